"""The drivers, experts, products and head of one runner, chosen once.

    fast        this project's CPU kernels where they can compute (bf16); else torch. The last
                bits may differ from those of transformers.
    reference   transformers' modules: the bits of `model.forward`.

Level L2 requires rows that do not depend on each other. Rows of this project's kernels are
independent. For products in torch, a rule is found at start (`runner.layers.rows`).
"""

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from qllm.errors import ModelError
from qllm.kernels import cpu
from qllm.kernels.cpu import is_usable
from qllm.models.discover import LayerParts, ModelParts
from qllm.models.parts.inventory import described, inventory
from qllm.models.weights.activations import read_rows
from qllm.models.weights.quantised_linears import is_read, linear_in
from qllm.runner.invariance import find_invariance
from qllm.runner.layers.around import AroundDriver
from qllm.runner.layers.deltas import DeltaMixer, delta_mixer
from qllm.runner.layers.drivers import FastDriver, HookedDriver, LayerDriver, WholeDriver
from qllm.runner.layers.embeddings import Embedding
from qllm.runner.layers.experts import expert_banks
from qllm.runner.layers.linears import Head, Linears
from qllm.runner.layers.native import NativeDriver
from qllm.runner.layers.native_experts import NativeBank, is_covered
from qllm.runner.layers.native_parts import native_norm
from qllm.runner.layers.rows import PLAIN, RowBlocks, RowRule
from qllm.runner.layers.work import Bank
from qllm.runner.sweep import Sweep
from qllm.scheduler.program import Op, OpKind
from qllm.types import Driver

RunOp = Callable[[Any, Op, int], int]
"""Function that runs one op of a frame from a position. It returns the next position, 0 if the op
is done."""
_log = logging.getLogger("qllm")


class Compute:
    """The implementations that a runner computes with.

    Args:
        model: Model, on one device.
        parts: Parts of the model.
        kind: Kernels, "fast" or "reference".
        batch_invariant: True for level L2.
        expert_weights: Format of experts: see `EngineConfig`. All formats but "auto" round the
            weights permanently.
        activations: Dtype of the inputs of products with quantised weights: see `EngineConfig`.
        max_packed_bytes: Most bytes of copies of linear modules (the head) for the kernels. Later
            changes of copied weights have no effect. Experts are packed in place, whatever their
            size.

    Raises:
        ModelError: Level L2 is not possible here.
        ConfigError: The format of experts is not possible here.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: ModelParts,
        kind: str,
        *,
        batch_invariant: bool = False,
        expert_weights: str = "auto",
        activations: str = "bf16",
        max_packed_bytes: int = 0,
    ) -> None:
        sizes, arena = _sizes(parts), cpu.Arena()
        native = kind == "fast" and cpu.MISSING is None
        if kind == "fast" and cpu.MISSING is not None:
            _log.warning("torch computes in place of our CPU kernels: %s", cpu.MISSING)
        self._native = {
            name: native and 0 < size <= max_packed_bytes for name, size in sizes.items()
        }
        self._native["experts"] = native
        if kind == "fast":  # the reference reads the same rounded weights
            read_rows(model, activations)
        self.drivers = tuple(
            driver_for(p, arena if self._native["linears"] else None) for p in parts.layers
        )
        self._known = described(inventory(parts.layers))
        self.streams = kind == "fast" and parts.like.device.type == "cpu"
        """True if HEAD keeps only the best logit of each greedy row (`runner.heads`)."""
        covered = {m for driver in self.drivers for m in driver.covered}
        rule, self._enters_rule = PLAIN, False
        if batch_invariant:
            _refuse_states(parts, self.drivers)
            ours = self._ours(parts, covered)
            rule, self._enters_rule = find_invariance(model, parts, self.drivers, ours)
        self.rule: RowRule = rule
        self.banks = expert_banks(parts, rule, self._native["experts"], expert_weights, activations)
        self.sweep = Sweep(self.drivers, self.banks, parts.shape.experts_per_token)
        """Runner of several ops in one native call."""
        self.courses = self.sweep.courses
        """Pool of the places inside ops."""
        self._held = tuple(bank for bank in self.banks if bank is not None)
        # A runner that is dropped, not closed, restores the weights when it is garbage-collected.
        weakref.finalize(self, _leave, self._held).atexit = False
        self._linears = Linears(parts, rule, self._native["linears"], covered, arena)
        read = self._native["head"] and is_read(parts.lm_head)  # rows are bf16 as a result
        norm = native_norm(parts.norm) if read else None
        on_cpu = native and parts.like.device.type == "cpu"
        self.embed: Callable[[list[int]], Tensor] = Embedding(parts, on_cpu)
        self.head = Head(parts.lm_head, norm or parts.norm, rule, read, arena)

    def enter(self) -> None:
        """Make the model's modules use these implementations, and pack the experts' weights."""
        try:
            for bank in self._held:
                bank.pack()
        except BaseException:
            self.leave()
            raise
        self.sweep.enter()
        self._linears.do()

    def leave(self) -> None:
        """Restore the modules. The engine loop must not run."""
        self._linears.undo()
        self.sweep.leave()
        _leave(self._held)

    def follow_rule(self, ops: dict[OpKind, RunOp]) -> None:
        """Wrap the ops that call the model's code, so that the rule applies inside them."""
        if not self._enters_rule:
            return

        def ruled(run: RunOp) -> RunOp:
            def call(frame: Any, op: Op, pos: int) -> int:
                with RowBlocks(self.rule):
                    return run(frame, op, pos)

            return call

        is_hooked = any(driver.kind is Driver.HOOKED for driver in self.drivers)
        for kind in (OpKind.ROUTE, OpKind.COMBINE, *((OpKind.ATTN,) if is_hooked else ())):
            ops[kind] = ruled(ops[kind])

    def _ours(self, parts: ModelParts, covered: set[nn.Module]) -> set[int]:
        """Return the parameters that this project's kernels multiply, as values of `id`."""
        linears: list[Any] = list(covered)
        found: set[int] = set()
        if self._native["linears"]:
            modules = [m for layer in parts.layers for m in layer.layer.modules()]
            linears += [m for m in modules if type(m) is nn.Linear]
        if self._native["experts"]:
            for layer in parts.layers:
                if layer.experts is not None and is_covered(layer.experts):
                    found |= {
                        id(w) for w in layer.experts.parameters() if w.is_meta or is_usable(w)
                    }
        if self._native["head"]:
            linears.append(parts.lm_head)
        return found | {id(m.weight) for m in linears if is_read(m)}

    @property
    def is_ours(self) -> bool:
        """True if this project's kernels compute all of every layer."""
        whole = [isinstance(d, NativeDriver) and d.is_complete for d in self.drivers]
        banks = [isinstance(bank, NativeBank) for bank in self._held]
        return all(whole) and all(banks)

    @property
    def stops_between_keys(self) -> bool:
        """True if every layer's attention can stop between two blocks of keys."""
        native = [d for d in self.drivers if isinstance(d, NativeDriver)]
        return sum("attention" in driver.names for driver in native) == len(self.drivers)

    @property
    def names(self) -> dict[str, str]:
        """Name of the implementation of each kind of work, for benchmark results."""
        native = [d for d in self.drivers if isinstance(d, NativeDriver)]
        fused = Counter(part for driver in native for part in driver.names)
        sdpa = "sdpa per sequence on slabs (transformers' own eager with sinks)"
        ours = f"qllm {cpu.kind()}" if native else ""
        total, deltas = len(self.drivers), sum(map(_has_delta_kernel, self.drivers))

        def attends(torch_name: str) -> str:
            kernel = f"{ours} ({fused['attention']} of {total} layers)"
            rest = [torch_name] if fused["attention"] + deltas < total else []
            return ", ".join([kernel, *rest] if fused["attention"] else rest)

        mlp = {"mlp": f"{ours} ({fused['mlp']} of {total} layers)"} if fused["mlp"] else {}
        states = {"state": f"qllm {cpu.kind()} ({deltas} of {total} layers)"} if deltas else {}
        return (
            mlp
            | states
            | {
                "experts": listed(bank.kernel for bank in self.banks if bank is not None),
                "router": f"{ours} ({fused['router']} of {total} layers)" if native else "torch",
                "linear": listed(self._linears.kernels.elements()) or "in attention",
                "head": self.head.kernel,
                "attention": attends(sdpa),
                "sweep": f"{self.sweep.num_layers} of {total} layers in one call",
                "parts": self._known,
                "row_rule": "none" if self.rule is PLAIN else str(tuple(self.rule)),
                "missing": cpu.MISSING or "none",
            }
        )


def _leave(banks: Iterable[Bank]) -> None:
    with torch.device("cpu"):  # garbage collection may run while another thread makes a model
        for bank in banks:
            bank.unpack()


def listed(names: Iterable[str]) -> str:
    """Return names with the number of times that each occurs: "a (2), b (1)"."""
    counts = Counter(names)
    return ", ".join(f"{name} ({num})" for name, num in sorted(counts.items()))


def _sizes(parts: ModelParts) -> dict[str, int]:
    """Return the bytes of the weights that may be packed."""
    experts = [m for layer in parts.layers if layer.experts for m in layer.experts.parameters()]
    modules = [m for layer in parts.layers for m in layer.layer.modules()]
    linears = [m for m in modules if type(m) is nn.Linear]
    return {
        "experts": sum(w.numel() * w.element_size() for w in experts),
        "linears": sum(map(_size, linears)),
        "head": _size(parts.lm_head),
    }


def _size(module: nn.Linear) -> int:
    held = linear_in(module)
    return module.weight.nbytes if held is None else held.num_bytes


def _refuse_states(parts: ModelParts, drivers: Iterable[LayerDriver]) -> None:
    for layer, driver in zip(parts.layers, drivers, strict=True):
        if layer.new_state is not None and not _has_delta_kernel(driver):
            raise ModelError(
                f"layer {layer.index} carries a state "
                f"({type(layer.self_attn or layer.layer).__name__}), whose "
                "last bits depend on how a prompt is cut into passes: "
                "exactness='batch-invariant' is not possible, use 'order'"
            )


def _has_delta_kernel(driver: LayerDriver) -> bool:
    return isinstance(getattr(driver, "mixer", None), DeltaMixer)


def driver_for(parts: LayerParts, arena: cpu.Arena | None) -> LayerDriver:
    """Return the driver that `discover` chose for a layer. It uses kernels if `arena` is not None.

    A dense layer of unknown structure is driven by hooks.
    """
    if parts.around is not None:
        return AroundDriver(parts)
    if len(parts.attentions) > 1:
        return WholeDriver(parts)
    mixer = delta_mixer(parts, arena)
    if parts.input_layernorm is None or (parts.new_state is not None and mixer is None):
        return HookedDriver(parts, mixer, () if mixer is None else mixer.covered)
    if arena is None or parts.rope_kind is not None:  # the kernels have one rotation for all layers
        return FastDriver(parts)
    return NativeDriver(parts, arena, mixer)
