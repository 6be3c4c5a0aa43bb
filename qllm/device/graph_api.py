"""Graph calls of the loop through cuda-bindings."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from cuda.bindings import driver, runtime

from qllm.cuda.calls import BindingsCalls
from qllm.cuda.graphs import raw_node_types
from qllm.device.ring_memory import Pinned
from qllm.errors import DeviceError

DEFAULT_AT_LAUNCH = 1
"""Value of cudaGraphCondAssignDefault."""
NOT_READY = 600
"""Value of cudaErrorNotReady."""


def _checked(result: Sequence[Any]) -> Any:
    """Return the result of a call without its error code. Raise if the code is not 0."""
    if int(result[0]) != 0:
        raise DeviceError(f"CUDA answered {result[0]!r} to a call of the loop")
    return result[1] if len(result) == 2 else result[1:]


def _raw(graph: Any) -> Any:
    """Return the CUDA graph of a torch graph. Any other graph is a CUDA graph already."""
    if not hasattr(graph, "raw_cuda_graph"):
        return graph
    return runtime.cudaGraph_t(init_value=int(graph.raw_cuda_graph()))


class CudaLoopApi:
    """The `LoopApi` of CUDA. Its stream is its own, so that no other work waits for the loop."""

    def __init__(self) -> None:
        cuda: Any = torch.cuda
        self._stream = cuda.Stream()
        self._ended: Any = None
        self._calls = BindingsCalls()

    def load(self, cubin: bytes, name: str) -> Any:
        """Load a kernel of a cubin, which stays loaded."""
        try:
            return self._calls.load(cubin, name)
        except RuntimeError as error:
            raise DeviceError(f"CUDA answered {error} to the load of {name}") from error

    def new_graph(self) -> Any:
        return _checked(runtime.cudaGraphCreate(0))

    def new_handle(self, graph: Any, first: int) -> int:
        return int(
            _checked(runtime.cudaGraphConditionalHandleCreate(graph, first, DEFAULT_AT_LAUNCH))
        )

    def add_conditional(
        self, graph: Any, after: Sequence[Any], handle: int, kind: str, size: int
    ) -> tuple[Any, list[Any]]:
        p = runtime.cudaGraphNodeParams()
        p.type = runtime.cudaGraphNodeType.cudaGraphNodeTypeConditional
        p.conditional.handle = handle
        kinds = runtime.cudaGraphConditionalNodeType
        p.conditional.type = getattr(kinds, f"cudaGraphCondType{kind}")
        p.conditional.size = size
        nodes = [runtime.cudaGraphNode_t(init_value=int(node)) for node in after]
        node = _checked(runtime.cudaGraphAddNode(graph, nodes, None, len(nodes), p))
        return node, list(p.conditional.phGraph_out)

    def add_kernel(
        self, graph: Any, after: Sequence[Any], function: Any, numbers: Sequence[int], threads: int
    ) -> Any:
        p = driver.CUDA_KERNEL_NODE_PARAMS()
        p.func = function
        p.gridDimX = p.gridDimY = p.gridDimZ = p.blockDimY = p.blockDimZ = 1
        p.blockDimX = threads
        p.kernelParams = (tuple(numbers), (ctypes.c_uint64,) * len(numbers))
        nodes = [driver.CUgraphNode(init_value=int(node)) for node in after]
        raw = driver.CUgraph(init_value=int(graph))
        return _checked(driver.cuGraphAddKernelNode(raw, nodes, len(nodes), p))

    def add_child(self, graph: Any, child: Any) -> Any:
        return _checked(runtime.cudaGraphAddChildGraphNode(graph, [], 0, _raw(child)))

    def node_types(self, graph: Any) -> list[str]:
        types = raw_node_types(graph, self._calls)
        assert types is not None  # `needs_bindings` checked it
        return types

    def instantiate(self, graph: Any) -> Any:
        made = _checked(runtime.cudaGraphInstantiate(graph, 0))
        # On the stream of the launches, so it ends before the first one.
        _checked((*runtime.cudaGraphUpload(made, self._stream.cuda_stream), None))
        return made

    def launch(self, made: Any) -> None:
        _checked((*runtime.cudaGraphLaunch(made, self._stream.cuda_stream), None))
        cuda: Any = torch.cuda
        self._ended = cuda.Event()
        self._ended.record(self._stream)

    def pin(self, memory: memoryview) -> Pinned:
        return Pinned(memory)

    def staging(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def is_running(self) -> bool:
        (answer,) = runtime.cudaEventQuery(self._ended.cuda_event)
        if int(answer) not in (0, NOT_READY):
            raise DeviceError(f"the loop ended with {answer!r}; the CUDA context is lost")
        return int(answer) == NOT_READY
