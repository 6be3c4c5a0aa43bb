"""Sessions of agents: published medians, prompts that extend the last turn, turns that wait."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qllm import QLLMEngine
from qllm.errors import ConfigError
from qllm.types import Priority
from qllm.workloads.capacity import Capacity
from qllm.workloads.generators import Workload
from qllm.workloads.lengths import between
from qllm.workloads.mix import Client, send
from qllm.workloads.sessions import AGENTS, Conversations
from qllm.workloads.spec import Arrival, RequestSpec, Turn
from qllm.workloads.tokens import with_tokens
from tests.support.families import make_model
from tests.support.waiting import wait_for

SMALL = Capacity(prefill_tokens_per_s=2000.0, output_tokens_per_s=150.0)
CORPUS = range(3, 3000)
SCALES = st.sampled_from([1.0, 1 / 16, 1 / 200])


def session(seed: int, scale: float = 1.0, subagents: Priority = Priority.BE) -> list[RequestSpec]:
    return AGENTS.scaled(scale).session("s", random.Random(seed), subagents=subagents)


def is_agent(turn: RequestSpec) -> bool:
    return ".sub" not in turn.name


def seen_before(turns: Sequence[RequestSpec]) -> float:
    """Return the share of the prompts that an earlier request of the session had."""
    found = {turn.name: turn for turn in turns}
    seen = total = 0
    for turn in filter(is_agent, turns):
        total += turn.num_prompt_tokens
        if turn.follows is None:
            seen += turn.num_shared
        else:
            last = found[turn.follows.extends]
            seen += last.num_prompt_tokens + last.max_tokens
    return seen / total


@pytest.mark.parametrize("scale", [1.0, 1 / 16])
def test_sessions_have_the_published_medians(scale: float) -> None:
    sessions = [session(seed, scale) for seed in range(800)]
    agents = [list(filter(is_agent, turns)) for turns in sessions]
    assert median(map(len, agents)) == pytest.approx(43, abs=2)
    last = median(turns[-1].num_prompt_tokens for turns in agents)
    assert last == pytest.approx(142_000 * scale, rel=0.04)
    answers = [turn.max_tokens for turns in agents for turn in turns]
    assert median(answers) == pytest.approx(444 * scale, rel=0.04)
    with_subagents = fmean(len(a) < len(s) for a, s in zip(agents, sessions, strict=True))
    assert with_subagents == pytest.approx(0.44, abs=0.04)
    assert 0.96 < median(map(seen_before, sessions)) < 0.98
    prompts = sum(turn.num_prompt_tokens for turns in agents for turn in turns)
    assert prompts / sum(answers) == pytest.approx(131, rel=0.1)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), SCALES, st.sampled_from([Priority.BE, Priority.LS]))
def test_a_turn_extends_the_last_one_and_waits_for_what_it_called(
    seed: int, scale: float, subagents: Priority
) -> None:
    turns = session(seed, scale, subagents)
    assert turns == session(seed, scale, subagents)
    assert len({turn.name for turn in turns}) == len(turns)
    known: dict[str, RequestSpec] = {}
    for before, turn in zip([None, *turns], turns, strict=False):
        assert turn.num_prompt_tokens + turn.max_tokens <= 200_000 * scale + 1
        assert turn.priority == (Priority.LS if is_agent(turn) else subagents)
        if before is None:
            assert turn.follows is None
        else:
            assert turn.follows is not None
            assert turn.follows.after == before.name, "one request at a time"
            if turn.follows.extends:
                last = known[turn.follows.extends]
                assert turn.num_prompt_tokens > last.num_prompt_tokens + last.max_tokens
                assert is_agent(last) == is_agent(turn)
            else:
                assert not is_agent(turn), "only a subagent begins anew"
        known[turn.name] = turn


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_the_prompt_of_a_turn_begins_with_the_whole_last_turn(
    seed: int, rng: random.Random
) -> None:
    specs = {turn.name: turn for turn in session(seed, 1 / 200)}
    talks = Conversations(with_tokens(specs.values(), CORPUS, seed))
    due, whole, now_s = list(talks.first), dict[str, tuple[int, ...]](), 0.0
    system = due[0].token_ids[: specs[due[0].name].num_shared]
    asked = []
    while due:
        (turn,) = due
        spec = specs[turn.name]
        asked.append(turn.name)
        assert len(turn.token_ids) == spec.num_prompt_tokens
        assert turn.token_ids[: len(system)] == system
        if spec.follows is not None:
            assert turn.at_s == now_s + spec.follows.wait_s
            begin = whole.get(spec.follows.extends, ())
            assert turn.token_ids[: len(begin)] == begin
        answer = [rng.randrange(5000) for _ in range(turn.max_tokens)]
        whole[turn.name] = (*turn.token_ids, *answer)
        now_s = turn.at_s + rng.random()
        due = talks.ended(turn, answer, now_s)
    assert asked == list(specs)


def test_two_sessions_share_their_system_prompt_alone() -> None:
    both = [
        AGENTS.scaled(1 / 100).session(name, random.Random(name), at_s=i)[0]
        for i, name in enumerate(("one", "two"))
    ]
    first, second = (a.token_ids for a in with_tokens(both, CORPUS))
    assert both[0].num_shared == 180
    assert first[:180] == second[:180]
    assert first[180:185] != second[180:185]


def test_a_session_whose_context_is_full_ends() -> None:
    lengths = [len(list(filter(is_agent, session(seed)))) for seed in range(300)]
    most = max(turn.num_prompt_tokens + turn.max_tokens for s in range(300) for turn in session(s))
    assert 195_000 < most <= 200_000
    assert max(lengths) > 60


def test_an_engine_is_asked_turn_after_turn_with_its_own_answers(engine: QLLMEngine) -> None:
    rule = replace(AGENTS.scaled(1 / 400, 1e-4), turns=between(4, 4), with_subagents=1.0)
    turns = [t for i in range(2) for t in rule.session(f"s{i}", random.Random(i))]
    client = Client(engine, with_tokens(turns, CORPUS))
    client.start()
    client.join(120)
    handles = {handle.request_id: handle for handle in client.stop()}
    assert handles.keys() == {turn.name for turn in turns}
    for turn in turns:
        handle = handles[turn.name]
        assert len(handle.prompt_token_ids) == turn.num_prompt_tokens
        assert len(handle.result(60).token_ids) == turn.max_tokens
        if turn.follows is not None and turn.follows.extends:
            last = handles[turn.follows.extends]
            whole = (*last.prompt_token_ids, *last.token_ids)
            assert handle.prompt_token_ids[: len(whole)] == whole


def test_a_turn_whose_answer_broke_off_is_followed_by_none(engine: QLLMEngine) -> None:
    one = Arrival(at_s=0.0, name="a", priority=10, token_ids=(5,) * 20, max_tokens=3000)
    two = replace(one, name="b", max_tokens=1, follows=Turn("a", 0.0, "a"))
    client = Client(engine, [one, two])
    client.start()
    wait_for(lambda: bool(client.handles))
    (handle,) = client.handles
    handle.cancel()
    client.join(60)
    assert [h.request_id for h in client.stop()] == ["a"]


def ends_in_time(ticks: list[float]) -> Callable[[float], None]:
    """Return a callback of `send` that fails where it waits for nothing."""

    def note(at_s: float) -> None:
        ticks.append(at_s)
        assert len(ticks) < 500, "all is answered, and the run goes on"

    return note


@pytest.fixture
def recording() -> Iterator[QLLMEngine]:
    with QLLMEngine.from_model(make_model("mixtral"), record=True, conformance=False) as engine:
        yield engine


def test_a_run_until_all_is_answered_waits_for_turns_and_for_nothing_else(
    recording: QLLMEngine,
) -> None:
    one = Arrival(at_s=0.0, name="a", priority=10, token_ids=(5,) * 20, max_tokens=3)
    two = replace(one, name="b", max_tokens=2, follows=Turn("a", 0.3, "a"))
    late = replace(one, name="c", at_s=0.6)
    ticks: list[float] = []
    done = send(recording, [one, two, late], 3600.0, ends_in_time(ticks), until_answered=True)
    answers = done.tokens()
    assert {name: len(ids) for name, ids in answers.items()} == {"a": 3, "b": 2, "c": 3}


def test_a_run_with_an_unanswered_request_waits_for_its_end(recording: QLLMEngine) -> None:
    endless = Arrival(at_s=0.0, name="d", priority=10, token_ids=(5,) * 20, max_tokens=3000)
    done = send(recording, [endless], 0.5, until_answered=True)
    assert done.window_s >= 0.5
    assert len(done.tokens()["d"]) < 3000
    whole = send(recording, [replace(endless, name="e", max_tokens=1)], 0.5)
    assert whole.window_s >= 0.5


def workload(**more: Any) -> Workload:
    how = {"capacity": SMALL, "length_scale": 1 / 16, "wait_scale": 0.5, "seconds": 40.0}
    return Workload(name="S15", **how | more)


@pytest.mark.parametrize("load", [0.2, 1.5])
def test_so_many_agents_as_the_load_asks_for_talk_all_the_time(load: float) -> None:
    made = workload(load=load)
    ls = [r for r in made.requests(4) if not r.name.startswith("be-")]
    assert sum(r.follows is None for r in ls) == made.num_agents()
    sessions = made.scenario.sessions
    assert sessions is not None
    busy_s = 1 / made.scenario.ls.per_s(SMALL)
    turn_s = busy_s + sessions.wait_ms.mean / 1000
    assert made.num_agents() * busy_s / turn_s == pytest.approx(load, rel=0.35)  # whole agents
    for agent in range(made.num_agents()):
        own = [r for r in ls if r.name.startswith(f"ls-{agent}.")]
        assert own[-1].at_s + sum(r.follows.wait_s for r in own if r.follows) >= made.seconds
        assert [r.follows.after for r in own if r.follows] == [r.name for r in own[:-1]]


def test_the_class_of_subagents_is_a_setting_and_the_factor_is_said() -> None:
    for name in ("LS", "BE"):
        made = workload(subagents=name, load=2.0).requests(0)
        assert {r.priority for r in made if ".sub" in r.name} == {Priority[name]}
    assert "published lengths times 0.0625" in workload().what
    assert workload(max_len=2000).session_scale == 0.01
    assert "times" not in Workload(name="S2").what


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"subagents": "ls"}, "subagents='ls' must be one of LS, BE"),
        ({"wait_scale": 0.0}, "wait_scale=0.0 must be > 0"),
        ({"name": "S2", "subagents": "LS"}, "only S15 has some"),
        ({"name": "S2", "wait_scale": 2.0}, "only S15 has some"),
    ],
)
def test_a_setting_of_agents_that_means_nothing_is_refused(
    wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Workload(**{"name": "S15", **wrong})


def test_a_failed_turn_ends_its_session() -> None:
    one = Arrival(at_s=0.0, name="a", priority=0, token_ids=(1,), max_tokens=1)
    two = Arrival(
        at_s=0.0, name="b", priority=0, token_ids=(2,), max_tokens=1, follows=Turn("a", 0.5, "a")
    )
    talks = Conversations([one, two])
    assert talks.first == [one]
    assert (talks.holds("a"), talks.holds("b")) == (True, False)
    (after,) = talks.ended(one, [7], 2.0)
    assert (after.at_s, after.token_ids) == (2.5, (1, 7, 2))
    assert not talks.holds("a")
    assert talks.ended(after, [8], 3.0) == []
