"""A backend for a device: paged KV, fused kernels, experts in ranges, sampling on the device.

Routing stays on the device, unless experts come and go (`qllm.cuda.slots`). The host reads tokens
once per step, when the runner finishes the step.
A captured stage (a CUDA graph) is replayed if a program's next ops are exactly that stage. All
other ops run one by one. The host runs at most `AHEAD` ops or stages ahead of the device, so a stop
takes effect soon.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qllm.cuda.experts import DeviceWork
from qllm.cuda.gathers import Gathers, gathers_of
from qllm.cuda.graphs import GraphApi, Graphs, TorchGraphApi
from qllm.cuda.lanes import Bucket, Lane, LaneHead, LaneRow
from qllm.cuda.layers import DeviceLayers
from qllm.cuda.pages import PagedKV, Spare
from qllm.cuda.shares import ranks_of
from qllm.cuda.slots import DeviceResidency, ExpertRoom
from qllm.cuda.stages import Body, Key, StagePart, Stages
from qllm.errors import DeviceError, ModelError
from qllm.kernels.select import kernels
from qllm.kernels.tiles import Query, query_block, tiles_of
from qllm.models.discover import ModelParts, base_model
from qllm.models.heard import warn_of_unheard
from qllm.models.hybrid import kv_shapes
from qllm.models.positions import embeddings
from qllm.plan import Row
from qllm.runner.backend import Asking
from qllm.runner.compute import Compute
from qllm.runner.cuts import cut_rule
from qllm.runner.frame import Frame, LayerState
from qllm.runner.kv import RequestKV
from qllm.runner.layers.attention import Span
from qllm.runner.protocol import Stop
from qllm.runner.rope import switch_of
from qllm.runner.runner import TorchRunner
from qllm.runner.sampling.sampler import Unread
from qllm.runner.sweep import Swept
from qllm.scheduler.blocks import BlockTables
from qllm.scheduler.program import Index, OpKind, Program
from qllm.types import NS_PER_MS, Driver, Grain, SamplingParams

AHEAD = 2
"""Number of ops or stages that the host may launch while the device still runs an earlier one."""
EXPERT_RANGES = 4
"""Number of ranges into which an EXPERTS op is cut, in a program that may stop between experts."""
LAYERS_PER_STAGE = 4
"""Layers per stage of programs that may stop. The number is predicted, not measured
(docs/design/gpu.md)."""
AHEAD_MS = 1.6
"""Milliseconds per step for copies of KV ahead of a swap-out."""
NOTHING = SamplingParams(temperature=0)


def cuda_runner(
    model: nn.Module,
    *,
    tp: int = 1,
    clock: Callable[[], int] = time.perf_counter_ns,
    **settings: Any,
) -> TorchRunner:
    """Return a runner on a device, or on ranks of devices.

    Args:
        model: A whole model on the device, in evaluation mode.
        tp: Number of ranks that share the model: see `gathers_of`.
        clock: Clock in nanoseconds, used only for segments.
        **settings: Settings of `CudaBackend`.

    Raises:
        ModelError: The model cannot be run safely, its experts have no kernel, or it cannot be
            split over ranks.
        ConfigError: The model cannot be split over so many ranks, or the machine has too few
            devices.
    """
    made: list[CudaBackend] = []

    def backend(parts: ModelParts) -> CudaBackend:
        gathers = None if tp == 1 else gathers_of(parts.lm_head.weight.device, tp)
        made.append(CudaBackend(model, parts, **{"gathers": gathers, **settings}))
        return made[0]

    runner = TorchRunner(model, backend, clock=clock)
    if (ranks := made[0].layers.ranks) is not None:
        num_bytes = sum(ranks.kv_bytes(runner.charge.token_bytes))
        runner.charge = runner.charge._replace(token_bytes=num_bytes)
    return runner


class CudaBackend:
    """A `Backend` (`runner/backend.py`).

    The class is large because a backend contains everything that depends on the device.

    Args:
        model: The transformers model, on the device.
        parts: Parts of the model.
        num_pages: Number of KV pages, equal to the scheduler's blocks.
        page_size: Tokens of a page, and of a block.
        max_num_seqs: Most rows of a captured stage.
        max_step_tokens: Most tokens of a captured stage.
        max_total_tokens: Longest sequence of a captured stage; at most the model's.
        kernels_name: "triton" or "torch"; None is Triton on CUDA, torch elsewhere.
        graphs: API that captures; None captures on CUDA and nowhere else; False never does.
        buckets: Sizes to capture; None is `default_buckets`.
        layers_per_stage: Layers per captured stage.
        spare: Room for KV in addition to the pages, or None.
        room: Room for experts that come and go, all of which are on the host; None if all experts
            are on the device. If there is room for all, they are on the device, too.
        gathers: Ranks that share the model; None is one device that has all of it.

    Raises:
        ConfigError: The room is too small for the experts of one token in one layer, or the model
            cannot be split over so many ranks.
        ModelError: Experts of a kind without a kernel, or a model that cannot be split.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: ModelParts,
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
        spare: Spare | None = None,
        room: ExpertRoom | None = None,
        gathers: Gathers | None = None,
    ) -> None:
        warn_of_unheard(model, parts)
        self._parts, self.shape = parts, parts.shape
        self.device = parts.lm_head.weight.device
        self._on_cuda = self.device.type == "cuda"
        with torch.inference_mode():
            self.compute = Compute(model, parts, "reference")
        config, never_cuts = base_model(model).config, float("inf")
        self.cuts, self.costs = cut_rule(parts, config, never_cuts)
        self.kernels = kernels(kernels_name or ("triton" if self._on_cuda else "torch"))
        if len(kv_shapes(parts.attentions)) > 1:
            raise ModelError(
                "the keys and values of its layers have different shapes, and a page of the device "
                "holds those of one: serve it with device='cpu'"
            )
        if any(layer.new_state is not None for layer in parts.layers):
            raise ModelError(
                "layers that carry a state are not run on a device yet: serve it with device='cpu'"
            )
        self._spare, self._gathers = spare, gathers
        ranks = None if gathers is None else ranks_of(model, parts, gathers)
        self.layers = DeviceLayers(model, parts, self.compute.drivers, self.kernels, room, ranks)
        self.compute.head = self.layers.rank_head or self.compute.head
        self.pages = self.layers.pages(num_pages, page_size, spare)
        self.drivers = self.layers.drivers
        self._block = query_block(self.layers.heads_per_group)
        self._marks: deque[Any] = deque()
        self.stages: Stages | None = None
        self.not_captured = self._why_not_captured(model, graphs)
        """Reason why steps run op by op; empty if they are captured."""
        self._to_capture: tuple[Any, ...] | None = None
        if not self.not_captured:
            api = TorchGraphApi() if graphs is None or isinstance(graphs, bool) else graphs
            wanted = buckets or default_buckets(max_num_seqs, max_step_tokens)
            most = max(bucket.tokens for bucket in wanted)
            longest = min(max_total_tokens, self.shape.max_position)
            sizes = most, max_num_seqs, -(-longest // page_size)
            self._to_capture = api, wanted, sizes, layers_per_stage

    is_native = False
    """False, because our CPU kernels run nothing here."""
    why_inexact = (
        "on CUDA the bits of a token's KV depend on the number of rows that its step is padded to"
    )
    shares_blocks = True

    @property
    def ranks(self) -> Sequence[Mapping[str, int]]:
        """Ranks, all in this process: see `Backend`."""
        pid, found = os.getpid(), self.layers.rank_bytes
        return [{"pid": pid, "weight_bytes": num_bytes} for num_bytes in found]

    @property
    def copy_bytes_per_ms(self) -> int:
        return 0 if self._spare is None else self._spare.bytes_per_ms

    @property
    def move_token_ns(self) -> int:
        return self.pages.token_bytes * NS_PER_MS // max(1, self.copy_bytes_per_ms)

    def enter(self) -> None:
        self.compute.enter()
        self.layers.enter()
        if self._to_capture is not None:
            self._capture(*self._to_capture)
            self._to_capture = None

    # names and numbers

    @property
    def residency(self) -> DeviceResidency | None:
        """Slots for experts; None if all experts are on the device."""
        return self.layers.residency

    def _why_not_captured(self, model: nn.Module, graphs: GraphApi | bool | None) -> str:
        if graphs is False or (graphs is None and not self._on_cuda):
            return "not asked for" if graphs is False else f"device {self.device.type}"
        if self.layers.residency is not None:
            return "the host decides which experts are on the device"
        if any(driver.kind is Driver.HOOKED for driver in self.drivers):
            return "a layer is driven by hooks"
        if self._gathers is not None and not self._gathers.is_captured:
            return "its ranks have several devices, and a graph has one"
        if any(layer.rope_kind is not None for layer in self._parts.layers):
            return "every type of layer has position embeddings of its own"
        if switch_of(model, self._parts.rotary_emb) is None:
            return ""
        kind = getattr(self._parts.rotary_emb, "rope_type", "")
        return f"the position embeddings (rope type {kind!r}) depend on the request's length"

    @property
    def names(self) -> dict[str, str]:
        """Return the names of the kernels in use, for results."""
        captured = self.not_captured
        if self.stages is not None:
            num, k = len(self.stages.captured), self.stages.layers_per_stage
            captured = f"{num} graphs, {k} layers per stage"
        return {**self.layers.names, "stages": captured}

    def close(self) -> None:
        self.layers.leave()
        self.pages.release()
        self.stages = None
        self.compute.leave()

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Run layers and norms by the model's own forwards in the block, without an open frame."""
        self.layers.norms.leave()
        self.drivers = self.compute.drivers
        try:
            yield
        finally:
            self.drivers = self.layers.drivers
            self.layers.norms.enter()

    @property
    def bytes_read(self) -> int:
        """Bytes of experts read so far, each once per layer of a program, after a wait."""
        return self.layers.expert_bytes

    def forget(self, frame: Frame) -> None:
        for lane in self._lanes():
            lane.forget(frame)

    def fault(self, error: Exception) -> DeviceError | None:
        """Return the error of a lost device. After a CUDA fault every call of the process fails."""
        if not self._on_cuda:
            return None
        try:
            for device in {self.device} if self._gathers is None else {*self._gathers.devices}:
                torch.cuda.synchronize(device)
        except Exception:  # noqa: BLE001 - after any error the device is lost
            return DeviceError(
                f"the device is lost ({type(error).__name__}: {error}); end this process and start "
                "again"
            )
        return None

    def _lanes(self) -> list[Lane]:
        return [] if self.stages is None else list(self.stages.lanes.values())

    # ops one by one

    def new_kv(self, capacity: int) -> RequestKV:
        return PagedKV(self.pages, capacity)

    def copy_ahead(self, kvs: Sequence[RequestKV]) -> None:
        page_bytes = self.pages.token_bytes * self.pages.page_size
        most = max(1, int(AHEAD_MS * self.copy_bytes_per_ms) // max(1, page_bytes))
        for kv in kvs:
            most -= kv.copy_ahead(most) if isinstance(kv, PagedKV) else 0

    def new_tables(self) -> BlockTables:
        return BlockTables(self.pages.num_pages, self.pages.page_size)

    def new_step(self, spans: Sequence[Span], num_tokens: int) -> Any:
        kvs: dict[int, PagedKV] = {}
        queries = []
        slots = [-1] * num_tokens
        for kv, at, a, b in spans:
            kvs[id(kv)] = kv
            queries.append(Query(list(kvs).index(id(kv)), at, a, b - a))
            slots[at : at + b - a] = [kv.slot(t) for t in range(a, b)]
        most = max((len(kv.pages) for kv in kvs.values()), default=1)
        tables = torch.zeros((max(1, len(kvs)), most), dtype=torch.int64)
        for r, kv in enumerate(kvs.values()):
            tables[r, : len(kv.pages)] = torch.tensor(kv.pages)
        tiles = tiles_of(queries, num_tokens, self._block, self.device)
        at_slots = torch.tensor(slots).to(self.device)
        return self.layers.step(self.pages, tables.to(self.device), tiles, at_slots)

    def new_work(self, layer: int, ids_TK: Tensor, grain: Grain) -> DeviceWork:
        return self.layers.begin(layer, ids_TK, EXPERT_RANGES if grain is Grain.EXPERT else 1)

    def pace(self) -> None:
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
        like = self._parts.lm_head.weight
        with torch.inference_mode():
            positions = torch.arange(sizes[2] * self.pages.page_size, device=self.device)
            assert self._parts.rotary_emb is not None
            cos, sin = embeddings(self._parts.rotary_emb, None, like[:1, :1], positions[None])
            slots = self.pages.num_pages * self.pages.page_size
            hidden = like.new_zeros((slots + 1, self._parts.lm_head.in_features))
            lanes = {whole: Lane(*sizes, self._block, hidden) for whole in (True, False)}
            body = Body(self._parts, self.layers, self.kernels, self.pages, (cos[0], sin[0]))
            self.stages = Stages(Graphs(api), body, lanes, self.shape.num_layers, k)
            self.stages.capture(buckets)
            self._rehearse(body, max(buckets), lanes[True])
        self.layers.forget_bytes()

    def _rehearse(self, body: Body, bucket: Bucket, lane: Lane) -> None:
        """Run the largest step outside of graphs, so that torch has memory for single ops."""
        body.of(Key(True, 0, self.shape.num_layers, bucket, embed=True, head=True), lane)()

    def run_some(
        self, runner: Asking, frame: Frame, program: Program, at: Index, stop: Stop
    ) -> Swept | None:
        """Replay the captured stage that begins at an op; return None if no captured stage fits."""
        part = None if at.pos else self._part(runner, frame, program, at.op)
        if part is None:
            return None
        self._replay(runner, frame, part)
        return Swept(Index(part.end_op, 0), 0, 0, program.ops[at.op].kind, 0)

    def _part(self, runner: Asking, frame: Frame, program: Program, op: int) -> StagePart | None:
        if self.stages is None or runner.on_logits is not None:
            return None
        whole = frame.program  # `program` may end earlier
        rows = [row for row in whole.rows if row.request_id not in frame.dead]
        if any(runner.requests[row.request_id].owes_prompt for row in rows):
            return None  # hidden states must be stored, which a captured head does not do
        part = self.stages.part(whole, op, program.grain, self._can_sample(runner, frame))
        if part is None or part.end_op > len(program.ops):
            return None
        most = self.stages.lanes[part.key.whole].max_pages
        alive = [whole.rows[r] for r in whole.groups[part.group] if not frame.is_dead(r)]
        fits = all(len(_kv(runner, row).pages) <= most for row in alive)
        return part if fits else None

    def _sampling_rows(self, frame: Frame) -> list[Row]:
        program = frame.program
        last = program.ops[len(program.ops) - 1]
        if last.kind is not OpKind.HEAD:
            return []
        return [program.rows[r] for r in program.groups[last.group]]

    def _can_sample(self, runner: Asking, frame: Frame) -> bool:
        return all(
            runner.sampler.simple(row.request_id) is not None
            for row in self._sampling_rows(frame)
            if row.request_id not in frame.dead
        )

    def _replay(self, runner: Asking, frame: Frame, part: StagePart) -> None:
        assert self.stages is not None
        key, program = part.key, frame.program
        lane = self.stages.lanes[key.whole]
        x = None if key.embed else frame.activate(part.group)
        if lane.loaded != (program.frame_id, part.group):
            self._load(runner, lane, frame, part.group)
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
            num, ids = len(rows), [row.request_id for row in rows]
            peaks_R = lane.peaks_R[:num]
            frame.unread = Unread(ids, [row.hi for row in rows], lane.tokens_R[:num], peaks_R)

    def _load(self, runner: Asking, lane: Lane, frame: Frame, group: int) -> None:
        program = frame.program
        rows, last, at = [], {}, 0
        for r in program.groups[group]:
            row = program.rows[r]
            at += row.num_tokens
            last[row.request_id] = at - 1
            if row.request_id in frame.dead:
                rows.append(LaneRow([0] * row.num_tokens, row.lo, None))
            else:
                ids = runner.requests[row.request_id].ids[row.lo : row.hi]
                rows.append(LaneRow(ids, row.lo, _kv(runner, row)))
        heads = []
        for row in self._sampling_rows(frame):
            is_dead = row.request_id in frame.dead
            simple = None if is_dead else runner.sampler.simple(row.request_id)
            params, seed = simple or (NOTHING, 0)
            heads.append(LaneHead(last.get(row.request_id, 0), row.hi, params, seed))
        lane.load(rows, heads)
        lane.loaded = (program.frame_id, group)

    # sampling

    samples = True

    def sample(self, runner: Asking, logits_RV: Tensor, rows: Sequence[Row]) -> Unread | None:
        simple = [runner.sampler.simple(row.request_id) for row in rows]
        found = [each for each in simple if each is not None]
        if runner.on_logits is not None or len(found) < len(rows):
            return None

        def column(values: list[Any], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(self.device)

        tokens = torch.zeros(len(rows), dtype=torch.int64, device=self.device)
        peaks = torch.zeros(len(rows), dtype=torch.float32, device=self.device)
        positions = [row.hi for row in rows]
        self.kernels.sample(
            logits_RV,
            column([p.temperature for p, _ in found], torch.float64),
            column([p.top_k for p, _ in found], torch.int64),
            column([p.top_p for p, _ in found], torch.float64),
            column([p.min_p for p, _ in found], torch.float64),
            column([seed for _, seed in found], torch.int64),
            column(positions, torch.int64),
            tokens,
            peaks,
        )
        return Unread([row.request_id for row in rows], positions, tokens, peaks)


def _kv(runner: Asking, row: Row) -> PagedKV:
    kv = runner.requests[row.request_id].kv
    assert isinstance(kv, PagedKV)
    return kv


def default_buckets(max_num_seqs: int, max_step_tokens: int) -> list[Bucket]:
    """Return buckets for decode in powers of two, and for prefill by factors of four."""
    decode, prefill = [1], [64]
    while decode[-1] < max_num_seqs:
        decode.append(min(decode[-1] * 2, max_num_seqs))
    most = max_step_tokens + max_num_seqs
    while prefill[-1] < most:
        prefill.append(min(prefill[-1] * 4, most))
    return [*(Bucket(n, False) for n in decode), *(Bucket(n, True) for n in prefill)]
