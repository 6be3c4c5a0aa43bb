"""A pytest plugin for openai-python's own tests: files, batches and responses they name exist.

The tests were made for a server that answers anything. This puts `file_id`, `input_file_id`, a
batch `batch_id` and two responses into the server's state before each test, so that those of
lookups, lists, deletions and cancellations can be run against a server that keeps what it was
given.
"""

import json
import os
import sqlite3
import time
from pathlib import Path

import pytest

STATE = Path(os.environ["QLLM_STATE_DIR"])
FILES = ("file_id", "input_file_id")
RESPONSES = ("resp_677efb5139a88190b512bc3fef8e535d", "response_id")
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
            for name in RESPONSES:
                part = {"type": "input_text", "text": "x"}
                item = {"id": "msg_1", "type": "message", "role": "user", "content": [part]}
                made = (name, OWNER, at, "cancelled", None, "{}", json.dumps([item]))
                db.execute(
                    "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    (*made, json.dumps(_response(name, at))),
                )
    finally:
        db.close()


def _response(name: str, at: int) -> dict[str, object]:
    return {
        "id": name, "object": "response", "created_at": at, "status": "cancelled",
        "background": True, "model": "tiny", "output": [], "parallel_tool_calls": True,
        "tool_choice": "auto", "tools": [], "previous_response_id": None,
    }  # fmt: skip
