"""Work in a process of its own: what comes back, and what it may not do to others."""

import os
import signal
import socket
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qllm.errors import ConfigError, ContextLengthError
from qllm.server.api.protocol import ChatRequest, CompletionRequest
from qllm.server.http.errors import ApiError
from qllm.server.http.fields import Packed
from qllm.server.requests import apart
from qllm.server.requests.apart import LONG, Apart, Given
from qllm.server.requests.bodies import (
    MOST_CONTAINERS,
    MOST_DEPTH,
    MOST_DIGITS,
    MOST_UNPACKED,
    MOST_VALUES,
    read,
)
from qllm.server.requests.texts import encoded
from tests.support.waiting import wait_for

JSON = "application/json"


class Letters:
    """A tokenizer of a test."""

    def get_vocab(self) -> dict[str, int]:
        return {"a": 97}

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(x) for x in text]}


@pytest.fixture(scope="module")
def shared() -> Iterator[Apart]:
    made = Apart(Letters)
    yield made
    process = made._process
    made.close()
    assert process is None or process.poll() == 0, "it outlives the server"


def spin() -> None:
    while True:
        pass


def fill() -> int:
    return len(bytearray(apart.MEMORY_BYTES))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise KeyError("a bug")


def tried(path: str, work: Any = None, first: Any = None) -> int:
    """Do a work, another one first; return how often this was tried."""
    with open(path, "a+") as file:
        file.write("x")
        file.flush()
        file.seek(0)
        count = len(file.read())
    if first is not None and count == 1:
        first()
    if work is not None:
        work()
    return count


@pytest.mark.parametrize("work", [spin, fill, die])
def test_what_takes_too_much_is_refused_and_ends_nothing_else(
    shared: Apart, monkeypatch: pytest.MonkeyPatch, work: Any
) -> None:
    monkeypatch.setattr(apart, "CPU_S", 1)
    with pytest.raises(ApiError, match="make it shorter") as caught:
        shared.do(LONG, work)
    assert (caught.value.status_code, caught.value.code) == (400, "body_too_costly")
    assert shared.do(LONG, os.getpid) != os.getpid()


def test_work_whose_process_is_ended_is_done_by_another_one(shared: Apart, tmp_path: Path) -> None:
    assert shared.do(LONG, tried, str(tmp_path / "tries"), None, die) == 2


def test_work_that_the_process_that_waits_did_not_take_up_is_done(
    shared: Apart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ended while a socket is on its way to it."""
    shared.start()
    waits, hand_over = shared._process, shared._hand_over
    assert waits is not None

    def handed_over(theirs: socket.socket) -> None:
        is_first = waits.poll() is None
        if is_first:
            waits.send_signal(signal.SIGSTOP)
        hand_over(theirs)
        if is_first:
            waits.kill()
            waits.wait()

    monkeypatch.setattr(shared, "_hand_over", handed_over)
    assert shared.do(LONG, os.getpid) != os.getpid()


def test_work_is_done_if_the_process_that_waits_is_ended_as_it_starts(
    shared: Apart, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, ended = shared._start, [BrokenPipeError()] * (apart.STARTS - 1)

    def started() -> socket.socket:
        if ended:
            raise ended.pop()
        return start()

    monkeypatch.setattr(shared, "_start", started)
    assert shared.do(LONG, os.getpid) != os.getpid()
    ended += [BrokenPipeError()] * apart.STARTS
    with pytest.raises(ApiError, match="try again") as caught:
        shared.do(LONG, os.getpid)
    assert caught.value.status_code == 503


@pytest.mark.parametrize("work", [spin, fill])
def test_work_that_exceeds_a_bound_is_not_tried_again(
    shared: Apart, monkeypatch: pytest.MonkeyPatch, work: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(apart, "CPU_S", 1)
    with pytest.raises(ApiError, match="make it shorter"):
        shared.do(LONG, tried, str(tmp_path / "tries"), work)
    assert (tmp_path / "tries").read_text() == "x"


def test_each_work_has_a_process_and_short_work_has_none(shared: Apart) -> None:
    assert len({shared.do(LONG, os.getpid) for _ in range(3)} | {os.getpid()}) == 4
    assert shared.do(LONG - 1, os.getpid) == os.getpid()
    lowest = min(19, os.nice(0) + apart.NICE)
    assert shared.do(LONG, os.nice, 0, nice=apart.NICE) == lowest


def test_an_error_is_raised_as_it_was(shared: Apart) -> None:
    with pytest.raises(ContextLengthError, match="at most"):
        shared.do(LONG, encoded, "a" * LONG, Given.TOKENIZER, 1 << 20, 1, None)
    with pytest.raises(KeyError, match="a bug") as caught:
        shared.do(LONG, fail)
    assert "in fail" in caught.value.__notes__[0]


def test_a_tokenizer_that_stays_here_is_an_error_at_the_start() -> None:
    made = Apart(lambda: lambda text: text)
    with pytest.raises(ConfigError, match="the tokenizer cannot be given"):
        made.start()
    made.close()


def test_the_process_that_waits_is_started_again(shared: Apart) -> None:
    shared.start()
    process = shared._process
    assert process is not None
    process.kill()
    wait_for(lambda: process.poll() is not None)
    assert list(shared.do(LONG, encoded, "abc", Given.TOKENIZER, 1 << 20, None, None)) == [
        97,
        98,
        99,
    ]


MANY = {
    "lists and objects": b'{"prompt": [' + b"[]," * MOST_CONTAINERS + b"[]]}",
    "values": b'{"prompt": [' + b"1," * MOST_VALUES + b"1]}",
    "inside each other": b'{"prompt": '
    + b"[" * MOST_DEPTH
    + b"]" * MOST_DEPTH
    + b" " * LONG
    + b"}",
    "digits": b'{"prompt": "", "seed": ' + b"1" * (MOST_DIGITS + 1) + b" " * LONG + b"}",
    "values beside its ids": b'{"prompt": "", "stop": [' + b'"",' * MOST_UNPACKED + b'""]}',
}


@pytest.mark.parametrize("what", MANY)
def test_too_much_of_something_is_refused_by_name(what: str) -> None:
    with pytest.raises(ApiError, match=what):
        read(MANY[what], JSON, CompletionRequest)


def test_what_is_in_a_text_is_not_counted() -> None:
    text = ('[{,\\"' * (MOST_VALUES // 2)) + "1" * (MOST_DIGITS + 1)
    raw = b'{"prompt": "' + text.encode() + b'"}'
    assert read(raw, JSON, CompletionRequest).prompt == text.replace('\\"', '"')


NOT_CLOSED = {
    "quotes": b'{"prompt": "' + b'\\"' * (1 << 20),
    "quotes and half an escape": b'{"prompt": "' + b'\\"' * (1 << 20) + b"\\",
}


@pytest.mark.parametrize("what", NOT_CLOSED)
def test_a_body_that_is_not_closed_is_refused_within_the_bounds_of_a_short_one(
    shared: Apart, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(apart, "CPU_S", 1)
    monkeypatch.setattr(apart, "CPU_S_PER_MIB", 0)
    with pytest.raises(ApiError, match="JSON"):
        shared.do(LONG, read, NOT_CLOSED[what], JSON, CompletionRequest)


def test_long_lists_come_back_compact(shared: Apart) -> None:
    ids = b'{"prompt": [' + b"17," * LONG + b"17]}"
    body = shared.do(len(ids), read, ids, JSON, CompletionRequest)
    assert body.prompts() == [array("q", [17] * (LONG + 1))]
    several = b'{"prompt": [[1, 2], [' + b"17," * LONG + b"17]]}"
    assert [len(x) for x in read(several, JSON, CompletionRequest).prompts()] == [2, LONG + 1]
    turn = b'{"role": "user", "content": "a"}'
    chat = b'{"messages": [' + (turn + b",") * LONG + turn + b"]}"
    packed: Any = shared.do(len(chat), read, chat, JSON, ChatRequest).messages
    assert isinstance(packed, Packed)
    assert (packed.num, len(packed.opened())) == (LONG + 1, LONG + 1)
