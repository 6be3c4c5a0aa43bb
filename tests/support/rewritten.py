"""Copies of transformers' modelling files, rewritten: as another release, or another author, might.

A copy is a module of its own, so no digest is known of it.
"""

import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support import families, hybrids

Edit = Callable[[str], str]
KINDS = (
    *("RMSNorm", "Attention", "TopKRouter", "TopkRouter", "SparseMoeBlock", "DecoderLayer"),
    *("MLP", "MoE", "Experts", "GatedDeltaNet", "RMSNormGated"),
)
"""How names of the classes of parts end."""


def models() -> dict[str, Callable[[], Any]]:
    """The families and hybrids of which every part is known: a tiny bf16 model of each."""
    made: dict[str, Callable[[], Any]] = {}
    for name in families.FAMILIES:
        made[name] = lambda name=name: families.make_model(name, torch.bfloat16, num_layers=2)
    made["deepseek_v3 in halves"] = partial(_deepseek, rope_interleave=False)
    made["deepseek_v3"] = partial(_deepseek, topk_group=1)
    made["deepseek_v2"] = _deepseek_v2
    made["olmoe"] = _olmoe
    for name in hybrids.NATIVE:
        made[name] = lambda name=name: hybrids.make_hybrid(name)
    return made


def _deepseek(**settings: Any) -> Any:
    model = families.make_model("deepseek_v3", torch.bfloat16, num_layers=2)
    model.config.update(settings)
    for module in model.modules():
        vars(module).update({k: v for k, v in settings.items() if k in vars(module)})
    return model


def _deepseek_v2() -> Any:
    """Make a model whose rotation is complex, and whose experts are of the group with the best."""
    config = AutoConfig.for_model(
        "deepseek_v2", vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        moe_intermediate_size=32, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=32,
        q_lora_rank=24, qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=16,
        n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, first_k_dense_replace=1,
        n_group=4, topk_group=1, topk_method="group_limited_greedy", routed_scaling_factor=16.0,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()


def _olmoe() -> Any:
    model = families.make_model("olmoe", torch.bfloat16, num_layers=2)
    model.config.norm_topk_prob = True
    for module in model.modules():
        if hasattr(module, "norm_topk_prob"):
            module.norm_topk_prob = True
    return model


def source_of(model: Any) -> str:
    """The text of the file that a model's class is in."""
    return Path(str(sys.modules[type(model).__module__].__file__)).read_text()


def rewritten(model: Any, edit: Edit, folder: Path) -> Any:
    """The same model with the same weights, of an edited copy of its file.

    Args:
        model: Of transformers.
        edit: Makes the text of the copy.
        folder: Where the copy is written.
    """
    copy = _module(type(model).__module__, edit, folder)
    found = {name: value for name, value in vars(copy).items() if isinstance(value, type)}
    made = found[type(model).__name__](model.config)
    made.load_state_dict(model.state_dict())
    return made.to(model.dtype).eval()


def _module(name: str, edit: Edit, folder: Path) -> ModuleType:
    package = name.rpartition(".")[0]
    text = Path(str(sys.modules[name].__file__)).read_text()
    text = edit(text)
    for dots, root in (("...", "transformers"), ("..", "transformers.models"), (".", package)):
        text = text.replace(f"from {dots} import", f"from {root} import")
        text = text.replace(f"from {dots}", f"from {root}.")
    path = folder / f"copied_{name.rpartition('.')[2]}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and decorators look it up
    spec.loader.exec_module(module)
    return module


def renamed(text: str, names: Mapping[str, str]) -> str:
    """The text with other names."""
    for old, new in names.items():
        text = re.sub(rf"\b{old}\b", new, text)
    return text


def locals_renamed(text: str) -> str:
    """Other names for what functions compute."""
    names = ("query_states", "key_states", "value_states", "router_logits", "residual", "variance")
    head, mark, tail = text.partition("PreTrainedModel(PreTrainedModel):")
    return renamed(head, {name: f"the_{name}" for name in names}) + mark + tail


def statements_reordered(text: str) -> str:
    """Values before queries; the second of two lines first, where neither reads the other."""
    lines = [rf"(\n +{x}_states = [^\n]+)" for x in ("query", "key", "value")]
    text = re.sub(rf"{lines[0]}({lines[1]}?){lines[2]}", r"\4\2\1", text)
    text = re.sub(r"(\n +q_embed = [^\n]+)(\n +k_embed = [^\n]+)", r"\2\1", text)
    text = re.sub(r"(\n +xq_ = [^\n]+)(\n +xk_ = [^\n]+)", r"\2\1", text)
    return re.sub(r"(\n +cos = cos[^\n]+)(\n +sin = sin[^\n]+)", r"\2\1", text)


def helper_pulled_out(text: str) -> str:
    """Functions of its own for what was written out."""
    text = text.replace(
        "hidden_states.pow(2).mean(-1, keepdim=True)", "_mean_of_squares(hidden_states)"
    )
    text = re.sub(
        r"\((\w+) \* cos\) \+ \(rotate_half\(\w+\) \* sin\)", r"_turned(\1, cos, sin)", text
    )
    text = text.replace("self.act_fn(self.gate_proj(x)) * self.up_proj(x)", "_gated(self, x)")
    return (
        text
        + "\n\ndef _mean_of_squares(x):\n    return (x * x).mean(-1, keepdim=True)\n"
        + "\n\ndef _turned(x, cos, sin):\n    return rotate_half(x) * sin + x * cos\n"
        + "\n\ndef _gated(m, x):\n    up = m.up_proj(x)\n    return up * m.act_fn(m.gate_proj(x))\n"
    )


def classes_renamed(text: str) -> str:
    """Other names for the classes of all parts."""
    return re.sub(rf"\b([A-Z]\w+?)({'|'.join(KINDS)})\b", r"Another\1\2", text)


def cache_renamed(text: str) -> str:
    """Another name for the cache that layers and attention take."""
    head, _, tail = text.partition("PreTrainedModel(PreTrainedModel):")
    old = ("cache_params", "past_key_values", "cache")
    name = next(name for name in old if f"{name}: Cache | None" in head)
    for one in old:
        head = re.sub(rf"(?<![\w.]){one}\b", "kept_before", head)
    head = head.replace("import kept_before", "import cache")
    calls = re.compile(rf"(decoder_layer\(.*?)\b{name}=", re.DOTALL)
    return head + "PreTrainedModel(PreTrainedModel):" + calls.sub(r"\1kept_before=", tail)


REWRITES: dict[str, Edit] = {
    "locals renamed": locals_renamed,
    "statements reordered": statements_reordered,
    "helper pulled out": helper_pulled_out,
    "classes renamed": classes_renamed,
    "cache renamed": cache_renamed,
}
"""What changes a source and no result."""

RESIDUAL = "residual = hidden_states"
POST_NORM = "hidden_states = self.post_attention_layernorm(hidden_states)"
IN_ATTENTION = "input_shape = hidden_states.shape[:-1]"
IN_LAYER = "hidden_states = self.input_layernorm(hidden_states)"
IN_BLOCK = "batch_size, sequence_length, hidden_dim = hidden_states.shape"
MUTANTS: dict[str, tuple[str, str]] = {
    # norms
    "norm without its weight": (
        "return self.weight * hidden_states.to(input_dtype)",
        "return hidden_states.to(input_dtype)",
    ),
    "norm with one more": (
        "return self.weight * hidden_states",
        "return (1 + self.weight) * hidden_states",
    ),
    "norm without its one": ("(1.0 + self.weight.float())", "self.weight.float()"),
    "norm with another epsilon": (
        "variance + self.variance_epsilon",
        "variance + 2 * self.variance_epsilon",
    ),
    "norm of another mean": ("x.pow(2).mean(-1", "x.abs().mean(-1"),
    "norm rounded before": (
        "return (self.weight * hidden_states).to(input_dtype)",
        "return (self.weight * hidden_states.to(input_dtype).float() * 1.002).to(input_dtype)",
    ),
    # routers
    "router that does not renormalise": (
        "router_top_value /= router_top_value",
        "router_top_value *= 1 + 0 * router_top_value",
    ),
    "router of sigmoids": (
        "softmax(router_logits.float(), dim=-1)",
        "sigmoid(router_logits.float())",
    ),
    "router with one expert less": (
        "topk(router_probs, self.top_k",
        "topk(router_probs, self.top_k - 1",
    ),
    "router that scales": (
        "return router_logits, router_scores,",
        "return router_logits, router_scores * 1.01,",
    ),
    "router without its bias": (
        "F.linear(hidden_states, self.weight, self.bias)",
        "F.linear(hidden_states, self.weight)",
    ),
    "router that softens": ("torch.softmax(top_k_logits", "torch.softmax(top_k_logits / 1.1"),
    "router without its correction": ("scores + self.e_score_correction_bias", "scores + 0"),
    "router with another sum of groups": (".topk(2, dim=-1)[0]", ".topk(1, dim=-1)[0]"),
    "router that keeps all groups": (
        "masked_fill(~score_mask.bool()",
        "masked_fill(~score_mask.bool() & False",
    ),
    "router that weighs by the correction": (
        "scores.gather(1, topk_indices)",
        "(scores + self.e_score_correction_bias).gather(1, topk_indices)",
    ),
    "router without its scale": ("topk_weights * self.routed_scaling_factor", "topk_weights * 1"),
    "router with another jitter": ("> (2 * jitter_eps)", "> (3 * jitter_eps)"),
    # attention
    "rope in pairs": (
        "x1 = x[..., : x.shape[-1] // 2]\n    x2 = x[..., x.shape[-1] // 2 :]",
        "x1 = x[..., 0::2]\n    x2 = x[..., 1::2]",
    ),
    "rope in halves": ("q1, q2 = q[..., 0::2], q[..., 1::2]", "q1, q2 = q.chunk(2, -1)"),
    "complex rope the other way": ("xq_ * freqs_cis", "xq_ * freqs_cis.conj()"),
    "keys not turned, as complex numbers": ("xk_ * freqs_cis", "xk_"),
    "rope the other way": ("torch.cat((-x2, x1), dim=-1)", "torch.cat((x2, -x1), dim=-1)"),
    "keys not turned": ("k_embed = (k * cos) + (rotate_half(k) * sin)", "k_embed = k"),
    "half table the other way": (
        "first_half * cos - second_half * sin",
        "first_half * cos + second_half * sin",
    ),
    "another scaling": ("scaling=self.scaling,", "scaling=self.scaling * 1.01,"),
    "a softcap": ("scaling=self.scaling,", "scaling=self.scaling, softcap=30.0,"),
    "values scaled": ("self.v_proj(hidden_states)", "1.01 * self.v_proj(hidden_states)"),
    "queries in place of keys": (
        "self.k_proj(hidden_states)",
        "(self.k_proj(hidden_states) + hidden_states.mean(-1, keepdim=True))",
    ),
    "output scaled": (
        "attn_output = self.o_proj(attn_output)",
        "attn_output = self.o_proj(attn_output) * 0.99",
    ),
    "no norm of queries": ("self.q_norm(", "("),
    "no norm of keys": ("self.k_norm(", "("),
    "no norm of latents": ("self.kv_a_layernorm(kv_nope)", "kv_nope"),
    "no clip of values": ("value_states.clamp_(", "value_states.clone().clamp_("),
    "no clip of queries": ("query_states.clamp_(", "query_states.clone().clamp_("),
    "half the gate": ("torch.sigmoid(gate)", "torch.sigmoid(gate / 2)"),
    "sinks left out": (
        "probs[..., :-1]",
        "probs[..., :-1] / probs[..., :-1].sum(-1, keepdim=True)",
    ),
    "keys and values change places": (
        "value_states = torch.split(kv_nope, [self.qk_nope_head_dim, self.v_head_dim]",
        "value_states = torch.split(kv_nope.flip(-1), [self.qk_nope_head_dim, self.v_head_dim]",
    ),
    "one token attends otherwise": (
        "attn_output = attn_output.reshape(*input_shape, -1)",
        "attn_output = attn_output.reshape(*input_shape, -1) * (1 + (input_shape[-1] == 1))",
    ),
    # Gated DeltaNet
    "another gate of the state": ("beta = b.sigmoid()", "beta = b.tanh()"),
    "decay without its bias": ("F.softplus(a.float() + self.dt_bias)", "F.softplus(a.float())"),
    "no unit vectors": ("use_qk_l2norm_in_kernel=True", "use_qk_l2norm_in_kernel=False"),
    "state begins anew": ("initial_state=recurrent_state", "initial_state=None"),
    "z without its gate": (
        "ACT2FN[self.activation](gate.to(torch.float32))",
        "torch.sigmoid(gate.to(torch.float32))",
    ),
    # MLPs and experts
    "gate and up change places": (
        "self.act_fn(self.gate_proj(x)) * self.up_proj(x)",
        "self.gate_proj(x) * self.act_fn(self.up_proj(x))",
    ),
    "another activation": ("ACT2FN[config.hidden_act]", "ACT2FN['gelu']"),
    "experts without their one": ("(up + 1) * glu", "up * glu"),
    "experts with another limit": (
        "gate.clamp(min=None, max=self.limit)",
        "gate.clamp(min=None, max=self.limit / 2)",
    ),
    "experts that scale": (
        "current_hidden_states = self.act_fn(gate) * up",
        "current_hidden_states = self.act_fn(gate) * up * 1.1",
    ),
    # what lies between
    "half the sum": (
        "hidden_states = residual + hidden_states\n        return",
        "hidden_states = residual + 0.5 * hidden_states\n        return",
    ),
    "residual after the norm": (
        f"{RESIDUAL}\n        {POST_NORM}",
        f"{POST_NORM}\n        {RESIDUAL}",
    ),
    "the first norm twice": (
        "self.post_attention_layernorm(hidden_states)",
        "self.input_layernorm(hidden_states)",
    ),
    "layer without its multiplier": (
        "residual + hidden_states * self.residual_multiplier",
        "residual + hidden_states * 1",
    ),
    "block that scales its weights": (
        ", top_k_index, top_k_weights)",
        ", top_k_index, top_k_weights * 1.01)",
    ),
    "block without shared experts": (
        "hidden_states + self.shared_experts(residuals)",
        "hidden_states + 0 * self.shared_experts(residuals)",
    ),
    "block whose gate is not squashed": (
        "F.sigmoid(self.shared_expert_gate(hidden_states_reshaped))",
        "self.shared_expert_gate(hidden_states_reshaped)",
    ),
    # what shows in some calls alone
    "norm of all tokens": (".pow(2).mean(-1, keepdim=True)", ".pow(2).mean(1, keepdim=True)"),
    "norm with a limit": (
        "variance = hidden_states.pow(2)",
        "hidden_states = hidden_states.clamp(-500, 500)\n        variance = hidden_states.pow(2)",
    ),
    "norm that counts its calls": (
        "input_dtype = hidden_states.dtype",
        "input_dtype = hidden_states.dtype\n        self.calls = getattr(self, 'calls', 0) + 1",
    ),
    "MLP with a limit": (
        "self.act_fn(self.gate_proj(x)) * self.up_proj(x)",
        "(self.act_fn(self.gate_proj(x)) * self.up_proj(x)).clamp(-500, 500)",
    ),
    "MLP that mixes tokens": (
        "self.act_fn(self.gate_proj(x)) * self.up_proj(x)",
        "self.act_fn(self.gate_proj(x)) * self.up_proj(x + x.mean(-2, keepdim=True))",
    ),
    "experts with a limit": (
        "current_hidden_states = self.act_fn(gate) * up",
        "current_hidden_states = (self.act_fn(gate) * up).clamp(-500, 500)",
    ),
    "router with a limit": (
        "F.linear(hidden_states, self.weight)",
        "F.linear(hidden_states, self.weight).clamp(-50, 50)",
    ),
    "router of few tokens": (
        "F.linear(hidden_states, self.weight)",
        "F.linear(hidden_states, self.weight) * (1 - 2 * (len(hidden_states) < 3))",
    ),
    "router of many tokens": (
        "F.linear(hidden_states, self.weight)",
        "F.linear(hidden_states, self.weight) * (1 - 2 * (len(hidden_states) > 70))",
    ),
    "attention of far positions": (
        IN_ATTENTION,
        f"{IN_ATTENTION}\n        if (places := kwargs.get('position_ids')) is not None:\n"
        "            hidden_states = torch.where(places[..., None] > 8192, 2, 1) * hidden_states",
    ),
    "attention of many tokens": (
        IN_ATTENTION,
        f"{IN_ATTENTION}\n        hidden_states = hidden_states * (1 + (input_shape[-1] > 50))",
    ),
    "attention that counts its calls": (
        IN_ATTENTION,
        f"{IN_ATTENTION}\n        self.calls = getattr(self, 'calls', 0) + 1",
    ),
    "attention that lists its calls": (
        IN_ATTENTION,
        f"{IN_ATTENTION}\n        vars(self).setdefault('calls', []).append(1)",
    ),
    "layer of many tokens": (
        IN_LAYER,
        f"{IN_LAYER}\n        hidden_states *= 1 + (hidden_states.shape[1] > 20)",
    ),
    "layer with a limit": (
        "hidden_states = residual + hidden_states\n        return",
        "hidden_states = (residual + hidden_states).clamp(-100, 100)\n        return",
    ),
    "layer that counts its calls": (
        IN_LAYER,
        f"{IN_LAYER}\n        self.calls = getattr(self, 'calls', 0) + 1",
    ),
    "layer that masks otherwise": (
        IN_LAYER,
        f"{IN_LAYER}\n        if attention_mask is not None:\n"
        "            attention_mask = attention_mask * 0",
    ),
    "layer that tells its attention more": (
        "hidden_states=hidden_states,\n",
        "hidden_states=hidden_states, boost=3.0,\n",
    ),
    "block of many tokens": (
        IN_BLOCK,
        f"{IN_BLOCK}\n        hidden_states = hidden_states * (1 + (sequence_length > 50))",
    ),
    "block of one token": (
        IN_BLOCK,
        f"{IN_BLOCK}\n        hidden_states = hidden_states * (1 + (sequence_length == 1))",
    ),
}
"""What computes something else: text -> text."""
