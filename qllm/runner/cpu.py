"""The CPU backend: this project's kernels where they can compute, else torch. KV lies in slabs."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qllm.errors import DeviceError, InvariantError
from qllm.kernels import cpu
from qllm.models.discover import ModelParts, base_model
from qllm.models.heard import warn_of_unheard
from qllm.models.weights.activations import read_rows, refuse_other_activations
from qllm.plan import Row
from qllm.runner.backend import Asking
from qllm.runner.compute import Compute
from qllm.runner.cuts import bound_of, cut_rule
from qllm.runner.frame import Frame
from qllm.runner.kv import RequestKV, SlabKV
from qllm.runner.layers.attention import Span, Step
from qllm.runner.layers.drivers import LayerDriver
from qllm.runner.layers.work import Work
from qllm.runner.protocol import Stop
from qllm.runner.residency import Residency
from qllm.runner.runner import TorchRunner
from qllm.runner.sampling.sampler import Unread
from qllm.runner.sweep import Amounts, Sweep, Swept
from qllm.scheduler.blocks import BlockTables
from qllm.scheduler.program import Index, Program
from qllm.types import Grain


def cpu_runner(
    model: nn.Module,
    *,
    max_segment_ms: float = 5.0,
    batch_invariant: bool = False,
    kernels: str = "fast",
    expert_weights: str = "auto",
    activations: str = "bf16",
    max_packed_bytes: int = 2 << 30,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> TorchRunner:
    """Return a runner on the CPU.

    Args:
        model: Whole model in evaluation mode, on one device. The model's attention modules get a
            config of their own (see `runner.layers.attention`). The results of `model.forward` do
            not change.
        max_segment_ms: Most milliseconds of work between two boundaries. Infinity leaves ops whole.
        batch_invariant: True for level L2. The self-test of L2 runs here and finds the rule for
            products.
        kernels: Name of the kernels: see `EngineConfig`.
        expert_weights: Format of experts: see `EngineConfig`.
        activations: Dtype of the inputs of quantised products: see `EngineConfig`.
        max_packed_bytes: Most bytes of copies of linear modules (the head) for the kernels. Later
            changes of copied weights have no effect.
        clock: Clock in nanoseconds that measures segments.

    Raises:
        ModelError: The model cannot be driven safely, or level L2 is not possible here.
        ConfigError: `expert_weights` or `activations` is not possible here.
    """
    refuse_other_activations(model, activations, kernels, expert_weights)

    def backend(parts: ModelParts) -> CpuBackend:
        warn_of_unheard(model, parts)
        with torch.inference_mode():
            compute = Compute(
                model,
                parts,
                kernels,
                batch_invariant=batch_invariant,
                expert_weights=expert_weights,
                activations=activations,
                max_packed_bytes=max_packed_bytes,
            )
        return CpuBackend(model, parts, compute, max_segment_ms, batch_invariant)

    rounding = expert_weights, activations
    return TorchRunner(model, backend, rounding=rounding, reads_files=True, clock=clock)


class CpuBackend:
    """A `Backend` (`runner/backend.py`) on the CPU.

    Args:
        model: Model of transformers.
        parts: Parts of the model.
        compute: Products, experts and the head.
        max_segment_ms: Most milliseconds between two boundaries: see `cpu_runner`.
        batch_invariant: True for level L2: see `cpu_runner`.
    """

    bytes_read = 0
    """Always 0, because the runner counts the bytes: each expert once per layer of a program."""

    def __init__(
        self,
        model: nn.Module,
        parts: ModelParts,
        compute: Compute,
        max_segment_ms: float,
        batch_invariant: bool,
    ) -> None:
        self._model, self._parts, self.compute = model, parts, compute
        self.polls_inside = compute.sweep.num_layers == len(parts.layers)
        """True if every op polls before each of its tasks. Otherwise the runner polls between
        ops."""
        self.cuts, self.costs = cut_rule(
            parts,
            base_model(model).config,
            max_segment_ms,
            polls_inside=self.polls_inside,
            stops_between_keys=compute.stops_between_keys,
            batch_invariant=batch_invariant,
        )
        cpu.set_threads(torch.get_num_threads())
        self.sweep = compute.sweep
        """Runner of several ops in one native call. `runner.sweep.NOTHING` supports no op."""

    @property
    def drivers(self) -> tuple[LayerDriver, ...]:
        """Drivers of all layers that compute at the moment."""
        return self.compute.drivers

    @property
    def residency(self) -> Residency | None:
        """Slots for experts of a file; None if all experts are in memory."""
        held = (bank.residency for bank in self.compute.banks if bank is not None)
        return next((one.all for one in held if one is not None), None)

    @property
    def is_native(self) -> bool:
        """True if this project's kernels run every layer."""
        return self.sweep.num_layers == len(self.drivers) or self.compute.is_ours

    ranks: Sequence[Mapping[str, Any]] = ()
    shares_blocks = False
    copy_bytes_per_ms = 4_000_000
    """Nominal copy rate of one thread."""
    move_token_ns = 0

    @property
    def why_inexact(self) -> str:
        if self.is_native:
            return ""
        return (
            "not every layer runs on our kernels, so the bits of a token's KV depend on how its "
            "prefill was cut and on its batch mates"
        )

    @property
    def names(self) -> dict[str, str]:
        """Name of the implementation of each kind of work, for benchmark results."""
        stops = "before every task of an op"
        if not self.polls_inside:
            stops = f"between ops ({bound_of(self.cuts, self.costs)})"
        return self.compute.names | {"stops": stops}

    def enter(self) -> None:
        self.compute.enter()

    def close(self) -> None:
        self.compute.leave()
        read_rows(self._model, "bf16")

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        ours, sweep = self.compute, self.sweep
        ours.leave()
        try:
            self._use(Compute(self._model, self._parts, "reference"))
            yield
        finally:
            self.compute.leave()
            self._use(ours, sweep)

    def _use(self, compute: Compute, sweep: Sweep | None = None) -> None:
        """Replace the implementations that compute."""
        self.compute, self.sweep = compute, sweep or compute.sweep
        compute.enter()

    def new_kv(self, capacity: int) -> RequestKV:
        return SlabKV(self._parts.num_kv_layers, capacity, self._parts.kv_layers)

    def copy_ahead(self, kvs: Sequence[RequestKV]) -> None:
        """Do nothing, because swapped-out KV stays in place."""

    def new_tables(self) -> BlockTables:
        return BlockTables(1 << 14, 16)  # more than any self-test needs; address space is plentiful

    def new_step(self, spans: Sequence[Span], num_tokens: int) -> Step:
        return Step(spans, num_tokens, self._parts.latent_kv)

    def new_work(self, layer: int, ids_TK: Tensor, grain: Grain) -> Work:
        bank = self.compute.banks[layer]
        assert bank is not None
        return Work(bank, ids_TK, self.cuts.expert_block)

    def run_some(
        self, runner: Asking, frame: Frame, program: Program, at: Index, stop: Stop
    ) -> Swept | None:
        if not self.sweep.covers(program.ops[at.op]):
            return None
        sizes = Amounts(self.costs, self.cuts.expert_block, runner.on_segment is not None)
        run = partial(self.sweep.run, frame, program, at, stop, runner.new_step, sizes)
        swept = run()
        if swept.missing is None or swept.at != at or swept.missing.residency.all.parks:
            return swept
        with swept.missing.in_memory():
            swept = run()
        if swept.missing is not None and swept.at == at:
            raise InvariantError("no unit of an expert ran, and all its experts are in memory")
        return swept

    def pace(self) -> None:
        """Do nothing, because no work is queued on a CPU."""

    samples = False

    def sample(self, runner: Asking, logits_RV: Tensor, rows: Sequence[Row]) -> Unread | None:
        return None

    def forget(self, frame: Frame) -> None:
        """Do nothing: the backend keeps no data of frames."""

    def fault(self, error: Exception) -> DeviceError | None:
        return None
