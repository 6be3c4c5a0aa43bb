"""Execution of programs on a Hugging Face model, op by op, in torch.

A program is a list of ops. A frame contains the program's tensors. `run` executes ops in order and
polls after each op, and inside EXPERTS after each range of work units. To stop, `run` returns the
index of the first op that is not done. The frame already contains all that is needed to continue.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qllm.errors import DeviceError, InvariantError, ModelError
from qllm.models.discover import ModelParts, discover
from qllm.models.identity import identity
from qllm.models.unsafe import refuse_unsafe
from qllm.plan import CutRule
from qllm.runner.backend import Backend, OnHidden, OnLogits, OnSegment
from qllm.runner.choosing import choose_some
from qllm.runner.compute import RunOp
from qllm.runner.frame import Frame, LayerState, RequestState, num_top_of
from qllm.runner.heads import HeadState, last_tokens
from qllm.runner.inference import inference
from qllm.runner.layers import attention
from qllm.runner.layers.around import embed
from qllm.runner.layers.attention import Step
from qllm.runner.layers.linears import HeadBlocks
from qllm.runner.layers.native import attend_some
from qllm.runner.layers.trial import charged
from qllm.runner.layers.work import Work
from qllm.runner.polling import let_poll
from qllm.runner.protocol import Longest, Segments, Stop
from qllm.runner.residency import Missing, Residency
from qllm.runner.rope import Ropes
from qllm.runner.sampling.sampler import Sampler
from qllm.runner.sweep import Swept
from qllm.scheduler.program import Index, Op, OpKind, Program
from qllm.types import CAPABILITIES, Grain, RequestId, Sampled, SamplingParams


class TorchRunner:
    """The `Runner` of `runner/protocol.py` over a causal language model of transformers.

    `cpu_runner` and `cuda_runner` make it. Large because requests and frames change together.

    Args:
        model: Whole model in evaluation mode, on one device.
        make_backend: Factory of the backend, from the parts of the model.
        rounding: `expert_weights` and `activations` of `EngineConfig`, which are part of the
            identity.
        reads_files: True if the backend reads experts that are in a file.
        on_ranks: True if the backend has ranks, which read their own experts.
        clock: Clock in nanoseconds that measures segments.

    Raises:
        ModelError: The model cannot be driven safely.
    """

    capabilities = CAPABILITIES

    def __init__(
        self,
        model: nn.Module,
        make_backend: Callable[[ModelParts], Backend],
        *,
        rounding: tuple[str, str] = ("auto", "bf16"),
        reads_files: bool = False,
        on_ranks: bool = False,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        refuse_unsafe(model, reads_files=reads_files, on_ranks=on_ranks)
        self.model = model
        self.parts = parts = discover(model)
        self.segments: Segments = Longest()
        self.on_segment: OnSegment | None = None
        self.on_logits: OnLogits | None = None
        self.on_hidden: OnHidden | None = None
        """Receiver of the last hidden states of all committed tokens; None if there is none."""
        self._clock, self._bytes_read, self.sampler = clock, 0, Sampler()
        self.requests: dict[RequestId, RequestState] = {}
        self.frames: dict[int, Frame] = {}
        self._device, self._identity = parts.like.device, identity(model, *rounding)
        with inference():
            self.rope = Ropes(model, parts, self._device, parts.like.dtype)
            self.shape = parts.shape._replace(recompute_above=self.rope.recompute_above)
        self.backend = make_backend(parts)
        attention.install(parts.attentions)
        try:
            self.backend.enter()  # must be last, because it packs the experts' weights in place
        except BaseException:
            self.close()  # restore the model for the caller
            raise
        self._follow_backend()
        self.shape, self.charge = charged(self.shape, model, parts, self._drivers)

    def _follow_backend(self) -> None:
        """Use the implementations that the backend computes with now."""
        compute, self._drivers = self.backend.compute, self.backend.drivers
        self.drivers = tuple(driver.kind for driver in self._drivers)
        self._ops: dict[OpKind, RunOp] = {
            OpKind.EMBED: self._embed,
            OpKind.ATTN: self._attn,
            OpKind.ROUTE: self._route,
            OpKind.EXPERTS: self._experts,
            OpKind.COMBINE: self._combine,
        }
        compute.follow_rule(self._ops)

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Compute with transformers' modules inside the `with` block. No frame may be open."""
        try:
            with self.backend.as_reference():
                self._follow_backend()
                yield
        finally:
            self._follow_backend()

    @property
    def residency(self) -> Residency | None:
        """Slots for experts that come and go; None if there are none."""
        return self.backend.residency

    @property
    def cuts(self) -> CutRule:
        """Rule that cuts the ops of a program by rows."""
        return self.backend.cuts

    @property
    def names(self) -> dict[str, str]:
        """Name of the implementation of each kind of work, for benchmark results."""
        return self.backend.names

    @property
    def expert_bytes(self) -> int:
        """Bytes of weights read, each expert once per layer of a program. May wait for the GPU."""
        return self._bytes_read + self.backend.bytes_read

    def close(self) -> None:
        """Restore the model's modules."""
        self.backend.close()
        attention.uninstall(self.parts.attentions)

    # requests

    def add(
        self,
        request_id: RequestId,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        num_prompt_tokens: int,
        max_total_tokens: int,
    ) -> None:
        if request_id in self.requests:
            raise InvariantError(f"request {request_id} is in the runner already")
        ids, kv = list(token_ids), self.backend.new_kv(max_total_tokens)
        num_top = num_top_of(sampling, self.shape.vocab_size)
        self.sampler.add(request_id, sampling, ids[:num_prompt_tokens])
        self.requests[request_id] = RequestState(ids, num_prompt_tokens, kv, num_top)

    def keepable(self, request_id: RequestId, num_tokens: int, num_prompt_tokens: int) -> int:
        request = self.requests[request_id]
        return request.keepable(num_tokens, num_prompt_tokens, self.rope.switch)

    def revise(
        self,
        request_id: RequestId,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        num_kept: int,
        table: Sequence[int] = (),
    ) -> None:
        self.sampler.remove(request_id)
        self.sampler.add(request_id, sampling, token_ids)
        num_top = num_top_of(sampling, self.shape.vocab_size)
        self.requests[request_id].revise(token_ids, num_top, num_kept, table)

    def draft(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        self.requests[request_id].drafts = tuple(token_ids)

    def guess(self, request_id: RequestId) -> int | None:
        return self.requests[request_id].guess

    def remove(self, request_id: RequestId) -> None:
        if self.requests.pop(request_id, None) is not None:
            self.sampler.remove(request_id)

    def evict(self, request_id: RequestId) -> None:
        self.requests[request_id].evict()

    def swap_out(self, request_id: RequestId) -> None:
        if self.requests[request_id].kv.swap_out():
            for frame in self.frames.values():
                if request_id in frame.program.request_ids:
                    frame.forget_steps()
                    self.backend.forget(frame)

    def swap_in(self, request_id: RequestId, table: Sequence[int] = ()) -> None:
        self.requests[request_id].kv.swap_in(table)

    def copy_ahead(self, request_ids: Sequence[RequestId]) -> None:
        self.backend.copy_ahead([self.requests[request_id].kv for request_id in request_ids])

    def token_ids(self, request_id: RequestId) -> list[int]:
        """Return the prompt and output tokens of a request."""
        return list(self.requests[request_id].ids)

    def forced(self, request_id: RequestId, outputs: Sequence[int], most: int) -> Sequence[int]:
        return self.sampler.forced(request_id, outputs, most)

    def num_committed(self, request_id: RequestId) -> int:
        """Return the number of tokens of a request whose KV exists in every layer."""
        return self.requests[request_id].kv.committed

    # frames

    def accept(self, program: Program, tables: Sequence[Sequence[int]] = ()) -> None:
        """See `Runner`. On a CPU, where blocks have no addresses, `tables` may be omitted."""
        if program.frame_id in self.frames:
            raise InvariantError(f"frame {program.frame_id} exists already")
        for row in program.rows:
            self.requests[row.request_id].check(row)
        for row, blocks in zip(program.rows, tables or [()] * len(program.rows), strict=True):
            request = self.requests[row.request_id]
            request.kv.hold(blocks, row.hi)
            request.kv.states.begin(len(request.ids), row.hi)
        frame = Frame(program)
        with inference():
            frame.rope = self.rope.rows(program.rows, self.requests)
            frame.load_rows(self.requests, self.parts)
        self.frames[program.frame_id] = frame

    def run(self, program: Program, start: Index, stop: Stop) -> Index:
        frame = self.frames[program.frame_id]
        frame.grain = program.grain  # the grain may have changed since the frame was made
        frame.missing = None
        with inference():
            return self._run(frame, program, start, stop)

    def _run(self, frame: Frame, program: Program, start: Index, stop: Stop) -> Index:
        clock, segments, backend = self._clock, self.segments, self.backend
        ops = program.ops
        (op, pos), begin = start, clock()
        while op < len(ops):
            o, here = ops[op], Index(op, pos)
            kind, swept = o.kind, backend.run_some(self, frame, program, here, stop)
            if swept is None and kind is OpKind.HEAD:
                swept = self._logits(frame, program, here, stop)
            if swept is not None:
                (op, pos), kind = swept.at, swept.longest_op
                self._bytes_read += swept.expert_bytes
                if swept.missing is not None and swept.missing.residency.all.parks:
                    frame.missing = swept.missing
            else:
                frame.layer.space = None
                pos = self._ops[kind](frame, o, pos)
                op += pos == 0 and frame.missing is None
            backend.pace()
            end = clock()
            ns = end - begin if swept is None else swept.segment_ns(end - begin)
            if ns > segments.longest_ns:
                segments.longest_ns, segments.longest_op = ns, kind
            if self.on_segment is not None:
                self.on_segment(program, here, begin, end)
            begin = end
            if op < len(ops) and _stops(frame, program, Index(op, pos), stop):
                break
        return Index(op, pos)

    def missing(self, program: Program) -> Missing | None:
        """Return the experts without which the last run of a program could not go on.

        It is None if the run could go on.
        """
        return self.frames[program.frame_id].missing

    def finish(self, program: Program) -> list[Sampled]:
        frame = self.frames[program.frame_id]
        if frame.unread is not None:
            frame.sampled += frame.unread.read(self.sampler, frame.dead)
        self._forget(program)
        owed = self.shape.experts_per_token * program.tokens_of(OpKind.EXPERTS)
        if frame.slots_done != owed:
            raise InvariantError(f"{frame.slots_done} expert slots ran instead of {owed} (I1)")
        with inference():
            frame.save_rows(self.requests, program.end)
            if self.on_hidden is not None:
                for states in frame.last_states():
                    self.on_hidden(*states)  # if it fails, nothing is committed yet
            frame.commit(self.requests)
        sampled = [s for s in frame.sampled if s.request_id not in frame.dead]
        for token in sampled:
            self.requests[token.request_id].take(token.token_id)
        return sampled

    def split(self, program: Program, index: Index) -> None:
        if program.inside_layer(index):
            raise InvariantError(f"frame {program.frame_id} is inside a layer at {index}")
        frame = self._forget(program)
        assert frame is not None
        with inference():
            frame.save_rows(self.requests, index)

    def kill(self, program: Program, request_id: RequestId) -> None:
        frame = self.frames[program.frame_id]
        frame.dead.add(request_id)
        frame.forget_steps()
        self.backend.forget(frame)

    def leave(self, program: Program, request_id: RequestId, at: Index) -> None:
        with inference():
            self.frames[program.frame_id].leave(self.requests[request_id], request_id, at)
        self.kill(program, request_id)

    def drop(self, program: Program) -> None:
        frame = self._forget(program)
        dead = set() if frame is None else frame.dead
        for request_id in (self.requests.keys() & {*program.request_ids}) - dead:
            self.requests[request_id].forget_begun()

    def fault(self, error: Exception) -> DeviceError | None:
        return self.backend.fault(error)

    def _forget(self, program: Program) -> Frame | None:
        frame = self.frames.pop(program.frame_id, None)
        if frame is not None:
            self.backend.forget(frame)
        return frame

    # ops

    def _embed(self, frame: Frame, op: Op, pos: int) -> int:
        parts = self.parts
        frame.flush()
        if parts.around is not None:
            x = embed(parts.around, *self._calling(frame, op))
        else:
            x = self.backend.compute.embed(frame.ids(self.requests, op.group))
        frame.x_TD, frame.group = x, op.group
        return 0

    def new_step(self, frame: Frame, group: int, lo: int, hi: int) -> Step:
        """Return the inputs of the ATTN op over tokens [lo, hi) of a group."""
        return self.backend.new_step(frame.spans(self.requests, group, lo, hi), hi - lo)

    def _calling(self, frame: Frame, op: Op) -> tuple[Any, ...]:
        """Return a driver's extra arguments, if the layer runs by the model's own code; else ()."""
        where = op[2:] if self.parts.around is not None else None
        return (frame.rope_of(*where), frame.step_of(*where, self.new_step)) if where else ()

    def _attn(self, frame: Frame, op: Op, pos: int) -> int:
        _, layer, group, lo, hi = op
        x, state, step = frame.activate(group), frame.layer, frame.step_of(*op[2:], self.new_step)
        rope = frame.rope_of(group, lo, hi, self.parts.layers[layer].rope_kind)
        whole, costs = hi - lo == x.shape[0], self.backend.costs
        driver, x_TD = self._drivers[layer], x if whole else x[lo:hi]
        mid, state.begun, pos = attend_some(driver, x_TD, rope, step, pos, state.begun, costs)
        if mid is None:
            return pos
        if whole or lo == 0:
            state.mid_TD = mid if whole else mid.new_empty((x.shape[0], mid.shape[1]))
        assert state.mid_TD is not None
        if not whole:
            state.mid_TD[lo:hi] = mid
        return 0

    def _route(self, frame: Frame, op: Op, pos: int) -> int:
        state, x, mid = frame.layer, frame.x_TD, frame.layer.mid_TD
        assert x is not None
        assert mid is not None
        lo, hi = op.lo, op.hi
        if hi - lo != x.shape[0]:
            x, mid = x[lo:hi], mid[lo:hi]
        state.routed[lo] = self._drivers[op.layer].route(x, mid, *self._calling(frame, op))
        return 0

    def _experts(self, frame: Frame, op: Op, pos: int) -> int:
        """Run one range of work units; return the next position, 0 when the op is done."""
        state = frame.layer
        work = state.work or self._start_experts(state, op, frame.grain)
        x = state.experts_x_TD
        assert x is not None
        missing = work.missing(pos)
        if missing is not None and missing.residency.all.parks:
            frame.missing = missing
            return pos
        with work.in_memory(pos, missing):
            stop = work.end_of_range(pos, self.backend.costs)
            frame.slots_done += work.run(x, pos, stop)
        self._bytes_read += work.bytes_read(pos, stop)
        if stop < len(work.units):
            return stop
        state.experts_x_TD = None
        return 0

    def _start_experts(self, state: LayerState, op: Op, grain: Grain) -> Work:
        ids = state.gather()
        if ids.shape[1] != self.shape.experts_per_token:
            raise ModelError(
                f"the router of layer {op.layer} takes {ids.shape[1]} experts per token, its "
                f"config says {self.shape.experts_per_token}; correct num_experts_per_tok"
            )
        state.work = self.backend.new_work(op.layer, ids, grain)
        return state.work

    def _combine(self, frame: Frame, op: Op, pos: int) -> int:
        _, layer, _, lo, hi = op
        state, x, mid = frame.layer, frame.x_TD, frame.layer.mid_TD
        assert x is not None
        assert mid is not None
        whole = hi - lo == x.shape[0]
        part, mid_part = (x, mid) if whole else (x[lo:hi], mid[lo:hi])
        driver, calling = self._drivers[layer], self._calling(frame, op)
        if self.shape.is_moe[layer]:
            assert state.work is not None
            assert state.weights_TK is not None
            if lo == 0 and 0 in state.work.done:
                raise InvariantError(f"layer {layer} combines before all its experts ran (I1)")
            routed = state.routed[lo]
            experts = state.work.combine(lo, hi, state.weights_TK, routed.x_TD.dtype)
            out = driver.combine(part, mid_part, routed, experts, *calling)
        else:
            out = driver.dense(part, mid_part, *calling)
        if not whole:
            if lo == 0:
                state.next_TD = torch.empty_like(x)
            assert state.next_TD is not None
            state.next_TD[lo:hi] = out
            if hi < x.shape[0]:
                return 0
            out = state.next_TD
        frame.x_TD = out
        frame.layer = LayerState()
        return 0

    def _logits(self, frame: Frame, program: Program, at: Index, stop: Stop) -> Swept:
        """Compute requested prompt scores, then blocks of the vocabulary, then sample tokens."""
        (op, pos), group = at, program.ops[at.op].group
        parts, members = self.parts, program.groups[group]
        costs, vocabulary = self.backend.costs, self.backend.compute.head
        if frame.head is None or (pos == 0 and frame.course is None):
            x = frame.activate(group)
            rows = costs.rows_at_once(vocabulary.num_blocks, self.shape.vocab_size)
            scores = frame.scores_of(self.requests, members, (vocabulary.num_blocks, rows))
            counts = [program.samples[r] for r in members]
            x = last_tokens(x, [program.rows[r].num_tokens for r in members], counts)
            streams = self.on_logits is None and self.backend.compute.streams
            ids = []
            if streams:
                places = zip(members, counts, strict=True)
                ids = [program.rows[r].request_id for r, num in places for _ in range(num)]
            plain = self.sampler.plain(ids, frame.dead)
            confident = self.sampler.confident(ids, plain)
            frame.head = HeadState(vocabulary.norm(x), plain, scores, confident)
        head, num = frame.head, vocabulary.num_blocks
        if pos < head.scores.num_units:
            dead = {i for i, r in enumerate(members) if frame.is_dead(r)}
            pos = head.scores.run(vocabulary, parts, costs, pos, dead)
            return Swept(Index(op, pos), 0, 0, OpKind.HEAD, 0)
        first = pos - head.scores.num_units
        if first >= num:  # only the choice of tokens is left, one row at a time
            is_done = self._choose(frame, members, first - num)
            next_at = Index(op + 1, 0) if is_done else Index(op, pos + 1)
            return Swept(next_at, 0, 0, OpKind.HEAD, 0)
        courses, single = self.backend.compute.courses, self.on_segment is not None
        inside = frame.course or courses.take()
        blocks = HeadBlocks(at=first, end=num, course=inside.address, single=single)
        let_poll(blocks, stop, program.stop_below, frame.grain)
        head.run(vocabulary, blocks, parts.logit_rule, costs.head_blocks(len(head.x_BD), num))
        frame.course = courses.keep(inside)
        next_at = Index(op, head.scores.num_units + blocks.at)
        if blocks.at == num:
            is_done = self._choose(frame, members, 0)
            next_at = Index(op + 1, 0) if is_done else Index(op, next_at.pos + 1)
        return Swept(next_at, blocks.call_ns, blocks.longest_ns, OpKind.HEAD, 0)

    def _choose(self, frame: Frame, members: Sequence[int], num_before: int) -> bool:
        """See `choose_some`."""
        rule = self.parts.logit_rule
        return choose_some(self, self.backend, rule, frame, members, num_before)

    def export_frame(self, program: Program, index: Index) -> dict[str, Tensor]:
        """Return the tensors of a parked frame."""
        return self.frames[program.frame_id].export()

    def import_frame(self, program: Program, index: Index, tensors: dict[str, Tensor]) -> None:
        """Make a frame from the tensors of `export_frame`. Its requests must be present already."""
        frame = Frame(program)
        with inference():
            frame.rope = self.rope.rows(program.rows, self.requests)
            here = {name: t.to(self._device, copy=True) for name, t in tensors.items()}
            frame.restore(here)
            if "work.ids" in here:
                layer = program.ops[index.op].layer
                work = self.backend.new_work(layer, here["work.ids"], program.grain)
                frame.layer.work = work
                work.restore(here["work.slots"], here["work.done"], here.get("work.units"))
            frame.dead = set(program.request_ids) - self.requests.keys()
            if index == program.end and frame.head is not None:
                members = program.groups[program.ops[-1].group]
                self._choose(frame, members, sum(program.samples))
        self.frames[program.frame_id] = frame

    def export_request(self, request_id: RequestId) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the KV (committed or not) and hidden states of a request, with a description."""
        return self.requests[request_id].export()

    def import_request(
        self,
        request_id: RequestId,
        sampling: SamplingParams,
        tensors: dict[str, Tensor],
        meta: dict[str, Any],
        blocks: Sequence[int] = (),
    ) -> None:
        """Add a request from an `export_request`, in blocks with room for all its KV."""
        prompt = meta["num_prompt_tokens"]
        self.add(request_id, meta["token_ids"], sampling, prompt, meta["max_total_tokens"])
        with inference():
            here = {name: t.to(self._device) for name, t in tensors.items()}
            self.requests[request_id].restore(here, meta, blocks)

    def fingerprint(self) -> str:
        """Return the model's identity: settings, a sample of its weights' bytes, their format."""
        return self._identity


def _stops(frame: Frame, program: Program, at: Index, stop: Stop) -> bool:
    """Return True if a run ends at a boundary before the end of its program."""
    if frame.missing is not None:
        return True
    if program.grain is Grain.STEP:
        return False
    if program.grain is Grain.LAYER and program.inside_layer(at):
        return False
    is_late = stop.stop_at_ns is not None and stop.now_ns() >= stop.stop_at_ns
    return is_late or stop.word < program.stop_below
