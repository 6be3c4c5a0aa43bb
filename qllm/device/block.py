"""A block of the native scheduler's state in host memory, and how Python reads and writes it."""

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from qllm.device import layout
from qllm.device.layout import NONE, cell
from qllm.errors import InvariantError
from qllm.ingress.structs import Dtype
from qllm.policy import CostTable
from qllm.scheduler.decision import Parked
from qllm.scheduler.request import Request
from qllm.types import RequestId

_PACK = {"i4": "i", "i8": "q"}


def _record(dtype: Dtype) -> struct.Struct:
    """Packs and unpacks one element of a section."""
    assert dtype.names is not None
    return struct.Struct("<" + "".join(_PACK[dtype[name].str[1:]] for name in dtype.names))


_REQUEST = _record(layout.REQUEST)
_ROW = _record(layout.ROW)
_FRAME = _record(layout.FRAME)
_EFFECT = _record(layout.EFFECT)
_CELLS = {name: cell(name) for name in layout.STATE.names or ()}
_TABLE = struct.Struct("<iii")
"""`num_blocks`, `first_block`, `last_block` of a request."""
assert layout.REQUEST.fields is not None
_TABLE_AT = layout.REQUEST.fields["num_blocks"][1]


Zeros = Callable[[int], np.ndarray[Any, np.dtype[np.int64]]]


def host_zeros(count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Memory of the host."""
    return np.zeros(count, np.int64)


class Block:
    """One block.

    Args:
        sizes: `capacity`, `seats`, `num_blocks` and `num_marks`.
        zeros: Makes its memory, so many numbers of eight bytes.
    """

    def __init__(self, sizes: dict[str, int], zeros: Zeros = host_zeros) -> None:
        self.sizes = sizes
        self._zeros = zeros
        self.offsets, num_bytes = layout.section_offsets(sizes)
        self.memory = zeros(num_bytes // 8)
        self.address: int = self.memory.ctypes.data
        self._cells = memoryview(self.memory.data)
        self._bytes = self._cells.cast("B")
        at = self.offsets["next_block"]
        self._chain = self._bytes[at : at + 4 * sizes["num_blocks"]].cast("i")
        self.set(version=layout.VERSION, **sizes)
        self.set(**{f"at_{name}": at for name, at in self.offsets.items()})

    def grown(self, capacity: int) -> "Block":
        """A copy with room for more requests; the new slots are not linked yet."""
        bigger = Block({**self.sizes, "capacity": capacity}, self._zeros)
        own = {"capacity", *(f"at_{section.name}" for section in layout.SECTIONS)}
        num_cells = layout.STATE.itemsize // 8
        for at in set(range(num_cells)) - {_CELLS[name] for name in own}:
            bigger._cells[at] = self._cells[at]
        for section in layout.SECTIONS:
            old = self.array(section.name)
            bigger.array(section.name)[: len(old)] = old
        return bigger

    # -- STATE

    def get(self, name: str) -> int:
        """A number of STATE."""
        return int(self._cells[_CELLS[name]])

    def set(self, **numbers: int) -> None:
        """Change numbers of STATE."""
        for name, value in numbers.items():
            self._cells[_CELLS[name]] = int(value)

    def set_ride_frac(self, frac: float) -> None:
        """The one number of STATE that is not whole."""
        struct.pack_into("<d", self._bytes, 8 * _CELLS["ride_frac"], frac)

    def set_costs(self, table: CostTable) -> None:
        """Change the predicted times."""
        count = len(table.decode_ns)
        if count > layout.COST_LEVELS:
            raise InvariantError(f"{count} decode costs; at most {layout.COST_LEVELS}")
        at = _CELLS["decode_ns"]
        self._cells[at : at + count] = np.array(table.decode_ns, np.int64).data
        self.set(num_decode_ns=count, prefill_token_ns=table.prefill_token_ns)

    # -- sections

    def array(self, name: str) -> np.ndarray[Any, Dtype]:
        """A section as a numpy array that shares its memory."""
        section = next(s for s in layout.SECTIONS if s.name == name)
        count = layout.count_of(section, self.sizes)
        return np.frombuffer(self._bytes, section.dtype, count, self.offsets[name])

    def view(self, name: str, copy: "np.ndarray[Any, np.dtype[np.uint8]]") -> Any:
        """A section in a copy of the block's bytes."""
        section = next(s for s in layout.SECTIONS if s.name == name)
        count = layout.count_of(section, self.sizes)
        return np.frombuffer(copy.data, section.dtype, count, self.offsets[name])

    def head(self, copy: "np.ndarray[Any, np.dtype[np.uint8]]") -> dict[str, int]:
        """The numbers of STATE in a copy of the block's bytes."""
        cells = copy[: layout.STATE.itemsize].view(np.int64)
        return {name: int(cells[at]) for name, at in _CELLS.items() if at < len(cells)}

    def ints(self, name: str, count: int) -> list[int]:
        """The first numbers of a section of 4-byte integers."""
        at = self.offsets[name]
        return self._bytes[at : at + 4 * count].cast("i").tolist()

    def request(self, slot: int) -> tuple[int, ...]:
        """A request, as `layout.REQUEST` has it."""
        at = self.offsets["requests"] + slot * _REQUEST.size
        return _REQUEST.unpack_from(self._bytes, at)

    def frame(self, slot: int) -> tuple[int, ...]:
        """A frame, as `layout.FRAME` has it."""
        return _FRAME.unpack_from(self._bytes, self.offsets["frames"] + slot * _FRAME.size)

    def rows(self, frame: int, count: int) -> list[tuple[int, ...]]:
        """The rows of a frame, as `layout.ROW` has them."""
        at = self._rows_at(frame)
        return list(_ROW.iter_unpack(self._bytes[at : at + count * _ROW.size]))

    def _rows_at(self, frame: int) -> int:
        return self.offsets["frame_rows"] + frame * self.sizes["seats"] * _ROW.size

    def effects(self, count: int) -> list[tuple[int, ...]]:
        """The first effects, as `layout.EFFECT` has them."""
        at = self.offsets["effects"]
        return list(_EFFECT.iter_unpack(self._bytes[at : at + count * _EFFECT.size]))

    def extend_table(self, slot: int, table: list[int]) -> None:
        """Add to a block table the blocks that its request took since."""
        at = self.offsets["requests"] + slot * _REQUEST.size + _TABLE_AT
        count, first, _ = _TABLE.unpack_from(self._bytes, at)
        while len(table) < count:
            table.append(self._chain[table[-1]] if table else first)

    # -- what comes from elsewhere

    def restore(self, slot: int, request: Request) -> None:
        """Write the counters of a request that was added as a new one."""
        record = self.array("requests")[slot]
        for name in ("served_ns", "last_progress_ns", "evictions", "preemptions", "failures"):
            record[name] = getattr(request, name)
        for name in ("first_token_ns", "last_token_ns"):
            at_ns = getattr(request, name)
            record[name] = NONE if at_ns is None else at_ns
        record["num_tokens"] = request.num_tokens
        record["num_computed"] = request.num_computed_tokens
        if request.frontier is not None:
            record["front_lo"], record["front_hi"], record["front_layer"] = request.frontier

    def restore_frame(self, frame: int, parked: Parked, slots: Mapping[RequestId, int]) -> None:
        """Write a parked frame, and to its live requests that they are in it."""
        program, index = parked.program, parked.index
        _FRAME.pack_into(
            self._bytes,
            self.offsets["frames"] + frame * _FRAME.size,
            *(program.frame_id, parked.parked_ns, program.stop_below, len(program.rows)),
            *(program.layer_at(index), program.inside_layer(index), program.grain, -1, 0),
        )
        at, requests = self._rows_at(frame), self.array("requests")
        for row, samples in zip(program.rows, program.samples, strict=True):
            is_dead = row.request_id in parked.dead
            slot = 0 if is_dead else slots[row.request_id]
            flags = layout.SAMPLES * samples | layout.DEAD * is_dead
            _ROW.pack_into(self._bytes, at, *row, slot, flags)
            at += _ROW.size
            if not is_dead:
                requests[slot]["frame"] = frame

    # -- tests

    def check_blocks(self, tables: Mapping[RequestId, Sequence[int]]) -> None:
        """Compare the chains of KV blocks with block tables: nothing leaks, nothing is shared.

        Raises:
            InvariantError: Something does.
        """
        found = [block for table in tables.values() for block in table]
        found += self.ints("free_blocks", self.get("num_free"))
        if sorted(found) != list(range(self.sizes["num_blocks"])):
            raise InvariantError("the free and the held KV blocks are not all of them, once each")

    def check_order(self, slots: Mapping[RequestId, int]) -> None:
        """Look whether every live request is in one place of the order, and in the right one.

        Raises:
            InvariantError: One is not.
        """
        requests = self.array("requests")
        found: list[int] = []
        for name, place in (
            ("admitted", layout.ADMITTED),
            ("waiting", layout.WAITING),
            ("unranked", layout.UNRANKED),
        ):
            order = self.ints(name, self.get(f"num_{name}"))
            found += order
            if any(requests[slot]["place"] != place for slot in order):
                raise InvariantError(f"a request in {name} says that it is elsewhere")
            if place == layout.UNRANKED:
                continue
            if any((requests[slot]["num_blocks"] > 0) != (name == "admitted") for slot in order):
                raise InvariantError(f"a request in {name} should not be there")
            ranks = [tuple(requests[slot][["tier", "key", "id"]]) for slot in order]
            if ranks != sorted(ranks):
                raise InvariantError(f"{name} is out of order")
        if sorted(found) != sorted(slots.values()):
            raise InvariantError(f"ranked are slots {sorted(found)}, others are live")


class NativePool:
    """The KV blocks of a block of state, as `qllm.scheduler.blocks.BlockPool` shows them."""

    def __init__(self, block_size: int, block: Block) -> None:
        self.block_size = block_size
        self.num_blocks = block.sizes["num_blocks"]
        self.block = block

    @property
    def num_free(self) -> int:
        """Blocks nobody holds."""
        return self.block.get("num_free")

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens of one request need."""
        return -(-num_tokens // self.block_size)

    def check(self, tables: Mapping[RequestId, Sequence[int]]) -> None:
        """See `Block.check_blocks`."""
        self.block.check_blocks(tables)
