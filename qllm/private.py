"""Files and folders that only their owner may read, for data of requests."""

import os
import stat
from pathlib import Path
from typing import TextIO


def private_fd(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file that only its owner may read under any umask; create a missing file.

    A pipe or a terminal is opened with its present rights.
    """
    fd = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            os.fchmod(fd, 0o600)
    except BaseException:
        os.close(fd)
        raise
    return fd


def write_private(path: str | os.PathLike[str]) -> TextIO:
    """Open a private text file for writing. The old content is lost."""
    return open(private_fd(path, os.O_WRONLY | os.O_TRUNC), "w", encoding="utf-8")


def make_private_folder(path: Path) -> None:
    """Make a folder that only its owner may enter, under any umask.

    An existing folder is not changed.
    """
    if not path.is_dir():
        path.mkdir(mode=0o700, parents=True)
        path.chmod(0o700)
