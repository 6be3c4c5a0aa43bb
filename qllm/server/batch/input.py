"""The lines of a batch's input, held to what they were when the batch was validated.

What was validated once is not trusted for ever: a disk may lose or change it. Every line has a
digest of its own, so that those which are as they were get their answers, and the others an error.
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
"""Errors of a file that is not there, or cannot be read: waiting does not help."""


class Digested:
    """Lines that pass, and what is remembered of them.

    Args:
        lines: Of a file.
    """

    def __init__(self, lines: Iterable[bytes]) -> None:
        self._lines, self._whole = lines, blake2b()
        self.of_lines = bytearray()
        """A digest of each line, one behind the other."""

    def __iter__(self) -> Iterator[bytes]:
        for line in self._lines:
            self._whole.update(line)
            self.of_lines += _digest(line)
            yield line

    @property
    def of_file(self) -> bytes:
        """A digest of all lines, as `Store.write` makes one of a file."""
        return self._whole.digest()


def checked(path: Path, total: int, digests: bytes | None) -> Iterator[tuple[int, bytes | None]]:
    """Yield the number of each line, from 0, with its text; None if it is damaged or missing.

    Args:
        path: Of the input file, which may be damaged or missing.
        total: Lines that it had.
        digests: From `Digested`; None if the batch is of an older release: then a line is taken
            to be as it was if it has the parts of one.

    Raises:
        OSError: It cannot be read now, but may be later.
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
