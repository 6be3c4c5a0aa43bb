"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

import errno
import logging
import sqlite3
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.routing import Match

from qllm.errors import (
    ContextLengthError,
    DeadEndError,
    EngineClosedError,
    InvalidRequestError,
    QllmError,
    QueueFullError,
    brief,
)

ANTHROPIC = "/v1/messages"
"""Path prefix of the routes whose errors have Anthropic's shape."""
OVERLOADED = 529
"""Anthropic's status where others send 503."""
METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
"""HTTP methods that routes have."""
RETRY_AFTER_S = 1
"""Retry-After, in seconds, of 429 and 503 where nothing else is known."""
STORAGE_RETRY_S = 30
"""Retry-After, in seconds, when nothing can be stored."""
FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})
FULL_DATABASE = frozenset(
    {sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN}
)

_log = logging.getLogger("qllm.server")


def is_unwritable(error: BaseException) -> bool:
    """Return True if the error means that a disk stores nothing: full, read-only or failing."""
    if isinstance(error, sqlite3.OperationalError):
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_FULL)
        return code & 0xFF in FULL_DATABASE
    return isinstance(error, OSError) and error.errno in FULL_DISK


class ErrorDetail(BaseModel):
    """Details of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is not 2xx."""

    error: ErrorDetail


RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in {
        400: "The request is wrong; the message says what is allowed",
        401: "No API key, or a wrong one",
        403: "The API key may not do this",
        404: "There is no such thing",
        408: "The body did not come in time",
        409: "It cannot be done in the present state",
        413: "The body is too large",
        422: "Not used; wrong bodies are 400",
        429: "A queue or a limit is full; see Retry-After",
        500: "The request failed in the engine",
        503: "The engine is not serving; see Retry-After",
        504: "The request took longer than the server allows",
        507: "The disk has no room for what is to be kept; see Retry-After",
    }.items()
}
"""Error responses in the OpenAPI schema of a route."""


class AnthropicErrorDetail(BaseModel):
    """Details of an error in Anthropic's shape."""

    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """The body of every answer at a path under `ANTHROPIC` that is not 2xx."""

    type: Literal["error"]
    error: AnthropicErrorDetail


ANTHROPIC_RESPONSES: dict[int | str, dict[str, Any]] = {
    OVERLOADED if status == 503 else status: {**found, "model": AnthropicErrorBody}
    for status, found in RESPONSES.items()
}


def _sendable(text: str) -> str:
    """Return the text with half surrogate pairs escaped: UTF-8 cannot encode them."""
    return text.encode("utf-8", "backslashreplace").decode()


class ApiError(HTTPException):
    """An answer that is not 2xx.

    Args:
        status: HTTP status.
        message: Text that says what is wrong and what is allowed.
        param: Field of the request that is wrong.
        code: Short name of the error for programs.
        retry_after_s: Seconds after which it makes sense to try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        if status in (429, 503) and retry_after_s is None:
            retry_after_s = RETRY_AFTER_S
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        if retry_after_s is not None:
            headers |= {"Retry-After": str(retry_after_s), "x-should-retry": "true"}
        super().__init__(status, message, headers)
        self.message = _sendable(message)
        self.param = None if param is None else _sendable(param)
        self.code = code

    @property
    def type(self) -> str:
        """OpenAI's name for the kind of error, by status."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        if self.status_code >= 500:
            return "server_error"
        return kinds.get(self.status_code, "invalid_request_error")

    def body(self) -> dict[str, Any]:
        """Return the JSON of the answer."""
        detail = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": detail}

    def anthropic(self) -> dict[str, Any]:
        """Return the JSON of the answer in Anthropic's shape."""
        kinds = {404: "not_found_error", 413: "request_too_large", 504: "timeout_error"}
        kinds |= {503: "overloaded_error"}
        kind = kinds.get(self.status_code, self.type)
        detail = {"type": "api_error" if kind == "server_error" else kind, "message": self.message}
        return {"type": "error", "error": detail}

    def response(self, path: str = "") -> JSONResponse:
        """Return the answer in the shape that clients of the path expect."""
        if not path.startswith(ANTHROPIC):
            return JSONResponse(self.body(), self.status_code, self.headers)
        status = OVERLOADED if self.status_code == 503 else self.status_code
        return JSONResponse(self.anthropic(), status, self.headers)


def from_engine(error: QllmError) -> ApiError:
    """Return the answer to an error of the engine."""
    if isinstance(error, InvalidRequestError):
        message = str(error).removesuffix("; change it in SamplingParams")
        name = message.partition("=")[0]
        code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
        return ApiError(400, message, param=name if name.isidentifier() else None, code=code)
    if isinstance(error, DeadEndError):
        return ApiError(400, str(error), code="no_way_on")
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full")
    if isinstance(error, EngineClosedError):
        return ApiError(503, str(error), code="engine_closed")
    return ApiError(500, str(error), code="engine_error")


def unexpected(error: Exception) -> ApiError:
    """Return the answer to an unforeseen failure. The caller must log the traceback."""
    text = f"the server failed: {type(error).__name__}; its log has the traceback"
    return ApiError(500, text, code="internal_error")


def storage_full(why: str) -> ApiError:
    """Return the answer to a request whose data cannot be stored."""
    text = f"nothing of this request is kept: {why}; try again when the server has room"
    return ApiError(507, text, code="storage_full", retry_after_s=STORAGE_RETRY_S)


def answer_to(error: Exception) -> ApiError:
    """Return the answer to any error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QllmError):
        return from_engine(error)
    return storage_full(str(error)) if is_unwritable(error) else unexpected(error)


def logged(error: Exception, what: str) -> ApiError:
    """Return the answer to any error, and log the error; an unforeseen one with its traceback.

    Args:
        error: Exception that was raised.
        what: Name of the failed work, for the log.
    """
    answer = answer_to(error)
    is_unforeseen = answer.code == "internal_error"
    _log.log(
        logging.ERROR if is_unforeseen else logging.WARNING,
        "%s failed: %s",
        what,
        answer.message,
        exc_info=error if is_unforeseen else None,
    )
    return answer


def from_validation(errors: Any, data: Any = None) -> ApiError:
    """Return an answer to pydantic's errors: the first wrong field, its value, what is allowed.

    Args:
        errors: Errors in pydantic's list.
        data: Data that pydantic checked, in which the wrong field is searched.
    """
    first = errors[0]
    where = _place(first["loc"], data, is_missing=first["type"] == "missing")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown field {where!r}", param=where, code="unknown_field")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "union_tag_invalid":
        wanted, tag = first["ctx"]["expected_tags"], first["ctx"]["tag"]
        message = f"Input should be of type {wanted}, not {tag!r:.80}"
    elif message.startswith("Input should"):
        message += f", not {brief(first['input'])}"
    name = where.partition(".")[0].partition("[")[0]
    is_told = not where or (where == name and message.startswith(name))
    return ApiError(400, message if is_told else f"{where}: {message}", param=where or None)


def _place(loc: Sequence[int | str], data: Any, *, is_missing: bool) -> str:
    """Return the path of a wrong field in a body, such as `messages[0].content`.

    Args:
        loc: Location from pydantic, which also contains names of members of unions.
        data: The body.
        is_missing: True if a field is missing there.
    """
    for end in range(len(loc), 0, -1):  # a member of a union may be last
        if (found := _path(loc[:end], data, is_missing=is_missing)) is not None:
            return found.removeprefix(".")
    return str(loc[0]) if loc else ""


def _path(loc: Sequence[int | str], data: Any, *, is_missing: bool) -> str | None:
    """Return the path to the last of `loc`, without names that the data lacks; None if missing."""
    name, rest = loc[0], loc[1:]
    step: str | None = None
    if isinstance(name, int):
        if isinstance(data, list) and 0 <= name < len(data):
            step, inner = f"[{name}]", data[name]
    elif isinstance(data, dict) and (name in data or (is_missing and not rest)):
        step, inner = f".{name}", data.get(name)
    if step is not None:
        if not rest:
            return step
        if (more := _path(rest, inner, is_missing=is_missing)) is not None:
            return step + more
    return _path(rest, data, is_missing=is_missing) if rest and isinstance(name, str) else None


def _no_json(kind: str | None, error: RequestValidationError) -> ApiError | None:
    """Return the error if a body is not JSON, or its content type is not; else None."""
    first = error.errors()[0]
    if first["type"] == "missing" and tuple(first["loc"]) == ("body",):
        return ApiError(400, "the body is missing; send JSON")
    if first["type"] == "json_invalid":
        at, text = first["loc"][-1], str(error.body)
        line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
        why = first.get("ctx", {}).get("error", "wrong").removesuffix(" at")
        return ApiError(400, f"the body is no JSON: {why} at line {line}, column {column}")
    if tuple(first["loc"]) == ("body",) and isinstance(error.body, bytes):
        was = "is missing" if kind is None else f"is {kind!r:.80}"
        return ApiError(400, f"the header Content-Type {was}; send 'application/json'")
    return None


def _wrong_method(request: Request) -> ApiError:
    """Return a 405 that lists all methods of the path; each single route knows only its own."""
    asked = [{**request.scope, "method": method} for method in METHODS]
    here = {
        scope["method"]
        for route in request.app.routes
        for scope in asked
        if route.matches(scope)[0] is Match.FULL
    }
    allowed = ", ".join(sorted(here)) or "another method"
    text = f"{request.method} is not allowed at {request.url.path}; use {allowed}"
    found = ApiError(405, text)
    found.headers = {"Allow": allowed}
    return found


def from_request(kind: str | None, error: RequestValidationError) -> ApiError:
    """Return the answer to an error that FastAPI, or `bodies.read`, found in a request.

    Args:
        kind: Content type of the request's body.
        error: Error that was found.
    """
    first = error.errors()[0]
    inside = {**first, "loc": first["loc"][1:]}  # without "body" or "query"
    return _no_json(kind, error) or from_validation([inside], error.body)


def parse(model: type[BaseModel], data: object) -> Any:
    """Return the body as a model.

    Raises:
        ApiError: 400, naming the wrong field.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise from_validation(error.errors(), data) from error


def _from_http(request: Request, error: StarletteHTTPException) -> ApiError:
    """Return the answer to an error of FastAPI or Starlette."""
    text, path, cause = str(error.detail), request.url.path, error.__cause__
    if isinstance(cause, OSError):  # Starlette writes an upload to a file before the route runs
        return logged(cause, f"the body of {request.method} {path}")
    if isinstance(cause, ValueError | RecursionError):
        text = f"the body cannot be read: {cause}"  # too long a number, too deep, no text
    if error.status_code == 404:
        text = f"there is no {request.method} {path}; see /openapi.json"
        if path.startswith(("/v1/files", "/v1/batches", "/v1/responses")):
            text += " (what is kept needs --state-dir)"
    if error.status_code == 405:
        return _wrong_method(request)
    wrapped = ApiError(error.status_code, text)
    wrapped.headers = error.headers
    return wrapped


def install(app: FastAPI) -> None:
    """Make the app answer every error in the API's shape."""

    async def ours(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error.response(request.url.path)

    async def engine(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, QllmError)
        return from_engine(error).response(request.url.path)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        kind = request.headers.get("content-type")
        return from_request(kind, error).response(request.url.path)

    async def other(request: Request, error: Exception) -> JSONResponse:
        return answer_to(error).response(request.url.path)  # the guard logs it

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, StarletteHTTPException)
        return _from_http(request, error).response(request.url.path)

    app.add_exception_handler(ApiError, ours)
    app.add_exception_handler(QllmError, engine)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(StarletteHTTPException, http)
    app.add_exception_handler(Exception, other)
