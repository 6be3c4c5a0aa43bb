"""The whole serving loop as one CUDA graph, which the host launches and then only watches.

    WHILE (run)                     a conditional node with this body:
      turn                            a kernel: books a stage, claims, decides, fills a lane
      SWITCH (branch)                 a conditional node with a body per captured stage;
        0: stage   1: stage   ...     a branch without a body runs nothing

Each turn sets both handles. A turn clears `run` after a bounded number of turns, or when the host
asks it to stop. Then the host launches again, because the launch itself holds no state of the loop.
A stage may contain only the nodes that the body of a conditional node may contain
(`graphs.ALLOWED`).
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from qllm.cuda.graphs import ALLOWED
from qllm.errors import DeviceError, ModelError

NO_BRANCH = (1 << 32) - 1
"""Value of the switch without a body."""
THREADS = 256
"""Threads of the one block that takes a turn."""
MOST_LOOK_S = 1.0
"""Most seconds that count between two looks at the heartbeat. So a process that was suspended looks
again before it reports a hang of the device."""


class KernelCall(NamedTuple):
    """A kernel, and the numbers with which it is launched. The numbers of its loop follow these."""

    function: Any
    numbers: tuple[int, ...]
    """Addresses and numbers of 8 bytes each."""


class LoopApi(Protocol):
    """The calls of CUDA's graphs that the loop needs."""

    def new_graph(self) -> Any:
        """Return an empty graph."""
        ...

    def new_handle(self, graph: Any, first: int) -> int:
        """Return the condition of a later node of this graph. Each launch sets it to `first`."""
        ...

    def add_conditional(
        self, graph: Any, after: Sequence[Any], handle: int, kind: str, size: int
    ) -> tuple[Any, list[Any]]:
        """Add a "While" or "Switch" node; return it and the empty graphs of its bodies."""
        ...

    def add_kernel(
        self, graph: Any, after: Sequence[Any], function: Any, numbers: Sequence[int], threads: int
    ) -> Any:
        """Add a kernel of one block, launched with numbers of 8 bytes each."""
        ...

    def add_child(self, graph: Any, child: Any) -> Any:
        """Add a copy of a captured graph."""
        ...

    def node_types(self, graph: Any) -> list[str]:
        """Return the type of each node."""
        ...

    def instantiate(self, graph: Any) -> Any:
        """Return a graph that can be launched."""
        ...

    def launch(self, made: Any) -> None:
        """Start a graph and return at once."""
        ...

    def is_running(self) -> bool:
        """Return True if the last launch seems to run. The words of the loop decide (`serve`).

        Raises:
            DeviceError: The launch ended with a fault.
        """
        ...

    def pin(self, memory: memoryview) -> Any:
        """Page-lock memory of the host for the device until `close`, while no loop runs.

        An object that is dropped without `close` is unlocked before the memory is unmapped.

        Raises:
            DeviceError: The memory cannot be page-locked.
        """
        ...

    def staging(self, num_bytes: int) -> Any:
        """Return a page-locked tensor, uint8 [num_bytes], whose copies do not wait for the loop."""
        ...


class LoopGraph:
    """The graph of a loop.

    Args:
        api: Calls that build it.
        turn: Kernel of a turn.
        stages: Captured stages, in the order of their branches.

    Raises:
        ModelError: There is no stage, or a stage has a node that a conditional body may not have.
    """

    def __init__(self, api: LoopApi, turn: KernelCall, stages: Sequence[Any]) -> None:
        _check_stages(api, stages)
        self._api = api
        graph = api.new_graph()
        run = api.new_handle(graph, 1)
        _, (body,) = api.add_conditional(graph, (), run, "While", 1)
        branch = api.new_handle(body, NO_BRANCH)
        numbers = (*turn.numbers, run, branch)
        kernel = api.add_kernel(body, (), turn.function, numbers, THREADS)
        _, bodies = api.add_conditional(body, (kernel,), branch, "Switch", len(stages))
        for inside, stage in zip(bodies, stages, strict=True):
            api.add_child(inside, stage)
        self._made = api.instantiate(graph)

    def launch(self) -> None:
        """Start the loop, which ends by itself after a bounded number of turns."""
        self._api.launch(self._made)

    @property
    def is_running(self) -> bool:
        """True if the last launch seems to run (see `LoopApi.is_running`)."""
        return self._api.is_running()


def _check_stages(api: LoopApi, stages: Sequence[Any]) -> None:
    if not stages:
        raise ModelError("no stage was captured: there is nothing that a loop could run")
    for branch, stage in enumerate(stages):
        odd = sorted(set(api.node_types(stage)) - ALLOWED)
        if odd:
            raise ModelError(
                f"stage {branch} holds {', '.join(odd)} nodes; the body of a conditional node "
                f"may hold {', '.join(sorted(ALLOWED))} nodes only"
            )


class Watch(NamedTuple):
    """The host's view of a loop: functions that read and write the loop's words."""

    prepare: Callable[[], None]
    """Function that is called before each launch."""
    heartbeat: Callable[[], int]
    """Number of turns taken."""
    is_stopped: Callable[[], bool]
    """True if the loop was asked to stop and has no work left."""
    goes_on: Callable[[], bool]
    """True while the launch has turns to take. `prepare` sets the word, and the last turn clears
    it."""
    look: Callable[[], None] = lambda: None
    """Function that is called repeatedly while a launch runs."""


def serve(
    loop: LoopGraph,
    watch: Watch,
    *,
    hang_s: float = 10.0,
    pause_s: float = 0.001,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Launch a loop again and again until it has stopped; return the number of launches.

    Args:
        loop: Graph that is ready to launch.
        watch: Words of the loop.
        hang_s: Seconds without a new heartbeat, while the host watches, that count as a hang.
        pause_s: Seconds between two looks.
        clock: Function that returns seconds.
        sleep: Function that waits for seconds.

    Raises:
        DeviceError: A fault, a hang, or a launch that ended before its last turn. The CUDA context
            is lost. This process must end. A new process loads the weights and serves the
            unfinished requests.
    """
    launches, seen = 0, watch.heartbeat()
    while not watch.is_stopped():
        before = watch.heartbeat()
        watch.prepare()
        still_s, looked = 0.0, clock()
        loop.launch()
        launches += 1
        # An event may read as over while a loop iterates, so the words of the launch count too.
        while loop.is_running or watch.goes_on():
            sleep(pause_s)
            watch.look()
            beat, now = watch.heartbeat(), clock()
            still_s = still_s + min(now - looked, MOST_LOOK_S) if beat == seen else 0.0
            seen, looked = beat, now
            if still_s > hang_s:
                raise DeviceError(
                    f"the device has taken no turn for {still_s:.1f} s after turn {seen} "
                    f"(at most {hang_s:g} s): a stage hangs; end this process and start again"
                )
        if watch.heartbeat() == before:
            raise DeviceError(
                f"launch {launches} of the loop ended and took no turn; see the driver's log"
            )
    return launches
