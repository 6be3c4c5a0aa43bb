"""Measurements that a device scheduler depends on: python3 -m bench.gpu.probe [OUT.json].

    while     one iteration of a WHILE node with a one-thread kernel
    switch    one SWITCH inside the WHILE with 2, 8, 100 and 400 bodies: time, set-up, memory
    children  torch graphs as the bodies of the SWITCH: the results of eager
    nodes     cost of one kernel node in a plain replay and in the body of a SWITCH
    calls     calls of the host while a WHILE iterates: do they wait for it?

Each part is guarded: a failure is recorded with its text, and the other parts run.
"""

import ctypes
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver, nvrtc, runtime

SOURCE = b"""
extern "C" __device__ __cudart_builtin__ void CUDARTAPI
cudaGraphSetConditional(cudaGraphConditionalHandle, unsigned int);
// c: run handle, switch handle, count, limit, bodies, runs of a body
extern "C" __global__ void sched(unsigned long long* c) {
  c[2]++;
  if (c[4]) cudaGraphSetConditional((cudaGraphConditionalHandle)c[1], (unsigned)(c[2] % c[4]));
  cudaGraphSetConditional((cudaGraphConditionalHandle)c[0], c[2] < c[3] ? 1u : 0u);
}
extern "C" __global__ void body(unsigned long long* c) { c[5]++; }
"""
LONG_LOOP = 100_000
"""Iterations of a loop during which calls are timed: some tenths of a second."""
DEFAULT_AT_LAUNCH = 1
"""Value of cudaGraphCondAssignDefault."""


def checked(result: Sequence[Any]) -> Any:
    """Return the result of a call of cuda-bindings, without the error code."""
    if int(result[0]) != 0:
        raise RuntimeError(str(result[0]))
    return result[1] if len(result) == 2 else result[1:]


def load() -> tuple[Any, Any, Any]:
    """Load the kernels `sched` and `body`, and the module that must outlive them."""
    program = checked(nvrtc.nvrtcCreateProgram(SOURCE, b"probe.cu", 0, [], []))
    major, minor = torch.cuda.get_device_capability()
    compiled = nvrtc.nvrtcCompileProgram(
        program, 1, [f"--gpu-architecture=sm_{major}{minor}".encode()]
    )
    if int(compiled[0]):
        log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.decode())
    cubin = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
    checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    module = checked(driver.cuModuleLoadData(cubin))
    sched, body = (checked(driver.cuModuleGetFunction(module, n)) for n in (b"sched", b"body"))
    return sched, body, module


def add_kernel(graph: Any, function: Any, control: torch.Tensor) -> Any:
    """Add a node of one thread, and return it."""
    p = driver.CUDA_KERNEL_NODE_PARAMS()
    p.func = function
    p.gridDimX = p.gridDimY = p.gridDimZ = p.blockDimX = p.blockDimY = p.blockDimZ = 1
    p.kernelParams = ((control.data_ptr(),), (ctypes.c_void_p,))
    return checked(driver.cuGraphAddKernelNode(driver.CUgraph(init_value=int(graph)), [], 0, p))


def add_chain(graph: Any, function: Any, control: torch.Tensor, num: int) -> None:
    """Add a chain of nodes, each after the one before."""
    last = None
    for _ in range(num):
        node = add_kernel(graph, function, control)
        if last is not None:
            edge = runtime.cudaGraphAddDependencies
            first, then = (runtime.cudaGraphNode_t(init_value=int(n)) for n in (last, node))
            checked((*edge(graph, [first], [then], None, 1), None))
        last = node


def conditional(graph: Any, after: list[Any], kind: str, size: int) -> tuple[int, list[Any]]:
    """Add a conditional node; return its handle and the graphs of its bodies."""
    first = int(kind == "While")
    handle = checked(runtime.cudaGraphConditionalHandleCreate(graph, first, DEFAULT_AT_LAUNCH))
    p = runtime.cudaGraphNodeParams()
    p.type = runtime.cudaGraphNodeType.cudaGraphNodeTypeConditional
    p.conditional.handle = handle
    kinds = runtime.cudaGraphConditionalNodeType
    p.conditional.type = getattr(kinds, f"cudaGraphCondType{kind}")
    p.conditional.size = size
    nodes = [runtime.cudaGraphNode_t(init_value=int(node)) for node in after]
    checked(runtime.cudaGraphAddNode(graph, nodes, None, len(nodes), p))
    return int(handle), list(p.conditional.phGraph_out)


def loop(
    bodies: int, iterations: int, children: Sequence[Any] = (), kernels: int = 1
) -> dict[str, Any]:
    """Measure WHILE { sched; SWITCH }: time of an iteration, time and memory of instantiation.

    Args:
        bodies: Number of bodies of the SWITCH; 0 has no SWITCH.
        iterations: Number of iterations of the WHILE.
        children: Captured graphs as the bodies.
        kernels: Kernels of a body, one after the other, if it is no child.
    """
    control = torch.zeros(16, dtype=torch.int64, device="cuda")
    sched, body, module = load()
    graph = checked(runtime.cudaGraphCreate(0))
    run_handle, inside = conditional(graph, [], "While", 1)
    node, switch_handle = add_kernel(inside[0], sched, control), 0
    if bodies:
        switch_handle, slots = conditional(inside[0], [node], "Switch", bodies)
        for i, slot in enumerate(slots):
            if children:
                child = runtime.cudaGraph_t(init_value=int(children[i].raw_cuda_graph()))
                checked(runtime.cudaGraphAddChildGraphNode(slot, None, 0, child))
            else:
                add_chain(slot, body, control, kernels)
    start = torch.tensor([run_handle, switch_handle, 0, iterations, bodies, 0], device="cuda")
    torch.cuda.synchronize()
    free, begin = torch.cuda.mem_get_info()[0], time.monotonic()
    made = checked(runtime.cudaGraphInstantiate(graph, 0))
    seconds = time.monotonic() - begin
    stream, found = torch.cuda.Stream(), []
    for _ in range(4):
        control[:6] = start
        torch.cuda.synchronize()
        a, b = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        a.record(stream)
        checked((*runtime.cudaGraphLaunch(made, stream.cuda_stream), None))
        b.record(stream)
        stream.synchronize()
        found.append(a.elapsed_time(b))
    memory = (free - torch.cuda.mem_get_info()[0]) / 2**20
    seen = int(control[2])
    runtime.cudaGraphExecDestroy(made)
    driver.cuModuleUnload(module)
    return {
        "us_per_iteration": min(found) * 1e3 / iterations, "iterations_seen": seen,
        "instantiate_s": seconds, "memory_mb": memory,
    }  # fmt: skip


def torch_children() -> dict[str, Any]:
    """Run four captured products as bodies, each twice."""
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)
    graphs, outs, weights = [], [], []
    for _ in range(4):
        weight = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
        out = torch.zeros(64, 1024, device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.mm(x, weight, out=out)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            torch.mm(x, weight, out=out)
        graphs.append(graph)
        outs.append(out)
        weights.append(weight)
    for out in outs:
        out.zero_()
    found = loop(4, 8, graphs)
    pairs = zip(outs, weights, strict=True)
    return found | {"equal_to_eager": [bool(torch.equal(y, x @ w)) for y, w in pairs]}


def nodes() -> dict[str, Any]:
    """Return microseconds per kernel node, by number and place."""
    found: dict[str, Any] = {}
    control = torch.zeros(16, dtype=torch.int64, device="cuda")
    _, body, module = load()
    for num in (1, 100, 1400):
        graph = checked(runtime.cudaGraphCreate(0))
        add_chain(graph, body, control, num)
        made = checked(runtime.cudaGraphInstantiate(graph, 0))
        stream, times = torch.cuda.Stream(), []
        for _ in range(5):
            a, b = (torch.cuda.Event(enable_timing=True) for _ in "ab")
            a.record(stream)
            checked((*runtime.cudaGraphLaunch(made, stream.cuda_stream), None))
            b.record(stream)
            stream.synchronize()
            times.append(a.elapsed_time(b) * 1e3 / num)
        inside = loop(1, 20, kernels=num)["us_per_iteration"] / num
        found[str(num)] = {"plain_us": min(times), "switch_us": inside}
        runtime.cudaGraphExecDestroy(made)
    driver.cuModuleUnload(module)
    return found


def host_calls(control: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return calls that a host may make during a loop."""
    page = torch.empty(1 << 20, dtype=torch.uint8)
    word, word_on_device = torch.zeros(1, dtype=torch.int64).pin_memory(), control[8:9]
    side = torch.cuda.Stream(priority=-1)

    def copy_word() -> None:
        with torch.cuda.stream(side):
            word_on_device.copy_(word, non_blocking=True)
        side.synchronize()

    def fill_word() -> None:
        with torch.cuda.stream(side):
            word_on_device.fill_(3)
        side.synchronize()

    def malloc_free() -> None:
        address = checked(runtime.cudaMalloc(1 << 20))
        runtime.cudaFree(address)

    def register_unregister() -> None:
        checked((*runtime.cudaHostRegister(page.data_ptr(), page.numel(), 2), None))
        runtime.cudaHostUnregister(page.data_ptr())

    named = (copy_word, fill_word, malloc_free, register_unregister)
    return {"nothing": lambda: None, **{call.__name__: call for call in named}}


def calls() -> dict[str, Any]:
    """Return the milliseconds of each call during a WHILE, and True if the loop outlasted it."""
    control = torch.zeros(16, dtype=torch.int64, device="cuda")
    sched, _, module = load()
    graph = checked(runtime.cudaGraphCreate(0))
    handle, inside = conditional(graph, [], "While", 1)
    add_kernel(inside[0], sched, control)
    made = checked(runtime.cudaGraphInstantiate(graph, 0))
    stream, found = torch.cuda.Stream(), {}
    for name, call in host_calls(control).items():
        call()  # its needs are loaded before
        start = torch.tensor([handle, 0, 0, LONG_LOOP, 0, 0], device="cuda")
        control[:6] = start
        torch.cuda.synchronize()
        ended = torch.cuda.Event()
        begin = time.perf_counter()
        checked((*runtime.cudaGraphLaunch(made, stream.cuda_stream), None))
        ended.record(stream)
        call()
        took, goes_on = time.perf_counter() - begin, not ended.query()
        torch.cuda.synchronize()
        whole = time.perf_counter() - begin
        found[name] = {"ms": took * 1e3, "loop_ms": whole * 1e3, "loop_goes_on": goes_on}
    runtime.cudaGraphExecDestroy(made)
    driver.cuModuleUnload(module)
    return found


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "while": lambda: loop(0, 2000),
    "switch": lambda: {str(n): loop(n, 2000) for n in (2, 8, 100, 400)},
    "children": torch_children,
    "nodes": nodes,
    "calls": calls,
}


def main() -> None:
    """Run every part, print the results, and write them if a file is given."""
    result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name, run in PARTS.items():
        try:
            result[name] = run()
        except Exception as error:  # noqa: BLE001 - the point is to go on
            trace = traceback.format_exc()[-900:]
            result[name] = {"error": f"{type(error).__name__}: {error}", "trace": trace}
        print(name, json.dumps(result[name]), flush=True)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
