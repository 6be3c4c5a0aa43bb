"""Tiles of the kernels: rows, columns and inputs of one program, its warps and its stages.

A stage is one copy of the tile's inputs in shared memory. With more stages, more loads are under
way while a program multiplies. The tables hold the tiles that are fastest on an H100. A device with
less shared memory gets fewer stages.
"""

import functools
from typing import NamedTuple

import torch
import triton


class Tile(NamedTuple):
    """One program's share of a product."""

    rows: int
    columns: int
    inputs: int
    """Inputs of one step of the loop; for attention the keys."""
    warps: int
    stages: int


class Chip(NamedTuple):
    """Facts of a device that limit a tile."""

    shared_bytes: int
    """Most shared memory of one program."""
    capability: int
    """Compute capability times ten."""


HOPPER = Chip(227 * 1024, 90)
"""An H100 or H200."""
EXPERTS = Tile(16, 64, 128, 4, 4), Tile(64, 64, 64, 4, 3), Tile(128, 128, 64, 8, 3)
"""Tiles of the experts' products, from few rows to many. An expert's slots divide into them."""
IN_FP32 = 32
"""Columns and inputs of these tiles for fp32 weights."""
FEW_SLOTS, SOME_SLOTS = 16, 128
"""Most slots per expert of the first two tiles."""
MOST_COLUMNS = 1024
"""Most columns of a program that works element by element."""
SCAN = 1024
"""Slots that a sorting program reads at once."""
HEADS = 4
"""Heads of a program that rotates, all queries or all keys."""
WARPGROUP_ROWS = 64
"""Fewest rows of a product whose inputs Hopper reads out of shared memory."""


def chip_of(device: torch.device) -> Chip:
    """Return the facts of a CUDA device.

    Another device means that kernels are interpreted, or compiled for an H100 without running.
    """
    if device.type != "cuda":
        return HOPPER
    return _cuda_chip(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _cuda_chip(index: int) -> Chip:
    major, minor = torch.cuda.get_device_capability(index)
    about = triton.runtime.driver.active.utils.get_device_properties(index)
    return Chip(int(about["max_shared_mem"]), 10 * major + minor)


def tile_rows(num_slots: int, num_experts: int) -> int:
    """Return the rows of a tile. They are about one expert's slots, so few rows are padding."""
    per_expert = num_slots / num_experts
    few, some, many = EXPERTS
    tile = few if per_expert <= FEW_SLOTS else some if per_expert <= SOME_SLOTS else many
    return tile.rows


def expert_tile(rows: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """Return the tile of the experts' products.

    Args:
        rows: Rows of the tile, from `tile_rows`.
        dtype: Dtype of the rows.
        device: Device of the rows.
    """
    tile = next(tile for tile in EXPERTS if tile.rows == rows)
    if dtype is torch.float32:
        tile = tile._replace(columns=IN_FP32, inputs=IN_FP32)
    # A program reads the columns of gate and up in one step.
    stage = (tile.rows + 2 * tile.columns) * tile.inputs * dtype.itemsize
    return _bounded(tile, stage, 0, chip_of(device))


def attention_tile(
    rows: int, widths: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> Tile:
    """Return the tile of an attention program; its inputs are the keys of a step.

    Args:
        rows: (query, head) pairs of the tile.
        widths: Padded widths of keys, of their second part (0 for none) and of values.
        dtype: Dtype of queries, keys and values.
        device: Device of the queries.
    """
    key, second, value = widths
    keys = 32 if second or key > 128 else 64
    is_wide = value > 256
    warps = 8 if rows >= 128 or is_wide else 4
    tile = Tile(rows, value, keys, warps, 1 if is_wide else 2)
    size = dtype.itemsize
    queries = rows * (key + second) * size
    return _bounded(tile, keys * (key + second + value) * size, queries, chip_of(device))


def row_block(width: int) -> tuple[int, int]:
    """Return block and warps of a program that holds a whole row."""
    block = int(triton.next_power_of_2(width))
    return block, 8 if block >= 2048 else 4 if block >= 512 else 1


def column_block(width: int) -> int:
    """Return the columns of a program that works element by element."""
    return min(MOST_COLUMNS, int(triton.next_power_of_2(width)))


def scan_block(num_slots: int) -> int:
    """Return the slots that a sorting program reads at once."""
    return min(SCAN, max(16, int(triton.next_power_of_2(num_slots))))


def _bounded(tile: Tile, stage_bytes: int, fixed_bytes: int, chip: Chip) -> Tile:
    """Return the tile with the stages that fit into shared memory, at least one.

    Products by warp groups (Hopper, 64 rows) hold each stage. Others hold one less, because their
    inputs are in registers before the next stage arrives. Triton refuses a tile that does not fit
    with one stage.
    """
    by_groups = chip.capability == HOPPER.capability and tile.rows >= WARPGROUP_ROWS
    copies = (chip.shared_bytes - fixed_bytes) // stage_bytes
    most = copies if by_groups else copies + 1
    return tile._replace(stages=max(1, min(tile.stages, most)))
