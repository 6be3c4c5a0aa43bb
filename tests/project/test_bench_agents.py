"""The parts of `bench agents` and `bench long_turn` that decide what a number means."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import common
from bench.common import Table, busy_cores
from bench.models.noise_folder import skeleton
from bench.models.published_shapes import SHAPES, config_of
from bench.models.shape_floors import Needs
from bench.report_agents import agents_part, draw_agents
from bench.serving import agents, servers
from bench.serving.agents_numbers import (
    Run,
    batch_rate,
    different,
    in_turn,
    mean_rate,
    prefix_share,
)
from qllm.types import Priority
from qllm.workloads.measure import Served
from qllm.workloads.sessions import Conversations
from qllm.workloads.spec import Arrival, RequestSpec, Turn

LS, BE = Priority.LS, Priority.BE


def served(
    name: str, *token_s: float, prompt: int = 100, at_s: float = 0.0, done: bool = True, **more: Any
) -> Served:
    priority = BE if name.startswith("be") else LS
    spec = RequestSpec(
        at_s=at_s, priority=priority, num_prompt_tokens=prompt, max_tokens=len(token_s), name=name
    )
    return Served(spec=spec, token_s=list(token_s), done=done, **more)


def test_the_rate_of_a_batch_counts_whole_prompts_between_two_first_tokens() -> None:
    batch = [
        served("be-0", 10.0, 11.0, prompt=900),  # its prompt began before anything was measured
        served("be-1", 15.0, 16.0, prompt=300),
        served("be-2", 20.0, 21.0, prompt=600),  # its second token comes after the last prompt
        served("be-3", prompt=5000),
    ]
    assert batch_rate(batch) == pytest.approx((300 + 600 + 4) / 10)
    assert batch_rate(batch[:1]) is None
    whole, none = Run(agents=[], batch=batch), Run(agents=[], batch=batch[:1])
    assert mean_rate([whole, whole]) == batch_rate(batch)
    assert mean_rate([whole, none]) is None


def test_a_prefix_counts_by_tokens_and_a_silent_server_found_none() -> None:
    turns = [
        served("a", 1.0, prompt=100, num_cached=0),
        served("b", 1.0, prompt=300, num_cached=280),
    ]
    assert prefix_share(turns) == 0.7
    assert prefix_share([served("a", 1.0)]) == 0.0


def test_a_lost_turn_takes_those_behind_it_with_it() -> None:
    run = Run(
        agents=[served("a.0", 1.0), served("a.1", done=False, error="gone")],
        batch=[served("be-0", 1.0), served("be-1", done=False), served("be-2", error="gone")],
    )
    assert run.lost(asked=5) == 4 + 1
    assert run.errors == ["gone"]
    assert Run(agents=[served("a.0", 1.0)]).lost(asked=1) == 0


def test_only_turns_that_people_wait_for_have_latencies() -> None:
    run = Run(agents=[served("a", 1.0, 1.5, at_s=0.9), served("be-sub", 9.0, 9.9), served("b")])
    assert run.ttft_ms == [pytest.approx(100)]
    assert run.tpot_ms == [pytest.approx(500)]


def test_an_answer_that_was_cut_off_is_compared_as_far_as_it_came() -> None:
    solo = {"a": [1, 2, 3], "b": [1, 2, 3], "c": [1]}
    assert different({"a": [1, 2], "b": [1, 3], "c": [1, 1]}, solo) == ["b", "c"]
    with pytest.raises(KeyError):
        different({"d": [1]}, solo)


LEAVES_A_WORKER = """
import os, signal, sys, time
if os.fork():
    signal.pause()
while time.process_time() < 0.3:
    pass
open(sys.argv[1], "w").close()
signal.pause()
"""
"""A server that ends without waiting for its worker, which has used 0.3 s of a core."""


def test_the_time_of_a_servers_workers_is_not_that_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "worked"
    monkeypatch.setattr(servers, "_answers", lambda port: mark.exists())
    command = [sys.executable, "-c", LEAVES_A_WORKER, str(mark)]
    peer = servers.Peer(
        name="forks", environment=None, install=lambda home: None, command=lambda place: command
    )
    before_s = busy_cores()[1]
    with servers.serving(peer, servers.Place(tmp_path, tmp_path, 0, 1), tmp_path / "log"):
        pass
    assert busy_cores()[1] - before_s > 0.25


def arguments(**more: Any) -> argparse.Namespace:
    how = {
        "scale": 1 / 64, "wait_scale": 0.1, "agents": 2, "subagents": "BE", "turns": 6,
        "rounds": 2, "seed": 3, "kill": True,
    }  # fmt: skip
    return argparse.Namespace(**how | more)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> agents.Bench:
    """Return a bench without a model, whose intervals are rough."""
    monkeypatch.setattr(common, "RESAMPLES", 20)
    made = object.__new__(agents.Bench)
    made.args, made.corpus = arguments(), range(10, 4000)
    made.rule = agents.rule_of(made.args)
    return made


def test_each_round_has_turns_and_an_endless_batch_of_its_own(bench: agents.Bench) -> None:
    first, again, other = bench.agents(0), bench.agents(0), bench.agents(1)
    assert first == again != other
    own = [turn for turn in first if ".sub" not in turn.name]
    assert len(own) == 12
    assert [turn.follows is None for turn in own].count(True) == 2
    jobs = [job for job, _ in zip(bench.jobs(0), range(50), strict=False)]
    assert len({job.token_ids for job in jobs}) == 50
    assert all(8000 / 64 <= len(job.token_ids) <= 30_000 / 64 for job in jobs)


def test_alone_means_one_after_the_other_with_the_same_prompts(bench: agents.Bench) -> None:
    turns = bench.agents(0)
    prompts: list[dict[str, tuple[int, ...]]] = []
    most: list[int] = []
    for arrivals in (turns, in_turn(turns)):
        talks, found = Conversations(arrivals), dict[str, tuple[int, ...]]()
        due, widest = list(talks.first), 0
        while due:
            widest = max(widest, len(due))
            turn = due.pop(0)
            found[turn.name] = turn.token_ids
            due += talks.ended(turn, [len(turn.token_ids)] * turn.max_tokens, 0.0)
        prompts.append(found)
        most.append(widest)
    assert prompts[0] == prompts[1]
    assert prompts[0].keys() == {turn.name for turn in turns}
    assert most == [2, 1]
    answers = {name: [len(ids)] * next(t.max_tokens for t in turns if t.name == name)
               for name, ids in prompts[0].items()}  # fmt: skip
    last = agents.last_turns([t for t in turns if ".sub" not in t.name], answers)
    assert [(turn.name, turn.token_ids) for turn in last] == [
        (name, prompts[0][name]) for name in ("ls-0.5", "ls-1.5")
    ]


def runs_of(bench: agents.Bench, slow: float = 1.0) -> agents.Runs:
    """Return made-up runs in which the arm with the batch is slower by a factor."""
    found: agents.Runs = {}
    for name in (*agents.ARMS, "killed"):
        found[name] = []
        for i in range(1 if name == "killed" else 2):
            factor = slow if name == "with_batch" else 1.0
            turns = [
                served(turn.name, 0.1 * factor, 0.1 * factor + 0.02, num_cached=97)
                for turn in bench.agents(bench.args.seed + i)
            ]
            batch = [served(f"be-{j}", 1.0 + j, token_ids=[1]) for j in range(4)]
            server = {"restarts": 1.0, "replayed": 3.0} if name == "killed" else {}
            found[name].append(Run(agents=turns, batch=batch, took_s=9.0, server=server))
    return found


EQUAL: dict[str, Any] = {
    "checked": 40,
    "different": {"alone": [], "with_batch": [], "priority": [], "killed": []},
    "different_without_cache": [],
}


def test_every_row_with_a_target_is_judged(bench: agents.Bench) -> None:
    good, bad = Table(), Table()
    agents.tabulate(good, bench, runs_of(bench), EQUAL, {})
    assert not good.missed
    judged = [line.name for line in good.lines if line.target != "printed"]
    assert len(judged) == 9
    runs = runs_of(bench, slow=1.5)
    runs["with_batch"] = [
        replace(run, batch=[replace_at(s, 1.5) for s in run.batch],
                agents=[turn_with(s, num_cached=90) for s in run.agents[:-1]])
        for run in runs["with_batch"]
    ]  # fmt: skip
    runs["killed"] = [replace(run, agents=run.agents[1:]) for run in runs["killed"]]
    wrong = EQUAL | {"different": {**EQUAL["different"], "with_batch": ["ls-0.1"]}}
    agents.tabulate(bad, bench, runs, wrong, {"vllm": runs["alone"]})
    missed = [line.name for line in bad.lines if line.reached is False]
    assert missed == [
        "LS TTFT p50 next to the batch / alone",
        "LS TTFT p99 next to the batch / alone",
        "share of the agents' prompts found in the cache",
        "batch tokens/s, qllm2 / priority",
        "streams that differ from their solo run",
        "answers lost",
        "kill -9 with 3 requests open: answers lost; changed",
        "LS TTFT p99 vllm (its best setting) / ours",
    ]


def replace_at(one: Served, factor: float) -> Served:
    return replace(one, token_s=[at * factor for at in one.token_s])


def turn_with(one: Served, **more: Any) -> Served:
    return replace(one, **more)


def test_a_kill_that_hit_nothing_misses_its_target(bench: agents.Bench) -> None:
    runs = runs_of(bench)
    runs["killed"] = [replace(runs["killed"][0], server={"restarts": 1.0, "replayed": 0.0})]
    table = Table()
    agents.tabulate(table, bench, runs, EQUAL, {})
    assert [line.name for line in table.lines if line.reached is False] == [
        "kill -9 with 0 requests open: answers lost; changed"
    ]


def test_the_figure_and_the_page_come_from_the_result(bench: agents.Bench, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    table, runs = Table(), runs_of(bench)
    runs["vllm-512"] = runs["alone"]
    found = agents.tabulate(table, bench, runs_of(bench), EQUAL, {"vllm-512": runs["priority"]})
    document = {
        "config": vars(bench.args) | {"threads": 2},
        "machine": {"cpu": "x"},
        "found": found,
        "lines": [line._asdict() for line in table.lines],
        "samples": {name: agents.samples_of(of) for name, of in runs.items()},
    }
    draw_agents(document | {"samples": document["samples"] | {
        "vllm-512": document["samples"]["priority"]}}, str(tmp_path / "agents.png"))  # fmt: skip
    assert (tmp_path / "agents.png").read_bytes().startswith(b"\x89PNG")
    page = "\n".join(agents_part(document))
    assert "lengths times 0.0156" in page
    assert "2 rounds" in page
    assert "| LS TTFT p99 next to the batch / alone |" in page


def test_a_follower_of_a_turn_that_is_not_extended_keeps_its_own_prompt() -> None:
    one = Arrival(at_s=0.0, name="a", priority=0, token_ids=(1,), max_tokens=1)
    two = replace(one, name="b", token_ids=(2,), follows=Turn("a", 0.5))
    talks = Conversations(in_turn([one, two]))
    assert [t.token_ids for t in talks.ended(one, [9], 1.0)] == [(2,)]


def test_a_turn_costs_its_new_tokens_and_one_read_of_the_context() -> None:
    needs = Needs(skeleton(config_of(SHAPES["Qwen3-30B-A3B"], 2)))
    kv = 2 * 2 * 4 * 128 * 2  # K and V, two layers, four heads of 128, two bytes
    assert needs.turn(500, 65_536).bytes == kv * 66_036
    assert needs.turn(500, 0).flops == needs.prefill(500, "bf16").flops
    attention = 2 * 4 * 32 * 128  # two products of two FLOPs, two layers, 32 heads of 128
    more = needs.turn(500, 65_536).flops - needs.turn(500, 0).flops
    assert more == pytest.approx(attention * 500 * 65_536)
