"""At the start a layer with a state shows that chunks go on from it, or is refused."""

from typing import Any

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from qllm import QLLMEngine
from qllm.errors import ModelError
from qllm.runner.layers.deltas import DeltaMixer
from qllm.runner.layers.recurrent import RecurrentMixer
from qllm.runner.layers.trial import refuse_chunks, state_bytes
from tests.support.deltas import HIDDEN, mixer_of, module_of, parts_of
from tests.support.hybrids import make_hybrid


class Anew(Qwen3NextGatedDeltaNet):
    """Begins anew where several tokens go on from a state, as Jamba's Mamba does."""

    shortest = 2

    def forward(self, hidden_states: Any, cache_params: Any = None, **given: Any) -> Any:
        layer = cache_params.layers[self.layer_idx]
        if hidden_states.shape[1] >= self.shortest and layer.has_previous_state[0]:
            for t in (layer.conv_states[0], layer.recurrent_states[0]):
                t.zero_()
        return super().forward(hidden_states, cache_params=cache_params, **given)


class Broken(Anew):
    """Begins anew with every call."""

    shortest = 1


LIKE = torch.zeros(1, HIDDEN).bfloat16()


def recurrent(kind: type) -> RecurrentMixer:
    module = module_of("grouped")
    module.__class__ = kind
    return RecurrentMixer(module, parts_of(module, "grouped").new_state)


@torch.inference_mode()
def test_a_module_that_goes_on_passes_and_says_what_it_carries() -> None:
    mixer = recurrent(Qwen3NextGatedDeltaNet)
    refuse_chunks(mixer, LIKE, exact=False)
    assert mixer._goes_on_in_chunks
    with pytest.raises(ModelError, match="no bit is allowed"):
        refuse_chunks(mixer, LIKE, exact=True)


@torch.inference_mode()
def test_a_layer_with_chunks_that_begin_anew_is_called_token_by_token() -> None:
    mixer = recurrent(Anew)
    refuse_chunks(mixer, LIKE, exact=False)
    assert mixer._goes_on_in_chunks is False


@torch.inference_mode()
def test_one_that_forgets_its_state_is_refused() -> None:
    with pytest.raises(ModelError, match=r"layer 0 \(Broken\) carries a state, and a prompt in "):
        refuse_chunks(recurrent(Broken), LIKE, exact=False)


@torch.inference_mode()
def test_our_kernel_must_give_the_same_bits() -> None:
    refuse_chunks(mixer_of(module_of("grouped"), "grouped"), LIKE, exact=True)

    class Off(DeltaMixer):
        def __call__(self, *args: Any, **given: Any) -> Any:
            out = super().__call__(*args, **given)
            return out * (1.01 if out.shape[1] == 1 else 1)

    mixer = mixer_of(module_of("grouped"), "grouped")
    mixer.__class__ = Off
    refuse_chunks(mixer, LIKE, exact=False)
    with pytest.raises(ModelError, match="a prompt in tokens gives another output"):
        refuse_chunks(mixer, LIKE, exact=True)


@torch.inference_mode()
def test_what_all_layers_carry_is_measured() -> None:
    class Driver:
        mixer = mixer_of(module_of("split"), "split")

    assert state_bytes([Driver(), object()], LIKE) == 4 * 32 * 48 * 4 + (2 * 64 + 4 * 48) * 4 * 2  # type: ignore[list-item]
    assert state_bytes([object()], LIKE) == 0  # type: ignore[list-item]


def test_the_engine_refuses_the_family_by_name() -> None:
    model = make_hybrid("qwen3_next", torch.float32)
    model.model.layers[0].linear_attn.__class__ = Broken
    with pytest.raises(ModelError, match=r"'qwen3_next' cannot be driven: layer 0 \(Broken\)"):
        QLLMEngine.from_model(model, threads=1, max_kv_tokens=1 << 17)
