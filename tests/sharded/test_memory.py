"""Memory that ranks share: tensors do not overlap, and freed memory goes back to the system."""

import mmap
import random
import resource
from typing import Any

import pytest
import torch

from qllm.errors import ConfigError
from qllm.sharded import memory as memory_module
from qllm.sharded.kv import RankKV
from qllm.sharded.memory import SharedMemory


def test_tensors_do_not_overlap_and_freed_ranges_are_used_again() -> None:
    memory, rng = SharedMemory(), random.Random(0)
    held: dict[int, torch.Tensor] = {}
    addresses = set()
    for number in range(600):
        size = rng.choice((1, 7, 63, 64, 65, 1000, 5000))
        held[number] = memory.empty((size,), torch.int64).fill_(number)
        addresses.add(held[number].data_ptr())
        assert held[number].data_ptr() % 64 == 0
        assert memory.holds(held[number])
        if len(held) > 20:
            gone = rng.choice(list(held))
            assert (held.pop(gone) == gone).all()
    assert all(bool((tensor == number).all()) for number, tensor in held.items())
    assert len(addresses) < 300


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_a_large_tensor_gives_its_memory_back() -> None:
    memory, before = SharedMemory(), resident_bytes()
    memory.empty((3,), torch.uint8)  # the next one starts at a page all the same
    tensor = memory.empty((64 << 20,), torch.uint8).fill_(1)
    assert resident_bytes() - before > 60 << 20
    del tensor
    assert resident_bytes() - before < 8 << 20


def test_a_system_without_addresses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(memory_module.mmap, "mmap", refused)
    with pytest.raises(ConfigError, match=r"2 TiB of addresses of shared memory.*use tp=1"):
        SharedMemory()


def test_addresses_that_run_out_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "ADDRESS_BYTES", 1 << 20)
    memory = SharedMemory()
    with pytest.raises(ConfigError, match="no addresses left for 2097152 bytes"):
        memory.empty((2 << 20,), torch.uint8)
    assert mmap.PAGESIZE <= 1 << 20


@pytest.mark.parametrize(
    "heads", [[range(3)], [range(2), range(2, 3)], [range(1), range(1), range(1, 3)]]
)
def test_kv_of_ranks_is_read_as_it_was_written(heads: list[range]) -> None:
    """Two ranks may have the same head."""
    made = torch.Generator().manual_seed(0)
    kv = RankKV(2, 9, None, SharedMemory(), heads)
    k, v = torch.randn((1, 3, 7, 4), generator=made), torch.randn((1, 3, 7, 8), generator=made)
    for layer in range(2):
        kv.write(layer, k[:, :, :5] + layer, v[:, :, :5] - layer, 0)
        kv.write(layer, k[:, :, 5:] + layer, v[:, :, 5:] - layer, 5)
    kv.commit(7)
    for layer in range(2):
        found = kv.read(layer, 2, 7)
        assert torch.equal(found[0], k[:, :, 2:] + layer)
        assert torch.equal(found[1], v[:, :, 2:] - layer)
    exported = dict(kv.export())
    assert torch.equal(exported["k.1"], k + 1)
    page = kv.copy_out(0, 4)
    other = RankKV(2, 9, None, SharedMemory(), heads[::-1] if len(heads) == 1 else heads)
    other.copy_in(0, page)
    assert torch.equal(other.read(1, 0, 4)[1], v[:, :, :4] - 1)
    kv.clear()
    assert dict(kv.export()) == {}
