"""Movement of tensors between ranks of devices. One process launches the work of all ranks.

    spread      a tensor of rank 0 to every rank
    to_all      a part of each rank to every rank
    to_owner    a part of each rank to rank 0

A gather moves bits and adds nothing. Rank 0 is the owner: it has the frames, the norms, the routers
and all sums over experts.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from qllm.errors import ConfigError

Found = TypeVar("Found")


class Gathers(Protocol):
    """The ranks of a model, and what moves tensors between them."""

    devices: Sequence[torch.device]
    """Device of each rank, that of the owner first."""
    is_captured: bool
    """True if a captured stage may contain gathers."""
    kind: str
    """Text for results."""

    def on(self, rank: int) -> AbstractContextManager[Any]:
        """Launch the kernels of this context on the device of a rank."""
        ...

    def put(self, rank: int, x: Tensor) -> Tensor:
        """Return a weight on the device of a rank: a copy only if it is not there."""
        ...

    def spread(self, x: Tensor) -> list[Tensor]:
        """Return a tensor of the owner on each rank."""
        ...

    def to_all(self, parts: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return, for each rank, the parts of all ranks.

        Args:
            parts: Rows of each rank, [T, any width].
        """
        ...

    def to_owner(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the parts of all ranks on the owner."""
        ...


class OneDevice:
    """Ranks that share a device, and one stream of it. A gather is a copy on the device.

    NCCL refuses two ranks on one device. The stream runs the ranks one after the other, so no rank
    waits for another.

    Args:
        device: The device.
        num: Number of ranks.
    """

    is_captured = True

    def __init__(self, device: torch.device, num: int) -> None:
        self.devices: Sequence[torch.device] = (device,) * num
        self.kind = f"{num} on one device, copies"

    def on(self, rank: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def put(self, rank: int, x: Tensor) -> Tensor:
        return x

    def spread(self, x: Tensor) -> list[Tensor]:
        return [x, *(x.clone() for _ in self.devices[1:])]

    def to_all(self, parts: Sequence[Tensor]) -> list[list[Tensor]]:
        return [
            [part if own == rank else part.clone() for own, part in enumerate(parts)]
            for rank in range(len(self.devices))
        ]

    def to_owner(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [parts[0], *(part.clone() for part in parts[1:])]


class Nccl:
    """Ranks with a device each. NCCL moves what every rank needs.

    Torch copies what the owner alone needs, from device to device. All calls are ordered with the
    computing streams of their devices, and none waits. A graph of torch is one of one device, so no
    captured stage contains these calls.

    Args:
        devices: Device of each rank; no device twice.
        calls: Module with the calls of `torch.cuda.nccl`; None is that module.
    """

    is_captured = False

    def __init__(self, devices: Sequence[torch.device], calls: Any = None) -> None:
        self.devices: Sequence[torch.device] = tuple(devices)
        if calls is None:
            import torch.cuda.nccl as calls
        self._calls, self.kind = calls, f"{len(self.devices)} devices, NCCL"

    def on(self, rank: int) -> AbstractContextManager[Any]:
        device: AbstractContextManager[Any] = torch.cuda.device(self.devices[rank])
        return device

    def put(self, rank: int, x: Tensor) -> Tensor:
        return x.to(self.devices[rank])

    def spread(self, x: Tensor) -> list[Tensor]:
        found = [x.contiguous(), *(self._empty(rank, x.shape, x) for rank in self._others())]
        self._calls.broadcast(found, 0)
        return found

    def to_all(self, parts: Sequence[Tensor]) -> list[list[Tensor]]:
        widths = [part.shape[1] for part in parts]
        rows, most = len(parts[0]), max(widths)  # NCCL gathers parts of one size
        given, found = [], []
        for rank, part in enumerate(parts):
            with self.on(rank):
                padded = part.contiguous()
                if part.shape[1] < most:
                    padded = self._empty(rank, (rows, most), part)
                    padded[:, : part.shape[1]] = part
            given.append(padded)
            found.append(self._empty(rank, (len(parts), rows, most), part))
        self._calls.all_gather(given, found)
        return [[x[:, :w] for x, w in zip(own, widths, strict=True)] for own in found]

    def to_owner(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [parts[0], *map(self._to_first, parts[1:])]

    def _to_first(self, x: Tensor) -> Tensor:
        return x.to(self.devices[0], non_blocking=True)

    def _others(self) -> range:
        return range(1, len(self.devices))

    def _empty(self, rank: int, shape: Sequence[int], like: Tensor) -> Tensor:
        with self.on(rank):
            return torch.empty(shape, dtype=like.dtype, device=self.devices[rank])


def on_ranks(gathers: Gathers, work: Callable[..., Found], *values: Iterable[Any]) -> list[Found]:
    """Return the results of a function on each rank, which launches on the rank's device.

    Args:
        gathers: Ranks.
        work: The function.
        values: Arguments, each with a value for every rank.
    """
    found = []
    for rank, given in enumerate(zip(*values, strict=True)):
        with gathers.on(rank):
            found.append(work(*given))
    return found


def gathers_of(device: torch.device, num: int) -> Gathers:
    """Return the gathers of ranks on this machine.

    Each rank has a device of its own if there are so many. With one device, ranks share it.

    Args:
        device: Device of the owner.
        num: Number of ranks.

    Raises:
        ConfigError: There are several devices, and fewer than ranks.
    """
    if device.type != "cuda":
        return OneDevice(device, num)
    there = torch.cuda.device_count()
    if there == 1:
        return OneDevice(device, num)
    if there < num:
        raise ConfigError(
            f"tp={num}: there are {there} CUDA devices, and each rank needs one, or all ranks "
            f"share one; use tp={there}, or CUDA_VISIBLE_DEVICES=0"
        )
    return Nccl([torch.device("cuda", rank) for rank in range(num)])
