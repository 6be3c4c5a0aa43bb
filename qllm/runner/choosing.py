"""The end of HEAD: the choice of tokens, of all greedy rows at once, else of a few rows."""

from collections.abc import Sequence

from torch import Tensor

from qllm.models.logits import LogitRule
from qllm.plan import Row
from qllm.runner.backend import Asking, Backend
from qllm.runner.frame import Frame
from qllm.types import Sampled

TOKENS_AT_ONCE = 1 << 20
"""Logits of sampled rows that are read between two polls, which takes about a millisecond."""


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
        num_before: Number of calls before the frame's checkpoint. The rows of these calls are
            chosen again.

    Returns:
        True if all rows have a token. Between two calls a runner may stop.
    """
    head = frame.head
    assert head is not None
    rows = [frame.program.rows[r] for r in members]
    begins = head.chosen is None
    chosen = head.chosen = {} if head.chosen is None else head.chosen
    if begins:
        for i, token_id, peak in head.answers():
            if not frame.is_dead(members[i]):
                request_id, _, position = rows[i][:3]
                chosen[i] = runner.sampler.greedy(request_id, token_id, peak, position)
    live = [
        (place, i)
        for place, i in enumerate(head.rest)
        if i not in chosen and not frame.is_dead(members[i])
    ]
    if live and begins and not head.scores.num_units and backend.samples:
        logits = _ruled(rule, head.logits([place for place, _ in live]))
        frame.unread = backend.sample(runner, logits, [rows[i] for _, i in live])
    now = list[tuple[int, int]]()
    if live and frame.unread is None:
        num = max(1, TOKENS_AT_ONCE // head.vocab_size) * (num_before + 1 if begins else 1)
        now = live[:num]
        logits = _ruled(rule, head.logits([place for place, _ in now]))
        chosen |= _choose(runner, logits, {i: rows[i] for _, i in now})
    if len(now) < len(live) and frame.unread is None:
        return False
    frame.sampled = [head.scores.add_to(i, chosen[i]) for i in sorted(chosen)]
    return True


def _ruled(rule: LogitRule | None, logits_RV: Tensor) -> Tensor:
    return logits_RV if rule is None else rule(logits_RV)


def _choose(runner: Asking, logits_RV: Tensor, rows: dict[int, Row]) -> dict[int, Sampled]:
    ids = [row.request_id for row in rows.values()]
    positions = [row.hi for row in rows.values()]
    if runner.on_logits is not None:
        for request_id, position, logits_V in zip(ids, positions, logits_RV, strict=True):
            runner.on_logits(request_id, position, logits_V)
    outputs = [runner.requests[i].output_ids for i in ids]
    found = runner.sampler.sample(logits_RV, ids, positions, outputs)
    return dict(zip(rows, found, strict=True))
