"""Compiled kernels are found again, and only where nothing that they come from has changed."""

from pathlib import Path
from typing import Any

import pytest

from qllm.device import cubins
from qllm.plugins import load_policy


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, int]]]:
    """What was compiled, by policy and capability; compiling takes no time here."""
    calls: list[tuple[str, tuple[int, int]]] = []

    def link(policy: Any, capability: tuple[int, int]) -> bytes:
        calls.append((repr(policy), capability))
        return b"\x7fELF" + repr(calls[-1]).encode()

    monkeypatch.setattr(cubins, "link_kernel", link)
    return calls


def test_a_kernel_is_compiled_once(compiled: list[Any], tmp_path: Path) -> None:
    policy = load_policy("qllm2")
    first = cubins.kernel_of(policy, (9, 0), tmp_path)
    assert first == cubins.kernel_of(load_policy("qllm2"), (9, 0), tmp_path)
    assert len(compiled) == 1
    assert first.startswith(b"\x7fELF")


def test_whatever_it_comes_from_makes_another(
    compiled: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_policy("edf")
    cubins.kernel_of(policy, (9, 0), tmp_path)
    cubins.kernel_of(policy, (8, 0), tmp_path)
    cubins.kernel_of(load_policy("fcfs"), (9, 0), tmp_path)
    assert len(compiled) == 3
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "scheduler.h").write_text("// changed")
    monkeypatch.setattr(cubins, "HEADER", sources / "state.h")
    cubins.kernel_of(policy, (9, 0), tmp_path)
    assert len(compiled) == 4


@pytest.mark.parametrize("damage", [b"", b"\x7fELF", b"x" * 200])
def test_a_damaged_file_is_compiled_anew(
    compiled: list[Any], tmp_path: Path, damage: bytes
) -> None:
    policy = load_policy("edf")
    good = cubins.kernel_of(policy, (9, 0), tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage)
    assert cubins.kernel_of(policy, (9, 0), tmp_path) == good
    assert cubins.kernel_of(policy, (9, 0), tmp_path) == good
    assert len(compiled) == 2
    assert list(tmp_path.iterdir()) == [file], "a part was left behind"


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cubins.cache_folder() == tmp_path / "qllm" / "cubins"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cubins.cache_folder() == Path.home() / ".cache" / "qllm" / "cubins"
