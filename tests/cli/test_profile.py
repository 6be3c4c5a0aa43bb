"""`qllm profile`: a table, a JSON file and a figure, and errors before a model is loaded."""

import builtins
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from qllm.cli import app
from qllm.cli.app import FAILED
from qllm.models.depth_profile import read
from qllm.models.loader import load
from tests.support.files import ROOT

runner = CliRunner()
WRITE = os.W_OK | os.X_OK
TEXT = ROOT / "docs" / "guides" / "drafts.md"


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model `tiny` whose layers from the third on change nothing."""
    loaded = load("tiny")
    with torch.no_grad():
        for layer in loaded.model.model.layers[2:]:
            for name, p in layer.named_parameters():
                if "o_proj" in name or "down_proj" in name:
                    p.zero_()
    folder = tmp_path_factory.mktemp("models") / "known"
    loaded.model.save_pretrained(folder)
    assert loaded.tokenizer is not None
    loaded.tokenizer.save_pretrained(folder)
    return folder


def test_a_folder_with_a_known_model_is_profiled(known: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    code = ROOT / "qllm" / "measure" / "profile.py"
    arguments = ["profile", str(known), "--text", str(TEXT), "--text", f"code={code}"]
    done = runner.invoke(
        app,
        [*arguments, "--out", str(out), "--tokens", "100", "--set", "conformance=false"],
        terminal_width=200,
    )
    assert done.exit_code == 0, done.stderr
    assert "code: the first 100 of" in done.stderr
    found = json.loads((out / "profile.json").read_text())
    assert found["num_layers"] == 4
    assert found["num_tokens"] == {"drafts": 100, "code": 100}
    exits = {(e["text"], e["layer"]): e["agreement"] for e in found["exits"]}
    assert {place: x == 1.0 for place, x in exits.items()} == {
        (text, layer): layer >= 2 for text in ("drafts", "code") for layer in (1, 2, 3)
    }
    assert (out / "profile.png").read_bytes().startswith(b"\x89PNG")
    rows = [line.split()[:3] for line in done.stdout.splitlines() if line.startswith(" drafts")]
    assert [row[1:] for row in rows[1:]] == [["2", "100.0%"], ["3", "100.0%"]]
    proposal = found["proposal"]
    said = f"draft=exit:{proposal['layer']} " if proposal else f"is proposed: {found['why_none']}"
    assert said in " ".join(done.stdout.split())


def test_depths_are_measured_and_written_beside_the_weights(known: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.json"
    arguments = ["profile", str(known), "--depths", "--candidates", "1,2", "--tokens", "64"]
    arguments += ["--set", "conformance=false", "--memory", "2GiB", "--threads", "1"]
    done = runner.invoke(app, arguments, terminal_width=200)
    assert done.exit_code == 0, done.stderr
    found = read(str(known))
    assert [one.depth for one in found.depths] == [1, 2, 4]
    assert [one.agreed == 1 for one in found.depths] == [False, True, True]
    rows = [line.split() for line in done.stdout.splitlines() if " of 4 " in line]
    assert [row[0] for row in rows] == ["1", "2", "4"] * 2
    assert [row[3] for row in rows[1:3]] == ["100.0%"] * 2
    assert [row[-1] for row in rows[3:]] == [f"{one.kv_tokens:,}" for one in found.depths]
    done = runner.invoke(app, [*arguments, "--text", str(TEXT), "--output", str(again)])
    assert done.exit_code == 0, done.stderr
    assert list(read(str(known), again).depths[0].agreement) == ["drafts"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["tiny", "--candidates", "1"], "--candidates and --output go with --depths"),
        (["tiny", "--depths", "--candidates", "1,x"], "must be depths with commas between"),
        (["tiny", "--depths", "--candidates", "7"], "depth 7 must be in [1, 4]"),
        (["tiny", "--depths", "--set", "depth=2"], "leave depth out"),
        (["tiny", "--depths", "--output", "/proc/x"], "cannot be written to '/proc/x'"),
        (["tiny", "--depths", "--output", "/"], "is a folder; name a file"),
        (["tiny", "--depths", "--text", "no-such.txt"], "text 'no-such.txt' cannot be read"),
        (["tiny"], "a profile needs a text"),
        (["tiny", "--text", "no-such.txt"], "text 'no-such.txt' cannot be read"),
        (["no-such-model", "--text", str(TEXT)], "known aliases"),
        (["tiny", "--text", str(TEXT), "--out", __file__], "is no folder and cannot be made"),
        (["tiny", "--text", str(TEXT), "--out", "/proc/x"], "is no folder and cannot be made"),
        (["tiny", "--text", str(TEXT), "--set", "nonsense=1"], "unknown setting 'nonsense'"),
        (["tiny", "--text", str(TEXT), "--dtype", "float7"], "float7"),
        (["tiny", "--text", "{short}"], "has 1 token; a profile needs 32 or more"),
    ],
)
def test_an_error_is_one_line(
    arguments: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("a")
    done = runner.invoke(app, ["profile", *(a.format(short="short.txt") for a in arguments)])
    assert done.exit_code == FAILED
    assert why in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_folder_in_which_nothing_can_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.access  # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: mode != WRITE and real(path, mode))
    done = runner.invoke(app, ["profile", "tiny", "--text", str(TEXT), "--out", str(tmp_path)])
    assert done.exit_code == FAILED
    assert "nothing can be written there; name another folder" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    done = runner.invoke(app, ["profile", "tiny", "--text", str(TEXT)])
    assert done.exit_code == FAILED
    assert "a figure needs matplotlib; pip install" in done.stderr
