"""Buffers for the intermediate tensors of a layer in one native call (`qllm.runner.sweep`)."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qllm.runner.frame import LayerState
from qllm.runner.layers.drivers import Routed, RouterExtras
from qllm.runner.layers.native import NativeLayer
from qllm.runner.layers.work import Bank, Unit, Work
from qllm.scheduler.program import Index, Op, OpKind


class Storage:
    """Memory that the buffers of all layers share. It grows and is not freed.

    Allocating so much memory takes longer than using it. Freeing it takes milliseconds without a
    poll.
    """

    def __init__(self) -> None:
        self._flat: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor in the memory of that name.

        No earlier tensor may still use the memory.
        """
        numel, flat = math.prod(shape), self._flat.get(name)
        if flat is None or flat.numel() < numel or flat.dtype is not dtype:
            flat = self._flat[name] = self.fresh((numel,), dtype)
        return flat[:numel].view(shape)

    def fresh(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor that shares no memory."""
        return torch.empty(tuple(shape), dtype=dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of all memory, used or not. Callable from any thread."""
        return sum(flat.nbytes for flat in list(self._flat.values()))


class Sizes(NamedTuple):
    """Sizes of the routed experts' work."""

    out_width: int
    """Width of an expert's output."""
    num_units: int
    """Most work units."""
    unit_rows: int
    """Most rows of one work unit."""


class LayerBuffers:
    """Tensors of the layer that a call is in.

    A frame that is parked in the layer keeps the tensors.
    """

    def __init__(self, x_TD: Tensor, layer: NativeLayer, sizes: Sizes, storage: Storage) -> None:
        (tokens, width), top_k, dtype = x_TD.shape, layer.top_k, x_TD.dtype
        num, take, shape = tokens * top_k, storage.take, (tokens, width)
        self.storage = storage
        self.mid_TD, self.normed_TD = take("mid", shape, dtype), take("normed", shape, dtype)
        self.next_TD = storage.fresh(shape, dtype)  # the frame takes ownership
        has_shared = layer.router is not None and layer.mlp is not None
        self.shared_TD = take("shared", shape, dtype) if has_shared else None
        self.weights_TK = take("weights", (tokens, top_k), layer.weights)
        self.slots_SD = take("slots", (num, sizes.out_width), dtype)
        whole = take("ints", (3 * (num + sizes.num_units),), torch.int64)
        self.ids_TK = whole[:num].view(tokens, top_k)
        self.ints = whole[num : 3 * num]
        """The fields token_S and inverse_S of `Work`."""
        self.units = whole[3 * num :]
        self.num_units = self.begun = 0
        """Number of `units`, and the end of the range inside which the op was left; else 0."""
        self.places = self._places()
        """Fields of `SweepStruct` except the destination of the layer's output."""

    def _places(self) -> dict[str, int | None]:
        token = self.ints.data_ptr()
        return {
            "tokens": self.mid_TD.shape[0],
            "width": self.mid_TD.shape[1],
            "top_k": self.ids_TK.shape[1],
            "wide": self.weights_TK.dtype is torch.float32,
            "mid": self.mid_TD.data_ptr(),
            "normed": self.normed_TD.data_ptr(),
            "shared": None if self.shared_TD is None else self.shared_TD.data_ptr(),
            "weights": self.weights_TK.data_ptr(),
            "slots": self.slots_SD.data_ptr(),
            "ids": self.ids_TK.data_ptr(),
            "token": token,
            "inverse": token + self.ints.nbytes // 2,
            "units": self.units.data_ptr(),
        }

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers, used or not."""
        return self.storage.num_bytes + self.next_TD.nbytes

    def load_from(self, state: LayerState) -> None:
        """Copy the results of ops of a layer that ran one by one, or that a restored frame has."""
        assert state.mid_TD is not None
        self.mid_TD.copy_(state.mid_TD)
        for lo, routed in state.routed.items():
            hi = lo + routed.x_TD.shape[0]
            self.normed_TD[lo:hi] = routed.x_TD
            self.ids_TK[lo:hi] = routed.ids_TK
            self.weights_TK[lo:hi] = routed.weights_TK
            if self.shared_TD is not None and routed.kept is not None:
                shared = routed.kept["shared"]
                assert isinstance(shared, Tensor)
                self.shared_TD[lo:hi] = shared
        work = state.work
        if work is not None:
            self.slots_SD.copy_(work.slots_SD)
            self.ints.copy_(torch.cat((work.token_S, work.inverse_S)))
            self.units[: len(work.flat)] = torch.tensor(work.flat)
        if state.next_TD is not None:
            self.next_TD.copy_(state.next_TD)

    def leave(
        self, state: LayerState, bank: Bank | None, parts: Sequence[Op], at: Index, num_units: int
    ) -> None:
        """Write the results of the ops of a layer that are done to the frame.

        Args:
            state: State of the layer in the frame.
            bank: Experts of the layer; None for a dense layer.
            parts: Ops of the layer.
            at: Index in `parts`, and the number of work units of an EXPERTS op that are done.
            num_units: Number of work units of the layer, once its experts have started.
        """
        state.space, state.mid_TD, state.begun = self, self.mid_TD, None
        for kind, _, _, lo, hi in parts[: at.op]:
            if kind is OpKind.ROUTE:
                shared: dict[str, RouterExtras] | None = None
                if self.shared_TD is not None:
                    shared = {"shared": self.shared_TD[lo:hi]}
                state.routed[lo] = Routed(
                    self.normed_TD[lo:hi], self.ids_TK[lo:hi], self.weights_TK[lo:hi], shared
                )
        combine = [part.kind for part in parts].index(OpKind.COMBINE)
        units_done = at.pos or (num_units if at.op >= combine else 0)
        if bank is not None and units_done:
            # the order of units may have changed
            if state.work is None or bank.residency is not None:
                state.work = self._work(bank, num_units)
                units_done = units_done if at.pos else len(state.work.units)
            state.work.done[:units_done] = b"\1" * units_done
            state.weights_TK = self.weights_TK
            state.experts_x_TD = self.normed_TD if at.pos else None
        if at.op > combine:
            state.next_TD = self.next_TD

    def _work(self, bank: Bank, num_units: int) -> Work:
        """Return the work of an EXPERTS op that has started."""
        units = [Unit(*unit) for unit in self.units.view(-1, 3)[:num_units].tolist()]
        return Work.of(bank, self.ids_TK, self.ints, units, self.slots_SD)
