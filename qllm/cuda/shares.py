"""The shares of ranks of devices: the weights of a layer, the KV, and the model's split.

The split is that of `qllm.sharded.plan`, with whole experts. Any model can be split whose attention
and MLPs are known to the device's backend.
"""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qllm.cuda.attention import HeadAttention, is_known_attention, known_attention
from qllm.cuda.gathers import Gathers, gathers_of, on_ranks
from qllm.cuda.latents import keeps_latents
from qllm.cuda.pages import Pages
from qllm.errors import InvariantError, ModelError
from qllm.kernels.quantised import Quantised
from qllm.kernels.routing import ExpertWeights
from qllm.kernels.select import Kernels
from qllm.models.discover import LayerParts, ModelParts, base_model
from qllm.models.heard import is_heard
from qllm.models.parts.known import attention_kind, is_swiglu
from qllm.sharded.plan import (
    LayerShape,
    LayerShare,
    ShardPlan,
    ShardShape,
    plan_of,
    without_copies,
)

Put = Callable[[Tensor], Tensor]
"""Function that returns a weight on the device of a rank."""


class Ranks:
    """The ranks of a model, and what each has of it.

    Args:
        gathers: Ranks.
        plan: Split of the model.
    """

    def __init__(self, gathers: Gathers, plan: ShardPlan) -> None:
        self.gathers, self.plan = gathers, plan
        self.weight_bytes = [0] * len(plan.ranks)
        """Bytes of the weights that were moved to each rank."""

    def puts(self) -> list[Put]:
        """Return, for each rank, the function that moves a weight to it."""
        return [partial(self._put, rank) for rank in range(len(self.plan.ranks))]

    def _put(self, rank: int, x: Tensor) -> Tensor:
        self.weight_bytes[rank] += x.nbytes
        return self.gathers.put(rank, x)

    def shares(self, layer: int) -> list[LayerShare]:
        """Return the share of each rank in a layer."""
        return [rank.layers[layer] for rank in self.plan.ranks]

    def kv_bytes(self, token_bytes: int) -> list[int]:
        """Return the bytes of a token's KV on each rank, from those on one device."""
        heads, num = self.shares(0), self.plan.shape.layers[0].num_kv_heads
        return [token_bytes * len(share.kv_heads) // num for share in heads]


def ranks_of(model: nn.Module, parts: ModelParts, gathers: Gathers) -> Ranks:
    """Return the ranks of a model.

    Raises:
        ModelError: The model cannot be split.
        ConfigError: It cannot be split over so many ranks.
    """
    name = base_model(model).config.model_type
    return Ranks(gathers, plan_on_devices(name, parts, len(gathers.devices)))


def owner_bytes(parts: ModelParts) -> int:
    """Return the bytes of the weights that only the owner has: embedding, norms and routers."""
    modules = [parts.embed, parts.norm]
    for layer in parts.layers:
        modules += [
            module
            for module in (
                layer.input_layernorm,
                layer.post_attention_layernorm,
                layer.router,
                layer.shared_gate,
            )
            if module is not None
        ]
    head = parts.lm_head.weight.data_ptr()
    weights = [p for module in modules for p in module.parameters()]
    return sum(p.nbytes for p in weights if p.data_ptr() != head)


# -- the split


def plan_on_devices(name: str, parts: ModelParts, tp: int) -> ShardPlan:
    """Return the split of a model. Its numbers of bytes are 0: `Ranks.weight_bytes` has them.

    Args:
        name: Name of the model's type.
        parts: Parts of the model.
        tp: Number of ranks.

    Raises:
        ModelError: A part cannot be split. The message names the first.
        ConfigError: The model cannot be split over so many ranks.
    """
    for layer in parts.layers:
        if why := _why_unsplit(layer):
            raise ModelError(
                f"model {name!r} cannot be split over ranks of devices: layer {layer.index} {why}; "
                "use tp=1"
            )
    if is_heard(parts.lm_head):
        raise ModelError(
            f"model {name!r} cannot be split over ranks of devices: a hook listens to its head, "
            "of which each rank computes a part; use tp=1, or remove the hook"
        )
    vocab, hidden = parts.lm_head.weight.shape
    shapes = tuple(_shape_of(layer) for layer in parts.layers)
    if len({(shape.num_heads, shape.num_kv_heads) for shape in shapes}) > 1:
        raise ModelError(
            f"model {name!r} cannot be split over ranks of devices: its layers have different "
            "numbers of heads; use tp=1"
        )
    return plan_of(ShardShape(shapes, int(hidden), int(vocab), 0, 0), tp)


def most_kv_bytes(model: nn.Module, parts: ModelParts, tp: int, token_bytes: int) -> int:
    """Return the bytes of a token's KV on the device that has most of it.

    Args:
        model: The model.
        parts: Parts of the model.
        tp: Number of ranks.
        token_bytes: Bytes of a token's KV without ranks.

    Raises:
        ModelError: The model cannot be split.
        ConfigError: It cannot be split over so many ranks, or there are too few devices.
    """
    gathers, found = gathers_of(parts.like.device, tp), Counter[torch.device]()
    ranks = ranks_of(model, parts, gathers)
    for device, num_bytes in zip(gathers.devices, ranks.kv_bytes(token_bytes), strict=True):
        found[device] += num_bytes
    return max(found.values())


def _why_unsplit(parts: LayerParts) -> str:
    attn: Any = parts.self_attn
    if parts.input_layernorm is None or attn is None or parts.new_state is not None:
        return f"({type(parts.layer).__name__}) is not run part by part"
    if not is_known_attention(attn):
        return f"has attention of an unknown kind ({type(attn).__name__})"
    mlp = parts.shared if parts.is_moe else parts.mlp
    if mlp is not None and not is_swiglu(mlp):
        return f"has an MLP of an unknown kind ({type(mlp).__name__})"
    if is_heard(attn) or (mlp is not None and is_heard(mlp)):
        return "has a hook on its attention or MLP, of which each rank computes a part"
    return ""


def _shape_of(parts: LayerParts) -> LayerShape:
    attn: Any = parts.self_attn
    mlp: Any = parts.shared if parts.is_moe else parts.mlp
    experts: Any = parts.experts
    if keeps_latents(attn):
        num, num_kv = int(attn.num_heads), 1
    else:
        num, num_kv = (x.out_features // attn.head_dim for x in (attn.q_proj, attn.k_proj))
    return LayerShape(
        num_heads=num,
        num_kv_heads=num_kv,
        head_bytes=0,
        kv_head_bytes=0,
        num_experts=0 if experts is None else int(experts.num_experts),
        expert_bytes=0,
        expert_width=0,  # experts stay whole
        mlp_width=0 if mlp is None else int(mlp.gate_proj.out_features),
        inner_bytes=0,
        down_bytes=0,
        whole_bytes=0,
    )


# -- weights


class Rows(nn.Linear):
    """Some outputs of a linear module, on the device of a rank.

    Args:
        linear: The module.
        rows: Its outputs.
        put: Function that moves them there.
    """

    def __init__(self, linear: nn.Linear, rows: range, put: Put) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, len(rows)

        def share(x: Tensor) -> nn.Parameter:
            own = put(x.detach()[rows.start : rows.stop])
            return nn.Parameter(own, requires_grad=False)

        self.weight = share(linear.weight)
        self.bias = None if linear.bias is None else share(linear.bias)


def _scaled(rows: range, by: int) -> range:
    return range(rows.start * by, rows.stop * by)


def share_of_attention(parts: LayerParts, share: LayerShare, put: Put) -> HeadAttention:
    """Return the attention of a rank's heads, without the output projection.

    It is a module of the same class, with some rows of the projections to heads.
    """
    attn: Any = parts.self_attn
    own = copy.copy(attn)
    heads, kv_heads = share.heads, share.kv_heads
    if keeps_latents(attn):
        queries = "q_proj" if attn.q_lora_rank is None else "q_b_proj"
        width = getattr(attn, queries).out_features // attn.num_heads
        both = attn.qk_nope_head_dim + attn.v_head_dim
        rows = {queries: _scaled(heads, width), "kv_b_proj": _scaled(heads, both)}
        own.num_heads = len(heads)
    else:
        rows = {"q_proj": _scaled(heads, attn.head_dim)}
        rows |= dict.fromkeys(("k_proj", "v_proj"), _scaled(kv_heads, attn.head_dim))
    own._modules = {
        name: Rows(module, rows[name], put) if name in rows else _moved(module, put)
        for name, module in attn._modules.items()
        if name != "o_proj" and module is not None
    } | {name: None for name, module in attn._modules.items() if module is None}
    own._parameters = {name: x for name, x in attn._parameters.items() if name != "sinks"}
    if "sinks" in attn._parameters:
        sinks = put(attn.sinks.detach()[heads.start : heads.stop])
        own._parameters["sinks"] = nn.Parameter(sinks, requires_grad=False)
    kind = None if keeps_latents(attn) else attention_kind(attn)
    return known_attention(own, parts.window, kind)


def _moved(module: nn.Module, put: Put) -> nn.Module:
    """Return a copy of a small module on the device of a rank."""
    own = copy.deepcopy(module)
    for x in (*own.parameters(), *own.buffers()):
        x.data = put(x.data)
    return own


def share_of_experts(whole: ExpertWeights, own: range, put: Put) -> ExpertWeights:
    """Return the weights of a rank's experts, which keep their numbers in the layer."""

    def some(x: Any) -> Any:
        return None if x is None else put(x[own.start : own.stop]).contiguous()

    def packed(stack: Quantised) -> Quantised:
        codes = some(stack.codes.view(torch.uint8)).view(stack.codes.dtype)
        return stack._replace(
            codes=codes, scale_NG=some(stack.scale_NG), offset_NG=some(stack.offset_NG)
        )

    part = whole._replace(
        up_bias_EF=some(whole.up_bias_EF),
        down_bias_ED=some(whole.down_bias_ED),
        share=(own.start, whole.num_experts),
    )
    if whole.packed is not None:
        up, down = map(packed, whole.packed)
        return part._replace(up_EFD=up.codes, down_EDI=down.codes, packed=(up, down))
    # strides stay: a transposed module's weights are read in its layout
    up_EFD, down_EDI = (put(x[own.start : own.stop]) for x in (whole.up_EFD, whole.down_EDI))
    return part._replace(up_EFD=up_EFD, down_EDI=down_EDI)


# -- KV


class RankPages(Pages):
    """The pages of all ranks: each has those of the KV heads that its queries read.

    Args:
        num_layers: Number of layers.
        num_pages: Number of pages.
        page_size: Tokens of a page.
        kernels: Kernels that write the slots.
        ranks: Ranks, of which each has the same KV heads in all layers.
    """

    def __init__(
        self, num_layers: int, num_pages: int, page_size: int, kernels: Kernels, ranks: Ranks
    ) -> None:
        super().__init__(num_layers, num_pages, page_size, kernels)
        self.gathers = ranks.gathers
        self._heads = [share.kv_heads for share in ranks.shares(0)]
        self.parts = [Pages(num_layers, num_pages, page_size, kernels) for _ in self._heads]

    def release(self) -> None:
        for part in self.parts:
            part.release()

    @property
    def token_bytes(self) -> int:
        return sum(part.token_bytes for part in self.parts)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        raise InvariantError("no rank has the pages of all heads")

    def of(self, layer: int, k_TGD: Tensor, v_TGE: Tensor) -> tuple[Tensor, Tensor]:
        raise InvariantError("no rank has the pages of all heads")

    def write(self, layer: int, k_TGD: Tensor, v_TGE: Tensor, slots_T: Tensor) -> None:
        def write(part: Pages, heads: range, k: Tensor, v: Tensor, slots: Tensor) -> None:
            own = slice(heads.start, heads.stop)
            part.write(layer, k[:, own], v[:, own], slots)

        every = map(self.gathers.spread, (k_TGD, v_TGE, slots_T))
        on_ranks(self.gathers, write, self.parts, self._heads, *every)

    def read(self, layer: int, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        gathers, every = self.gathers, without_copies(self._heads)
        found = on_ranks(gathers, lambda part: part.read(layer, slots), self.parts)
        keys, values = map(gathers.to_owner, zip(*found, strict=True))
        k, v = (torch.cat([x[rank][:, skip:] for rank, skip in every], 1) for x in (keys, values))
        return k, v
