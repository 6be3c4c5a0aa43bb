"""Memory of a load whose experts go to a file, as the system counts it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.dense import save
from tests.support.gguf_files import convert

MIB = 1 << 20
CHILD = """
import json, re, sys
from pathlib import Path
from qllm.models.loader import load
from qllm.models.weights.experts_in_file import ExpertsInFile

def status(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

def loaded(path):
    experts = ExpertsInFile(out / f"{path.stem}.experts", max_bytes)
    return load(path, dtype="bfloat16", expert_weights=how, experts=experts).model, experts.file

small, large, out, how, max_bytes = *map(Path, sys.argv[1:4]), sys.argv[4], int(sys.argv[5])
loaded(small)  # imports, threads, and what a first load allocates for itself
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
model, file = loaded(large)
peak = status("VmHWM") - before
rest = sum(p.nbytes for p in model.parameters() if not p.is_meta)
print(json.dumps([peak, rest, sum(layer.num_bytes for layer in file.layers)]))
"""


def checkpoint(folder: Path, layers: int, hidden: int, width: int) -> Path:
    config: Any = AutoConfig.for_model(
        "mixtral", hidden_size=hidden, intermediate_size=width, num_hidden_layers=layers,
        num_local_experts=16, num_experts_per_tok=2, vocab_size=260, num_attention_heads=8,
        num_key_value_heads=2, head_dim=hidden // 8, eos_token_id=1, pad_token_id=None,
        bos_token_id=None, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    torch.manual_seed(0)
    return save(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small model, and one with 384 MiB of experts in bf16."""
    place = tmp_path_factory.mktemp("models")
    return checkpoint(place / "small", 1, 64, 64), checkpoint(place / "large", 8, 512, 1024)


@pytest.fixture(scope="module")
def gguf_files(folders: tuple[Path, Path]) -> list[Path]:
    return [convert(folder, folder.with_suffix(".gguf"), "Q8_0") for folder in folders]


def assert_bound(paths: Any, out: Path, how: str, max_bytes: int) -> None:
    args = [sys.executable, "-c", CHILD, *map(str, paths), str(out), how, str(max_bytes)]
    text = subprocess.run(args, capture_output=True, text=True, check=True).stdout
    peak, rest, experts = json.loads(text.splitlines()[-1])
    most = 1.1 * (max_bytes + rest)
    assert experts > 1.2 * most, "a load of all experts would break the bound"
    assert peak <= most, (peak, most, experts)


def test_a_load_takes_no_more_memory_than_it_may(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    assert_bound(folders, tmp_path, "auto", 64 * MIB)


@pytest.mark.slow  # test_a_load_takes_no_more_memory_than_it_may, with other formats and bounds
@pytest.mark.parametrize(
    ("how", "mib"), [("auto", 36), ("auto", 200), ("int8", 64), ("int8-g64", 120), ("int4", 64)]
)
def test_a_load_in_any_format_takes_no_more_memory_than_it_may(
    folders: tuple[Path, Path], tmp_path: Path, how: str, mib: int
) -> None:
    assert_bound(folders, tmp_path, how, mib * MIB)


@pytest.mark.slow  # test_a_load_takes_no_more_memory_than_it_may, with a GGUF file
def test_a_load_of_a_gguf_file_takes_no_more_memory_than_it_may(
    gguf_files: list[Path], tmp_path: Path
) -> None:
    assert_bound(gguf_files, tmp_path, "auto", 64 * MIB)
