"""Reader of settings written as text, with one syntax for flags, the environment and files."""

import json
import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from enum import Enum
from pathlib import PurePath
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from qllm.errors import ConfigError, shown

NONE = ("none", "null")
BOOLS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}
"""Words for a bool, the same as pydantic's."""
COUNTS: Mapping[str, int | Decimal] = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
}
SIZES: Mapping[str, int | Decimal] = {
    "b": 1,
    **{f"{unit}b": size for unit, size in COUNTS.items() if unit},
    **COUNTS,
}
TIMES_MS: Mapping[str, int | Decimal] = {
    "us": Decimal("0.001"),
    "ms": 1,
    "s": 1000,
    "m": 60_000,
    "min": 60_000,
    "h": 3_600_000,
}
Units = tuple[Mapping[str, int | Decimal], int, str]
UNITS: dict[str, Units] = {
    "_ms": (TIMES_MS, 1, "500ms or 2s"),
    "_s": (TIMES_MS, 1000, "10s or 500ms"),
    "_gib": (SIZES, 2**30, "8GiB or 500MB"),
    "_bytes": (SIZES, 1, "4MiB or 500kB"),
    "memory": (SIZES, 1, "10GiB or 500MB"),
}
"""Units by the end of a setting's name. Each has the sizes of its units, the size of a number
without unit, and an example."""
NUMBER = re.compile(r"([+-]?(?:[\d_]+\.?[\d_]*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z]*)", re.I)
MAX_DIGITS = 30
"""Most digits of an integer. An integer like `1e999999999` would fill the memory."""


class Unset(Enum):
    """The type of `UNSET`."""

    UNSET = "unset"


UNSET = Unset.UNSET
"""Value of an empty text, which means that the setting is not given."""


def read(name: str, text: str, kind: Any) -> Any:
    """Return the value of a text, or UNSET.

    Args:
        name: Name of the setting. The end of the name decides the unit of numbers.
        text: Text of a flag, a variable or a file.
        kind: Type of the setting.

    Raises:
        ConfigError: The text has no value of this type; the message contains the allowed texts.
    """
    word = text.strip()
    if not word:
        return UNSET
    for alternative in sorted(alternatives(kind), key=_rank):
        found = _read_as(name, text, _unquoted(word), alternative)
        if found is not UNSET:
            return found
    raise ConfigError(f"{name}={shown(text)} must be {allowed(name, kind)}")


def read_all(given: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of settings by their types. Empty texts are left out.

    A bool or a number in a file is read like its text, so that files, flags and variables agree. A
    name without a type is read as `Any`.
    """
    found = {name: _value(name, x, kinds.get(name, Any)) for name, x in given.items()}
    return {name: value for name, value in found.items() if value is not UNSET}


def read_list(name: str, text: str) -> tuple[str, ...]:
    """Return the items of a list, written as JSON or separated by commas.

    Raises:
        ConfigError: The text begins like JSON, but is no list of strings.
    """
    if not text.strip().startswith(("[", "{")):
        return tuple(item.strip() for item in text.split(",") if item.strip())
    try:
        items = json.loads(text)
    except (ValueError, RecursionError):
        items = None
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ConfigError(f'{name}={shown(text)} must be like a,b or a list like ["a", "b"]')
    return tuple(items)


def alternatives(kind: Any) -> list[Any]:
    """Return the members of a union type; each value of a Literal is a member."""
    if get_origin(kind) is Annotated:
        return alternatives(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [found for inner in get_args(kind) for found in alternatives(inner)]
    if get_origin(kind) is Literal:  # a string stands for itself
        return [x if isinstance(x, str) else type(x) for x in get_args(kind)]
    return [kind]


def allowed(name: str, kind: Any) -> str:
    """Return the allowed texts for a setting of this type, in words."""
    units = units_of(name)
    number = f", like {units[2]}" if units else ""
    words = {
        bool: "true or false",
        int: f"an integer{number}",
        float: f"a number{number}, or inf",
        type(None): "none",
        dict: 'a JSON object like {"name": "value"}',
        tuple: "a list with commas between",
    }
    kinds = sorted(alternatives(kind), key=_rank)
    choices = [found for found in kinds if isinstance(found, str)]
    said = ["one of " + ", ".join(choices)] if len(choices) > 1 else choices
    said += [words.get(_plain(found), "text") for found in kinds if not isinstance(found, str)]
    return ", or ".join(dict.fromkeys(said))


def units_of(name: str) -> Units | None:
    """Return the units for the end of a name; None if the name has no unit."""
    return next((units for end, units in UNITS.items() if name.endswith(end)), None)


def _value(name: str, value: Any, kind: Any) -> Any:
    if isinstance(value, str):
        value = read(name, value, kind)
    elif (value is None or isinstance(value, bool | int | float)) and kind is not Any:
        value = read(name, str(value), kind)
    if not isinstance(value, dict):
        return value
    of_values = next((get_args(x)[1] for x in alternatives(kind) if get_args(x)[1:]), Any)
    if of_values is Any:  # the table's values are read later, by types of their own
        return value
    return {key: _value(f"{name}.{key}", x, of_values) for key, x in value.items()}


def _plain(kind: Any) -> Any:
    return get_origin(kind) or kind


def _rank(kind: Any) -> int:
    """Return the order in which types are tried: types with few texts first, text itself last."""
    order = (type(None), bool, int, float, dict, tuple)
    if isinstance(kind, str):
        return -1
    return order.index(_plain(kind)) if _plain(kind) in order else len(order)


def _unquoted(word: str) -> str:
    """Return a text without its quotes. Shells remove quotes; readers of variable files may not."""
    is_quoted = len(word) > 1 and word[0] == word[-1] and word[0] in "\"'"
    return word[1:-1] if is_quoted else word


def _read_as(name: str, text: str, word: str, kind: Any) -> Any:
    """Return the value of a text for this alternative, or UNSET if the text has no such value."""
    low, plain = word.lower(), _plain(kind)
    if isinstance(kind, str):
        return kind if low == kind.lower() else UNSET
    if plain is type(None):
        return None if low in NONE else UNSET
    if plain is bool:
        return BOOLS.get(low, UNSET)
    if plain in (int, float):
        return _number(name, low, plain)
    if plain is tuple:
        return read_list(name, text)
    if plain is dict:
        return _table(name, text, kind)
    if plain is Any:
        return _anything(word)
    if plain is str or (isinstance(plain, type) and issubclass(plain, PurePath)):
        return plain(word)
    # a secret is taken literally: quotes are part of the secret, and "none" is not None
    return text


def _number(name: str, low: str, kind: type[Any]) -> Any:
    if low.lstrip("+-") in ("inf", "infinity"):
        return float(low) if kind is float else UNSET
    found = NUMBER.fullmatch(low)
    if found is None:
        return UNSET
    units, per, _ = units_of(name) or (COUNTS, 1, "")
    unit = found[2]
    try:
        number = Decimal(found[1])
    except InvalidOperation:
        return UNSET
    if unit and unit not in units:
        return UNSET
    value = number * units[unit] / per if unit else number
    if kind is float:
        return float(value)
    if value.adjusted() > MAX_DIGITS or value != value.to_integral_value():
        return UNSET
    return int(value)


def _table(name: str, text: str, kind: Any) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        hint = f"{error}; names and texts stand in double quotes, true and false in lower case"
        raise ConfigError(f"{name}={shown(text)} is not JSON: {hint}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{name}={shown(text)} must be {allowed(name, kind)}")
    return found


def _anything(word: str) -> Any:
    """Return the value for a setting without a type: a word, a number or JSON, else text."""
    low = word.lower()
    if low in NONE:
        return None
    if low in ("true", "false"):
        return low == "true"
    for kind in (int, float):
        if (found := _number("", low, kind)) is not UNSET:
            return found
    try:
        return json.loads(word)
    except (ValueError, RecursionError):
        return word
