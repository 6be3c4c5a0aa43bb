"""The lines of a batch's input, checked against the digests made at validation.

A disk may lose or change a file after validation. So each line has a digest. Intact lines still get
answers, and damaged lines get an error.
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
"""Error numbers of a missing or unreadable file. Waiting does not help after such an error."""


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
        """The digest of all lines together, equal to the file's digest from `Store.write`."""
        return self._whole.digest()


def checked(path: Path, total: int, digests: bytes | None) -> Iterator[tuple[int, bytes | None]]:
    """Yield each line's number, from 0, and its text, or None for a damaged or missing line.

    Args:
        path: Path of the input file, which may be damaged or missing.
        total: Number of lines at validation.
        digests: Digests from `Digested`; None for a batch of an older release. Without digests,
            each line with the necessary fields counts as intact.

    Raises:
        OSError: The file cannot be read now, but perhaps later.
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
