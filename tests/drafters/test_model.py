"""A draft model without an engine: what it proposes, its KV, and its stops."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from qllm.drafters.model import CHUNK, SHORT, DraftModel, Terms
from qllm.drafters.protocol import DraftRequest
from qllm.plan import ANY_ARRIVAL
from qllm.runner.cpu import cpu_runner
from qllm.runner.runner import TorchRunner
from qllm.scheduler.request import Request
from qllm.types import Priority, SamplingParams
from tests.support.draft_models import poison_cut
from tests.support.families import VOCAB, make_model
from tests.support.storms import prompt_of

GREEDY = SamplingParams(temperature=0, seed=0)
SETTINGS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(temperature=0.9, seed=7),
    "repetition": SamplingParams(temperature=0.8, seed=8, repetition_penalty=1.4),
    "bias": SamplingParams(temperature=0, seed=0, logit_bias={9: 3.0}),
}
MS = 1_000_000
SECOND: list[TorchRunner] = []
"""Another runner of the same weights, for what a fresh draft model proposes."""


@pytest.fixture(autouse=True)
def _cut_kv_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_cut(monkeypatch)


@pytest.fixture(scope="module")
def runner() -> Iterator[TorchRunner]:
    torch.set_num_threads(1)
    made, second = (cpu_runner(make_model("mixtral", torch.bfloat16)) for _ in range(2))
    SECOND.append(second)
    yield made
    SECOND.pop().close()
    made.close()


class Word:
    """A stop that an arrival of a class lowers at one of its polls, and that counts the polls."""

    def __init__(self, after: int = 1 << 60, to: int = Priority.LS) -> None:
        self.after, self.to = after, to
        self.num_polls = self.polls_after = 0
        self.stop_at_ns: int | None = None
        self.lowered_ns = 0
        self.clock: Callable[[], int] = lambda: 0

    @property
    def word(self) -> int:
        self.num_polls += 1
        if self.num_polls <= self.after:
            return ANY_ARRIVAL
        self.polls_after += 1
        return self.to

    def now_ns(self) -> int:
        return self.clock()


class Rig:
    """A draft model and its requests."""

    def __init__(self, runner: TorchRunner) -> None:
        self.runner, self.stop, self.now_ns = runner, Word(), 0
        self.requests: dict[int, Request] = {}
        terms = Terms(lambda: self.stop, self.requests, 4096, 5 * MS, lambda: self.now_ns)
        self.model = DraftModel(runner, terms)

    def add(self, number: int, num_prompt: int, sampling: SamplingParams = GREEDY) -> Any:
        self.requests[number] = Request(
            request_id=number,
            priority=Priority.BE,
            arrival_ns=0,
            num_prompt_tokens=num_prompt,
            max_tokens=200,
        )
        self.model.begin_turn()
        return self.model(DraftRequest(number, num_prompt, sampling, lambda *_: ()))

    @contextmanager
    def slow(self) -> Iterator[None]:
        """Let each segment of a pass take a millisecond."""
        self.stop.clock = lambda: self.now_ns
        self.runner.on_segment = lambda *_: setattr(self, "now_ns", self.now_ns + MS)
        try:
            yield
        finally:
            self.runner.on_segment = None

    def end(self) -> None:
        for number in self.requests:
            self.model.forget(number)
        assert self.model.num_kv_tokens == 0
        assert not self.runner.requests
        assert not self.runner.frames


@pytest.fixture
def rig(runner: TorchRunner) -> Iterator[Rig]:
    made = Rig(runner)
    yield made
    made.end()


def fresh(known: Sequence[int], num_prompt: int, most: int, sampling: SamplingParams) -> list[int]:
    """The proposal of a draft model that sees these tokens for the first time."""
    rig = Rig(SECOND[0])
    found: list[int] = rig.add(1_000_000, num_prompt, sampling).propose(known, most)
    rig.end()
    return found


@pytest.mark.parametrize("kind", SETTINGS)
def test_after_rejections_it_proposes_what_a_fresh_draft_model_proposes(
    kind: str, rig: Rig
) -> None:
    """KV of rejected drafts is NaN. Accepted ones stay computed."""
    rng, sampling = random.Random(len(kind)), SETTINGS[kind]
    known = prompt_of(21, 3)
    one = rig.add(0, 20, sampling)
    num_cut = num_kept = 0
    for _ in range(24):
        most = rng.choice((1, 4, 7, 16))
        found = one.propose(tuple(known), most)
        assert found == fresh(known, 20, most, sampling)
        assert len(found) == most
        accepted = rng.randrange(most + 1)
        num_cut += most - accepted
        num_kept += accepted
        known += [*found[:accepted], rng.randrange(VOCAB)]
    assert min(num_cut, num_kept) > 30


def accepted_rows(rig: Rig, patch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The ranges of all rows that the runner gets from now on."""
    rows: list[tuple[int, int]] = []
    accept = rig.runner.accept

    def seen(program: Any, tables: Any = ()) -> None:
        rows.extend((row.lo, row.hi) for row in program.rows)
        accept(program, tables)

    patch.setattr(rig.runner, "accept", seen)
    return rows


def test_no_token_is_computed_twice_unless_its_draft_was_wrong(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = prompt_of(30, 4)
    one = rig.add(0, 29)
    rows = accepted_rows(rig, monkeypatch)
    found = one.propose(tuple(known), 3)
    assert rows == [(0, 29), (29, 30), (30, 31), (31, 32)]
    del rows[:]
    known += [*found, one.propose((*known, *found), 1)[0]]  # all are right, and one more
    assert rows == [(32, 33)]
    del rows[:]
    known += [5]
    one.propose(tuple(known), 1)
    assert rows == [(33, 35)]


def test_drafts_that_are_known_already_need_no_pass(rig: Rig) -> None:
    known = prompt_of(9, 4)
    one = rig.add(0, 8)
    found = one.propose(tuple(known), 6)
    polls = rig.stop.num_polls
    assert one.propose((*known, *found[:2]), 4) == found[2:]
    assert rig.stop.num_polls == polls


@pytest.mark.parametrize("after", [0, 1, 3, 9, 30])
@pytest.mark.parametrize("kind", ["prompt", "drafts"])
def test_an_arrival_stops_a_pass_at_its_next_poll(kind: str, after: int, rig: Rig) -> None:
    """Nothing is proposed then. The pass goes on later, with the same tokens."""
    known, one = prompt_of(60, 5), rig.add(0, 59)
    if kind == "drafts":
        one.propose(tuple(known), 1)
        known = [*known, one.ids[-1]]
    expected = fresh(known, 59, 4, GREEDY)
    rig.stop = Word(after)
    assert one.propose(tuple(known), 4) == []
    assert rig.model.was_stopped
    assert not rig.model.may_draft
    assert rig.model.num_stops == len(rig.model.stop_latencies_ns) == 1
    assert rig.stop.num_polls - after <= 2, "the poll that saw it, and one that says why"
    parked = list(rig.runner.frames)
    assert len(parked) == (after > 0), "with an arrival before the pass there is none"
    rig.stop = Word()
    rig.model.begin_turn()
    assert rig.model.may_draft
    assert one.propose(tuple(known), 4) == expected


@pytest.mark.parametrize(
    ("priority", "word", "stops"),
    [
        (Priority.BE, Priority.LS, True),
        (Priority.BE, Priority.BE, True),
        (Priority.BE, Priority.BE + 1, False),
        (Priority.LS, Priority.LS, True),
        (Priority.LS, Priority.BE, False),
    ],
)
def test_an_arrival_of_the_same_class_or_a_better_one_stops_it(
    priority: int, word: int, stops: bool, rig: Rig
) -> None:
    one = rig.add(0, 20)
    rig.requests[0].priority = priority
    rig.stop = Word(2, word)
    found = one.propose(prompt_of(21, 1), 2)
    assert rig.model.was_stopped is stops
    assert bool(found) is not stops


def test_a_parked_pass_is_dropped_if_its_tokens_were_wrong(rig: Rig) -> None:
    known, one = prompt_of(20, 6), rig.add(0, 19)
    found = one.propose(tuple(known), 4)
    known += [*found, 3]
    rig.stop = Word(2)
    assert one.propose(tuple(known), 4) == []
    rig.stop = Word()
    other = [*known[:-1], 4]  # never so in an engine, and the harder case
    one.num_same = len(known) - 1
    assert one.propose(tuple(other), 4) == fresh(other, 19, 4, GREEDY)


@pytest.mark.parametrize("is_right", [True, False])
def test_a_parked_pass_that_would_draft_is_dropped_when_the_model_went_on(
    is_right: bool, rig: Rig
) -> None:
    """Its token would come behind the one that the model chose."""
    known, one = prompt_of(20, 6), rig.add(0, 19)
    (first,) = fresh(known, 19, 1, GREEDY)
    rig.stop = Word(3)
    assert one.propose(tuple(known), 4) == []
    assert len(rig.runner.frames) == 1
    rig.stop = Word()
    known.append(first if is_right else (first + 1) % VOCAB)
    assert one.propose(tuple(known), 4) == fresh(known, 19, 4, GREEDY)


def test_a_stopped_draft_goes_on_when_the_model_chose_it_too(rig: Rig) -> None:
    known, one = prompt_of(20, 6), rig.add(0, 19)
    expected = fresh(known, 19, 8, GREEDY)
    one.propose(tuple(known), 2)
    rig.stop = Word(3)
    assert one.propose(tuple(known), 6) == []
    (frame,) = rig.runner.frames
    rig.stop = Word()
    assert one.propose((*known, *expected[:1]), 4) == expected[1:5]
    assert frame not in rig.runner.frames
    assert rig.model._num_frames < 12


def test_a_long_prompt_takes_the_time_of_several_turns(rig: Rig) -> None:
    """The end of a turn stops it, as an arrival does, and says nothing of an arrival."""
    known = prompt_of(400, 7)
    one = rig.add(0, 399)
    with rig.slow():
        turns = [one.propose(tuple(known), 3)]
        while not turns[-1]:
            assert len(turns) < 100
            assert rig.now_ns >= len(turns) * 5 * MS
            assert one.propose(tuple(known), 3) == [], "the time of this turn is over"
            rig.model.begin_turn()
            assert rig.model.may_draft
            turns.append(one.propose(tuple(known), 3))
    assert len(turns) > 1
    assert turns[-1] == fresh(known, 399, 3, GREEDY)
    assert rig.model.num_stops == 0
    assert rig.model.draft_ns == 0, "time that was taken to catch up says nothing of a draft"


def test_a_request_that_grows_is_caught_up_with(rig: Rig) -> None:
    """Each turn has time for a part of the prompt only, and the request gets a token after it."""
    known = prompt_of(400, 7)
    one = rig.add(0, 399)
    num_turns = 1
    with rig.slow():
        while not (found := one.propose(tuple(known), 3)):
            assert num_turns < 100
            known.append(known[-1])
            rig.model.begin_turn()
            num_turns += 1
    assert num_turns > 2
    assert found == fresh(known, 399, 3, GREEDY)


def test_time_in_which_others_draft_is_not_time_to_catch_up(rig: Rig) -> None:
    """Else the requests that are asked last would never draft."""
    known, one = prompt_of(30, 4), rig.add(0, 29)
    known += one.propose(tuple(known), 4)
    other = rig.add(1, 29)
    with rig.slow():
        assert len(one.propose(tuple(known), 4)) == 4
        assert rig.now_ns > 5 * MS
    assert len(other.propose(prompt_of(30, 5), 2)) == 2


def test_a_pass_has_few_tokens(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SHORT < CHUNK
    known = prompt_of(CHUNK - 3, 1)
    rows = accepted_rows(rig, monkeypatch)
    rig.add(0, CHUNK - 4).propose(known, 1)
    assert max(hi - lo for lo, hi in rows) <= CHUNK


@pytest.mark.parametrize("limit", [30, 64, 100])
def test_its_kv_never_exceeds_its_limit(limit: int, rig: Rig) -> None:
    """The request that was asked longest ago loses its KV. It is computed again."""
    rig.model._most_kv_tokens, rng = limit, random.Random(limit)
    known = {number: prompt_of(13, number) for number in range(4)}
    made = {number: rig.add(number, 12) for number in known}
    largest = 0
    for step in range(60):
        number = rng.choice(sorted(known))
        found = made[number].propose(tuple(known[number]), 3)
        largest = max(largest, rig.model.num_kv_tokens)
        assert largest <= limit
        expected = fresh(known[number], 12, 3, GREEDY)
        room = max(0, limit - len(known[number]))
        assert found == expected[:room], step
        if len(known[number]) < limit + 3:
            known[number] += [*found[: rng.randrange(3)], rng.randrange(VOCAB)]
    assert largest > limit / 2


def test_a_request_that_is_too_long_takes_no_kv_from_others(rig: Rig) -> None:
    rig.model._most_kv_tokens = 40
    one, other = rig.add(0, 20), rig.add(1, 50)
    assert len(one.propose(prompt_of(21, 1), 2)) == 2
    assert other.propose(prompt_of(51, 2), 2) == []
    assert one.num_held == rig.model.num_kv_tokens == 22


def test_nothing_is_drafted_behind_the_longest_answer(rig: Rig) -> None:
    one, known = rig.add(0, 10), prompt_of(10, 2)
    rig.requests[0].max_tokens = 4
    assert len(one.propose((*known, 1), 8)) == 3
    assert len(one.propose((*known, 1, 2, 3), 8)) == 1
    assert one.propose((*known, 1, 2, 3, 4), 8) == []


def test_a_pass_that_raises_frees_its_frame_and_its_kv(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rig.add(0, 20)

    def fails(*_: Any) -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr(rig.runner, "run", fails)
    with pytest.raises(RuntimeError, match="no more"):
        one.propose(prompt_of(21, 1), 2)
    rig.model.forget(0)
    assert not rig.runner.requests
    assert not rig.runner.frames


def test_the_time_of_a_draft_is_that_of_short_passes(rig: Rig) -> None:
    known, one = prompt_of(30, 4), rig.add(0, 29)
    rig.runner.on_segment = lambda *_: setattr(rig, "now_ns", rig.now_ns + 1000)
    try:
        known += one.propose(tuple(known), 4)
        assert rig.model.draft_ns == 0
        one.propose(tuple(known), 4)
        first = rig.model.draft_ns
        assert first > 0
        assert rig.model.stats()["draft_ms"] == first / MS
        assert rig.model.extra_ns(3) == 3 * first
    finally:
        rig.runner.on_segment = None


def test_lengths_at_which_kv_is_computed_again_are_not_crossed(rig: Rig) -> None:
    """The rope of the model changes above 24 tokens, as its runner says."""
    shape = rig.runner.shape._replace(recompute_above=24)
    shaped: Any = _Shaped(rig.runner, shape)
    rig.model._runner, rows = shaped, shaped.rows
    known, one = prompt_of(22, 4), rig.add(0, 21)
    found = one.propose(tuple(known), 8)
    assert len(found) == 3, "two at the old rope, and the one after them"
    assert one.num_computed <= 24
    known += [*found, 5]
    assert len(one.propose(tuple(known), 4)) == 4
    assert [row for row in rows if row[0] == 0] == [(0, 21), (0, 25)]


def test_a_prompt_one_token_above_that_length_is_computed_once(rig: Rig) -> None:
    shape = rig.runner.shape._replace(recompute_above=24)
    shaped: Any = _Shaped(rig.runner, shape)
    rig.model._runner, rows = shaped, shaped.rows
    assert len(rig.add(0, 24).propose(prompt_of(25, 4), 2)) == 2
    assert [row for row in rows if row[0] == 0] == [(0, 25)]


class _Shaped:
    """A runner with another shape, that notes its rows."""

    def __init__(self, runner: TorchRunner, shape: Any) -> None:
        self._inner, self.shape, self.rows = runner, shape, list[tuple[int, int]]()

    def accept(self, program: Any, tables: Any) -> None:
        self.rows += [(row.lo, row.hi) for row in program.rows]
        self._inner.accept(program, tables)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_settings_that_need_the_model_are_left_out(rig: Rig) -> None:
    given = SamplingParams(
        temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=5, presence_penalty=1, min_tokens=3,
        logprobs=2, repetition_penalty=1.1, logit_bias={3: 1.0}, allowed_token_ids=(3, 4),
    )  # fmt: skip
    assert rig.add(0, 1, given).sampling == SamplingParams(
        temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=5, repetition_penalty=1.1,
        logit_bias={3: 1.0},
    )  # fmt: skip
