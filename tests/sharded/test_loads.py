"""Models that are loaded for ranks: each rank reads and keeps its own experts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from qllm.engine.storage.identity import weights_digest
from qllm.errors import ConfigError, DeviceError, ModelError
from qllm.kernels import cpu
from qllm.kernels.cpu.experts import Cut
from qllm.kernels.quantised import Quantised
from qllm.models.loader import load
from qllm.models.weights.checkpoint import Shards
from qllm.models.weights.on_demand import all_on_demand
from qllm.models.weights.quantised_experts import quantised_in
from qllm.models.weights.quantised_linears import weight_bytes
from qllm.runner.cpu import cpu_runner
from qllm.sharded.runner import sharded_runner
from tests.support import published
from tests.support.dense import save
from tests.support.experts_in_file import saved
from tests.support.families import VOCAB, make_model
from tests.support.gguf_files import convert
from tests.support.sharded import assert_same, served
from tests.support.streaming import STEM, change, made

assert cpu.MISSING is None, cpu.MISSING
pytestmark = pytest.mark.usefixtures("one_thread")
WEIGHTS = ("auto", "int8", "int8-g64", "int4", "mxfp4")
FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "granitemoe")
IDS = torch.randint(VOCAB, (1, 24), generator=torch.Generator().manual_seed(5))


def loaded(folder: Path, tp: int, how: str = "auto") -> Any:
    return load(folder, dtype="bfloat16", expert_weights=how, tp=tp).model


def assert_ranks_are_whole(folder: Path, how: str = "auto", rows: str = "bf16") -> None:
    """Compare identities, digests, and then the bits of results."""
    settings = {"expert_weights": how, "activations": rows}
    both = [loaded(folder, tp, how) for tp in (1, 2)]
    assert len(all_on_demand(both[1])) > 0
    assert weights_digest(both[0]) == weights_digest(both[1])
    assert weight_bytes(both[0]) * 0.5 < weight_bytes(both[1]) < weight_bytes(both[0]) * 1.2
    whole, ranks = cpu_runner(both[0], **settings), sharded_runner(both[1], 2, **settings)
    assert whole._identity == ranks._identity
    assert_same(served(ranks), served(whole))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("how", WEIGHTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_that_read_their_experts_have_the_bits_of_a_whole_load(
    tmp_path: Path, family: str, how: str
) -> None:
    assert_ranks_are_whole(saved(tmp_path, family), how)


@pytest.mark.parametrize("rows", ["bf16", "int8"])
def test_experts_in_four_bits_read_the_rows_of_the_setting(tmp_path: Path, rows: str) -> None:
    assert_ranks_are_whole(saved(tmp_path, "qwen3_moe"), "int4", rows)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("form", [*published.FORMATS, "mxfp4"])
def test_ranks_read_quantised_checkpoints(tmp_path: Path, form: str) -> None:
    assert_ranks_are_whole(made(tmp_path, "gpt_oss" if form == "mxfp4" else "qwen3_moe", form))


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "F32"])
def test_ranks_read_gguf_files(tmp_path: Path, kind: str) -> None:
    folder = save(small_model(), tmp_path / "m")
    assert_ranks_are_whole(convert(folder, tmp_path / "model.gguf", kind))


def assert_shares_are_rows(folder: Path, how: str = "auto") -> None:
    """Compare shares of experts, as they are read, with rows of whole experts."""
    cuts = Cut(range(16), range(24)), Cut(range(16, 32), range(24, 40))
    for experts in all_on_demand(loaded(folder, 2, how)).values():
        for expert in (0, experts.num_experts - 1):
            up, down = map(values_of, experts._read(expert))
            for own in cuts:
                found = map(values_of, experts._read(expert, own))
                expected = own.of_up(up), own.of_down(down)
                for one, other in zip(found, expected, strict=True):
                    assert one.shape == other.shape
                    assert torch.equal(one, other)


def values_of(weight: Tensor | Quantised) -> Tensor:
    return weight.dequantised() if isinstance(weight, Quantised) else weight


@pytest.mark.parametrize("how", ["auto", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_share_of_an_expert_is_read_as_rows_of_the_whole(
    tmp_path: Path, family: str, how: str
) -> None:
    assert_shares_are_rows(saved(tmp_path, family), how)


@pytest.mark.parametrize("form", [*published.FORMATS, "mxfp4"])
def test_a_share_of_a_quantised_expert_has_rows_of_the_whole(tmp_path: Path, form: str) -> None:
    family = "gpt_oss" if form == "mxfp4" else "qwen3_moe"
    assert_shares_are_rows(made(tmp_path, family, form))


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "F32"])
def test_a_share_of_an_expert_of_a_gguf_file_is_read_as_rows_of_the_whole(
    tmp_path: Path, kind: str
) -> None:
    folder = save(small_model(), tmp_path / "m")
    assert_shares_are_rows(convert(folder, tmp_path / "model.gguf", kind))


def small_model() -> Any:
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=64, intermediate_size=96, moe_intermediate_size=32,
        vocab_size=260, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, eos_token_id=1,
        bos_token_id=None, pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", ["auto", "int4", "mxfp4"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_the_forward_of_the_model_reads_experts_and_frees_them(
    tmp_path: Path, family: str, how: str
) -> None:
    folder = saved(tmp_path, family)
    found = []
    for tp in (1, 2):
        model = loaded(folder, tp, how)
        with torch.inference_mode():
            found.append(model(IDS).logits)
    assert torch.equal(*found)
    for path in all_on_demand(model):
        assert quantised_in(model.get_submodule(path)) is None
        assert all(
            p.is_meta
            for n, p in model.named_parameters()
            if n.startswith(f"{path}.") and n.endswith("_proj")
        )


def test_a_forward_on_rounded_rows_is_that_of_a_whole_load(tmp_path: Path) -> None:
    folder, found = saved(tmp_path, "qwen3_moe"), []
    for tp in (1, 2):
        model = loaded(folder, tp, "int4")
        settings = {"expert_weights": "int4", "activations": "int8"}
        runner: Any = cpu_runner(model, **settings) if tp == 1 else None
        runner = runner or sharded_runner(model, 2, **settings)
        with runner.as_reference(), torch.inference_mode():
            found.append(model(IDS).logits)
        runner.close()
    assert torch.equal(*found)


def test_ranks_that_read_large_experts_at_once_share_no_buffer(tmp_path: Path) -> None:
    """Experts are read before the fork, too: for the digest, and for the format of codes."""
    folder = checkpoint(tmp_path / "m", 3, 512, 512)
    whole = served(cpu_runner(loaded(folder, 1)))
    for _ in range(2):
        model = loaded(folder, 2)
        weights_digest(model)
        assert_same(served(sharded_runner(model, 2)), whole)
    path = convert(folder, tmp_path / "model.gguf", "Q8_0")
    whole = served(cpu_runner(loaded(path, 1)))
    for _ in range(2):
        assert_same(served(sharded_runner(loaded(path, 2), 2)), whole)


# -- what is refused


def test_a_model_without_experts_is_loaded_and_split(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "qwen3", hidden_size=128, intermediate_size=192, vocab_size=260, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, eos_token_id=1,
        bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(3)
    folder = save(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), tmp_path / "m")
    whole, ranks = cpu_runner(loaded(folder, 1)), sharded_runner(loaded(folder, 2), 2)
    assert_same(served(ranks), served(whole))


def test_a_runner_without_ranks_refuses_the_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="are read by ranks, and this runner has none; load the "):
        cpu_runner(loaded(saved(tmp_path), 2))


def test_another_format_than_that_of_the_load_is_refused(tmp_path: Path) -> None:
    model = loaded(saved(tmp_path), 2, "int4")
    with pytest.raises(ConfigError, match="'int8' differs from that of the load, 'int4'"):
        sharded_runner(model, 2, expert_weights="int8")


@pytest.mark.parametrize("tp", [1, 2])
def test_int8_rows_need_weights_that_are_integers(tmp_path: Path, tp: int) -> None:
    model = loaded(saved(tmp_path), tp)
    with pytest.raises(ConfigError, match="and this model has none"):
        sharded_runner(model, 2, activations="int8")
    with pytest.raises(ConfigError, match=r"model has none \(e2m1 g32\)"):
        sharded_runner(loaded(tmp_path, 2, "mxfp4"), 2, activations="int8")


def test_a_model_in_fp32_is_refused_with_the_dtype_to_use(tmp_path: Path) -> None:
    make_model("mixtral").save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"bfloat16, not torch\.float32; use dtype='bfloat16', or "
    ):
        load(tmp_path, tp=2)


def test_an_expert_of_another_format_than_the_first_is_refused_by_name(tmp_path: Path) -> None:
    folder = made(tmp_path)
    stem = STEM.replace("experts.3", "experts.6")

    values = Shards([tmp_path / "values" / "model.safetensors"])

    def expand(tensors: dict[str, Tensor]) -> None:
        for end in ("qweight", "qzeros", "scales"):
            del tensors[f"{stem}.w2.{end}"]
        tensors[f"{stem}.w2.weight"] = values.read(f"{stem}.w2.weight")

    change(folder, expand)
    with pytest.raises(
        DeviceError, match=r"rank 1 did not start: expert 6 of model.layers.1.+tp=1"
    ):
        sharded_runner(loaded(folder, 2), 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_that_is_cut_off_after_the_load_is_named(tmp_path: Path, rank: int) -> None:
    """The experts of a rank lie one after the other in the file, and the file ends in them."""
    folder = saved(tmp_path, "mixtral")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    last = sorted(name for name in tensors if f"experts.{7 * rank}." in name and ".2." in name)[-1]
    rest = {name: weight for name, weight in tensors.items() if name != last}
    path.rename(folder / "a.safetensors")
    save_file(rest, folder / "model-1.safetensors", metadata={"format": "pt"})
    save_file({last: tensors[last]}, folder / "model-2.safetensors", metadata={"format": "pt"})
    (folder / "a.safetensors").unlink()
    places = dict.fromkeys(rest, "model-1.safetensors") | {last: "model-2.safetensors"}
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model = loaded(folder, 2)
    with (folder / "model-2.safetensors").open("r+b") as file:
        file.truncate(200)
    with pytest.raises((DeviceError, ModelError), match=rf"expert {7 * rank} of .*2.* ends too"):
        sharded_runner(model, 2)


# -- what is read, and what is in memory

CHILD = """
import json, re, sys
from pathlib import Path
from qllm.models.loader import load
from qllm.models.weights.quantised_linears import weight_bytes
from qllm.sharded.runner import sharded_runner

def of(pid, file, name):
    return int(re.search(name + r":\\s+(\\d+)", open(f"/proc/{pid}/{file}").read())[1])

def ranks(path):
    model = load(path, dtype="bfloat16", expert_weights=how, tp=2).model
    return weight_bytes(model), sharded_runner(model, 2, expert_weights=how)

small, large, how = *map(Path, sys.argv[1:3]), sys.argv[3]
_, runner = ranks(small)  # imports, threads, and what a first load allocates for itself
base = [of(rank["pid"], "status", "VmHWM") for rank in runner.backend.ranks]
runner.close()
before = of("self", "io", "rchar")
num_bytes, runner = ranks(large)
pids = [rank["pid"] for rank in runner.backend.ranks]
peaks = [1024 * (of(pid, "status", "VmHWM") - own) for pid, own in zip(pids, base)]
read = [of(pids[0], "io", "rchar") - before, of(pids[1], "io", "rchar")]
plans = [rank["weight_bytes"] for rank in runner.backend.ranks]
print(json.dumps([num_bytes, plans, peaks, read]))
runner.close()
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small model, and one with 384 MiB of experts in bf16."""
    place = tmp_path_factory.mktemp("models")
    return checkpoint(place / "small", 1, 64, 64), checkpoint(place / "large", 8, 512, 1024)


def checkpoint(folder: Path, layers: int, hidden: int, width: int) -> Path:
    config: Any = AutoConfig.for_model(
        "mixtral", hidden_size=hidden, intermediate_size=width, num_hidden_layers=layers,
        num_local_experts=16, num_experts_per_tok=2, vocab_size=260,
        num_attention_heads=hidden // 32,
        num_key_value_heads=2, head_dim=32, eos_token_id=1, pad_token_id=None,
        bos_token_id=None, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    torch.manual_seed(0)
    return save(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), folder)


@pytest.mark.parametrize("how", ["auto", "int4"])
def test_a_rank_reads_its_experts_alone_and_takes_the_memory_of_its_share(
    folders: tuple[Path, Path], how: str
) -> None:
    args = [sys.executable, "-c", CHILD, *map(str, folders), how]
    text = subprocess.run(args, capture_output=True, text=True, check=True).stdout
    num_bytes, plans, peaks, read = json.loads(text.splitlines()[-1])
    assert all(plan < 0.55 * num_bytes for plan in plans)
    experts = 8 * 16 * 3 * 512 * 1024 * 2
    for num in read:  # rank 0 also reads an expert of each layer for its format and identity
        assert 0.5 * experts <= num <= 0.65 * experts, (num, experts)
    room = 1.1 * 64 * (1 << 20)  # read buffers
    for peak, plan in zip(peaks, plans, strict=True):
        assert peak <= 1.1 * plan + room, (peak, plan, num_bytes)
        assert how != "auto" or peak < 0.8 * num_bytes


@pytest.mark.parametrize("kind", ["Q8_0", "BF16"])
def test_a_rank_reads_its_share_of_a_gguf_file_alone(tmp_path: Path, kind: str) -> None:
    files = [
        convert(checkpoint(tmp_path / f"{layers}", layers, size, 2 * size), path, kind)
        for layers, size, path in ((1, 64, tmp_path / "1.gguf"), (3, 512, tmp_path / "3.gguf"))
    ]
    args = [sys.executable, "-c", CHILD, *map(str, files), "auto"]
    text = subprocess.run(args, capture_output=True, text=True, check=True).stdout
    _, _, _, read = json.loads(text.splitlines()[-1])
    bytes_of = {"Q8_0": 34 / 32, "BF16": 2}[kind]
    experts = 3 * 16 * 3 * 512 * 1024 * bytes_of
    for num in read:  # rank 0 also reads an expert of each layer, and all that is no expert
        assert 0.5 * experts <= num <= 0.75 * experts, (num, experts)
