"""The routes' access to the engine: admission, tokenising off the event loop, open answers."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote
from weakref import WeakKeyDictionary

from qllm.errors import EngineClosedError, QllmError, RequestFailedError
from qllm.fleet.models import AUTO, refuse_same_names
from qllm.frontend.checks import FIT, longest
from qllm.frontend.handle import Handle, Result, all_ended
from qllm.frontend.request_log import RequestLog
from qllm.llm import QLLMEngine
from qllm.server.config import ServerConfig
from qllm.server.http import access
from qllm.server.http.errors import ApiError, from_engine
from qllm.server.http.keys import NO_RULE, Rule
from qllm.server.http.unknown import Told
from qllm.server.metrics import Metrics
from qllm.server.requests import texts
from qllm.server.requests.apart import LONG, NICE, Apart, Given
from qllm.server.requests.ask import TO_FIT, Ask, LossyAnswers, Served
from qllm.server.requests.inline_submit import AtOnce
from qllm.server.requests.open_answer import Answer
from qllm.server.requests.text_work import TextWork
from qllm.types import Priority, SamplingParams

_log = logging.getLogger("qllm.server")


class Front:
    """The server's access to the engine: submits requests and tracks them. Lives on one event loop.

    A server of several models has one front per model. A front knows one model's engine alone, so
    no request of a model can reach the engine of another one. The fronts share the names of
    models, the ids of open requests and the state of the server.

    This is one class, because submitting, changing and ending a request share the same counts.

    Args:
        engine: First engine.
        config: Settings of the server, with the names of this model.
        metrics: Metrics of this model.
        rules: Rules of callers.
        beside: Front of the server's first model; None makes the first front.

    Raises:
        ConfigError: Another model of the server has a name of this model.
    """

    def __init__(
        self,
        engine: QLLMEngine,
        config: ServerConfig,
        metrics: Metrics,
        rules: Mapping[str, Rule] | None = None,
        beside: "Front | None" = None,
    ) -> None:
        self.engine = engine
        """The current engine. The supervisor replaces an engine that has ended."""
        self.ended: WeakKeyDictionary[QLLMEngine, str] = WeakKeyDictionary()
        """Reason of failure of each earlier engine."""
        self.back_in_s: Callable[[], int] | None = None
        """Function that estimates the seconds until there is an engine; None if there will be none.
        """
        self.gave_up: str | None = None
        """Reason why the supervisor starts no further engine. The server then ends."""
        self.config = config
        self._rules = rules or {}
        """Rules by caller. Other callers have the default rule."""
        self.metrics = metrics
        if (fleet := engine.fleet) is None:
            self.log = RequestLog(config.max_replays, metrics.replayed.inc)
        else:  # a fleet never fails as a whole; it migrates requests by itself
            self.log, self.back_in_s = fleet.log, lambda: fleet.back_in_s
            self.log.on_replay = metrics.replayed.inc
        self.answers: set[Answer] = set()
        """Open answers, whose clients still wait."""
        self.draining: asyncio.Event = asyncio.Event() if beside is None else beside.draining
        """Event, set when the server is about to end and accepts no new request."""
        self.leaving = False
        """True if the server will drain soon. /ready reports this. Requests are still served."""
        self._ids: set[tuple[str, str]] = set() if beside is None else beside._ids
        """Caller and id of each open request that its caller has named. Ids are unique per caller.
        """
        self.lossy: LossyAnswers | None = None
        """Owner of the server's lossy answers; None if it allows none."""
        self._settling: set[asyncio.Task[None]] = set()
        self._text = {priority: TextWork(priority.name) for priority in Priority}
        """Threads for text work per class, so that no LS prompt waits for the tokenising of BE
        prompts.
        """
        self._at_once = AtOnce()
        self.apart = Apart(lambda: self.engine.tokenizer)
        """Runner of work whose cost grows with the body."""
        self._num_ls = 0
        self._by_name: dict[str, Front] = {} if beside is None else beside._by_name
        """The fronts of all models, by each name for clients."""
        refuse_same_names([*self._by_name, *config.model_names])
        self._by_name.update(dict.fromkeys(config.model_names, self))
        self.told: Told = (
            Told(_log, is_strict=config.strict_fields) if beside is None else beside.told
        )
        """Report of the ignored parts of requests."""

    @property
    def model_name(self) -> str:
        """Name of the model for clients."""
        return self.config.model_name

    @property
    def all(self) -> "tuple[Front, ...]":
        """The fronts of all models of the server, this one's among them, the first model first."""
        return tuple(dict.fromkeys(self._by_name.values()))

    @property
    def names(self) -> tuple[str, ...]:
        """All names of models that clients may ask for."""
        return tuple(self._by_name)

    def of(self, name: str | None) -> "Front":
        """Return the front of the model with a name. A request without a name gets this front.

        Without a class and a length, "auto" is the first whole model.

        Raises:
            ApiError: 404, no model of this server has the name.
        """
        if name is None:
            return self
        if name == AUTO and self.config.auto:
            return next(front for front in self.all if front.is_whole)
        if (found := self._by_name.get(name)) is None:
            names = ", ".join(map(repr, self._by_name))
            if name == AUTO and len(self.all) > 1:
                names += ", or start the server with --auto true"
            raise ApiError(
                404,
                f"model {name!r:.200} is not served here; use {names}",
                param="model",
                code="model_not_found",
            )
        return found

    @property
    def is_whole(self) -> bool:
        """True if the model has all its layers."""
        info = self.engine.client.info
        return bool(info.shape.num_layers == info.whole_layers)

    def headers(self) -> dict[str, str]:
        """Return the header that names the model of an answer, if the server has several.

        Characters that a header cannot hold are percent-encoded.
        """
        name = quote(self.model_name, safe="/:@=+.,-_~ ")
        return {"x-qllm-models": name} if len(self.all) > 1 else {}

    def rule_of(self, caller: str) -> Rule:
        """Return the class and the limits of a caller's requests."""
        return self._rules.get(caller, NO_RULE)

    async def in_thread(self, priority: Priority, function: Callable[..., Any], *args: Any) -> Any:
        """Run text work on a thread of the class, and return its result."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._text[priority].pool, function, *args)

    async def best_effort(self, num_bytes: int, function: Callable[..., Any], *args: Any) -> Any:
        """Run work as `Apart.do` does, but on a BE thread, and return its result."""
        do = partial(self.apart.do, num_bytes, function, *args, nice=NICE)
        return await self.in_thread(Priority.BE, do)

    async def open(self, ask: Ask, wanted: Priority) -> Answer:
        """Admit a request, submit its choices, and return its answer.

        Raises:
            ApiError: The request is refused.
        """
        count = ask.num_choices
        if count > self.config.max_choices:
            raise ApiError(
                400,
                f"{count} choices (prompts times n) are asked for; at most "
                f"{self.config.max_choices} are allowed",
                param="n",
            )
        whose = (ask.caller, ask.answer_id)
        if whose in self._ids:
            raise ApiError(
                409,
                f"a request with the id {ask.answer_id!r:.280} is open; give another request_id",
                param="request_id",
                code="duplicate_request_id",
            )
        served = self._admit(wanted, count, ask.caller) if ask.opened is None else ask.opened.served
        takes = count * (served.priority is Priority.LS and ask.opened is None)
        self._num_ls += takes
        engine = self.engine
        submit = partial(self._submit, engine, ask, served.priority)
        if ask.caller:
            self._ids.add(whose)
        try:
            if AtOnce.takes(engine, ask):
                handles = self._at_once.run(engine, submit)
            else:
                text = self._text[served.priority]
                handles = await text.run(submit, is_short=ask.is_short, abandon=_cancel_all)
        except BaseException as error:
            self._num_ls -= takes
            self._ids.discard(whose)
            if ask.opened is not None and isinstance(error, asyncio.CancelledError):
                ask.opened.prompt.cancel()  # submitted by now, perhaps, and no client waits
            if isinstance(error, EngineClosedError):
                raise self._explain(engine, error) from error
            raise
        explain = partial(self._failed, engine)
        answer = Answer(
            handles, ask.n, served, self._closed, explain, lambda: self.engine.num_waiting
        )
        answer.shows_tokens = ask.max_tokens != 0
        answer.answer_id, answer.caller = ask.answer_id, ask.caller
        answer.names, answer.silence_timeout_s = ask.names, ask.silence_timeout_s
        self.answers.add(answer)
        if ask.opened is not None:
            ask.opened.has_seat = False
        if answer.exchange is not None:
            answer.exchange.opened(ask.answer_id, served.priority.name, served.demoted)
        return answer

    def change(self, answer: Answer, priority: Priority | None, paused: bool | None) -> None:
        """Change the class of an open request, or pause or resume the request.

        An argument that is None changes nothing.

        Raises:
            ApiError: The limit of LS requests is reached, or the API key may not have the class.
            QllmError: The engine refuses the change.
        """
        count, before = len(answer.handles), answer.served.priority
        rule = self.rule_of(answer.caller)
        if priority is not None and not rule.allows(priority):
            raise ApiError(
                403,
                f"the best class of this API key ({rule.name}) is {rule.best.name} (max_priority)",
                param="priority",
                code="class_not_allowed",
            )
        is_raised = priority is Priority.LS and before is not Priority.LS
        if is_raised and self._num_ls + count > self.config.max_ls:
            raise self._full()
        for handle in answer.handles:
            handle.update(priority=priority, paused=paused)
        if priority is not None:
            self._num_ls += count * ((priority is Priority.LS) - (before is Priority.LS))
            answer.served = Served(priority)
        if paused is not None:
            answer.is_paused = paused

    def unavailable(self) -> ApiError | None:
        """Return the error while the engine serves no requests; None while the engine serves."""
        try:
            self.engine.raise_if_closed()
        except EngineClosedError as error:
            return self._explain(self.engine, error)
        return None

    def _explain(self, engine: QLLMEngine, error: QllmError) -> ApiError:
        """Return the API error for an engine's error, of one request or of the whole engine."""
        failure = engine.failure or self.ended.get(engine)
        is_request = isinstance(error, RequestFailedError) and failure is None
        if is_request or not isinstance(error, EngineClosedError | RequestFailedError):
            return from_engine(error)
        if self.back_in_s is None:
            return ApiError(503, str(error), code="engine_closed")
        text = f"{failure or error}; a new engine is on its way"
        return ApiError(503, text, code="engine_restarting", retry_after_s=self.back_in_s())

    def _failed(self, engine: QLLMEngine, handle: Handle, error: QllmError) -> ApiError:
        """Return the API error for the error of a request that was first submitted to `engine`."""
        if self.gave_up is not None:
            return ApiError(503, str(error), code="engine_closed")
        return self._explain(engine, error) if handle.log is None else from_engine(error)

    def _admit(self, wanted: Priority, count: int, caller: str) -> Served:
        if not (rule := self.rule_of(caller)).allows(wanted):
            return Served(rule.best, demoted=True)
        if wanted is Priority.BE or self._num_ls + count <= self.config.max_ls:
            return Served(wanted)
        if self.config.ls_overflow == "demote":
            self.metrics.demoted.inc()
            return Served(Priority.BE, demoted=True)
        raise self._full()

    def admit(self, wanted: Priority, caller: str) -> Served:
        """Reserve a seat for a streaming prompt. The answer takes the seat, or `release` frees it.

        Raises:
            ApiError: The limit of LS requests is reached.
        """
        served = self._admit(wanted, 1, caller)
        self._num_ls += served.priority is Priority.LS
        return served

    def release(self, served: Served) -> None:
        """Release a reserved seat that no answer used."""
        self._num_ls -= served.priority is Priority.LS

    def keep(self, handle: Handle) -> None:
        """Resubmit the request to the next engine if this engine fails and another one starts."""
        if self.back_in_s is not None:
            self.log.keep(handle)

    def text_of(self, priority: Priority) -> TextWork:
        """Return the threads for text work of a class."""
        return self._text[priority]

    def _full(self) -> ApiError:
        return ApiError(
            429,
            f"{self._num_ls} LS requests are in flight (max_ls={self.config.max_ls}); try again "
            "later, or use service_tier='flex'",
            code="ls_limit",
            retry_after_s=1,
        )

    def _submit(self, engine: QLLMEngine, ask: Ask, priority: Priority) -> list[Handle]:
        """Tokenise and submit a request. Called on a thread of the request's class."""
        given = _keywords(engine, ask)
        if (lossy := ask.lossy) is not None:
            given["confidence"] = True
            lossy.check(SamplingParams(**given), ask)
        handles: list[Handle] = []
        ttl_s = ask.ttl_s(priority, self.config.tool_ttl_s)
        if ask.opened is not None:
            return [self._send(engine, ask, ttl_s)]
        try:
            for prompt in self._prompts(ask, priority):
                first: Any = prompt
                for choice in range(ask.n):
                    keywords = dict(given)
                    if choice and keywords.get("seed") is not None:
                        keywords["seed"] = (keywords["seed"] + choice) % 2**63
                    handles.append(
                        engine.submit(
                            first,
                            priority,
                            _most(ask),
                            sampling=SamplingParams(**keywords),
                            slo=ask.slo,
                            timeout_s=ask.timeout_s,
                            request_id=f"{ask.answer_id}-{len(handles)}",
                            cache_salt=ask.cache_salt,
                            cache_owner=ask.cache_owner,
                            cache_ttl_s=ttl_s,
                            reading=ask.reading,
                        )
                    )
                    if lossy is not None:
                        lossy.begin(handles[-1], ask, self)
                    elif ask.replay:
                        self.keep(handles[-1])
                    first = handles[-1].prompt_token_ids
        except BaseException:
            _cancel_all(handles)
            raise
        return handles

    @staticmethod
    def _send(engine: QLLMEngine, ask: Ask, ttl_s: float | None) -> Handle:
        """Send a streaming prompt that is now complete.

        Called on a thread of the request's class.
        """
        params = SamplingParams(**_keywords(engine, ask))
        handle: Handle = ask.opened.prompt.send(
            _most(ask),
            sampling=params,
            slo=ask.slo,
            timeout_s=ask.timeout_s,
            cache_ttl_s=ttl_s,
            reading=ask.reading,
        )
        return handle

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and an answer together."""
        return longest(self.engine.config, self.engine.client.info.shape)

    def _prompts(self, ask: Ask, priority: Priority) -> list[Any]:
        """Return the prompts of a request, each as token ids or a short text."""
        if ask.messages is not None:
            return [self._cut(ask, self.render(ask, priority))]
        return [self._cut(ask, self._encoded(ask, x, priority)) for x in ask.prompts]

    def _encoded(self, ask: Ask, prompt: Any, priority: Priority) -> Any:
        is_usual = ask.truncate is None and ask.special is not False
        if not isinstance(prompt, str) or (is_usual and len(prompt) < LONG):
            return prompt
        vocab_size, nice = self.engine.vocabulary.vocab_size, _nice(priority)
        how = (prompt, Given.TOKENIZER, vocab_size, self._most_of(ask), ask.special)
        return self.apart.do(len(prompt), texts.encoded, *how, nice=nice)

    def _most_of(self, ask: Ask) -> int | None:
        """Return the most tokens of an encoded text; None if the text will be truncated."""
        return self.max_model_len if ask.truncate is None else None

    def _cut(self, ask: Ask, prompt: Any) -> Any:
        if ask.truncate is None:
            return prompt
        most = ask.truncate
        if most == TO_FIT:
            longest = self.max_model_len if ask.lossy is None else ask.lossy.longest
            most = longest - (ask.max_tokens or 1)
            if most < 1:  # a limit that leaves no room for the prompt
                most = longest - 1
        return prompt[-most:]

    def check(self, ask: Ask) -> None:
        """Refuse a wrong chat that will be submitted later, as far as the errors can be found now.

        Raises:
            ApiError: A message is wrong.
            InvalidRequestError: A setting is wrong, or the chat template refuses the messages.
        """
        engine = self.engine
        params = SamplingParams(**_keywords(engine, ask))
        engine.check(self.render(ask, Priority.BE), _most(ask), params)

    def render(self, ask: Ask, priority: Priority) -> Sequence[int]:
        """Return the token ids of a chat. Called on a thread of the request's class.

        Raises:
            ApiError: A message is wrong.
            InvalidRequestError: The chat template refuses the messages.
        """
        template, special = dict(ask.template), ask.special is True
        how = (ask.messages, Given.TOKENIZER, template, self._most_of(ask), special)
        nice = _nice(priority)
        found: Sequence[int] = self.apart.do(ask.num_bytes, texts.rendered, *how, nice=nice)
        return found

    def _closed(self, answer: Answer) -> None:
        _cancel_all(answer.handles)
        self.answers.discard(answer)
        self._ids.discard((answer.caller, answer.answer_id))
        if all(handle.has_ended for handle in answer.handles):
            self._settle(answer)
            return
        task = asyncio.create_task(self._settle_later(answer))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _settle_later(self, answer: Answer) -> None:
        """Count the choices of an answer once the engine has finished all of them."""
        await all_ended(answer.handles)
        self._settle(answer)

    def _settle(self, answer: Answer) -> None:
        """Count the finished choices of an answer, at the model that had the request last."""
        results: list[Result] = []
        prompts: set[int] = set()
        course = answer.course
        metrics = (self if course is None else self.of(course.name)).metrics
        try:
            for index, handle in enumerate(answer.handles):
                try:
                    results.append(handle.result(timeout=0))
                    is_first = index // answer.n not in prompts
                    prompts.add(index // answer.n)
                    _count(metrics, results[-1], answer.exchange, is_first)
                except RequestFailedError:
                    metrics.failed(answer.served.priority)
                except Exception:  # noqa: BLE001 - this text fails (a tokenizer), not the server
                    _log.exception("a choice ended without a result")
                    metrics.failed(answer.served.priority)
        finally:
            self._num_ls -= len(answer.handles) * (answer.served.priority is Priority.LS)
            if answer.exchange is not None:
                answer.exchange.settled(results)

    def cancel(self) -> None:
        """Cancel every open answer, so that the clients get an error."""
        for answer in self.answers:
            _cancel_all(answer.handles)

    async def close(self) -> None:
        """Cancel every open answer and wait until the engine has finished all requests."""
        for answer in list(self.answers):
            answer.close()
        self.log.end_all("the server is shutting down")
        if self._settling:
            await asyncio.wait(self._settling, timeout=30)
        for text in self._text.values():
            text.close()
        await asyncio.to_thread(self.apart.close)


def _cancel_all(handles: list[Handle]) -> None:
    for handle in handles:
        handle.cancel()


def _count(
    metrics: Metrics, result: Result, exchange: access.Exchange | None, is_first: bool
) -> None:
    metrics.finished(result)
    if exchange is not None and exchange.caller:
        metrics.tokens_of_key(exchange.caller, result, is_first=is_first)


def _nice(priority: Priority) -> int:
    return NICE if priority is Priority.BE else 0


def _keywords(engine: QLLMEngine, ask: Ask) -> dict[str, Any]:
    """Return the keywords of SamplingParams: the model's defaults, and the request's settings."""
    found = {"temperature": 1.0, **engine.sampling_defaults, **ask.sampling}
    return (
        found if ask.form is None else {**found, "structured_outputs": ask.form(engine.tokenizer)}
    )


def _most(ask: Ask) -> int | str:
    return FIT if ask.max_tokens is None else max(1, ask.max_tokens)
