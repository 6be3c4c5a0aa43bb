"""JSON bodies: the limits, and the reading of short and long bodies.

A short body is read in place. `qllm.server.requests.apart` reads a long body in its own process.
The process checks the bytes against the limits before it parses them. Long lists come back packed.
"""

import json
import pickle
import re
from array import array
from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from qllm.server.http.errors import ApiError, from_request
from qllm.server.http.fields import Body, Packed
from qllm.server.requests.apart import LONG

JSON = "application/json"
"""Content type of a body."""
MOST_VALUES = 1_000_000
"""Most values in a body: token ids, texts, fields."""
MOST_CONTAINERS = 200_000
"""Most lists and objects in a body: messages, parts of messages, calls, tools."""
MOST_DEPTH = 200
"""Most levels of nested lists and objects."""
MOST_DIGITS = 400
"""Most digits of a number. The largest 64-bit floating point number has 309 digits."""
MOST_UNPACKED = 50_000
"""Most unpacked values in a long body. Unpacked values become objects in the server's process."""
FEW = 1_000
"""Number of values up to which a list is not packed."""
_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
"""A text. An unclosed text extends to the end of the body, so no byte is matched twice."""
_TOO_LONG = re.compile(rb"[0-9]{%d}" % (MOST_DIGITS + 1))

_Some = TypeVar("_Some", bound=Body)


def check_bounds(raw: bytes) -> None:
    """Check that parsing a body has a bounded cost. Bytes inside texts are not counted.

    Raises:
        ApiError: A limit is exceeded. The message names the limit.
    """
    bare = _TEXT.sub(b"", raw)
    containers = bare.count(b"[") + bare.count(b"{")
    _refuse_more("lists and objects", containers, MOST_CONTAINERS)
    _refuse_more("values", containers + bare.count(b",") + 1, MOST_VALUES)
    if containers > MOST_DEPTH:
        _refuse_more("lists and objects inside each other", _depth(bare), MOST_DEPTH)
    if (found := _TOO_LONG.search(bare)) is not None:
        text = f"the body has a number of more than {MOST_DIGITS} digits, {found[0][:20].decode()}"
        raise ApiError(400, f"{text}...; write a shorter one")


def _refuse_more(what: str, count: int, most: int) -> None:
    if count > most:
        text = f"the body has {count} {what}; at most {most} are allowed; send less at a time"
        raise ApiError(400, text, code="body_too_large")


def _depth(bare: bytes) -> int:
    """Return the depth of nested lists and objects."""
    depth = deepest = 0
    for byte in bare:
        if byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"]}":
            depth -= 1
    return deepest


def loads(raw: bytes) -> Any:
    """Return the JSON of a body, or of one line of a body, within the limits.

    Raises:
        ApiError: A limit is exceeded.
        ValueError: The body is not JSON.
        RecursionError: The JSON is nested too deep.
    """
    if len(raw) >= LONG:
        check_bounds(raw)
    return json.loads(raw)


def read(raw: bytes, kind: str | None, model: type[_Some], *, packs: bool = True) -> _Some:
    """Return a body as a model.

    Args:
        raw: The body.
        kind: Content type of the request.
        model: Model of the body.
        packs: True if a list of messages may come back packed.

    Raises:
        ApiError: The body is missing, has another content type than JSON, is not JSON, exceeds a
            limit, or has a wrong field.
    """
    try:
        return packed(_read(raw, kind, model), len(raw), messages=packs)
    except RequestValidationError as error:
        raise from_request(kind, error) from error


def _read(raw: bytes, kind: str | None, model: type[_Some]) -> _Some:
    called = (kind or "").partition(";")[0].strip().lower()
    if not raw:
        raise _wrong({"type": "missing", "loc": ("body",), "msg": "Field required"}, None)
    if called != JSON and not called.endswith("+json"):
        raise _wrong({"type": "model_attributes_type", "loc": ("body",), "msg": "no JSON"}, raw)
    data: Any = None
    try:
        data = loads(raw)
        return model.model_validate(data)
    except ValidationError as error:
        found = [{**e, "loc": ("body", *e["loc"])} for e in error.errors()]
        raise RequestValidationError(found, body=data) from error
    except json.JSONDecodeError as error:
        where = {"type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error"}
        raise _wrong({**where, "ctx": {"error": error.msg}}, error.doc) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, or nested too deep
        where = {"type": "json_invalid", "loc": ("body", 0), "msg": "JSON decode error"}
        raise _wrong({**where, "ctx": {"error": str(error)}}, "") from error


def _wrong(what: dict[str, Any], body: Any) -> RequestValidationError:
    return RequestValidationError([{"input": None, **what}], body=body)


def packed(body: _Some, num_bytes: int, *, messages: bool = True) -> _Some:
    """Return a body with its long lists compact: ids as arrays, messages as bytes.

    Args:
        body: Body that is already checked.
        num_bytes: Size of the body, in bytes.
        messages: True if messages may be packed.

    Raises:
        ApiError: There are too many unpacked values.
    """
    found: dict[str, Any] = {}
    for name in body.ids if num_bytes >= LONG else ():
        found[name] = _as_arrays(name, getattr(body, name))
    for name in body.packs if messages and num_bytes >= LONG else ():
        value = getattr(body, name)
        if isinstance(value, list) and num_values(value) > FEW:
            data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
            found[name] = Packed(data, len(value))
    made = body.model_copy(update=found) if found else body
    made.num_bytes = num_bytes
    if num_bytes >= LONG:
        what = " and ".join(("ids", *(made.packs if messages else ())))
        _refuse_more(f"values beside its {what}", num_values(made), MOST_UNPACKED)
    return made


def opened(body: _Some) -> _Some:
    """Return the body with unpacked messages. For many messages, run this in a separate process."""
    found = {x: v.opened() for x in body.packs if isinstance(v := getattr(body, x), Packed)}
    return body.model_copy(update=found) if found else body


def chat_of(body: Any, before: Sequence[str] = ()) -> Any:
    """Return the chat that a body is converted to, packed.

    Args:
        body: Body of `/v1/messages` or `/v1/responses`.
        before: JSON lists of the earlier items in the conversation.

    Raises:
        ApiError: A value is wrong.
    """
    whole = opened(body)
    items = [item for text in before for item in json.loads(text)]
    asked = whole.chat(items) if items else whole.chat()
    return packed(asked, body.num_bytes + sum(map(len, before)))


def kept_of(body: Any) -> tuple[str, str]:
    """Return the stored parts of a response's body, as JSON: its fields, and its input items."""
    fields, items = opened(body).kept()
    return json.dumps(fields), json.dumps(items)


def _as_arrays(name: str, value: Any) -> Any:
    """Return a list of ids, or of lists of ids, as arrays. Other values are returned unchanged."""
    if not isinstance(value, list) or not value:
        return value
    try:
        if isinstance(value[0], int):
            return array("q", value)
        if isinstance(value[0], list):
            return [array("q", some) for some in value]
    except OverflowError:
        raise ApiError(400, f"{name}: a token id must be in [0, 2**63)", param=name) from None
    return value


def num_values(value: Any) -> int:
    """Return the number of values in a value, itself included.

    A packed list or array counts as one.
    """
    count, left = 0, [value]
    while left:
        one = left.pop()
        count += 1
        if isinstance(one, BaseModel):
            left += one.__dict__.values()
            left += (one.model_extra or {}).values()
        elif isinstance(one, dict):
            left += one.values()
        elif isinstance(one, Sequence) and not isinstance(one, str | bytes | array | Packed):
            left += one
    return count


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI description of a body that the endpoint reads itself."""
    content = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}
