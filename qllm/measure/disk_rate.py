"""The rate of a disk when experts are read from it, measured with a file that is then removed."""

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from qllm.block_file import Blocks, checksum_of, created, whole_blocks
from qllm.engine.storage.reads import NUM_THREADS
from qllm.errors import ConfigError
from qllm.models.weights.expert_file import room_for

MOST_BYTES = 256 << 20
"""Most bytes of the file, unless two experts are larger."""
MOST_S = 2.0
"""Seconds after which no further read begins."""


class DiskRate(NamedTuple):
    """A measured rate."""

    bytes_per_s: float
    is_direct: bool
    """True if reads bypassed the page cache."""


def disk_rate(
    folder: Path, expert_bytes: int, clock_s: Callable[[], float] = time.perf_counter
) -> DiskRate:
    """Measure how fast experts of a file in a folder are read and checked, as an engine does it.

    As many threads as an engine has read pieces of a file, each once and in no order.

    Args:
        folder: The folder, which is made if it is missing.
        expert_bytes: Bytes of an expert.
        clock_s: Clock in seconds.

    Raises:
        ConfigError: The folder cannot be written or read, or has no room.
    """
    size = whole_blocks(expert_bytes)
    num = max(NUM_THREADS, MOST_BYTES // size)
    path = folder / f"{os.getpid()}.rate"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with created(path, path.with_suffix(".new"), num * size):
                _write(path.with_suffix(".new"), size, num)
            return _read(path, size, num, clock_s)
        finally:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the disk of {str(folder)!r} cannot be measured ({error}); give a folder that may be "
            f"written, with {num * size} free bytes"
        ) from error


def _write(path: Path, size: int, num: int) -> None:
    file, room = Blocks(path), room_for(size)
    try:
        for i in range(num):
            room[:] = os.urandom(size)
            file.write(room, i * size)
    finally:
        file.close()


def _read(path: Path, size: int, num: int, clock_s: Callable[[], float]) -> DiskRate:
    file = Blocks(path, os.O_RDONLY)
    places = iter(random.Random(0).sample(range(num), num))  # shared by the threads
    done, errors = list[int](), list[OSError]()
    start = clock_s()

    def serve() -> None:
        room = room_for(size)
        try:
            for place in places:
                if clock_s() - start >= MOST_S:
                    break
                file.read(room, place * size)
                checksum_of(room)
                done.append(size)
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=serve) for _ in range(NUM_THREADS)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took_s = clock_s() - start
    finally:
        file.close()
    if errors:
        raise errors[0]
    return DiskRate(sum(done) / took_s, file.is_direct)
