"""Capture: what a stage may not hold is refused with its name; the fake refuses what CUDA does."""

from collections.abc import Callable

import pytest
import torch

from qllm.cuda import stages as stages_module
from qllm.cuda.backend import cuda_runner, default_buckets
from qllm.cuda.graphs import ALLOWED, Graphs
from qllm.cuda.lanes import Bucket
from qllm.errors import ModelError
from qllm.kernels import reference
from qllm.kernels.triton import norm
from qllm.plan import NO_CUTS, Plan, Row
from qllm.scheduler.compile import compile_program
from qllm.types import Grain
from tests.support import interpret  # noqa: F401 - mends the interpreter
from tests.support.fake_cuda import FakeCuda, FakeGraph
from tests.support.families import make_model


def test_a_graph_replays_operations_on_data_and_not_the_python_around_them() -> None:
    x, y, scale = torch.ones(3), torch.zeros(3), [2.0]
    graph = Graphs(FakeCuda()).capture("s", lambda: y.copy_(x * scale[0]))
    x.fill_(5)
    scale[0] = 100.0
    graph.replay()
    assert y.tolist() == [10.0] * 3


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: bool((x > 0).any()), "_local_scalar_dense"),
        (lambda x: x[x > 0], "nonzero"),
        (lambda x: torch.bincount(x.long()), "bincount"),
        (lambda x: x.repeat_interleave(x.long()), "repeat_interleave"),
        (lambda x: torch.unique_consecutive(x), "unique_consecutive"),
        (lambda x: torch.equal(x, x), "equal"),
        (lambda x: x.add_(torch.tensor([2.0])), "lift_fresh"),
    ],
)
def test_a_stage_that_waits_for_the_device_is_refused(
    act: Callable[[torch.Tensor], object], name: str
) -> None:
    x = torch.ones(3)
    with pytest.raises(ModelError, match=rf"stage layers 0-3 cannot be captured.*{name}"):
        Graphs(FakeCuda()).capture("layers 0-3", lambda: act(x))


@pytest.mark.parametrize("kind", ["Host", "MemAlloc", "EventRecord", "Conditional"])
def test_a_node_of_another_type_is_refused_by_name(kind: str) -> None:
    fake, x = FakeCuda(), torch.ones(3)
    fake.extra_node = kind
    with pytest.raises(ModelError, match=f"node 1 of 2 of stage s is of type {kind}, after Kernel"):
        Graphs(fake).capture("s", lambda: x.add_(1))


@pytest.mark.parametrize("kind", sorted(ALLOWED))
def test_the_allowed_types_are_allowed(kind: str) -> None:
    fake, x = FakeCuda(), torch.ones(3)
    fake.extra_node = kind
    Graphs(fake).capture("s", lambda: x.add_(1))


def test_the_fake_refuses_what_cuda_refuses() -> None:
    fake, x = FakeCuda(), torch.ones(3)
    graph = fake.new_graph()
    with pytest.raises(RuntimeError, match="new cannot be launched"):
        graph.replay()
    with pytest.raises(RuntimeError, match="new has no definition"):
        fake.node_types(graph)
    with pytest.raises(RuntimeError, match="new cannot be instantiated"):
        fake.instantiate(graph)
    with fake.capturing(graph, fake), pytest.raises(RuntimeError, match="not permitted"):
        fake.synchronize()
    with pytest.raises(RuntimeError, match="captured once"), fake.capturing(graph, fake):
        x.add_(1)
    with (
        fake.capturing(fake.new_graph(), fake),
        pytest.raises(RuntimeError, match="not permitted"),
        fake.capturing(fake.new_graph(), fake),
    ):
        x.add_(1)


def test_nodes_are_what_cuda_makes_of_operations() -> None:
    fake, x, y = FakeCuda(), torch.ones(3, 3), torch.zeros(9)
    types: list[list[str]] = []
    read = fake.node_types
    fake.node_types = lambda graph: types.append(read(graph)) or read(graph)  # type: ignore[method-assign, func-returns-value]
    Graphs(fake).capture("s", lambda: y.copy_((x @ x).view(9)[:9].add_(y.new_zeros(9))))
    assert types == [["Kernel", "Memset", "Kernel", "Memcpy"]]


def test_launches_of_kernels_are_replayed_on_what_their_tensors_hold_then() -> None:
    fake, x = FakeCuda(), torch.ones(2, 8)
    found = torch.zeros(2, 8)
    graph = Graphs(fake).capture("s", lambda: found.copy_(norm.rms_norm(x, torch.ones(8), 0.0)))
    assert [name for name, *_ in graph.ops if name.startswith("_rms")] == ["_rms_norm"]
    x[1, 3:] = 7.0
    graph.replay()
    torch.testing.assert_close(found, reference.rms_norm(x, torch.ones(8), 0.0))


def test_what_lies_in_the_pool_does_not_outlive_the_next_replay() -> None:
    fake = FakeCuda()
    graphs, x, y = Graphs(fake), torch.ones(3), torch.zeros(3)
    left: list[torch.Tensor] = []
    first = graphs.capture("first", lambda: left.append(x + 1))
    second = graphs.capture("second", lambda: y.copy_(left[-1]))
    first.replay()
    second.replay()
    assert y.isnan().all(), "a stage that keeps a tensor in the pool would go unseen"


def test_every_stage_is_captured_for_every_bucket_and_class() -> None:
    buckets = [Bucket(2, False), Bucket(32, True)]
    runner = cuda_runner(
        make_model("mixtral"), num_pages=8, page_size=4, max_num_seqs=2, max_total_tokens=32,
        graphs=FakeCuda(), buckets=buckets, layers_per_stage=2,
    )  # fmt: skip
    assert runner.backend.stages is not None
    # whole: decode 1, prefill with and without head 2; by 2 of 3 layers: decode 2, prefill 3
    assert len(runner.backend.stages.captured) == 8
    assert all(isinstance(graph, FakeGraph) for graph in runner.backend.stages.captured.values())
    names = sorted(map(str, runner.backend.stages.captured))
    assert "layers 0-1 (embedding, 2 tokens, decode)" in names
    assert "layers 2-2 (head, 32 tokens, prefill)" in names


def test_default_buckets_reach_the_limits() -> None:
    assert default_buckets(6, 100) == [
        *(Bucket(n, False) for n in (1, 2, 4, 6)),
        *(Bucket(n, True) for n in (64, 106)),
    ]


def test_a_stage_is_found_where_the_ops_are_one_and_nowhere_else() -> None:
    shape = cuda_runner(make_model("qwen2_moe"), num_pages=8, graphs=False).shape
    assert shape.is_moe == (True, False, True)
    rows = (Row(0, 0, 5, 0, 3), Row(1, 4, 5, 0, 2))  # the second leaves at layer 2
    program = compile_program(
        Plan(rows=rows, grain=Grain.LAYER), frame_id=1, samples=(True, False), shape=shape,
        cuts=NO_CUTS,
    )  # fmt: skip
    found = {
        op: stages_module._cover(program.ops, op, 2, 3)  # type: ignore[arg-type]
        for op in range(len(program.ops))
    }
    kinds = [(op.kind.name, op.layer, op.group) for op in program.ops]
    first = kinds.index(("ATTN", 0, 0))
    late = next(i for i, kind in enumerate(kinds) if kind[:2] == ("ATTN", 2))
    assert {op: stage for op, stage in found.items() if stage is not None} == {
        0: (0, 2, 0, late, True),
        first: (0, 2, 0, late, False),
        late: (2, 3, 1, len(kinds) - 1, False),
    }
    assert stages_module._cover(program.ops, 0, 3, 3) is None  # type: ignore[arg-type]
