"""Experts of a checkpoint are packed as they are read, and what cannot be read is named."""

import errno
import gc
import json
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from qllm.cores import no_collections
from qllm.engine.storage.identity import weights_digest
from qllm.errors import ModelError
from qllm.kernels.quantised import Quantised
from qllm.models import loader
from qllm.models.folders import missing_weights
from qllm.models.identity import identity
from qllm.models.loader import load, wrap
from qllm.models.weights import checkpoint, raw_file, streaming
from qllm.models.weights.quantised_experts import WEIGHTS, QuantisedExperts, all_quantised
from qllm.models.weights.quantised_weights import Weights
from tests.support.engines import open_files
from tests.support.families import make_model
from tests.support.streaming import STEM, change, made
from tests.support.waiting import wait_for

PARTS = 2
"""Weights that are read for a packed one, at most: gate and up are stored apart."""


@pytest.mark.parametrize("readers", [1, 2])
def test_a_reader_packs_an_expert_before_it_reads_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readers: int
) -> None:
    """So what is not packed yet is an expert per reader, however many a layer has."""
    folder = made(tmp_path)
    lock, names, held, most = threading.Lock(), [], 0, 0
    read, take = checkpoint._read, Weights.take

    def reading(name: str, weight: str, *rest: Any) -> Any:
        nonlocal held, most
        if ".experts." in weight:
            with lock:
                names.append(weight)
                held += 1
                most = max(most, held)
        return read(name, weight, *rest)

    def taking(self: Weights, first: int, weights: Any) -> None:
        nonlocal held
        take(self, first, weights)
        with lock:
            held -= sum(map(len, weights))

    monkeypatch.setattr(checkpoint, "_read", reading)
    monkeypatch.setattr(Weights, "take", taking)
    monkeypatch.setattr(streaming, "READERS", readers)
    found = all_quantised(load(folder).model)
    num = sum(experts.num_experts for experts in found.values())
    assert num > 4 * len(found) > 0, "many more than readers"
    assert len(names) == len(set(names)) == 3 * num, "each is read once"
    assert held == 0
    assert most <= PARTS * readers


@pytest.mark.parametrize("part", ["qweight", "qzeros"])
@pytest.mark.parametrize("cut", [lambda x: x[:0], lambda x: x[0, 0], lambda x: x[:-1]])
def test_parts_of_any_shape_name_the_weight(
    tmp_path: Path, part: str, cut: Callable[[Tensor], Tensor]
) -> None:
    path = made(tmp_path) / "model.safetensors"
    tensors = load_file(path)
    name = f"model.layers.1.block_sparse_moe.experts.0.w1.{part}"
    tensors[name] = cut(tensors[name]).clone()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.1\..*experts\.0\.w1\.weight: .* fit"):
        load(path.parent)


@pytest.mark.parametrize(
    ("part", "dtype", "said"),
    [
        ("scales", torch.float64, r"is F64; awq has F32, F16, BF16 there"),
        ("scales", torch.int32, r"is I32; awq has F32, F16, BF16 there"),
        ("qzeros", torch.float32, r"is F32; awq has I32 there"),
    ],
)
def test_a_part_of_another_dtype_is_named_before_any_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, dtype: torch.dtype, said: str
) -> None:
    name = f"{STEM}.w2.{part}"
    folder = change(made(tmp_path), lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    monkeypatch.setattr(checkpoint, "_read", lambda *_: pytest.fail("a weight is read"))
    with pytest.raises(ModelError, match=rf"{name} {said}"):
        load(folder)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_weight_that_is_there_in_two_forms_is_refused(tmp_path: Path, dtype: str) -> None:
    """Which one is meant nobody knows."""
    name = "model.layers.0.self_attn.o_proj.weight"
    plain = load_file(made(tmp_path).parent / "plain" / "model.safetensors")[name]
    folder = change(tmp_path / "published", lambda tensors: tensors.update({name: plain}))
    with pytest.raises(ModelError, match=rf"{name} is there twice, as .*o_proj\.qweight, "):
        load(folder, dtype=dtype)


def test_a_plain_weight_of_another_shape_is_named(tmp_path: Path) -> None:
    def cut(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"][1:].clone()

    said = r"model\.norm\.weight, which is \(63,\) and must be \(64,\)"
    with pytest.raises(ModelError, match=said):
        load(change(made(tmp_path), cut))


@pytest.mark.parametrize(
    ("form", "part", "change_part"),
    [
        ("packed", "weight_shape", lambda x: x * 0),
        ("packed", "weight_packed", lambda x: x[1:]),
        ("int8", "weight_scale", lambda x: x[None]),
        ("int8", "weight_zero_point", lambda x: x[1:]),
        ("int8", "weight_zero_point", lambda x: x[None]),
        ("fp8", "weight_scale_inv", lambda x: x[None]),
    ],
)
@pytest.mark.parametrize("stem", ["self_attn.o_proj", "mlp.experts.2.up_proj"])
def test_scales_and_zeros_of_any_shape_name_the_weight(
    tmp_path: Path, form: str, part: str, change_part: Callable[[Tensor], Tensor], stem: str
) -> None:
    """Values that are broadcast may be finite, and are another weight's."""
    folder = made(tmp_path, "qwen3_moe", form)
    name = f"model.layers.0.{stem}"

    def spoil(tensors: dict[str, Tensor]) -> None:
        like = tensors.get(f"{name}.{part}", tensors.get(f"{name}.weight_scale"))
        assert like is not None
        if part == "weight_zero_point":
            like = torch.ones_like(like, dtype=torch.int8)
        tensors[f"{name}.{part}"] = change_part(like).clone()

    with pytest.raises(ModelError, match=rf"{name}\.weight: .* fit"):
        load(change(folder, spoil))


# -- what goes wrong on a reader's thread

GATE_AND_UP = rf"{STEM}\.w1\.weight and {STEM}\.w3\.weight"


def readers() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("qllm-read")]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), MemoryError("no")])
@pytest.mark.parametrize("where", ["read", "packed"])
def test_an_error_of_a_reader_names_the_weight_and_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, where: str
) -> None:
    folder, preadv, take = made(tmp_path), os.preadv, Weights.take
    start = checkpoint._places_in(folder / "model.safetensors")[f"{STEM}.w3.scales"][0]

    def read(number: int, into: list[memoryview], at: int, flags: int = 0) -> int:
        if at == start and where == "read":
            raise type(error)(*error.args)
        return preadv(number, into, at, flags)

    def taken(self: Weights, first: int, weights: Any) -> None:
        if first == 3 and where == "packed":
            raise type(error)(*error.args)
        take(self, first, weights)

    monkeypatch.setattr(raw_file.os, "preadv", read)
    monkeypatch.setattr(Weights, "take", taken)
    before = open_files()
    name = rf"{STEM}\.w3\.weight" if where == "read" else r"experts\.3\.w1\.weight and .*"
    what = error.args[-1]
    with pytest.raises(ModelError, match=rf"{name} could not be read .*{what}") as found:
        load(folder)
    assert ("model.safetensors" in str(found.value)) == (where == "read" and what != "no")
    assert not readers()
    del found  # it holds what was open
    gc.collect()
    assert open_files() <= before


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("safe_open", RuntimeError("unable to open file: Too many open files (24)")),
        ("safe_open", PermissionError(errno.EACCES, "Permission denied")),
        ("RawFile", OSError(errno.EMFILE, "Too many open files")),
    ],
)
def test_a_file_that_the_system_does_not_open_is_not_called_truncated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise error

    folder = made(tmp_path)
    monkeypatch.setattr(checkpoint, where, refuse)
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be opened .*(files|denied)"):
        load(folder)


def test_an_interrupted_load_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read, num = made(tmp_path), checkpoint._read, 0

    def reading(*args: Any) -> Any:
        nonlocal num
        num += 1
        if num == 9:
            signal.raise_signal(signal.SIGINT)
        return read(*args)

    monkeypatch.setattr(checkpoint, "_read", reading)
    before, handler = open_files(), signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            load(folder)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert num < 40, "of 84: the rest is not read"
    wait_for(lambda: not readers())  # the signal may come while their ends are waited for
    gc.collect()
    assert open_files() <= before
    monkeypatch.setattr(checkpoint, "_read", read)
    assert all_quantised(load(folder).model)


def test_nothing_is_begun_once_a_load_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over, begun = threading.Event(), list[int]()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(False, cancel_futures=cancel_futures)
            is_over.set()
            super().shutdown(wait)

    monkeypatch.setattr(streaming, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(streaming, "READERS", 1)
    with suppress(ZeroDivisionError), streaming._readers() as pool:
        pool.submit(is_over.wait, 60)
        waiting = pool.submit(begun.append, 1)
        raise ZeroDivisionError
    assert waiting.cancelled()
    assert not begun
    assert not readers(), "it waits for what they were at"


def test_the_only_shard_of_an_index_is_missing_as_one_of_several_is(tmp_path: Path) -> None:
    text = json.dumps({"weight_map": {"a": "model.safetensors"}})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert missing_weights(tmp_path) == "1 of 1 shards missing: model.safetensors"


def test_readers_have_the_next_module_before_the_one_before_is_waited_for() -> None:
    seen = list[str]()

    def begin(names: str) -> Iterator[str]:
        for name in names:
            seen.append(f"begin {name}")
            yield name

    for name in streaming._one_ahead(begin("abc")):
        seen.append(f"wait {name}")
    assert seen == ["begin a", "begin b", "wait a", "begin c", "wait b", "wait c"]
    assert not list(streaming._one_ahead([]))


def test_the_index_and_every_header_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path)
    path = folder / "model.safetensors"
    tensors, of_name = load_file(path), {}
    for number in range(3):
        own = {name: tensors[name] for name in sorted(tensors)[number::3]}
        save_file(own, folder / f"part-{number}.safetensors", metadata={"format": "pt"})
        of_name |= dict.fromkeys(own, f"part-{number}.safetensors")
    path.unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": of_name}))
    opened, read = list[str](), Path.open

    def opening(self: Path, *args: Any, **how: Any) -> Any:
        opened.append(self.name)
        return read(self, *args, **how)

    def mapping(path: Path, framework: str) -> Any:
        opened.append(path.name)
        return safe_open(path, framework)

    monkeypatch.setattr(Path, "open", opening)  # read_text goes through it, too
    monkeypatch.setattr(checkpoint, "safe_open", mapping)
    assert all_quantised(load(folder).model)
    ours = [name for name in opened if name.startswith(("part", index.name))]
    assert sorted(ours) == [index.name, *sorted([*set(of_name.values())] * 2)], "and mapped"


@pytest.mark.parametrize("was", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_nothing_is_collected_while_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was: bool, fails: bool
) -> None:
    folder, read, seen = made(tmp_path), checkpoint._read, set[bool]()

    def reading(*args: Any) -> Any:
        seen.add(gc.isenabled())
        if fails:
            raise ModelError("no")
        return read(*args)

    monkeypatch.setattr(checkpoint, "_read", reading)
    (gc.enable if was else gc.disable)()
    try:
        with pytest.raises(ModelError, match="no") if fails else nullcontext():
            load(folder)
        assert gc.isenabled() == was
    finally:
        gc.enable()
    assert seen == {False}


@pytest.mark.parametrize("how", ["dropped", "refused", "taken"])
def test_a_model_that_is_garbage_is_collected_before_the_next_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Its weights lie in cycles when it is gone itself; of one that is refused nobody knows."""
    folder, read, alive = made(tmp_path), checkpoint._read, set[int]()
    packed, misfit = weakref.WeakSet[Any](), loader._refuse_misfit
    enter = QuantisedExperts.__init__

    def entering(self: QuantisedExperts, weights: dict[str, Any], *rest: Any) -> None:
        packed.update(weights.values())
        enter(self, weights, *rest)

    def refusing(*_: Any) -> None:
        raise ModelError("not so")

    def reading(*args: Any) -> Any:
        alive.add(sum(one in old for one in packed))
        return read(*args)

    monkeypatch.setattr(QuantisedExperts, "__init__", entering)
    monkeypatch.setattr(loader, "_had_model", threading.Event())
    monkeypatch.setattr(loader, "_refuse_misfit", refusing if how == "refused" else misfit)
    with no_collections():
        if how == "taken":
            taken: Any = wrap(make_model("mixtral")).model
            taken.itself = [taken]
            packed.add(taken)
            del taken
        else:
            with suppress(ModelError):
                load(folder)
        old = weakref.WeakSet(packed)
        assert old, "as no cycles were looked for"
        monkeypatch.setattr(loader, "_refuse_misfit", misfit)
        monkeypatch.setattr(checkpoint, "_read", reading)
        load(folder)
    assert alive == {0}


def test_a_first_load_looks_for_no_garbage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of a second where torch and transformers are all there is."""
    folder, looks = made(tmp_path), list[int]()
    monkeypatch.setattr(loader, "_had_model", threading.Event())
    monkeypatch.setattr(loader.gc, "collect", lambda: looks.append(1))
    for num in range(3):
        load(folder)
        assert len(looks) == num


def nan(x: Tensor) -> Tensor:
    x[0, 0] = torch.nan
    return x


def test_an_expert_that_cannot_be_packed_is_named(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[f"{STEM}.w3.scales"] = nan(tensors[f"{STEM}.w3.scales"])

    with pytest.raises(ModelError, match=rf"{GATE_AND_UP}: .* packed: a scale .* is nan"):
        load(change(made(tmp_path), spoil))


def test_an_expert_of_another_size_is_named(tmp_path: Path) -> None:
    def cut(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(f"{STEM}.w1.")]:
            columns = tensors[name].shape[1] // 2
            tensors[name] = tensors[name][:, :columns].contiguous()

    with pytest.raises(ModelError, match=rf"{GATE_AND_UP}: .* outputs, the others of its stack"):
        load(change(made(tmp_path), cut))


def test_a_stack_that_cannot_be_packed_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.down_proj"

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[f"{name}_scales"][2, 0, 0] = 254

    folder = change(made(tmp_path, "gpt_oss", "mxfp4"), spoil)
    with pytest.raises(ModelError, match=rf"{name}: .* packed: a scale .* is 1\.7"):
        load(folder)


@pytest.mark.parametrize("how", ["int4", "mxfp4"])
def test_a_weight_that_cannot_be_rounded_is_named(tmp_path: Path, how: str) -> None:
    make_model("mixtral", torch.bfloat16).save_pretrained(tmp_path)
    name = f"{STEM}.w2.weight"
    change(tmp_path, lambda tensors: nan(tensors[name]))
    with pytest.raises(ModelError, match=rf"{name}: .*not finite cannot be rounded"):
        load(tmp_path, expert_weights=how)


# -- the model itself


def test_its_own_forward_leaves_no_values_behind(tmp_path: Path) -> None:
    model = load(made(tmp_path)).model
    for ids in ([1, 2, 3], [model.config.vocab_size]):  # no token has that number
        with torch.no_grad(), suppress(IndexError):
            model(torch.tensor([ids]))
        for experts in all_quantised(model).values():
            assert all(experts._module._parameters[name].is_meta for name in WEIGHTS)
    experts = next(iter(all_quantised(model).values()))
    with pytest.raises(ZeroDivisionError), experts.in_place():
        raise ZeroDivisionError
    assert all(experts._module._parameters[name].is_meta for name in WEIGHTS)


def test_a_name_and_a_digest_are_of_every_part(tmp_path: Path) -> None:
    """Codes, scales and zeros of a linear module and of an expert; a name is of a few bytes."""
    folder, names, digests = made(tmp_path), list[str](), set[str]()
    stems = "model.layers.0.self_attn.q_proj", "model.layers.0.block_sparse_moe.experts.0.w2"
    parts = [f"{stem}.{part}" for stem in stems for part in ("qweight", "scales", "qzeros")]
    stored = load_file(folder / "model.safetensors")
    for part in (None, *parts):
        tensors = dict(stored)
        if part is not None:
            x = tensors[part]
            tensors[part] = x * 2 if x.is_floating_point() else x ^ 0x11111111
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        model = load(folder).model
        names.append(identity(model))
        digests.add(weights_digest(model))
    assert len(digests) == 1 + len(parts)
    assert len(set(names[:4])) == 4, "of the linear module"


def test_a_digest_is_of_what_codes_stand_for() -> None:
    codes = torch.arange(64, dtype=torch.uint8).view(4, 16)
    digests = set()
    for code, dtype in (("i8", torch.int8), ("e4m3", torch.float8_e4m3fn)):
        one = Quantised(code, codes.view(dtype), torch.ones(4, 1), None, 16)
        weights = Weights(1, one)
        weights.take(0, [[one]])
        digests.add(weights.digest())
    assert len(digests) == 2
