"""Memory with the state of the native decisions, and its reads and writes from Python."""

import struct
from collections.abc import Mapping, Sequence

import numpy as np

from qllm.device import layout
from qllm.device.records import Records, Zeros, host_zeros
from qllm.errors import InvariantError
from qllm.ingress.structs import Dtype
from qllm.policy import CostTable
from qllm.types import RequestId

_PACK = {"i4": "i", "i8": "q"}


def _record(dtype: Dtype) -> struct.Struct:
    """Return the struct that packs one element of a section."""
    assert dtype.names is not None
    return struct.Struct("<" + "".join(_PACK[dtype[name].str[1:]] for name in dtype.names))


REQUEST = _record(layout.REQUEST)
ROW = _record(layout.ROW)
FRAME = _record(layout.FRAME)
EFFECT = _record(layout.EFFECT)
_TABLE = struct.Struct("<iii")
"""`num_blocks`, `first_block`, `last_block` of a request."""
assert layout.REQUEST.fields is not None
_TABLE_AT = layout.REQUEST.fields["num_blocks"][1]


class Block(Records):
    """The state of the decisions: STATE and its sections (`qllm.device.layout`).

    Args:
        sizes: `capacity`, `seats`, `num_blocks` and `num_marks`.
        zeros: Function that allocates the block's memory, in numbers of eight bytes.
    """

    def __init__(self, sizes: dict[str, int], zeros: Zeros = host_zeros) -> None:
        super().__init__(layout.STATE, layout.SECTIONS, sizes, layout.VERSION, zeros)
        self.sizes, self.zeros = sizes, zeros
        self.bytes = self._cells.cast("B")
        at = self.offsets["next_block"]
        self._chain = self.bytes[at : at + 4 * sizes["num_blocks"]].cast("i")

    def set_ride_frac(self, frac: float) -> None:
        """Set the ride fraction, the only number of STATE that is not whole."""
        struct.pack_into("<d", self.bytes, 8 * self.index("ride_frac"), frac)

    def set_costs(self, table: CostTable) -> None:
        """Set the predicted times."""
        count = len(table.decode_ns)
        if count > layout.COST_LEVELS:
            raise InvariantError(f"{count} decode costs; at most {layout.COST_LEVELS}")
        at = self.index("decode_ns")
        self._cells[at : at + count] = np.array(table.decode_ns, np.int64).data
        self.set(num_decode_ns=count, prefill_token_ns=table.prefill_token_ns)

    # -- sections

    def ints(self, name: str, count: int) -> list[int]:
        """Return the first numbers of a section of 4-byte integers."""
        at = self.offsets[name]
        return self.bytes[at : at + 4 * count].cast("i").tolist()

    def request(self, slot: int) -> tuple[int, ...]:
        """Return the fields of a request, as in `layout.REQUEST`."""
        at = self.offsets["requests"] + slot * REQUEST.size
        return REQUEST.unpack_from(self.bytes, at)

    def frame(self, slot: int) -> tuple[int, ...]:
        """Return the fields of a frame, as in `layout.FRAME`."""
        return FRAME.unpack_from(self.bytes, self.offsets["frames"] + slot * FRAME.size)

    def rows(self, frame: int, count: int) -> list[tuple[int, ...]]:
        """Return the first rows of a frame, as in `layout.ROW`."""
        at = self.rows_at(frame)
        return list(ROW.iter_unpack(self.bytes[at : at + count * ROW.size]))

    def rows_at(self, frame: int) -> int:
        """Return the byte offset of the rows of a frame."""
        return self.offsets["frame_rows"] + frame * self.sizes["seats"] * ROW.size

    def effects(self, count: int) -> list[tuple[int, ...]]:
        """Return the first effects, as in `layout.EFFECT`."""
        at = self.offsets["effects"]
        return list(EFFECT.iter_unpack(self.bytes[at : at + count * EFFECT.size]))

    def extend_table(self, slot: int, table: list[int]) -> None:
        """Append to a block table the blocks that the request has taken since the last call."""
        at = self.offsets["requests"] + slot * REQUEST.size + _TABLE_AT
        count, first, _ = _TABLE.unpack_from(self.bytes, at)
        while len(table) < count:
            table.append(self._chain[table[-1]] if table else first)

    # -- tests

    def check_blocks(self, tables: Mapping[RequestId, Sequence[int]]) -> None:
        """Check that these block tables and the free blocks hold every KV block exactly once.

        Raises:
            InvariantError: A block is missing, or is held twice.
        """
        found = [block for table in tables.values() for block in table]
        found += self.ints("free_blocks", self.get("num_free"))
        if sorted(found) != list(range(self.sizes["num_blocks"])):
            raise InvariantError("the free and the held KV blocks are not all of them, once each")

    def check_order(self, slots: Mapping[RequestId, int]) -> None:
        """Check that every live request is in the right list once, and that lists are sorted.

        Raises:
            InvariantError: A request is missing, twice or in a wrong list, or a list is not sorted.
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
