"""Conversion of an answer's pieces to HTTP: one JSON body, or server-sent events."""

import asyncio
import json
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from qllm.fleet.models import AUTO
from qllm.frontend.detokenizer import bytes_of, token_text
from qllm.frontend.handle import Piece
from qllm.names import token_hex
from qllm.server.api.protocol import Generation, StreamOptions
from qllm.server.http.connection import Presence
from qllm.server.http.errors import ApiError, logged
from qllm.server.http.headers import header
from qllm.server.http.lines import on_one_line
from qllm.server.requests.ask import Ask, LossyAnswers, Sends, check_alone
from qllm.server.requests.auto import choose
from qllm.server.requests.front import Front
from qllm.server.requests.open_answer import Answer, Comment
from qllm.types import FinishReason, Logprobs, Priority

HEADER = "x-qllm-priority"
OBJECTIVES = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
"""Headers of the Gateway API Inference Extension: name of an InferenceObjective (`objectives`)."""
DYNAMO = "x-dynamo-request-priority"
"""Header with an integer priority: below 0 is BE, any other is LS."""
CLIENT_GONE = 499
"""nginx's status for a client that has gone; only logs and metrics see it."""

LEAST_LOGPROB = -9999.0
"""Smallest log-probability shown, the same as in vLLM."""

_NOTHING: Mapping[str, Any] = {}
_T = TypeVar("_T")
_log = logging.getLogger("qllm.server")


class Shown(NamedTuple):
    """A token and its log-probability, at one position."""

    token: str
    logprob: float
    data: bytes
    """Bytes of the token; a character may consist of the bytes of several tokens."""


class Tokens:
    """A converter of tokens to texts. Log-probabilities stay finite, because JSON has no -inf.

    Args:
        front: Front with the model's tokenizer.
    """

    def __init__(self, front: Front) -> None:
        self._front = front
        self._known: dict[int, tuple[str, bytes]] = {}
        """Cache of texts and bytes, by token id."""

    def shown(self, token_id: int, logprob: float, added: str | None = None) -> Shown:
        """Return a token's text and bytes with its log-probability.

        Args:
            token_id: The token.
            logprob: Its log-probability.
            added: Text that it added to an answer, if it is in one. Shorter than the token's own
                text if the decoder strips the leading space.
        """
        text, data = self._known.get(token_id) or self._look_up(token_id)
        if added is not None and text == f" {added}":
            text, data = added, added.encode()
        return Shown(text, max(logprob, LEAST_LOGPROB), data)

    def _look_up(self, token_id: int) -> tuple[str, bytes]:
        tokenizer = self._front.engine.tokenizer
        if tokenizer is None:
            text = f"token_id:{token_id}"
            found = text, text.encode()
        else:
            text = token_text(tokenizer, token_id)
            found = text, bytes_of(tokenizer, token_id, text)
        self._known[token_id] = found
        return found


class Renderer(Protocol):
    """A view of one answer in the shape of its endpoint."""

    answer_id: str

    def serve(self, answer: Answer, asked: str | None) -> None:
        """Record the class that the request was given, and the one that it asked for."""
        ...

    async def body(self, answer: Answer) -> dict[str, Any]:
        """Wait for the answer, and return its whole body."""
        ...

    def events(self, answer: Answer, body: Any, silence_s: float) -> AsyncIterator[str]:
        """Yield the events of the answer as it grows; see `stream`."""
        ...

    def error_event(self, error: ApiError) -> str:
        """Return the event that ends a failed stream."""
        ...


class Writer(ABC):
    """A converter of a request's pieces to the JSON of an endpoint with choices.

    Args:
        front: Front with the model's name and tokenizer.
        prefix: Prefix of the answer's id.
        asked: Body of the request.
    """

    kind: str
    """`object` of a whole answer."""
    chunk_kind: str
    """`object` of a chunk of a stream."""
    has_prompts_in_choices = True
    """True if each choice reports on its prompt; else the body does, as in vLLM."""

    def __init__(self, front: Front, prefix: str, asked: Generation) -> None:
        self.answer_id = f"{prefix}-{asked.request_id or token_hex(12)}"
        self.shows_ids = bool(asked.return_token_ids)
        self._front = front
        self._created = int(time.time())
        self.tier = "default"
        self._shows_prompt = asked.prompt_logprobs is not None
        self._shows_tokens = True
        """Value of `Answer.shows_tokens`."""
        self._of_prompts: dict[int, list[Any]] = {}
        """Log-probabilities of each choice's prompt, if requested."""
        self._shown_ids: set[int] = set()
        """Choices whose prompt ids were already sent."""
        self.shown = Tokens(front).shown
        self.prompts: list[tuple[int, ...]] = []
        """Token ids of each choice's prompt, after `serve`."""

    def serve(self, answer: Answer, asked: str | None) -> None:
        """Record the class that the request was given, and its prompts."""
        served, self._shows_tokens = answer.served, answer.shows_tokens
        self.prompts = [handle.prompt_token_ids for handle in answer.handles]
        is_ls = served.priority is Priority.LS
        self.tier = "priority" if is_ls and asked == "priority" else served.tier

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the fields that every body of the answer has."""
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self._created,
            "model": self._front.model_name,
            "service_tier": self.tier,
            "choices": choices,
        }

    def alternatives(
        self, token_id: int, logprobs: Logprobs, added: str | None = None
    ) -> tuple[Shown, list[Shown]]:
        """Return the chosen token, with its added text, and the most likely alternatives."""
        top = [self.shown(i, value) for i, value in logprobs.top]
        return self.shown(token_id, logprobs.chosen, added), top

    async def made(
        self, answer: Answer, make: Callable[[int, Any], _T], index: int, item: Any
    ) -> _T:
        """Return `make(index, item)`; run it off the event loop if it shows a whole prompt."""
        if not isinstance(item, Piece) or item.prompt is None:
            return make(index, item)
        found: _T = await self._front.in_thread(answer.served.priority, make, index, item)
        return found

    def part(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return a part of a whole answer, and store its log-probabilities of the prompt."""
        if self._shows_prompt and piece.prompt is not None:
            both = zip(self.prompts[index][1:], piece.prompt.tokens(), strict=True)
            self._of_prompts[index] = [None, *(self._of_token(*pair) for pair in both)]
        return self.chunk(index, piece)

    def _of_token(self, token_id: int, logprobs: Logprobs) -> dict[str, Any]:
        """Return vLLM's entry for a token: by id, with its rank if it is among the alternatives."""
        ranks = {i: rank for rank, (i, _) in enumerate(logprobs.top, 1)}
        values = {token_id: logprobs.chosen, **dict(logprobs.top)}
        shown = {i: self.shown(i, value) for i, value in values.items()}
        return {
            str(i): {"logprob": x.logprob, "rank": ranks.get(i), "decoded_token": x.token}
            for i, x in shown.items()
        }

    def of_prompt(self, index: int) -> dict[str, Any]:
        """Return the field with the prompt's log-probabilities; empty if not requested."""
        return {"prompt_logprobs": self._of_prompts.get(index)} if self._shows_prompt else {}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the first chunk of a choice, before any text; None for none."""
        return None

    def usage(self, answer: Answer) -> dict[str, Any]:
        """Return the tokens of the answer so far."""
        return answer.usage()

    @staticmethod
    def models(answer: Answer) -> dict[str, Any]:
        """Return the field that names the candidates of a lossy answer; empty for an exact one."""
        course = answer.course
        return {} if course is None else {"system_fingerprint": f"lossy:{course}"}

    @abstractmethod
    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return a choice of a stream that grows by a piece."""

    @abstractmethod
    def end(self, index: int, reason: FinishReason) -> dict[str, Any]:
        """Return a choice of a stream that ends."""

    def choice(self, index: int, item: Piece | FinishReason) -> dict[str, Any]:
        """Return a choice of a stream that grows or ends."""
        if not isinstance(item, Piece):
            return self.end(index, item)
        return {**self.chunk(index, item), **self.ids(index, item.token_ids)}

    def ids(self, index: int, token_ids: Sequence[int]) -> dict[str, Any]:
        """Return a part's token ids, if requested; a choice's first part also has its prompt's."""
        if not self.shows_ids:
            return {}
        found = {"token_ids": list(token_ids) if self._shows_tokens else []}
        if self.has_prompts_in_choices and index not in self._shown_ids:
            self._shown_ids.add(index)
            found["prompt_token_ids"] = list(self.prompts[index])
        return found

    def beside(self) -> dict[str, Any]:
        """Return the body's fields about its one prompt; a stream has them in its first chunk."""
        if self.has_prompts_in_choices:
            return {}
        ids = {"prompt_token_ids": list(self.prompts[0])} if self.shows_ids else {}
        return {**ids, **self.of_prompt(0)}

    async def body(self, answer: Answer) -> dict[str, Any]:
        """Wait for all choices and return the body."""
        return await complete(answer, self)

    def events(self, answer: Answer, body: Any, silence_s: float) -> AsyncIterator[str]:
        """Yield the events of an answer."""
        return _events(answer, self, body.stream_options or StreamOptions(), silence_s)

    def error_event(self, error: ApiError) -> str:
        """Return the event that ends a failed stream."""
        return event(error.body())

    @abstractmethod
    def whole(self, index: int, pieces: list[dict[str, Any]], reason: FinishReason) -> Any:
        """Return a whole choice, made of the chunks of its pieces."""


async def complete(answer: Answer, writer: Writer) -> dict[str, Any]:
    """Wait for all choices and return the body."""
    made: list[list[dict[str, Any]]] = [[] for _ in answer.handles]
    choices: list[Any] = [None] * len(answer.handles)
    async for index, item in answer.pieces():
        if isinstance(item, Piece):
            made[index].append(await writer.made(answer, writer.part, index, item))
        elif isinstance(item, FinishReason):
            ids = writer.ids(index, answer.handles[index].token_ids)
            whole = writer.whole(index, made[index], item)
            said = writer.of_prompt(index) if writer.has_prompts_in_choices else {}
            choices[index] = {**whole, **ids, **said}
    body = {**writer.envelope(writer.kind, choices), **writer.models(answer)}
    return {**body, "usage": writer.usage(answer), **writer.beside()}


def event(data: object) -> str:
    """Return a server-sent event."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"data: {on_one_line(text)}\n\n"


async def stream(
    answer: Answer, renderer: Renderer, body: Any, silence_s: float
) -> AsyncIterator[str]:
    """Yield the events of an answer. An error is also an event, and the last one.

    While no tokens arrive, a comment is sent every `silence_s` seconds, so that proxies do not
    close the connection as idle.
    """
    try:
        async for text in renderer.events(answer, body, silence_s):
            yield text
    except ApiError as error:
        yield renderer.error_event(error)
    except Exception as error:  # noqa: BLE001 - a part was sent, so the error is an event
        yield renderer.error_event(logged(error, "a stream"))


async def _events(
    answer: Answer, writer: Writer, options: StreamOptions, silence_s: float
) -> AsyncIterator[str]:
    beside = writer.beside()

    def wrap(choices: list[dict[str, Any]], said: Mapping[str, Any] = _NOTHING) -> str:
        body = {**writer.envelope(writer.chunk_kind, choices), **beside, **said}
        beside.clear()
        if options.continuous_usage_stats:
            body["usage"] = writer.usage(answer)
        elif options.include_usage:
            body["usage"] = None
        return event(body)

    def shown(index: int, item: Piece | FinishReason | Comment) -> str:
        if isinstance(item, Comment):
            return f": {item.text}\n\n"
        is_last = isinstance(item, FinishReason)
        return wrap([writer.choice(index, item)], writer.models(answer) if is_last else _NOTHING)

    for index in range(len(answer.handles)):
        if opening := writer.opening(index):
            yield wrap([opening])
    async for index, item in answer.pieces(silence_s):
        yield await writer.made(answer, shown, index, item)
    if options.include_usage:
        body = {**writer.envelope(writer.chunk_kind, []), **writer.models(answer)}
        yield event({**body, "usage": writer.usage(answer)})
    yield "data: [DONE]\n\n"


class Whole(JSONResponse):
    """A response with a whole body, which closes its answer after sending."""

    def __init__(self, body: Any, on_close: Callable[[], None], headers: dict[str, str]) -> None:
        super().__init__(body, headers=headers)
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
            await asyncio.sleep(0)  # writes go out at the end of the loop's iteration
        finally:
            self._on_close()


class EventStream(StreamingResponse):
    """A stream of server-sent events, which closes its answer even if it is never read."""

    def __init__(
        self,
        events: AsyncIterator[str],
        on_close: Callable[[], None],
        headers: dict[str, str],
        stall_s: float,
    ) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers},
        )
        self._on_close, self._stall_s = on_close, stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self._stall_s):
                await send(message)

        scope["state"]["has_events"] = True
        try:
            await super().__call__(scope, receive, send_in_time)
        except* TimeoutError:
            _log.warning("a client took no bytes for %g s; its answer ends", self._stall_s)
        finally:
            self._on_close()


async def unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T | None:
    """Run `work`, but cancel it and return None if the client disconnects."""
    task = asyncio.current_task()
    assert task is not None
    is_gone = False

    def gone() -> None:
        nonlocal is_gone
        is_gone = True
        task.cancel()

    stop = _tell_when_gone(request, gone)
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone and task.uncancel() == 0:
            return None
        raise
    finally:
        stop()


def _tell_when_gone(request: Request, gone: Callable[[], None]) -> Callable[[], object]:
    """Call `gone` when the client disconnects; return a function that stops the watch."""
    presence: Presence | None = request.scope["state"].get("presence")
    if presence is not None:
        return presence.tell_when_gone(gone)

    async def wait() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone()

    return asyncio.create_task(wait()).cancel


def _class_of_gateway(request: Request, objectives: Mapping[str, str]) -> Priority | None:
    """Return the class that a gateway's header asks for; None without a known one."""
    for name in OBJECTIVES:
        if (found := objectives.get(header(request.scope, name) or "")) is not None:
            return Priority[found]
    if (text := header(request.scope, DYNAMO)) is None:
        return None
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text, re.ASCII):
        raise ApiError(400, f"{DYNAMO}: {text!r:.40} must be an integer", param=DYNAMO)
    return Priority.BE if int(text) < 0 else Priority.LS


def wanted_class(request: Request, by_body: Priority | None, front: Front) -> Priority:
    """Return the class that a request asks for.

    It is in `HEADER`, a gateway's header or the body; else it is the default of its API key.

    Raises:
        ApiError: The header contains no known class.
    """
    text = header(request.scope, HEADER)
    if text is None:
        by_gateway = _class_of_gateway(request, front.config.objectives)
        default = front.rule_of(request.state.caller).default
        return next((x for x in (by_gateway, by_body) if x is not None), default)
    if text.upper() not in Priority.__members__:
        raise ApiError(400, f"{HEADER}: {text!r:.40} must be LS or BE", param=HEADER)
    return Priority[text.upper()]


def front_of(request: Request, front: Front, body: Any) -> Front:
    """Return the front of the model that a body names, or that the server chooses for "auto".

    Raises:
        ApiError: No model has the name, or no model has room for the request.
    """
    if body.lossy:
        found: Front = _lossy_of(front, body).pick(_answer_of(body))
        return found
    if body.model != AUTO:
        return front.of(body.model)
    wanted = wanted_class(request, body.asked_class(), front)
    text = header(request.scope, "content-length") or ""
    num_bytes = int(text) if re.fullmatch("[0-9]{1,15}", text, re.ASCII) else body.num_bytes
    return choose(front, body.model, wanted, num_bytes, _answer_of(body))


def _lossy_of(front: Front, body: Any) -> LossyAnswers:
    """Return the owner of lossy answers.

    Raises:
        ApiError: 400, the server allows none, or the body names a model.
    """
    if (found := front.lossy) is None:
        why = (
            "this server does not allow lossy answers; leave it out, or name a model that is cut "
            "(GET /v1/models lists depths)"
        )
    elif body.model != AUTO:
        why = f"the server chooses the model, so model must be {AUTO!r}; or leave lossy out"
    else:
        return found
    raise ApiError(400, f"lossy=true: {why}", param="lossy", code="lossy_not_allowed")


def _answer_of(body: Any) -> int:
    """Return the number of tokens that a body asks for; 0 if it names none."""
    names = ("max_completion_tokens", "max_output_tokens", "max_tokens")
    return next((n for name in names if (n := getattr(body, name, None)) is not None), 0)


def chosen_for_batch(front: Front, body: Any) -> Front:
    """Return the front of the model that the body of a batch line names, as `front_of` does.

    Raises:
        ApiError: No model has the name, or the line is lossy.
    """
    if body.lossy:
        raise ApiError(
            400,
            "lossy=true: lines of batches are computed exactly; leave it out, or name a model that "
            "is cut",
            param="lossy",
            code="lossy_not_allowed",
        )
    return choose(front, body.model, Priority.BE, body.num_bytes, _answer_of(body))


def owner_of(caller: str) -> str:
    """Return the owner of a caller's cached KV; callers do not share it."""
    return f"key {caller}"


def ask_of(body: Generation, answer_id: str, timeout_s: float | None, **own: Any) -> Ask:
    """Return the request to the engine: the fields that all bodies share, and the body's own.

    Args:
        body: The body of a chat or a completion.
        answer_id: Name of the answer.
        timeout_s: Seconds after which the request ends; None is without an end.
        **own: Fields of `Ask` that only this kind of body has.
    """
    return Ask(
        answer_id=answer_id,
        n=body.n,
        max_tokens=body.most_tokens(),
        slo=None if body.slo is None else body.slo.slo(),
        timeout_s=timeout_s,
        truncate=body.truncate_prompt_tokens,
        cache_salt=body.cache_salt or "",
        cache_ttl_s=body.cache_ttl_s,
        num_bytes=body.num_bytes,
        **own,
    )


async def respond_to_prompt(
    request: Request,
    front: Front,
    prompts: Sends,
    renderer: Renderer,
    body: Generation,
    ask: Ask,
    *,
    is_chat: bool,
) -> Response:
    """Serve one HTTP request, with the streaming prompt that its body names, if it names one."""
    if body.prompt_id is None:
        return await respond(request, front, renderer, body, ask)
    check_alone(body)
    caller, name = request.state.caller, body.prompt_id
    with prompts.sending(front, caller, name, is_chat=is_chat) as opened:
        return await respond(request, front, renderer, body, replace(ask, opened=opened))


async def respond(
    request: Request, front: Front, renderer: Renderer, body: Any, ask: Ask
) -> Response:
    """Serve one HTTP request, as a stream if its body asks for one."""
    wanted = wanted_class(request, body.asked_class(), front)
    ignored = front.told.headers(body.all_unserved)

    async def work() -> Response:
        caller, other_id = request.state.caller, header(request.scope, "x-request-id")
        whose = replace(
            ask,
            cache_owner=owner_of(caller),
            caller=caller,
            other_id=other_id,
            silence_timeout_s=front.config.silence_timeout_s,
            lossy=front.lossy if body.lossy else None,
        )
        answer = await front.open(whose, wanted)
        try:
            await asyncio.sleep(0)  # the engine is notified, and computes during the rest
            renderer.serve(answer, body.service_tier)
            headers = {
                "x-request-id": renderer.answer_id,
                **answer.served.headers(),
                **({} if answer.course is not None else front.headers()),
                **ignored,
            }
            if body.stream:
                return EventStream(
                    stream(answer, renderer, body, front.config.comment_s),
                    answer.close,
                    headers,
                    front.config.stalled_client_s,
                )
            whole = await renderer.body(answer)
            if answer.course is not None:
                headers["x-qllm-models"] = str(answer.course)
            return Whole(whole, answer.close, headers)
        except BaseException:
            answer.close()
            raise

    return await unless_gone(request, work()) or Response(status_code=CLIENT_GONE)
