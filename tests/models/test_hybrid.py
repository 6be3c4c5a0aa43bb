"""The cache that a module with a state is given: it holds one layer, whatever the layer's index."""

import inspect
from typing import Any

import pytest
import torch
from transformers.cache_utils import Cache, LinearAttentionLayer

from qllm.models.hybrid import OneState

OFFLOADING = {"offload", "prefetch"}
"""Nobody asks for these: no state is offloaded."""


def questions() -> list[str]:
    """Methods of transformers' cache that are asked about a layer, and about nothing else."""
    found = []
    for name, method in inspect.getmembers(Cache, inspect.isfunction):
        parameters = [*inspect.signature(method).parameters.values()][1:]
        needed = [p.name for p in parameters if p.default is p.empty]
        is_asked = name not in OFFLOADING
        if (
            is_asked
            and any(p.name == "layer_idx" for p in parameters)
            and set(needed) <= {"layer_idx"}
        ):
            found.append(name)
    return found


def answer(name: str, index: int) -> Any:
    state = LinearAttentionLayer()
    state.update_conv_state(torch.ones(1, 4, 3))
    state.update_recurrent_state(torch.ones(1, 2, 4, 4))
    try:
        return getattr(OneState(state), name)(layer_idx=index)
    except (AttributeError, ValueError) as error:  # a question about keys and values
        return type(error)


@pytest.mark.parametrize("name", questions())
def test_the_index_of_a_layer_changes_no_answer(name: str) -> None:
    first = answer(name, 0)
    for index in (1, 2, 61):
        found = answer(name, index)
        same = torch.equal(found, first) if isinstance(first, torch.Tensor) else found == first
        assert same, (index, found, first)


def test_the_state_that_was_there_is_seen() -> None:
    assert "has_previous_state" in questions()
    assert answer("has_previous_state", 2) is True
