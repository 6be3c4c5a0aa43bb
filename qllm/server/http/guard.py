"""The middleware in front of every route: API keys, rates, concurrency, limits on bodies."""

import asyncio
import hmac
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qllm.errors import ConfigError
from qllm.names import token_hex
from qllm.server.config import ServerConfig
from qllm.server.http import access
from qllm.server.http.access import ANYBODY
from qllm.server.http.errors import ANTHROPIC, ApiError, logged
from qllm.server.http.headers import header, is_ndjson
from qllm.server.http.keys import Rule, caller_of, digest
from qllm.server.metrics import Metrics

OPEN_PATHS = frozenset(
    {"/", "/health", "/ready", "/metrics", "/version", "/ui", "/docs", "/openapi.json"}
)
"""Paths served without a key: they show no data of a request."""
OPEN_FOLDERS = ("/ui/static/", "/docs/static/")
CLIENT_GONE = 499
"""nginx's status for a client that left before its answer began; only logs and metrics see it."""
UPLOAD_PATH = "/v1/files"

_log = logging.getLogger("qllm.server")


@dataclass(slots=True)
class _Use:
    """Current use of the server by one caller."""

    num_open: int = 0
    tokens: float = 0.0
    """Tokens in the caller's token bucket at the time `at_s`."""
    at_s: float = 0.0


class Limits:
    """Limits of each caller: requests per minute (a token bucket of that size) and at once.

    Args:
        rate_per_minute: Requests per minute; None is unlimited.
        max_concurrent: Requests at once; None is unlimited.
        most_of: Requests at once of callers that have a limit of their own.
        now_s: A clock, in seconds.
    """

    def __init__(
        self,
        rate_per_minute: int | None,
        max_concurrent: int | None,
        now_s: Callable[[], float] = time.monotonic,
        most_of: Mapping[str, int] | None = None,
    ) -> None:
        self._rate = rate_per_minute
        self._most, self._most_of = max_concurrent, most_of or {}
        self._now_s = now_s
        self._uses: dict[str, _Use] = {}

    def enter(self, caller: str) -> None:
        """Count one request as open; `leave` must follow.

        Raises:
            ApiError: 429; nothing was counted.
        """
        now = self._now_s()
        use = self._uses.setdefault(caller, _Use(tokens=float(self._rate or 0), at_s=now))
        most = self._most_of.get(caller, self._most)
        if most is not None and use.num_open >= most:
            raise ApiError(
                429,
                f"{use.num_open} requests of this API key are open (max_concurrent={most})",
                code="concurrency_limit",
                retry_after_s=1,
            )
        if self._rate is not None:
            per_s = self._rate / 60
            use.tokens = min(float(self._rate), use.tokens + (now - use.at_s) * per_s)
            use.at_s = now
            if use.tokens < 1:
                raise ApiError(
                    429,
                    f"this API key made {self._rate} requests within a minute (rate_per_minute)",
                    code="rate_limit_exceeded",
                    retry_after_s=math.ceil((1 - use.tokens) / per_s),
                )
            use.tokens -= 1
        use.num_open += 1

    def headers(self, caller: str) -> dict[str, str]:
        """Return OpenAI's headers about the rate limit; empty without a limit."""
        use = self._uses.get(caller)
        if self._rate is None or use is None:
            return {}
        return {
            "x-ratelimit-limit-requests": str(self._rate),
            "x-ratelimit-remaining-requests": str(int(use.tokens)),
            "x-ratelimit-reset-requests": f"{(self._rate - use.tokens) * 60 / self._rate:.3f}s",
        }

    def leave(self, caller: str) -> None:
        """Count one request as ended."""
        self._uses[caller].num_open -= 1


class Keys:
    """The API keys, stored only as digests.

    Args:
        keys: All keys; with none, every caller is allowed.
        admin: The key for admin endpoints, one of `keys`; empty if none is configured.
        rules: Further keys, with rules of their own.

    Raises:
        ConfigError: A key has a rule and is in `keys`, too.
    """

    def __init__(self, keys: Iterable[str], admin: str = "", rules: Iterable[Rule] = ()) -> None:
        plain, ruled = {digest(key): None for key in keys}, {rule.digest: rule for rule in rules}
        for rule in ruled.values():
            if rule.digest in plain:
                raise ConfigError(
                    f"the key of {rule.name} in keys_file is also in api_key_file, api_keys or "
                    "admin_api_key; name each key once"
                )
        self._digests = [*plain, *ruled]
        self._admin = caller_of(digest(admin)) if admin else None

    def caller(self, authorization: str) -> str:
        """Return a name of the caller that is not its key. Takes the same time for every key.

        Raises:
            ApiError: 401.
        """
        if not self._digests:
            return ANYBODY
        scheme, _, key = authorization.partition(" ")
        given = digest(key.strip())
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(
                401,
                "no valid API key; send the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
            )
        return caller_of(given)

    def is_admin(self, caller: str) -> bool:
        """Return True if the caller may use admin endpoints: its key is the admin key.

        Without an admin key, every caller may if at most one key is configured.
        """
        return len(self._digests) <= 1 if self._admin is None else caller == self._admin


class Guard:
    """Middleware that refuses forbidden requests before any route sees them."""

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        keys: Keys,
        limits: Limits,
        metrics: Metrics,
        log: access.Log | None,
    ) -> None:
        self._app = app
        self._config = config
        self._keys = keys
        self._limits = limits
        self._metrics = metrics
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        known_as = header(scope, "x-request-id") or None
        exchange = access.Exchange.of(scope, "", self._log)
        access.CURRENT.set(exchange)
        status, is_sent = CLIENT_GONE, False

        async def noting(message: Message) -> None:
            nonlocal status, is_sent
            if message["type"] == "http.response.start":
                status = message["status"]
                if status >= 400:
                    self._metrics.refuse(status)
                told = MutableHeaders(scope=message)
                ours = told.get("x-request-id") or f"req-{token_hex(8)}"
                exchange.request_id = known_as or ours
                told["x-request-id"] = exchange.request_id
                if scope["path"].startswith(ANTHROPIC):
                    told.setdefault("request-id", ours)
                told.update(self._limits.headers(exchange.caller or ANYBODY))
            await send(message)
            is_sent = message["type"] == "http.response.body" and not message.get("more_body")

        try:
            await self._guarded(scope, receive, noting, exchange)
        except Exception as error:
            if status != CLIENT_GONE and not is_sent:  # a part of the answer is sent
                raise
            answer = logged(error, exchange.line)
            if not is_sent:
                await answer.response(scope["path"])(scope, receive, noting)
        finally:
            if exchange.caller:
                self._metrics.of_key(exchange.caller, status)
            exchange.ended(status)

    async def _guarded(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        exchange: access.Exchange,
    ) -> None:
        """Refuse the request, or let the routes answer it."""
        path = scope["path"]
        is_open = path in OPEN_PATHS or path.startswith(OPEN_FOLDERS)
        caller = ANYBODY
        counted = False
        try:
            self._check_headers(scope)
            if not is_open:
                caller = self._keys.caller(_authorization(scope))
            exchange.caller = "" if caller == ANYBODY else caller
            most = self._most_bytes(path)
            self._check_length(header(scope, "content-length"), most)
            _check_encoding(header(scope, "content-encoding"))
            if scope["method"] in ("POST", "PUT"):
                self._limits.enter(caller)
                counted = True
        except ApiError as error:
            await error.response(path)(scope, receive, send)
            return
        scope.setdefault("state", {})["caller"] = caller
        scope["state"]["is_admin"] = self._keys.is_admin(caller)
        try:
            await self._app(scope, self._limited(scope, receive, most), send)
        finally:
            if counted:
                self._limits.leave(caller)

    def _most_bytes(self, path: str) -> int:
        return self._config.max_file_bytes if path == UPLOAD_PATH else self._config.max_body_bytes

    def _check_headers(self, scope: Scope) -> None:
        """Check the size of the headers: the parser limits only heads that arrive in pieces."""
        most = self._config.max_header_bytes
        if sum(len(name) + len(value) for name, value in scope["headers"]) > most:
            raise ApiError(431, f"the headers are larger than {most} bytes (max_header_bytes)")

    def _check_length(self, text: str | None, most: int) -> None:
        if text is not None and (not text.isascii() or not text.isdigit() or int(text[:20]) > most):
            raise _too_large(most)

    def _limited(self, scope: Scope, receive: Receive, most: int) -> Receive:
        """Count the bytes of a body as they arrive, and limit the time between two pieces."""
        seen, is_whole, streams = 0, False, is_ndjson(scope)
        wait_s = self._config.prompt_idle_s if streams else self._config.body_timeout_s

        async def limited() -> Message:
            nonlocal seen, is_whole
            if is_whole:  # the next message is the disconnect
                return await receive()
            try:
                if scope["state"].get("is_whole"):  # the whole body is here
                    message = await receive()
                else:
                    async with asyncio.timeout(wait_s):
                        message = await receive()
            except TimeoutError:
                if streams:
                    self._metrics.abandoned.inc()
                text = f"no more of the body came for {wait_s:g} s"
                code = "prompt_abandoned" if streams else "body_timeout"
                raise ApiError(408, text, code=code) from None
            seen += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if seen > most:
                raise _too_large(most)
            return message

        return limited


def _check_encoding(text: str | None) -> None:
    if text is not None and text.strip().lower() not in ("", "identity"):
        raise ApiError(415, f"the header Content-Encoding is {text!r:.80}; send the body plain")


def _authorization(scope: Scope) -> str:
    """Return the Authorization header, or Anthropic's `x-api-key` in that form."""
    if given := header(scope, "authorization"):
        return given
    key = header(scope, "x-api-key")
    return "" if key is None else f"Bearer {key}"


def _too_large(most: int) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than {most} bytes (max_body_bytes, for files max_file_bytes)",
        code="body_too_large",
    )
