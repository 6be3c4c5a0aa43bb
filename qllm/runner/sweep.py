"""Consecutive ops of a program in one native call, for layers whose every op has a kernel.

A call runs until the number of ops per layer changes, an op has no kernel, or a stop may be due.
It also ends before the next op that carries states: Python finds and stores the states of each op.
The call leaves the frame in the same state as `qllm.runner.runner`, which runs the ops one by one.
A call may stop inside an op, after any task (kernels/cpu/course.py). The loop is
kernels/cpu/sweep.cpp.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qllm.errors import InvariantError, ModelError
from qllm.kernels import cpu
from qllm.kernels.cpu import course
from qllm.kernels.cpu.course import Courses
from qllm.kernels.cpu.norms import Norm
from qllm.runner.buffers import LayerBuffers, Sizes, Storage
from qllm.runner.cuts import CutCosts
from qllm.runner.frame import Frame, LayerState, NewStep
from qllm.runner.layers.attention import Step
from qllm.runner.layers.deltas import Carried
from qllm.runner.layers.drivers import LayerDriver
from qllm.runner.layers.native import NativeDriver, NativeLayer
from qllm.runner.layers.native_experts import NativeBank
from qllm.runner.layers.work import Bank, Work
from qllm.runner.polling import let_poll
from qllm.runner.protocol import Stop
from qllm.runner.residency import Missing
from qllm.scheduler.program import Index, Op, OpKind, Ops, Program, Stretch


class LayerStruct(ctypes.Structure):
    """`Layer` in sweep.h."""

    _fields_ = (
        ("attention", c_void_p),
        ("latents", c_void_p),
        ("deltas", c_void_p),
        ("first_norm", c_void_p),
        ("into", c_void_p),
        ("gate", c_void_p),
        ("out", c_void_p),
        ("router", c_void_p),
        ("experts", c_void_p),
        ("mlp", c_void_p),
        ("norm", c_void_p),
        ("index", c_int64),
        ("window", c_int64),
        ("expert_bytes", c_int64),
        ("scale", c_float),
        ("share", c_void_p),
    )


class LayerOpStruct(ctypes.Structure):
    """`LayerOp` in sweep.h."""

    _fields_ = (
        ("kind", c_int64),
        ("lo", c_int64),
        ("hi", c_int64),
        ("spans", c_void_p),
        ("num_spans", c_int64),
        ("whole", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("states", c_void_p),
        ("round_nums", c_void_p),
        ("num_rounds", c_int64),
    )


class SweepStruct(ctypes.Structure):
    """`Sweep` in sweep.h."""

    _fields_ = (
        ("layers", c_void_p),
        ("parts", c_void_p),
        ("num_parts", c_int64),
        ("end_layer", c_int64),
        ("tokens", c_int64),
        ("width", c_int64),
        ("top_k", c_int64),
        ("wide", c_int64),
        ("x", c_void_p),
        ("next", c_void_p),
        ("mid", c_void_p),
        ("normed", c_void_p),
        ("shared", c_void_p),
        ("weights", c_void_p),
        ("slots", c_void_p),
        ("ids", c_void_p),
        ("token", c_void_p),
        ("inverse", c_void_p),
        ("units", c_void_p),
        ("unit_rows", c_int64),
        ("range_rows", c_int64),
        ("range_ns", c_double),
        ("unit_ns", c_double),
        ("row_ns", c_double),
        ("key_values", c_int64),
        ("course", c_void_p),
        ("grain", c_int64),
        ("watch", c_void_p),
        ("seen", c_int64),
        ("stop_ns", c_int64),
        ("tasks_left", c_int64),
        ("single", c_int64),
        ("layer", c_int64),
        ("part", c_int64),
        ("pos", c_int64),
        ("num_units", c_int64),
        ("num_layers", c_int64),
        ("call_ns", c_int64),
        ("longest_ns", c_int64),
        ("longest_kind", c_int64),
        ("slots_done", c_int64),
        ("expert_bytes", c_int64),
        ("failed", c_int64),
        ("begun", c_int64),
        ("missing", c_int64),
        ("clock", c_int64),
        ("rank", c_void_p),
        ("desk", c_void_p),
        ("heads", c_void_p),
        ("inner", c_void_p),
        ("queries", c_void_p),
        ("rows_from", c_int64),
        ("expert_inner", c_void_p),
        ("piece_rows", c_int64),
    )


class Amounts(NamedTuple):
    """The amounts of work that a call does at once."""

    costs: CutCosts
    """Costs that set the size of a range of expert work units."""
    unit_rows: int
    """Most rows of one expert work unit."""
    single: bool
    """True to return after the first op or range."""


class Swept(NamedTuple):
    """The result of one native call."""

    at: Index
    """First op that is not done."""
    polled_ns: int
    """Nanoseconds in which the call polled by itself; 0 if the call does not poll."""
    longest_ns: int
    """Longest time in nanoseconds between two polls of a thread in the call."""
    longest_op: OpKind
    """Kind of the op in which `longest_ns` was measured."""
    expert_bytes: int
    """Bytes of weights of the experts that had a work unit; 0 if the device counts the bytes."""
    missing: Missing | None = None
    """Experts without which the op at `at` cannot continue; None if it can."""

    def segment_ns(self, whole_ns: int) -> int:
        """Return the longest time without a poll, including the caller's time around the polls."""
        return max(0, whole_ns - self.polled_ns) + self.longest_ns


KEY_VALUES = 1 << 20
"""Most values that one attention task reads of keys, and of values. The number is that of 4,096
tokens with heads of 128."""


class LayerOps(NamedTuple):
    """The ops of one layer in the layout that a call reads."""

    ops: tuple[Op, ...]
    structs: "ctypes.Array[LayerOpStruct]"
    steps: list[Step]
    """Inputs of the ATTN ops, which come first."""
    held: tuple[Tensor, ...] = ()
    """Memory of `structs`."""

    def carry(self, part: int, carried: Carried) -> None:
        """Let an op read and write these states."""
        states, struct = carried.spans, self.structs[part]
        struct.states, struct.round_nums = states.address, states.round_nums
        struct.num_rounds = states.num_rounds


class Sweep:
    """The layers of one model that run in native calls.

    Args:
        drivers: Driver of every layer.
        banks: Experts of every layer; None for a dense layer.
        top_k: Experts per token.
    """

    courses: Courses = course
    """Pool of the places inside ops."""

    def __init__(
        self, drivers: Sequence[LayerDriver], banks: Sequence[Bank | None], top_k: int
    ) -> None:
        self._banks = tuple(banks)
        found: list[NativeLayer] = []
        """Layers that run in native calls."""
        self._layers: list[NativeLayer | None] = []
        for driver, bank in zip(drivers, banks, strict=True):
            layer = _native_layer(driver, bank, top_k)
            fits = layer is not None and layer.fits(found)
            self._layers.append(layer if fits else None)
            found += [layer] if layer is not None and fits else []
        self._slab = next((layer.slab for layer in found if layer.slab is not None), None)
        """Slab of all layers that attend."""
        self._num_experts = max((bank.num_experts for bank in banks if bank is not None), default=0)
        """Largest number of experts of any layer. One call uses the same buffers for several
        layers."""
        held = (bank.residency for bank in banks if bank is not None)
        self._residency = next((one.all for one in held if one is not None), None)
        """Residency of all layers whose experts are in a file."""
        self._structs: Any = None
        self._spare: dict[bool, LayerBuffers] = {}
        """Buffers of the previous call, for dense layers and for layers with experts. A frame that
        is parked inside a layer has its own buffers."""

    def enter(self) -> None:
        """Read the addresses of the weights. The experts' weights must be packed."""
        self._structs = (LayerStruct * len(self._layers))()
        for i, (layer, bank) in enumerate(zip(self._layers, self._banks, strict=True)):
            if layer is not None:
                experts = (
                    (bank.address, bank.unit_bytes) if isinstance(bank, NativeBank) else (None, 0)
                )
                self._structs[i] = struct_of(layer, *experts)

    def leave(self) -> None:
        """Refuse calls until the next `enter`, because experts free their packed memory."""
        self._structs = None

    @property
    def num_layers(self) -> int:
        """Number of layers that run in native calls."""
        return sum(layer is not None for layer in self._layers)

    def covers(self, op: Op) -> bool:
        """Return True if a call may start at an op."""
        inside = op.kind is not OpKind.EMBED and op.layer < len(self._layers)
        return inside and self._layers[op.layer] is not None

    def run(
        self,
        frame: Frame,
        program: Program,
        at: Index,
        stop: Stop,
        new_step: NewStep,
        sizes: Amounts,
    ) -> Swept:
        """Run ops from `at` on, at least one task of an op.

        Args:
            frame: Frame of the program.
            program: Program of the frame, or a shorter program with its first ops.
            at: First op, which must be covered.
            stop: Stop to poll. A stop without `watch` is polled by the caller, so the call returns
                at every boundary of the program's grain between ops and ranges.
            new_step: Function that returns the inputs of an ATTN op.
            sizes: Amounts of work that the call does at once.

        Returns:
            Work that the call has done. It is none if an expert is missing at `at`.

        Raises:
            InvariantError: Expert work units ran out of order (I1), or the sweep is not entered.
            ModelError: A router chose an expert that does not exist.
        """
        if self._structs is None:
            raise InvariantError("these experts were given back to their module")
        stretch, first = _stretch_of(program.ops, at.op)
        num = stretch.num_ops
        nth, part = divmod(at.op - first, num)
        layer = stretch.start + nth
        x = self._input(frame, stretch.group, layer)
        ahead = self._look_ahead(frame, stretch, layer, x, new_step)
        kind, work = ahead.ops[part].kind, frame.layer.work
        units_done = at.pos if kind is OpKind.EXPERTS else 0
        _check_units(work, ahead.ops[part], units_done)
        space = self._space(frame, layer, x, sizes.unit_rows, part > 0)
        begun = space.begun if kind is OpKind.EXPERTS and frame.course is not None else 0
        num_units = 0 if work is None else len(work.units)
        carried = self._carried(frame, layer, ahead, part)
        inside = frame.course or self.courses.take()
        s = SweepStruct(
            **space.places,
            layers=ctypes.addressof(self._structs),
            parts=ctypes.addressof(ahead.structs),
            num_parts=num,
            end_layer=self._end(layer, stretch.end),
            x=x.data_ptr(),
            next=space.next_TD.data_ptr(),
            unit_rows=sizes.unit_rows,
            range_rows=sizes.costs.range_rows,
            range_ns=sizes.costs.range_ns,
            unit_ns=sizes.costs.unit_ns,
            row_ns=sizes.costs.row_ns,
            key_values=KEY_VALUES,
            course=inside.address,
            single=sizes.single or (carried is not None and part + 1 < len(ahead.steps)),
            layer=layer,
            part=part,
            pos=units_done,
            num_units=space.num_units if begun else num_units,
            begun=begun,
            clock=0 if self._residency is None else self._residency.clock,
        )
        let_poll(s, stop, program.stop_below, program.grain)
        self._call(s)
        if s.failed:
            raise ModelError(f"the router of layer {s.layer} gave an id that is no expert's")
        if self._residency is not None:
            self._residency.clock = s.clock
        tasks_done = inside.done
        frame.course = self.courses.keep(inside)
        if carried is not None and (s.num_layers or s.part > part):
            carried.put()
            carried = None
        frame.carried = carried
        self._leave(frame, s, space, x, ahead)
        pos = s.pos if ahead.ops[s.part].kind is OpKind.EXPERTS else tasks_done
        index = Index(first + (s.layer - stretch.start) * num + s.part, pos)
        longest = OpKind(s.longest_kind)
        missing = self._missing(s, space) if s.missing else None
        return Swept(index, s.call_ns, s.longest_ns, longest, s.expert_bytes, missing)

    def _missing(self, s: SweepStruct, space: LayerBuffers) -> Missing:
        """Return the experts of the range that has begun, or of all units that are not done."""
        bank = self._banks[s.layer]
        assert bank is not None
        assert bank.residency is not None
        units = space.units.view(-1, 3)[s.pos : s.begun or s.num_units, 0]
        return Missing(bank.residency, tuple(dict.fromkeys(units.tolist())), bool(s.begun))

    def _call(self, s: SweepStruct) -> None:
        """Run the native call."""
        cpu.native.sweep(ctypes.addressof(s))

    def _input(self, frame: Frame, group: int, layer: int) -> Tensor:
        """Return the input of a layer. Later layers overwrite the tensor."""
        x = frame.activate(group)
        if layer and self._layers[layer - 1] is None:
            # a hook of the earlier module may hold the tensor
            x = frame.x_TD = x.clone(memory_format=torch.contiguous_format)
        elif not x.is_contiguous():
            x = frame.x_TD = x.contiguous()
        return x

    def _end(self, start: int, end: int) -> int:
        """Return the first layer of [start, end] that a call from `start` cannot include."""
        return next((i for i in range(start + 1, end) if self._ends_before(i)), end)

    def _ends_before(self, layer: int) -> bool:
        native = self._layers[layer]
        return native is None or native.deltas is not None

    def _carried(self, frame: Frame, layer: int, ahead: LayerOps, part: int) -> Carried | None:
        """Return the states of the first op; None if the op carries none."""
        native = self._layers[layer]
        if native is None or native.deltas is None or part >= len(ahead.steps):
            return None
        carried = frame.carried or native.deltas.begin(ahead.steps[part].spans)
        ahead.carry(part, carried)
        return carried

    def _look_ahead(
        self,
        frame: Frame,
        stretch: Stretch,
        layer: int,
        x_TD: Tensor,
        new_step: NewStep,
    ) -> LayerOps:
        native = self._layers[layer]
        assert native is not None
        key = stretch.group, native.router is None
        found: LayerOps | None = frame.ahead.get(key)
        if found is None:
            found = self._prepared(frame, stretch.in_layer(layer), x_TD, new_step)
            frame.ahead[key] = found
        return found

    def _prepared(
        self, frame: Frame, ops: tuple[Op, ...], x_TD: Tensor, new_step: NewStep
    ) -> LayerOps:
        """Return the ops of one layer in the layout that a call reads."""
        structs, steps = (LayerOpStruct * len(ops))(), []
        for i, (kind, _, group, lo, hi) in enumerate(ops):
            structs[i] = LayerOpStruct(kind=kind, lo=lo, hi=hi)
            if kind is not OpKind.ATTN:
                continue
            step = frame.step_of(group, lo, hi, new_step)
            steps.append(step)
            part = structs[i]
            part.num_spans, part.whole = len(step.spans), step.num_attended == step.num_tokens
            if self._slab is None:
                continue
            part.spans = step.addresses(self._slab, x_TD).address
            tables = frame.rope.addresses(group, lo, hi, frame.tokens(group))
            part.cos, part.sin = tables[0], tables[-1]
        return LayerOps(ops, structs, steps)

    def _space(
        self, frame: Frame, layer: int, x_TD: Tensor, unit_rows: int, inside: bool
    ) -> LayerBuffers:
        """Return buffers for the results of the layer that runs first."""
        state, native, bank = frame.layer, self._layers[layer], self._banks[layer]
        held: LayerBuffers | None = state.space
        if held is not None:
            return held
        assert native is not None
        spare = self._spare.pop(native.router is None, None)
        if not inside and spare is not None and spare.places["tokens"] == x_TD.shape[0]:
            return spare
        num_slots = x_TD.shape[0] * native.top_k
        width = x_TD.shape[1] if bank is None else bank.out_width
        num_units = min(num_slots, self._num_experts + num_slots // unit_rows)
        storage = None if spare is None else spare.storage
        space = self._buffers(x_TD, native, Sizes(width, num_units, unit_rows), storage)
        if inside:
            space.load_from(state)
            frame.layer = LayerState()
        return space

    def _buffers(
        self,
        x_TD: Tensor,
        layer: NativeLayer,
        sizes: Sizes,
        storage: Storage | None,
    ) -> LayerBuffers:
        """Return buffers in this storage, or in new memory."""
        return LayerBuffers(x_TD, layer, sizes, storage or Storage())

    def _leave(
        self, frame: Frame, s: SweepStruct, space: LayerBuffers, x_TD: Tensor, ahead: LayerOps
    ) -> None:
        """Bring the frame into the state that the same ops leave when they run one by one."""
        frame.slots_done += s.slots_done
        space.num_units, space.begun = s.num_units, s.begun
        for step in ahead.steps if s.num_layers else ahead.steps[: s.part]:
            step.reach()
        if s.num_layers:
            if s.num_layers % 2:
                frame.x_TD, space.next_TD = space.next_TD, x_TD
            frame.layer = LayerState()
        if s.part or frame.course is not None:
            bank = self._banks[s.layer]
            space.leave(frame.layer, bank, ahead.ops, Index(s.part, s.pos), s.num_units)
        else:
            is_dense = s.top_k == 0
            other = self._spare.get(is_dense)
            if other is None or other.storage.num_bytes <= space.storage.num_bytes:
                self._spare[is_dense] = space


def _native_layer(driver: LayerDriver, bank: Bank | None, top_k: int) -> NativeLayer | None:
    """Return a layer in the layout that a call reads; None if part of the layer has no kernel."""
    layer = driver.whole if isinstance(driver, NativeDriver) else None
    if layer is None or layer.router is None:
        return layer
    return layer if isinstance(bank, NativeBank) and layer.top_k == top_k else None


def struct_of(layer: NativeLayer, experts: int | None, expert_bytes: int) -> LayerStruct:
    """Return a layer in the layout that a call reads.

    Args:
        layer: Layer without its routed experts.
        experts: Address of `Experts` in kernels.h; None in a dense layer.
        expert_bytes: Bytes of one expert's weights.
    """
    return LayerStruct(
        **{layer.mixes: layer.mixer.address},
        first_norm=address_of(layer.first_norm),
        into=None if layer.into is None else layer.into.address,
        gate=None if layer.gate is None else layer.gate.address,
        out=layer.out.address,
        router=None if layer.router is None else layer.router.address,
        experts=experts,
        mlp=None if layer.mlp is None else layer.mlp.address,
        norm=address_of(layer.norm),
        index=layer.number,
        window=layer.window or 0,
        expert_bytes=expert_bytes,
        scale=layer.scale,
    )


def _stretch_of(ops: Sequence[Op], index: int) -> tuple[Stretch, int]:
    """Return the stretch of an op and the stretch's first index.

    Bare ops have the stretch of a layer.
    """
    if isinstance(ops, Ops):
        return ops.stretch_of(index)
    same = ops[index].layer, ops[index].group
    first, end = index, index + 1
    while first and ops[first - 1][1:3] == same and ops[first - 1].kind is not OpKind.EMBED:
        first -= 1
    while end < len(ops) and ops[end][1:3] == same:
        end += 1
    parts = tuple((op.kind, ((op.lo, op.hi),)) for op in ops[first:end])
    return Stretch(same[0], same[0] + 1, same[1], parts), first


def address_of(norm: Norm | None) -> int | None:
    """Return the address of a norm's `Norm` in kernels.h."""
    return None if norm is None else ctypes.addressof(norm.struct)


def _check_units(work: Work | None, op: Op, pos: int) -> None:
    """Raise unless exactly the work units before `pos` are done. COMBINE needs all units."""
    if work is None:
        return
    if op.kind is OpKind.COMBINE:
        if 0 in work.done:
            raise InvariantError(f"layer {op.layer} combines before all its experts ran (I1)")
    elif 0 in work.done[:pos] or 1 in work.done[pos:]:
        raise InvariantError(f"units of layer {op.layer} ran out of order (I1)")


NOTHING = Sweep((), (), 0)
"""A sweep that runs no layer. Every op runs on its own."""
