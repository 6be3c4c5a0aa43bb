"""Capture of CUDA graphs: the few calls that are needed, and the rule for what is in a graph.

A graph that may become the body of a conditional node holds kernel, memcpy, memset and empty nodes
only; anything else (a host function, an allocation, an event) is refused at capture with its name.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from qllm.errors import ModelError

ALLOWED = {"Kernel", "Memcpy", "Memset", "Empty"}
"""Node types of a captured stage."""
WARM_UP = 1
"""Runs before a capture: kernels are compiled and libraries make their workspaces there."""


class GraphApi(Protocol):
    """What capture needs of CUDA."""

    def new_pool(self) -> Any:
        """A private memory pool for the intermediates of graphs."""
        ...

    def side_stream(self) -> AbstractContextManager[Any]:
        """Work in this context is done, in order, beside nothing else."""
        ...

    def new_graph(self) -> Any:
        """An empty graph that keeps its definition; it has `replay` once instantiated."""
        ...

    def capturing(self, graph: Any, pool: Any) -> AbstractContextManager[Any]:
        """Record what is launched in this context into the graph; nothing runs."""
        ...

    def node_types(self, graph: Any) -> list[str]:
        """Type of each node, in the order of `cudaGraphGetNodes`."""
        ...

    def instantiate(self, graph: Any) -> None:
        """Make the graph launchable."""
        ...

    def synchronize(self) -> None:
        """Wait for all work of the device."""
        ...


class TorchGraphApi:
    """Torch's graphs, and cuda-bindings where torch has no call."""

    def __init__(self) -> None:
        cuda: Any = torch.cuda
        self._stream = cuda.Stream()

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def side_stream(self) -> AbstractContextManager[Any]:
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def new_graph(self) -> Any:
        return torch.cuda.CUDAGraph(keep_graph=True)

    def capturing(self, graph: Any, pool: Any) -> AbstractContextManager[Any]:
        # Another thread (tokenising, HTTP) may allocate meanwhile: its calls are none of ours.
        return torch.cuda.graph(
            graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"
        )

    def node_types(self, graph: Any) -> list[str]:
        return raw_node_types(graph)

    def instantiate(self, graph: Any) -> None:
        graph.instantiate()

    def synchronize(self) -> None:
        torch.cuda.synchronize()


def raw_node_types(graph: Any) -> list[str]:
    """Type of each node of one of torch's graphs, in the order of `cudaGraphGetNodes`."""
    from cuda.bindings import runtime

    raw = runtime.cudaGraph_t(init_value=int(graph.raw_cuda_graph()))
    _, num = _checked(runtime.cudaGraphGetNodes(raw))
    nodes, _ = _checked(runtime.cudaGraphGetNodes(raw, num))
    types = [_checked(runtime.cudaGraphNodeGetType(node))[0] for node in nodes[:num]]
    return [t.name.removeprefix("cudaGraphNodeType") for t in types]


def _checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    if int(result[0]) != 0:
        raise ModelError(f"CUDA answered {result[0]!r} to a graph call; see the driver's log")
    return result[1:]


class Graphs:
    """Captures functions into one private pool.

    The pool's memory is used anew by every graph, so only intermediates may live in it: what one
    graph leaves for another is a tensor made before.
    """

    def __init__(self, api: GraphApi) -> None:
        self._api, self._pool = api, api.new_pool()

    def capture(self, name: str, run: Callable[[], object]) -> Any:
        """Return the graph of a function of device tensors; call `replay` on it.

        Args:
            name: For messages.
            run: Launches work; called `WARM_UP` times and then captured.

        Raises:
            ModelError: It does something that a graph cannot hold; names it and where it is.
        """
        api = self._api
        with api.side_stream():
            for _ in range(WARM_UP):
                run()
        api.synchronize()
        graph = api.new_graph()
        try:
            with api.capturing(graph, self._pool):
                run()
        except RuntimeError as error:
            cause = error.__context__ or error  # torch speaks of "a previous error" only
            raise ModelError(f"stage {name} cannot be captured: {cause}") from error
        types = api.node_types(graph)
        for i, kind in enumerate(types):
            if kind not in ALLOWED:
                raise ModelError(
                    f"node {i} of {len(types)} of stage {name} is of type {kind}, after "
                    f"{types[i - 1] if i else 'nothing'}; only {', '.join(sorted(ALLOWED))} nodes "
                    "may be in a stage"
                )
        api.instantiate(graph)
        return graph
