"""What a live page sees of the passes, and that a loop keeps events only while somebody looks."""

import json
from collections.abc import Callable
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from qllm.engine.watch import LEASE_NS, MAX_LISTED, Watch
from qllm.floor import NO_FLOOR
from qllm.llm import QLLMEngine
from qllm.plan import Row
from qllm.record.timeline import MAX_NEW, MAX_REQUESTS, Timeline, track_of
from qllm.record.trace import (
    Arrived,
    Dropped,
    Event,
    Evicted,
    Finished,
    Parked,
    Planned,
    Ran,
    Replaced,
    Resumed,
    SwappedOut,
    Token,
)
from qllm.scheduler.be_share import BeShare
from qllm.scheduler.program import Index
from qllm.types import NS_PER_MS, FinishReason, Grain, Slo
from tests.support.waiting import wait_for

LAYERS = 8
BE_SHARE = BeShare(NO_FLOOR)
ZERO = Index(0, 0)


def ms(value: float) -> int:
    return int(value * NS_PER_MS)


def arrived(number: int, at: float, priority: int = 10) -> Arrived:
    return Arrived(
        at_ns=ms(at), request_id=number, priority=priority, num_prompt_tokens=5, max_tokens=9,
        name=f"r{number}", token_ids=(1, 2, 3, 4, 5),
    )  # fmt: skip


def planned(frame: int, at: float, *numbers: int, replaces: tuple[int, ...] = ()) -> Planned:
    rows = tuple(Row(number, 0, 5, 0, LAYERS) for number in numbers)
    return Planned(
        at_ns=ms(at), frame_id=frame, rows=rows, grain=Grain.EXPERT, stop_below=10,
        from_frames=replaces,
    )  # fmt: skip


def ran(frame: int, start: float, end: float, why: Any = "done") -> Ran:
    return Ran(
        start_ns=ms(start), at_ns=ms(end), frame_id=frame, start=ZERO, end=ZERO, why=why, segments=1
    )


def parked(
    frame: int, at: float, *numbers: int, layer: int = 3, inside: bool = False, since: float | None
) -> Parked:
    return Parked(
        at_ns=ms(at), frame_id=frame, request_ids=numbers, layer=layer, inside_layer=inside,
        arrival_ns=None if since is None else ms(since),
    )  # fmt: skip


def token(number: int, at: float) -> Token:
    return Token(at_ns=ms(at), request_id=number, token_id=7)


def fed(*events: Event) -> Timeline:
    timeline = Timeline()
    for event in events:
        timeline.feed(event)
    return timeline


def entries(timeline: Timeline, what: str) -> list[list[Any]]:
    return [entry[1:] for entry in timeline.since(0)[0] if entry[0] == what]


PREEMPTED: tuple[Event, ...] = (
    arrived(1, 0), planned(10, 1, 1), arrived(2, 20, 0), ran(10, 1, 22, "stopped"),
    parked(10, 22, 1, layer=3, inside=True, since=20), planned(11, 22, 2), ran(11, 22, 30),
    token(2, 30), Resumed(at_ns=ms(31), frame_id=10), ran(10, 31, 60), token(1, 60),
)  # fmt: skip


def watch_until(engine: QLLMEngine, condition: Callable[[Any], Any], told: Any = None) -> Any:
    """Watch an engine, from a look on, until a look fulfils a condition; return that look."""
    looks = [told or engine.watch()]

    def is_seen() -> bool:
        looks.append(engine.watch(looks[-1]["seq"]))
        return bool(condition(looks[-1]))

    wait_for(is_seen)
    return looks[-1]


def test_a_preemption_names_both_requests_and_when_the_first_resumed() -> None:
    timeline = fed(*PREEMPTED, token(1, 70))
    assert entries(timeline, "preempted") == [[22.0, 2.0, "BE", 3.5, 1, ["r1"], "LS", "r2"]]
    assert entries(timeline, "held") == [[22.0, 31.0, "BE", 3.5, True]]
    assert entries(timeline, "run") == [
        [1.0, 22.0, "BE", 0, 3.5, 1, 1, 5],
        [22.0, 30.0, "LS", 0, LAYERS, 1, 1, 5],
        [31.0, 60.0, "BE", 3.5, LAYERS, 1, 1, 5],
    ]
    assert entries(timeline, "first") == [[30.0, "LS", "r2", 10.0], [60.0, "BE", "r1", 60.0]]
    assert timeline.num_output_tokens == {"LS": 1, "BE": 2}
    assert timeline.num_pass_tokens == {"LS": 5, "BE": 5}
    assert timeline.num_preemptions == 1
    assert timeline.now() == {"parked": [], "running": None}


def test_it_made_room_for_the_most_urgent_of_the_next_pass() -> None:
    timeline = fed(*PREEMPTED[:3], arrived(3, 1), *PREEMPTED[3:5], planned(11, 22, 3, 2))
    assert entries(timeline, "preempted")[0][-2:] == ["LS", "r2"]


def test_what_is_parked_and_what_runs() -> None:
    timeline = fed(*PREEMPTED[:6])
    now = timeline.now()
    assert now["parked"] == [[22.0, "BE", 3.5, LAYERS, 1, True]]
    assert now["running"] == [22.0, "LS", 0, LAYERS, 1]


def test_the_end_of_a_slice_is_no_preemption() -> None:
    timeline = fed(
        arrived(1, 0), planned(10, 1, 1), ran(10, 1, 9, "slice"), parked(10, 9, 1, since=None),
        planned(12, 30, 1, replaces=(10,)),
    )  # fmt: skip
    assert entries(timeline, "preempted") == []
    assert entries(timeline, "held") == [[9.0, 30.0, "BE", 3.0, False]]


@pytest.mark.parametrize(
    "end",
    [
        Replaced(at_ns=ms(40), frame_id=10, by_frame_id=12),
        Dropped(at_ns=ms(40), frame_id=10, reason="dead"),
    ],
)
def test_a_parked_frame_that_ends_is_parked_no_longer(end: Event) -> None:
    timeline = fed(*PREEMPTED[:8], end)
    assert entries(timeline, "held") == [[22.0, 40.0, "BE", 3.5, True]]
    assert timeline.now()["parked"] == []


def test_small_passes_in_a_row_are_one_entry() -> None:
    events: list[Event] = [arrived(1, 0)]
    for n in range(10):
        events += [planned(n, n, 1), ran(n, n, n + 0.9)]
    timeline = fed(*events)
    assert entries(timeline, "run") == [[0.0, 9.9, "BE", 0, LAYERS, 10, 1, 50]]


@pytest.mark.parametrize(
    "second",
    [
        ran(2, 2, 9),  # a long one has a slope of its own
        ran(2, 9, 9.5),  # a gap between them
    ],
)
def test_other_passes_are_entries_of_their_own(second: Ran) -> None:
    timeline = fed(arrived(1, 0), planned(1, 0, 1), ran(1, 0, 1), planned(2, 1, 1), second)
    assert [entry[5] for entry in entries(timeline, "run")] == [1, 1]


def test_passes_of_two_lanes_are_not_joined() -> None:
    timeline = fed(
        arrived(1, 0), arrived(2, 0, 0), planned(1, 0, 1), ran(1, 0, 1), planned(2, 1, 2, 1),
        ran(2, 1, 2),
    )  # fmt: skip
    assert [(entry[2], entry[6]) for entry in entries(timeline, "run")] == [("BE", 1), ("LS", 2)]


def test_joined_passes_have_an_end() -> None:
    events: list[Event] = [arrived(1, 0)]
    for n in range(100):
        events += [planned(n, n, 1), ran(n, n, n + 0.9)]
    runs = entries(fed(*events), "run")
    assert 6 <= len(runs) <= 8
    assert sum(run[5] for run in runs) == 100


def test_an_answer_is_bounded_and_says_what_is_lost() -> None:
    timeline = fed(*(arrived(n, n) for n in range(MAX_NEW + 50)))
    new, num_lost = timeline.since(0)
    assert (len(new), num_lost, timeline.seq) == (MAX_NEW, 50, MAX_NEW + 50)
    assert new[-1][3] == f"r{MAX_NEW + 49}"


def test_a_reader_gets_what_came_since() -> None:
    timeline = fed(arrived(1, 0))
    _, lost = timeline.since(0)
    seq = timeline.seq
    timeline.feed(arrived(2, 1))
    assert ([entry[3] for entry in timeline.since(seq)[0]], lost) == (["r2"], 0)
    assert timeline.since(timeline.seq) == ([], 0)
    assert len(timeline.since(10_000)[0]) == 2  # the number of another engine


def test_what_is_remembered_of_requests_is_bounded() -> None:
    timeline = fed(*(arrived(n, n) for n in range(MAX_REQUESTS + 5)), token(0, 1e6))
    assert timeline.num_output_tokens == {"LS": 0, "BE": 0}  # forgotten, and nothing breaks


def test_ends_and_evictions_are_told() -> None:
    timeline = fed(
        arrived(1, 0, 5),
        Evicted(at_ns=ms(1), request_id=1, num_tokens_lost=4),
        SwappedOut(at_ns=ms(2), request_id=1, num_tokens=3),
        Finished(at_ns=ms(3), request_id=1, reason=FinishReason.STOP),
        Finished(at_ns=ms(4), request_id=99, reason=FinishReason.STOP),
    )
    assert timeline.since(0)[0][1:] == [
        ["evicted", 1.0, "class 5", "r1", 4],
        ["swapped out", 2.0, "class 5", "r1", 3],
        ["ended", 3.0, "class 5", "r1", "stop"],
    ]
    assert track_of(5) == "LS"


def test_events_of_frames_that_are_not_known_are_left_out() -> None:
    timeline = fed(
        ran(7, 0, 1), ran(7, 0, 1, "stopped"), parked(7, 1, 1, since=0),
        Resumed(at_ns=ms(2), frame_id=7),
    )  # fmt: skip
    assert timeline.since(0)[0] == []


def test_no_text_and_no_token_leaves() -> None:
    shown = json.dumps([fed(*PREEMPTED).since(0), fed(*PREEMPTED[:6]).now()])
    assert "token_ids" not in shown
    assert "[1, 2, 3, 4, 5]" not in shown


# -- a loop that is watched


def core(engine: QLLMEngine) -> tuple[Any, Watch]:
    client: Any = engine._client
    return client.loop, client._core._watch


@pytest.fixture
def thread_engine() -> Any:
    with QLLMEngine.from_pretrained("tiny", threads=1, run_in="thread") as engine:
        yield engine


def test_without_a_viewer_nothing_is_kept(thread_engine: QLLMEngine) -> None:
    loop, watch = core(thread_engine)
    thread_engine.submit([1, 2], max_tokens=2).result()
    assert loop.listeners == ()
    assert not watch._new


def test_a_look_starts_it_and_the_lease_ends_it(thread_engine: QLLMEngine) -> None:
    loop, watch = core(thread_engine)
    first = thread_engine.watch()
    assert (first["entries"], watch.is_on) == ([], True)
    thread_engine.submit([1, 2], max_tokens=2, request_id="mine").result()
    told = thread_engine.watch(first["seq"])
    assert [(entry[0], entry[3]) for entry in told["entries"] if "mine" in entry] == [
        ("arrived", "mine"),
        ("first", "mine"),
        ("ended", "mine"),
    ]
    assert told["output_tokens"] == {"LS": 2, "BE": 0}
    watch._until_ns = -LEASE_NS  # nobody has looked for long
    thread_engine.submit([1, 2], max_tokens=2).result()
    assert (watch.is_on, loop.listeners) == (False, ())
    again = thread_engine.watch(told["seq"])
    assert (again["entries"], watch.is_on) == ([], True)


def test_a_record_goes_on_when_the_lease_ends() -> None:
    with QLLMEngine.from_pretrained("tiny", threads=1, run_in="thread", record=True) as engine:
        _, watch = core(engine)
        engine.watch()
        watch._until_ns = -1
        engine.submit([1, 2], max_tokens=2).result()
        assert not watch.is_on
        before = len(engine.trace)
        engine.submit([1, 2], max_tokens=2).result()
        assert len(engine.trace) > before > 0


def test_a_look_knows_what_was_there_before_it() -> None:
    with QLLMEngine.from_pretrained("tiny", threads=1) as engine:
        slo = Slo(ttft_ms=5e5)
        handle = engine.submit([1] * 9, "BE", 3000, slo=slo, request_id="old", ignore_eos=True)
        next(iter(handle))
        told = engine.watch()
        row = told["requests"][0]
        assert (row["name"], row["class"], row["prompt_tokens"]) == ("old", "BE", 9)
        assert row["ttft_target_ms"] == 5e5
        assert 0 < row["ttft_ms"] < row["age_ms"]
        assert row["output_tokens"] > 0
        assert told["counts"] == [["BE", row["status"], 1]]
        assert "requests" not in engine.watch(told["seq"], whole=False)
        told = watch_until(engine, lambda told: told["output_tokens"]["BE"], told)
        assert not [entry for entry in told["entries"] if entry[0] == "first"]
        assert told["kv_blocks_used"] > 0
        handle.cancel()


def test_a_look_knows_what_was_parked_before_it() -> None:
    program = SimpleNamespace(
        rows=planned(7, 1, 1, 2).rows, layer_at=lambda index: 2, inside_layer=lambda index: True
    )
    frame = SimpleNamespace(program=program, index=ZERO, parked_ns=ms(5))
    scheduler = SimpleNamespace(
        frames={7: frame}, pool=SimpleNamespace(num_free=3), be_share=BE_SHARE
    )
    loop: Any = SimpleNamespace(
        now_ns=lambda: ms(9),
        listeners=(),
        live={},
        scheduler=scheduler,
        num_preemptions=0,
        drafts=None,
    )
    config: Any = SimpleNamespace(num_blocks=8, max_segment_ms=1, min_be_share=0)
    runner: Any = SimpleNamespace(
        segments=SimpleNamespace(longest_ns=0), shape=SimpleNamespace(num_layers=LAYERS)
    )
    watch = Watch(loop, config, runner, None)
    assert watch.look(0, False)["parked"] == [[5, "BE", 2.5, LAYERS, 2, False]]
    loop.listeners[0](Resumed(at_ns=ms(10), frame_id=7))
    told = watch.look(0, False)
    assert (told["parked"], told["running"]) == ([], [10, "BE", 2.5, LAYERS, 2])
    assert told["entries"] == [["held", 5, 10, "BE", 2.5, False]]


def test_a_look_just_before_the_watch_leaves_keeps_it_on() -> None:
    """The loop's thread finds the lease over; before it leaves, another thread looks."""
    clock, looked = [ms(9)], []
    loop: Any = SimpleNamespace(
        now_ns=lambda: clock[0],
        listeners=(),
        live={},
        scheduler=SimpleNamespace(frames={}, pool=SimpleNamespace(num_free=3), be_share=BE_SHARE),
        num_preemptions=0,
        drafts=None,
    )
    config: Any = SimpleNamespace(num_blocks=8, max_segment_ms=1, min_be_share=0)
    runner: Any = SimpleNamespace(
        segments=SimpleNamespace(longest_ns=0), shape=SimpleNamespace(num_layers=LAYERS)
    )
    watch = Watch(loop, config, runner, None)
    since = watch.look(0, False)["seq"]

    class LookFirst:
        """The lock of changes, which another thread is faster to take."""

        lock = watch._changing

        def __enter__(self) -> None:
            watch._changing = self.lock
            looks = Thread(target=lambda: looked.append(watch.look(since, False)))
            looks.start()
            looks.join()
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    watch._changing = LookFirst()  # type: ignore[assignment]
    clock[0] = ms(9) + 2 * LEASE_NS
    loop.listeners[0](Resumed(at_ns=clock[0], frame_id=7))
    assert len(looked) == 1
    assert watch.is_on
    loop.listeners[0](Resumed(at_ns=clock[0] + 2 * LEASE_NS, frame_id=7))
    assert (watch.is_on, loop.listeners) == (False, ())


def test_listed_requests_are_bounded() -> None:
    settings: dict[str, Any] = {"threads": 1, "max_waiting": 10_000}
    with QLLMEngine.from_pretrained("tiny", **settings) as engine:
        handles = [
            engine.submit([1] * 50, "BE", 3000, ignore_eos=True) for _ in range(MAX_LISTED + 20)
        ]
        late = engine.submit([1] * 50, "LS", 3000, ignore_eos=True)
        told = watch_until(engine, lambda told: sum(n for *_, n in told["counts"]) > len(handles))
        assert len(told["requests"]) == MAX_LISTED
        assert told["requests"][0]["number"] == late.number  # LS first
        for handle in (*handles, late):
            handle.cancel()
