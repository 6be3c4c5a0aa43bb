"""The start-up check of a model whose experts are in a file: each expert is read at most once."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from qllm import QLLMEngine
from qllm.errors import ModelError
from qllm.kernels import cpu
from qllm.models.weights.expert_file import ExpertFile
from qllm.runner import conformance
from qllm.runner.conformance import check
from qllm.runner.runner import TorchRunner
from qllm.scheduler.program import Index, OpKind, Program
from qllm.types import Grain
from tests.support.experts_in_file import gguf_of, in_slots, loaded, residency_of, saved
from tests.support.families import FAMILIES
from tests.support.tiny_configs import tiny_model

assert cpu.MISSING is None, cpu.MISSING
pytestmark = pytest.mark.usefixtures("one_thread")


class Reads(Counter[tuple[int, int]]):
    """Experts that were read, by layer and number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.num_bytes = 0
        real = ExpertFile.read

        def read(file: ExpertFile, layer: int, expert: int, into: memoryview) -> None:
            self[layer, expert] += 1
            self.num_bytes += into.nbytes
            real(file, layer, expert, into)

        monkeypatch.setattr(ExpertFile, "read", read)


def assert_checked_with_one_read_each(
    folder: Path, num_slots: int, monkeypatch: pytest.MonkeyPatch, how: str = "auto"
) -> None:
    runner = in_slots(folder, num_slots, how)
    residency, reads = residency_of(runner), Reads(monkeypatch)
    with residency.layer(0).pinned([0]):  # an expert in memory is no reason to overtake
        pass
    reads.clear()
    reads.num_bytes = 0
    check(runner.model, runner)
    assert set(reads.values()) == {1}
    assert {layer for layer, _ in reads} == set(range(len(residency.layers)))
    assert reads.num_bytes <= residency.stored_bytes
    assert not residency.parks
    assert not runner.frames
    assert not runner.requests
    check(runner.model, runner)
    assert set(reads.values()) == {2}, "another check reads each expert again"


@pytest.mark.sampled(12)
@pytest.mark.parametrize("more", [0, 1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_check_reads_each_expert_at_most_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, more: int
) -> None:
    """With memory for the experts of one token, and for some more."""
    folder = saved(tmp_path, family)
    top_k = residency_of(in_slots(folder, 6)).top_k
    assert_checked_with_one_read_each(folder, top_k + more, monkeypatch)


@pytest.mark.parametrize(
    "family", ["jamba", "afmoe", "qwen3_next", "minimax", "aria_text", "granitemoehybrid"]
)
def test_the_check_reads_each_expert_at_most_once_with_states_and_without_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    tiny_model(family).bfloat16().save_pretrained(tmp_path)
    top_k = residency_of(in_slots(tmp_path, 3)).top_k
    assert_checked_with_one_read_each(tmp_path, top_k, monkeypatch)


@pytest.mark.parametrize("how", ["int8", "int4", "gguf"])
def test_the_check_reads_each_quantised_expert_at_most_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "gguf":
        assert_checked_with_one_read_each(gguf_of(tmp_path, "Q4_0"), 3, monkeypatch)
    else:
        assert_checked_with_one_read_each(saved(tmp_path), 5, monkeypatch, how)


def test_a_start_reads_the_file_at_most_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine starts with its check, and has read nothing more before its first request."""
    folder = saved(tmp_path, "qwen3_moe")
    file = loaded(folder)[1]
    model, _ = loaded(folder, max_bytes=9 * max(layer.expert_bytes for layer in file.layers))
    reads = Reads(monkeypatch)
    with QLLMEngine.from_model(model, threads=1, max_kv_tokens=2048) as engine:
        assert 0 < reads.num_bytes <= file.num_bytes
        assert engine.stats()["experts"]["blocking"]["bytes"] == reads.num_bytes
        assert engine.submit([1, 2, 3], "LS", 2).result(300).token_ids


def test_a_damaged_expert_is_named(tmp_path: Path) -> None:
    runner = in_slots(saved(tmp_path), 4)
    layer: Any = residency_of(runner).layers[1]
    place, path = layer.place(2), Path(residency_of(runner).where)
    with path.open("r+b") as out:
        out.seek(place)
        before = out.read(1)
        out.seek(place)
        out.write(bytes([before[0] ^ 1]))
    with pytest.raises(ModelError, match=r"^expert 2 of .*\.1\..* is damaged; delete the file"):
        check(runner.model, runner)
    assert not residency_of(runner).parks
    assert not runner.frames


def disturbed(
    runner: TorchRunner, which: tuple[int, bool], monkeypatch: pytest.MonkeyPatch
) -> list[Index]:
    """Change the rows that experts of the last layer get, once, in one pass of the check."""
    real, done = runner.run, list[Index]()

    def run(program: Program, start: Index, stop: Any) -> Index:
        op, row = program.ops[min(start.op, len(program.ops) - 1)], program.rows[0]
        is_last = op.kind is OpKind.EXPERTS and op.layer == runner.shape.num_layers - 1
        if (row.request_id, row.num_tokens == 1) == which and is_last and not done:
            done.append(start)
            tensors = runner.export_frame(program, start)
            tensors["mid"][-1] *= 1.25
            runner.import_frame(program, start, tensors)
        return real(program, start, stop)

    monkeypatch.setattr(runner, "run", run)
    return done


@pytest.mark.parametrize("num_slots", [4, 6])
@pytest.mark.parametrize("request_id", [conformance._A, conformance._B])
@pytest.mark.parametrize("is_decode", [False, True])
def test_a_pass_with_other_bits_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request_id: int,
    num_slots: int,
    *,
    is_decode: bool,
) -> None:
    runner = in_slots(saved(tmp_path), num_slots)
    done = disturbed(runner, (request_id, is_decode), monkeypatch)
    what = "a decode step" if is_decode else "a prefill that was parked"
    with pytest.raises(ModelError, match=f"the logits of {what}.* differ from those of an uncut"):
        check(runner.model, runner)
    assert done


def test_a_decode_step_reads_the_kv_of_its_prefill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV of another prefill, in the first layer, changes the decode step alone."""
    runner = in_slots(saved(tmp_path), 4)
    real, done = runner.run, list[bool]()

    def run(program: Program, start: Index, stop: Any) -> Index:
        row = program.rows[0]
        if row.request_id == conformance._A and row.num_tokens == 1 and not done:
            kv = runner.requests[row.request_id].kv
            keys, values = kv.read(0, 0, 1)
            kv.write(0, keys.clone(), values * 2, 0)
            done.append(True)
        return real(program, start, stop)

    monkeypatch.setattr(runner, "run", run)
    with pytest.raises(ModelError, match=r"the logits of a decode step.* differ from those"):
        check(runner.model, runner)
    assert done


def test_decode_runs_beside_a_pass_that_is_parked_inside_a_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the pass that is not parked stops only where experts are missing."""
    runner = in_slots(saved(tmp_path), 4)
    real, beside, stops = runner.run, list[bool](), Counter[tuple[int, bool]]()
    at = dict[int, Index]()

    def run(program: Program, start: Index, stop: Any) -> Index:
        row = program.rows[0]
        if row.request_id == conformance._A and row.num_tokens == 1:
            programs = [frame.program for frame in runner.frames.values()]
            others = [p for p in programs if p.rows[0].request_id == conformance._B]
            prefill = next(p for p in others if p.rows[0].num_tokens > 1)
            beside.append(prefill.inside_layer(at[prefill.frame_id]))
        end = at[program.frame_id] = real(program, start, stop)
        if runner.missing(program) is None and end != program.end:
            stops[row.request_id, program.grain is Grain.STEP] += 1
        return end

    monkeypatch.setattr(runner, "run", run)
    check(runner.model, runner)
    assert beside
    assert all(beside)
    assert set(stops) == {(conformance._B, False)}
    assert stops[conformance._B, False] > 20


def test_a_token_that_is_not_taken_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = in_slots(saved(tmp_path), 4)
    monkeypatch.setattr("qllm.runner.frame.RequestState.take", lambda *_: None)
    with pytest.raises(ModelError, match="sampled"):
        check(runner.model, runner)


def test_logits_are_those_of_experts_in_memory(tmp_path: Path) -> None:
    """Both kinds of check compute the same prefill."""
    folder, found = saved(tmp_path, "qwen3_moe"), []
    for num_slots in (5, 1000):
        runner = in_slots(folder, num_slots)
        assert (runner.residency is None) == (num_slots == 1000)
        tokens = conformance._tokens(runner.model, runner)
        with torch.inference_mode(), conformance._probing(runner.model, runner) as probe:
            if runner.residency is None:
                probe.compare_parked(tokens[:-1])
            else:
                probe.compare_by_layer(tokens, runner.residency)
            found.append(probe.logits[conformance._A, len(tokens) - 1])
    assert torch.equal(*found)
