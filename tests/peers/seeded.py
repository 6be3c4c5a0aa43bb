"""A pytest plugin for openai-python's own tests: the files and batches that they name exist.

The tests were made for a server that answers anything. This puts `file_id`, `input_file_id` and a
batch `batch_id` into the server's state before each test, so that those of lookups, lists,
deletions and cancellations can be run against a server that keeps what it was given.
"""

import os
import sqlite3
import time
from pathlib import Path

import pytest

STATE = Path(os.environ["QLLM_STATE_DIR"])
FILES = ("file_id", "input_file_id")
OWNER = os.environ["QLLM_CALLER"]
"""Who calls a server without keys."""


@pytest.fixture(autouse=True)
def _seed() -> None:
    at = int(time.time())
    db = sqlite3.connect(STATE / "batch.db", timeout=30)
    try:
        with db:
            for name in FILES:
                (STATE / "files" / name).write_text("{}\n")
                values = (name, OWNER, "lines.jsonl", "batch", 3, at)
                db.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)", values)
            db.execute(
                "INSERT OR REPLACE INTO batches (id, owner, endpoint, input_file_id, status, "
                "metadata, created_at, expires_at) VALUES ('batch_id', ?, "
                "'/v1/completions', 'input_file_id', 'cancelling', '{}', ?, ?)",
                (OWNER, at, at + 60),
            )
    finally:
        db.close()
