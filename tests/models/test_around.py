"""Layers that are called as their model's own forward calls them: what they keep is a state."""

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from qllm import QLLMEngine, SamplingParams
from qllm.errors import ConfigError, ModelError
from qllm.models.discover import discover
from qllm.models.layer_cache import JOINED, LayerCache
from qllm.plan import Row
from qllm.runner.cpu import cpu_runner
from qllm.runner.runner import TorchRunner
from qllm.scheduler.program import START, Index, Program
from qllm.types import Driver, Sampled
from tests.long import families as all_families
from tests.support import tiny_configs
from tests.support.replay_schedule import Always
from tests.support.storms import cuts_of
from tests.support.swap_models import finished, one_pass

KINDS = [
    "deepseek_v4",
    "deepseek_v32",
    "glm_moe_dsa",
    "inkling_text",
    "qwen4_exp_text",
    "zaya",
]
"""Streams and compressed keys; an indexer; its choices handed on; convolutions around attention;
recurrences beside an indexer with the positions of all tokens; values of routers handed on."""
GREEDY = SamplingParams(temperature=0, logprobs=0, ignore_eos=True)
LONG = 150
"""Tokens: windows and compression of the tiny models go round several times."""
BOUNDARIES = pytest.mark.parametrize(
    "every",
    [4, pytest.param(1, marks=pytest.mark.slow)],  # a part of the same boundaries
)


@functools.cache
def model_of(family: str) -> Any:
    """Make a tiny model once."""
    return tiny_configs.tiny_model(family)


def prompt_of(num: int, seed: int = 0) -> list[int]:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(3, tiny_configs.VOCAB, (num,), generator=made).tolist()


def runner_of(family: str) -> TorchRunner:
    """A runner with as many boundaries as there can be."""
    runner = cpu_runner(copy.deepcopy(model_of(family)), kernels="reference")
    assert {driver.value for driver in runner.drivers} == {Driver.AROUND.value}
    runner.backend.cuts = cuts_of(runner)
    object.__setattr__(runner.backend.costs, "range_ns", 0.5)
    return runner


@pytest.fixture(params=KINDS)
def family(request: pytest.FixtureRequest) -> str:
    torch.set_num_threads(1)
    return str(request.param)


STEPS = ((0, 23), (23, 40), (40, 41), (41, 42))
"""Passes over a prompt of 40 tokens and two of its answer."""


def bits(runner: TorchRunner, request_id: int) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in runner.requests[request_id].export()[0].items()}


def begin(runner: TorchRunner, request_id: int, lo: int, hi: int, start: int = 0) -> Program:
    row = Row(request_id, lo, hi, start, runner.shape.num_layers)
    return one_pass(runner, [row], 100 * request_id + lo)


def add(runner: TorchRunner, request_id: int, num: int = 40, most: int = 60) -> None:
    runner.add(request_id, prompt_of(num), GREEDY, num, most)


def boundaries(runner: TorchRunner, program: Program) -> Iterator[Index]:
    """Run a program, and stop wherever it may stop."""
    at = START
    while at != program.end:
        at = runner.run(program, at, Always())
        if at != program.end:
            yield at


def plain(runner: TorchRunner, request_id: int) -> tuple[list[list[Sampled]], dict[str, Tensor]]:
    add(runner, request_id)
    samples = [finished(runner, begin(runner, request_id, *step)) for step in STEPS]
    return samples, bits(runner, request_id)


def values(samples: list[Sampled]) -> list[Any]:
    return [(s.token_id, s.logprobs) for s in samples]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, t in found.items() if not torch.equal(t, expected[name])] == []


def test_it_moves_to_another_runner_at_every_boundary(family: str) -> None:
    """As in a checkpoint: frame and request, out of one runner and into a new one."""
    here, there = runner_of(family), runner_of(family)
    expected, last = plain(here, 1)
    add(here, 2)
    number = 0
    for step, samples in zip(STEPS, expected, strict=True):
        program, at = begin(here, 2, *step), START
        while at != program.end:
            at = here.run(program, at, Always())
            tensors = here.export_frame(program, at)
            state, meta = here.export_request(2)
            here.drop(program)
            here.remove(2)
            here, there = there, here
            here.import_request(2, GREEDY, state, meta)
            here.import_frame(program, at, tensors)
            number += 1
        assert values(here.finish(program)) == values(samples)
    assert number > 4 * here.shape.num_layers * len(STEPS) / 2
    assert_same(bits(here, 2), last)


@pytest.mark.sampled(3)
@BOUNDARIES
def test_a_pass_that_is_dropped_at_any_boundary_leaves_what_was_committed(
    family: str, every: int
) -> None:
    runner = runner_of(family)
    expected, last = plain(runner, 1)
    add(runner, 2)
    for step, samples in zip(STEPS, expected, strict=True):
        program = begin(runner, 2, *step)
        for num in range(step[0] % 5, sum(1 for _ in boundaries(runner, program)), 7 * every):
            runner.drop(program)
            program = begin(runner, 2, *step)
            for i, _ in enumerate(boundaries(runner, program)):
                if i == num:
                    break
        runner.drop(program)
        assert values(finished(runner, begin(runner, 2, *step))) == values(samples)
    assert_same(bits(runner, 2), last)


@pytest.mark.sampled(3)
@BOUNDARIES
def test_a_row_leaves_its_frame_at_any_boundary_and_goes_on(family: str, every: int) -> None:
    runner = runner_of(family)
    expected, last = plain(runner, 1)
    number, inside = 2, 0
    for num in range(1, 10_000, 5 * every):
        add(runner, number)
        finished(runner, begin(runner, number, *STEPS[0]))
        program = begin(runner, number, *STEPS[1])
        found = next((at for i, at in enumerate(boundaries(runner, program)) if i == num), None)
        if found is None:
            break
        start = program.layer_start(found)
        inside += start != found
        runner.leave(program, number, start)
        finished(runner, program, found)
        layer = program.frontier_layer(0, start)
        rest = [finished(runner, begin(runner, number, *STEPS[1], layer))]
        rest += [finished(runner, begin(runner, number, *step)) for step in STEPS[2:]]
        assert [values(s) for s in rest] == [values(s) for s in expected[1:]]
        assert_same(bits(runner, number), last)
        runner.remove(number)
        number += 1
    assert inside > 2 / every


def test_rows_of_one_step_are_alone(family: str) -> None:
    """A decode beside a prefill and a row that dies gives what it gives by itself."""
    runner = runner_of(family)
    expected, last = plain(runner, 1)
    for request_id in (2, 3, 4):
        add(runner, request_id)
    top = runner.shape.num_layers
    finished(runner, begin(runner, 2, *STEPS[0]))
    rows = [Row(3, 0, 9, 0, top), Row(2, *STEPS[1], 0, top), Row(4, 0, 23, 0, top)]
    program = one_pass(runner, rows, 7)
    at = next(at for i, at in enumerate(boundaries(runner, program)) if i == 5)
    runner.kill(program, 3)
    found = finished(runner, program, at)
    assert [s.token_id for s in found] == [s.token_id for s in expected[1]]
    for step, samples in zip(STEPS[2:], expected[2:], strict=True):
        tokens = [s.token_id for s in finished(runner, begin(runner, 2, *step))]
        assert tokens == [s.token_id for s in samples]
    found_bits = bits(runner, 2)
    assert found_bits.keys() == last.keys()
    for name, t in found_bits.items():
        torch.testing.assert_close(t, last[name], rtol=1e-4, atol=1e-4)


@functools.cache
def long_answers_of(family: str) -> list[all_families.Stream]:
    """Return what transformers gives for the prompts of the next test."""
    return all_families.generated(copy.deepcopy(model_of(family)))


@pytest.mark.sampled
@pytest.mark.parametrize("arm", ["whole", "chunked"])
def test_a_long_prompt_gives_the_tokens_of_generate(
    family: str, arm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, compressed keys and indexers see more than they may keep or choose."""
    monkeypatch.setattr(all_families, "prompts", lambda: [prompt_of(LONG, 1), prompt_of(77, 2)])
    expected = long_answers_of(family)
    found, drivers = all_families.served(
        copy.deepcopy(model_of(family)),
        **all_families.ARMS[arm],
        kernels="reference",
        conformance=False,
    )
    assert drivers == [Driver.AROUND]
    assert all_families.difference(found, expected) <= all_families.CLOSE
    spread = [max(stream.logprobs) - min(stream.logprobs) for stream in expected]
    assert min(spread) > 10 * all_families.CLOSE, "it would not show a wrong step"


@pytest.mark.sampled(2)  # the test of every boundary above moves a request of each family
def test_a_checkpoint_goes_on_in_a_new_engine(family: str, tmp_path: Path) -> None:
    how: dict[str, Any] = {"threads": 1, "conformance": False, "max_kv_tokens": 512}
    prompt = prompt_of(60, 3)
    with QLLMEngine.from_model(copy.deepcopy(model_of(family)), **how) as engine:
        expected = engine.submit(prompt, "BE", 30, sampling=GREEDY).result(300)
        handle = engine.submit(prompt, "BE", 30, sampling=GREEDY)
        next(iter(handle))
        handle.update(paused=True)
        engine.checkpoint(tmp_path / "saved")
        num_tokens = len(handle.token_ids)
    with QLLMEngine.from_model(copy.deepcopy(model_of(family)), **how) as engine:
        (handle,) = engine.restore(tmp_path / "saved")
        handle.update(paused=False)
        found = handle.result(300)
    assert 0 < num_tokens < 30
    assert found.token_ids == expected.token_ids


# -- what is seen of a model


def test_what_the_forward_shows() -> None:
    v4, dsa = (discover(model_of(x)).around for x in ("deepseek_v4", "glm_moe_dsa"))
    assert v4 is not None
    assert dsa is not None
    assert (tuple(v4.shape), v4.goes_on) == ((4, 64), True)
    assert all(v4.may_stop)
    assert not any(v4.handed)
    assert [(h.name, h.layer, h.place) for h in dsa.handed[2]] == [("prev_topk_indices", 1, 1)]
    ids = torch.tensor(prompt_of(9))
    entry = v4.enter(ids, 30)
    assert entry.x_TW.shape == (9, 256)
    assert torch.equal(entry.given[0]["input_ids"], ids[None])
    assert entry.given[0]["position_ids"].tolist() == [list(range(30, 39))]
    assert entry.given[0]["attention_mask"].shape[-2:] == (9, 9 + 15)


@pytest.mark.parametrize("kind", sorted(JOINED))
def test_a_pass_on_a_copy_leaves_the_committed_layer_of_the_cache(kind: str) -> None:
    """Those that share their tensors with a copy never write into one."""
    made = {"DynamicLayer": DynamicLayer()}
    for state in ("deepseek_v4", "deepseek_v32"):
        for layer in discover(model_of(state)).around.fresh:  # type: ignore[union-attr]
            made.setdefault(type(layer).__name__, layer)
    layer = copy.deepcopy(made[kind])
    held = LayerCache({0: layer})

    def grow(cache: Any, num: int, seed: int) -> None:
        rand = torch.Generator().manual_seed(seed)
        new = torch.randn((1, 1, num, 8), generator=rand)
        cache.update(new, new)
        if hasattr(cache, "update_indexer"):
            cache.update_indexer(new[0])
        if hasattr(cache, "store_compression_weights"):
            chunk, _, _ = cache.store_compression_weights("compressor", new[0], new[0])
            cache.update_compressor_states("compressor", chunk[:, :: cache.compress_rate])

    grow(layer, 20, 1)
    before = {name: t.clone() for name, t in held.tensors().items()}
    other = copy.deepcopy(held)
    for seed in range(3):
        grow(other.layers[0], 7, seed)
    assert_same(held.tensors(), before)
    assert other.tensors().keys() >= before.keys()
    assert not torch.equal(other.tensors()["cache.0.keys"], before["cache.0.keys"])


def test_numbers_of_the_cache_are_kept_as_they_are() -> None:
    numbers = {"share": 0.1, "most": 2**40 + 1, "is_full": True}
    held = LayerCache({0: SimpleNamespace(**numbers)})
    empty = LayerCache({0: SimpleNamespace(share=0.0, most=0, is_full=False)})
    assert vars(empty.load(held.tensors()).layers[0]) == numbers


def test_what_is_not_known_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(model_of("deepseek_v32"))
    base = model.model
    real = type(base).forward

    def skips(self: Any, *args: Any, **given: Any) -> Any:
        self.layers, kept = self.layers[:2], self.layers
        try:
            return real(self, *args, **given)
        finally:
            self.layers = kept

    monkeypatch.setattr(type(base), "forward", skips)
    with pytest.raises(ModelError, match=r"; and DeepseekV32Model does not call each of its layer"):
        discover(model)
    monkeypatch.undo()

    layer = type(base.layers[0])
    keep = layer.forward

    def writes(self: Any, hidden_states: Tensor, position_embeddings: Any, **given: Any) -> Any:
        out = keep(self, hidden_states, position_embeddings=tuple(position_embeddings), **given)
        position_embeddings.append(out)
        return out

    rotary = type(base.rotary_emb).forward
    monkeypatch.setattr(layer, "forward", writes)
    monkeypatch.setattr(
        type(base.rotary_emb), "forward", lambda self, *a, **k: list(rotary(self, *a, **k))
    )
    with pytest.raises(ModelError, match=r"hands its layers a position_embeddings that they write"):
        discover(model)
    monkeypatch.undo()

    def keeps(self: Any, hidden_states: Tensor, **given: Any) -> Any:
        given["past_key_values"].layers[1].indexer_keys_of = [hidden_states]
        return keep(self, hidden_states, **given)

    monkeypatch.setattr(layer, "forward", keeps)
    with pytest.raises(
        ModelError, match=r"DynamicIndexedLayer keeps a list in its indexer_keys_of"
    ):
        discover(model)
    monkeypatch.undo()
    assert discover(model).around is not None


def test_hooks_are_called_but_for_the_head(caplog: pytest.LogCaptureFixture) -> None:
    model = copy.deepcopy(model_of("deepseek_v32"))
    layer, called = model.model.layers[1], dict[str, list[Any]]()
    for name, module in (("attention", layer.self_attn), ("experts", layer.mlp.experts)):
        module.register_forward_hook(
            lambda _, args, out, name=name: called.setdefault(name, []).append(
                [x.clone() for x in (*args, out) if isinstance(x, torch.Tensor)]
            )
        )
    model.lm_head.register_forward_hook(lambda *_: None)
    with torch.inference_mode():
        model(torch.tensor([prompt_of(9)]))
    direct = {name: list(seen) for name, seen in called.items()}
    with QLLMEngine.from_model(model, threads=1, conformance=False) as engine:
        assert "hooks on lm_head are never called" in caplog.text
        called.clear()
        engine.submit(prompt_of(9), "LS", 1, sampling=GREEDY).result(300)
    torch.testing.assert_close(called["experts"], direct["experts"])
    assert "attention" in called


def test_it_has_no_prefix_cache_and_says_why() -> None:
    model = model_of("deepseek_v32")
    with pytest.raises(ConfigError, match=r"what its layers keep .* grows with every token"):
        QLLMEngine.from_model(
            model, threads=1, conformance=False, prefix_cache="approximate", max_kv_tokens=512
        )
    with QLLMEngine.from_model(model, threads=1, conformance=False, max_kv_tokens=512) as engine:
        assert "grows with every token" in str(engine.stats()["prefix_cache"])


def test_more_experts_per_token_than_there_are() -> None:
    model = copy.deepcopy(model_of("deepseek_v32"))
    routers = [m for m in model.modules() if hasattr(m, "top_k")]
    assert routers
    for router in routers:
        router.top_k = 1000
    with pytest.raises(ModelError, match=r"num_experts_per_tok=1000 must be in \[1, "):
        discover(model)
