"""The embedding of token ids: rows of a table."""

from array import array

import torch
from torch import Tensor, nn

from qllm.kernels import cpu
from qllm.models.discover import ModelParts
from qllm.models.heard import is_heard


class Embedding:
    """The lookup from token ids to the residual stream of the first layer.

    Args:
        parts: Parts of the model.
        native: True if kernels copy the rows of a plain table. A call of the module takes a tenth
            of a millisecond when the weights of a step have evicted all code from the caches.
    """

    def __init__(self, parts: ModelParts, native: bool) -> None:
        self._module, self._multiplier = parts.embed, parts.embedding_multiplier
        self._device, self._native = parts.like.device, native
        self._table = _table_of(parts.embed) if native else None
        if self._table is not None:
            self._num, width = self._table.shape
            self._address, self._row_bytes = self._table.data_ptr(), width * self._table.itemsize
            self._blank = cpu.Blank(width, self._table.dtype)

    def __call__(self, ids: list[int]) -> Tensor:
        """Return rows [T, D].

        Raises:
            IndexError: An id is not in the table.
        """
        if self._table is None or is_heard(self._module):
            x_TD: Tensor = self._module(torch.tensor(ids, device=self._device))
            if self._native or is_heard(self._module):
                # a hook may hold the original tensor, and layers overwrite `x_TD`
                x_TD = x_TD.clone()
        else:
            x_TD = self._rows(ids)
        return x_TD if self._multiplier is None else x_TD * self._multiplier

    def _rows(self, ids: list[int]) -> Tensor:
        if not 0 <= min(ids) <= max(ids) < self._num:
            wrong = next(i for i in ids if not 0 <= i < self._num)
            raise IndexError(f"token id {wrong} must be in [0, {self._num})")
        x_TD, numbers = self._blank.take(len(ids)), array("q", ids)
        where = numbers.buffer_info()[0]
        cpu.native.copy_rows(x_TD.data_ptr(), self._address, where, len(ids), self._row_bytes)
        return x_TD


def _table_of(module: nn.Module) -> Tensor | None:
    """Return the weight of a module that only looks up its rows; None for other modules."""
    if type(module) is not nn.Embedding or module.max_norm is not None:
        return None
    if "forward" in vars(module) or not module.weight.is_contiguous():
        return None
    return module.weight.detach()
