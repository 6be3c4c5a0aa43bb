"""The worker of batches.

Every line is one BE request. The next server continues unfinished batches.

validating -> in_progress -> finalizing -> completed
    |              |  (time over)     `--> expired
    `-> failed     `-> cancelling -------> cancelled
"""

import asyncio
import json
import logging
import secrets
import sqlite3
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from qllm.server.api import chat, completions
from qllm.server.api.answers import Renderer, chosen_for_batch, owner_of
from qllm.server.api.best_effort import BestEffort, EngineGoneError
from qllm.server.api.protocol import ChatRequest, CompletionRequest
from qllm.server.api.response_writer import ResponseWriter
from qllm.server.api.responses_protocol import ENDPOINT as RESPONSES_ENDPOINT
from qllm.server.api.responses_protocol import ResponsesRequest
from qllm.server.batch.input import Digested, checked
from qllm.server.http import access
from qllm.server.http.errors import ApiError, parse
from qllm.server.http.fields import Body
from qllm.server.requests.apart import NICE
from qllm.server.requests.ask import Ask
from qllm.server.requests.bodies import chat_of, loads, packed
from qllm.server.requests.front import Front
from qllm.server.state.store import UNFINISHED, Row, Store, now
from qllm.types import Priority

MAX_LINES = 50_000
MAX_ERRORS = 100
"""Most errors that are reported for one file."""
BYTES_AT_ONCE = 65_536
"""Bytes read from a file at a time. A block also includes the rest of its last line."""
STORAGE_RETRY_S = 5.0
"""Seconds until a batch is retried after a failed write to disk."""

DAMAGED_FILE = "the input file is damaged or missing on the server's disk; upload it again"

_log = logging.getLogger("qllm.server.batch")


class Line(Body):
    """A line of an input file."""

    custom_id: str = Field(min_length=1, max_length=512)
    method: str
    url: str
    body: dict[str, Any]


class Problem(NamedTuple):
    """A reason why a file is not a valid batch."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


def problems(lines: Iterator[bytes], endpoint: str, most_bytes: int) -> tuple[int, list[Problem]]:
    """Return the number of lines in a file, and the problems of these lines.

    Args:
        lines: Lines of the file.
        endpoint: Endpoint that every line must name.
        most_bytes: Most bytes of a line, the same limit as for the body of a request.
    """
    found: list[Problem] = []
    seen: set[str] = set()
    total = 0
    for total, text in enumerate(lines, 1):
        if len(found) >= MAX_ERRORS or total > MAX_LINES:
            break
        if len(text) > most_bytes:
            what = f"the line has {len(text)} bytes; at most {most_bytes} (max_body_bytes)"
            found.append(Problem("line_too_large", what, total))
            continue
        problem = _problem(text, endpoint, seen, total)
        if problem is not None:
            found.append(problem)
    if total > MAX_LINES:
        found.append(Problem("too_many_lines", f"a batch has at most {MAX_LINES} lines"))
    if not total:
        found.append(Problem("empty_file", "the file has no lines"))
    return total, found


def _problem(text: bytes, endpoint: str, seen: set[str], number: int) -> Problem | None:
    try:
        data = loads(text)
    except ApiError as error:
        return Problem("invalid_json_line", error.message, number)
    except (ValueError, RecursionError) as error:
        return Problem("invalid_json_line", f"not JSON: {error}", number)
    try:
        line: Line = parse(Line, data)
    except ApiError as error:
        return Problem("invalid_line", error.message, number, error.param)
    if line.method != "POST" or line.url != endpoint:
        text_ = f"{line.method} {line.url} must be POST {endpoint}, the batch's endpoint"
        return Problem("mismatched_url", text_, number, "url")
    if line.custom_id in seen:
        text_ = f"custom_id {line.custom_id!r:.80} is not unique"
        return Problem("duplicate_custom_id", text_, number, "custom_id")
    seen.add(line.custom_id)
    return None


def problems_of(
    path: Path, endpoint: str, most_bytes: int
) -> tuple[int, list[Problem], bytes, bytes]:
    """Return `problems` of the file at a path, with the digests of its lines and of the file."""
    with open(path, "rb") as file:
        lines = Digested(file)
        total, found = problems(iter(lines), endpoint, most_bytes)
    return total, found, bytes(lines.of_lines), lines.of_file


def custom_id_of(text: bytes) -> str:
    """Return the `custom_id` of a line."""
    return str(loads(text)["custom_id"])


def line_of(text: bytes, endpoint: str) -> tuple[str, Any]:
    """Return a line's `custom_id`, and the line's body or the `ApiError` that refuses the line."""
    line = loads(text)
    try:
        return line["custom_id"], _body_of(line["body"], endpoint, len(text))
    except ApiError as error:
        return line["custom_id"], error


def _body_of(body: dict[str, Any], endpoint: str, num_bytes: int) -> Any:
    if body.get("stream"):
        raise ApiError(400, "a batch line cannot be a stream; leave stream out", param="stream")
    if body.get("prompt_id") is not None:
        raise ApiError(400, "a batch line has a prompt of its own", param="prompt_id")
    models: dict[str, type[Body]] = {
        chat.ENDPOINT: ChatRequest,
        completions.ENDPOINT: CompletionRequest,
        RESPONSES_ENDPOINT: ResponsesRequest,
    }
    return packed(parse(models[endpoint], body), num_bytes)


async def prepare(front: Front, body: Any) -> tuple[Ask, Renderer]:
    """Return the engine request for a line's body, and the writer of the answer.

    Args:
        front: Front of the line's model.
        body: Body of the line.

    Raises:
        ApiError: The body is wrong.
    """
    front.told.headers(body.all_unserved)
    if isinstance(body, ChatRequest):
        chat_writer = chat.ChatWriter(front, body)
        return chat.ask_of(front, body, chat_writer.answer_id, None), chat_writer
    if isinstance(body, ResponsesRequest):
        return await _prepare_response(front, body)
    writer = completions.CompletionWriter(front, body)
    return completions.ask_of(body, writer.answer_id, None), writer


async def _prepare_response(front: Front, body: ResponsesRequest) -> tuple[Ask, Renderer]:
    for name in ("previous_response_id", "background", "store"):
        if getattr(body, name):
            text = f"a batch line has no {name}: what it answers is in the output file only"
            raise ApiError(400, text, param=name)
    asked: ChatRequest = await front.best_effort(body.num_bytes, chat_of, body)
    writer = ResponseWriter(front, body, asked, None)
    return chat.ask_of(front, asked, writer.answer_id, None), writer


class Worker:
    """The worker for the lines of all unfinished batches. Lives on one event loop.

    Unanswered lines outlive the engine. They wait for the next engine, and after the server's end
    for the next server. After an engine died, the worker retries its lines one by one. A line has
    failed if an engine dies again during the line.
    """

    def __init__(self, front: Front, store: Store, best_effort: BestEffort) -> None:
        self._front = front
        self._store = store
        self._best_effort = best_effort
        self._batches: dict[str, asyncio.Task[None]] = {}
        self._stopper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Continue the batches that the previous server left unfinished."""
        self._stopper = asyncio.create_task(self._stop_at_drain())
        for batch_id in await asyncio.to_thread(self._store.unfinished):
            self.begin(batch_id)

    async def _stop_at_drain(self) -> None:
        await self._front.draining.wait()
        for task in self._batches.values():
            task.cancel()

    async def close(self) -> None:
        """Stop at once. Unanswered lines stay for the next server."""
        tasks = [*self._batches.values(), *([self._stopper] if self._stopper else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def begin(self, batch_id: str) -> None:
        """Start to work on a batch."""
        if not self._front.draining.is_set():
            task = asyncio.create_task(self._run(batch_id))
            self._batches[batch_id] = task
            task.add_done_callback(lambda _: self._batches.pop(batch_id, None))

    def cancel(self, batch_id: str) -> None:
        """Stop the lines of a batch in status `cancelling`, and end it."""
        task = self._batches.get(batch_id)
        if task is None:
            self.begin(batch_id)
        else:
            task.cancel()
            task.add_done_callback(lambda _: self.begin(batch_id))

    async def _run(self, batch_id: str) -> None:
        try:
            while True:
                try:
                    return await self._advance(batch_id)
                except EngineGoneError:
                    _log.warning("batch %s waits for an engine", batch_id)
                except (OSError, sqlite3.Error) as error:  # for example a full disk
                    _log.warning("batch %s waits for its storage: %s", batch_id, error)
                    await asyncio.sleep(STORAGE_RETRY_S)
                await self._best_effort.engine()
        except Exception:  # noqa: BLE001 - logged; the other batches continue
            _log.exception("batch %s stopped; the next server goes on with it", batch_id)

    async def _advance(self, batch_id: str) -> None:
        """Advance a batch from its current status to the end."""
        store = self._store
        batch = await asyncio.to_thread(store.batch, batch_id)
        if batch["status"] == "validating":
            await asyncio.to_thread(self._validate, batch)
        elif batch["status"] == "cancelling":
            await asyncio.to_thread(store.finish, batch_id, "cancelled")
        elif batch["status"] == "in_progress":
            await self._answer_all(batch)
            await asyncio.to_thread(store.move, batch_id, "finalizing", only_from=("in_progress",))
        elif batch["status"] == "finalizing":
            has_all = batch["num_ok"] + batch["num_failed"] == batch["total"]
            if not has_all:
                await asyncio.to_thread(self._expire, batch)
            await asyncio.to_thread(store.finish, batch_id, "completed" if has_all else "expired")
        if batch["status"] in UNFINISHED:
            await self._advance(batch_id)

    def _validate(self, batch: Row) -> None:
        file = self._store.file(batch["input_file_id"], batch["owner"])
        total, found, of_lines = 0, [Problem("input_damaged", DAMAGED_FILE)], b""
        if file is not None and self._store.is_whole(file):
            path, most = self._store.path(file["id"]), self._front.config.max_body_bytes
            what = (path, batch["endpoint"], most)
            num_bytes = path.stat().st_size
            of_file = None
            try:
                looked = self._front.apart.do(num_bytes, problems_of, *what, nice=NICE)
                total, found, of_lines, of_file = looked
            except ApiError as error:
                _refuse_outage(error)
                found = [Problem(str(error.code), error.message)]
            if not found and file["digest"] not in (None, of_file):  # changed since its upload
                found = [Problem("input_damaged", DAMAGED_FILE)]
        if found:
            errors = json.dumps({"object": "list", "data": [p._asdict() for p in found]})
            self._store.move(batch["id"], "failed", only_from=("validating",), errors=errors)
        else:
            self._store.accept(batch["id"], of_lines, total)

    async def _answer_all(self, batch: Row) -> None:
        """Answer the unanswered lines, until the batch's time is over."""
        done = await asyncio.to_thread(self._store.answered, batch["id"])
        lines = await asyncio.to_thread(self._lines, batch, done)
        running: set[asyncio.Task[None]] = set()
        try:
            async with asyncio.timeout(max(0, batch["expires_at"] - now())):
                while some := await asyncio.to_thread(_some, lines):
                    for number, text in some:
                        if text is None:
                            await asyncio.to_thread(self._lost, batch, number)
                        else:
                            await self._start_line(batch, number, text, running)
                await _all(running)
        except TimeoutError:
            pass
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _lines(self, batch: Row, done: set[int]) -> Iterator[tuple[int, bytes | None]]:
        """Yield the unanswered lines. The text of a damaged or missing line is None."""
        path, digests = self._store.path(batch["input_file_id"]), self._store.digests(batch["id"])
        found = checked(path, batch["total"], digests)
        return ((number, text) for number, text in found if number not in done)

    def _lost(self, batch: Row, number: int) -> None:
        """Answer a damaged or missing line with an error."""
        what = f"line {number + 1} of the input is damaged or missing on the server's disk"
        _log.warning("batch %s: %s", batch["id"], what)
        error = {"code": "input_damaged", "message": f"{what}; ask it again", "line": number + 1}
        self._end_line(batch, number, None, error)

    def _end_line(self, batch: Row, number: int, custom_id: str | None, error: Row) -> None:
        record = {
            "id": f"batch_req_{secrets.token_hex(12)}",
            "custom_id": custom_id,
            "response": None,
            "error": error,
        }
        self._store.answer(batch["id"], number, False, record)

    async def _start_line(
        self, batch: Row, number: int, text: bytes, running: set[asyncio.Task[None]]
    ) -> None:
        permits = await self._best_effort.take((batch["id"], number))
        task = asyncio.create_task(self._line(batch, number, text))
        task.add_done_callback(lambda _: self._best_effort.give_back(permits))
        failed = [t for t in running if t.done()]
        running.difference_update(failed)
        running.add(task)
        for old in failed:
            old.result()

    async def _line(self, batch: Row, number: int, text: bytes) -> None:
        place, what = (batch["id"], number), (text, batch["endpoint"])
        do = self._front.best_effort
        try:
            custom_id, given = await do(len(text), line_of, *what)
        except ApiError as error:  # the line is too costly to read
            _refuse_outage(error)
            custom_id, given = await self._front.in_thread(Priority.BE, self._name_of, text), error
        request_id = f"batch_req_{secrets.token_hex(12)}"
        try:
            access.begin(batch["owner"])
            if isinstance(given, ApiError):
                raise given
            status, body = 200, await self._ask(batch, given, place)
        except ApiError as error:
            status, body = error.status_code, error.body()
        except EngineGoneError:
            raise
        except Exception as error:  # noqa: BLE001 - logged, and becomes this line's answer
            _log.exception("a line of batch %s failed", batch["id"])
            failed = ApiError(500, f"the server failed: {type(error).__name__}")
            status, body = failed.status_code, failed.body()
        record = {
            "id": request_id,
            "custom_id": custom_id,
            "response": {"status_code": status, "request_id": request_id, "body": body},
            "error": None,
        }
        await _uncancelled(
            asyncio.to_thread(self._store.answer, batch["id"], number, status == 200, record)
        )
        self._front.metrics.batch_line(status)
        self._best_effort.forget(place)

    async def _ask(self, batch: Row, body: Any, place: tuple[str, int]) -> dict[str, Any]:
        owner = batch["owner"]
        front = chosen_for_batch(self._front, body)
        ask, writer = await prepare(front, body)
        salt = blake2b(f"{place[0]}\n{ask.cache_salt}".encode("utf-8", "surrogatepass")).hexdigest()
        ask = replace(ask, cache_owner=owner_of(owner), cache_salt=salt)
        return await self._best_effort.answer(front, place, ask, writer)

    def _expire(self, batch: Row) -> None:
        """Answer every unanswered line with an error."""
        done = self._store.answered(batch["id"])
        error = {"code": "batch_expired", "message": "the batch's completion window is over"}
        for number, text in self._lines(batch, done):
            if text is None:
                self._lost(batch, number)
            else:
                self._end_line(batch, number, self._name_of(text), error)

    def _name_of(self, text: bytes) -> str | None:
        """Return the `custom_id` of a line; None if the line is too costly to read."""
        try:
            found: str = self._front.apart.do(len(text), custom_id_of, text, nice=NICE)
        except ApiError:
            return None
        return found


def _refuse_outage(error: ApiError) -> None:
    """Raise if the error is an outage, and not the fault of a line or a file.

    Raises:
        EngineGoneError: The work must be retried.
    """
    if error.status_code == 503:
        raise EngineGoneError from error


def _some(lines: Iterator[tuple[int, bytes | None]]) -> list[tuple[int, bytes | None]]:
    """Return the next lines, about `BYTES_AT_ONCE` bytes; an empty list after the last line."""
    found, num_bytes = [], 0
    for number, text in lines:
        found.append((number, text))
        num_bytes += 1 if text is None else len(text)
        if num_bytes >= BYTES_AT_ONCE:
            break
    return found


async def _uncancelled(work: Coroutine[Any, Any, None]) -> None:
    """Finish `work` even when cancelled, because later steps rely on its effect."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


async def _all(tasks: set[asyncio.Task[None]]) -> None:
    """Wait for all tasks, but raise the first failure at once."""
    if tasks:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
