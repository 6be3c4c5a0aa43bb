"""The prefix cache changes no token and no bit of KV, leaks nothing, and crosses no salt."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qllm import QLLMEngine, SamplingParams
from qllm.errors import ConfigError, InvalidRequestError
from qllm.frontend.handle import Result
from qllm.kernels import cpu
from qllm.runner.rope_tables import Switch
from qllm.scheduler.prefix import Chain, PageStore
from qllm.types import NS_PER_S, Evict, Priority, RequestStatus
from tests.support.families import FAMILIES, VOCAB, make_model
from tests.support.inside import loop_of

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
SETTINGS: dict[str, Any] = {"conformance": False, "threads": 1, "max_kv_tokens": 2048}


def prompt_of(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(n)]


def engine_of(model: Any, **settings: Any) -> QLLMEngine:
    return QLLMEngine.from_model(model, **{**SETTINGS, **settings})


def run(engine: QLLMEngine, ids: list[int], n: int = 8, **how: Any) -> Result:
    return engine.submit(ids, "LS", n, sampling=how.pop("sampling", GREEDY), **how).result(300)


def kept(engine: QLLMEngine) -> dict[bytes, tuple[torch.Tensor, torch.Tensor]]:
    """The pages of an engine on a thread, by name."""
    prefix = loop_of(engine).prefix

    def look() -> dict[bytes, tuple[torch.Tensor, torch.Tensor]]:
        prefix.check()
        loop_of(engine).scheduler.check()
        return {name: page.data for name, page in prefix.store._pages.items()}

    return dict(engine.call(look))


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


KINDS = cpu.native.available() if cpu.native is not None else []


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Compute with the kernels of one instruction set."""
    cpu.native.use(request.param)
    yield request.param
    cpu.native.use(cpu.kind())


@pytest.mark.sampled
@pytest.mark.parametrize("kernels", KINDS, indirect=True)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hit_has_the_tokens_and_the_kv_of_a_cold_run(family: str, kernels: str) -> None:
    model = make_model(family, torch.bfloat16, num_layers=2)
    shared, rng = prompt_of(200), random.Random(family)
    prompts = [shared[: rng.choice((64, 100, 128, 150, 200))] + prompt_of(rng.randrange(1, 90), i)
               for i in range(4)]  # fmt: skip
    cold, cold_pages = [], {}
    with engine_of(model, prefix_cache=True) as engine:
        for ids in prompts:
            engine.reset_prefix_cache()
            cold.append(run(engine, ids, 70))
            cold_pages.update(kept(engine))
    assert not any(r.metrics.num_cached_tokens for r in cold)
    # pages of chunks, of a decode, beside mates; then everything once more
    with engine_of(model, prefix_cache=True, max_step_tokens=24) as engine:
        handles = [engine.submit(ids, "BE", 70, sampling=GREEDY) for ids in prompts]
        warm = [h.result(300) for h in handles] + [run(engine, ids, 70) for ids in prompts]
        turn = run(engine, [*prompts[0], *cold[0].token_ids, 5], 4)
        pages = kept(engine)
    for found, want in zip(warm, cold * 2, strict=True):
        assert found.token_ids == want.token_ids
    for found in warm[4:]:
        whole = (len(found.prompt_token_ids) - 1) // 64 * 64
        assert found.metrics.num_cached_tokens == whole
    assert turn.metrics.num_cached_tokens == (len(prompts[0]) + 69) // 64 * 64
    assert set(cold_pages) <= set(pages)
    for name, page in cold_pages.items():
        assert same(page, pages[name])


LONG: list[Any] = [("qwen3_moe", kind, 1000) for kind in KINDS]
LONG += [(family, kind, 1000) for family in FAMILIES if family != "qwen3_moe" for kind in KINDS[:1]]
LONG += [("qwen3_moe", kind, 4000) for kind in KINDS[:1]]
LONG += [
    pytest.param(family, kind, 4000, marks=pytest.mark.slow)  # as above with 1,000 tokens
    for family in FAMILIES
    for kind in (KINDS[1:] if family == "qwen3_moe" else KINDS[:1])
]


@pytest.mark.sampled(5)  # every family and kind has the shorter hit above
@pytest.mark.parametrize(("family", "kernels", "num"), LONG, indirect=["kernels"])
def test_a_long_hit_has_the_tokens_and_the_kv_of_a_cold_run(
    family: str, kernels: str, num: int
) -> None:
    """Pages of prefill and of chunks are found again beside a mate and by a longer turn."""
    model = make_model(family, torch.bfloat16, num_layers=2)
    model.config.max_position_embeddings = 8192
    ids, settings = prompt_of(num), {"max_kv_tokens": 16384, "prefix_cache_tokens": 8192}
    with engine_of(model, prefix_cache=True, **settings) as engine:
        cold = run(engine, ids, 70)
        turn = [*ids, *cold.token_ids, 5]
        cold_pages = kept(engine)
        engine.reset_prefix_cache()
        later = run(engine, turn, 8)
    with engine_of(model, prefix_cache=True, max_step_tokens=num // 6, **settings) as engine:
        first = run(engine, ids, 70)
        handles = [engine.submit(i, "BE", 8, sampling=GREEDY) for i in (turn, prompt_of(300, 1))]
        warm, _ = (handle.result(300) for handle in handles)
        pages = kept(engine)
    assert (first.token_ids, warm.token_ids) == (cold.token_ids, later.token_ids)
    assert warm.metrics.num_cached_tokens == (num + 69) // 64 * 64
    assert len(cold_pages) == (num + 69) // 64
    assert all(same(page, pages[name]) for name, page in cold_pages.items())


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("qwen3_moe", torch.bfloat16)


def test_evicted_requests_find_their_own_pages(model: Any) -> None:
    prompts = [prompt_of(200, i) for i in range(4)]
    with engine_of(model, prefix_cache=False) as engine:
        want = [run(engine, ids, 80).token_ids for ids in prompts]
    with engine_of(model, max_kv_tokens=640) as engine:
        handles = [engine.submit(ids, "BE", 80, sampling=GREEDY) for ids in prompts[:3]]
        for handle in handles:  # a prefill under way has committed nothing that could be kept
            next(iter(handle))
        handles.append(engine.submit(prompts[3], "LS", 80, sampling=GREEDY))
        found = [h.result(300) for h in handles]
        kept(engine)
    assert [r.token_ids for r in found] == want
    assert sum(r.metrics.evictions for r in found) > 0
    for r in found:  # at most a page, what was not committed, and the two that are always owed
        assert r.metrics.evict_recomputed_tokens <= r.metrics.evictions * 66


def test_a_cancelled_request_leaves_its_pages(model: Any) -> None:
    with engine_of(model) as engine:
        handle = engine.submit(prompt_of(200), "BE", 300, sampling=GREEDY)
        next(iter(handle))
        handle.cancel()
        assert run(engine, prompt_of(200)).metrics.num_cached_tokens == 192


def test_salts_share_nothing(model: Any) -> None:
    with engine_of(model) as engine:
        for salt in ("", "a", "b"):
            assert run(engine, prompt_of(150), cache_salt=salt).metrics.num_cached_tokens == 0
            assert run(engine, prompt_of(150), cache_salt=salt).metrics.num_cached_tokens == 128
        with pytest.raises(InvalidRequestError, match="at most 256"):
            run(engine, [1], cache_salt="x" * 257)
        with pytest.raises(InvalidRequestError, match="must be text"):
            run(engine, [1], cache_salt=5)


@pytest.mark.parametrize(("keep_ls_s", "found"), [(600, 128), (0, 0)])
def test_best_effort_displaces_no_young_pages_of_chats(
    model: Any, keep_ls_s: float, found: int
) -> None:
    settings_ = {"prefix_cache_tokens": 256, "keep_ls_s": keep_ls_s}
    with engine_of(model, prefix_cache=True, **settings_) as engine:
        run(engine, prompt_of(130), 2)
        for i in range(1, 8):
            engine.submit(prompt_of(200, i), "BE", 2, sampling=GREEDY).result(300)
        assert run(engine, prompt_of(130), 2).metrics.num_cached_tokens == found


def test_a_reset_forgets_and_off_is_off(model: Any) -> None:
    with engine_of(model) as engine:
        run(engine, prompt_of(150))
        engine.reset_prefix_cache()
        assert run(engine, prompt_of(150)).metrics.num_cached_tokens == 0
    with engine_of(model, prefix_cache=False) as engine:
        assert [run(engine, prompt_of(150)).metrics.num_cached_tokens for _ in "ab"] == [0, 0]
        assert engine.stats()["prefix_cache"] == {"off": "prefix_cache=False"}


def test_prompt_logprobs_are_computed(model: Any) -> None:
    asked = SamplingParams(temperature=0, ignore_eos=True, prompt_logprobs=0)
    with engine_of(model) as engine:
        first, again = (run(engine, prompt_of(150), sampling=asked) for _ in "ab")
        assert again.metrics.num_cached_tokens == 0
        assert again.prompt_logprobs == first.prompt_logprobs
        assert run(engine, prompt_of(150)).metrics.num_cached_tokens == 128


def test_a_request_with_a_ttl_of_0_finds_cached_kv_and_leaves_none(model: Any) -> None:
    with engine_of(model) as engine:
        run(engine, prompt_of(150))
        before = kept(engine).keys()
        longer = prompt_of(150) + prompt_of(150, seed=1)
        assert run(engine, longer, cache_ttl_s=0).metrics.num_cached_tokens == 128
        assert kept(engine).keys() == before


def test_one_token_is_always_computed(model: Any) -> None:
    with engine_of(model) as engine:
        first = run(engine, prompt_of(128))
        again = run(engine, prompt_of(128))
        assert (again.token_ids, again.metrics.num_cached_tokens) == (first.token_ids, 64)
        assert again.metrics.num_prefilled_tokens == 64


def test_an_inexact_cache_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="a hit could change tokens"):
        engine_of(model, kernels="reference", prefix_cache=True)
    with engine_of(model, kernels="reference") as engine:
        assert "cut" in engine.stats()["prefix_cache"]["off"]
    with engine_of(model, kernels="reference", prefix_cache="approximate") as engine:
        run(engine, prompt_of(150))
        assert run(engine, prompt_of(150)).metrics.num_cached_tokens == 128


@pytest.mark.parametrize("wrong", [{"prefix_cache": "yes"}, {"prefix_cache_tokens": 0},
                                   {"prefix_cache": True, "loop": "conditional"},
                                   {"keep_ls_s": -1}, {"keep_ls_s": "1"}])  # fmt: skip
def test_bad_settings(model: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        engine_of(model, **wrong)


def test_a_checkpoint_goes_on_elsewhere(model: Any, tmp_path: Path) -> None:
    with engine_of(model) as engine:
        want = run(engine, prompt_of(200), 100).token_ids
        first = engine.submit(prompt_of(200), "BE", 100, sampling=GREEDY)
        next(iter(first))
        assert engine.checkpoint(tmp_path / "c") == 1
    with engine_of(model) as engine:
        assert engine.restore(tmp_path / "c")[0].result(300).token_ids == want


# -- the store


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_store_loses_nothing_in_use(data: st.DataObject) -> None:
    capacity, keep_s = data.draw(st.integers(0, 6)), data.draw(st.sampled_from([0, 5, 600]))
    store = PageStore[bytes](capacity, keep_s * NS_PER_S)
    pins: dict[bytes, int] = {}
    now = 0
    for _ in range(data.draw(st.integers(1, 40))):
        now += data.draw(st.integers(0, 4)) * NS_PER_S
        salt = data.draw(st.sampled_from([b"", b"a"]))
        ids = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=4))
        names = Chain(ids, 1, (salt,)).upto(len(ids))
        priority = data.draw(st.sampled_from([Priority.LS, Priority.BE]))
        there = store.find(names)
        for i in range(there):
            assert store.read(names[i]) == salt + bytes(ids[: i + 1])
        if data.draw(st.booleans()) and there:
            store.pin(names[:there])
            pins.update({n: pins.get(n, 0) + 1 for n in names[:there]})
        elif pins and data.draw(st.booleans()):
            name = data.draw(st.sampled_from(sorted(pins)))
            store.unpin([name])
            pins[name] -= 1
            pins = {n: k for n, k in pins.items() if k}
        store.touch(names[:there], priority, now)
        young = {n for n, p in store._pages.items()
                 if p.is_ls and now - p.used_ns < store.keep_ls_ns}  # fmt: skip
        if there < len(names) and store.make_room(priority, now):
            store.add(names[there], salt + bytes(ids[: there + 1]), priority, now)
        if priority == Priority.BE:
            assert all(n in store for n in young)
        assert all(n in store for n in pins)
        store.check(pins)


def test_hints_hold_half_of_the_store_until_they_are_over() -> None:
    store = PageStore[int](4)
    for i in range(4):
        store.add(bytes([i]), i, Priority.LS, 0, until_ns=10)
    assert [store.displace(Priority.LS, 9) for _ in range(3)] == [True, True, False]
    assert store.names() == [b"\0", b"\1"]
    assert store.displace(Priority.LS, 10)


def test_a_name_depends_on_all_before_it() -> None:
    a, b, c = Chain([1, 2, 3, 4], 2, (b"x",)), Chain([9, 2, 3, 4], 2, (b"x",)), None
    assert a.upto(4)[1] != b.upto(4)[1]
    c = Chain([1, 2, 3, 4], 2, (b"", b"x"))
    assert not set(a.upto(4)) & set(c.upto(4))
    assert a.upto(3) == a.upto(4)[:1]


def test_a_name_depends_on_what_decides_bits(model: Any) -> None:
    """Weights, settings and the size of a page: then what is kept elsewhere is of no use."""
    names: list[bytes] = []
    other = make_model("qwen3_moe", torch.bfloat16, seed=1)
    makes = [(model, {}), (other, {}), (model, {"exactness": "batch-invariant"}),
             (model, {"block_size": 128})]  # fmt: skip
    for made, more in makes:
        with engine_of(made, prefix_cache=True, **more) as engine:
            run(engine, prompt_of(260), 2)
            names += kept(engine)
    assert len(names) == len(set(names)) == 3 * 4 + 2


def test_who_was_evicted_with_output_owes_two_tokens() -> None:
    """Else it would be decoding, and nobody decodes without KV."""
    chain = Chain(range(129), 64, (b"",))
    assert len(chain.usable(129)) == len(Chain(range(130), 64, (b"",)).usable(100)) == 2
    assert len(chain.usable(128)) == 1
    assert len(Chain(range(128), 64, (b"",)).usable(128)) == 1


def test_rope_factors_are_part_of_the_name() -> None:
    longrope, ntk = Switch(at=8, is_binary=True, recomputes=False), Switch(8, False, False)
    phi = Switch(at=8, is_binary=True, recomputes=True)
    assert longrope.regime(8, 20) == "short" != longrope.regime(9, 9) == longrope.regime(12, 12)
    assert len({ntk.regime(8, 20), ntk.regime(9, 9), ntk.regime(10, 10)}) == 3
    assert phi.regime(4, 8) == "short" != phi.regime(4, 9)


@pytest.mark.parametrize("most", [1, 2])
def test_what_is_copied_for_be_is_bounded(most: int) -> None:
    """LS arrivals wait for copies, so a BE request takes the beginning of its prefix alone."""
    model = make_model("mixtral", torch.bfloat16)
    ids = prompt_of(64 * 5 + 3)
    with engine_of(model) as engine:
        wanted = run(engine, ids, 12)
        prefix = loop_of(engine).prefix
        engine.call(lambda: setattr(prefix, "_copy_bytes", most * prefix._page_bytes))
        engine.reset_prefix_cache()
        run(engine, ids, 12)  # its pages are kept a few per step
        assert len(kept(engine)) == 5
        be = engine.submit(ids, "BE", 12, sampling=GREEDY).result(300)
        ls = run(engine, ids, 12)
        together = [engine.submit(ids, "BE", 12, sampling=GREEDY) for _ in range(3)]
        results = [handle.result(300) for handle in together]
        kept(engine)
    assert be.metrics.num_cached_tokens == most * 64
    assert ls.metrics.num_cached_tokens == 5 * 64
    assert {r.token_ids for r in (be, ls, *results)} == {wanted.token_ids}


def test_a_paused_request_keeps_no_pages_from_others() -> None:
    """Else it would have all that BE requests may find, for as long as it is paused."""
    model = make_model("mixtral", torch.bfloat16)
    ids = prompt_of(64 * 5 + 3)
    with engine_of(model) as engine:
        wanted = run(engine, ids, 12)
        prefix = loop_of(engine).prefix
        engine.call(lambda: setattr(prefix, "_copy_bytes", 2 * prefix._page_bytes))

        def paused_at_once() -> Any:
            handle = engine.submit(ids, "BE", 12, sampling=GREEDY)
            handle.pause()
            return handle

        paused = engine.call(paused_at_once)
        other = engine.submit(ids, "BE", 12, sampling=GREEDY).result(300)
        assert other.metrics.num_cached_tokens == 2 * 64
        assert paused.status is RequestStatus.PAUSED
        prefix.store.check({})
        engine.reset_prefix_cache()
        run(engine, ids, 12)
        kept(engine)
        paused.resume()
        result = paused.result(300)
        kept(engine)
    assert result.metrics.num_cached_tokens == 2 * 64
    assert other.token_ids == result.token_ids == wanted.token_ids


@pytest.mark.parametrize("forget", [False, True])
def test_who_moved_out_before_its_pages_were_copied_finds_no_more(forget: bool) -> None:
    """What it has computed is what moved out, until it is back."""
    model = make_model("mixtral", torch.bfloat16)
    ids = prompt_of(64 * 5 + 3)
    with engine_of(model, swap_kv_tokens=1024) as engine:
        wanted = run(engine, ids, 12)
        loop = loop_of(engine)
        prefix, scheduler = loop.prefix, loop.scheduler
        engine.call(lambda: setattr(prefix, "_copy_bytes", 2 * prefix._page_bytes))

        def move_out(number: int) -> None:
            """It was given blocks, and another took them before it ran."""
            request = scheduler.requests[number]
            request.block_table = scheduler.pool.take(number, 5)
            for effect in scheduler.evict(number, number, Evict.SWAP):
                loop.effects.apply(effect)
            assert request.num_swapped_tokens == 128
            prefix._copy_bytes, prefix._seen = None, -1
            prefix.seek()
            scheduler.check()
            if forget:
                prefix.reset()
                scheduler.check()

        def submit() -> Any:
            found = engine.submit(ids, "BE", 12, sampling=GREEDY)
            loop.pending.extend(loop.ingress.drain())
            loop._take_in(loop.pending.pop())
            move_out(found.number)
            return found

        moved = engine.call(submit)
        result = moved.result(300)
        kept(engine)
    assert result.token_ids == wanted.token_ids
    assert result.metrics.num_cached_tokens == (0 if forget else 2 * 64)


def test_the_end_of_a_prefix_goes_before_its_beginning() -> None:
    """In whatever order its pages were kept: what follows a page that is gone is of no use."""
    store, names = PageStore[None](3, 0), [b"first", b"second", b"third"]
    for name in (names[1], names[2], names[0]):
        store.add(name, None, Priority.LS, 0)
    store.touch(names, Priority.LS, 1)
    for kept in (2, 1, 0):
        assert store.displace(Priority.LS, 2)
        assert [name in store for name in names] == [i < kept for i in range(3)]


def test_short_prompts_displace_each_other_and_no_long_session_that_was_used_later() -> None:
    """A turn touches its whole prompt, so all pages of a session are as recent as its last turn."""
    ls, store = int(Priority.LS), PageStore[None](32)
    session = [f"session {i}".encode() for i in range(20)]
    for at, names in enumerate((session, *([f"chat {i}".encode()] for i in range(12)))):
        for name in names:
            assert store.make_room(ls, at)
            store.add(name, None, ls, at)
    store.touch(session, ls, 20)
    for i in range(12):
        assert store.make_room(ls, 30)
        store.add(f"later {i}".encode(), None, ls, 30)
        assert store.find(session) == 20, "older chats go first"
    assert not any(f"chat {i}".encode() in store for i in range(12))
    assert store.make_room(ls, 40)
    assert store.find(session) == 19, "then the session, from its end"
