"""Words of the live page that its scripts make of numbers, in Node."""

import json
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

PAGE = files("qllm.server.page") / "static" / "page.js"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({}, ""),
        (
            {
                "drafter": "auto",
                "drafts": {
                    "LS": {"accepted": 1000, "rejected": 204},
                    "BE": {"accepted": 0, "rejected": 0},
                },
            },
            "drafted tokens (auto): LS 1,204, 83 % accepted; BE 0",
        ),
    ],
)
def test_drafts_are_told_in_words(message: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert said("drafted", message, tmp_path) == words


READ = {"loads": 3, "bytes": 12_340_000_000, "waits_ms": 5.0}
HELD = {
    "resident": 18, "experts": 32, "waiting": 0, "blocking": {"loads": 1, "bytes": 1_500_000_000},
}  # fmt: skip


@pytest.mark.parametrize(
    ("experts", "words"),
    [
        ({}, ""),
        (HELD, "18 of 32 experts in memory, from the file 1.50 GB"),
        (
            HELD | {"LS": READ, "BE": READ | {"bytes": 0}},
            "18 of 32 experts in memory, from the file LS 12.34 GB, BE 0.00 GB",
        ),
        (
            HELD | {"waiting": 2, "LS": READ, "BE": READ},
            "18 of 32 experts in memory, from the file LS 12.34 GB, BE 12.34 GB; 2 passes waiting "
            "for it",
        ),
    ],
)
def test_experts_of_a_file_are_told_in_words(
    experts: dict[str, Any], words: str, tmp_path: Path
) -> None:
    assert said("residents", experts, tmp_path) == words


def said(function: str, given: dict[str, Any], place: Path) -> str:
    """Return what a function of the page says."""
    (place / "page.mjs").write_text(PAGE.read_text())
    script = (
        f"import {{ {function} }} from './page.mjs';"
        f"process.stdout.write({function}({json.dumps(given)}));"
    )
    done = subprocess.run(
        ["node", "--input-type=module", "-e", script],
        cwd=place, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout
