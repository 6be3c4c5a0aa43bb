"""Engines on the same cores: each knows whether another has LS work, until that one ends."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from qllm import QLLMEngine
from qllm.config import EngineConfig
from qllm.engine.neighbours import Neighbours
from qllm.errors import ConfigError
from qllm.floor import NO_FLOOR
from qllm.scheduler.pressure import Pressure
from tests.support.engines import pid_of
from tests.support.files import ROOT
from tests.support.serving import tiny_engine
from tests.support.waiting import wait_for

ONE = """
import sys, time
from pathlib import Path
from qllm.engine.neighbours import Neighbours
from qllm.floor import NO_FLOOR
from qllm.scheduler.pressure import Pressure
it = Neighbours("g", Pressure(NO_FLOOR, None), lambda: None, Path(sys.argv[1]))
while True:
    it.turn(True, 0)
    time.sleep(0.01)
"""


class Group:
    """Neighbours of one folder, with the number of times that each woke its loop."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.wakes: list[int] = []

    def join(self, name: str = "g") -> Neighbours:
        number = len(self.wakes)
        self.wakes.append(0)

        def wake() -> None:
            self.wakes[number] += 1

        made = Neighbours(name, Pressure(NO_FLOOR, None), wake, self.folder)
        self._stack.callback(made.close)
        return made


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with ExitStack() as stack:
        yield Group(tmp_path, stack)


def is_pressed(one: Neighbours, has_ls: bool = False) -> bool:
    one.turn(has_ls, 0)
    return one.pressure.is_on


def test_each_hears_of_all_others_and_not_of_itself(group: Group) -> None:
    all_ = [group.join() for _ in range(3)]
    wait_for(lambda: all(one.num_met == 2 for one in all_))
    assert not is_pressed(all_[0], has_ls=True)
    wait_for(lambda: is_pressed(all_[1]) and is_pressed(all_[2]))
    assert not is_pressed(all_[0], has_ls=True)
    is_pressed(all_[1], has_ls=True)
    wait_for(lambda: is_pressed(all_[0], has_ls=True))
    is_pressed(all_[0], has_ls=False)  # one of two is left
    wait_for(lambda: not is_pressed(all_[1], has_ls=True))
    assert is_pressed(all_[2])
    is_pressed(all_[1], has_ls=False)
    wait_for(lambda: not is_pressed(all_[2]) and not is_pressed(all_[0]))


def test_a_change_wakes_the_loop_of_the_others(group: Group) -> None:
    first, second = group.join(), group.join()
    wait_for(lambda: first.num_met == second.num_met == 1)
    before = group.wakes[1]
    first.turn(True, 0)
    wait_for(lambda: group.wakes[1] == before + 1)
    for _ in range(10):
        first.turn(True, 0)  # nothing new
    first.turn(False, 0)
    wait_for(lambda: group.wakes[1] == before + 2)


def test_who_comes_later_hears_of_the_ls_that_is_there(group: Group) -> None:
    first = group.join()
    first.turn(True, 0)
    second = group.join()
    wait_for(lambda: group.wakes[0] > 0)  # so that it has a turn
    first.turn(True, 0)
    wait_for(lambda: is_pressed(second))


def test_other_groups_hear_nothing(group: Group) -> None:
    first, other = group.join(), group.join("h")
    first.turn(True, 0)
    assert not is_pressed(other)
    assert first.num_met == other.num_met == 0


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_the_pressure_of_an_engine_ends_with_it(group: Group, how: str) -> None:
    own = group.join()
    if how == "closed":
        other = group.join()
        other.turn(True, 0)
        wait_for(lambda: is_pressed(own))
        other.close()
    else:
        child = subprocess.Popen([sys.executable, "-c", ONE, str(group.folder)], cwd=ROOT)
        try:
            wait_for(lambda: is_pressed(own), 120)
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()
    wait_for(lambda: not is_pressed(own))
    wait_for(lambda: own.num_met == 0)
    third = group.join()  # and its socket is no neighbour
    wait_for(lambda: own.num_met == third.num_met == 1)
    names = list((group.folder / "g").iterdir())
    assert len(names) == 2


def test_an_engine_that_reads_nothing_is_told_the_state_later(group: Group) -> None:
    """Fill the buffer of an engine that stands still. The sender does not wait for it."""
    own = group.join()
    still = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    still.connect(str(own._file))
    wait_for(lambda: own.num_met == 1)
    begin = time.monotonic()
    for number in range(20_000):
        own.turn(number % 2 == 0, 0)
    assert time.monotonic() - begin < 60
    still.setblocking(False)

    def last() -> bytes:
        found = b""
        try:
            while (said := still.recv(1)) != b"":
                found = said
        except BlockingIOError:
            return found
        return found

    last()
    own.turn(True, 0)
    own.turn(True, 0)
    assert last() in (b"\1", b"")  # empty if it knew already
    own.turn(False, 0)
    assert last() == b"\0"
    still.close()


@pytest.mark.parametrize("name", ["", "a/b", "a" * 41, 3, ".."])
def test_wrong_names_of_groups(name: Any) -> None:
    with pytest.raises(ConfigError, match="shared_cores="):
        EngineConfig(shared_cores=name)


def test_a_folder_that_is_too_deep_for_a_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 120)
    with pytest.raises(ConfigError, match=r"cannot be joined.*TMPDIR"):
        Neighbours("g", Pressure(NO_FLOOR, None), lambda: None, deep)


def test_be_of_an_engine_waits_for_ls_of_another_until_that_one_dies() -> None:
    """Counted in holds and tokens: BE of one is held while LS of the other runs."""
    name = f"test-{os.getpid()}"
    with ExitStack() as stack:
        made: list[QLLMEngine] = []
        for _ in range(2):
            engine = tiny_engine(shared_cores=name, conformance=False, max_kv_tokens=16384)
            stack.callback(engine.close)
            made.append(engine)
        a, b = made
        wait_for(lambda: all(engine.stats()["pressure"]["met"] == 1 for engine in made))
        be = b.submit("def f(", "BE", 4_000, ignore_eos=True, seed=1)
        wait_for(lambda: len(be.token_ids) > 5)
        assert b.stats()["pressure"] == {"is_on": False, "holds": 0, "met": 1}
        ls = a.submit("def g(", "LS", 4_000, ignore_eos=True, seed=1)
        wait_for(lambda: b.stats()["pressure"]["is_on"])
        assert a.stats()["pressure"]["is_on"] is False
        num_ls, num_be = len(ls.token_ids), len(be.token_ids)
        wait_for(lambda: len(ls.token_ids) > num_ls + 300)
        slowed = len(be.token_ids) - num_be
        assert slowed < (len(ls.token_ids) - num_ls) / 4
        assert b.stats()["pressure"]["holds"] > 0
        os.kill(pid_of(a), signal.SIGKILL)
        wait_for(
            lambda: b.stats()["pressure"] | {"holds": 0} == {"is_on": False, "holds": 0, "met": 0}
        )
        num_be = len(be.token_ids)
        wait_for(lambda: len(be.token_ids) > num_be + 100)
        be.cancel()
