"""Position embeddings of a frame, computed by the model's own rotary module.

A model may have one kind of embedding for all layers, one for every type of layer (sliding and full
attention rotate by different angles), or none.

Static rope types give a position the same values in every call, so values are computed once into a
table. LongRoPE and dynamic NTK choose their frequencies by the *length* of a call: the position of
its last token + 1. In this module, a position has the length of the call in which `generate` would
compute the position. That length depends on the request alone:

    prompt of n tokens     0 ... n-1            length n, however the prompt is cut into passes
    decoded token          p >= n               length p + 1
    Phi-3, Phi-3.5-MoE     every position       the number of tokens known so far

The third line is for families whose `generate` drops its cache when the length exceeds the original
length (`Switch.recomputes`). At that length the engine evicts the request and computes it again
with the long factors. In the other families, cached keys keep their first factors.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from qllm.errors import ModelError
from qllm.models.arguments import cache_of_function
from qllm.models.discover import ModelParts, base_model
from qllm.models.positions import STATIC_ROPE, embeddings
from qllm.plan import Row
from qllm.runner.frame import RequestState
from qllm.runner.rope_tables import RopeTable, RowRopes, Switch
from qllm.types import RequestId


class Holding(DynamicCache):
    """A cache that reports a given number of tokens."""

    num_tokens = 0

    def get_mask_sizes(self, query_length: int, *_: object, **__: object) -> tuple[int, int]:
        return self.num_tokens + query_length, 0

    def get_seq_length(self, *_: object, **__: object) -> int:
        return self.num_tokens


def _drops_cache(model: Any, at: int) -> bool:
    """Return True if `generate` drops a cache of the original length at the next token."""
    prepare: Any = getattr(model, "prepare_inputs_for_generation", None)
    name = None if prepare is None else cache_of_function(prepare)
    if name is None:
        return False

    def is_kept(num_tokens: int) -> bool:
        cache = Holding(config=base_model(model).config)
        cache.num_tokens = num_tokens
        ids = torch.zeros(1, num_tokens + 1, dtype=torch.long, device=model.device)
        given = {"attention_mask": torch.ones_like(ids), "use_cache": True, name: cache}
        return any(value is cache for value in prepare(ids, **given).values())

    if not is_kept(at - 1):
        raise ModelError(
            f"{type(model).__name__}.prepare_inputs_for_generation does not hand on the cache that "
            f"it is given as {name}: whether it drops one of {at} tokens cannot be known"
        )
    return not is_kept(at)


def switch_of(model: nn.Module, rotary_emb: Any) -> Switch | None:
    """Return the dependence of a model's frequencies on the length; None if there is none."""
    kind = getattr(rotary_emb, "rope_type", "default")
    if isinstance(kind, Mapping):  # one kind per type of layer; discovery accepts only static kinds
        return None
    config = base_model(model).config
    parameters = getattr(config, "rope_parameters", None) or {}
    # Phi-3.5-MoE scales by `short_mscale` or `long_mscale`, whatever its rope type is.
    is_binary = kind == "longrope" or (kind != "default" and "long_mscale" in parameters)
    if kind in STATIC_ROPE and not is_binary:
        return None
    at = getattr(rotary_emb, "original_max_seq_len", 0)
    if is_binary:
        at = parameters["original_max_position_embeddings"]
    return Switch(int(at), is_binary, is_binary and _drops_cache(model, int(at)))


class Ropes:
    """The tables of a model, by kind of embedding.

    Args:
        model: Model of transformers.
        parts: Parts of the model.
        device: Device of the tables.
        dtype: Dtype of the tables.
    """

    def __init__(
        self, model: nn.Module, parts: ModelParts, device: torch.device, dtype: torch.dtype
    ) -> None:
        rotary = parts.rotary_emb
        self.switch = None if rotary is None else switch_of(model, rotary)
        self._tables: dict[str | None, RopeTable] = {}
        self._takes_ids, self._device = parts.around is not None, device
        attend = [layer for layer in parts.layers if layer.new_state is None]
        for kind in {layer.rope_kind for layer in attend} if rotary is not None else ():
            assert rotary is not None
            call = partial(embeddings, rotary, kind)
            self._tables[kind] = RopeTable(call, device, dtype, self.switch)

    @property
    def recompute_above(self) -> int | None:
        """See `ModelShape`."""
        return self.switch.at if self.switch is not None and self.switch.recomputes else None

    def rows(self, rows: Sequence[Row], requests: Mapping[RequestId, RequestState]) -> RowRopes:
        """Return the embeddings of the rows of a program.

        The embeddings of a row depend only on the row's request. A dead row has no request. Layers
        that run by the model's own code get token ids instead, [1, T].
        """
        if self._takes_ids:
            ids: list[int] = []
            for row in rows:
                own = requests.get(row.request_id)
                ids += [0] * row.num_tokens if own is None else own.ids[row.lo : row.hi]
            return RowRopes({}, (), given=(torch.tensor([ids], device=self._device),))
        ranges = [(row.lo, row.hi) for row in rows]
        if self.switch is None:
            return RowRopes(self._tables, ranges)
        lengths = []
        for row in rows:
            held = requests.get(row.request_id)
            known = (0, 0) if held is None else (held.num_prompt_tokens, len(held.ids))
            lengths.append(self.switch.length_of(*known))
        return RowRopes(self._tables, ranges, lengths)
