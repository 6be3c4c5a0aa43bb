"""Compilation for `make gpu-check` on a machine without a GPU, so that the check compiles less.

    python -m bench.gpu.prepare      # in an environment of `scripts/gpu-machine`: the same Triton

It fills build/gpu: cubins of the scheduler with each policy that the check runs on the device, and
Triton's cache for the kernels of the check's models, of the tests' models and of the rows of
`bench.gpu.kernels`. Models are on torch's meta device. A launch compiles and does not run, so
exactly the kernels of a capture are compiled. The GPU machine compiles missing kernels.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from bench.gpu.check import PREPARED, SITE, write_site

CAPABILITY = (9, 0)
"""Compute capability of an H100 or H200."""
POLICIES = ("qllm2", "chunked-priority", "priority-layered")
"""Policies linked for the loop on the device."""
RANDOM_SHAPES = 6
"""Number of policies with random parameters that the tests on a GPU use."""


class NoDevice:
    """A driver with the answers that Triton needs before it compiles."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class CaptureNothing:
    """A `GraphApi` whose captures only call the captured function."""

    def new_pool(self) -> None:
        return None

    def side_stream(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def new_graph(self) -> None:
        return None

    def capturing(self, graph: Any, pool: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def node_types(self, graph: Any) -> list[str]:
        return []

    def instantiate(self, graph: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


def compile_only() -> Callable[[], int]:
    """Make launches of Triton kernels compile and not run; yield a counter of the variants."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(NoDevice())
    real, variants = JITFunction.run, set()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = real(self, *args, grid=grid, warmup=True, **kwargs)
        variants.add(kernel.hash)
        return kernel

    JITFunction.run = run
    return lambda: len(variants)


def models() -> list[tuple[str, Any, dict[str, Any]]]:
    """Return models on the meta device, few layers, and the settings of their runners."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    from bench.gpu.loads import BATCH
    from bench.gpu.parts import SHAPES
    from qllm.cuda.lanes import Bucket
    from tests.support import families

    big = {"num_pages": 8192, "max_num_seqs": BATCH, "max_step_tokens": 2048}
    tiny = {
        "num_pages": 64, "max_num_seqs": 4, "max_total_tokens": 96, "layers_per_stage": 2,
        "buckets": [Bucket(4, False), Bucket(64, True)],
    }  # fmt: skip
    makers = {
        "qwen3": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
        "mixtral": (MixtralConfig, MixtralForCausalLM),
    }
    out = []
    with torch.device("meta"):
        for name, (config, make) in makers.items():
            few = config(**{**SHAPES[name], "num_hidden_layers": 1})
            out.append((name, make._from_config(few, dtype=torch.bfloat16).train(False), big))
    for family in families.FAMILIES:
        model = families.make_model(family, families.DTYPES["fp32"]).to("meta")
        out.append((f"tiny {family}", model, tiny))
    return out


def stages() -> dict[str, str]:
    """Compile the stages of every model; return the result of each."""
    from qllm.cuda.backend import cuda_runner
    from qllm.runner import runner

    runner.refuse_unsafe = lambda model, **_: None  # this runner computes nothing
    runner.identity = lambda *_: ""  # type: ignore[assignment, misc]
    found = {}
    for name, model, how in models():
        try:
            cuda_runner(model, graphs=CaptureNothing(), kernels_name="triton", **how)
            found[name] = "compiled"
        except Exception as error:  # noqa: BLE001 - the machine with the GPU compiles it then
            found[name] = f"{type(error).__name__}: {error}"[:300]
    return found


def rows() -> None:
    """Compile the rows of `bench.gpu.kernels`."""
    import torch

    from bench.gpu.kernels import PAGE
    from bench.gpu.parts import SHAPES
    from qllm.kernels.routing import Activation, ExpertWeights
    from qllm.kernels.select import kernels
    from qllm.kernels.tiles import Query, query_block, tiles_of

    k, device, dtype = kernels("triton"), torch.device("meta"), torch.bfloat16

    def new(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device=device)

    for batch, num in ((1, 1), (32, 1), (1, 2048)):
        cache = [new(batch * 4096, 4, 128) for _ in "kv"]
        queries = [Query(r, r * num, 4096 - num, num) for r in range(batch)]
        q, tables = new(batch * num, 32, 128), new(batch, 4096 // PAGE, kind=torch.int64)
        tiles = tiles_of(queries, batch * num, query_block(8), device)
        k.attend(
            q, *cache, tables, tiles, page_size=PAGE, scale=128**-0.5, out_TNE=torch.empty_like(q),
        )  # fmt: skip
    one, hits = new(1, kind=torch.int32), new(1, kind=torch.int64)
    for shape in SHAPES.values():
        experts = shape.get("num_experts") or shape["num_local_experts"]
        inner = shape.get("moe_intermediate_size") or shape["intermediate_size"]
        width, top_k = shape["hidden_size"], shape["num_experts_per_tok"]
        weights = ExpertWeights(
            new(experts, 2 * inner, width), new(experts, width, inner), None, None, False,
            Activation.SILU,
        )  # fmt: skip
        for tokens in (1, 32, 512, 2048):
            routing = k.route(new(tokens, top_k, kind=torch.int64), one, experts, hits)
            slots, x = new(tokens, top_k, width), new(tokens, width)
            k.run_experts(x, weights, routing, 0, experts, slots)
            k.combine(slots, new(tokens, top_k, kind=torch.float32), one, x)
            if experts == 128:
                for codes in _quantised(weights):
                    k.run_experts(x, codes, routing, 0, experts, slots)
    for num in (1, 32):
        real, whole = new(num, kind=torch.float64), new(num, kind=torch.int64)
        peaks = new(num, kind=torch.float32)
        k.sample(new(num, 151936), real, whole, real, real, whole, whole, whole, peaks)


def _quantised(weights: Any) -> Iterator[Any]:
    """Yield the same weights as codes of each rounding."""
    import torch

    from qllm.models.weights.formats.rounding import ROUNDINGS
    from qllm.models.weights.quantised_weights import DeviceWeights

    for rounding in ROUNDINGS.values():
        ones = [rounding(torch.zeros(w.shape[1:], dtype=torch.bfloat16)) for w in weights[:2]]
        num, meta = weights.num_experts, torch.device("meta")
        up, down = (DeviceWeights(num, one, meta).whole for one in ones)
        yield weights._replace(up_EFD=up.codes, down_EDI=down.codes, packed=(up, down))


def cubins() -> dict[str, str]:
    """Link the scheduler with each policy, and with those of `tests/device/test_on_gpu.py`."""
    from qllm.device.cubins import kernel_of
    from qllm.plugins import load_policy
    from tests.support.differential import random_shape

    found: dict[str, str] = {}
    policies = {name: load_policy(name) for name in POLICIES}
    policies |= {f"random {n}": random_shape(random.Random(n)) for n in range(RANDOM_SHAPES)}
    for name, policy in policies.items():
        try:
            data = kernel_of(policy, CAPABILITY)
            found[name] = f"{len(data)} bytes"
        except Exception as error:  # noqa: BLE001 - the machine with the GPU links it then
            found[name] = f"{type(error).__name__}: {error}"[:300]
    return found


def main() -> int:
    """Compile all kernels; return 1 if one failed."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    os.environ["TRITON_CACHE_DIR"] = str(PREPARED / "triton")
    os.environ["XDG_CACHE_HOME"] = str(PREPARED)
    os.environ.pop("TRITON_INTERPRET", None)
    write_site()
    sys.path.insert(0, str(SITE))  # policies are found by this path
    PREPARED.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    found: dict[str, Any] = {"cubins": cubins()}
    count = compile_only()
    rows()
    found["stages"] = stages()
    found |= {"variants": count(), "seconds": round(time.monotonic() - begin, 1)}
    (PREPARED / "prepared.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    failed = [x for x in found["cubins"].values() if not x.endswith("bytes")]
    return 1 if failed or any(x != "compiled" for x in found["stages"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
