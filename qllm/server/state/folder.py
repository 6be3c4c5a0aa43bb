"""The state folder: private to its owner, locked by one server, with an intact database."""

import fcntl
import logging
import os
import re
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from qllm.errors import ConfigError
from qllm.private import make_private_folder, private_fd
from qllm.server.http.errors import is_unwritable

DATABASE = "batch.db"
OURS = re.compile(r"lock|files|batch\.db(-wal|-shm|-journal)?|lost\+found")
"""Names of the server's files in the folder, and of `lost+found`, which file systems create."""
MADE = b"made\n"
"""Content of the lock file once the database was made. After that, a missing database is an error.
"""
_log = logging.getLogger("qllm.server")


def make_private(folder: Path) -> None:
    """Make the folder and its subfolder `files`, and close both to other users.

    Raises:
        ConfigError: The folder is open to others and cannot be closed, or holds foreign files.
    """
    files = folder / "files"
    make_private_folder(folder)
    make_private_folder(files)
    wrong = [path for path in _entries(folder, files) if _mode(path) != _wanted(path)]
    open_ones = [path for path in wrong if _mode(path) & 0o077]
    if folder in open_ones:
        _refuse_shared(folder)
    for path in wrong:
        try:
            path.chmod(_wanted(path))
        except PermissionError as error:
            raise ConfigError(
                f"state_dir={str(folder)!r}: {path} is open to other users and belongs to another "
                "one; change its owner, or give a folder inside it, which the server makes"
            ) from error
        if _mode(path) & 0o077:
            raise ConfigError(
                f"state_dir={str(folder)!r}: {path} stays open to other users, as its file system "
                "has no permissions; give a folder on another one"
            )
    if open_ones:
        text = "state_dir=%r was open to other users of this host (%d entries); it is closed now"
        _log.warning(text, str(folder), len(open_ones))


def _refuse_shared(folder: Path) -> None:
    """Refuse to close a folder that other users may need, such as /tmp."""
    foreign = sorted(path.name for path in folder.iterdir() if not OURS.fullmatch(path.name))
    if foreign or folder.stat().st_mode & stat.S_ISVTX:
        also = f" and holds {foreign[0]!r}, which is not the server's" if foreign else ""
        raise ConfigError(
            f"state_dir={str(folder)!r} is open to other users{also}; give a folder of its own, "
            f"or close this one: chmod 700 {folder}"
        )


def _entries(folder: Path, files: Path) -> Iterator[Path]:
    """Yield the folder and the server's entries in the folder, except links."""
    yield folder
    for path in (*folder.iterdir(), *files.iterdir()):
        is_ours = OURS.fullmatch(path.name) and path.name != "lost+found"
        if (is_ours or path.parent == files) and not path.is_symlink():
            yield path


def _wanted(path: Path) -> int:
    return 0o700 if path.is_dir() else 0o600


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def hold(folder: Path) -> int:
    """Lock the folder for this process, and return the descriptor of the lock file.

    Raises:
        ConfigError: Another server has locked the folder.
    """
    fd = private_fd(folder / "lock", os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise ConfigError(f"state_dir={str(folder)!r} is used by another server") from error
    return fd


def open_database(folder: Path, lock: int, tables: Sequence[str]) -> sqlite3.Connection:
    """Open the database, check that the database is intact, and update it to the last version.

    Args:
        folder: Folder of the database.
        lock: Descriptor from `hold`.
        tables: SQL that each version adds to the previous version.

    Raises:
        ConfigError: The database is missing, damaged, of a later version, or cannot be written.
    """
    path = folder / DATABASE
    is_made = os.pread(lock, 1, 0) != b"" or any((folder / "files").iterdir())
    if is_made and not (path.is_file() and path.stat().st_size):
        raise _damaged(folder, "it is missing or empty")
    whole_pages = _has_whole_pages(path)
    os.close(private_fd(path, os.O_RDWR))
    db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    try:
        if not whole_pages:
            raise sqlite3.DatabaseError("it ends in the middle of a page")
        _bring_up(db, folder, tables)
    except sqlite3.DatabaseError as error:
        db.close()
        if is_unwritable(error):
            text = "make room, or make it writable, and start again"
            raise ConfigError(
                f"state_dir={str(folder)!r} cannot be written ({error}); {text}"
            ) from error
        raise _damaged(folder, str(error)) from error
    except BaseException:
        db.close()
        raise
    if not is_made or not os.pread(lock, 1, 0):
        try:
            os.pwrite(lock, MADE, 0)
        except OSError as error:  # a full disk: the next start writes it
            _log.warning("state_dir=%r: %s", str(folder), error)
    return db


def _has_whole_pages(path: Path) -> bool:
    """Return True if the file has whole pages, or a log that may complete the last page."""
    log = path.with_name(f"{DATABASE}-wal")
    if not path.is_file() or (log.is_file() and log.stat().st_size):
        return True
    with open(path, "rb") as file:
        page = int.from_bytes(file.read(18)[16:], "big")
    return path.stat().st_size % (page or 1) == 0


def _bring_up(db: sqlite3.Connection, folder: Path, tables: Sequence[str]) -> None:
    db.row_factory = sqlite3.Row
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")  # acknowledged data survives a power failure
    (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise sqlite3.DatabaseError(found)
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > len(tables):
        raise ConfigError(
            f"state_dir={str(folder)!r} has version {version}; this release reads {len(tables)}"
        )
    if version < len(tables):
        more = "".join(tables[version:])
        db.executescript(f"BEGIN; {more} PRAGMA user_version = {len(tables)}; COMMIT;")
    there = {row["name"] for row in db.execute("SELECT name FROM sqlite_master")}
    wanted = re.findall(r"CREATE (?:TABLE|INDEX|TRIGGER) (\w+)", "".join(tables))
    if missing := [name for name in wanted if name not in there]:
        raise sqlite3.DatabaseError(f"it has no {missing[0]}")


def _damaged(folder: Path, why: str) -> ConfigError:
    return ConfigError(
        f"state_dir={str(folder)!r}: {DATABASE} is damaged ({why}). Put a backup in its place and "
        f"remove {DATABASE}-wal and {DATABASE}-shm; or rescue it with `sqlite3 {DATABASE} "
        ".recover`; or move the folder away to begin with an empty one, without the batches, "
        "files and responses in this one"
    )
