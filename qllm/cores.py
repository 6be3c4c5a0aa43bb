"""Cores and memory that this process may use, as limited by its control groups."""

import ctypes
import gc
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

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


def why_too_large(num_bytes: int) -> str | None:
    """Return why weights of so many bytes do not fit into the memory that is free; None if they do.

    Args:
        num_bytes: Bytes of the weights.
    """
    free = free_bytes()
    if num_bytes <= free:
        return None
    return f"its weights take {num_bytes} bytes, and {free} bytes of memory are free"


def free_bytes(
    groups: Path = Path("/proc/self/cgroup"),
    root: Path = Path("/sys/fs/cgroup"),
    machine: Path = Path("/proc/meminfo"),
) -> int:
    """Return the bytes of memory that are free, fewer if a control group's limit leaves fewer.

    Cached files count as free, also those of weights that are mapped.

    Args:
        groups: File with the control groups of the process (see `usable_cores`).
        root: Folder of their files.
        machine: File with the memory of the machine, as Linux lists it.
    """
    found = [_numbers(machine)["MemAvailable"] * 1024]
    found += [left for folder in _folders("memory", groups, root) for left in _left_in(folder)]
    return max(0, min(found))


def _left_in(folder: Path) -> Iterator[int]:
    """Yield what the limit of a control group leaves; nothing without a limit."""
    for limit, use, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        text = (folder / limit).read_text().strip() if (folder / limit).exists() else "max"
        if text.isdigit():
            stat = _numbers(folder / "memory.stat")
            files = sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
            yield int(text) - int((folder / use).read_text()) + files


class Held(NamedTuple):
    """Memory that a process holds, in bytes."""

    own: int
    """Memory that is in no file."""
    in_files: int
    """Mapped parts of files, such as weights, that are in memory."""


def held_bytes(pid: int | str = "self", processes: Path = Path("/proc")) -> Held | None:
    """Return the memory that a process holds; None if there is no such process."""
    try:
        found = _numbers(processes / str(pid) / "status")
    except OSError:
        return None
    own = found.get("RssAnon", 0) + found.get("RssShmem", 0)
    return Held(own * 1024, found.get("RssFile", 0) * 1024)


def shared_out(pids: Iterable[int | str], processes: Path = Path("/proc")) -> Held:
    """Return the memory that processes hold together.

    Pages that several of them hold count once. They count for each if Linux does not say how they
    are shared, or if a process is gone.
    """
    pids = list(pids)
    try:
        each = [_numbers(processes / str(pid) / "smaps_rollup") for pid in pids]
        own = sum(found["Pss_Anon"] + found["Pss_Shmem"] for found in each)
        return Held(own * 1024, sum(found["Pss_File"] for found in each) * 1024)
    except (OSError, KeyError):
        found = [held_bytes(pid, processes) or Held(0, 0) for pid in pids]
        return Held(sum(one.own for one in found), sum(one.in_files for one in found))


def _numbers(file: Path) -> dict[str, int]:
    """Return the numbers of a file of Linux with a name and a number per line."""
    rows = [line.replace(":", " ").split() for line in file.read_text().splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


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
