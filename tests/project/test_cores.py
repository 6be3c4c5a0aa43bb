import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from qllm import QLLMEngine
from qllm.cli import app
from qllm.cores import (
    Held,
    free_bytes,
    held_bytes,
    memory_bytes,
    num_threads,
    parse_threads,
    shared_out,
    usable_cores,
)
from qllm.errors import ConfigError
from qllm.kernels import cpu
from qllm.server.config import load_config


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def written(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_quotas_the_affinity_counts(many_cores: None, tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "none", tmp_path) == 8
    written(tmp_path / "cgroup", "0::/a\n")
    written(tmp_path / "a" / "cpu.max", "max 100000\n")
    assert usable_cores(tmp_path / "cgroup", tmp_path) == 8


@pytest.mark.parametrize(("quota", "cores"), [(50_000, 1), (250_000, 2), (1_600_000, 8)])
def test_the_smallest_quota_up_to_the_root_counts(
    many_cores: None, tmp_path: Path, quota: int, cores: int
) -> None:
    written(tmp_path / "cgroup", "1:memory:/x\n0::/a/b\n")
    written(tmp_path / "a" / "cpu.max", f"{quota} 100000\n")
    written(tmp_path / "a" / "b" / "cpu.max", "700000 100000\n")
    assert usable_cores(tmp_path / "cgroup", tmp_path) == min(cores, 7)


@pytest.mark.parametrize(("quota", "cores"), [(-1, 8), (300_000, 3)])
def test_quotas_of_version_1_count(
    many_cores: None, tmp_path: Path, quota: int, cores: int
) -> None:
    written(tmp_path / "cgroup", "4:cpu,cpuacct:/a\n")
    for name, value in (("quota", quota), ("period", 100_000)):
        written(tmp_path / "cpu,cpuacct" / f"cpu.cfs_{name}_us", f"{value}\n")
    assert usable_cores(tmp_path / "cgroup", tmp_path) == cores


@pytest.mark.parametrize("limit", ["max", "1000000", str(1 << 62)])
@pytest.mark.parametrize(
    ("groups", "file"),
    [("0::/a/b\n", "a/memory.max"), ("4:memory:/a/b\n", "memory/a/memory.limit_in_bytes")],
)
def test_the_smallest_limit_of_memory_counts(
    tmp_path: Path, groups: str, file: str, limit: str
) -> None:
    whole = memory_bytes(tmp_path / "none", tmp_path)
    assert whole == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    written(tmp_path / "cgroup", "3:cpu:/c\n" + groups)
    written(tmp_path / file, limit + "\n")
    found = memory_bytes(tmp_path / "cgroup", tmp_path)
    assert found == (1_000_000 if limit == "1000000" else whole)


def test_threads_are_a_number_auto_or_left_to_torch() -> None:
    assert num_threads(None) is None
    assert num_threads(3) == 3
    assert num_threads("auto") == usable_cores() <= len(os.sched_getaffinity(0))
    for wrong in (0, -1, True, "many", 1.5):
        with pytest.raises(ConfigError, match="threads="):
            num_threads(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="threads='many'"):
        QLLMEngine.from_pretrained("tiny", threads="many")  # type: ignore[arg-type]


def test_threads_from_a_command_line_or_an_environment() -> None:
    assert [parse_threads(text) for text in ("3", "auto")] == [3, usable_cores()]
    for wrong in ("0", "-1", "--3", "many", "1.5", ""):
        with pytest.raises(ConfigError, match="threads="):
            parse_threads(wrong)
    environ = {"QLLM_MODEL": "tiny", "QLLM_THREADS": "auto"}
    assert load_config(None, environ, {}).threads == usable_cores()
    with pytest.raises(ConfigError, match="threads='many'"):
        load_config(None, environ | {"QLLM_THREADS": "many"}, {})
    refused = CliRunner().invoke(app, ["run", "tiny", "Hi", "--threads", "0"])
    assert refused.exit_code
    assert "threads=0 must be an integer" in " ".join(refused.output.split())


@pytest.fixture
def one_core() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    cpu.set_threads(1)
    os.sched_setaffinity(0, before)


def test_more_threads_than_cores_do_not_collapse(one_core: None) -> None:
    """A pool that waits without yielding burns time slices: 10 times the CPU time and more."""
    matrix = cpu.Matrix([torch.ones(512, 512).bfloat16()])
    x = torch.ones(8, 512).bfloat16()

    def least_cpu_s() -> float:
        times: list[Any] = []
        for _ in range(30):
            start = time.process_time()
            for _ in range(20):
                matrix.linear(x)
            times.append(time.process_time() - start)
        return float(min(times))

    cpu.set_threads(1)
    alone = least_cpu_s()
    cpu.set_threads(3)
    assert least_cpu_s() < 3 * alone


def bits(x: Tensor) -> bytes:
    """Found without torch's threads, which a fork has not."""
    return x.view(torch.int16).numpy().tobytes()


def busy(matrix: cpu.Matrix, x: Tensor, wanted: Tensor, until: threading.Event) -> bool:
    same = torch.equal(matrix.linear(x), wanted)
    while same and not until.is_set():
        same = torch.equal(matrix.linear(x), wanted)
    return same


def test_threads_change_while_a_kernel_computes() -> None:
    """An engine that is loaded sets them for the process, beside one that serves."""
    matrix = cpu.Matrix([torch.randn(512, 64, dtype=torch.float32).bfloat16()])
    x, until = torch.randn(8, 64, dtype=torch.float32).bfloat16(), threading.Event()
    wanted = matrix.linear(x)
    try:
        with ThreadPoolExecutor(2) as pool:
            found = [pool.submit(busy, matrix, x, wanted, until) for _ in range(2)]
            for i in range(200):
                cpu.set_threads(1 + i % 4)
            until.set()
            assert all(one.result() for one in found)
    finally:
        until.set()
        cpu.set_threads(1)


def test_a_fork_has_threads_of_its_own_while_its_parent_computes() -> None:
    matrix = cpu.Matrix([torch.randn(512, 512, dtype=torch.float32).bfloat16()])
    x = torch.randn(1000, 512, dtype=torch.float32).bfloat16()  # which takes some milliseconds
    until = threading.Event()
    cpu.set_threads(3)
    wanted = matrix.linear(x)
    other = threading.Thread(target=busy, args=(matrix, x, wanted, until))
    other.start()
    try:
        for _ in range(3):
            pid = os.fork()
            if pid == 0:
                signal.alarm(120)  # ends a child that hangs
                cpu.set_threads(2)
                os._exit(int(bits(matrix.linear(x)) != bits(wanted)))
            assert os.waitpid(pid, 0)[1] == 0
    finally:
        until.set()
        other.join()
        cpu.set_threads(1)


def _linux(tmp_path: Path, available: int) -> dict[str, Path]:
    """Write what Linux says of its memory, in kB, and return where."""
    written(tmp_path / "meminfo", f"MemTotal: 24000 kB\nMemAvailable: {available} kB\nOdd: x\n")
    return {"groups": tmp_path / "cgroup", "root": tmp_path, "machine": tmp_path / "meminfo"}


@pytest.mark.parametrize(
    ("groups", "folder", "names", "prefix"),
    [
        ("0::/a/b\n", "a", ("memory.max", "memory.current"), ""),
        (
            "4:memory:/a/b\n",
            "memory/a",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            "total_",
        ),
    ],
)
def test_what_a_control_group_leaves_is_free_with_its_cached_files(
    tmp_path: Path, groups: str, folder: str, names: tuple[str, str], prefix: str
) -> None:
    where = _linux(tmp_path, 20_000)
    assert free_bytes(**where) == 20_000 * 1024, "without a group"
    written(where["groups"], groups)
    limit, use = (tmp_path / folder / name for name in names)
    written(use, "9000000\n")
    stat = f"{prefix}active_file 1000000\n{prefix}inactive_file 500000\n{prefix}anon 7000000\n"
    written(tmp_path / folder / "memory.stat", stat)
    for text, free in (("max", 20_000 * 1024), ("10000000", 2_500_000), ("8000000", 500_000)):
        written(limit, text + "\n")
        assert free_bytes(**where) == free
    written(limit, "7000000\n")
    assert free_bytes(**where) == 0, "a limit that was lowered below what is used"
    written(tmp_path / "meminfo", "MemAvailable: 100 kB\n")
    written(limit, "10000000\n")
    assert free_bytes(**where) == 100 * 1024, "the machine has less than the group"


def test_a_process_holds_its_own_memory_and_parts_of_files(tmp_path: Path) -> None:
    text = "Name:\tx\nRssAnon:\t  10 kB\nRssFile:\t  7 kB\nRssShmem:\t  1 kB\n"
    written(tmp_path / "5" / "status", text)
    assert held_bytes(5, tmp_path) == Held(11 * 1024, 7 * 1024)
    assert held_bytes(6, tmp_path) is None
    found = held_bytes()
    assert found is not None
    assert found.own > 1 << 20


def test_pages_of_several_processes_count_once_where_linux_says_so(tmp_path: Path) -> None:
    for pid, own in ((5, 10), (6, 30)):
        written(tmp_path / str(pid) / "status", f"RssAnon:\t {own} kB\nRssFile:\t 7 kB\n")
        parts = f"Pss_Anon:\t {own // 2} kB\nPss_File:\t 3 kB\nPss_Shmem:\t 1 kB\n"
        written(tmp_path / str(pid) / "smaps_rollup", f"55-66 ---p 0 0:0 0 [rollup]\n{parts}")
    assert shared_out([5, 6], tmp_path) == Held(22 * 1024, 6 * 1024)
    (tmp_path / "6" / "smaps_rollup").unlink()
    assert shared_out([5, 6], tmp_path) == Held(40 * 1024, 14 * 1024)
    assert shared_out([5, 7], tmp_path) == Held(10 * 1024, 7 * 1024)
