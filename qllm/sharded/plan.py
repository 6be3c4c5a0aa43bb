"""The split of a model over ranks. A rank computes with its share of the weights.

    heads         query heads in order, with the KV heads that they read
    columns       outputs of a product, in multiples of 64
    experts       a range of inner values and a range of outputs of each expert, in multiples of
                  64; or, of experts that cannot be cut evenly, whole experts
    vocabulary    rows of the embedding and of the output head, in multiples of 64

Shares split the outputs of products, never the inputs: an element has one sum, on one rank. Fewer
KV heads than ranks are replicated. The latents of MLA are one KV head, so all ranks hold them.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from qllm.errors import ConfigError, shown

PANEL = 64
"""Outputs that kernels compute together. A split inside a panel would pack it twice."""
ROWS_FROM = 16
"""Least rows of an ATTN op whose output projection is split by rows. With fewer rows, each rank
computes some columns of all rows, and reads a part of the weight."""
PIECE_ROWS = 128
"""Least rows of a piece of an op. A rank on another host gets an op's rows in up to four pieces, of
which it gets one while the next is computed."""
UNEVEN = 1.25
"""Most panels of a rank over their mean, for experts that ranks share. Two ranks that have whole
experts, 64 each, do 1.27 times the mean for a token of 8 experts."""


class LayerShape(NamedTuple):
    """Sizes of one layer, with bytes of weights."""

    num_heads: int
    num_kv_heads: int
    """KV heads; 1 if the cache holds latents."""
    head_bytes: int
    """Bytes of the projection to one query head, and to its gate."""
    kv_head_bytes: int
    """Bytes of the projections to one KV head."""
    num_experts: int
    """Routed experts; 0 in a dense layer."""
    expert_bytes: int
    expert_width: int
    """Inner values of an expert."""
    mlp_width: int
    """Inner width of the dense MLP or of the shared experts; 0 without them."""
    inner_bytes: int
    """Bytes of the two projections to one inner value of the MLP."""
    down_bytes: int
    """Bytes of the MLP's projection to one output."""
    whole_bytes: int
    """Bytes that every rank holds: norms, router, and the attention's output projection."""


class ShardShape(NamedTuple):
    """Sizes of a model, with bytes of weights."""

    layers: tuple[LayerShape, ...]
    hidden: int
    """Width of a token."""
    vocab_size: int
    token_bytes: int
    """Bytes of one token id in the embedding and in the output head."""
    whole_bytes: int
    """Bytes outside of layers that every rank holds."""


class ExpertShare(NamedTuple):
    """The share of a rank in each expert of a layer."""

    inner: range
    columns: range


class LayerShare(NamedTuple):
    """The share of a rank in one layer."""

    heads: range
    kv_heads: range
    """KV heads that the rank's query heads read."""
    columns: range
    """Outputs of the projections to the residual stream."""
    experts: range
    """Experts of which the rank has weights."""
    cut: ExpertShare | None
    """Share of the rank in each of them; None is all."""
    inner: range
    """Inner values of the dense MLP or of the shared experts."""


class RankPlan(NamedTuple):
    """The share of one rank."""

    rank: int
    layers: tuple[LayerShare, ...]
    vocabulary: range
    num_bytes: int
    """Bytes of the rank's weights."""


class ShardPlan(NamedTuple):
    """The shares of all ranks."""

    shape: ShardShape
    ranks: tuple[RankPlan, ...]

    def __str__(self) -> str:
        """Return a table with a line per rank. Heads and experts are those of the widest layer."""
        layers = range(len(self.shape.layers))
        wide = max(layers, key=lambda i: self.shape.layers[i].num_experts, default=0)
        width = self.shape.layers[wide].expert_width if self.shape.layers else 0
        heads = ("rank", "heads", "KV heads", "columns", "experts", "of each", "vocabulary", "MB")
        rows: list[tuple[str, ...]] = [heads]
        for one in self.ranks:
            share = one.layers[wide]
            each = range(width if share.experts else 0) if share.cut is None else share.cut.inner
            found = share.heads, share.kv_heads, share.columns, share.experts, each, one.vocabulary
            rows.append((str(one.rank), *map(_text, found), f"{one.num_bytes / 1e6:.1f}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(x.rjust(w) for x, w in zip(row, widths, strict=True)) for row in rows
        )


def _text(found: range) -> str:
    return f"{found.start}-{found.stop - 1}" if found else "none"


def even(num: int, parts: int) -> list[range]:
    """Return consecutive ranges of [0, num). The first ranges may be longer than others by one."""
    least, rest = divmod(num, parts)
    ends = [(i + 1) * least + min(i + 1, rest) for i in range(parts)]
    return [range(a, b) for a, b in pairwise([0, *ends])]


def in_panels(num: int, parts: int) -> list[range]:
    """Return consecutive ranges of [0, num) that start at multiples of 64, or at the end."""
    panels = even(-(-num // PANEL), parts)
    return [range(min(num, p.start * PANEL), min(num, p.stop * PANEL)) for p in panels]


def split_heads(num: int, num_kv: int, tp: int) -> list[tuple[range, range]]:
    """Return the query heads of each rank, and the KV heads that they read.

    Args:
        num: Query heads, at least `tp`. With several ranks it is a multiple of `num_kv`.
        num_kv: KV heads. If there are fewer than ranks, neighbouring ranks share one.
        tp: Number of ranks.
    """
    if tp == 1:
        return [(range(num), range(num_kv))]
    per = num // num_kv
    if num_kv >= tp:
        return [(range(kv.start * per, kv.stop * per), kv) for kv in even(num_kv, tp)]
    found = []
    for kv, ranks in enumerate(even(tp, num_kv)):
        for own in even(per, len(ranks)):
            found.append((range(kv * per + own.start, kv * per + own.stop), range(kv, kv + 1)))
    return found


def without_copies(heads: Sequence[range]) -> list[tuple[int, int]]:
    """Return ranks that have all heads together, each once.

    Args:
        heads: Heads of each rank. Several ranks may have the same head.

    Returns:
        For each of these ranks, its number, and how many of its first heads an earlier one has.
    """
    found, end = [], 0
    for rank, own in enumerate(heads):
        if own.stop > end:
            found.append((rank, end - own.start))
            end = own.stop
    return found


def plan_of(shape: ShardShape, tp: int) -> ShardPlan:
    """Return the share of each of `tp` ranks.

    Raises:
        ConfigError: The model cannot be split over so many ranks.
    """
    _refuse(shape, tp)
    layers = [_split_layer(layer, shape.hidden, tp) for layer in shape.layers]
    ranks = []
    for rank, ids in enumerate(in_panels(shape.vocab_size, tp)):
        shares = tuple(shares[rank] for shares in layers)
        both = zip(shape.layers, shares, strict=True)
        sizes = [_bytes_of(layer, shape.hidden, share) for layer, share in both]
        total = shape.whole_bytes + len(ids) * shape.token_bytes + sum(sizes)
        ranks.append(RankPlan(rank, shares, ids, total))
    return ShardPlan(shape, tuple(ranks))


def _split_layer(layer: LayerShape, hidden: int, tp: int) -> list[LayerShare]:
    heads = split_heads(layer.num_heads, layer.num_kv_heads, tp)
    columns, experts = in_panels(hidden, tp), even(layer.num_experts, tp)
    cuts: list[ExpertShare | None] = [None] * tp
    if can_cut(layer, hidden, tp):
        experts = [range(layer.num_experts)] * tp
        own = zip(in_panels(layer.expert_width, tp), columns, strict=True)
        cuts = [ExpertShare(*ranges) for ranges in own]
    inner = in_panels(layer.mlp_width, tp)
    return [LayerShare(*heads[i], columns[i], experts[i], cuts[i], inner[i]) for i in range(tp)]


def can_cut(layer: LayerShape, hidden: int, tp: int) -> bool:
    """Return True if each of `tp` ranks gets about the same share of each expert, on panels."""
    if not layer.num_experts or layer.expert_width % PANEL or tp == 1:
        return False
    panels = [-(-num // PANEL) for num in (layer.expert_width, hidden)]
    return all(tp <= num and -(-num // tp) * tp <= UNEVEN * num for num in panels)


def _expert_bytes(layer: LayerShape, hidden: int, share: LayerShare) -> int:
    """Return the bytes of the experts of a rank. A third of an expert's are those of `down`."""
    whole = len(share.experts) * layer.expert_bytes
    if share.cut is None:
        return whole
    inner, columns = map(len, share.cut)
    width = layer.expert_width
    return whole * (2 * inner * hidden + columns * width) // (3 * hidden * width)


def _bytes_of(layer: LayerShape, hidden: int, share: LayerShare) -> int:
    return (
        layer.whole_bytes
        + len(share.heads) * layer.head_bytes
        + len(share.kv_heads) * layer.kv_head_bytes
        + _expert_bytes(layer, hidden, share)
        + len(share.inner) * layer.inner_bytes
        + len(share.columns) * (layer.down_bytes if layer.mlp_width else 0)
    )


def _refuse(shape: ShardShape, tp: object) -> None:
    """Refuse a number of ranks that the model cannot be split over."""
    for i, layer in enumerate(shape.layers):
        if layer.num_heads % layer.num_kv_heads and tp != 1:
            raise ConfigError(
                f"tp={shown(tp)} cannot split layer {i}: its {layer.num_heads} query heads are no "
                f"multiple of its {layer.num_kv_heads} KV heads; use tp=1"
            )
    heads, at_heads = _least(shape, lambda layer: layer.num_heads)
    experts, at_experts = _least(shape, lambda layer: layer.num_experts)
    most, what = heads, f"layer {at_heads} has {heads} query heads"
    if experts < heads:
        most, what = experts, f"layer {at_experts} has {experts} experts"
    allowed = f"use a whole number from 1 to {most}" if most > 1 else "use tp=1"
    if type(tp) is not int or tp < 1:
        raise ConfigError(f"tp={shown(tp)} is no number of ranks; {allowed}")
    if tp > most:
        raise ConfigError(f"tp={tp} is too many ranks: {what}, and each rank needs one; {allowed}")


def _least(shape: ShardShape, size: Callable[[LayerShape], int]) -> tuple[int, int]:
    """Return the smallest size of a layer that is not 0, and the number of the layer."""
    found = [(size(layer), i) for i, layer in enumerate(shape.layers) if size(layer)]
    return min(found, default=(1 << 30, 0))
