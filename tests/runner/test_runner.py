# Over 500 lines: one law of the runner per test, over all families.
"""The torch runner against `model.forward`, bit for bit, whatever interrupts it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qllm.engine import archive
from qllm.errors import InvariantError, ModelError
from qllm.models.discover import discover
from qllm.models.parts import known
from qllm.plan import Row
from qllm.policy import NO_STOP
from qllm.runner.cpu import cpu_runner
from qllm.runner.layers import experts as experts_module
from qllm.runner.layers import linears
from qllm.runner.runner import TorchRunner
from qllm.scheduler.program import START, Index, OpKind
from qllm.types import Driver, Grain
from tests.support.families import DTYPES, FAMILIES, LAYERS, TOP_K, make_model
from tests.support.programs import (
    CUTS,
    GREEDY,
    STEPS,
    Poll,
    add,
    assert_same,
    compiled,
    forward,
    next_row,
    prompt_of,
    serve,
    sweep,
)

PROMPT = 21
INF = float("inf")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


MODELS: dict[tuple[str, str], Any] = {}


def model_of(family: str, dtype: str) -> Any:
    if (family, dtype) not in MODELS:
        MODELS[family, dtype] = make_model(family, DTYPES[dtype])
    return MODELS[family, dtype]


def runner_of(model: Any, **settings: Any) -> tuple[TorchRunner, dict[tuple[int, int], Tensor]]:
    runner = cpu_runner(model, **{"max_segment_ms": INF, "kernels": "reference", **settings})
    logits: dict[tuple[int, int], Tensor] = {}
    runner.on_logits = lambda request, position, x: logits.update({(request, position): x.clone()})
    return runner, logits


def fine(runner: TorchRunner) -> None:
    """One expert unit per range, small row cuts, and two blocks of vocabulary."""
    runner.backend.cuts = CUTS
    object.__setattr__(runner.backend.costs, "range_ns", 0.5)
    object.__setattr__(runner.backend.costs, "segment_ns", 0.6 * runner.backend.costs.head_ns)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_model(family: str, dtype: str) -> None:
    model, ids = make_model(family, DTYPES[dtype]), prompt_of(PROMPT)
    before = forward(model, ids)
    runner, logits = runner_of(model)
    add(runner, 1, ids)
    serve(runner, 1)
    assert Driver.HOOKED not in runner.drivers
    assert_same(list(logits.values()), before)
    assert_same(forward(model, ids), before)  # the model is not disturbed
    runner.close()
    assert not any("forward" in vars(module) for module in model.modules())
    assert_same(forward(model, ids), before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_stopping_at_every_boundary_changes_no_bit(family: str, dtype: str) -> None:
    model = model_of(family, dtype)
    rows = (Row(1, 0, PROMPT, 0, LAYERS), Row(2, 0, 9, 0, LAYERS))

    def run(every: int) -> tuple[dict[tuple[int, int], Tensor], int]:
        runner, logits = runner_of(model)
        fine(runner)
        add(runner, 1, prompt_of(PROMPT))
        add(runner, 2, prompt_of(9, 2))
        add(runner, 3, prompt_of(5, 3))
        program = compiled(runner, *rows)
        runner.accept(program)
        index, stops, poll = START, 0, Poll(every)
        while (index := runner.run(program, index, poll)) != program.end:
            stops += 1
            if stops % 7 == 1:  # a foreign program in between
                runner.evict(3)
                sweep(runner, Row(3, 0, 5, 0, LAYERS))
        runner.finish(program)
        for request_id in (1, 2):
            serve(runner, request_id, 1)
        return {key: x for key, x in logits.items() if key[0] != 3}, stops

    whole, none = run(0)
    parts, stops = run(1)
    assert none == 0
    assert stops > 40
    assert whole.keys() == parts.keys()
    assert_same(list(parts.values()), list(whole.values()))


def test_a_parked_frame_says_what_it_holds() -> None:
    model = model_of("mixtral", "fp32")
    runner, _ = runner_of(model)
    fine(runner)
    add(runner, 1, prompt_of(PROMPT))
    program = compiled(runner, Row(1, 0, PROMPT, 0, LAYERS))
    runner.accept(program)
    stream = PROMPT * model.config.hidden_size * 4
    index, held, poll = START, {}, Poll(1)
    while (index := runner.run(program, index, poll)) != program.end:
        op = program.ops[index.op]
        held.setdefault(
            (op.kind, op.layer, index.pos > 0), runner.frames[program.frame_id].num_bytes()
        )
    assert held[OpKind.ATTN, 1, False] == stream, "between layers: one residual stream, once"
    slots = 2 * stream  # two experts per token
    assert held[OpKind.EXPERTS, 1, True] >= 3 * stream + slots  # the stream, mid, input, slots
    frame = runner.frames[program.frame_id]
    head, held_at_end = frame.head, frame.num_bytes()
    assert head is not None
    frame.head = None
    vocab = 4 * model.config.vocab_size
    assert held_at_end - frame.num_bytes() == head.x_BD.nbytes + vocab, "the logits of one row"
    frame.head = head
    runner.finish(program)
    assert not runner.frames


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_order_and_ranges_of_experts_change_no_bit(
    family: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = model_of(family, dtype), prompt_of(PROMPT)
    expected = forward(model, ids)
    real = experts_module.TorchBank._matmul

    def backwards(self: Any, x: Tensor, *weights: Any) -> None:
        *weights, units, out = weights
        base = units[0].lo
        for unit in reversed(units):
            part = slice(unit.lo - base, unit.hi - base)
            real(self, x[part], *weights, [unit], out[part])

    monkeypatch.setattr(experts_module.TorchBank, "_matmul", backwards)
    runner, logits = runner_of(model)
    object.__setattr__(runner.backend.costs, "range_ns", 0.5)
    add(runner, 1, ids)
    serve(runner, 1)
    assert_same(list(logits.values()), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_unknown_glue_is_driven_by_hooks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "layer", lambda *_: known.Known(None, "a test"))
    model, ids = model_of(family, "fp32"), prompt_of(PROMPT)
    runner, logits = runner_of(model)
    assert Driver.FAST not in runner.drivers
    add(runner, 1, ids)
    program = compiled(runner, next_row(runner, 1))
    runner.accept(program)
    index, poll = START, Poll(1)
    while index != program.end:
        tensors = runner.export_frame(program, index)
        runner.drop(program)
        runner.import_frame(program, index, tensors)
        index = runner.run(program, index, poll)
    runner.finish(program)
    serve(runner, 1, STEPS - 1)
    assert_same(list(logits.values()), forward(model, ids))


def test_a_lost_expert_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _ = runner_of(model_of("mixtral", "fp32"))
    add(runner, 1, prompt_of(PROMPT))
    monkeypatch.setattr(experts_module.Work, "run", lambda self, x, start, stop: 0)
    with pytest.raises(InvariantError, match="I1"):
        sweep(runner, next_row(runner, 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_ranges_give_the_bits_of_a_whole_sweep(family: str) -> None:
    model, ids = model_of(family, "bf16"), prompt_of(PROMPT)
    expected = forward(model, ids, 0)
    runner, logits = runner_of(model)
    add(runner, 1, ids)
    for layer in range(LAYERS):
        sweep(runner, Row(1, 0, PROMPT, layer, layer + 1))
    assert_same(list(logits.values()), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_join_and_leave(dtype: str) -> None:
    model = model_of("mixtral", dtype)
    a, b, c = (prompt_of(n, n) for n in (PROMPT, 9, 13))
    runner, logits = runner_of(model)
    for request_id, ids in ((1, a), (2, b), (3, c)):
        add(runner, request_id, ids)
    sweep(runner, Row(1, 0, PROMPT, 0, 1))
    sweep(runner, Row(1, 0, PROMPT, 1, 3), Row(2, 0, 9, 0, 3), Row(3, 0, 13, 0, 2))
    assert runner.num_committed(3) == 0
    sweep(runner, Row(3, 0, 13, 2, 3))
    tolerance = 1e-4 if dtype == "fp32" else 5e-2
    for request_id, ids in ((1, a), (2, b), (3, c)):
        expected = forward(model, ids, 0)[0]
        torch.testing.assert_close(
            logits[request_id, len(ids)], expected, atol=tolerance, rtol=tolerance
        )


def test_a_split_frame_goes_on_where_it_was() -> None:
    model, ids = model_of("qwen3_moe", "bf16"), prompt_of(PROMPT)
    expected = forward(model, ids)
    runner, logits = runner_of(model)
    add(runner, 1, ids)
    program = compiled(runner, next_row(runner, 1), grain=Grain.LAYER)
    runner.accept(program)
    index = runner.run(program, START, Poll(3))
    assert program.layer_at(index) > 0
    runner.split(program, index)
    sweep(runner, Row(1, 0, PROMPT, program.layer_at(index), LAYERS))
    serve(runner, 1, STEPS - 1)
    assert_same(list(logits.values()), expected)


def test_a_dead_row_is_skipped_and_the_others_go_on() -> None:
    model = model_of("mixtral", "bf16")
    runner, logits = runner_of(model)
    fine(runner)
    add(runner, 1, prompt_of(PROMPT))
    add(runner, 2, prompt_of(9, 2))
    program = compiled(runner, Row(1, 0, PROMPT, 0, LAYERS), Row(2, 0, 9, 0, LAYERS))
    runner.accept(program)
    index = runner.run(program, START, Poll(12))
    runner.kill(program, 2)
    runner.remove(2)
    assert runner.run(program, index, Poll()) == program.end
    assert [token.request_id for token in runner.finish(program)] == [1]
    assert list(logits) == [(1, PROMPT)]
    alone, solo = runner_of(model)
    fine(alone)
    add(alone, 1, prompt_of(PROMPT))
    sweep(alone, next_row(alone, 1))
    torch.testing.assert_close(logits[1, PROMPT], solo[1, PROMPT], atol=5e-2, rtol=5e-2)


def test_grains_say_where_a_program_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "HEAD_BLOCK", 64)
    runner, _ = runner_of(model_of("mixtral", "fp32"))
    fine(runner)
    for grain in Grain:
        runner.add(1, prompt_of(PROMPT), GREEDY, PROMPT, PROMPT + 8)
        program = compiled(runner, next_row(runner, 1), grain=grain)
        runner.accept(program)
        seen = []
        index, poll = START, Poll(1)
        while (index := runner.run(program, index, poll)) != program.end:
            seen.append(index)
        if grain is Grain.STEP:
            assert seen == []
        elif grain is Grain.LAYER:
            assert len(seen) == LAYERS + 1
            assert not any(program.inside_layer(i) for i in seen)
        else:
            assert {program.ops[i.op].kind for i in seen if i.pos} == {OpKind.EXPERTS, OpKind.HEAD}
        runner.finish(program)
        runner.remove(1)


def test_a_resumed_program_counts_as_it_is_given() -> None:
    """The scheduler may end a program at the next layer, or give it another threshold or grain."""
    runner, _ = runner_of(model_of("mixtral", "fp32"))
    fine(runner)
    add(runner, 1, prompt_of(PROMPT))
    program = compiled(runner, next_row(runner, 1))
    runner.accept(program)
    alarm = Poll(1)
    index = runner.run(program, START, alarm)
    limit = program.layer_end(index)
    cut = replace(program, ops=program.ops[: limit.op])
    assert runner.run(cut, index, Poll()) == limit < program.end
    after = runner.run(replace(program, grain=Grain.LAYER), limit, alarm)
    assert limit < after == program.layer_end(Index(limit.op + 1, 0))
    assert runner.run(replace(program, stop_below=NO_STOP), after, alarm) == program.end
    assert runner.finish(program)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3"])
def test_a_checkpoint_goes_on_in_a_new_runner(family: str, tmp_path: Path) -> None:
    model, ids = model_of(family, "bf16"), prompt_of(PROMPT)
    runner, logits = runner_of(model)
    fine(runner)
    add(runner, 1, ids)
    program = compiled(runner, next_row(runner, 1))
    runner.accept(program)
    index, poll, kinds = START, Poll(1), set()
    saved: list[tuple[Index, Path]] = []
    while True:
        index = runner.run(program, index, poll)
        at_end = index == program.end
        kind = (None, 0) if at_end else (program.ops[index.op].kind, bool(index.pos))
        if kind not in kinds:
            kinds.add(kind)
            path = tmp_path / f"{len(saved)}.qllm"
            frame = runner.export_frame(program, index)
            tensors, meta = runner.export_request(1)
            whole = {f"frame.{n}": t for n, t in frame.items()}
            whole.update({f"request.{n}": t for n, t in tensors.items()})
            archive.write(path, {"request": meta, "model": runner.fingerprint()}, whole)
            saved.append((index, path))
        if at_end:
            break
    runner.finish(program)
    serve(runner, 1, 1)
    assert len(saved) >= 6
    for index, path in saved:
        meta, whole = archive.read(path)
        other, found = runner_of(model)
        fine(other)
        assert meta["model"] == other.fingerprint()
        tensors = {n[8:]: t for n, t in whole.items() if n.startswith("request.")}
        other.import_request(1, GREEDY, tensors, meta["request"])
        frame = {n[6:]: t for n, t in whole.items() if n.startswith("frame.")}
        other.import_frame(program, index, frame)
        assert other.run(program, index, Poll()) == program.end
        other.finish(program)
        serve(other, 1, 1)
        assert_same(list(found.values()), list(logits.values()))


def test_a_request_with_hidden_states_is_exported() -> None:
    model, ids = model_of("mixtral", "bf16"), prompt_of(PROMPT)
    runner, _ = runner_of(model)
    add(runner, 1, ids)
    sweep(runner, Row(1, 0, PROMPT, 0, 2))
    other, logits = runner_of(model)
    other.import_request(1, GREEDY, *runner.export_request(1))
    sweep(other, Row(1, 0, PROMPT, 2, LAYERS))
    assert_same(list(logits.values()), forward(model, ids, 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_batch_mates_change_no_bit_in_l2(family: str, dtype: str) -> None:
    model = model_of(family, dtype)
    lengths = {1: PROMPT, 2: 9, 3: 13}
    together, batched = runner_of(model, batch_invariant=True)
    together.backend.cuts = CUTS
    for request_id, n in lengths.items():
        add(together, request_id, prompt_of(n, n))
    sweep(together, next_row(together, 3), next_row(together, 1))
    sweep(together, next_row(together, 1), next_row(together, 2), next_row(together, 3))
    sweep(together, *(next_row(together, i) for i in lengths))
    for request_id, n in lengths.items():
        alone, solo = runner_of(model, batch_invariant=True)
        alone.backend.cuts = CUTS
        add(alone, request_id, prompt_of(n, n))
        serve(alone, request_id, 1)
        for key, x in solo.items():
            assert torch.equal(batched[key], x), key


def test_unsafe_models_are_refused() -> None:
    model = make_model("mixtral")
    model.train()
    with pytest.raises(ModelError, match="training"):
        cpu_runner(model)
    model.eval()
    layer = model.model.layers[0]
    layer._hf_hook = object()
    with pytest.raises(ModelError, match="accelerate hook"):
        cpu_runner(model)
    del layer._hf_hook
    layer.mlp.experts.forward = lambda *a: a
    with pytest.raises(ModelError, match="replaced on the instance"):
        cpu_runner(model)
    del layer.mlp.experts.forward
    model.lm_head.to("meta")
    with pytest.raises(ModelError, match="meta device"):
        cpu_runner(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fast_driver_knows_every_family(family: str) -> None:
    parts = discover(model_of(family, "fp32"))
    assert {p.driver for p in parts.layers} <= {Driver.FAST, Driver.DENSE}
    assert all(p.input_layernorm is not None for p in parts.layers)
    assert parts.shape.experts_per_token in (2, TOP_K)


def test_a_row_off_its_frontier_is_refused() -> None:
    runner, _ = runner_of(model_of("mixtral", "fp32"))
    add(runner, 1, prompt_of(PROMPT))
    for row in (Row(1, 3, PROMPT, 0, LAYERS), Row(1, 0, PROMPT, 1, LAYERS)):
        with pytest.raises(InvariantError, match="I2"):
            runner.accept(compiled(runner, row))


def test_a_frame_split_before_its_head_samples_later() -> None:
    model, ids = model_of("mixtral", "bf16"), prompt_of(PROMPT)
    runner, logits = runner_of(model)
    add(runner, 1, ids)
    program = compiled(runner, next_row(runner, 1), grain=Grain.LAYER)
    runner.accept(program)
    index = runner.run(program, START, Poll(LAYERS + 1))
    assert program.layer_at(index) == LAYERS
    assert index != program.end
    runner.split(program, index)
    sweep(runner, Row(1, 0, PROMPT, LAYERS, LAYERS))
    assert runner.num_committed(1) == PROMPT
    assert_same(list(logits.values()), forward(model, ids, 0))


def test_a_dropped_frame_leaves_nothing() -> None:
    model, ids = model_of("mixtral", "bf16"), prompt_of(PROMPT)
    runner, logits = runner_of(model)
    add(runner, 1, ids)
    program = compiled(runner, next_row(runner, 1))
    runner.accept(program)
    runner.run(program, START, Poll(5))
    runner.drop(program)
    runner.drop(program)
    assert runner.num_committed(1) == 0
    sweep(runner, next_row(runner, 1))
    assert_same(list(logits.values()), forward(model, ids, 0))
