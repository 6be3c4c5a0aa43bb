"""The loop as graphs: what is built, what it runs, what the host makes of hangs and faults."""

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_loop import MOST_LAUNCHES, FakeLoopApi

from qllm.cuda.loop import NO_BRANCH, KernelCall, LoopGraph, SelfLaunching, Watch, serve
from qllm.errors import DeviceError, ModelError


def nothing() -> None:
    """Nothing has to be prepared."""


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
        return Watch(nothing, lambda: self.turns, lambda: not self.left)


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


def never() -> bool:
    """The words say that a launch takes no more turns."""
    return False


class Launching(Turn):
    """The same, as a kernel that launches the stages and itself."""

    def __call__(self, launch: Any, relaunch: Any, state: int, size: int, table: int) -> None:
        chosen: dict[str, int] = {}
        super().__call__(chosen.__setitem__, state, size, "run", "branch")  # type: ignore[arg-type]
        if chosen["branch"] != NO_BRANCH:
            launch(ctypes.c_uint64.from_address(table + 8 * chosen["branch"]).value)
        if chosen["run"]:
            relaunch()


@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_turns_launch_stages_and_themselves(limit: int) -> None:
    log: list[str] = []
    # More turns than one execution may launch graphs: each turn is an execution of its own.
    wanted = [0, 2, None, None, 1, 1, 2, None] + [1] * (MOST_LAUNCHES + 1)
    turn, api = Launching(wanted, limit), FakeLoopApi()
    loop = SelfLaunching(api, KernelCall(turn, (17, 4)), stages(log), never)
    launches = serve(loop, turn.watch())
    assert log == [f"stage{i}" for i in wanted if i is not None]
    assert api.trace == [i for i in wanted if i is not None]
    assert launches == api.num_launches == -(-len(wanted) // limit)
    assert (turn.turns, loop.num_branches) == (len(wanted), 3)


def test_what_the_device_cannot_launch_is_named() -> None:
    turn = KernelCall(Launching([], 1), (17, 4))
    for types, message in (
        (("Kernel", "Empty"), "stage 3 holds Empty nodes; a graph that the device launches may"),
        (("Conditional", "Host"), "stage 3 holds Conditional, Host nodes"),
    ):
        bad = [*stages([]), Stage("bad", [], *types)]
        with pytest.raises(ModelError, match=message):
            SelfLaunching(FakeLoopApi(), turn, bad, never)
    nodeless = Stage("nodeless", [])
    nodeless.types = []
    with pytest.raises(ModelError, match="stage 1 cannot be made ready for device launch"):
        SelfLaunching(FakeLoopApi(), turn, [*stages([], 1), nodeless], never)
    with pytest.raises(ModelError, match="no stage was captured"):
        SelfLaunching(FakeLoopApi(), turn, [], never)


def test_a_launch_runs_while_its_words_say_more_whatever_the_event_says() -> None:
    looks, turn = iter([True, True, False]), Launching([0], 1)
    loop = SelfLaunching(FakeLoopApi(), KernelCall(turn, (17, 4)), stages([]), lambda: next(looks))
    assert serve(loop, turn.watch()) == 1
    assert next(looks, None) is None
    event = Running(3)
    loop = SelfLaunching(event, KernelCall(Launching([0], 1), (17, 4)), stages([]), never)
    loop.launch()
    assert [loop.is_running for _ in range(3)] == [True, True, False]


def test_a_tail_that_the_device_refused_is_a_hang_and_a_fault_is_one() -> None:
    with pytest.raises(DeviceError, match="has taken no turn"):
        served(FakeLoopApi(), Watch(nothing, lambda: 7, lambda: False), lambda: True)
    with pytest.raises(DeviceError, match="illegal address"):
        served(
            Running(50, "an illegal address"),
            Watch(nothing, lambda: 0, lambda: False),
            lambda: True,
        )


Kernel = Callable[[FakeLoopApi, Any, Any, list[int]], None]


def launches_itself(api: FakeLoopApi, launch: Any, relaunch: Any, stage: list[int]) -> None:
    launch(max(api.execs))


def launches_what_is_none(api: FakeLoopApi, launch: Any, relaunch: Any, stage: list[int]) -> None:
    launch(0)


def launches_one_twice(api: FakeLoopApi, launch: Any, relaunch: Any, stage: list[int]) -> None:
    launch(stage[1])
    launch(stage[1])


def launches_too_many(api: FakeLoopApi, launch: Any, relaunch: Any, stage: list[int]) -> None:
    for number in stage:
        launch(number)


def relaunches_twice(api: FakeLoopApi, launch: Any, relaunch: Any, stage: list[int]) -> None:
    relaunch()
    relaunch()


def host_launches_too(api: FakeLoopApi, launch: Any, relaunch: Any, stage: list[int]) -> None:
    api.launch(api.execs[max(api.execs)])


def host_launches_a_stage(api: FakeLoopApi, launch: Any, relaunch: Any, stage: list[int]) -> None:
    launch(stage[0])
    api.launch(api.execs[stage[0]])


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (launches_itself, "the graph runs"),
        (launches_what_is_none, "no graph instantiated for device launch"),
        (launches_one_twice, "the graph runs"),
        (launches_too_many, "more than 120 launches"),
        (relaunches_twice, "one tail launch of itself"),
        (host_launches_too, "host and device at the same time"),
        (host_launches_a_stage, "host and device at the same time"),
    ],
)
def test_the_fake_keeps_the_rules_of_device_launch(kernel: Kernel, message: str) -> None:
    api, num = FakeLoopApi(), MOST_LAUNCHES + 1

    def turn(launch: Any, relaunch: Any, table: int) -> None:
        kernel(api, launch, relaunch, list((ctypes.c_uint64 * num).from_address(table)))

    loop = SelfLaunching(api, KernelCall(turn, ()), stages([], num), never)
    with pytest.raises(RuntimeError, match=message):
        loop.launch()


def test_graphs_are_launched_by_kernels_of_running_graphs_and_before_the_tail() -> None:
    api, kept, seen, log = FakeLoopApi(), [], [], []

    def turn(launch: Any, relaunch: Any, table: int) -> None:
        seen.append(len(log))
        kept.append(launch)
        launch(ctypes.c_uint64.from_address(table).value)
        if len(seen) < 3:
            relaunch()

    SelfLaunching(api, KernelCall(turn, ()), stages(log), never).launch()
    assert seen == [0, 1, 2]
    with pytest.raises(RuntimeError, match="only a kernel that runs in a graph"):
        kept[0](min(api.execs))


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


def served(
    api: FakeLoopApi, watch: Watch, takes_more: Callable[[], bool] | None = None, **more: Any
) -> int:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    loop: LoopGraph | SelfLaunching
    loop = LoopGraph(api, KernelCall(Turn([0] * 5, 2), (17, 4)), stages([]))
    if takes_more is not None:
        turn = KernelCall(Launching([0] * 5, 2), (17, 4))
        loop = SelfLaunching(api, turn, stages([]), takes_more)
    return serve(loop, watch, clock=lambda: now[0], sleep=sleep, **more)


def test_a_heartbeat_that_stands_still_is_a_hang_and_a_moving_one_is_not() -> None:
    with pytest.raises(DeviceError, match=r"no turn for 2\.\d s after turn 7"):
        served(Running(100_000), Watch(nothing, lambda: 7, lambda: False), hang_s=2.0)
    looks, stop = iter(range(10_000_000)), iter([False, True])
    slow = Watch(
        nothing, lambda: next(looks) // 1_500, lambda: next(stop)
    )  # looks are a millisecond apart
    assert served(Running(5_000), slow, hang_s=2.0) == 1


def test_a_fault_and_a_launch_without_a_turn_end_the_process() -> None:
    with pytest.raises(DeviceError, match="illegal address"):
        served(Running(50, "an illegal address"), Watch(nothing, lambda: 0, lambda: False))
    with pytest.raises(DeviceError, match="launch 1 of the loop ended and took no turn"):
        served(FakeLoopApi(), Watch(nothing, lambda: 3, lambda: False))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver: calls would succeed")
def test_calls_reach_cuda_with_the_arguments_it_takes() -> None:
    """Without a driver every call answers so: a wrong argument would be a TypeError instead."""
    from cuda.bindings import driver, runtime

    from qllm.cuda.loop_api import CudaLoopApi

    api = CudaLoopApi.__new__(CudaLoopApi)
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
        "for the device": lambda: api.instantiate_for_device(graph),
        "stage for the device": lambda: api.instantiate_for_device(child),
        "launch": lambda: api.launch(runtime.cudaGraphExec_t(init_value=0)),
        "running": api.is_running,
    }
    for call in calls.values():
        with pytest.raises((DeviceError, ModelError), match="InsufficientDriver"):
            call()
    with pytest.raises(Exception, match='"cuda" is an NVIDIA driver library'):
        api.add_kernel(graph, (), driver.CUfunction(init_value=1), (1, 2, 3), 256)
    with pytest.raises((RuntimeError, AssertionError), match=r"NVIDIA|CUDA"):
        api.new_table([1, (1 << 64) - 1])


def test_what_the_device_launches_is_instantiated_for_it_and_uploaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from cuda.bindings import runtime

    from qllm.cuda import loop_api

    flags = runtime.cudaGraphInstantiateFlags
    assert int(flags.cudaGraphInstantiateFlagDeviceLaunch) == loop_api.DEVICE_LAUNCH
    calls: list[tuple[Any, ...]] = []
    made = runtime.cudaGraphExec_t(init_value=0x1234_5678_9ABC)

    def instantiate(graph: Any, how: int) -> tuple[int, Any]:
        calls.append(("instantiate", int(graph), how))
        return 0, made

    def upload(what: Any, stream: int) -> tuple[int]:
        calls.append(("upload", int(what), stream))
        return (0,)

    monkeypatch.setattr(runtime, "cudaGraphInstantiate", instantiate)
    monkeypatch.setattr(runtime, "cudaGraphUpload", upload)
    api = loop_api.CudaLoopApi.__new__(loop_api.CudaLoopApi)
    api._stream = SimpleNamespace(cuda_stream=5)
    number = 0x1234_5678_9ABC
    for graph in (SimpleNamespace(raw_cuda_graph=lambda: 77), runtime.cudaGraph_t(init_value=77)):
        assert api.number_of(api.instantiate_for_device(graph)) == number
    assert calls == [("instantiate", 77, 4), ("upload", number, 5)] * 2
