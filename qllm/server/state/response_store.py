"""Stored responses, and the conversations that the responses continue."""

import json
import sqlite3
import time
from collections.abc import Sequence
from typing import Any

from qllm.server.http.errors import ApiError
from qllm.server.state.store import Row, Store

UNFINISHED = ("queued", "in_progress")
KEPT_S = 30 * 24 * 3600
"""Seconds for which a response is stored: 30 days, as in OpenAI's API."""
BUSY_S = 10
"""Retry-After, in seconds, when an owner has too many unfinished responses."""
EVENTS_AT_ONCE = 256
_CHAIN = """
WITH RECURSIVE chain(id, previous, status, input, output, depth) AS (
    SELECT id, previous, status, input, response -> '$.output' AS output, 0
    FROM responses WHERE id = ? AND owner = ?
    UNION ALL
    SELECT r.id, r.previous, r.status, r.input, r.response -> '$.output', depth + 1
    FROM responses r JOIN chain ON r.id = chain.previous WHERE r.owner = ?
) SELECT * FROM chain ORDER BY depth DESC
"""


class ResponseStore:
    """The responses in the state folder. Any thread may call the store. Calls block.

    Args:
        store: Store of the folder.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def add(
        self,
        owner: str,
        asked: str,
        items: str,
        response: Row,
        *,
        events: Sequence[str] = (),
        most_unfinished: int | None = None,
        now_s: int | None = None,
    ) -> None:
        """Store a response, and delete responses that are too old.

        Args:
            owner: Caller that the response belongs to.
            asked: Body of the request, as JSON.
            items: Input of this request, as JSON, without the input of earlier responses.
            response: The response in the API's shape.
            events: First events of the stream, for a streamed response.
            most_unfinished: Most unfinished responses of the owner; None is unlimited.
            now_s: Seconds since 1970.

        Raises:
            ApiError: 429, the owner has too many unfinished responses.
        """
        at = int(time.time()) if now_s is None else now_s
        values = (
            response["id"], owner, at, response["status"], response["previous_response_id"],
            asked, items, json.dumps(response),
        )  # fmt: skip
        self._store.refuse_more(owner, sum(len(text) for text in values[-3:]))
        with self._store.change() as db:
            _refuse_more(db, owner, most_unfinished)
            old = "SELECT id FROM responses WHERE created_at < ? AND status NOT IN (?, ?)"
            for name, column in (("response_events", "response_id"), ("responses", "id")):
                sql = f"DELETE FROM {name} WHERE {column} IN ({old})"
                db.execute(sql, (at - KEPT_S, *UNFINISHED))
            db.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
            _append(db, response["id"], events)

    def get(self, response_id: str, owner: str) -> Row:
        """Return a response in the API's shape.

        Raises:
            ApiError: 404, also if the response belongs to another owner.
        """
        return dict(json.loads(self._row(response_id, owner)["response"]))

    def items(self, response_id: str, owner: str) -> str:
        """Return the input of a response, as JSON.

        Raises:
            ApiError: 404.
        """
        return str(self._row(response_id, owner)["input"])

    def _row(self, response_id: str, owner: str) -> Row:
        sql = "SELECT * FROM responses WHERE id = ? AND owner = ?"
        if not (rows := self._store.rows(sql, response_id, owner)):
            text = f"there is no response {response_id!r:.80}"
            raise ApiError(404, text, code="response_not_found")
        return rows[0]

    def conversation(self, response_id: str, owner: str) -> list[str]:
        """Return the items of a response and of all earlier ones in the conversation, oldest first.

        Each element is a JSON list of input or output items.

        Raises:
            ApiError: The response is missing or did not end well, or an earlier one was deleted.
        """
        field, code = "previous_response_id", "previous_response_not_found"
        rows = self._store.rows(_CHAIN, response_id, owner, owner)
        if not rows:
            text = f"there is no response {response_id!r:.80}"
            raise ApiError(400, text, param=field, code=code)
        if rows[0]["previous"] is not None:
            text = f"response {rows[0]['previous']!r}, with which the conversation began, is gone"
            raise ApiError(400, text, param=field, code=code)
        if rows[-1]["status"] not in ("completed", "incomplete"):
            status = rows[-1]["status"]
            how = "when it has ended" if status in UNFINISHED else "from the response before it"
            text = f"response {response_id!r} is {status}; go on {how}"
            raise ApiError(400, text, param=field)
        return [text for row in rows for text in (row["input"], row["output"])]

    def delete(self, response_id: str, owner: str) -> None:
        """Delete a response.

        Raises:
            ApiError: 404.
        """
        self._row(response_id, owner)
        with self._store.change() as db:
            db.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (response_id, owner))
            db.execute("DELETE FROM response_events WHERE response_id = ?", (response_id,))

    # -- in the background

    def unfinished(self) -> list[str]:
        """Return ids of the responses that a new server must continue, oldest first."""
        sql = "SELECT id FROM responses WHERE status IN (?, ?) ORDER BY rowid"
        return [row["id"] for row in self._store.rows(sql, *UNFINISHED)]

    def work(self, response_id: str) -> Row | None:
        """Return the row of an unfinished response of any owner; None if it has ended."""
        sql = "SELECT * FROM responses WHERE id = ? AND status IN (?, ?)"
        rows = self._store.rows(sql, response_id, *UNFINISHED)
        return rows[0] if rows else None

    def change(self, response_id: str, response: dict[str, Any], *events: str) -> bool:
        """Replace an unfinished response, and append events to the response.

        Returns False, without a change, if the response has already ended.
        """
        with self._store.change() as db:
            done = db.execute(
                "UPDATE responses SET status = ?, response = ? WHERE id = ? AND status IN (?, ?)",
                (response["status"], json.dumps(response), response_id, *UNFINISHED),
            )
            if done.rowcount == 1:
                _append(db, response_id, events)
            return done.rowcount == 1

    # -- events of a stream

    def add_event(self, response_id: str, event: str) -> bool:
        """Add an event to an unfinished response. Return False if the response has ended."""
        with self._store.change() as db:
            sql = "SELECT 1 FROM responses WHERE id = ? AND status IN (?, ?)"
            is_open = db.execute(sql, (response_id, *UNFINISHED)).fetchone() is not None
            if is_open:
                _append(db, response_id, (event,))
            return is_open

    def num_events(self, response_id: str) -> int:
        """Return the number of events of a response. Events are numbered from 0."""
        sql = "SELECT COUNT(*) AS n FROM response_events WHERE response_id = ?"
        return int(self._store.rows(sql, response_id)[0]["n"])

    def events(self, response_id: str, after: int) -> tuple[list[str], bool]:
        """Return the next events after a number, and True if no more will follow."""
        is_over = self.work(response_id) is None  # first: the last event is stored with the end
        sql = (
            "SELECT event FROM response_events WHERE response_id = ? AND number > ? "
            "ORDER BY number LIMIT ?"
        )
        found = [r["event"] for r in self._store.rows(sql, response_id, after, EVENTS_AT_ONCE)]
        return found, is_over and len(found) < EVENTS_AT_ONCE


def _append(db: sqlite3.Connection, response_id: str, events: Sequence[str]) -> None:
    sql = "SELECT COUNT(*) FROM response_events WHERE response_id = ?"
    (first,) = db.execute(sql, (response_id,)).fetchone()
    rows = [(response_id, number, event) for number, event in enumerate(events, first)]
    db.executemany("INSERT INTO response_events VALUES (?, ?, ?)", rows)


def _refuse_more(db: sqlite3.Connection, owner: str, most: int | None) -> None:
    if most is None:
        return
    sql = "SELECT COUNT(*) FROM responses WHERE owner = ? AND status IN ('queued', 'in_progress')"
    (count,) = db.execute(sql, (owner,)).fetchone()
    if count >= most:
        text = (
            f"{count} responses of this API key are in the background and not finished "
            f"(max_background={most}); try again when one has ended"
        )
        raise ApiError(429, text, code="background_limit", retry_after_s=BUSY_S)
