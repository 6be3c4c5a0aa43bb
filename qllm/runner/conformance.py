"""Start-up check of a runner against its model's forward, and against itself.

Against `model.forward`, layer by layer, in a prefill and in a decode step:

    every component of a layer (attention, router, the rest) gets the input that the model's own
    component had, so that errors neither grow nor change the experts; the output may differ by
    what rounding explains (`runner.reference` measures that difference on the model itself).

This comparison ignores the last bits. A product has other bits in blocks of another size, with
another number of threads, and in this project's kernels. The comparison of the runner with itself
is bit by bit, and each run chooses its own tokens:

    A   prefill uncut        decode while B is parked inside a layer
    B            prefill, parked at every boundary          decode, parked at every boundary
                 and after every few tasks of an op         and after every few tasks of an op

If experts come and go, all four passes go through the model together, layer by layer, so that
each expert is read once. Then the decode steps run over a given token, because no token is chosen
before the last layer. A pass stops, uncut or not, where its experts are not in memory yet.
"""

import ctypes
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_int64
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from qllm.errors import ConfigError, ModelError
from qllm.models.discover import base_model, discover
from qllm.models.weights.expert_file import all_in_file
from qllm.plan import NO_STOP, Plan, Row
from qllm.runner import reference
from qllm.runner.layers.around import AroundDriver
from qllm.runner.layers.drivers import HookedDriver
from qllm.runner.layers.trial import mixers_of, refuse_chunks
from qllm.runner.protocol import Stop, Watch
from qllm.runner.reference import LayerPass, Pass, by_expert, pinned, unit
from qllm.runner.residency import LayerResidency, Missing, Residency
from qllm.scheduler.compile import compile_program
from qllm.scheduler.program import START, Index, OpKind, Program
from qllm.types import Grain, RequestId, SamplingParams

if TYPE_CHECKING:
    from qllm.runner.runner import TorchRunner

NUM_PROMPT = 24
BEYOND_WINDOW = 8
"""Prompt tokens beyond a sliding window, if the prompt fits into `MAX_PROMPT`."""
MAX_PROMPT = 512
BOUND = {torch.float32: 64.0}
"""Largest difference that rounding explains, in spreads (`runner.reference`). In 16 bits, whose
sums are in fp32, the bound is 8. The largest differences seen, in small models of eight families
and in some models 1,024 wide, were 7.8 in fp32 and 2.6 in 16 bits."""
TASKS = 37
"""Tasks of ops between two stops of the parked pass. A layer has thousands of tasks."""
UNCLEAR = 24
"""Divisor of the number of tokens. The quotient, at least one, is the number of tokens that may get
other experts although their choice seemed clear. So the prefill tests a router; the decode step
does not."""
_A, _B, _C = -1, -2, -3
_log = logging.getLogger("qllm")


class _Always:
    """A stop that is due at every boundary between ops."""

    word = NO_STOP
    stop_at_ns: int | None = None

    def now_ns(self) -> int:
        return 0


class _Inside(_Always):
    """A stop that is due at every boundary between ops, and inside ops after some tasks."""

    def __init__(self) -> None:
        self._word = c_int64()

    def watch(self) -> Watch:
        return Watch(ctypes.addressof(self._word), 0, TASKS)


def check(model: nn.Module, runner: "TorchRunner") -> None:
    """Compare a runner without requests with the forward of its model.

    Raises:
        ModelError: Runner and model differ, or a layer cannot be driven; the message names family,
            layer and driver.
        ConfigError: There is too little KV.
    """
    place, residency = next(iter(all_in_file(model).values()), None), runner.residency
    where = str(place.file.path) if place is not None else residency and residency.where
    tokens = _tokens(model, runner)
    with torch.inference_mode():
        _check_chunks(runner)
        if where is None:
            _compare_with_model(model, runner, tokens)
        else:
            _log.warning(
                "the start-up check compares parked passes with uncut ones, and not with "
                "model.forward, because the experts are in %s",
                where,
            )
        with _probing(model, runner) as probe:
            if residency is None:
                probe.compare_parked(tokens[:-1])
            else:
                probe.compare_by_layer(tokens, residency)


def _compare_with_model(model: nn.Module, runner: "TorchRunner", tokens: list[int]) -> None:
    """Require that the runner follows `model.forward`, up to rounding."""
    with runner.as_reference(), pinned(model):
        own = runner.parts  # a second discovery through the model's forward finds nothing new
        parts = discover(model) if own.around is None else own
        split = [tokens[:-1], tokens[-1:]]
        found = [reference.record(model, parts, split, quiet=quiet) for quiet in (False, True)]
    for passes in found:
        with _probing(model, runner) as probe:
            probe.follow(tokens, passes)


def _check_chunks(runner: "TorchRunner") -> None:
    """Require that a prompt in chunks leaves the same layer states as a whole prompt.

    If KV is exact, the bits of the states must be equal.
    """
    backend = runner.backend
    for mixer in mixers_of(backend.drivers):
        refuse_chunks(mixer, runner.parts.like, exact=not backend.why_inexact)


def _tokens(model: nn.Module, runner: "TorchRunner") -> list[int]:
    """Return a seeded prompt and one more token. The prompt exceeds a sliding window if possible.

    The window comes from the config, not from the runner's parts, so the check finds a window that
    the parts lack.
    """
    window = getattr(base_model(model).config, "sliding_window", None)
    beyond = [window + BEYOND_WINDOW] if isinstance(window, int) else []
    kv = runner.backend.new_tables()
    room = kv.num_blocks // 2 * kv.block_size - 3  # room for two requests at once
    if room < 1:
        raise ConfigError(
            f"the start-up check needs 2 KV blocks of {kv.block_size} tokens, there are "
            f"{kv.num_blocks}; raise max_kv_tokens, or set conformance=False"
        )
    most = min(MAX_PROMPT, runner.shape.max_position - 2, room)
    if beyond and room < beyond[0] <= MAX_PROMPT:
        _log.warning(
            "the start-up check ends inside the sliding window of %d tokens: there is KV for %d",
            window,
            room,
        )
    length = max([n for n in (NUM_PROMPT, *beyond) if n <= most], default=most)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(runner.shape.vocab_size, (length + 1,), generator=generator).tolist()


@contextmanager
def _probing(model: nn.Module, runner: "TorchRunner") -> Iterator["_Probe"]:
    """Yield a probe of a runner, and restore the runner afterwards."""
    probe = _Probe(model, runner)
    before = runner.on_logits, runner.on_segment
    segments = runner.segments
    longest = segments.longest_ns, segments.longest_op
    runner.on_logits, runner.on_segment = probe.take, probe.passed
    try:
        yield probe
    finally:
        runner.on_logits, runner.on_segment = before
        segments.longest_ns, segments.longest_op = longest
        for program in probe.programs:
            runner.drop(program)
        for request_id in (_A, _B, _C):
            runner.remove(request_id)


@dataclass(slots=True, eq=False)
class _Walk:
    """A program that goes through the model layer by layer."""

    program: Program
    index: Index = START
    missing: Missing | None = None
    """Experts that the program waits for."""


class _Probe:
    """A probe that runs programs and compares their results."""

    def __init__(self, model: nn.Module, runner: "TorchRunner") -> None:
        self.model = model
        self.runner = runner
        self.programs: list[Program] = []
        self.logits: dict[tuple[RequestId, int], Tensor] = {}
        self._last: tuple[Program, Index] | None = None
        self._tables = runner.backend.new_tables()
        dtype = runner.parts.like.dtype
        self._unit, self._bound = unit(dtype), BOUND.get(dtype, 8.0)

    def take(self, request_id: RequestId, num_tokens: int, logits_V: Tensor) -> None:
        """Keep the logits after a request's first `num_tokens` tokens."""
        self.logits[request_id, num_tokens] = logits_V

    def passed(self, program: Program, index: Index, begin_ns: int, end_ns: int) -> None:
        """Store the last op for the error message."""
        self._last = program, index

    # -- against the model

    def follow(self, tokens: list[int], passes: list[Pass]) -> None:
        """Run the passes of the model, each layer on the model's own input, and compare."""
        self._add(_C, tokens, len(tokens) - 1)
        for (lo, hi), expected in zip(
            ((0, len(tokens) - 1), (len(tokens) - 1, len(tokens))), passes, strict=True
        ):
            program = self._begin(_C, lo, hi, Grain.EXPERT)
            index, op = self._run(program, START), START.op
            while index != program.end:
                if index.op != op:  # ranks also stop inside an op, and values would begin it again
                    self._meet(program, index, expected)
                op, index = index.op, self._run(program, index)
            self.runner.finish(program)
            assert expected.logits_V is not None
            spread = torch.tensor([expected.logits_spread], dtype=torch.float32)
            logits = self.logits[_C, hi]
            self._require(logits[None], expected.logits_V[None], spread, self._layer(None))

    def _meet(self, program: Program, index: Index, expected: Pass) -> None:
        """Compare the last output at a boundary, and continue there with the model's values."""
        op = program.ops[index.op]
        if index.pos or program.ops[index.op - 1].kind is op.kind:
            return
        before = program.ops[index.op - 1].kind
        if before is OpKind.ATTN:
            change = self._meet_attention
        elif op.kind is OpKind.EXPERTS:
            change = self._meet_routing
        elif op.kind in (OpKind.ATTN, OpKind.HEAD):
            change = self._meet_layer
        else:
            return
        tensors = self.runner.export_frame(program, index)
        change(tensors, op.layer, expected)
        self.runner.import_frame(program, index, tensors)

    def _meet_layer(self, tensors: dict[str, Tensor], layer: int, expected: Pass) -> None:
        """Compare the output of the previous layer, or of the embedding."""
        x_TD, num = tensors["x"], len(expected.layers)
        assert expected.embedded_TD is not None
        if layer == 0:
            spread_T = expected.embedded_TD.float().norm(dim=-1) * self._unit
            self._require(x_TD, expected.embedded_TD, spread_T, "the embedding")
        else:
            before = expected.layers[layer - 1]
            assert before.out_TD is not None
            assert before.spread_T is not None
            self._require(x_TD, before.out_TD, before.spread_T, self._layer(layer - 1))
        following = expected.last_TD if layer == num else expected.layers[layer].x_TD
        assert following is not None
        tensors["x"] = following.clone()

    def _meet_attention(self, tensors: dict[str, Tensor], layer: int, expected: Pass) -> None:
        """Compare after a layer's attention.

        `mid` is the attention's output, or its sum with the input.
        """
        seen, parts = expected.layers[layer], self.runner.parts.layers[layer]
        if len(parts.attentions) > 1 or parts.self_attn is None:
            return  # the output of the whole layer is compared later
        assert seen.attn_TD is not None
        assert seen.given_TD is not None
        assert seen.attn_spread_T is not None
        where, scale = f"the attention of {self._layer(layer)}", parts.residual_multiplier or 1.0
        drivers = self.runner.backend.drivers
        if isinstance(drivers[layer], HookedDriver | AroundDriver):
            self._require(tensors["mid"], seen.attn_TD, seen.attn_spread_T, where)
            tensors["mid"] = seen.given_TD.clone()
            return
        spread_T = scale * seen.attn_spread_T + seen.x_TD.float().norm(dim=-1) * self._unit
        self._require(tensors["mid"], seen.x_TD + seen.attn_TD * scale, spread_T, where)
        tensors["mid"] = seen.x_TD + seen.given_TD * scale

    def _meet_routing(self, tensors: dict[str, Tensor], layer: int, expected: Pass) -> None:
        """Compare the choice of a layer's router."""
        routing, experts_TK = expected.layers[layer].routing, expected.layers[layer].experts_TK
        where = f"the router of {self._layer(layer)}"
        if routing is None or experts_TK is None:
            raise ModelError(self._message(f"{where}, which model.forward does not run"))
        starts = sorted(int(n.split(".")[1]) for n in tensors if n.endswith(".ids") and n[0] == "r")
        ids, weights = (
            torch.cat([tensors[f"routed.{lo}.{name}"] for lo in starts])
            for name in ("ids", "weights")
        )
        if ids.shape != routing.ids_TK.shape:
            text = f"{where}: {ids.shape[1]} experts per token, not {routing.ids_TK.shape[1]}"
            raise ModelError(self._message(text))
        self._compare_routing(ids, weights, expected.layers[layer], where)
        for lo in starts:
            rows = slice(lo, lo + len(tensors[f"routed.{lo}.ids"]))
            for name, right in (("ids", experts_TK), ("weights", routing.weights_TK)):
                tensors[f"routed.{lo}.{name}"] = right[rows].to(tensors[f"routed.{lo}.{name}"])

    def _compare_routing(
        self, ids_TK: Tensor, weights_TK: Tensor, layer: LayerPass, where: str
    ) -> None:
        """Compare ids and weights.

        At a near tie either choice is right. Few tokens are at a near tie.
        """
        routing = layer.routing
        assert routing is not None
        ids, weights = by_expert(ids_TK, weights_TK)
        right_ids, right = by_expert(routing.ids_TK, routing.weights_TK)
        same = (ids == right_ids).all(-1)
        off = (weights - right).norm(dim=-1)
        allowed = self._bound * (routing.spread_T + right.norm(dim=-1) * self._unit)
        wrong = routing.clear_T & ~(same & (off <= allowed))
        if int(wrong.sum()) > max(1, len(wrong) // UNCLEAR):
            num = f"{int(wrong.sum())} of {len(wrong)}"
            text = f"{where}: other experts or weights for {num} tokens with a clear choice"
            raise ModelError(self._message(text))

    def _require(self, found: Tensor, expected: Tensor, spread_T: Tensor, where: str) -> None:
        """Require that rows [T, .] differ by at most what rounding explains."""
        error = (found.float() - expected.float()).norm(dim=-1)
        floor = expected.float().norm(dim=-1) * self._unit
        units = error / torch.maximum(spread_T.to(error), floor).clamp_min(1e-30)
        worst = float(units.max()) if bool(torch.isfinite(units).all()) else float("inf")
        if worst > self._bound:
            text = f"{where}: {worst:.3g} times what one rounding changes (at most {self._bound:g})"
            raise ModelError(self._message(text))

    # -- against itself

    def compare_parked(self, prompt: list[int]) -> None:
        """Run requests A and B as the module's docstring describes."""
        length = len(prompt)
        for request_id in (_A, _B):
            self._add(request_id, prompt, length)
        self._step(_A, 0, length)
        parked = self._begin(_B, 0, length, Grain.EXPERT)
        index, half = START, self.runner.shape.num_layers // 2
        while index != parked.end:
            index = self._run(parked, index, _Inside())
            inside = parked.inside_layer(index) and parked.layer_at(index) >= half
            if inside and (_A, length + 1) not in self.logits:
                self._step(_A, length, length + 1)
        self._end(parked)
        self._same(length, "a prefill that was parked at every boundary")
        if (_A, length + 1) not in self.logits:
            self._step(_A, length, length + 1)
        self._step(_B, length, length + 1, Grain.EXPERT)
        self._same(length + 1, "a decode step: one beside a parked request, one parked itself")

    def compare_by_layer(self, tokens: list[int], residency: Residency) -> None:
        """Run requests A and B layer by layer. Each expert is read at most once.

        Args:
            tokens: The prompt, and the token of the decode step.
            residency: Slots for experts, which lose all experts first.
        """
        length, grains = len(tokens) - 1, {_A: Grain.STEP, _B: Grain.EXPERT}
        for request_id in grains:
            self._add(request_id, tokens, length)
        first_a, first_b = (_Walk(self._begin(i, 0, length, grains[i])) for i in grains)
        for request_id in grains:  # a decode step follows its prefill through the layers
            self.runner.requests[request_id].kv.commit(length)
        next_a, next_b = (_Walk(self._begin(i, length, length + 1, grains[i])) for i in grains)
        residency.clear()  # a decode step with its experts in memory would overtake its prefill
        parked, residency.parks = residency.parks, True
        try:
            for walk in (first_a, first_b, next_a, next_b):
                self._go_on(walk)
            # while the decode step of A runs, the prefill of B is parked inside a layer
            while waiting := [w for w in (first_a, next_a, first_b, next_b) if w.missing]:
                layer, experts = _next_experts(waiting, (next_a, next_b))
                with layer.pinned(experts):  # as many as fit
                    for walk in waiting:
                        self._go_on(walk)
        finally:
            residency.parks = parked
        for walk in (first_a, first_b, next_a, next_b):
            self._end(walk.program)
        self._same(length, "a prefill that was parked at every boundary")
        self._same(length + 1, "a decode step: one beside a parked request, one parked itself")

    def _go_on(self, walk: _Walk) -> None:
        """Run a program until it misses experts, or to its end."""
        walk.missing, stop = None, _Inside()
        while walk.missing is None and walk.index != walk.program.end:
            walk.index = self._run(walk.program, walk.index, stop)
            walk.missing = self.runner.missing(walk.program)

    def _same(self, length: int, what: str) -> None:
        uncut, parked = self.logits[_A, length], self.logits[_B, length]
        if not torch.equal(uncut, parked):
            error = (uncut.float() - parked.float()).abs().max()
            raise ModelError(
                f"{self._family()}: the logits of {what} differ from those of an uncut pass "
                f"(largest difference {error:.3g}); {_REPORT}"
            )

    def _step(self, request_id: RequestId, lo: int, hi: int, grain: Grain = Grain.STEP) -> None:
        program, stop = self._begin(request_id, lo, hi, grain), _Inside()
        index = START
        while index != program.end:
            index = self._run(program, index, stop)
        self._end(program)

    def _end(self, program: Program) -> None:
        """Finish a program. Its token is the token with the largest logit."""
        sampled = self.runner.finish(program)
        row = program.rows[0]
        best = int(self.logits[row.request_id, row.hi].argmax())
        known = self.runner.token_ids(row.request_id)
        if [s.token_id for s in sampled] != [best] or known[-1] != best:
            raise ModelError(f"{self._family()} sampled {sampled}, not token {best}")

    # -- programs

    def _add(self, request_id: RequestId, tokens: list[int], num_prompt: int) -> None:
        greedy = SamplingParams(temperature=0)
        self.runner.add(request_id, tokens, greedy, num_prompt, num_prompt + 3)

    def _begin(self, request_id: RequestId, lo: int, hi: int, grain: Grain) -> Program:
        """Return a program of one pass over tokens [lo, hi)."""
        row = Row(request_id, lo, hi, 0, self.runner.shape.num_layers)
        program = compile_program(
            Plan(rows=(row,), grain=grain, stop_below=0),
            frame_id=-1 - len(self.programs),
            samples=[True],
            shape=self.runner.shape,
            cuts=self.runner.cuts,
        )
        self._last = None
        self.runner.accept(program, self._tables.cover(program.rows))
        self.programs.append(program)
        return program

    def _run(self, program: Program, start: Index, stop: Stop | None = None) -> Index:
        try:
            return self.runner.run(program, start, stop or _Always())
        except Exception as error:
            at = start.op
            if self._last is not None and self._last[0] is program:
                at = min(self._last[1].op + 1, len(program.ops) - 1)
            op = program.ops[at]
            raise ModelError(
                f"{self._family()} cannot be driven: {op.kind.name} of {self._layer(op.layer)} "
                f"raised {type(error).__name__}: {error}"
            ) from error

    # -- messages

    def _family(self) -> str:
        return f"model {base_model(self.model).config.model_type!r}"

    def _layer(self, layer: int | None) -> str:
        if layer is None or layer == self.runner.shape.num_layers:
            return "the output head"
        return f"layer {layer} (driver {self.runner.drivers[layer].value!r})"

    def _message(self, where: str) -> str:
        return (
            f"{self._family()}: the results differ from model.forward by more than rounding "
            f"explains; first different: {where}. {_REPORT}"
        )


def _next_experts(
    waiting: Sequence[_Walk], decodes: Collection[_Walk]
) -> tuple[LayerResidency, list[int]]:
    """Return the experts that the first program waits for, and others in its layer, too.

    Those of decode steps are last, so that a decode step leaves a layer when all others have.
    """
    first = waiting[0].missing
    assert first is not None
    wanted: dict[bool, dict[int, None]] = {False: {}, True: {}}
    for walk in waiting:
        if walk.missing is not None and walk.missing.residency is first.residency:
            wanted[walk in decodes].update(dict.fromkeys(walk.missing.experts))
    rest = [expert for expert in wanted[False] if expert not in wanted[True]]
    return first.residency, [*rest, *wanted[True]]


_REPORT = "Report the family, or set conformance=False to serve it all the same"
