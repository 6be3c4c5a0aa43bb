"""The rule that cuts ops by rows. It depends only on the configuration and the kernels.

If this project's kernels run every layer, an op polls before each of its tasks. Such an op gets as
many rows as fit in `course.OP_BYTES` bytes, whatever the speed of the machine.

Other layers poll between ops. These ops are cut by nominal costs of one core of a Zen 4 server,
rounded towards slow. A cut has at least as many rows as can be multiplied in the time of reading
the weights. A faster machine gets shorter segments than necessary. A slower machine, or a model of
large layers, exceeds the bound; `segments` in the statistics contains the excess.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from qllm.kernels import cpu
from qllm.kernels.cpu import course
from qllm.kernels.cpu.attention import KEY_BLOCK
from qllm.models.discover import LayerParts, ModelParts
from qllm.models.weights.quantised_experts import quantised_in
from qllm.models.weights.quantised_linears import linear_in
from qllm.plan import NO_CUTS, CutRule

NS_PER_MS = 1_000_000
BYTES_PER_NS = 6.0
"""Bytes of weights streamed from memory per nanosecond."""
CODE_BYTES_PER_NS = 10.0
"""Bytes of quantised weights per nanosecond, including scales and dequantisation. 16 were
measured."""
FLOPS_PER_NS = {torch.bfloat16: 180.0, torch.float32: 60.0, torch.float16: 20.0}
ATTN_FLOPS_PER_NS = {torch.bfloat16: 70.0, torch.float32: 25.0, torch.float16: 10.0}
PAIRS_FLOPS_PER_NS = 120.0
"""Attention FLOPs per nanosecond of kernels whose instruction sums pairs of bfloat16."""
GLUE_NS_PER_VALUE = 3.0
"""Nanoseconds of norms, rotations and sums per token and value of the residual stream."""
PAIRS_GLUE_NS_PER_VALUE = 1.0
"""Nanoseconds of norms, rotations and sums, as above, in layers with such kernels."""
COMBINE_NS_PER_VALUE = 2.0
"""Nanoseconds of gather, scale and sum per token, expert and value."""
SCORE_NS_PER_VALUE = 15.0
"""Nanoseconds per logit of log-softmax and of finding the largest values."""
LOGITS_AT_ONCE = 1 << 22
"""Most logits of prompt tokens that are in memory at once."""
KEY_QUERIES = 16
"""Queries per block of an attention that stops between keys, if the projections fit."""
CHUNK_BLOCK = 64
"""Queries per block if chunks of a prompt end with a block, and more blocks cost nothing."""
LEAST_AROUND, MOST_AROUND = 64, 512
"""Fewest and most queries of a block, if every block calls the layer's own forward."""
FEW_MORE = 1.25
"""Most keys of the last segment, relative to the keys of the earlier segments."""
FILL = 0.6
"""Share of `max_segment_ms` that nominal costs may fill."""


@dataclass(frozen=True, slots=True)
class CutCosts:
    """Nominal nanoseconds, and the number of rows that fit into the memory of an op."""

    range_rows: int
    """Most rows of one range of expert work units. A range has at least one unit."""
    range_ns: float
    """Target time of one range of expert work units."""
    unit_ns: float
    """Time to read one expert's weights."""
    row_ns: float
    """Time of one row through an expert."""
    head_ns: float
    """Time to read the output head's weights."""
    head_row_ns: float
    """Time of one row through the output head."""
    segment_ns: float
    """Longest time of a segment."""
    read_ns: float
    """Time to read the weights of an attention."""
    attn_ns: float
    """Time that `read_ns` leaves of `segment_ns`, at least a quarter of `segment_ns`."""
    project_ns: float
    """Time of one token through the projections of an attention."""
    query_key_ns: float
    """Time of attention between one query and one key."""
    key_ns: float
    """Time to read one key and one value."""
    glue_ns: float
    """Time to read a router and its shared experts."""
    glue_row_ns: float
    """Time of one row through them."""
    dense_ns: float
    """Time to read the MLP of a layer without experts."""
    dense_row_ns: float
    """Time of one row through it."""

    def keys(self, num_tokens: int, num_spans: int, left: int) -> int:
        """Return the number of keys of the next segment for `num_tokens` queries.

        Each span has its own keys. If the `left` keys are few more than fit, all are returned,
        because the rest is not worth a segment.
        """
        free = max(self.attn_ns - num_tokens * self.project_ns, self.segment_ns / 4)
        each = num_tokens * self.query_key_ns + num_spans * self.key_ns
        num = max(1, int(min(free / each, 1 << 40)) // KEY_BLOCK) * KEY_BLOCK
        return max(left, num) if left <= FEW_MORE * num else num

    def head_blocks(self, num_rows: int, num_blocks: int) -> int:
        """Return the number of vocabulary blocks per segment for that many rows."""
        total = self.head_ns + num_rows * self.head_row_ns
        return int(max(1.0, min(num_blocks, self.segment_ns * num_blocks / total)))

    def rows_at_once(self, num_blocks: int, vocab_size: int) -> int:
        """Return the number of prompt tokens whose logits are computed together."""
        most = max(1, LOGITS_AT_ONCE // vocab_size)
        fit = (self.segment_ns * num_blocks - self.head_ns) / self.head_row_ns
        return _power_of_two(min(fit, most), 1, most)

    def rows_to_read(self, vocab_size: int) -> int:
        """Return the rows of logits per segment for which log-probabilities are computed."""
        return max(1, int(min(self.segment_ns / (SCORE_NS_PER_VALUE * vocab_size), 1 << 20)))


def _weights(module: Any) -> int:
    return 0 if module is None else sum(p.numel() for p in module.parameters() if p.dim() > 1)


def _read_ns(module: Any, item: int) -> float:
    """Return the time to read a module's weights once, in the format in which they are stored."""
    if module is None:
        return 0.0
    packed = [held for m in module.modules() if (held := linear_in(m)) is not None]
    plain = _weights(module) - sum(math.prod(held.weight.shape) for held in packed)
    codes = sum(held.num_bytes for held in packed)
    return plain * item / BYTES_PER_NS + codes / CODE_BYTES_PER_NS


def _expert_ns(experts: Any, weights: int, item: int) -> float:
    """Return the time to read the weights of one expert."""
    held = quantised_in(experts)
    if held is None:
        return weights * item / BYTES_PER_NS
    return held.num_bytes / held.num_experts / CODE_BYTES_PER_NS


def _power_of_two(most: float, low: int = 16, high: int = 1024) -> int:
    size = low
    while size * 2 <= min(most, high):
        size *= 2
    return size


def _rows_as_long(read_ns: float, row_ns: float) -> int:
    """Return the number of rows that multiply while weights are read, a power of two."""
    size = 1
    while size * row_ns < read_ns:
        size *= 2
    return size


class _Attn(NamedTuple):
    """The nominal nanoseconds of one layer's attention."""

    read: float
    """Time to read the weights of the attention."""
    project: float
    """Time of one token through the projections of the attention."""
    query_key: float
    key: float


def _heads(attn: Any, config: Any) -> int:
    """Return the query heads of the module, or of the config if all layers are alike."""
    found = getattr(attn, "num_heads", None) or getattr(attn, "num_attention_heads", None)
    return int(found or config.num_attention_heads)


def _attn_ns(
    parts: LayerParts, config: Any, dtype: torch.dtype, width: int, in_pairs: bool
) -> _Attn:
    attn: Any = parts.self_attn
    weights, item = _weights(attn), dtype.itemsize
    if attn is None:
        return _Attn(0.0, 1.0, 0.0, 0.0)
    heads = _heads(attn, config)
    if hasattr(attn, "kv_lora_rank"):  # key: the latent and the rotated values; value: the latent
        key, value = attn.kv_lora_rank + attn.qk_rope_head_dim, attn.kv_lora_rank
        stored = key
    else:
        key = value = getattr(attn, "head_dim", None) or width // heads
        groups = getattr(config, "num_key_value_heads", None) or heads
        stored = 2 * groups * key
    glue = PAIRS_GLUE_NS_PER_VALUE if in_pairs else GLUE_NS_PER_VALUE
    flops = PAIRS_FLOPS_PER_NS if in_pairs else ATTN_FLOPS_PER_NS[dtype]
    return _Attn(
        _read_ns(attn, item),
        2 * weights / FLOPS_PER_NS[dtype] + glue * width * 4,
        2 * heads * (key + value) / flops,
        stored * item / BYTES_PER_NS,
    )


def cut_rule(
    parts: ModelParts,
    config: Any,
    max_segment_ms: float,
    *,
    polls_inside: bool = False,
    stops_between_keys: bool = False,
    batch_invariant: bool = False,
) -> tuple[CutRule, CutCosts]:
    """Return the rule that cuts a model's ops for a bound on segments, and the nominal costs.

    Args:
        parts: Parts of the model.
        config: Config of the model.
        max_segment_ms: Most milliseconds of a segment. Infinity leaves ops whole.
        polls_inside: True if every layer runs in `runner.sweep`, which polls inside ops.
        stops_between_keys: True if attention stops between blocks of keys. Then blocks of queries
            at late positions may keep `KEY_QUERIES` queries.
        batch_invariant: True at level L2, where a chunk of a prompt ends with a block of queries.
    """
    dtype = parts.like.dtype
    flops = FLOPS_PER_NS.get(dtype, 20.0)
    width = parts.lm_head.in_features
    item = parts.like.element_size()
    segment = max_segment_ms * NS_PER_MS * FILL
    moe: Any = next((x.experts for x in parts.layers if x.experts is not None), None)
    one = (moe.gate_up_proj[0].numel() + moe.down_proj[0].numel()) if moe is not None else 0
    head = parts.lm_head.weight.numel()
    in_pairs = stops_between_keys and cpu.kind() in cpu.SUM_PAIRS
    all_ns = [_attn_ns(layer, config, dtype, width, in_pairs) for layer in parts.layers]
    attn = _Attn(*map(max, zip(*all_ns, strict=True)))
    free = max(segment - attn.read, segment / 4)
    room = _room_of(parts, config, width)
    dense = [layer.mlp for layer in parts.layers if not layer.is_moe]
    costs = CutCosts(
        range_rows=room.rows(room.expert),
        read_ns=attn.read,
        attn_ns=free,
        project_ns=attn.project,
        query_key_ns=attn.query_key,
        key_ns=attn.key,
        range_ns=min(1e6, segment),
        unit_ns=_expert_ns(moe, one, item),
        row_ns=2 * one / flops,
        head_ns=_read_ns(parts.lm_head, item),
        head_row_ns=2 * head / flops,
        segment_ns=segment,
        glue_ns=max(_read_ns(x.shared, item) + _read_ns(x.router, item) for x in parts.layers),
        glue_row_ns=2 * max(_weights(x.shared) + _weights(x.router) for x in parts.layers) / flops,
        dense_ns=max((_read_ns(mlp, item) for mlp in dense), default=0.0),
        dense_row_ns=2 * max(map(_weights, dense), default=0) / flops,
    )
    if max_segment_ms == float("inf"):
        return NO_CUTS, costs
    if polls_inside:
        rule = room.cuts()
        rule = rule._replace(max_block=CHUNK_BLOCK) if batch_invariant else rule
        return rule, replace(costs, range_ns=math.inf)
    if parts.around is not None:
        return _around_cuts(parts, costs), costs
    route = costs.glue_row_ns + GLUE_NS_PER_VALUE * width * 2
    combine = COMBINE_NS_PER_VALUE * width * (parts.shape.experts_per_token + 2)
    least = _rows_as_long(attn.read, attn.project)
    keeps = _power_of_two(free / attn.project, 1, KEY_QUERIES) if stops_between_keys else 1
    rule = CutRule(
        max_cost=max(float(least), free / attn.project),
        attn_cost_per_kv=attn.query_key / attn.project,
        min_block=min(max(least, keeps), MOST_AROUND),
        glue_block=_block(costs.glue_ns, costs.glue_row_ns, segment / max(route, combine)),
        dense_block=_block(
            costs.dense_ns, costs.dense_row_ns, segment / max(costs.dense_row_ns, 1.0)
        ),
        expert_block=_expert_block(costs),
    )
    return rule, costs


def bound_of(rule: CutRule, costs: CutCosts) -> str:
    """Return, as text, the nominal time of the longest op if a rule cuts the ops by rows."""
    if rule.glue_block == NO_CUTS.glue_block:
        return "some as long as a step"
    attn = costs.read_ns + rule.max_cost * costs.project_ns
    expert = costs.unit_ns + rule.expert_block * costs.row_ns
    glue = costs.glue_ns + rule.glue_block * costs.glue_row_ns
    dense = costs.dense_ns + rule.dense_block * costs.dense_row_ns
    return f"nominal {max(attn, expert, glue, dense) / NS_PER_MS:.1f} ms"


def _block(read_ns: float, row_ns: float, most: float) -> int:
    """Return the most rows of an op, a power of two.

    The rows take at least as long to multiply as the weights take to read.
    """
    least = _rows_as_long(read_ns, max(row_ns, 1.0))
    return _power_of_two(most, low=min(max(16, least), 1024))


def _expert_block(costs: CutCosts) -> int:
    unit = costs.segment_ns - costs.range_ns  # a range ends with the unit that exceeds `range_ns`
    free = max(unit - costs.unit_ns, costs.segment_ns / 4)
    return _block(costs.unit_ns, costs.row_ns, free / max(costs.row_ns, 1.0))


class _Room(NamedTuple):
    """The bytes of memory of a token, or of a row of an expert, during an op."""

    attn: int
    glue: int
    dense: int
    expert: int

    def rows(self, num_bytes: int) -> int:
        """Return the number of rows, each of `num_bytes`, that fit; at least 16."""
        return max(16, course.OP_BYTES // max(1, num_bytes))

    def cuts(self) -> CutRule:
        """Return the rule that gives ops as many rows as fit."""
        return CutRule(
            max_cost=float(self.rows(self.attn)),
            attn_cost_per_kv=0.0,
            glue_block=_power_of_two(self.rows(self.glue), high=1 << 16),
            dense_block=_power_of_two(self.rows(self.dense), high=1 << 16),
            expert_block=_power_of_two(self.rows(self.expert)),
        )


def _room_of(parts: ModelParts, config: Any, width: int) -> _Room:
    """Return the memory of ops: inputs as kernels read them, and results between two products."""
    item = parts.like.element_size()
    attn = max((_attn_room(x.self_attn, config, width) for x in parts.layers), default=0)
    shared = max((_widest(x.shared) for x in parts.layers), default=0)
    dense = max((_widest(x.mlp) for x in parts.layers if not x.is_moe), default=0)
    moe: Any = next((x.experts for x in parts.layers if x.experts is not None), None)
    hidden = 0 if moe is None else moe.down_proj[0].numel() // width
    return _Room(
        attn * item,
        (width + 3 * shared) * item + parts.shape.num_experts * 4,
        (2 * width + 3 * dense) * item,
        (width + 4 * hidden) * item,
    )


def _linears(module: Any) -> list[nn.Linear]:
    return [] if module is None else [m for m in module.modules() if isinstance(m, nn.Linear)]


def _widest(mlp: Any) -> int:
    return max((m.out_features for m in _linears(mlp)), default=0)


def _attn_room(attn: Any, config: Any, width: int) -> int:
    """Return the number of a token's values: projections, queries, outputs, and sums in fp32."""
    if attn is None:
        return width
    heads = _heads(attn, config)
    value = getattr(attn, "kv_lora_rank", None) or getattr(attn, "head_dim", None)
    value = value or width // heads
    return width + sum(m.out_features for m in _linears(attn)) + 6 * heads * int(value)


def _around_cuts(parts: ModelParts, costs: CutCosts) -> CutRule:
    """Return the rule for layers that run by the model's own code: cuts of queries and experts."""
    rule = NO_CUTS._replace(expert_block=_expert_block(costs))
    assert parts.around is not None
    if not parts.around.goes_on:
        return rule  # the layer would compute a second block token by token
    return rule._replace(
        max_cost=max(float(LEAST_AROUND), costs.attn_ns / costs.project_ns),
        attn_cost_per_kv=costs.query_key_ns / costs.project_ns,
        min_block=LEAST_AROUND,
        max_block=MOST_AROUND,
    )
