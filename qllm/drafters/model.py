"""Drafts of a second, small model with the same tokenizer.

The draft model has KV of its own for each request. It computes the tokens that it has not seen yet.
Then it computes one token after another. Each is the token that it would choose itself, with the
request's settings and random numbers.

    the request        a b c d e f
    the draft model    a b c d x y    its last drafts were x y, and the model chose e f
                       -------        KV that stays; e f are computed, and more is drafted

A pass of the draft model is a program, and polls the engine's stop as every program does. A stopped
pass stays parked. It continues when the request is asked again, if its tokens are still right.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from qllm.drafters.protocol import DraftRequest
from qllm.ingress.protocol import ArrivalWord
from qllm.plan import Plan, Row
from qllm.runner.protocol import Runner
from qllm.scheduler.compile import compile_program
from qllm.scheduler.program import START, Index, Program
from qllm.scheduler.request import Request
from qllm.types import MOST_DRAFTS, NS_PER_MS, Grain, RequestId, SamplingParams

CHUNK = 512
"""Most tokens of a pass."""
SHORT = MOST_DRAFTS + 1
"""Most tokens that a verified row adds. A longer pass catches up, and only in the time of a turn.
"""
MOST_LATENCIES = 1000
"""Number of latest stops whose latencies are kept for statistics."""
OLD = 0.75
"""Weight of all earlier times of a drafted token, relative to the newest."""


class _Parked(NamedTuple):
    """A pass that was stopped, and the place where it continues."""

    program: Program
    at: Index


class Drafted:
    """A request in the draft model: its `Drafter`."""

    def __init__(self, model: "DraftModel", request: DraftRequest) -> None:
        self._model = model
        self.request_id = request.request_id
        self.sampling = _alike(request.sampling)
        self.first = 0
        """Index of the request's token with which the draft model begins. All other indices count
        from it."""
        self.ids: list[int] = []
        """Tokens in the draft model: the request's as far as they are known, and drafts."""
        self.num_same = 0
        """Number of first tokens that are known to be the request's."""
        self.num_computed = 0
        """Number of first tokens whose KV is complete."""
        self.capacity: int | None = None
        """Most tokens of the request in the draft model; None before its first proposal."""
        self.parked: _Parked | None = None

    @property
    def num_held(self) -> int:
        """Number of tokens with KV, which a parked pass may have written in part."""
        parked = self.parked  # another thread may ask
        return self.num_computed if parked is None else parked.program.rows[0].hi

    def propose(self, token_ids: Sequence[int], most: int) -> list[int]:
        """See `Drafter`. Propose nothing if a pass was stopped."""
        return self._model.propose(self, token_ids, most)


class Terms(NamedTuple):
    """The parts and limits that an engine gives to its draft model."""

    stop: Callable[[], ArrivalWord]
    """Function that returns the engine's stop."""
    requests: Mapping[RequestId, Request]
    """The scheduler's requests, which have classes and longest lengths."""
    most_kv_tokens: int
    """Most tokens of KV in the draft model, over all requests."""
    turn_ns: int
    """Time between two programs in which the draft model may catch up."""
    now_ns: Callable[[], int]
    """The engine's clock."""


class DraftModel:
    """The draft model of an engine. It makes the drafter of each request.

    Args:
        runner: Runner of the draft model. Its requests need no KV blocks.
        terms: Parts and limits of the engine.
    """

    def __init__(self, runner: Runner, terms: Terms) -> None:
        self._runner, self._stop, self._requests = runner, terms.stop, terms.requests
        self._most_kv_tokens, self._turn_ns = terms.most_kv_tokens, terms.turn_ns
        self._now_ns = terms.now_ns
        self._drafted: dict[RequestId, Drafted] = {}
        """Requests in the draft model. The one that was asked longest ago comes first."""
        self._num_frames = 0
        self._may_draft = True
        self._left_ns = 0
        """Time that is left in this turn to catch up."""
        self.draft_ns = 0
        """Measured time of a drafted token; 0 before the first."""
        self.was_stopped = False
        """True if an arrival has stopped a pass in this turn."""
        self.num_stops = 0
        """Number of passes that an arrival has stopped."""
        self.stop_latencies_ns: deque[int] = deque(maxlen=MOST_LATENCIES)
        """Times from an arrival to the stop of a pass, the latest ones."""

    def __call__(self, request: DraftRequest) -> Drafted:
        """Return the drafter of a request."""
        one = self._drafted[request.request_id] = Drafted(self, request)
        return one

    @property
    def num_kv_tokens(self) -> int:
        """Number of tokens of KV in the draft model. Callable from any thread."""
        return sum(one.num_held for one in list(self._drafted.values()))

    def stats(self) -> dict[str, Any]:
        """Return numbers for statistics. Callable from any thread."""
        return {
            "requests": len(self._drafted),
            "kv_tokens": self.num_kv_tokens,
            "max_kv_tokens": self._most_kv_tokens,
            "draft_ms": self.draft_ns / NS_PER_MS,
            "stops": self.num_stops,
            "stop_latencies_ms": [ns / NS_PER_MS for ns in list(self.stop_latencies_ns)],
        }

    @property
    def may_draft(self) -> bool:
        """True if the model may draft in this turn, and no arrival has stopped it."""
        return self._may_draft and not self.was_stopped

    def extra_ns(self, num_drafts: int) -> int:
        """Return the time that so many drafts take, as measured so far."""
        return num_drafts * self.draft_ns

    def begin_turn(self, *, may_draft: bool = True) -> None:
        """Begin the time between two programs.

        Args:
            may_draft: False if other requests need this time.
        """
        self._may_draft, self.was_stopped = may_draft, False
        self._left_ns = self._turn_ns

    def forget(self, request_id: RequestId) -> None:
        """Free all data of a request."""
        one = self._drafted.pop(request_id, None)
        if one is not None and one.capacity is not None:
            self._drop_pass(one)
            self._runner.remove(request_id)

    def propose(self, one: Drafted, token_ids: Sequence[int], most: int) -> list[int]:
        """Return the tokens that the draft model chooses next; none if a pass was stopped.

        Args:
            one: The request.
            token_ids: Its tokens.
            most: Most tokens to return.
        """
        known = len(token_ids) - one.first
        self._follow(one, token_ids)
        end = known + self._room(one, known, most)
        if end == known:
            return []
        self._make_room(one, end)
        begin_ns, before = self._now_ns(), len(one.ids)
        is_behind = before - one.num_computed > SHORT
        while len(one.ids) < end:
            if not self._pass(one):
                return []
        if len(one.ids) > before and not is_behind:
            self._measured((self._now_ns() - begin_ns) // (len(one.ids) - before))
        return one.ids[known:end]

    def _follow(self, one: Drafted, token_ids: Sequence[int]) -> None:
        """Take the request's new tokens, and cut the KV of drafts that it does not have."""
        ids, same, first = one.ids, one.num_same, one.first
        known = len(token_ids) - first
        while same < min(len(ids), known) and ids[same] == token_ids[first + same]:
            same += 1
        one.num_same = known
        if same == known:
            return  # more drafts of the same text may be known
        ids[same:] = token_ids[first + same :]
        if one.capacity is None:
            longest = self._requests[one.request_id].max_total_tokens
            one.capacity = min(longest, self._runner.shape.longest(self._most_kv_tokens))
            self._runner.add(one.request_id, ids, one.sampling, known, max(known, one.capacity))
            return
        if one.parked is not None:
            program = one.parked.program
            if program.rows[0].hi > same or program.samples[0]:
                self._drop_pass(one)
        one.num_computed = min(one.num_computed, same)
        num_kept = one.num_computed if one.parked is None else same
        self._runner.revise(one.request_id, ids, one.sampling, num_kept, ())

    def _room(self, one: Drafted, known: int, most: int) -> int:
        """Return how many of `most` tokens after the known ones can be drafted."""
        assert one.capacity is not None
        above = self._runner.shape.recompute_above
        if above is not None and known <= above:
            most = min(most, above + 1 - known)
        return max(0, min(most, one.capacity - known))

    def _make_room(self, one: Drafted, num_tokens: int) -> None:
        """Drop KV of requests that were asked longest ago, so that `num_tokens` of one fit."""
        self._drafted[one.request_id] = self._drafted.pop(one.request_id)  # the last asked
        held = self.num_kv_tokens - one.num_held
        for other in self._drafted.values():
            if held + num_tokens <= self._most_kv_tokens or other is one:
                return
            held -= other.num_held
            self._drop_kv(other)

    def _drop_kv(self, one: Drafted) -> None:
        if one.capacity is not None:
            self._drop_pass(one)
            self._runner.evict(one.request_id)
            one.num_computed = 0

    def _drop_pass(self, one: Drafted) -> None:
        if one.parked is not None:
            self._runner.drop(one.parked.program)
            one.parked = None

    def _pass(self, one: Drafted) -> bool:
        """Run a pass, or continue the parked one; return True if it ended."""
        stop, below = self._stop(), self._requests[one.request_id].priority + 1
        if self._is_stopped(stop, below):
            return False
        program, at = one.parked or self._new_pass(one)
        program = replace(program, stop_below=below)  # the class may have changed
        one.parked = _Parked(program, at)
        is_long, begin_ns = program.num_tokens > SHORT, self._now_ns()
        if is_long and self._left_ns <= 0:
            return False
        stop.stop_at_ns = begin_ns + self._left_ns if is_long else None
        self._before_run(one, program)
        end = self._runner.run(program, at, stop)
        if is_long:
            self._left_ns -= self._now_ns() - begin_ns
        if end != program.end:
            one.parked = _Parked(program, end)
            self._is_stopped(stop, below)
            return False
        sampled = self._runner.finish(program)
        one.parked, one.num_computed = None, program.rows[0].hi
        one.ids += [token.token_id for token in sampled]
        return True

    def _before_run(self, one: Drafted, program: Program) -> None:
        """Do nothing. A draft model that reads more than tokens gets the rest here."""

    def _is_stopped(self, stop: ArrivalWord, below: int) -> bool:
        """Return True if a class below `below` has arrived, and count the stop."""
        if stop.word >= below:
            return False
        self.was_stopped = True
        self.num_stops += 1
        self.stop_latencies_ns.append(self._now_ns() - stop.lowered_ns)
        return True

    def _new_pass(self, one: Drafted) -> _Parked:
        """Make the pass over the next tokens without KV. The last pass samples a token."""
        shape, num = self._runner.shape, len(one.ids)
        above = shape.recompute_above
        if above is not None and one.num_computed <= above < num:
            self._drop_kv(one)
        lo = one.num_computed
        hi = min(num, lo + CHUNK)
        crosses = above is not None and hi - 1 <= above < num
        if hi == num and hi - lo > SHORT and not crosses:
            hi -= 1  # a pass that samples is dropped when the request gets a token
        row = Row(one.request_id, lo, hi, 0, shape.num_layers)
        self._num_frames += 1
        program = compile_program(
            Plan(rows=(row,), grain=Grain.EXPERT),
            frame_id=self._num_frames,
            samples=(int(row.hi == num),),
            shape=shape,
            cuts=self._runner.cuts,
        )
        self._runner.accept(program, ())
        return _Parked(program, START)

    def _measured(self, ns: int) -> None:
        self.draft_ns = int(OLD * self.draft_ns + (1 - OLD) * ns) if self.draft_ns else max(1, ns)


def _alike(sampling: SamplingParams) -> SamplingParams:
    """Return settings with which the draft model chooses like the model.

    The seed and the place of a token give its random number. So equal logits give equal tokens.
    Limits, such as a grammar, and penalties for tokens of the answer alone are left out.
    """
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
    )
