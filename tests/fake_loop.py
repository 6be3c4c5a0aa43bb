"""The loop's graph calls on a CPU, with the rules that CUDA states for them.

Source of the rules: the CUDA programming guide, sections 4.2.4 (conditional nodes) and 4.2.6
(device launch). A stage is whatever has `replay`; a kernel is a Python function of numbers and
before them of `set_conditional`, or of `launch` and `relaunch` in a graph for device launch.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from qllm.errors import DeviceError

IN_BODY = {"Kernel", "Memcpy", "Memset", "Empty", "Graph", "Conditional"}
"""Node types that the body of a conditional node may hold."""
ON_DEVICE = {"Kernel", "Memcpy", "Memset", "Graph"}
"""Node types that a graph for device launch may hold."""
MOST_LAUNCHES = 120
"""Fire-and-forget launches of one execution of a graph."""
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


class Exec:
    """A graph instantiated for device launch."""

    def __init__(self, graph: Any, order: int) -> None:
        self.graph, self.order, self.number = graph, order, 0x7F00_0000_0000 + 64 * order
        self.is_running = False


class Execution:
    """A graph that was launched runs once; what its kernels may call meanwhile.

    Children run between two nodes, which is as late as they may, so what a kernel writes after its
    launches is seen; all of them are over before the tail.
    """

    def __init__(self, api: "FakeLoopApi", of: Exec) -> None:
        self.api, self.of, self.is_over = api, of, False
        self.num_launches, self.relaunches = 0, False
        self.waiting: list[Exec] = []
        self.children: list[Exec] = []

    def launch(self, number: int) -> None:
        """Fire and forget."""
        self._from_a_kernel()
        child = self.api.execs.get(number)
        if child is None:
            raise RuntimeError(f"{number:#x} is no graph instantiated for device launch")
        if child.is_running:
            raise RuntimeError("the graph runs: cudaErrorInvalidValue")
        self.num_launches += 1
        if self.num_launches > MOST_LAUNCHES:
            raise RuntimeError(f"more than {MOST_LAUNCHES} launches of one execution")
        child.is_running = True
        self.waiting.append(child)

    def relaunch(self) -> None:
        """Tail launch of the graph itself."""
        self._from_a_kernel()
        if self.relaunches:
            raise RuntimeError("one tail launch of itself may be pending")
        self.relaunches = True

    def _from_a_kernel(self) -> None:
        if self.is_over:
            raise RuntimeError("only a kernel that runs in a graph launches graphs")

    def run(self) -> None:
        for node in getattr(self.of.graph, "nodes", ()):
            if node.kind == "Kernel":
                node.more["function"](self.launch, self.relaunch, *node.more["numbers"])
            else:
                self.api.replay(node.more["child"])
            self._run_children()
        if not isinstance(self.of.graph, Graph):
            self.api.replay(self.of.graph)
        self.is_over = True
        for child in self.children:
            child.is_running = False

    def _run_children(self) -> None:
        for child in self.waiting:
            self.api.trace.append(child.order)
            Execution(self.api, child).run()
        self.children += self.waiting
        self.waiting = []


class FakeLoopApi:
    """A `LoopApi`: `launch` runs the loop to its end."""

    def __init__(self) -> None:
        self.handles: dict[int, dict[str, Any]] = {}
        self.values: dict[int, int] = {}
        self.trace: list[int] = []
        """Branches that ran."""
        self.num_launches = 0
        self.execs: dict[int, Exec] = {}
        self.tables: list[Any] = []
        self.set_by: dict[int, int] = {}
        self.fault = ""

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

    def instantiate_for_device(self, graph: Any) -> Exec:
        is_ours = isinstance(graph, Graph)
        types = {n.kind for n in graph.nodes} if is_ours else set(self.node_types(graph))
        if not types <= ON_DEVICE or not types - {"Graph"}:
            raise DeviceError(f"{sorted(types)} in a graph for device launch (result 3)")
        if is_ours:
            self._check(graph)
        made = Exec(graph, len(self.execs))
        self.execs[made.number] = made
        return made

    def number_of(self, made: Exec) -> int:
        return made.number

    def new_table(self, numbers: Sequence[int]) -> int:
        self.tables.append((ctypes.c_uint64 * len(numbers))(*numbers))
        return ctypes.addressof(self.tables[-1])

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
        if isinstance(made, Exec):
            self._launch_self_launching(made)
            return
        if not made.frozen or made.is_body:
            raise RuntimeError("only an instantiated graph can be launched")
        self.num_launches += 1
        self.values = {h: known["first"] for h, known in self.handles.items()}
        self._run(made)

    def _launch_self_launching(self, made: Exec) -> None:
        if made.is_running:
            raise RuntimeError("launches by host and device at the same time are undefined")
        self.num_launches += 1
        made.is_running = True
        for _ in range(MOST_TURNS):
            once = Execution(self, made)
            once.run()
            if not once.relaunches:
                made.is_running = False
                return
        raise RuntimeError("the loop does not end")

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
