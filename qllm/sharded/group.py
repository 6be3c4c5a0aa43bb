"""Ranks as threads of one process, and the tensors that they gather.

A gather joins the parts of all ranks in the order of the ranks. Nothing is summed.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from qllm.errors import DeviceError

T = TypeVar("T")

DEADLINE_S = 60.0
"""Seconds that a rank waits for the others."""


class Member:
    """One rank in its group.

    Args:
        group: Group of the rank.
        rank: Number of the rank.
    """

    def __init__(self, group: "Group", rank: int) -> None:
        self._group, self.rank, self.size = group, rank, group.size

    def gather(self, part: Any, join: Callable[[Sequence[Any]], T]) -> T:
        """Return the parts of all ranks, joined. All ranks call this method in the same order.

        Args:
            part: This rank's part. Nothing may change it during the call.
            join: Function of the parts in the order of the ranks. Its result shares no memory with
                them.
        """
        return self._group.gather(self.rank, part, join)


class Group:
    """Some ranks that wait for each other.

    Args:
        size: Number of ranks.
        deadline_s: Seconds that a rank waits for the others before all ranks fail.
    """

    def __init__(self, size: int, deadline_s: float = DEADLINE_S) -> None:
        self.size, self._deadline_s = size, deadline_s
        self._barrier = threading.Barrier(size)
        self._parts: list[Any] = [None] * size
        self._failed: list[BaseException] = []
        """Errors of ranks, the first one first."""

    def gather(self, rank: int, part: Any, join: Callable[[Sequence[Any]], T]) -> T:
        """Return the parts of all ranks, joined: see `Member.gather`."""
        self._parts[rank] = part
        self._wait(rank)
        joined = join(tuple(self._parts))
        self._wait(rank)  # no rank replaces its part before all have read it
        return joined

    def _wait(self, rank: int) -> None:
        try:
            self._barrier.wait(self._deadline_s)
        except threading.BrokenBarrierError as error:
            why = f"not all came within {self._deadline_s:g} s"
            if self._failed:
                why = f"one of them failed with {type(self._failed[0]).__name__}"
            raise DeviceError(
                f"rank {rank} of {self.size} waited for the others, and {why}; "
                "start all ranks again"
            ) from error

    def run(self, work: Callable[[Member], T]) -> list[T]:
        """Run `work` in a thread per rank, and return the results in the order of the ranks.

        Raises:
            Exception: The error of the first rank that raised. The other ranks stop waiting.
        """
        results: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            try:
                results[rank] = work(Member(self, rank))
            except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
                self._failed.append(error)
                self._barrier.abort()

        ranks = range(self.size)
        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failed:
            raise self._failed[0]
        return results


class Form:
    """The rows that a rank owns between the products of a layer.

    With whole rows, every rank has all rows. With split rows, each rank has a range of them.
    """

    def __init__(self, member: Member, num_rows: int, split: bool) -> None:
        self.member, self.split = member, split
        self.own = range(num_rows)
        if split:
            size, rank = member.size, member.rank
            self.own = range(num_rows * rank // size, num_rows * (rank + 1) // size)

    def all_columns(self, part_TC: Tensor) -> Tensor:
        """Return all columns of the own rows, from some columns of all rows on each rank."""
        rows = slice(self.own.start, self.own.stop)
        return self.member.gather(part_TC, lambda parts: torch.cat([p[rows] for p in parts], 1))

    def all_rows(self, own_TC: Tensor) -> Tensor:
        """Return all rows, from the own rows of each rank."""
        return joined(self.member, own_TC, 0) if self.split else own_TC


def joined(member: Member, part: Tensor, dim: int) -> Tensor:
    """Return the tensors of all ranks, one after the other along a dimension."""
    return member.gather(part, lambda parts: torch.cat(list(parts), dim))
