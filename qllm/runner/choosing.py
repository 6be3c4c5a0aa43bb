"""The end of HEAD: the choice of tokens, of all greedy rows at once, else of a few rows.

A row of the program that verifies d drafted tokens has 1 + d positions at which a token is sampled.
They are chosen in order, and each is chosen as if the tokens before it had come one by one. The
first token that differs from its draft is the last of the row. So are a token after all drafts, and
a position without an allowed token.

A draft row chooses a token in the same way as a row that samples, and the token is only a draft.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from qllm.models.logits import LogitRule
from qllm.plan import Row
from qllm.runner.backend import Asking, Backend
from qllm.runner.frame import Frame
from qllm.types import Sampled

TOKENS_AT_ONCE = 1 << 20
"""Logits of sampled rows that are read between two polls, which takes about a millisecond."""


class Verified(NamedTuple):
    """A row of HEAD, and the positions at which its tokens are sampled."""

    member: int
    """Index of the row among the rows of HEAD."""
    row: Row
    first: int
    """Index of the row's first position among all positions of HEAD."""
    drafts: Sequence[int]
    """Drafted tokens of the positions except the last."""
    is_draft: bool = False
    """True for a draft row, whose token is drafted and not sampled."""

    def open_place(self, chosen: Mapping[int, Sampled]) -> int | None:
        """Return the index of the next position to choose; None if all are chosen."""
        if not self.drafts:
            return None if self.first in chosen else self.first
        for place, draft in enumerate((*self.drafts, None), self.first):
            found = chosen.get(place)
            if found is None:
                return place
            if found.token_id != draft or found.error is not None:
                return None
        return None

    def places(self) -> range:
        """Return the indices of all positions."""
        return range(self.first, self.first + len(self.drafts) + 1)

    def position(self, place: int) -> int:
        """Return the index in the whole sequence of the token at `place`."""
        return self.row.hi - len(self.drafts) + place - self.first


def _verified(runner: Asking, frame: Frame, members: Sequence[int]) -> Iterator[Verified]:
    """Yield the rows of HEAD that are alive."""
    program, first = frame.program, 0
    for member, r in enumerate(members):
        row, num = program.rows[r], program.samples[r]
        if not frame.is_dead(r):
            drafts = runner.requests[row.request_id].drafts[: num - 1] if num > 1 else ()
            yield Verified(member, row, first, drafts, r in program.exits)
        first += num


def choose_some(
    runner: Asking,
    backend: Backend,
    rule: LogitRule | None,
    frame: Frame,
    members: Sequence[int],
    num_before: int,
) -> bool:
    """Choose the tokens of greedy rows and of a few other rows. A device chooses for all rows.

    Args:
        runner: Runner that has the requests.
        backend: Backend of the runner.
        rule: Change that the model makes to its logits; None changes nothing.
        frame: Frame whose head has all blocks. It gets the tokens at the end.
        members: Rows of HEAD.
        num_before: Number of calls before the frame's checkpoint. The positions of these calls are
            chosen again.

    Returns:
        True if all rows have their tokens. Between two calls a runner may stop.
    """
    head = frame.head
    assert head is not None
    found = list(_verified(runner, frame, members))
    rows = [row for row in found if not row.is_draft]
    begins = head.chosen is None
    chosen = head.chosen = {} if head.chosen is None else head.chosen
    best = {place: (token_id, peak) for place, token_id, peak in head.answers()}
    if begins:
        _guess(runner, rule, frame, [row for row in found if row.is_draft], best)
        confidence = head.confidence()
        for row in rows:
            while (place := row.open_place(chosen)) in best:
                request_id, at = row.row.request_id, row.position(place)
                token = runner.sampler.greedy(request_id, *best[place], at)
                chosen[place] = token._replace(confidence=confidence.get(place))
    waiting = _waiting(rows, chosen)
    is_plain = begins and not head.scores.num_units and not any(row.drafts for row in rows)
    if waiting and is_plain and backend.samples:
        logits = _ruled(rule, head.logits(head.places_of(waiting)))
        frame.unread = backend.sample(runner, logits, [row.row for row in waiting.values()])
    num = max(1, TOKENS_AT_ONCE // head.vocab_size) if waiting else 0
    num *= num_before + 1 if begins else 1
    while waiting and num > 0 and frame.unread is None:
        now = dict(list(waiting.items())[:num])
        logits = _ruled(rule, head.logits(head.places_of(now)))
        chosen |= _choose(runner, logits, now, chosen)
        num -= len(now)
        waiting = _waiting(rows, chosen)
    if waiting and frame.unread is None:
        return False
    for row in rows:
        if row.first not in best:  # rows of `best` have no grammar
            _look_ahead(runner, row, chosen)
    frame.sampled = [
        head.scores.add_to(row.member, chosen[place])
        for row in rows
        for place in row.places()
        if place in chosen
    ]
    return True


def _guess(
    runner: Asking,
    rule: LogitRule | None,
    frame: Frame,
    rows: Sequence[Verified],
    best: Mapping[int, tuple[int, float]],
) -> None:
    """Choose the tokens of draft rows. A row whose logits are broken drafts none."""
    requests = {row.first: runner.requests[row.row.request_id] for row in rows}
    rest = [row for row in rows if row.first not in best]
    for row in rows:
        token_id, peak = best.get(row.first, (0, math.nan))
        requests[row.first].guess = token_id if math.isfinite(peak) else None
    if not rest:
        return
    assert frame.head is not None
    logits = _ruled(rule, frame.head.logits(frame.head.places_of([row.first for row in rest])))
    outputs = [[*one.output_ids, *one.drafts] for one in (requests[row.first] for row in rest)]
    ids, positions = [row.row.request_id for row in rest], [row.row.hi for row in rest]
    found = runner.sampler.guess(logits, ids, positions, outputs)
    for row, guess in zip(rest, found, strict=True):
        requests[row.first].guess = guess


def _waiting(rows: Sequence[Verified], chosen: Mapping[int, Sampled]) -> dict[int, Verified]:
    """Return the next position of each row that has one, with its row."""
    places = [(row.open_place(chosen), row) for row in rows]
    return {place: row for place, row in places if place is not None}


def _ruled(rule: LogitRule | None, logits_RV: Tensor) -> Tensor:
    return logits_RV if rule is None else rule(logits_RV)


def _choose(
    runner: Asking, logits_RV: Tensor, now: Mapping[int, Verified], chosen: Mapping[int, Sampled]
) -> dict[int, Sampled]:
    ids = [row.row.request_id for row in now.values()]
    positions = [row.position(place) for place, row in now.items()]
    if runner.on_logits is not None:
        for request_id, position, logits_V in zip(ids, positions, logits_RV, strict=True):
            runner.on_logits(request_id, position, logits_V)
    outputs = [_outputs(runner, row, range(row.first, place), chosen) for place, row in now.items()]
    found = runner.sampler.sample(logits_RV, ids, positions, outputs)
    return dict(zip(now, found, strict=True))


def _outputs(
    runner: Asking, row: Verified, places: Iterable[int], chosen: Mapping[int, Sampled]
) -> list[int]:
    """Return the answer so far of a row's request, with the tokens chosen at some places."""
    known = runner.requests[row.row.request_id].output_ids
    return [*known, *(chosen[place].token_id for place in places)]


def _look_ahead(runner: Asking, row: Verified, chosen: Mapping[int, Sampled]) -> None:
    """Start to compute the tokens that the request's grammar allows after its last token."""
    request_id = row.row.request_id
    if not runner.sampler.is_limited(request_id):
        return
    places = [place for place in row.places() if place in chosen]
    if places and chosen[places[-1]].error is None:
        runner.sampler.look_ahead(request_id, _outputs(runner, row, places, chosen))
