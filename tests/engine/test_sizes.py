"""Laws of the sizes that an engine chooses."""

from collections.abc import Container
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qllm.config import EngineConfig
from qllm.engine.sizes import (
    FOR_KV,
    GIB,
    LEAST_TOKENS,
    MOST_TOKENS,
    SIZES,
    USUAL,
    Costs,
    Sizes,
    sized,
    with_usual_sizes,
)
from qllm.errors import ConfigError, InvariantError

FREE = st.integers(0, 1 << 42)
COSTS = st.builds(
    Costs,
    token_bytes=st.integers(0, 1 << 20),
    state_bytes=st.one_of(st.just(0), st.integers(1, 1 << 28)),
    state_tokens=st.integers(0, 1 << 14),
    most_tokens=st.integers(1, 1 << 40),
    keeps=st.booleans(),
    draft_bytes=st.sampled_from([0, 0, 1000, 1 << 20]),
)
BY_HAND: dict[str, st.SearchStrategy[Any]] = {
    "max_kv_tokens": st.one_of(st.none(), st.integers(1024, 1 << 20)),
    "prefix_cache_tokens": st.one_of(st.none(), st.integers(256, 1 << 20)),
    "prefix_states_gib": st.one_of(st.none(), st.floats(0, 64)),
    "prefix_cache": st.sampled_from(["auto", False]),
    "swap_kv_tokens": st.sampled_from([0, 4096]),
}
CONFIGS = st.builds(EngineConfig, **BY_HAND)


def taken(config: EngineConfig, costs: Costs, names: Container[str] = SIZES) -> int:
    """Return the most bytes that sizes of these names let an engine take."""
    each, keeps = max(1, costs.token_bytes), costs.keeps and config.prefix_cache is not False
    found = {
        "max_kv_tokens": int(config.max_kv_tokens or 0) * (each + costs.draft_bytes),
        "prefix_cache_tokens": int(config.prefix_cache_tokens or 0) * each * keeps,
        "prefix_states_gib": int((config.prefix_states_gib or 0) * GIB)
        * (keeps and costs.state_bytes > 0),
    }
    return sum(size for name, size in found.items() if name in names)


def open_in(config: EngineConfig) -> list[str]:
    return [name for name in SIZES if getattr(config, name) is None]


@given(CONFIGS, FREE, COSTS)
def test_sizes_by_hand_stay_and_no_size_is_left_open(
    config: EngineConfig, free: int, costs: Costs
) -> None:
    found = sized(config, free, costs)
    for name in SIZES:
        asked = getattr(config, name)
        assert getattr(found, name) is not None
        assert asked is None or getattr(found, name) == asked
    assert replace(found, **{name: getattr(config, name) for name in SIZES}) == config
    assert found.num_blocks > 0
    assert found.kept_tokens >= 0


@given(CONFIGS, FREE, COSTS)
@example(EngineConfig(), 16, Costs(1, state_bytes=1))
@example(EngineConfig(), 900 << 20, Costs(24 << 10, state_bytes=200 << 20))
def test_open_sizes_take_no_more_than_their_part_of_what_is_free(
    config: EngineConfig, free: int, costs: Costs
) -> None:
    swapped = config.swap_kv_tokens * max(1, costs.token_bytes)
    left = max(0, free - taken(config, costs) - swapped)
    mine, smallest = (
        taken(sized(config, room, costs), costs, open_in(config)) for room in (free, 0)
    )
    assert mine <= max(smallest, FOR_KV * left)


@given(FREE, COSTS)
def test_a_chosen_size_is_a_power_of_two_within_its_bounds(free: int, costs: Costs) -> None:
    found = sized(EngineConfig(), free, costs)
    for tokens in (found.pool_tokens, found.kept_tokens):
        assert tokens & (tokens - 1) == 0
        assert LEAST_TOKENS <= tokens <= MOST_TOKENS
    states = found.kept_state_bytes
    assert states & (states - 1) == 0


@given(st.builds(EngineConfig), FREE, COSTS)
def test_the_usual_sizes_are_kept_where_they_fit(
    config: EngineConfig, free: int, costs: Costs
) -> None:
    usual = with_usual_sizes(config)
    if costs.state_tokens + LEAST_TOKENS <= USUAL.kv_tokens and costs.state_bytes <= 2 * GIB:
        found = sized(config, free, costs)
        if taken(usual, costs) <= int(FOR_KV * free):
            assert found.pool_tokens >= USUAL.kv_tokens
            assert found.kept_tokens >= USUAL.kept_tokens
            assert found.kept_state_bytes >= USUAL.state_bytes


@given(CONFIGS, FREE, COSTS)
def test_with_a_budget_all_of_kv_fits_or_the_engine_is_refused(
    config: EngineConfig, free: int, costs: Costs
) -> None:
    swapped = config.swap_kv_tokens * max(1, costs.token_bytes)
    smallest = taken(sized(config, 0, costs), costs) + swapped
    config = replace(config, memory="1024GiB")
    if smallest > free:
        with pytest.raises(ConfigError, match=f" {free} bytes for KV.* {smallest} are needed"):
            sized(config, free, costs)
    else:
        assert taken(sized(config, free, costs), costs) + swapped <= free


def test_shares_of_20_gib_for_a_model_of_96_kib_a_token() -> None:
    found = sized(EngineConfig(), 20 * GIB, Costs(96 << 10, most_tokens=1 << 20))
    assert (found.max_kv_tokens, found.prefix_cache_tokens) == (65536, 32768)
    found = sized(EngineConfig(), 80 * GIB, Costs(96 << 10, most_tokens=1 << 20))
    assert (found.max_kv_tokens, found.prefix_cache_tokens) == (262144, 131072)
    found = sized(EngineConfig(), 8 * GIB, Costs(96 << 10, most_tokens=1 << 20))
    assert (found.max_kv_tokens, found.prefix_cache_tokens) == (32768, 16384)


def test_kv_beyond_what_all_seats_can_use_is_not_reserved() -> None:
    found = sized(EngineConfig(), 1 << 40, Costs(96 << 10, most_tokens=100_000))
    assert found.max_kv_tokens == 131072
    assert found.prefix_cache_tokens == 2097152


def test_states_get_half_of_what_pages_and_states_share() -> None:
    found = sized(EngineConfig(), 96 * GIB, Costs(24 << 10, 78 << 20, 6300, 1 << 21))
    assert found.max_kv_tokens == 2097152
    assert found.prefix_cache_tokens == 524288
    assert found.prefix_states_gib == 8.0


def test_an_engine_without_a_cache_gives_its_share_to_kv() -> None:
    costs = Costs(96 << 10, most_tokens=1 << 20)
    assert sized(EngineConfig(prefix_cache=False), 17 * GIB, costs).max_kv_tokens == 131072
    assert sized(EngineConfig(), 17 * GIB, costs).max_kv_tokens == 65536


def test_open_sizes_are_no_numbers_until_an_engine_chose_them() -> None:
    for name in ("num_blocks", "pool_tokens", "kept_tokens", "kept_state_bytes"):
        with pytest.raises(InvariantError, match="is open: an engine chooses it"):
            getattr(EngineConfig(), name)
    assert with_usual_sizes(EngineConfig()).pool_tokens == 65536
    assert Sizes(1, 2, 3).num_bytes(Costs(10)) == 33


@pytest.mark.parametrize(
    ("text", "number"),
    [("10GiB", 10 << 30), ("10 GB", 10**10), ("1.5gib", 3 << 29), ("4096", 4096), (77, 77)],
)
def test_memory_is_a_number_of_bytes_with_a_unit(text: Any, number: int) -> None:
    assert EngineConfig(memory=text).memory == number


@pytest.mark.parametrize("wrong", ["", "ten", "10 parsecs", "0", "-1GiB", 0, 1.5, True, "inf"])
def test_memory_that_is_no_size_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"memory=.*must be .*10GiB or 500MB"):
        EngineConfig(memory=wrong)
