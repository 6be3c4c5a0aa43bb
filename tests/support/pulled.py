"""An engine whose rings a device reads and writes: the native server in the device's place.

It has the rings by address alone and a model of one line. As a program it lets front ends of other
processes in until its parent is gone: tests/support/pulled.py PROFILE FRONT_ENDS RING_BYTES
"""

import os
import socket
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

import torch

from qllm.config import EngineConfig
from qllm.device.rings import DeviceRings, ring_memory_of
from qllm.device.server import NativeServer
from qllm.engine.remote import RemoteFrontEnd, RemoteListener, offer, peer_from
from qllm.errors import ConfigError
from qllm.ingress import Submission
from qllm.ingress.memory import ControlMemory, FrontEndMemory
from qllm.ingress.messages import EngineCard, ModelInfo
from qllm.ingress.remote.meeting import Address, Meeting, MeetingError, Wire
from qllm.ingress.remote.nixl import Link
from qllm.ingress.remote.pull import LinkDriver, PullingFrontEnd
from qllm.ingress.words import address_of
from qllm.plan import NO_CUTS, ModelShape
from qllm.plugins import load_policy
from qllm.scheduler.decision import Limits
from qllm.types import Grain, SamplingParams, Slo
from tests.support.sizes import SIZES

SHAPE = ModelShape(2, 4, 2, (True, True), 50_000, 4096)
LIMITS = Limits(
    max_num_seqs=32, max_step_tokens=2048, block_size=16, num_blocks=512, grain=Grain.STEP,
    max_segment_ns=10**9,
)  # fmt: skip
CPU = torch.device("cpu")
MAX_TOTAL = 256


def tokens_of(request_id: int, count: int) -> list[int]:
    """What the model answers."""
    return [(request_id % 9973 * 31 + n * 7) % SHAPE.vocab_size for n in range(count)]


def submission(request_id: int, priority: int, num_prompt: int, num_output: int) -> Submission:
    return Submission(
        request_id=request_id, name=str(request_id), priority=priority,
        token_ids=tuple(i % 997 for i in range(num_prompt)), sampling=SamplingParams(seed=1),
        stop_ids=frozenset(), max_tokens=num_output, slo=Slo(), arrival_ns=time.monotonic_ns(),
        deadline_ns=None,
    )  # fmt: skip


class Answerer:
    """A server, and steps of its model."""

    def __init__(self, num_front_ends: int = 1, **settings: Any) -> None:
        self.control = ControlMemory.create(0)
        self.server = NativeServer(
            load_policy("qllm2"), SHAPE, NO_CUTS, LIMITS,
            control=address_of(self.control.words), max_total_tokens=MAX_TOTAL, capacity=64,
            max_front_ends=num_front_ends, ls_slots=4, **settings,
        )  # fmt: skip

    def step(self) -> bool:
        """Take what has come, run one program; whether there was one."""
        server, now_ns = self.server, time.monotonic_ns()
        server.flush()
        server.claim(now_ns)
        server.changes()
        program = server.decide(now_ns).program
        server.show()
        if program is None:
            return False
        rows = zip(program.rows, program.samples, strict=True)
        ids = [row.request_id for row, samples in rows if samples]
        server.done(program.end, ids, now_ns, time.monotonic_ns())
        for request_id in ids:
            slot = server.find(request_id)
            request = server.block.array("requests")[slot]
            count = int(request["num_tokens"] - request["num_prompt"])
            server.sampled(slot, tokens_of(request_id, count)[-1], time.monotonic_ns())
        server.changes()
        return True


def block_of(number: int, ring_bytes: int) -> DeviceRings:
    return DeviceRings(number, (ring_bytes,) * 4, ring_memory_of(CPU, "tcp"), CPU)


# -- another process's front end


class Met:
    """A front end that has met an engine, and the connection beside its rings.

    It says there now and then that it lives, whatever else its process is busy with.
    """

    def __init__(self, address: str, profile: str) -> None:
        host, _, port = address.rpartition(":")
        self.wire = Wire(socket.create_connection((host, int(port))))
        self.wire.be_front_end(b"")
        self.wire.send({"profile": profile})
        hello = self.wire.receive()
        if "error" in hello:
            self.wire.close()
            raise ConfigError(hello["error"])
        first, second, third, fourth = hello["capacities"]
        self.block = FrontEndMemory.create(hello["number"], (first, second, third, fourth))
        name = f"front-end-{self.block.number}-{os.urandom(4).hex()}"
        self.link = Link(name, profile, self.block.segment)
        self.wire.send(offer(self.link))
        self.peer = peer_from(self.wire.receive())
        self.link.connect(self.peer)
        self.front_end = PullingFrontEnd(self.block, self.link)
        self.asking, self.closes = threading.Lock(), threading.Event()
        self.beats = threading.Thread(target=self._beat, daemon=True)
        self.beats.start()

    def ask(self, op: str) -> Any:
        with self.asking:
            self.wire.send({"op": op, "args": []})
            return self.wire.receive()["ok"]

    def _beat(self) -> None:
        with suppress(MeetingError):  # whoever asks next is told
            while not self.closes.wait(1):
                self.ask("beat")

    def close(self) -> None:
        self.closes.set()
        self.beats.join()
        self.wire.hang_up()
        self.wire.close()
        self.front_end.close()
        self.block.segment.close_fd()


# -- the engine's process


def card() -> EngineCard:
    info = ModelInfo("one line", SHAPE, frozenset(), {}, (), {}, None)
    return EngineCard(info, EngineConfig(**SIZES), {}, "one line")


class Engine:
    """Lets front ends in, and serves them.

    Args:
        profile: Of NIXL.
        num_front_ends: Whose rings there are.
        ring_bytes: Of each ring.
    """

    def __init__(self, profile: str, num_front_ends: int, ring_bytes: int) -> None:
        self.answerer = Answerer(num_front_ends)
        # kept for good: the server writes to a front end's block until it is detached
        self.blocks = [block_of(number, ring_bytes) for number in range(num_front_ends)]
        for block in self.blocks:
            block.attach_to(self.answerer.server)
        self.fresh = deque(self.blocks)
        self.gone: deque[int] = deque()
        self.links = LinkDriver(profile, lambda number, why: self.gone.append(number))
        meeting = Meeting(Address("127.0.0.1", 0), profile, b"")
        self.listener = RemoteListener(
            meeting, self.make_memory, self.enter, self.leave, self.answer, self.hand
        )
        self.listener.listen()
        self.listener.open(card())

    def hand(self, wire: Wire, ticket: str) -> None:
        raise ConfigError("it hands no KV over")

    def make_memory(self) -> DeviceRings:
        if not self.fresh:
            raise ConfigError("all rings are taken")
        return self.fresh.popleft()

    def enter(self, front_end: RemoteFrontEnd) -> None:
        self.links.add(front_end.number, front_end.link)

    def leave(self, front_end: RemoteFrontEnd) -> None:
        self.links.remove(front_end.number)
        self.gone.append(front_end.number)

    def answer(self, op: str, args: list[Any]) -> Any:
        if op == "beat":
            return {"now_ns": time.monotonic_ns(), "draining": False, "error": None}
        held = self.answerer.server.memory.get("num_held")
        return {"live": self.answerer.control.num_live, "held": held}

    def serve(self) -> None:
        """Until the parent is gone."""
        parent, server, steps = os.getppid(), self.answerer.server, 0
        while os.getppid() == parent:
            while self.gone:
                server.detach(self.gone.popleft(), time.monotonic_ns())
            if not self.answerer.step():
                time.sleep(0.0001)
            steps += 1
            if steps % 100 == 0:
                server.check()


def main() -> None:
    """Be an engine; the arguments of the program say which."""
    engine = Engine(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.write(f"{engine.listener.address}\n")
    sys.stdout.flush()
    engine.serve()


if __name__ == "__main__":
    main()
