"""Launches of one layer of a decode step, counted on a CPU: no GPU is needed.

    python -m scripts.launches          # every family that the tests know

Operations of torch count when they are dispatched, except those that only make views or allocate
memory. Triton's kernels are interpreted, and each launch counts. A matrix product counts once,
though cuBLAS may divide it. The last line of stdout is one JSON document.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

if __name__ == "__main__" or not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton's own library is imported

from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from qllm.cuda.backend import cuda_runner
from qllm.cuda.layers import DeviceLayers
from qllm.plan import NO_CUTS, NO_STOP, Plan, Row
from qllm.scheduler.compile import compile_program
from qllm.types import Grain, SamplingParams

NO_LAUNCH = frozenset(
    [
        "view",
        "_unsafe_view",
        "reshape",
        "transpose",
        "mT",
        "t",
        "unsqueeze",
        "squeeze",
        "slice",
        "select",
        "split",
        "split_with_sizes",
        "tensor_split",
        "detach",
        "expand",
        "permute",
        "as_strided",
        "alias",
        "chunk",
        "unbind",
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "_reshape_alias",
        "lift_fresh",
    ]
)
"""Operations that only make views or allocate memory: no node of a graph."""


class Count(TorchDispatchMode):
    """Counts of launches by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        if name not in NO_LAUNCH:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count launches until the end of the block."""
    mode, real = Count(), GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        mode.found[f"triton {self.fn.__name__}"] += 1
        with _disable_current_modes():
            real(self, *args, **kwargs)

    GridExecutor.__call__ = launch  # type: ignore[method-assign]
    try:
        with mode:
            yield mode.found
    finally:
        GridExecutor.__call__ = real  # type: ignore[method-assign]


def of_layers(model: Any, num_rows: int = 2) -> list[Counter[str]]:
    """Return the launches of each layer of a decode step, as a captured stage runs it."""
    found: list[Counter[str]] = []
    real = DeviceLayers.run

    def run(self: Any, *args: Any) -> Any:
        with counting() as now:
            out = real(self, *args)
        found.append(now)
        return out

    runner = cuda_runner(model, num_pages=16, page_size=4, kernels_name="triton", graphs=False)
    backend: Any = runner.backend
    for i in range(num_rows):
        runner.add(i, [1, 2, 3], SamplingParams(temperature=0), 3, 8)
    rows = tuple(Row(i, 0, 1, 0, runner.shape.num_layers) for i in range(num_rows))
    program = compile_program(
        Plan(rows=rows, grain=Grain.STEP, stop_below=NO_STOP), frame_id=1,
        samples=[False] * num_rows, shape=runner.shape, cuts=NO_CUTS,
    )  # fmt: skip
    runner.accept(program, backend.new_tables().cover(program.rows))
    spans = [(runner.requests[i].kv, i, 0, 1) for i in range(num_rows)]
    with torch.inference_mode():
        step = backend.new_step(spans, num_rows)
        x = runner.parts.embed(torch.tensor([1] * num_rows))
        cos, sin = runner.parts.rotary_emb(x, torch.zeros(1, num_rows, dtype=torch.long))
        live = torch.tensor([num_rows], dtype=torch.int32)
        for layer in range(runner.shape.num_layers):
            x = run(backend.layers, layer, x, (cos, sin), step, live)
    runner.close()
    return found


def main() -> None:
    """Count the launches of every family."""
    from tests.support import interpret  # noqa: F401 - mends the interpreter
    from tests.support.families import FAMILIES, make_model

    out = {}
    for family in FAMILIES:
        layers = of_layers(make_model(family))
        out[family] = [dict(layer) for layer in layers]
        print(family, [sum(layer.values()) for layer in layers])
    print(json.dumps(out))


if __name__ == "__main__":
    main()
