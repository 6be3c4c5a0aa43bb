"""The memory that an engine may take, next to the other engines of the same machine.

KV takes memory only when it fills. So a starting engine finds free memory that another engine will
take later. Each engine claims this memory: it writes the number of bytes to a file, and locks the
file until its process ends. Engines of one user see each other's claims if they have the same
folder for temporary files.
"""

import fcntl
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from qllm.config import EngineConfig
from qllm.cores import Held, free_bytes, held_bytes, memory_bytes, shared_out
from qllm.engine.sizes import Costs, memory_of, sized
from qllm.errors import ConfigError
from qllm.private import make_private_folder, private_fd

LOCK = "lock"
"""Name of the file that an engine locks while it reads the claims of other engines."""
MOST_BYTES = 4096
"""Most bytes of a claim's file."""
_log = logging.getLogger("qllm.engine")


class Others(NamedTuple):
    """The claims of the other engines on one kind of memory."""

    num_bytes: int = 0
    """Bytes that the other engines may still take."""
    num_open: int = 0
    """Number of engines that have not chosen their sizes yet."""


class Claim:
    """The claim of one engine, from before the load of a model until the engine is closed.

    Args:
        place: Kind of memory: "cpu" or "cuda".
        folder: Folder of the claims; None is the user's own folder on this machine.
    """

    def __init__(self, place: str, folder: Path | None = None) -> None:
        self._place = place
        temporary = Path(tempfile.gettempdir())
        self._folder = folder or temporary / f"qllm-memory-{os.getuid()}"
        self._file = self._folder / f"{os.getpid()}-{os.urandom(4).hex()}"
        self._fd: int | None = None
        self.ranks: list[int] = []
        """Process ids of the model's other ranks, which take memory, too."""
        try:
            make_private_folder(self._folder)
            if self._folder.stat().st_uid != os.getuid():
                raise PermissionError(f"{self._folder} belongs to another user")
            with self._locked():
                self._fd = private_fd(self._file, os.O_RDWR)
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._write(None)
        except OSError as error:
            _log.warning(
                "this engine and others on the machine may count on the same memory: %s; set "
                "TMPDIR to a folder of your own, or give each engine its `memory`",
                error,
            )
            self.close()
        except BaseException:
            self.close()  # other engines read the file of a claim that is held
            raise

    @contextmanager
    def others(self) -> Iterator[Others]:
        """Yield the claims of other engines. Inside the block no other engine can claim memory."""
        if self._fd is None:
            yield Others()
            return
        with self._locked():
            yield self._read()

    def tell(self, num_bytes: int) -> None:
        """Publish how many bytes this engine may still take. Called inside of `others`."""
        if self._fd is not None:
            self._write(num_bytes)

    def close(self) -> None:
        """Withdraw the claim. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with suppress(OSError):
                self._file.unlink()
            os.close(fd)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fd = private_fd(self._folder / LOCK, os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _write(self, num_bytes: int | None) -> None:
        assert self._fd is not None
        told = {
            "place": self._place,
            "pid": os.getpid(),
            "ranks": self.ranks,
            "bytes": num_bytes,
            "own": _own_bytes([os.getpid(), *self.ranks]),
        }
        text = json.dumps(told).encode()
        os.pwrite(self._fd, text, 0)
        os.ftruncate(self._fd, len(text))

    def _read(self) -> Others:
        num_bytes = num_open = 0
        for file in self._folder.iterdir():
            if file.name in (LOCK, self._file.name):
                continue
            told = _told(file)
            if told is None or told["place"] != self._place:
                continue
            if told["bytes"] is None:
                num_open += 1
                continue
            pids = [told["pid"], *told.get("ranks", ())]  # engines of older releases name none
            held = _own_bytes(pids) if self._place == "cpu" else 0
            taken = max(0, held - told["own"])
            num_bytes += max(0, told["bytes"] - taken)
        return Others(num_bytes, num_open)


def _own_bytes(pids: Sequence[int]) -> int:
    """Return the bytes outside of files that processes hold. Pages of several count for each."""
    return sum(held.own for pid in pids if (held := held_bytes(pid)) is not None)


def _told(file: Path) -> dict[str, Any] | None:
    """Return the claim in a file.

    If the claiming engine has ended, remove the file and return None.
    """
    with suppress(FileNotFoundError):  # the engine is being closed at this moment
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.unlink()
        except BlockingIOError:
            found: dict[str, Any] = json.loads(os.pread(fd, MOST_BYTES, 0))
            return found
        finally:
            os.close(fd)
    return None


def choose_sizes(
    claim: Claim,
    weight_bytes: int,
    config: EngineConfig,
    costs: Costs,
    *,
    on_cuda: bool,
    ranks: Sequence[int] = (),
    slot_bytes: int = 0,
) -> tuple[EngineConfig, dict[str, int]]:
    """Choose the open sizes.

    Return the settings with all sizes, and the bytes of the sizes for statistics. This also
    publishes to other engines how much memory this engine may take.

    Args:
        claim: Claim of this engine.
        weight_bytes: Bytes of the model's weights.
        config: Settings.
        costs: Numbers of the loaded model.
        on_cuda: True for the memory of the GPU.
        ranks: Process ids of the model's other ranks.
        slot_bytes: Bytes of the GPU that the runner takes for experts that come and go.

    Raises:
        ConfigError: The model or the sizes do not fit, as in `free_for` and `sized`.
    """
    claim.ranks = list(ranks)
    with claim.others() as others:
        free = free_for(
            config, weight_bytes, others, on_cuda=on_cuda, ranks=ranks, slot_bytes=slot_bytes
        )
        found = sized(config, free, costs)
        memory = memory_of(found, costs, free)
        taken = memory["kv_bytes"] + memory["kept_bytes"]
        claim.tell(taken if config.memory is None else free)
    return found, memory


def free_for(
    config: EngineConfig,
    weight_bytes: int,
    others: Others,
    *,
    on_cuda: bool,
    ranks: Sequence[int] = (),
    slot_bytes: int = 0,
) -> int:
    """Return the bytes that an engine may take in addition to the loaded model.

    With the setting `memory`, the result is the rest of `memory`. Otherwise the result is a share
    of the free memory that no other engine has claimed. Engines that are loading get equal shares.

    Args:
        config: Settings.
        weight_bytes: Bytes of the model's weights.
        others: Claims of the other engines.
        on_cuda: True for the memory of the GPU.
        ranks: Process ids of the model's other ranks.
        slot_bytes: Bytes of the GPU that the runner takes for experts that come and go.

    Raises:
        ConfigError: `memory` is more than the machine has, or too little for the model.
    """
    free, held, whole = _of_device() if on_cuda else _of_machine(weight_bytes, ranks)
    free, held = free - slot_bytes, held + slot_bytes
    if config.memory is None:
        return max(0, free - others.num_bytes) // (1 + others.num_open)
    budget = int(config.memory)
    what = "the GPU has" if on_cuda else "the machine, or its control group, has"
    if budget > whole:
        raise ConfigError(f"memory={budget} is more than {what}: {whole} bytes; give at most that")
    if held > budget:
        raise ConfigError(
            f"memory={budget} is too little for the model: {held} bytes are in use after loading, "
            f"and its weights are {weight_bytes} of them; give more, or a smaller model"
        )
    return budget - held


def _of_machine(weight_bytes: int, ranks: Sequence[int]) -> tuple[int, int, int]:
    """Return the free bytes, the bytes that this process and its ranks hold, and all bytes.

    Weights may be mapped files. Linux counts the memory of such files as free.
    """
    held = shared_out(["self", *ranks]) if ranks else held_bytes() or Held(0, 0)
    in_files = max(held.in_files, weight_bytes - held.own)
    return free_bytes() - in_files, held.own + in_files, memory_bytes()


def _of_device() -> tuple[int, int, int]:
    """Return the free bytes of the GPU, the bytes that torch has allocated, and all bytes."""
    free, whole = torch.cuda.mem_get_info()
    return free, torch.cuda.memory_allocated(), whole
