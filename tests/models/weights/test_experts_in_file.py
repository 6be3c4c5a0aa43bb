"""Models whose experts go to a file: the bytes of a bank, never together in memory."""

import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qllm.block_file import FileLock
from qllm.errors import ConfigError
from qllm.kernels import cpu
from qllm.models.loader import load
from qllm.models.weights import checkpoint, experts_in_file
from qllm.models.weights.expert_file import IN_FILE, ExpertFile
from qllm.models.weights.experts_in_file import ExpertsInFile
from qllm.models.weights.quantised_linears import all_linears
from qllm.models.weights.raw_file import RawFile
from tests.support import published
from tests.support.experts_in_file import (
    EXPERTS_IN_FILE,
    assert_file_is_bank,
    gguf_of,
    loaded,
    saved,
)
from tests.support.families import FAMILIES, make_model
from tests.support.streaming import STEM, change, made

assert cpu.MISSING is None, cpu.MISSING
FORMATS = ("auto", "int8", "int8-g64", "int4", "mxfp4")


# -- the bytes


@pytest.mark.sampled(12)
@pytest.mark.parametrize("how", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_has_the_bytes_of_the_packed_bank(tmp_path: Path, family: str, how: str) -> None:
    _, file = loaded(saved(tmp_path, family), how)
    assert_file_is_bank(file, tmp_path, how)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("form", [*published.FORMATS, "mxfp4"])
def test_a_file_of_a_quantised_checkpoint_has_the_bytes_of_its_bank(
    tmp_path: Path, form: str
) -> None:
    folder = made(tmp_path, "gpt_oss" if form == "mxfp4" else "qwen3_moe", form)
    model, file = loaded(folder)
    assert_file_is_bank(file, folder)
    assert {bool(layer.formats[0]) for layer in file.layers} == {form != "gptq-act-order"}
    plain = load(folder).model
    assert all_linears(model).keys() == all_linears(plain).keys()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stacks", [True, False])
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_1", "F32"])
def test_a_file_of_a_gguf_file_has_the_bytes_of_its_bank(
    tmp_path: Path, kind: str, stacks: bool
) -> None:
    path = gguf_of(tmp_path, kind, stacks=stacks)
    _, file = loaded(path)
    assert_file_is_bank(file, path)
    assert bool(file.layers[0].formats[0]) == (kind != "F32")


@pytest.mark.parametrize("odd", [0, 3])
@pytest.mark.parametrize("centred", ["qzeros", "other scales"])
def test_experts_that_are_made_alike_have_the_bytes_of_their_bank(
    tmp_path: Path, odd: int, centred: str
) -> None:
    """One expert has no zeros, or scales of another type, so its layer is written twice."""
    folder = made(tmp_path)
    stem = STEM.replace("experts.3", f"experts.{odd}")

    def spoil(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(f"{stem}.")]:
            if centred == "qzeros" and name.endswith("qzeros"):
                tensors[name] = torch.full_like(tensors[name], -0x77777778)  # every zero is 8
            elif centred != "qzeros" and name.endswith("scales"):
                tensors[name] = tensors[name].float()

    change(folder, spoil)
    _, file = loaded(folder)
    assert_file_is_bank(file, folder)
    assert all(layer.formats[0] for layer in file.layers)


def test_a_layer_with_a_plain_expert_is_bf16_as_in_its_bank(tmp_path: Path) -> None:
    folder = made(tmp_path)
    values = checkpoint.Shards([tmp_path / "values" / "model.safetensors"])

    def expand(tensors: dict[str, Tensor]) -> None:
        for end in ("qweight", "qzeros", "scales"):
            del tensors[f"{STEM}.w2.{end}"]
        tensors[f"{STEM}.w2.weight"] = values.read(f"{STEM}.w2.weight")

    change(folder, expand)
    _, file = loaded(folder)
    assert_file_is_bank(file, folder)
    assert [layer.formats[0] is None for layer in file.layers] == [False, True, False]


def test_weights_of_another_dtype_are_rounded_as_in_their_bank(tmp_path: Path) -> None:
    make_model("qwen3_moe").save_pretrained(tmp_path)
    _, file = loaded(tmp_path)
    assert_file_is_bank(file, tmp_path)


def test_layers_are_in_the_order_of_the_model(tmp_path: Path) -> None:
    """A checkpoint may have the names of layer 10 before those of layer 2."""
    make_model("qwen3_moe", torch.bfloat16, num_layers=12).save_pretrained(tmp_path)
    model, file = loaded(tmp_path)
    assert [layer.name for layer in file.layers] == [
        name for name, module in model.named_modules() if hasattr(module, IN_FILE)
    ]
    assert_file_is_bank(file, tmp_path)


def test_the_rest_of_the_model_is_as_in_a_load_without_a_file(tmp_path: Path) -> None:
    model, _ = loaded(saved(tmp_path, "gpt_oss"))
    found, wanted = (dict(m.named_parameters()) for m in (model, load(tmp_path).model))
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert found[name].shape == weight.shape
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            assert found[name].is_meta
        else:
            assert torch.equal(found[name], weight), name


def test_a_second_load_reads_no_expert_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, file = loaded(saved(tmp_path), "int4")
    path = file.path
    before, lock = path.stat(), path.with_name(path.name + ".lock")
    lock.unlink()  # a reader needs no right to write in the folder
    names = {p.name for p in tmp_path.iterdir()}
    monkeypatch.setattr(RawFile, "read", lambda *_: pytest.fail("an expert is read"))
    _, again = loaded(tmp_path, "int4")
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert again.layers == file.layers
    assert {p.name for p in tmp_path.iterdir()} == names


# -- what is in memory


@pytest.mark.parametrize("form", ["plain", "mxfp4"])
def test_a_stack_is_read_expert_by_expert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    folder = saved(tmp_path, "gpt_oss") if form == "plain" else made(tmp_path, "gpt_oss", form)
    sizes, read = list[int](), RawFile.read

    def reading(self: RawFile, start: int, num_bytes: int) -> Tensor:
        sizes.append(num_bytes)
        return read(self, start, num_bytes)

    monkeypatch.setattr(RawFile, "read", reading)
    model, file = loaded(folder)
    up = model.get_submodule(file.layers[0].name).gate_up_proj[0].numel()
    assert max(sizes) == (2 * up if form == "plain" else up // 2)


@pytest.mark.parametrize("num", [1, 3])
def test_no_more_experts_are_in_memory_than_max_bytes_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num: int
) -> None:
    """From the read of an expert's first weight until the expert is written."""
    saved(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("a file is begun"))
        with pytest.raises(
            ConfigError, match=r"max_expert_bytes=1 has no room .* give at least"
        ) as no:
            loaded(tmp_path, max_bytes=1)
    one = int(str(no.value).rsplit(" ", 1)[1])
    assert one == next(iter(plans_of(tmp_path))).working_bytes
    lock, now, most = threading.Lock(), 0, 0
    expert, write = experts_in_file.ExpertSource.expert, experts_in_file.ExpertWriter.write

    def reading(*args: Any) -> Any:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        return expert(*args)

    def writing(*args: Any) -> None:
        nonlocal now
        write(*args)
        with lock:
            now -= 1

    monkeypatch.setattr(experts_in_file.ExpertSource, "expert", reading)
    monkeypatch.setattr(experts_in_file.ExpertWriter, "write", writing)
    _, file = loaded(tmp_path, max_bytes=one * (num + 1) - 1)
    assert now == 0
    assert most <= num
    monkeypatch.undo()
    assert_file_is_bank(file, tmp_path)


def plans_of(folder: Path) -> list[Any]:
    """Return the plans of a load of this folder."""
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpertsInFile, "_num_readers", lambda _, plans: found.extend(plans) or 1)
        loaded(folder, path=folder / "other.experts")
    return found


# -- engines that share a file


def test_an_engine_waits_for_the_one_that_writes_and_takes_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path)
    _, other = loaded(tmp_path, path=tmp_path / "other.experts")
    path = tmp_path / EXPERTS_IN_FILE
    lock = FileLock(path.with_name(path.name + ".lock"))
    assert lock.take() is None
    monkeypatch.setattr(ExpertsInFile, "_write", lambda _: pytest.fail("a second file is written"))
    is_waiting, found = threading.Event(), list[ExpertFile]()
    take = FileLock.take

    def taking(self: FileLock, wait: bool = False) -> str | None:
        if wait:
            is_waiting.set()
        return take(self, wait)

    monkeypatch.setattr(FileLock, "take", taking)
    with caplog.at_level(logging.WARNING, "qllm"):
        thread = threading.Thread(target=lambda: found.append(loaded(tmp_path)[1]))
        thread.start()
        assert is_waiting.wait(60)
        os.link(other.path, path)
        lock.close()
        thread.join(60)
    assert found[0].layers == other.layers
    assert f"process {os.getpid()} writes the experts to {path}: waiting" in caplog.text
