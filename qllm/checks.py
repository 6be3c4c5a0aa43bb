"""Checks of what a caller hands to `submit`, each with a message that says what is allowed."""

import math
from typing import Any

from qllm.errors import InvalidRequestError
from qllm.types import Priority, Slo

PRIORITY_LIMIT = 1 << 20


def priority_class(value: str | int | Priority) -> int:
    """A class as an integer.

    Raises:
        InvalidRequestError: It is none.
    """
    if isinstance(value, str) and value.upper() in Priority.__members__:
        return int(Priority[value.upper()])
    if is_int(value) and abs(int(value)) <= PRIORITY_LIMIT:
        return int(value)
    raise InvalidRequestError(
        f"priority={value!r} is unknown; use 'LS', 'BE' or an integer in "
        f"[-{PRIORITY_LIMIT}, {PRIORITY_LIMIT}] (smaller is sooner; LS = 0, BE = 10)"
    )


def is_int(value: Any) -> bool:
    """An integer of any kind (numpy's too), but no bool."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


def is_positive(value: Any) -> bool:
    """A finite number above 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0


def slo_of(value: Any, default: Slo) -> Slo:
    """Targets; each one that is not given is the default's.

    Raises:
        InvalidRequestError: They are no Slo, or no positive milliseconds.
    """
    if value is None:
        return default
    if not isinstance(value, Slo):
        raise InvalidRequestError(f"slo={value!r} must be an Slo(ttft_ms, tpot_ms), or None")
    wrong = [name for name, t in value._asdict().items() if t is not None and not is_positive(t)]
    if wrong:
        raise InvalidRequestError(
            f"slo={value!r}: {wrong[0]} must be a finite number of milliseconds > 0, or None"
        )
    return Slo(*(d if t is None else t for t, d in zip(value, default, strict=True)))
