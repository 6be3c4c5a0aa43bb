"""What a step does around its layers without torch: embedding, positions, blank tensors."""

import ctypes
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qllm.kernels import cpu
from qllm.models.discover import discover
from qllm.runner.layers.embeddings import Embedding
from qllm.runner.rope_tables import RopeTable, RowRopes, Switch
from qllm.runner.runner import TorchRunner
from qllm.scheduler.program import START, Program
from qllm.types import Grain
from tests.support.families import make_model
from tests.support.sweeps import (
    GREEDY,
    LAYERS,
    Poll,
    assert_same,
    compiled,
    held,
    model_of,
    next_row,
    prompt_of,
    run_beside,
    runner_of,
)

WIDTH = 32


class Parts:
    """What an embedding asks of the parts of a model."""

    like = torch.empty((0, WIDTH), dtype=torch.bfloat16)

    def __init__(self, embed: nn.Module, multiplier: float | None = None) -> None:
        self.embed, self.embedding_multiplier = embed, multiplier


def embedding(module: nn.Module, multiplier: float | None = None) -> Embedding:
    parts: Any = Parts(module, multiplier)
    return Embedding(parts, native=True)


def table(**how: Any) -> nn.Embedding:
    made = nn.Embedding(50, WIDTH, dtype=torch.bfloat16, **how).requires_grad_(False)
    made.weight.copy_(torch.randn((50, WIDTH), generator=torch.Generator().manual_seed(1)))
    return made


@pytest.mark.parametrize("multiplier", [None, 1.5])
def test_rows_are_those_of_the_module(multiplier: float | None) -> None:
    module = table()
    ours = embedding(module, multiplier)
    for ids in ([7], [0, 49, 7, 7], [3], list(range(40))):
        wanted = module(torch.tensor(ids))
        assert torch.equal(ours(ids), wanted if multiplier is None else wanted * multiplier)


@pytest.mark.parametrize("ids", [[50], [-1], [3, 50, 4], [3, -1, 4]])
def test_an_id_outside_the_table_is_refused(ids: list[int]) -> None:
    ours = embedding(table())
    with pytest.raises(IndexError, match=r"token id (50|-1) must be in \[0, 50\)"):
        ours(ids)


@pytest.fixture
def _no_turns() -> Iterator[None]:
    """A thread keeps the GIL until it gives it back."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_no_turns")
def test_other_threads_run_while_a_long_prompt_is_looked_up() -> None:
    """It copies for tens of ms; how late a busy machine wakes the other is not ours to say."""
    weight, numbers = table().weight, torch.full((3_000_000,), 7)
    out = torch.empty((len(numbers), WIDTH), dtype=torch.bfloat16)
    rows = out.data_ptr(), weight.data_ptr(), numbers.data_ptr(), len(numbers), WIDTH * 2
    for _ in range(50):
        ran, go = list[bool](), threading.Event()

        def other(go: threading.Event = go, ran: list[bool] = ran) -> None:
            go.wait()
            ran.append(True)

        thread = threading.Thread(target=other)
        thread.start()
        time.sleep(0.01)  # so that it waits
        go.set()
        before = bool(ran)
        cpu.native.copy_rows(*rows)
        was_beside = bool(ran) and not before
        thread.join()
        if was_beside:
            assert torch.equal(out, weight[7].expand_as(out))
            return
    pytest.fail("the copy kept the GIL")


class Shifted(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + 1


def test_what_does_more_than_look_up_is_called() -> None:
    heard, seen = table(), list[Tensor]()
    heard.register_forward_hook(lambda module, args, out: seen.append(out))
    kept = embedding(heard)([4, 5])
    before = seen[0].clone()
    kept.zero_()  # as layers write over what they are given
    assert torch.equal(seen[0], before)
    own = table()
    vars(own)["forward"] = lambda ids: nn.Embedding.forward(own, ids) + 1
    shifted = Shifted(50, WIDTH, dtype=torch.bfloat16).requires_grad_(False)
    for module in (own, shifted):
        ours = embedding(module)
        assert torch.equal(ours([4, 5]), module(torch.tensor([4, 5])))
    clipped = table(max_norm=0.5)
    assert clipped.weight.float().norm(dim=1).min() > 1
    clips = embedding(clipped)
    assert clips([4, 5]).float().norm(dim=1).max() < 0.51


class Remembering(nn.Embedding):
    """Looks a prompt up once."""

    def __init__(self) -> None:
        super().__init__(50, WIDTH, dtype=torch.bfloat16)
        self.seen = dict[tuple[int, ...], Tensor]()

    def forward(self, ids: Tensor) -> Tensor:
        key = tuple(ids.tolist())
        return self.seen.setdefault(key, super().forward(ids).detach())


def test_what_a_module_remembers_is_not_written_over() -> None:
    ours = embedding(Remembering())
    first = ours([4, 5]).clone()
    ours([4, 5]).zero_()
    assert torch.equal(ours([4, 5]), first)


def test_a_blank_tensor_is_not_shared() -> None:
    blank = cpu.Blank(8, torch.bfloat16)
    held = [blank.take(num) for num in (1, 1, 3, 1, 3, *[2] * 5000)]
    places = {x.data_ptr() + i * 16 for x in held for i in range(x.shape[0])}
    assert [tuple(x.shape) for x in held[:4]] == [(1, 8), (1, 8), (3, 8), (1, 8)]
    assert all(x.is_contiguous() for x in held)
    assert len(places) == sum(x.shape[0] for x in held)


def rope_table(switch: Switch | None = None) -> RopeTable:
    model = make_model("mixtral").bfloat16()
    rotary: Any = discover(model).rotary_emb
    return RopeTable(rotary, torch.device("cpu"), torch.bfloat16, switch)


def at(address: int, like: Tensor) -> Tensor:
    """What lies at an address, of a shape."""
    raw = bytearray(ctypes.string_at(address, like.nbytes))
    return torch.frombuffer(raw, dtype=like.dtype).view(like.shape)


@pytest.mark.parametrize(
    ("ranges", "lo", "hi"),
    [([(5, 6)], 0, 1), ([(5, 60)], 0, 55), ([(5, 60)], 16, 32), ([(5, 9), (2, 3)], 0, 5)],
)
def test_a_kernel_finds_the_positions_of_rows(
    ranges: list[tuple[int, int]], lo: int, hi: int
) -> None:
    found = rope_table()
    ropes = RowRopes({None: found}, ranges)
    addresses = ropes.addresses(0, lo, hi, None)
    found._tables.clear()  # a longer table takes its place
    for address, whole in zip(addresses, rope_table().of(ranges), strict=True):
        assert torch.equal(at(address, whole[:, lo:hi]), whole[:, lo:hi])


def test_addresses_hold_while_the_table_grows() -> None:
    """Layers with experts have asked before another frame's row is longer; dense ones ask after."""
    shared = rope_table()
    ropes = RowRopes({None: shared}, [(5, 60)])
    first = ropes.addresses(0, 0, 55, None)
    RowRopes({None: shared}, [(0, 2000)]).addresses(0, 0, 2000, None)
    assert ropes.addresses(0, 0, 55, None) == first
    for address, whole in zip(first, shared.of([(5, 60)]), strict=True):
        assert torch.equal(at(address, whole), whole)


def test_a_row_on_both_sides_of_a_length_is_put_together() -> None:
    switch = Switch(at=16, is_binary=True, recomputes=False)
    ropes = RowRopes({None: rope_table(switch)}, [(10, 20)], [12])
    addresses = ropes.addresses(0, 0, 10, None)
    for address, whole in zip(addresses, rope_table(switch).of([(10, 20)], [12]), strict=True):
        assert torch.equal(at(address, whole), whole)
    assert RowRopes({}, ()).of(0, 0, 1, None) == ()


def test_frames_that_take_turns_do_not_share_buffers() -> None:
    """One stands at each boundary in turn while another of as many tokens runs to its end."""
    model = model_of("mixtral")

    def step(runner: TorchRunner, request: int) -> Program:
        program = compiled(runner, [next_row(runner, request)], Grain.EXPERT)
        runner.accept(program)
        return program

    def outputs(between: bool) -> dict[int, list[int]]:
        runner, at = runner_of(model, native=True, fine=True), START
        for request in range(2):
            runner.add(request, prompt_of(5, request), GREEDY, 5, 900)
        for _ in range(4):
            program, at = step(runner, 0), START
            while at != program.end:
                at = runner.run(program, at, Poll(0, 1.0))
                if between:
                    other = step(runner, 1)
                    assert runner.run(other, START, Poll(0, 0.0)) == other.end
                    runner.finish(other)
            runner.finish(program)
        return {request: runner.token_ids(request) for request in range(2)}

    assert outputs(between=True)[0] == outputs(between=False)[0]


def test_layers_write_over_no_tensor_of_others() -> None:
    """What a layer of torch gave may be held by a hook; a parked frame is imported twice."""
    runner = runner_of(model_of("part_torch"), native=True)
    (torch_layer,) = [i for i, layer in enumerate(runner.backend.sweep._layers) if layer is None]
    assert torch_layer < LAYERS - 2  # two more layers: the second writes over what both were given
    driver, given = runner._drivers[torch_layer], list[tuple[Tensor, Tensor]]()

    def heard(last: Any) -> Any:
        def call(*args: Any) -> Tensor:
            out: Tensor = last(*args)
            given.append((out, out.clone()))
            return out

        return call

    for name in ("combine", "dense"):
        setattr(driver, name, heard(getattr(driver, name)))
    runner.add(0, prompt_of(5, 0), GREEDY, 5, 90)
    program = compiled(runner, [next_row(runner, 0)], Grain.LAYER)
    runner.accept(program)
    assert runner.run(program, START, Poll(0, 0.0)) == program.end
    assert runner.finish(program)
    assert given
    assert all(torch.equal(now, then) for now, then in given)


def test_a_frame_is_imported_as_often_as_one_likes() -> None:
    runner = runner_of(model_of("mixtral"), native=True)
    runner.add(0, prompt_of(5, 0), GREEDY, 5, 90)
    program = compiled(runner, [next_row(runner, 0)], Grain.LAYER)
    runner.accept(program)
    at = runner.run(program, START, Poll(0, 1.0))
    tensors, found = runner.export_frame(program, at), list[Any]()
    before = {name: t.clone() for name, t in tensors.items()}
    for _ in range(2):
        runner.drop(program)
        runner.import_frame(program, at, tensors)
        assert runner.run(program, at, Poll(0, 0.0)) == program.end
        found.append(runner.frames[program.frame_id].sampled)
    assert found[0] == found[1]
    assert all(torch.equal(tensors[name], t) for name, t in before.items())


def test_a_layer_in_columns_is_read_as_rows() -> None:
    """Torch gives the sum of a transposed tensor and another in the order of the first."""
    model, ends = model_of("part_torch"), []
    for native in (False, True):
        runner = runner_of(model, native=native)
        driver: Any = runner.backend.drivers[1]

        def dense(*args: Any, real: Any = driver.dense) -> Tensor:
            columns: Tensor = real(*args).t().contiguous().t()
            return columns

        driver.dense = dense
        runner.add(0, prompt_of(12, 0), GREEDY, 12, 20)
        program = compiled(runner, [next_row(runner, 0)], Grain.STEP)
        runner.accept(program)
        assert runner.run(program, START, Poll(0, 0.0)) == program.end
        ends.append(held(runner, program, program.end))
    assert runner.backend.sweep.num_layers == 3
    assert_same(ends[1], ends[0])


def test_layers_may_differ_in_how_many_experts_they_have() -> None:
    """Experts were pruned in the first layer: one call goes from there to layers with more."""
    model, runners = model_of("qwen3"), []
    mlp: Any = model.get_submodule("model.layers.0.mlp")
    mlp.gate.num_experts = mlp.experts.num_experts = 4
    for module, name in (
        (mlp.gate, "weight"),
        (mlp.experts, "gate_up_proj"),
        (mlp.experts, "down_proj"),
    ):
        setattr(module, name, nn.Parameter(getattr(module, name)[:4].detach().clone()))
    for native in (False, True):
        runner = runner_of(model, native=native)
        runner.add(0, prompt_of(12, 0), GREEDY, 12, 20)
        runners.append(runner)
    program, at = compiled(runner, [next_row(runner, 0)], Grain.EXPERT), START
    runner.accept(program)
    for _ in range(2):  # EMBED and ATTN: a call that went on would write past what is too small
        at = runner.run(program, at, Poll(0, 1.0))
    assert runner.frames[program.frame_id].layer.space.units.numel() // 3 >= 8
    runner.drop(program)
    run_beside(runners, program, 0.3, 0)
