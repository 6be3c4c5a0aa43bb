"""Guests: parked frames whose expert rows are computed beside the program that runs.

A frame that is parked before or between the experts of a layer still owes units, one (expert, rows)
each. A program that runs the same layer reads some of these experts anyway; the frame's own units
of those experts follow at once, up to a budget of rows, while the weights are in the cache. Bits
do not change: the units are the ones the frame would have run, over the same rows. Nothing of this
is a decision about who runs; here is only who comes first. The runner's half is `models/guests.py`.
"""

from collections.abc import Mapping
from dataclasses import replace

from qllm.decision import Decision, Parked
from qllm.ranking import Ranking
from qllm.types import FrameId


def with_guests(
    decision: Decision,
    guest_rows: int,
    frames: Mapping[FrameId, Parked],
    ranking: Ranking | None,
) -> Decision:
    """The decision with the parked frames as guests of its program.

    Args:
        decision: What runs, or that nothing does.
        guest_rows: Of the plan.
        frames: All that are parked now, oldest first.
        ranking: The order of the requests; None if the policy plans by itself.
    """
    if decision.program is None:
        return decision
    guests = resume_order(frames, ranking)
    program = replace(decision.program, guest_rows=guest_rows, guests=guests)
    return replace(decision, program=program)


def resume_order(frames: Mapping[FrameId, Parked], ranking: Ranking | None) -> tuple[FrameId, ...]:
    """Parked frames as `shape_plan` resumes them: by the tier of their best row, then by age."""
    live = {i: rows for i, parked in frames.items() if (rows := parked.live_rows())}
    if ranking is None:
        return tuple(live)
    tiers = {x.request_id: x.tier for x in ranking.admitted}
    return tuple(sorted(live, key=lambda i: min(tiers[row.request_id] for row in live[i])))
