"""A model split over ranks, and the steps of one rank.

embedding    rows of own token ids           -> all rows
layers       see `qllm.sharded.layer`
head         logits of own token ids         -> the best of all ranks, or all logits
"""

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qllm.errors import InvariantError, ModelError
from qllm.kernels import cpu
from qllm.kernels.cpu import course
from qllm.models.discover import ModelParts, base_model, discover
from qllm.models.unsafe import refuse_unsafe
from qllm.models.weights.activations import read_rows
from qllm.plan import Row
from qllm.runner.frame import RequestState
from qllm.runner.heads import HeadState
from qllm.runner.inference import inference
from qllm.runner.kv import SlabKV
from qllm.runner.layers.attention import Span, Step
from qllm.runner.layers.experts import expert_banks
from qllm.runner.layers.linears import Head, HeadBlocks
from qllm.runner.layers.native_experts import NativeBank
from qllm.runner.layers.native_parts import norm_of
from qllm.runner.layers.rows import PLAIN
from qllm.runner.protocol import NEVER
from qllm.runner.rope import Ropes
from qllm.sharded.group import Form, Member, joined
from qllm.sharded.layer import RankLayer
from qllm.sharded.plan import ShardPlan, plan_of
from qllm.sharded.weights import LayerWeights, refuse_unsplit, shape_of
from qllm.types import Grain, RequestId


class SplitModel(NamedTuple):
    """A model and its split. The modules keep their weights, which ranks copy or share."""

    model: nn.Module
    parts: ModelParts
    plan: ShardPlan
    banks: tuple[NativeBank | None, ...]
    """Routed experts of every layer; None for a dense layer."""


def split_model(
    model: nn.Module, tp: int, *, expert_weights: str = "auto", activations: str = "bf16"
) -> SplitModel:
    """Return the split of a model over `tp` ranks.

    Args:
        model: Whole model in evaluation mode, which no runner drives.
        tp: Number of ranks.
        expert_weights: Format of experts: see `EngineConfig`. Formats of 4 bits round the model's
            weights permanently.
        activations: Dtype of the inputs of quantised products: see `EngineConfig`. The model's own
            forward uses them too.

    Raises:
        ModelError: A part of the model cannot be split.
        ConfigError: The model cannot be split over so many ranks, or has no such experts.
    """
    refuse_unsafe(model)
    with inference():
        parts = discover(model)
        refuse_unsplit(base_model(model).config.model_type, parts)
        plan = plan_of(shape_of(parts), tp)
        read_rows(model, activations)
        found = expert_banks(parts, PLAIN, True, expert_weights, activations)
    banks = tuple(bank if isinstance(bank, NativeBank) else None for bank in found)
    return SplitModel(model, parts, plan, banks)


class Best(NamedTuple):
    """The largest logit of a position among some token ids. NaN is larger than any number."""

    logit: float
    token_id: int


def best_of(found: Sequence[Best]) -> Best:
    """Return the largest logit, of equal ones the lowest id, from ranks in ascending order of ids.

    Args:
        found: The best of each rank.
    """
    best = found[0]
    for other in found[1:]:
        if other.logit > best.logit or (math.isnan(other.logit) and not math.isnan(best.logit)):
            best = other
    return best


class Rank:
    """One rank of a model: its share of the weights, and the KV of its heads.

    All ranks get the same calls in the same order.

    Args:
        split: Model and its split.
        member: Rank in its group.
        rows_from: Number of tokens of a step from which rows are split between products. A step
            with fewer tokens than ranks has whole rows.
    """

    def __init__(self, split: SplitModel, member: Member, rows_from: int) -> None:
        if len(split.plan.ranks) != member.size:
            raise InvariantError(
                f"a split over {len(split.plan.ranks)} ranks runs on {member.size} ranks"
            )
        parts, arena = split.parts, cpu.Arena()
        self.member, self._rows_from = member, rows_from
        self.plan = own = split.plan.ranks[member.rank]
        self.requests: dict[RequestId, RequestState] = {}
        self._parts, self._vocabularies = parts, [rank.vocabulary for rank in split.plan.ranks]
        with inference():
            given = zip(parts.layers, own.layers, split.banks, strict=True)
            self._layers = [
                RankLayer(LayerWeights.of(layer), share, bank, member, arena)
                for layer, share, bank in given
            ]
            slabs = {layer.attention.kernel.slab for layer in self._layers}
            if len(slabs) > 1:
                raise ModelError(f"layers have KV of several shapes: {sorted(slabs)}; use one rank")
            embed: Any = parts.embed
            self._table = embed.weight.detach()[own.vocabulary.start : own.vocabulary.stop]
            norm = norm_of(parts.norm)
            self._head = Head(parts.lm_head, norm, PLAIN, True, arena, own.vocabulary)
            # A rotary module may change its buffers in a call, so each rank has one.
            rotary = copy.deepcopy(parts.rotary_emb)
            own_parts = dataclasses.replace(parts, rotary_emb=rotary)
            like = parts.like
            self._ropes = Ropes(split.model, own_parts, like.device, like.dtype)

    def add(self, request_id: RequestId, token_ids: Sequence[int], capacity: int) -> None:
        """Register a request of at most `capacity` tokens."""
        kv = SlabKV(self._parts.num_kv_layers, capacity, self._parts.kv_layers)
        self.requests[request_id] = RequestState(list(token_ids), len(token_ids), kv)

    def run(self, rows: Sequence[Row]) -> Tensor:
        """Run rows through all layers, and commit their KV.

        Args:
            rows: Positions of requests, the rows of one step.

        Returns:
            The normed hidden states of the last token of each row, [B, D].
        """
        with inference():
            ids: list[int] = []
            spans, ends = [], []
            for row in rows:
                request = self.requests[row.request_id]
                request.check(row)
                spans.append(Span(request.kv, len(ids), row.lo, row.hi))
                ids += request.ids[row.lo : row.hi]
                ends.append(len(ids) - 1)
            num, member = len(ids), self.member
            form = Form(member, num, split=num >= max(self._rows_from, member.size))
            rope = self._ropes.rows(rows, self.requests).of(0, 0, num, None)
            x_TD, step = self._embed(ids), Step(spans, num, latent=False)
            for layer in self._layers:
                x_TD = layer(x_TD, rope, step, form)
            for row in rows:
                self.requests[row.request_id].kv.commit(row.hi)
            return self._head.norm(x_TD[ends])

    def _embed(self, ids: list[int]) -> Tensor:
        """Return the embeddings of all tokens, each from the rank that has its id."""
        tokens, own = torch.tensor(ids), self.plan.vocabulary
        places = [(tokens >= v.start) & (tokens < v.stop) for v in self._vocabularies]
        part = self._table[tokens[places[self.member.rank]] - own.start]
        rows = joined(self.member, part, 0)
        x_TD = torch.empty_like(rows)
        x_TD[torch.cat([place.nonzero()[:, 0] for place in places])] = rows
        multiplier = self._parts.embedding_multiplier
        return x_TD if multiplier is None else x_TD * multiplier

    def logits(self, x_BD: Tensor) -> Tensor:
        """Return the logits of all token ids that are sampled, [B, V]."""
        rule = self._parts.logit_rule
        with inference():
            blocks = [self._head(x_BD, block) for block in range(self._head.num_blocks)]
            part = torch.cat([x_BD.new_empty((len(x_BD), 0)), *blocks], 1)
            logits = joined(self.member, part, 1)
            return logits if rule is None else rule(logits)

    def choose(self, x_BD: Tensor) -> list[int]:
        """Return the lowest token id of the largest logit of each position.

        A rank passes one logit and one id per position to the others.
        """
        with inference():
            state, num = HeadState(x_BD, range(len(x_BD))), self._head.num_blocks
            place = course.take()
            blocks = HeadBlocks(
                end=num,
                course=place.address,
                grain=Grain.STEP,
                stop_ns=NEVER,
                tasks_left=NEVER,
            )
            while blocks.at < num:
                state.run(self._head, blocks, self._parts.logit_rule, num)
            course.give_back(place)
        first = self.plan.vocabulary.start
        own = [Best(peak, first + token_id) for _, token_id, peak in state.answers()]
        found = self.member.gather(own, lambda parts: list(zip(*parts, strict=True)))
        return [best_of(each).token_id for each in found]
