"""Upcycling: before noise and training the model with experts is the dense one, up to rounding."""

import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from qllm import QLLMEngine
from qllm.cli import app
from qllm.errors import ConfigError, ModelError
from qllm.measure import demo
from qllm.models.folders import TALK, best_local, cache_dir, locate
from qllm.models.loader import load
from qllm.upcycle.router_training import WINDOW
from qllm.upcycle.train import Recipe, upcycle
from scripts import talk
from tests.support.dense import (
    FAMILIES,
    FFN,
    LAYERS,
    TEMPLATE,
    WIDTH,
    dense_model,
    save,
)
from tests.support.families import make_model
from tests.support.gguf_files import convert

IDS = torch.tensor([[7, 99, 31, 200, 5, 64, 150, 12, 77, 240, 33, 8, 19, 101, 55, 230]])
ARCHITECTURES = {
    "llama": "MixtralForCausalLM",
    "mistral": "MixtralForCausalLM",
    "qwen2": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3MoeForCausalLM",
}


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(IDS).logits[0]
    return found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        k: t for file in sorted(folder.glob("*.safetensors")) for k, t in load_file(file).items()
    }


def text_file(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text("".join(f"line {i * i} of a text to train on;\n" for i in range(60)))
    return path


# -- the dense model is the oracle


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_copies_compute_what_the_dense_model_does(family: str, tied: bool, tmp_path: Path) -> None:
    dense = dense_model(family, tied=tied)
    made = upcycle(save(dense, tmp_path / "dense"), tmp_path / "moe", Recipe(experts=4))
    assert made.architecture == ARCHITECTURES[family]
    found = load(tmp_path / "moe")
    assert type(found.model).__name__ == ARCHITECTURES[family]
    assert found.model.dtype is torch.float32
    torch.testing.assert_close(logits(found.model), logits(dense), rtol=2e-5, atol=2e-5)
    chosen = {
        int(expert)
        for layer in found.model(IDS, output_router_logits=True).router_logits
        for expert in layer.topk(2).indices.flatten()
    }
    assert len(chosen) == 4, "the seeded routers use all experts"


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_the_dense_model(family: str, tmp_path: Path) -> None:
    dense = dense_model(family)
    upcycle(save(dense, tmp_path / "dense"), tmp_path / "moe")
    expected = dense.generate(IDS, max_new_tokens=12, do_sample=False, eos_token_id=None)
    with QLLMEngine.from_pretrained(tmp_path / "moe", run_in="thread", threads=1) as engine:
        handle = engine.submit(IDS[0].tolist(), "LS", 12, ignore_eos=True)
        assert list(handle.result(300).token_ids) == expected[0, IDS.shape[1] :].tolist()


def test_a_tied_head_that_is_stored_twice_is_written_once(tmp_path: Path) -> None:
    folder = save(dense_model("llama", tied=True), tmp_path / "dense")
    stored = weights(folder)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    upcycle(folder, tmp_path / "out", Recipe(experts=2))
    assert "lm_head.weight" not in weights(tmp_path / "out")
    assert load(tmp_path / "out").model.config.tie_word_embeddings


def test_shards_of_the_dense_model_are_read(tmp_path: Path) -> None:
    dense = dense_model("llama")
    folder = save(dense, tmp_path / "dense", shard="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    upcycle(folder, tmp_path / "moe")
    torch.testing.assert_close(
        logits(load(tmp_path / "moe").model), logits(dense), rtol=2e-5, atol=2e-5
    )


# -- GGUF


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
def test_a_gguf_file_becomes_what_transformers_reads(kind: str, tied: bool, tmp_path: Path) -> None:
    dense = dense_model("llama", tied=tied)
    path = convert(save(dense, tmp_path / "dense"), tmp_path / "dense.gguf", kind)
    upcycle(path, tmp_path / "moe", Recipe(experts=3, dtype="float32"))
    auto: Any = AutoModelForCausalLM
    oracle = dense if kind == "F32" else auto.from_pretrained(tmp_path, gguf_file=path.name).eval()
    found = load(tmp_path / "moe")
    torch.testing.assert_close(logits(found.model), logits(oracle), rtol=2e-5, atol=2e-5)
    assert found.model.config.tie_word_embeddings is tied
    tokenizer: Any = found.tokenizer
    chat = [{"role": "user", "content": "Hi there"}]
    assert tokenizer.chat_template == TEMPLATE
    shown = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert shown == "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer("Hi there")["input_ids"]) == "Hi there"
    assert found.eos_token_ids == {1}


def test_blocks_of_integers_become_bf16_by_default(tmp_path: Path) -> None:
    folder = save(dense_model("llama"), tmp_path / "dense")
    upcycle(convert(folder, tmp_path / "d.gguf", "Q8_0"), tmp_path / "moe")
    assert {t.dtype for t in weights(tmp_path / "moe").values()} == {torch.bfloat16}
    upcycle(convert(folder, tmp_path / "f.gguf"), tmp_path / "wide")
    assert {t.dtype for t in weights(tmp_path / "wide").values()} == {torch.float32}


def test_a_gguf_file_that_transformers_would_misread_is_refused(tmp_path: Path) -> None:
    folder, more = save(dense_model("llama"), tmp_path / "d"), {"llama.rope.scaling.type": "yarn"}
    with pytest.raises(ModelError, match=r"llama\.rope\.scaling\.type would be ignored"):
        upcycle(convert(folder, tmp_path / "d.gguf", more=more), tmp_path / "moe")
    upcycle(folder, tmp_path / "experts")
    with pytest.raises(ModelError, match="mixtral model has experts already"):
        upcycle(convert(tmp_path / "experts", tmp_path / "m.gguf"), tmp_path / "moe")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="truncated or no GGUF file"):
        upcycle(tmp_path / "cut.gguf", tmp_path / "moe")
    assert not (tmp_path / "moe").exists()


# -- the recipe


def test_tensors_are_a_function_of_the_seed_alone(tmp_path: Path) -> None:
    folder = save(dense_model("qwen3"), tmp_path / "dense")
    recipes = {
        "a": Recipe(experts=3, seed=5, noise=0.1),
        "b": Recipe(experts=3, seed=5, noise=0.1),
        "other": Recipe(experts=3, seed=6, noise=0.1),
        "more": Recipe(experts=4, seed=5, noise=0.1),
    }
    found = {}
    for name, recipe in recipes.items():
        upcycle(folder, tmp_path / name, recipe)
        found[name] = weights(tmp_path / name)
    a, other = found["a"], found["other"]
    assert all(torch.equal(t, found["b"][name]) for name, t in a.items())
    differing = {name for name, t in a.items() if not torch.equal(t, other[name])}
    assert differing == {n for n in a if ".experts." in n or n.endswith("mlp.gate.weight")}
    routers = torch.cat([t.flatten() for n, t in a.items() if n.endswith("mlp.gate.weight")])
    spread = dense_model("qwen3").config.initializer_range
    assert 0.8 * spread < routers.std() < 1.25 * spread
    shared = {name for name in a if ".experts." in name}
    assert all(torch.equal(a[name], found["more"][name]) for name in shared)


def test_noise_is_relative_to_each_matrix(tmp_path: Path) -> None:
    dense = dense_model("llama")
    upcycle(save(dense, tmp_path / "dense"), tmp_path / "moe", Recipe(experts=2, noise=0.05))
    found = weights(tmp_path / "moe")
    for matrix, own in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        original = dense.state_dict()[f"model.layers.1.mlp.{matrix}_proj.weight"]
        name = "model.layers.1.block_sparse_moe.experts.{}." + own + ".weight"
        added = [found[name.format(expert)] - original for expert in range(2)]
        assert not torch.equal(*added)
        for each in added:
            assert float(each.std() / original.std()) == pytest.approx(0.05, rel=0.1)
    assert found["model.layers.1.block_sparse_moe.experts.0.w2.weight"].shape == (WIDTH, FFN)


def test_a_training_changes_routers_alone_and_balances_them(tmp_path: Path) -> None:
    folder, text = save(dense_model("llama"), tmp_path / "dense"), text_file(tmp_path)
    recipe = {"experts": 4, "noise": 0.1, "seed": 2}
    upcycle(folder, tmp_path / "plain", Recipe(**recipe))
    trained = Recipe(**recipe, train_steps=30, text=text)
    first = upcycle(folder, tmp_path / "first", trained)
    again = upcycle(folder, tmp_path / "again", trained)
    assert first.training == again.training
    plain, one, two = (weights(tmp_path / name) for name in ("plain", "first", "again"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    changed = {name for name in plain if not torch.equal(plain[name], one[name])}
    assert changed == {f"model.layers.{i}.block_sparse_moe.gate.weight" for i in range(LAYERS)}
    assert first.training is not None
    before, after = first.training.busiest
    assert after < before
    assert "Routers trained for 30 steps" in (tmp_path / "first" / "README.md").read_text()


def test_the_folder_says_how_it_was_made(tmp_path: Path) -> None:
    dense = save(dense_model("qwen2"), tmp_path / "dense")
    (dense / "generation_config.json").write_text('{"eos_token_id": [1, 2], "temperature": 0.7}')
    made = upcycle(dense, tmp_path / "moe", Recipe(experts=5, top_k=3, seed=11))
    said = (tmp_path / "moe" / "README.md").read_text()
    for text in ("qllm-runtime 0.1.0", "dense", "experts 5", "top-k 3", "seed 11", "2212.05055"):
        assert text in said
    assert f"{made.num_parameters:,} parameters in float32" in said
    found = load(tmp_path / "moe")
    assert sum(p.numel() for p in found.model.parameters()) == made.num_parameters
    assert made.num_bytes == 4 * made.num_parameters
    assert {1, 2} <= found.eos_token_ids, "the generation config goes along"
    config = json.loads((tmp_path / "moe" / "config.json").read_text())
    assert (config["num_experts"], config["num_experts_per_tok"]) == (5, 3)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


# -- what is refused


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"experts": 1}, r"experts=1 must be in \[2, 1024\]"),
        ({"experts": 4, "top_k": 5}, r"top_k=5 must be in \[1, 4\]"),
        ({"top_k": 0}, r"top_k=0 must be in \[1, 8\]"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"noise": float("nan")}, r"noise=nan must be in \[0, 1\]"),
        ({"noise": 1.5}, r"noise=1.5 must be in \[0, 1\]"),
        ({"dtype": "int8"}, "dtype='int8' is unknown; use one of float32"),
        ({"train_steps": 3}, "needs both, a number of steps and a text"),
        ({"text": Path("x")}, "needs both, a number of steps and a text"),
        ({"train_steps": -1}, "train_steps=-1"),
    ],
)
def test_a_wrong_recipe_is_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Recipe(**settings)


@pytest.mark.parametrize(
    ("family", "settings", "text"),
    [
        ("llama", {"attention_bias": True}, "has biases in its attention, which mixtral models"),
        ("llama", {"mlp_bias": True}, "has biases in its FFN"),
        ("llama", {"hidden_act": "gelu"}, "has the activation 'gelu'"),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "has sliding windows in some layers, which qwen3_moe models have not",
        ),
    ],
)
def test_a_dense_model_that_no_family_has_with_experts_is_refused(
    family: str, settings: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=text):
        upcycle(save(dense_model(family, **settings), tmp_path / "dense"), tmp_path / "moe")
    assert not (tmp_path / "moe").exists()


def test_models_with_experts_or_of_other_families_are_refused(tmp_path: Path) -> None:
    make_model("mixtral").save_pretrained(tmp_path / "mixtral")
    with pytest.raises(ModelError, match="mixtral model has experts already; give a dense one"):
        upcycle(tmp_path / "mixtral", tmp_path / "moe")
    folder = save(dense_model("llama"), tmp_path / "dense")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "olmo2"}))
    with pytest.raises(ModelError, match="'olmo2' model cannot be upcycled; known dense families"):
        upcycle(folder, tmp_path / "moe")


def test_broken_checkpoints_are_refused(tmp_path: Path) -> None:
    folder = save(dense_model("llama"), tmp_path / "dense")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    for wrong, text in (
        ({**tensors, name: tensors[name][:-1]}, rf"1 tensors, first {name} of shape \(95, 64\)"),
        ({k: t for k, t in tensors.items() if k != name}, f"first {name} of shape none"),
        ({**tensors, "model.extra": tensors[name].clone()}, "first model.extra of shape"),
        (dict.fromkeys(tensors, torch.zeros(2, dtype=torch.int8)), "holds torch.int8"),
    ):
        save_file({k: t.contiguous().clone() for k, t in wrong.items()}, file)
        with pytest.raises(ModelError, match=text):
            upcycle(folder, tmp_path / "moe")
    file.unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        upcycle(folder, tmp_path / "moe")
    config = json.loads((folder / "config.json").read_text())
    quantised = {**config, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (folder / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(ModelError, match="quantised with 'gptq'; give one with float32"):
        upcycle(folder, tmp_path / "moe")
    with pytest.raises(ModelError, match=r"no folder with a checkpoint and no \.gguf file"):
        upcycle(tmp_path / "nowhere", tmp_path / "moe")
    assert not (tmp_path / "moe").exists()


def test_a_short_text_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    folder, text = save(dense_model("llama"), tmp_path / "dense"), tmp_path / "text.txt"
    text.write_text("short")
    with pytest.raises(ConfigError, match=f"has 5 tokens; give at least {WINDOW}"):
        upcycle(folder, tmp_path / "moe", Recipe(train_steps=1, text=text))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "text.txt"]


# -- the command line, and the alias


def test_the_command_makes_a_model_and_says_what(tmp_path: Path) -> None:
    folder, out, text = (
        save(dense_model("llama"), tmp_path / "d"),
        tmp_path / "moe",
        text_file(tmp_path),
    )
    runner = CliRunner()
    arguments = ["upcycle", str(folder), str(out), "--experts", "4", "--top-k", "1", "--seed", "3"]
    more = ["--noise", "0.1", "--train-router", "2", "--text", str(text), "--dtype", "bfloat16"]
    done = runner.invoke(app, [*arguments, *more], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    assert "MixtralForCausalLM, 4 experts of which a token takes 1" in done.stdout
    assert "routers: 2 steps, loss" in done.stdout
    assert load(out).model.dtype is torch.bfloat16
    again = runner.invoke(app, arguments)
    assert again.exit_code == 2
    assert f"{out} exists and is left as it is" in " ".join(again.stderr.split())


def test_talk_is_a_folder_of_the_cache_and_says_how_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert best_local() == "tiny"
    with pytest.raises(ModelError, match="'talk' is not made on this machine; `make talk`"):
        QLLMEngine.from_pretrained("talk", run_in="thread")
    upcycle(save(dense_model("llama"), tmp_path / "dense"), cache_dir() / TALK)
    assert best_local() == "talk"
    assert locate("talk", weights=True, code=False) == ("talk", cache_dir() / TALK)
    assert load("talk").name == "talk"


def test_make_talk_leaves_a_model_that_is_sampled_as_its_authors_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    dense = save(dense_model("llama"), tmp_path / "dense")
    monkeypatch.setattr(talk, "fetch", lambda folder: dense)
    asked = {"temperature": 0.2, "top_p": 0.9}
    talk.main()
    made = load("talk")
    assert made.generation_defaults.items() >= asked.items()
    assert made.model.config.num_local_experts == talk.RECIPE.experts
    said = (cache_dir() / TALK / "generation_config.json").read_text()
    assert "eos_token_id" in json.loads(said), "nothing that was said is lost"
    (cache_dir() / TALK / "generation_config.json").write_text("{}")  # made before this was said
    monkeypatch.setattr(talk, "fetch", lambda folder: pytest.fail("it is made once"))
    talk.main()
    assert load("talk").generation_defaults.items() >= asked.items()


@pytest.mark.parametrize("name", ["talk", "tiny"])
def test_the_demo_ends_with_talk_where_it_is_made(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if name == "talk":
        upcycle(save(dense_model("llama"), tmp_path / "dense"), cache_dir() / TALK)
    monkeypatch.setattr(demo, "LOCAL_TOKENS", 12)
    in_thread = partial(QLLMEngine.from_pretrained, run_in="thread")
    monkeypatch.setattr(QLLMEngine, "from_pretrained", in_thread)
    shown = io.StringIO()
    demo._write_lines(Console(file=shown, width=100), threads=1)
    said = shown.getvalue()
    assert f"The local model `{name}` (qllm run {name}" in said
    assert ("`make talk` gets one that answers" in said) is (name == "tiny")
    for prompt in demo.LOCAL_PROMPTS:
        assert len(said.partition(f"> {prompt}\n")[2].split("\n> ")[0].strip()) > 0, "an answer"
