"""Kept states of hybrids: a hit changes no token and no bit, and none is kept beyond its budget."""

import copy
import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from qllm import QLLMEngine
from qllm.engine.kv.states import KeptStates
from qllm.errors import ConfigError
from qllm.runner.states import tensors_of
from qllm.scheduler.prefix import Name
from qllm.types import Evict
from tests.support import tiny_configs
from tests.support.hybrid_prefix import GREEDY, engine_of, prompt_of, run
from tests.support.hybrids import NATIVE, make_hybrid
from tests.support.inside import loop_of

PAGE = 64
States = dict[Name, dict[str, torch.Tensor]]


def states_of(engine: QLLMEngine) -> KeptStates:
    found = loop_of(engine).prefix.states
    assert isinstance(found, KeptStates)
    return found


def flat(states: Mapping[int, Any]) -> dict[str, torch.Tensor]:
    return {f"{layer}.{name}": t.clone() for layer, state in states.items()
            for name, t in tensors_of(state).items()}  # fmt: skip


def kept(engine: QLLMEngine) -> tuple[dict[Name, Any], States]:
    """Pages and states of an engine on a thread, by name; all its books are checked."""
    loop = loop_of(engine)

    def look() -> tuple[dict[Name, Any], States]:
        loop.prefix.check()
        loop.scheduler.check()
        store = loop.prefix.states.store
        pages = {name: loop.prefix.store.read(name) for name in loop.prefix.store.names()}
        return pages, {name: flat(store.read(name)) for name in store.names()}

    found: tuple[dict[Name, Any], States] = engine.call(look)
    return found


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.fixture(scope="module", params=NATIVE)
def model(request: pytest.FixtureRequest) -> Any:
    return make_hybrid(request.param)


@pytest.fixture(scope="module")
def qwen() -> Any:
    return make_hybrid("qwen3_next")


def test_our_kernels_run_every_layer_and_the_cache_is_on(model: Any) -> None:
    with engine_of(model, conformance=True) as engine:
        assert engine.kernels["attention"].endswith("(2 of 4 layers)")
        assert engine.kernels["state"].endswith("(2 of 4 layers)")
        assert engine.kernels["router"].endswith("(4 of 4 layers)")
        assert set(engine.drivers) == {"fast"}
        assert "off" not in engine.stats()["prefix_cache"]


def test_a_hit_has_the_tokens_pages_and_states_of_a_cold_run(model: Any) -> None:
    """Random overlapping prompts: whole, in chunks beside mates, then once more."""
    rng, shared = random.Random(5), prompt_of(300)
    prompts = [shared[: rng.choice((64, 100, 128, 150, 200, 280))]
               + prompt_of(rng.randrange(1, 90), i) for i in range(4)]  # fmt: skip
    cold, cold_pages, cold_states = [], {}, {}
    with engine_of(model) as engine:
        for ids in prompts:
            engine.reset_prefix_cache()
            assert kept(engine) == ({}, {})
            cold.append(run(engine, ids, 70))
            pages, states = kept(engine)
            cold_pages.update(pages)
            cold_states.update(states)
    assert not any(r.metrics.num_cached_tokens for r in cold)
    for how in ({}, {"max_step_tokens": 24}, {"policy": "chunked", "max_step_tokens": 100}):
        with engine_of(model, **how) as engine:
            handles = [engine.submit(ids, "BE", 70, sampling=GREEDY) for ids in prompts]
            warm = [h.result(300) for h in handles] + [run(engine, ids, 70) for ids in prompts]
            turn = run(engine, [*prompts[0], *cold[0].token_ids, 5], 4)
            pages, states = kept(engine)
        for found, want in zip(warm, cold * 2, strict=True):
            assert found.token_ids == want.token_ids
        for found in warm[len(prompts) :]:
            assert found.metrics.num_cached_tokens == (len(found.prompt_token_ids) - 1) // 64 * 64
        assert turn.metrics.num_cached_tokens == (len(prompts[0]) + 69) // 64 * 64
        both = cold_states.keys() & states.keys()
        assert len(both) > len(prompts)
        assert all(same(states[name], cold_states[name]) for name in both)
        for name, page in cold_pages.items():
            assert all(map(torch.equal, page, pages[name]))


def test_chats_go_on_from_the_end_of_a_turn(model: Any) -> None:
    rng, turns = random.Random(1), []
    other = copy.deepcopy(model)
    with engine_of(model) as engine, engine_of(other, prefix_cache=False) as plain:
        ids = prompt_of(90)
        for number in range(5):
            found = run(engine, ids, 75)
            assert found.token_ids == run(plain, ids, 75).token_ids
            if number:
                assert found.metrics.num_cached_tokens == turns[-1] // PAGE * PAGE
            turns.append(len(ids) + 74)
            ids = [*ids, *found.token_ids, *prompt_of(rng.randrange(1, 40), number)]
        assert engine.stats()["prefix_cache"]["kept_states"] < 2 * 5 + 1


def test_a_prompt_leaves_its_states_where_it_leaves_what_is_kept(qwen: Any) -> None:
    """The second request with a system prompt leaves them after it, the third finds them."""
    system = prompt_of(210)
    with engine_of(qwen) as engine:
        found = [run(engine, system + prompt_of(100, i)).metrics.num_cached_tokens
                 for i in range(1, 4)]  # fmt: skip
        assert found == [0, 0, 192]
    with engine_of(qwen, prefix_cache=False) as engine:
        want = run(engine, system + prompt_of(100, 3)).token_ids
    with engine_of(qwen) as engine:
        for i in (1, 2):
            run(engine, system + prompt_of(100, i))
        assert run(engine, system + prompt_of(100, 3)).token_ids == want


def test_preempted_evicted_and_swapped_requests_give_the_same_tokens(model: Any) -> None:
    prompts = [prompt_of(200, i) for i in range(3)] + [prompt_of(150, 0) + prompt_of(60, 9)]
    with engine_of(model, prefix_cache=False) as engine:
        want = [run(engine, ids, 80).token_ids for ids in prompts]
        each = engine.stats()["states"]["tokens_per_request"]
    for swap in (0, 8 * (each + 320)):
        room = 2 * (each + 320)
        with engine_of(model, max_kv_tokens=room, swap_kv_tokens=swap) as engine:
            handles = [engine.submit(ids, "BE", 80, sampling=GREEDY) for ids in prompts[:2]]
            for handle in handles:
                next(iter(handle))
            handles += [engine.submit(ids, "LS", 80, sampling=GREEDY) for ids in prompts[2:]]
            found = [h.result(240) for h in handles]
            kept(engine)
            swapped = engine.stats()["swap"]["out_tokens"]
        assert [r.token_ids for r in found] == want
        if swap:
            assert swapped > 0
        else:
            assert sum(r.metrics.evictions for r in found) > 0
            for r in found:  # they went on from their own states
                assert r.metrics.evict_recomputed_tokens <= r.metrics.evictions * 80


def test_an_eviction_goes_back_to_the_states_of_its_own_answer(qwen: Any) -> None:
    with engine_of(qwen) as engine:
        handle = engine.submit(prompt_of(100), "BE", 600, sampling=GREEDY)
        stream = iter(handle)
        for _ in range(40):  # position 128 was passed
            next(stream)
        handle.update(paused=True)
        loop = loop_of(engine)

        def evict() -> int:
            (number,) = loop.live
            before = loop.live[number].request.num_computed_tokens
            for effect in loop.scheduler.evict(number, number, Evict.RECOMPUTE):
                loop.effects.apply(effect)
            return int(before)

        computed = engine.call(evict)
        handle.update(paused=False)
        found = handle.result(300)
        assert found.metrics.evictions == 1
        assert found.metrics.evict_recomputed_tokens <= computed % PAGE + PAGE
    with engine_of(qwen, prefix_cache=False) as engine:
        assert run(engine, prompt_of(100), 600).token_ids == found.token_ids


def test_no_more_states_are_kept_than_the_budget_holds(qwen: Any) -> None:
    with engine_of(qwen) as engine:
        each = states_of(engine).state_bytes
    gib = 3.5 * each / (1 << 30)
    with engine_of(qwen, prefix_states_gib=gib, prefix_cache_tokens=64 * 400) as engine:
        for i in range(8):
            run(engine, prompt_of(100 + 30 * i, i), 70)
            stats = engine.stats()["prefix_cache"]
            assert stats["kept_states"] <= stats["max_states"] == 3
            assert stats["kept_state_bytes"] == stats["kept_states"] * each
            assert len(kept(engine)[1]) == stats["kept_states"]
        assert stats["evicted_states"] > 4
        last = [*prompt_of(310, 7)]
        assert run(engine, last, 2).metrics.num_cached_tokens == 256
        first = prompt_of(100, 0)
        assert run(engine, first, 2).metrics.num_cached_tokens == 0, "its pages are kept, no states"
        handles = [engine.submit(prompt_of(300, i), "BE", 70, sampling=GREEDY) for i in range(9)]
        for handle in handles[::2]:
            handle.cancel()
        for handle in handles[1::2]:
            handle.result(300)
        kept(engine)


def test_a_request_never_holds_more_states_than_it_is_charged(qwen: Any) -> None:
    with engine_of(qwen, max_step_tokens=50, policy="chunked") as engine:
        loop, each = loop_of(engine), states_of(engine).state_bytes
        runner, seen = loop.runner, []

        def look(*_: object) -> None:
            states = loop.prefix.states.store
            lent = {t.data_ptr() for name in states.names()
                    for t in flat_views(states.read(name))}  # fmt: skip
            for request in runner.requests.values():
                coming = len(request.kv.states.marks)
                own = [t for t in request.kv.states.tensors() if t.data_ptr() not in lent]
                seen.append(sum(t.nbytes for t in own) / each)
                assert seen[-1] <= 2 + coming

        engine.call(lambda: setattr(runner, "on_segment", look))
        for i in range(3):
            run(engine, prompt_of(200) + prompt_of(100, i), 70)
        engine.call(lambda: setattr(runner, "on_segment", None))
        assert max(seen) > 1


def flat_views(states: Mapping[int, Any]) -> list[torch.Tensor]:
    return [t for state in states.values() for t in tensors_of(state).values()]


def test_lent_states_are_never_written(qwen: Any) -> None:
    with engine_of(qwen) as engine:
        first = run(engine, prompt_of(200), 70)
        _, before = kept(engine)
        handles = [engine.submit([*prompt_of(200), *first.token_ids, i], "BE", 90, sampling=GREEDY)
                   for i in range(3)]  # fmt: skip
        handles += [engine.submit(prompt_of(200) + prompt_of(9, i), "LS", 90, sampling=GREEDY)
                    for i in range(3)]  # fmt: skip
        for handle in handles:
            assert handle.result(300).metrics.num_cached_tokens >= 192
        _, after = kept(engine)
        both = before.keys() & after.keys()
        assert len(both) >= 2
        assert all(same(before[name], after[name]) for name in both)


def test_salts_share_no_states_and_deletion_forgets_them(qwen: Any) -> None:
    with engine_of(qwen) as engine:
        for salt in ("", "a", "b"):
            assert run(engine, prompt_of(150), cache_salt=salt).metrics.num_cached_tokens == 0
            assert run(engine, prompt_of(150), cache_salt=salt).metrics.num_cached_tokens == 128
        _, states = kept(engine)
        engine.delete_kv(cache_salt="a")
        assert len(kept(engine)[1]) == len(states) - 1
        assert run(engine, prompt_of(150), cache_salt="a").metrics.num_cached_tokens == 0
        assert run(engine, prompt_of(150), cache_salt="b").metrics.num_cached_tokens == 128
        engine.reset_prefix_cache()
        assert kept(engine) == ({}, {})


@pytest.mark.parametrize("family", ["jamba", "granitemoehybrid", "lfm2_moe"])
def test_modules_of_transformers_keep_states_only_where_that_is_asked_for(family: str) -> None:
    model = tiny_configs.tiny_model(family)
    for module in model.modules():
        if hasattr(module, "chunk_size"):
            module.chunk_size = 16  # a chunk is filled up, and its cost is that of a full one
    vocab = tiny_configs.VOCAB
    ids = [i % vocab for i in prompt_of(200)]
    with engine_of(model) as engine:
        assert "cut" in engine.stats()["prefix_cache"]["off"]
        want = run(engine, ids, 12).token_ids
    with pytest.raises(ConfigError, match="a hit could change tokens"):
        engine_of(model, prefix_cache=True)
    with engine_of(model, prefix_cache="approximate") as engine:
        found = [run(engine, ids, 12) for _ in "ab"]
        assert [r.metrics.num_cached_tokens for r in found] == [0, 192]
        assert [r.token_ids for r in found] == [want, want]  # fp32: no near tie here
        kept(engine)


@pytest.mark.parametrize(
    ("family", "asked"),
    [("", "auto"), ("", True), ("jamba", "approximate"), ("zaya", "auto"), ("gemma4_text", "auto")],
)
def test_a_folder_for_kv_is_refused_and_left_empty(
    family: str, asked: Any, qwen: Any, tmp_path: Any
) -> None:
    """States, and keys of different shapes, have no place in the file: nothing half is kept."""
    model = tiny_configs.tiny_model(family) if family else qwen
    why = (
        "is not possible|needs the prefix cache|holds the pages of the prefix cache, and only exact"
    )
    with pytest.raises(ConfigError, match=f"kv_dir='.*' ({why})"):
        engine_of(model, prefix_cache=asked, kv_dir=str(tmp_path / "kv"))
    assert not (tmp_path / "kv").exists()


def test_an_engine_that_starts_again_misses_and_gives_the_same_tokens(qwen: Any) -> None:
    """What is kept of a hybrid ends with its engine: the next one computes, and keeps anew."""
    found = []
    for _ in range(2):
        with engine_of(qwen) as engine:
            found += [run(engine, prompt_of(200), 20) for _ in range(2)]
    assert [r.metrics.num_cached_tokens for r in found] == [0, 192, 0, 192]
    assert len({r.token_ids for r in found}) == 1


def test_what_is_not_possible_is_said(qwen: Any, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="carry a state, and the file holds pages of keys"):
        engine_of(qwen, kv_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="prefix_states_gib=0 has no room"):
        engine_of(qwen, prefix_cache=True, prefix_states_gib=0)
    with engine_of(qwen, prefix_states_gib=0) as engine:
        assert "prefix_states_gib=0" in engine.stats()["prefix_cache"]["off"]
    with pytest.raises(ConfigError, match=r"prefix_states_gib=-1 must be None or a number in "):
        engine_of(qwen, prefix_states_gib=-1)
