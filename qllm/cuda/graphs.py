"""Capture of CUDA graphs: the CUDA calls for it, and the rule for the content of a graph.

The body of a conditional node may contain kernel, memcpy, memset and empty nodes only. A capture
refuses any other node (a host function, an allocation, an event) by name.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from qllm.cuda.calls import CudaCalls, cuda_calls
from qllm.errors import ModelError

_log = logging.getLogger("qllm")

ALLOWED = {"Kernel", "Memcpy", "Memset", "Empty"}
"""Node types of a captured stage."""
WARM_UP = 1
"""Runs before a capture, in which kernels are compiled and libraries make their workspaces."""


class GraphApi(Protocol):
    """CUDA calls that capture needs."""

    def new_pool(self) -> Any:
        """Return a private memory pool for the intermediates of graphs."""
        ...

    def side_stream(self) -> AbstractContextManager[Any]:
        """Run the work of this context in order, with no other work at the same time."""
        ...

    def new_graph(self) -> Any:
        """Return an empty graph that keeps its definition. It has `replay` once instantiated."""
        ...

    def capturing(self, graph: Any, pool: Any) -> AbstractContextManager[Any]:
        """Record kernels launched in this context into the graph, without running them."""
        ...

    def node_types(self, graph: Any) -> list[str] | None:
        """Return the type of each node, in the order of `cudaGraphGetNodes`.

        None says that no call tells it (`CudaCalls.node_types`).
        """
        ...

    def instantiate(self, graph: Any) -> None:
        """Make the graph launchable."""
        ...

    def synchronize(self) -> None:
        """Wait for all work of the device."""
        ...


class TorchGraphApi:
    """An API of torch's graphs, and of `cuda_calls` where torch has no call.

    Raises:
        ConfigError: No package makes these calls.
    """

    def __init__(self) -> None:
        self._calls = cuda_calls()
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
        # Other threads (tokenising, HTTP) may allocate meanwhile: their calls do not matter here.
        return torch.cuda.graph(
            graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"
        )

    def node_types(self, graph: Any) -> list[str] | None:
        return raw_node_types(graph, self._calls)

    def instantiate(self, graph: Any) -> None:
        graph.instantiate()

    def synchronize(self) -> None:
        torch.cuda.synchronize()


def raw_node_types(graph: Any, calls: CudaCalls) -> list[str] | None:
    """Return the type of each node of a torch graph, in the order of `cudaGraphGetNodes`."""
    try:
        return calls.node_types(int(graph.raw_cuda_graph()))
    except RuntimeError as error:
        raise ModelError(f"CUDA answered {error} to a graph call; see the driver's log") from error


class Graphs:
    """A capturer of functions, whose graphs use one private memory pool.

    Every graph reuses the pool's memory, so only intermediates may be in the pool. A result that
    one graph leaves for another must be a tensor from before the capture.
    """

    def __init__(self, api: GraphApi) -> None:
        self._api, self._pool = api, api.new_pool()

    def capture(self, name: str, run: Callable[[], object]) -> Any:
        """Return the graph of a function of device tensors, which has a `replay`.

        Args:
            name: Name for messages.
            run: Function that launches work. It is called `WARM_UP` times and then captured.

        Raises:
            ModelError: The function does something that a graph cannot contain. The text names the
                work and its place.
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
            cause = error.__context__ or error  # torch itself reports only "a previous error"
            raise ModelError(f"stage {name} cannot be captured: {cause}") from error
        types = api.node_types(graph)
        if types is None:
            _log.warning("the nodes of stage %s are not checked: no call lists them", name)
            types = []
        for i, kind in enumerate(types):
            if kind not in ALLOWED:
                raise ModelError(
                    f"node {i} of {len(types)} of stage {name} is of type {kind}, after "
                    f"{types[i - 1] if i else 'nothing'}; only {', '.join(sorted(ALLOWED))} nodes "
                    "may be in a stage"
                )
        api.instantiate(graph)
        return graph
