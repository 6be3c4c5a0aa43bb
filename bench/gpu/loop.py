"""The loop on the device against the host that replays the same stages: tokens, speed, hogs.

In a dry run the host replaces the device, with fakes of the tests.
"""

import os
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import torch

from qllm.cuda.backend import CudaBackend, cuda_runner
from qllm.device.launcher import DeviceEngine
from qllm.errors import DeviceError
from qllm.ingress import Submission
from qllm.ingress.front_end import FrontEnd, TokenAt
from qllm.ingress.memory import ControlMemory, FrontEndMemory
from qllm.ingress.shm import Doorbell
from qllm.plugins import load_policy
from qllm.runner.runner import TorchRunner
from qllm.scheduler.decision import Limits
from qllm.types import Grain, Priority, SamplingParams, Slo

GREEDY = SamplingParams(temperature=0, seed=0)
LOOK_S = 0.0005
"""Seconds between two looks of the front end at its token ring: the device rings no doorbell."""


class LoopClient:
    """A front end and a loop on the device behind it, on a thread.

    Args:
        runner: Runner with captured stages.
        policy: Name of the policy.
        limits: Settings of the scheduler.
        max_total_tokens: Tokens of the longest request.
        dry: True if the host runs the loop, with a fake of CUDA's graphs.
    """

    def __init__(
        self, runner: TorchRunner, policy: str, limits: Limits, max_total_tokens: int, dry: bool
    ) -> None:
        settings: dict[str, Any] = {}
        if dry:
            from tests.support.fake_loop import FakeLoopApi

            settings = {"api": FakeLoopApi(), "function": self._turn, "turns": 2000}
        zero_ns = time.monotonic_ns()
        self.now_ns = lambda: time.monotonic_ns() - zero_ns
        self.control = ControlMemory.create(zero_ns)
        block, bell = FrontEndMemory.create(0, (1 << 20,) * 4), Doorbell.create()
        assert isinstance(runner.backend, CudaBackend)
        self.engine = DeviceEngine(
            runner.backend, load_policy(policy), limits, control=self.control, front_ends=[block],
            now_ns=self.now_ns, max_total_tokens=max_total_tokens, capacity=64, ls_slots=2,
            **settings,
        )  # fmt: skip
        self.front_end = FrontEnd(block, self.control, Doorbell(os.dup(bell.fd)), bell)
        self.crash: BaseException | None = None
        self._number = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _turn(self, set_conditional: Any, server: int, state: int, *rest: int) -> None:
        """Do the kernel's work on the host."""
        at, run, stage = rest
        loop, memory = self.engine.loop, self.engine.memory
        rank = loop.server.rank_address
        branch = loop.server.native.loop_turn(server, state, rank, at, self.now_ns(), 1)
        set_conditional(stage, branch)
        set_conditional(run, memory.read("goes_on"))
        if branch < 0:
            time.sleep(LOOK_S)

    def _serve(self) -> None:
        try:
            with torch.inference_mode():
                self.engine.serve()
        except BaseException as error:  # noqa: BLE001 - shown by `ask`
            traceback.print_exc()
            self.crash = error

    def ask(
        self, prompts: Sequence[Sequence[int]], new: int, priority: str = "LS", wait_s: float = 60
    ) -> list[list[TokenAt]]:
        """Submit prompts together and wait for all their tokens.

        Raises:
            RuntimeError: The loop crashed, a request failed, or the answer took too long.
        """
        first = self._number
        for ids in prompts:
            self.front_end.submit(
                Submission(
                    request_id=self._number, name="", priority=Priority[priority],
                    token_ids=tuple(ids), sampling=GREEDY, stop_ids=frozenset(), max_tokens=new,
                    slo=Slo(), arrival_ns=self.now_ns(), deadline_ns=None,
                )
            )  # fmt: skip
            self._number += 1
        tokens: dict[int, list[TokenAt]] = defaultdict(list)
        limit, left = time.monotonic() + wait_s, len(prompts)
        while left:
            for record in self.front_end.receive():
                if isinstance(record, TokenAt):
                    tokens[record.sampled.request_id].append(record)
                elif record.error:
                    raise RuntimeError(f"request {record.request_id}: {record.error}")
                else:
                    left -= 1
            if self.crash is not None:
                raise RuntimeError("the loop crashed") from self.crash
            if time.monotonic() > limit:
                raise RuntimeError(f"{left} of {len(prompts)} requests had not ended: {wait_s} s")
            time.sleep(LOOK_S)
        return [tokens[first + i] for i in range(len(prompts))]

    def close(self) -> None:
        """Stop the loop and free its memory.

        Raises:
            DeviceError: The loop did not end.
        """
        self.front_end.stop()
        self._thread.join(20)
        if self.crash is not None or self._thread.is_alive():
            # Freeing memory would wait for the device, which may never answer.
            raise DeviceError(f"the loop did not end: {self.crash or 'it still runs'}")
        self.engine.close()
        self.front_end.close()


def limits_of(runner: TorchRunner, seats: int, step_tokens: int) -> Limits:
    """Return the limits that the stages of a runner were captured for."""
    assert isinstance(runner.backend, CudaBackend)
    pages = runner.backend.pages
    return Limits(
        max_num_seqs=seats, max_step_tokens=step_tokens, block_size=pages.page_size,
        num_blocks=pages.num_pages, grain=Grain.LAYER, max_segment_ns=10**12, whole_steps=True,
    )  # fmt: skip


def decode_rates(client: LoopClient, batches: Sequence[int], prompts: Any, new: int) -> Any:
    """Return the median and p99 of the time between tokens per batch size, and the tokens."""
    out: dict[str, Any] = {}
    tokens: list[list[int]] = []
    for batch in batches:
        for _ in range(2):  # the first warms up
            found = client.ask(prompts[:batch], new)
        gaps = sorted((b.at_ns - a.at_ns) / 1e6 for row in found for a, b in pairwise(row))
        tpot = gaps[len(gaps) // 2]
        out[f"batch_{batch}"] = {
            "tpot_ms": tpot, "tpot_p99_ms": gaps[int(0.99 * (len(gaps) - 1))],
            "tokens_per_s": 1e3 * batch / tpot,
        }  # fmt: skip
        tokens = [[t.sampled.token_id for t in row] for row in found]
    return out, tokens


def measure(
    model: Any,
    prompts: list[list[int]],
    wanted: list[list[int]],
    hogs: Callable[[], AbstractContextManager[Any]],
    dry: bool,
) -> dict[str, Any]:
    """Return decode rates of the loop, quiet and with `hogs`, and the number of equal answers."""
    seats, step_tokens, longest = (4, 32, 64) if dry else (32, 2048, 1024)
    graphs: Any = None
    if dry:
        from tests.support.fake_cuda import FakeCuda

        graphs = FakeCuda()
    runner = cuda_runner(
        model, num_pages=256 if dry else 4096, max_num_seqs=seats, max_step_tokens=step_tokens,
        max_total_tokens=longest, graphs=graphs,
    )  # fmt: skip
    client = LoopClient(runner, "qllm2", limits_of(runner, seats, step_tokens), longest, dry)
    batches, new = (1, 2) if dry else (1, 8, 32), len(wanted[0])
    try:
        quiet, tokens = decode_rates(client, batches, prompts, new)
        with hogs():
            busy, _ = decode_rates(client, batches, prompts, new)
        turns = client.engine.memory.read("num_turns")
    finally:
        client.close()
        runner.close()
    same = sum(a == b for a, b in zip(tokens, wanted, strict=True))
    pairs = [zip(a, b, strict=False) for a, b in zip(tokens, wanted, strict=True)]
    first = [next((i for i, (x, y) in enumerate(pair) if x != y), None) for pair in pairs]
    differ = [i for i in first if i is not None]
    equal = {
        "equal_to_host": same,
        "of": len(wanted),
        "first_difference": min(differ, default=None),
    }
    return {"quiet": quiet, "busy": busy, "turns": turns, **equal}
