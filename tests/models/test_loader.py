"""Names become models, or errors that say what to do: aliases, folders, shards, the hub."""

import json
import shutil
import time
import warnings
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoTokenizer,
    BertConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
)

from qllm import QLLMEngine
from qllm.errors import ConfigError, ModelError
from qllm.models import folders
from qllm.models.aliases import ALIASES
from qllm.models.loader import load, wrap
from qllm.models.tokenizer import load_tokenizer
from qllm.models.weights import checkpoint
from qllm.models.weights.dense import open_dense

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


def moe_config() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        **SIZES, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as save_pretrained writes it: bf16, several shards."""
    folder = tmp_path_factory.mktemp("qwen3_moe")
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(moe_config()).to(torch.bfloat16).save_pretrained(
        folder, max_shard_size="20KB"
    )
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def edit(path: Path, **changes: object) -> None:
    value = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**value, **changes}))


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = model(torch.arange(7)[None]).logits
    return out


def test_a_sharded_folder_loads_with_its_own_dtype_and_weights(saved: Path) -> None:
    assert len(shards(saved)) > 2
    loaded = load(saved)
    assert loaded.name == str(saved)
    assert loaded.model.dtype is torch.bfloat16
    assert not loaded.model.training
    assert loaded.model.config._experts_implementation == "grouped_mm"
    assert loaded.tokenizer is None
    assert same(loaded.model, Qwen3MoeForCausalLM.from_pretrained(saved, dtype="auto"))


@pytest.mark.parametrize("dtype", ["float32", torch.float32])
def test_a_dtype_that_is_asked_for_is_used(saved: Path, dtype: str | torch.dtype) -> None:
    assert load(saved, dtype=dtype).model.dtype is torch.float32


def test_a_dense_model_loads(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path).model), logits(model))


def test_an_unknown_name_lists_the_aliases() -> None:
    for name in ("mixtrall", "/no/such/folder", "./no-such", "a/b/c", ""):
        with pytest.raises(ConfigError, match=r"known aliases: .*gpt-oss.*phi-moe"):
            load(name)


def test_every_alias_that_is_not_local_is_a_hub_id() -> None:
    assert {"mixtral", "qwen3-moe", "olmoe", "gpt-oss", "deepseek-v3"} < set(ALIASES)
    for alias, name in ALIASES.items():
        assert alias in ("tiny", "talk") or folders._HUB_ID.fullmatch(name), alias


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty hub cache and a hub that refuses connections."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    return cache


@pytest.mark.parametrize("name", ["mixtral", "allenai/OLMoE-1B-7B-0924-Instruct"])
def test_absent_weights_say_where_was_looked_and_how_to_get_them(
    name: str, nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps: list[float] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    with pytest.raises(ModelError) as caught:
        load(name)
    assert naps == [], "a hub that cannot be reached is not asked again and again"
    message = str(caught.value)
    assert str(nowhere) in message
    assert "127.0.0.1:9" in message
    assert f"`hf download {ALIASES.get(name, name)}`" in message


def in_cache(cache: Path, name: str, source: Path) -> Path:
    """Lay a folder into a hub cache as a download leaves it."""
    home = cache / f"models--{name.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0" * 40)
    return Path(shutil.copytree(source, home / "snapshots" / ("0" * 40)))


def test_a_cached_hub_model_loads_without_a_network(saved: Path, nowhere: Path) -> None:
    in_cache(nowhere, "org/some-moe", saved)
    loaded = load("org/some-moe")
    assert loaded.name == "org/some-moe"
    assert same(loaded.model, load(saved).model)


def test_a_half_downloaded_model_says_what_is_missing(saved: Path, nowhere: Path) -> None:
    shards(in_cache(nowhere, "org/some-moe", saved))[0].unlink()
    with pytest.raises(ModelError, match=r"not on this machine completely \(1 of .*00001-of"):
        load("org/some-moe")
    assert load("org/some-moe", load_format="dummy").model.config.num_experts == 4


FILES = ("config.json", "generation_config.json", "model.safetensors.index.json", "last shard")


@pytest.mark.parametrize("name", FILES)
def test_pointers_of_git_lfs_are_named_with_what_to_do(folder: Path, name: str) -> None:
    path = shards(folder)[-1] if name == "last shard" else folder / name
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n")
    with pytest.raises(ModelError, match=rf"{path.name} is a Git LFS pointer.*`git lfs pull`"):
        load(folder)
    moved = path.rename(folder.parent / "model.gguf")
    with pytest.raises(ModelError, match=r"model\.gguf is a Git LFS pointer"):
        load(moved)


def test_a_file_in_place_of_a_folder_is_refused_with_the_folder(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        with pytest.raises(ConfigError, match=rf"is a file; give its folder: '{folder}'"):
            load(path)


def test_names_that_all_have_a_prefix_are_refused_with_it(folder: Path) -> None:
    """As in models of which the text is a part: another download has the same names."""
    for path in shards(folder):
        tensors = {f"language_model.{name}": x for name, x in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    edit(index, weight_map={f"language_model.{name}": shard for name, shard in names.items()})
    with pytest.raises(ModelError, match=r"names begin with 'language_model\.'") as caught:
        load(folder)
    assert "download" not in str(caught.value)


def test_a_missing_shard_is_named(folder: Path) -> None:
    gone = shards(folder)[1]
    gone.unlink()
    with pytest.raises(ModelError, match=f"1 of .* shards missing: {gone.name}"):
        load(folder)


def test_a_truncated_shard_is_named(folder: Path) -> None:
    cut = shards(folder)[1]
    cut.write_bytes(cut.read_bytes()[:-8])
    with pytest.raises(ModelError, match=f"{cut.name} is truncated"):
        load(folder)


def test_a_header_that_safetensors_takes_and_we_do_not_is_refused(folder: Path) -> None:
    """An entry that is a list, as its parser reads any struct."""
    path = shards(folder)[0]
    size, stored = int.from_bytes(path.read_bytes()[:8], "little"), path.read_bytes()[8:]
    header = json.loads(stored[:size])
    name = next(name for name in header if name != "__metadata__")
    header[name] = [header[name][key] for key in ("dtype", "shape", "data_offsets")]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + stored[size:])
    for read in (load, open_dense):
        with pytest.raises(ModelError, match=rf"{path.name} is truncated or no safetensors file"):
            read(folder)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[" * 100_000, "cannot be read"),
        (json.dumps({"weight_map": {"a": "x" * 300}}), "1 of 1 shards missing: xxx"),
    ],
)
def test_an_index_with_a_wrong_form_is_refused(folder: Path, text: str, wrong: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=wrong):
        load(folder)


@pytest.mark.parametrize(
    "entry",
    ["../x.safetensors", "/x.safetensors", "a/../../x.safetensors", "", 3, None, ["x"], "\0"],
)
def test_an_index_that_names_a_file_elsewhere_is_refused_unread(
    folder: Path, monkeypatch: pytest.MonkeyPatch, entry: object
) -> None:
    outside = folder.parent / "x.safetensors"
    shutil.copy(shards(folder)[0], outside)
    index = folder / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    edit(
        index,
        weight_map={
            **names,
            "lm_head.weight": str(outside) if entry == "/x.safetensors" else entry,
        },
    )
    monkeypatch.setattr(checkpoint, "_opened", lambda path: pytest.fail(f"{path} is opened"))
    for read in (load, open_dense):
        with pytest.raises(ModelError, match=r"'lm_head\.weight' is said to be in .*in its folder"):
            read(folder)


def test_shards_may_be_links_to_files_elsewhere(folder: Path) -> None:
    """As they are in the hub's cache."""
    for shard in shards(folder):
        shard.symlink_to(shard.rename(folder.parent / f"blob-{shard.stem}"))
    assert load(folder).model.dtype is torch.bfloat16


def test_a_file_that_needs_no_index_is_read_in_place_of_one(folder: Path) -> None:
    """transformers reads it, so what is looked at and rounded here has to be of it, too."""
    whole = {name: x for path in shards(folder) for name, x in load_file(path).items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder / "model.safetensors.index.json", weight_map={"a": "b"})
    assert folders.weight_files(folder) == [folder / "model.safetensors"]
    assert same(load(folder).model, Qwen3MoeForCausalLM.from_pretrained(folder, dtype="auto"))


def test_a_config_that_names_other_weights_is_refused(folder: Path) -> None:
    """transformers would read them, and not those that were looked at."""
    edit(folder / "config.json", transformers_weights="other.safetensors")
    with pytest.raises(ModelError, match=r"transformers_weights='other\.safetensors'"):
        load(folder)


@pytest.mark.parametrize("is_same", [True, False])
def test_a_tensor_in_two_files_has_to_be_the_same(folder: Path, is_same: bool) -> None:
    index = folder / "model.safetensors.index.json"
    shard = folder / json.loads(index.read_text())["weight_map"]["model.norm.weight"]
    other = next(path for path in shards(folder) if path != shard)
    norm = load_file(shard)["model.norm.weight"]
    more = {**load_file(other), "model.norm.weight": norm if is_same else norm * 2}
    save_file(more, other, metadata={"format": "pt"})
    if is_same:
        assert torch.equal(load(folder).model.model.norm.weight, norm)
        return
    with pytest.raises(ModelError, match=r"model\.norm\.weight is in two files"):
        load(folder)


def test_a_dense_folder_without_tensors_is_refused(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="holds no tensors"):
        open_dense(tmp_path)


def test_weights_that_a_checkpoint_lacks_are_not_made_up(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = folder / index["weight_map"].pop("lm_head.weight")
    tensors = load_file(shard)
    del tensors["lm_head.weight"]
    save_file(tensors, shard, metadata={"format": "pt"})
    edit(folder / "model.safetensors.index.json", **index)
    with pytest.raises(ModelError, match=r"does not fit its config: 1 missing keys.*lm_head"):
        load(folder)


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    edit(folder / "config.json", vocab_size=65)
    wrong = (
        r"2 weights of another shape, first lm_head\.weight, .* \(64, 32\) and must be \(65, 32\)"
    )
    with pytest.raises(ModelError, match=wrong):
        load(folder)


def test_pickles_are_refused(folder: Path) -> None:
    for path in [*shards(folder), folder / "model.safetensors.index.json"]:
        path.unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(ModelError, match="only pickles"):
        load(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": "nonsense"}'])
def test_a_broken_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config.json"):
        load(tmp_path)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (T5Config(), "encoder-decoder"),
        (BertConfig(), "both directions"),
        (ViTConfig(), "no causal language model"),
    ],
)
def test_what_is_no_causal_decoder_is_refused(
    tmp_path: Path, config: T5Config | BertConfig | ViTConfig, reason: str
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=reason):
        load(tmp_path, load_format="dummy")


def test_remote_code_runs_only_when_trusted(tmp_path: Path) -> None:
    edit(
        tmp_path / "config.json",
        model_type="brought-along",
        auto_map={"AutoConfig": "code.MyConfig", "AutoModelForCausalLM": "code.MyModel"},
    )
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ModelError, match="trust_remote_code=True"):
        load(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_every_eos_id_ends_an_answer(folder: Path) -> None:
    assert load(folder).eos_token_ids == frozenset()
    edit(folder / "config.json", eos_token_id=1)
    edit(folder / "generation_config.json", eos_token_id=[2, 3])
    words = {"a": 0, "<end>": 5, "<unk>": 6}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")), eos_token="<end>"
    ).save_pretrained(folder)
    loaded = load(folder)
    assert loaded.eos_token_ids == {1, 2, 3, 5}
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.convert_tokens_to_ids("<end>") == 5


def test_sampling_defaults_count_only_if_the_checkpoint_samples(folder: Path) -> None:
    given = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05}
    edit(folder / "generation_config.json", do_sample=True, **given)
    assert load(folder).generation_defaults == given
    edit(folder / "generation_config.json", do_sample=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers finds this combination odd
        assert load(folder).generation_defaults == {"repetition_penalty": 1.05}


def test_dummy_weights_need_a_config_only_and_repeat(tmp_path: Path) -> None:
    moe_config().save_pretrained(tmp_path)
    state = torch.random.get_rng_state()
    first, second = (load(tmp_path, load_format="dummy").model for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert same(first, second)
    assert not first.training
    assert first.config._experts_implementation == "grouped_mm"
    found = logits(first)
    assert found.isfinite().all()
    assert found.std() > 0
    bf16 = load(tmp_path, load_format="dummy", dtype="bfloat16").model
    assert bf16.dtype is torch.bfloat16


@pytest.mark.parametrize(
    "wrong", [{"dtype": "int3"}, {"device": "tpu9"}, {"load_format": "gguf"}, {"device": "meta"}]
)
def test_wrong_settings_are_config_errors(saved: Path, wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong.values()))):
        load(saved, **wrong)  # type: ignore[arg-type]


def test_a_loaded_model_is_taken_as_it_is() -> None:
    model = Qwen3MoeForCausalLM(moe_config()).eval()
    model.generation_config.eos_token_id = [4, 5]
    model.generation_config.do_sample = True
    model.generation_config.temperature = 0.5
    before = model.config.to_dict()
    wrapped = wrap(model)
    assert wrapped.model is model
    assert model.config.to_dict() == before
    assert wrapped.eos_token_ids == {4, 5}
    assert wrapped.generation_defaults["temperature"] == 0.5
    assert wrapped.name == "Qwen3MoeForCausalLM"
    with pytest.raises(ModelError, match="encoder-decoder"):
        wrap(T5ForConditionalGeneration(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1)))


def test_a_plain_tokenizer_is_the_one_that_transformers_would_choose() -> None:
    folder = files("qllm.models") / "tiny"
    ours, theirs = load_tokenizer("tiny"), AutoTokenizer.from_pretrained(str(folder))
    chat = [{"role": "user", "content": "What does json.dumps do?"}]
    assert ours is not None
    assert type(ours) is type(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(
        chat, tokenize=False
    )
    text = "def f(x):\n    return x  # ünïcode <|im_start|>"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]


@pytest.mark.parametrize("per_token", [5, 0])
def test_more_experts_per_token_than_there_are(folder: Path, per_token: int) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": per_token}))
    says = rf"num_experts_per_tok={per_token} must be in \[1, 4\], the number of experts"
    with pytest.raises(ModelError, match=says):
        QLLMEngine.from_pretrained(str(folder), run_in="thread")
