"""An engine whose KV and states are looked at, for the tests of prompts that grow."""

import random
from typing import Any

import torch

from qllm import QLLMEngine, SamplingParams
from qllm.frontend.handle import Result
from qllm.frontend.streaming_prompt import StreamingPrompt
from qllm.types import RequestStatus
from tests.support.families import VOCAB
from tests.support.inside import loop_of
from tests.support.waiting import wait_for

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
SETTINGS: dict[str, Any] = {"conformance": False, "threads": 1, "max_kv_tokens": 2048}
Kv = list[tuple[torch.Tensor, torch.Tensor]]


def ids_of(n: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(n)]


class Engine:
    """An engine on a thread, whose KV, and states of layers, are looked at as requests leave it."""

    def __init__(self, model: Any, **how: Any) -> None:
        self.engine = QLLMEngine.from_model(model, **{**SETTINGS, **how})
        self.loop = loop_of(self.engine)
        self.runner = self.loop.runner
        self.kv: dict[int, Kv] = {}
        remove = self.runner.remove

        def look(number: int) -> None:
            kv = self.runner.requests[number].kv
            layers = [
                i
                for i in range(len(self.runner.parts.layers))
                if kv.slabs[i] is not None and i not in kv.states.layers
            ]
            read = [kv.read(layer, 0, kv.committed) for layer in layers]
            at, states = f".{kv.committed}.", kv.states.export()
            ends = [(x, x) for name, x in sorted(states.items()) if at in name]
            self.kv[number] = [(k.clone(), v.clone()) for k, v in read] + ends
            remove(number)

        self.runner.remove = look

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def settle(self, prompt: StreamingPrompt) -> None:
        """Wait until all that came of a prompt is computed."""
        self.engine.call(lambda: None)
        wait_for(lambda: prompt.handle.status is RequestStatus.OPEN)
        self.engine.call(self.loop.scheduler.check)

    def whole(self, ids: list[int], n: int = 6, **how: Any) -> tuple[Result, Kv]:
        handle = self.engine.submit(ids, "LS", n, sampling=GREEDY, **how)
        return handle.result(300), self.kv[handle.number]

    def end(self, prompt: StreamingPrompt, n: int = 6, **how: Any) -> tuple[Result, Kv]:
        handle = prompt.send(n, sampling=GREEDY, **how)
        return handle.result(300), self.kv[handle.number]


def same(a: Kv, b: Kv) -> bool:
    pairs = [
        (x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True)
    ]
    return len(pairs) > 0 and all(torch.equal(x, y) for x, y in pairs)


def equal(found: tuple[Result, Kv], want: tuple[Result, Kv]) -> None:
    assert found[0].token_ids == want[0].token_ids
    assert found[0].prompt_token_ids == want[0].prompt_token_ids
    assert same(found[1], want[1])
