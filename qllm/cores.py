"""Cores and memory that this process may use, as limited by its control groups."""

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from qllm.errors import ConfigError

Threads = int | Literal["auto"] | None
"""Number of threads of computation. "auto" is the cores that this process may use; None is torch's
number."""


def num_threads(threads: Threads) -> int | None:
    """Return `threads` as a number; None stays None.

    Raises:
        ConfigError: `threads` is neither "auto" nor an integer >= 1.
    """
    if threads is None:
        return None
    if threads == "auto":
        return usable_cores()
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
        raise ConfigError(f"threads={threads!r} must be an integer >= 1, 'auto' or None")
    return threads


def parse_threads(text: str | int) -> int | None:
    """Return `threads` as a number, from the text of a flag, a file or a variable.

    Raises:
        ConfigError: The text is neither "auto" nor an integer >= 1.
    """
    found: Any = str(text).strip()
    with suppress(ValueError):
        found = int(found)
    return num_threads(found)


def usable_cores(
    groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the number of cores that this process may use, by affinity and control groups.

    Args:
        groups: File with the control groups of the process, as Linux lists them.
        root: Folder with the files of the control groups.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    quotas = [cores for folder in _folders("cpu", groups, root) for cores in _quota(folder)]
    return max(1, int(min([cores, *quotas])))


def memory_bytes(
    groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the memory in bytes that this process may use, by machine and control groups.

    Args:
        groups: File with the control groups of the process (see `usable_cores`).
        root: Folder with the files of the control groups.
    """
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    names = ("memory.max", "memory.limit_in_bytes")
    files = [folder / name for folder in _folders("memory", groups, root) for name in names]
    texts = [file.read_text().strip() for file in files if file.exists()]
    return min([whole, *(int(text) for text in texts if text.isdigit())])


def _folders(controller: str, groups: Path, root: Path) -> Iterator[Path]:
    """Yield the folders of the process's group and its parents, of cgroup versions 1 and 2."""
    for line in groups.read_text().splitlines() if groups.exists() else ():
        number, controllers, name = line.split(":", 2)
        if number != "0" and controller not in controllers.split(","):
            continue
        base = root if number == "0" else root / controllers
        group = base / name.strip("/")
        for folder in (group, *group.parents):
            yield folder
            if folder == base:
                break


def _quota(folder: Path) -> Iterator[float]:
    both = folder / "cpu.max"
    quota, period = folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"
    if both.exists():
        limit, length = both.read_text().split()
        if limit != "max":
            yield int(limit) / int(length)
    elif quota.exists() and (limit_us := int(quota.read_text())) > 0:
        yield limit_us / int(period.read_text())


def freeze_garbage() -> None:
    """Exclude all present objects from garbage collection.

    A full collection stops every thread for 0.2-0.4 s. Requests make few cycles. So a collection
    runs after 20,000 new objects, not after 700.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


@contextmanager
def no_collections() -> Iterator[None]:
    """Stop garbage collection during the block, for code that makes many objects and few cycles."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def give_memory_back() -> None:
    """Return freed memory to the system. After a tokenizer of 151,000 tokens that is 108 MB."""
    with suppress(OSError, AttributeError):  # the C library is not glibc
        ctypes.CDLL(None).malloc_trim(0)
