"""A seeded mix of interactive requests and batch jobs, sent in real time.

Open loop: the client submits each request at its time, independent of the engine. Only a request
that follows another in a session waits for the other's answer. LS requests arrive as a Poisson
process. BE requests arrive as a burst at the start, then as a steady flow that keeps a backlog. A
request that is unfinished at the end of the window is cancelled and counted as censored.
"""

import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from qllm.errors import ConfigError, QueueFullError
from qllm.record.metrics import RequestMetrics
from qllm.record.summary import Summary, percentile, request_metrics, summarize
from qllm.record.trace import Arrived, Event, Parked, Token, Trace
from qllm.types import NS_PER_MS, NS_PER_S, FinishReason, Priority, SamplingParams
from qllm.workloads.sessions import Conversations
from qllm.workloads.spec import Arrival

if TYPE_CHECKING:
    from qllm.frontend.handle import Handle
    from qllm.llm import QLLMEngine

TICK_S = 0.2
WHOLE = (FinishReason.STOP, FinishReason.LENGTH)
"""Finish reasons of an answer after which a session continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The parameters of a mix. Lengths are inclusive ranges of tokens."""

    seconds: float = 25.0
    seed: int = 0
    ls_rate: float = 2.0
    """LS requests per second, on average."""
    ls_tail: float = 0.1
    """Part of the window, at its end, without LS arrivals. So every unserved LS request has waited.
    """
    ls_prompt: tuple[int, int] = (64, 128)
    ls_output: tuple[int, int] = (16, 32)
    be_burst: int = 24
    """Number of BE requests at the start."""
    be_rate: float = 1.0
    """Further BE requests per second, evenly spaced."""
    be_prompt: tuple[int, int] = (1024, 2048)
    be_output: tuple[int, int] = (64, 192)

    def __post_init__(self) -> None:
        if not self.seconds > 0 or self.ls_rate < 0 or self.be_rate < 0 or self.be_burst < 0:
            raise ConfigError(f"seconds must be > 0, and rates and the burst >= 0: {self}")


def make_workload(mix: Mix, corpus: Sequence[int]) -> tuple[Arrival, ...]:
    """Return arrivals in order of time, which depend only on the arguments.

    Each class has its own random numbers. So LS is the same with and without BE.

    Args:
        mix: Parameters of the mix.
        corpus: Token ids that prompts are cut from.
    """
    ls = random.Random(f"{mix.seed} LS")
    be = random.Random(f"{mix.seed} BE")
    arrivals: list[Arrival] = []

    def add(
        rng: random.Random, at_s: float, priority: Priority, sizes: tuple[tuple[int, int], ...]
    ) -> None:
        num_prompt, num_output = (rng.randint(*size) for size in sizes)
        start = rng.randrange(max(1, len(corpus) - num_prompt))
        ids = tuple(corpus[(start + i) % len(corpus)] for i in range(num_prompt))
        name = f"{priority.name.lower()}-{len(arrivals)}"
        arrivals.append(
            Arrival(at_s=at_s, name=name, priority=priority, token_ids=ids, max_tokens=num_output)
        )

    at_s, last_s = 0.0, mix.seconds * (1 - mix.ls_tail)
    while mix.ls_rate > 0 and (at_s := at_s + ls.expovariate(mix.ls_rate)) < last_s:
        add(ls, at_s, Priority.LS, (mix.ls_prompt, mix.ls_output))
    for _ in range(mix.be_burst):
        add(be, 0.0, Priority.BE, (mix.be_prompt, mix.be_output))
    for i in range(1, int(mix.seconds * mix.be_rate) + 1):
        add(be, (i - 0.5) / mix.be_rate, Priority.BE, (mix.be_prompt, mix.be_output))
    return tuple(sorted(arrivals, key=lambda a: a.at_s))


def only(arrivals: Iterable[Arrival], priority: Priority) -> tuple[Arrival, ...]:
    """Return the arrivals of one class."""
    return tuple(a for a in arrivals if a.priority == priority)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A workload that was served for its window."""

    trace: Trace
    """Trace of the whole run, including events after the window."""
    start_ns: int
    end_ns: int
    """End of the window, on the engine's clock."""
    max_lag_ms: float
    """Longest time, in ms, between due and submission."""
    refused: int
    """Requests that the engine refused (`max_waiting`)."""

    @property
    def events(self) -> tuple[Event, ...]:
        """Return the events inside the window."""
        return tuple(e for e in self.trace if e.at_ns <= self.end_ns)

    @property
    def window_s(self) -> float:
        """Return the seconds of the window, the denominator of rates."""
        return (self.end_ns - self.start_ns) / NS_PER_S

    def summary(self) -> Summary:
        """Return the metrics of the window."""
        return summarize(self.events)

    def waits(self, priority: int) -> "Waits":
        """Return the TTFT of a class, including requests without a token in the window."""
        of_class = [r for r in request_metrics(self.events) if r.priority == priority]
        return Waits.of(of_class, self.end_ns)

    def tokens(self) -> dict[str, tuple[int, ...]]:
        """Return the tokens of every request, by the request's name."""
        names = {e.request_id: e.name for e in self.trace if isinstance(e, Arrived)}
        out: dict[str, list[int]] = {name: [] for name in names.values()}
        for event in self.trace:
            if isinstance(event, Token):
                out[names[event.request_id]].append(event.token_id)
        return {name: tuple(ids) for name, ids in out.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """TTFT in ms. For a censored request, the time that the request has waited."""

    served: tuple[float, ...]
    censored: tuple[float, ...]

    @classmethod
    def of(cls, requests: Iterable[RequestMetrics], end_ns: int) -> "Waits":
        """Return the waits of these requests at the end of a window."""
        requests = tuple(requests)
        return cls(
            served=tuple(r.ttft_ms for r in requests if r.ttft_ms is not None),
            censored=tuple(
                (end_ns - r.arrival_ns) / NS_PER_MS for r in requests if r.ttft_ms is None
            ),
        )

    @property
    def all(self) -> tuple[float, ...]:
        """Return served and censored waits. A censored wait is a lower bound."""
        return self.served + self.censored

    def percentile(self, p: float) -> tuple[float, bool] | None:
        """Return a percentile, and True if it is only a lower bound; None without requests."""
        if not self.all:
            return None
        value = percentile(self.all, p)
        return value, any(c <= value for c in self.censored)


def send(
    engine: "QLLMEngine",
    arrivals: Sequence[Arrival],
    seconds: float,
    on_tick: Callable[[float], None] | None = None,
    *,
    until_answered: bool = False,
) -> Sent:
    """Submit every arrival at its time from a thread, and cancel unfinished requests at the end.

    Args:
        engine: Engine with `record=True`.
        arrivals: Arrivals in order of time.
        seconds: Length of the window.
        on_tick: Callback with the seconds since the start, a few times per second.
        until_answered: True to end as soon as all arrivals have ended. No event comes later. So a
            report with a fixed window is the same. `window_s` is shorter.
    """
    client = Client(engine, arrivals)
    client.start()
    try:
        while (left := client.start_s + seconds - time.monotonic()) > 0:
            time.sleep(min(left, TICK_S))
            if on_tick is not None:
                on_tick(min(seconds, time.monotonic() - client.start_s))
            if until_answered and client.is_answered:
                break
        end_ns = engine.now_ns()
    finally:
        handles = client.stop()
        for handle in handles:
            handle.cancel()
    for handle in handles:
        handle.result()
    return Sent(
        trace=engine.trace,
        start_ns=client.start_ns,
        end_ns=end_ns,
        max_lag_ms=client.max_lag_s * 1000,
        refused=client.refused,
    )


class Client(threading.Thread):
    """A thread that submits each arrival at its time, or after the request that it follows.

    Args:
        engine: Engine to submit to.
        arrivals: Arrivals in order of time. A request that follows another comes after it.
    """

    def __init__(self, engine: "QLLMEngine", arrivals: Sequence[Arrival]) -> None:
        super().__init__(name="qllm-client", daemon=True)
        self._engine = engine
        self._talks = Conversations(arrivals)
        self._due = [(a.at_s, i, a) for i, a in enumerate(self._talks.first)]
        self._count = len(self._due)
        self._open: list[tuple[Arrival, Handle]] = []
        """Open requests that other requests wait for."""
        self.handles: list[Handle] = []
        self._error: BaseException | None = None
        self._stopped = False
        self._news = threading.Event()
        self.max_lag_s = 0.0
        self.refused = 0
        self.start_ns = engine.now_ns()
        self.start_s = time.monotonic()

    def run(self) -> None:
        try:
            heapify(self._due)
            while (self._due or self._open) and not self._stopped:
                left_s = self._due[0][0] - self._now_s() if self._due else None
                if left_s is None or left_s > 0:
                    self._news.wait(left_s)
                    self._news.clear()
                    self._go_on()
                    continue
                arrival = heappop(self._due)[2]
                self.max_lag_s = max(self.max_lag_s, self._now_s() - arrival.at_s)
                self._submit(arrival)
        except BaseException as error:  # noqa: BLE001 - `stop` raises it again
            self._error = error

    @property
    def is_answered(self) -> bool:
        """Return True if all arrivals are submitted and have ended, or if the thread has failed."""
        return not self.is_alive() and all(handle.has_ended for handle in self.handles)

    def _now_s(self) -> float:
        return time.monotonic() - self.start_s

    def _go_on(self) -> None:
        """Mark the requests as due that follow a request with a whole answer."""
        for arrival, handle in list(self._open):
            if not handle.has_ended:
                continue
            self._open.remove((arrival, handle))
            handle.unlisten(self._news.set)
            if handle.finish_reason in WHOLE:
                for after in self._talks.ended(arrival, handle.token_ids, self._now_s()):
                    self._count += 1
                    heappush(self._due, (after.at_s, self._count, after))

    def _submit(self, arrival: Arrival) -> None:
        try:
            handle = submit(self._engine, arrival)
        except QueueFullError:
            self.refused += 1
        else:
            self.handles.append(handle)
            if self._talks.holds(arrival.name):
                self._open.append((arrival, handle))
                handle.listen(self._news.set)
                self._news.set()  # may have ended before

    def stop(self) -> "list[Handle]":
        """Stop submitting, and return the handles of all submitted requests."""
        self._stopped = True
        self._news.set()
        self.join()
        if self._error is not None:
            raise self._error
        return self.handles


class Tally:
    """The counts for the progress line, made from new events."""

    def __init__(self, trace: Trace) -> None:
        self._events = trace.events
        self._seen = 0
        self._priority: dict[int, int] = {}
        self._arrived = {Priority.LS: 0, Priority.BE: 0}
        self._first: set[int] = set()
        self._num_tokens = 0
        self._preemptions = 0

    def text(self) -> str:
        """Return a line for a progress display."""
        upto = len(self._events)
        for event in self._events[self._seen : upto]:
            self._take(event)
        self._seen = upto
        ls = sum(self._priority[r] == Priority.LS for r in self._first)
        return (
            f"LS {ls}/{self._arrived[Priority.LS]} answered"
            f"  BE {len(self._first) - ls}/{self._arrived[Priority.BE]}"
            f"  {self._num_tokens:,} tokens  {self._preemptions:,} preemptions"
        )

    def _take(self, event: Event) -> None:
        match event:
            case Arrived():
                self._priority[event.request_id] = event.priority
                self._arrived[Priority(event.priority)] += 1
            case Token():
                self._first.add(event.request_id)
                self._num_tokens += 1
            case Parked():
                self._preemptions += event.preempted
            case _:
                pass


GREEDY = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)
"""Parameters with which solo and mixed runs choose the same tokens."""


def submit(engine: "QLLMEngine", arrival: Arrival, max_tokens: int | None = None) -> "Handle":
    """Submit one arrival to an engine."""
    return engine.submit(
        arrival.token_ids,
        arrival.priority,
        max_tokens or arrival.max_tokens,
        sampling=GREEDY,
        slo=arrival.slo,
        request_id=arrival.name,
    )


def ls_capacity(engine: "QLLMEngine", arrivals: Sequence[Arrival], budget_s: float = 4.0) -> float:
    """Return the number of requests per second that the engine completes one after the other.

    One request warms the engine up and does not count. At least one more request runs. Further
    requests run until the budget is used.
    """
    submit(engine, arrivals[0]).result()
    start, num = time.monotonic(), 0
    while not num or time.monotonic() - start < budget_s:
        submit(engine, arrivals[num % len(arrivals)]).result()
        num += 1
    return num / (time.monotonic() - start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Equality:
    """The result of a comparison of answers with a run without other requests."""

    equal: int
    checked: int
    different: tuple[str, ...]
    """Names of the requests with other tokens."""


def solo_tokens(
    engine: "QLLMEngine",
    arrivals: Iterable[Arrival],
    num_tokens: Mapping[str, int],
    budget_s: float,
    on_tick: Callable[[float], None] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Run requests one after the other, each alone, until the budget is used.

    Args:
        engine: Engine without other requests.
        arrivals: Requests, most interesting first.
        num_tokens: Number of tokens to produce, by name. A request without an entry is skipped.
        budget_s: Seconds after which no further request starts. At least one request starts.
        on_tick: Callback with the seconds since the start, after each request.
    """
    start = time.monotonic()
    out: dict[str, tuple[int, ...]] = {}
    for arrival in arrivals:
        spent = time.monotonic() - start
        if on_tick is not None:
            on_tick(spent)
        if out and spent > budget_s:
            break
        if count := num_tokens.get(arrival.name, 0):
            out[arrival.name] = submit(engine, arrival, count).result().token_ids
    return out


def compare(
    answers: Mapping[str, tuple[int, ...]], solo: Mapping[str, tuple[int, ...]]
) -> Equality:
    """Compare answers, whole or cut off, with solo runs. Skip requests without a token."""
    checked = [name for name in solo if answers.get(name)]
    different = tuple(n for n in checked if answers[n] != solo[n][: len(answers[n])])
    return Equality(equal=len(checked) - len(different), checked=len(checked), different=different)
