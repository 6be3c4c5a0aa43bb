"""A choice among candidates on a virtual clock: `Choice` and audits as they are, and counted work.

A machine serves a constant number of requests. A candidate's numbers are those of a profile's file:
the time of a step of n rows is a line through its speeds alone and together. Candidates that serve
at the same time take turns. For each token a difference from the whole model is drawn, then a
confidence from the profile's bins. Nothing is computed, so a result says what a choice is worth on
such numbers, and not what a model does.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from qllm.errors import ConfigError
from qllm.fleet.audit import SHARE, is_audited
from qllm.fleet.choice import Candidate, Choice, Cost, Do, Rules
from qllm.models.depth_profile import EDGES, DepthEntry, DepthProfile

LOAD_BYTES_PER_S = 1 << 30
"""Bytes of weights that are read per second."""


class Asked(NamedTuple):
    """A request of one kind of text."""

    kind: str
    prompt: int
    answer: int
    """Tokens of the prompt, and of the answer."""


class Served(NamedTuple):
    """The counts of a simulation."""

    tokens: int
    seconds: float
    differing: int
    """Tokens of answers that are not the whole model's."""
    by_candidate: Mapping[str, int]
    """Tokens of answers by candidate."""
    audited: int
    """Answers that were audited."""
    changes: int
    """Changes of the candidate that serves."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens of answers per virtual second."""
        return self.tokens / self.seconds

    @property
    def disagreement(self) -> float:
        """Part of all tokens of answers that are not the whole model's."""
        return self.differing / max(1, self.tokens)


@dataclass(slots=True)
class _Running:
    number: int
    asked: Asked
    name: str
    begun_s: float
    tokens: int = 0
    moved: bool = False
    """True if the request has changed its candidate. Its time then tells no candidate's speed."""


class Speed(NamedTuple):
    """The time of a step: `step_s`, and `row_s` for each of its rows."""

    step_s: float
    row_s: float
    token_s: float
    """Time of a prompt's token."""

    @classmethod
    def of(cls, entry: DepthEntry, batch: int) -> "Speed":
        """Return the line through a profile's two speeds."""
        alone_s, together_s = 1 / entry.alone_per_s, batch / entry.batch_per_s
        row_s = max(0.0, (together_s - alone_s) / max(1, batch - 1))
        return cls(max(0.0, alone_s - row_s), row_s, 1 / entry.prompt_per_s)


def candidates_of(*profiles: DepthProfile) -> list[Candidate]:
    """Return the candidates of profiles, named `MODEL@DEPTH`, and `MODEL` for a whole one."""
    return [
        Candidate(
            name=_name(profile, one),
            model=profile.model,
            depth=one.depth,
            is_whole=one.depth == profile.layers,
            tokens_per_s=one.batch_per_s,
            agreement=one.agreed,
            low=one.low,
        )
        for profile in profiles
        for one in profile.depths
    ]


def _name(profile: DepthProfile, one: DepthEntry) -> str:
    return profile.model if one.depth == profile.layers else f"{profile.model}@{one.depth}"


@dataclass(slots=True)
class _World:
    """The machine, its requests, and the numbers of the candidates."""

    entries: dict[str, DepthEntry]
    speeds: dict[str, Speed]
    choice: Choice | None
    fixed: str
    whole: str
    rng: random.Random
    now_s: float = 0.0
    running: list[_Running] = field(default_factory=list)
    loaded: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)
    differing: int = 0
    audited: int = 0
    changes: int = 0

    def load(self, name: str) -> None:
        """Wait for a candidate's weights, if no engine has them."""
        if name not in self.loaded:
            self.loaded.add(name)
            self.now_s += self.entries[name].weight_bytes / LOAD_BYTES_PER_S

    def begin(self, number: int, asked: Asked) -> None:
        name = self.fixed if self.choice is None else self.choice.current
        self.load(name)
        self.now_s += asked.prompt * self.speeds[name].token_s
        self.running.append(_Running(number, asked, name, self.now_s))

    def step(self) -> list[_Running]:
        """Compute a token of each request; return the requests that are done."""
        names = dict.fromkeys(one.name for one in self.running)
        for name in names:
            rows = [one for one in self.running if one.name == name]
            self.now_s += self.speeds[name].step_s + len(rows) * self.speeds[name].row_s
            confidences = []
            for one in rows:
                one.tokens += 1
                differs, confidence = self._token(name, one.asked.kind)
                self.differing += differs
                confidences.append(confidence)
            self.counts[name] = self.counts.get(name, 0) + len(rows)
            if self.choice is not None:
                self.follow(*self.choice.on_tokens(name, confidences))
        done = [one for one in self.running if one.tokens >= one.asked.answer]
        self.running = [one for one in self.running if one.tokens < one.asked.answer]
        return done

    def end(self, one: _Running, share: float) -> None:
        """Tell the choice that a request is done, and audit the answer."""
        name = f"{one.number}"
        if self.choice is None:
            if is_audited(name, share):
                self._audit(one, ())
            return
        tokens, seconds = (0, 0.0) if one.moved else (one.tokens, self.now_s - one.begun_s)
        self.follow(*self.choice.on_finished(one.name, tokens, seconds))
        if self.choice.is_audited(name, share):
            self._audit(one, self.choice.shadowed)

    def _audit(self, one: _Running, closed: Sequence[str]) -> None:
        """Let the whole model and closed candidates read an answer, which takes their time."""
        self.audited += 1
        for name in {self.whole, *closed} - {one.name}:
            self.now_s += (one.asked.prompt + one.tokens) * self.speeds[name].token_s
        for name in dict.fromkeys([one.name, *closed]):
            differing = sum(self._token(name, one.asked.kind)[0] for _ in range(one.tokens))
            if self.choice is not None:
                self.follow(*self.choice.on_audit(name, one.tokens, differing))

    def follow(self, do: Do, name: str) -> None:
        """Move open requests to the candidate that serves now. Its KV of them is computed."""
        if self.choice is None:
            return
        is_open = self.choice.open
        leave = [one for one in self.running if one.name not in is_open or do is Do.DEEPEN]
        if do is Do.STAY and not leave:
            return
        self.changes += do is not Do.STAY
        self.load(name)
        for one in leave:
            self.now_s += (one.asked.prompt + one.tokens) * self.speeds[name].token_s
            one.name, one.moved = name, True

    def price(self, name: str) -> Cost:
        """Return the cost of going to a candidate now."""
        tokens = sum(one.asked.prompt + one.tokens for one in self.running)
        load_s = 0.0
        if name not in self.loaded:
            load_s = self.entries[name].weight_bytes / LOAD_BYTES_PER_S
        return Cost(load_s, tokens * self.speeds[name].token_s)

    def _token(self, name: str, kind: str) -> tuple[bool, float]:
        """Draw if a candidate's token differs from the whole model's, and its confidence."""
        entry = self.entries[name]
        differs = self.rng.random() >= entry.agreement[kind]
        weights = [one.num - one.agreed if differs else one.agreed for one in entry.bins]
        if not any(weights):
            return differs, 1.0
        return differs, self.rng.choices(EDGES, weights)[0]


def simulate_depths(
    asked: Iterable[Asked],
    profiles: Sequence[DepthProfile],
    *,
    fixed: str | None = None,
    seats: int = 8,
    rules: Rules | None = None,
    share: float = SHARE,
    seed: int = 0,
) -> Served:
    """Serve requests with a choice among candidates, or with one of them.

    One candidate alone is audited too: without audits nothing would say that its loss is bounded.

    Args:
        asked: Requests, of which `seats` are open at any time.
        profiles: Profiles of the models. The first whole model audits.
        fixed: Candidate that serves all requests; None lets `Choice` choose.
        seats: Number of open requests.
        rules: Constants of the choice.
        share: Part of the answers that are audited.
        seed: Seed of the drawn tokens.

    Raises:
        ConfigError: A candidate, a kind of text or a rule is unknown or wrong.
    """
    entries = {_name(profile, one): one for profile in profiles for one in profile.depths}
    speeds = {
        _name(profile, one): Speed.of(one, profile.batch)
        for profile in profiles
        for one in profile.depths
    }
    waiting = list(asked)
    for kind in {one.kind for one in waiting}:
        if unknown := [name for name, one in entries.items() if kind not in one.agreement]:
            raise ConfigError(
                f"the profile of {unknown[0]!r} has no text {kind!r}; it has "
                f"{', '.join(entries[unknown[0]].agreement)}"
            )
    choice = Choice(candidates_of(*profiles), rules) if fixed is None else None
    start = fixed if choice is None else choice.current
    if start not in entries:
        raise ConfigError(f"candidate {start!r} is unknown; there are {', '.join(entries)}")
    whole = profiles[0].model  # reads the answers that are audited
    world = _World(entries, speeds, choice, start, whole, random.Random(seed))
    world.loaded |= {start, whole}
    if choice is not None:
        choice.cost_of = world.price
    waiting.reverse()
    number = 0
    while waiting or world.running:
        while waiting and len(world.running) < seats:
            world.begin(number, waiting.pop())
            number += 1
        for one in world.step():
            world.end(one, share)
    return Served(
        tokens=sum(world.counts.values()),
        seconds=world.now_s,
        differing=world.differing,
        by_candidate=world.counts,
        audited=world.audited,
        changes=world.changes,
    )
