"""Ranks with a device each, on a CPU: memory belongs to a rank, and NCCL's calls have its rules."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from qllm.cuda.gathers import Nccl

HERE = torch.device("cpu")
FRESH = {torch.ops.aten.lift_fresh.default}
"""Operations that get the memory of `torch.tensor`, which was allocated a moment ago."""


class RankMemory(TorchDispatchMode):
    """Finds every operation of a rank that reads or writes memory of another rank.

    Memory belongs to the rank that allocated it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rank = 0
        self._ranks: dict[int, int] = {}
        self._kept: list[Tensor] = []
        """All memory of other ranks than the owner, so that no address is used twice."""

    def rank_of(self, x: Tensor) -> int | None:
        """Return the rank of memory; None if it is empty, or was there before this object."""
        return self._ranks.get(x.untyped_storage().data_ptr()) if x.numel() else None

    def give(self, x: Tensor, rank: int) -> Tensor:
        """Note that memory belongs to a rank."""
        self._ranks[x.untyped_storage().data_ptr()] = rank
        if rank:
            self._kept.append(x)
        return x

    @contextmanager
    def on(self, rank: int) -> Iterator[None]:
        before, self.rank = self.rank, rank
        try:
            yield
        finally:
            self.rank = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FRESH:
            return self.give(func(*args, **(kwargs or {})), self.rank)
        given: list[Tensor] = []
        tree_map_only(Tensor, given.append, (args, kwargs or {}))
        places = {x.untyped_storage().data_ptr() for x in given}
        for x in () if func.is_view else given:
            if x.dim() and self.rank_of(x) not in (None, self.rank):
                raise AssertionError(
                    f"rank {self.rank} ran {func} on memory of rank {self.rank_of(x)}"
                )
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in places:
                self.give(x, self.rank)
        return out


class FakeNccl:
    """The calls of `torch.cuda.nccl` for ranks of one process, with NCCL's refusals.

    Args:
        memory: Memory of the ranks.
        num: Number of ranks.
    """

    def __init__(self, memory: RankMemory, num: int) -> None:
        self._memory, self._num, self.calls = memory, num, list[str]()

    def _check(self, tensors: Sequence[Tensor]) -> None:
        ranks = [self._memory.rank_of(x) for x in tensors]
        if len(ranks) != self._num or any(x not in (None, i) for i, x in enumerate(ranks)):
            raise RuntimeError(f"NCCL: one tensor of each device in order, not of {ranks}")
        if not all(x.is_contiguous() for x in tensors):
            raise RuntimeError("NCCL: tensors are contiguous")
        if len({(x.numel(), x.dtype) for x in tensors}) > 1:
            raise RuntimeError("NCCL: tensors have one size and one dtype")

    def broadcast(self, tensors: Sequence[Tensor], root: int) -> None:
        self._check(tensors)
        self.calls.append("broadcast")
        with _disable_current_modes():
            for x in tensors:
                x.copy_(tensors[root].clone())

    def all_gather(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self._check(inputs)
        self._check(outputs)
        if outputs[0].numel() != self._num * inputs[0].numel():
            raise RuntimeError("NCCL: an output has room for all inputs")
        self.calls.append("all_gather")
        with _disable_current_modes():
            whole = torch.cat([x.flatten() for x in inputs])
            for x in outputs:
                x.view(-1).copy_(whole)


class FakeDevices(Nccl):
    """Ranks with a device each. Use its `memory` as a context around all that the ranks do."""

    def __init__(self, num: int) -> None:
        self.memory = RankMemory()
        self.nccl = FakeNccl(self.memory, num)
        super().__init__([HERE] * num, self.nccl)

    def on(self, rank: int) -> Any:
        return self.memory.on(rank)

    def put(self, rank: int, x: Tensor) -> Tensor:
        return self._moved(rank, x)

    def _to_first(self, x: Tensor) -> Tensor:
        return self._moved(0, x)

    def _moved(self, rank: int, x: Tensor) -> Tensor:
        with _disable_current_modes():
            found = x.clone(memory_format=torch.preserve_format)
        return self.memory.give(found, rank)
