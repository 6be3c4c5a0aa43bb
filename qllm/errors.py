"""Errors that callers can get.

QllmError
├── ConfigError            a setting, alias, policy or capability is wrong: fix the call
├── ModelError             a model cannot be found, loaded or driven safely
├── InvalidRequestError    a request is wrong; raised by `submit`, also a ValueError
│   └── ContextLengthError a prompt, or what is asked for with it, does not fit
├── QueueFullError         too many requests are waiting: try again later
├── EngineClosedError      the engine was closed or has crashed
├── RequestFailedError     raised by `result()` of a request that ended in `error`
│   └── DeadEndError       the request's grammar or `bad_words` allow no next token
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
    """Return the command that installs the requirements of an extra by names that pip finds."""
    needs = _needs(extra)
    if not needs:
        return f"install what the extra [{extra}] names in pyproject.toml"
    return "pip install " + " ".join(f"'{n}'" if re.search(r"[^\w.-]", n) else n for n in needs)


def _needs(*extras: str) -> list[str]:
    """Return the requirements of extras, including those of extras that they contain.

    This package is on no index, so `qllm-runtime[extra]` itself could not be installed by name.
    """
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
"""Name of this package for installers. The package is on no index yet."""


def shown(value: object) -> str:
    """Return a wrong value as text for a message: the value's `repr`, shortened."""
    try:
        with contained():
            text = repr(value)
    except Exception as error:  # noqa: BLE001 - a huge int or deep nesting has no `repr`
        return f"<{type(value).__name__}: {type(error).__name__}>"
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


MAX_SHOWN = 200
"""Most characters of a wrong value in a message."""


def brief(value: object) -> str:
    """Return a wrong value as text for a message, quickly even if the value is very large."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return shown(value[: 2 * MAX_SHOWN] if isinstance(value, str) else value)


class OutsideError(Exception):
    """An error that a plugin raised to end its thread or process; the message names its class."""


@contextmanager
def contained() -> Iterator[None]:
    """Run code of a plugin. Its `SystemExit`, and similar errors, become OutsideError.

    A `KeyboardInterrupt` is not changed, because it comes from the user and not from the code.

    Raises:
        OutsideError: The code raised neither an `Exception` nor a `KeyboardInterrupt`.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise OutsideError(told(error)) from error


def told(error: BaseException) -> str:
    """Return the class and the text of an error, even if its `__str__` raises."""
    try:
        with contained():
            text = str(error)
    except Exception:  # noqa: BLE001 - `__str__` is code of a plugin
        text = "(its text cannot be made)"
    return text if isinstance(error, OutsideError) else f"{type(error).__name__}: {text}"


class QllmError(Exception):
    """Base of all errors of this package."""


class ConfigError(QllmError, ValueError):
    """Error of a wrong setting, alias, policy or capability. The message lists the known ones."""


class ModelError(QllmError):
    """Error of a model that cannot be found, loaded or driven safely. The message has the cause."""


class InvalidRequestError(QllmError, ValueError):
    """Error of a wrong request. `submit` raises it, never the engine loop."""


class ContextLengthError(InvalidRequestError):
    """Error of a prompt and answer that are longer than the model, or the engine's KV, allows."""


class QueueFullError(QllmError):
    """Error of a request too many: `max_waiting` requests are waiting. Try again later."""


QueueFull = QueueFullError


CRASHED = "the engine crashed"
"""Start of the error text of a request that ended because its engine crashed."""


NO_TOKEN = "no token may come next: "
"""Start of the error text of a request whose grammar or `bad_words` allow no next token."""


MOVED = "the request goes on elsewhere; ticket: "
"""Start of the error text of a migrated request. The ticket of its KV follows if there is one."""


def without_ticket(error: str | None) -> str | None:
    """Return an error's text for traces, without the ticket. A ticket would give access to KV."""
    if error is not None and error.startswith(MOVED):
        return MOVED.partition(";")[0]
    return error


class EngineClosedError(QllmError):
    """Error of calls to an engine that was closed, or crashed (then `__cause__` is the reason)."""


class RequestFailedError(QllmError):
    """Error of a request that ended in `error`; the message has the cause."""


class DeadEndError(RequestFailedError):
    """Error of a request that ended because its grammar or `bad_words` allow no next token."""


def failed(name: str, error: str | None) -> RequestFailedError:
    """Return the exception for a request that ended in `error`, from its name and error text."""
    is_dead_end = error is not None and error.startswith(NO_TOKEN)
    return (DeadEndError if is_dead_end else RequestFailedError)(f"request {name}: {error}")


class CheckpointError(QllmError):
    """Error of a checkpoint that cannot be written or read: truncated, foreign, another version."""


class PolicyError(QllmError):
    """Error of a policy that raised, or whose plan breaks an invariant. The message has both."""

    request_id: int | None = None
    """Request for which the policy was called; None if it was called for several requests."""


class DeviceError(QllmError):
    """Error of a device that faulted or hangs: its context is lost, and its process must end."""


class InvariantError(QllmError, AssertionError):
    """Error of an invariant that does not hold: a bug in this package."""


@contextmanager
def naming(setting: str, path: object) -> Iterator[None]:
    """Turn an `OSError` of the block into an error that names the setting and the path.

    Raises:
        ConfigError: The system refused the file or folder.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{setting}={str(path)!r}: {error.strerror or error}") from error


def check_text(name: str, value: Any) -> None:
    """Refuse a value with a string that cannot be encoded.

    Args:
        name: Name of the value in the message.
        value: String, or mappings and sequences that contain strings. Other values pass.

    Raises:
        InvalidRequestError: A string contains half a surrogate pair; the message has its position.
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
