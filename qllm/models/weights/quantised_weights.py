"""Weights that stay quantised: packed for our kernels while they are read, if there are kernels."""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from qllm.errors import ModelError
from qllm.kernels import cpu
from qllm.kernels.cpu.quantised import ALLOWED_WORTHS, MOST_SCALE, QuantisedStack, stacked
from qllm.kernels.quantised import Quantised

SAMPLES = 64
"""Number of sample bytes of a weight, or of its scales, for the identity of a model."""


class _Weights(ABC):
    """Base class of E weights of one shape and format, on any device."""

    def __init__(self, num: int, like: Quantised) -> None:
        self.num, self.shape = num, like.shape
        self.like = shape_of(like)
        """One of the weights, without its memory."""
        self.kind = like.kind
        """Codes and group as text: "e2m1 g32"."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Return all tensors of the weights."""

    @abstractmethod
    def ends(self) -> list[Tensor]:
        """Return the tensors of the first and of the last weight."""

    def sample(self) -> bytes:
        """Return a few bytes of the first and the last weight, for the identity of the model."""
        return b"".join(sample_of(tensor) for tensor in self.ends())

    def digest(self) -> str:
        """Return a digest of every byte."""
        return self.kind + repr([checksum(tensor) for tensor in self.tensors()])


class Weights(_Weights):
    """E weights [n, k] of one shape and format.

    Args:
        num: E.
        like: One of the weights.
    """

    def __init__(self, num: int, like: Quantised) -> None:
        super().__init__(num, like)
        self._codes = [self.like] * num
        self.stack: QuantisedStack | None = None
        """The packed weights; None without our kernels."""
        if cpu.MISSING is None:
            cpu.set_threads(torch.get_num_threads())
            self.stack = QuantisedStack(num, *self.shape, self.like)

    def take(self, first: int, weights: Sequence[Sequence[Quantised]]) -> None:
        """Store some of the weights, in any order. Several threads may call this method.

        Args:
            first: Number of the first.
            weights: Parts of each weight, to be stacked along their rows. They are not used
                afterwards.

        Raises:
            ModelError: The kernels do not support such weights.
        """
        if self.stack is None:
            for i, parts in enumerate(weights):
                whole = stacked(parts)
                assert whole is not None
                self._codes[first + i] = whole
            return
        try:
            self.stack.pack(first, *weights)
        except ValueError as error:
            raise ModelError(f"quantised weights cannot be packed: {error}") from error

    def values(self, index: int) -> Tensor:
        """Return the values of one weight, bf16 [n, k]."""
        out = torch.empty(self.shape, dtype=torch.bfloat16)
        self.write(index, out)
        return out

    def write(self, index: int, out_NK: Tensor, scratch: Tensor | None = None) -> None:
        """Write a weight's values into bf16 [n, k] of any strides; `scratch` as in `unpack`."""
        if self.stack is None:
            out_NK.copy_(self._codes[index].dequantised())
        else:
            self.stack.unpack(index, out_NK, scratch)

    def scratch(self) -> Tensor:
        """Return memory for `write`."""
        return torch.empty(cpu.packed_numel(*self.shape), dtype=torch.bfloat16)

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        if self.stack is not None:
            return self.stack.num_bytes * self.num
        return sum(t.nbytes for one in self._codes for t in tensors_of(one))

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the weights: one, or some for each weight."""
        if self.stack is not None:
            return list(self.stack.packed)
        return [tensor for one in self._codes for tensor in tensors_of(one)]

    def ends(self) -> list[Tensor]:
        if self.stack is not None:
            return [self.stack.packed[0], self.stack.packed[-1]]
        return [tensor for i in (0, -1) for tensor in tensors_of(self._codes[i])]


class DeviceWeights(_Weights):
    """E weights [n, k] of one shape and format in a checkpoint's layout, on a device.

    The class has the methods of `Weights`, but the weights are not packed.

    Args:
        num: E.
        like: One of the weights.
        device: Device of the weights.
    """

    def __init__(self, num: int, like: Quantised, device: torch.device) -> None:
        super().__init__(num, like)
        self._device = device
        self.whole = with_tensors(like, map(self._empty, tensors_of(like)))
        """All weights, as a stack."""

    def _empty(self, like: Tensor) -> Tensor:
        """Return memory for tensors like this one of all weights."""
        return torch.empty((self.num, *like.shape), dtype=like.dtype, device=self._device)

    def take(self, first: int, weights: Sequence[Sequence[Quantised]]) -> None:
        """Store some of the weights, see `Weights.take`."""
        for i, parts in enumerate(weights):
            one = stacked(parts)
            assert one is not None
            if one.shape != self.shape:
                raise ModelError(
                    f"quantised weights cannot be kept: one is {one.shape}, the others of its "
                    f"stack {self.shape}"
                )
            for worths in tensors_of(one)[1:]:
                _refuse_far(worths)
            if one.code == "e4m3" and ((one.codes.view(torch.uint8) & 127) == 127).any():
                raise ModelError("quantised weights have codes that are not a number")
            for own, new in zip(tensors_of(self.whole), tensors_of(one), strict=True):
                own.view(torch.uint8)[first + i].copy_(new.contiguous().view(torch.uint8))

    def values(self, index: int) -> Tensor:
        """Return the values of one weight, bf16 [n, k]."""
        return self.whole.one(index).dequantised()

    def write(self, index: int, out_NK: Tensor, scratch: Tensor | None = None) -> None:
        """Write the values of one weight into bf16 [n, k] of any strides."""
        out_NK.copy_(self.values(index))

    def scratch(self) -> None:
        """Return None: `write` needs no memory."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the weights."""
        return tensors_of(self.whole)

    def ends(self) -> list[Tensor]:
        return [tensor for i in (0, self.num - 1) for tensor in tensors_of(self.whole.one(i))]


def _refuse_far(worths: Tensor) -> None:
    """Refuse scales or offsets that the CPU kernels refuse: they could give values that are NaN."""
    size = worths.float().abs()
    is_bad = (size != 0) & ~((size >= 1 / MOST_SCALE) & (size <= MOST_SCALE))
    if is_bad.any():
        raise ModelError(
            f"quantised weights cannot be kept: a scale or offset is {float(worths[is_bad][0]):g}; "
            f"{ALLOWED_WORTHS}"
        )


AnyWeights = Weights | DeviceWeights


def tensors_of(one: Quantised) -> list[Tensor]:
    """Return codes, scales, and offsets if there are any."""
    return [t for t in (one.codes, one.scale_NG, one.offset_NG) if t is not None]


def with_tensors(one: Quantised, tensors: Iterable[Tensor]) -> Quantised:
    """Return a weight with other tensors, in the order of `tensors_of`."""
    codes, scale, *offset = tensors
    return one._replace(codes=codes, scale_NG=scale, offset_NG=offset[0] if offset else None)


def shape_of(one: Quantised) -> Quantised:
    """Return the same weight without its memory."""
    return with_tensors(one, (tensor.to("meta") for tensor in tensors_of(one)))


def sample_of(tensor: Tensor) -> bytes:
    """Return a few bytes of a tensor."""
    flat = tensor.reshape(-1)
    return bytes(_as_bytes(flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES]))


def checksum(tensor: Tensor, before: int = 0) -> int:
    """Return the CRC-32 of every byte of a tensor, after bytes with the checksum `before`."""
    return zlib.crc32(_as_bytes(tensor), before)


def _as_bytes(tensor: Tensor) -> memoryview:
    array: memoryview = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return array
