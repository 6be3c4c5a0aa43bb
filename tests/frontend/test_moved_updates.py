"""Updates of requests that move between engines: the last state that was asked for is told."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from qllm.errors import QueueFullError
from qllm.frontend.saved_request import SavedRequest
from qllm.ingress import Submission, Update
from qllm.ingress.front_end import UPDATE_BYTES
from qllm.ingress.ring import record_bytes
from qllm.types import FinishReason, RequestStatus
from tests.support.request_log import BE, LS, WHY, SilentClient, World


class Heard(SilentClient):
    """Notes what its engine is told of requests, and runs something in the middle of a replay."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[int, list[Any]] = {}
        self.during: Callable[[str], None] = lambda _: None
        update = self._front_end.update

        def noting(item: Update) -> None:
            self.told[item.request_id].append(item.paused)
            update(item)

        self._front_end.update = noting  # type: ignore[method-assign]

    def new_number(self) -> int:
        self.during("before it is looked at")
        return super().new_number()

    def _put(self, entry: SavedRequest, submission: Submission) -> None:
        self.during("before it is put")
        self.told[submission.request_id] = [submission.priority]
        super()._put(entry, submission)
        self.during("after it is put")

    def state(self, entry: SavedRequest) -> tuple[int, bool]:
        """Class and pause of a request, as its engine has them in the end."""
        priority, *pauses = self.told[entry.handle.number]
        return priority, bool(([False, *(x for x in pauses if x is not None)])[-1])


def moved(entry: SavedRequest, act: Callable[[], None]) -> None:
    """Have something done just before, or just after, the handle is moved."""
    move = entry.handle.move

    def later(*to: Any) -> None:
        entry.handle.move = move  # type: ignore[method-assign]
        act()
        move(*to)

    entry.handle.move = later  # type: ignore[method-assign]


WHEN = ["before it is looked at", "before it is put", "after it is put", "as it is moved"]


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("is_paused", [False, True])
def test_a_pause_or_its_end_in_the_middle_of_a_replay_is_not_lost(
    when: str, is_paused: bool
) -> None:
    w, client = World(), Heard()
    first, second = w.entry(1), w.entry(2)
    w.die(first, second)
    if is_paused:
        first.handle.pause()
    act = first.handle.resume if is_paused else first.handle.pause
    if when == WHEN[-1]:
        moved(first, act)
    client.during = lambda now: act() if now == when and len(client.handles) <= 1 else None
    w.log.go_on(client.replay)
    assert client.state(first) == (LS, not is_paused)
    assert not w.log.holds(first.handle)
    if not is_paused:
        assert not w.log.holds(second.handle), "one that is paused holds nobody up"


def test_an_update_that_a_dying_engine_does_not_take_is_told_to_the_next() -> None:
    """Asked after the engine was lost, before the request is taken over."""
    w, dead, client = World(), Heard(), Heard()
    entry = w.entry(1)
    w.die(entry)
    w.log.go_on(dead.replay)
    w.token(entry)
    forget = dead._forget

    def late(number: int) -> None:
        entry.handle.update(priority="BE", paused=True)
        forget(number)

    dead._forget = late  # type: ignore[method-assign]
    dead._end_all(WHY)
    assert dead.told == {0: [LS]}
    w.log.go_on(client.replay)
    assert client.state(entry) == (BE, True)


def test_an_update_on_its_way_to_a_dead_engine_reaches_the_next() -> None:
    """It began before the request was moved and ends after: the last state asked for stays."""
    w, client = World(), Heard()
    entry = w.entry(1)
    begun, go_on = threading.Event(), threading.Event()

    def slow(item: Update) -> None:
        begun.set()
        assert go_on.wait(60)

    entry.handle._update = slow
    asks = threading.Thread(target=entry.handle.pause)
    asks.start()
    assert begun.wait(60)
    w.die(entry)
    w.log.go_on(client.replay)
    assert client.state(entry) == (LS, True), "it was asked, though that engine never took it"
    entry.handle.resume()
    go_on.set()
    asks.join(60)
    assert client.state(entry) == (LS, False), "the pause was asked before"


def test_updates_that_overlap_end_in_the_last_one() -> None:
    """The first is delivered after the second; the engine is told once more."""
    w, client = World(), Heard()
    entry = w.entry(1)
    w.die(entry)
    w.log.go_on(client.replay)
    put, begun, go_on = client.update, threading.Event(), threading.Event()

    def slow(item: Update) -> None:
        if item.paused and not begun.is_set():
            begun.set()
            assert go_on.wait(60)
        put(item)

    entry.handle._update = slow
    asks = threading.Thread(target=entry.handle.pause)
    asks.start()
    assert begun.wait(60)
    entry.handle.resume()
    assert client.told[0] == [LS, False]
    go_on.set()
    asks.join(60)
    assert client.told[0] == [LS, False, True, False]


def test_an_update_that_is_refused_was_not_asked() -> None:
    w, client = World(), SilentClient()
    entry = w.entry(1)
    w.die(entry)
    w.log.go_on(client.replay)
    entry.handle.update(priority="BE")
    while client.num_updates < UPDATE_BYTES // record_bytes(16):
        client._front_end.update(Update(99, paused=True))
    with pytest.raises(QueueFullError):
        entry.handle.pause()
    assert (entry.priority, entry.is_paused) == (BE, False)


def test_one_without_room_for_what_was_asked_meanwhile_goes_back() -> None:
    w, client = World(), SilentClient()
    entry = w.entry(1)
    w.die(entry)
    while client.num_updates < UPDATE_BYTES // record_bytes(16):
        client._front_end.update(Update(99, paused=True))
    moved(entry, entry.handle.pause)
    w.log.go_on(client.replay)
    assert w.log.holds(entry.handle)
    assert not client.handles
    assert entry.handle.status is RequestStatus.PAUSED
    entry.handle.cancel()
    assert entry.handle.result(0).finish_reason is FinishReason.CANCELLED
