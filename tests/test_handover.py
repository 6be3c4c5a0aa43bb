"""A request goes on in another engine, with its KV: the tokens and bits of one that stayed."""

import mmap
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from families import DTYPES, VOCAB, make_model
from serving import until

from qllm import QLLMEngine, SamplingParams
from qllm.engine import handed
from qllm.engine.handover import Choose
from qllm.engine.parcel import header_bytes
from qllm.errors import MOVED, CheckpointError
from qllm.frontend.handle import Handle, Result
from qllm.ingress import CONTROL, Submission
from qllm.ingress.messages import Source
from qllm.scheduler.program import Index, OpKind, Program
from qllm.types import FinishReason

SETTINGS: dict[str, Any] = {
    "conformance": False,
    "threads": 1,
    "max_kv_tokens": 2048,
    "swap_kv_tokens": 2048,
    "max_segment_ms": 0.4,
    "handover_gib": 0.01,
}
GREEDY = SamplingParams(temperature=0, ignore_eos=True, logprobs=1)
SAMPLED = SamplingParams(
    temperature=1.3, seed=7, top_k=60, repetition_penalty=1.1, logprobs=2, ignore_eos=True
)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is late, however busy the machine is."""
    monkeypatch.setattr(handed, "SLACK_NS", 600 * 10**9)


def prompt_of(n: int, seed: int = 1) -> list[int]:
    rng = random.Random(1000 * n + seed)
    return [rng.randrange(VOCAB) for _ in range(n)]


def engine_of(family: str, dtype: str = "bf16", **settings: Any) -> QLLMEngine:
    made = QLLMEngine.from_model(make_model(family, DTYPES[dtype]), **{**SETTINGS, **settings})
    object.__setattr__(made._client.runner.backend.costs, "range_ns", 0.5)
    return made


@dataclass
class Way:
    """How parcels go from one engine to the other in this process."""

    engine: QLLMEngine
    change: Callable[[bytearray], object] = lambda _: None
    asked: list[int] = field(default_factory=list)
    fetched: int = 0

    def pull(
        self,
        source: Source,
        allow: Callable[[int], None],
        choose: Choose,
        wanted: Callable[[], bool],
    ) -> mmap.mmap:
        sealed = core_of(self.engine).handover.outbox.read(source.ticket)
        if sealed is None:
            raise CheckpointError("no such ticket")
        data = bytearray(memoryview(sealed))
        self.change(data)
        self.asked.append(len(data))
        allow(len(data))
        memory = mmap.mmap(-1, max(1, len(data)))
        memory[: len(data)] = bytes(len(data))
        start = header_bytes(data[:24])
        memory[:start] = data[:start]
        for at, size in choose(memoryview(memory)[:start], len(data)):
            memory[at : at + size] = data[at : at + size]
            self.fetched += size
        return memory


def core_of(engine: QLLMEngine) -> Any:
    return engine._client._core  # type: ignore[attr-defined]


def connect(a: QLLMEngine, b: QLLMEngine) -> Way:
    way = Way(a)
    core_of(b).handover._pull = way.pull
    return way


Wanted = Callable[[Program | None, Index, int], bool]


@dataclass
class Left:
    """A request that has left an engine."""

    handle: Handle
    submission: Submission
    ticket: str
    where: str
    kv: list[torch.Tensor]


def leave(engine: QLLMEngine, wanted: Wanted, beside: int = 0, **spec: Any) -> Left:
    """Submit a request, with others beside it, and have it leave at the first wanted boundary."""
    client, core = engine._client, core_of(engine)
    reached, found = threading.Event(), []
    box: dict[str, Any] = {}
    count = 0

    def watch(program: Program, index: Index, begin: int, end: int) -> None:
        nonlocal count
        number = box.get("number")
        if found or number not in program.request_ids:
            return
        count += 1
        if wanted(program, index, count):
            found.append(f"{program.ops[index.op].kind.name} {index} of {len(program.rows)} rows")
            reached.set()
            deadline = time.monotonic() + 60
            while client.ingress.stop.word != CONTROL and time.monotonic() < deadline:
                time.sleep(0.0005)

    def submit() -> list[Handle]:
        client.runner.on_segment = watch
        others = [engine.submit(prompt_of(9 + i, 50 + i), "BE", 12) for i in range(beside)]
        handle = engine.submit(**spec)
        box["number"] = handle.number
        return [handle, *others]

    def give() -> str | None:
        live = core.loop.live[box["number"]]
        box["submission"] = live.submission
        kv = core.runner.requests[box["number"]].kv
        box["kv"] = (
            [
                t.clone()
                for i in range(len(kv.slabs))
                if i not in kv.states.layers
                for t in kv.read(i, 0, kv.committed)
            ]
            if kv.committed
            else []
        )
        return core.handover.give(box["number"])

    handle, *others = engine.call(submit)
    assert reached.wait(60), "the boundary was never reached"
    ticket = engine.call(give)
    assert ticket is not None
    for other in others:
        other.result(60)
    engine.call(core.loop.scheduler.check)
    until(lambda: handle.has_ended)
    assert handle.finish_reason is FinishReason.ERROR
    return Left(handle, box["submission"], ticket, found[0], box["kv"])


def go_on(engine: QLLMEngine, left: Left, ticket: str | None = None) -> Result:
    """Have the request go on as a front end does that replays it, and put its output together."""
    client, core = engine._client, core_of(engine)
    done = left.handle.token_ids
    item = left.submission
    with client.admission_lock:
        number = client.new_number()
        prompt = item.token_ids[: item.num_prompt_tokens]
        handle = engine._handle(number, None, prompt, item.sampling)
        for sampled in left.handle._sampled:
            handle.on_token(sampled)
        rest = replace(
            item,
            request_id=number,
            token_ids=(*prompt, *done),
            num_output_tokens=len(done),
            arrival_ns=client.now_ns(),
        )
        if ticket := left.ticket if ticket is None else ticket:
            core.handed.expect(number, Source("there:1", ticket))
        client.submit(rest, handle)
    result = handle.result(120)
    engine.call(core.loop.scheduler.check)
    assert not core.runner.requests
    return result


def same(found: Result, wanted: Result) -> bool:
    return (
        found.token_ids == wanted.token_ids
        and found.logprobs == wanted.logprobs
        and found.prompt_logprobs == wanted.prompt_logprobs
        and found.finish_reason == wanted.finish_reason
    )


def taken(engine: QLLMEngine) -> tuple[int, int]:
    stats = engine.stats()["handover"]
    return stats["taken"], stats["missed"]


def in_experts(program: Program | None, index: Index, count: int) -> bool:
    assert program is not None
    op = program.ops[min(index.op, len(program.ops) - 1)]
    return op.kind is OpKind.EXPERTS and op.layer >= 1 and index.pos > 0


def after(least: int) -> Wanted:
    return lambda program, index, count: count >= least


FAMILIES = ["mixtral", "gpt_oss", "deepseek_v3", "qwen2_moe", "granitemoe"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_request_that_moves_anywhere_gets_the_tokens_of_one_that_stayed(
    family: str, dtype: str
) -> None:
    rng = random.Random(f"{family} {dtype}")
    exact = {"exactness": "batch-invariant"}
    with engine_of(family, dtype, **exact) as a, engine_of(family, dtype, **exact) as b:
        connect(a, b)
        moves = 0
        for sampling in (GREEDY, SAMPLED):
            spec = {"prompt": prompt_of(150), "max_tokens": 14, "sampling": sampling}
            stayed = a.submit(priority="BE", **spec).result(60)
            assert len(set(stayed.token_ids)) > 1
            places = (in_experts, after(rng.randrange(1, 60)), after(rng.randrange(60, 150)))
            for wanted in places:
                a.reset_prefix_cache()
                b.reset_prefix_cache()
                left = leave(a, wanted, rng.choice((0, 2)), priority="BE", **spec)
                found = go_on(b, left)
                assert same(found, stayed), left.where
                moves += bool(left.ticket)
                assert taken(b) == (moves, 0), left.where
                there, here = core_of(a).handover.counts, core_of(b).handover.counts
                assert here.taken_tokens == there.given_tokens
        assert moves
