"""A limit of memory for this process and those that it starts, by a control group of its own."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qllm.cores import memory_bytes

ROOT = Path("/sys/fs/cgroup/memory")
"""Folder of the controller of memory, cgroup version 1."""
LIMIT, MEMBERS = "memory.limit_in_bytes", "cgroup.procs"
CLOSE_S = 10.0
"""Seconds in which the processes of a group end."""


def own_group(groups: Path = Path("/proc/self/cgroup"), root: Path = ROOT) -> Path:
    """Return the folder of the control group that limits the memory of this process."""
    for line in groups.read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if "memory" in controllers.split(","):
            return root / name.strip("/")
    raise SystemExit(
        f"{groups} names no group of the controller of memory (cgroup version 1), so no group can "
        "be made here; start the bench in a group with the limit: "
        "systemd-run --scope -p MemoryMax=BYTES python -m bench ..."
    )


@contextmanager
def limited(num_bytes: int) -> Iterator[int]:
    """Limit the memory of this process, and of those that it starts, to so many bytes.

    The limit counts memory that is taken in the `with` block, and files that are cached in it.
    Files that were cached before do not count: see `forget`. The `with` block gets the limit, which
    is lower if the process has a lower one already.
    """
    if memory_bytes() <= num_bytes:
        yield memory_bytes()
        return
    before = own_group()
    group = before / f"qllm-bench-{os.getpid()}"
    try:
        group.mkdir()
        (group / LIMIT).write_text(str(num_bytes))
        (group / MEMBERS).write_text(str(os.getpid()))
    except OSError as error:
        raise SystemExit(f"cannot limit memory by the group {group} ({error}); be root") from error
    try:
        yield memory_bytes()
    finally:
        (before / MEMBERS).write_text(str(os.getpid()))
        _remove(group)


def _remove(group: Path) -> None:
    """Remove a group, once its processes have ended."""
    end_s = time.monotonic() + CLOSE_S
    while (group / MEMBERS).read_text().split() and time.monotonic() < end_s:
        time.sleep(0.1)
    group.rmdir()


def forget(*paths: Path) -> None:
    """Drop files from the system's cache."""
    for path in paths:
        number = os.open(path, os.O_RDONLY)
        os.fsync(number)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(number)
