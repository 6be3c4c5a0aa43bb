"""Two engine processes behind one server: kill -9 of either, at any time, changes no answer."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qllm import QLLMEngine
from qllm.cli.top import head, scrape, table
from qllm.errors import ConfigError
from qllm.fleet.members import Backoff
from qllm.fleet.router import Entry, replayed
from qllm.fleet.routes import load_route
from qllm.ingress.remote import meeting
from qllm.ingress.remote.meeting import Address, Meeting
from tests.support.engines import free_port, freeze, pid_of
from tests.support.replay import ASKS, COMPLETIONS, SETTINGS, Client, ask_all, ask_until_they_run
from tests.support.serving import Serving, serving, tiny_engine
from tests.support.waiting import wait_for

REPLAYED = "qllm:requests_replayed_total"
QUICK = Backoff(first_s=0.2, cap_s=0.2)
FEW = [ASKS[0], ASKS[3], ASKS[5], ASKS[6]]
"""Greedy, with penalties and log-probabilities, two choices, and an expression. What else there is
to ask is asked of one engine in tests/server/ops/test_replay.py."""
ask_few, ask_few_until_they_run = (partial(ask, asks=FEW) for ask in (ask_all, ask_until_they_run))


class Two:
    """Two engines: one met over NIXL, one over shared memory."""

    def __init__(self, folder: Path) -> None:
        self.meeting = Meeting(Address("127.0.0.1", free_port()), "tcp", b"")
        self.names = [str(self.meeting.address), str(folder / "engine")]
        self.engines: list[QLLMEngine] = [self.make(0), self.make(1)]

    def make(self, index: int, **more: Any) -> QLLMEngine:
        where = {"meeting": self.meeting} if index == 0 else {"listen": self.names[1]}
        return tiny_engine(**{**SETTINGS, **where, **more})

    def kill(self, index: int) -> None:
        os.kill(pid_of(self.engines[index]), signal.SIGKILL)
        wait_for(lambda: self.engines[index].failure is not None)
        self.engines[index].close()

    def bring_back(self, index: int) -> None:
        self.engines[index] = self.make(index)

    @property
    def address(self) -> str:
        return ",".join(self.names)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    made = Two(tmp_path_factory.mktemp("fleet"))
    yield made
    for engine in made.engines:
        engine.close()


def is_up(served: Serving, index: int) -> bool:
    return bool(served.get("/health").json()["engines"][index]["up"])


def broken(request: Any, engines: Any) -> Any:
    raise ValueError("this plug-in is broken")


def kill_under_load(
    two: Two, dies: int, served: Serving, expected: list[Any], ask: Callable[..., list[Client]]
) -> None:
    clients = ask(served)
    two.kill(dies)
    assert [client.answer() for client in clients] == expected
    two.bring_back(dies)
    wait_for(lambda: is_up(served, dies))


def test_kill_9_of_either_engine_changes_no_answer(two: Two) -> None:
    entries: list[Entry] = []
    with ExitStack() as stack:
        fleet = QLLMEngine.connect(
            two.address, route="prefix", record=entries.append, backoff=QUICK, max_replays=9
        )
        stack.callback(fleet.close)
        served = stack.enter_context(serving(fleet))
        expected = [client.answer() for client in ask_few(served)]
        for dies in (0, 1):
            kill_under_load(two, dies, served, expected, ask_few)
            before = served.metric(REPLAYED)
            while served.metric(REPLAYED) == before:  # until one hits what runs
                kill_under_load(two, dies, served, expected, ask_few_until_they_run)
        health = served.get("/health").json()
        assert health["status"] == "ok"
        assert min(engine["met"] for engine in health["engines"]) >= 3
        # one whose last token was here when its engine died is taken, and goes on nowhere
        taken = [served.metric("qllm:fleet_requests_taken_total", engine=n) for n in two.names]
        assert served.metric(REPLAYED) <= sum(taken)
        assert [served.metric("qllm:fleet_engine_up", engine=n) for n in two.names] == [1, 1]
        wait_for(lambda: fleet.stats()["num_live"] == 0)
    choices = replayed(entries, load_route("prefix"))
    assert len(choices) > 5 * len(FEW)
    assert [now for _, now in choices] == [then for then, _ in choices], "as in a simulation"


def test_an_engine_that_is_closed_under_load_loses_no_answer(two: Two) -> None:
    """So it is if whoever started it is killed, or its time to drain is over: it cancels all."""
    with ExitStack() as stack:
        fleet = QLLMEngine.connect(two.address, route="least", backoff=QUICK)
        stack.callback(fleet.close)
        served = stack.enter_context(serving(fleet))
        expected = [client.answer() for client in ask_few(served)]
        for index in (0, 1):
            clients = ask_few_until_they_run(served)
            two.engines[index].close()
            assert [client.answer() for client in clients] == expected
            two.bring_back(index)
            wait_for(lambda index=index: is_up(served, index))


@pytest.mark.parametrize("index", [0, 1], ids=["over NIXL", "over shared memory"])
def test_an_engine_that_stands_still_is_left_and_comes_back(
    two: Two, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps the KV of what it had; who goes on there has computed it, and finds nothing."""
    with ExitStack() as stack:
        fleet = QLLMEngine.connect(two.address, route="least", backoff=QUICK, max_replays=9)
        stack.callback(fleet.close)
        served = stack.enter_context(serving(fleet))
        expected = [client.answer() for client in ask_few(served)]
        clients = ask_few_until_they_run(served)
        pid = pid_of(two.engines[index])
        monkeypatch.setattr(meeting, "LIVENESS_S", 2.0)
        monkeypatch.setattr(meeting, "HANDSHAKE_S", 2.0)
        freeze(pid)
        try:
            wait_for(lambda: not is_up(served, index))
            assert [client.answer() for client in clients] == expected
            with QLLMEngine.connect(two.address) as another:
                assert another.submit("abc", max_tokens=2).result(300).token_ids
        finally:
            os.kill(pid, signal.SIGCONT)
            monkeypatch.undo()
        wait_for(lambda: is_up(served, index))
        assert [client.answer() for client in ask_few(served)] == expected


def test_without_an_engine_503_says_when_to_come_back(two: Two) -> None:
    with ExitStack() as stack:
        fleet = QLLMEngine.connect(two.address, route=broken, backoff=QUICK)
        stack.callback(fleet.close)
        served = stack.enter_context(serving(fleet))
        asked = {"prompt": "def f(", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        (expected,) = served.post(COMPLETIONS, asked).json()["choices"]
        assert served.metric("qllm:fleet_route_errors_total") == 1, "and it was answered"
        client = Client(served, COMPLETIONS, {**asked, "max_tokens": 1500, "stream": True})
        wait_for(lambda: client.has_begun)
        for index in (0, 1):
            two.kill(index)
        wait_for(lambda: served.get("/ready").status_code == 503)
        refused = served.post(COMPLETIONS, asked)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_restarting"
        assert int(refused.headers["Retry-After"]) >= 1
        assert served.get("/health").json()["status"] == "restarting"
        assert client.is_alive(), "it waits"
        two.bring_back(1)
        wait_for(lambda: served.get("/ready").status_code == 200)
        assert served.post(COMPLETIONS, asked).json()["choices"] == [expected]
        usage, *_ = client.answer()
        assert usage["completion_tokens"] == 1500
        found = scrape(served.url)
        assert head(found).startswith("tiny: KV ")
        assert table(found, found).row_count > 5
        assert served.post("/reset_prefix_cache", {}).status_code == 200
        two.bring_back(0)


def test_engines_with_other_settings_are_refused(two: Two, tmp_path: Path) -> None:
    path = str(tmp_path / "other")
    with two.make(1, listen=path, max_kv_tokens=4096), pytest.raises(ConfigError) as refused:
        QLLMEngine.connect(f"{two.names[1]},{path}")
    assert "max_kv_tokens is 4096 there and 16384 here" in str(refused.value)
    with pytest.raises(ConfigError, match=r"route='fastest' is unknown; use one of class, length"):
        QLLMEngine.connect(two.address, route="fastest")
