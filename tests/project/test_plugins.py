"""Policies found through their entry points: listed, loaded, and broken ones named."""

import re
import sys
import types
from importlib.metadata import EntryPoint

import pytest
from typer.testing import CliRunner

from qllm.cli import app
from qllm.errors import ConfigError
from qllm.plugins import GROUP, cap_names, installed_policies, load_factory, load_policy
from qllm.types import Cap

runner = CliRunner()


class Lean:
    """Runs anywhere.

    A second paragraph, which no list shows.
    """

    needs = Cap.NONE


class Picky:
    needs = Cap.LAYER_RANGE

    def __init__(self, seed: int) -> None:
        raise NotImplementedError


class NoNeeds:
    """Forgot to say what it needs."""


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """A module with policies, and the entry points of a machine that has only those."""
    module = types.ModuleType("theirs")
    vars(module).update(Lean=Lean, Picky=Picky, NoNeeds=NoNeeds)
    monkeypatch.setitem(sys.modules, "theirs", module)
    found = [EntryPoint("lean", "theirs:Lean", GROUP), EntryPoint("picky", "theirs:Picky", GROUP)]
    monkeypatch.setattr("qllm.plugins.entry_points", lambda group: found)
    return found


def rows() -> dict[str, list[str]]:
    """The table of `qllm policies`: by name, the first line of every cell."""
    done = runner.invoke(app, ["policies"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    lines = [re.split(r" {2,}", line.strip()) for line in done.stdout.splitlines()]
    return {cells[0]: cells[1:] for cells in lines if len(cells) > 1}


def test_every_installed_policy_is_listed_with_one_line_and_what_it_needs() -> None:
    listed = rows()
    for name, point in installed_policies().items():
        assert re.match(r"[A-Z\d]", listed[name][0]), listed[name]
        assert point.load().__doc__
    assert listed["fcfs"][1:] == ["chunk_tokens=None", "-"]
    assert listed["flow"][1:] == ["ls_ttft_ms=500", "yield_layer"]
    assert listed["rota"][1:] == ["lag_weight=3.0", "-"]


def test_a_policy_without_parameters_or_docstring_is_listed(points: list[EntryPoint]) -> None:
    listed = rows()
    assert listed["lean"] == ["Runs anywhere", "-"]
    assert listed["picky"] == ["layer_range"]


def test_a_broken_package_does_not_hide_the_others(points: list[EntryPoint]) -> None:
    points.append(EntryPoint("gone", "no_such_module:Gone", GROUP))
    points.append(EntryPoint("renamed", "theirs:Renamed", GROUP))
    points.append(EntryPoint("silent", "theirs:NoNeeds", GROUP))
    listed = rows()
    assert {"lean", "picky", "gone", "renamed", "silent"} <= set(listed)
    assert listed["gone"][0].startswith("policy 'gone' cannot be")
    assert listed["silent"][0].startswith("broken: AttributeError")
    for name in ("gone", "renamed"):
        with pytest.raises(ConfigError, match=f"policy '{name}' cannot be loaded from .*Error"):
            load_policy(name)
    assert load_factory(points[0]) is Lean


def test_one_name_in_two_packages_is_refused(points: list[EntryPoint]) -> None:
    points.append(EntryPoint("lean", "theirs:Lean", GROUP))  # listed twice, and the same
    assert load_factory(installed_policies()["lean"]) is Lean
    points.append(EntryPoint("lean", "elsewhere:Lean", GROUP))
    with pytest.raises(ConfigError, match="'lean' is installed twice: theirs:Lean and elsewhere"):
        load_policy("lean")


def test_capabilities_as_text() -> None:
    assert cap_names(Cap.NONE) == ""
    assert cap_names(Cap.YIELD_LAYER | Cap.LAYER_RANGE) == "layer_range, yield_layer"
