"""Runs programs on a Hugging Face model: the torch half of the sweep.

A program is a list of ops; a frame is its tensors. `run` executes ops in order and polls after
each of them, and inside EXPERTS after each range of work units. Stopping is returning the index
of the first op not done: everything needed to go on is in the frame already.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from qllm.errors import InvariantError, ModelError
from qllm.kernels import cpu
from qllm.models.discover import base_model, discover, identity, refuse_unsafe
from qllm.plan import Row
from qllm.runner.compute import Compute, RunOp
from qllm.runner.cuts import cut_rule
from qllm.runner.frame import Frame, LayerState, RequestState
from qllm.runner.heads import HeadState, last_tokens
from qllm.runner.kv import RequestKV
from qllm.runner.layers import attention
from qllm.runner.layers.attention import Span, Step
from qllm.runner.layers.native import attend_some
from qllm.runner.layers.work import Work
from qllm.runner.protocol import Longest, Segments, Stop
from qllm.runner.rope import RopeTable, switch_of
from qllm.runner.sampler import Sampler
from qllm.runner.sweep import Sizes
from qllm.scheduler.program import Index, Op, OpKind, Program
from qllm.types import CAPABILITIES, Grain, RequestId, Sampled, SamplingParams

OnSegment = Callable[[Program, Index, int, int], None]
OnLogits = Callable[[RequestId, int, Tensor], None]


class TorchRunner:
    """The `Runner` of `runner/protocol.py` over a causal language model of transformers.

    Args:
        model: In evaluation mode, whole, on one device. Its attention modules get a config of
            their own (see `runner.layers.attention`); `model.forward` gives what it gave before.
        max_segment_ms: Bound on the work between two boundaries; infinity does not cut.
        batch_invariant: Level L2; its self-test runs here and finds the rule.
        kernels, expert_weights: See `EngineConfig`.
        max_packed_bytes: Most bytes that a copy of the linear modules (of the head) for our kernels
            may take. Weights changed later are not seen.
        clock: Nanoseconds, for segments only.

    Raises:
        ModelError: The model cannot be driven safely, or level L2 is not possible here.
        ConfigError: `expert_weights` is not possible here.
    """

    capabilities = CAPABILITIES

    def __init__(
        self,
        model: nn.Module,
        *,
        max_segment_ms: float = 5.0,
        batch_invariant: bool = False,
        kernels: str = "fast",
        expert_weights: str = "auto",
        max_packed_bytes: int = 2 << 30,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        refuse_unsafe(model)
        self.model = model
        self.parts = parts = discover(model)
        self.segments: Segments = Longest()
        self.expert_bytes = 0  # weights read so far: each expert once per layer of a program
        self.on_segment: OnSegment | None = None
        self.on_logits: OnLogits | None = None
        self._clock = clock
        self._sampler = Sampler()
        self._requests: dict[RequestId, RequestState] = {}
        self.frames: dict[int, Frame] = {}
        self._device, self._identity = parts.lm_head.weight.device, identity(model, expert_weights)
        with torch.inference_mode():
            switch, dtype = switch_of(model, parts.rotary_emb), parts.lm_head.weight.dtype
            self._rope = RopeTable(parts.rotary_emb, self._device, dtype, switch)
            self.shape = parts.shape._replace(recompute_above=self._rope.recompute_above)
            self.compute = Compute(
                model,
                parts,
                kernels,
                batch_invariant=batch_invariant,
                expert_weights=expert_weights,
                max_packed_bytes=max_packed_bytes,
            )
        """What computes what."""
        stops = self.compute.stops_between_keys
        self.cuts, self._costs = cut_rule(parts, base_model(model).config, max_segment_ms, stops)
        cpu.set_threads(torch.get_num_threads())
        attention.install([p.self_attn for p in parts.layers])
        self._use(self.compute)

    def _use(self, compute: Compute) -> None:
        """Let this compute from now on; nothing else computes."""
        self.compute = compute
        self._drivers, self._banks, self._head = compute.drivers, compute.banks, compute.head
        self.sweep = compute.sweep
        """Runs what it covers in one call; with `runner.sweep.NOTHING` every op runs by itself."""
        self.drivers = tuple(driver.kind for driver in self._drivers)
        """The driver of each layer."""
        self._ops: dict[OpKind, RunOp] = {
            OpKind.EMBED: self._embed,
            OpKind.ATTN: self._attn,
            OpKind.ROUTE: self._route,
            OpKind.EXPERTS: self._experts,
            OpKind.COMBINE: self._combine,
            OpKind.HEAD: self._logits,
        }
        compute.follow_rule(self._ops)
        compute.enter()  # last: nothing here holds weights of another compute

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Compute with transformers' own modules for a while, with no frame open."""
        ours = self.compute
        ours.leave()
        try:
            self._use(Compute(self.model, self.parts, "reference"))
            yield
        finally:
            self.compute.leave()
            self._use(ours)

    @property
    def names(self) -> dict[str, str]:
        """What computes what, for results."""
        return self.compute.names

    def close(self) -> None:
        """Give the model's modules back what they had."""
        self.compute.leave()
        attention.uninstall([p.self_attn for p in self.parts.layers])

    # requests

    def add(
        self,
        request_id: RequestId,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        num_prompt_tokens: int,
        max_total_tokens: int,
    ) -> None:
        if request_id in self._requests:
            raise InvariantError(f"request {request_id} is in the runner already")
        ids = list(token_ids)
        kv, num_top = self._new_kv(max_total_tokens), sampling.prompt_logprobs
        num_top = None if num_top is None else min(num_top, self.shape.vocab_size)
        held = RequestState(ids, num_prompt_tokens, kv, num_top)
        self._sampler.add(request_id, sampling, ids[:num_prompt_tokens])
        self._requests[request_id] = held

    def _new_kv(self, max_total_tokens: int) -> RequestKV:
        return RequestKV(self.shape.num_layers, max_total_tokens)

    def remove(self, request_id: RequestId) -> None:
        if self._requests.pop(request_id, None) is not None:
            self._sampler.remove(request_id)

    def evict(self, request_id: RequestId) -> None:
        self._requests[request_id].evict()

    def token_ids(self, request_id: RequestId) -> list[int]:
        """The ids of a request, prompt and output."""
        return list(self._requests[request_id].ids)

    def num_committed(self, request_id: RequestId) -> int:
        """Tokens of a request whose KV exists in every layer."""
        return self._requests[request_id].kv.committed

    # frames

    def accept(self, program: Program) -> None:
        if program.frame_id in self.frames:
            raise InvariantError(f"frame {program.frame_id} exists already")
        for row in program.rows:
            request = self._requests[row.request_id]
            if row.hi > len(request.ids) or row.hi > request.kv.capacity:
                raise InvariantError(f"{row} goes past the tokens of its request")
            if row.lo != request.kv.committed:
                raise InvariantError(f"{row} starts off {request.kv.committed} (I2)")
        with torch.inference_mode():
            self.frames[program.frame_id] = self._new_frame(program)

    def _new_frame(self, program: Program) -> Frame:
        frame = Frame(program)
        frame.rope = self._rope.rows(program, self._requests)
        frame.load_rows(self._requests, self.parts.lm_head.weight)
        return frame

    def run(self, program: Program, start: Index, stop: Stop) -> Index:
        frame = self.frames[program.frame_id]
        with torch.inference_mode():
            return self._run(frame, program, start, stop)

    def _run(self, frame: Frame, program: Program, start: Index, stop: Stop) -> Index:
        clock, segments = self._clock, self.segments
        ops, grain, below = program.ops, program.grain, program.stop_below
        sizes = Sizes(self._costs, self.cuts.expert_block, self.on_segment is not None)
        (op, pos), begin = start, clock()
        while op < len(ops):
            o = ops[op]
            kind, here, swept = o.kind, Index(op, pos), None
            if self.sweep.covers(o):
                swept = self.sweep.run(frame, program, here, stop, self._new_step, sizes)
            if swept is not None:
                (op, pos), kind = swept.at, swept.longest_op
                self.expert_bytes += swept.expert_bytes
            else:
                frame.layer.space = None
                pos = self._ops[kind](frame, o, pos)
                op += pos == 0
            end = clock()
            ns = end - begin if swept is None or swept.num_segments == 1 else swept.longest_ns
            if ns > segments.longest_ns:
                segments.longest_ns, segments.longest_op = ns, kind
            if self.on_segment is not None:
                self.on_segment(program, here, begin, end)
            begin = end
            if op == len(ops) or grain is Grain.STEP:
                continue
            if grain is Grain.LAYER and program.inside_layer(Index(op, pos)):
                continue
            late = stop.stop_at_ns is not None and stop.now_ns() >= stop.stop_at_ns
            if late or stop.word < below:
                break
        return Index(op, pos)

    def finish(self, program: Program) -> list[Sampled]:
        frame = self.frames.pop(program.frame_id)
        top_k = self.shape.experts_per_token
        owed = top_k * program.tokens_of(OpKind.EXPERTS)
        if frame.slots_done != owed:
            raise InvariantError(f"{frame.slots_done} expert slots ran instead of {owed} (I1)")
        with torch.inference_mode():
            frame.save_rows(self._requests, program.end)
            frame.commit(self._requests)
        sampled = [s for s in frame.sampled if s.request_id not in frame.dead]
        for token in sampled:
            self._requests[token.request_id].take(token.token_id)
        return sampled

    def split(self, program: Program, index: Index) -> None:
        if program.inside_layer(index):
            raise InvariantError(f"frame {program.frame_id} is inside a layer at {index}")
        with torch.inference_mode():
            self.frames.pop(program.frame_id).save_rows(self._requests, index)

    def kill(self, program: Program, request_id: RequestId) -> None:
        frame = self.frames[program.frame_id]
        frame.dead.add(request_id)
        frame.forget_steps()

    def drop(self, program: Program) -> None:
        self.frames.pop(program.frame_id, None)

    # ops

    def _embed(self, frame: Frame, op: Op, pos: int) -> int:
        program = frame.program
        ids: list[int] = []
        for r in program.groups[op.group]:
            row = program.rows[r]
            if row.request_id in frame.dead:
                ids.extend([0] * row.num_tokens)
            else:
                ids.extend(self._requests[row.request_id].ids[row.lo : row.hi])
        x = self.parts.embed(torch.tensor(ids, device=self._device))
        if self.parts.embedding_multiplier is not None:
            x = x * self.parts.embedding_multiplier
        frame.flush()
        frame.x_TD, frame.group = x, op.group
        return 0

    def _spans(self, frame: Frame, group: int, lo: int, hi: int) -> list[Span]:
        program = frame.program
        spans: list[Span] = []
        at = -lo  # where the row begins in the op
        for r in program.groups[group]:
            row, marks = program.rows[r], program.row_blocks[r]
            first = row.lo + max(0, -at)
            stop = min(row.hi, row.lo + hi - lo - at)
            if first < stop and row.request_id not in frame.dead:
                kv = self._requests[row.request_id].kv
                ends = marks[bisect_left(marks, first) : bisect_left(marks, stop) + 1]
                spans.extend(Span(kv, at + a - row.lo, a, b) for a, b in pairwise(ends))
            at += row.num_tokens
        return spans

    def _new_step(self, frame: Frame, group: int, lo: int, hi: int) -> Step:
        spans = self._spans(frame, group, lo, hi)
        return Step(spans, hi - lo, self.parts.latent_kv)

    def _attn(self, frame: Frame, op: Op, pos: int) -> int:
        _, layer, group, lo, hi = op
        x, state = frame.activate(group), frame.layer
        step = frame.step_of(group, lo, hi, self._new_step)
        rope = frame.rope_of(group, lo, hi)
        whole = hi - lo == x.shape[0]
        driver, x_TD = self._drivers[layer], x if whole else x[lo:hi]
        mid, state.begun, pos = attend_some(driver, x_TD, rope, step, pos, state.begun, self._costs)
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
        state.routed[lo] = self._drivers[op.layer].route(x, mid)
        return 0

    def _experts(self, frame: Frame, op: Op, pos: int) -> int:
        """One range of units; returns the next position, 0 when the op is done."""
        state = frame.layer
        work = state.work or self._start_experts(state, op)
        x, stop = state.experts_x_TD, work.end_of_range(pos, self._costs)
        assert x is not None
        frame.slots_done += work.run(x, pos, stop)
        self.expert_bytes += work.bytes_read(pos, stop)
        if stop < len(work.units):
            return stop
        state.experts_x_TD = None
        return 0

    def _start_experts(self, state: LayerState, op: Op) -> Work:
        ids = state.gather()
        if ids.shape[1] != self.shape.experts_per_token:
            raise ModelError(
                f"the router of layer {op.layer} takes {ids.shape[1]} experts per token, its "
                f"config says {self.shape.experts_per_token}; correct num_experts_per_tok"
            )
        state.work = self._new_work(op.layer, ids)
        return state.work

    def _new_work(self, layer: int, ids_TK: Tensor) -> Work:
        bank = self._banks[layer]
        assert bank is not None
        return Work(bank, ids_TK, self.cuts.expert_block)

    def _combine(self, frame: Frame, op: Op, pos: int) -> int:
        _, layer, _, lo, hi = op
        state, x, mid = frame.layer, frame.x_TD, frame.layer.mid_TD
        assert x is not None
        assert mid is not None
        whole = hi - lo == x.shape[0]
        part, mid_part = (x, mid) if whole else (x[lo:hi], mid[lo:hi])
        driver = self._drivers[layer]
        if self.shape.is_moe[layer]:
            assert state.work is not None
            assert state.weights_TK is not None
            if lo == 0 and 0 in state.work.done:
                raise InvariantError(f"layer {layer} combines before all its experts ran (I1)")
            routed = state.routed[lo]
            experts = state.work.combine(lo, hi, state.weights_TK, routed.x_TD.dtype)
            out = driver.combine(part, mid_part, routed, experts)
        else:
            out = driver.dense(part, mid_part)
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

    def _logits(self, frame: Frame, op: Op, pos: int) -> int:
        """Prompts that are asked about, then blocks of the vocabulary; at the end, sample."""
        parts, members = self.parts, frame.program.groups[op.group]
        if frame.head is None or pos == 0:
            x = frame.activate(op.group)
            rows = self._costs.rows_at_once(self._head.num_blocks, self.shape.vocab_size)
            scores = frame.scores_of(self._requests, members, (self._head.num_blocks, rows))
            x = last_tokens(x, [frame.program.rows[r].num_tokens for r in members])
            frame.head = HeadState(parts.norm(x), self._greedy(frame, members), scores)
        head, num = frame.head, self._head.num_blocks
        if pos < head.scores.num_units:
            dead = {i for i, r in enumerate(members) if frame.is_dead(r)}
            return head.scores.run(self._head, parts, self._costs, pos, dead)
        pos -= head.scores.num_units
        stop = min(num, pos + self._costs.head_blocks(len(members), num))
        head.run(self._head, pos, stop, parts.logits_scaling)
        if stop < num:
            return head.scores.num_units + stop
        self._sample(frame, members)
        return 0

    def _greedy(self, frame: Frame, members: tuple[int, ...]) -> list[int]:
        """Rows that need no logits but the largest."""
        if self.on_logits is not None or not self.compute.streams:
            return []
        program = frame.program
        ids, dead = [program.rows[r].request_id for r in members], frame.dead
        return [i for i, name in enumerate(ids) if name in dead or self._sampler.is_plain(name)]

    def _sample(self, frame: Frame, members: tuple[int, ...]) -> None:
        head = frame.head
        assert head is not None
        rows = [frame.program.rows[r] for r in members]
        found: dict[int, Sampled] = {}
        for i, token_id, peak in head.answers():
            if rows[i].request_id not in frame.dead:
                found[i] = self._sampler.greedy(rows[i].request_id, token_id, peak, rows[i].hi)
        live = [j for j, i in enumerate(head.rest) if rows[i].request_id not in frame.dead]
        if live:
            logits = head.logits()[live] if len(live) < len(head.rest) else head.logits()
            if self.parts.logits_scaling is not None:
                logits = logits / self.parts.logits_scaling
            rest = [head.rest[j] for j in live]
            found.update(zip(rest, self._choose(logits, [rows[i] for i in rest]), strict=True))
        frame.sampled = [head.scores.add_to(i, found[i]) for i in sorted(found)]

    def _choose(self, logits: Tensor, rows: list[Row]) -> list[Sampled]:
        if self.on_logits is not None:
            for i, row in enumerate(rows):
                self.on_logits(row.request_id, row.hi, logits[i])
        requests = [self._requests[row.request_id] for row in rows]
        return self._sampler.sample(
            logits,
            [row.request_id for row in rows],
            [row.hi for row in rows],
            [r.ids[r.num_prompt_tokens :] for r in requests],
        )

    # checkpoints

    def export_frame(self, program: Program, index: Index) -> dict[str, Tensor]:
        """The tensors of a parked frame."""
        return self.frames[program.frame_id].export()

    def import_frame(self, program: Program, index: Index, tensors: dict[str, Tensor]) -> None:
        """Make the frame that `export_frame` described; its requests are there already."""
        frame = Frame(program)
        with torch.inference_mode():
            frame.rope = self._rope.rows(program, self._requests)
            frame.restore({name: t.to(self._device) for name, t in tensors.items()})
            if "work.ids" in tensors:
                layer = program.ops[index.op].layer
                frame.layer.work = work = self._new_work(layer, tensors["work.ids"])
                work.restore(tensors["work.slots"], tensors["work.done"])
            if index == program.end and frame.head is not None:
                self._sample(frame, program.groups[program.ops[-1].group])
        self.frames[program.frame_id] = frame

    def export_request(self, request_id: RequestId) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """KV (committed or not) and hidden states of a request, and what describes them."""
        return self._requests[request_id].export()

    def import_request(
        self,
        request_id: RequestId,
        sampling: SamplingParams,
        tensors: dict[str, Tensor],
        meta: dict[str, Any],
    ) -> None:
        """Add a request with what `export_request` gave."""
        prompt = meta["num_prompt_tokens"]
        self.add(request_id, meta["token_ids"], sampling, prompt, meta["max_total_tokens"])
        with torch.inference_mode():
            here = {name: t.to(self._device) for name, t in tensors.items()}
            self._requests[request_id].restore(here, meta)

    def fingerprint(self) -> str:
        """Identity of the model: its settings, a sample of its weights' bytes, their format."""
        return self._identity
