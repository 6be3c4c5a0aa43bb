"""The native server drives the CPU runner: requests and tokens go through rings alone."""

import os
import random
import select
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from qllm import QLLMEngine, SamplingParams
from qllm.device.server import NativeServer
from qllm.ingress import Submission
from qllm.ingress.front_end import FrontEnd, TokenAt
from qllm.ingress.layout import NUMBER_BITS
from qllm.ingress.memory import ControlMemory, FrontEndMemory
from qllm.ingress.shm import Doorbell
from qllm.ingress.words import address_of
from qllm.plugins import load_policy
from qllm.runner.cpu import cpu_runner
from qllm.scheduler.decision import Limits
from qllm.types import FinishReason, Grain, Priority, RequestId, Slo
from tests.support.families import VOCAB, make_model
from tests.support.native_loop import NativeLoop

LIMITS = Limits(
    max_num_seqs=3,
    max_step_tokens=2048,
    block_size=16,
    num_blocks=16,
    grain=Grain.EXPERT,
    max_segment_ns=5_000_000,
    batch_invariant=True,
)
NUM_FRONT_ENDS = 2


class Served:
    """A native loop on a thread, and its front ends."""

    def __init__(self) -> None:
        self.runner = cpu_runner(make_model("mixtral"), batch_invariant=True)
        zero_ns = time.monotonic_ns()
        self.now_ns = lambda: time.monotonic_ns() - zero_ns
        self.control, self.bell = ControlMemory.create(zero_ns), Doorbell.create()
        self.server = NativeServer(
            load_policy("qllm2"),
            self.runner.shape,
            self.runner.cuts,
            LIMITS,
            control=address_of(self.control.words),
            max_total_tokens=256,
        )
        self.loop = NativeLoop(self.server, self.runner, self.control, self.bell, self.now_ns)
        self.front_ends = [self._front_end(number) for number in range(NUM_FRONT_ENDS)]
        self.crash: BaseException | None = None
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _front_end(self, number: int) -> FrontEnd:
        block, tokens = FrontEndMemory.create(number, (1 << 20,) * 4), Doorbell.create()
        self.loop.attach(block, tokens)
        engine = Doorbell(os.dup(self.bell.fd))
        return FrontEnd(block, self.control, engine, Doorbell(os.dup(tokens.fd)))

    def _serve(self) -> None:
        torch.set_num_threads(1)
        try:
            self.loop.serve()
        except BaseException as error:  # noqa: BLE001 - shown by the test
            self.crash = error

    def close(self) -> None:
        self.front_ends[0].stop()
        self.thread.join(60)
        self.runner.close()
        for front_end in self.front_ends:
            front_end.close()
        assert self.crash is None
        assert not self.thread.is_alive()

    def receive(self, count: int) -> dict[RequestId, list[Any]]:
        """What the front ends got until so many requests ended."""
        records: dict[RequestId, list[Any]] = defaultdict(list)
        ended = 0
        while ended < count:
            fds = [front_end.doorbell.fd for front_end in self.front_ends]
            assert select.select(fds, (), (), 20)[0], f"{ended} of {count} ended"
            for front_end in self.front_ends:
                for record in front_end.receive():
                    is_token = isinstance(record, TokenAt)
                    ended += not is_token
                    request_id = record.sampled.request_id if is_token else record.request_id
                    records[request_id].append(record)
        return records


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.close()


def questions() -> list[tuple[str, list[int], SamplingParams]]:
    rng = random.Random(3)
    found = []
    for i in range(12):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(5, 60))]
        sampling = SamplingParams(temperature=0.9 * (i % 2), top_p=0.9, top_k=40, seed=i)
        found.append(("LS" if i % 3 == 2 else "BE", prompt, sampling))
    return found


def python_answers() -> list[tuple[tuple[int, ...], FinishReason]]:
    with QLLMEngine.from_model(
        make_model("mixtral"),
        policy="qllm2",
        conformance=False,
        threads=1,
        max_kv_tokens=256,
        max_num_seqs=3,
        exactness="batch-invariant",
    ) as engine:
        handles = [
            engine.submit(prompt, priority, 9, sampling=sampling)
            for priority, prompt, sampling in questions()
        ]
        results = [handle.result(300) for handle in handles]
    return [(r.token_ids, r.finish_reason) for r in results]


def submit(served: Served, number: int, priority: str, prompt: list[int], **changes: Any) -> int:
    front_end = number % NUM_FRONT_ENDS
    values: dict[str, Any] = {
        "request_id": front_end << NUMBER_BITS | number,
        "name": "",
        "priority": Priority[priority],
        "token_ids": tuple(prompt),
        "sampling": SamplingParams(temperature=0, seed=0),
        "stop_ids": frozenset(),
        "max_tokens": 9,
        "slo": Slo(),
        "arrival_ns": served.now_ns(),
        "deadline_ns": None,
    }
    item = Submission(**{**values, **changes})
    served.front_ends[front_end].submit(item)
    return item.request_id


def test_the_native_loop_gives_the_tokens_of_the_python_engine(served: Served) -> None:
    ids = [
        submit(served, number, priority, prompt, sampling=sampling)
        for number, (priority, prompt, sampling) in enumerate(questions())
    ]
    records = served.receive(len(ids))
    answers = [
        (
            tuple(r.sampled.token_id for r in records[i] if isinstance(r, TokenAt)),
            records[i][-1].reason,
        )
        for i in ids
    ]
    assert answers == python_answers()
    assert len({tokens for tokens, _ in answers}) == 12
    assert served.control.num_live == 0 or served.control.read_stats().num_live == 0


def test_the_native_loop_goes_on_where_another_engine_was(served: Served) -> None:
    whole = python_answers()
    ids = [
        submit(
            served, number, priority, [*prompt, *whole[number][0][: number % 9]],
            sampling=sampling, num_output_tokens=number % 9,
        )
        for number, (priority, prompt, sampling) in enumerate(questions())
    ]  # fmt: skip
    records = served.receive(len(ids))
    for number, request_id in enumerate(ids):
        *tokens, end = records[request_id]
        rest = whole[number][0][number % 9 :]
        assert (tuple(t.sampled.token_id for t in tokens), end.reason) == (rest, whole[number][1])
        assert end.metrics.num_prompt_tokens == len(questions()[number][1])
    nothing_left = submit(served, 12, "LS", [1, 2, 3], max_tokens=2, num_output_tokens=2)
    (end,) = served.receive(1)[nothing_left]
    assert (end.reason, end.error) == (FinishReason.ERROR, "a prompt or an answer of no tokens")


def test_an_error_of_the_runner_ends_its_request_and_nothing_else(served: Served) -> None:
    embed = served.runner._ops[0]

    def poisoned(frame: Any, op: Any, pos: int) -> Any:
        if any(row.hi == 33 for row in frame.program.rows):
            raise RuntimeError("33 tokens")
        return embed(frame, op, pos)

    served.runner._ops[0] = poisoned  # type: ignore[index]
    ids = [submit(served, n, "BE", [7] * (33 if n == 4 else 10 + n)) for n in range(6)]
    records = served.receive(len(ids))
    ends = [records[i][-1] for i in ids]
    assert [end.reason for end in ends] == [
        FinishReason.ERROR if n == 4 else FinishReason.LENGTH for n in range(6)
    ]
    assert ends[4].error == "RuntimeError: 33 tokens"


def test_a_sleeping_loop_wakes_for_a_request_and_for_a_deadline(served: Served) -> None:
    time.sleep(0.1)
    submit(served, 0, "LS", [1, 2, 3])
    assert served.receive(1)[0][-1].reason is FinishReason.LENGTH
    late = submit(
        served, 1, "BE", [5] * 100, max_tokens=150, deadline_ns=served.now_ns() + 30_000_000
    )
    assert served.receive(1)[late][-1].reason is FinishReason.TIMEOUT


def test_stopping_ends_what_is_open(served: Served) -> None:
    ids = [submit(served, n, "BE", [n] * 40, max_tokens=180) for n in range(8)]
    served.front_ends[1].stop()
    records = served.receive(len(ids))
    assert {records[i][-1].reason for i in ids} == {FinishReason.CANCELLED}
