"""The runner for devices: the frames and ops of `TorchRunner` over paged KV and fused kernels.

What differs from the CPU: KV lies in pages, routing stays on the device and experts run in ranges
of experts, tokens are sampled on the device and read once per step, in `finish`. Stages that were
captured as CUDA graphs are replayed where a program's ops are exactly a stage; all other ops run
one by one. The host runs at most `AHEAD` pieces ahead of the device, so that stopping means
stopping.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qllm.cuda.experts import DeviceWork
from qllm.cuda.graphs import GraphApi, Graphs, TorchGraphApi
from qllm.cuda.lanes import Bucket, Lane, LaneHead, LaneRow
from qllm.cuda.layers import DeviceLayers
from qllm.cuda.pages import PagedKV, Pages
from qllm.cuda.stages import Body, Key, Part, Stages
from qllm.cuda.step import PagedStep
from qllm.errors import InvariantError
from qllm.kernels.select import kernels
from qllm.kernels.tiles import Query, query_block, tiles_of
from qllm.plan import Row
from qllm.runner.frame import Frame, LayerState
from qllm.runner.kv import RequestKV
from qllm.runner.protocol import Stop
from qllm.runner.runner import TorchRunner
from qllm.scheduler.program import Index, OpKind, Program
from qllm.types import CAPABILITIES, Driver, Grain, RequestId, Sampled, SamplingParams

AHEAD = 2
"""Ops or stages that the host may have launched beyond the one that the device works on."""
EXPERT_RANGES = 4
"""Pieces of an EXPERTS op of a program that may stop between experts."""
LAYERS_PER_STAGE = 4
"""Layers per stage of programs that may stop. Predicted, not measured: docs/gpu-status.md."""
NOTHING = SamplingParams(temperature=0)


class CudaRunner(TorchRunner):
    """The `Runner` of `runner/protocol.py` on a device.

    Args:
        model: In evaluation mode, whole, on the device.
        num_pages: KV pages.
        page_size: Tokens of a page.
        max_num_seqs: Most rows of a captured stage.
        max_step_tokens: Most tokens of a captured stage.
        max_total_tokens: Longest sequence of a captured stage; at most the model's.
        kernels_name: "triton" or "torch"; None is Triton on CUDA, torch elsewhere.
        graphs: How to capture; None captures on CUDA and nowhere else; False never does.
        buckets: What to capture for; None is `default_buckets`.
        layers_per_stage: k.
        clock: Nanoseconds, for segments only.

    Raises:
        ModelError: The model cannot be driven safely, or its experts have no kernel.
    """

    capabilities = CAPABILITIES

    def __init__(
        self,
        model: nn.Module,
        *,
        num_pages: int,
        page_size: int = 16,
        max_num_seqs: int = 32,
        max_step_tokens: int = 4096,
        max_total_tokens: int = 8192,
        kernels_name: str | None = None,
        graphs: GraphApi | bool | None = None,
        buckets: list[Bucket] | None = None,
        layers_per_stage: int = LAYERS_PER_STAGE,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        super().__init__(model, max_segment_ms=float("inf"), kernels="reference", clock=clock)
        on_cuda = self._device.type == "cuda"
        self.kernels = kernels(kernels_name or ("triton" if on_cuda else "torch"))
        spare = max_num_seqs * 2
        layers = self.shape.num_layers
        self.pages = Pages(layers, num_pages + spare, page_size, self.kernels)
        self.layers = DeviceLayers(model, self.parts, self._drivers, self.kernels)
        self._drivers = self.layers.drivers
        self.layers.enter()
        self._block = query_block(self.layers.heads_per_group)
        self._pending: dict[int, tuple[list[RequestId], list[int], Tensor, Tensor]] = {}
        self._marks: deque[Any] = deque()
        self._on_cuda = on_cuda
        self.stages: Stages | None = None
        self.not_captured = self._why_not_captured(graphs)
        """Why steps run op by op; empty if they are captured."""
        if not self.not_captured:
            api = TorchGraphApi() if graphs is None or isinstance(graphs, bool) else graphs
            wanted = buckets or default_buckets(max_num_seqs, max_step_tokens)
            most = max(bucket.tokens for bucket in wanted)
            longest = min(max_total_tokens, self.shape.max_position)
            max_pages = -(-longest // page_size)
            self._capture(api, wanted, (most, max_num_seqs, max_pages), layers_per_stage)

    # what there is

    def _why_not_captured(self, graphs: GraphApi | bool | None) -> str:
        if graphs is False or (graphs is None and not self._on_cuda):
            return "not asked for" if graphs is False else f"device {self._device.type}"
        if any(driver is Driver.HOOKED for driver in self.drivers):
            return "a layer is driven by hooks"
        if self._rope.switch is None:
            return ""
        kind = getattr(self.parts.rotary_emb, "rope_type", "")
        return f"the position embeddings (rope type {kind!r}) depend on the request's length"

    @property
    def names(self) -> dict[str, str]:
        """What computes what, for results."""
        captured = self.not_captured
        if self.stages is not None:
            num, k = len(self.stages.captured), self.stages.layers_per_stage
            captured = f"{num} graphs, {k} layers per stage"
        return {**self.layers.names, "stages": captured}

    def close(self) -> None:
        self.layers.leave()
        self.pages.release()
        self.stages = None  # stages and runner know each other: their memory would stay
        super().close()

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Run layers and norms by the model's own forwards for a while, with no frame open."""
        self.layers.norms.leave()
        self._drivers = self.compute.drivers
        try:
            yield
        finally:
            self._drivers = self.layers.drivers
            self.layers.norms.enter()

    @property
    def expert_bytes(self) -> int:
        """Weights read so far: each expert once per layer of a program. Waits for the device."""
        return self.layers.expert_bytes

    @expert_bytes.setter
    def expert_bytes(self, value: int) -> None:
        """The device counts; the base class starts at 0 and adds nothing."""
        if value and value != self.expert_bytes:
            raise InvariantError("expert bytes are counted on the device")

    # KV

    def _new_kv(self, max_total_tokens: int) -> RequestKV:
        return PagedKV(self.pages, max_total_tokens)

    def _kv(self, request_id: RequestId) -> PagedKV:
        kv = self._requests[request_id].kv
        assert isinstance(kv, PagedKV)
        return kv

    def remove(self, request_id: RequestId) -> None:
        if request_id in self._requests:
            self._requests[request_id].kv.clear()
        super().remove(request_id)

    def accept(self, program: Program) -> None:
        super().accept(program)
        for row in program.rows:
            kv = self._kv(row.request_id)
            kv.reserve(row.hi)
            kv.reach(row.hi)

    def drop(self, program: Program) -> None:
        frame = self.frames.get(program.frame_id)
        self._pending.pop(program.frame_id, None)
        super().drop(program)
        if frame is None:
            return
        for lane in self._lanes():
            lane.forget(frame)
        for request_id in program.request_ids:
            if request_id in self._requests:
                kv = self._kv(request_id)
                if self._requests[request_id].kept is None:
                    kv.trim()

    def kill(self, program: Program, request_id: RequestId) -> None:
        super().kill(program, request_id)
        for lane in self._lanes():
            if lane.loaded is not None and lane.loaded[0] == program.frame_id:
                lane.loaded = None

    def split(self, program: Program, index: Index) -> None:
        frame = self.frames[program.frame_id]
        super().split(program, index)
        for lane in self._lanes():
            lane.forget(frame)

    def _lanes(self) -> list[Lane]:
        return [] if self.stages is None else list(self.stages.lanes.values())

    # ops one by one

    def _new_step(self, frame: Frame, group: int, lo: int, hi: int) -> Any:
        spans = self._spans(frame, group, lo, hi)
        kvs: dict[int, PagedKV] = {}
        queries = []
        slots = [-1] * (hi - lo)
        for kv, at, a, b in spans:
            assert isinstance(kv, PagedKV)
            kvs[id(kv)] = kv
            queries.append(Query(list(kvs).index(id(kv)), at, a, b - a))
            slots[at : at + b - a] = [kv.slot(t) for t in range(a, b)]
        most = max((len(kv.pages) for kv in kvs.values()), default=1)
        tables = torch.zeros((max(1, len(kvs)), most), dtype=torch.int64)
        for r, kv in enumerate(kvs.values()):
            tables[r, : len(kv.pages)] = torch.tensor(kv.pages)
        tiles = tiles_of(queries, hi - lo, self._block, self._device)
        at_slots = torch.tensor(slots).to(self._device)
        return PagedStep(self.pages, self.kernels, tables.to(self._device), tiles, at_slots)

    def _new_work(self, layer: int, ids_TK: Tensor) -> DeviceWork:
        experts = self.layers.experts[layer]
        assert experts is not None
        return experts.begin(ids_TK, EXPERT_RANGES)

    def _experts(self, frame: Frame, op: Any, pos: int) -> int:
        state = frame.layer
        if state.work is None:
            self._start_experts(state, op)
        work, x = state.work, state.experts_x_TD
        assert work is not None
        assert x is not None
        num = len(work.units)
        stop = pos + 1 if frame.program.grain is Grain.EXPERT else num
        frame.slots_done += work.run(x, pos, stop)
        if stop < num:
            return stop
        state.experts_x_TD = None
        return 0

    # running

    def run(self, program: Program, start: Index, stop: Stop) -> Index:
        frame = self.frames[program.frame_id]
        with torch.inference_mode():
            return self._run_to(frame, len(program.ops), start, stop)

    def _run_to(self, frame: Frame, limit: int, start: Index, stop: Stop) -> Index:
        """Ops [start, limit): `limit` is less than the program's when only a layer is finished."""
        program, clock, segments = frame.program, self._clock, self.segments
        op, pos = start
        begin = clock()
        while op < limit:
            here, kind = Index(op, pos), program.ops[op].kind
            part = self._part(frame, op, limit) if pos == 0 else None
            if part is not None:
                self._replay(frame, part)
                op = part.end_op
            else:
                pos = self._ops[kind](frame, program.ops[op], pos)
                op += pos == 0
            self._pace()
            end = clock()
            if end - begin > segments.longest_ns:
                segments.longest_ns, segments.longest_op = end - begin, kind
            if self.on_segment is not None:
                self.on_segment(program, here, begin, end)
            begin = end
            if op < limit and self._may_stop(program, Index(op, pos)) and _is_asked(program, stop):
                break
        return Index(op, pos)

    def _may_stop(self, program: Program, index: Index) -> bool:
        if program.grain is Grain.STEP:
            return False
        return program.grain is not Grain.LAYER or not program.inside_layer(index)

    def _pace(self) -> None:
        if not self._on_cuda:
            return
        cuda: Any = torch.cuda
        mark = cuda.Event()
        mark.record()
        self._marks.append(mark)
        if len(self._marks) > AHEAD:
            self._marks.popleft().synchronize()

    # stages

    def _capture(
        self, api: GraphApi, buckets: list[Bucket], sizes: tuple[int, int, int], k: int
    ) -> None:
        like = self.parts.lm_head.weight
        with torch.inference_mode():
            positions = torch.arange(sizes[2] * self.pages.page_size, device=self._device)
            cos, sin = self.parts.rotary_emb(like[:1, :1], positions[None])
            slots = self.pages.num_pages * self.pages.page_size
            hidden = like.new_zeros((slots + 1, self.parts.lm_head.in_features))
            lanes = {whole: Lane(*sizes, self._block, hidden) for whole in (True, False)}
            body = Body(self.parts, self.layers, self.kernels, self.pages, (cos[0], sin[0]))
            self.stages = Stages(Graphs(api), body, lanes, self.shape.num_layers, k)
            self.stages.capture(buckets)
            self._rehearse(body, max(buckets), lanes[True])
        self.layers.forget_bytes()

    def _rehearse(self, body: Body, bucket: Bucket, lane: Lane) -> None:
        """Run the largest step outside of graphs: torch keeps the memory for ops one by one."""
        body.of(Key(True, 0, self.shape.num_layers, bucket, embed=True, head=True), lane)()

    def _part(self, frame: Frame, op: int, limit: int) -> Part | None:
        if self.stages is None or self.on_logits is not None or self._owes_prompt(frame):
            return None
        part = self.stages.part(frame.program, op, self._can_sample(frame))
        if part is None or part.end_op > limit:
            return None
        rows = [frame.program.rows[r] for r in frame.program.groups[part.group]]
        alive = [row.request_id for row in rows if row.request_id not in frame.dead]
        most = self.stages.lanes[part.key.whole].max_pages
        return part if all(len(self._kv(i).pages) <= most for i in alive) else None

    def _owes_prompt(self, frame: Frame) -> bool:
        """Whether hidden states of a prompt have to be kept, which a captured head does not."""
        ids = {row.request_id for row in frame.program.rows} - frame.dead
        return any(self._requests[i].owes_prompt for i in ids)

    def _sampling_rows(self, frame: Frame) -> list[Row]:
        program = frame.program
        last = program.ops[len(program.ops) - 1]
        if last.kind is not OpKind.HEAD:
            return []
        return [program.rows[r] for r in program.groups[last.group]]

    def _can_sample(self, frame: Frame) -> bool:
        return all(
            self._sampler.simple(row.request_id) is not None
            for row in self._sampling_rows(frame)
            if row.request_id not in frame.dead
        )

    def _replay(self, frame: Frame, part: Part) -> None:
        assert self.stages is not None
        key, program = part.key, frame.program
        lane = self.stages.lanes[key.whole]
        x = None if key.embed else frame.activate(part.group)
        if lane.loaded != (program.frame_id, part.group):
            self._load(lane, frame, part.group)
        if x is None:
            frame.flush()
        else:
            lane.put(x)
        self.stages.replay(key)
        frame.x_TD = None if key.head else lane.take(part.num_tokens)
        frame.group, frame.layer = part.group, LayerState()
        moe = sum(self.shape.is_moe[key.start : key.end])
        frame.slots_done += moe * part.num_tokens * self.shape.experts_per_token
        if key.head:
            rows = self._sampling_rows(frame)
            num = len(rows)
            self._pending[program.frame_id] = (
                [row.request_id for row in rows],
                [row.hi for row in rows],
                lane.tokens_R[:num],
                lane.peaks_R[:num],
            )

    def _load(self, lane: Lane, frame: Frame, group: int) -> None:
        program = frame.program
        rows, last, at = [], {}, 0
        for r in program.groups[group]:
            row = program.rows[r]
            at += row.num_tokens
            last[row.request_id] = at - 1
            if row.request_id in frame.dead:
                rows.append(LaneRow([0] * row.num_tokens, row.lo, None))
            else:
                request = self._requests[row.request_id]
                ids = request.ids[row.lo : row.hi]
                rows.append(LaneRow(ids, row.lo, self._kv(row.request_id)))
        heads = []
        for row in self._sampling_rows(frame):
            is_dead = row.request_id in frame.dead
            simple = None if is_dead else self._sampler.simple(row.request_id)
            params, seed = simple or (NOTHING, 0)
            heads.append(LaneHead(last.get(row.request_id, 0), row.hi, params, seed))
        lane.load(rows, heads)
        lane.loaded = (program.frame_id, group)

    # sampling

    def _sample(self, frame: Frame, members: tuple[int, ...]) -> None:
        rows = [frame.program.rows[r] for r in members]
        live = [i for i, row in enumerate(rows) if row.request_id not in frame.dead]
        owed = self._owes_prompt(frame)
        if self.on_logits is not None or owed or not live or not self._can_sample(frame):
            super()._sample(frame, members)
            return
        assert frame.head is not None
        logits = torch.cat(frame.head.blocks, 1)
        if self.parts.logits_scaling is not None:
            logits = logits / self.parts.logits_scaling
        rows = [rows[i] for i in live]
        found = [self._sampler.simple(row.request_id) or (NOTHING, 0) for row in rows]

        def column(values: list[Any], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(self._device)

        tokens = torch.zeros(len(rows), dtype=torch.int64, device=self._device)
        peaks = torch.zeros(len(rows), dtype=torch.float32, device=self._device)
        self.kernels.sample(
            logits if len(live) == logits.shape[0] else logits[live],
            column([p.temperature for p, _ in found], torch.float64),
            column([p.top_k for p, _ in found], torch.int64),
            column([p.top_p for p, _ in found], torch.float64),
            column([p.min_p for p, _ in found], torch.float64),
            column([seed for _, seed in found], torch.int64),
            column([row.hi for row in rows], torch.int64),
            tokens,
            peaks,
        )
        ids, positions = [row.request_id for row in rows], [row.hi for row in rows]
        self._pending[frame.program.frame_id] = (ids, positions, tokens, peaks)

    def finish(self, program: Program) -> list[Sampled]:
        """As the base; reads the sampled tokens, the one time in a step that waits.

        Raises:
            ValueError: The logits of a live request hold NaN or no finite maximum.
        """
        frame = self.frames[program.frame_id]
        pending = self._pending.pop(program.frame_id, None)
        if pending is not None:
            request_ids, positions, tokens, peaks = pending
            both = torch.stack((tokens.double(), peaks.double())).cpu()
            for i, request_id in enumerate(request_ids):
                if request_id in frame.dead:
                    continue
                if not torch.isfinite(both[1, i]):
                    raise ValueError(
                        f"request {request_id}: the largest logit is {both[1, i].item()} and must "
                        f"be finite; the model's output at position {positions[i]} is broken"
                    )
                frame.sampled.append(Sampled(request_id, int(both[0, i])))
        sampled = super().finish(program)
        for lane in self._lanes():
            lane.forget(frame)
        return sampled


def _is_asked(program: Program, stop: Stop) -> bool:
    late = stop.stop_at_ns is not None and stop.now_ns() >= stop.stop_at_ns
    return stop.word < program.stop_below or late


def default_buckets(max_num_seqs: int, max_step_tokens: int) -> list[Bucket]:
    """Decode batches in powers of two, and prefill steps by factors of four."""
    decode, prefill = [1], [64]
    while decode[-1] < max_num_seqs:
        decode.append(min(decode[-1] * 2, max_num_seqs))
    most = max_step_tokens + max_num_seqs
    while prefill[-1] < most:
        prefill.append(min(prefill[-1] * 4, most))
    return [*(Bucket(n, False) for n in decode), *(Bucket(n, True) for n in prefill)]
