"""The whole serving loop as one CUDA graph: the host launches it and then only watches.

    WHILE (run)                     a conditional node; its body is
      turn                            a kernel: books a stage, claims, decides, fills a lane
      SWITCH (branch)                 a conditional node with a body per captured stage;
        0: stage   1: stage   ...     a branch that is none of them runs nothing

A turn sets both handles each time. It lowers `run` after a bounded number of turns or when it is
told to stop, and the host launches again: nothing of the loop lives in the launch itself. What a
stage may hold (`graphs.ALLOWED`) is what the body of a conditional node may hold.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from qllm.cuda.graphs import ALLOWED
from qllm.errors import DeviceError, ModelError

NO_BRANCH = (1 << 32) - 1
"""A value of the switch that no body has."""
THREADS = 256
"""Threads of the one block that takes a turn."""
MOST_LOOK_S = 1.0
"""The time between two looks at the heartbeat counts for so much at most: a process that stood
still, as one that is stopped and goes on, looks again before it says that the device hangs."""


class KernelCall(NamedTuple):
    """A kernel and the numbers it is launched with; those of its loop follow them."""

    function: Any
    numbers: tuple[int, ...]
    """Addresses and numbers of 8 bytes each."""


class LoopApi(Protocol):
    """What the loop needs of CUDA's graphs."""

    def new_graph(self) -> Any:
        """An empty graph."""
        ...

    def new_handle(self, graph: Any, first: int) -> int:
        """A condition of one node that will be in this graph; it has that value at each launch."""
        ...

    def add_conditional(
        self, graph: Any, after: Sequence[Any], handle: int, kind: str, size: int
    ) -> tuple[Any, list[Any]]:
        """Add a "While" or "Switch" node: the node, and the empty graphs of its bodies."""
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
        """Type of each node."""
        ...

    def instantiate(self, graph: Any) -> Any:
        """Make a graph launchable."""
        ...

    def launch(self, made: Any) -> None:
        """Start a graph; returns at once."""
        ...

    def is_running(self) -> bool:
        """Whether the last launch seems not to have ended; its own words decide (`serve`).

        Raises:
            DeviceError: It ended with a fault.
        """
        ...

    def pin(self, address: int, num_bytes: int) -> Any:
        """Page-lock memory of the host for the device until `close`; neither while a loop runs.

        Raises:
            DeviceError: It cannot be.
        """
        ...

    def staging(self, num_bytes: int) -> Any:
        """A page-locked tensor, uint8 [num_bytes]: copies to and from it wait for no loop."""
        ...


class LoopGraph:
    """The graph of a loop.

    Args:
        api: Builds it.
        turn: The kernel of a turn.
        stages: Captured stages, in the order of their branches.

    Raises:
        ModelError: There is no stage, or one holds what a conditional body may not.
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
        """Start the loop; it ends by itself after a bounded number of turns."""
        self._api.launch(self._made)

    @property
    def is_running(self) -> bool:
        """See `LoopApi.is_running`."""
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
    """What the host knows of a loop: words that the device writes where the host can read."""

    prepare: Callable[[], None]
    """Called before each launch."""
    heartbeat: Callable[[], int]
    """Turns taken."""
    is_stopped: Callable[[], bool]
    """The loop was told to stop and has nothing left to do."""
    goes_on: Callable[[], bool]
    """The launch has turns to take; `prepare` says so, and its last turn takes it back."""
    look: Callable[[], None] = lambda: None
    """Called again and again while a launch runs."""


def serve(
    loop: LoopGraph,
    watch: Watch,
    *,
    hang_s: float = 10.0,
    pause_s: float = 0.001,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Launch a loop again and again until it has stopped; return how often.

    Args:
        loop: Ready to be launched.
        watch: Its words.
        hang_s: A heartbeat that stands still so long, while it is watched, is a hang.
        pause_s: Between two looks.
        clock: Seconds.
        sleep: Waits.

    Raises:
        DeviceError: A fault, or a hang, or a launch that ended before its last turn. The CUDA
            context is lost: this process must end, and a new one loads the weights and serves what
            is unfinished.
    """
    launches, seen = 0, watch.heartbeat()
    while not watch.is_stopped():
        before = watch.heartbeat()
        watch.prepare()
        still_s, looked = 0.0, clock()
        loop.launch()
        launches += 1
        # An event may read as over while a loop iterates: a launch ends when its words say so too.
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
