"""CUDA graphs on a CPU: what is captured is the list of operations, never the Python around them.

A graph records every aten operation with the tensors it was given, and every launch of a Triton
kernel, which the interpreter runs again at a replay: data that changes must be in tensors, as on a
device. It refuses what CUDA refuses, and between replays it spoils what lies in the private pool,
as the next graph would.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only
from triton.runtime.interpreter import GridExecutor

from scripts.launches import NO_LAUNCH

SYNCS = {
    "_local_scalar_dense": "a value is read by the host",
    "nonzero": "a shape depends on data",
    "masked_select": "a shape depends on data",
    "unique_dim": "a shape depends on data",
    "_unique2": "a shape depends on data",
    "bincount": "a shape depends on data",
    "repeat_interleave": "a shape depends on data",
    "unique_consecutive": "a shape depends on data",
    "equal": "a value is read by the host",
    "is_nonzero": "a value is read by the host",
    "lift_fresh": "data is copied from memory of the host that is not page-locked",
}
NODES = {"zeros": "Memset", "zero_": "Memset", "new_zeros": "Memset", "copy_": "Memcpy"}
"""Types of nodes that are no kernels."""
NOT_PERMITTED = "operation not permitted when stream is capturing"


class Recorder(TorchDispatchMode):
    def __init__(self, graph: "FakeGraph") -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        if name.startswith("index") and _has_mask(args):
            name = "nonzero"
        if name in SYNCS and func._overloadname != "self_int":
            raise RuntimeError(f"{NOT_PERMITTED}: {name} ({SYNCS[name]})")
        out = func(*args, **(kwargs or {}))
        self.graph.record(name, func, args, kwargs or {}, out)
        return out


def _has_mask(args: Any) -> bool:
    """Indexing by a boolean tensor looks for its non-zeros."""
    found: list[bool] = []
    tree_map_only(torch.Tensor, lambda t: found.append(t.dtype is torch.bool), args[1:2])
    return any(found)


@contextmanager
def _launches(graph: "FakeGraph") -> Iterator[None]:
    """Record launches of Triton kernels, and nothing of what interprets them."""
    real = GridExecutor.__call__

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        def run(*again: Any) -> None:
            with _disable_current_modes():
                real(executor, *again, **kwargs)

        run(*args)
        graph.record(executor.fn.__name__, run, args, {}, None)

    GridExecutor.__call__ = launch  # type: ignore[method-assign]
    try:
        yield
    finally:
        GridExecutor.__call__ = real  # type: ignore[method-assign]


class FakeGraph:
    """One graph: captured once, instantiated, then replayed."""

    def __init__(self, cuda: "FakeCuda") -> None:
        self.cuda, self.ops, self.state = cuda, [], "new"
        self.work: list[tuple[Any, Any, Any, list[Any]]] = []
        """Operations that a replay runs again: all but views, which stay as they are."""
        self.own: list[torch.Tensor] = []
        self.storages: set[int] = set()

    def record(self, name: str, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self.ops.append((name, func, args, kwargs, out))
        given: set[int] = set()
        tree_map_only(torch.Tensor, lambda t: given.add(t.untyped_storage().data_ptr()), args)
        outs = [t for t in _each(out) if isinstance(t, torch.Tensor)]
        new = [t for t in outs if t.untyped_storage().data_ptr() not in given]
        self.own += new
        schema = getattr(func, "_schema", None)
        if new or not outs or schema is None or schema.is_mutable:
            self.work.append((func, args, kwargs, outs))

    def replay(self) -> None:
        if self.state != "instantiated":
            raise RuntimeError(f"a graph that is {self.state} cannot be launched")
        if self.cuda.capturing_now is not None:
            raise RuntimeError(NOT_PERMITTED)
        while self.cuda.ran:
            self.cuda.ran.pop().spoil()
        for func, args, kwargs, olds in self.work:
            again = func(*args, **kwargs)
            news = [t for t in _each(again) if isinstance(t, torch.Tensor)]
            for old, new in zip(olds, news, strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        self.cuda.ran.append(self)
        self.cuda.replays.append(self)

    def spoil(self) -> None:
        for t in self.own:
            if t.is_floating_point():
                t.fill_(math.nan)
            elif t.dtype is not torch.bool:
                t.fill_(-7)


def _each(out: Any) -> Any:
    return out if isinstance(out, tuple | list) else (out,)


class FakeCuda:
    """A `GraphApi`; `extra_node` is a node of that type in every graph captured from now on."""

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []
        self.replays: list[FakeGraph] = []
        self.ran: list[FakeGraph] = []
        """Graphs that hold results in memory of the pool, which the next replay spoils."""
        self.capturing_now: FakeGraph | None = None
        self.on_side = False
        self.extra_node = ""

    def new_pool(self) -> object:
        return self

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        self.on_side = True
        yield
        self.on_side = False

    def new_graph(self) -> FakeGraph:
        return FakeGraph(self)

    @contextmanager
    def capturing(self, graph: FakeGraph, pool: object) -> Iterator[None]:
        if self.capturing_now is not None:
            raise RuntimeError(NOT_PERMITTED)
        if graph.state != "new" or pool is not self:
            raise RuntimeError("a graph is captured once, into the pool of its device")
        self.capturing_now = graph
        try:
            with _launches(graph), Recorder(graph):
                yield
            graph.state = "captured"
            self.graphs.append(graph)
            self.ran.append(graph)
        finally:
            self.capturing_now = None

    def node_types(self, graph: FakeGraph) -> list[str]:
        if graph.state != "captured":
            raise RuntimeError(f"a graph that is {graph.state} has no definition")
        names = [name for name, *_ in graph.ops if name not in NO_LAUNCH]
        return [NODES.get(name, "Kernel") for name in names] + [self.extra_node] * bool(
            self.extra_node
        )

    def instantiate(self, graph: FakeGraph) -> None:
        if graph.state != "captured":
            raise RuntimeError(f"a graph that is {graph.state} cannot be instantiated")
        graph.state = "instantiated"

    def synchronize(self) -> None:
        if self.capturing_now is not None:
            raise RuntimeError(NOT_PERMITTED)
