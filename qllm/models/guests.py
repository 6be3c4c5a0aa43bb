"""Guests in a runner: expert units of parked frames, run behind the program's own of that expert.

    program      layer 7 EXPERTS | expert 2 |        | expert 5 | expert 9 |        | COMBINE ...
    parked there, owes 2 7 9                | unit 2 |                     | unit 9 |

A guest's units are run by its own `Work` on its own rows: the call that it would make itself, so
that its bits are its own, whatever multiplies. They are marked in its done-mask and counted in its
`slots_done` (I1). Between ranges of them the program may stop; what was not run stays owed.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from qllm.models.cuts import Costs
from qllm.models.experts import Work
from qllm.models.frame import Frame, LayerState
from qllm.plan import Op, OpKind, Program
from qllm.types import FrameId

Start = Callable[[LayerState, Op], Work]
"""Begins an EXPERTS op."""


class _Owed(NamedTuple):
    """Units [start, stop) of a guest, all of one expert and none of them done."""

    frame: Frame
    work: Work
    start: int
    stop: int


class Guests:
    """The guests of one run of a program.

    Args:
        most_rows: Of all guests together, per EXPERTS op of the program.
        parked: Per layer the guests, and the EXPERTS op that they are parked at; first come first.
        start: Begins an EXPERTS op.
    """

    def __init__(
        self,
        most_rows: int,
        parked: dict[int, list[tuple[Frame, Op]]],
        start: Start,
    ) -> None:
        self._most_rows = most_rows
        self._parked = parked
        self._start = start
        self._layer = -1
        self._waiting: dict[int, list[_Owed]] = {}
        """By expert: what is owed at that layer, where the program is."""
        self.due: deque[_Owed] = deque()
        """What is run next: its weights were just read."""

    def waiting(self, layer: int) -> Mapping[int, list[_Owed]]:
        """What guests owe at a layer, by expert."""
        if layer == self._layer:
            return self._waiting
        self._layer, self._waiting = layer, {}
        for frame, op in self._parked.get(layer, ()):
            frame.layer.space = None  # a sweep takes up anew what is done here
            work = frame.layer.work or self._start(frame.layer, op)
            for expert, start, stop in work.owed():
                self._waiting.setdefault(expert, []).append(_Owed(frame, work, start, stop))
        return self._waiting

    def invite(self, expert: int, state: LayerState) -> None:
        """The program has just run this expert: what is owed of it is due, as far as rows are left.

        Args:
            expert: Whose weights were read.
            state: The program's layer; counts the rows that it took along.
        """
        for owed in self._waiting.pop(expert, ()):
            rows = owed.work.rows(owed.start, owed.stop)
            if state.guest_rows + rows <= self._most_rows:
                state.guest_rows += rows
                self.due.append(owed)

    def run(self, costs: Costs) -> int:
        """Run a range of what is due; return its rows."""
        frame, work, start, end = self.due.popleft()
        x = frame.layer.experts_x_TD
        assert x is not None
        _, stop = work.next_range(start, costs, end=end)
        if stop < end:
            self.due.appendleft(_Owed(frame, work, stop, end))
        rows = work.run(x, start, stop)
        frame.slots_done += rows
        return rows


def guests_of(program: Program, frames: Mapping[FrameId, Frame], start: Start) -> Guests | None:
    """The guests of a run of `program`; None if there are none.

    A frame that is gone, or lost a row, is left alone.
    """
    if not program.guest_rows:
        return None
    parked: dict[int, list[tuple[Frame, Op]]] = {}
    for frame_id in program.guests:
        frame = frames.get(frame_id)
        op = None if frame is None or frame.dead else frame.next_op()
        if frame is not None and op is not None and op.kind is OpKind.EXPERTS:
            parked.setdefault(op.layer, []).append((frame, op))
    return Guests(program.guest_rows, parked, start) if parked else None
