"""JSON bodies that are read beside the event loop, since they may be long."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from .ask import SHORT

_T = TypeVar("_T")


async def aside(do: Callable[[], _T], num_bytes: int) -> _T:
    """Do what takes a time that grows with `num_bytes`: on a thread if they are many."""
    return do() if num_bytes < SHORT else await asyncio.to_thread(do)


def read(request: Request, raw: bytes, model: type[BaseModel]) -> Any:
    """A body as a model has it.

    Raises:
        RequestValidationError: As FastAPI raises it: the body is missing, is no JSON or not called
            so, or has a wrong field.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not raw:
        raise _wrong({"type": "missing", "loc": ("body",), "msg": "Field required"}, None)
    if kind != "application/json" and not kind.endswith("+json"):
        raise _wrong({"type": "model_attributes_type", "loc": ("body",), "msg": "no JSON"}, raw)
    data: Any = None
    try:
        data = json.loads(raw)
        return model.model_validate(data)
    except ValidationError as error:
        found = [{**e, "loc": ("body", *e["loc"])} for e in error.errors()]
        raise RequestValidationError(found, body=data) from error
    except json.JSONDecodeError as error:
        where = {"type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error"}
        raise _wrong({**where, "ctx": {"error": error.msg}}, error.doc) from error
    except (ValueError, RecursionError) as error:  # no UTF-8, or too deep
        where = {"type": "json_invalid", "loc": ("body", 0), "msg": "JSON decode error"}
        raise _wrong({**where, "ctx": {"error": str(error)}}, "") from error


def _wrong(what: dict[str, Any], body: Any) -> RequestValidationError:
    return RequestValidationError([{"input": None, **what}], body=body)


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """What OpenAPI says of a body that the endpoint reads itself."""
    content = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}
