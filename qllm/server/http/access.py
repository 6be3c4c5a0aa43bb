"""The access log: a line per HTTP request, with its class, TTFT and tokens."""

import asyncio
import logging
import re
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from starlette.types import Scope

from qllm.frontend.handle import Result
from qllm.server.http.headers import header

PROBES = frozenset({"/health", "/ready", "/metrics"})
"""Paths that are polled every few seconds; only their errors are logged."""

ANYBODY = "anybody"
"""Name of the caller if no API keys are configured."""
LATER_S = 0.005
"""Seconds until a line is written, so that writing does not delay the answer."""
CURRENT: ContextVar["Exchange | None"] = ContextVar("qllm_exchange", default=None)
"""The exchange that this task answers."""

PLAIN = "-._~:/+=@%"
"""Characters, in addition to ASCII letters and digits, that a line shows unescaped."""

_is_plain = re.compile(f"[A-Za-z0-9{re.escape(PLAIN)}]*").fullmatch
_log = logging.getLogger("qllm.server.http.access")


def plain(text: str) -> str:
    """Return a client's text escaped: no blank, quote or line break in it can imitate a field."""
    return text if _is_plain(text) else quote(text, safe=PLAIN, errors="backslashreplace")


@dataclass(slots=True)
class Exchange:
    """An HTTP request and its answer, or the line of a batch.

    Its line is written when the response has ended and the engine has finished every answer that it
    opened.
    """

    caller: str
    """Digest of the API key."""
    log: "Log | None" = None
    """Log that its line goes to; None for the line of a batch."""
    line: str = ""
    """Method and path."""
    client: str = ""
    program: str = ""
    """Name of the client's program, without its release."""
    request_id: str = ""
    """Value of the answer's `x-request-id` header."""
    start_s: float = field(default_factory=time.monotonic)
    status: int = 0
    ended_s: float | None = None
    num_open: int = 0
    """Number of answers that the engine works on."""
    answers: list[tuple[str, str, bool]] = field(default_factory=list)
    """Id, class, and True if it was demoted, of each answer."""
    results: list[Result] = field(default_factory=list)

    @classmethod
    def of(cls, scope: Scope, caller: str, log: "Log | None") -> "Exchange":
        """Return the exchange of a request over HTTP."""
        path = scope.get("raw_path") or scope["path"].encode("utf-8", "backslashreplace")
        client = scope.get("client") or ("-", 0)
        program = (header(scope, "user-agent") or "").partition("/")[0]
        return cls(
            caller=caller,
            log=log,
            line=f"{scope['method']} {plain(path.decode('latin-1')):.200}",
            client=str(client[0]),
            program=plain(program)[:40],
        )

    @property
    def who(self) -> str:
        """The client: its API key's digest or its address, and its program."""
        return " ".join(filter(None, (self.caller or self.client, self.program)))

    def opened(self, answer_id: str, class_name: str, demoted: bool) -> None:
        """Count an answer that the engine has started to work on."""
        self.num_open += 1
        self.answers.append((plain(answer_id), class_name, demoted))

    def settled(self, results: list[Result]) -> None:
        """Count an answer that the engine has finished; a failed one has no result."""
        self.num_open -= 1
        self.results += results
        self._tell()

    def ended(self, status: int) -> None:
        """Record the end of the response, or of its client's connection."""
        self.status, self.ended_s = status, time.monotonic()
        self._tell()

    def _tell(self) -> None:
        if self.log is not None and self.ended_s is not None and not self.num_open:
            self.log.add(self)

    def write(self) -> None:
        """Write the line, unless it is that of a successful probe."""
        is_told = self.status >= 400 or self.line.partition(" ")[2] not in PROBES
        if not is_told or not _log.isEnabledFor(logging.INFO):
            return
        found = self.fields()
        shown = " ".join(f"{k}={v}" for k, v in found.items() if k not in ("request", "status"))
        values = (self.line, self.status, shown)
        record = logging.LogRecord(_log.name, logging.INFO, __file__, 0, '"%s" %s %s', values, None)
        record.__dict__["fields"] = found
        _log.handle(record)  # `info` would search the stack for the calling line

    def fields(self) -> dict[str, Any]:
        """Return the fields of the line."""
        assert self.ended_s is not None
        found: dict[str, Any] = {"request": self.line, "status": self.status}
        found |= {"client": self.client, "ms": round(1e3 * (self.ended_s - self.start_s))}
        if self.caller:
            found["key"] = self.caller
        asked = plain(self.request_id)
        if asked and asked not in (answer[0] for answer in self.answers):
            found["x_request_id"] = asked[:80]
        if self.answers:
            found["id"], found["class"], demoted = self.answers[0]
            if demoted:
                found["demoted"] = True
            found |= _of_results(self.results)
        return found


class Log:
    """The log lines of a server, written shortly after their answers. Lives on one event loop."""

    def __init__(self) -> None:
        self._due: list[Exchange] = []

    def add(self, exchange: Exchange) -> None:
        """Write the line of an exchange after `LATER_S`."""
        self._due.append(exchange)
        if len(self._due) == 1:
            asyncio.get_running_loop().call_later(LATER_S, self.write)

    def write(self) -> None:
        """Write the lines that are due."""
        due, self._due = self._due, []
        for exchange in due:
            exchange.write()


def _of_results(results: list[Result]) -> dict[str, Any]:
    """Return the fields of results: TTFT of the first token, and tokens of all choices."""
    metrics = [result.metrics for result in results]
    ttfts = [m.ttft_ms for m in metrics if m.ttft_ms is not None]
    found: dict[str, Any] = {} if not ttfts else {"ttft_ms": round(min(ttfts), 1)}
    if metrics:
        found["prompt_tokens"] = max(m.num_prompt_tokens for m in metrics)
        found["output_tokens"] = sum(m.num_output_tokens for m in metrics)
        found["preemptions"] = sum(m.preemptions for m in metrics)
        found["finish"] = ",".join(sorted({result.finish_reason.value for result in results}))
    return found


def begin(caller: str) -> None:
    """Start an exchange without an HTTP request: for a batch line or a background response."""
    CURRENT.set(Exchange("" if caller == ANYBODY else caller))
