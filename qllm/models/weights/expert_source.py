"""The weights of one module of experts in a checkpoint, read expert by expert."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qllm.errors import ModelError
from qllm.kernels.cpu.experts import BF16, Cut, Formats
from qllm.kernels.cpu.quantised import is_like, stacked
from qllm.kernels.quantised import Quantised
from qllm.models.weights.checkpoint import Checkpoint, naming
from qllm.models.weights.conversions import alike, expanded
from qllm.models.weights.formats.layout import Weight
from qllm.models.weights.places import Place
from qllm.models.weights.quantised_experts import WEIGHTS, gate_first
from qllm.models.weights.quantised_weights import shape_of


class _Read(NamedTuple):
    """A part of an expert's weight."""

    name: str
    number: int | None
    """Number of the expert in a stack; None if the weight is its own."""
    rows: range | None
    """Outputs of the part; None is all."""


class ExpertSource:
    """The weights of one module of experts in a checkpoint.

    Args:
        path: Path of the module.
        module: The module, on the meta device.
        names: Names of the weights.
        places: Places of all weights of experts.
        checkpoint: Weights to read.
        rounding: Rounding of plain weights; None keeps them in bf16.
    """

    def __init__(
        self,
        path: str,
        module: Any,
        names: Sequence[str],
        places: Mapping[str, Place],
        checkpoint: Checkpoint,
        rounding: Callable[[Tensor], Quantised] | None,
    ) -> None:
        self.path, self.module = path, module
        self._checkpoint, self._rounding = checkpoint, rounding
        self._shapes = {name: self._shape_of(getattr(module, name)) for name in WEIGHTS}
        """Outputs and inputs of one expert's weight, by parameter."""
        self.num_experts = int(module.gate_up_proj.shape[0])
        hidden, width = self._shapes[WEIGHTS[1]]
        self.shape = width, hidden
        self._names = {
            parameter: self._names_of(
                parameter, {places[n][2:]: n for n in names if places[n].parameter == parameter}
            )
            for parameter in WEIGHTS
        }

    def _shape_of(self, weight: Tensor) -> tuple[int, int]:
        n, k = weight.shape[:0:-1] if self.module.is_transposed else weight.shape[1:]
        return n, k

    def _names_of(
        self, parameter: str, by_place: Mapping[tuple[int, int | None], str]
    ) -> list[list[tuple[str, int | None]]]:
        """Return the name of each part of each expert, and the expert's number in a stack."""
        experts = range(self.num_experts)
        if list(by_place) == [(0, None)]:
            return [[(by_place[0, None], expert)] for expert in experts]
        parts = range(len(by_place) // self.num_experts)
        wanted = {(part, expert) for part in parts for expert in experts}
        if wanted != set(by_place) or not wanted or not self.module.is_concatenated:
            raise ModelError(
                f"{self.path}.{parameter} is stored in a way that cannot be read expert by expert "
                f"({len(by_place)} weights for {self.num_experts} experts); keep the experts in "
                "memory, with tp=1"
            )
        return [[(by_place[part, expert], None) for part in parts] for expert in experts]

    @property
    def num_values(self) -> tuple[int, ...]:
        """Values of each weight of an expert."""
        return tuple(n * k for n, k in self._shapes.values())

    def formats(self) -> Formats:
        """Return the formats of the first expert; BF16 if one of its weights is not quantised."""
        names = {name for parts in self._names.values() for name, _ in parts[0]}
        if names <= self._checkpoint.plain.keys():
            if self._rounding is None:
                return BF16
            likes = [
                self._rounding(torch.zeros(1, k, dtype=torch.float32))
                for _, k in self._shapes.values()
            ]
            return Formats(*map(shape_of, likes))
        found = [stacked(_matrices(self._all(0, name))) for name in WEIGHTS]
        whole = [shape_of(one) for one in found if one is not None]
        return Formats(*whole) if len(whole) == len(WEIGHTS) else BF16

    def common_formats(self, pool: Executor) -> Formats:
        """Return formats to which all experts can be converted, with data; BF16 without such."""
        found = []
        for name in WEIGHTS:
            every = chain.from_iterable(
                pool.map(partial(self._all, name=name), range(self.num_experts))
            )
            same = alike(list(every))
            if same is None:
                return BF16
            found.append(same[0].rows(slice(0, 1)))
        return Formats(*found)

    def expert(
        self, expert: int, formats: Formats, cut: Cut | None = None
    ) -> tuple[Tensor | Quantised, Tensor | Quantised] | None:
        """Return the weights of an expert as they are packed; None if they have another format.

        Args:
            expert: Number of the expert.
            formats: Formats of its weights.
            cut: Share of a rank, of which the weights have the outputs; None is all. Weights of a
                GGUF file, and those that are not quantised, are read from the file in such rows
                alone, unless their rows are inputs. Others are read whole.
        """
        found = []
        for name, like in zip(WEIGHTS, formats, strict=True):
            weight = self._joined(name, self._reads(expert, name, cut), like)
            if weight is None:
                return None
            found.append(weight)
        return found[0], found[1]

    def _reads(self, expert: int, name: str, cut: Cut | None) -> list[_Read]:
        """Return the parts of one weight of an expert, or of a share of it."""
        (width, _), parts = self.shape, self._names[name][expert]
        if cut is None:
            return [_Read(*part, None) for part in parts]
        if name != WEIGHTS[0]:
            return [_Read(*part, cut.columns) for part in parts]
        start, stop = cut.inner.start, cut.inner.stop
        if len(parts) > 1:
            ranges = [cut.inner]
        elif self.module.is_concatenated:
            ranges = [cut.inner, range(width + start, width + stop)]
        else:
            ranges = [range(2 * start, 2 * stop)]
        return [_Read(*part, rows) for part in parts for rows in ranges]

    def _joined(
        self, name: str, reads: Sequence[_Read], like: Quantised | None
    ) -> Tensor | Quantised | None:
        whole: Tensor | Quantised | None
        parts, names = self._parts(reads), [read.name for read in reads]
        n, k = self._shapes[name]
        shape = (n, k) if reads[0].rows is None else (sum(len(r.rows or ()) for r in reads), k)
        if like is None:
            values = [self._values(*pair) for pair in zip(names, parts, strict=True)]
            whole = torch.cat([one.to(torch.bfloat16) for one in values])
        else:
            whole = _like(parts, like)
        if whole is not None and tuple(whole.shape) != shape:
            raise ModelError(
                f"{' and '.join(dict.fromkeys(names))} is {tuple(whole.shape)} and must be "
                f"{shape}; download it again"
            )
        if whole is None or name != WEIGHTS[0] or self.module.is_concatenated:
            return whole
        order = gate_first(len(whole) if isinstance(whole, Tensor) else whole.shape[0])
        return whole[order] if isinstance(whole, Tensor) else whole.rows(order)

    def _values(self, own: str, weight: Weight) -> Tensor:
        """Return the values of a weight as they are, or of a quantised one after a check."""
        if own in self._checkpoint.quantised:
            return expanded(own, weight)
        return _plain(weight)

    def _all(self, expert: int, name: str) -> list[Weight]:
        """Read the parts of one weight of an expert, with outputs as rows."""
        return self._parts(self._reads(expert, name, None))

    def _parts(self, reads: Sequence[_Read]) -> list[Weight]:
        """Read parts of a weight, with outputs as rows."""
        found: list[Weight] = []
        whole: dict[tuple[str, int | None], Weight] = {}
        for own, number, rows in reads:
            turned = number is not None and self.module.is_transposed
            is_plain, part = own in self._checkpoint.plain, (own, number)
            with naming(own):
                if rows is not None and not turned and own in self._checkpoint.in_rows:
                    weight = self._checkpoint.rows(own, number, rows)
                else:
                    if part not in whole:
                        whole[part] = self._checkpoint.one(own, number)
                    weight = _plain(whole[part]).t() if is_plain and turned else whole[part]
                    weight = weight if rows is None else _rows_of(weight, rows)
                if is_plain and self._rounding is not None:
                    weight = self._rounding(_plain(weight))
            found.append(weight)
        return found


def _plain(weight: Weight) -> Tensor:
    assert isinstance(weight, Tensor)
    return weight


def _rows_of(weight: Weight, rows: range) -> Weight:
    which = slice(rows.start, rows.stop)
    return weight.rows(which) if isinstance(weight, Quantised) else weight[which]


def _matrices(weights: Sequence[Weight]) -> list[Quantised]:
    """Return the weights if each is quantised, else an empty list."""
    found = [one for one in weights if isinstance(one, Quantised)]
    return found if len(found) == len(weights) else []


def _like(parts: Sequence[Weight], like: Quantised) -> Quantised | None:
    """Return the weight of these parts in a format; None if it has another format.

    Values are converted only to a format with data, see `common_formats`.
    """
    whole = stacked(_matrices(parts))
    if whole is not None and is_like(whole, like):
        return whole
    found = None if like.codes.is_meta else alike([*parts, like])
    whole = None if found is None else stacked(found[:-1])
    return whole if whole is not None and is_like(whole, like) else None
