"""Everything but the tokens that decides the bits of cached KV, for the header of a KV file."""

from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from operator import itemgetter

import torch
from torch import nn

from qllm.engine.storage.file import Layout
from qllm.models.weights.expert_file import all_in_file
from qllm.models.weights.on_demand import OnDemand, all_on_demand, held_experts
from qllm.models.weights.quantised_experts import QuantisedExperts
from qllm.models.weights.quantised_linears import QuantisedLinear, all_linears
from qllm.models.weights.quantised_weights import checksum
from qllm.runner.layers.drivers import LayerDriver
from qllm.runner.layers.native import NativeDriver
from qllm.runner.runner import TorchRunner


def layout_of(runner: TorchRunner, page_size: int) -> Layout:
    """Return the layout of a page, which holds the layers that attend.

    Our kernels must run every layer.
    """
    slabs = [slab for driver in runner.backend.drivers if (slab := _slab_of(driver)) is not None]
    layers, (heads, key, value) = len(slabs), slabs[0]
    dtype = runner.parts.like.dtype
    return Layout((layers, heads, page_size, key), (layers, heads, page_size, value), dtype)


def _slab_of(driver: LayerDriver) -> tuple[int, int, int] | None:
    """Return KV heads and widths of a layer's slabs; None if the layer carries a state."""
    assert isinstance(driver, NativeDriver)
    assert driver.whole is not None
    return driver.whole.slab


def weights_digest(model: nn.Module) -> str:
    """Return a digest of every byte of a model's weights and buffers, and of their formats.

    Buffers decide bits too: corrections of routers, angles of rotations.
    """
    apart = {name: one for name, one in all_on_demand(model).items() if not one.is_quantised}

    def checksum_of(pair: tuple[str, nn.Parameter]) -> int:
        path, _, name = pair[0].rpartition(".")
        return apart[path].checksums[name] if pair[1].is_meta else checksum(pair[1].detach())

    plain = [
        (name, weight)
        for name, weight in sorted(model.named_parameters(), key=itemgetter(0))
        if not weight.is_meta or name.rpartition(".")[0] in apart
    ]
    buffers = dict(model.named_buffers())
    quantised = {**held_experts(model), **all_linears(model)}
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        sums: list[object] = list(pool.map(checksum_of, plain))
        sums += zip(buffers, pool.map(checksum, buffers.values()), strict=True)
        sums += zip(quantised, pool.map(_digest, quantised.values()), strict=True)
    sums += [(name, place.digest()) for name, place in all_in_file(model).items()]
    return blake2b(repr(sums).encode(), digest_size=16).hexdigest()


def _digest(held: QuantisedExperts | OnDemand | QuantisedLinear) -> str:
    return held.digest()
