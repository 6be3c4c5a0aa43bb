"""Prompts that grow and change beside others, on a virtual clock; records, ranks and workloads."""

import random
import struct
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qllm.errors import ConfigError
from qllm.ingress import Revision, Submission
from qllm.ingress.codec import decode_revision, encode_revision
from qllm.ingress.layout import REVISE_KIND
from qllm.ingress.ring import Record
from qllm.measure.bench import BenchLoad
from qllm.plugins import load_policy
from qllm.record import trace
from qllm.sim.presets import preset
from qllm.sim.run import simulate
from qllm.sim.world import LIMITS, World
from qllm.types import NS_PER_MS, Cap, FinishReason, SamplingParams, Slo
from qllm.workloads.generators import named_workload
from qllm.workloads.spec import PieceSpec, RequestSpec

LS, BE = 0, 10
H100 = preset("h100", "qwen3-moe")
TIGHT = replace(
    LIMITS, num_blocks=48, num_swap_blocks=64, capabilities=LIMITS.capabilities | Cap.KV_SWAP
)


def stream(world: World, level: int, steps: list[tuple[float, int, float]], at_ns: int = 0) -> int:
    """Open a prompt; each step is the part that stays, new tokens, and milliseconds before it."""
    number, known = world.submit(level, 0, 3, at_ns=at_ns, is_open=True), 0
    for i, (part, more, after_ms) in enumerate(steps, 1):
        at_ns += round(after_ms * NS_PER_MS)
        keep, is_open = int(known * part), i < len(steps)
        more = max(more, not (keep or is_open))
        world.revise(number, keep, more, at_ns, is_open=is_open)
        known = keep + more
    return number


STEPS = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 150), st.floats(0, 60)), min_size=1, max_size=5
)


@pytest.mark.parametrize("policy", ["qllm2", "lcas", "mcps", "fcfs", "mlfq", "rota", "layered"])
@settings(max_examples=25, deadline=None)
@given(streams=st.lists(STEPS, min_size=1, max_size=5), seed=st.integers(0, 99))
def test_nothing_is_lost_where_kv_is_short(policy: str, streams: list[Any], seed: int) -> None:
    """Every state is checked, and each request has its tokens."""
    rng = random.Random(seed)
    world = World(load_policy(policy), TIGHT)
    for steps in streams:
        stream(world, rng.choice([LS, BE]), steps, rng.randrange(50) * NS_PER_MS)
    for _ in range(4):
        at_ns = rng.randrange(200) * NS_PER_MS
        world.submit(rng.choice([LS, BE]), rng.randint(1, 500), 4, at_ns=at_ns)
    world.run()
    assert world.errors == dict.fromkeys(world.submitted)
    assert set(world.finished.values()) == {FinishReason.LENGTH}
    assert all(world.tokens[n] == item.max_tokens for n, item in world.submitted.items())


def test_a_whole_prompt_stops_a_pass_of_open_ones() -> None:
    """Also one of its class; another open one does not."""
    for is_open, first in ((False, 1), (True, 0)):
        world = World(load_policy("qllm2"))
        stream(world, LS, [(1, 400, 1), (1, 1, 10_000)])
        if is_open:
            stream(world, LS, [(1, 40, 2), (1, 1, 10_000)])
        else:
            world.submit(LS, 40, 1, at_ns=2 * NS_PER_MS)
        while not any(isinstance(e, trace.Ran) and e.why == "done" for e in world.record):
            world.step()
        done = next(e for e in world.record if isinstance(e, trace.Ran) and e.why == "done")
        planned = {e.frame_id: e for e in world.record if isinstance(e, trace.Planned)}
        assert planned[done.frame_id].rows[0].request_id == first


def order_of(policy: str, made: list[list[tuple[float, int, float]]]) -> list[int]:
    """In which order prompts that all wait are planned, one at a time."""
    world = World(load_policy(policy), replace(LIMITS, max_num_seqs=1))
    world.submit(LS, 500, 1)  # they wait for it
    for steps in made:
        stream(world, LS, steps)
    world.run()
    planned = [e.rows[0].request_id for e in world.record if isinstance(e, trace.Planned)]
    return [n for n in dict.fromkeys(planned) if n]


def test_orders_of_lcas_and_mcps_and_first_come() -> None:
    first, second = [(1, 30, 0), (1, 10, 3)], [(1, 20, 1), (1, 10, 1)]
    assert order_of("qllm2", [first, second]) == [1, 2]  # the first came first
    assert order_of("lcas", [first, second]) == [2, 1]  # its last piece came last
    # of three that are open and computed in part, the one with most goes on first
    world = World(load_policy("mcps"), replace(LIMITS, max_num_seqs=1))
    numbers = [
        stream(world, LS, [(1, size, 0), (1, 10, 400), (1, 1, 1000)]) for size in (40, 90, 60)
    ]
    world.submit(LS, 500, 1, at_ns=399 * NS_PER_MS)
    world.run()
    later = [e for e in world.record if isinstance(e, trace.Planned) and e.at_ns > 399 * NS_PER_MS]
    order = [e.rows[0].request_id for e in later if e.rows[0].request_id in numbers][:3]
    assert order == [numbers[1], numbers[2], numbers[0]]


def test_the_last_piece_may_be_of_another_class_by_then() -> None:
    world = World(load_policy("qllm2"))
    number = stream(world, BE, [(1, 100, 1), (1, 10, 500)])
    world.step()
    for effect in world.scheduler.update(number, LS, None, world.clock.at_ns):
        world.loop.effects.apply(effect)
    world.run()
    assert world.finished[number] is FinishReason.LENGTH


def test_a_broken_front_end_hurts_its_own_request_alone() -> None:
    world = World(load_policy("qllm2"))
    closed = world.submit(LS, 30, 2)
    opened = stream(world, LS, [(1, 30, 1), (1, 5, 50)])
    longer = world.submit(LS, 0, 3, is_open=True)
    world.revise(closed, 3, 3, NS_PER_MS // 1000, is_open=False)
    world.revise(longer, 50, 3, 2 * NS_PER_MS, is_open=True)
    world.run()
    assert "was whole already" in str(world.errors[closed])
    assert "keeps 50 tokens of a prompt of 0" in str(world.errors[longer])
    assert world.finished[opened] is FinishReason.LENGTH


@settings(max_examples=50, deadline=None)
@given(
    keep=st.integers(0, 2**32 - 1),
    ids=st.lists(st.integers(0, 2**32 - 1), max_size=20),
    is_open=st.booleans(),
    name=st.text(max_size=8),
)
def test_a_record_is_what_was_written(keep: int, ids: list[int], is_open: bool, name: str) -> None:
    rest = Submission(
        request_id=5, name=name, priority=LS, token_ids=tuple(ids),
        sampling=SamplingParams(seed=3, stop=("x",)), stop_ids=frozenset({2}), max_tokens=4,
        slo=Slo(1.0, None), arrival_ns=7, deadline_ns=None, is_open=is_open,
    )  # fmt: skip
    item = Revision(keep, rest)
    flags, body = encode_revision(item)
    assert decode_revision(Record(REVISE_KIND, flags, body + b"\0" * 32)) == item
    with pytest.raises((ValueError, IndexError, struct.error)):
        decode_revision(Record(REVISE_KIND, flags, body[:100]))


# -- workloads and the simulator


@pytest.mark.parametrize(("name", "tokens", "seconds"), [("S13", 9100, 9.9), ("S14", 13_000, 4.5)])
def test_retrieval_has_the_lengths_and_the_gaps_of_the_paper(
    name: str, tokens: int, seconds: float
) -> None:
    found = named_workload(name, seconds=600)
    mean = sum(r.num_prompt_tokens for r in found) / len(found)
    assert mean == pytest.approx(tokens, rel=0.1)
    assert sum(r.pieces[-1].after_s for r in found) / len(found) == pytest.approx(seconds, rel=0.2)
    for r in found:
        known = 0
        for after_s, keep, more in r.pieces:
            assert 0 <= keep <= known
            assert after_s >= 0
            assert name == "S14" or keep == known
            known = keep + more
        assert known == r.num_prompt_tokens == r.longest_prompt
        assert r.whole().at_s == r.at_s + r.pieces[-1].after_s
    assert named_workload(name, seconds=600, retrieval_scale=0.1)[0].pieces[-1].after_s < 3


def test_the_simulator_serves_pieces() -> None:
    pieces = (PieceSpec(0.0, 0, 100), PieceSpec(1.0, 100, 900), PieceSpec(2.0, 400, 700))
    spec = RequestSpec(at_s=0.5, priority=LS, num_prompt_tokens=1100, max_tokens=5, pieces=pieces)
    events = list(simulate([spec], "qllm2", H100).events)
    revised = [e for e in events if isinstance(e, trace.Revised)]
    assert [e.at_ns for e in revised] == [500_000_000, 1_500_000_000, 2_500_000_000]
    assert [(e.num_kept, e.num_lost) for e in revised] == [(0, 0), (100, 0), (400, 600)]
    planned = sum(r.num_tokens for e in events if isinstance(e, trace.Planned) for r in e.rows)
    assert planned == 100 + 900 + 700 + 4
    run = simulate([spec.whole()], "qllm2", H100)
    assert next(e for e in run.events if isinstance(e, trace.Arrived)).at_ns == 2_500_000_000


def test_moving_kv_takes_the_time_that_it_costs() -> None:
    """And is chosen where it is quicker, not where it is slower."""
    requests = named_workload("S13", seconds=20, load=0.9)
    from qllm.config import EngineConfig

    config = EngineConfig(max_kv_tokens=40_000, swap_kv_tokens=400_000)
    moved = {}
    for ns in (10, 10**7):
        costs = H100.model_copy(update={"costs": {**H100.costs, "move_token_ns": ns}})
        events = simulate(requests, "qllm2", costs, config=config).events
        moved[ns] = sum(isinstance(e, trace.SwappedOut) for e in events)
    assert moved[10] > 0
    assert moved[10**7] == 0


def test_a_live_client_says_that_it_sends_no_pieces() -> None:
    from qllm.workloads.capacity import REFERENCE

    with pytest.raises(ConfigError, match="come in pieces"):
        BenchLoad(name="S13").requests(REFERENCE)
