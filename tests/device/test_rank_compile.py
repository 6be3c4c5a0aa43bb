"""A policy's `rank`, compiled: Python's numbers, and refusals that name line and reason."""

import ctypes
import inspect
import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from qllm.cli import app
from qllm.device.cubins import KERNELS, link_kernel, link_verbosely
from qllm.device.rank import ARCHITECTURES, compile_device, compile_host
from qllm.errors import ConfigError
from qllm.plugins import load_policy
from qllm.policy import NO_DEADLINE, RankPolicy
from qllm.types import NS_PER_MS, Priority
from scripts.turn_cost import spilled
from tests.support.new_policy import made

LIMIT = 7 * NS_PER_MS
RANKED = ["fcfs", "ls-first", "priority", "qllm2", "chunked", "chunked-priority", "edf"]
RANKED += ["layered", "priority-layered"]
runner = CliRunner()


def native(policy: Any) -> Any:
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 7, ctypes.POINTER(ctypes.c_int64))
    function = kind(compile_host(policy).address)

    def rank(*numbers: int) -> tuple[int, int]:
        out = (ctypes.c_int64 * 2)()
        function(*numbers, out)
        return out[0], out[1]

    return rank


@dataclass(frozen=True, kw_only=True)
class Everything(RankPolicy):
    """Every piece of the language."""

    weight: int = -3
    urgent: bool = True

    def rank(
        self,
        arrival_ns: int,
        priority: int,
        deadline_ns: int,
        prompt_tokens: int,
        done_tokens: int,
        served_ns: int,
        now_ns: int,
    ) -> tuple[int, int]:
        age: int = (now_ns - arrival_ns) // LIMIT
        left = max(prompt_tokens - done_tokens, 0, self.weight)
        left += abs(self.weight) << 2
        if self.urgent and not priority > Priority.LS:
            return (0, -age) if deadline_ns < 2**62 else (1, left % 5)
        elif age >= 3 or served_ns == 0:
            return priority - 1, left & 0xFF | 1
        late = -7 // (left + 1) ^ 3
        return (priority, late) if deadline_ns != NO_DEADLINE else (priority + 1, served_ns >> 3)


TIMES = st.integers(-(2**40), 2**45)


@settings(max_examples=300, deadline=None)
@given(
    st.tuples(
        TIMES,
        st.integers(-9, 30),
        TIMES | st.just(NO_DEADLINE),
        st.integers(1, 9000),
        st.integers(0, 9000),
        TIMES,
        TIMES,
    )
)
def test_the_whole_language_gives_pythons_numbers(numbers: tuple[int, ...]) -> None:
    for policy in (Everything(), Everything(weight=11, urgent=False)):
        assert native(policy)(*numbers) == policy.rank(*numbers)


@pytest.mark.parametrize("name", RANKED)
def test_an_installed_rank_gives_pythons_numbers(name: str) -> None:
    policy, rng = load_policy(name), random.Random(4)
    rank = native(policy)
    for _ in range(100):
        deadline = rng.choice([NO_DEADLINE, rng.randrange(10**12)])
        numbers = [rng.randrange(10**12), rng.choice([0, 10]), deadline]
        numbers += [rng.randrange(1, 999), rng.randrange(999), rng.randrange(10**9)]
        assert rank(*numbers, 10**12) == policy.rank(*numbers, 10**12)


def test_what_qllm_new_policy_writes_compiles_for_the_host(tmp_path: Path) -> None:
    policy = made(tmp_path, "rank")(tokens_per_ms=2)
    numbers = (5_000_000, 10, 2**62, 70, 0, 0, 8_999_999)
    assert native(policy)(*numbers) == policy.rank(*numbers) == (10, 64)


# -- refusals


def refused(body: str, tmp_path: Path, field: str = "") -> str:
    """What compiling a rank with this body says, without the folder."""
    lines = ["from qllm.policy import RankPolicy", "def helper(x): return x", "TABLE = (1, 2)"]
    lines += ["class Mine(RankPolicy):", f"    {field or 'pass'}"]
    lines += ["    def rank(self, a, priority, deadline_ns, prompt, done, served, now):"]
    file = tmp_path / "mine.py"
    file.write_text("\n".join([*lines, *(f"        {line}" for line in body.split("\n"))]) + "\n")
    names: dict[str, Any] = {"__name__": "mine"}
    exec(compile(file.read_text(), str(file), "exec"), names)
    with pytest.raises(ConfigError) as caught:
        compile_host(names["Mine"]())
    return str(caught.value).replace(f"{tmp_path}/", "")


@pytest.mark.parametrize(
    ("body", "line", "reason"),
    [
        ("return priority, a / 2", 7, "uses Div"),
        ("return priority, 0.5", 7, "0.5 is not a 64-bit whole number"),
        ("return priority, 1 << 2**63", 7, "9223372036854775808 is not a 64-bit whole number"),
        ("x = a\nfor i in range(3):\n    x += i\nreturn 0, x", 8, "calls range"),
        ("x = a\nwhile x:\n    x -= 1\nreturn 0, x", 8, "uses While"),
        ("return priority, helper(a)", 7, "calls helper; only min, max, abs can be called"),
        ("return priority, self.weight()", 7, "calls self.weight"),
        ("return priority, self.missing", 7, "self.missing is None, not a whole number"),
        ("return priority, TABLE[0]", 7, "TABLE is (1, 2), not a whole number"),
        ("x = a, now\nreturn 0, 1", 7, "a tuple, other than the one that is returned"),
        ("x, y = a, now\nreturn x, y", 7, "only plain names can be assigned to"),
        ("return [priority, a]", 7, "uses List"),
        ("return priority", 7, "must return tier, key: two whole numbers"),
        ("return priority, a, now", 7, "must return tier, key: two whole numbers"),
        ("if a > 3:\n    return 0, a", 6, "not every path returns a (tier, key)"),
        ("return 0, unknown", 7, "unknown is None, not a whole number"),
        ("return 0, (lambda: 3)()", 7, "calls lambda: 3"),
        ("return 0, a**2", 7, "uses Pow"),
    ],
)
def test_a_refusal_names_the_line_and_the_reason(
    body: str, line: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect, "getfile", lambda thing: str(tmp_path / "mine.py"))
    said = refused(body, tmp_path)
    assert said.startswith(f"rank of policy Mine cannot be compiled: mine.py:{line}: "), said
    assert reason in said


def test_a_field_that_is_no_whole_number_is_refused(tmp_path: Path) -> None:
    said = refused("return 0, self.share", tmp_path, "share = 0.5")
    assert "mine.py:7: self.share is 0.5, not a whole number" in said


def test_a_policy_may_say_that_it_cannot_be_compiled() -> None:
    class Mine(RankPolicy):
        compilable = False

    with pytest.raises(ConfigError, match="policy Mine says compilable=False"):
        compile_host(Mine())


def test_without_numba_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ConfigError, match="not installed; pip install numba cuda-core"):
        compile_host(Everything(weight=12345))
    with pytest.raises(ConfigError, match="; pip install numba cuda-core"):
        compile_device(Everything(), (9, 0))


# -- for devices, of which none is here: compiled and linked, never run


def test_every_architecture_gets_its_lto_ir() -> None:
    codes = {cc: compile_device(Everything(), cc) for cc in ARCHITECTURES}
    assert all(len(code) > 1000 for code in codes.values())
    assert codes != {cc: compile_device(load_policy("fcfs"), cc) for cc in ARCHITECTURES}


def test_rank_is_linked_into_the_scheduler_kernel_and_nothing_is_spilled() -> None:
    cubin, log = link_verbosely(load_policy("qllm2"), (9, 0))
    assert cubin.startswith(b"\x7fELF")
    assert all(kernel.encode() in cubin for kernel in KERNELS)
    assert spilled(log, "qllm_turn") == {}
    used = re.search(r"entry function 'qllm_turn'.*?Used (\d+) registers", log, re.DOTALL)
    assert used
    assert int(used[1]) * 256 <= 65536  # one block fits a multiprocessor


def test_what_functions_spill_is_read_of_the_linkers_log() -> None:
    of = "Function properties for {}\n  {} bytes stack frame, "
    of += "{} bytes spill stores, {} bytes spill loads\n"
    log = "Compiling entry function 'a' for 'sm_90'\n" + of.format("a", 8, 0, 0)
    log += of.format("f", 8, 4, 8) + "Compiling entry function 'b' for 'sm_90'\n"
    log += of.format("b", 0, 16, 0)
    assert spilled(log, "a") == {"f": 12}
    assert spilled(log, "b") == {"b": 16}


@pytest.mark.slow  # one architecture: test_rank_is_linked_into_the_scheduler_kernel_and_...
@pytest.mark.parametrize(
    ("name", "capability"),
    [("edf", (8, 0)), ("priority-layered", (10, 0)), ("edf", (12, 0))],
)
def test_every_architecture_gets_its_kernel(name: str, capability: tuple[int, int]) -> None:
    """With sm_90, of which the test above says more: four architectures."""
    cubin = link_kernel(load_policy(name), capability)
    assert cubin.startswith(b"\x7fELF")
    assert b"qllm_turn" in cubin


# -- the command


def test_the_command_says_for_what_it_compiled() -> None:
    done = runner.invoke(app, ["policies", "--compile", "edf"])
    assert done.exit_code == 0
    assert "edf: rank compiles for this machine\n" in done.stdout
    found = re.findall(r"rank compiles for (sm_\d+), \d{4} bytes of LTO-IR", done.stdout)
    assert found == ["sm_80", "sm_90", "sm_100", "sm_120"]


def test_the_command_refuses_in_one_line() -> None:
    done = runner.invoke(app, ["policies", "--compile", "mlfq"])
    assert done.exit_code == 2
    assert "policy Mlfq plans by itself" in done.stderr
    assert done.stderr.count("\n") == 1
