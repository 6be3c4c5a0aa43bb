"""What waits between two engines: who goes on, in which order, and who does not."""

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from qllm import QLLMEngine, SamplingParams
from qllm.errors import MOVED, ConfigError, EngineClosedError, InvalidRequestError, QueueFullError
from qllm.frontend.saved_request import SavedRequest
from qllm.ingress import Submission, Update
from qllm.ingress.codec import End
from qllm.ingress.front_end import UPDATE_BYTES
from qllm.ingress.ring import record_bytes
from qllm.types import NS_PER_MS, NS_PER_S, FinishReason, RequestStatus, Slo
from tests.support.families import make_model
from tests.support.request_log import BE, LS, WHY, SilentClient, World


def test_they_go_on_one_by_one_by_class_and_arrival() -> None:
    w = World()
    entries = {n: w.entry(n, LS if n in (3, 5) else BE) for n in (4, 5, 2, 3)}
    w.die(*entries.values())
    assert all(w.log.holds(e.handle) for e in entries.values())
    assert {e.handle.status for e in entries.values()} == {RequestStatus.WAITING}
    assert w.go_on() == ["r3"]
    w.log.look()
    assert w.names() == ["r3"]
    w.token(entries[5])
    assert w.names() == ["r3"], "one that is not on trial"
    w.token(entries[3])
    assert w.names() == ["r3", "r5"]
    w.token(entries[3])
    assert w.names() == ["r3", "r5"]
    w.token(entries[5])
    w.token(entries[2])
    assert w.names() == ["r3", "r5", "r2", "r4"]
    assert w.num_replayed == 4
    assert not w.log.holds(entries[4].handle)


def test_the_rest_of_a_request_is_what_is_not_delivered() -> None:
    w = World()
    entry = w.entry(1, deadline_ns=5 * NS_PER_S)
    item = entry.submission
    w.die(entry)
    assert item is not None
    assert entry.submission is not None
    shift = entry.submission.arrival_ns - item.arrival_ns
    assert abs(shift - w.zero_ns) < NS_PER_MS
    assert entry.submission.deadline_ns == 5 * NS_PER_S + shift
    assert entry.token_ns == [10 * NS_PER_MS + shift, 11 * NS_PER_MS + shift]
    assert entry.unknown.arrival_ns == NS_PER_MS + shift
    assert entry.rest(9) == replace(
        item, request_id=9, token_ids=(1, 2, 3, 60, 61), num_output_tokens=2,
        arrival_ns=NS_PER_MS + shift, deadline_ns=5 * NS_PER_S + shift,
    )  # fmt: skip


def ended(entry: SavedRequest) -> tuple[FinishReason | None, str | None]:
    return entry.handle.finish_reason, entry.handle._error


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("stop id", FinishReason.STOP),
        ("last token", FinishReason.LENGTH),
        ("cancelled", FinishReason.CANCELLED),
        ("stop string", FinishReason.STOP),
        ("from a checkpoint", FinishReason.ERROR),
    ],
)
def test_one_that_was_done_is_not_replayed(how: str, reason: FinishReason) -> None:
    w = World()
    entry = w.entry(1)
    if how == "stop id":
        w.token(entry, 50)
    elif how == "last token":
        for _ in range(3):
            w.token(entry)
    elif how == "cancelled":
        entry.handle.cancel()
    elif how == "stop string":
        entry.ended = FinishReason.STOP, None
    else:
        entry.submission = None
    w.die(entry)
    assert entry.handle.finish_reason is reason
    assert w.go_on() == []
    if reason is not FinishReason.ERROR:
        result = entry.handle.result(0)
        assert result.metrics.num_output_tokens == len(entry.token_ns)
        assert result.metrics.ttft_ms == pytest.approx(9)


def test_the_one_that_gave_no_sign_of_life_ends_with_the_next_engine() -> None:
    w = World()
    entries = [w.entry(n) for n in range(4)]
    w.die(*entries)
    w.go_on()
    w.token(entries[0])
    assert w.names() == ["r0", "r1"]
    w.engine.die()
    reason, error = ended(entries[1])
    assert reason is FinishReason.ERROR
    assert error == f"{WHY}; 2 engines died while they had this request"
    assert [w.log.holds(e.handle) for e in entries] == [True, False, True, True]
    assert w.go_on() == ["r0"]
    for entry in (entries[0], entries[2], entries[3]):
        w.token(entry)
    assert w.names() == ["r0", "r2", "r3"]


def test_no_request_is_carried_over_for_ever() -> None:
    w = World(max_replays=2)
    entry = w.entry(1, max_tokens=100)
    w.die(entry)
    for _ in range(2):
        assert w.go_on() == ["r1"]
        w.token(entry)
        w.engine.die()
    assert ended(entry)[1] == f"{WHY}; 3 engines died while they had this request"
    assert w.go_on() == []
    assert w.num_replayed == 2


def test_zero_replays_keep_nothing() -> None:
    w = World(max_replays=0)
    assert w.entry(1).handle.log is None
    assert World(1).entry(1).handle.log is not None


@pytest.mark.parametrize("error", [EngineClosedError("gone"), QueueFullError("full")])
def test_one_that_finds_no_room_is_tried_again(error: Exception) -> None:
    w = World(max_replays=1)
    first, second = w.entry(1), w.entry(2)
    w.die(first, second)
    w.engine.raises = error
    assert w.go_on() == []
    w.log.look()
    assert (w.names(), w.num_replayed, first.num_replays) == ([], 0, 0)
    w.engine.raises = None
    w.log.look()
    assert w.names() == ["r1"]
    assert (w.num_replayed, first.num_replays) == (1, 1)


def test_one_cancelled_while_it_finds_no_room_ends() -> None:
    w = World()
    entry = w.entry(1)
    w.die(entry)
    w.engine.raises, w.engine.before = QueueFullError("full"), entry.handle.cancel
    w.go_on()
    assert entry.handle.result(0).finish_reason is FinishReason.CANCELLED
    assert not w.log.holds(entry.handle)


def test_one_that_the_new_engine_refuses_ends_alone() -> None:
    w = World()
    first, second = w.entry(1), w.entry(2)
    w.die(first, second)
    w.engine.raises = InvalidRequestError("too large")

    def later() -> None:
        w.engine.before = lambda: setattr(w.engine, "raises", None)

    w.engine.before = later
    assert w.go_on() == ["r2"]
    assert ended(first) == (FinishReason.ERROR, "too large")


def test_deadlines_and_cancels_count_while_they_wait() -> None:
    w = World()
    late, soon, gone = w.entry(1, deadline_ns=1), w.entry(2, deadline_ns=10**12), w.entry(3)
    w.die(late, soon, gone)
    assert late.handle.finish_reason is None
    w.log.look()
    assert late.handle.result(0).finish_reason is FinishReason.TIMEOUT
    gone.handle.cancel()
    assert gone.handle.result(0).finish_reason is FinishReason.CANCELLED
    assert soon.handle.finish_reason is None
    assert w.go_on() == ["r2"]


def test_without_a_further_engine_all_end() -> None:
    w = World()
    waits, comes = w.entry(1), w.entry(2)
    w.die(waits)
    w.log.end_all("given up")
    w.die(comes)
    assert ended(waits) == ended(comes) == (FinishReason.ERROR, "given up")


PROMPT = tuple(range(5, 40))


@pytest.mark.parametrize("num_done", [1, 7, 11])
def test_an_engine_goes_on_where_another_was(num_done: int) -> None:
    penalties = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3}
    sampling = SamplingParams(temperature=1.1, top_p=0.95, seed=5, ignore_eos=True, **penalties)
    settings: dict[str, Any] = {"conformance": False, "exactness": "batch-invariant", "threads": 1}
    with QLLMEngine.from_model(make_model("mixtral"), **settings) as engine:
        whole = engine.submit(list(PROMPT), "LS", 12, sampling=sampling).result(300)
        assert len(set(whole.token_ids)) > 8
        client = engine._client
        with client.admission_lock:
            number = client.new_number()
            handle = engine._handle(number, None, PROMPT, sampling)
            item = Submission(
                request_id=number, name="rest", priority=BE, sampling=sampling, max_tokens=12,
                token_ids=(*PROMPT, *whole.token_ids[:num_done]), num_output_tokens=num_done,
                stop_ids=frozenset(), slo=Slo(), arrival_ns=-5 * NS_PER_S, deadline_ns=None,
            )  # fmt: skip
            client.submit(item, handle)
        rest = handle.result(300)
        assert rest.token_ids == whole.token_ids[num_done:]
        assert rest.finish_reason is FinishReason.LENGTH
        assert rest.metrics.num_prompt_tokens == rest.metrics.num_prefilled_tokens == len(PROMPT)
        with pytest.raises(ConfigError, match="takes over no requests"):
            engine.replay(World().entry(1))


def test_a_cancel_just_before_a_move_is_not_lost() -> None:
    w = World()
    entry = w.entry(1)
    move = entry.handle.move

    def cancel_and_move(*to: Any) -> None:
        entry.handle.cancel()
        move(*to)

    entry.handle.move = cancel_and_move  # type: ignore[method-assign]
    w.die(entry)
    assert entry.handle.result(0).finish_reason is FinishReason.CANCELLED
    assert w.go_on() == []


def test_a_cancel_beside_a_move_is_not_lost() -> None:
    for _ in range(300):
        w = World()
        entry = w.entry(1)
        thread = threading.Thread(target=entry.handle.cancel)
        thread.start()
        w.die(entry)
        thread.join()
        assert entry.handle.result(0).finish_reason is FinishReason.CANCELLED


# -- pauses while engines die


def test_a_request_that_is_paused_on_trial_delays_no_other() -> None:
    w, client = World(), SilentClient()
    first, second, third = (w.entry(n) for n in range(3))
    w.die(first, second, third)
    w.log.go_on(client.replay)
    assert w.num_replayed == 1
    first.handle.update(priority="BE")
    assert w.num_replayed == 1
    first.handle.pause()
    assert w.num_replayed == 2
    second.handle.resume()
    assert w.num_replayed == 2, "it computes, and its token is waited for"
    second.handle.pause()
    assert w.num_replayed == 3


def test_paused_requests_without_room_for_their_pause_wait_on() -> None:
    """They are in one place: here or in the engine."""
    w, client = World(), SilentClient()
    entries = [w.entry(n) for n in range(2)]
    w.die(*entries)
    for entry in entries:
        entry.handle.pause()
    while client.num_updates < UPDATE_BYTES // record_bytes(16) - 1:
        client._front_end.update(Update(99, paused=True))
    w.log.go_on(client.replay)
    assert w.num_replayed == 1
    assert [w.log.holds(entry.handle) for entry in entries] == [False, True]
    assert list(client.handles.values()) == [entries[0].handle]
    assert entries[1].num_replays == 0


class WatchedLock:
    """A lock that tells when a thread wants it."""

    def __init__(self) -> None:
        self.is_wanted, self._lock = threading.Event(), threading.RLock()

    def __enter__(self) -> None:
        self.is_wanted.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_thread_that_replays_waits_for_no_prompt_with_the_locks_of_its_engine() -> None:
    """A caller that holds the prompt's lock may want those."""
    w, client = World(), SilentClient()
    first, second = (w.entry(n) for n in range(2))
    w.die(first, second)
    client._announce = lambda *_: first.handle.pause()  # type: ignore[method-assign]
    second.handle.prompt_lock = lock = WatchedLock()  # type: ignore[assignment]
    thread = threading.Thread(target=w.log.go_on, args=(client.replay,))
    with lock:
        lock.is_wanted.clear()
        thread.start()
        assert lock.is_wanted.wait(60)
        is_free = client.admission_lock.acquire(blocking=False)
        if is_free:
            client.admission_lock.release()
    thread.join(60)
    assert is_free
    assert w.num_replayed == 2


def test_a_request_that_is_heard_of_while_another_is_replayed_is_followed_at_once() -> None:
    w = World()
    first, second, third = (w.entry(n) for n in range(3))
    w.die(first, second, third)
    w.engine.before = lambda: w.log.heard_of(w.log._trial or first)
    assert w.go_on() == ["r0", "r1", "r2"]


@pytest.mark.parametrize(
    ("num_done", "moved", "told"),
    [(0, None, 3), (2, None, 0), (2, 2, 2)],
    ids=["it was not begun", "its engine died", "its engine handed it over"],
)
def test_what_later_engines_find_kept_of_a_prompt_is_its_own(
    num_done: int, moved: int | None, told: int
) -> None:
    """The cached tokens that it is told, and may pay for, are those of its first engine."""
    w, client = World(), SilentClient()
    entry = w.entry(1, num_done=0)
    known = replace(entry.unknown, num_cached_tokens=2)
    w.log.go_on(client.replay)
    client.replay(entry)
    for n in range(num_done):
        w.token(entry, 60 + n)
    if moved is None:
        client._end_all(WHY)
    else:
        (number,) = client.handles
        client._on_finish(End(number, FinishReason.ERROR, f"{MOVED}ticket", known))
    w.log.go_on(client.replay)
    while not (numbers := [n for n, found in client._open.items() if found is entry]):
        time.sleep(0.001)
    later = replace(known, num_cached_tokens=3)
    client._on_finish(End(numbers[0], FinishReason.LENGTH, None, later))
    assert entry.handle.result(300).metrics.num_cached_tokens == told


class Keeper:
    """The log of a handle that passes its requests on to another log."""

    def __init__(self) -> None:
        self.ended: list[bool] = []

    def heard_of(self, entry: SavedRequest) -> None:
        self.ended.append(entry.handle.has_ended)


@pytest.mark.parametrize("how", ["done", "cancelled", "late", "no engine", "moved"])
def test_a_log_that_ends_a_request_tells_the_log_of_its_handle(how: str) -> None:
    w = World()
    keeper: Any = Keeper()
    entry = w.entry(1, LS, num_done=5 if how in ("done", "moved") else 2)
    entry.handle.log = keeper
    if how == "moved":
        w.log.move_on(entry, time.monotonic_ns() - w.zero_ns, lambda _: None)
        for thread in threading.enumerate():
            if thread.name == "qllm-move":
                thread.join()
    else:
        w.die(entry)
    if how == "cancelled":
        entry.handle.cancel()
    elif how == "no engine":
        w.log.end_all("over")
    elif how == "late":
        assert entry.submission is not None
        entry.submission = replace(entry.submission, deadline_ns=1)
        w.log.look()
    assert keeper.ended == [True]
