"""The lines of a batch's input, checked against the digests made at validation.

A disk may lose or change a file after its validation. Each line has its own digest, so that intact
lines still get answers, and damaged ones an error.
"""

import errno
import json
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import chain, repeat
from pathlib import Path

DIGEST_BYTES = 16
GONE = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EIO}
)
"""Errors of a missing or unreadable file, for which waiting does not help."""


class Digested:
    """An iterator over lines that collects their digests.

    Args:
        lines: Lines of a file.
    """

    def __init__(self, lines: Iterable[bytes]) -> None:
        self._lines, self._whole = lines, blake2b()
        self.of_lines = bytearray()
        """Digests of all lines, concatenated."""

    def __iter__(self) -> Iterator[bytes]:
        for line in self._lines:
            self._whole.update(line)
            self.of_lines += _digest(line)
            yield line

    @property
    def of_file(self) -> bytes:
        """The digest of all lines together, equal to that of `Store.write` for the file."""
        return self._whole.digest()


def checked(path: Path, total: int, digests: bytes | None) -> Iterator[tuple[int, bytes | None]]:
    """Yield the number of each line, from 0, with its text; None if it is damaged or missing.

    Args:
        path: Path of the input file, which may be damaged or missing.
        total: Number of lines at validation.
        digests: Digests from `Digested`. None in a batch of an older release: then each line with
            the necessary fields counts as intact.

    Raises:
        OSError: The file cannot be read now, but may be later.
    """
    for number, text in zip(range(total), chain(_lines(path), repeat(None)), strict=False):
        yield number, text if text is not None and _is_same(text, number, digests) else None


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            yield from file
    except OSError as error:
        if error.errno not in GONE:
            raise


def _is_same(text: bytes, number: int, digests: bytes | None) -> bool:
    if digests is not None:
        at = number * DIGEST_BYTES
        return _digest(text) == digests[at : at + DIGEST_BYTES]
    try:
        line = json.loads(text)
        return isinstance(line["custom_id"], str) and isinstance(line["body"], dict)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def _digest(line: bytes) -> bytes:
    return blake2b(line, digest_size=DIGEST_BYTES).digest()
