"""The choice of a drafter by its name, and the drafters of packages."""

import sys
import types
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from qllm import QLLMEngine, SamplingParams, plugins
from qllm.config import EngineConfig
from qllm.drafters.choose import GROUP, OWN, drafters, load_drafter, model_path
from qllm.errors import ConfigError
from qllm.frontend.prompts import with_prediction


class Repeat:
    """The last token once more."""

    def __init__(self, request: Any) -> None:
        pass

    def propose(self, token_ids: Any, most: int) -> list[int]:
        return [token_ids[-1]] * most


@pytest.fixture(autouse=True)
def _their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("their_drafters")
    vars(module).update(Repeat=Repeat, NUMBER=7)
    monkeypatch.setitem(sys.modules, "their_drafters", module)
    found = [
        EntryPoint("repeat", "their_drafters:Repeat", GROUP),
        EntryPoint("number", "their_drafters:NUMBER", GROUP),
        EntryPoint("gone", "their_drafters:Gone", GROUP),
    ]
    others = plugins.entry_points
    monkeypatch.setattr(
        plugins, "entry_points", lambda group: found if group == GROUP else others(group=group)
    )


def test_a_package_adds_a_drafter_that_an_engine_uses() -> None:
    with QLLMEngine.from_pretrained(
        "tiny", run_in="thread", conformance=False, draft="repeat"
    ) as engine:
        engine.submit("a a a a", "LS", 20, temperature=0, ignore_eos=True).result(60)
        counts = engine.stats()["drafts"]
    assert sum(counts["LS"].values()) > 0
    assert counts["faults"] == {}


@pytest.mark.parametrize(("draft", "num"), [("none", 0), ("lookup", 3)])
def test_only_an_engine_that_drafts_reads_the_prediction(draft: str, num: int) -> None:
    """A prediction may be long, and its tokens wait with the request."""
    given = SamplingParams(prediction=(5, 6, 7))
    config = EngineConfig(draft=draft)
    assert len(with_prediction(given, None, config).prediction) == num


def test_our_drafters_and_those_of_packages_are_known() -> None:
    assert drafters() == [*OWN, "exit:E", "model:PATH", "mtp", "gone", "number", "repeat"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "x",
            "draft='x' is unknown; use one of none, auto, lookup, grammar, exit:E, model:PATH, "
            "mtp, gone, number, repeat",
        ),
        ("number", "drafter 'number' at their_drafters:NUMBER is 7, which makes no drafters; name"),
        ("gone", "drafter 'gone' cannot be loaded from their_drafters:Gone: .*; repair or unins"),
    ],
)
def test_a_drafter_that_cannot_be_used_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_drafter(name)


def test_a_draft_model_needs_a_path() -> None:
    assert model_path("lookup") is None
    assert model_path("model:a/b") == "a/b"
    with pytest.raises(ConfigError, match="draft='model: ' names no model; give a folder, a GGUF"):
        model_path("model: ")
