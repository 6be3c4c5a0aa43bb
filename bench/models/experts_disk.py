"""A model whose experts do not fit: what it costs, and what each part of the design gains.

    LS beside BE   time of LS requests beside a BE request that misses experts
    decode         experts that stay by their uses, over those used last
    two BE         tokens/s of two BE requests that miss experts, over those of one
    prefill        a prompt with a quarter of the experts in memory, over all
    layered        bytes of experts that a prompt reads, over chunks of 256
    memory         peak of an engine in a process of its own
    simulator      bytes and waits that `qllm sim` expects, over those of an engine

Arms alternate in one process. The arm of experts used last is `Lru` below, in place of the
residency's `Displacing`; no setting reaches it. Blocking reads are those of a runner that does not
park. Bytes are compared with those that the system counts. The model is the one of `bench.common`,
which routes evenly; `tiny` has a trained router. A model of 30B is measured by `experts_30b`. The
output is a table, then one JSON line.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from bench.common import (
    Table,
    machine,
    make_jobs,
    make_prompt,
    median,
    model_folder,
    plain,
    result_file,
)
from bench.energy import Run, answered_tokens, metered
from bench.engine.ranks_served import status
from bench.models.simulated_disk import simulator_rows
from qllm import QLLMEngine, SamplingParams
from qllm.kernels import cpu
from qllm.runner.displacing import NONE, Displacing, Slots, Use

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=5, ignore_eos=True)
"""Sampling that does not repeat itself, with the same tokens in all arms."""
TEXTS: list[Any] = ["# Experts\n\nA model with experts is", "def area(width, height):\n"]
THREADS, SEED = 2, 5
LS_LENGTHS, NUM_LS, GAP_S = (1, 16), 8, 0.1
"""Tokens of LS prompts, requests of a round after two that do not count, and seconds between."""
NUM_BE = 40
"""BE requests of a round: more than can end in it."""
NUM_TOKENS, PROMPT, CHUNK = 96, 1024, 256
MODEL_BYTES, TINY_BYTES = 288 * 1_769_472, 32 * 221_184
"""Bytes of the experts of the model of `bench.common`, and of `tiny`, in their files."""
SLACK = 1.1
MOST_OVER_RESIDENT, MOST_OVER_BLOCKING = 1.3, 0.33
LEAST_DECODE, LEAST_TWO, LEAST_PREFILL, MOST_LAYERED = 1.5, 1.3, 0.9, 0.33


class Lru(Displacing):
    """The choice of the expert that was used longest ago, of any class."""

    def choose(
        self, slots: Slots, most: int, use: Use, now_ns: int, *, by_right: bool = False
    ) -> list[int]:
        """See `Displacing.choose`."""
        free = np.flatnonzero(slots.may_go)
        order = np.where(slots.owner[free] == NONE, NONE, slots.used[free]).argsort(kind="stable")
        found: list[int] = free[order[:most]].tolist()
        return found


class Served:
    """An engine on a thread.

    Args:
        model: Alias or folder of the model.
        share: Share of the experts that fit in memory; None has all of them without a file.
        folder: Folder for files of experts.
        settings: Settings of the engine.
    """

    def __init__(
        self, model: str | Path, share: float | None, folder: str, **settings: Any
    ) -> None:
        self.engine = QLLMEngine.from_pretrained(
            model,
            run_in="thread",
            threads=THREADS,
            conformance=False,
            prefix_cache=False,
            max_step_tokens=PROMPT,
            **memory_for(model, share, folder),
            **settings,
        )
        rng = np.random.default_rng(SEED)
        self.first = TEXTS if model == "tiny" else [make_prompt(rng, 8) for _ in TEXTS]
        """Prompts of requests that decode. Only `tiny` knows words."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def use(self, kind: type[Displacing] = Displacing, parks: bool = True) -> None:
        """Empty all slots, choose who stays, and let the runner park or block."""
        client: Any = self.engine._client
        residency = client.runner.residency

        def change() -> None:
            residency.leave()
            residency.enter()
            residency.displacing = kind(residency.num_experts, residency.num_slots, residency.top_k)
            residency.parks = parks

        self.engine.call(change)

    def time(self, prompt: str | list[int], num: int, priority: str = "BE") -> float:
        """Return the seconds of one request."""
        start = time.monotonic()
        self.engine.submit(prompt, priority, num, sampling=GREEDY).result(600)
        return time.monotonic() - start

    def time_as_asked(self, prompt: list[int], num: int) -> float:
        """Return the seconds of one BE request. No expert is read before it is asked for."""
        client: Any = self.engine._client
        waits = client.loop.waits
        waits.reads_ahead = False
        try:
            return self.time(prompt, num)
        finally:
            waits.reads_ahead = True

    @property
    def num_bytes(self) -> int:
        """Bytes of experts that frames waited for."""
        stats = self.engine.stats()["experts"]
        return sum(int(stats[name]["bytes"]) for name in ("LS", "BE"))

    def bytes_of(self, ids: list[int]) -> int:
        """Return the bytes of experts that a prompt reads into empty slots."""
        self.use()
        before = self.num_bytes
        self.time(ids, 1)
        return self.num_bytes - before

    def decode(
        self, num_requests: int, num: int, energy: list[Run] | None = None
    ) -> tuple[float, float]:
        """Return the tokens/s of BE requests that decode together, and the MB per token."""
        first = self.first[:num_requests]
        for prompt in first:
            self.time(prompt, 8)
        before, start = self.num_bytes, time.monotonic()
        with metered([] if energy is None else energy) as computed:
            handles = [self.engine.submit(one, "BE", num, sampling=SAMPLED) for one in first]
            computed.append(answered_tokens(handle.result(600) for handle in handles))
        tokens = num * num_requests
        seconds = time.monotonic() - start
        return tokens / seconds, (self.num_bytes - before) / tokens / 1e6

    def beside_be(self, length: int) -> list[float]:
        """Return the times in ms of LS requests with one token, beside a flood of BE requests."""
        chat = make_prompt(np.random.default_rng([SEED, length]), length)
        jobs = make_jobs(SEED, NUM_BE, (512, 512), (8, 8))
        self.engine.submit(jobs[-1].token_ids, "BE", 1, sampling=GREEDY).result(600)
        flood = [self.engine.submit(job.token_ids, "BE", 8, sampling=GREEDY) for job in jobs]
        found = []
        for _ in range(NUM_LS + 2):
            found.append(self.time(chat, 1, "LS") * 1000)
            time.sleep(GAP_S)
        assert flood[-1].finish_reason is None, "there is BE work all the time"
        for be in flood:
            be.cancel()
        for be in flood:
            be.result(60)
        return found[2:]


def memory_for(model: str | Path, share: float | None, folder: str) -> dict[str, Any]:
    """Return the settings that keep a share of the experts in memory."""
    if share is None:
        return {}
    num_bytes = TINY_BYTES if model == "tiny" else MODEL_BYTES
    return {"max_expert_bytes": int(num_bytes * share), "expert_dir": folder}


def in_turns(arms: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """Run arms in turns, each round in another order, and return their results."""
    rng, found = np.random.default_rng(SEED), {name: list[Any]() for name in arms}
    for _ in range(rounds):
        for i in rng.permutation(len(arms)):
            name = list(arms)[i]
            found[name].append(arms[name]())
    return found


def ratio_of(top: Sequence[float], bottom: Sequence[float]) -> float:
    """Return the median of the ratios of two arms."""
    return median(np.array(top) / np.array(bottom))


def ls_rows(table: Table, half: Served, whole: Served, rounds: int) -> dict[str, Any]:
    """Measure LS requests beside a BE request, with half of the experts in memory."""
    rows = {}

    def beside(kind: type[Displacing], parks: bool, length: int) -> list[float]:
        half.use(kind, parks)
        return half.beside_be(length)

    for length in LS_LENGTHS:
        arms = {
            "parked": partial(beside, Displacing, True, length),
            "used last": partial(beside, Lru, True, length),
            "blocking": partial(beside, Lru, False, length),
            "resident": partial(whole.beside_be, length),
        }
        times = {name: np.concatenate(found) for name, found in in_turns(arms, rounds).items()}
        p99 = {name: float(np.percentile(ms, 99)) for name, ms in times.items()}
        p50 = {name: float(np.percentile(ms, 50)) for name, ms in times.items()}
        rows[f"ls_{length}"] = {"p50_ms": p50, "p99_ms": p99}
        what = f"LS with a prompt of {length}"
        for other, target in (("resident", MOST_OVER_RESIDENT), ("blocking", MOST_OVER_BLOCKING)):
            ratio = p99["parked"] / p99[other]
            text = f"{ratio:.2f} ({p99['parked']:.0f} / {p99[other]:.0f} ms)"
            table.add(f"{what}: p99, over {other}", text, f"<= {target}", ratio <= target)
        table.add(f"{what}: p99, experts used last stay", f"{p99['used last']:.0f} ms")
        table.add(f"{what}: p50", " ".join(f"{name} {ms:.0f}" for name, ms in p50.items()))
    return rows


def decode_rows(table: Table, half: Served, tiny: Served, rounds: int) -> dict[str, Any]:
    """Measure decode with half of the experts in memory."""
    rows = {}

    def decode(served: Served, kind: type[Displacing]) -> tuple[float, float]:
        served.use(kind)
        return served.decode(1, NUM_TOKENS)

    for name, served, target in (("tiny", tiny, LEAST_DECODE), ("the model", half, None)):
        arms = {"uses": partial(decode, served, Displacing), "last": partial(decode, served, Lru)}
        found = in_turns(arms, rounds)
        speed, mb = ({k: [one[i] for one in each] for k, each in found.items()} for i in (0, 1))
        ratio = ratio_of(speed["uses"], speed["last"])
        rows[f"decode_{name}"] = {"tokens_per_s": speed, "mb_per_token": mb}
        wanted = "printed" if target is None else f">= {target}x"
        reached = None if target is None else ratio >= target
        table.add(f"decode of {name}: by uses, over used last", f"{ratio:.2f}x", wanted, reached)
        text = f"{np.median(mb['uses']):.2f} / {np.median(mb['last']):.2f}"
        table.add(f"decode of {name}: MB per token", text)
    half.use()
    energy: dict[int, list[Run]] = {1: [], 2: []}
    found = in_turns(
        {str(n): partial(half.decode, n, NUM_TOKENS // 2, energy[n]) for n in energy}, rounds
    )
    speed = {name: [one[0] for one in each] for name, each in found.items()}
    ratio = ratio_of(speed["2"], speed["1"])
    reached, value = ratio >= LEAST_TWO, f"{ratio:.2f}x"
    table.add("two BE / one: tokens/s", value, f">= {LEAST_TWO}x", reached, energy=energy[2])
    return rows | {"two": speed}


def prompt_rows(
    table: Table, model: Path, folder: str, whole: Served, rounds: int
) -> dict[str, Any]:
    """Measure a prompt with a quarter of the experts in memory."""
    ids = make_prompt(np.random.default_rng(SEED), PROMPT)
    with Served(model, 0.25, folder) as quarter:
        arms = {
            "quarter": partial(quarter.time, ids, 1),
            "as asked": partial(quarter.time_as_asked, ids, 1),
            "whole": partial(whole.time, ids, 1),
        }
        for arm in arms.values():
            arm()
        seconds = in_turns(arms, rounds)
        ahead = quarter.engine.stats()["experts"]["ahead"]
    ratio = ratio_of(seconds["whole"], seconds["quarter"])
    name = f"prefill of {PROMPT}, a quarter in memory / all"
    table.add(name, f"{ratio:.2f}", f">= {LEAST_PREFILL}", ratio >= LEAST_PREFILL)
    ratio = ratio_of(seconds["whole"], seconds["as asked"])
    table.add("  the same, nothing read ahead", f"{ratio:.2f}")
    unused = ahead["unused_bytes"] / max(1, ahead["bytes"])
    table.add("  bytes read ahead and not used", f"{unused:.1%}")
    found = {}
    for policy, settings in (("layered", {}), ("chunked", {"step_tokens": CHUNK})):
        with Served(model, 0.25, folder, policy=policy, policy_settings=settings) as served:
            found[policy] = served.bytes_of(ids) / 1e6
    share = found["layered"] / found["chunked"]
    text = f"{share:.2f} ({found['layered']:.0f} / {found['chunked']:.0f} MB)"
    table.add(
        f"layered / chunks of {CHUNK}: bytes", text, f"<= {MOST_LAYERED}", share <= MOST_LAYERED
    )
    return {"prefill_s": seconds, "prompt_mb": found}


def memory_row(table: Table, model: Path, folder: str) -> dict[str, Any]:
    """Measure the peak of an engine with a quarter of the experts in memory."""
    ids, peaks, kv = make_prompt(np.random.default_rng(SEED), 64), {}, {}
    how = {"conformance": False, "max_kv_tokens": 4096, "threads": THREADS}
    for name, one, share in (("tiny", "tiny", None), ("quarter", model, 0.25)):
        with QLLMEngine.from_pretrained(one, **memory_for(one, share, folder), **how) as engine:
            ids = [min(i, 3000) for i in ids]
            engine.submit(ids, "BE", 8, sampling=GREEDY).result(600)
            stats = engine.stats()
            peaks[name] = status(stats["pid"], "VmHWM")
            kv[name] = stats["memory"]["kv_bytes"]
    budget = int(MODEL_BYTES * 0.25)
    rest = sum(path.stat().st_size for path in model.glob("*.safetensors")) - MODEL_BYTES
    rest += kv["quarter"] - kv["tiny"]
    own, most = peaks["quarter"] - peaks["tiny"], SLACK * (budget + rest)
    text = f"{own / 1e6:.0f} MB ({budget / 1e6:.0f} + {rest / 1e6:.0f})"
    table.add("peak, less that of tiny", text, f"<= {most / 1e6:.0f} MB", own <= most)
    return {"peak_bytes": peaks, "budget_bytes": budget, "rest_bytes": rest}


def io_row(table: Table, half: Served) -> dict[str, int]:
    """Compare the bytes that the engine counts with those that the system counts."""
    half.use()
    before, counted = read_bytes(), half.num_bytes
    half.decode(1, NUM_TOKENS // 2)
    read, own = read_bytes() - before, half.num_bytes - counted
    table.add(
        "bytes read by the system / counted", f"{read / own:.3f}", "1.00", own <= read <= 1.02 * own
    )
    return {"read_bytes": read, "counted_bytes": own}


def read_bytes(pid: int | str = "self") -> int:
    """Return the bytes that a process has read from disks."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def main() -> None:
    """Measure, print the table and the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--dir", default=None, help="folder on a disk, for files of experts")
    parser.add_argument("--out", type=result_file)
    args = parser.parse_args()
    table, rounds, model = Table(), 1 if args.quick else 5, model_folder()
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        with (
            Served(model, 0.5, folder) as half,
            Served("tiny", 0.5, folder) as tiny,
            Served(model, None, folder) as whole,
        ):
            rows["io"] = io_row(table, half)
            rows |= ls_rows(table, half, whole, rounds)
            rows |= decode_rows(table, half, tiny, rounds)
            rows |= prompt_rows(table, model, folder, whole, rounds)
        rows["memory"] = memory_row(table, model, folder)
    rows["simulator"] = simulator_rows(table, 1 if args.quick else 3)
    config = {"threads": THREADS, "seed": SEED, "rounds": rounds, "kernels": cpu.kind()}
    result = {"bench": "experts_disk", "machine": machine(), "config": config, "rows": plain(rows)}
    table.finish(result, args.out)


if __name__ == "__main__":
    main()
