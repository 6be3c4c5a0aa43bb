"""A model cut after its first layers: layers, tokens and bytes of transformers' own cut model."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from qllm import QLLMEngine
from qllm.engine.storage.identity import weights_digest
from qllm.errors import ConfigError, ModelError
from qllm.models.discover import base_model, decoder_layers
from qllm.models.identity import identity
from qllm.models.loader import load
from qllm.models.weights.expert_file import room_for
from tests.long import families as long_families
from tests.support import published, tiny_configs
from tests.support.all_families import DENSE, MOE
from tests.support.dense import save
from tests.support.draft_models import WITH_MTP, saved
from tests.support.experts_in_file import assert_file_is_bank, loaded
from tests.support.experts_in_file import saved as saved_moe
from tests.support.families import FAMILIES, make_model
from tests.support.gguf_files import convert

NOT_LOADED = {
    "deepseek_v4": "whole models are refused: transformers saves names that it does not load",
    "emu3": "transformers saves a config whose type it does not load",
    "hy_v3": "whole models are refused: their router takes a further argument",
    "minimax_m2": "whole models are refused: their router takes a further argument",
    "qwen4_exp": "its first layer alone has no norm that is known",
    "qwen4_exp_text": "its first layer alone has no norm that is known",
}
"""Families without a check of all depths, and the reason."""
PER_LAYER = (
    "layer_types", "mlp_layer_types", "no_rope_layers", "indexer_types", "layer_rope_theta",
    "num_attention_heads_per_layer", "layers_block_type",
)  # fmt: skip
"""Lists of a config with an entry for each layer."""
MIB = 1 << 20
REST = 2 * 260 * 512 * 2
"""Bytes of embeddings and head of the large model."""
BUFFERS = 32 * MIB
"""Bytes of read buffers, and of layers that are being packed: as many in a load of all layers."""


def cut(model: Any, depth: int) -> Any:
    """Truncate a model of transformers, and its config."""
    base = base_model(model)
    layers, config = decoder_layers(base), base.config
    each = config.num_hidden_layers // len(layers)
    del layers[depth:]
    for name in PER_LAYER:
        if isinstance(found := vars(config).get(name), list | tuple):
            setattr(config, name, found[: depth * each])
    config.num_hidden_layers = depth * each
    return model


def answers(model: Any) -> list[long_families.Stream]:
    """Return greedy answers of a model without a cache, which some cut hybrids cannot have."""
    found = []
    for prompt in long_families.prompts():
        ids, logprobs = list(prompt), []
        for _ in range(long_families.NEW):
            with torch.no_grad():
                logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1].float()
            ids.append(int(logits.argmax()))
            logprobs.append(torch.log_softmax(logits, -1)[ids[-1]].item())
        found.append(long_families.Stream(ids[len(prompt) :], logprobs))
    return found


def save_family(family: str, folder: Path) -> Any:
    """Save a tiny model, and return it."""
    model = tiny_configs.tiny_model(family)
    model.save_pretrained(folder)
    return model


def assert_is_cut(folder: Path, depth: int) -> None:
    """Check weights, tokens and log-probabilities against those of transformers' own cut model."""
    auto: Any = transformers.AutoModelForCausalLM
    whole = auto.from_pretrained(folder, dtype=torch.float32).eval()
    other = answers(whole)
    expected = cut(whole, depth)
    found = load(folder, dtype="float32", depth=depth).model
    assert type(found) is type(expected)
    settings = [vars(base_model(model).config) for model in (found, expected)]
    for name in ("num_hidden_layers", *PER_LAYER):
        assert settings[0].get(name) == settings[1].get(name), name
    ours, theirs = found.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    wanted = answers(expected)
    streams, _ = long_families.served(found)
    assert long_families.difference(streams, wanted) < long_families.CLOSE
    assert long_families.difference(wanted, other) > 20 * long_families.CLOSE, "shows no cut"


@pytest.mark.sampled(6)
@pytest.mark.parametrize("family", [x for x in (*MOE, *DENSE) if x not in NOT_LOADED])
def test_a_cut_family_gives_the_tokens_of_transformers_cut(family: str, tmp_path: Path) -> None:
    model = save_family(family, tmp_path)
    num = len(decoder_layers(base_model(model)))
    for depth in sorted({1, num - 1}):
        assert_is_cut(tmp_path, depth)


@pytest.mark.parametrize(
    ("family", "depth"),
    [
        ("gemma4", 3),  # positions by type of layer, of which one is cut off
        ("longcat_flash", 1),  # the config counts two layers for each
        ("minicpm3", 2),  # a scale that depends on the number of layers
        ("minimax", 3),  # a decay that depends on it
        ("qwen3_next", 3),  # no layer attends
    ],
)
def test_what_only_some_families_have_stays_that_of_the_whole_model(
    family: str, depth: int, tmp_path: Path
) -> None:
    save_family(family, tmp_path)
    assert_is_cut(tmp_path, depth)


@pytest.mark.parametrize("family", FAMILIES)
def test_our_kernels_give_a_cut_model_the_bits_of_one_that_was_cut_before(
    family: str, tmp_path: Path
) -> None:
    make_model(family, torch.bfloat16).save_pretrained(tmp_path)
    ours = load(tmp_path, depth=2).model
    theirs = cut(load(tmp_path).model, 2)
    settings = {"threads": 1, "max_kv_tokens": 2048, "conformance": False}
    sampling: dict[str, Any] = {"seed": 7, "temperature": 1.2, "ignore_eos": True}
    found = []
    for model in (ours, theirs):
        with QLLMEngine.from_model(model, **settings) as engine:
            handles = [
                engine.submit(ids, "BE", 12, **how)
                for ids in long_families.prompts()
                for how in ({"temperature": 0, "ignore_eos": True}, sampling)
            ]
            found.append([handle.result(60).token_ids for handle in handles])
    assert found[0] == found[1]


def test_all_layers_are_the_whole_model() -> None:
    whole, same = load("tiny").model, load("tiny", depth=4).model
    assert identity(whole) == identity(same)
    assert weights_digest(whole) == weights_digest(same)
    depths = [load("tiny", depth=depth).model for depth in (1, 2, 3)]
    assert len({identity(model) for model in (whole, *depths)}) == 4
    assert len({weights_digest(model) for model in (whole, *depths)}) == 4


def test_a_cut_model_that_was_saved_is_another_model(tmp_path: Path) -> None:
    """Its layers may be others: some families compute with the number of layers."""
    found = load("tiny", depth=2).model
    cut(load("tiny").model, 2).save_pretrained(tmp_path)
    assert identity(load(tmp_path).model) != identity(found)


# -- what is read


@pytest.mark.parametrize("form", ["fp8", "awq", "packed"])
def test_a_quantised_checkpoint_is_read_to_its_depth(form: str, tmp_path: Path) -> None:
    make_model("mixtral", torch.bfloat16).save_pretrained(tmp_path / "plain")
    folder, _ = published.publish(tmp_path / "plain", form, tmp_path)
    same_tensors(load(folder, depth=2).model, cut(load(folder).model, 2))


@pytest.mark.parametrize("how", ["int8", "int4", "mxfp4"])
def test_experts_are_rounded_to_the_depth(how: str, tmp_path: Path) -> None:
    folder = saved_moe(tmp_path)
    settings: dict[str, Any] = {"dtype": "bfloat16", "expert_weights": how}
    same_tensors(load(folder, depth=2, **settings).model, cut(load(folder, **settings).model, 2))


@pytest.mark.parametrize("kind", ["BF16", "Q8_0"])
def test_a_gguf_file_is_read_to_its_depth(kind: str, tmp_path: Path) -> None:
    folder = save(moe(num_layers=3), tmp_path / "model")
    file = convert(folder, tmp_path / "model.gguf", kind)
    same_tensors(load(file, depth=2).model, cut(load(file).model, 2))


def same_tensors(found: Any, expected: Any) -> None:
    """Check that a model has the weights of another one, quantised or not."""
    assert weights_digest(found) == weights_digest(expected)
    assert [n for n, _ in found.named_modules()] == [n for n, _ in expected.named_modules()]


def moe(num_layers: int, hidden: int = 64, width: int = 64) -> Any:
    config: Any = transformers.AutoConfig.for_model(
        "mixtral", hidden_size=hidden, intermediate_size=width, num_hidden_layers=num_layers,
        num_local_experts=8, num_experts_per_tok=2, vocab_size=260, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, eos_token_id=1, pad_token_id=None, bos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    return auto.from_config(config, dtype=torch.bfloat16)


def test_a_tensor_of_no_layer_is_still_refused(tmp_path: Path) -> None:
    make_model("mixtral", torch.bfloat16).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.odd.weight"] = torch.zeros(2)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"unexpected keys, first model\.odd\.weight"):
        load(tmp_path, depth=2)


def test_further_layers_of_a_checkpoint_are_dropped(tmp_path: Path) -> None:
    folder = saved(tmp_path, WITH_MTP)
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"]
    found = load(folder, depth=2).model
    assert base_model(found).config.num_nextn_predict_layers == 0
    assert len(decoder_layers(base_model(found))) == 2


def test_a_file_of_experts_has_the_layers_of_its_depth(tmp_path: Path) -> None:
    folder = saved_moe(tmp_path)
    model, file = loaded(folder, depth=2, path=tmp_path / "two")
    assert len(file.layers) == 2
    assert len(decoder_layers(base_model(model))) == 2
    whole, every = loaded(folder, path=tmp_path / "whole")
    assert len(every.layers) == 3
    assert identity(model) != identity(whole)
    assert_file_is_bank(every, folder)
    for layer, own in enumerate(file.layers):
        assert bytes_in(file, layer) == bytes_in(every, layer)
        assert own.formats == every.layers[layer].formats
    for path, depth in ((tmp_path / "two", 1), (tmp_path / "two", None), (tmp_path / "whole", 2)):
        with pytest.raises(ConfigError, match="they have other layers or shapes than the model"):
            loaded(folder, depth=depth, path=path)


def bytes_in(file: Any, layer: int) -> list[bytes]:
    """Return the experts of a layer in a file."""
    found = []
    for expert in range(file.layers[layer].num_experts):
        room = room_for(file.layers[layer].expert_bytes)
        file.read(layer, expert, room)
        found.append(bytes(room))
    return found


CHILD = """
import json, re, sys
from pathlib import Path
from qllm.models.loader import load
from qllm.models.weights.experts_in_file import ExpertsInFile

def status(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

def read_bytes():
    return int(re.search(r"read_bytes: (\\d+)", open("/proc/self/io").read())[1])

small, large, depth, how = *sys.argv[1:3], json.loads(sys.argv[3]), json.loads(sys.argv[4])
in_file = how.pop("in_file", False)

def loaded(path, **more):
    if in_file:
        file = Path(path).parent / f"{Path(path).name}.{depth}.experts"
        more["experts"] = ExpertsInFile(file, 32 << 20)
    return load(path, **how, **more).model

kept = loaded(small)  # imports, threads, and what a first load allocates for itself
before, read = status("VmRSS"), read_bytes()
open("/proc/self/clear_refs", "w").write("5")
model = loaded(large, depth=depth)
print(json.dumps([status("VmHWM") - before, read_bytes() - read]))
"""
LAYERS, DEPTH = 12, 3


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small model, and one whose layers have 13 MiB each."""
    place = tmp_path_factory.mktemp("large")
    return save(moe(1), place / "small"), save(moe(LAYERS, 512, 512), place / "large")


def as_stored(_: Path, folder: Path) -> Path:
    return folder


def in_shards(place: Path, folder: Path) -> Path:
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype="auto")
    return save(model, place / folder.name, "60MB")


def as_fp8(place: Path, folder: Path) -> Path:
    return published.publish(folder, "fp8", place / folder.name)[0]


def as_gguf(place: Path, folder: Path) -> Path:
    return convert(folder, place / f"{folder.name}.gguf", "Q8_0")


@pytest.mark.parametrize(
    ("make", "how"),
    [
        (as_stored, {}),
        (in_shards, {}),
        (as_fp8, {}),
        (as_gguf, {}),
        (as_stored, {"expert_weights": "int4"}),
        (as_stored, {"in_file": True}),
    ],
)
def test_a_load_reads_and_holds_no_more_than_its_share(
    make: Callable[[Path, Path], Path],
    how: dict[str, Any],
    large: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    """A layer that is not needed is not in memory for a moment, and not read from the disk."""
    paths = [make(tmp_path, folder) for folder in large]
    files = [paths[1]] if paths[1].is_file() else sorted(paths[1].glob("*.safetensors"))
    for file in files:
        drop_from_page_cache(file)
    args = [sys.executable, "-c", CHILD, *map(str, paths), json.dumps(DEPTH), json.dumps(how)]
    done = subprocess.run(args, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-1000:]
    peak, read = json.loads(done.stdout.splitlines()[-1])
    whole = sum(file.stat().st_size for file in files)
    most = 1.1 * ((whole - REST) * DEPTH / LAYERS + REST)
    ahead = 2 * read_ahead(files[0]) * len(files)
    assert max(most + BUFFERS, most + ahead) < 0.8 * whole, "would not show a layer too many"
    assert most / 1.3 < read <= most + ahead, (read, most, whole)
    assert peak <= most + BUFFERS, (peak, most, whole)


def drop_from_page_cache(file: Path) -> None:
    """Let the next read of a file come from the disk."""
    fd = os.open(file, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def read_ahead(file: Path) -> int:
    """Return the bytes that the system reads behind what a process has asked for."""
    device = file.stat().st_dev
    place = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    found = [where / "queue" / "read_ahead_kb" for where in (place, place.resolve().parent)]
    return max((int(path.read_text()) << 10 for path in found if path.exists()), default=0)


# -- what is refused


@pytest.mark.parametrize("depth", [0, -1, 5, True, 2.0, "2"])
def test_a_depth_that_the_model_does_not_have_is_refused(depth: Any) -> None:
    said = r"depth=.* must be an integer in \[1, 4\], the layers of model 'tiny'; leave depth out"
    with pytest.raises(ConfigError, match=said):
        load("tiny", depth=depth)


def test_random_weights_are_not_cut() -> None:
    with pytest.raises(ConfigError, match="load_format='dummy' reads no layers; leave depth out"):
        load("tiny", load_format="dummy", depth=2)
