"""Answers that may lose: each one runs at the candidate that `Choice` names, and may change it.

    token of A -> `Course.had_token` -> `Choice` says B -> A drops the request -> B goes on

A request changes its engine between two tokens, on the thread that delivers the tokens of A. B gets
the prompt and the tokens so far, as after an engine's death (`qllm.frontend.request_log`). So the
answer is exactly what A and B give alone, one after the other: A up to the change, B from there on.

    tiny@2[0:57],tiny[57:]    tokens 0 to 56 are those of `tiny@2`, all others those of `tiny`
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote
from weakref import WeakSet

from qllm.errors import ConfigError, InvalidRequestError, shown
from qllm.fleet.choice import Choice, Cost, Decision, Do
from qllm.frontend.handle import Handle, RequestKeeper
from qllm.frontend.request_log import RequestLog
from qllm.frontend.rings import RingClient
from qllm.frontend.saved_request import SavedRequest
from qllm.types import NS_PER_S, FinishReason, SamplingParams

FREE = (
    "temperature", "top_k", "top_p", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos",
    "include_stop_str_in_output", "skip_special_tokens", "max_tokens", "logprobs",
    "prompt_logprobs", "confidence", "draft_tokens", "prediction",
)  # fmt: skip
"""Settings of sampling that do not change which token a greedy answer chooses."""


class Side(Protocol):
    """A candidate's place: its engine now, and the store of requests whose engine has ended."""

    @property
    def engine(self) -> Any:
        """The engine that serves now (`qllm.llm.QLLMEngine`), in a process of its own."""
        ...

    @property
    def log(self) -> RequestLog:
        """Store of requests that outlive an engine of the candidate."""
        ...


class Span(NamedTuple):
    """Tokens of an answer, from `begin` up to the next span, that one candidate chose."""

    name: str
    begin: int


class Standing(NamedTuple):
    """A candidate in the eyes of the audits."""

    is_open: bool
    """True if the candidate may answer."""
    bound: float
    """Upper end of the interval for the part of its tokens that differ; 0 for a whole model."""


class Course(RequestKeeper):
    """The way of one answer through candidates. It is the `log` of the answer's handle.

    Args:
        lossy: Owner.
        handle: The answer.
        name: Candidate that has the request.
    """

    def __init__(self, lossy: "Lossy", handle: Handle, name: str) -> None:
        self._lossy, self.handle = lossy, handle
        self.spans = [Span(name, 0)]
        """The candidates of the answer so far, in order."""
        self.wanted: str | None = None
        """Candidate to which the request moves with its next token; None stays."""
        self.num_counted = 0
        """Number of tokens that the choice has counted."""
        self.has_ended = False

    @property
    def name(self) -> str:
        """The candidate that has the request."""
        return self.spans[-1].name

    def parts(self) -> list[tuple[str, int, int]]:
        """Return candidate, first token, and end of each part of the answer that has tokens."""
        spans = tuple(self.spans)  # another thread may add one
        num = len(self.handle.token_ids)
        ends = [span.begin for span in spans[1:]] + [num]
        both = zip(spans, ends, strict=True)
        return [(span.name, span.begin, end) for span, end in both if end > span.begin]

    @property
    def num_early(self) -> int:
        """Number of tokens that candidates without all layers chose."""
        return sum(end - begin for name, begin, end in self.parts() if self._lossy.is_cut(name))

    def __str__(self) -> str:
        """Return the candidates and their tokens; the last part has no end."""
        spans = list(zip(self.spans, self.spans[1:], strict=False))
        texts = [f"{_quoted(span.name)}[{span.begin}:{after.begin}]" for span, after in spans]
        last = self.spans[-1]
        return ",".join([*texts, f"{_quoted(last.name)}[{last.begin}:]"])

    # -- as the log of a handle

    def take(self, entry: SavedRequest, engine_ns: int, why: str) -> None:
        """Store a request whose engine has ended: the next engine of this candidate continues."""
        self._lossy.log_of(self.name).take(entry, engine_ns, why)

    def had_token(self, entry: SavedRequest) -> None:
        """Count a token, and move the request if the choice says so."""
        self._lossy.log_of(self.name).had_token(entry)
        self._lossy.had_token(self, entry)

    def heard_of(self, entry: SavedRequest) -> None:
        """Count the request if it has ended."""
        self._lossy.log_of(self.name).heard_of(entry)
        if self.handle.has_ended:
            self._lossy.on_end(self, entry.token_ns)

    def move_on(
        self, entry: SavedRequest, engine_ns: int, back: Callable[[SavedRequest], None]
    ) -> None:
        """Continue a request that another engine of the same candidate takes over."""
        self._lossy.log_of(self.name).move_on(entry, engine_ns, back)


def _quoted(name: str) -> str:
    return quote(name, safe="/:@+.-_~")


class Lossy:
    """All open lossy answers, and the choice of their candidates. Callable from any thread.

    Args:
        choice: The choice. Only this object may use it from now on.
        sides: Place of each candidate, by name.
        token_s: Seconds that each candidate takes for a token of a prompt, by name.
        on_move: Function that is called with the candidate that gets an open answer.
        on_end: Function that is called for each answer that has ended with `stop` or `length`, on
            the thread that delivered its last token.

    Raises:
        ConfigError: A candidate's engine cannot give a request away.
    """

    def __init__(
        self,
        choice: Choice,
        sides: Mapping[str, Side],
        token_s: Mapping[str, float],
        on_move: Callable[[str], None],
        on_end: Callable[[Course], None],
    ) -> None:
        for name, side in sides.items():
            if not isinstance(side.engine.client, RingClient):
                raise ConfigError(
                    f"lossy answers change their engine, and that of {name!r} cannot give a "
                    "request away; use one engine per model, each in a process of its own"
                )
        self._lock = threading.RLock()
        self._choice, self._sides, self._token_s = choice, sides, token_s
        self._cut = {one.name for one in choice.candidates if not one.is_whole}
        choice.cost_of = self.cost_of
        self._on_move, self._report_end = on_move, on_end
        self._courses: WeakSet[Course] = WeakSet()

    def log_of(self, name: str) -> RequestLog:
        """Return the store for requests whose engine at a candidate has ended."""
        return self._sides[name].log

    def is_cut(self, name: str) -> bool:
        """Return True if a candidate has not all layers of its model."""
        return name in self._cut

    @property
    def current(self) -> str:
        """The candidate that gets new requests."""
        with self._lock:
            return self._choice.current

    @property
    def shadowed(self) -> tuple[str, ...]:
        """The closed candidates, which read audited answers."""
        with self._lock:
            return self._choice.shadowed

    def is_audited(self, course: Course, share: float) -> bool:
        """Return True if an answer is to be audited."""
        with self._lock:
            return self._choice.is_audited(course.handle.request_id, share)

    @property
    def bound(self) -> float:
        """Most part of the tokens that may differ from the whole model's."""
        return self._choice.rules.max_disagreement

    def standing(self) -> dict[str, Standing]:
        """Return the standing of each candidate, by name."""
        with self._lock:
            is_open = self._choice.open
            return {
                one.name: Standing(
                    one.name in is_open,
                    0.0 if one.is_whole else self._choice.estimate(one.name).upper,
                )
                for one in self._choice.candidates
            }

    # -- answers

    def begin(self, handle: Handle, name: str) -> Course:
        """Follow an answer from now on. Its request was submitted with `confidence=True`.

        Args:
            handle: The answer.
            name: Candidate that has the request.
        """
        course = Course(self, handle, name)
        with self._lock:
            self._courses.add(course)
            if name not in self._choice.open:  # closed since the request was sent there
                course.wanted = self._choice.current
        handle.log = course
        if handle.has_ended:  # before the engine's client had seen the course
            self.on_end(course, ())
        return course

    def had_token(self, course: Course, entry: SavedRequest) -> None:
        """Count what is new of an answer, and move it if the choice says so.

        The client of the engine that has the request calls this, on the thread that delivers its
        tokens. So no token of this engine can come between the move and the first token of the next
        engine.
        """
        with self._lock:
            self._count(course)
            wanted = course.wanted
            if wanted in (None, course.name) or entry.end() is not None:
                return  # it stays, or has its last token
            client: RingClient = self._sides[course.name].engine.client
            if not client.let_go(entry):
                return  # its engine has ended, and the next one gets the request
            course.wanted = None
            course.spans.append(Span(wanted, len(course.handle.token_ids)))
        self._on_move(wanted)
        side = self._sides[wanted]
        side.log.move_on(entry, client.now_ns(), side.engine.replay)

    def audited(self, name: str, num_positions: int, num_differing: int) -> None:
        """Count an audit of a candidate: positions that it chose, and those that differ."""
        with self._lock:
            self._follow(lambda: self._choice.on_audit(name, num_positions, num_differing))

    def _count(self, course: Course) -> None:
        """Count the new tokens of an answer."""
        fresh = course.handle.confidences(course.num_counted)
        course.num_counted += len(fresh)
        self._follow(lambda: self._choice.on_tokens(course.name, fresh))

    def on_end(self, course: Course, token_ns: Sequence[int]) -> None:
        """Count an answer that has ended, once."""
        handle = course.handle
        with self._lock:
            if course.has_ended:
                return
            self._count(course)
            course.has_ended = True
            self._courses.discard(course)
            num = 0 if len(course.spans) > 1 else len(token_ns)
            seconds = (token_ns[-1] - token_ns[0]) / NS_PER_S if token_ns else 0.0
            self._follow(lambda: self._choice.on_finished(course.name, num, seconds))
        if handle.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._report_end(course)

    def _follow(self, ask: Callable[[], Decision]) -> None:
        """Let open answers change their candidate as the choice decides. The caller holds the lock.

        Answers leave a candidate that was closed. If the choice deepens, they leave the candidate
        before it too.
        """
        before, was_open = self._choice.current, self._choice.open
        decision, is_open = ask(), self._choice.open
        if decision.do is Do.STAY and is_open == was_open:
            return
        for course in self._live():
            is_left = course.name == before and decision.do is Do.DEEPEN
            if is_left or course.name not in is_open:
                course.wanted = decision.name
            elif course.wanted is not None and course.wanted not in is_open:
                course.wanted = None

    def _live(self) -> list[Course]:
        """Return the open answers. One that was cancelled between two engines reports no end."""
        return [course for course in self._courses if not course.handle.has_ended]

    def cost_of(self, name: str) -> Cost:
        """Return the cost of going to a candidate now: the KV of open answers is computed."""
        num = sum(
            len(course.handle.prompt_token_ids) + course.num_counted for course in self._live()
        )
        return Cost(switch_s=num * self._token_s[name])


def check_sampling(params: SamplingParams) -> None:
    """Refuse settings with which no audit can compare an answer with the whole model's choice.

    Raises:
        InvalidRequestError: The request is not greedy, or a setting changes the chosen token.
    """
    if params.temperature != 0:
        raise InvalidRequestError(
            f"lossy=true with temperature={params.temperature:g}: an audit compares tokens with "
            "those that the whole model would choose, and drawn tokens differ by chance; use "
            "temperature=0"
        )
    usual = SamplingParams()
    for field in fields(params):
        name, value = field.name, getattr(params, field.name)
        if name not in FREE and value != getattr(usual, name):
            raise InvalidRequestError(
                f"lossy=true with {name}={shown(value)}: it changes which token is "
                "chosen, so no audit can compare the answer with the whole model's; leave it out, "
                "or leave out lossy"
            )
