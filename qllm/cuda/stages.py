"""A step as captured stages of k consecutive layers, replayed by the host.

    first stage  embedding + layers [0, k)      ...      last stage  layers + norm + head + sampling

There are two classes, each with its own lane. Programs that may stop only between steps replay one
graph for the whole step. Others replay k layers at a time and may be parked between stages. A step
in whose middle rows of a cohort join or leave also runs k layers at a time, but is not parked.
Without a captured graph, the runner runs ops one by one, from the same frame. Reasons are a bucket
that is too small, a cohort that leaves in the middle of a stage, and settings that only the host
can sample by.
"""

import gc
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qllm.cuda.graphs import Graphs
from qllm.cuda.lanes import Bucket, Lane
from qllm.cuda.layers import DeviceLayers
from qllm.cuda.pages import Pages
from qllm.kernels.select import Kernels
from qllm.models.discover import ModelParts
from qllm.scheduler.program import OpKind, Ops, Program
from qllm.types import Grain


class Key(NamedTuple):
    """The identity of a graph."""

    whole: bool
    """True for the class whose stages are whole steps."""
    start: int
    end: int
    bucket: Bucket
    embed: bool
    head: bool

    def __str__(self) -> str:
        kind = "prefill" if self.bucket.prefill else "decode"
        more = "embedding, " * self.embed + "head, " * self.head
        return f"layers {self.start}-{self.end - 1} ({more}{self.bucket.tokens} tokens, {kind})"


class StagePart(NamedTuple):
    """The ops of a program that one stage covers."""

    key: Key
    group: int
    num_tokens: int
    end_op: int


class Body:
    """The computation of a stage, which reads and writes the tensors of its lane.

    Args:
        parts: Parts of the model.
        layers: Layers that run the parts.
        kernels: Kernels that sample and prepare steps.
        pages: The KV.
        rope: Cos and sin of every position, each [S, H].
    """

    def __init__(
        self,
        parts: ModelParts,
        layers: DeviceLayers,
        kernels: Kernels,
        pages: Pages,
        rope: tuple[Tensor, Tensor],
    ) -> None:
        self._parts, self._layers, self._kernels = parts, layers, kernels
        self._pages, self._rope = pages, rope

    def of(self, key: Key, lane: Lane) -> Callable[[], None]:
        """Return the function to capture."""
        return lambda: self._run(key, lane)

    def _run(self, key: Key, lane: Lane) -> None:
        parts, data = self._parts, lane.on_device
        num = key.bucket.tokens
        at = data["gather"][:num]
        if not key.embed:
            x = lane.hidden_SD.index_select(0, at)
        else:
            x = parts.embed(data["ids"][:num])
            if parts.embedding_multiplier is not None:
                x = x * parts.embedding_multiplier
        tables, tiles, slots = lane.step_tensors(key.bucket)
        step = self._layers.step(self._pages, tables, tiles, slots)
        cos, sin = (t.index_select(0, data["pos"][:num]).unsqueeze(0) for t in self._rope)
        for layer in range(key.start, key.end):
            x = self._layers.run(layer, x, (cos, sin), step, data["num_tokens"])
        if key.head:
            self._head(x, lane, min(lane.max_rows, num))
        else:
            lane.hidden_SD.index_copy_(0, at, x)

    def _head(self, x_TD: Tensor, lane: Lane, rows: int) -> None:
        parts, d = self._parts, lane.on_device
        logits = self._layers.head(parts.norm(x_TD.index_select(0, d["last"][:rows])))
        if parts.logit_rule is not None:
            logits = parts.logit_rule(logits)
        columns = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
        self._kernels.sample(
            logits, *(d[name][:rows] for name in columns), lane.tokens_R[:rows], lane.peaks_R[:rows]
        )


class Stages:
    """The captured graphs, and the choice of the next one.

    Args:
        graphs: Capturer.
        body: Computation of a stage.
        lanes: Lanes by class: whole steps, and stages.
        num_layers: L.
        layers_per_stage: k.
    """

    def __init__(
        self,
        graphs: Graphs,
        body: Body,
        lanes: dict[bool, Lane],
        num_layers: int,
        layers_per_stage: int,
    ) -> None:
        self._graphs, self._body, self.lanes = graphs, body, lanes
        self.num_layers, self.layers_per_stage = num_layers, layers_per_stage
        self.captured: dict[Key, Any] = {}
        self.num_replays = 0

    def keys(self, buckets: Iterable[Bucket]) -> list[Key]:
        """Return the keys of all stages: both classes, prefill with and without the head."""
        out = []
        for bucket in buckets:
            for whole in (True, False):
                k = self.num_layers if whole else self.layers_per_stage
                for start in range(0, self.num_layers, k):
                    end = min(start + k, self.num_layers)
                    is_last = end == self.num_layers
                    heads = (True, False) if is_last and bucket.prefill else (is_last,)
                    out += [Key(whole, start, end, bucket, start == 0, head) for head in heads]
        return out

    def capture(self, buckets: Iterable[Bucket]) -> None:
        """Capture every stage of the buckets.

        Raises:
            ModelError: A stage does something that a graph cannot contain.
        """
        gc.collect()  # freeing a graph during a capture would end that capture
        with torch.inference_mode():
            for key in self.keys(buckets):
                run = self._body.of(key, self.lanes[key.whole])
                self.captured[key] = self._graphs.capture(str(key), run)
        self._buckets = sorted({key.bucket for key in self.captured})

    def _bucket(self, num_tokens: int, prefill: bool) -> Bucket | None:
        fitting = (b for b in self._buckets if b.tokens >= num_tokens and b.prefill == prefill)
        return next(fitting, None)

    def part(self, program: Program, op: int, grain: Grain, can_sample: bool) -> StagePart | None:
        """Return the stage whose first op this is, if a graph was captured for it.

        Args:
            program: The program that runs.
            op: Index of the op.
            grain: Finest boundary at which the program may stop now.
            can_sample: True if the device can sample all rows that need it.
        """
        whole = grain is Grain.STEP
        part = self._part(program, op, can_sample, whole)
        # a step that rows of a cohort leave in the middle runs by stages, and is not parked
        return self._part(program, op, can_sample, False) if whole and part is None else part

    def _part(self, program: Program, op: int, can_sample: bool, whole: bool) -> StagePart | None:
        ops, k = program.ops, self.num_layers if whole else self.layers_per_stage
        found = _cover(ops, op, k, self.num_layers) if isinstance(ops, Ops) else None
        if found is None:
            return None
        start, end, group, end_op, embed = found
        rows = [program.rows[r] for r in program.groups[group]]
        num = sum([row.num_tokens for row in rows])
        bucket = self._bucket(num, any(row.num_tokens > 1 for row in rows))
        if bucket is None or len(rows) > self.lanes[whole].max_rows:
            return None
        last = ops[end_op] if can_sample and end_op < len(ops) else None
        # if rows that wait at the last layer sample too, the head is an op of its own
        head = (
            last is not None
            and last.kind is OpKind.HEAD
            and set(program.groups[last.group]) <= set(program.groups[group])
        )
        key = Key(whole, start, end, bucket, embed, head)
        if key not in self.captured:
            return None
        return StagePart(key, group, num, end_op + head)

    def replay(self, key: Key) -> None:
        """Launch a stage on the data of its lane."""
        self.captured[key].replay()
        self.num_replays += 1


def _cover(ops: Ops, op: int, k: int, num_layers: int) -> tuple[int, int, int, int, bool] | None:
    """Return the stage of k layers that begins at an op; None if the ops are not such a stage.

    Returns:
        The first and end layer, the group, the op after the stage, and True if the stage begins
            with the embedding.
    """
    at, start, end, end_layer, group, embed = 0, -1, -1, -1, -1, False
    for stretch in ops.stretches:
        num = stretch.num_ops * (stretch.end - stretch.start)
        kind, spans = stretch.parts[0]
        if start < 0 and at == op and kind is OpKind.EMBED:
            embed, group, op = True, stretch.group, op + 1
        elif start < 0 and at <= op < at + num:
            layer, inside = divmod(op - at, stretch.num_ops)
            start = end = stretch.start + layer
            end_layer = min(start + k, num_layers)
            is_other = embed and stretch.group != group
            if inside or is_other or start % k or kind is not OpKind.ATTN or len(spans) > 1:
                return None
            group = stretch.group
        if start >= 0:
            if kind is not OpKind.ATTN or stretch.group != group:
                return None
            end = min(stretch.end, end_layer)
            if end == end_layer:
                return start, end, group, at + stretch.num_ops * (end - stretch.start), embed
        at += num
    return None
