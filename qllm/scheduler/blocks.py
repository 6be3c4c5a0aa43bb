"""KV blocks: ids and who holds them. No tensors.

A block is `block_size` tokens of K and V in every layer. Blocks are charged as tokens are
scheduled to be written, and come back whole when a request ends or is evicted.
"""

from collections.abc import Sequence

from qllm.errors import InvariantError
from qllm.plan import Row


class BlockPool:
    """All KV blocks of an engine: each is free, or held by exactly one request."""

    __slots__ = ("_free", "_holder", "block_size", "num_blocks")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holder: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens of one request need."""
        return -(-num_tokens // self.block_size)

    def take(self, request_id: int, count: int) -> list[int]:
        """Give `count` blocks to a request."""
        if count > len(self._free):
            raise InvariantError(f"{count} blocks asked for, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._holder[block] = request_id
        return taken

    def give_back(self, request_id: int, blocks: list[int]) -> None:
        """Take back all blocks of `blocks`, which `request_id` must hold."""
        for block in blocks:
            if self._holder.pop(block, None) != request_id:
                raise InvariantError(f"block {block} is not held by request {request_id}")
            self._free.append(block)

    def check(self, tables: dict[int, list[int]]) -> None:
        """Compare with the block tables of all requests: nothing leaks, nothing is shared."""
        held = [block for table in tables.values() for block in table]
        if len(set(held)) != len(held):
            raise InvariantError("a block is in two block tables")
        if len(held) + len(self._free) != self.num_blocks or len(set(self._free)) != len(
            self._free
        ):
            raise InvariantError(
                f"{len(held)} held and {len(self._free)} free blocks of {self.num_blocks}"
            )
        for request_id, table in tables.items():
            for block in table:
                if self._holder.get(block) != request_id:
                    raise InvariantError(f"block {block} is not held by request {request_id}")


class SwapSpace:
    """Room for KV that lies outside the blocks of its request, counted in blocks.

    Args:
        num_blocks: Room in all; 0 is none.
    """

    __slots__ = ("_held", "num_blocks", "num_used")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_used = 0
        """Blocks of room that requests have."""
        self._held: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks of room that nobody has."""
        return self.num_blocks - self.num_used

    def put(self, request_id: int, count: int) -> bool:
        """Take room for a request; False, and nothing is taken, if there is too little."""
        if request_id in self._held:
            raise InvariantError(f"request {request_id} is swapped out twice")
        if count > self.num_free:
            return False
        self._held[request_id] = count
        self.num_used += count
        return True

    def release(self, request_id: int) -> None:
        """Give back the room of a request; one that has none is fine."""
        self.num_used -= self._held.pop(request_id, 0)

    def check(self, swapped: dict[int, int]) -> None:
        """Compare with the blocks that the KV of each swapped-out request needs."""
        used = sum(self._held.values())
        if swapped != self._held or used != self.num_used or self.num_free < 0:
            raise InvariantError(f"swapped out are {swapped}, room is taken for {self._held}")


class BlockTables:
    """Block tables of requests that run without a scheduler: measurements and self-tests.

    Args:
        num_blocks: Blocks in all.
        block_size: Tokens of a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._pool = BlockPool(num_blocks, block_size)
        self.num_blocks, self.block_size = num_blocks, block_size
        self._tables: dict[int, list[int]] = {}

    def cover(self, rows: Sequence[Row]) -> list[list[int]]:
        """Give every row the blocks that it still needs; return all blocks of its request.

        Raises:
            InvariantError: There are too few.
        """
        for request_id, _, hi, *_ in rows:
            table = self._tables.setdefault(request_id, [])
            need = self._pool.blocks_for(hi) - len(table)
            table += self._pool.take(request_id, max(0, need))
        return [self._tables[row.request_id] for row in rows]

    def remove(self, request_id: int) -> None:
        """Take back the blocks of a request; one that has none is fine."""
        self._pool.give_back(request_id, self._tables.pop(request_id, []))
