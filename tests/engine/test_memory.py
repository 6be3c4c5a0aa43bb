"""The memory that an engine may take on a machine with other engines and programs."""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from qllm import QLLMEngine
from qllm.config import EngineConfig
from qllm.cores import Held, held_bytes
from qllm.engine import memory
from qllm.engine.memory import Claim, Others, free_for
from qllm.engine.sizes import SIZES
from qllm.errors import ConfigError
from qllm.runner.kv import SlabKV
from tests.support.engines import LONG

GIB = 1 << 30
NOBODY = Others()
OPEN = dict.fromkeys(SIZES)
CLAIMS = """
import sys
from pathlib import Path
from qllm.engine.memory import Claim
claim = Claim("cpu", Path(sys.argv[1]))
if sys.argv[2] != "loading":
    with claim.others():
        claim.tell(int(sys.argv[2]))
print("told", flush=True)
for line in sys.stdin:
    block = b"x" * int(line)
    print("taken", flush=True)
"""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 20 GiB free of 24; this process holds 2 GiB, of which 1.5 are in files."""
    monkeypatch.setattr(memory, "free_bytes", lambda: 20 * GIB)
    monkeypatch.setattr(memory, "memory_bytes", lambda: 24 * GIB)
    monkeypatch.setattr(memory, "held_bytes", lambda pid="self": Held(GIB // 2, 3 * GIB // 2))


def free(others: Others = NOBODY, weights: int = 0, **settings: Any) -> float:
    return free_for(EngineConfig(**settings), weights, others, on_cuda=False) / GIB


def test_weights_in_mapped_files_are_not_free(machine: None) -> None:
    assert free() == 18.5, "what is mapped now"
    assert free(weights=GIB) == 18.5
    assert free(weights=9 * GIB) == 11.5, "and what of the weights is not in memory yet"


def test_other_engines_keep_what_they_were_promised(machine: None) -> None:
    assert free(Others(num_bytes=10 * GIB)) == 8.5
    assert free(Others(num_bytes=30 * GIB)) == 0
    assert free(Others(num_open=1)) == 9.25, "each of two engines that start gets a half"
    assert free(Others(10 * GIB, 1)) == 4.25


def test_a_budget_counts_everything_that_the_process_holds(machine: None) -> None:
    assert free(memory="10GiB") == 8
    assert free(Others(50 * GIB, 3), memory="10GiB") == 8, "whatever others promise"
    assert free(weights=9 * GIB, memory="10GiB") == 1
    with pytest.raises(ConfigError) as refused:
        free(weights=9 * GIB, memory="8GiB")
    for number in (8 * GIB, 9 * GIB, 9 * GIB):
        assert str(number) in str(refused.value)
    with pytest.raises(ConfigError, match=f"memory={30 * GIB} is more than the machine"):
        free(memory="30GiB")


@pytest.fixture
def others(tmp_path: Path) -> Iterator[Any]:
    """Make engines of other processes, as far as their claims go."""
    made: list[subprocess.Popen[str]] = []

    def make(told: str) -> subprocess.Popen[str]:
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen([sys.executable, "-c", CLAIMS, str(tmp_path), told], **pipes)
        assert process.stdout is not None
        assert process.stdout.readline() == "told\n"
        made.append(process)
        return process

    yield make
    for process in made:
        process.kill()
        process.communicate()


def seen(claim: Claim) -> Others:
    with claim.others() as found:
        return found


def test_engines_see_each_other_until_they_end(tmp_path: Path, others: Any) -> None:
    claim = Claim("cpu", tmp_path)
    assert seen(claim) == Others()
    one, two = others("loading"), others(str(8 * GIB))
    found = seen(claim)
    assert found.num_open == 1
    assert 7.9 * GIB < found.num_bytes <= 8 * GIB
    on_gpu = Claim("cuda", tmp_path)
    assert seen(on_gpu) == Others(), "another kind of memory"
    on_gpu.close()
    os.kill(two.pid, signal.SIGKILL)
    two.wait()
    assert seen(claim) == Others(num_open=1)
    one.communicate()
    assert seen(claim) == Others()
    assert {file.name for file in tmp_path.iterdir()} == {"lock", claim._file.name}
    claim.close()
    claim.close()


def test_memory_that_an_engine_has_taken_is_not_counted_twice(tmp_path: Path, others: Any) -> None:
    mine, other = Claim("cpu", tmp_path), others(str(GIB))
    before = seen(mine).num_bytes
    other.stdin.write(f"{100 << 20}\n")
    other.stdin.flush()
    assert other.stdout.readline() == "taken\n"
    assert 90 << 20 < before - seen(mine).num_bytes < 110 << 20
    mine.close()


def test_a_claim_that_fails_halfway_leaves_no_file_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(pid: object = "self") -> None:
        raise RuntimeError("no such process")

    with monkeypatch.context() as patch:
        patch.setattr(memory, "held_bytes", failing)
        with pytest.raises(RuntimeError, match="no such process"):
            Claim("cpu", tmp_path)
    other = Claim("cpu", tmp_path)
    with other.others() as found:
        assert found == Others()
    other.close()


def test_a_folder_that_cannot_be_used_is_said_and_harms_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    claim = Claim("cpu", tmp_path / "file" / "claims")
    assert "may count on the same memory" in caplog.text
    assert seen(claim) == Others()
    claim.tell(5)
    claim.close()


def test_two_engines_in_a_row_share_and_both_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(memory, "free_bytes", lambda: 100 << 20)
    monkeypatch.setattr(memory, "held_bytes", lambda pid="self": Held(0, 0))
    folder = tmp_path / f"qllm-memory-{os.getuid()}"
    made = [
        QLLMEngine.from_pretrained("tiny", run_in="thread", conformance=False, threads=1, **OPEN)
        for _ in range(2)
    ]
    first, second = (engine.stats()["memory"] for engine in made)
    assert second["free_bytes"] == first["free_bytes"] - first["kv_bytes"] - first["kept_bytes"]
    assert second["kv_bytes"] < first["kv_bytes"]
    for engine in made:
        engine.close()
    assert [file.name for file in folder.iterdir()] == ["lock"]
    assert folder.stat().st_mode & 0o777 == 0o700


def num_resident(address: int, num_bytes: int) -> int:
    """Return how many bytes of a range of addresses are in memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    first, last = address // page, -(-(address + num_bytes) // page)
    there = (ctypes.c_ubyte * (last - first))()
    libc = ctypes.CDLL(None, use_errno=True)
    start, size = ctypes.c_void_p(first * page), ctypes.c_size_t((last - first) * page)
    assert libc.mincore(start, size, there) == 0, os.strerror(ctypes.get_errno())
    return page * sum(flag & 1 for flag in bytes(there))


def test_kv_is_reserved_as_addresses_and_takes_memory_as_it_fills() -> None:
    num_layers, heads, width, longest = 2, 2, 64, 1 << 18
    kv, like = SlabKV(num_layers, longest), torch.zeros((1, heads, 64, width))
    whole = 2 * num_layers * heads * longest * width * 4
    place, _ = kv.base((heads, width, width), like)
    assert num_resident(place, whole // 2) < 1 << 20, "of 256 MiB"
    for layer in range(num_layers):
        for lo in range(0, 1024, 64):
            kv.write(layer, like, like, lo)
    written = whole // 2 // longest * 1024
    assert written <= num_resident(place, whole // 2) < written + (1 << 20)


def test_an_engine_that_chooses_its_sizes_takes_none_of_that_memory_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(memory, "free_bytes", lambda: 64 * GIB)
    before = held_bytes()
    with QLLMEngine.from_pretrained("tiny", run_in="thread", threads=1, **OPEN) as engine:
        after, said = held_bytes(), engine.stats()["memory"]
        assert before is not None
        assert after is not None
        assert said["kept_bytes"] > 1 << 30
        assert after.own - before.own < said["kept_bytes"] // 4
        assert engine.config.pool_tokens == said["kv_tokens"] >= 65536
        assert set(engine.client.info.chosen) == set(SIZES)
        told = json.dumps(engine.stats()["memory"])
        assert engine.submit("def f(", "LS", 4, sampling=LONG).result(60)
        assert told == json.dumps(engine.stats()["memory"])


def test_an_engine_in_a_process_tells_its_front_end_what_it_chose() -> None:
    with QLLMEngine.from_pretrained(
        "tiny", threads=1, conformance=False, memory="1GiB", **OPEN
    ) as engine:
        said = engine.stats()["memory"]
        assert said["budget_bytes"] == 1 << 30
        assert said["kv_bytes"] + said["kept_bytes"] <= said["free_bytes"] < 1 << 30
        assert engine.config.prefix_cache_tokens == said["kept_tokens"]
        assert engine.config.max_kv_tokens == said["kv_tokens"]
        assert engine.submit("def f(", "LS", 4, sampling=LONG).result(60)


@pytest.mark.parametrize("run_in", ["process", "thread"])
def test_a_model_that_does_not_fit_its_budget_is_refused_with_the_numbers(run_in: str) -> None:
    with pytest.raises(ConfigError, match=r"memory=104857600 is too little.*\d{8,} bytes are in"):
        QLLMEngine.from_pretrained("tiny", run_in=run_in, memory="100MiB", **OPEN)


def test_sizes_by_hand_beyond_the_budget_are_refused() -> None:
    held = held_bytes()
    assert held is not None
    memory = held.own + held.in_files + (1 << 30)  # this process has other models, too
    with pytest.raises(ConfigError, match=r"memory=\d+ leaves \d+ bytes for KV"):
        QLLMEngine.from_pretrained("tiny", run_in="thread", memory=memory, max_kv_tokens=1 << 28)
