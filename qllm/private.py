"""Files and folders that only their owner may read: what is written of requests goes into them."""

import os
import stat
from pathlib import Path
from typing import TextIO


def private_fd(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file that only its owner may read, whatever the umask; make it if it is not there.

    What is no file (a pipe, a terminal) is opened as it is.
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
    """Open a private text file to write it anew."""
    return open(private_fd(path, os.O_WRONLY | os.O_TRUNC), "w", encoding="utf-8")


def make_private_folder(path: Path) -> None:
    """Make a folder that only its owner may enter, whatever the umask; leave one that is there."""
    if not path.is_dir():
        path.mkdir(mode=0o700, parents=True)
        path.chmod(0o700)
