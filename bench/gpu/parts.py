"""Parts of `make gpu-check` that are not tests; see check.py. One JSON line per section."""

import argparse
import copy
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from bench.gpu.check import ROOT
from bench.gpu.exact import exact
from bench.gpu.gathered import sections as gathered
from bench.gpu.kernels import ceilings, kernel_rows
from bench.gpu.loads import (
    capacity,
    continuous,
    decode,
    eager,
    interference,
    loaded,
    mixed,
    on_device,
    peer,
)
from bench.gpu.part import Part
from bench.gpu.ranks import sections as shared

POLICIES = ("fcfs", "chunked-priority", "qllm2", "layered", "priority-layered")
LOADED = POLICIES[:3]
"""Policies compared at the loads of the paper's set-up."""
FOR_WEIGHTS = 0.75
"""Part of the free memory for weights."""
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {
        "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "moe_intermediate_size": 768, "intermediate_size": 6144, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "max_position_embeddings": 8192,
    },
    "mixtral": {
        "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
        "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 8192,
    },
}  # fmt: skip
TINY = {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "moe_intermediate_size": 32, "intermediate_size": 32,
    "head_dim": 16,
}  # fmt: skip


# -- one big model: decode, mixed workload, interference, peers


def num_layers(config: Any, make: Any, free_bytes: int) -> int:
    """Return the number of layers that fit; KV, graphs and activations take the other memory."""
    sizes = []
    for count in (1, 2):
        few = copy.deepcopy(config)
        few.num_hidden_layers = count
        with torch.device("meta"):
            model = make._from_config(few, dtype=torch.bfloat16)
        sizes.append(sum(p.numel() * p.element_size() for p in model.parameters()))
    per_layer, rest = sizes[1] - sizes[0], 2 * sizes[0] - sizes[1]
    fit = int((FOR_WEIGHTS * free_bytes - rest) // per_layer)
    if fit < 1:
        raise MemoryError(f"a layer has {per_layer} bytes, and {free_bytes} are free")
    return min(int(config.num_hidden_layers), fit)


def make_model(part: Part, name: str) -> Any:
    """Make random bf16 weights on the device; fewer layers if not all fit."""
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = {**SHAPES[name], **(TINY if part.dry else {})}
    config, make = {
        "qwen3": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
        "mixtral": (MixtralConfig, MixtralForCausalLM),
    }[name]
    torch.manual_seed(0)
    whole = config(**shape, eos_token_id=None, bos_token_id=None, pad_token_id=None)
    if not part.dry:
        fit = num_layers(whole, make, torch.cuda.mem_get_info()[0])
        whole.num_hidden_layers = min(fit, part.layers or fit)
    with torch.device(part.device):
        model = make._from_config(whole, dtype=torch.bfloat16)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0) if p.dim() == 1 else p.normal_(0.0, p.shape[-1] ** -0.5)
    model.set_experts_implementation("grouped_mm")
    return model.train(False)


def sizes_of(model: Any) -> dict[str, int]:
    """Return the bytes of weights outside the experts, and the size of the vocabulary."""
    experts = sum(
        p.numel() * p.element_size() for n, p in model.named_parameters() if ".experts." in n
    )
    embed = model.get_input_embeddings().weight
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    dense = total - experts - embed.numel() * embed.element_size()
    return {"dense_bytes": dense, "vocab": model.config.vocab_size, "total_bytes": total}


def big(part: Part, name: str) -> None:
    """Measure one model, most wanted numbers first."""
    begin, made = time.monotonic(), {}

    def set_up() -> dict[str, Any]:
        made["model"] = model = make_model(part, name)
        seconds = round(time.monotonic() - begin, 1)
        return {"set_up_s": seconds, "layers": model.config.num_hidden_layers, **sizes_of(model)}

    part.section("model", set_up, set_up=True)
    if not made:
        return
    model = made["model"]
    sizes = sizes_of(model)
    part.section("decode", lambda: decode(part, model, sizes))
    seconds, rate = (1.5, 4.0) if part.dry else (5.0, 8.0)
    part.section("ls_alone", lambda: mixed(part, model, "qllm2", seconds, rate, alone=True))
    policies = POLICIES if name == "qwen3" else LOADED[2:]
    for policy in POLICIES[1:3] if part.dry else policies:
        part.section(
            f"mixed_{policy}", lambda policy=policy: mixed(part, model, policy, seconds, rate)
        )
    if name == "qwen3":
        part.section("interference", lambda: interference(part, model))
        part.section("loop_on_device", lambda: on_device(part, model))
        part.section("peer_eager", lambda: peer(part, model, eager))
        part.section("peer_continuous_batching", lambda: peer(part, model, continuous))
    else:
        load_sections(part, model)


def load_sections(part: Part, model: Any) -> None:
    """Measure the paper's set-up at parts of the measured capacity."""
    full: dict[str, Any] = {}
    part.section("capacity", lambda: full.setdefault("found", capacity(part, model)), set_up=True)
    for policy in LOADED[:1] if part.dry else LOADED:
        part.section(
            f"load_{policy}",
            lambda policy=policy: loaded(part, model, policy, full["found"]["requests_per_s"]),
        )


def kernels(part: Part) -> None:
    """Measure each kernel over its byte or FLOP floor."""
    part.section("ceilings", lambda: ceilings(part.device, part.dry))
    for name, row in kernel_rows(part.device, part.dry):
        part.section(name, row)


def ranks(part: Part) -> None:
    """Compare two ranks with one device; compare and measure the kernel for the end of an op."""
    for rows in (shared(part.device, part.dry), gathered(part.dry)):
        for name, row in rows:
            part.section(name, row)


def probe(part: Part) -> None:
    """Measure the costs of turns and switches; skip it without a GPU."""
    if part.dry:
        part.section("while", lambda: {"skipped": "no GPU: nothing of this runs on a CPU"})
        return
    from bench.gpu.probe import PARTS

    for name, run in PARTS.items():
        part.section(name, run)


TOOLS = {"memcheck": "mixtral or deepseek_v3", "racecheck": "mixtral"}
"""Tools of compute-sanitizer, and the families whose steps run under them: their kernels are
prepared, those of random shapes are not."""
TOOL_S = 90
"""Seconds for each tool; they run side by side."""


def sanitizer(part: Part) -> None:
    """Run steps, op by op and captured, under compute-sanitizer."""
    with ThreadPoolExecutor() as pool:
        runs = {tool: pool.submit(sanitized, part, tool, tests) for tool, tests in TOOLS.items()}
        for tool, run in runs.items():
            part.section(tool, run.result)


def sanitized(part: Part, tool: str, tests: str) -> dict[str, Any]:
    """Run tests of kernels under one tool."""
    program = shutil.which("compute-sanitizer")
    if program is None or part.dry:
        return {"skipped": "no GPU" if part.dry else "compute-sanitizer is not on this machine"}
    command = [
        program, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "pytest", "-q",
        "-x", "-m", "gpu", "-W", "default", "tests/cuda/test_runner.py", "-k", tests,
    ]  # fmt: skip
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | str = process.wait(TOOL_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the tool and the tests
            process.wait()
            status = f"none after {TOOL_S} s"
        out.seek(0)
        text = out.read()
    if status != 0:
        raise AssertionError(f"exit {status}: {text[-1500:]}")
    return {"tests": text.strip().splitlines()[-1]}


PROGRAMS: dict[str, Callable[[Part], None]] = {
    "exact": exact, "kernels": kernels, "probe": probe, "ranks": ranks, "sanitizer": sanitizer,
}  # fmt: skip
"""Parts without a big model."""


def main() -> int:
    """Run one part."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=(*PROGRAMS, *SHAPES))
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--skip", default="", help="sections, with commas between")
    parser.add_argument("--layers", type=int, help="of the big models at most")
    asked = parser.parse_args()
    part = Part(asked.dry_run, asked.skip.split(","), asked.layers)
    if part.dry:
        torch.set_num_threads(1)
    if asked.part in PROGRAMS:
        PROGRAMS[asked.part](part)
    else:
        big(part, asked.part)
    return int(part.failed)


if __name__ == "__main__":
    sys.exit(main())
