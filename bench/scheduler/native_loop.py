"""LS TTFT of three engines behind the same rings: Python, native decisions, native server.

`python` is the engine loop with the scheduler and the rings' ends in Python, `native` the same
loop with both in C++ (`scheduler="native"`), `server` the native loop, in which no request is a
Python object. Each runs the model `tiny` in a process of its own; this process is the front end:
a few BE requests are always open, LS requests come as a Poisson process. TTFT is from the put to
the first token in this process. All engines are up, and take turns with the load; the others
sleep meanwhile. A number is the median over an engine's turns; CPU time is of its process. The
last line of stdout is one JSON document.

    python -m bench.scheduler.native_loop [--turns 12] [--seconds 1.5] [--gap-ms 30]
        [--policy qllm2]
"""

import argparse
import gc
import json
import os
import platform
import random
import select
import statistics
import time
from typing import Any

import numpy as np

from qllm.ingress import Submission
from qllm.ingress.front_end import FrontEnd, TokenAt, ring_bytes
from qllm.ingress.memory import ControlMemory, FrontEndMemory
from qllm.ingress.shm import Doorbell
from qllm.types import FinishReason, Priority, SamplingParams, Slo

ENGINES = ("python", "native", "server")
BE_OPEN, BE_PROMPT, BE_TOKENS = 6, 300, 48
LS_PROMPT, LS_TOKENS = 24, 4
MAX_TOTAL = 2048


class Rings:
    """What an engine and its front end share."""

    def __init__(self) -> None:
        self.zero_ns = time.monotonic_ns()
        self.control, self.bell = ControlMemory.create(self.zero_ns), Doorbell.create()
        self.block, self.tokens = (
            FrontEndMemory.create(0, ring_bytes(8192, 32_000)),
            Doorbell.create(),
        )

    def now_ns(self) -> int:
        """Engine time."""
        return time.monotonic_ns() - self.zero_ns

    def close(self) -> None:
        """Give the descriptors back."""
        for doorbell in (self.bell, self.tokens):
            doorbell.close()
        for segment in (self.control.segment, self.block.segment):
            segment.close_fd()


def serve(rings: Rings, engine: str, policy_name: str, ready: int) -> None:
    """Be an engine until the front end asks to stop."""
    from qllm.config import EngineConfig
    from qllm.engine.build import EngineCore, ring_ends
    from qllm.ingress.shm import FrontEndPort, RingSink, ShmIngress
    from qllm.models.loader import load
    from qllm.plugins import load_policy

    config = EngineConfig(scheduler="native" if engine == "native" else "python", conformance=False)
    policy = load_policy(policy_name)
    ingress = ShmIngress(
        rings.control, rings.bell, rings.now_ns, lambda: core.loop.close(), lambda *_: None
    )
    core = EngineCore(
        load("tiny"),
        policy,
        config,
        ingress=ingress,
        sink=RingSink(ingress.lanes),
        now_ns=rings.now_ns,
        threads=1,
        decided=ingress.decided,
    )
    loop: Any = core.loop
    if engine == "server":
        loop = native_loop(rings, core, policy)
        loop.attach(rings.block, rings.tokens)
    else:
        ingress.attach(FrontEndPort(rings.block, rings.tokens, ring_ends(config)))
    gc.collect()
    gc.freeze()
    os.write(ready, b"r")
    loop.serve()


def native_loop(rings: Rings, core: Any, policy: Any) -> Any:
    """The native loop in the place of a core's own."""
    from qllm.device.server import NativeServer, address_of
    from qllm.engine.native_loop import NativeLoop

    runner = core.runner
    server = NativeServer(
        policy,
        runner.shape,
        runner.cuts,
        core.loop.scheduler.limits,
        control=address_of(rings.control.words),
        max_total_tokens=MAX_TOTAL,
    )
    return NativeLoop(server, runner, rings.control, rings.bell, rings.now_ns)


class Load:
    """The front end: what is open, and what it saw of it."""

    def __init__(self, rings: Rings) -> None:
        self.front_end = FrontEnd(rings.block, rings.control, rings.bell, rings.tokens)
        self.now_ns = rings.now_ns
        self.rng = random.Random()
        self.put_ns: dict[int, int] = {}
        self.ttft_ms: list[float] = []
        self.num_tokens = self.num_open = self.num_be_open = self._number = 0

    def submit(self, priority: Priority, prompt: int, max_tokens: int) -> None:
        """Put a request."""
        now = self.now_ns()
        item = Submission(
            request_id=self._number,
            name="",
            priority=priority,
            token_ids=tuple(self.rng.randrange(10, 200) for _ in range(prompt)),
            sampling=SamplingParams(temperature=0, seed=1),
            stop_ids=frozenset(),
            max_tokens=max_tokens,
            slo=Slo(),
            arrival_ns=now,
            deadline_ns=None,
        )
        self._number += 1
        self.num_open += 1
        if priority is Priority.LS:
            self.put_ns[item.request_id] = now
        else:
            self.num_be_open += 1
        self.front_end.submit(item)

    def receive(self) -> None:
        """Take what came."""
        for record in self.front_end.receive():
            if isinstance(record, TokenAt):
                put_ns = self.put_ns.pop(record.sampled.request_id, None)
                if put_ns is not None:
                    self.ttft_ms.append((self.now_ns() - put_ns) / 1e6)
                self.num_tokens += 1
            else:
                assert record.reason is FinishReason.LENGTH, record
                self.num_open -= 1
                self.num_be_open -= record.metrics.priority == Priority.BE

    def run(self, seconds: float, gap_s: float) -> None:
        """Put and take for a while, then until nothing is open."""
        begin = time.monotonic()
        next_ls, end = begin + self.rng.expovariate(1 / gap_s), begin + seconds
        while (now := time.monotonic()) < end or self.num_open:
            while now < end and self.num_be_open < BE_OPEN:
                self.submit(Priority.BE, BE_PROMPT, BE_TOKENS)
            if next_ls <= now < end:
                self.submit(Priority.LS, LS_PROMPT, LS_TOKENS)
                next_ls += self.rng.expovariate(1 / gap_s)
            timeout = max(0.0, min(next_ls, end) - time.monotonic()) if now < end else 1.0
            select.select((self.front_end.doorbell.fd,), (), (), timeout)
            self.receive()


class Engine:
    """An engine in a process of its own, and the load on it."""

    def __init__(self, name: str, policy: str) -> None:
        self.rings, (ready, told) = Rings(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                serve(self.rings, name, policy, told)
                code = 0
            finally:
                os._exit(code)
        os.close(told)
        assert os.read(ready, 1) == b"r", f"the {name} engine did not start"
        os.close(ready)
        self.load = Load(self.rings)
        self.turns: list[dict[str, float]] = []

    def turn(self, seconds: float, gap_s: float, seed: int) -> None:
        """Load it for a while."""
        load = self.load
        load.rng, load.ttft_ms, load.num_tokens = random.Random(seed), [], 0
        cpu_s, begin = self.cpu_s(), time.monotonic()
        load.run(seconds, gap_s)
        elapsed_s = time.monotonic() - begin
        p50, p99 = np.percentile(load.ttft_ms, (50, 99))
        self.turns.append(
            {
                "ls_ttft_p50_ms": float(p50),
                "ls_ttft_p99_ms": float(p99),
                "tokens_per_s": load.num_tokens / elapsed_s,
                "cpu_us_per_token": (self.cpu_s() - cpu_s) / load.num_tokens * 1e6,
                "ls_requests": len(load.ttft_ms),
            }
        )

    def cpu_s(self) -> float:
        """CPU time of the process so far."""
        with open(f"/proc/{self.pid}/stat") as file:
            user, system = file.read().rsplit(")", 1)[1].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def medians(self) -> dict[str, float]:
        """Over its turns."""
        turns = self.turns
        return {name: round(statistics.median(t[name] for t in turns), 2) for name in turns[0]}

    def close(self) -> None:
        """Let it end."""
        self.load.front_end.stop()
        assert os.waitpid(self.pid, 0)[1] == 0, "the engine failed"
        self.rings.close()


def main() -> None:
    """Measure, print a table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--gap-ms", type=float, default=30.0)
    parser.add_argument("--policy", default="qllm2")
    args = parser.parse_args()
    engines = {name: Engine(name, args.policy) for name in ENGINES}
    for number in range(-1, args.turns):
        for engine in list(engines.values())[:: 1 if number % 2 else -1]:
            engine.turn(args.seconds, args.gap_ms / 1e3, number)
    table = {}
    print(f"{'':8}{'LS TTFT p50':>14}{'p99':>10}{'tokens/s':>11}{'CPU us/token':>14}")
    for name, engine in engines.items():
        engine.turns = engine.turns[1:]  # the first warmed it up
        engine.close()
        table[name] = engine.medians()
        p50, p99, rate, cpu_us, _ = table[name].values()
        print(f"{name:8}{p50:>11} ms{p99:>7} ms{rate:>11}{cpu_us:>14}")
    result = {
        "bench": "native_loop",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "load_1min": round(os.getloadavg()[0], 2),
        "args": vars(args),
        "engines": table,
        "turns": {name: engine.turns for name, engine in engines.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
