"""Checks of the arguments of `submit`, each with a message that states what is allowed."""

import operator
from hashlib import blake2b
from typing import Any

from qllm.config import EngineConfig
from qllm.errors import ContextLengthError, InvalidRequestError, QueueFullError, check_text, shown
from qllm.plan import ModelShape
from qllm.types import (
    MAX_TIME_MS,
    MAX_TIME_S,
    PRIORITY_LIMIT,
    Priority,
    SamplingParams,
    Slo,
)

FIT = "fit"
"""A value of `max_tokens`: as many tokens as there is room for."""
DEFAULT_MAX_TOKENS = 256
MOST_SALT_BYTES = 256
"""Largest size of a `cache_salt` in bytes."""


def check_room(num_waiting: int, max_waiting: int) -> None:
    """Raise if no further request may wait.

    Raises:
        QueueFullError: `max_waiting` requests wait already.
    """
    if num_waiting >= max_waiting:
        raise QueueFullError(
            f"{num_waiting} requests wait already (max_waiting={max_waiting}); try again later"
        )


def priority_class(value: str | int | Priority) -> int:
    """Return a class as an integer.

    Raises:
        InvalidRequestError: The value is not a class.
    """
    if isinstance(value, str) and value.upper() in Priority.__members__:
        return int(Priority[value.upper()])
    if is_int(value) and abs(int(value)) <= PRIORITY_LIMIT:
        return int(value)
    if isinstance(value, SamplingParams):
        raise InvalidRequestError("priority is SamplingParams; pass sampling= for those")
    raise InvalidRequestError(
        f"priority={shown(value)} is unknown; use 'LS', 'BE' or an integer in "
        f"[-{PRIORITY_LIMIT}, {PRIORITY_LIMIT}] (smaller is sooner; LS = 0, BE = 10)"
    )


def check_request_id(value: Any) -> None:
    """Raise if a request may not have this id. None lets the engine choose an id.

    Raises:
        InvalidRequestError: The id is not a string, is empty, or cannot be encoded.
    """
    if value is not None and (not isinstance(value, str) or not value):
        raise InvalidRequestError(f"request_id={shown(value)} must be a non-empty string")
    check_text("request_id", value)


def is_int(value: Any) -> bool:
    """Return True for an integer of any type (numpy's too), and False for a bool."""
    try:
        return operator.index(value) is not None and not isinstance(value, bool)
    except (TypeError, ValueError):  # an array also has __index__
        return False


def is_time(value: Any, most: int, *, zero: bool = False) -> bool:
    """Return True for a number in (0, most], and for 0 if `zero`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # all comparisons with NaN are False
    return is_number and (0 < value <= most or (zero and value == 0))


def check_timeout(name: str, value: Any, *, zero: bool = False) -> None:
    """Raise if a time is neither None nor an allowed number of seconds.

    Args:
        name: Name of the argument.
        value: Time in seconds.
        zero: True to allow 0.

    Raises:
        InvalidRequestError: The value is neither None nor an allowed number.
    """
    if value is not None and not is_time(value, MAX_TIME_S, zero=zero):
        range_ = f"{'[' if zero else '('}0, {MAX_TIME_S}]"
        raise InvalidRequestError(
            f"{name}={shown(value)} must be a number of seconds in {range_}, or None"
        )


def slo_of(value: Any, default: Slo) -> Slo:
    """Return latency targets; a missing target gets the value of `default`.

    Raises:
        InvalidRequestError: The value is not an Slo, or a target is not in (0, MAX_TIME_MS] ms.
    """
    if value is None:
        return default
    if not isinstance(value, Slo):
        raise InvalidRequestError(f"slo={shown(value)} must be an Slo(ttft_ms, tpot_ms), or None")
    for name, target in value._asdict().items():
        if target is not None and not is_time(target, MAX_TIME_MS):
            raise InvalidRequestError(
                f"slo={shown(value)}: {name} must be a number of milliseconds in "
                f"(0, {MAX_TIME_MS}], or None"
            )
    return Slo(*(d if t is None else t for t, d in zip(value, default, strict=True)))


def longest(config: EngineConfig, shape: ModelShape) -> int:
    """Return the length of the longest sequence, prompt and answer, in tokens."""
    return shape.longest(config.pool_tokens)


def most_tokens(
    num_prompt_tokens: int, max_tokens: Any, config: EngineConfig, shape: ModelShape
) -> int:
    """Return the largest number of tokens that a request may produce.

    Args:
        num_prompt_tokens: Length of the request's prompt in tokens.
        max_tokens: Requested upper limit, which may be cut to the room. None is the default limit.
            "fit" is the default limit if one is set, else all tokens that fit.
        config: Settings of the engine.
        shape: Shape of the model.

    Raises:
        InvalidRequestError: `max_tokens` is not an integer >= 1.
        ContextLengthError: The prompt and one more token do not fit. Without the setting
            `clamp_max_tokens`, prompt and `max_tokens` must fit too.
    """
    most = longest(config, shape)
    name = "the model's longest sequence" if most == shape.max_position else "max_kv_tokens"
    if num_prompt_tokens >= most:
        raise ContextLengthError(
            f"the prompt has {num_prompt_tokens} tokens; with at least one to produce it must "
            f"be shorter than {most} ({name})"
        )
    room = most - num_prompt_tokens
    if max_tokens is None or max_tokens == FIT:
        usual = most if max_tokens == FIT else DEFAULT_MAX_TOKENS
        return min(config.default_max_tokens or usual, room)
    if not is_int(max_tokens) or max_tokens < 1:
        raise InvalidRequestError(f"max_tokens={shown(max_tokens)} must be an integer >= 1")
    if max_tokens > room and not config.clamp_max_tokens:
        raise ContextLengthError(
            f"{num_prompt_tokens} prompt tokens and max_tokens={shown(max_tokens)} exceed {most} "
            f"({name}); ask for at most {room}, or let the answer end there with "
            "clamp_max_tokens=True"
        )
    return int(min(max_tokens, room))


def salt_digest(salt: str, owner: str = "") -> bytes:
    """Return digests of a `cache_salt` and its owner, 16 bytes each; empty if both are empty.

    Raises:
        InvalidRequestError: The salt or the owner is not a text, or is longer than 256 bytes.
    """
    parts = text_digest("cache_owner", owner), text_digest("cache_salt", salt)
    return b"".join(parts) if salt or owner else b""


def kv_tag(salt: str | None, owner: str) -> bytes:
    """Return the tag of cached KV: of one salt of an owner (32 bytes), or of all salts (16 bytes).

    Raises:
        InvalidRequestError: The salt or the owner is not a text, or is longer than 256 bytes.
    """
    tag = text_digest("cache_owner", owner)
    return tag if salt is None else tag + text_digest("cache_salt", salt)


def text_digest(name: str, text: str) -> bytes:
    """Return a 16-byte digest of a text.

    Raises:
        InvalidRequestError: The value is not a text, or is longer than 256 bytes.
    """
    if not isinstance(text, str):
        raise InvalidRequestError(f"{name}={shown(text)} must be text")
    data = text.encode("utf-8", "surrogatepass")
    if len(data) > MOST_SALT_BYTES:
        raise InvalidRequestError(
            f"{name} has {len(data)} bytes; it may have at most {MOST_SALT_BYTES}"
        )
    return blake2b(data, digest_size=16).digest()
