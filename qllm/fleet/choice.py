"""The choice among candidates, models and models that are cut, for requests that allow a loss.

A candidate is closed until audits show that its rate of disagreement is within the bound. Then the
fastest open candidate serves. It is left for one of three reasons:

    an audit's bound is above `max_disagreement`   closed: deepen or switch at once
    more than 50 of its last 100 tokens are low    it rests: deepen or switch, by cost
    every 150 requests all are compared            another is faster by a margin

The constants are those of HELIOS (arXiv:2504.10724): 3 candidates, 5 requests, 50 of 100 tokens,
150 requests. HELIOS has no audits, and serves 5 requests with each candidate before it knows their
loss. Here a closed candidate never answers: it reads audited answers (`shadowed`) until its own
audits are good. The profile has its speed. After a change the last 5 requests of both candidates
correct it. Requests that run beside those of another candidate would not tell its speed.

This module has no clock and no chance. Time is counted in tokens and requests.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

from qllm.errors import ConfigError, shown
from qllm.fleet.audit import SHARE, Audits, Estimate, is_audited

DENSE = 2
"""Answers that a closed candidate reads before only a share is audited, in `Rules.trials`."""


class Candidate(NamedTuple):
    """A model, whole or cut at a depth."""

    name: str
    model: str
    depth: int
    is_whole: bool
    tokens_per_s: float
    """Speed in the profile."""
    agreement: float
    """Part of the positions at which it chooses the whole model's token, in the profile."""
    low: float = 0.5
    """Confidence below which one of its tokens is low."""


class Rules(NamedTuple):
    """The constants of a choice."""

    max_disagreement: float = 0.02
    """Bound of the rate at which tokens of a lossy answer differ from the whole model's."""
    num_candidates: int = 3
    trials: int = 5
    """Requests that tell a candidate's speed, and fewest audited answers before one opens."""
    window: int = 100
    """Tokens that are searched for low ones, and fewest tokens between two changes that no audit
    asks for."""
    most_low: int = 50
    """Most low tokens in the window."""
    every: int = 150
    """Requests between two comparisons of all open candidates."""
    margin: float = 0.1
    """Part by which another candidate must be faster."""
    reopen: float = 0.75
    """Part of the bound below which audits of a closed candidate must be before it opens again."""


class Do(StrEnum):
    """The answer of a choice."""

    STAY = "stay"
    DEEPEN = "deepen"
    """Go on with more layers of the same model."""
    SWITCH = "switch"
    """Go on with another model, or with fewer layers."""


class Decision(NamedTuple):
    """The answer of a choice, and the candidate that serves from now on."""

    do: Do
    name: str


class Cost(NamedTuple):
    """The costs of going to a candidate, in seconds."""

    load_s: float = 0.0
    """Time to load its layers that no engine has; 0 if it is loaded."""
    switch_s: float = 0.0
    """Time to compute the KV of open requests again."""

    @property
    def all_s(self) -> float:
        """Both together."""
        return self.load_s + self.switch_s


class _State:
    """The changing numbers of one candidate."""

    def __init__(self, candidate: Candidate) -> None:
        self.candidate = candidate
        self.audits = Audits()
        self.is_open = candidate.is_whole
        self.was_closed = False
        self.rests_until = 0
        """Number of finished requests before which the candidate rests."""
        self.rest = 0
        """Length of its last rest, in requests."""
        self.speed = candidate.tokens_per_s
        """Tokens per second, on the scale of the profile."""


class Choice:
    """The candidate that serves lossy requests, and the decisions to leave it.

    Args:
        candidates: All candidates. The whole models stay, with the fastest others up to
            `num_candidates` whose profile is within the bound, or else those nearest to it.
        rules: Constants.
        cost_of: Function that returns the cost of going to a candidate now, by its name. By default
            it costs nothing.

    Raises:
        ConfigError: No candidate is a whole model, two have the same name, or a rule is out of its
            range.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        rules: Rules | None = None,
        cost_of: Callable[[str], Cost] | None = None,
    ) -> None:
        self.rules = rules or Rules()
        _check(candidates, self.rules)
        self.cost_of = cost_of or (lambda _: Cost())
        """Function that returns the cost of going to a candidate now, by its name."""
        self._states = {one.name: _State(one) for one in _kept(candidates, self.rules)}
        wholes = [one for one in candidates if one.is_whole]
        self.current = max(wholes, key=lambda one: one.tokens_per_s).name
        """Name of the candidate that serves."""
        self._low: deque[bool] = deque()  # of the last tokens
        self._num_low = 0
        self._tokens = self.rules.window  # since the last change
        self._finished = self._compared_at = 0
        self._times: deque[tuple[int, float]] = deque(maxlen=self.rules.trials)
        self._before: tuple[str, float] | None = None
        """The candidate before this one, and its speed in its last requests."""

    # -- for the caller that starts requests

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The candidates, without those that did not get a place."""
        return tuple(state.candidate for state in self._states.values())

    @property
    def open(self) -> tuple[str, ...]:
        """Names of the candidates that may answer. Whole models always may."""
        return tuple(name for name, state in self._states.items() if state.is_open)

    @property
    def shadowed(self) -> tuple[str, ...]:
        """Names of the closed candidates, which read the answers that are audited."""
        return tuple(name for name, state in self._states.items() if not state.is_open)

    def estimate(self, name: str) -> Estimate:
        """Return a candidate's audited rate."""
        return self._states[name].audits.estimate

    def is_audited(self, request_id: str, share: float = SHARE, seed: int = 0) -> bool:
        """Return True if the whole model and the closed candidates are to read an answer.

        That is a share of the answers, and all of them while a closed candidate has read few.

        Args:
            request_id: Id of the request.
            share: Part of the answers that are audited.
            seed: Seed of the sample.

        Raises:
            ConfigError: The share is no number in [0, 1].
        """
        most = DENSE * self.rules.trials
        few = any(self.estimate(name).num_answers < most for name in self.shadowed)
        return is_audited(request_id, share, seed) or few

    # -- what happened

    def on_tokens(self, name: str, confidences: Iterable[float]) -> Decision:
        """Count tokens of a candidate, with the confidence of each, in order."""
        decision = Decision(Do.STAY, self.current)
        for confidence in confidences:
            self._tokens += 1
            state = self._states[self.current]
            if name != self.current or state.candidate.is_whole:
                continue
            self._low.append(is_low := confidence < state.candidate.low)
            self._num_low += is_low
            if len(self._low) > self.rules.window:
                self._num_low -= self._low.popleft()
            if self._num_low > self.rules.most_low and self._tokens >= self.rules.window:
                state.rest = max(self.rules.every, 2 * state.rest)
                state.rests_until = self._finished + state.rest
                decision = self._leave()
        return decision

    def on_finished(self, name: str, num_tokens: int, seconds: float) -> Decision:
        """Count a finished request.

        Args:
            name: The candidate of its last token.
            num_tokens: Tokens of the answer; 0 if another candidate has some of them.
            seconds: Time from the first token to the last.
        """
        self._finished += 1
        if name == self.current and num_tokens and seconds > 0:
            self._times.append((num_tokens, seconds))
        if self._finished - self._compared_at >= self.rules.every:
            return self._compare()
        return Decision(Do.STAY, self.current)

    def on_audit(self, name: str, num_positions: int, num_differing: int) -> Decision:
        """Count an audited answer of a candidate, or an answer that it only read.

        Audits close and open candidates. A whole model agrees with itself, and has no audits.

        Args:
            name: The candidate.
            num_positions: Positions of the answer.
            num_differing: Positions at which the candidate's token is not the whole model's.
        """
        state = self._states[name]
        if state.candidate.is_whole:
            return Decision(Do.STAY, self.current)
        found = state.audits.add(num_positions, num_differing)
        bound = self.rules.max_disagreement
        if state.is_open:
            if found.upper > bound:
                state.is_open, state.was_closed = False, True
                state.audits.clear()
                if name == self.current:
                    return self._leave()
        elif found.num_answers >= self.rules.trials and found.upper <= bound * (
            self.rules.reopen if state.was_closed else 1
        ):
            state.is_open = True
            return self._compare()
        return Decision(Do.STAY, self.current)

    # -- changes

    def _able(self) -> list[str]:
        """Return the names of the open candidates that do not rest. Whole models never rest."""
        return [
            name
            for name, state in self._states.items()
            if state.is_open and self._finished >= state.rests_until
        ]

    def _measured(self) -> float | None:
        """Return the tokens per second of the last requests of the current candidate."""
        if len(self._times) < self.rules.trials:
            return None
        return sum(num for num, _ in self._times) / sum(seconds for _, seconds in self._times)

    def _compare(self) -> Decision:
        """Go to the fastest candidate if it is faster by the margin."""
        if self._tokens < self.rules.window:
            return Decision(Do.STAY, self.current)
        self._compared_at = self._finished
        own, found = self._states[self.current], self._measured()
        if self._before is not None and found is not None:
            name, before = self._before
            own.speed, self._before = self._states[name].speed * found / before, None
        best = max(self._able(), key=lambda name: self._states[name].speed)
        if self._states[best].speed <= own.speed * (1 + self.rules.margin):
            return Decision(Do.STAY, self.current)
        return self._go(best)

    def _leave(self) -> Decision:
        """Leave the current candidate for a deeper one of its model, or another model, by cost."""
        own = self._states[self.current].candidate
        others = [self._states[name].candidate for name in self._able() if name != self.current]
        deeper = [one for one in others if one.model == own.model and one.depth > own.depth]
        nearest = sorted(deeper, key=lambda one: one.depth)[:1]
        found = nearest + [one for one in others if one.model != own.model]
        best = min(found, key=lambda one: self.cost_of(one.name).all_s)
        return self._go(best.name)

    def _go(self, name: str) -> Decision:
        old, new = self._states[self.current].candidate, self._states[name].candidate
        found = self._measured()
        self._before = None if found is None else (self.current, found)
        self._times.clear()
        self.current = name
        self._low.clear()
        self._num_low = self._tokens = 0
        deepens = old.model == new.model and new.depth > old.depth
        return Decision(Do.DEEPEN if deepens else Do.SWITCH, name)


def _kept(candidates: Sequence[Candidate], rules: Rules) -> list[Candidate]:
    """Return the candidates that get a place, in their order."""
    wholes = {one.name for one in candidates if one.is_whole}
    cut = [one for one in candidates if not one.is_whole]
    good = [one for one in cut if 1 - one.agreement <= rules.max_disagreement]
    good.sort(key=lambda one: -one.tokens_per_s)
    rest = sorted((one for one in cut if one not in good), key=lambda one: -one.agreement)
    room = max(0, rules.num_candidates - len(wholes))
    names = wholes | {one.name for one in [*good, *rest][:room]}
    return [one for one in candidates if one.name in names]


def _check(candidates: Sequence[Candidate], rules: Rules) -> None:
    names = [one.name for one in candidates]
    if len(set(names)) < len(names):
        raise ConfigError(f"two candidates have the same name: {shown(names)}")
    if not any(one.is_whole for one in candidates):
        raise ConfigError(
            f"none of the candidates {shown(names)} is a whole model; a loss is only measured "
            "beside one, so add a whole model"
        )
    if not 0 < rules.max_disagreement < 1:
        raise ConfigError(
            f"max_disagreement={shown(rules.max_disagreement)} must be above 0 and below 1; 0.02 "
            "lets two of a hundred tokens differ"
        )
    if not 0 <= rules.most_low < rules.window or min(rules.trials, rules.every) < 1:
        raise ConfigError(
            f"the rules {rules} must have most_low below window, and trials and every of at least 1"
        )
