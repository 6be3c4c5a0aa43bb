"""The loop's graph calls on a CPU, with the rules that CUDA states for them.

Source of the rules: the CUDA programming guide, section 4.2.4 (conditional nodes). A stage is
whatever has `replay`; a kernel is a Python function of `set_conditional` and numbers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from qllm.ingress.words import address_of

IN_BODY = {"Kernel", "Memcpy", "Memset", "Empty", "Graph", "Conditional"}
"""Node types that the body of a conditional node may hold."""
MOST_TURNS = 100_000


class Graph:
    """A graph under construction."""

    def __init__(self, parent: "Graph | None" = None) -> None:
        self.parent, self.nodes, self.handles = parent, [], []
        self.frozen = False

    @property
    def is_body(self) -> bool:
        return self.parent is not None


class Node:
    """One node: a kernel, a child or a conditional."""

    def __init__(self, kind: str, graph: Graph, after: Sequence[Any], **more: Any) -> None:
        if graph.frozen:
            raise RuntimeError("the structure of an instantiated graph is fixed")
        if any(node not in graph.nodes for node in after):
            raise RuntimeError("a node may only depend on nodes of its own graph")
        self.kind, self.after, self.more = kind, list(after), more
        graph.nodes.append(self)


class FakePinned:
    """Page-locked memory."""

    def __init__(self, api: "FakeLoopApi", memory: memoryview) -> None:
        self._api, self._what = api, (address_of(memory), memory.nbytes)
        api.pinned.append(self._what)

    def close(self) -> None:
        self._api.needs_quiet("cudaHostUnregister")
        self._api.pinned.remove(self._what)


class FakeLoopApi:
    """A `LoopApi`: `launch` runs the loop to its end."""

    def __init__(self) -> None:
        self.handles: dict[int, dict[str, Any]] = {}
        self.values: dict[int, int] = {}
        self.trace: list[int] = []
        """Branches that ran."""
        self.num_launches = 0
        self.set_by: dict[int, int] = {}
        self.fault = ""
        self.pinned: list[tuple[int, int]] = []
        """Addresses and bytes of what is page-locked now."""

    # memory

    @property
    def is_busy(self) -> bool:
        """Whether a launch runs: CUDA lets many calls wait for it."""
        return False

    def wait_for_its_last_turn(self) -> None:
        """Let a launch that takes no more turns end; one that goes on does not."""

    def needs_quiet(self, call: str) -> None:
        """A call that waits for all that runs, or that all that runs waits for."""
        self.wait_for_its_last_turn()
        if self.is_busy:
            raise RuntimeError(f"{call} while the loop runs")

    def pin(self, memory: memoryview) -> "FakePinned":
        self.needs_quiet("cudaHostRegister")
        return FakePinned(self, memory)

    def staging(self, num_bytes: int) -> torch.Tensor:
        self.needs_quiet("cudaHostAlloc")
        return torch.zeros(num_bytes, dtype=torch.uint8)

    # building

    def new_graph(self) -> Graph:
        return Graph()

    def new_handle(self, graph: Graph, first: int) -> int:
        number = 1000 + len(self.handles)
        self.handles[number] = {"graph": graph, "first": first, "node": None}
        return number

    def add_conditional(
        self, graph: Graph, after: Sequence[Any], handle: int, kind: str, size: int
    ) -> tuple[Node, list[Graph]]:
        known = self.handles.get(handle)
        if known is None or not _is_in(graph, known["graph"]):
            raise RuntimeError("the handle is of another graph")
        if known["node"] is not None:
            raise RuntimeError("a handle belongs to exactly one node")
        if kind not in ("While", "Switch") or size < 1 or size > (1 if kind == "While" else size):
            raise RuntimeError(f"a {kind} node of size {size}")
        bodies = [Graph(graph) for _ in range(size)]
        node = Node(
            "Conditional", graph, after, handle=handle, loops=kind == "While", bodies=bodies
        )
        known["node"] = node
        return node, bodies

    def add_kernel(
        self,
        graph: Graph,
        after: Sequence[Any],
        function: Any,
        numbers: Sequence[int],
        threads: int,
    ) -> Node:
        if not 1 <= threads <= 1024 or any(not 0 <= n < 1 << 64 for n in numbers):
            raise RuntimeError("invalid launch configuration or arguments")
        return Node("Kernel", graph, after, function=function, numbers=tuple(numbers))

    def add_child(self, graph: Graph, child: Any) -> Node:
        return Node("Graph", graph, (), child=child, types=self.node_types(child))

    def node_types(self, graph: Any) -> list[str]:
        found: list[str] = graph.types if hasattr(graph, "types") else ["Kernel"]
        return found

    def instantiate(self, graph: Graph) -> Graph:
        if any(known["node"] is None for known in self.handles.values()):
            raise RuntimeError("a handle is not used by any node (result 5)")
        self._check(graph)
        return graph

    def _check(self, graph: Graph) -> None:
        graph.frozen = True
        for node in graph.nodes:
            if graph.is_body and node.kind not in IN_BODY:
                raise RuntimeError(f"{node.kind} in the body of a conditional node")
            if node.kind == "Graph" and not set(node.more["types"]) <= IN_BODY - {"Conditional"}:
                raise RuntimeError("a child graph holds what it may not")
            for body in node.more.get("bodies", ()):
                self._check(body)

    # running

    def launch(self, made: Any) -> None:
        if not made.frozen or made.is_body:
            raise RuntimeError("only an instantiated graph can be launched")
        self.num_launches += 1
        self.values = {h: known["first"] for h, known in self.handles.items()}
        self._run(made)

    def replay(self, stage: Any) -> None:
        """Run a captured stage."""
        stage.replay()

    def _run(self, graph: Graph) -> None:
        """Nodes in an order that only dependencies bind: of those that may run, the last added."""
        self.set_by = {}
        left = list(graph.nodes)
        while left:
            node = [n for n in left if not any(before in left for before in n.after)][-1]
            left.remove(node)
            getattr(self, f"_run_{node.kind.lower()}")(node)

    def _run_kernel(self, node: Node) -> None:
        function: Callable[..., None] = node.more["function"]

        def set_conditional(handle: int, value: int) -> None:
            if self.set_by.setdefault(handle, id(node)) != id(node):
                raise RuntimeError("two kernels set one handle (undefined)")
            self.values[handle] = value & 0xFFFFFFFF

        function(set_conditional, *node.more["numbers"])

    def _run_graph(self, node: Node) -> None:
        self.replay(node.more["child"])

    def _run_conditional(self, node: Node) -> None:
        handle, bodies = node.more["handle"], node.more["bodies"]
        if not node.more["loops"]:
            value = self.values[handle]
            if value < len(bodies):  # else no body runs
                self.trace.append(value)
                self._run(bodies[value])
            return
        for _ in range(MOST_TURNS):
            if not self.values[handle]:
                return
            self._run(bodies[0])
        raise RuntimeError("the loop does not end")

    def is_running(self) -> bool:
        return False


def _is_in(graph: Graph | None, container: Graph) -> bool:
    """CUDA: a handle is for a node of its graph or of a graph inside it."""
    while graph is not None:
        if graph is container:
            return True
        graph = graph.parent
    return False
