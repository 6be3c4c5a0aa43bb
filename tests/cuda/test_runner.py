"""The device runner on a CPU: the tokens of the CPU runner, op by op and by captured stages."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from qllm.cuda.backend import cuda_runner
from qllm.errors import InvariantError, ModelError
from qllm.plan import NO_CUTS, Plan, Row
from qllm.runner import conformance
from qllm.runner.cpu import cpu_runner
from qllm.runner.frame import Frame
from qllm.runner.runner import TorchRunner
from qllm.scheduler.compile import compile_program
from qllm.scheduler.program import START, Index, Program
from qllm.types import Grain, SamplingParams
from tests.support import interpret  # noqa: F401 - mends the interpreter
from tests.support.captured import (
    BUCKETS,
    GREEDY,
    NUM_PAGES,
    PROMPTS,
    Driver,
    Poll,
    captured_runner,
    device_runner,
    forget,
    sampling_of,
    schedule,
)
from tests.support.fake_cuda import FakeCuda
from tests.support.families import DTYPES, FAMILIES, make_model


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


WANTED: dict[tuple[str, float], dict[int, list[int]]] = {}


def wanted(family: str, temperature: float) -> dict[int, list[int]]:
    key = family, temperature
    if key not in WANTED:
        cpu = cpu_runner(make_model(family), max_segment_ms=float("inf"), kernels="reference")
        WANTED[key] = schedule(cpu, sampling_of(temperature), Grain.STEP)
        assert len({t for tokens in WANTED[key].values() for t in tokens}) > 3
    return WANTED[key]


@pytest.mark.parametrize("family", FAMILIES)
def test_op_by_op_the_tokens_are_those_of_the_cpu(family: str) -> None:
    runner = device_runner(family)
    assert runner.backend.stages is None
    assert runner.backend.not_captured == "not asked for"
    for grain, temperature in ((Grain.STEP, 0.0), (Grain.EXPERT, 0.8)):
        assert schedule(runner, sampling_of(temperature), grain) == wanted(family, temperature)
        forget(runner)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_by_stages_the_tokens_are_those_of_the_cpu(family: str) -> None:
    runner, fake = captured_runner(family, layers_per_stage=2)
    for grain, temperature in ((Grain.STEP, 0.8), (Grain.LAYER, 0.0)):
        before = len(fake.replays)
        assert schedule(runner, sampling_of(temperature), grain) == wanted(family, temperature)
        assert len(fake.replays) - before == 8 * (1 if grain is Grain.STEP else 2)
        forget(runner)


def test_the_largest_step_is_rehearsed_outside_of_graphs() -> None:
    """What ops one by one need is asked of the driver before the first request, not beside one."""
    seen: list[tuple[int, bool]] = []
    model = make_model("mixtral")
    fake = FakeCuda()
    model.model.layers[2].self_attn.o_proj.register_forward_hook(
        lambda _, args, out: seen.append((args[0].shape[:-1].numel(), fake.on_side))
    )
    cuda_runner(model, num_pages=NUM_PAGES, page_size=4, graphs=fake, buckets=BUCKETS)
    assert (64, False) in seen[-1:]


def test_weights_read_are_counted_on_the_device() -> None:
    cpu = cpu_runner(make_model("mixtral"), max_segment_ms=float("inf"), kernels="reference")
    schedule(cpu, GREEDY, Grain.STEP)
    for runner in (device_runner("mixtral"), captured_runner("mixtral")[0]):
        schedule(runner, GREEDY, Grain.LAYER)
        assert runner.expert_bytes == cpu.expert_bytes


def test_latents_are_never_expanded_and_others_may_still_do() -> None:
    """DeepSeek's keys and values are products of its latents that no step of ours computes."""
    runner = device_runner("deepseek_v3")
    attn: Any = runner.parts.layers[0].self_attn
    assert "over latents" in runner.names["attention"]
    rows: list[int] = []
    attn.kv_b_proj.register_forward_hook(lambda _, args, out: rows.append(args[0].shape[-2]))
    assert schedule(runner, sampling_of(0), Grain.EXPERT) == wanted("deepseek_v3", 0.0)
    assert rows == []
    with torch.no_grad():
        runner.model(torch.tensor([PROMPTS[1]]))
    assert rows == [len(PROMPTS[1])]
    runner.close()
    assert "expand_kv" not in vars(attn)


def test_latents_that_expand_in_an_unknown_way_are_refused() -> None:
    model = make_model("deepseek_v3")
    attn: Any = model.model.layers[2].self_attn
    attn.kv_b_proj = torch.nn.Linear(32, attn.kv_b_proj.out_features, bias=True)
    with pytest.raises(ModelError, match="layer 2: DeepseekV3Attention expands its latents"):
        cuda_runner(model, num_pages=8, graphs=False)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_interpreted_kernels_give_the_first_tokens(family: str) -> None:
    drivers = [Driver(device_runner(family, kernels_name=name)) for name in ("torch", "triton")]
    for driver in drivers:
        for i in (0, 1):
            driver.add(i, PROMPTS[1][: 3 + i])
        driver.sweep([driver.row(0), driver.row(1)])
        driver.sweep([driver.row(0), driver.row(1)])
    assert drivers[0].tokens == drivers[1].tokens
    assert all(len(tokens) == 2 for tokens in drivers[1].tokens.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_known_attention_rotates_and_writes_in_one_launch(family: str) -> None:
    runner = device_runner(family)
    assert "(3 of 3 layers)" in runner.names["rope"]


def test_a_window_of_known_attention_is_kept() -> None:
    tokens = []
    for how in (cpu_runner, cuda_runner):
        model = make_model("mixtral")
        model.config.sliding_window = 6
        more = {"kernels": "reference"} if how is cpu_runner else {"num_pages": NUM_PAGES}
        runner = how(model, **more)
        tokens.append(schedule(runner, sampling_of(0.8), Grain.STEP))
    assert tokens[0] == tokens[1] != wanted("mixtral", 0.8)


def test_what_the_device_cannot_sample_is_sampled_on_the_host() -> None:
    odd = SamplingParams(temperature=0, logprobs=2, repetition_penalty=1.3)
    cpu = cpu_runner(make_model("mixtral"), max_segment_ms=float("inf"), kernels="reference")
    runner, fake = captured_runner("mixtral")
    assert schedule(runner, odd, Grain.STEP) == schedule(cpu, odd, Grain.STEP)
    assert not any(graph is g for g in fake.replays for graph in _with_head(runner))


def _with_head(runner: TorchRunner) -> list[Any]:
    assert runner.backend.stages is not None
    return [graph for key, graph in runner.backend.stages.captured.items() if key.head]


# -- parking


@pytest.mark.sampled(3)
@pytest.mark.parametrize("grain", [Grain.LAYER, Grain.EXPERT])
@pytest.mark.parametrize("stages", [True, False])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen2_moe", "deepseek_v3"])
def test_parked_frames_lose_nothing(family: str, stages: bool, grain: Grain) -> None:
    """Frames of both classes stop anywhere, others run between, and each goes on where it was."""
    rng = random.Random(5)
    runner = captured_runner(family)[0] if stages else device_runner(family)
    driver = Driver(runner)
    for i, ids in enumerate(PROMPTS):
        driver.add(i, ids)
    parked: dict[int, tuple[Program, Index]] = {}
    parks = 0
    while any(len(tokens) < 6 for tokens in driver.tokens.values()):
        request = rng.randrange(3)
        if len(driver.tokens[request]) >= 6:
            continue
        is_whole = request not in parked and rng.random() < 0.3
        if request not in parked:
            rows = [driver.row(request, 16)]
            parked[request] = (driver.program(rows, Grain.STEP if is_whole else grain), START)
        program, index = parked.pop(request)
        index = runner.run(program, index, Poll(rng, 0.5))
        if index == program.end:
            driver.finish(program)
        else:
            parks += 1
            parked[request] = program, index
    assert parks > 5
    alone = {i: Driver(device_runner(family)) for i in range(3)}
    for i, one in alone.items():
        one.add(i, PROMPTS[i])
        while len(one.tokens[i]) < 6:
            one.sweep([one.row(i, 16)])
        assert driver.tokens[i] == one.tokens[i]


@pytest.mark.parametrize("stages", [True, False])
def test_a_dead_row_is_skipped_and_a_dropped_frame_is_run_again(stages: bool) -> None:
    runner = captured_runner("mixtral")[0] if stages else device_runner("mixtral")
    driver = Driver(runner)
    for i in range(3):
        driver.add(i, PROMPTS[i])
    program = driver.program([driver.row(i) for i in range(2)], Grain.LAYER)
    index = runner.run(program, START, Poll(p=1.0))
    assert START < index < program.end
    runner.kill(program, 0)
    assert runner.run(program, index, Poll()) == program.end
    driver.finish(program)
    assert driver.tokens[0] == []
    assert driver.tokens[1] == wanted("mixtral", 0.0)[1][:1]
    runner.remove(0)
    program = driver.program([driver.row(2)], Grain.LAYER)
    runner.run(program, START, Poll(p=1.0))
    runner.drop(program)
    if stages:
        assert all(lane.loaded is None for lane in runner.backend.stages.lanes.values())
    driver.sweep([driver.row(2)])
    assert driver.tokens[2] == wanted("mixtral", 0.0)[2][:1]


def test_a_limit_is_kept() -> None:
    """The engine finishes only the layer of a frame whose rows it regroups."""
    runner, _ = captured_runner("mixtral", layers_per_stage=2)
    driver = Driver(runner)
    driver.add(0, PROMPTS[0])
    program = driver.program([driver.row(0)], Grain.LAYER)
    limit = program.layer_end(Index(2, 0))
    cut = replace(program, ops=program.ops[: limit.op])
    assert runner.run(cut, START, Poll()) == limit
    runner.split(program, limit)
    row = Row(0, 0, len(PROMPTS[0]), program.layer_at(limit), runner.shape.num_layers)
    driver.sweep([row])
    assert driver.tokens[0] == wanted("mixtral", 0.0)[0][:1]


def test_broken_logits_name_the_request() -> None:
    model = make_model("mixtral")
    with torch.no_grad():
        model.lm_head.weight[3, 0] = float("nan")
    runner = cuda_runner(model, num_pages=8, page_size=4, graphs=False)
    driver = Driver(runner)
    driver.add(5, PROMPTS[1])
    with pytest.raises(ValueError, match="request 5: the largest logit is nan"):
        driver.sweep([driver.row(5)])


def test_a_runner_addresses_the_blocks_that_it_is_given_and_no_others() -> None:
    runner = device_runner("mixtral")
    driver = Driver(runner)
    driver.add(0, PROMPTS[0])
    driver.add(1, PROMPTS[1])
    driver.sweep([driver.row(0), driver.row(1)])
    for request in (0, 1):
        kv: Any = runner.requests[request].kv
        assert kv.pages == driver.tables.cover([driver.row(request)])[0][: len(kv.pages)]
    row = driver.row(0)
    driver.frames += 1
    program = compile_program(
        Plan(rows=(row,)), frame_id=driver.frames, samples=[True], shape=runner.shape, cuts=NO_CUTS
    )
    pages = list(runner.requests[0].kv.pages)  # type: ignore[attr-defined]
    for wrong, words in (
        ([], "0 KV blocks of 4 tokens do not hold 24"),
        ([*pages[1:], pages[0]], "moved"),
        ([*pages, NUM_PAGES], "are not all pages"),
    ):
        for _ in range(2):  # it is refused again when it is tried again
            with pytest.raises(InvariantError, match=words):
                runner.accept(program, [wrong])


@pytest.mark.parametrize("how", [cpu_runner, device_runner])
def test_what_a_dropped_frame_began_is_no_part_of_a_checkpoint(how: Any) -> None:
    def made() -> TorchRunner:
        if how is device_runner:
            return device_runner("mixtral")
        return cpu_runner(make_model("mixtral"), max_segment_ms=float("inf"), kernels="reference")

    runner = made()
    driver = Driver(runner)
    driver.add(0, PROMPTS[2])
    driver.sweep([driver.row(0, 16)])
    program = driver.program([driver.row(0, 16)], Grain.LAYER)
    runner.run(program, START, Poll(p=1.0))
    runner.drop(program)
    tensors, meta = runner.export_request(0)
    assert {t.shape[2] for name, t in tensors.items() if name[0] in "kv"} == {16}
    runner.close()
    other = made()
    again = Driver(other)
    row = Row(0, 0, 16, 0, other.shape.num_layers)
    other.import_request(0, GREEDY, tensors, meta, again.tables.cover([row])[0])
    again.tokens[0] = []
    again.sweep([again.row(0)])
    assert again.tokens[0] == wanted("mixtral", 0.0)[2][:1]


def test_a_split_that_fails_leaves_no_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _ = captured_runner("mixtral", layers_per_stage=1)
    driver = Driver(runner)
    driver.add(0, PROMPTS[0])
    program = driver.program([driver.row(0)], Grain.LAYER)
    index = runner.run(program, START, Poll(p=1.0))

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(Frame, "save_rows", fail)
    with pytest.raises(MemoryError):
        runner.split(program, index)
    assert not runner.frames
    assert all(lane.loaded is None for lane in runner.backend.stages.lanes.values())


def test_a_frame_that_is_resumed_at_a_finer_grain_stops_between_experts() -> None:
    runner = device_runner("mixtral")
    driver = Driver(runner)
    driver.add(0, PROMPTS[2])
    program = driver.program([driver.row(0)], Grain.LAYER)
    index = runner.run(program, START, Poll(p=1.0))
    assert not program.inside_layer(index)
    finer, inside = replace(program, grain=Grain.EXPERT), 0
    while index != program.end:
        index = runner.run(finer, index, Poll(p=1.0))
        inside += index.pos > 0
    assert inside
    driver.finish(program)
    assert driver.tokens[0] == wanted("mixtral", 0.0)[2][:1]


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu_the_tokens_are_those_of_the_cpu(family: str) -> None:
    model = make_model(family, DTYPES["fp32"]).cuda()
    for graphs in (None, False):
        runner = cuda_runner(
            model, num_pages=NUM_PAGES, page_size=16, max_num_seqs=4, max_total_tokens=96,
            graphs=graphs, buckets=BUCKETS, layers_per_stage=2,
        )  # fmt: skip
        for grain in (Grain.STEP, Grain.LAYER):
            assert schedule(runner, sampling_of(0.0), grain) == wanted(family, 0.0)
            forget(runner)
        runner.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_start_up_check_holds_on_pages(family: str) -> None:
    """It parks the runner, and goes on from frames that it wrote itself."""
    model = make_model(family)
    runner = cuda_runner(model, num_pages=64, page_size=4, graphs=False)
    conformance.check(model, runner)
    assert not runner.requests
    wrong: Any = runner._drivers[1]
    wrong.combine = lambda x, *rest, real=wrong.combine: real(x, *rest) * (1 + 2e-5)
    if runner.shape.is_moe[1]:
        with pytest.raises(ModelError, match="first different: layer 1"):
            conformance.check(model, runner)
