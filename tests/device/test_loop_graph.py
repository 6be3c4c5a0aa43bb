"""The loop as graphs: what is built, what it runs, what the host makes of hangs and faults."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qllm.device.graph import NO_BRANCH, KernelCall, LoopGraph, Watch, serve
from qllm.errors import DeviceError, ModelError
from tests.support.fake_loop import FakeLoopApi


def nothing() -> None:
    """Nothing has to be prepared."""


def over() -> bool:
    """The launch has no turns left."""
    return False


class Stage:
    def __init__(self, name: str, log: list[str], *types: str) -> None:
        self.name, self.log, self.types = name, log, list(types) or ["Kernel", "Memset"]

    def replay(self) -> None:
        self.log.append(self.name)


class Turn:
    """Runs given branches, `limit` turns per launch; None is a turn with nothing to do."""

    def __init__(self, branches: list[int | None], limit: int) -> None:
        self.left, self.limit, self.turns, self.of_launch = list(branches), limit, 0, 0

    def __call__(self, set_conditional: Any, state: int, size: int, run: int, branch: int) -> None:
        assert (state, size) == (17, 4)
        self.turns += 1
        self.of_launch += 1
        found = self.left.pop(0) if self.left else None
        set_conditional(branch, NO_BRANCH if found is None else found)
        more = bool(self.left) and self.of_launch < self.limit
        self.of_launch = self.of_launch if more else 0
        set_conditional(run, int(more))

    def watch(self) -> Watch:
        return Watch(nothing, lambda: self.turns, lambda: not self.left, lambda: self.of_launch > 0)


def stages(log: list[str], num: int = 3) -> list[Stage]:
    return [Stage(f"stage{i}", log) for i in range(num)]


@pytest.mark.parametrize("limit", [1, 3, 100])
def test_turns_choose_stages_and_launches_are_bounded(limit: int) -> None:
    log: list[str] = []
    wanted = [0, 2, None, None, 1, 1, 2, None]
    turn, api = Turn(wanted, limit), FakeLoopApi()
    loop = LoopGraph(api, KernelCall(turn, (17, 4)), stages(log))
    launches = serve(loop, turn.watch())
    assert log == [f"stage{i}" for i in wanted if i is not None]
    assert api.trace == [i for i in wanted if i is not None]
    assert launches == api.num_launches == -(-len(wanted) // limit)
    assert turn.turns == len(wanted)


def test_a_branch_of_the_turn_before_is_not_run_again() -> None:
    """Handles keep their value between turns: a turn that sets nothing would repeat the branch."""
    log: list[str] = []
    turn = Turn([1, None, None, 0], 50)
    api = FakeLoopApi()
    serve(LoopGraph(api, KernelCall(turn, (17, 4)), stages(log)), turn.watch())
    assert log == ["stage1", "stage0"]


def test_what_a_body_may_not_hold_is_named() -> None:
    log: list[str] = []
    bad = [*stages(log), Stage("host", log, "Kernel", "Host", "MemAlloc")]
    with pytest.raises(ModelError, match="stage 3 holds Host, MemAlloc nodes"):
        LoopGraph(FakeLoopApi(), KernelCall(Turn([], 1), (17, 4)), bad)
    with pytest.raises(ModelError, match="no stage was captured"):
        LoopGraph(FakeLoopApi(), KernelCall(Turn([], 1), (17, 4)), [])


class Running(FakeLoopApi):
    """A launch that goes on for some looks of the host."""

    def __init__(self, looks: int, fault: str = "") -> None:
        super().__init__()
        self.looks, self.left, self.text = looks, 0, fault

    def launch(self, made: Any) -> None:
        super().launch(made)
        self.left = self.looks

    def is_running(self) -> bool:
        self.left -= 1
        if self.text and self.left == 0:
            raise DeviceError(self.text)
        return self.left > 0


def served(api: FakeLoopApi, watch: Watch, **more: Any) -> int:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    loop = LoopGraph(api, KernelCall(Turn([0] * 5, 2), (17, 4)), stages([]))
    return serve(loop, watch, clock=lambda: now[0], sleep=sleep, **more)


def test_a_heartbeat_that_stands_still_is_a_hang_and_a_moving_one_is_not() -> None:
    with pytest.raises(DeviceError, match=r"no turn for 2\.\d s after turn 7"):
        served(Running(100_000), Watch(nothing, lambda: 7, lambda: False, over), hang_s=2.0)
    looks, stop = iter(range(10_000_000)), iter([False, True])
    slow = Watch(
        nothing, lambda: next(looks) // 1_500, lambda: next(stop), over
    )  # looks are a millisecond apart
    assert served(Running(5_000), slow, hang_s=2.0) == 1


def test_time_in_which_the_host_stood_still_is_no_hang() -> None:
    """A process that is stopped and goes on may look before the device has taken a turn."""
    now, stop, turns = [0.0], iter([False, True]), iter([7, 7, 7, 7, 8, 8, 8, 9, 9])

    def sleep(seconds: float) -> None:
        now[0] += 3600

    words = Watch(nothing, lambda: next(turns), lambda: next(stop), over)
    loop = LoopGraph(Running(7), KernelCall(Turn([0] * 5, 2), (17, 4)), stages([]))
    assert serve(loop, words, hang_s=3.0, clock=lambda: now[0], sleep=sleep) == 1
    over_again = Watch(nothing, lambda: 7, lambda: False, over)
    with pytest.raises(DeviceError, match=r"no turn for 4\.0 s after turn 7"):
        serve(loop, over_again, hang_s=3.0, clock=lambda: now[0], sleep=sleep)


def test_a_fault_and_a_launch_without_a_turn_end_the_process() -> None:
    with pytest.raises(DeviceError, match="illegal address"):
        served(Running(50, "an illegal address"), Watch(nothing, lambda: 0, lambda: False, over))
    with pytest.raises(DeviceError, match="launch 1 of the loop ended and took no turn"):
        served(FakeLoopApi(), Watch(nothing, lambda: 3, lambda: False, over))


def test_an_event_that_says_over_too_early_brings_no_second_launch() -> None:
    """The loop's own words go on: the host waits for them."""
    left, turns = [40], [0]

    def look() -> None:
        left[0] -= 1
        turns[0] += 1

    words = Watch(nothing, lambda: turns[0], lambda: left[0] == 0, lambda: left[0] > 0, look)
    assert served(FakeLoopApi(), words) == 1
    assert left == [0]


def test_a_launch_that_ended_before_its_last_turn_is_a_hang() -> None:
    words = Watch(nothing, lambda: 5, lambda: False, lambda: True)
    with pytest.raises(DeviceError, match="no turn for"):
        served(FakeLoopApi(), words, hang_s=2.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver: calls would succeed")
def test_calls_reach_cuda_with_the_arguments_it_takes() -> None:
    """Without a driver every call answers so: a wrong argument would be a TypeError instead."""
    from cuda.bindings import driver, runtime

    from qllm.cuda.calls import BindingsCalls
    from qllm.device.graph_api import CudaLoopApi

    api = CudaLoopApi.__new__(CudaLoopApi)
    api._calls = BindingsCalls()
    api._stream = SimpleNamespace(cuda_stream=0)
    api._ended = SimpleNamespace(cuda_event=0)
    graph = runtime.cudaGraph_t(init_value=0)
    child = SimpleNamespace(raw_cuda_graph=lambda: 0)
    calls: dict[str, Any] = {
        "graph": api.new_graph,
        "handle": lambda: api.new_handle(graph, NO_BRANCH),
        "while": lambda: api.add_conditional(graph, (), 5, "While", 1),
        "switch": lambda: api.add_conditional(graph, (driver.CUgraphNode(),), 5, "Switch", 9),
        "child": lambda: api.add_child(graph, child),
        "types": lambda: api.node_types(child),
        "instantiate": lambda: api.instantiate(graph),
        "launch": lambda: api.launch(runtime.cudaGraphExec_t(init_value=0)),
        "running": api.is_running,
    }
    for call in calls.values():
        with pytest.raises((DeviceError, ModelError), match="InsufficientDriver"):
            call()
    with pytest.raises(Exception, match='"cuda" is an NVIDIA driver library'):
        api.add_kernel(graph, (), driver.CUfunction(init_value=1), (1, 2, 3), 256)
