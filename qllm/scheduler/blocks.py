"""KV blocks: their ids, and the requests that hold them. This module has no tensors.

A block is `block_size` tokens of K and V in every layer. A request takes blocks when tokens are
scheduled to be written, and returns all blocks when it ends or is evicted.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from qllm.errors import InvariantError
from qllm.plan import ModelShape, Row


class BlockPool:
    """All KV blocks of an engine. Each block is free, or held by one request or more.

    A full, committed block can be shared by several requests, because no request writes to it any
    more. A shared block counts once, and is free when its last holder returns it.

    Args:
        num_blocks: Number of all blocks.
        block_size: Tokens of a block.
        shape: Shape of the model, which sets the blocks charged for states; None charges nothing.
    """

    __slots__ = (
        *("_free", "_holders", "_left", "_name_of", "_named"),
        *("block_size", "num_blocks", "shape", "shared"),
    )

    def __init__(self, num_blocks: int, block_size: int, shape: ModelShape | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.shape = shape
        self._free = deque(range(num_blocks - 1, -1, -1))
        self._holders: dict[int, list[int]] = {}
        self.shared: dict[int, int] = {}
        """Number of holders of each block that has several holders."""
        self._named: dict[bytes, tuple[int, ...]] = {}
        """Blocks of each KV page that has a name, while a request holds the blocks."""
        self._name_of: dict[int, bytes] = {}
        self._left: dict[int, tuple[frozenset[int], Callable[[], object]]] = {}
        """Blocks with KV of requests that end, and what is called when one is given to another."""

    @property
    def num_free(self) -> int:
        """Number of blocks that no request holds."""
        return len(self._free)

    @property
    def has_names(self) -> bool:
        """True if there are blocks that requests could share."""
        return bool(self._named)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that `num_tokens` tokens of one request need."""
        if self.shape is not None:
            return self.shape.blocks_for(num_tokens, self.block_size)
        return -(-num_tokens // self.block_size)

    def take(self, request_id: int, count: int) -> list[int]:
        """Give `count` blocks to a request."""
        if count > len(self._free):
            raise InvariantError(f"{count} blocks asked for, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._holders[block] = [request_id]
        if self._left:
            self._overwrite(frozenset(taken))
        return taken

    def _overwrite(self, taken: frozenset[int]) -> None:
        lost = [i for i, (blocks, _) in self._left.items() if not blocks.isdisjoint(taken)]
        for request_id in lost:
            _, call = self._left.pop(request_id)
            call()

    def leave(self, request_id: int, blocks: Sequence[int], lost: Callable[[], object]) -> None:
        """Let the KV of a request that ends stay in its blocks until they are needed.

        The blocks are as free as others once they are given back, but are handed out last.

        Args:
            request_id: Request that ends.
            blocks: Blocks that the request holds.
            lost: Callback: one of the blocks was handed out, so its KV will be overwritten.
        """
        self._left[request_id] = frozenset(blocks), lost

    def clear(self, request_id: int) -> None:
        """End `leave`, because the KV is not needed any more."""
        self._left.pop(request_id, None)

    def name(self, name: bytes, blocks: Sequence[int]) -> None:
        """Name the KV page in blocks that a request holds. A known name keeps its old blocks."""
        if name not in self._named and not any(block in self._name_of for block in blocks):
            self._named[name] = tuple(blocks)
            self._name_of |= dict.fromkeys(blocks, name)

    def find(self, names: Sequence[bytes]) -> list[int]:
        """Return the blocks of these pages, up to the first page without blocks."""
        found: list[int] = []
        for name in names if self._named else ():
            if name not in self._named:
                break
            found += self._named[name]
        return found

    def is_fixed(self, block: int) -> bool:
        """Return True if other requests share a block, or may share it.

        Its KV must not change then.
        """
        return block in self.shared or block in self._name_of

    def share(self, request_id: int, blocks: Sequence[int]) -> None:
        """Add a request as a holder of blocks that other requests hold."""
        for block in blocks:
            holders = self._holders.get(block)
            if not holders or request_id in holders:
                raise InvariantError(f"request {request_id} shares block {block} of {holders}")
            holders.append(request_id)
            self.shared[block] = len(holders)

    def give_back(self, request_id: int, blocks: Sequence[int], *, moving: bool = False) -> None:
        """Take blocks back from a request.

        Args:
            request_id: Request that returns the blocks.
            blocks: Blocks that the request holds.
            moving: True if the blocks' KV is still being copied out. Other free blocks are used
                first then, as after `leave`.
        """
        moving |= request_id in self._left
        for block in blocks:
            holders = self._holders.get(block, [])
            if request_id not in holders:
                raise InvariantError(f"block {block} is not held by request {request_id}")
            holders.remove(request_id)
            if holders:
                self._count(block, len(holders))
                continue
            del self._holders[block]
            self._forget(block)
            (self._free.appendleft if moving else self._free.append)(block)

    def _count(self, block: int, num_holders: int) -> None:
        if num_holders > 1:
            self.shared[block] = num_holders
        else:
            del self.shared[block]

    def _forget(self, block: int) -> None:
        name = self._name_of.get(block)
        if name is not None:
            for other in self._named.pop(name):
                del self._name_of[other]

    def only(self, tables: Mapping[int, Sequence[int]]) -> "BlockPool":
        """Return a copy of the pool in which only these block tables hold blocks."""
        pool = BlockPool(self.num_blocks, self.block_size, self.shape)
        for request_id, table in tables.items():
            for block in table:
                pool._holders.setdefault(block, []).append(request_id)
        pool.shared = {b: len(who) for b, who in pool._holders.items() if len(who) > 1}
        pool._free = deque(b for b in range(self.num_blocks - 1, -1, -1) if b not in pool._holders)
        for name, blocks in self._named.items():
            if all(block in pool._holders for block in blocks):
                pool.name(name, blocks)
        return pool

    def check(self, tables: dict[int, list[int]]) -> None:
        """Compare with the block tables of all requests.

        No block may leak; a shared block counts once.

        Raises:
            InvariantError: Pool and tables differ.
        """
        holders: dict[int, list[int]] = {}
        for request_id, table in tables.items():
            if len(set(table)) != len(table):
                raise InvariantError(f"a block is twice in the table of request {request_id}")
            for block in table:
                holders.setdefault(block, []).append(request_id)
        free = set(self._free)
        if len(free) != len(self._free) or len(free) + len(holders) != self.num_blocks:
            raise InvariantError(
                f"{len(holders)} held and {len(self._free)} free blocks of {self.num_blocks}"
            )
        for block, who in holders.items():
            if sorted(self._holders.get(block, [])) != sorted(who):
                raise InvariantError(f"block {block} is not held by {who}")
        if self.shared != {b: len(who) for b, who in holders.items() if len(who) > 1}:
            raise InvariantError(f"blocks {sorted(self.shared)} count as shared")
        named = [block for blocks in self._named.values() for block in blocks]
        if sorted(named) != sorted(self._name_of) or not set(named) <= set(holders):
            raise InvariantError("a name is of blocks that nobody holds")


class SwapSpace:
    """Space for swapped-out KV, counted in blocks.

    Args:
        num_blocks: Size of the space in blocks; 0 disables swapping.
    """

    __slots__ = ("_held", "num_blocks", "num_used")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_used = 0
        """Blocks of the space that requests use."""
        self._held: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks of the space that no request uses."""
        return self.num_blocks - self.num_used

    def put(self, request_id: int, count: int) -> bool:
        """Reserve space for a request.

        Return False, and reserve nothing, if there is too little space.
        """
        if request_id in self._held:
            raise InvariantError(f"request {request_id} is swapped out twice")
        if count > self.num_free:
            return False
        self._held[request_id] = count
        self.num_used += count
        return True

    def release(self, request_id: int) -> None:
        """Free the space of a request, if it has any."""
        self.num_used -= self._held.pop(request_id, 0)

    def check(self, swapped: dict[int, int]) -> None:
        """Compare with the number of blocks that each swapped-out request needs."""
        used = sum(self._held.values())
        if swapped != self._held or used != self.num_used or self.num_free < 0:
            raise InvariantError(f"swapped out are {swapped}, room is taken for {self._held}")


class BlockTables:
    """Block tables of requests that run without a scheduler: in measurements and self-tests.

    Args:
        num_blocks: Number of all blocks.
        block_size: Tokens of a block.
        shape: Shape of the model (see `BlockPool`).
    """

    def __init__(self, num_blocks: int, block_size: int, shape: ModelShape | None = None) -> None:
        self._pool = BlockPool(num_blocks, block_size, shape)
        self.num_blocks, self.block_size = num_blocks, block_size
        self._tables: dict[int, list[int]] = {}

    def cover(self, rows: Sequence[Row]) -> list[list[int]]:
        """Give every row the blocks that it still needs; return each row's block table.

        Raises:
            InvariantError: There are too few blocks.
        """
        for request_id, _, hi, *_ in rows:
            table = self._tables.setdefault(request_id, [])
            need = self._pool.blocks_for(hi) - len(table)
            table += self._pool.take(request_id, max(0, need))
        return [self._tables[row.request_id] for row in rows]

    def remove(self, request_id: int) -> None:
        """Free the blocks of a request, if it has any."""
        self._pool.give_back(request_id, self._tables.pop(request_id, []))
