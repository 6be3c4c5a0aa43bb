"""The load of a model whose experts go to a file, and are never together in memory.

    plan     the format of each layer, from shapes or from the layer's first expert; so the size of
             the file is known before it is written
    pack     each thread reads an expert, packs it as the kernels read it, and writes it

The bytes of an expert are those that a load without a file has in memory. The experts of a layer
become alike as in such a load. The modules of experts then have parameters without memory.
"""

import json
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qllm.block_file import FileLock
from qllm.errors import ConfigError, ModelError
from qllm.kernels import cpu
from qllm.kernels.cpu.experts import BF16, Experts, Formats
from qllm.kernels.quantised import Quantised
from qllm.models.weights.checkpoint import Checkpoint, naming
from qllm.models.weights.expert_file import (
    CodeFormat,
    ExpertFile,
    ExpertLayer,
    ExpertWriter,
    InFile,
    file_bytes,
    leave_in_file,
    parts_of,
    refuse_too_few,
    room_for,
    written,
)
from qllm.models.weights.expert_source import ExpertSource
from qllm.models.weights.experts_apart import ExpertsApart
from qllm.models.weights.formats.rounding import INT8_GROUPS
from qllm.models.weights.quantised import Method
from qllm.models.weights.sampled import sampled

READERS = 8
"""Most threads that read and pack."""
SOURCE_BYTES, SCRATCH_BYTES = 4, 16
"""Most bytes of a value in the checkpoint, and of a value on its way to its packed form."""

_log = logging.getLogger("qllm")


class ExpertsInFile(ExpertsApart):
    """The place of a model's experts: a file, which is written by the first load of the model.

    Args:
        path: The file, in a folder that exists.
        max_bytes: Most bytes of experts in memory, during a load and in a runner. During a load,
            read buffers of up to 64 MiB may stay in addition. If the experts of a layer differ in
            format, one parameter of the layer is read whole.
    """

    where, advice = "in a file", "load without a file of experts"
    cures = (
        "give a file in a folder that exists and may be written",
        "give a file on a disk with room",
    )
    """Cures of a folder that cannot be used, and of a disk that is full."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        super().__init__()
        self._path, self._max_bytes = path, max_bytes
        self._says: dict[str, str] = {}
        self._file: ExpertFile | None = None

    @property
    def file(self) -> ExpertFile:
        """The file. It is there after the load."""
        assert self._file is not None, "the model is not loaded"
        return self._file

    def identify(self, files: Sequence[Path], method: Method | None, expert_weights: str) -> None:
        super().identify(files, method, expert_weights)
        found = None if method is None else [method.name, dict(method.settings)]
        text = json.dumps(found, sort_keys=True, default=str)
        self._says = {
            "weights": digest_of(files),
            "quantization": blake2b(text.encode(), digest_size=16).hexdigest(),
            "expert_weights": expert_weights,
            "kernels": cpu.kind(),
        }

    def _prepare(self) -> bool:
        cpu.set_threads(torch.get_num_threads())
        if self._all_fit():
            return False
        with self._naming():
            self._file = self._opened() or self._written()
        found = [(one.name, one.num_experts, one.width, one.hidden) for one in self._file.layers]
        if found != [(one.path, one.num_experts, *one.shape) for one in self._sources]:
            raise ConfigError(
                f"the experts in {str(self._path)!r} cannot be used: they have other layers or "
                "shapes than the model; delete the file"
            )
        return True

    def _leave(self, module: nn.Module, number: int) -> str:
        leave_in_file(module, InFile(self.file, number, self._max_bytes))
        return f"{kind_of(self.file.layers[number])} in a file"

    # -- the file

    def _all_fit(self) -> bool:
        """Return True if no file is needed, because `max_bytes` has room for all experts."""
        return False

    def _opened(self) -> ExpertFile | None:
        is_there = self._path.exists() or self._path.is_symlink()
        return ExpertFile(self._path, self._says) if is_there else None

    def _written(self) -> ExpertFile:
        """Write the file, or wait for the process that writes it."""
        lock = FileLock(self._path.with_name(self._path.name + ".lock"))
        try:
            pid = lock.take()
            if pid is not None:
                _log.warning("process %s writes the experts to %s: waiting", pid, self._path)
                lock.take(wait=True)
            if (found := self._opened()) is not None:
                return found
            self._write()
        finally:
            lock.close()
        return ExpertFile(self._path, self._says)

    def _write(self) -> None:
        plans = self._plans
        num_readers = self._num_readers(plans)
        with (
            self._room(plans),
            written(self._path, self._says, [plan.layer for plan in plans]) as writer,
            _threads(num_readers) as pool,
        ):
            for plan in plans:
                plan.write(writer, pool, num_readers)

    @cached_property
    def _plans(self) -> list["_Plan"]:
        """The writing of each layer. Making it reads the first expert of each quantised layer."""
        group = INT8_GROUPS.get(self._expert_weights)
        return [_Plan(source, group, source.formats()) for source in self._sources]

    def _num_readers(self, plans: Sequence["_Plan"]) -> int:
        most = max(plan.working_bytes for plan in plans)
        if most > self._max_bytes:
            raise ConfigError(
                f"max_expert_bytes={self._max_bytes} has no room for an expert, which takes {most} "
                f"bytes while it is packed; give at least {most}"
            )
        return min(READERS, self._max_bytes // most)

    @contextmanager
    def _room(self, plans: Sequence["_Plan"]) -> Iterator[None]:
        """Add the bytes that are needed to an error of the file."""
        try:
            yield
        except OSError as error:
            need = file_bytes([plan.layer for plan in plans])
            disk = os.statvfs(self._path.parent)
            raise ConfigError(
                f"the experts cannot be written to {str(self._path)!r} ({error.strerror}): they "
                f"take {need} bytes, and {disk.f_bavail * disk.f_frsize} bytes are free; "
                f"{self.cures[1]}"
            ) from error

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Add the name of the file to an error of the system."""
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"the file of experts {str(self._path)!r} cannot be used ({error}); {self.cures[0]}"
            ) from error


class ExpertsInFolder(ExpertsInFile):
    """The place of a model's experts: a file in a folder, which has a name of its own there.

    Args:
        folder: The folder, which is made if it is missing.
        max_bytes: Most bytes of experts in memory. If all experts fit, there is no file.
    """

    advice = "leave max_expert_bytes and expert_dir out"
    cures = "give a folder that may be written as expert_dir", "give an expert_dir with room"

    def __init__(self, folder: Path, max_bytes: int) -> None:
        super().__init__(folder, max_bytes)
        self._folder = folder

    def take(self, skeleton: PreTrainedModel, checkpoint: Checkpoint) -> Checkpoint:
        """See `ExpertsInFile.take`.

        Raises:
            ConfigError: `max_bytes` has no room for the experts of one token, or for packing one
                expert of a file that is not there yet. Nothing is written then.
        """
        config = skeleton.config.get_text_config(decoder=True)
        self._top_k = getattr(config, "num_experts_per_tok", None) or 1
        return super().take(skeleton, checkpoint)

    def _prepare(self) -> bool:
        """Name the file after all that decides its bytes: a cut model has fewer layers."""
        text = json.dumps([self._says, [source.path for source in self._sources]], sort_keys=True)
        self._path = self._folder / f"{blake2b(text.encode(), digest_size=8).hexdigest()}.experts"
        return super()._prepare()

    def _all_fit(self) -> bool:
        layers = [plan.layer for plan in self._plans]
        total = sum(layer.num_bytes for layer in layers)
        if self._max_bytes >= total:
            return True
        largest = max(layer.expert_bytes for layer in layers)
        refuse_too_few(self._max_bytes, largest, self._top_k, total)
        if not self._path.exists():
            self._num_readers(self._plans)
        with self._naming():
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return False


def digest_of(files: Sequence[Path]) -> str:
    """Return a digest of the sizes, the times of change and a sample of the bytes of files."""
    return sampled(files, times=True)


@contextmanager
def _threads(count: int) -> Iterator[Executor]:
    """Run threads that read and pack. After the block they start nothing more."""
    pool = ThreadPoolExecutor(count, "qllm-read")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


class _Plan:
    """The writing of one layer.

    Args:
        source: Weights of the layer.
        group: Inputs that share a scale in int8; None without int8.
        formats: Formats of quantised weights.
    """

    def __init__(self, source: ExpertSource, group: int | None, formats: Formats) -> None:
        self._source, self._formats = source, formats
        self._group = group if formats == BF16 else None
        packed = self._packed()
        sizes = {name: part.numel() for name, part in packed.parts(0).items()}
        kept = self._codes(packed), self._group
        self.layer = ExpertLayer(
            source.path, source.num_experts, *source.shape, parts_of(sizes), kept[1], kept[0]
        )
        """The layer in the file, without its place and checksums."""

    def _packed(self) -> Experts:
        return Experts(1, *self._source.shape, self._group, formats=self._formats)

    def _codes(self, *packed: Experts) -> tuple[CodeFormat | None, CodeFormat | None]:
        """Return the formats of all experts, which were packed into these."""
        found: list[CodeFormat | None] = []
        for i, like in enumerate(self._formats):
            own = [format for one in packed if (format := one.formats[i]) is not None]
            if like is None or not own:
                found.append(None)
                continue
            offset = None if like.offset_NG is None else _spelled(like.offset_NG.dtype)
            products = min(format.products for format in own)
            scale = _spelled(like.scale_NG.dtype)
            found.append(CodeFormat(like.code, own[0].group, scale, offset, products))
        return found[0], found[1]

    @property
    def working_bytes(self) -> int:
        """Most bytes in memory for one expert while it is read, packed and written."""
        values = self._source.num_values
        return (
            SOURCE_BYTES * sum(values) + SCRATCH_BYTES * max(values) + 2 * self.layer.expert_bytes
        )

    def write(self, writer: ExpertWriter, pool: Executor, count: int) -> None:
        """Write all experts, `count` at a time."""
        if self._write_alike(writer, pool, count):
            return
        again = _Plan(self._source, self._group, self._source.common_formats(pool))
        if not again._write_alike(writer, pool, count):
            raise ModelError(
                f"the experts of {again.layer.name} changed while they were read; load them again"
            )

    def _write_alike(self, writer: ExpertWriter, pool: Executor, count: int) -> bool:
        """Write all experts; return False if one has another format than the plan."""
        writer.start(self.layer)
        packers, free = [], SimpleQueue[_Packer]()
        for _ in range(count):
            packers.append(_Packer(self._packed(), self.layer))
            free.put(packers[-1])
        are_alike = True

        def write(expert: int) -> bool:
            nonlocal are_alike
            weights = self._source.expert(expert, self._formats) if are_alike else None
            if weights is None:
                are_alike = False
                return False
            packer = free.get()
            try:
                with naming(f"expert {expert} of {self._source.path}"):
                    data = packer.pack(*weights)
                writer.write(expert, data)
            finally:
                free.put(packer)
            return True

        if not all(list(pool.map(write, range(self._source.num_experts)))):
            return False
        writer.finish(self._codes(*(packer.experts for packer in packers)))
        return True


class _Packer:
    """Memory for one expert at a time: packed weights, and the bytes for the file."""

    def __init__(self, experts: Experts, layer: ExpertLayer) -> None:
        self.experts, self._room = experts, room_for(layer.expert_bytes)
        self._pairs = [
            (torch.frombuffer(self._room, dtype=torch.uint8, count=count, offset=start), name)
            for name, start, count in layer.parts
        ]

    def pack(self, up: Tensor | Quantised, down: Tensor | Quantised) -> memoryview:
        """Return the bytes of an expert, valid until the next call.

        Raises:
            ModelError: The kernels do not support the weights.
        """
        try:
            self.experts.pack(0, up, down)
        except ValueError as error:
            raise ModelError(f"weights cannot be packed: {error}") from error
        parts = self.experts.parts(0)
        for room, name in self._pairs:
            room.copy_(parts[name])
        return self._room


def _spelled(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def kind_of(layer: ExpertLayer) -> str:
    """Return the format of a layer as text: "bf16", "int8" or "u4 g64"."""
    if layer.group is not None:
        return "int8" if layer.group == 0 else f"int8-g{layer.group}"
    kinds = ["bf16" if one is None else f"{one.code} g{one.group}" for one in layer.formats]
    return "+".join(dict.fromkeys(kinds))
