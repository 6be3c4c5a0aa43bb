"""The file of packed experts: after any accident it is absent, refused, or gives the same bytes."""

import errno
import fcntl
import gc
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from qllm import block_file
from qllm.block_file import BLOCK, Blocks, checksum_of, make_header, said_in, why_foreign
from qllm.errors import ConfigError, ModelError
from qllm.kernels import cpu
from qllm.kernels.cpu.experts import Experts, Formats
from qllm.kernels.quantised import FOUR_BIT, Quantised
from qllm.models.weights import expert_file
from qllm.models.weights.expert_file import (
    END,
    KIND,
    MAGIC,
    CodeFormat,
    ExpertFile,
    ExpertLayer,
    file_bytes,
    parts_of,
    room_for,
    written,
)
from tests.support.engines import open_files

SAYS = {"weights": "a", "kernels": "AVX2"}
FORMATS = (CodeFormat("u4", 64, "bfloat16", "bfloat16", 1), None)
LAYERS = [
    ExpertLayer("layers.0.experts", 2, 24, 16, parts_of({"up": 5000, "down": 100})),
    ExpertLayer("layers.2.experts", 3, 24, 16, parts_of({"up": 70, "down": 60}), 64),
]


def bytes_of(layer: int, expert: int) -> bytes:
    """Return an expert that differs from all others at every byte."""
    return bytes([16 * layer + expert + 1]) * LAYERS[layer].expert_bytes


def write(path: Path, says: dict[str, str] = SAYS, blocks: type[Blocks] = Blocks) -> Path:
    with written(path, says, LAYERS, blocks) as writer:
        for i, layer in enumerate(LAYERS):
            writer.start(layer)
            for expert in reversed(range(layer.num_experts)):
                room = room_for(layer.expert_bytes)
                room[:] = bytes_of(i, expert)
                writer.write(expert, room)
            writer.finish(FORMATS)
    return path


def read(file: ExpertFile, layer: int, expert: int) -> bytes:
    room = room_for(file.layers[layer].expert_bytes)
    file.read(layer, expert, room)
    return bytes(room)


def places() -> Iterator[tuple[int, int]]:
    for i, layer in enumerate(LAYERS):
        for expert in range(layer.num_experts):
            yield i, expert


def error_of(file: ExpertFile, layer: int, expert: int) -> str | None:
    """Return the error of a read; None if it gives the right bytes."""
    try:
        found = read(file, layer, expert)
    except ModelError as error:
        return str(error)
    assert found == bytes_of(layer, expert)
    return None


def right_in(path: Path) -> set[tuple[int, int]]:
    """Return the experts that can be read; all others are refused by name."""
    file, found = ExpertFile(path, SAYS), set()
    for layer, expert in places():
        error = error_of(file, layer, expert)
        if error is None:
            found.add((layer, expert))
        else:
            assert f"expert {expert} of {file.layers[layer].name} in {path}" in error
    file.close()
    return found


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.experts"


def test_experts_are_read_as_they_were_written_in_any_order(path: Path) -> None:
    file = ExpertFile(write(path), SAYS)
    assert right_in(path) == set(places())
    assert [layer.name for layer in file.layers] == [layer.name for layer in LAYERS]
    for found, given in zip(file.layers, LAYERS, strict=True):
        assert found.formats == FORMATS
        assert (found.parts, found.group) == (given.parts, given.group)
        for expert in range(found.num_experts):
            assert found.place(expert) % BLOCK == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert path.stat().st_size <= file_bytes(LAYERS)


SUMS = {
    "bf16": 10840651427076071560,
    "int8": 15264080180978118839,
    "u4": 2776890941685992629,
    "i8": 17666790634297956360,
    "e2m1": 4218352035358477964,
    "e4m3": 17666790634297956360,
    "i4": 3647017908190963219,
}
"""Checksum of an expert in the layout of this version, by its format."""


def counted(n: int, k: int) -> torch.Tensor:
    """Return weights that differ from their neighbours, and are the same everywhere."""
    return (torch.arange(n * k).remainder(251).view(n, k) - 125).float().bfloat16()


def packed_as(form: str) -> Experts:
    up, down = counted(48, 40), counted(40, 24)
    if form in ("bf16", "int8"):
        experts = Experts(1, 24, 40, None if form == "bf16" else 16)
        experts.pack(0, up, down)
        return experts
    codes = []
    for weight in (up, down):
        n, k = weight.shape
        width = k // 2 if form in FOUR_BIT else k
        dtype = {"i8": torch.int8, "e4m3": torch.float8_e4m3fn}.get(form, torch.uint8)
        code = torch.arange(n * width).remainder(120).to(torch.uint8).view(dtype).view(n, width)
        scale = 1 + torch.arange(n * (k // 8)).view(n, k // 8) / 1024
        offset = -scale.half() if form == "u4" else None
        codes.append(Quantised(form, code, scale.half(), offset, 8))
    experts = Experts(1, 24, 40, formats=Formats(*codes))
    experts.pack(0, *codes)
    return experts


@pytest.mark.parametrize("kind", cpu.native.available())
@pytest.mark.parametrize("form", SUMS)
def test_packed_weights_have_the_layout_of_this_version(kind: str, form: str) -> None:
    """Another layout needs another version in MAGIC: older files have this one."""
    cpu.native.use(kind)
    try:
        parts = packed_as(form).parts(0)
    finally:
        cpu.native.use(cpu.kind())
    assert list(parts) == ["up", "down", *(["up_scale", "down_scale"] * (form == "int8"))]
    assert checksum_of(*(part.numpy().tobytes() for part in parts.values())) == SUMS[form]


def test_parts_of_an_expert_start_on_cache_lines_and_do_not_overlap() -> None:
    parts = parts_of({"up": 65, "down": 1, "up_scale": 64, "down_scale": 3})
    assert [(p.start, p.num_bytes) for p in parts] == [(0, 65), (128, 1), (192, 64), (256, 3)]


@pytest.mark.parametrize("wrong", ["short", "long", "not aligned"])
def test_memory_of_another_size_or_place_is_refused(path: Path, wrong: str) -> None:
    file = ExpertFile(write(path), SAYS)
    size = file.layers[0].expert_bytes
    room = room_for(size + BLOCK)
    given = {"short": room[: size - BLOCK], "long": room, "not aligned": room[8 : size + 8]}
    with pytest.raises(ValueError, match=f"takes {size} bytes on a boundary of {BLOCK}"):
        file.read(0, 0, given[wrong])


@pytest.mark.parametrize("expert", [-1, 2])
def test_an_expert_that_is_not_there_is_refused(path: Path, expert: int) -> None:
    file = ExpertFile(write(path), SAYS)
    with pytest.raises(IndexError, match=rf"layers\.0\.experts has no expert {expert}"):
        read(file, 0, expert)


# -- a process that dies


class StoppedError(Exception):
    """The process is killed here."""


def dying(after: int) -> tuple[type[Blocks], list[int]]:
    """Return blocks of a process that is killed after so many bytes, and the bytes left."""
    left = [after]

    class Dying(Blocks):
        def write(self, data: memoryview, at: int) -> None:
            count = min(len(data), left[0])
            fd = os.open(os.readlink(f"/proc/self/fd/{self._fd}"), os.O_RDWR)
            os.pwrite(fd, data[:count], at)  # a part of a block, which direct writes refuse
            os.close(fd)
            left[0] -= count
            if count < len(data):
                raise StoppedError

    return Dying, left


def test_a_writer_that_is_killed_at_any_byte_leaves_no_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process removes nothing, so the test keeps the unfinished file too."""
    monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False: None)
    unlink = os.unlink
    blocks, left = dying(10**9)
    write(path, blocks=blocks)
    total = 10**9 - left[0]
    assert right_in(path) == set(places())
    unlink(path)
    new = path.with_name(path.name + ".new")
    for cut in [*range(0, total, 509), *range(total - BLOCK, total, 97)]:
        with pytest.raises(StoppedError):
            write(path, blocks=dying(cut)[0])
        assert not path.exists()
        with pytest.raises(ConfigError):  # even if it had the name of a complete file
            ExpertFile(new, SAYS)
        unlink(new)
    assert list(path.parent.iterdir()) == []


def test_an_unfinished_file_of_a_killed_writer_is_replaced(path: Path) -> None:
    path.with_name(path.name + ".new").write_bytes(b"left over")
    assert right_in(write(path)) == set(places())
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_an_error_of_a_writer_leaves_nothing(path: Path) -> None:
    with pytest.raises(StoppedError):
        write(path, blocks=dying(3 * BLOCK)[0])
    assert list(path.parent.iterdir()) == []


def test_a_layer_that_is_started_again_has_only_its_last_experts(path: Path) -> None:
    with written(path, SAYS, LAYERS[:1]) as writer:
        for layer, value in ((LAYERS[0], 1), (LAYERS[1], 2)):
            writer.start(layer)
            for expert in range(2 if value == 1 else 3):
                room = room_for(layer.expert_bytes)
                room[:] = bytes([value]) * len(room)
                writer.write(expert, room)
        writer.finish(FORMATS)
    file = ExpertFile(path, SAYS)
    assert [layer.name for layer in file.layers] == [LAYERS[1].name]
    assert all(read(file, 0, e) == bytes([2]) * LAYERS[1].expert_bytes for e in range(3))


def test_a_layer_without_all_experts_is_not_finished(path: Path) -> None:
    """An expert that was written before the layer was started again does not count."""
    layer = LAYERS[0]
    with suppress(StoppedError), written(path, SAYS, [layer]) as writer:
        for experts in ([0, 1], [1]):
            writer.start(layer)
            for expert in experts:
                writer.write(expert, room_for(layer.expert_bytes))
        with pytest.raises(KeyError):
            writer.finish(FORMATS)
        raise StoppedError


# -- bits that flip, and files that are cut


def test_every_flipped_bit_of_the_first_and_the_last_block_is_refused(path: Path) -> None:
    size, header = write(path).stat().st_size, make_header(MAGIC, SAYS)
    first, last = bytearray(path.read_bytes()[:BLOCK]), bytearray(path.read_bytes()[-BLOCK:])
    assert why_foreign(first, header, KIND) is None
    assert said_in(last) is not None
    for bit in range(8 * BLOCK):
        first[bit // 8] ^= 1 << bit % 8
        assert why_foreign(first, header, KIND) is not None
        first[bit // 8] ^= 1 << bit % 8
        last[bit // 8] ^= 1 << bit % 8
        assert said_in(last) is None or not last.startswith(END)
        last[bit // 8] ^= 1 << bit % 8
    for block in (0, size - BLOCK):
        for bit in range(0, 8 * BLOCK, 997):
            flip(path, 8 * block + bit)
            with pytest.raises(ConfigError, match=r"cannot be used: .*(damaged|release|here it)"):
                ExpertFile(path, SAYS)
            flip(path, 8 * block + bit)
    assert right_in(path) == set(places())


def test_every_flipped_bit_of_the_table_is_refused(path: Path) -> None:
    size = write(path).stat().st_size
    last = ExpertFile(path, SAYS).layers[-1]
    start = last.place(last.num_experts)
    assert size == start + 2 * BLOCK
    for bit in range(8 * start, 8 * (size - BLOCK), 7):
        flip(path, bit)
        with pytest.raises(ConfigError, match="its table is damaged"):
            ExpertFile(path, SAYS)
        flip(path, bit)
    assert right_in(path) == set(places())


def test_a_flipped_bit_of_an_expert_is_an_error_of_that_expert_only(path: Path) -> None:
    file = ExpertFile(write(path), SAYS)
    for i, expert in places():
        start, size = file.layers[i].place(expert), file.layers[i].expert_bytes
        for bit in (*range(8 * start, 8 * (start + size), 4099), 8 * (start + size) - 1):
            flip(path, bit)
            assert right_in(path) == set(places()) - {(i, expert)}
            flip(path, bit)


def test_an_expert_in_the_place_of_another_is_an_error(path: Path) -> None:
    file = ExpertFile(write(path), SAYS)
    one, other = (file.layers[1].place(expert) for expert in (0, 2))
    data = bytearray(path.read_bytes())
    size = file.layers[1].expert_bytes
    data[one : one + size], data[other : other + size] = (
        data[other : other + size],
        data[one : one + size],
    )
    path.write_bytes(data)
    assert right_in(path) == {(0, 0), (0, 1), (1, 1)}


def test_a_file_that_is_cut_at_any_place_is_refused(path: Path) -> None:
    size = write(path).stat().st_size
    for left in (*range(0, size, 509), *range(0, size, BLOCK), size - 1):
        os.truncate(path, left)
        with pytest.raises(ConfigError, match="cannot be used"):
            ExpertFile(path, SAYS)
        path.unlink()
        write(path)
    with path.open("ab") as file:
        file.write(bytes(BLOCK))
    with pytest.raises(ConfigError, match="its end is damaged or cut off"):
        ExpertFile(path, SAYS)


def test_a_file_that_is_cut_while_it_is_open_is_an_error_of_what_is_gone(path: Path) -> None:
    file = ExpertFile(write(path), SAYS)
    os.truncate(path, file.layers[1].place(1))
    assert read(file, 1, 0) == bytes_of(1, 0)
    with pytest.raises(ModelError, match=r"expert 1 of layers\.2\.experts .* is cut off"):
        read(file, 1, 1)


# -- files of others, and folders that do not serve


def test_a_file_of_something_else_is_refused_by_its_name(path: Path) -> None:
    write(path)
    for name in SAYS:
        ours = SAYS | {name: "c"}
        said = f"its {name} is {SAYS[name]}, and here it is c"
        if name in ("weights", "quantization"):
            said = "it was made from other weights"
        with pytest.raises(ConfigError, match=f"{said}; give another"):
            ExpertFile(path, ours)
    path.write_bytes(b"something else of the user's")
    with pytest.raises(ConfigError, match=f"it is no {KIND}, or one of another release"):
        ExpertFile(path, SAYS)


def test_a_file_of_another_version_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_file, "MAGIC", MAGIC[:-1] + b"\x02")
    write(path)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="one of another release"):
        ExpertFile(path, SAYS)


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "loose link"])
def test_only_a_regular_file_is_opened(path: Path, kind: str) -> None:
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        other = path.with_name("other")
        path.symlink_to(write(other) if kind == "link" else other)
    said = "a symbolic link" if "link" in kind else "no regular file"
    with pytest.raises(ConfigError, match=f"cannot be used: it is {said}"):
        ExpertFile(path, SAYS)


def test_no_file_stays_open_behind_an_object_that_is_gone(path: Path) -> None:
    write(path)
    before = open_files()
    file = ExpertFile(path, SAYS)
    assert len(open_files()) == len(before) + 1
    file.close()
    assert open_files() == before
    del file
    ExpertFile(path, SAYS)
    with pytest.raises(ConfigError):
        ExpertFile(path, SAYS | {"weights": "c"})
    gc.collect()
    assert open_files() == before


def test_a_link_in_the_place_of_the_unfinished_file_is_not_followed(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"of the user")
    path.with_name(path.name + ".new").symlink_to(other)
    write(path)
    assert other.read_bytes() == b"of the user"


def test_a_link_is_not_followed_when_it_comes_after_the_check(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.symlink_to(write(path.with_name("other")))
    monkeypatch.setattr(Path, "is_symlink", lambda _: False)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        ExpertFile(path, SAYS)


def test_a_file_of_another_writer_is_not_written_to(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may come after the older file was removed."""
    new = path.with_name(path.name + ".new")
    new.write_bytes(b"of another writer")
    monkeypatch.setattr(Path, "unlink", lambda _: None)
    with pytest.raises(FileExistsError):
        write(path)
    assert new.read_bytes() == b"of another writer"


def test_all_bytes_are_on_the_disk_before_the_file_has_its_name(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = list[str]()
    for home, name in ((os, "pwritev"), (os, "truncate"), (os, "fsync"), (Path, "rename")):
        real = getattr(home, name)

        def call(*args: Any, real: Any = real, name: str = name) -> Any:
            done.append(name)
            return real(*args)

        monkeypatch.setattr(home, name, call)
    write(path)
    assert done[-3:] == ["truncate", "fsync", "rename"]
    assert done.count("fsync") == done.count("rename") == 1


def test_a_file_that_cannot_get_its_name_is_removed(path: Path) -> None:
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        write(path)
    assert list(path.parent.iterdir()) == [path]


def test_missing_room_is_an_error_before_a_byte_is_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()

    def full(fd: int, start: int, size: int) -> None:
        asked.append(size)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(block_file.os, "posix_fallocate", full)
    monkeypatch.setattr(os, "pwritev", lambda *_: pytest.fail("a byte is written"))
    with pytest.raises(OSError, match="No space"):
        write(path)
    assert asked == [file_bytes(LAYERS)]
    assert list(path.parent.iterdir()) == []


def test_reads_bypass_the_page_cache(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path)
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
        can_bypass = True
    except OSError:  # some file systems cannot
        can_bypass = False
    flags = list[int]()
    real = os.preadv

    def preadv(fd: int, buffers: Any, at: int) -> int:
        flags.append(fcntl.fcntl(fd, fcntl.F_GETFL))
        return real(fd, buffers, at)

    file = ExpertFile(path, SAYS)
    monkeypatch.setattr(os, "preadv", preadv)
    read(file, 0, 0)
    assert file.is_direct is can_bypass
    assert flags
    assert all(bool(one & os.O_DIRECT) is can_bypass for one in flags)


def test_a_file_system_without_direct_reads_serves_too(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path)
    real, calls = os.preadv, list[int]()

    def preadv(fd: int, buffers: Any, at: int) -> int:
        calls.append(at)
        if len(calls) == 1:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", preadv)
    file = ExpertFile(path, SAYS)
    assert not file.is_direct
    assert read(file, 1, 2) == bytes_of(1, 2)


def test_an_error_of_the_disk_ends_one_read(path: Path) -> None:
    class Failing(Blocks):
        fails = False

        def read(self, data: memoryview, at: int) -> bool:
            if self.fails:
                raise OSError(errno.EIO, "Input/output error")
            return super().read(data, at)

    file = ExpertFile(write(path), SAYS, Failing)
    Failing.fails = True
    with pytest.raises(OSError, match="Input/output error"):
        read(file, 0, 1)
    Failing.fails = False
    assert read(file, 0, 1) == bytes_of(0, 1)


def test_memory_from_room_for_is_zeroed_and_aligned() -> None:
    room = room_for(3 * BLOCK)
    assert bytes(room) == bytes(3 * BLOCK)
    assert isinstance(room.obj, mmap.mmap)
    assert expert_file._address(room) % BLOCK == 0
