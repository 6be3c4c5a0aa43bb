"""Bytes that are alive while a checkpoint is loaded."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, and the most that there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def bytes_of_layer(model: Any) -> int:
    """One layer of experts in bf16, the largest there is."""
    found = {name: m for name, m in model.named_modules() if name.endswith(".experts")}
    sizes = [sum(2 * p.numel() for p in m.parameters()) for m in found.values()]
    assert len(sizes) > 1
    return max(sizes)
