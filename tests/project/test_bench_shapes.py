"""`python -m bench NAME`, and the parts of `bench shapes` that decide what a number means."""

import json
import re
import runpy
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, DeepseekV2Config, GptOssConfig, Qwen3MoeConfig

from bench import __main__ as by_name
from bench.common import Table
from bench.engine.ranks import vllm_rows
from bench.models import shapes
from bench.models.answering import of_rows
from bench.models.noise_folder import skeleton, write
from bench.models.published_shapes import SHAPES, VOCAB, config_of
from bench.models.rival import Rival, RivalError, library
from bench.models.shape_floors import Machine, Needs, Work
from tests.support.files import ROOT

SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
QWEN = {"moe_intermediate_size": 32, "num_experts": 8, "intermediate_size": 96}


def test_every_bench_has_a_name_of_its_own() -> None:
    folder = ROOT / "bench"
    paths = [p for p in folder.rglob("*.py") if "\ndef main(" in p.read_text()]
    assert set(by_name.named().values()) == set(paths) - {folder / "__main__.py"}
    assert by_name.named()["shapes"] == folder / "models" / "shapes.py"
    assert by_name.named()["kv"] == folder / "kv" / "__main__.py"


def test_the_readme_lists_every_bench_and_every_result() -> None:
    text = (ROOT / "bench" / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .+? \|(?: .+? \|)* (.+?) \|$", text, re.M)
    assert sorted(name for name, _ in rows) == sorted(by_name.named())
    results = {path.name for path in (ROOT / "bench" / "results").iterdir()}
    assert {file for _, last in rows for file in re.findall(r"[\w-]+\.json", last)} <= results
    assert set(re.findall(r"`([\w-]+\.json)`", text)) == results


def test_a_bench_is_run_by_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(runpy, "run_module", lambda name, **how: ran.append((name, sys.argv[1:])))
    monkeypatch.setattr(sys, "argv", ["bench", "shapes", "--quick"])
    by_name.main()
    assert ran == [("bench.models.shapes", ["--quick"])]
    monkeypatch.setattr(sys, "argv", ["bench"])
    by_name.main()
    assert "shapes " in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["bench", "no-such"])
    with pytest.raises(SystemExit) as ended:
        by_name.main()
    assert ended.value.code == 2
    assert "'no-such'; there are" in capsys.readouterr().err
    assert len(ran) == 1


def test_a_step_counts_while_it_has_every_row() -> None:
    alone = [1.0, 2.0, 3.0, 4.0]
    later = [2.5, 5.5, 8.5]
    assert of_rows([alone]) == {"prompt_s": 1.0, "token_s": 1.0}
    assert of_rows([alone, later]) == {"prompt_s": 2.5, "token_s": 1.0}
    assert of_rows([[1.0], [2.0]]) == {"prompt_s": 2.0, "token_s": None}


@pytest.mark.parametrize("name", SHAPES)
def test_a_published_shape_has_its_layers(name: str) -> None:
    shape = SHAPES[name]
    model = skeleton(config_of(shape, shape.num_layers))
    needs = Needs(model)
    assert needs.head == VOCAB * model.config.hidden_size
    assert needs.experts == shape.num_layers * needs.largest  # no layer is dense, or all are
    assert (needs.experts == 0) == (shape.note == "dense")
    assert needs.rest > 0
    one = Needs(skeleton(config_of(shape, 1)))
    assert one.experts == needs.largest
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"]
    assert set(shape.per_layer.get("layer_types", ["full_attention"])) <= set(kinds)


def test_the_floor_is_what_even_routing_reads_and_computes() -> None:
    needs = Needs(skeleton(Qwen3MoeConfig(**SMALL, **QWEN)))
    experts, attention = 2 * 8 * 3 * 64 * 32, 2 * (64 * 16 * (4 + 2 + 2) + 16 * 4 * 64)
    norms, router, head = 2 * (2 * 64 + 2 * 16) + 64, 2 * 8 * 64, 512 * 64
    assert (needs.experts, needs.rest) == (experts, attention + norms + router)
    assert needs.hit(1) == pytest.approx(2 / 8)
    assert needs.hit(2) == pytest.approx(1 - 0.75**2)
    one = needs.decode(1, 100, "auto")
    kv = 2 * 2 * 2 * 2 * 16 * 100  # layers, keys and values, bytes, heads, size, tokens
    assert one.bytes == pytest.approx(2 * (needs.rest + head + experts / 4) + kv)
    passed = needs.rest + experts / 4
    assert one.flops == pytest.approx(2 * (passed + head) + 2 * 4 * 4 * 16 * 100)
    rounded = needs.decode(1, 100, "int4")
    assert one.bytes - rounded.bytes == pytest.approx((2 - 4.5 / 8) * experts / 4)
    many = needs.prefill(64, "auto")
    assert many.flops == pytest.approx(2 * 64 * passed + 2 * head + 2 * 4 * 4 * 16 * 64 * 32)
    assert Work(3e9, 8e9).seconds(Machine(gb_s=1.0, gflops=4.0)) == 3.0
    assert Work(3e9, 8e9).seconds(Machine(gb_s=10.0, gflops=4.0)) == 2.0


def test_a_window_and_a_latent_make_a_floor_smaller() -> None:
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    needs = Needs(skeleton(GptOssConfig(**SMALL, num_local_experts=4, **layers)))
    grown = needs.decode(1, 120, "auto").bytes - needs.decode(1, 20, "auto").bytes
    assert grown == 100 * 2 * 2 * 2 * 16  # of the layer without a window
    sizes = {"kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16, "v_head_dim": 16}
    sizes |= {"qk_rope_head_dim": 8, "n_routed_experts": 8, "moe_intermediate_size": 32}
    fields = {key: value for key, value in SMALL.items() if key != "head_dim"}
    needs = Needs(skeleton(DeepseekV2Config(**fields, **sizes)))
    grown = needs.decode(1, 120, "auto").bytes - needs.decode(1, 20, "auto").bytes
    assert grown == 100 * 2 * 2 * (32 + 8)


def test_a_folder_of_noise_is_a_checkpoint(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(**SMALL, **QWEN, dtype="bfloat16")
    write(skeleton(config), tmp_path / "noise")
    model, found = AutoModelForCausalLM.from_pretrained(
        tmp_path / "noise", output_loading_info=True
    )
    assert not any(found.values())
    assert model.dtype == torch.bfloat16
    logits = model(torch.arange(8, 40)[None]).logits
    assert logits.isfinite().all()
    assert logits.std() > 0.1
    with safe_open(tmp_path / "noise" / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if "up_proj" in name]  # noqa: SIM118
        experts = [file.get_tensor(name) for name in names]
    assert len(experts) == 16
    assert not any(torch.equal(a, b) for a, b in pairwise(experts))


def test_a_row_far_from_its_floor_falls_behind() -> None:
    def row(shape: str, over: float, form: str = "bf16", name: str = "decode of 1") -> Any:
        return {"shape": shape, "format": form, "row": name, "over_floor": over}

    table = Table()
    rows = [row("a", 1.2), row("b", 1.7), row("c", 1.9), row("d", 9.0, "int4"), row("d", 8.0)]
    shapes.add_behind(table, [*rows, row("e", 7.0, name="mixed")])
    assert [line.name.partition(":")[0] for line in table.lines if line.reached is False] == [
        "c bf16",
        "d bf16",
    ]
    assert rows[2]["behind"] == "a"


def test_layers_are_left_out_for_memory() -> None:
    args: Any = SimpleNamespace(plain=False, vllm=None, llama=None, memory=20.0)
    table = Table()
    whole = shapes.fitting("OLMoE", "bf16", args, table)
    assert whole is not None
    assert whole.num_layers == 2
    assert table.lines == []
    args.memory = shapes.memory_gb(whole.needs, "bf16", args) - 0.1
    case = shapes.fitting("OLMoE", "bf16", args, table)
    assert case is not None
    assert case.num_layers == 1
    assert "one layer" in table.lines[0].value
    args.memory = 2.0
    assert shapes.fitting("OLMoE", "bf16", args, table) is None
    assert "left out" in table.lines[1].value


class Answers(Rival):
    """A contender that answers by itself."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds

    def ask(self, question: Any) -> dict[str, Any]:
        if self._seconds is None:
            raise RivalError("out of memory")
        return {"prompt_s": self._seconds, "token_s": self._seconds, "be_s": 4.0, "ttft_s": [0.5]}


def test_one_that_fails_is_a_row_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "REST_S", 0)
    args: Any = SimpleNamespace(plain=False, vllm=None, llama=None, memory=99.0)
    case = shapes.fitting("OLMoE", "int4", args, Table())
    rivals = {"bound": 2.0, "free": 1.0, "vllm": None, "plain": 3.0, "llama": 1.9}
    asking = shapes.Asking({who: Answers(seconds) for who, seconds in rivals.items()}, {})
    prompts = shapes.Prompts()
    for _ in range(2):
        shapes.one_round(asking, prompts, shapes.QUICK, keep=True)
    assert asking.refused["vllm, decode of 1"] == "out of memory"
    assert case is not None
    table = Table()
    rows = list(shapes.rows_of(case, asking, shapes.QUICK))
    found = [shapes.add_row(table, row, shapes.QUICK, Machine(20, 200)) for row in rows]
    assert [row["row"] for row in found] == [
        "prefill of 256",
        "decode of 1",
        "decode of 4",
        "mixed",
    ]
    assert found[0]["theirs_over_ours"]["free"].value == 0.5
    assert table.lines[0].reached is False  # the bound costs half
    assert [line.name.rpartition(", ")[2] for line in table.lines[1:3]] == [
        "llama/ours",
        "plain/ours",
    ]
    assert [line.reached for line in table.lines[1:3]] == [False, True]  # a library that is faster
    assert found[3]["ttft_ms"] == {who: [500.0] * 2 for who in ("bound", "free", "plain", "llama")}


def test_a_step_without_all_rows_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "REST_S", 0)
    rival = Answers(1.0)
    monkeypatch.setattr(rival, "ask", lambda question: {"prompt_s": 1.0, "token_s": None})
    asking = shapes.Asking({"bound": rival}, {})
    asking.ask("prefill", {"tokens": 1})
    asking.ask("decode", {"tokens": 12})
    assert list(asking.found) == ["prefill"]
    assert asking.refused == {"bound, decode": "no step had every row"}


def test_a_process_that_ends_says_its_last_line() -> None:
    with pytest.raises(RivalError, match="ended with 1: ValueError: no such shape"):
        Rival([sys.executable, "-c", "print('x'); raise ValueError('no such shape')"])
    rival = Rival([sys.executable, "-c", "print('{}'); input(); print('{\"error\": \"no\"}')"])
    try:
        with pytest.raises(RivalError, match=r"^no$"):
            rival.ask({})
    finally:
        rival.close()


ITS_CORES = """#!/bin/sh
echo "$VLLM_CPU_OMP_THREADS_BIND, $VLLM_CPU_KVCACHE_SPACE GiB" >> "$0.said"
echo '{"answers": [[1]], "seconds": 1.0}'
"""


def test_each_vllm_of_a_bench_gets_its_cores(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(ITS_CORES)
    python.chmod(0o755)
    vllm_rows(Table(), str(python), tmp_path)
    library(str(python), "vllm_rate.py", tmp_path, "2").close()
    said = python.with_name("python.said").read_text().splitlines()
    assert said == ["0-1, 1 GiB", "0|1, 1 GiB", "0-1, 1 GiB"]


@pytest.mark.slow  # the parts of the bench are tested above
def test_the_benchmark_of_shapes_runs() -> None:
    command = [sys.executable, "-m", "bench", "shapes", "--quick", "--plain"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-1000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["bench"] == "shapes"
    assert [len(case["rows"]) for case in result["cases"]] == [4, 4]
    assert not any(case["refused"] for case in result["cases"])
