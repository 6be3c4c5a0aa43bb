"""The aliases as they are published: what is on the hub loads by its alias and answers.

Values are drawn and sizes are scaled (`tests/support/hub.py` states the rule); configs, names,
dtypes, shapes and shards are those of the originals.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from torch import Tensor

from qllm import QLLMEngine, SamplingParams
from qllm.errors import ModelError
from qllm.models import loader
from qllm.models.loader import load
from tests.support import hub

GREEDY = SamplingParams(temperature=0, ignore_eos=True)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty hub cache, without a hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def small(alias: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A config that was scaled, and drawn tensors."""
    config = hub.scaled(hub.published_config(alias))
    return config, hub.drawn(hub.header(alias, config))


@pytest.mark.parametrize("alias", hub.HUB)
def test_headers_add_up_to_what_is_published(alias: str) -> None:
    tensors = hub.header(alias, hub.published_config(alias))
    published = hub.PUBLISHED[alias]
    assert published.num_tensors in (None, len(tensors))
    assert published.num_bytes in (None, sum(stored.num_bytes for stored in tensors.values()))


@pytest.mark.parametrize("alias", hub.HUB)
def test_an_alias_answers_from_the_hubs_cache(alias: str, cache: Path) -> None:
    hub.lay(cache, alias, *small(alias))
    with QLLMEngine.from_pretrained(alias, run_in="thread", threads=1) as engine:
        answer = engine.submit([1, 2, 3], priority="LS", sampling=GREEDY, max_tokens=4).result(60)
    assert len(answer.token_ids) == 4


def parts_of_weights(alias: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> list[str]:
    """One name of every kind of tensor that the model needs."""
    further = f"model.layers.{config['num_hidden_layers']}."
    return list(hub.kinds({n: x for n, x in tensors.items() if not n.startswith(further)}).values())


@pytest.mark.sampled(8)
@pytest.mark.parametrize("wrong", ["missing", "renamed", "turned"])
@pytest.mark.parametrize("alias", hub.HUB)
def test_a_tensor_that_does_not_fit_is_refused_by_its_name(
    alias: str, wrong: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind of tensor, before a weight is read."""
    config, tensors = small(alias)
    monkeypatch.setattr(loader, "_pretrained", lambda *a: pytest.fail("weights are read"))
    for name in parts_of_weights(alias, config, tensors):
        value = tensors[name]
        if wrong == "turned" and (value.dim() < 2 or value.shape[-1] == value.shape[-2]):
            continue
        changed = {key: x for key, x in tensors.items() if key != name}
        if wrong != "missing":
            key, new = (f"{name}x", value) if wrong == "renamed" else (name, value.mT.contiguous())
            changed[key] = new
        hub.lay(cache, alias, config, changed)
        stem = re.sub("(_scale_inv|_blocks|_scales)$", "", name)  # codes and scales are one weight
        with pytest.raises(ModelError, match=re.escape(stem)):
            load(alias)
        shutil.rmtree(next(cache.iterdir()))
