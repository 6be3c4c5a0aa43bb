"""torch's default dtype is the process's, and transformers changes it while it loads a model.

So what computes on another thread, or for a user who has set it, names the dtype of every tensor
that it makes: our kernels write fp32 where they were told to.
"""

import ast
import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm

from qllm.models.loader import load
from qllm.runner.cpu import cpu_runner
from tests.support.families import make_model
from tests.support.files import ROOT, python_files
from tests.support.hybrids import make_hybrid
from tests.support.programs import add as add_request
from tests.support.programs import assert_same, logits_of, prompt_of, serve

MAKERS = frozenset({"empty", "zeros", "ones", "full", "rand", "randn", "eye", "linspace"})
"""Functions of torch whose tensors have the default dtype where none is named."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("mixtral", {}),
    "biases": ("qwen2_moe", {}),
    "latents": ("deepseek_v3", {}),
    "states": ("qwen3_next", {}),
    "experts in int8": ("qwen3_moe", {"expert_weights": "int8"}),
    "rows in int8": ("qwen3_moe", {"expert_weights": "int4", "activations": "int8"}),
    "4-bit floats": ("gpt_oss", {"expert_weights": "mxfp4"}),
    "transformers' own": ("mixtral", {"kernels": "reference"}),
}
DEFAULTS = [torch.bfloat16, torch.float64]


def computed(model: Any, settings: dict[str, Any]) -> tuple[list[Tensor], list[int]]:
    """Logits of some tokens, and tokens that are chosen by blocks of the head."""
    ids, mine = prompt_of(70), copy.deepcopy(model)
    logits = logits_of(cpu_runner(mine, **settings), ids)
    runner = cpu_runner(copy.deepcopy(model), max_segment_ms=0.02, **settings)
    add_request(runner, 2, ids)
    serve(runner, 2)
    tokens = runner.token_ids(2)[len(ids) :]
    runner.close()
    return logits, tokens


@pytest.mark.parametrize("name", MODELS)
def test_no_bit_depends_on_it(name: str) -> None:
    family, settings = MODELS[name]
    make = make_hybrid if family == "qwen3_next" else make_model
    model = make(family, torch.bfloat16)
    wanted, tokens = computed(model, settings)
    assert len(tokens) > 1
    for default in DEFAULTS:
        torch.set_default_dtype(default)
        try:
            found, others = computed(model, settings)
        finally:
            torch.set_default_dtype(torch.float32)
        assert_same(found, wanted)
        assert others == tokens


def nameless(source: str) -> list[int]:
    """Lines that make a tensor of numbers without saying of which dtype."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {f"torch.{name}" for name in MAKERS}
        and not any(given.arg == "dtype" for given in node.keywords)
    ]


def test_every_tensor_is_made_with_a_dtype() -> None:
    found = {path: nameless((ROOT / path).read_text()) for path in python_files("qllm")}
    assert len(found) > 100
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize("call", [f"torch.{name}(3)" for name in sorted(MAKERS)])
def test_a_tensor_without_one_is_seen(call: str) -> None:
    assert nameless(f"x = 1\ny = {call}") == [2]
    assert not nameless(call.replace("(3)", "(3, dtype=torch.int64)"))


def test_models_of_two_dtypes_are_loaded_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers makes a model under a default dtype that is the process's."""
    make_model("mixtral", torch.bfloat16).save_pretrained(tmp_path)
    makers, second = set[int](), threading.Event()
    norm = MixtralRMSNorm.__init__

    def made(self: nn.Module, *args: Any, **given: Any) -> None:
        if threading.get_ident() not in makers:
            makers.add(threading.get_ident())
            second.set() if len(makers) == 2 else second.wait(1)  # which is in vain
        norm(self, *args, **given)

    monkeypatch.setattr(MixtralRMSNorm, "__init__", made)
    wanted = torch.bfloat16, torch.float32
    with ThreadPoolExecutor(2) as pool:
        models = list(pool.map(lambda dtype: load(tmp_path, dtype=dtype).model, wanted))
    for model, dtype in zip(models, wanted, strict=True):
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert torch.get_default_dtype() is torch.float32
