"""Position embeddings that depend on the length: a function of the request, not of the pass.

LongRoPE (Phi-3.5-MoE, whose `generate` drops its cache at the original length; Mixtral with the
same settings, whose `generate` keeps it) and dynamic NTK.
"""

import inspect
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qllm import QLLMEngine, SamplingParams
from qllm.errors import ModelError
from qllm.frontend.handle import Result
from qllm.ingress import Submission
from qllm.models.arguments import CACHES
from qllm.models.discover import discover
from qllm.plan import Plan
from qllm.policy import View
from qllm.runner.rope import switch_of
from qllm.runner.rope_tables import RopeTable, Switch
from qllm.types import Priority, Slo
from tests.support.families import VOCAB
from tests.support.hybrids import make_hybrid
from tests.support.inside import runner_of
from tests.support.rope import KINDS, ORIGINAL, model_of
from tests.support.storms import Chaos

GREEDY = SamplingParams(temperature=0, ignore_eos=True, logprobs=0)
NEW = 10
LENGTHS = {"beyond": 100, "crossing": ORIGINAL - 4, "below": 20}


def prompt_of(n: int) -> list[int]:
    rng = random.Random(n)
    return [rng.randrange(VOCAB) for _ in range(n)]


PROMPTS = {name: prompt_of(n) for name, n in LENGTHS.items()}


Answer = tuple[list[int], list[float]]


@pytest.fixture(scope="module")
def generated() -> dict[tuple[str, str], Answer]:
    """Tokens and log-probabilities of `generate`, each from a model of its own."""
    found = {}
    for kind in KINDS:
        for name, ids in PROMPTS.items():
            out = model_of(kind).generate(
                torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, eos_token_id=None,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
            tokens = out.sequences[0, len(ids) :].tolist()
            logprobs = torch.log_softmax(torch.cat(out.logits).float(), -1)
            found[kind, name] = tokens, [logprobs[i, t].item() for i, t in enumerate(tokens)]
    return found


def engine_of(model: Any, **settings: Any) -> QLLMEngine:
    defaults = {"conformance": False, "threads": 1, "max_kv_tokens": 1024, "kernels": "reference"}
    return QLLMEngine.from_model(model, **{**defaults, **settings})


class Anyhow(Chaos):
    """Any rows, layers and chunks; every fifth plan evicts a request."""

    num_plans = 0

    def plan(self, view: View) -> Plan:
        self.num_plans += 1
        held = [r.request_id for r in view.requests if r.is_admitted]
        if self.num_plans % 5 == 0 and held and self.num_plans < 60:
            return Plan(drop=(self.rng.choice(held),))
        return super().plan(view)


def agrees(result: Result, expected: Answer) -> bool:
    """The same tokens, at the same log-probabilities up to rounding."""
    assert result.logprobs is not None
    close = zip((x.chosen for x in result.logprobs), expected[1], strict=True)
    return list(result.token_ids) == expected[0] and all(abs(a - b) < 1e-3 for a, b in close)


WAYS: dict[str, dict[str, Any]] = {
    "whole": {"max_step_tokens": 512},
    "steps of 64": {"max_step_tokens": 64},
    "chunked": {"policy": "chunked", "max_step_tokens": 48},
    "layered": {"policy": "layered", "max_step_tokens": 64},
    "anyhow": {"policy": 11, "max_step_tokens": 96},
}


@pytest.mark.sampled
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_generate(
    kind: str, way: str, generated: dict[tuple[str, str], Answer]
) -> None:
    settings = dict(WAYS[way])
    if way == "anyhow":
        settings["policy"] = Anyhow(settings["policy"])
    with engine_of(model_of(kind), **settings) as engine:
        handles = engine.call(
            lambda: {
                n: engine.submit(ids, "BE", NEW, sampling=GREEDY) for n, ids in PROMPTS.items()
            }
        )
        results = {name: handle.result(300) for name, handle in handles.items()}
    wrong = [name for name, r in results.items() if not agrees(r, generated[kind, name])]
    assert not wrong
    if way == "anyhow":
        assert sum(r.metrics.evictions for r in results.values()) > 1
    else:
        evicted = {name: r.metrics.evictions for name, r in results.items()}
        assert evicted == {"beyond": 0, "crossing": int(kind == "phimoe-longrope"), "below": 0}


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_give_every_request_the_bits_of_its_own_run(kind: str) -> None:
    """In level L2 nothing else changes a bit: batch mates, chunks, evictions, layers."""
    model, level = model_of(kind, "bf16"), {"exactness": "batch-invariant", "kernels": "fast"}
    with engine_of(model, max_step_tokens=512, **level) as engine:
        alone = {
            name: engine.submit(ids, "LS", NEW, sampling=GREEDY).result(300)
            for name, ids in PROMPTS.items()
        }
    for policy in ("chunked", Anyhow(5)):
        with engine_of(model, policy=policy, max_step_tokens=48, **level) as engine:
            handles = engine.call(
                lambda engine=engine: {
                    name: engine.submit(ids, "BE", NEW, sampling=GREEDY)
                    for name, ids in PROMPTS.items()
                }
            )
            for name, handle in handles.items():
                result = handle.result(300)
                assert result.token_ids == alone[name].token_ids, name
                assert result.logprobs == alone[name].logprobs, name


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_in_chunks_are_close_to_one_pass_of_the_model(kind: str) -> None:
    model, ids = model_of(kind, "bf16"), PROMPTS["beyond"]
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0, -1].float()
    found: list[Tensor] = []
    with engine_of(model, kernels="fast", max_step_tokens=32) as engine:
        runner_of(engine).on_logits = lambda request, position, x: found.append(x.float())
        engine.submit(ids, "LS", 1, sampling=GREEDY).result(300)
    assert (found[-1] - expected).abs().max() < 0.05 * expected.abs().max()


def slow_down(engine: QLLMEngine) -> None:
    """Every program takes a tenth of a second more."""
    runner: Any = runner_of(engine)
    run = runner.run

    def slow(*args: Any) -> Any:
        time.sleep(0.1)
        return run(*args)

    runner.run = slow


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_and_a_replayed_request_keep_their_factors(
    kind: str, generated: dict[tuple[str, str], Answer], tmp_path: Path
) -> None:
    """Both across the original length; a replayed one has its prompt and its output so far."""
    ids, (tokens, _) = PROMPTS["crossing"], generated[kind, "crossing"]
    for seen in (2, 7):  # tokens before the move: below and beyond the original length
        with engine_of(model_of(kind)) as engine:
            slow_down(engine)  # or the answer ends before its checkpoint
            handle = engine.submit(ids, "LS", NEW, sampling=GREEDY)
            stream = iter(handle)
            for _ in range(seen):
                next(stream)
            engine.checkpoint(tmp_path / f"{seen}")
        with engine_of(model_of(kind)) as engine:
            (restored,) = engine.restore(tmp_path / f"{seen}")
            assert list(restored.result(300).token_ids) == tokens
            client = engine._client
            with client.admission_lock:
                number = client.new_number()
                again = engine._handle(number, None, tuple(ids), GREEDY)
                item = Submission(
                    request_id=number, name="again", priority=Priority.LS, sampling=GREEDY,
                    token_ids=(*ids, *tokens[:seen]), num_output_tokens=seen, max_tokens=NEW,
                    stop_ids=frozenset(), slo=Slo(), arrival_ns=0, deadline_ns=None,
                )  # fmt: skip
                client.submit(item, again)
            assert list(again.result(300).token_ids) == tokens[seen:]


# -- the table


def direct(rotary: Any, position: int, length: int) -> Tensor:
    """What a module that was never called before gives a position in a call of a length."""
    ids = torch.tensor([[position, length - 1]])
    cos, sin = rotary(torch.empty(0), ids)
    return torch.cat((cos[0, 0], sin[0, 0]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_position_has_the_factors_of_its_requests_length(kind: str) -> None:
    model = model_of(kind)
    rotary, switch = discover(model).rotary_emb, switch_of(model, discover(model).rotary_emb)
    assert switch == Switch(ORIGINAL, "dynamic" not in kind, kind == "phimoe-longrope")
    table = RopeTable(rotary, torch.device("cpu"), torch.float32, switch)
    cases = [
        (20, 0),
        (20, 63),
        (20, 64),
        (20, 70),
        (64, 63),
        (65, 0),
        (65, 64),
        (100, 3),
        (100, 150),
    ]
    for num_prompt, position in (*cases, *cases):  # the second time from what is kept
        length = max(num_prompt, position + 1)
        fresh = discover(model_of(kind)).rotary_emb
        cos, sin = table.of([(position, position + 1)], [num_prompt])
        assert torch.equal(torch.cat((cos[0, 0], sin[0, 0])), direct(fresh, position, length))
    # and packed with others, over the edge
    ranges, lengths = [(60, 70), (90, 100), (0, 8)], [20, 100, 8]
    packed = table.of(ranges, lengths)[0][0]
    each = [table.of([(p, p + 1)], [n])[0][0] for r, n in zip(ranges, lengths, strict=True)
            for p in range(*r)]  # fmt: skip
    assert torch.equal(packed, torch.cat(each))


def test_a_request_that_outgrew_its_factors_has_the_length_that_is_known() -> None:
    switch = Switch(at=64, is_binary=True, recomputes=True)
    assert [switch.length_of(60, n) for n in (60, 64, 65, 80)] == [60, 60, 65, 80]
    assert Switch(at=64, is_binary=True, recomputes=False).length_of(60, 80) == 60


def test_dynamic_scaling_may_go_beyond_the_position_embeddings() -> None:
    shape = discover(model_of("mixtral-dynamic")).shape
    assert shape.max_position == ORIGINAL * 8
    assert discover(model_of("mixtral-longrope")).shape.max_position == 512


def test_phi_scales_by_length_whatever_the_type() -> None:
    model = model_of("phimoe-longrope")
    rotary = discover(model).rotary_emb
    model.config.rope_parameters["rope_type"] = rotary.rope_type = "linear"
    assert switch_of(model, rotary) == Switch(ORIGINAL, is_binary=True, recomputes=True)
    del model.config.rope_parameters["long_mscale"]
    assert switch_of(model, rotary) is None


def prepares(change: Callable[[Any, int], Any], name: str) -> Callable[..., dict[str, Any]]:
    """A `prepare_inputs_for_generation` that changes the cache, which it takes by a name."""

    def prepare(self: Any, input_ids: Tensor, **given: Any) -> dict[str, Any]:
        cache = change(given.pop(name), input_ids.shape[1])
        return {"input_ids": input_ids, **given, "kept": cache}

    prepare.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(x, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for x in ("self", "input_ids", name)
        ]
    )
    return prepare


def at_the_edge(cache: Any, num_ids: int) -> Any:
    return None if num_ids > ORIGINAL >= cache.get_seq_length() else cache


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize(
    ("change", "recomputes"),
    [(at_the_edge, True), (lambda cache, n: cache, False), (lambda cache, n: None, None)],
    ids=["dropped at the edge", "never dropped", "always dropped"],
)
@pytest.mark.parametrize("kind", ["phimoe-longrope", "mixtral-longrope"])
def test_that_a_cache_is_dropped_is_seen_whatever_the_source_says(
    kind: str, change: Callable[[Any, int], Any], recomputes: bool | None, name: str
) -> None:
    model = model_of(kind)
    base = type(model)
    own = {"prepare_inputs_for_generation": prepares(change, name)}
    model.__class__ = type(base.__name__, (base,), own)
    rotary = discover(model).rotary_emb
    if recomputes is None:
        with pytest.raises(ModelError, match="cannot be known"):
            switch_of(model, rotary)
    else:
        assert switch_of(model, rotary) == Switch(ORIGINAL, is_binary=True, recomputes=recomputes)


def test_a_module_of_several_axes_is_given_the_positions_of_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until transformers 5.18 that of Qwen3.5 took nothing else."""
    found = []
    for is_strict in (False, True):
        model = make_hybrid("qwen3_5_moe_text")
        rotary = type(discover(model).rotary_emb)
        usual = rotary.forward

        def forward(self: Any, x: Tensor, position_ids: Tensor, usual: Any = usual) -> Any:
            assert position_ids.dim() == 3, "too many indices"
            return usual(self, x, position_ids)

        if is_strict:
            monkeypatch.setattr(rotary, "forward", forward)
        with engine_of(model) as engine:
            found.append(engine.submit(prompt_of(40), "LS", NEW, sampling=GREEDY).result(300))
    assert found[0].token_ids == found[1].token_ids
    assert found[0].logprobs == found[1].logprobs


def model_with(kind: str, original: int) -> Any:
    """A model whose factors change at another length."""
    family, changes = KINDS[kind]
    names = ("original_max_position_embeddings", "max_position_embeddings")
    rope = dict(changes["rope_parameters"])
    if names[0] in rope:
        rope[names[0]] = original
    made = {name: original for name in names if name in changes}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KINDS, kind, (family, {**changes, **made, "rope_parameters": rope}))
        return model_of(kind, "bf16")


@pytest.mark.parametrize("kind", KINDS)
def test_kept_pages_of_other_factors_are_not_found(kind: str) -> None:
    """A hit is that of a cold run on either side of the boundary and across it."""
    model, at, ids = model_with(kind, 160), 160, prompt_of(230)
    asked = [ids[:130], ids[:140], ids[:200], ids[: at - 4], ids[:230]]
    how: dict[str, Any] = {"kernels": "fast", "max_step_tokens": 48}
    with engine_of(model, prefix_cache=False, **how) as engine:
        cold = [engine.submit(x, "LS", NEW, sampling=GREEDY).result(300) for x in asked]
        turn = [*asked[3], *cold[3].token_ids, 5]
        cold.append(engine.submit(turn, "LS", NEW, sampling=GREEDY).result(300))
    with engine_of(model, prefix_cache=True, **how) as engine:
        warm = [engine.submit(x, "LS", NEW, sampling=GREEDY).result(300) for x in (*asked, turn)]
    assert [(r.token_ids, r.logprobs) for r in warm] == [(r.token_ids, r.logprobs) for r in cold]
    cached = [r.metrics.num_cached_tokens for r in warm]
    assert cached[:4] == [0, 128, 0, 128], "of the short factors alone"
    recomputes = kind == "phimoe-longrope"
    crossing = warm[3].metrics
    assert (crossing.evictions, crossing.evict_recomputed_tokens > 0) == (recomputes, recomputes)
    assert recomputes or not crossing.evict_recomputed_tokens
