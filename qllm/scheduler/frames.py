"""Parked frames come apart between two layers: their rows keep their hidden states."""

from typing import Protocol

from qllm.scheduler.decision import Parked, Split
from qllm.scheduler.request import Request
from qllm.types import FrameId, Frontier, RequestId


class Frames(Protocol):
    """What is asked of a scheduler; `qllm.scheduler.scheduler.Scheduler` has it."""

    requests: dict[RequestId, Request]
    frames: dict[FrameId, Parked]


def let_go(state: Frames) -> list[Split]:
    """Drop parked frames whose remaining rows have all left the sweep."""
    found = []
    for parked in [p for p in state.frames.values() if p.dead and not p.live_rows()]:
        # the work in this layer was of cancelled rows; live rows left the sweep at its start
        parked.index = parked.program.layer_start(parked.index)
        found.append(split(state, parked))
    return found


def split(state: Frames, parked: Parked) -> Split:
    """Let go of a frame that is between two layers."""
    del state.frames[parked.program.frame_id]
    for row in parked.held_rows():
        state.requests[row.request_id].leave_frame(Frontier(row.lo, row.hi, row.start_layer))
    return Split(parked.program, parked.index)
