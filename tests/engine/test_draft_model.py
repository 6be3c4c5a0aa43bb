"""Drafts of a second model change no token, delay no arrival, and end with their requests."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from qllm import QLLMEngine, SamplingParams, cores
from qllm.drafters.model import DraftModel
from qllm.engine import needs
from qllm.errors import ConfigError
from qllm.frontend.handle import Result
from qllm.models.loader import load
from qllm.plan import Plan
from qllm.policy import View, next_row
from qllm.record import trace
from qllm.types import Cap, FinishReason, Priority, StructuredOutputs
from tests.support.draft_models import (
    FAMILIES,
    MTP,
    OTHER,
    SAME,
    WITH_MTP,
    drafting,
    engine_of,
    model_in,
    poison_cut,
    saved,
)
from tests.support.draft_storms import DraftStorm, some_specs
from tests.support.drafters import counts, poison_rejected
from tests.support.families import VOCAB, make_model
from tests.support.inside import loop_of, runner_of
from tests.support.serving import tiny_engine
from tests.support.storms import Chaos, fine, prompt_of, same
from tests.support.tiny_configs import tiny_model
from tests.support.waiting import wait_for

NEW = 20
KINDS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0),
    "seeded": SamplingParams(temperature=0.9, seed=3),
    "cut": SamplingParams(temperature=1.2, top_k=40, top_p=0.9, min_p=0.01, seed=4),
    "repetition": SamplingParams(temperature=0.8, seed=5, repetition_penalty=1.3),
    "bias": SamplingParams(temperature=0, logit_bias={7: 2.0, 9: -100.0}),
    "logprobs": SamplingParams(temperature=0.7, seed=6, logprobs=5),
    "prompt logprobs": SamplingParams(temperature=0, prompt_logprobs=2),
    "first of three": SamplingParams(temperature=1, seed=10),
    "second of three": SamplingParams(temperature=1, seed=11),
    "third of three": SamplingParams(temperature=1, seed=12),
    "penalties": SamplingParams(
        temperature=0.8, seed=5, presence_penalty=0.5, frequency_penalty=0.5
    ),
    "min tokens": SamplingParams(
        temperature=1, seed=8, min_tokens=9, stop_token_ids=tuple(range(0, VOCAB, 5))
    ),
    "allowed": SamplingParams(temperature=1, seed=9, allowed_token_ids=tuple(range(40))),
}
KINDS = {
    kind: sampling if "min" in kind else replace(sampling, ignore_eos=True)
    for kind, sampling in KINDS.items()
}
UNLIKE = ("penalties", "min tokens", "allowed")
"""Kinds of requests whose rules the draft model does not know."""


@pytest.fixture(autouse=True)
def _wrong_kv_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_rejected(monkeypatch)
    poison_cut(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def answers(engine: QLLMEngine, kinds: dict[str, SamplingParams]) -> dict[str, Result]:
    """All kinds at once."""
    handles = engine.call(
        lambda: {
            kind: engine.submit(prompt_of(17, len(kind)), "LS", NEW, sampling=sampling)
            for kind, sampling in kinds.items()
        }
    )
    return {kind: handle.result(300) for kind, handle in handles.items()}


def told(result: Result) -> tuple[Any, ...]:
    return result.token_ids, result.logprobs, result.prompt_logprobs, result.finish_reason


def is_empty(engine: QLLMEngine) -> bool:
    """True if the draft model has no request, no KV and no frame."""
    model: Any = model_in(engine)
    runner = model._runner
    states = getattr(model, "_unread", None)
    return not (model._drafted or model.num_kv_tokens or runner.requests or runner.frames or states)


# -- answers


@pytest.mark.parametrize(
    ("family", "seed"),
    [*product(FAMILIES, (SAME, OTHER)), (WITH_MTP, MTP)],
)
def test_answers_are_those_without_drafts(family: str, seed: int, folder: Path) -> None:
    """A draft model with the weights of the model is always right, also where tokens are drawn."""
    with engine_of(folder, family) as engine:
        expected = answers(engine, KINDS)
        stop = expected["seeded"].token_ids[NEW // 2]
        stops = {"seeded": replace(KINDS["seeded"], stop_token_ids=(stop,))}
        stopped = answers(engine, stops)
    with drafting(folder, family, seed) as engine:
        found = answers(engine, KINDS)
        assert {k: told(r) for k, r in answers(engine, stops).items()} == {
            k: told(r) for k, r in stopped.items()
        }
        assert is_empty(engine)
        said = engine.stats()["drafts"]
    assert {kind: told(r) for kind, r in found.items()} == {
        kind: told(r) for kind, r in expected.items()
    }
    assert stopped["seeded"].finish_reason is FinishReason.STOP
    assert said["faults"] == {}
    if seed == MTP:
        assert min(counts(found.values())) > 50
        accepted, rejected = counts([found["greedy"], found["logprobs"]])
        assert accepted > rejected / 20, "a random drafter is right once in 256 tokens"
        return
    for kind in KINDS.keys() - set(UNLIKE):
        accepted, rejected = counts([found[kind]])
        assert (accepted > 10) is (seed == SAME), (kind, accepted)
        assert (rejected > 10) is (seed == OTHER), (kind, rejected)
        assert rejected == 0 or seed == OTHER, kind
    if seed == SAME:
        accepted, rejected = counts([found[kind] for kind in UNLIKE])
        assert min(accepted, rejected) > 0


PERSON = StructuredOutputs(
    json={
        "type": "object",
        "properties": {"identifier": {"type": "integer"}, "is_available": {"type": "boolean"}},
        "required": ["identifier", "is_available"],
    }
)
ASKED: dict[str, tuple[str, SamplingParams]] = {
    "json": ("A person:", SamplingParams(temperature=0, structured_outputs=PERSON)),
    "stop string": ("def f(a):", SamplingParams(seed=4, temperature=0.7, stop=("e", "return"))),
    "budget": ("What?<think>", SamplingParams(seed=3, thinking_token_budget=7)),
    "bad words": ("def f(a):", SamplingParams(seed=5, bad_words=("a", "return"), ignore_eos=True)),
}


def test_grammars_stop_strings_and_several_answers_are_those_without_drafts() -> None:
    def asked(engine: QLLMEngine) -> list[Result]:
        handles = [
            engine.submit(prompt, "LS", 40, sampling=sampling)
            for prompt, sampling in ASKED.values()
        ]
        three = SamplingParams(temperature=0.8, seed=1, n=3, max_tokens=24, ignore_eos=True)
        return [handle.result(300) for handle in handles] + list(
            engine.generate(["def area(width):"], three)
        )

    with tiny_engine(conformance=False, run_in="thread") as engine:
        expected = asked(engine)
    with tiny_engine(conformance=False, run_in="thread", draft="model:tiny") as engine:
        loop_of(engine).drafts._weighs = False
        found = asked(engine)
        assert is_empty(engine)
        assert engine.stats()["drafts"]["faults"] == {}
    assert [(r.text, *told(r)) for r in found] == [(r.text, *told(r)) for r in expected]
    assert len({r.token_ids for r in found[-3:]}) == 3
    accepted, rejected = counts(found)
    assert accepted > 100
    assert rejected > 0


def test_an_engine_in_a_process_of_its_own_drafts_with_a_model() -> None:
    sampling = SamplingParams(temperature=0, ignore_eos=True)
    with tiny_engine(conformance=False) as engine:
        expected = engine.submit("def area(", "LS", 40, sampling=sampling).result(120)
    with tiny_engine(conformance=False, draft="model:tiny") as engine:
        found = engine.submit("def area(", "LS", 40, sampling=sampling).result(120)
        model = engine.stats()["drafts"]["model"]
    assert found.token_ids == expected.token_ids
    assert counts([found])[0] > 0, "the first rows of an engine always draft"
    assert model["draft_ms"] > 0
    assert model["requests"] == model["kv_tokens"] == 0
    assert model["weight_bytes"] > 1_000_000
    assert model["token_bytes"] > 0


# -- arrivals


class _Arrivals:
    """Segments of the draft model, and arrivals that come inside of them."""

    def __init__(self, engine: QLLMEngine, every: int, make: Any, most: int = 12) -> None:
        self.engine, self.every, self.make, self.most = engine, every, make, most
        self.num_segments = self.num_made = 0
        runner: Any = model_in(engine)._runner
        runner.on_segment = self

    def __call__(self, *_: object) -> None:
        self.num_segments += 1
        if self.num_segments % self.every == 0 and self.num_made < self.most:
            self.num_made += 1
            self.make()


@pytest.mark.parametrize("num_prompt", [17, 300])
def test_an_ls_arrival_stops_the_draft_model_and_runs_next(num_prompt: int, folder: Path) -> None:
    """It comes while the draft model computes a prompt, and while it drafts."""
    with drafting(folder, record=True) as engine:
        fine(engine)
        events = engine.trace.events
        handles: list[Any] = []
        arrived: list[int] = []

        def arrive() -> None:
            arrived.append(len(events))
            handles.append(engine.submit(prompt_of(5, len(handles)), "LS", 4, temperature=0))
            at.append(arrivals.num_segments)

        at: list[int] = []
        arrivals = _Arrivals(engine, 37, arrive)
        first = engine.submit(prompt_of(num_prompt, 1), "BE", 40, temperature=0, ignore_eos=True)
        first.result(300)
        model = model_in(engine)
        for handle in handles:
            handle.result(300)
        assert model.num_stops > 3
        assert len(handles) > 3
    for number, begin in zip(handles, arrived, strict=True):
        planned = (e for e in events[begin:] if isinstance(e, trace.Planned))
        rows = [row.request_id for row in next(planned).rows]
        assert number.number in rows or first.number not in rows  # LS requests may wait for LS


def test_no_draft_is_made_while_an_ls_request_waits_for_its_first_token(folder: Path) -> None:
    """It arrives while a BE step runs to its end. Then the BE request has a token to go on from."""
    with drafting(folder, record=True, max_step_tokens=16, preempt_at="step") as engine:
        handles: list[Any] = []

        def arrive(*_: object) -> None:
            if not handles and len(be.token_ids) >= 20:
                handles.append(engine.submit(prompt_of(120, 2), "LS", 6, sampling=sampling))

        sampling = SamplingParams(temperature=0, ignore_eos=True)
        be = engine.submit(prompt_of(9, 1), "BE", 100, sampling=sampling)
        runner_of(engine).on_segment = arrive
        be.result(300)
        (ls,) = handles
        ls.result(300)
        events = engine.trace.events
    arrived = next(
        n
        for n, e in enumerate(events)
        if isinstance(e, trace.Arrived) and e.request_id == ls.number
    )
    token = next(
        n for n, e in enumerate(events) if isinstance(e, trace.Token) and e.request_id == ls.number
    )
    drafted = [n for n, e in enumerate(events) if isinstance(e, trace.Drafted)]
    assert token - arrived > 10
    assert not [n for n in drafted if arrived < n < token]
    assert [n for n in drafted if n < arrived]
    assert [n for n in drafted if n > token]


def test_the_time_of_its_drafts_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its drafts are always right, and would take an hour each. So none is made."""
    monkeypatch.setattr(DraftModel, "_measured", lambda *_: None)
    with drafting(folder) as engine:
        loop_of(engine).drafts._weighs = True
        model_in(engine).draft_ns = 3600 * 10**9
        handle = engine.submit(prompt_of(20, 1), "LS", 300, temperature=0, ignore_eos=True)
        assert counts([handle.result(300)]) == (0, 0)


# -- storms

SPECS = some_specs(12)


@pytest.mark.parametrize("swap", [0, 4096])
@pytest.mark.parametrize("policy", ["chaos", "qllm2"])
@pytest.mark.parametrize("seed", [SAME, OTHER, MTP])
def test_a_storm_leaves_every_stream_equal_to_its_solo_run(
    seed: int, policy: str, swap: int, folder: Path
) -> None:
    family = FAMILIES[(seed + bool(swap) + (policy == "chaos")) % len(FAMILIES)]
    if seed == MTP:
        family = WITH_MTP
    with engine_of(folder, family) as engine:
        expected = [engine.submit(priority="BE", **spec).result(300) for spec in SPECS]
    made = Chaos(seed) if policy == "chaos" else policy
    limits = {"max_kv_tokens": 176, "max_step_tokens": 96, "swap_kv_tokens": swap}
    with drafting(folder, family, seed, policy=made, record=True, **limits) as engine:
        fine(engine)
        storm = DraftStorm(engine, 3 + seed, drawn=SPECS)
        arrivals = _Arrivals(engine, 101, lambda: storm.submit(storm.rng.choice(("LS", "BE"))))
        results = storm.run()
        while len(results) < len(storm.handles):
            results = [handle.result(300) for handle, _ in storm.handles]
        engine.call(loop_of(engine).scheduler.check)
        assert is_empty(engine)
        said = engine.stats()["drafts"]
    of_spec = {id(spec): result for spec, result in zip(SPECS, expected, strict=True)}
    numbers = [h.number for h, _ in storm.handles]
    pairs = zip(numbers, results, strict=True)
    assert [n for n, r in pairs if not same(r, of_spec[id(storm.specs[n])])] == []
    accepted, rejected = counts(results)
    assert (accepted > 10) is (seed != OTHER)
    assert rejected > 10 or seed == SAME
    assert said["model"]["stops"] > 0
    assert arrivals.num_made > 0
    assert said["faults"] == {}


class Holds:
    """A policy that runs one request until it has some tokens, and then holds it."""

    needs = Cap.LAYER_RANGE

    def __init__(self, after: int) -> None:
        self.after, self.is_holding = after, False

    def plan(self, view: View) -> Plan:
        one = view.requests[0]
        self.is_holding |= one.num_tokens - one.num_prompt_tokens >= self.after
        if self.is_holding:
            return Plan(wait_until_ns=view.now_ns + 1_000_000)
        return Plan(rows=(next_row(one, view),))


@pytest.mark.parametrize(("family", "seed"), [("mixtral", SAME), (WITH_MTP, MTP)])
def test_a_checkpoint_leaves_out_the_draft_model_which_catches_up(
    family: str, seed: int, folder: Path, tmp_path: Path
) -> None:
    spec: dict[str, Any] = {"prompt": prompt_of(40, 1), "max_tokens": 30, "temperature": 0}
    with engine_of(folder, family) as engine:
        expected = engine.submit(**spec).result(300)
    holds = Holds(9)
    with drafting(folder, family, seed, policy=holds) as engine:
        engine.submit(**spec)
        while not holds.is_holding:
            engine.call(lambda: None)
        assert not is_empty(engine)
        assert engine.checkpoint(tmp_path / "saved") == 1
    with drafting(folder, family, seed) as engine:
        (handle,) = engine.restore(tmp_path / "saved")
        found = handle.result(300)
        assert is_empty(engine)
    assert found.token_ids == expected.token_ids
    assert counts([found])[0] > 5


@pytest.mark.parametrize(("family", "seed"), [("mixtral", SAME), (WITH_MTP, MTP)])
def test_a_pause_keeps_the_draft_model_and_a_cancel_frees_it(
    family: str, seed: int, folder: Path
) -> None:
    spec: dict[str, Any] = {"max_tokens": 300, "temperature": 0, "ignore_eos": True}
    with engine_of(folder, family) as engine:
        expected = engine.submit(prompt_of(20, 1), "BE", **spec).result(300)
    with drafting(folder, family, seed) as engine:
        one, other = (engine.submit(prompt_of(20, n), "BE", **spec) for n in (1, 2))
        wait_for(lambda: min(len(one.token_ids), len(other.token_ids)) >= 8)
        one.pause()
        other.cancel()
        other.result(300)
        assert not is_empty(engine)
        assert engine.stats()["drafts"]["model"]["requests"] == 1
        one.resume()
        found = one.result(300)
        assert is_empty(engine)
    assert found.token_ids == expected.token_ids


@pytest.mark.parametrize(("family", "seed"), [("mixtral", SAME), (WITH_MTP, MTP)])
def test_a_prompt_that_came_in_pieces_and_changed_is_drafted_as_the_whole(
    family: str, seed: int, folder: Path
) -> None:
    whole, spec = prompt_of(60, 1), {"max_tokens": 30, "temperature": 0, "ignore_eos": True}
    with engine_of(folder, family) as engine:
        expected = engine.submit(whole, "LS", **spec).result(300)
    with drafting(folder, family, seed) as engine:
        prompt = engine.open("LS", [*whole[:30], 1, 2, 3])
        wait_for(lambda: engine.stats()["open_prompts"]["now"] == 1)
        prompt.replace(30, whole[30:45])
        prompt.append(whole[45:])
        found = prompt.send(**spec).result(300)
        assert is_empty(engine)
    assert found.token_ids == expected.token_ids
    assert counts([found])[0] > 10
    assert counts([found])[1] == 0 or seed == MTP


# -- what is refused


def refused(model: Any, draft: str, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        QLLMEngine.from_model(
            model, conformance=False, **{"max_kv_tokens": 1024, "draft": draft, **settings}
        )
    text = str(caught.value)
    assert text.startswith(f"draft={draft!r}")
    return text


@pytest.fixture(scope="module")
def mixtral(folder: Path) -> Any:
    return load(saved(folder, "mixtral")).model


def test_a_path_without_a_model_is_refused(mixtral: Any, tmp_path: Path) -> None:
    assert "is no alias, no folder here and no hub id" in refused(mixtral, "model:not here")
    assert "has no config.json and no GGUF file" in refused(mixtral, f"model:{tmp_path}")
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    assert "no model.safetensors" in refused(mixtral, f"model:{tmp_path}")
    assert "names no model" in refused(mixtral, "model:")


def test_another_vocabulary_is_refused(mixtral: Any, tmp_path: Path) -> None:
    tiny_model("mixtral").to(torch.bfloat16).save_pretrained(tmp_path)
    said = refused(mixtral, f"model:{tmp_path}")
    assert f"the model has {VOCAB} token ids, and the draft model 128; a draft model needs" in said


def test_another_tokenizer_is_refused(mixtral: Any, folder: Path, tmp_path: Path) -> None:
    assert "the model has no tokenizer, and the other one has" in refused(mixtral, "model:tiny")
    tiny = load("tiny")
    tokenizer: Any = load("tiny").tokenizer
    tokenizer.add_tokens(["zebra", "quagga"])
    tokenizer.save_pretrained(tmp_path)
    tiny.model.save_pretrained(tmp_path)
    number = tokenizer.convert_tokens_to_ids("zebra")
    said = (
        f"2 token ids have another text in its tokenizer, the first is {number}: None in the "
        "model, 'zebra' in the draft model; a draft model needs the same tokenizer"
    )
    with pytest.raises(ConfigError, match=said):
        tiny_engine(run_in="thread", conformance=False, draft=f"model:{tmp_path}")


def test_a_model_with_states_or_without_our_kernels_is_refused(
    mixtral: Any, folder: Path, tmp_path: Path
) -> None:
    one = tiny_model("qwen3_next").to(torch.bfloat16)
    one.save_pretrained(tmp_path / "states")
    narrow = tiny_model("llama").to(torch.bfloat16)
    narrow.save_pretrained(tmp_path / "narrow")
    said = refused(narrow, f"model:{tmp_path / 'states'}")
    assert "its layers carry a state, which cannot go back" in said
    said = refused(narrow, f"model:{tmp_path / 'narrow'}")
    assert "not every layer of it runs on our kernels, so an arrival would wait for it" in said


def test_a_model_that_cannot_verify_exactly_gets_no_draft_model(mixtral: Any, folder: Path) -> None:
    said = refused(mixtral, f"model:{saved(folder, 'mixtral')}", kernels="reference")
    assert "and a draft could change tokens; use draft='none'" in said


def test_more_memory_than_there_is_is_refused(
    mixtral: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = f"model:{saved(folder, 'mixtral')}"
    with monkeypatch.context() as patch:
        patch.setattr(cores, "free_bytes", lambda: 1000)
        assert "and 1000 bytes of memory are free; name a smaller model" in refused(mixtral, draft)
    monkeypatch.setattr(needs, "memory_bytes", lambda: 1 << 20)
    said = refused(mixtral, draft, max_kv_tokens=2048, prefix_cache=False)
    assert "the draft model holds KV of up to max_kv_tokens=2048 tokens, 768 bytes each" in said
    assert "give max_kv_tokens at most 1365" in said


def test_an_engine_that_drafts_nothing_loads_no_draft_model(mixtral: Any) -> None:
    with QLLMEngine.from_model(
        mixtral, conformance=False, max_kv_tokens=1024, draft="model:not here", draft_tokens=0
    ) as engine:
        assert loop_of(engine).drafts is None
        assert engine.stats()["drafts"] == {}


@pytest.mark.parametrize(("segment_ms", "turn_ms"), [(2.0, 2), (9.0, 5), (float("inf"), 5)])
def test_it_catches_up_for_no_longer_than_a_segment(
    segment_ms: float, turn_ms: int, folder: Path
) -> None:
    draft = f"model:{saved(folder, 'mixtral')}"
    with engine_of(folder, draft=draft, max_segment_ms=segment_ms) as engine:
        model = model_in(engine)
        assert model._turn_ns == turn_ms * 1_000_000
        assert model._most_kv_tokens == engine.config.pool_tokens


def test_its_kv_counts_as_memory_of_the_engine(folder: Path) -> None:
    with engine_of(folder, max_kv_tokens=2048) as engine:
        alone = engine.stats()["memory"]
    with drafting(folder, max_kv_tokens=2048) as engine:
        memory = engine.stats()["memory"]
        each = engine.stats()["drafts"]["model"]["token_bytes"]
    assert memory["kv_bytes"] - alone["kv_bytes"] == 2048 * each > 0


def test_the_class_of_a_request_is_the_class_of_its_drafts(folder: Path) -> None:
    """A request that becomes LS is not stopped by BE arrivals any more."""
    with drafting(folder) as engine:
        model: Any = model_in(engine)
        below: list[int] = []
        run = model._runner.run

        def seen(program: Any, at: Any, stop: Any) -> Any:
            below.append(program.stop_below)
            return run(program, at, stop)

        model._runner.run = seen
        handle = engine.submit(prompt_of(20, 1), "BE", 300, temperature=0, ignore_eos=True)
        wait_for(lambda: len(handle.token_ids) >= 10)
        handle.update(priority="LS")
        handle.result(300)
    assert below[0] == Priority.BE + 1
    assert below[-1] == Priority.LS + 1


# -- layers of the checkpoint that predict further tokens


# -- the layer of a checkpoint that predicts further tokens


@pytest.mark.parametrize(("family", "num"), [(WITH_MTP, 0), ("mixtral", None)])
def test_a_config_without_further_layers_is_refused(
    family: str, num: int | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(saved(folder, family)).model
    if num is not None:
        model.config.num_nextn_predict_layers = num
    why = "its config counts no layer that predicts further tokens (num_nextn_predict_layers)"
    advice = "use draft='auto', or a draft model with draft='model:PATH'"
    start = "draft='mtp' cannot be used with this model"
    assert refused(model, "mtp") == f"{start}: {why}; {advice}"
    monkeypatch.delattr(transformers.modeling_layers, "MtpModel")
    release = f"transformers {transformers.__version__} has no class that computes such layers"
    assert refused(model, "mtp") == f"{start}: {why}, and {release}; {advice}"


def test_a_transformers_without_the_class_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(transformers.modeling_layers, "MtpModel")
    text = refused(load(saved(folder, WITH_MTP)).model, "mtp")
    release = f"transformers {transformers.__version__} has no class that computes such layers"
    assert text.startswith(f"draft='mtp' cannot be used with this model: {release}; use")


def test_a_checkpoint_without_the_layer_is_refused(tmp_path: Path) -> None:
    make_model("deepseek_v3", torch.bfloat16).save_pretrained(tmp_path)
    text = refused(load(tmp_path).model, "mtp")
    assert f"{tmp_path} has no weights whose names contain 'layers.3.'; use draft='auto'" in text
    text = refused(make_model("deepseek_v3", torch.bfloat16), "mtp")
    assert "it was made in memory, and only a checkpoint has such layers" in text


@pytest.mark.parametrize("lost", ["enorm.weight", "mlp.experts.3.up_proj.weight"])
def test_a_layer_with_a_missing_weight_is_refused(lost: str, folder: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"model.layers.3.{lost}"]

    text = refused(load(changed(folder, tmp_path, change)).model, "mtp")
    assert f"transformers {transformers.__version__} cannot read the layer in {tmp_path}" in text


def test_a_quantised_layer_is_refused(folder: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.3.eh_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    text = refused(load(changed(folder, tmp_path, change)).model, "mtp")
    assert "model.layers.3.eh_proj.weight is stored as F8_E4M3, and such layers are read" in text


def test_a_layer_that_does_not_fit_into_memory_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(saved(folder, WITH_MTP)).model
    monkeypatch.setattr(cores, "free_bytes", lambda: 1000)
    text = refused(model, "mtp")
    assert "its weights take " in text
    assert "bytes, and 1000 bytes of memory are free; use draft='auto'" in text


def test_a_refused_layer_leaves_the_model_as_it_was(folder: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.3.enorm.weight"]

    model = load(changed(folder, tmp_path, change)).model
    before = (model._keys_to_ignore_on_load_unexpected, model.config.to_dict())
    refused(model, "mtp")
    assert (model._keys_to_ignore_on_load_unexpected, model.config.to_dict()) == before


def changed(folder: Path, found: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of a model with a further layer, whose tensors are changed after it was loaded."""
    shutil.copytree(saved(folder, WITH_MTP), found, dirs_exist_ok=True)
    path = found / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
    return found
