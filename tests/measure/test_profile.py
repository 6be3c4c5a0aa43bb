"""`qllm.measure.profile`: early answers are those of the model's own layers, norm and head."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from qllm.config import engine_config
from qllm.errors import ConfigError, ModelError
from qllm.measure import profile as measure
from qllm.measure.profile import (
    DRAFTS,
    EarlyExit,
    Prediction,
    Profile,
    StepTime,
    profile,
    speedup,
    step_time,
)
from qllm.measure.profile_texts import ALL, MOST_BYTES, read_texts, tokens_of
from qllm.models.loader import load, wrap
from qllm.runner.runner import TorchRunner
from qllm.scheduler.program import OpKind, Program
from tests.support.families import FAMILIES, VOCAB, make_model
from tests.support.hybrids import make_hybrid
from tests.support.tiny_configs import tiny_model
from tests.support.tokenizers import with_two_in_front

CONFIG = engine_config({"conformance": False})


def ids(num: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (num,), generator=generator).tolist()


def found_in(model: Any, kinds: dict[str, list[int]], **more: Any) -> Profile:
    return profile(wrap(model), kinds, CONFIG, threads=1, **more)


def expected_answers(model: Any, tokens: Sequence[int]) -> list[torch.Tensor]:
    """Return the logits after each layer, by modules of transformers alone."""
    with torch.inference_mode():
        out = model(torch.tensor([tokens]), output_hidden_states=True)
        early = [model.lm_head(model.model.norm(x))[0] for x in out.hidden_states[1:-1]]
    scale = getattr(model.config, "logits_scaling", 1.0)
    return [*(x / scale for x in early), out.logits[0]]


def sharp(family: str) -> Any:
    """A random model some of whose answers are confident."""
    model = make_model(family)
    with torch.no_grad():
        model.lm_head.weight.mul_(6)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_early_answers_are_those_of_the_models_own_modules(family: str) -> None:
    tokens = ids(100)
    *early, whole = expected_answers(sharp(family), tokens)
    found = found_in(sharp(family), {"random": tokens})
    assert [e.layer for e in found.exits] == [1, 2]
    for e, logits in zip(found.exits, early, strict=True):
        chance = logits.softmax(-1).max(-1).values
        agreed = logits.argmax(-1) == whole.argmax(-1)
        assert 0 < e.agreement < 1
        assert e.agreement == pytest.approx(float(agreed.float().mean()))
        assert e.confidence == pytest.approx(float(chance.mean()), rel=1e-3)
        sure = chance >= 0.9
        assert 0 < e.confident < 1
        assert e.confident == pytest.approx(float(sure.float().mean()))
        assert e.confident_agreement == pytest.approx(float(agreed[sure].float().mean()))
        assert e.num_tokens == 100


def without_upper_layers(model: Any, first: int) -> Any:
    """Let the layers from `first` on change nothing: what they add to the residual is zero."""
    with torch.no_grad():
        for layer in model.model.layers[first:]:
            for name, p in layer.named_parameters():
                if "o_proj" in name or "down_proj" in name:
                    p.zero_()
    return model


@pytest.mark.parametrize(
    ("first", "dtype"), [(1, torch.float32), (3, torch.bfloat16), (4, torch.bfloat16)]
)
def test_layers_that_change_nothing_agree_in_full(first: int, dtype: torch.dtype) -> None:
    model = without_upper_layers(make_model("qwen3_moe", dtype, num_layers=5), first)
    found = found_in(model, {"a": ids(80), "b": ids(95, seed=1)})
    for text in ("a", "b", ALL):
        exits = found.of(text)
        assert [e.layer for e in exits] == [1, 2, 3, 4]
        assert [e.agreement == 1.0 for e in exits] == [e.layer >= first for e in exits]
    assert found.num_tokens == {"a": 80, "b": 95}


def test_a_long_text_runs_in_parts_that_start_anew() -> None:
    """The limit of a part is the longest sequence of the model, less the tokens before each."""
    prefix, one, two = [7, 9], ids(510), ids(40, seed=1)
    apart = [found_in(make_model("mixtral"), {"x": part}, prefix=prefix) for part in (one, two)]
    whole = found_in(make_model("mixtral"), {"x": one + two}, prefix=prefix)
    for n, e in enumerate(whole.exits):
        parts = [found.exits[n] for found in apart]
        assert e.num_tokens == 550
        assert e.agreement * 550 == pytest.approx(sum(p.agreement * p.num_tokens for p in parts))


def test_tokens_before_a_text_change_answers_and_are_not_counted() -> None:
    tokens = ids(60)
    *early, whole = expected_answers(make_model("mixtral"), [3, 5, *tokens])
    found = found_in(make_model("mixtral"), {"x": tokens}, prefix=[3, 5])
    for e, logits in zip(found.exits, early, strict=True):
        agreed = (logits.argmax(-1) == whole.argmax(-1))[2:]
        assert e.agreement == pytest.approx(float(agreed.float().mean()))


def test_a_model_with_states_is_measured_and_gets_no_proposal() -> None:
    found = found_in(make_hybrid("qwen3_next"), {"x": ids(50)})
    assert [0 <= e.agreement < 1 for e in found.exits] == [True] * 3
    assert "carry a state" in found.refused
    assert set(found.times) == {1}
    assert found.predictions("x") == found.predictions(ALL) == []
    assert found.proposal is None
    assert "carry a state" in found.why_none


def test_a_model_with_layers_of_its_own_code_is_measured() -> None:
    """Its embedding and its layers run inside the model's own forward."""
    model = tiny_model("deepseek_v32")
    found = found_in(model, {"x": [i % model.config.vocab_size for i in ids(40)]})
    assert all(0 < e.agreement < 1 for e in found.exits)
    assert "carry a state" in found.refused


def test_an_error_of_a_model_names_its_family() -> None:
    """The check at start, which refuses such a model, is off."""
    with pytest.raises(ModelError, match="'hy_v3' cannot be driven: running a text raised TypeE"):
        found_in(tiny_model("hy_v3"), {"x": [i % 32 for i in ids(40)]})


def test_the_model_is_given_back() -> None:
    """The kernels' packed weights and hooks are gone, and a second profile is the same."""
    model, tokens = make_model("qwen3_moe", torch.bfloat16), ids(64)
    with torch.inference_mode():
        before = model(torch.tensor([tokens])).logits
    first, second = (found_in(model, {"x": tokens}) for _ in range(2))
    with torch.inference_mode():
        assert torch.equal(model(torch.tensor([tokens])).logits, before)
    assert first.exits == second.exits


def test_a_model_with_one_layer_has_no_exit() -> None:
    with pytest.raises(ModelError, match="has 1 layer; an early exit needs 2"):
        found_in(make_model("mixtral", num_layers=1), {"x": ids(40)})


def test_logits_that_are_no_numbers_are_named() -> None:
    model = make_model("mixtral")
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="logits after layer 1 are not finite"):
        found_in(model, {"x": ids(40)})


# -- times


LAYER_NS, START_NS, HEAD_NS = (100, 200, 300), 40, 1000


@pytest.fixture
def _known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes in the ops of a program alone, as much as the test says."""
    now, run = [0], TorchRunner.run

    def timed(self: Any, program: Program, start: Any, stop: Any) -> Any:
        end = run(self, program, start, stop)
        for op in program.ops[start.op : end.op]:
            if op.kind is OpKind.EMBED:
                now[0] += START_NS
            elif op.kind is OpKind.ATTN:
                now[0] += LAYER_NS[op.layer] * (op.hi - op.lo)
            elif op.kind is OpKind.HEAD:
                now[0] += HEAD_NS + op.hi - op.lo
        return end

    monkeypatch.setattr(TorchRunner, "run", timed)
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter_ns=lambda: now[0]))


@pytest.mark.usefixtures("_known_times")
def test_each_part_of_a_step_gets_its_own_time() -> None:
    found = found_in(make_model("qwen3_moe", torch.bfloat16), {"x": ids(90)})
    assert found.context == 90 - 9
    assert set(found.times) == {1, 2, 3, 5, 9}
    for width, step in found.times.items():
        assert step.begin_ns == pytest.approx(START_NS)
        assert step.layers_ns == pytest.approx([ns * width for ns in LAYER_NS])
        assert step.head_ns == pytest.approx(HEAD_NS + width)


def test_parts_divide_the_time_of_the_step_that_ran_at_once() -> None:
    """Medians: whole 100; parts 10, 20, 30, 40 and 100 together, twice as long as the step."""
    rounds = [(50, [10, 20, 30, 40]), (900, [10, 20, 30, 40]), (40, [0, 90, 30, 40])]
    assert step_time(rounds) == StepTime(5.0, (10.0, 15.0), 20.0)


# -- the prediction


TIMES = {
    1: StepTime(1.0, (2.0, 3.0, 4.0), 5.0),
    2: StepTime(1.0, (3.0, 4.0, 5.0), 7.0),
    3: StepTime(1.0, (4.0, 6.0, 8.0), 10.0),
    5: StepTime(1.0, (6.0, 8.0, 9.0), 16.0),
    9: StepTime(1.0, (9.0, 11.0, 12.0), 30.0),
}


def test_the_speed_up_is_that_of_a_calculation_by_hand() -> None:
    """Two drafts of exit:1: three passes of 1 + 2, two heads of 5, and 1 + 6 + 8 + 10 = 44.

    They give 1 + 1/2 + 1/4 tokens. A step takes 15.
    """
    assert speedup(0.5, 1, 2, TIMES) == pytest.approx(1.75 * 15 / 44)
    assert speedup(1.0, 2, 1, TIMES) == pytest.approx(2 * 15 / (2 * 6 + 5 + 1 + 5 + 7))


def made(agreements: Sequence[float], times: dict[int, StepTime], refused: str = "") -> Profile:
    exits = tuple(
        EarlyExit("x", n, 10, a, 0.5, 0.2, 1.0) for n, a in enumerate(agreements, start=1)
    )
    return Profile(
        model="m", num_layers=len(agreements) + 1, num_tokens={"x": 10}, exits=exits, times=times,
        context=5, refused=refused,
    )  # fmt: skip


CHEAP = dict.fromkeys((1, 2, 3, 5, 9), StepTime(0.0, (1.0, 9.0, 90.0), 1.0))
"""Steps of a machine on which each step costs the same, whatever its width."""
DEAR = {w: StepTime(0.0, (10.0 * w,) * 3, 5.0 * w) for w in CHEAP}
"""Steps of a machine on which each token costs as much as a whole step of one token."""


def test_the_best_layer_and_number_of_drafts_are_proposed() -> None:
    """Eight drafts of exit:1 cost 9 + 8 + 100 = 117 and give 1 + 8 * 1; exit:2 costs more."""
    found = made([1.0, 1.0], CHEAP)
    assert found.proposal == Prediction(1, 8, pytest.approx(9 * 101 / 117))
    assert found.why_none == ""
    assert made([0.1, 0.8], CHEAP).proposal == Prediction(
        2, 4, pytest.approx(sum(0.8**k for k in range(5)) * 101 / (5 * 10 + 4 + 91))
    )


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (made([0.01, 0.01], CHEAP), "agree at 1% of the positions, which is too few"),
        (made([1.0, 1.0], DEAR), "even if every draft were right"),
        (made([1.0, 1.0], CHEAP, "its layers carry a state"), "drafts are refused with this"),
    ],
    ids=["seldom", "dear", "refused"],
)
def test_without_a_gain_the_reason_is_said(found: Profile, why: str) -> None:
    assert found.proposal is None
    assert why in found.why_none
    document = found.document()
    assert document["proposal"] is None
    assert document["why_none"] == found.why_none


def test_texts_together_count_by_their_tokens() -> None:
    exits = (EarlyExit("a", 1, 30, 0.5, 0.2, 0.1, 1.0), EarlyExit("b", 1, 10, 0.9, 0.6, 0.0, None))
    found = Profile(
        model="m", num_layers=2, num_tokens={"a": 30, "b": 10}, exits=exits, times=TIMES,
        context=5, refused="",
    )  # fmt: skip
    (both,) = found.of(ALL)
    assert both == (ALL, 1, 40, pytest.approx(0.6), pytest.approx(0.3), pytest.approx(0.075), 1.0)
    document = json.loads(json.dumps(found.document(), allow_nan=False))
    assert set(document["speedups"]) == {"a", "b", ALL}
    assert [p["draft_tokens"] for p in document["speedups"]["b"]] == list(DRAFTS)


# -- texts


def test_texts_have_names(tmp_path: Path) -> None:
    for name in ("prose.txt", "a=b.txt"):
        (tmp_path / name).write_text(f"text of {name}")
    found = read_texts([f"{tmp_path}/prose.txt", f"code={tmp_path}/a=b.txt"])
    assert found == {"prose": "text of prose.txt", "code": "text of a=b.txt"}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([], "give --text FILE"),
        (["{}/none.txt"], "cannot be read: No such file"),
        (["{}"], "cannot be read: Is a directory"),
        (["{}/empty.txt"], "is empty"),
        (["{}/blank.txt"], "is empty"),
        (["{}/bytes.bin"], "no UTF-8 at byte 1"),
        (["{}/large.txt"], f"at most {MOST_BYTES:,} are read"),
        (["=x"], "must be FILE or NAME=FILE"),
        (["x="], "must be FILE or NAME=FILE"),
        (["{}/ok.txt", "ok={}/ok.txt"], "the name 'ok' is given twice"),
        (["all={}/ok.txt"], "the name 'all' means all texts together"),
    ],
)
def test_a_wrong_text_is_named(tmp_path: Path, given: list[str], why: str) -> None:
    (tmp_path / "ok.txt").write_text("words")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "bytes.bin").write_bytes(b"a\xff")
    with (tmp_path / "large.txt").open("wb") as large:
        large.truncate(MOST_BYTES + 1)
    with pytest.raises(ConfigError, match=why):
        read_texts([text.format(tmp_path) for text in given])


@pytest.fixture(scope="module")
def tiny() -> Any:
    return load("tiny")


def test_a_short_text_is_refused_and_a_long_one_is_cut(tiny: Any) -> None:
    with pytest.raises(ConfigError, match="text 'x' has 1 token; a profile needs 32 or more"):
        tokens_of(tiny, {"x": "a"}, 100)
    _, found = tokens_of(tiny, {"x": "word and word " * 100}, 50)
    assert len(found["x"].ids) == 50
    assert found["x"].num_tokens > 200
    with pytest.raises(ConfigError, match="text 'x' has 3 tokens"):
        found_in(make_model("mixtral"), {"x": ids(3)})


def test_tokens_that_a_tokenizer_puts_in_front_are_known() -> None:
    tokenizer: PreTrainedTokenizerFast = with_two_in_front()
    loaded: Any = SimpleNamespace(tokenizer=tokenizer, name="m")
    text = "hello world " * 40
    prefix, found = tokens_of(loaded, {"x": text}, 1000)
    assert len(prefix) == 2
    assert prefix + found["x"].ids == tokenizer(text)["input_ids"]
    loaded.tokenizer = None
    with pytest.raises(ModelError, match="has no tokenizer"):
        tokens_of(loaded, {"x": text}, 1000)
