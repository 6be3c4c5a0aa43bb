"""Models whose experts are in a file: the bits of resident experts, whatever is in memory."""

import errno
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qllm.errors import ConfigError, InvariantError, ModelError
from qllm.kernels import cpu
from qllm.models.loader import load
from qllm.models.weights.expert_file import ExpertFile
from qllm.runner.cpu import cpu_runner
from qllm.runner.runner import TorchRunner
from qllm.runner.sweep import Amounts
from qllm.scheduler.program import START, Index, OpKind, Program
from qllm.types import Grain
from tests.support import published
from tests.support.experts_in_file import (
    draw_residents,
    gguf_of,
    in_slots,
    loaded,
    residency_of,
    saved,
)
from tests.support.families import FAMILIES
from tests.support.stops import (
    NUM_PROMPTS,
    add_prompts,
    assert_same_ends,
    run_in_pieces,
    whole_program,
)
from tests.support.streaming import made
from tests.support.sweeps import (
    GREEDY,
    Asked,
    Poll,
    Watched,
    compiled,
    next_row,
    prompt_of,
)
from tests.support.tiny_configs import tiny_model

assert cpu.MISSING is None, cpu.MISSING
pytestmark = pytest.mark.usefixtures("one_thread")
LENGTHS = (21, 5)


def resident(folder: Path, how: str = "auto", **settings: Any) -> TorchRunner:
    """A runner whose experts are in memory."""
    model = load(folder, dtype="bfloat16", expert_weights=how).model
    return cpu_runner(model, max_segment_ms=float("inf"), expert_weights=how, **settings)


def top_k_of(folder: Path) -> int:
    return resident(folder).shape.experts_per_token


def assert_same_steps(
    expected: TorchRunner, found: TorchRunner, num_tasks: int, rng: random.Random
) -> None:
    """Run three steps of two requests. At stops of the second runner, other experts come and go."""

    def disturb() -> None:
        if rng.random() < 0.3:
            draw_residents(found, rng)

    for runner in (expected, found):
        add_prompts(runner, LENGTHS)
    for _ in range(3):
        draw_residents(found, rng)
        programs = [whole_program(runner) for runner in (expected, found)]
        assert expected.run(programs[0], START, Watched()) == programs[0].end
        run_in_pieces(found, programs[1], num_tasks, disturb)
        assert_same_ends(expected, found, programs)
        tokens = [
            [s.token_id for s in runner.finish(program)]
            for runner, program in zip((expected, found), programs, strict=True)
        ]
        assert tokens[0] == tokens[1]


# -- the bits


@pytest.mark.sampled(4)
@pytest.mark.parametrize("num_tasks", [1, 5, 1 << 40])
@pytest.mark.parametrize("more", [0, 1, 5])
@pytest.mark.parametrize(
    ("kernels", "how"),
    [("fast", how) for how in ("auto", "int8", "int8-g64", "int4", "mxfp4")]
    + [("reference", "auto")],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_its_bits_with_any_experts_in_memory(
    tmp_path: Path, family: str, kernels: str, how: str, more: int, num_tasks: int
) -> None:
    """The least memory is that for the experts of one token."""
    rng = random.Random(f"{family}{kernels}{how}{more}{num_tasks}")
    folder = saved(tmp_path, family)
    expected = resident(folder, how, kernels=kernels)
    num_slots = expected.shape.experts_per_token + more
    found = in_slots(folder, num_slots, how, kernels=kernels)
    assert f"in {num_slots} slots for" in found.names["experts"]
    assert_same_steps(expected, found, num_tasks, rng)
    assert residency_of(found).num_reads > 2 * num_slots


@pytest.mark.parametrize("settings", [{"activations": "int8"}, {"batch_invariant": True}])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_settings_of_products_have_their_bits(
    tmp_path: Path, settings: dict[str, Any], num_threads: int
) -> None:
    folder, rng = saved(tmp_path, "qwen3_moe"), random.Random(num_threads)
    how = "int4" if "activations" in settings else "auto"
    expected, found = resident(folder, how, **settings), in_slots(folder, 4, how, **settings)
    cpu.set_threads(num_threads)
    assert_same_steps(expected, found, 3, rng)
    kernel = found.names["experts"]
    assert ("on int8 rows" in kernel) == ("activations" in settings)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kernels", ["fast", "reference"])
@pytest.mark.parametrize("more", [0, 1, 5])
@pytest.mark.parametrize("form", [*published.FORMATS, "mxfp4"])
def test_a_quantised_checkpoint_has_its_bits(
    tmp_path: Path, kernels: str, more: int, form: str
) -> None:
    folder = made(tmp_path, "gpt_oss" if form == "mxfp4" else "qwen3_moe", form)
    expected = resident(folder, kernels=kernels)
    found = in_slots(folder, expected.shape.experts_per_token + more, kernels=kernels)
    assert_same_steps(expected, found, 7, random.Random(f"{form}{more}"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("stacks", [True, False])
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_1", "F32"])
def test_a_gguf_file_has_its_bits(tmp_path: Path, kind: str, stacks: bool, more: int) -> None:
    path = gguf_of(tmp_path, kind, stacks=stacks)
    expected = resident(path)
    found = in_slots(path, expected.shape.experts_per_token + more)
    assert_same_steps(expected, found, 5, random.Random(f"{kind}{stacks}{more}"))


@pytest.mark.parametrize("kernels", cpu.native.available())
def test_every_kind_of_kernel_has_its_bits(tmp_path: Path, kernels: str) -> None:
    folder = saved(tmp_path, "qwen3_moe")
    expected, found = resident(folder), in_slots(folder, 4)
    cpu.native.use(kernels)
    assert_same_steps(expected, found, 2, random.Random(kernels))


@pytest.mark.parametrize("kernels", ["fast", "reference"])
def test_memory_for_all_experts_needs_no_slots_and_no_more_reads(
    tmp_path: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path, "gpt_oss")
    expected = resident(folder, kernels=kernels)
    found = cpu_runner(loaded(folder)[0], max_segment_ms=float("inf"), kernels=kernels)
    monkeypatch.setattr(ExpertFile, "read", lambda *_: pytest.fail("an expert is read again"))
    assert "from a file" in found.names["experts"]
    assert all(bank is None or bank.residency is None for bank in found.backend.compute.banks)
    add_prompts(expected, LENGTHS)
    add_prompts(found, LENGTHS)
    programs = [whole_program(runner) for runner in (expected, found)]
    for runner, program in zip((expected, found), programs, strict=True):
        assert runner.run(program, START, Watched()) == program.end
    assert_same_ends(expected, found, programs)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "family", ["jamba", "afmoe", "qwen3_next", "minimax", "aria_text", "granitemoehybrid"]
)
def test_layers_without_kernels_and_with_states_have_their_bits(
    tmp_path: Path, family: str
) -> None:
    """The first layer of jamba reads a mark of its config, which no load may leave."""
    tiny_model(family).bfloat16().save_pretrained(tmp_path)
    expected = resident(tmp_path)
    found = in_slots(tmp_path, expected.shape.experts_per_token)
    programs = []
    for runner in (expected, found):
        for request in range(NUM_PROMPTS):
            runner.add(request, list(range(1 + request, 22)), GREEDY, 21 - request, 30)
        programs.append(whole_program(runner))
        assert runner.run(programs[-1], START, Watched()) == programs[-1].end
    assert_same_ends(expected, found, programs)
    assert residency_of(found).num_reads > 0


def test_layers_that_only_the_model_s_own_code_runs_are_refused(tmp_path: Path) -> None:
    tiny_model("deepseek_v32").bfloat16().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="its layers cannot be tried without weights"):
        cpu_runner(loaded(tmp_path)[0])


def test_many_requests_end_in_memory_for_the_experts_of_one_token(tmp_path: Path) -> None:
    """Programs of one request each run in turns, a few tasks at a time."""
    folder, rng = saved(tmp_path, "qwen3_moe"), random.Random(5)
    tokens = []
    for runner in (resident(folder), in_slots(folder, top_k_of(folder))):
        programs = dict[int, tuple[Program, Index]]()
        for request in range(16):
            length = 1 + request % 4
            runner.add(request, prompt_of(length, request), GREEDY, length, length + 4)
            program = compiled(runner, [next_row(runner, request)], Grain.EXPERT)
            runner.accept(program)
            programs[request] = program, START
        found = dict[int, int]()
        while programs:
            request = rng.choice(list(programs))
            program, at = programs[request]
            at = runner.run(program, at, Asked(rng.randint(1, 9)))
            programs[request] = program, at
            if at == program.end:
                found[request] = runner.finish(program)[0].token_id
                del programs[request]
        tokens.append(found)
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 16


# -- the order of units


def at_experts(runner: TorchRunner) -> tuple[Program, Index]:
    """Run a program up to its first EXPERTS op."""
    add_prompts(runner, LENGTHS)
    program, at = whole_program(runner), START
    while program.ops[at.op].kind is not OpKind.EXPERTS:
        at = runner.run(program, at, Poll(0, 1.0))
    return program, at


def used_experts(runner: TorchRunner, program: Program) -> list[int]:
    """The experts of the layer that the routers chose."""
    routed = runner.frames[program.frame_id].layer.routed
    return sorted({e for one in routed.values() for e in one.ids_TK.flatten().tolist()})


@pytest.mark.parametrize("kernels", ["fast", "reference"])
def test_units_of_present_experts_run_first(tmp_path: Path, kernels: str) -> None:
    folder = saved(tmp_path, "qwen3_moe")
    runner = in_slots(folder, 5, kernels=kernels)
    program, at = at_experts(runner)
    used, frame = used_experts(runner, program), runner.frames[program.frame_id]
    assert len(used) > 5
    bank: Any = runner.backend.compute.banks[program.ops[at.op].layer]
    here = used[2:5]
    residency_of(runner).leave()
    residency_of(runner).enter()
    with bank.residency.pinned([here[1], here[2], here[0]]):
        pass
    others = [expert for expert in used if expert not in here]
    num_reads = residency_of(runner).num_reads
    if kernels == "fast":
        sizes = Amounts(runner.backend.costs, runner.backend.cuts.expert_block, single=False)
        swept = runner.backend.sweep.run(frame, program, at, Watched(), runner.new_step, sizes)
        assert swept.at == (at.op, len(here))
        assert swept.missing is not None
        assert list(swept.missing.experts) == others
        end = swept.at
    else:
        end = runner.run(program, at, Poll(0, 1.0))
        assert end == (at.op, len(here))
    assert residency_of(runner).num_reads == num_reads, "nothing is read while a unit can run"
    work = frame.layer.work
    assert work is not None
    assert [unit.expert for unit in work.units] == here + others
    assert bytes(work.done) == b"\1" * len(here) + b"\0" * len(others)
    end = runner.run(program, end, Poll(0, 1.0))  # as many of the others as fit
    assert residency_of(runner).num_reads == num_reads + min(len(others), 5)


def move(one: TorchRunner, other: TorchRunner, program: Program, at: Index) -> None:
    """Move a parked frame and its requests to another runner."""
    tensors = one.export_frame(program, at)
    requests = {request: one.export_request(request) for request in program.request_ids}
    one.drop(program)
    for request, (kv, meta) in requests.items():
        one.remove(request)
        other.import_request(request, GREEDY, kv, meta)
    other.import_frame(program, at, tensors)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kernels", ["fast", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_with_units_in_another_order_continues_elsewhere(
    tmp_path: Path, family: str, kernels: str
) -> None:
    """The other runners have memory for other numbers of experts."""
    rng, folder = random.Random(f"{family}{kernels}"), saved(tmp_path, family)
    expected = resident(folder, kernels=kernels)
    top_k = expected.shape.experts_per_token
    runners = [in_slots(folder, top_k + i, kernels=kernels) for i in range(3)]
    add_prompts(expected, LENGTHS)
    add_prompts(runners[0], LENGTHS)
    here, num_unsorted = runners[0], 0
    for _ in range(2):
        programs = [whole_program(runner) for runner in (expected, here)]
        assert expected.run(programs[0], START, Watched()) == programs[0].end
        program, at = programs[1], START
        while at != program.end:
            draw_residents(here, rng)
            at = here.run(program, at, Asked(rng.choice((1, 5, 50))))
            work = here.frames[program.frame_id].layer.work
            is_unsorted = work is not None and work.units != sorted(work.units)
            if at != program.end and (is_unsorted or rng.random() < 0.05):
                there = rng.choice([runner for runner in runners if runner is not here])
                move(here, there, program, at)
                here = there
                num_unsorted += is_unsorted and at.pos > 0
        assert_same_ends(expected, here, [programs[0], program])
        assert [s.token_id for s in expected.finish(programs[0])] == [
            s.token_id for s in here.finish(program)
        ]
    assert num_unsorted > 0


def test_units_of_another_op_are_refused_in_a_checkpoint(tmp_path: Path) -> None:
    runner = in_slots(saved(tmp_path), 5)
    program, at = at_experts(runner)
    draw_residents(runner, random.Random(0))
    while not at.pos:
        at = runner.run(program, at, Poll(0, 1.0))
    tensors = runner.export_frame(program, at)
    runner.drop(program)
    tensors["work.units"][0, 1] += 1
    with pytest.raises(InvariantError, match="a checkpoint has other expert units than its op"):
        runner.import_frame(program, at, tensors)


# -- errors


def answer(runner: TorchRunner, request: int, length: int) -> int:
    """Add a request, and return its first token. A failed request is removed."""
    runner.add(request, prompt_of(length, request), GREEDY, length, length + 4)
    program = compiled(runner, [next_row(runner, request)], Grain.EXPERT)
    runner.accept(program)
    try:
        assert runner.run(program, START, Watched()) == program.end
        return runner.finish(program)[0].token_id
    finally:
        runner.drop(program)
        runner.remove(request)


def read_for(runner: TorchRunner, patch: pytest.MonkeyPatch, run: Callable[[], int]) -> Any:
    """Run with no expert in memory; return the result, and the experts that were read."""
    residency, found, real = residency_of(runner), list[tuple[int, int]](), ExpertFile.read
    residency.leave()
    residency.enter()

    def read(file: ExpertFile, layer: int, expert: int, into: memoryview) -> None:
        found.append((layer, expert))
        real(file, layer, expert, into)

    with patch.context() as own:
        own.setattr(ExpertFile, "read", read)
        return run(), found


def fail_with_eio(*_: object) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("kernels", ["fast", "reference"])
@pytest.mark.parametrize("damage", ["flipped", "cut off", "EIO"])
def test_a_damaged_expert_ends_the_rows_that_need_it(
    tmp_path: Path, kernels: str, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = in_slots(saved(tmp_path, "qwen3_moe"), 12, kernels=kernels)
    one, used = read_for(runner, monkeypatch, lambda: answer(runner, 1, 1))
    other, used_by_other = read_for(runner, monkeypatch, lambda: answer(runner, 2, 1))
    layer, expert = next(pair for pair in used if pair not in used_by_other)
    file = loaded(tmp_path)[1]
    own, whole = file.layers[layer], file.path.read_bytes()
    place = own.place(expert)
    residency_of(runner).leave()
    residency_of(runner).enter()
    with monkeypatch.context() as patch:
        with file.path.open("r+b") as out:
            if damage == "flipped":
                out.seek(place)
                out.write(bytes([whole[place] ^ 1]))
            elif damage == "cut off":
                out.truncate(place)
            else:
                patch.setattr(os, "preadv", fail_with_eio)
        wanted = {"flipped": "is damaged", "cut off": "is cut off", "EIO": "cannot be read from"}
        name = f"expert {expert}" if damage != "EIO" else "expert"
        with pytest.raises(ModelError, match=rf"{name} .*{wanted[damage]}"):
            answer(runner, 1, 1)
        assert not runner.frames
        if damage == "flipped":
            assert answer(runner, 2, 1) == other, "others go on while it is damaged"
    with file.path.open("r+b") as out:
        out.write(whole)
    assert answer(runner, 1, 1) == one
    assert answer(runner, 2, 1) == other


# -- refusals


def test_memory_below_the_experts_of_one_token_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, "qwen3_moe")
    top_k = top_k_of(folder)
    with pytest.raises(ConfigError, match=rf"has room for {top_k - 1} experts, and a token uses"):
        in_slots(folder, top_k - 1)
    model = loaded(folder)[0]
    cpu_runner(model).close()  # the refused runner left no mark


def test_a_format_of_experts_that_the_file_has_not_is_refused(tmp_path: Path) -> None:
    model, file = loaded(saved(tmp_path))
    wanted = rf"expert_weights='int8' differs from .* {re.escape(str(file.path))}, 'auto'; use"
    with pytest.raises(ConfigError, match=wanted):
        cpu_runner(model, expert_weights="int8")
    int8 = loaded(tmp_path, "int8", path=tmp_path / "int8.experts")[0]
    with pytest.raises(ConfigError, match="kernels='reference' has no others; use 'auto'"):
        cpu_runner(int8, expert_weights="int8", kernels="reference")


def test_one_runner_at_a_time_has_the_experts_of_a_model(tmp_path: Path) -> None:
    model, _ = loaded(saved(tmp_path))
    for kernels in ("fast", "reference", "fast"):
        runner = cpu_runner(model, kernels=kernels)
        with pytest.raises(ModelError, match="packed for another runner"):
            cpu_runner(model)
        runner.close()


def test_files_of_other_weights_give_other_names_of_a_model(tmp_path: Path) -> None:
    one = cpu_runner(loaded(saved(tmp_path / "one"))[0]).fingerprint()
    again = cpu_runner(loaded(saved(tmp_path / "one"))[0]).fingerprint()
    assert one == again
    folder = saved(tmp_path / "other")
    model = load(folder).model
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj[1, 2, 3] += 1
    model.save_pretrained(folder)
    assert cpu_runner(loaded(folder)[0]).fingerprint() != one


def test_the_reference_of_a_runner_reads_the_file_too(tmp_path: Path) -> None:
    folder = saved(tmp_path, "qwen3_moe")
    runner, expected = in_slots(folder, 4), resident(folder, kernels="reference")
    first = answer(runner, 1, 7)
    with runner.as_reference():
        assert "torch mm" in runner.names["experts"]
        found = [answer(runner, 2, 9), answer(runner, 3, 12)]
    assert found == [answer(expected, 2, 9), answer(expected, 3, 12)]
    assert answer(runner, 1, 7) == first
