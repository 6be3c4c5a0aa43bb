"""Experts of a layer that differ: made alike where no value changes, else expanded."""

import re
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qllm.cores import no_collections
from qllm.errors import ModelError
from qllm.kernels.cpu.quantised import is_like
from qllm.kernels.quantised import Quantised
from qllm.models.loader import load
from qllm.models.weights import checkpoint, streaming
from qllm.models.weights.conversions import alike
from qllm.models.weights.quantised_experts import WEIGHTS, all_quantised
from qllm.models.weights.quantised_weights import Weights
from tests.support import published
from tests.support.streaming import STEM, change, made


def random(code: Any, k: int, scale: torch.dtype, offset: bool) -> Quantised:
    made = torch.Generator().manual_seed(k)
    width, top = (k, 255) if code == "i8" else (k // 2, 256)
    codes = torch.randint(top, (6, width), generator=made).to(torch.uint8)
    worths = torch.rand((2, 6, k // 8), generator=made).mul(0.1).to(scale)
    codes = codes.view(torch.int8) if code == "i8" else codes
    return Quantised(code, codes, worths[0], worths[1] if offset else None, 8)


def expand(pattern: str, values: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """Store weights as they are, instead of their codes."""
    for name in [name for name in tensors if re.search(pattern, name)]:
        del tensors[name]
        name = name.rpartition(".")[0] + ".weight"
        tensors[name] = values[name]


def rooms_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many packed weights are alive, whenever room for one more was taken."""
    alive, rooms, room = weakref.WeakSet[Weights](), list[int](), Weights.__init__

    def taking(self: Weights, *args: Any) -> None:
        room(self, *args)
        alive.add(self)
        rooms.append(len(alive))

    monkeypatch.setattr(Weights, "__init__", taking)
    return rooms


@pytest.mark.parametrize(
    "kinds",
    [
        [("i8", torch.float16, True), ("i8", torch.float16, False)],
        [("u4", torch.float16, True), ("u4", torch.float32, True)],
        [("u4", torch.float16, True), ("u4", torch.bfloat16, True)],
        [("i4", torch.float16, False), ("u4", torch.float16, True)],
        [("i8", torch.float32, False), ("i8", torch.float16, True)],
    ],
)
def test_weights_that_are_made_alike_keep_their_values(kinds: Any) -> None:
    weights = [random(code, 16, scale, offset) for code, scale, offset in kinds]
    found = alike(weights)
    assert found is not None
    assert all(is_like(one, found[0]) for one in found)
    for one, before in zip(found, weights, strict=True):
        assert torch.equal(one.dequantised(), before.dequantised())


def test_weights_of_other_codes_groups_or_inputs_are_not_made_alike() -> None:
    one = random("i8", 16, torch.float16, True)
    assert alike([one, random("i8", 32, torch.float16, True)]) is None
    assert alike([one, random("u4", 16, torch.float16, True)]) is None
    assert alike([one, one._replace(group=16, scale_NG=one.scale_NG[:, :1])]) is None
    assert alike([one, one.dequantised()]) is None


def test_experts_that_are_made_alike_are_in_their_places(tmp_path: Path) -> None:
    """One of them has no zeros, so all are read before they are packed."""
    folder = made(tmp_path)

    def centre(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if name.startswith(f"{STEM}.") and name.endswith("qzeros"):
                tensors[name] = torch.full_like(tensors[name], -0x77777778)  # every zero is 8

    change(folder, centre)
    model = load(folder).model
    held = all_quantised(model)
    assert len(held) == model.config.num_hidden_layers, "none is expanded"
    assert {one.kind for one in held.values()} == {"u4 g16"}
    plain = load(folder, dtype="float32").model
    for path, experts in held.items():
        for name in WEIGHTS:
            wanted = plain.get_submodule(path).get_parameter(name)
            found = [experts.as_parameter(name, i).float() for i in range(len(wanted))]
            assert torch.equal(torch.stack(found), wanted)


@pytest.mark.parametrize("odd", [1, 7])
def test_what_was_begun_of_experts_that_are_made_alike_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: int
) -> None:
    """Its room is free before that of all is taken, and nothing more is read for it."""
    folder, names, read = made(tmp_path), list[str](), checkpoint._read

    def centre(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if f".experts.{odd}." in name and name.endswith("qzeros"):
                tensors[name] = torch.full_like(tensors[name], -0x77777778)

    def reading(name: str, weight: str, *rest: Any) -> Any:
        names.extend([weight] * (".experts." in weight))
        return read(name, weight, *rest)

    change(folder, centre)
    monkeypatch.setattr(streaming, "READERS", 1)
    monkeypatch.setattr(checkpoint, "_read", reading)
    rooms = rooms_of(monkeypatch)
    with no_collections():
        held = all_quantised(load(folder).model)
    num = len(set(names)) // sum(experts.num_experts for experts in held.values())
    assert len(names) == len(set(names)) + num * len(held) * (odd + 1), "up to the odd one"
    assert max(rooms) <= len(WEIGHTS) * len(held)


@pytest.mark.parametrize("plain", ["w2", "w[13]"])
def test_experts_of_which_a_matrix_is_plain_are_expanded(tmp_path: Path, plain: str) -> None:
    folder, wanted = made(tmp_path), load_file(tmp_path / "values" / "model.safetensors")

    change(folder, partial(expand, rf"layers\.1.*\.{plain}\.", wanted))
    model, dense = load(folder).model, load(tmp_path / "values").model
    assert len(all_quantised(model)) == model.config.num_hidden_layers - 1
    for name in WEIGHTS:
        path = f"model.layers.1.mlp.experts.{name}"
        assert torch.equal(model.get_parameter(path), dense.get_parameter(path))


def test_no_room_is_held_for_experts_that_cannot_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of one layer is free before the next but one has its own."""
    folder, wanted = made(tmp_path), load_file(tmp_path / "values" / "model.safetensors")

    change(folder, partial(expand, r"experts.*\.w[13]\.", wanted))
    monkeypatch.setattr(streaming, "READERS", 1)
    rooms = rooms_of(monkeypatch)
    with no_collections():
        model = load(folder).model
    assert not all_quantised(model)
    assert len(rooms) == model.config.num_hidden_layers > 2
    assert max(rooms) == 2


def test_experts_of_another_width_than_the_config_has_are_refused(tmp_path: Path) -> None:
    folder = made(tmp_path)
    published.configure(folder, intermediate_size=96)
    with pytest.raises(ModelError, match=r"6 weights of another shape, .*\.experts"):
        load(folder)
