"""Sizes of an engine's KV and cached KV: a share of free memory for each size that is not set.

    free after loading   | KV of requests 1/2 | cached KV 1/4 | buffers 1/4 |

A share is rounded down to a power of two of tokens. So engines on equal machines have equal sizes.
On a CPU a size is a limit. Memory is only taken when KV fills it.
"""

from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from qllm.config import EngineConfig
from qllm.errors import ConfigError

FOR_KV = Fraction(3, 4)
"""Part of the free memory that KV and cached KV may take together."""
GIB = 1 << 30
SIZES = ("max_kv_tokens", "prefix_cache_tokens", "prefix_states_gib")
"""Settings that an engine chooses if they are open, which means None."""
LEAST_TOKENS = 1 << 10
"""Least tokens of each size, even with little free memory."""
MOST_TOKENS = 1 << 22
"""Most tokens of a chosen size, because the scheduler keeps a list of all blocks."""


class Costs(NamedTuple):
    """The numbers of a loaded model that sizes depend on."""

    token_bytes: int
    """Bytes of a token's KV."""
    state_bytes: int = 0
    """Bytes of a request's states at one position; 0 if no layer has states."""
    state_tokens: int = 0
    """Number of tokens that a request's states count as (`ModelShape.state_tokens`)."""
    most_tokens: int = MOST_TOKENS
    """Tokens of all seats, each with the longest sequence. More tokens would be useless."""
    keeps: bool = True
    """True if cached KV takes the same memory as KV; False without cached KV, or in other memory.
    """
    draft_bytes: int = 0
    """Bytes of a token's KV in the draft model; 0 without a draft model."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token's KV in the model and in the draft model."""
        return self.token_bytes + self.draft_bytes


class Sizes(NamedTuple):
    """The sizes of KV, in tokens, and of states, in bytes."""

    kv_tokens: int
    kept_tokens: int
    state_bytes: int

    def num_bytes(self, costs: Costs) -> int:
        """Return the bytes of all three sizes."""
        kept = self.kept_tokens * costs.token_bytes
        return self.kv_tokens * costs.kv_bytes + kept + self.state_bytes


USUAL = Sizes(1 << 16, 1 << 14, 2 * GIB)
"""Least sizes of an engine, if all of them fit."""


def sized(config: EngineConfig, free: int, costs: Costs) -> EngineConfig:
    """Return settings in which no size is open.

    Args:
        config: Settings.
        free: Bytes that the engine may still take.
        costs: Numbers of the model.

    Raises:
        ConfigError: `memory` is set, and the least sizes do not fit.
    """
    costs = costs._replace(token_bytes=max(1, costs.token_bytes))
    keeps = costs.keeps and config.prefix_cache is not False
    has_states = keeps and costs.state_bytes > 0
    by_hand = other_bytes(config, costs) + Sizes(
        config.max_kv_tokens or 0,
        (config.prefix_cache_tokens or 0) * keeps,
        int((config.prefix_states_gib or 0) * GIB) * has_states,
    ).num_bytes(costs)
    is_open = Sizes(
        config.max_kv_tokens is None,
        config.prefix_cache_tokens is None and keeps,
        config.prefix_states_gib is None and has_states,
    )
    chosen = _chosen(int(FOR_KV * max(0, free - by_hand)), costs, is_open)
    needed = by_hand + chosen.num_bytes(costs)
    if config.memory is not None and needed > free:
        raise ConfigError(
            f"memory={config.memory} leaves {max(0, free)} bytes for KV beside the loaded model, "
            f"and at least {needed} are needed ({costs.kv_bytes} a token); give more, or a "
            "smaller model"
        )
    return _with(config, chosen)


def with_usual_sizes(config: EngineConfig) -> EngineConfig:
    """Return settings with the usual sizes for open ones, so that results depend on no machine."""
    return _with(config, USUAL)


def _with(config: EngineConfig, sizes: Sizes) -> EngineConfig:
    """Return settings with `sizes` in place of open sizes. A size of 0 means the usual size."""
    kv, kept, states = (x or y for x, y in zip(sizes, USUAL, strict=True))
    given = config.max_kv_tokens, config.prefix_cache_tokens, config.prefix_states_gib
    return replace(
        config,
        max_kv_tokens=kv if given[0] is None else given[0],
        prefix_cache_tokens=kept if given[1] is None else given[1],
        prefix_states_gib=states / GIB if given[2] is None else given[2],
    )


def memory_of(config: EngineConfig, costs: Costs, free: int) -> dict[str, int]:
    """Return the bytes of sizes, for statistics.

    Args:
        config: Settings in which no size is open.
        costs: Numbers of the model.
        free: Bytes that were free when the sizes were chosen.
    """
    kept = config.kept_tokens * costs.token_bytes if costs.keeps else 0
    states = config.kept_state_bytes if costs.keeps and costs.state_bytes else 0
    return {
        "kv_tokens": config.pool_tokens,
        "kept_tokens": config.kept_tokens if costs.keeps else 0,
        "free_bytes": free,
        "budget_bytes": int(config.memory or 0),
        "kv_bytes": config.pool_tokens * costs.kv_bytes + other_bytes(config, costs),
        "kept_bytes": kept + states,
    }


def other_bytes(config: EngineConfig, costs: Costs) -> int:
    """Return the bytes of KV that is swapped out, or in transfer to or from other engines."""
    return config.swap_kv_tokens * costs.token_bytes + int(2 * config.handover_gib * GIB)


def _chosen(room: int, costs: Costs, is_open: Sizes) -> Sizes:
    """Return the open sizes for `room` bytes, and 0 for sizes that are set."""
    weights = (
        4 * is_open.kv_tokens,
        is_open.kept_tokens * (1 if is_open.state_bytes else 2),
        1 * is_open.state_bytes,
    )
    units = (costs.kv_bytes, costs.token_bytes, 1)
    shares = [
        _power_below(room * weight // (sum(weights) * unit)) if weight else 0
        for weight, unit in zip(weights, units, strict=True)
    ]
    least = Sizes(
        _power_above(costs.state_tokens + LEAST_TOKENS),
        LEAST_TOKENS,
        _power_above(costs.state_bytes),
    )
    usual = Sizes(*(max(x, y) * o for x, y, o in zip(USUAL, least, is_open, strict=True)))
    if any(x < y for x, y in zip(shares, usual, strict=True)) and usual.num_bytes(costs) <= room:
        return usual
    most = Sizes(
        min(MOST_TOKENS, max(USUAL.kv_tokens, _power_above(costs.most_tokens))),
        MOST_TOKENS,
        room,
    )
    each = zip(shares, least, most, is_open, strict=True)
    found = Sizes(*(max(low, min(share, high)) * o for share, low, high, o in each))
    while found.num_bytes(costs) > room:  # a size at its minimum may exceed its share
        above = [i for i in range(len(found)) if found[i] > least[i]]
        if not above:
            break
        largest = max(above, key=lambda i: found[i] * units[i])
        found = Sizes(*(x // 2 if i == largest else x for i, x in enumerate(found)))
    return found


def _power_below(number: int) -> int:
    """Return the largest power of two that is at most `number`; 0 for 0."""
    return 1 << (number.bit_length() - 1) if number else 0


def _power_above(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()
