"""What a stream says while nothing comes."""

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from qllm.frontend.handle import Piece
from qllm.server.config import ServerConfig
from qllm.server.http.errors import ApiError
from qllm.server.requests.ask import Served
from qllm.server.requests.open_answer import Answer, Comment
from qllm.types import FinishReason, Priority, RequestStatus
from tests.support.engines import FileGate
from tests.support.serving import serving, tiny_engine
from tests.support.virtual import VirtualLoop


def test_a_stream_that_waits_says_so_and_clients_do_not_see_it(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    body = {"model": "tiny", "prompt": "x", "max_tokens": 3, "stream": True}
    with (
        tiny_engine(policy=FileGate(str(gate)), conformance=False) as engine,
        serving(engine, comment_s=0.05) as served,
        httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as answer,
    ):
        lines = answer.iter_lines()
        seen = []
        for line in lines:
            seen.append(line)
            if line == ": waiting 1":
                break
        assert set(seen) <= {"", ": alive", ": waiting 1"}, "nothing else is known of it"
        heard: list[Any] = []

        def ask() -> None:
            heard.extend(served.client().completions.create(**body))  # type: ignore[call-overload]

        other = threading.Thread(target=ask)
        other.start()
        while ": waiting 2" not in seen:
            seen.append(next(lines))
        gate.touch()
        events = [line for line in lines if line.startswith("data: ")]
        other.join(60)
    assert events[-1] == "data: [DONE]"
    assert all(json.loads(event[6:])["choices"] for event in events[:-1])
    assert "".join(chunk.choices[0].text for chunk in heard)


class Gated:
    """A handle whose second piece and end come when they are let through."""

    def __init__(self) -> None:
        self.status: RequestStatus = RequestStatus.PARKED
        self.is_open = False

    def at(self, position: int) -> Piece | FinishReason | None:
        if position == 0:
            return Piece("a", (1,), ())
        if not self.is_open:
            return None
        return Piece("b", (2,), ()) if position == 1 else FinishReason.STOP

    def listen(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def unlisten(self, wake: Callable[[], None]) -> None:
        assert wake == self.wake

    def go_on(self) -> None:
        self.is_open = True
        if hasattr(self, "wake"):
            self.wake()


async def heard(status: RequestStatus, silence_s: float | None) -> list[Any]:
    handle: Any = Gated()
    handle.status = status
    served = Served(Priority.BE)
    answer = Answer([handle], 1, served, lambda _: None, lambda *_: None, lambda: 4)  # type: ignore[arg-type, return-value]
    found: list[Any] = []
    if silence_s is None:
        handle.go_on()
    async for _, item in answer.pieces(silence_s):
        found.append(item.text if isinstance(item, Piece | Comment) else item)
        if isinstance(item, Comment):
            handle.go_on()
    return [x for i, x in enumerate(found) if not i or x != found[i - 1]]


def test_a_parked_stream_says_when_it_goes_on() -> None:
    stop = FinishReason.STOP
    parked = asyncio.run(heard(RequestStatus.PARKED, 0.02))
    assert parked == ["a", "parked", "resumed", "b", stop]
    assert asyncio.run(heard(RequestStatus.WAITING, 0.02)) == ["a", "waiting 4", "b", stop]
    assert asyncio.run(heard(RequestStatus.RUNNING, 0.02)) == ["a", "running", "b", stop]
    assert asyncio.run(heard(RequestStatus.PARKED, None)) == ["a", "b", stop]


def test_the_first_bytes_of_a_stream_go_before_the_rest_is_made() -> None:
    async def seen(silence_s: float | None) -> list[str]:
        handle: Any = Gated()
        handle.is_open = True
        answer = Answer(
            [handle], 1, Served(Priority.LS), lambda _: None, lambda _, error: error, lambda: 0
        )
        found: list[str] = []
        async for _, item in answer.pieces(silence_s):
            if not found:
                asyncio.get_running_loop().call_soon(found.append, "sent")
            found.append(item.text if isinstance(item, Piece) else "end")
        return found

    assert asyncio.run(seen(60.0)) == ["a", "sent", "b", "end"]
    assert asyncio.run(seen(None)) == ["a", "b", "end", "sent"]


class Timed(Gated):
    """A handle whose pieces come after given silences, in seconds; then it ends."""

    def __init__(self, silences: Sequence[float]) -> None:
        super().__init__()
        self.silences, self.num = silences, 0

    def at(self, position: int) -> Piece | FinishReason | None:
        if position < self.num:
            return Piece("a", (1,), ())
        return FinishReason.STOP if self.num == len(self.silences) else None

    async def run(self) -> None:
        for silence_s in self.silences:
            await asyncio.sleep(silence_s)
            self.num += 1
            self.wake()


def num_until_cut(silences: Sequence[float], silence_s: float | None, lag_s: float = 0) -> int:
    """Count the pieces that come where a silence is limited; -1 - n where an error ends them."""

    async def read() -> int:
        handle: Any = Timed(silences)
        made = Answer([handle], 1, Served(Priority.LS), lambda _: None, lambda *_: None, lambda: 0)  # type: ignore[arg-type, return-value]
        made.silence_timeout_s, num = 10.0, 0
        sends = asyncio.create_task(handle.run())
        try:
            async for _, item in made.pieces(silence_s):
                num += isinstance(item, Piece)
                await asyncio.sleep(lag_s)
        except ApiError as error:
            return -1 - num if (error.status_code, error.code) == (504, "timeout") else -1000
        finally:
            sends.cancel()
        return num

    loop = VirtualLoop()
    try:
        return loop.run_until_complete(read())
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


@pytest.mark.parametrize("silence_s", [None, 4.0])
def test_silence_ends_an_answer_and_duration_does_not(silence_s: float | None) -> None:
    assert num_until_cut([9.0] * 100, silence_s) == 100
    for at in (0, 1, 50):
        silences = [9.0] * 100
        silences[at] = 30.0
        assert num_until_cut(silences, silence_s) == -1 - at


def test_a_client_that_reads_slowly_is_no_silence() -> None:
    assert num_until_cut([1.0] * 20, None, lag_s=15) == 20


def test_only_a_setting_ends_a_request_for_its_duration() -> None:
    config = ServerConfig()
    assert (config.request_timeout_s, config.silence_timeout_s) == (None, 600)
