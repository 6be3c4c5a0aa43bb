#!/usr/bin/env python
"""Soak of the rings: front ends and an engine in separate processes, every record checked.

Each front end sends LS and BE requests of random sizes through rings that are far too small, and
now and then a cancel; the engine answers each request with tokens and an end. Both sides pause at
random, so rings run full and empty. Any record that is lost, doubled, changed or out of order
within its class fails the run. Usage: scripts/soak_rings.py [--records 1000000] [--over tcp]
"""

import argparse
import json
import os
import random
import sys
import time
import zlib
from collections.abc import Callable
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from qllm.errors import QueueFullError
from qllm.ingress import Cancel, Submission
from qllm.ingress.codec import End
from qllm.ingress.front_end import FrontEnd, FrontEndRings
from qllm.ingress.layout import NUMBER_BITS
from qllm.ingress.memory import ControlMemory, FrontEndMemory
from qllm.ingress.shm import Doorbell, FrontEndPort, RingSink, ShmIngress, front_end_of
from qllm.types import FinishReason, Logprobs, Priority, Sampled, SamplingParams, Slo

CAPACITY = 1 << 15
"""Bytes per ring: about ten requests."""
RECORDS_PER_REQUEST = 3.5
"""Average of a request, 1.5 tokens, an end, and a tenth of a cancel."""
IN_FLIGHT = 200
Child = tuple[int, Connection]
SAMPLING = SamplingParams(seed=1, stop=("a", "bc"), logit_bias={5: 1.5})


def prompt_of(number: int) -> tuple[int, ...]:
    """Return ids; the last one is the checksum of the others."""
    rng = random.Random(number)
    ids = [
        number & 0xFFFF,
        number >> 16,
        *(rng.randrange(1 << 17) for _ in range(rng.choice((1, 30, 900)))),
    ]
    return (*ids, zlib.crc32(repr(ids).encode()) >> 1)


def tokens_of(number: int) -> list[Sampled]:
    """Return the engine's answer to a request."""
    logprobs = Logprobs(-1.5, ((number & 0xFFF, -1.5), (7, -2.0))) if number % 3 else None
    return [Sampled(number, (number * 31 + i) & 0x1FFFF, logprobs) for i in range(1 + number % 2)]


def check(condition: bool, what: str, *values: object) -> None:
    """End this process if the condition is false."""
    if not condition:
        print("FAILED:", what, *values, file=sys.stderr)
        os._exit(1)


class Sender:
    """A front end's process."""

    def __init__(self, front_end: FrontEndRings, num_requests: int) -> None:
        self.front_end, self.num_requests = front_end, num_requests
        self.rng = random.Random(front_end.number)
        self.expected: dict[int, list[Sampled]] = {}
        self.last_end = {True: -1, False: -1}
        self.num_received = self.num_refused = 0

    def run(self) -> int:
        """Send everything, wait for all answers; return how often a ring was full."""
        for n in range(self.num_requests):
            request_id = self.front_end.number << NUMBER_BITS | n
            self.expected[request_id] = tokens_of(request_id)
            self.submit(request_id)
            if self.rng.random() < 0.1:
                self.front_end.cancel(Cancel(request_id, FinishReason.STOP))
            while len(self.expected) > IN_FLIGHT:
                self.receive()
            if self.rng.random() < 0.001:
                time.sleep(self.rng.random() * 0.01)
        while self.expected:
            self.receive()
        return self.num_refused

    def submit(self, request_id: int) -> None:
        is_ls = is_ls_request(request_id)
        item = Submission(
            request_id=request_id,
            name=f"r{request_id}",
            priority=Priority.LS if is_ls else Priority.BE,
            token_ids=prompt_of(request_id),
            sampling=SAMPLING,
            stop_ids=frozenset({1, 2}),
            max_tokens=9,
            slo=Slo(),
            arrival_ns=time.monotonic_ns(),
            deadline_ns=None,
        )
        while True:
            try:
                self.front_end.submit(item)
                return
            except QueueFullError:
                self.num_refused += 1
                self.receive()

    def receive(self) -> None:
        for item in self.front_end.receive():
            self.num_received += 1
            if isinstance(item, End):
                self.on_end(item)
                continue
            left = self.expected.get(item.sampled.request_id)
            check(bool(left), "a token nobody waits for", item)
            assert left
            check(item.sampled == left.pop(0), "another token", item)
        time.sleep(0)

    def on_end(self, end: End) -> None:
        left = self.expected.pop(end.request_id, None)
        check(left == [], "an end too early or twice", end, left)
        is_ls = is_ls_request(end.request_id)
        check(end.request_id > self.last_end[is_ls], "ends out of order", end)
        self.last_end[is_ls] = end.request_id


def is_ls_request(request_id: int) -> bool:
    """Return True for two of five requests."""
    return request_id % 5 < 2


class Answerer:
    """The engine's process."""

    def __init__(self, ingress: ShmIngress, num_front_ends: int, num_requests: int) -> None:
        self.ingress = ingress
        self.sink = RingSink(ingress.ports)
        self.left = num_front_ends * num_requests
        self.last: dict[tuple[int, bool], int] = {}
        self.rng = random.Random(99)
        self.num_records = 0

    def run(self) -> int:
        """Answer until every request came; return the records seen and written."""
        while self.left:
            items = self.ingress.drain()
            for item in items:
                self.take(item)
            if not items:
                self.ingress.wait(None)
            elif self.rng.random() < 0.001:
                time.sleep(self.rng.random() * 0.01)
        return self.num_records

    def take(self, item: Any) -> None:
        self.num_records += 1
        number = item.request_id
        key = front_end_of(number), is_ls_request(number)
        if isinstance(item, Cancel):
            check(number <= self.last.get(key, -1), "a cancel before its request", number)
            return
        check(number > self.last.get(key, -1), "out of order within a class", number)
        self.last[key] = number
        check(item.priority == (Priority.LS if key[1] else Priority.BE), "another class", item)
        check(item.token_ids == prompt_of(number), "another prompt", item)
        check(item.sampling == SAMPLING and item.name == f"r{number}", "another request", item)
        self.left -= 1
        for sampled in tokens_of(number):
            self.sink.on_token(sampled, time.monotonic_ns())
            self.num_records += 1
        self.sink.on_finish(number, FinishReason.LENGTH, None, None)
        self.num_records += 1


def fork(work: Callable[[Connection], int]) -> tuple[int, Connection]:
    """Run `work` in a child that stays until its connection is closed; return both."""
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        ours.close()
        try:
            theirs.send(work(theirs))
            theirs.poll(None)
            os._exit(0)
        except BaseException as error:  # noqa: BLE001 - the run fails with it
            check(False, repr(error))
    theirs.close()
    return pid, ours


def over_shm(args: argparse.Namespace, per_front_end: int) -> tuple[ShmIngress, list[Child]]:
    """Start the front ends; they inherit memory and doorbells."""
    control, bell, children = ControlMemory.create(0), Doorbell.create(), []
    ingress = ShmIngress(control, bell, time.monotonic_ns, lambda: None, cut_off)
    for number in range(args.front_ends):
        block, doorbell = FrontEndMemory.create(number, (CAPACITY,) * 4), Doorbell.create()
        sender = Sender(FrontEnd(block, control, bell, doorbell), per_front_end)
        children.append(fork(lambda _, sender=sender: sender.run()))
        ingress.attach(FrontEndPort(block, doorbell))
    return ingress, children


def over_nixl(args: argparse.Namespace, per_front_end: int) -> tuple[ShmIngress, list[Child]]:
    """Start the front ends; each has its own memory and a link to ours."""
    from qllm.ingress.remote.nixl import Link, NixlFrontEnd, NixlIngress

    links: list[Link] = []

    def work(connection: Connection, number: int) -> int:
        block = FrontEndMemory.create(number, (CAPACITY,) * 4)
        link = Link(f"front-end-{number}", args.over, block.segment)
        connection.send(link.offer)
        link.connect(connection.recv())
        links.append(link)  # a lost link is a failure of the other side, which still writes
        return Sender(NixlFrontEnd(block, link), per_front_end).run()

    children = [fork(partial(work, number=number)) for number in range(args.front_ends)]
    ingress = NixlIngress(
        ControlMemory.create(0), Doorbell.create(), time.monotonic_ns, lambda: None, cut_off
    )
    for number, (_, connection) in enumerate(children):
        block = FrontEndMemory.create(number, (CAPACITY,) * 4)
        link = Link(f"engine-{number}", args.over, block.segment)
        link.connect(connection.recv())
        connection.send(link.offer)
        ingress.attach_over(block, link)
        print(f"front end {number}: {link.profile.says}", file=sys.stderr)
    return ingress, children


def cut_off(number: int, why: str) -> None:
    """End the run: no front end here breaks its rings."""
    check(False, f"front end {number} was cut off: {why}")


def receive(connection: Connection) -> int:
    """Return the counts of a front end; 0 if it failed."""
    try:
        return int(connection.recv())
    except EOFError:
        return 0


def main() -> None:
    """Run the soak and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--front-ends", type=int, default=2)
    parser.add_argument(
        "--over",
        choices=("memory", "shm", "tcp", "rdma"),
        default="memory",
        help="shared memory, or NIXL with a profile of qllm.ingress.remote.nixl",
    )
    args = parser.parse_args()
    per_front_end = int(args.records / RECORDS_PER_REQUEST / args.front_ends) + 1
    start = time.monotonic()
    begin = over_shm if args.over == "memory" else over_nixl
    ingress, children = begin(args, per_front_end)
    num_records = Answerer(ingress, args.front_ends, per_front_end).run()
    deadline = time.monotonic() + 60
    while not all(connection.poll() for _, connection in children):
        ingress.drain()  # the other tokens
        check(time.monotonic() < deadline, "a front end waits for a record that does not come")
        time.sleep(0.001)
    refused = [receive(connection) for _, connection in children]
    for _, connection in children:
        connection.close()
    codes = [os.waitpid(pid, 0)[1] for pid, _ in children]
    print(
        json.dumps(
            {
                "over": args.over,
                "records": num_records,
                "requests": args.front_ends * per_front_end,
                "ring_full": sum(refused),
                "seconds": round(time.monotonic() - start, 1),
                "ok": not any(codes),
            }
        )
    )
    sys.exit(1 if any(codes) else 0)


if __name__ == "__main__":
    main()
