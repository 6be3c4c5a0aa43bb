"""Every error a caller can meet.

QllmError
├── ConfigError            a setting, alias, policy or capability is wrong: fix the call
├── ModelError             a model cannot be found, loaded or driven safely
├── InvalidRequestError    a request is wrong; raised by `submit`, also a ValueError
│   └── ContextLengthError a prompt, or what is asked for with it, does not fit
├── QueueFullError         too many requests are waiting: try again later
├── EngineClosedError      the engine was closed or has crashed
├── RequestFailedError     raised by `result()` of a request that ended in `error`
│   └── DeadEndError       what it asked for (a form, `bad_words`) leaves its answer no way on
├── CheckpointError        a checkpoint file is truncated, foreign or of another version
├── PolicyError            a policy raised, or returned a plan that breaks an invariant
├── DeviceError            the device faulted or hangs: its process must end
└── InvariantError         our own bug: an invariant of the executor does not hold
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


def pip_install(extra: str) -> str:
    """The command that installs what an extra of this package needs, by names that pip finds."""
    needs = _needs(extra)
    if not needs:
        return f"install what the extra [{extra}] names in pyproject.toml"
    return "pip install " + " ".join(f"'{n}'" if re.search(r"[^\w.-]", n) else n for n in needs)


def _needs(*extras: str) -> list[str]:
    """Return the requirements of extras. This package is on no index: its own are given instead."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        given = [need.partition(";") for need in requires(DISTRIBUTION) or ()]
    except PackageNotFoundError:
        return []
    marks = [re.compile(rf"""extra == ["']{re.escape(extra)}["']""") for extra in extras]
    found: list[str] = []
    for need, _, mark in given:
        if any(wanted.search(mark) for wanted in marks):
            own = re.fullmatch(rf"{DISTRIBUTION}\[(.+)\]", need.strip())
            found += _needs(*own[1].split(",")) if own else [need.strip()]
    return list(dict.fromkeys(found))


DISTRIBUTION = "qllm-runtime"
"""What installers call this package; it is on no index yet."""


def shown(value: object) -> str:
    """A wrong value in a message: as `repr` has it, and short whatever it is."""
    try:
        with contained():
            text = repr(value)
    except Exception as error:  # noqa: BLE001 - a huge int, deep nesting: it is wrong all the same
        return f"<{type(value).__name__}: {type(error).__name__}>"
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


MAX_SHOWN = 200
"""Characters of a wrong value in a message."""


def brief(value: object) -> str:
    """A wrong value in a message, in a short time: it may be as large as a body."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return shown(value[: 2 * MAX_SHOWN] if isinstance(value, str) else value)


class OutsideError(Exception):
    """An error that a plugin raised to end its thread or process; the message names its class."""


@contextmanager
def contained() -> Iterator[None]:
    """Run code of a plugin: its `SystemExit`, and other errors of that kind, become OutsideError.

    A `KeyboardInterrupt` stays one: the user raises it, whatever code runs.

    Raises:
        OutsideError: The code raised what is neither an `Exception` nor a `KeyboardInterrupt`.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise OutsideError(told(error)) from error


def told(error: BaseException) -> str:
    """Return the class and the text of an error, also of one whose `__str__` raises."""
    try:
        with contained():
            text = str(error)
    except Exception:  # noqa: BLE001 - whatever its `__str__` does
        text = "(its text cannot be made)"
    return text if isinstance(error, OutsideError) else f"{type(error).__name__}: {text}"


class QllmError(Exception):
    """Base of all errors of this package."""


class ConfigError(QllmError, ValueError):
    """A setting, alias, policy or capability is wrong. The message lists what is known."""


class ModelError(QllmError):
    """A model cannot be found, loaded or driven safely. The message says why."""


class InvalidRequestError(QllmError, ValueError):
    """A request is wrong. Raised by `submit`, never in the engine loop."""


class ContextLengthError(InvalidRequestError):
    """Prompt and answer are longer than the model, or the engine's KV, allows."""


class QueueFullError(QllmError):
    """`max_waiting` requests are waiting already. Try again later."""


QueueFull = QueueFullError


CRASHED = "the engine crashed"
"""How the error of a request begins that ended with its engine, not by itself."""


NO_TOKEN = "no token may come next: "
"""How the error of a request begins whose own limits (a form, `bad_words`) leave it no way on."""


MOVED = "the request goes on elsewhere; ticket: "
"""How the error of a request begins that was handed over; the ticket of its KV follows, if any."""


def without_ticket(error: str | None) -> str | None:
    """What traces may say of an error: with a ticket, KV can be fetched."""
    if error is not None and error.startswith(MOVED):
        return MOVED.partition(";")[0]
    return error


class EngineClosedError(QllmError):
    """The engine was closed, or its loop has crashed (then `__cause__` says why)."""


class RequestFailedError(QllmError):
    """The request ended in `error`; the message names the cause."""


class DeadEndError(RequestFailedError):
    """The request ended in `error` since what it asked for (a form, `bad_words`) has no way on."""


def failed(name: str, error: str | None) -> RequestFailedError:
    """The error of a request that ended in `error`, by its name and what the engine said."""
    is_dead_end = error is not None and error.startswith(NO_TOKEN)
    return (DeadEndError if is_dead_end else RequestFailedError)(f"request {name}: {error}")


class CheckpointError(QllmError):
    """A checkpoint cannot be written or read: truncated, foreign, or another version."""


class PolicyError(QllmError):
    """A policy raised, or planned what an invariant forbids. The message names both."""

    request_id: int | None = None
    """The request that the policy was asked about; None if it was asked about several."""


class DeviceError(QllmError):
    """The device faulted or hangs: its context is lost, and its process must end."""


class InvariantError(QllmError, AssertionError):
    """An invariant of the executor does not hold: a bug in this package."""


@contextmanager
def naming(setting: str, path: object) -> Iterator[None]:
    """Say which setting names a file or folder that cannot be used.

    Raises:
        ConfigError: The system refused it.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{setting}={str(path)!r}: {error.strerror or error}") from error


def check_text(name: str, value: Any) -> None:
    """Return if every string in a value can be encoded.

    Args:
        name: What the value is called in the message.
        value: A string, or mappings and sequences that hold some; anything else passes.

    Raises:
        InvalidRequestError: A string holds half a surrogate pair; says which string and where.
    """
    left = [(name, value)]
    while left:
        name, value = left.pop()
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise InvalidRequestError(
                    f"{name} holds {value[error.start]!a} at position {error.start}, half of a "
                    "surrogate pair, which is no text; replace it, for example with U+FFFD"
                ) from error
        elif isinstance(value, Mapping):
            left += [(f"a key of {name}", key) for key in value]
            left += [(f"{name}[{key!a:.60}]", item) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            left += [(f"{name}[{index}]", item) for index, item in enumerate(value)]
