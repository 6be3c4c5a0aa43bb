"""The sizes of a model, counted before its experts are loaded, equal those of a loaded engine."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from qllm.block_file import Blocks
from qllm.cli import app
from qllm.config import EngineConfig
from qllm.errors import ConfigError
from qllm.kernels import cpu
from qllm.measure import disk_rate as rates
from qllm.measure import fit as fits
from qllm.measure.disk_rate import disk_rate
from qllm.measure.fit import Fit, fit_of
from qllm.models.weights.expert_file import ExpertLayer, Part
from qllm.models.weights.quantised_linears import weight_bytes
from tests.support import published
from tests.support.experts_in_file import gguf_of, loaded, saved
from tests.support.families import FAMILIES
from tests.support.serving import tiny_engine
from tests.support.streaming import made

assert cpu.MISSING is None, cpu.MISSING


def assert_is_loaded(path: Path, how: str = "auto") -> None:
    """Compare with a load that writes the file."""
    fit = fit_of(str(path), EngineConfig(expert_weights=how), dtype="bfloat16")
    model, file = loaded(path, how)
    assert fit.expert_bytes == file.num_bytes > 0
    assert fit.rest_bytes + file.num_bytes == weight_bytes(model)
    assert [layer.num_experts for layer in fit.layers] == [e.num_experts for e in file.layers]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", ["auto", "int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_are_those_of_a_file(tmp_path: Path, family: str, how: str) -> None:
    assert_is_loaded(saved(tmp_path, family), how)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", published.FORMATS)
def test_bytes_of_a_quantised_checkpoint_are_those_of_a_file(tmp_path: Path, form: str) -> None:
    assert_is_loaded(made(tmp_path, "qwen3_moe", form))


def test_bytes_of_a_gguf_file_are_those_of_a_file(tmp_path: Path) -> None:
    assert_is_loaded(gguf_of(tmp_path, "Q4_0"))


def test_numbers_are_those_of_an_engine(tmp_path: Path) -> None:
    own: dict[str, Any] = {"max_expert_bytes": 4 << 20, "expert_dir": str(tmp_path)}
    fit = fit_of("tiny", EngineConfig(**own))
    with tiny_engine(run_in="thread", conformance=False, **own) as engine:
        stats = engine.stats()
    assert fit.rest_bytes + (4 << 20) == stats["weight_bytes"]
    experts = stats["experts"]
    assert (fit.num_slots, fit.num_experts) == (experts["slots"], experts["experts"])
    assert fit.expert_bytes == experts["file_bytes"]
    assert fit.token_bytes * stats["memory"]["kv_tokens"] == stats["memory"]["kv_bytes"]


def test_less_memory_than_the_rest_takes_is_refused() -> None:
    with pytest.raises(ConfigError, match="memory=1000000 is too little for the model"):
        fit_of("tiny", EngineConfig(memory=1_000_000))


def made_up(**more: Any) -> Fit:
    """Two layers of four and two experts, of which a token uses one."""
    parts = (Part("up", 0, 4096),)
    layers = ExpertLayer("a", 4, 1, 1, parts), ExpertLayer("b", 2, 1, 1, parts)
    found = Fit(layers, 1, 7, 10, 40_960, 10_240, None, 0)
    return found._replace(**more)


def test_a_token_reads_the_share_of_its_experts_that_is_not_in_memory() -> None:
    assert made_up().budget == 30_720
    assert made_up().num_slots == 6
    assert (made_up().decode_bytes, made_up().prompt_bytes(9)) == (0, 0)
    some = made_up(given_bytes=3 * 4096 + 1)
    assert some.num_slots == 3
    assert some.decode_bytes == 2 * 4096 / 2
    assert some.prompt_bytes(1) == 2 * 4096
    assert some.prompt_bytes(2) == 4096 * (4 * (1 - 0.75**2) + 2 * (1 - 0.5**2))
    assert some.prompt_bytes(1000) == pytest.approx(6 * 4096)
    assert made_up(free_bytes=0).num_slots == 0
    assert made_up(packing_bytes=5000).least == 5000
    assert made_up(top_k=2, packing_bytes=5000).least == 8192


# -- the disk


def test_each_part_of_a_file_is_read_once_and_the_file_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads bypass the page cache if the file system can."""
    places = Counter[int]()
    read = Blocks.read

    def reading(blocks: Blocks, data: memoryview, at: int) -> bool:
        assert len(data) == 8192
        places[at] += 1
        return read(blocks, data, at)

    monkeypatch.setattr(Blocks, "read", reading)
    monkeypatch.setattr(rates, "MOST_BYTES", 81_920)
    times = iter([5.0] * 11 + [5.5])  # the start, a look before each of ten reads, and the end
    found = disk_rate(tmp_path / "new" / "folder", 5000, lambda: next(times))
    assert places == dict.fromkeys(range(0, 81_920, 8192), 1)
    assert found.bytes_per_s == 81_920 / 0.5
    assert list((tmp_path / "new" / "folder").iterdir()) == []


def test_a_slow_disk_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(rates, "NUM_THREADS", 1)
    times = iter([0.0, 0.0, 1.0, 2.0, 4.0])
    assert disk_rate(tmp_path, 4096, lambda: next(times)).bytes_per_s == 2 * 4096 / 4


def test_an_error_of_the_disk_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> bool:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(rates, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(Blocks, "read", failing)
    with pytest.raises(ConfigError, match=r"cannot be measured \(.*Input/output error"):
        disk_rate(tmp_path, 4096)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="give a folder that may be written"):
        disk_rate(tmp_path / "file", 4096)


# -- the command


def doctor(*flags: str) -> str:
    done = CliRunner().invoke(app, ["doctor", *flags])
    assert done.exit_code == 0, done.output
    return " ".join(done.stdout.split())


def test_doctor_loads_no_experts_that_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fits, "free_for", lambda *_, **__: 5_000_000)
    monkeypatch.setattr(rates, "MOST_BYTES", 1 << 20)
    said = doctor("--memory", "1GiB", "--expert-dir", str(tmp_path))
    assert "its experts 7,077,888 bytes: 32 in 4 layers" in said
    assert "a token uses 2 of 8 in a layer" in said
    assert "memory beside them 5,000,000 bytes, of which KV has 1,250,000" in said
    assert "what fits 16 of 32 experts: --max-expert-bytes 3750000 --expert-dir FOLDER" in said
    assert "its disk" in said
    assert "ms for 884,736 bytes" in said
    assert "at most" in said
    assert "its depth" not in said, "no engine is made"
    assert list(tmp_path.iterdir()) == []
    said = doctor("--memory", "1GiB", "--set", "max_kv_tokens=4000")
    assert "too little: 4 of 32 experts, and an engine needs max_expert_bytes of at least" in said
    assert "its disk" not in said


def test_doctor_loads_a_model_that_fits(tmp_path: Path) -> None:
    said = doctor("--memory", "3GiB")
    assert "what fits all experts" in said
    assert "its depth 4 of 4 layers" in said
    given = "--max-expert-bytes", "4MiB", "--expert-dir", str(tmp_path)
    said = doctor(*given)
    assert "what fits 18 of 32 experts, by max_expert_bytes=4194304" in said
    assert "its slots room for 18 of 32 experts in memory" in said
