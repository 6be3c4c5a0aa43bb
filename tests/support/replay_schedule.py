"""Run a recorded schedule again on a fresh runner: the same programs, stopped at the same places.

In order mode the bits of a request depend on who shared its programs. So what a mixed run must
give is not its solo run but this: every recorded program, compiled again from its rows and run
without an engine, a scheduler or a policy.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from qllm.plan import Plan
from qllm.record import trace
from qllm.runner.runner import TorchRunner
from qllm.scheduler.compile import compile_program
from qllm.scheduler.program import START, Index, OpKind, Program
from qllm.types import FrameId, Grain, RequestId, Sampled


class Always:
    """Stops at every boundary."""

    word = -(2**31)
    stop_at_ns: int | None = None

    def now_ns(self) -> int:
        return 0


def boundary_before(program: Program, index: Sequence[int]) -> Index:
    """Where an op begins again that was left inside, after some of its tasks."""
    op, pos = index
    in_units = op < len(program.ops) and program.ops[op].kind in (OpKind.EXPERTS, OpKind.HEAD)
    return Index(op, pos if in_units else 0)


class Replayed(NamedTuple):
    """What a replay gave."""

    sampled: dict[RequestId, list[Sampled]]
    num_programs: int
    num_stops: int
    num_kills: int
    num_splits: int
    num_evictions: int


class Replayer:
    """Feeds events to a runner that has seen nothing else."""

    def __init__(self, runner: TorchRunner, *, batch_invariant: bool = False) -> None:
        self.runner = runner
        self.batch_invariant = batch_invariant
        self.frames: dict[FrameId, tuple[Program, Index]] = {}
        self.dead: defaultdict[FrameId, set[RequestId]] = defaultdict(set)
        self.num_prompt: dict[RequestId, int] = {}
        self.sampled: dict[RequestId, list[Sampled]] = {}
        self.counts: dict[str, int] = {}

    def feed(self, event: trace.Event) -> None:
        name = type(event).__name__
        handler = getattr(self, f"_{name.lower()}", None)
        if handler is not None:
            self.counts[name] = self.counts.get(name, 0) + 1
            handler(event)

    def _arrived(self, event: trace.Arrived) -> None:
        assert event.token_ids is not None
        assert event.sampling is not None
        n = len(event.token_ids)
        sampling = trace.sampling_from_dict(event.sampling)
        self.runner.add(event.request_id, event.token_ids, sampling, n, n + event.max_tokens)
        self.num_prompt[event.request_id] = n
        self.sampled[event.request_id] = []

    def _drafted(self, event: trace.Drafted) -> None:
        self.runner.draft(event.request_id, event.token_ids)

    def _planned(self, event: trace.Planned) -> None:
        ids = {row.request_id: self.runner.token_ids(row.request_id) for row in event.rows}
        program = compile_program(
            Plan(rows=event.rows, grain=Grain.EXPERT, stop_below=0),
            frame_id=event.frame_id,
            samples=event.samples
            or [max(0, row.hi - len(ids[row.request_id]) + 1) for row in event.rows],
            exits=event.exits,
            shape=self.runner.shape,
            cuts=self.runner.cuts,
            one_query_from=[
                self.num_prompt[row.request_id] if self.batch_invariant else row.hi
                for row in event.rows
            ],
        )
        self.runner.accept(program)
        self.frames[event.frame_id] = (program, START)

    def _ran(self, event: trace.Ran) -> None:
        program, index = self.frames[event.frame_id]
        assert index == tuple(event.start), f"frame {event.frame_id}: {index} is not {event.start}"
        if event.why == "error":
            return
        index, end = boundary_before(program, index), boundary_before(program, event.end)
        while index != end:
            assert index < end, f"{index} went past {end}"
            index = self.runner.run(program, index, Always())
        index = Index(*event.end)
        self.frames[event.frame_id] = (program, index)
        if event.why == "done":
            assert index == program.end
            for token in self.runner.finish(program):
                self.sampled[token.request_id].append(token)
            del self.frames[event.frame_id]
        else:
            self.counts["stops"] = self.counts.get("stops", 0) + 1

    def _split(self, event: trace.Split) -> None:
        program, index = self.frames.pop(event.frame_id)
        back = program.layer_start(index)
        if event.index != index:  # whoever took part in the begun layer is dead
            layer, dead = program.layer_at(index), self.dead[event.frame_id]
            inside = {r.request_id for r in program.rows if r.start_layer <= layer < r.end_layer}
            assert event.index == back, f"{event} is neither at {index} nor at {back}"
            assert inside <= dead, f"{event} takes {inside - dead} back into a begun layer"
        self.runner.split(program, Index(*event.index))

    def _killed(self, event: trace.Killed) -> None:
        self.runner.kill(self.frames[event.frame_id][0], event.request_id)
        self.dead[event.frame_id].add(event.request_id)

    def _left(self, event: trace.Left) -> None:
        program, index = self.frames[event.frame_id]
        assert event.index == program.layer_start(index), f"{event} is not at {index}"
        self.runner.leave(program, event.request_id, Index(*event.index))
        self.dead[event.frame_id].add(event.request_id)

    def _dropped(self, event: trace.Dropped) -> None:
        self.runner.drop(self.frames.pop(event.frame_id)[0])

    def _evicted(self, event: trace.Evicted) -> None:
        self.runner.evict(event.request_id)

    def _swappedout(self, event: trace.SwappedOut) -> None:
        self.runner.swap_out(event.request_id)

    def _swappedin(self, event: trace.SwappedIn) -> None:
        self.runner.swap_in(event.request_id)

    def _finished(self, event: trace.Finished) -> None:
        self.runner.remove(event.request_id)


def replay(events: Any, runner: TorchRunner, *, batch_invariant: bool = False) -> Replayed:
    """Replay events in order; returns every token, with its log-probabilities, by request."""
    replayer = Replayer(runner, batch_invariant=batch_invariant)
    for event in events:
        replayer.feed(event)
    assert not replayer.frames, "frames are left over"
    count = replayer.counts.get
    return Replayed(
        replayer.sampled,
        count("Planned", 0),
        count("stops", 0),
        count("Killed", 0),
        count("Split", 0),
        count("Evicted", 0),
    )
