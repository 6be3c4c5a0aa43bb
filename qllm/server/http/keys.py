"""API keys with a name, a class and limits of their own, from the TOML file of `keys_file`.

    [[key]]
    name = "subagents"
    key = "..."                  # or sha256 = "...", the digest of the key in hex
    priority = "BE"              # class of its requests that name none; "LS" by default
    max_priority = "BE"          # best class that it gets; "LS" by default
    max_concurrent = 4           # most POST and PUT requests at once

No message shows a key, nor text that could be one.
"""

import hashlib
import logging
import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from qllm.errors import ConfigError, naming
from qllm.types import Priority

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
SHA256 = re.compile(r"[0-9a-f]{64}")
FIELDS = ("name", "key", "sha256", "priority", "max_priority", "max_concurrent")
MAX_KEYS = 1000
"""Most keys of a file: metrics have a series for each."""
_log = logging.getLogger("qllm.server")


def digest(key: str) -> bytes:
    """Return the digest under which a key is stored."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def caller_of(digested: bytes) -> str:
    """Return the name of a caller for logs, metrics and stored data, made of its key's digest."""
    return digested.hex()[:16]


class Rule(NamedTuple):
    """The class and the limits of one key, or of all callers without a rule."""

    name: str = ""
    digest: bytes = b""
    default: Priority = Priority.LS
    """Class of requests that name none."""
    best: Priority = Priority.LS
    """Best class that requests get."""
    max_concurrent: int | None = None
    """Most POST and PUT requests at once; None is the server's limit."""

    @property
    def caller(self) -> str:
        """Name of the caller."""
        return caller_of(self.digest)

    def allows(self, priority: Priority) -> bool:
        """Return True if requests may have this class."""
        return priority >= self.best


NO_RULE = Rule()


def read_rules(path: Path | None) -> tuple[Rule, ...]:
    """Return the rules of a file; none without a file.

    Raises:
        ConfigError: The file cannot be read or is wrong; the message names the key, not its text.
    """
    if path is None:
        return ()
    with naming("keys_file", path):
        raw, mode = path.read_bytes(), path.stat().st_mode
    try:
        found = tomllib.loads(raw.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"keys_file={str(path)!r} is not UTF-8 at byte {error.start}") from None
    except tomllib.TOMLDecodeError as error:
        where = re.search(r"\(at [^()]*\)\s*$", str(error))
        place = where[0].strip() if where else "(somewhere)"
        raise ConfigError(f"keys_file={str(path)!r} is not TOML {place}") from None
    tables = found.pop("key", None)
    if found or not isinstance(tables, list) or not 1 <= len(tables) <= MAX_KEYS:
        raise ConfigError(
            f"keys_file={str(path)!r} must hold tables [[key]], 1 to {MAX_KEYS} of them, and "
            "nothing else"
        )
    rules = [_rule(table, f"keys_file={str(path)!r}, key {i}") for i, table in enumerate(tables, 1)]
    _refuse_twice(path, rules)
    if mode & (stat.S_IRGRP | stat.S_IROTH) and any("key" in table for table in tables):
        _log.warning(
            "keys_file=%r can be read by other users (mode %03o): chmod 600, or give sha256 "
            "instead of key",
            *(str(path), stat.S_IMODE(mode)),
        )
    return tuple(rules)


def _rule(table: Any, where: str) -> Rule:
    """Return the rule of one table.

    Raises:
        ConfigError: A field is unknown, missing or wrong.
    """
    if not isinstance(table, Mapping) or not table.keys() <= set(FIELDS):
        raise ConfigError(f"{where}: a field is unknown; known: {', '.join(FIELDS)}")
    name = table.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name) or name == table.get("key"):
        raise ConfigError(
            f"{where}: name must be 1 to 64 letters, digits, '.', '_' or '-', and not the key"
        )
    where = f"{where} ({name})"
    default = _class_of(table, "priority", where)
    best = _class_of(table, "max_priority", where)
    if "priority" in table and default < best:
        raise ConfigError(
            f"{where}: priority={default.name} is better than max_priority={best.name}; give both "
            "the same class, or leave priority out"
        )
    most = table.get("max_concurrent")
    is_count = isinstance(most, int) and not isinstance(most, bool)
    if most is not None and not (is_count and most >= 1):
        raise ConfigError(f"{where}: max_concurrent must be an integer >= 1")
    return Rule(name, _digest_of(table, where), max(default, best), best, most)


def _class_of(table: Mapping[str, Any], field: str, where: str) -> Priority:
    value = table.get(field, Priority.LS.name)
    if not isinstance(value, str) or value.upper() not in Priority.__members__:
        raise ConfigError(f"{where}: {field} must be one of {', '.join(Priority.__members__)}")
    return Priority[value.upper()]


def _digest_of(table: Mapping[str, Any], where: str) -> bytes:
    key, hexed = table.get("key"), table.get("sha256")
    if (key is None) == (hexed is None):
        raise ConfigError(f"{where}: give one of key and sha256")
    if hexed is not None:
        if not isinstance(hexed, str) or not SHA256.fullmatch(hexed.lower()):
            raise ConfigError(f"{where}: sha256 must be the 64 hex digits of the key's SHA-256")
        return bytes.fromhex(hexed)
    if not isinstance(key, str) or not key or key != key.strip():
        raise ConfigError(f"{where}: key must be text, not empty, without blanks around it")
    return digest(key)


def _refuse_twice(path: Path, rules: list[Rule]) -> None:
    by_name: dict[str, Rule] = {}
    by_digest: dict[bytes, Rule] = {}
    for rule in rules:
        if rule.name in by_name:
            raise ConfigError(f"keys_file={str(path)!r} names {rule.name} twice")
        if (other := by_digest.get(rule.digest)) is not None:
            raise ConfigError(
                f"keys_file={str(path)!r}: {other.name} and {rule.name} have the same key"
            )
        by_name[rule.name] = by_digest[rule.digest] = rule
