"""Park in the middle of a pass, write everything to one file, finish in another process."""

import json
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from qllm import QLLMEngine, SamplingParams
from qllm.engine import archive, checkpoint
from qllm.errors import CheckpointError
from qllm.frontend.handle import Handle, Result
from qllm.ingress import CONTROL
from qllm.scheduler.program import Index, OpKind, Program
from tests.support.families import DTYPES, VOCAB, make_model
from tests.support.files import ROOT
from tests.support.forked import start_program
from tests.support.inside import loop_of, runner_of
from tests.support.waiting import wait_for

SETTINGS: dict[str, Any] = {
    "conformance": False,
    "threads": 1,
    "max_kv_tokens": 1024,
    "max_segment_ms": 0.4,
    "policy": "qllm2",
    "exactness": "batch-invariant",
}
GREEDY = SamplingParams(temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.3, seed=7, top_k=60, repetition_penalty=1.1)
FAMILIES = ("mixtral", "gpt_oss", "deepseek_v3", "qwen2_moe")

FINISH = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
from tests.support.families import DTYPES, make_model
from qllm import QLLMEngine
settings, jobs = json.loads(sys.stdin.read())
models, out = {}, []
for family, dtype, path in jobs:
    if (family, dtype) not in models:
        models[family, dtype] = make_model(family, DTYPES[dtype])
    with QLLMEngine.from_model(models[family, dtype], **settings) as engine:
        handles = engine.restore(path)
        results = [h.result(300) for h in handles]
        out.append(
            {r.request_id: [r.token_ids, r.finish_reason, r.prompt_token_ids] for r in results}
        )
print(json.dumps(out))
"""


def prompt_of(n: int, seed: int) -> list[int]:
    rng = random.Random(1000 * n + seed)
    return [rng.randrange(VOCAB) for _ in range(n)]


def engine_of(family: str, dtype: str, **settings: Any) -> QLLMEngine:
    made = QLLMEngine.from_model(make_model(family, DTYPES[dtype]), **{**SETTINGS, **settings})
    object.__setattr__(runner_of(made).backend.costs, "range_ns", 0.5)
    return made


def flood(engine: QLLMEngine) -> list[Handle]:
    """Three prompts at once, so that they share programs; one is sampled."""

    def submit() -> list[Handle]:
        return [
            engine.submit(prompt_of(30, 1), "BE", 10, sampling=GREEDY, request_id="greedy"),
            engine.submit(prompt_of(9, 2), "BE", 14, sampling=SAMPLED, request_id="sampled"),
            engine.submit(prompt_of(21, 3), "BE", 4, sampling=GREEDY, request_id="short"),
        ]

    handles: list[Handle] = engine.call(submit)
    return handles


class Saved(NamedTuple):
    path: Path
    count: int
    where: str


def save_at(engine: QLLMEngine, wanted: Callable[[Program, Index, int], bool], path: Path) -> Saved:
    """Run the flood; call `engine.checkpoint` from another thread at one boundary."""
    reached, found = threading.Event(), []
    count = 0

    def watch(program: Program, index: Index, begin: int, end: int) -> None:
        nonlocal count
        count += 1
        if not found and wanted(program, index, count):
            found.append(f"{program.ops[index.op].kind.name} {index}")
            reached.set()
            wait_for(lambda: engine._client.ingress.stop.word == CONTROL)  # the call lowers it

    numbers = []

    def save() -> None:
        assert reached.wait(60)
        numbers.append(engine.checkpoint(path))

    thread = threading.Thread(target=save)
    thread.start()
    engine.call(lambda: setattr(runner_of(engine), "on_segment", watch))
    handles = flood(engine)
    thread.join(60)
    assert numbers, "no checkpoint was written"
    for handle in handles:  # the requests go on
        handle.cancel()
        handle.result(300)
    engine.call(lambda: setattr(runner_of(engine), "on_segment", None))
    return Saved(path, numbers[0], found[0])


def boundaries(seed: int) -> list[Callable[[Program, Index, int], bool]]:
    rng = random.Random(seed)
    inside, early, late = rng.randrange(1, 4), rng.randrange(1, 60), rng.randrange(60, 250)

    def in_experts(program: Program, index: Index, count: int) -> bool:
        kind = program.ops[index.op].kind
        return kind is OpKind.EXPERTS and index.pos >= inside

    def anywhere(program: Program, index: Index, count: int) -> bool:
        return count >= early

    def later(program: Program, index: Index, count: int) -> bool:
        return count >= late

    return [in_experts, anywhere, later]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("turn", range(3))
def test_a_new_process_finishes_what_was_parked(tmp_path: Path, turn: int) -> None:
    """Each family is parked at one of three boundaries: at each of them in some turn."""
    jobs: list[tuple[str, str, str]] = []
    expected: list[dict[str, Result]] = []
    for seed, family in enumerate(FAMILIES):
        dtype = "bf16" if seed % 2 == 0 else "fp32"
        with engine_of(family, dtype) as engine:
            whole = {h.request_id: h.result(300) for h in flood(engine)}
            place = (seed + turn) % 3
            saved = save_at(engine, boundaries(seed)[place], tmp_path / f"{family}.qllm")
            sys.stdout.write(f"{family} {dtype}: {saved.count} requests at {saved.where}\n")
            assert 1 <= saved.count <= 3
            jobs.append((family, dtype, str(saved.path)))
            expected.append(whole)
        if place == 0:
            with safe_open(saved.path, framework="pt") as file:
                names = set(file.keys())
            assert any("work.slots" in name for name in names), "it is not inside EXPERTS"
    with start_program(FINISH, str(ROOT)) as program:
        with program.stdin:
            json.dump([SETTINGS, jobs], program.stdin)
        said = program.stdout.read()
        assert program.wait() == 0
    for job, whole, got in zip(jobs, expected, json.loads(said.splitlines()[-1]), strict=True):
        assert got, job
        for name, (tokens, reason, prompt) in got.items():
            want = whole[name]
            assert tokens == list(want.token_ids), (job, name)
            assert reason == want.finish_reason
            assert prompt == list(want.prompt_token_ids)
    assert all(len(set(r.token_ids)) > 1 for whole in expected for r in whole.values())


# -- files that are refused


@pytest.fixture(scope="module")
def saver() -> Any:
    with engine_of("mixtral", "bf16") as made:
        yield made


@pytest.fixture(scope="module")
def good(saver: QLLMEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "good.qllm"
    return save_at(saver, boundaries(0)[0], path).path


def assert_untouched(engine: QLLMEngine) -> None:
    stats = engine.stats()
    assert (stats["num_live"], stats["num_waiting"]) == (0, 0)
    assert not engine._client.handles
    assert not runner_of(engine).requests
    assert not runner_of(engine).frames
    assert loop_of(engine).scheduler.pool.num_free == engine.config.num_blocks
    engine.call(loop_of(engine).scheduler.check)
    assert len(engine.submit(prompt_of(5, 5), "LS", 3, sampling=GREEDY).result(300).token_ids) == 3


def edited(
    good: Path, path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]
) -> Path:
    document, tensors = archive.read(good)
    change(document, tensors)
    archive.write(path, document, tensors)
    return path


def test_a_good_file_is_restored(saver: QLLMEngine, good: Path) -> None:
    whole = {h.request_id: h.result(300) for h in flood(saver)}
    handles = saver.restore(good)
    assert {h.request_id for h in handles} == set(whole)
    for handle in handles:
        assert handle.result(300).token_ids == whole[handle.request_id].token_ids
    assert_untouched(saver)
    unchanged = edited(good, good.with_name("unchanged"), lambda d, t: None)
    assert len([h.result(300) for h in saver.restore(unchanged)]) == 3


def test_truncated_and_foreign_files_are_refused(
    saver: QLLMEngine, good: Path, tmp_path: Path
) -> None:
    whole = good.read_bytes()
    bad = tmp_path / "bad.qllm"
    cuts = [whole[: int(len(whole) * x)] for x in (0.0, 0.01, 0.3, 0.7, 0.99)]
    later = whole.replace(f'"version":"{archive.VERSION}"'.encode(), b'"version":"7"')
    for data in (*cuts, whole[:-1], b"hello", later):
        bad.write_bytes(data)
        with pytest.raises(CheckpointError):
            saver.restore(bad)
    with pytest.raises(CheckpointError):
        saver.restore(tmp_path / "missing.qllm")
    save_file({"a": runner_of(saver).parts.lm_head.weight.detach().clone()}, bad)
    with pytest.raises(CheckpointError, match="not a qllm-checkpoint"):
        saver.restore(bad)
    with pytest.raises(CheckpointError, match="cannot write"):
        saver.checkpoint(tmp_path / "no" / "such" / "folder" / "x")
    assert_untouched(saver)


def _lose_last_tensor_of_the_last_request(document: dict[str, Any], tensors: Any) -> None:
    number = document["requests"][-1]["number"]
    names = sorted(n for n in tensors if n.startswith(f"request.{number}."))
    del tensors[names[-1]]


def _lose_a_frame_tensor(document: dict[str, Any], tensors: Any) -> None:
    del tensors[next(n for n in tensors if n.startswith("frame.") and n.endswith("numbers"))]


def _wrong_shape(document: dict[str, Any], tensors: Any) -> None:
    name = next(n for n in tensors if n.endswith("work.slots"))
    tensors[name] = tensors[name][1:].clone()


def _unknown_request_in_a_frame(document: dict[str, Any], tensors: Any) -> None:
    document["frames"][0]["rows"][0][0] = 10**6


def _no_requests_key(document: dict[str, Any], tensors: Any) -> None:
    del document["requests"]


def _no_sampling(document: dict[str, Any], tensors: Any) -> None:
    del document["requests"][1]["sampling"]["seed"]
    document["requests"][1]["sampling"]["sneed"] = 1


def test_a_parked_prefill_comes_back_with_the_blocks_that_it_writes_to(tmp_path: Path) -> None:
    """Its prompt is 30 tokens, of which none is computed in every layer."""
    with engine_of("mixtral", "fp32", block_size=4) as engine:
        saved = save_at(engine, lambda program, index, count: count >= 5, tmp_path / "saved")
    found: list[tuple[int, int]] = []
    with engine_of("mixtral", "fp32", block_size=4) as engine:
        loop: Any = loop_of(engine)
        take_over = loop.restored_frame

        def look(program: Program, *rest: Any) -> None:
            held = {i: 4 * len(r.block_table) for i, r in loop.scheduler.requests.items()}
            found.extend((held[row.request_id], row.hi) for row in program.rows)
            take_over(program, *rest)

        loop.restored_frame = look
        for handle in engine.restore(saved.path):
            handle.result(300)
    assert found
    assert all(room >= hi for room, hi in found)


@pytest.mark.parametrize(
    "change",
    [
        _lose_last_tensor_of_the_last_request,
        _lose_a_frame_tensor,
        _wrong_shape,
        _unknown_request_in_a_frame,
        _no_requests_key,
        _no_sampling,
    ],
)
def test_nothing_is_half_loaded(
    saver: QLLMEngine, good: Path, tmp_path: Path, change: Callable[..., None]
) -> None:
    bad = edited(good, tmp_path / "bad.qllm", change)
    with pytest.raises(CheckpointError):
        saver.restore(bad)
    assert_untouched(saver)


def test_another_model_or_other_settings_are_refused(good: Path) -> None:
    with engine_of("mixtral", "fp32") as engine:
        with pytest.raises(CheckpointError, match="another model"):
            engine.restore(good)
        assert_untouched(engine)
    other = QLLMEngine.from_model(make_model("mixtral", DTYPES["bf16"], seed=5), **SETTINGS)
    with other as engine, pytest.raises(CheckpointError, match="another model"):
        engine.restore(good)
    for settings in ({"max_segment_ms": 50.0}, {"exactness": "order"}):
        with engine_of("mixtral", "bf16", **settings) as engine:
            with pytest.raises(CheckpointError, match=r"settings.*max_segment_ms"):
                engine.restore(good)
            assert_untouched(engine)


def test_too_little_kv_is_refused(good: Path) -> None:
    with engine_of("mixtral", "bf16", max_kv_tokens=32) as engine:
        with pytest.raises(
            CheckpointError, match=r"needs \d+ KV blocks, 2 are free.*max_kv_tokens"
        ):
            engine.restore(good)
        assert_untouched(engine)


def _asks_for_much(document: dict[str, Any], tensors: dict[str, Any]) -> None:
    document["requests"][-1]["max_tokens"] = 5000


def test_a_restored_request_that_can_never_finish_is_refused(good: Path, tmp_path: Path) -> None:
    """Its KV fits now, its last token never will."""
    path = edited(good, tmp_path / "much", _asks_for_much)
    with engine_of("mixtral", "bf16") as engine:
        with pytest.raises(CheckpointError, match=r"the engine serves at most 512; raise max_kv"):
            engine.restore(path)
        assert_untouched(engine)


def test_a_restored_request_keeps_what_is_left_of_its_time(tmp_path: Path) -> None:
    """And has no log-probabilities, rather than some that are moved."""
    asked = SamplingParams(temperature=0, ignore_eos=True, logprobs=1)
    path = tmp_path / "timed"

    def save(engine: QLLMEngine) -> int:
        loop: Any = loop_of(engine)
        (live,) = loop.live.values()
        assert live.request.num_output_tokens
        return checkpoint.save(loop, runner_of(engine), path)

    with engine_of("mixtral", "fp32") as engine:
        handle = engine.submit(prompt_of(9, 1), "BE", 400, sampling=asked, timeout_s=300.0)
        next(iter(handle))
        assert engine.call(lambda: save(engine)) == 1
        handle.cancel()
    with engine_of("mixtral", "fp32") as engine:
        loop: Any = loop_of(engine)
        (handle,) = engine.restore(path)
        left_ns = [live.submission.deadline_ns - engine.now_ns() for live in loop.live.values()]
        assert all(0 < ns <= 300e9 for ns in left_ns)
        handle.cancel()
        assert handle.result(300).logprobs is None


def test_restored_requests_live_beside_new_ones(saver: QLLMEngine, good: Path) -> None:
    whole = {h.request_id: h.result(300) for h in flood(saver)}
    new = [saver.submit(prompt_of(11, i), "LS", 6, sampling=GREEDY) for i in range(3)]
    handles = [*saver.restore(good), *saver.restore(good)]
    for handle in handles:
        assert handle.result(300).token_ids == whole[handle.request_id].token_ids
    assert len({h.number for h in handles}) == len(handles) == 6
    assert all(len(h.result(300).token_ids) == 6 for h in new)
    assert_untouched(saver)
