"""Delay until an engine in another process sees a request, and the cost of looking for it.

The engine's process works in segments of a fixed length and polls the stop word after each, as a
runner does; this process puts requests at random moments. The delay is the time from the put (just
before the bell) to the poll that sees it, on the clock that both share. Then the engine sleeps, and
the delay is that of the doorbell. On a busy machine the system causes the delays. Three numbers
hold anywhere: `seen_at_first_poll`, the share of requests that the first poll after the put saw;
the delay over the length of the segment in which the request came; and the CPU time of a put and of
a look. The last line of stdout is one JSON document.

    python -m bench.engine.rings [--seconds 5] [--segment-us 1000]
"""

import argparse
import json
import os
import platform
import random
import time
import timeit
from collections.abc import Sequence
from typing import Any

import numpy as np

from qllm.ingress import StopWord, Submission
from qllm.ingress.front_end import FrontEnd, ring_bytes
from qllm.ingress.memory import ControlMemory, FrontEndMemory, Segment
from qllm.ingress.shm import Doorbell, FrontEndPort, ShmIngress
from qllm.types import SamplingParams, Slo

BOUND_US = 50
"""Longest delay over the segment, at the 99th percentile: the project's target."""
MEAN_GAP_S = 0.004
LAST = "last"


class TimedFrontEnd(FrontEnd):
    """A front end that records the times at which it rings the bell."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.put_ns: list[int] = []
        self.was_put_ns: list[int] = []

    def _ring(self) -> None:
        self.put_ns.append(time.monotonic_ns())
        super()._ring()
        self.was_put_ns.append(time.monotonic_ns())


def request(number: int, name: str, prompt: int) -> Submission:
    """Return a request as `submit` makes it."""
    return Submission(
        request_id=number,
        name=name,
        priority=0,
        token_ids=tuple(range(prompt)),
        sampling=SamplingParams(temperature=0, seed=1),
        stop_ids=frozenset({0}),
        max_tokens=64,
        slo=Slo(),
        arrival_ns=time.monotonic_ns(),
        deadline_ns=None,
    )


def engine(ingress: ShmIngress, segment_ns: int, out: int) -> None:
    """Work or sleep until the last request; write the time at which each was seen."""
    seen_ns: list[int] = []
    seen_poll: list[int] = []
    polls_ns: list[int] = []
    while True:
        if segment_ns:
            end = time.monotonic_ns() + segment_ns
            while time.monotonic_ns() < end:
                pass
            polls_ns.append(time.monotonic_ns())
            if ingress.stop.word >= 10:
                continue
        at = time.monotonic_ns()
        items = ingress.drain()
        seen_ns += [at if segment_ns else time.monotonic_ns()] * len(items)
        seen_poll += [len(polls_ns) - 1] * len(items)
        if any(isinstance(item, Submission) and item.name == LAST for item in items):
            break
        if not segment_ns:
            ingress.wait(None)
    with os.fdopen(out, "w") as file:
        json.dump([seen_ns, seen_poll, polls_ns], file)
    os._exit(0)


def pin(cores: Sequence[int], index: int) -> None:
    """Keep this process on one core, if there are several."""
    os.sched_setaffinity(0, {cores[index % len(cores)]})


def measure(segment_us: int, seconds: float, prompt: int) -> dict[str, float]:
    """Run both processes; return percentiles of the delay in microseconds."""
    control, bell, doorbell = ControlMemory.create(0), Doorbell.create(), Doorbell.create()
    block = FrontEndMemory.create(0, ring_bytes(8192, 32_000))
    ingress = ShmIngress(control, bell, time.monotonic_ns, lambda: None, lambda *_: None)
    ingress.attach(FrontEndPort(block, doorbell))
    cores = sorted(os.sched_getaffinity(0))
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        pin(cores, 0)
        engine(ingress, segment_us * 1000, write)
    os.close(write)
    pin(cores, 1)
    front_end, rng = TimedFrontEnd(block, control, bell, doorbell), random.Random(0)
    number, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(rng.expovariate(1 / MEAN_GAP_S))
        front_end.submit(request(number, "r", prompt))
        number += 1
    front_end.submit(request(number, LAST, prompt))
    with os.fdopen(read, "rb") as file:
        seen_ns, seen_poll, polls_ns = json.loads(file.read())
    os.waitpid(pid, 0)
    os.sched_setaffinity(0, set(cores))
    delays_us = (np.array(seen_ns) - np.array(front_end.put_ns)) / 1000
    p50, p99, most = np.percentile(delays_us, (50, 99, 100))
    first = {}
    if segment_us:
        due_poll = np.searchsorted(polls_ns, front_end.was_put_ns)
        on_time = np.array(seen_poll) <= due_poll
        # the system also stops the engine sometimes: a segment has its measured length
        segments_us = np.diff(polls_ns, prepend=0)[np.array(seen_poll)] / 1000
        over = float(np.percentile(delays_us - segments_us, 99))
        first = {
            "seen_at_first_poll": round(float(on_time.mean()), 4),
            "p99_over_its_segment_us": round(over, 1),
        }
    return {
        **first,
        "requests": len(delays_us),
        "p50_us": round(float(p50), 1),
        "p99_us": round(float(p99), 1),
        "max_us": round(float(most), 1),
    }


def cpu_us(prompt: int) -> dict[str, float]:
    """Return the median CPU microseconds of a put, and of a look that takes one request."""
    control, bell = ControlMemory.create(0), Doorbell.create()
    block = FrontEndMemory.create(0, ring_bytes(8192, 32_000))
    ingress = ShmIngress(control, bell, time.monotonic_ns, lambda: None, lambda *_: None)
    ingress.attach(FrontEndPort(block, Doorbell.create()))
    front_end = FrontEnd(block, control, bell, Doorbell.create())
    puts, looks = [], []
    for number in range(2000):
        item = request(number, "r", prompt)
        times = [time.thread_time_ns()]
        front_end.submit(item)
        times.append(time.thread_time_ns())
        ingress.stop.word  # noqa: B018 - a property that looks
        times.append(time.thread_time_ns())
        ingress.drain()
        puts.append(times[1] - times[0])
        looks.append(times[2] - times[1])
    medians = {"put": float(np.median(puts)), "look": float(np.median(looks))}
    return {name: round(value / 1000, 1) for name, value in medians.items()}


def poll_ns() -> dict[str, float]:
    """Return the CPU nanoseconds of reading the word as a runner does: the least of nine."""
    control, bell = ControlMemory.create(0), Doorbell.create()
    ingress = ShmIngress(control, bell, time.monotonic_ns, lambda: None, lambda *_: None)
    cell = Segment.create("cell", 64).words
    array = np.frombuffer(cell, np.int64)
    places = {
        "plain attribute (thread)": (StopWord(time.monotonic_ns), "x.word < 0"),
        "shm stop word (process)": (ingress.stop, "x.word < 0"),
        "bare shared memoryview cell": (cell, "x[0] < 0"),
        "bare shared numpy cell": (array, "x[0] < 0"),
    }
    count, found = 200_000, {}
    for name, (x, code) in places.items():
        timer = timeit.Timer(code, globals={"x": x}, timer=time.process_time)
        found[name] = round(min(timer.repeat(9, count)) / count * 1e9, 1)
    return found


def main() -> None:
    """Measure, print a table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--segment-us", type=int, default=1000)
    parser.add_argument("--prompt", type=int, default=200)
    args = parser.parse_args()
    busy = measure(args.segment_us, args.seconds, args.prompt)
    idle = measure(0, args.seconds, args.prompt)
    result = {
        "bench": "rings",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "load_1min": round(os.getloadavg()[0], 2),
        "segment_us": args.segment_us,
        "busy": busy,
        "busy_p99_over_segment_us": round(busy["p99_us"] - args.segment_us, 1),
        "within_bound": busy["p99_over_its_segment_us"] <= BOUND_US,
        "idle": idle,
        "cpu_us": cpu_us(args.prompt),
        "poll_ns": poll_ns(),
    }
    print(f"working in segments of {args.segment_us} us: {busy}")
    print(f"asleep: {idle}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
