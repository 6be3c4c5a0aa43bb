"""Experts that a load for a GPU leaves in the host's memory: the weights of a load without that."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qllm import QLLMEngine
from qllm.config import EngineConfig
from qllm.cuda.backend import cuda_runner
from qllm.cuda.slots import ExpertRoom
from qllm.engine import build
from qllm.engine.build import refuse_rounding
from qllm.engine.memory import Others, free_for
from qllm.errors import ConfigError, ModelError
from qllm.models import loader
from qllm.models.identity import identity
from qllm.models.loader import load
from qllm.models.weights import streaming
from qllm.models.weights.experts_on_host import ExpertsOnHost
from qllm.models.weights.on_host import bytes_in_slots, on_host
from qllm.models.weights.quantised_experts import WEIGHTS, all_quantised
from qllm.models.weights.quantised_linears import weight_bytes
from qllm.models.weights.quantised_weights import tensors_of
from qllm.types import Grain
from tests.support import published
from tests.support.captured import sampling_of, schedule
from tests.support.dense import dense_model, save
from tests.support.device_weights import on_device
from tests.support.expert_slots import expert_streams, in_slots, sizes_of
from tests.support.experts_in_file import gguf_of, residency_of, saved
from tests.support.fake_streams import install
from tests.support.streaming import STEM, change, made

FAMILIES = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"]


def loaded(folder: Path, max_bytes: int = 1, **how: Any) -> Any:
    """A model whose experts are on the host, with room for few on the device."""
    if max_bytes == 1:
        with pytest.raises(ConfigError, match="give at least") as caught:
            load(folder, experts=ExpertsOnHost(1), **how)
        max_bytes = int(str(caught.value).split("give at least ")[1].split(",")[0])
    return load(folder, experts=ExpertsOnHost(max_bytes), **how).model


def weights_of(model: Any) -> dict[str, Tensor]:
    """All weights of a model; quantised ones as they are stored."""
    found = {name: p.detach() for name, p in model.named_parameters() if not p.is_meta}
    for path, held in all_quantised(model).items():
        for name in WEIGHTS:
            for i, tensor in enumerate(tensors_of(held.weights[name].whole)):  # type: ignore[union-attr]
                found[f"{path}.{name}.{i}"] = tensor
    return found


def assert_same(model: Any, wanted: Any) -> None:
    found, others = weights_of(model), weights_of(wanted)
    assert found.keys() == others.keys()
    for name, tensor in found.items():
        assert tensor.dtype == others[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), others[name].view(torch.uint8)), name


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_identity_are_those_of_a_load_without_it(tmp_path: Path, family: str) -> None:
    folder = saved(tmp_path, family)
    model, wanted = loaded(folder), load(folder, dtype="bfloat16").model
    assert_same(model, wanted)
    assert identity(model) == identity(wanted)
    modules = [m for m in model.modules() if on_host(m) is not None]
    assert len(modules) == sum(hasattr(m, "gate_up_proj") for m in wanted.modules()) > 0
    for module in modules:
        for name in WEIGHTS:
            assert getattr(module, name).data_ptr() % 4096 == 0, "pages that no other memory is in"
    with pytest.raises(ModelError, match=r"layers\.\d\.mlp\.experts are in the host's memory, so"):
        modules[0](torch.zeros(1, 64), torch.zeros(1, 4).long(), torch.zeros(1, 4))


@pytest.mark.parametrize(
    ("family", "rounding"), [("gpt_oss", "mxfp4"), ("qwen3_moe", "int4"), ("mixtral", "awq")]
)
def test_quantised_weights_are_those_that_a_device_has(
    tmp_path: Path, family: str, rounding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, how = saved(tmp_path / "plain", family), rounding
    if rounding == "awq":
        folder, _ = published.publish(folder, "awq", tmp_path)
        how = "auto"
    monkeypatch.setattr(streaming, "staying", lambda *_: set())
    model = loaded(folder, expert_weights=how)
    wanted = on_device(folder, how, monkeypatch)
    assert_same(model, wanted)
    assert identity(model) == identity(wanted)
    refuse_rounding(model, how)
    assert {held.kind for held in all_quantised(model).values()} == {
        held.kind for held in all_quantised(wanted).values()
    }


@pytest.mark.parametrize("stacks", [True, False])
def test_experts_of_a_gguf_file_are_those_that_a_device_has(
    tmp_path: Path, stacks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = gguf_of(tmp_path, "Q4_0", stacks=stacks)
    monkeypatch.setattr(streaming, "staying", lambda *_: set())
    assert_same(loaded(file), on_device(file, "auto", monkeypatch))


@pytest.mark.parametrize("odd", [0, 3])
def test_experts_that_differ_in_format_get_a_common_one(
    tmp_path: Path, odd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One expert has scales of another type, so its layer is read twice."""
    folder = made(tmp_path)
    stem = STEM.replace("experts.3", f"experts.{odd}")

    def spoil(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(f"{stem}.")]:
            if name.endswith("scales"):
                tensors[name] = tensors[name].float()

    change(folder, spoil)
    monkeypatch.setattr(streaming, "staying", lambda *_: set())
    assert_same(loaded(folder), on_device(folder, "auto", monkeypatch))


@pytest.mark.parametrize("rounding", ["auto", "int4", "mxfp4"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_runner_with_slots_has_the_tokens_of_one_without(
    tmp_path: Path, family: str, rounding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes and scales of an expert are in one slot."""
    folder, streams = saved(tmp_path, family), expert_streams()
    install(monkeypatch, streams, 4)
    whole = on_device(folder, rounding, monkeypatch)
    runner = cuda_runner(whole, num_pages=128, page_size=4, graphs=False)
    wanted = schedule(runner, sampling_of(0.7), Grain.EXPERT)
    runner.close()
    model = loaded(folder, dtype="bfloat16", expert_weights=rounding)
    runner = in_slots(model, 5, streams)
    assert schedule(runner, sampling_of(0.7), Grain.EXPERT) == wanted
    assert residency_of(runner).num_reads > 10
    runner.close()
    assert not streams.races


def test_room_for_all_leaves_the_experts_where_the_model_is(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    slot, num = sizes_of(load(folder, dtype="bfloat16").model)
    model = loaded(folder, slot * num)
    assert not any(on_host(module) for module in model.modules())
    assert bytes_in_slots(model) == 0
    model = loaded(folder, slot * num - 1)
    assert all(on_host(layer.mlp.experts) for layer in model.model.layers)
    assert bytes_in_slots(model) == slot * num - 1
    streams = expert_streams()
    for room in (None, ExpertRoom(streams, slot * num)):
        with pytest.raises(ModelError, match="in the host's memory, and this runner needs all"):
            in_slots(model, 5, streams, room=room)


def test_the_memory_of_a_gpu_has_its_slots_and_not_the_experts_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path)
    whole = load(folder, dtype="bfloat16").model
    slot, num = sizes_of(whole)
    model = loaded(folder, 5 * slot)
    assert weight_bytes(model) == weight_bytes(whole) - num * slot + 5 * slot
    monkeypatch.setattr("qllm.engine.memory._of_device", lambda: (1000, 300, 2000))

    config, others = EngineConfig(), Others(0, 0)
    assert free_for(config, 0, others, on_cuda=True, slot_bytes=100) == 900
    config = EngineConfig(memory=600)
    assert free_for(config, 0, others, on_cuda=True, slot_bytes=100) == 200
    with pytest.raises(ConfigError, match="too little for the model: 700 bytes"):
        free_for(config, 0, others, on_cuda=True, slot_bytes=400)


def test_settings_reach_the_load_and_the_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU is asked for; what stands in for it is a CPU."""
    folder, asked, streams = saved(tmp_path, "qwen3_moe"), list[Any](), expert_streams()
    install(monkeypatch, streams, 16)
    slot, _ = sizes_of(load(folder, dtype="bfloat16").model)
    monkeypatch.setattr(loader, "check_device", lambda device: torch.device("cpu"))

    def make(model: Any, config: EngineConfig) -> Any:
        room = build.room_of(config, lambda: streams)
        asked.append((room, [on_host(layer.mlp.experts) for layer in model.model.layers[::2]]))
        return in_slots(model, 0, streams, room=room, num_pages=config.num_blocks, page_size=16)

    monkeypatch.setattr(build, "make_runner", make)
    how = {"device": "cuda", "dtype": "bfloat16", "max_kv_tokens": 512, "run_in": "thread"}
    how |= {"max_expert_bytes": 6 * slot, "conformance": True}
    monkeypatch.setattr(
        "qllm.frontend.thread.EngineConfig.check_place",
        lambda self, run_in, device: checked.append(device),
    )
    checked = list[str]()
    with QLLMEngine.from_pretrained(str(folder), **how) as engine:
        engine.submit([1, 2, 3], "LS", 3).result(300)
        told = engine.stats()["experts"]
    assert checked == ["cuda", "cpu"]
    assert told["slots"] == 6
    ((room, places),) = asked
    assert room == ExpertRoom(streams, 6 * slot)
    assert all(place is not None and place.max_bytes == 6 * slot for place in places)


@pytest.mark.parametrize(
    ("settings", "device", "wanted"),
    [
        ({"max_expert_bytes": 9}, "cpu", "max_expert_bytes=9 needs expert_dir, too: on the CPU"),
        (
            {"max_expert_bytes": 9, "expert_dir": "x"},
            "cuda",
            "expert_dir='x' is for the CPU: with device='cuda' all experts are in the host's",
        ),
    ],
)
def test_a_folder_is_for_the_cpu_alone(settings: Any, device: str, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        EngineConfig(**settings).check_place("thread", device)


def test_a_gpu_takes_the_bytes_alone() -> None:
    EngineConfig(max_expert_bytes=9).check_place("thread", "cuda")


def test_loads_that_read_no_checkpoint_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="experts in the host's memory are read from a check"):
        load(saved(tmp_path), experts=ExpertsOnHost(1), load_format="dummy")
    make = {"dtype": "float32", "experts": ExpertsOnHost(1)}
    with pytest.raises(ConfigError, match="experts in the host's memory are bfloat16, not"):
        load(saved(tmp_path), **make)


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    folder = save(dense_model("qwen3").bfloat16(), tmp_path)
    with pytest.raises(ConfigError, match="no experts that can be in the host's memory; leave max"):
        load(folder, experts=ExpertsOnHost(1))
