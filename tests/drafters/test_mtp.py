"""Drafts of a checkpoint's further layer are those that transformers would make with it."""

import math
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import modeling_layers
from transformers.cache_utils import MtpCache

from qllm import QLLMEngine, SamplingParams
from qllm.drafters import mtp
from qllm.drafters.mtp import MOST_STATES, MtpLayer, UnreadStates
from qllm.models.loader import load
from qllm.models.mtp import _read_as
from tests.support.draft_models import (
    MTP,
    WITH_MTP,
    drafting,
    engine_of,
    model_in,
    save_with_mtp,
    saved,
)
from tests.support.drafters import counts
from tests.support.inside import loop_of
from tests.support.storms import prompt_of

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
NEAR = 0.06
"""Largest difference of two logits in bf16 whose order may change."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers and states change the next token as much as its embedding does."""
    found = tmp_path_factory.mktemp("models")
    save_with_mtp(found / f"{WITH_MTP}-0", change=0.5, aside=1.0)
    return found


@dataclass
class Proposal:
    """A proposal of the layer."""

    token_ids: list[int]
    """The request's tokens before the drafts."""
    first: int
    """Index of the first of them that the layer has computed."""
    drafts: list[int]


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> list[Proposal]:
    """All proposals of the layer, as they are made.

    After each, the KV that the layer computed with its own states is NaN.
    """
    found: list[Proposal] = []
    propose = MtpLayer.propose

    def noted(layer: Any, one: Any, token_ids: Any, most: int) -> list[int]:
        drafts = propose(layer, one, token_ids, most)
        if drafts:
            found.append(Proposal(list(token_ids[:]), one.first, drafts))
            kv = layer._runner.requests[one.request_id].kv
            num = one.num_read
            for slab in kv.slabs:
                for t in slab or ():
                    with torch.inference_mode():
                        t.narrow(2, num, kv.written - num).fill_(math.nan)
        return drafts

    monkeypatch.setattr(MtpLayer, "propose", noted)
    return found


class Reference:
    """The further layer as transformers computes it, over whole sequences."""

    def __init__(self, folder: Path) -> None:
        path = saved(folder, WITH_MTP)
        self.model = load(path).model
        with _read_as(self.model, path):
            self.layer = modeling_layers.MtpModel.from_pretrained(self.model)
        self._known: list[tuple[list[int], Tensor]] = []

    def share(self, made: list[Proposal], *, every: int = 3, shift: int = 0) -> float:
        """The share of drafts that are right, of a part of the proposals.

        A few are wrong: where two experts are equally good for a token, another rounding takes the
        other one.
        """
        some = made[::every]
        assert len(some) > 3
        misses = [miss for one in reversed(some) for miss in self.misses(one, shift=shift)]
        return sum(miss < NEAR for miss in misses) / len(misses)

    def _states(self, ids: list[int]) -> Tensor:
        """The model's last hidden states. Those of a longer text that begins so are the same."""
        for known, states in self._known:
            if known[: len(ids)] == ids:
                return states[:, : len(ids)]
        states = self.model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1]
        self._known.append((ids, states))
        return states

    @torch.inference_mode()
    def misses(self, made: Proposal, *, shift: int = 0) -> list[float]:
        """By how much the logit of each draft is below the largest; 0 if it is the largest.

        Args:
            made: What the layer proposed.
            shift: Number of tokens by which the states are those of other tokens.
        """
        states = self._states(made.token_ids)[:, made.first - 1 : -1].roll(shift, 1)
        rest, found = made.token_ids[made.first :], list[float]()
        for draft in made.drafts:
            hidden = self._hidden(rest, states)
            logits = self.model.lm_head(hidden[:, -1]).float()[0]
            found.append(float(logits.max() - logits[draft]))
            states = torch.cat([states, hidden[:, -1:]], 1)
            rest = [*rest, draft]
        return found

    def _hidden(self, ids: list[int], states: Tensor) -> Tensor:
        places = torch.arange(1, len(ids) + 1)[None]
        cache = MtpCache(config=self.model.config.get_mtp_config())
        hidden: Tensor = self.layer.forward_layer(
            0, states, places, cache, input_ids=torch.tensor([ids])
        )
        return hidden


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def test_drafts_are_those_of_transformers_with_the_same_states(
    folder: Path, proposals: list[Proposal], reference: Reference
) -> None:
    prompts = [prompt_of(num, seed) for seed, num in enumerate((2, 9, 40, 130))]
    with drafting(folder, WITH_MTP, MTP) as engine:
        handles = [engine.submit(p, "LS", 16, sampling=GREEDY) for p in prompts]
        results = [handle.result(300) for handle in handles]
    assert min(counts(results)) > 0
    assert len(proposals) > 20
    assert {made.first for made in proposals} == {1}
    assert reference.share(proposals) > 0.97
    assert reference.share(proposals, shift=1) < 0.5


def test_a_long_prompt_is_drafted_from_its_last_states(
    folder: Path, proposals: list[Proposal], reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mtp, "MOST_STATES", 32)
    with drafting(folder, WITH_MTP, MTP, max_step_tokens=24) as engine:
        engine.submit(prompt_of(100, 1), "LS", 12, sampling=GREEDY).result(300)
    assert {made.first for made in proposals} == {85}
    assert reference.share(proposals, every=1) > 0.97


def test_after_a_gap_the_layer_begins_behind_it(
    folder: Path, proposals: list[Proposal], reference: Reference
) -> None:
    """A second request finds the KV of its prompt in the cache, so the model computes no states."""
    prompt = prompt_of(100, 1)
    with drafting(folder, WITH_MTP, MTP, prefix_cache_tokens=1024) as engine:
        first = engine.submit(prompt, "LS", 12, sampling=GREEDY).result(300)
        num = len(proposals)
        second = engine.submit(prompt, "LS", 12, sampling=GREEDY).result(300)
    assert second.token_ids == first.token_ids
    assert {made.first for made in proposals[:num]} == {1}
    assert len({made.first for made in proposals[num:]}) == 1
    assert proposals[num].first > 60
    assert reference.share(proposals, every=1) > 0.97


def test_requests_without_states_for_longest_lose_them_first(
    folder: Path, proposals: list[Proposal], reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They begin anew, and no answer changes."""
    prompts = [prompt_of(40, seed) for seed in range(6)]
    with engine_of(folder, WITH_MTP) as engine:
        expected = [engine.submit(p, "LS", 16, sampling=GREEDY).result(300) for p in prompts]
    monkeypatch.setattr(mtp, "MOST_STATES_OF_ALL", 60)
    with drafting(folder, WITH_MTP, MTP) as engine:
        layer: Any = model_in(engine)
        held: list[int] = []
        take = layer._take

        def taken(*states: Any) -> None:
            take(*states)
            held.append(layer._num_unread)
            assert layer._num_unread == sum(map(len, layer._unread.values()))

        loop_of(engine).runner.on_hidden = taken
        handles = [engine.submit(p, "LS", 16, sampling=GREEDY) for p in prompts]
        results = [handle.result(300) for handle in handles]
        assert layer._num_unread == 0
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    assert max(held) <= 60
    assert {made.first for made in proposals} > {1}
    assert reference.share(proposals) > 0.97


def test_a_layer_that_is_too_slow_for_its_states_begins_with_fewer(
    folder: Path, proposals: list[Proposal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no time for a pass of more than a few tokens, and new states come meanwhile."""
    monkeypatch.setattr(mtp, "MOST_STATES", 64)
    with drafting(folder, WITH_MTP, MTP) as engine:
        model_in(engine)._turn_ns = 0
        result = engine.submit(prompt_of(100, 1), "LS", 80, sampling=GREEDY).result(300)
    assert proposals, "of 64 states it reads 32, and at the next try 16"
    assert len(proposals[0].token_ids) - proposals[0].first == 16
    assert sum(counts([result])) > 0


def draft_in_turns(
    engine: QLLMEngine, then: Callable[[int, int], object] = lambda *_: None
) -> None:
    """Draft nothing at tokens 0 to 39, draft at tokens 40 to 79, and so on.

    Args:
        engine: Engine that drafts.
        then: Receiver of request and first token of each step.
    """
    drafts, runner = loop_of(engine).drafts, loop_of(engine).runner
    take, most = runner.on_hidden, drafts._most

    def taken(request_id: int, lo: int, x_TD: Tensor) -> None:
        take(request_id, lo, x_TD)
        drafts._most = most if lo // 40 % 2 else 0
        then(request_id, lo)

    runner.on_hidden = taken


def test_the_layer_begins_with_as_many_states_after_each_gap(
    folder: Path, proposals: list[Proposal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins with fewer only if it could not read those of the last try."""
    monkeypatch.setattr(mtp, "MOST_STATES", 32)
    with drafting(folder, WITH_MTP, MTP) as engine:
        draft_in_turns(engine)
        engine.submit(prompt_of(9, 1), "LS", 210, sampling=GREEDY).result(300)
    begun = {made.first: len(made.token_ids) - made.first for made in reversed(proposals)}
    assert [*begun.values()] == [16, 16, 16]


def test_a_layer_that_begins_anew_frees_the_memory_of_its_kv(
    folder: Path, proposals: list[Proposal], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mtp, "MOST_STATES", 32)
    slabs: list[weakref.ref[Tensor]] = []
    found: set[tuple[int, bool]] = set()
    with drafting(folder, WITH_MTP, MTP) as engine:
        layer: Any = model_in(engine)

        def look(request_id: int, _: int) -> None:
            num_begins = len({made.first for made in proposals})
            if num_begins and not slabs:
                slabs.append(weakref.ref(layer._runner.requests[request_id].kv.slabs[0][0]))
            if num_begins:
                found.add((num_begins, slabs[0]() is not None))

        draft_in_turns(engine, look)
        engine.submit(prompt_of(9, 1), "LS", 140, sampling=GREEDY).result(300)
    assert found == {(1, True), (2, False)}


def test_a_receiver_that_fails_ends_no_request(folder: Path) -> None:
    with engine_of(folder, WITH_MTP) as engine:
        expected = engine.submit(prompt_of(40, 1), "LS", 16, sampling=GREEDY).result(300)
    with drafting(folder, WITH_MTP, MTP) as engine:
        take, failures = loop_of(engine).runner.on_hidden, [5, 9]

        def taken(*states: Any) -> None:
            failures[:] = [n - 1 for n in failures]
            if 0 in failures:
                raise MemoryError
            take(*states)

        loop_of(engine).runner.on_hidden = taken
        found = engine.submit(prompt_of(40, 1), "LS", 16, sampling=GREEDY).result(300)
    assert max(failures) < 0
    assert found.token_ids == expected.token_ids


def test_states_that_are_lost_at_any_time_are_not_replaced_by_drafted_ones(
    folder: Path, proposals: list[Proposal], reference: Reference
) -> None:
    rng = random.Random(1)
    with drafting(folder, WITH_MTP, MTP) as engine:
        layer: Any = model_in(engine)
        take = layer._take

        def taken(request_id: int, *states: Any) -> None:
            take(request_id, *states)
            if rng.random() < 0.3:
                layer._drop_states(request_id)

        loop_of(engine).runner.on_hidden = taken
        engine.submit(prompt_of(40, 1), "LS", 60, sampling=GREEDY).result(300)
        assert engine.stats()["drafts"]["faults"] == {}
    assert len({made.first for made in proposals}) > 3
    assert len({made.first for made in proposals}) < len(proposals)
    assert reference.share(proposals) > 0.97


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_equal_logits_draft_equal_tokens(temperature: float, tmp_path: Path) -> None:
    """Neither model nor layer changes the embedding, so both have the same logits."""
    save_with_mtp(tmp_path / f"{WITH_MTP}-0", change=0, aside=0)
    sampling = SamplingParams(temperature=temperature, seed=3, ignore_eos=True)
    with drafting(tmp_path, WITH_MTP, MTP) as engine:
        result = engine.submit(prompt_of(9, 1), "LS", 60, sampling=sampling).result(300)
    accepted, rejected = counts([result])
    assert accepted > 40
    assert rejected < 12, "logits are equal but for the rounding of two norms"
    assert len(set(result.token_ids)) > 10 or not temperature


@pytest.mark.parametrize(("form", "said"), [("int8", "int8"), ("int4", "u4")])
def test_the_experts_of_the_layer_are_rounded_too(form: str, said: str, folder: Path) -> None:
    path = str(saved(folder, WITH_MTP))
    how: dict[str, Any] = {"conformance": False, "threads": 1, "run_in": "thread"}
    with QLLMEngine.from_pretrained(path, draft="mtp", expert_weights=form, **how) as engine:
        runner: Any = model_in(engine)._runner
        assert said in runner.names["experts"]
        assert engine.submit(prompt_of(9, 1), "LS", 8, sampling=GREEDY).result(300).token_ids


# -- states


class Plain:
    """The states of a request, kept by token."""

    def __init__(self) -> None:
        self.states: dict[int, float] = {}

    def add(self, lo: int, values: list[float]) -> None:
        if not (self.states and min(self.states) <= lo <= max(self.states) + 1):
            self.states = {}
        self.states = {t: value for t, value in self.states.items() if t < lo}
        self.states |= dict(enumerate(values, lo))
        self.states = dict(sorted(self.states.items())[-MOST_STATES:])

    def drop_before(self, begin: int) -> None:
        self.states = {t: value for t, value in self.states.items() if t >= begin}


@pytest.mark.parametrize("seed", range(20))
def test_states_are_kept_as_a_plain_list_keeps_them(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mtp, "MOST_STATES", 7)
    monkeypatch.setitem(globals(), "MOST_STATES", 7)
    rng, states, plain = random.Random(seed), UnreadStates(), Plain()
    for _ in range(200):
        if plain.states and rng.random() < 0.3:
            begin = rng.randint(min(plain.states), max(plain.states))
            states.drop_before(begin)
            plain.drop_before(begin)
        else:
            near = max(plain.states, default=0) + 1
            lo = rng.choice((near, near, near, max(0, near - rng.randrange(9)), near + 2))
            values = [rng.random() for _ in range(rng.randrange(1, 10))]
            memory = torch.tensor(values)[:, None]
            states.add(lo, memory)
            memory.fill_(-1)
            plain.add(lo, values)
        found = sorted(plain.states)
        assert (states.begin, states.end) == (found[0], found[-1] + 1)
        lo, hi = sorted(rng.choices(range(states.begin, states.end + 1), k=2))
        expected = torch.tensor([plain.states[t] for t in range(lo, hi)])
        assert states.of(lo, hi)[:, 0].equal(expected)


def test_states_take_the_memory_of_those_that_are_kept() -> None:
    """A long step has more states than are kept."""
    states = UnreadStates()

    def held() -> int:
        return sum(part.untyped_storage().nbytes() // 4 for part in states._parts)

    states.add(0, torch.zeros(2 * MOST_STATES - 1, 1))
    assert held() == len(states) == MOST_STATES
    states.drop_before(states.end - MOST_STATES // 4)
    assert held() == len(states) == MOST_STATES // 4
