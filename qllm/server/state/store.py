"""The state that the server keeps on disk: files, batches, answered lines, and responses.

    STATE_DIR/lock       held while a server runs
              batch.db   SQLite (WAL): one row per file, batch, answered line and response
              files/ID   an uploaded or generated file; written completely, then renamed

A line's answer is one row, written in one transaction. So after a crash, a line either has a whole
answer or none. The output file is made from the rows when the batch has ended. Only the owner of
the folder can read the files.
"""

import json
import logging
import os
import secrets
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

from qllm.errors import ConfigError
from qllm.private import private_fd
from qllm.server.http.errors import ApiError, storage_full
from qllm.server.http.lines import on_one_line
from qllm.server.state.folder import hold, make_private, open_database

GIB = 1 << 30
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
"""Tables added in version 2."""
EVENTS = """
CREATE TABLE response_events (
    response_id TEXT NOT NULL, number INTEGER NOT NULL, event TEXT NOT NULL,
    PRIMARY KEY (response_id, number)
) WITHOUT ROWID;
CREATE INDEX responses_unfinished ON responses (owner)
    WHERE status IN ('queued', 'in_progress');
"""
"""Tables added in version 3."""
KEPT_BYTES = """
ALTER TABLE files ADD COLUMN digest BLOB;
CREATE TABLE batch_inputs (batch_id TEXT PRIMARY KEY, digests BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE used (owner TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO used SELECT owner, sum(n) FROM (
    SELECT owner, bytes AS n FROM files UNION ALL
    SELECT owner, length(asked) + length(input) + length(response) FROM responses
) GROUP BY owner;
CREATE TRIGGER file_added AFTER INSERT ON files BEGIN
    INSERT INTO used VALUES (NEW.owner, NEW.bytes)
    ON CONFLICT (owner) DO UPDATE SET bytes = bytes + NEW.bytes;
END;
CREATE TRIGGER file_gone AFTER DELETE ON files BEGIN
    UPDATE used SET bytes = bytes - OLD.bytes WHERE owner = OLD.owner;
END;
CREATE TRIGGER response_added AFTER INSERT ON responses BEGIN
    INSERT INTO used
    VALUES (NEW.owner, length(NEW.asked) + length(NEW.input) + length(NEW.response))
    ON CONFLICT (owner) DO UPDATE SET bytes = bytes + excluded.bytes;
END;
CREATE TRIGGER response_changed AFTER UPDATE OF response ON responses BEGIN
    UPDATE used SET bytes = bytes + length(NEW.response) - length(OLD.response)
    WHERE owner = NEW.owner;
END;
CREATE TRIGGER response_gone AFTER DELETE ON responses BEGIN
    UPDATE used SET bytes = bytes - length(OLD.asked) - length(OLD.input) - length(OLD.response)
    WHERE owner = OLD.owner;
END;
"""
"""Columns and tables added in version 4: digests of files and batch lines, bytes of each key."""
VERSIONS = (TABLES, RESPONSES, EVENTS, KEPT_BYTES)
"""SQL that each version adds, by version. A database of a later version is refused."""
Row = dict[str, Any]


_log = logging.getLogger("qllm.server")


def now() -> int:
    """Return the seconds since 1970, the unit of the API's times."""
    return int(time.time())


class Store:
    """The files, batches and answers in the state folder.

    Any thread may call the store. Calls block. The class has many methods because each method is
    one SQL statement.

    Args:
        folder: State folder; created if missing.
        most_bytes: Most bytes of files and responses per key.
        reserve_bytes: Bytes of the disk that uploads leave for answers, at most a tenth of the
            disk.

    Raises:
        ConfigError: Another server uses the folder, or the folder is of another version, damaged,
            or cannot be written.
    """

    def __init__(
        self, folder: Path, *, most_bytes: int = 10 * GIB, reserve_bytes: int = GIB // 16
    ) -> None:
        self._files = folder / "files"
        self._most_bytes, self._reserve_bytes = most_bytes, reserve_bytes
        self._lock = threading.Lock()
        self._finishing = threading.Lock()
        self._coming_lock = threading.Lock()
        self._coming = Counter[str]()
        """Bytes of uploads that are being written, by key."""
        try:
            make_private(folder)
            self._held = hold(folder)
            try:
                self._db = open_database(folder, self._held, VERSIONS)
                self._sweep()
            except BaseException:
                os.close(self._held)
                raise
        except OSError as error:
            raise ConfigError(f"state_dir={str(folder)!r} cannot be used: {error}") from error

    def _sweep(self) -> None:
        """Remove files without a row, which a killed server left behind."""
        named = {row["id"] for row in self.rows("SELECT id FROM files")}
        left = [path for path in self._files.iterdir() if path.name not in named]
        for path in left:
            if path.suffix == ".part" or path.name.startswith("file-"):
                path.unlink()
        whole = [path for path in left if path.suffix != ".part"]
        if whole:
            text = "state_dir: %d files that a killed server left unfinished are removed"
            _log.warning(text, len(whole))

    def close(self) -> None:
        """Close the database and release the folder."""
        self._db.close()
        os.close(self._held)

    @contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """Run the block as one transaction: commit at the end, roll back after an error."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # a full disk may have ended the transaction already
                    self._db.execute("ROLLBACK")
                raise

    def rows(self, sql: str, *values: Any) -> list[Row]:
        """Return the rows of a query's result."""
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
        """Return at most `limit` rows of an owner, after the row `after`."""
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
        """Return the path of a file's content."""
        return self._files / file_id

    def write(self, file_id: str, chunks: Iterable[bytes]) -> tuple[int, bytes]:
        """Write a file completely or not at all.

        Return the file's size in bytes, and the digest.
        """
        part, size, sums = self._files / f"{file_id}.part", 0, blake2b()
        try:
            with open(private_fd(part, os.O_WRONLY | os.O_TRUNC), "wb") as out:
                for chunk in chunks:
                    size += out.write(chunk)
                    sums.update(chunk)
                out.flush()
                os.fsync(out.fileno())
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        os.replace(part, self.path(file_id))
        folder = os.open(self._files, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        return size, sums.digest()

    def add_file(self, owner: str, filename: str, source: IO[bytes], num_bytes: int = 0) -> Row:
        """Store an upload.

        Args:
            owner: Caller that the file belongs to.
            filename: Name that the owner gave the file.
            source: Content of the file.
            num_bytes: Size of the source in bytes.

        Raises:
            ApiError: The owner's quota is exceeded, or the disk is full.
        """
        file_id = f"file-{secrets.token_hex(12)}"
        with self._room(owner, num_bytes):
            size, digest = self.write(file_id, iter(lambda: source.read(1 << 20), b""))
            try:
                with self.change() as db:
                    _insert_file(db, file_id, owner, filename, "batch", size, digest)
            except BaseException:
                self.path(file_id).unlink(missing_ok=True)
                raise
        found = self.file(file_id, owner)
        assert found is not None
        return found

    @contextmanager
    def _room(self, owner: str, num_bytes: int) -> Iterator[None]:
        """Reserve disk space for an upload while the block writes it."""
        with self._coming_lock:
            self.refuse_more(owner, self._coming[owner] + num_bytes)
            disk = os.statvfs(self._files)
            reserve = min(self._reserve_bytes, disk.f_blocks * disk.f_frsize // 10)
            free = disk.f_bavail * disk.f_frsize - self._coming.total() - reserve
            if num_bytes > free:
                raise storage_full(f"{num_bytes} bytes are more than state_dir has room for")
            self._coming[owner] += num_bytes
        try:
            yield
        finally:
            with self._coming_lock:
                self._coming[owner] -= num_bytes

    def refuse_more(self, owner: str, num_bytes: int = 0) -> None:
        """Refuse more bytes than a key's quota allows.

        Raises:
            ApiError: 413, the key would exceed the quota.
        """
        rows = self.rows("SELECT bytes FROM used WHERE owner = ?", owner)
        used = rows[0]["bytes"] if rows else 0
        if used + num_bytes > self._most_bytes:
            text = (
                f"this API key keeps {used} bytes of files and responses, and {num_bytes} more are "
                f"above {self._most_bytes} (max_key_bytes); delete some first"
            )
            raise ApiError(413, text, code="storage_quota")

    def is_whole(self, row: Row) -> bool:
        """Return True if a file is unchanged.

        A file of an older release has no digest; its size counts.
        """
        try:
            with open(self.path(row["id"]), "rb") as file:
                if row["digest"] is None:
                    return os.fstat(file.fileno()).st_size == int(row["bytes"])
                sums = blake2b()
                while chunk := file.read(1 << 20):
                    sums.update(chunk)
        except OSError:
            return False
        return bool(sums.digest() == row["digest"])

    def file(self, file_id: str, owner: str) -> Row | None:
        """Return a file's row; None if the file is missing or belongs to another owner."""
        rows = self.rows("SELECT * FROM files WHERE id = ? AND owner = ?", file_id, owner)
        return rows[0] if rows else None

    def delete_file(self, file_id: str, owner: str) -> bool:
        """Delete a file and return True.

        Only return False if an unfinished batch reads the file.
        """
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
        """Store a new batch, which expires after `seconds`."""
        batch_id, at = f"batch_{secrets.token_hex(12)}", now()
        with self.change() as db:
            db.execute(
                "INSERT INTO batches (id, owner, endpoint, input_file_id, status, metadata, "
                "created_at, expires_at) VALUES (?, ?, ?, ?, 'validating', ?, ?, ?)",
                (batch_id, owner, endpoint, file_id, json.dumps(metadata), at, at + seconds),
            )
        return self.batch(batch_id)

    def batch(self, batch_id: str) -> Row:
        """Return the row of a batch that exists."""
        return self.rows("SELECT * FROM batches WHERE id = ?", batch_id)[0]

    def owned_batch(self, batch_id: str, owner: str) -> Row | None:
        """Return a batch's row; None if the batch is missing or belongs to another owner."""
        rows = self.rows("SELECT * FROM batches WHERE id = ? AND owner = ?", batch_id, owner)
        return rows[0] if rows else None

    def unfinished(self) -> list[str]:
        """Return ids of the batches that a new server must continue, oldest first."""
        marks = ",".join("?" * len(UNFINISHED))
        sql = f"SELECT id FROM batches WHERE status IN ({marks}) ORDER BY rowid"
        return [row["id"] for row in self.rows(sql, *UNFINISHED)]

    def move(
        self, batch_id: str, status: str, *, only_from: tuple[str, ...], **fields: Any
    ) -> bool:
        """Change a batch's status, the time of this status, and further columns.

        Returns False, without a change, if the current status is not in `only_from`.
        """
        columns = {"status": status, f"{status}_at": now(), **fields}
        sets = ", ".join(f"{name} = ?" for name in columns)
        marks = ",".join("?" * len(only_from))
        with self.change() as db:
            done = db.execute(
                f"UPDATE batches SET {sets} WHERE id = ? AND status IN ({marks})",
                (*columns.values(), batch_id, *only_from),
            )
            return done.rowcount == 1

    def accept(self, batch_id: str, digests: bytes, total: int) -> None:
        """Begin a validated batch, and store the digests of its lines."""
        with self.change() as db:
            done = db.execute(
                "UPDATE batches SET status = 'in_progress', in_progress_at = ?, total = ? "
                "WHERE id = ? AND status = 'validating'",
                (now(), total, batch_id),
            )
            if done.rowcount == 1:
                db.execute("INSERT INTO batch_inputs VALUES (?, ?)", (batch_id, digests))

    def digests(self, batch_id: str) -> bytes | None:
        """Return the digests of a batch's lines; None if an older release validated it."""
        rows = self.rows("SELECT digests FROM batch_inputs WHERE batch_id = ?", batch_id)
        return bytes(rows[0]["digests"]) if rows else None

    # -- lines

    def answered(self, batch_id: str) -> set[int]:
        """Return the numbers of the answered lines."""
        rows = self.rows("SELECT line FROM answers WHERE batch_id = ?", batch_id)
        return {row["line"] for row in rows}

    def answer(self, batch_id: str, line: int, is_ok: bool, record: Mapping[str, Any]) -> None:
        """Store the answer of a line.

        Raises:
            sqlite3.IntegrityError: The line already has an answer.
        """
        column = "num_ok" if is_ok else "num_failed"
        text = json.dumps(record, ensure_ascii=False)
        with self.change() as db:
            db.execute("INSERT INTO answers VALUES (?, ?, ?, ?)", (batch_id, line, is_ok, text))
            db.execute(f"UPDATE batches SET {column} = {column} + 1 WHERE id = ?", (batch_id,))

    def finish(self, batch_id: str, status: str) -> None:
        """Make the output and error files from the answers, and end the batch. Idempotent."""
        with self._finishing:
            batch = self.batch(batch_id)
            if batch["status"] in UNFINISHED:
                self._finish(batch, status)

    def _finish(self, batch: Row, status: str) -> None:
        batch_id: str = batch["id"]
        made: dict[str, tuple[str, int, bytes]] = {}
        for is_ok, column, kind in ((1, "output_file_id", "output"), (0, "error_file_id", "error")):
            file_id = f"file-{batch_id.removeprefix('batch_')}-{kind}"
            size, digest = self.write(file_id, self._records(batch_id, is_ok))
            if size:
                made[column] = (file_id, size, digest)
            else:
                self.path(file_id).unlink()
        with self.change() as db:
            for file_id, size, digest in made.values():
                name = f"{file_id.removeprefix('file-')}.jsonl"
                _insert_file(db, file_id, batch["owner"], name, "batch_output", size, digest)
            ids = [made.get(column, (None,))[0] for column in ("output_file_id", "error_file_id")]
            db.execute(
                f"UPDATE batches SET status = ?, {status}_at = ?, output_file_id = ?, "
                "error_file_id = ? WHERE id = ?",
                (status, now(), *ids, batch_id),
            )
            for table in ("answers", "batch_inputs"):
                db.execute(f"DELETE FROM {table} WHERE batch_id = ?", (batch_id,))

    def _records(self, batch_id: str, is_ok: int) -> Iterator[bytes]:
        last = -1
        while rows := self.rows(
            "SELECT line, record FROM answers WHERE batch_id = ? AND is_ok = ? AND line > ? "
            "ORDER BY line LIMIT 256",
            batch_id,
            is_ok,
            last,
        ):
            last = rows[-1]["line"]
            yield from (f"{on_one_line(row['record'])}\n".encode() for row in rows)


def _insert_file(
    db: sqlite3.Connection,
    file_id: str,
    owner: str,
    filename: str,
    purpose: str,
    size: int,
    digest: bytes,
) -> None:
    db.execute(
        "INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)",
        (file_id, owner, filename, purpose, size, now(), digest),
    )
