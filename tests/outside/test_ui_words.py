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
    (tmp_path / "page.mjs").write_text(PAGE.read_text())
    script = (
        "import { drafted } from './page.mjs';"
        f"process.stdout.write(drafted({json.dumps(message)}));"
    )
    done = subprocess.run(
        ["node", "--input-type=module", "-e", script],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == words
