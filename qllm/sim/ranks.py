"""The ops of a model on several ranks: times of the slowest rank, and gathers.

Costs are those of one rank: a file that was measured with one thread gives ranks of one thread
each. An op takes as long as on the rank with the largest share of its weights or rows, and in
addition its gathers. Shares and gathers are those of `qllm.sharded`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from qllm.errors import ConfigError, shown
from qllm.plan import ModelShape
from qllm.scheduler.program import OpKind
from qllm.sharded.plan import ROWS_FROM, LayerShape, LayerShare, ShardShape, plan_of
from qllm.sim.timeline import NO_GATHERS, Gathers, Prices, SimCosts, Work

VALUE_BYTES = 2
"""Bytes of a value that ranks gather: they compute in bf16 alone."""
BEST_BYTES = 12
"""Bytes of a rank's best logit of a row, with its token id."""


@dataclass(frozen=True, slots=True)
class Link:
    """The time of a gather.

    Each rank receives the parts of all others, one after the other.
    """

    latency_ns: float
    """Time for each other rank, whatever the size of its part."""
    byte_ns: float
    """Time for each byte of its part."""

    def __post_init__(self) -> None:
        for name in ("latency_ns", "byte_ns"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 <= value < math.inf:
                raise ConfigError(
                    f"{name}={shown(value)} is no time of a gather; use a finite number >= 0"
                )

    def ns(self, gathers: Gathers, num_ranks: int) -> float:
        """Return the time of gathers. Parts of all ranks have the same size."""
        num, num_bytes = gathers
        return (num_ranks - 1) * (num * self.latency_ns + num_bytes / num_ranks * self.byte_ns)


SHARED_MEMORY = Link(610, 0)
"""Ranks of one host: a gather of two takes 0.61 us, and parts lie where all ranks read them
(`bench/engine/ranks.py`, docs/log)."""
GLOO_1_GBIT = Link(400_000, 9.4)
"""Hosts with gloo at 1 Gbit/s: two take 0.4 ms for 3 kB each, and 30 ms for 3.1 MB each
(`scripts/gather_hosts.py`, the least times). This is an upper bound: hosts of the engine have fewer
gathers, and compute while parts are on the way."""


class Strict(BaseModel):
    """A part of a file of costs. It refuses fields that it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class LayerSizes(Strict):
    """Sizes of a layer: those of `qllm.sharded.plan.LayerShape`, and widths that are gathered."""

    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_bytes: int = Field(ge=0)
    kv_head_bytes: int = Field(ge=0)
    num_experts: int = Field(ge=0)
    expert_bytes: int = Field(ge=0)
    expert_width: int = Field(ge=0)
    mlp_width: int = Field(ge=0)
    inner_bytes: int = Field(ge=0)
    down_bytes: int = Field(ge=0)
    whole_bytes: int = Field(ge=0)
    heads_width: int = Field(ge=1)
    """Inputs of the attention's output projection."""
    normed_width: int = Field(ge=0)
    """Width of queries and keys that are normed over all heads together; else 0."""
    out_bytes: int = Field(ge=0)
    """Bytes of the attention's output projection."""
    router_bytes: int = Field(ge=0)

    @property
    def shape(self) -> LayerShape:
        """The sizes by which the layer is split."""
        return LayerShape(*(getattr(self, name) for name in LayerShape._fields))


class RankSizes(Strict):
    """Sizes of a model that ranks can share. Layers of one kind are alike."""

    hidden: int = Field(ge=1)
    """Width of a token."""
    choice_bytes: int = Field(ge=0)
    """Bytes of one choice of a router: the number of an expert, and its weight."""
    range_rows: int = Field(ge=1)
    """Most rows of experts that run between two gathers, if ranks share each expert. A range may
    have fewer in the engine, because it has whole units of one expert."""
    moe: LayerSizes | None = None
    """Layers with experts."""
    dense: LayerSizes | None = None
    """Layers without experts."""

    def of(self, is_moe: bool) -> LayerSizes:
        """Return the sizes of a kind of layers.

        Raises:
            ConfigError: The sizes have no such layers.
        """
        found = self.moe if is_moe else self.dense
        if found is None:
            name = "with" if is_moe else "without"
            raise ConfigError(
                f"the sizes for ranks have no layer {name} experts, and the model has one; "
                "measure the costs again with `qllm calibrate`"
            )
        return found


class _Split(NamedTuple):
    """Parts of a layer's weights and values on the rank with the most of each."""

    sizes: LayerSizes
    columns: float
    heads: float
    kv_heads: float
    projections: float
    """Projections to queries, keys and values."""
    out: float
    """Part of the output projection in the weights of attention."""
    mlp: float
    router: float
    """Part of the router in the weights of router and shared experts."""
    cut: float | None
    """Part of each expert; None if experts are whole."""
    experts: tuple[int, ...]
    """Experts of each rank."""

    @classmethod
    def of(cls, sizes: LayerSizes, shares: Sequence[LayerShare], hidden: int) -> "_Split":
        heads = max(len(s.heads) for s in shares) / sizes.num_heads
        kv_heads = max(len(s.kv_heads) for s in shares) / sizes.num_kv_heads
        columns = max(len(s.columns) for s in shares) / hidden
        to_heads = sizes.num_heads * sizes.head_bytes
        to_kv = sizes.num_kv_heads * sizes.kv_head_bytes
        inner = sizes.mlp_width * sizes.inner_bytes
        down = hidden * sizes.down_bytes if sizes.mlp_width else 0
        most_inner = max(len(s.inner) for s in shares) / max(1, sizes.mlp_width)
        cuts = [s.cut for s in shares]
        cut = None
        if cuts[0] is not None:
            most = max(len(c.inner) for c in cuts if c is not None) / sizes.expert_width
            cut = (2 * most + columns) / 3  # two of an expert's three products have inner values
        return cls(
            sizes,
            columns,
            heads,
            kv_heads,
            _part(to_heads * heads + to_kv * kv_heads, to_heads + to_kv),
            _part(sizes.out_bytes, to_heads + to_kv + sizes.out_bytes),
            _part(inner * most_inner + down * columns, inner + down),
            _part(sizes.router_bytes, sizes.router_bytes + inner + down),
            cut,
            tuple(len(s.experts) for s in shares),
        )


def _part(num: float, total: float) -> float:
    return num / total if total else 0.0


def _binomial(size: int, chance: float) -> Any:
    """Return the likelihoods [size + 1] of numbers of successes."""
    logs = [
        math.lgamma(size + 1) - math.lgamma(k + 1) - math.lgamma(size - k + 1)
        + k * math.log(chance) + (size - k) * math.log1p(-chance)
        for k in range(size + 1)
    ]  # fmt: skip
    return np.exp(logs)


@lru_cache(maxsize=65536)
def most_experts(num_chosen: int, sizes: tuple[int, ...]) -> float:
    """Return the expected number of chosen experts of the rank that has most of them.

    Args:
        num_chosen: Distinct experts that are chosen, each choice as likely as the others.
        sizes: Experts of each rank.
    """
    if not 0 < num_chosen < sum(sizes):
        return float(max(sizes) if num_chosen else 0)
    likelihoods = [_binomial(size, num_chosen / sum(sizes)) for size in sizes]

    def likelihood(most: int) -> float:
        """Return how likely no rank has more than `most`."""
        found: Any = np.ones(1)
        for one in likelihoods:
            found = np.convolve(found, one[: most + 1])
        return float(found[num_chosen]) if num_chosen < len(found) else 0.0

    all_ways = likelihood(max(sizes))
    return sum(1 - likelihood(most) / all_ways for most in range(max(sizes)))


class RankPrices(Prices):
    """Units, times and gathers of ops on several ranks.

    Args:
        costs: Costs of the ops on one rank.
        shape: Sizes of the model that programs depend on.
        sizes: Sizes by which it is split.
        num_ranks: Number of ranks, at least 2.
        link: Time of a gather.

    Raises:
        ConfigError: The model cannot be split over so many ranks.
    """

    def __init__(
        self, costs: SimCosts, shape: ModelShape, sizes: RankSizes, num_ranks: int, link: Link
    ) -> None:
        super().__init__(costs, shape)
        self._sizes, self._num_ranks, self._link = sizes, num_ranks, link
        layers = tuple(sizes.of(is_moe).shape for is_moe in shape.is_moe)
        plans = plan_of(ShardShape(layers, sizes.hidden, shape.vocab_size, 0, 0), num_ranks).ranks
        self._splits = {
            is_moe: _Split.of(
                sizes.of(is_moe),
                [p.layers[shape.is_moe.index(is_moe)] for p in plans],
                sizes.hidden,
            )
            for is_moe in set(shape.is_moe)
        }
        self._vocabulary = max(len(p.vocabulary) for p in plans) / shape.vocab_size

    def gathers(self, kind: OpKind, work: Work, is_moe: bool) -> Gathers:
        """Return the gathers of an op, with the bytes that all ranks write."""
        rows = work.tokens
        if kind is OpKind.HEAD:
            return Gathers(1, self._num_ranks * work.rows * BEST_BYTES)
        if kind is OpKind.EMBED:
            return NO_GATHERS
        split, hidden = self._splits[is_moe], self._sizes.hidden
        top_k, sizes = self._shape.experts_per_token, split.sizes
        widths: list[int]
        match kind:
            case OpKind.ATTN:
                widths = [sizes.normed_width] if sizes.normed_width else []
                widths += [sizes.heads_width, hidden]
            case OpKind.ROUTE:
                choices = rows * top_k * self._sizes.choice_bytes
                widths = [sizes.mlp_width, hidden] if sizes.mlp_width else []
                found = _rows_of([hidden, *widths], rows)
                return Gathers(found.num, found.num_bytes + choices)
            case OpKind.EXPERTS if split.cut is None:
                widths = [top_k * hidden]
            case OpKind.EXPERTS:
                num_ranges = max(1, -(-rows * top_k // self._sizes.range_rows))
                found = _rows_of([top_k * sizes.expert_width, top_k * hidden], rows)
                return Gathers(num_ranges + 1, found.num_bytes)
            case _:
                widths = [hidden] if is_moe else [hidden, sizes.mlp_width, hidden]
        return _rows_of(widths, rows)

    def _time(self, kind: OpKind, work: Work, is_moe: bool) -> float:
        costs = self._of_slowest(kind, work, is_moe)
        computing = costs.of(kind, work, self._shape, is_moe=is_moe)
        return computing + self._link.ns(self.gathers(kind, work, is_moe), self._num_ranks)

    def _of_slowest(self, kind: OpKind, work: Work, is_moe: bool) -> SimCosts:
        """Return the costs of an op on the rank with the largest share."""
        costs, rows, num_ranks = self._costs, work.tokens, self._num_ranks
        if kind is OpKind.EMBED:
            return replace(costs, embed_token_ns=costs.embed_token_ns * self._vocabulary)
        if kind is OpKind.HEAD:
            part = self._vocabulary
            return replace(
                costs, head_ns=costs.head_ns * part, head_row_ns=costs.head_row_ns * part
            )
        split, of_rows = self._splits[is_moe], -(-rows // num_ranks) / rows
        if kind is OpKind.ATTN:
            is_by_rows = rows >= max(num_ranks, ROWS_FROM)
            own = (1 - split.out) * split.projections
            read = own + split.out * (1 if is_by_rows else split.columns)
            compute = own + split.out * (of_rows if is_by_rows else split.columns)
            return replace(
                costs,
                attn_ns=costs.attn_ns * read,
                attn_token_ns=costs.attn_token_ns * compute,
                attn_row_ns=costs.attn_row_ns * split.heads,
                kv_token_ns=costs.kv_token_ns * split.kv_heads,
                pair_ns=costs.pair_ns * split.heads,
            )
        if kind is OpKind.ROUTE:
            shared = (1 - split.router) * split.mlp
            return replace(
                costs,
                route_ns=costs.route_ns * (split.router + shared),
                route_token_ns=costs.route_token_ns * (split.router * of_rows + shared),
            )
        if kind is OpKind.EXPERTS:
            part = split.cut or self._most_of(costs.distinct_experts(rows, self._shape), split)
            return replace(
                costs,
                expert_ns=costs.expert_ns * part,
                expert_token_ns=costs.expert_token_ns * part,
            )
        return replace(
            costs,
            combine_token_ns=costs.combine_token_ns * of_rows,
            dense_ns=costs.dense_ns * split.mlp,
            dense_token_ns=costs.dense_token_ns * split.mlp,
        )

    def _most_of(self, num_chosen: int, split: _Split) -> float:
        return most_experts(num_chosen, split.experts) / num_chosen


def _rows_of(widths: Sequence[int], rows: int) -> Gathers:
    """Return the gathers of rows of values, one for each width."""
    return Gathers(len(widths), rows * sum(widths) * VALUE_BYTES)
