"""A fleet of engines: every request is answered once, whatever dies and whenever."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qllm import SamplingParams, Slo
from qllm.errors import (
    ConfigError,
    ContextLengthError,
    EngineClosedError,
    QueueFullError,
    RequestFailedError,
)
from qllm.fleet.client import FleetClient
from qllm.fleet.members import Backoff
from qllm.fleet.router import Entry, replayed
from qllm.fleet.routes import ROUTES, by_class, by_prefix, least, round_robin
from qllm.frontend.handle import Handle
from qllm.server.metrics import Metrics
from qllm.server.ops.fleet_metrics import FleetMetrics
from qllm.types import FinishReason, RequestStatus
from tests.support.fake_fleet import FakeFleet, answer

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 6), st.sampled_from(["LS", "BE"])),
        st.tuples(st.sampled_from(["step", "look"]), st.just(0), st.just("")),
        st.tuples(st.just("token"), st.integers(0, 20), st.just("")),
        st.tuples(st.just("unheard"), st.integers(0, 20), st.just("")),
        st.tuples(st.sampled_from(["kill", "close"]), st.integers(0, 2), st.just("")),
        st.tuples(st.sampled_from(["full", "room"]), st.integers(0, 2), st.just("")),
        st.tuples(st.just("update"), st.integers(0, 20), st.sampled_from(["LS", "BE"])),
    ),
    max_size=50,
)


class World:
    """A fleet, what was asked of it, and what must come of it."""

    def __init__(self, route: str) -> None:
        self.entries: list[Entry] = []
        self.fleet = FakeFleet(
            3, ROUTES[route], max_replays=1000, max_trials=1000, record=self.entries.append
        )
        self.asked: list[tuple[Handle, tuple[int, ...], int]] = []

    def happen(self, what: str, number: int, label: str) -> None:
        fleet = self.fleet
        if what == "submit":
            prompt = (len(self.asked), *range(70 * number))
            prompt = tuple(i % 97 for i in prompt)
            try:
                handle = fleet.engine.submit(prompt, label, number, sampling=GREEDY)
            except (EngineClosedError, QueueFullError):
                return
            self.asked.append((handle, prompt, number))
        elif what == "step":
            fleet.step()
        elif what == "look":
            fleet.look()
        elif what in ("token", "unheard"):
            self._token(number, is_heard=what == "token")
        elif what == "kill":
            fleet.kill(number)
        elif what == "close":
            fleet.close(number)
        elif what in ("full", "room") and fleet[number] is not None:
            fleet[number].rings.is_full = what == "full"
        elif what == "update" and self.asked:
            self.asked[number % len(self.asked)][0].update(priority=label)

    def _token(self, number: int, *, is_heard: bool) -> None:
        """Make one token of one request; it may be on its way when its engine dies."""
        live = [(client, n) for client in self.fleet.up() for n in client.rings.live]
        if live:
            client, request = live[number % len(live)]
            client.rings.make_token(request)
            if is_heard:
                client.deliver()

    def end(self) -> None:
        """Let everything come to its end."""
        for _ in range(40):
            for client in self.fleet.up():
                client.rings.is_full = False
                client.deliver()
            self.fleet.look()
            self.fleet.step()


@settings(max_examples=300, deadline=None)
@given(route=st.sampled_from(sorted(ROUTES)), events=EVENTS)
def test_every_request_is_answered_once_whatever_dies_and_whenever(
    route: str, events: list[tuple[str, int, str]]
) -> None:
    world = World(route)
    try:
        for event in events:
            world.happen(*event)
        world.end()
        for handle, prompt, max_tokens in world.asked:
            result = handle.result(timeout=0)
            assert result.token_ids == answer(prompt, max_tokens)
            assert result.finish_reason is FinishReason.LENGTH
            assert result.metrics.num_output_tokens == max_tokens
        router = world.fleet.client._routing.router
        assert router.num_open == 0
        assert {(e.ls.num, e.be.num, e.busy_s) for e in router.engines} == {(0, 0, 0.0)}
        assert world.fleet.engine.drain(0)
        choices = replayed(world.entries, ROUTES[route])
        assert [now for _, now in choices] == [then for then, _ in choices]
    finally:
        world.fleet.client.close()


@pytest.fixture
def fleet() -> Any:
    made = FakeFleet(3, round_robin)
    yield made
    made.client.close()


def submit(fleet: FakeFleet, count: int, max_tokens: int = 4, **more: Any) -> list[Handle]:
    prompts = [(i, 1, 2) for i in range(count)]
    return [fleet.engine.submit(p, "BE", max_tokens, sampling=GREEDY, **more) for p in prompts]


def test_requests_go_where_the_route_says(fleet: FakeFleet) -> None:
    submit(fleet, 6)
    assert [len(fleet[i].rings.live) for i in range(3)] == [2, 2, 2]
    numbers = [n for i in range(3) for n in fleet[i].rings.live]
    assert len({n & 0xFFFF for n in numbers}) == 6, "numbers are unique among engines"


def test_what_is_asked_of_a_request_reaches_the_engine_that_has_it(fleet: FakeFleet) -> None:
    first, second = submit(fleet, 2)
    assert fleet.engine.statuses([first, second]) == [RequestStatus.RUNNING] * 2
    second.update(priority="LS")
    assert [len(fleet[i].rings.updates) for i in range(3)] == [0, 1, 0]
    fleet.step()
    engines = {e["engine"]: (e["LS"], e["BE"]) for e in fleet.client.engines()}
    assert engines == {"0": (0, 1), "1": (1, 0), "2": (0, 0)}
    second.cancel()
    assert not fleet[1].rings.live
    fleet[1].deliver()
    fleet.kill(0)
    assert fleet.engine.statuses([first]) == [RequestStatus.WAITING]
    assert fleet.client.open_handles() == [first]
    first.pause()
    fleet.client.look_at(fleet.client.members["0"])
    assert first.status is RequestStatus.RUNNING
    assert sum(len(client.rings.paused) for client in fleet.up()) == 1, "the next engine was told"
    first.cancel()
    assert first.finish_reason is FinishReason.CANCELLED


def test_an_engine_that_is_closed_ends_no_request_that_its_clients_wait_for(
    fleet: FakeFleet,
) -> None:
    """Its own process is told to end, or whoever started it was killed: it cancels all it has."""
    handles = submit(fleet, 6)
    fleet.step()
    handles[0].cancel()
    fleet.close(0)
    assert handles[0].result(timeout=0).finish_reason is FinishReason.CANCELLED
    for _ in range(8):
        fleet.look()
        fleet.step()
    for i, handle in enumerate(handles[1:], 1):
        assert handle.result(timeout=0).token_ids == answer((i, 1, 2), 4)
    assert fleet.client.engines()[0]["taken"] == 1


def test_a_prompt_that_grows_stays_with_its_engine_and_moves_with_it(fleet: FakeFleet) -> None:
    opened = fleet.engine.open("BE", [7] * 20)
    opened.append([8] * 20)
    holder = next(i for i in range(3) if fleet[i].rings.live)
    fleet.kill(holder)
    opened.append([9] * 20)
    fleet.look()
    handle = opened.send(4, sampling=GREEDY)
    for _ in range(4):
        fleet.step()
    prompt = (*[7] * 20, *[8] * 20, *[9] * 20)
    assert handle.result(timeout=0).token_ids == answer(prompt, 4)


def test_what_kills_every_engine_ends_after_three(fleet: FakeFleet) -> None:
    poison, *others = submit(fleet, 3)
    fleet.is_there = dict.fromkeys(fleet.is_there, False)
    for _ in range(3):
        holder = next(c for c in fleet.up() if poison.number in c.rings.live)
        holder.die()
        fleet.is_there = {**fleet.is_there, "0": True}
        fleet.look()
        fleet.look()
        for _ in range(4):
            for client in fleet.up():
                for number in list(client.rings.live):
                    if number != poison.number:
                        client.rings.make_token(number)
                client.deliver()
    with pytest.raises(RequestFailedError, match="3 engines died while they had this request"):
        poison.result(timeout=0)
    assert [handle.result(timeout=0).finish_reason for handle in others] == [
        FinishReason.LENGTH
    ] * 2


def test_without_an_engine_nothing_is_taken_and_what_waits_goes_on_later(fleet: FakeFleet) -> None:
    (handle,) = submit(fleet, 1)
    late = fleet.engine.submit((5,), "BE", 4, sampling=GREEDY, timeout_s=1e-6)
    for name in fleet.is_there:
        fleet.is_there[name] = False
        fleet.kill(name)
    fleet.look()
    fleet.look()
    with pytest.raises(EngineClosedError, match=r"none of 3 engines serves \(0: nobody answers"):
        fleet.engine.submit((1,), "LS", 4)
    assert fleet.client.back_in_s == 1
    assert handle.status is RequestStatus.WAITING
    assert late.result(timeout=0).finish_reason is FinishReason.TIMEOUT
    fleet.is_there["2"] = True
    fleet.look()
    for _ in range(4):
        fleet.step()
    assert handle.result(timeout=0).token_ids == answer((0, 1, 2), 4)
    assert [e["up"] for e in fleet.client.engines()] == [False, False, True]


def test_an_engine_that_drains_or_is_full_is_passed_over(fleet: FakeFleet) -> None:
    fleet[0].drains = True
    fleet[1].rings.num_waiting = fleet[1].config.max_waiting
    submit(fleet, 3)
    assert [len(fleet[i].rings.live) for i in range(3)] == [0, 0, 3]
    fleet[2].rings.num_waiting = fleet[2].config.max_waiting
    with pytest.raises(QueueFullError, match="requests wait already"):
        submit(fleet, 1)
    fleet[1].rings.num_waiting = 0
    fleet[1].rings.is_full = True
    with pytest.raises(QueueFullError, match="all of 2 engines have full queues"):
        submit(fleet, 1)
    assert fleet.client.engines()[1]["BE"] == 0, "what was not taken is not counted"


def test_a_request_that_one_ring_has_no_room_for_goes_to_the_next(fleet: FakeFleet) -> None:
    fleet[0].rings.is_full = True
    submit(fleet, 4)
    assert [len(fleet[i].rings.live) for i in range(3)] == [0, 2, 2]
    assert [e["BE"] for e in fleet.client.engines()] == [0, 2, 2]
    for i in range(3):
        fleet[i].rings.is_full = True
    with pytest.raises(QueueFullError):
        submit(fleet, 1)


def test_a_flapping_engine_is_held_out_longer_each_time() -> None:
    fleet = FakeFleet(2, least, backoff=Backoff(first_s=100, cap_s=350, calm_s=600))
    member = fleet.client.members["0"]
    waits = []
    for _ in range(4):
        dead = fleet["0"]
        fleet.kill("0")
        fleet.client.look_at(member)
        assert dead.rings.is_closed, "nothing more is heard of it"
        waits.append(member.next_s - member._up_s)
        member.next_s += 10**6
        assert fleet.client.back_in_s > 10**5, "clients are told so"
        member.next_s -= 10**6
        fleet.look()
        assert member.client is None, "it is not tried before its time"
        member.next_s = 0
        fleet.look()
        assert member.client is not None
    assert [round(wait, -1) for wait in waits] == [100, 200, 350, 350]
    member._up_s -= 601
    fleet.kill("0")
    fleet.client.look_at(member)
    assert round(member.next_s - member._up_s - 601, -1) == 100, "it was calm for long enough"
    assert fleet.client.engines()[0]["met"] == 5
    fleet.client.close()


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"info": {"weights": "other"}}, "weights is 'other' there and 'w' here"),
        ({"info": {"software": "old"}}, "software is 'old' there"),
        ({"info": {"vocabulary": "v"}}, "vocabulary is 'v' there and None here"),
        ({"info": {"kernels": {"experts": "avx2"}}}, "kernels in use is"),
        ({"config": {"exactness": "batch-invariant"}}, "exactness is 'batch-invariant' there"),
        ({"config": {"max_kv_tokens": 32}}, "max_kv_tokens is 32 there and 65536 here"),
        ({"policy": "Fcfs()"}, "policy is"),
    ],
)
def test_engines_that_differ_are_refused_with_words(
    told: dict[str, Any], said: str, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.told["1"] = told
    fleet.kill("1")
    fleet.look()
    fleet.look()
    assert fleet.client.members["1"].client is None
    why = fleet.client.engines()[1]["why"]
    assert said in why
    assert "the engine at 1 cannot serve beside that at 0" in why
    met: list[Any] = []

    def make(self: Any, name: str) -> Any:
        found = fleet.told.get(name, {}) if name == "1" else {}
        met.append(original(self, name) if not found else told_client(found))
        return met[-1]

    original = FakeFleet._meet
    monkeypatch.setattr(FakeFleet, "_meet", make)
    with pytest.raises(ConfigError, match="cannot serve beside"):
        FakeFleet(2, least)
    assert [client._closing for client in met] == [True, True]


def told_client(told: dict[str, Any]) -> Any:
    from tests.support.fake_fleet import FakeClient

    return FakeClient(9, **told)


def test_settings_of_one_engine_may_differ(fleet: FakeFleet) -> None:
    fleet.told["1"] = {"config": {"kv_dir": "/somewhere", "record": True, "conformance": False}}
    fleet.kill("1")
    fleet.look()
    fleet.look()
    assert fleet.client.members["1"].client is not None


def test_sizes_that_an_engine_chose_may_differ_and_the_smallest_is_promised() -> None:
    fleet = FakeFleet(3, round_robin)
    chosen: dict[str, Any] = {"info": {"chosen": ("max_kv_tokens", "prefix_cache_tokens")}}
    told = [{"max_kv_tokens": 1024, "prefix_cache_tokens": 4096}, {"max_kv_tokens": 512}]
    longest = [fleet.engine.config.max_kv_tokens]
    for number, config in enumerate(told, 1):
        fleet.told[str(number)] = {**chosen, "config": config}
        fleet.kill(number)
        fleet.look()
        fleet.look()
        assert fleet[number] is not None
        longest.append(fleet.engine.config.max_kv_tokens)
    assert longest == [65536, 1024, 512]
    prompt = [1] * 600
    with pytest.raises(ContextLengthError, match=r"shorter than 512 \(max_kv_tokens\)"):
        fleet.engine.submit(prompt, "BE", 4, sampling=GREEDY)
    fleet.kill(2)
    fleet.look()
    with pytest.raises(ContextLengthError):
        fleet.engine.submit(prompt, "BE", 4, sampling=GREEDY)
    fleet.client.close()


def test_kept_kv_is_deleted_everywhere_or_it_is_said_where_not(fleet: FakeFleet) -> None:
    assert fleet.engine.delete_kv("salt") == 6
    fleet.engine.reset_prefix_cache()
    assert all(c.asked == ["delete_kv", "reset_prefix_cache"] for c in fleet.up())
    fleet.is_there["1"] = False
    fleet.kill("1")
    assert fleet.engine.delete_kv("salt") == 4, "it had no file: its KV is gone"
    fleet.client.members["1"].keeps_file = True
    with pytest.raises(EngineClosedError, match="1 could not be asked and may have KV in a file"):
        fleet.engine.delete_kv("salt")
    assert [len(c.asked) for c in fleet.up()] == [4, 4]


def test_the_prefix_cache_that_was_reset_decides_nothing() -> None:
    fleet = FakeFleet(2, by_prefix)
    prompt = tuple(i % 97 for i in range(300))
    for _ in range(3):
        fleet.engine.submit(prompt, "LS", 1, sampling=GREEDY)
        fleet.step()
    assert [e["sent"] for e in fleet.client.engines()] == [3, 0]
    fleet.engine.reset_prefix_cache()
    fleet.engine.submit(prompt, "LS", 1, sampling=GREEDY)
    assert [e["sent"] for e in fleet.client.engines()] == [3, 1]
    fleet.client.close()


def test_costs_are_asked_and_slo_and_deadline_travel(fleet: FakeFleet) -> None:
    member = fleet.client.members["0"]
    fleet.client.look_at(member, asks_costs=True)
    assert fleet.client._routing.router.engines[0].costs.boundary == pytest.approx(50)
    slo = Slo(ttft_ms=50)
    before = fleet[0].now_ns()
    fleet.engine.submit((1,), "LS", 4, slo=slo, timeout_s=100)
    (item,) = fleet[0].rings.live.values()
    assert item.slo == slo
    assert before <= item.arrival_ns <= fleet[0].now_ns(), "on the clock of the engine"
    assert item.deadline_ns == item.arrival_ns + 100 * 10**9


def test_a_route_that_raises_hangs_nothing(fleet: FakeFleet) -> None:
    def raises(*_: Any) -> Any:
        raise ZeroDivisionError

    broken = FakeFleet(2, raises)
    handles = submit(broken, 4)
    for _ in range(4):
        broken.step()
    assert [len(handle.result(timeout=0).token_ids) for handle in handles] == [4] * 4
    assert broken.client.num_route_errors == 4
    broken.client.close()


def test_counts_of_engines_that_are_gone_stay_counted(fleet: FakeFleet) -> None:
    stats = fleet.engine.stats()
    assert (stats["num_preemptions"], stats["kv_blocks"], stats["num_waiting"]) == (9, 30, 0)
    assert stats["ring_use"] == {"LS": 0.0, "BE": 0.5}
    assert stats["preempt_latencies_ms"] == [1.0, 2.0, 3.0] * 3
    fleet.kill("1")
    fleet.is_there["1"] = False
    fleet.look()
    stats = fleet.engine.stats()
    assert (stats["num_preemptions"], stats["kv_blocks"]) == (9, 20)
    fleet.is_there["1"] = True
    fleet.look()
    assert fleet.engine.stats()["num_preemptions"] == 12
    assert fleet.engine.stats()["preempt_latencies_ms"] == [1.0, 2.0, 3.0] * 4


def test_what_is_for_one_engine_is_refused(fleet: FakeFleet) -> None:
    engine = fleet.engine
    for call in (
        lambda: engine.call(len),
        lambda: engine.checkpoint("x"),
        lambda: engine.restore("x"),
        lambda: engine.trace,
    ):
        with pytest.raises(ConfigError, match="is for one engine, and this front end has several"):
            call()


def test_a_closed_fleet_ends_everything(fleet: FakeFleet) -> None:
    first, _ = submit(fleet, 2)
    fleet.kill("0")
    fleet.engine.close()
    fleet.engine.close()
    assert first.finish_reason is FinishReason.CANCELLED
    with pytest.raises(EngineClosedError, match="the fleet was closed"):
        submit(fleet, 1)


def test_a_fleet_that_drains_takes_nothing(fleet: FakeFleet) -> None:
    (handle,) = submit(fleet, 1)
    assert not fleet.engine.drain(0)
    with pytest.raises(EngineClosedError, match="drains"):
        submit(fleet, 1)
    for _ in range(4):
        fleet.step()
    assert len(handle.result(timeout=0).token_ids) == 4
    assert fleet.engine.drain(0)


def test_one_address_comes_once() -> None:
    with pytest.raises(ConfigError, match="the engine at a:1 is named twice"):
        FleetClient.connect(["a:1", "b:1", "a:1"], by_class)


def test_metrics_of_an_engine_that_is_named_no_longer_are_gone() -> None:
    """Replicas of Ray have a name of their own each, and do not come back."""

    def told(name: str, sent: int) -> dict[str, Any]:
        counts = {"sent": sent, "taken": 0, "moved": 0, "met": 1, "LS": 2, "BE": 0}
        return {"engine": name, "up": True, **counts}

    engines = [told("a", 3), told("b", 4)]
    fleet: Any = SimpleNamespace(engines=lambda: engines, num_route_errors=0)
    metrics = Metrics("m")
    fleets = FleetMetrics(metrics, "m", fleet)
    fleets.observe()
    text = metrics.render().decode()
    assert 'qllm:fleet_engine_up{engine="a",model_name="m"} 1.0' in text
    assert 'qllm:fleet_requests_open{class="LS",engine="b",model_name="m"} 2.0' in text
    engines[:] = [told("b", 6), told("c", 1)]
    fleets.observe()
    text = metrics.render().decode()
    assert 'engine="a"' not in text
    assert 'qllm:fleet_requests_sent_total{engine="b",model_name="m"} 6.0' in text
    assert 'qllm:fleet_requests_sent_total{engine="c",model_name="m"} 1.0' in text
    engines[:] = [told("a", 1)]
    fleets.observe()
    assert (
        'qllm:fleet_requests_sent_total{engine="a",model_name="m"} 1.0' in metrics.render().decode()
    )


def test_clients_are_told_the_soonest_time_at_which_an_engine_is_tried() -> None:
    fleet = FakeFleet(2, least, backoff=Backoff(first_s=100))
    for name in ("0", "1"):
        fleet.is_there[name] = False
        fleet.kill(name)
        fleet.look()
    first = fleet.client.members["0"]
    first.next_s += 10**6
    assert fleet.client.back_in_s <= 100
    first.next_s -= 2 * 10**6
    assert fleet.client.back_in_s == 1, "it is due"
