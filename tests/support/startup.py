"""Random small models of the eight families, and ways to make them wrong, for the start-up check.

A wrong model has the weights of the right one and computes one part another way: the check of a
runner of the wrong one against the right one's forward must refuse it.
"""

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qllm.errors import ModelError
from qllm.models.discover import base_model, discover
from qllm.runner import conformance
from qllm.runner.cpu import cpu_runner
from qllm.runner.layers.attention import Span
from qllm.runner.rope_tables import RowRopes
from qllm.runner.runner import TorchRunner
from tests.support.families import FAMILIES, MAKERS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SEGMENT_MS = (5.0, 0.3, 0.1, float("inf"))


@dataclass(frozen=True)
class Case:
    """One random model and the settings of its runner."""

    number: int
    family: str
    dtype: str
    threads: int
    max_segment_ms: float
    level: str
    changes: dict[str, Any]
    scale: float
    """Size of the weights, in units of 1 / sqrt(inputs)."""

    @property
    def name(self) -> str:
        """For results."""
        return (
            f"{self.number} {self.family} {self.dtype} threads={self.threads} "
            f"max_segment_ms={self.max_segment_ms:g} {self.level} {self.changes}"
        )


def case_of(number: int) -> Case:
    """A case by its number: every family, dtype and number of threads in turn, the rest random."""
    rng = random.Random(number)
    family = FAMILIES[number % 8]
    turn = number // 8
    heads = rng.choice((2, 4, 6))
    kv = heads if family in ("deepseek_v3", "olmoe") else rng.choice((1, 2, heads))
    layers, experts = rng.choice((2, 3)), rng.choice((4, 8, 12))
    top_k = 2 if family == "phimoe" else rng.choice((1, 2, 4))
    width = heads * 32 if family == "olmoe" else rng.choice((32, 64, 96, 160))
    changes: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv if heads % kv == 0 else heads,
        "num_experts_per_tok": top_k,
        "rms_norm_eps": rng.choice((1e-5, 1e-6)),
    }
    name = {"deepseek_v3": "n_routed_experts"}.get(family, "num_experts")
    if family in ("mixtral", "gpt_oss", "granitemoe", "phimoe"):
        name = "num_local_experts"
    changes[name] = experts
    inner = rng.choice((32, 48, 96))
    if family in ("qwen2_moe", "qwen3_moe", "deepseek_v3"):
        changes["moe_intermediate_size"] = inner
    elif family != "gpt_oss":
        changes["intermediate_size"] = inner
    if family == "gpt_oss":
        changes["sliding_window"] = rng.choice((6, 12, 40))
    return Case(
        number,
        family,
        tuple(DTYPES)[turn % 3],
        1 + turn // 3 % 2,
        rng.choice(SEGMENT_MS),
        rng.choice(("order", "order", "batch-invariant")),
        changes,
        rng.choice((1.0, 1.5, 2.0)),
    )


def make(case: Case, **more: Any) -> Any:
    """The model of a case; `more` changes its config."""
    make_config, make_model = MAKERS[case.family]
    plain = make_config()
    settings = {**plain.to_dict(), **case.changes, **more}
    if settings.get("layer_types"):
        settings["layer_types"] = settings["layer_types"][: settings["num_hidden_layers"]]
    config = type(plain)(**settings)
    config._attn_implementation = "eager" if case.family == "gpt_oss" else "sdpa"
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(case.number)
    model = make_model(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.copy_(torch.randn_like(p) * 0.2 + ("norm" in name))
            else:
                size = 0.5 if "embed" in name else case.scale * p.shape[-1] ** -0.5
                p.copy_(torch.randn_like(p) * size)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.copy_(torch.randn_like(buffer) * 0.2)
    return model.to(DTYPES[case.dtype]).eval()


def runner_of(case: Case, model: Any, **more: Any) -> TorchRunner:
    """The runner of a model with the settings of a case; level L2 where it is possible."""
    settings = {"max_segment_ms": case.max_segment_ms, **more}
    if case.level == "batch-invariant":
        try:
            return cpu_runner(model, batch_invariant=True, **settings)
        except ModelError as error:
            if "batch-invariant results are not possible here" not in str(error):
                raise
    return cpu_runner(model, **settings)


@contextmanager
def threads_of(case: Case) -> Iterator[None]:
    """Let torch compute with the threads of a case."""
    before = torch.get_num_threads()
    torch.set_num_threads(case.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def refusal(right: Any, runner: TorchRunner) -> str | None:
    """Why the check refuses a runner against the forward of a model; None if it does not."""
    try:
        conformance.check(right, runner)
    except ModelError as error:
        return str(error)
    finally:
        runner.close()
    return None


# -- wrong models: each makes the runner of a wrong copy, or None if the family has no such part

Change = Callable[[Any], bool]
"""Changes one layer of a copy; whether it has such a part."""


def _copied(case: Case, model: Any, change: Change) -> TorchRunner | None:
    other = copy.deepcopy(model)
    with torch.no_grad():
        found = [change(layer) for layer in base_model(other).layers]
    return runner_of(case, other) if any(found) else None


def _tensors(layer: Any, *names: str) -> list[Tensor]:
    """Parameters and buffers whose path in a layer has one of these as a part."""
    every = [*layer.named_parameters(), *layer.named_buffers()]
    return [t for path, t in every if set(path.split(".")) & set(names)]


def _fill(value: float, *names: str) -> Change:
    def change(layer: Any) -> bool:
        found = _tensors(layer, *names)
        for tensor in found:
            tensor.fill_(value)
        return bool(found)

    return change


def _no_correction(layer: Any) -> bool:
    """Where a choice is left: of 4 experts of 4 it is the same without."""
    routers = [m for m in layer.modules() if hasattr(m, "e_score_correction_bias")]
    chosen = [m.e_score_correction_bias for m in routers if m.top_k < len(m.weight)]
    for bias in chosen:
        bias.fill_(0.0)
    return bool(chosen)


def _epsilon(name: str) -> Change:
    def change(layer: Any) -> bool:
        norm = getattr(layer, name)
        field = "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"
        setattr(norm, field, 10 * getattr(norm, field))
        return True

    return change


def _scale(layer: Any) -> bool:
    layer.self_attn.scaling *= 1.5
    return True


def _halves_swapped(layer: Any) -> bool:
    """Gate for up and up for gate, in every expert."""
    found = _tensors(layer, "gate_up_proj")
    for weight in found:
        dim = 1 if weight.dim() == 3 and weight.shape[1] > weight.shape[2] else -1
        weight.copy_(weight.roll(weight.shape[dim] // 2, dim))
    return bool(found)


def _one_expert(layer: Any) -> bool:
    found = _tensors(layer, "down_proj")
    stacks = [w for w in found if w.dim() == 3]
    for weight in stacks:
        weight[0].neg_()
    return bool(stacks)


def _other_activation(layer: Any) -> bool:
    experts = [m for m in layer.modules() if hasattr(m, "is_transposed")]
    for module in experts:
        if hasattr(module, "alpha"):  # gpt_oss has no `act_fn`
            module.alpha *= 1.3
        module.act_fn = nn.GELU()
    return bool(experts)


def _router(answer: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Change:
    """Routers of a class of their own, which no kernel knows, change weights and ids."""

    def change(layer: Any) -> bool:
        routers = [m for m in layer.modules() if hasattr(m, "top_k") and hasattr(m, "weight")]
        for router in routers:
            kind: Any = type(router)

            class Other(kind):  # type: ignore[misc]
                def forward(self, x: Tensor) -> Any:
                    logits, weights, ids = super().forward(x)
                    return logits, *answer(x @ self.weight.to(x).T, weights, ids)

            router.__class__ = Other
        return bool(routers)

    return change


def _sigmoid(logits: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return torch.sigmoid(logits.gather(-1, ids) + 0.5).to(weights), ids


def _next_expert(logits: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The first expert of every token is another one."""
    taken = torch.full_like(logits, 0.0).scatter(-1, ids, 1.0)
    free = taken.argmin(-1, keepdim=True)
    return weights, torch.cat((free, ids[:, 1:]), -1)


def _scaled(logits: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return weights * 1.1, ids


IN_LAYERS: dict[str, Change] = {
    "epsilon of the first norm": _epsilon("input_layernorm"),
    "epsilon of the second norm": _epsilon("post_attention_layernorm"),
    "scale of the attention": _scale,
    "no norm of queries": _fill(1.0, "q_norm"),
    "no norm of keys": _fill(1.0, "k_norm"),
    "no norm of latents": _fill(1.0, "kv_a_layernorm"),
    "no norm of the latents of queries": _fill(1.0, "q_a_layernorm"),
    "no sinks": _fill(-1e4, "sinks"),
    "no shared experts": _fill(0.0, "shared_expert", "shared_experts"),
    "no gate of the shared expert": _fill(0.0, "shared_expert_gate"),
    "no correction of the choice": _no_correction,
    "gate for up": _halves_swapped,
    "one expert": _one_expert,
    "activation of the experts": _other_activation,
    "sigmoid router": _router(_sigmoid),
    "scale of the routed experts": _router(_scaled),
    "another expert": _router(_next_expert),
}


def _with_config(case: Case, model: Any, families: str, **more: Any) -> TorchRunner | None:
    """With the same weights and another config; an empty list of families is all of them."""
    if families and case.family not in families.split():
        return None
    other = make(case, **more)
    other.load_state_dict(model.state_dict())
    return runner_of(case, other)


def _rope(case: Case, model: Any, **more: Any) -> TorchRunner | None:
    found = {"rope_type": "default", "rope_theta": 10000.0, **model.config.rope_parameters}
    rope = {**found, **more}
    if case.family == "phimoe" and rope["rope_type"] != "default":
        return None  # its module wants more keys
    return _with_config(case, model, "", rope_parameters=rope)


def _top_k(case: Case, model: Any) -> TorchRunner | None:
    if case.family == "phimoe":
        return None  # its router always takes two
    if model.config.num_experts_per_tok == discover(model).shape.num_experts:
        return None  # there is no expert more
    return _with_config(case, model, "", num_experts_per_tok=model.config.num_experts_per_tok + 1)


def _flag(case: Case, model: Any) -> TorchRunner | None:
    if not hasattr(model.config, "norm_topk_prob"):
        return None
    if (
        case.family != "deepseek_v3"
        and model.config.num_experts_per_tok == model.config.num_experts
    ):
        return None  # the sum over all experts is 1 either way
    return _with_config(case, model, "", norm_topk_prob=not model.config.norm_topk_prob)


def _no_window(case: Case, model: Any) -> TorchRunner | None:
    types = ["full_attention"] * model.config.num_hidden_layers
    return _with_config(case, model, "gpt_oss", layer_types=types)


def _window(case: Case, model: Any) -> TorchRunner | None:
    window = getattr(model.config, "sliding_window", None) or 0
    return _with_config(case, model, "gpt_oss", sliding_window=window + 1)


def _groups(case: Case, model: Any) -> TorchRunner | None:
    top_k, experts = case.changes["num_experts_per_tok"], case.changes.get("n_routed_experts", 0)
    if top_k == 1 or top_k >= experts // 2:
        return None  # the best expert is nearly always in the best group; one group has no others
    return _with_config(case, model, "deepseek_v3", topk_group=1)


def _no_clip(case: Case, model: Any) -> TorchRunner | None:
    return _with_config(case, model, "olmoe", clip_qkv=0.5)


def _head(change: Callable[[Any], Any]) -> Callable[[Case, Any], TorchRunner | None]:
    def build(case: Case, model: Any) -> TorchRunner | None:
        other = copy.deepcopy(model)
        with torch.no_grad():
            return None if change(other) is None else runner_of(case, other)

    return build


def _head_bias(model: Any) -> Any:
    return None if model.lm_head.bias is None else model.lm_head.bias.zero_()


def _last_epsilon(model: Any) -> bool:
    return _epsilon("norm")(base_model(model))


def _positions(case: Case, model: Any) -> TorchRunner:
    """Decoded tokens stand one position too far."""
    runner = runner_of(case, copy.deepcopy(model))
    real = runner.rope.rows

    def rows(*args: Any) -> RowRopes:
        found = real(*args)
        found._ranges = [(lo + (lo > 0), hi + (lo > 0)) for lo, hi in found._ranges]
        return found

    runner.rope.rows = rows  # type: ignore[method-assign]
    return runner


def _kv(case: Case, model: Any) -> TorchRunner:
    """Decoded tokens write and read their KV one place too far."""
    runner = runner_of(case, copy.deepcopy(model))
    real = runner.backend.new_step

    def new_step(spans: Sequence[Span], num_tokens: int) -> Any:
        far = [Span(kv, at, lo + (lo >= 24), hi + (lo >= 24)) for kv, at, lo, hi in spans]
        return real(far, num_tokens)

    runner.backend.new_step = new_step  # type: ignore[method-assign]
    return runner


def _multiplier(name: str) -> Callable[[Case, Any], TorchRunner | None]:
    def build(case: Case, model: Any) -> TorchRunner | None:
        more = {name: 1.1 * getattr(model.config, name, 1.0)}
        return _with_config(case, model, "granitemoe", **more)

    return build


ELSEWHERE: dict[str, Callable[[Case, Any], TorchRunner | None]] = {
    "theta": lambda case, model: _rope(case, model, rope_theta=20000.0),
    "linear scaling": lambda case, model: _rope(case, model, rope_type="linear", factor=2.0),
    "no window": _no_window,
    "window off by one": _window,
    "clip": _no_clip,
    "top-k off by one": _top_k,
    "sum of the weights": _flag,
    "scaling factor of the routed": lambda case, model: _with_config(
        case, model, "deepseek_v3", routed_scaling_factor=1.0
    ),
    "groups": _groups,
    "order of the rotated": lambda case, model: _with_config(
        case, model, "deepseek_v3", rope_interleave=False
    ),
    "embedding multiplier": _multiplier("embedding_multiplier"),
    "residual multiplier": _multiplier("residual_multiplier"),
    "attention multiplier": _multiplier("attention_multiplier"),
    "logits scaling": _multiplier("logits_scaling"),
    "no bias of the head": _head(_head_bias),
    "epsilon of the last norm": _head(_last_epsilon),
    "position off by one": _positions,
    "KV off by one": _kv,
}
WRONG = (*IN_LAYERS, *ELSEWHERE)


def wrong_runner(name: str, case: Case, model: Any) -> TorchRunner | None:
    """The runner of a copy of a model that is wrong in one part; None if it has no such part."""
    if name in IN_LAYERS:
        return _copied(case, model, IN_LAYERS[name])
    return ELSEWHERE[name](case, model)
