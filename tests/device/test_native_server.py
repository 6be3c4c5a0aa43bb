"""The native server against the Python engine: the same records for the same rings."""

import random
from collections import Counter
from typing import Any

import pytest

from qllm.device import serving
from qllm.device.native import load_native
from qllm.device.rank import compile_host
from qllm.errors import ConfigError
from qllm.ingress import CONTROL, layout
from qllm.ingress.front_end import TokenAt
from qllm.ingress.layout import NUMBER_BITS
from qllm.ingress.memory import FrontEndMemory
from qllm.plan import ANY_ARRIVAL, NO_CUTS, ModelShape
from qllm.plugins import load_policy
from qllm.scheduler.decision import Limits
from qllm.types import NS_PER_MS, FinishReason, Grain, Priority, SamplingParams, Slo
from tests.support.differential import random_costs, random_shape
from tests.support.on_device import DeviceCalls
from tests.support.ring_world import SHIPPED, RingWorld, tokens_alone, world
from tests.support.watching import has_changed

LS, BE = Priority.LS, Priority.BE
# -- record by record


def random_limits(rng: random.Random, longest: int, exact: bool) -> Limits:
    block_size = rng.choice([1, 16])
    fit = -(-(longest + 16) // block_size)
    return Limits(
        max_num_seqs=rng.choice([1, 2, 3, 8]),
        max_step_tokens=rng.choice([32, 256, 4096]),
        block_size=block_size,
        num_blocks=rng.choice([fit, fit + fit // 3, 2 * fit, 8 * fit]),
        grain=rng.choice([Grain.STEP, Grain.LAYER, Grain.EXPERT, Grain.EXPERT]),
        max_segment_ns=rng.choice([NS_PER_MS // 2, 5 * NS_PER_MS]),
        batch_invariant=exact,
    )


def random_world(policy: Any, seed: str, native: bool, **server: Any) -> tuple[RingWorld, int]:
    """A world with a random load in which nothing is plenty, and how many requests it has."""
    rng = random.Random(seed)
    longest, exact = rng.choice([20, 60, 200, 480]), rng.random() < 0.2
    layers = rng.choice([3, 7])
    made = RingWorld(
        policy,
        native,
        random_limits(rng, longest, exact),
        shape=ModelShape(layers, 4, 2, (False, *[True] * (layers - 1)), 97, 4096),
        cuts=NO_CUTS._replace(max_cost=70.0, attn_cost_per_kv=0.01, max_block=64)
        if exact
        else NO_CUTS,
        costs=random_costs(rng),
        num_front_ends=rng.choice([1, 2, 3]),
        capacity=64,
        **server,
    )
    at_ns, rate = 0, rng.choice([1, 10, 50]) * NS_PER_MS
    classes: list[int] = rng.choice([[0, 10], [10], [-3, 0, 4, 10]])
    count = rng.choice([3, 6, 12, 20])
    for number in range(count):
        at_ns += int(rng.expovariate(1) * rate)
        chance = rng.random()
        request_id = made.submit(
            number,
            rng.choice(classes),
            rng.randint(1, longest),
            rng.choice([1, 3, 10]),
            at_ns=at_ns,
            front_end=rng.randrange(len(made.blocks)),
            deadline_ns=at_ns + int(rng.random() * 200 * NS_PER_MS) if chance < 0.1 else None,
            slo=rng.choice([Slo(), Slo(), Slo(50.0, 5.0), Slo(None, 40.5), Slo(900.0, None)]),
            stop_ids=frozenset(rng.sample(range(97), rng.choice([0, 0, 8]))),
            sampling=SamplingParams(seed=3, ignore_eos=rng.random() < 0.5),
        )
        if 0.1 <= chance < 0.3:
            reason = rng.choice([FinishReason.CANCELLED, FinishReason.STOP])
            made.cancel(request_id, at_ns + int(rng.random() * 60 * NS_PER_MS), reason)
        elif 0.3 <= chance < 0.4:
            made.runner.poisoned[request_id] = rng.randint(1, 2)
    return made, count


def compare(make_policy: Any, seed: str, **server: Any) -> Counter[str]:
    """Run a trace through both engines; what it was made of."""
    runs = []
    for native in (False, True):
        made, count = random_world(make_policy(), seed, native, **server)
        made.run(count)
        runs.append((made.clock.at_ns, dict(made.records), made.shown, made.broken))
        made.close()
    assert runs[0] == runs[1], seed
    seen: Counter[str] = Counter()
    for records in runs[0][1].values():
        end = records[-1]
        seen[str(end.reason)] += 1
        for name in ("preemptions", "evictions", "evict_recomputed_tokens"):
            seen[name] += getattr(end.metrics, name)
        seen["retry_recomputed_tokens"] += end.metrics.retry_recomputed_tokens
        seen["parked"] += end.metrics.parked_ms > 0
        seen["stalled"] += end.metrics.max_stall_ms > 0
        seen["tokens"] += len(records) - 1
        seen["part"] += 0 < end.metrics.num_prefilled_tokens < end.metrics.num_prompt_tokens
    return seen


EVERYTHING = ["stop", "length", "cancelled", "timeout", "error", "preemptions", "evictions"]
EVERYTHING += ["evict_recomputed_tokens", "retry_recomputed_tokens", "parked", "stalled", "part"]


def test_every_record_of_any_shape_is_that_of_the_python_engine() -> None:
    seen: Counter[str] = Counter()
    for number in range(60):
        # a rank by service may evict in turns for ever: "any-1" does
        seen += compare(lambda n=number: random_shape(random.Random(n)), f"any-shape-{number}")
    assert all(seen[what] for what in EVERYTHING), seen


@pytest.mark.parametrize("name", SHIPPED)
def test_every_record_of_an_installed_policy_is_that_of_the_python_engine(name: str) -> None:
    seen: Counter[str] = Counter()
    for number in range(8):
        seen += compare(lambda: load_policy(name), f"{name}-{number}")
    assert seen["tokens"] > 100


def by_number(policy: Any) -> DeviceCalls:
    """The functions of scheduler and server, called as a kernel launch calls them."""
    rank, native = compile_host(policy), load_native()
    return DeviceCalls(
        lambda which, at, *n: int(native.call(at, rank.address, which, *n)),
        lambda which, server, at, *n: int(native.server_call(server, at, rank.address, which, *n)),
    )


def test_functions_called_by_number_give_the_same_records() -> None:
    seen: Counter[str] = Counter()
    for number in range(12):
        make = lambda n=number: random_shape(random.Random(n))  # noqa: E731
        seen += compare(make, f"number-{number}", calls=by_number)
    assert seen["preemptions"]
    assert seen["cancelled"]
    with world(calls=by_number) as w:
        at = w.server.memory.address, w.server.block.address
        assert load_native().server_call(*at, 0, len(serving.CALLS)) == -1
    with pytest.raises(TypeError, match="4 to 10 arguments, not 11"):
        load_native().server_call(*range(11))


@pytest.mark.slow  # fewer shapes: the test above
def test_every_record_of_any_shape_often() -> None:
    for number in range(1000):
        compare(lambda n=number: random_shape(random.Random(-n)), f"often-{number}")


# -- nothing plenty: slots, room in token rings


SMALL: dict[str, Any] = {"capacity": 12, "max_front_ends": 2, "ls_slots": 2}
PAGE = 4096


def test_what_has_no_slot_waits_in_its_ring_and_none_is_lost() -> None:
    requests = [(LS if n % 4 == 0 else BE, 5 + n % 30, 1 + n % 7) for n in range(150)]
    with world(**SMALL, ring_bytes=PAGE) as w:
        ids = [w.submit(n, *request, at_ns=n * 1000) for n, request in enumerate(requests)]
        while len(w.ends()) < len(ids):
            w.step()
            requests_held = w.server.block.array("requests")[list(w.server.live())]
            assert sum(requests_held["priority"] == BE) <= 12 - 2
        assert [w.tokens(i) for i in ids] == tokens_alone("qllm2", *requests)
        assert w.server.counters(0)["num_claimed"] == len(ids)


def test_be_requests_leave_slots_to_ls_requests() -> None:
    with world(**SMALL) as w:
        for n in range(40):
            w.submit(n, BE, 20, 60)
        for _ in range(5):
            w.step()
        late = w.submit(99, LS, 5, 1, at_ns=w.clock.at_ns)
        begin = w.clock.at_ns
        while late not in w.ends():
            w.step()
        assert len(w.ends()) < 20
        assert w.clock.at_ns - begin < 30 * NS_PER_MS


def test_a_front_end_that_never_reads_holds_up_no_other() -> None:
    requests = [(BE, 5, 40)] * 30
    with world(**SMALL, num_front_ends=2, ring_bytes=PAGE) as w:
        w.reads = {1}
        stuck = [w.submit(n, *request) for n, request in enumerate(requests)]
        for _ in range(400):
            w.step()
        assert w.server.counters(0)["owing"] == w.server.counters(0)["held"] == 7
        begin = w.clock.at_ns
        ids = [
            w.submit(n, *request, at_ns=begin, front_end=1) for n, request in enumerate(requests)
        ]
        w.run(len(ids))
        want = tokens_alone("qllm2", *requests)
        assert [len(w.tokens(i)) for i in ids] == [40] * 30
        w.reads = {0, 1}
        w.run(len(ids) + len(stuck))
        assert [w.tokens(i) for i in stuck] == want
        for request_id in (*ids, *stuck):
            at_ns = [r.at_ns for r in w.records[request_id] if isinstance(r, TokenAt)]
            assert at_ns == sorted(at_ns)
            assert not isinstance(w.records[request_id][-1], TokenAt)


def test_times_of_tokens_that_had_to_wait_are_those_of_sampling() -> None:
    runs = []
    for reads in ({0}, set[int]()):
        with world(ring_bytes=PAGE) as w:
            w.reads = reads
            ids = [w.submit(n, BE, 9, 90) for n in range(3)]
            for _ in range(150):
                w.step()
            w.reads = {0}
            w.run(len(ids))
            runs.append(dict(w.records))
    assert runs[0] == runs[1]


def test_requests_that_wait_for_room_take_turns() -> None:
    with world(ring_bytes=PAGE) as w:
        w.reads = set()
        ids = [w.submit(n, BE, 9, 200) for n in range(5)]
        for _ in range(400):
            w.step()
        w.reads = {0}
        for _ in range(6):  # 63 records each time
            w.receive()
            w.server.flush()
        w.receive()
        assert min(len(w.tokens(i)) for i in ids) > 64
        w.run(5)


# -- cancels and deadlines


def test_a_cancel_finds_a_request_that_waits_in_its_ring() -> None:
    with world(**SMALL) as w:
        ids = [w.submit(n, BE, 20, 30) for n in range(100)]
        for request_id in ids[60:]:
            w.cancel(request_id, 2 * NS_PER_MS)
        w.run(len(ids))
        reasons = w.reasons()
        assert [reasons[i] for i in ids[:60]] == [FinishReason.LENGTH] * 60
        assert [reasons[i] for i in ids[60:]] == [FinishReason.CANCELLED] * 40
        assert not any(w.tokens(i) for i in ids[60:])


@pytest.mark.parametrize("backwards", [False, True])
def test_more_cancels_than_are_kept_wait_in_their_ring(backwards: bool) -> None:
    with world(**SMALL) as w:
        ids = [w.submit(n, BE, 4, 2) for n in range(600)]
        gone = ids[30:]
        for request_id in reversed(gone) if backwards else gone:
            w.cancel(request_id, NS_PER_MS // 2, FinishReason.STOP)
        w.run(len(ids))
        late = [i for i in gone if w.reasons()[i] is not FinishReason.STOP]
        assert len(late) <= (len(gone) - serving.MOST_PENDING if backwards else 0)
        w.step()
        assert w.server.memory.array("front_ends")["num_pending"][0] == 0


def test_a_cancel_of_a_request_that_ended_or_never_was_changes_nothing() -> None:
    with world() as w:
        first = w.submit(0, LS, 5, 3)
        w.run(1)
        for request_id in (first, 77, 78):
            w.cancel(request_id, w.clock.at_ns)
        w.submit(1, LS, 5, 3, at_ns=w.clock.at_ns)
        w.run(2)
        assert w.reasons() == {0: FinishReason.LENGTH, 1: FinishReason.LENGTH}
        assert w.broken == []


def test_a_request_past_its_deadline_in_the_ring_ends_without_a_slot() -> None:
    with world(**SMALL) as w:
        ids = [w.submit(n, BE, 20, 40) for n in range(30)]
        late = w.submit(99, BE, 20, 40, deadline_ns=30 * NS_PER_MS)
        w.run(31)
        assert w.reasons()[late] is FinishReason.TIMEOUT
        assert all(w.reasons()[i] is FinishReason.LENGTH for i in ids)
        assert w.server.counters(0)["num_refused"] == 1


def test_a_live_request_ends_when_its_deadline_is_now() -> None:
    with world() as w:
        late = w.submit(0, BE, 20, 400, deadline_ns=100 * NS_PER_MS)
        later = w.submit(1, BE, 20, 400, deadline_ns=101 * NS_PER_MS)
        w.step()
        assert w.server.next_deadline_ns == 100 * NS_PER_MS
        w.clock.at_ns = 100 * NS_PER_MS
        w.step()
        assert w.reasons() == {late: FinishReason.TIMEOUT}
        assert w.server.next_deadline_ns == 101 * NS_PER_MS
        w.cancel(later, w.clock.at_ns)
        w.run(2)
        assert w.server.next_deadline_ns is None


# -- control block, front ends that come and go


def test_drain_and_stop_words_reach_the_loop() -> None:
    with world() as w:
        ids = [w.submit(n, BE, 5, 50) for n in range(3)]
        w.step()
        w.control.draining = True
        assert w.server.asked == serving.SERVE  # some live
        w.run(3)
        assert w.server.asked == serving.DRAINED
        w.submit(3, BE, 5, 3, at_ns=w.clock.at_ns)
        w.arrive()
        assert w.server.asked == serving.SERVE  # one is in a ring
        w.step()
        for n in range(4, 30):
            w.submit(n, BE, 5, 50, at_ns=w.clock.at_ns)
        w.arrive()
        w.front_ends[0].stop()
        w.step()
        w.receive()
        assert w.loop.closing
        reasons = [w.reasons()[n] for n in range(3, 30)]
        assert reasons == [FinishReason.CANCELLED] * 27
        assert w.reasons()[ids[0]] is FinishReason.LENGTH


def test_the_word_is_what_claim_would_take() -> None:
    with world(**SMALL, num_front_ends=2) as w:
        word = w.loop.stop
        assert word.word == ANY_ARRIVAL
        assert not has_changed(word.watch())
        w.submit(0, BE, 5, 3, at_ns=1)
        w.submit(1, LS, 5, 3, at_ns=2, front_end=1)
        w.clock.at_ns = 2
        w.arrive()
        assert has_changed(word.watch())
        assert (word.word, word.lowered_ns) == (LS, 2)
        assert w.server.memory.get("bell_seen") == w.control.words[w.control.BELL]
        assert not has_changed(word.watch())
        w.loop._take()
        assert word.word == ANY_ARRIVAL
        w.cancel(0, 2)
        w.arrive()
        assert word.word == CONTROL
        w.loop._take()
        for n in range(2, 40):
            w.submit(n, BE, 5, 300, at_ns=2)
        w.arrive()
        w.loop._take()
        w.submit(40, BE, 5, 3, at_ns=2)
        w.arrive()
        assert word.word == ANY_ARRIVAL  # no slot: it would stop a program for nothing
        w.submit(41, LS, 5, 3, at_ns=2)
        w.arrive()
        assert word.word == LS


def test_heartbeat_and_counters_are_shown() -> None:
    with world() as w:
        for n in range(20):
            w.submit(n, BE, 5, 9)
        w.clock.at_ns = 5
        w.step()
        assert w.control.heartbeat_ns == 5
        steps, live, waiting = w.control.read_stats()
        assert (steps, live, waiting) == (1, 20, 12)
        assert w.control.words[w.control._VERSION] == 2
        assert w.front_ends[0].num_waiting == 12
        w.run(20)
        counters = w.server.counters(0)
        assert counters["num_ended"] == counters["num_claimed"] == 20
        assert counters["num_written"] == 20 * 10
        assert w.server.memory.get("num_tokens") == 20 * 9


def test_a_front_end_that_left_frees_its_slots_and_another_comes() -> None:
    with world(**SMALL, num_front_ends=2) as w:
        for n in range(9):
            w.submit(n, BE, 20, 90)
            w.submit(n, BE, 20, 9, front_end=1)
        for _ in range(6):
            w.step()
        w.loop.detach(0)
        w.reads = {1}
        w.check()
        assert w.server.memory.get("num_held") == len(list(w.server.live()))
        assert all(i >> NUMBER_BITS == 1 for i in w.runner.requests)
        w.run(9)
        block = FrontEndMemory.create(2, (PAGE,) * 4)
        w.blocks.append(block)
        w._attach(block)
        w.reads = {2}
        fresh = w.submit(5, LS, 5, 2, at_ns=w.clock.at_ns, front_end=2)
        w.run(10)
        assert w.reasons()[fresh] is FinishReason.LENGTH
        with pytest.raises(ConfigError, match="all 2 front ends are attached"):
            w._attach(block)


# -- settings, headers


def test_the_headers_are_made_from_the_layouts() -> None:
    assert serving.HEADER.read_text() == serving.emit_header()
    assert layout.RECORDS.read_text() == layout.emit_records()


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="capacity=4 must exceed the 4 slots kept"):
        RingWorld(load_policy("fcfs"), True, capacity=4, max_front_ends=4, ls_slots=1)


def test_an_old_extension_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "VERSION", 99)
    with pytest.raises(ConfigError, match="of its serving, not 99"):
        RingWorld(load_policy("fcfs"), True)
