"""Both ends of the shm transport in one process."""

import os
from typing import Any

from qllm.ingress import Submission
from qllm.ingress.front_end import FrontEnd
from qllm.ingress.layout import NUMBER_BITS
from qllm.ingress.memory import ControlMemory, FrontEndMemory
from qllm.ingress.shm import Doorbell, FrontEndPort, RingSink, ShmIngress
from qllm.types import SamplingParams, Slo


class Rig:
    """An engine's end and front ends of one process, with a clock that counts."""

    def __init__(self, capacity: int = 1 << 16, front_ends: int = 1) -> None:
        self.now = 0
        self.control = ControlMemory.create(0)
        self.bell = Doorbell.create()
        self.closed: list[int] = []
        self.broken: list[tuple[int, str]] = []
        self.ingress = ShmIngress(
            self.control,
            self.bell,
            self.clock,
            lambda: self.closed.append(1),
            lambda number, why: self.broken.append((number, why)),
        )
        self.sink = RingSink(self.ingress.ports)
        self.blocks = [FrontEndMemory.create(n, (capacity,) * 4) for n in range(front_ends)]
        self.front_ends = []
        for block in self.blocks:
            tokens = Doorbell.create()
            mine = Doorbell(os.dup(tokens.fd))
            self.ingress.attach(FrontEndPort(block, tokens))
            engine = Doorbell(os.dup(self.bell.fd))
            self.front_ends.append(FrontEnd(block, self.control, engine, mine))

    def clock(self) -> int:
        self.now += 1
        return self.now

    def submit(self, number: int, priority: int = 0, size: int = 4, front_end: int = 0) -> int:
        request_id = front_end << NUMBER_BITS | number
        item = submission(request_id, priority, size, self.clock())
        self.front_ends[front_end].submit(item)
        return request_id

    def fill(self, priority: int) -> None:
        for number in range(1000):
            self.submit(number, priority, size=100)

    def close(self) -> None:
        for front_end in self.front_ends:
            front_end.close()
        for number in list(self.ingress.ports):
            self.ingress.detach(number)
        self.bell.close()
        for segment in [self.control.segment, *(block.segment for block in self.blocks)]:
            segment.close_fd()


def submission(request_id: int, priority: int, size: int, at_ns: int) -> Submission:
    return Submission(
        request_id=request_id,
        name="r",
        priority=priority,
        token_ids=tuple(range(size)),
        sampling=SamplingParams(seed=1),
        stop_ids=frozenset(),
        max_tokens=1,
        slo=Slo(),
        arrival_ns=at_ns,
        deadline_ns=None,
    )


def ids_of(items: list[Any]) -> list[int]:
    return [item.request_id for item in items]
