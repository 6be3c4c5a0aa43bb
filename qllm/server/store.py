"""What the server must not forget: files, batches, every line answered so far, and responses.

    STATE_DIR/lock       held while a server runs
              batch.db   SQLite (WAL): one row per file, batch, answered line and response
              files/ID   what was uploaded and what was made; written whole, then named

A line's answer is one row, written in one transaction. So after a crash a line is either answered
or not; the output file is made from the rows when the batch has ended.
"""

import fcntl
import json
import os
import secrets
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from qllm.errors import ConfigError

VERSION = 3
"""Version of the tables. A database of a later version is refused."""
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
TABLES = """
CREATE TABLE files (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL, created_at INTEGER NOT NULL
);
CREATE TABLE batches (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, endpoint TEXT NOT NULL, input_file_id TEXT NOT NULL,
    status TEXT NOT NULL, metadata TEXT NOT NULL, errors TEXT NOT NULL DEFAULT 'null',
    created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL, in_progress_at INTEGER,
    finalizing_at INTEGER, completed_at INTEGER, failed_at INTEGER, expired_at INTEGER,
    cancelling_at INTEGER, cancelled_at INTEGER, output_file_id TEXT, error_file_id TEXT,
    total INTEGER NOT NULL DEFAULT 0, num_ok INTEGER NOT NULL DEFAULT 0,
    num_failed INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE answers (
    batch_id TEXT NOT NULL, line INTEGER NOT NULL, is_ok INTEGER NOT NULL, record TEXT NOT NULL,
    PRIMARY KEY (batch_id, line)
) WITHOUT ROWID;
"""
RESPONSES = """
CREATE TABLE responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created_at INTEGER NOT NULL, status TEXT NOT NULL,
    previous TEXT, asked TEXT NOT NULL, input TEXT NOT NULL, response TEXT NOT NULL
);
CREATE INDEX responses_by_age ON responses (created_at);
"""
"""Came with version 2."""
EVENTS = """
CREATE TABLE response_events (
    response_id TEXT NOT NULL, number INTEGER NOT NULL, event TEXT NOT NULL,
    PRIMARY KEY (response_id, number)
) WITHOUT ROWID;
CREATE INDEX responses_unfinished ON responses (owner)
    WHERE status IN ('queued', 'in_progress');
"""
"""Came with version 3."""
Row = dict[str, Any]


def now() -> int:
    """Seconds since 1970: what the API's times are in."""
    return int(time.time())


class Store:
    """The state of the batch API. Safe to use from any thread; calls block.

    It has many methods because each is one statement of SQL.

    Raises:
        ConfigError: Another server uses the folder, or it is of another version.
    """

    def __init__(self, folder: Path) -> None:
        self._files = folder / "files"
        self._files.mkdir(parents=True, exist_ok=True)
        self._lock_file = open(folder / "lock", "w")  # noqa: SIM115 - held until `close`
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock_file.close()
            raise ConfigError(f"state_dir={str(folder)!r} is used by another server") from error
        for part in self._files.glob("*.part"):  # a server was killed while it wrote
            part.unlink()
        self._lock = threading.Lock()
        self._finishing = threading.Lock()
        self._db = sqlite3.connect(
            folder / "batch.db", check_same_thread=False, isolation_level=None
        )
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")  # what was acknowledged outlives the power
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version < VERSION:
            tables = (TABLES, RESPONSES, EVENTS)[version:]
            self._db.executescript(
                f"BEGIN; {''.join(tables)} PRAGMA user_version = {VERSION}; COMMIT;"
            )
        elif version > VERSION:
            self.close()
            raise ConfigError(
                f"state_dir={str(folder)!r} has version {version}; this release reads {VERSION}"
            )

    def close(self) -> None:
        """Let go of the folder."""
        self._db.close()
        self._lock_file.close()

    @contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """One transaction."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def rows(self, sql: str, *values: Any) -> list[Row]:
        """What a query finds."""
        with self._lock:
            return [dict(row) for row in self._db.execute(sql, values).fetchall()]

    def page(
        self,
        table: str,
        owner: str,
        after: str | None,
        limit: int,
        newest_first: bool = True,
        purpose: str | None = None,
    ) -> list[Row]:
        """Rows of an owner, at most `limit`, behind the row `after`."""
        sign, order = ("<", "DESC") if newest_first else (">", "ASC")
        where, values = "owner = ?", [owner]
        if after is not None:
            where += f" AND rowid {sign} (SELECT rowid FROM {table} WHERE id = ?)"
            values.append(after)
        if purpose is not None:
            where += " AND purpose = ?"
            values.append(purpose)
        sql = f"SELECT * FROM {table} WHERE {where} ORDER BY rowid {order} LIMIT ?"
        return self.rows(sql, *values, limit)

    # -- files

    def path(self, file_id: str) -> Path:
        """Where the content of a file is."""
        return self._files / file_id

    def write(self, file_id: str, chunks: Iterable[str]) -> int:
        """Write a file whole or not at all; return its bytes."""
        with self._new(file_id) as out:
            for chunk in chunks:
                out.write(chunk.encode())
        return self.path(file_id).stat().st_size

    @contextmanager
    def _new(self, file_id: str) -> Iterator[IO[bytes]]:
        part = self._files / f"{file_id}.part"
        try:
            with open(part, "wb") as out:
                yield out
                out.flush()
                os.fsync(out.fileno())
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        os.replace(part, self.path(file_id))
        folder = os.open(self._files, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    def add_file(self, owner: str, filename: str, source: IO[bytes]) -> Row:
        """Keep an upload."""
        file_id = f"file-{secrets.token_hex(12)}"
        with self._new(file_id) as out:
            shutil.copyfileobj(source, out, 1 << 20)
        size = self.path(file_id).stat().st_size
        with self.change() as db:
            _insert_file(db, file_id, owner, filename, "batch", size)
        found = self.file(file_id, owner)
        assert found is not None
        return found

    def file(self, file_id: str, owner: str) -> Row | None:
        """A file, if it is the owner's."""
        rows = self.rows("SELECT * FROM files WHERE id = ? AND owner = ?", file_id, owner)
        return rows[0] if rows else None

    def delete_file(self, file_id: str, owner: str) -> bool:
        """Delete a file; False if an unfinished batch reads it."""
        marks = ",".join("?" * len(UNFINISHED))
        with self.change() as db:
            used = db.execute(
                f"SELECT 1 FROM batches WHERE input_file_id = ? AND status IN ({marks})",
                (file_id, *UNFINISHED),
            ).fetchone()
            if used:
                return False
            db.execute("DELETE FROM files WHERE id = ? AND owner = ?", (file_id, owner))
        self.path(file_id).unlink(missing_ok=True)
        return True

    # -- batches

    def add_batch(
        self, owner: str, endpoint: str, file_id: str, metadata: Mapping[str, Any], seconds: int
    ) -> Row:
        """Keep a new batch, to be answered within `seconds`."""
        batch_id, at = f"batch_{secrets.token_hex(12)}", now()
        with self.change() as db:
            db.execute(
                "INSERT INTO batches (id, owner, endpoint, input_file_id, status, metadata, "
                "created_at, expires_at) VALUES (?, ?, ?, ?, 'validating', ?, ?, ?)",
                (batch_id, owner, endpoint, file_id, json.dumps(metadata), at, at + seconds),
            )
        return self.batch(batch_id)

    def batch(self, batch_id: str) -> Row:
        """A batch that exists."""
        return self.rows("SELECT * FROM batches WHERE id = ?", batch_id)[0]

    def owned_batch(self, batch_id: str, owner: str) -> Row | None:
        """A batch, if it is the owner's."""
        rows = self.rows("SELECT * FROM batches WHERE id = ? AND owner = ?", batch_id, owner)
        return rows[0] if rows else None

    def unfinished(self) -> list[str]:
        """Ids of the batches that a server has to go on with, oldest first."""
        marks = ",".join("?" * len(UNFINISHED))
        sql = f"SELECT id FROM batches WHERE status IN ({marks}) ORDER BY rowid"
        return [row["id"] for row in self.rows(sql, *UNFINISHED)]

    def move(
        self, batch_id: str, status: str, *, only_from: tuple[str, ...], **fields: Any
    ) -> bool:
        """Change the status, note when, and set further columns; False from another status."""
        columns = {"status": status, f"{status}_at": now(), **fields}
        sets = ", ".join(f"{name} = ?" for name in columns)
        marks = ",".join("?" * len(only_from))
        with self.change() as db:
            done = db.execute(
                f"UPDATE batches SET {sets} WHERE id = ? AND status IN ({marks})",
                (*columns.values(), batch_id, *only_from),
            )
            return done.rowcount == 1

    # -- lines

    def answered(self, batch_id: str) -> set[int]:
        """Numbers of the lines that have their answer."""
        rows = self.rows("SELECT line FROM answers WHERE batch_id = ?", batch_id)
        return {row["line"] for row in rows}

    def answer(self, batch_id: str, line: int, is_ok: bool, record: Mapping[str, Any]) -> None:
        """Keep the answer of a line.

        Raises:
            sqlite3.IntegrityError: It has one already.
        """
        column = "num_ok" if is_ok else "num_failed"
        text = json.dumps(record, ensure_ascii=False)
        with self.change() as db:
            db.execute("INSERT INTO answers VALUES (?, ?, ?, ?)", (batch_id, line, is_ok, text))
            db.execute(f"UPDATE batches SET {column} = {column} + 1 WHERE id = ?", (batch_id,))

    def finish(self, batch_id: str, status: str) -> None:
        """Make the output and error files from the answers, and end the batch. Repeats safely."""
        with self._finishing:
            batch = self.batch(batch_id)
            if batch["status"] in UNFINISHED:
                self._finish(batch, status)

    def _finish(self, batch: Row, status: str) -> None:
        batch_id: str = batch["id"]
        made: dict[str, tuple[str, int]] = {}
        for is_ok, column, kind in ((1, "output_file_id", "output"), (0, "error_file_id", "error")):
            file_id = f"file-{batch_id.removeprefix('batch_')}-{kind}"
            size = self.write(file_id, self._records(batch_id, is_ok))
            if size:
                made[column] = (file_id, size)
            else:
                self.path(file_id).unlink()
        with self.change() as db:
            for file_id, size in made.values():
                name = f"{file_id.removeprefix('file-')}.jsonl"
                _insert_file(db, file_id, batch["owner"], name, "batch_output", size)
            ids = [made.get(column, (None,))[0] for column in ("output_file_id", "error_file_id")]
            db.execute(
                f"UPDATE batches SET status = ?, {status}_at = ?, output_file_id = ?, "
                "error_file_id = ? WHERE id = ?",
                (status, now(), *ids, batch_id),
            )
            db.execute("DELETE FROM answers WHERE batch_id = ?", (batch_id,))

    def _records(self, batch_id: str, is_ok: int) -> Iterator[str]:
        last = -1
        while rows := self.rows(
            "SELECT line, record FROM answers WHERE batch_id = ? AND is_ok = ? AND line > ? "
            "ORDER BY line LIMIT 256",
            batch_id,
            is_ok,
            last,
        ):
            last = rows[-1]["line"]
            yield from (row["record"] + "\n" for row in rows)


def _insert_file(
    db: sqlite3.Connection, file_id: str, owner: str, filename: str, purpose: str, size: int
) -> None:
    db.execute(
        "INSERT INTO files VALUES (?, ?, ?, ?, ?, ?)",
        (file_id, owner, filename, purpose, size, now()),
    )
