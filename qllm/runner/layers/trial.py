"""Start-up tests of layers with a state: its size, and the states after a prompt in chunks."""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from qllm.errors import ModelError
from qllm.models.around import Around
from qllm.models.discover import ModelParts, base_model
from qllm.plan import ModelShape
from qllm.runner.kv import SlabKV
from qllm.runner.layers.attention import Span, Step
from qllm.runner.layers.deltas import DeltaMixer
from qllm.runner.layers.drivers import LayerDriver
from qllm.runner.layers.recurrent import RecurrentMixer
from qllm.runner.states import tensors_of

NUM_TRIED = 10
"""Tokens of the prompt that is cut."""
CUTS = {"chunks": [0, 4, 7, NUM_TRIED], "tokens": [*range(NUM_TRIED + 1)]}
GROWS, OTHERS = range(8, 14), (1, 4, 64)
"""Numbers of tokens whose state size is measured. The first range is larger than the taps of a
convolution and within the window of an attention."""
LEAST_TOKEN_BYTES = 64
"""Bytes charged per token if no layer keeps KV."""
CLOSE = 0.05
"""Relative difference that rounding explains in any dtype. A missing state makes a far larger
difference."""


class Carried(NamedTuple):
    """The results of a pass over a prompt."""

    out_TD: Tensor
    states: dict[str, Tensor]
    """Tensors of the state by name, whose meaning is the module's own."""


def carry(mixer: RecurrentMixer | DeltaMixer, x_TD: Tensor, cuts: list[int]) -> Carried:
    """Run the mixer of a layer over the tokens of one request, one pass between every two cuts."""
    kv, outs, call = SlabKV(0, len(x_TD)), [], cast(Callable[..., Any], mixer)
    for lo, hi in pairwise(cuts):
        step = Step([Span(kv, 0, lo, hi)], hi - lo, latent=False)
        given: dict[str, Any] = {mixer.cache_name: step}
        out = call(mixer.forward, x_TD[None, lo:hi], **given)
        outs.append((out[0] if isinstance(out, tuple) else out)[0])
        kv.committed = hi
    state = kv.states.take(mixer.index, cuts[-1], cuts[-1], dict)
    return Carried(torch.cat(outs), tensors_of(state))


def mixers_of(drivers: Iterable[LayerDriver]) -> list[RecurrentMixer | DeltaMixer]:
    """Return the mixers of the layers that carry a state."""
    found = (getattr(driver, "mixer", None) for driver in drivers)
    return [mixer for mixer in found if isinstance(mixer, RecurrentMixer | DeltaMixer)]


def state_bytes(drivers: Iterable[LayerDriver], like_TD: Tensor) -> int:
    """Return the bytes of the states of all layers at one position of a request.

    Args:
        drivers: Drivers of all layers.
        like_TD: Tensor with width, dtype and device of the drivers' input, and at least one row.
    """
    token = torch.zeros_like(like_TD[:1])
    with torch.inference_mode():
        found = [carry(mixer, token, [0, 1]) for mixer in mixers_of(drivers)]
    return sum(t.nbytes for one in found for t in one.states.values())


def kv_token_bytes(parts: ModelParts, model: nn.Module) -> int:
    """Return the bytes of keys and values of one token in all layers, as they are cached.

    Args:
        parts: Parts of the model.
        model: Model, whose config is read if an attention module lacks a size.
    """
    config = base_model(model).config
    size = parts.like.element_size()
    return size * sum(_kv_width(attn, config) for attn in parts.attentions)


def _kv_width(attn: Any, config: Any) -> int:
    if hasattr(attn, "kv_lora_rank"):
        return int(attn.kv_lora_rank + attn.qk_rope_head_dim)
    both = [getattr(attn, name, None) for name in ("k_proj", "v_proj")]
    linears = [x for x in both if isinstance(x, nn.Linear)]
    if len(linears) == len(both):
        return sum(int(x.out_features) for x in linears)
    head_dim = getattr(attn, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * int(heads) * int(head_dim)


class Charge(NamedTuple):
    """The largest number of bytes of a request of n tokens: `request_bytes + n * token_bytes`."""

    state_bytes: int
    """Bytes of states at one position that do not grow with the tokens. 0 if layers with a state
    also keep keys."""
    request_bytes: int
    token_bytes: int


def charged(
    shape: ModelShape, model: nn.Module, parts: ModelParts, drivers: Iterable[LayerDriver]
) -> tuple[ModelShape, Charge]:
    """Return the shape with `state_tokens`, and the bytes.

    A request is charged `state_tokens` tokens for its states. A request has two states: the state
    that it continues from, and the state that it writes. If states contain keys, each token is
    charged twice.
    """
    if parts.around is not None:
        fixed, per_token = growth_of(parts.around)
        found = Charge(0, 2 * fixed, 2 * per_token)
    else:
        num_bytes = state_bytes(drivers, parts.like)
        found = Charge(num_bytes, 2 * num_bytes, kv_token_bytes(parts, model))
    unit = max(found.token_bytes, LEAST_TOKEN_BYTES)
    return shape._replace(state_tokens=-(-found.request_bytes // unit)), found


def growth_of(around: Around) -> tuple[int, int]:
    """Return the most bytes that a request keeps at any length, and the bytes for every token.

    The bytes per token are measured before windows are full, and before keys are compressed.
    """
    kept = {num: around.kept_bytes(num) for num in (*GROWS, *OTHERS)}
    per_token = max(kept[hi] - kept[lo] for lo, hi in pairwise(GROWS))
    return max(0, *(num_bytes - per_token * num for num, num_bytes in kept.items())), per_token


def refuse_chunks(mixer: RecurrentMixer | DeltaMixer, like_TD: Tensor, *, exact: bool) -> None:
    """Compare a prompt in chunks, and token by token, with the same prompt in one pass.

    Args:
        mixer: Mixer of a layer.
        like_TD: Tensor with width, dtype and device of the mixer's input.
        exact: True if bits must be equal, not close.

    Raises:
        ModelError: The results differ, so chunks of a prompt and decode steps would be wrong.
    """
    made = torch.Generator().manual_seed(0)
    shape = (NUM_TRIED, like_TD.shape[1])
    x_TD = torch.randn(shape, generator=made, dtype=torch.float32).to(like_TD)
    whole = carry(mixer, x_TD, [0, NUM_TRIED])
    for how, cuts in CUTS.items():
        found = carry(mixer, x_TD, cuts)
        pairs = [("output", found.out_TD, whole.out_TD)]
        pairs += [(name, t, whole.states[name]) for name, t in found.states.items()]
        for name, one, other in pairs:
            far = float((one.float() - other.float()).norm() / other.float().norm().clamp_min(1e-9))
            if not (torch.equal(one, other) if exact else far <= CLOSE):
                raise ModelError(
                    f"layer {mixer.index} ({mixer.name}) carries a state, and a prompt in {how} "
                    f"gives another {name} than in one pass: they differ by {far:.3g} of it, "
                    f"{'no bit' if exact else CLOSE} is allowed"
                )
