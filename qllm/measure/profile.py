"""A profile of a model: at which layer does a token's answer no longer change?

A text runs through the engine's own runner, layer by layer. At each boundary between two layers the
residual stream goes through the model's last norm and head. This early answer is compared with the
answer of the whole model at the same position. The time of a step is measured in the same run. Both
together predict the speed-up of the drafter `exit:E`, which drafts with the first E layers.

    layers   1  2  3  4  ...  L   head -> answer
                   |
                   E  --------->  head -> early answer: the same token?
"""

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qllm.config import EngineConfig
from qllm.engine.build import make_runner, naming_family, torch_threads
from qllm.engine.needs import why_no_drafts
from qllm.engine.sizes import with_usual_sizes
from qllm.errors import InvariantError, ModelError
from qllm.ingress.inproc import StopWord
from qllm.measure.profile_texts import ALL, LEAST_TOKENS, require_tokens
from qllm.models.loader import LoadedModel
from qllm.plan import ANY_ARRIVAL, NO_STOP, Plan, Row
from qllm.runner.conformance import check as check_conformance
from qllm.runner.inference import inference
from qllm.runner.runner import TorchRunner
from qllm.scheduler.compile import compile_program
from qllm.scheduler.drafts import LEAST_GAIN
from qllm.scheduler.program import START, Program
from qllm.types import NS_PER_MS, FrameId, Grain, RequestId, SamplingParams

DRAFTS = (1, 2, 4, 8)
"""Numbers of drafted tokens for which a speed-up is predicted."""
CONFIDENT = 0.9
"""Probability of the early answer from which a position is called confident."""
WINDOW = 512
"""Most tokens that run together. A longer text is cut, and each part starts without the others."""
CONTEXT = 256
"""Most tokens before the steps whose time is measured."""
ROUNDS = 7
"""Number of measured steps of each width. Their median counts."""
_GREEDY = SamplingParams(temperature=0, seed=0)
_REQUEST, _FRAME = RequestId(0), FrameId(1)


class EarlyExit(NamedTuple):
    """The early answers after one layer, on one kind of text."""

    text: str
    """Name of the kind of text."""
    layer: int
    """Number of layers that ran, E."""
    num_tokens: int
    """Number of positions."""
    agreement: float
    """Part of the positions at which the early answer is the answer of the whole model."""
    confidence: float
    """Mean probability of the early answer."""
    confident: float
    """Part of the positions at which this probability is at least `CONFIDENT`."""
    confident_agreement: float | None
    """Agreement at the confident positions; None if there is none."""


class StepTime(NamedTuple):
    """The times of a step of one row, in nanoseconds."""

    begin_ns: float
    """Time of the start: compile, accept and embed the row."""
    layers_ns: tuple[float, ...]
    head_ns: float
    """Time of the last norm, the head and the choice of tokens."""

    @property
    def whole_ns(self) -> float:
        """Return the time of the whole step."""
        return self.begin_ns + sum(self.layers_ns) + self.head_ns

    def between_ns(self, start: int, end: int) -> float:
        """Return the time of a pass through the layers [start, end), without the head."""
        return self.begin_ns + sum(self.layers_ns[start:end])


class Prediction(NamedTuple):
    """The predicted speed-up of drafts that leave the model early."""

    layer: int
    draft_tokens: int
    speedup: float
    """Tokens per time, relative to steps without drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The early answers of a model on some texts, and what drafts of them would gain."""

    model: str
    num_layers: int
    num_tokens: dict[str, int]
    """Number of positions per kind of text."""
    exits: tuple[EarlyExit, ...]
    """Per kind of text, the early answers after layers 1 to L - 1."""
    times: dict[int, StepTime]
    """Time of a step of one row, by the number of the row's tokens. If drafts are refused, there is
    only a step of one token."""
    context: int
    """Number of tokens before the measured steps."""
    refused: str
    """Reason why an engine refuses drafts with this model here; "" if it takes them."""

    def predictions(self, text: str) -> list[Prediction]:
        """Return the predicted speed-ups on a kind of text, for all layers and numbers of drafts.

        There are none if an engine refuses drafts with this model.

        Args:
            text: Name of the kind, or `ALL`.
        """
        return [
            Prediction(e.layer, d, speedup(e.agreement, e.layer, d, self.times))
            for e in self.of(text)
            for d in DRAFTS
            if not self.refused
        ]

    def of(self, text: str) -> list[EarlyExit]:
        """Return the early answers on a kind of text, or on `ALL` texts, by layer."""
        if text != ALL:
            return [e for e in self.exits if e.text == text]
        layers = range(1, self.num_layers)
        return [_together([e for e in self.exits if e.layer == layer]) for layer in layers]

    @property
    def best(self) -> Prediction | None:
        """Return the prediction with the largest speed-up on all texts, also one that loses.

        It is None if an engine refuses drafts.
        """
        return max(self.predictions(ALL), key=lambda p: p.speedup, default=None)

    @property
    def proposal(self) -> Prediction | None:
        """Return the best layer and number of drafts; None if drafts gain too little."""
        best = self.best
        return best if best is not None and best.speedup >= LEAST_GAIN else None

    @property
    def why_none(self) -> str:
        """Return why no layer is proposed; "" if one is."""
        best = self.best
        if best is None:
            return f"drafts are refused with this model here: {self.refused}"
        if best.speedup >= LEAST_GAIN:
            return ""
        layer, drafts = best.layer, best.draft_tokens
        found = next(e.agreement for e in self.of(ALL) if e.layer == layer)
        told = (
            f"the best, exit:{layer} with draft_tokens={drafts}, would give {best.speedup:.2f} "
            f"times the tokens per second, and {LEAST_GAIN:g} is the least that pays"
        )
        ceiling = max(
            speedup(1.0, e, d, self.times) for e in range(1, self.num_layers) for d in DRAFTS
        )
        if ceiling < LEAST_GAIN:
            return (
                f"{told}; even if every draft were right, no layer would give more than "
                f"{ceiling:.2f}: passes through the first layers and the head take too long"
            )
        return f"{told}; its answers agree at {found:.0%} of the positions, which is too few"

    def document(self) -> dict[str, Any]:
        """Return the profile as the content of `profile.json`."""
        return {
            "model": self.model,
            "num_layers": self.num_layers,
            "num_tokens": self.num_tokens,
            "confident_from": CONFIDENT,
            "exits": [e._asdict() for e in self.exits],
            "steps": {
                "context": self.context,
                "by_width": {
                    str(width): {
                        "begin_ms": t.begin_ns / NS_PER_MS,
                        "layers_ms": [ns / NS_PER_MS for ns in t.layers_ns],
                        "head_ms": t.head_ns / NS_PER_MS,
                    }
                    for width, t in self.times.items()
                },
            },
            "speedups": {
                text: [p._asdict() for p in self.predictions(text)]
                for text in (*self.num_tokens, ALL)
            },
            "least_gain": LEAST_GAIN,
            "proposal": None if self.proposal is None else self.proposal._asdict(),
            "why_none": self.why_none,
        }


def speedup(agreement: float, layer: int, num_drafts: int, times: Mapping[int, StepTime]) -> float:
    """Return the predicted tokens per time with drafts of `exit:layer`, over those without.

    A row of d drafts gives 1 + a + a^2 + ... + a^d tokens, if each draft is right with probability
    a. It costs d + 1 passes of one token through the first layers, d heads, and one pass of d + 1
    tokens through the other layers and the head.

    Args:
        agreement: Probability a, in [0, 1].
        layer: Number of first layers, E.
        num_drafts: Number of drafted tokens, d.
        times: Times of steps of 1 and d + 1 tokens.
    """
    one, row = times[1], times[num_drafts + 1]
    tokens = sum(agreement**k for k in range(num_drafts + 1))
    drafting_ns = (num_drafts + 1) * one.between_ns(0, layer) + num_drafts * one.head_ns
    verify_ns = row.between_ns(layer, len(row.layers_ns)) + row.head_ns
    return tokens * one.whole_ns / (drafting_ns + verify_ns)


def profile(
    loaded: LoadedModel,
    kinds: Mapping[str, Sequence[int]],
    config: EngineConfig,
    *,
    prefix: Sequence[int] = (),
    threads: int | None = None,
) -> Profile:
    """Measure where the answers of a model could leave it early. Runs on the CPU.

    Args:
        loaded: The model. Its weights are packed for our kernels and given back at the end.
        kinds: Token ids of each kind of text.
        config: Settings of the engine that would serve it.
        prefix: Tokens before each part of a text. They are not counted.
        threads: Number of threads; None is torch's number.

    Raises:
        ConfigError: A text is too short, or a setting does not fit this model.
        ModelError: The model cannot be driven safely, has one layer, or its answers are not finite.
    """
    for name, ids in kinds.items():
        require_tokens(name, ids)
    with probing(loaded, config, prefix, threads) as probe:
        runner = probe.runner
        exits = [e for name, ids in kinds.items() for e in probe.exits(name, ids)]
        refused = why_no_drafts(runner, by_rows=True)
        context, times = probe.times(next(iter(kinds.values())), () if refused else DRAFTS)
        return Profile(
            model=loaded.name,
            num_layers=runner.shape.num_layers,
            num_tokens={name: len(ids) for name, ids in kinds.items()},
            exits=tuple(exits),
            times=times,
            context=context,
            refused=refused,
        )


@contextmanager
def probing(
    loaded: LoadedModel, config: EngineConfig, prefix: Sequence[int], threads: int | None
) -> Iterator["Probe"]:
    """Make a runner of a model, check it, and give the model's weights back after the block.

    Args:
        loaded: The model.
        config: Settings of the engine that would serve it.
        prefix: Tokens before each part of a text.
        threads: Number of threads; None is torch's number.

    Raises:
        ConfigError: A setting does not fit this model.
        ModelError: The model cannot be driven safely, or has one layer.
    """
    with torch_threads(threads), ExitStack() as opened:
        with naming_family(loaded.model, "finding its parts"):
            runner = make_runner(loaded.model, with_usual_sizes(config))
        opened.callback(runner.close)
        if config.conformance:
            with naming_family(loaded.model, "the start-up check"):
                check_conformance(loaded.model, runner)
        opened.enter_context(torch_threads(1 if runner.backend.is_native else threads))
        opened.enter_context(inference())
        opened.enter_context(naming_family(loaded.model, "running a text"))
        yield Probe(loaded.name, runner, prefix)


class _Sums:
    """Sums over positions, per layer."""

    def __init__(self, num_layers: int) -> None:
        self.agreed = [0] * num_layers
        self.confidence = [0.0] * num_layers
        self.confident = [0] * num_layers
        self.confident_agreed = [0] * num_layers


class Probe:
    """A runner without requests, of which single rows are run.

    Args:
        name: Name of the model, for messages.
        runner: The runner.
        prefix: Tokens before each part of a text.
    """

    def __init__(self, name: str, runner: TorchRunner, prefix: Sequence[int]) -> None:
        self._name, self.runner, self._prefix = name, runner, list(prefix)
        self._window = min(WINDOW, runner.shape.max_position) - len(self._prefix)
        self._num_layers = runner.shape.num_layers
        if self._num_layers < 2:
            raise ModelError(
                f"model {name!r} has {self._num_layers} layer; an early exit needs 2 or more"
            )
        if self._window < LEAST_TOKENS:
            raise ModelError(
                f"model {name!r} takes sequences of at most {runner.shape.max_position} tokens; a "
                f"profile needs {LEAST_TOKENS} and {len(self._prefix)} before them"
            )

    def exits(self, text: str, ids: Sequence[int]) -> list[EarlyExit]:
        """Return the early answers on a text after layers 1 to L - 1."""
        sums = _Sums(self._num_layers)
        for *early, (answers_T, _) in self.answers(ids):
            for layer, (early_T, confidence_T) in enumerate(early, 1):
                agreed_T, confident_T = early_T == answers_T, confidence_T >= CONFIDENT
                sums.agreed[layer] += int(agreed_T.sum())
                sums.confidence[layer] += float(confidence_T.sum())
                sums.confident[layer] += int(confident_T.sum())
                sums.confident_agreed[layer] += int((agreed_T & confident_T).sum())
        return [
            EarlyExit(
                text,
                layer,
                len(ids),
                sums.agreed[layer] / len(ids),
                sums.confidence[layer] / len(ids),
                (num := sums.confident[layer]) / len(ids),
                sums.confident_agreed[layer] / num if num else None,
            )
            for layer in range(1, self._num_layers)
        ]

    def answers(self, ids: Sequence[int]) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Run a text in parts. Yield the answers and their confidence [T] after each layer.

        The last layer's answers are those of the whole model.
        """
        for begin in range(0, len(ids), self._window):
            yield self._of_part(ids[begin : begin + self._window])

    def _of_part(self, ids: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Run a part of a text, and return the answers after each of its layers."""
        whole, counted = [*self._prefix, *ids], len(self._prefix)
        self.runner.add(_REQUEST, whole, _GREEDY, len(whole), len(whole) + 1)
        try:
            program = self._accepted(0, len(whole), 0)
            early: list[tuple[Tensor, Tensor]] = []
            stop, at = _stop_at_once(), START
            while at != program.end:
                at = self.runner.run(program, at, stop)
                if layer := program.layer_at(at):
                    x_TD = self.runner.frames[_FRAME].activate(0)[counted:]
                    early.append(self._answers(x_TD, layer))
            self.runner.drop(program)
        finally:
            self.runner.remove(_REQUEST)
        if len(early) != self._num_layers:
            raise InvariantError(f"{len(early)} stops in {self._num_layers} layers")
        return early

    def _answers(self, x_TD: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Return the token of the largest logit at each position, and its probability."""
        head, rule = self.runner.backend.compute.head, self.runner.parts.logit_rule
        x_TD = head.norm(x_TD)
        num = x_TD.shape[0]
        peak_T = torch.full((num,), -math.inf, dtype=torch.float32)
        sum_T = peak_T.clone()
        best_T = torch.zeros(num, dtype=torch.int64)
        for block in range(head.num_blocks):
            logits_TV = head(x_TD, block)
            logits_TV = (logits_TV if rule is None else rule(logits_TV)).float()
            block_T, at_T = logits_TV.max(1)
            wins_T = block_T > peak_T
            best_T[wins_T] = at_T[wins_T] + block * head.block_size
            peak_T = torch.maximum(peak_T, block_T)
            sum_T = torch.logaddexp(sum_T, logits_TV.logsumexp(1))
        if not bool(torch.isfinite(sum_T).all()):
            raise ModelError(
                f"model {self._name!r}: the logits after layer {layer} are not finite numbers, so "
                "there is no answer to compare; load it with --dtype float32 or bfloat16"
            )
        return best_T, (peak_T - sum_T).exp()

    def times(
        self, ids: Sequence[int], num_drafts: Sequence[int]
    ) -> tuple[int, dict[int, StepTime]]:
        """Measure a step without drafts and steps that verify drafts, after a part of a text.

        Args:
            ids: Tokens of the text.
            num_drafts: Numbers of drafts.

        Returns:
            The number of tokens before the steps, and the times of a step by its number of tokens.
        """
        widths = (1, *(d + 1 for d in num_drafts))
        given = [*self._prefix, *ids][: CONTEXT + widths[-1]]
        context = len(given) - widths[-1]
        known, drafts = given[: context + 1], given[context + 1 :]
        self.runner.add(_REQUEST, known, _GREEDY, len(known), len(given) + 1)
        try:
            program = self._accepted(0, context, 0)
            self.runner.run(program, START, StopWord(time.perf_counter_ns))
            self.runner.finish(program)
            rounds: dict[int, list[tuple[int, list[int]]]] = {width: [] for width in widths}
            for _ in range(ROUNDS + 1):
                for width in widths:  # in turn, so that a busy moment meets all of them
                    self.runner.draft(_REQUEST, drafts[: width - 1])
                    rounds[width].append(self._measured(context, context + width))
        finally:
            self.runner.remove(_REQUEST)
        return context, {width: step_time(found[1:]) for width, found in rounds.items()}

    def _measured(self, lo: int, hi: int) -> tuple[int, list[int]]:
        """Run a row at once, and again layer by layer.

        Returns:
            The time of the first run, and the times of the second: the start, the layers, the head.
        """
        begin_ns = time.perf_counter_ns()
        program = self._accepted(lo, hi, hi - lo)
        self.runner.run(program, START, StopWord(time.perf_counter_ns))
        whole_ns = time.perf_counter_ns() - begin_ns
        self.runner.drop(program)
        parts = [0] * (self._num_layers + 2)
        begin_ns, part, stop, at = time.perf_counter_ns(), 0, _stop_at_once(), START
        program = self._accepted(lo, hi, hi - lo)
        while at != program.end:
            at = self.runner.run(program, at, stop)
            end_ns = time.perf_counter_ns()
            parts[part] += end_ns - begin_ns
            begin_ns, part = end_ns, program.layer_at(at) + 1
        self.runner.drop(program)
        return whole_ns, parts

    def _accepted(self, lo: int, hi: int, num_samples: int) -> Program:
        """Return a program of one row whose frame the runner has made."""
        runner = self.runner
        row = Row(_REQUEST, lo, hi, 0, self._num_layers)
        program = compile_program(
            Plan(rows=(row,), grain=Grain.LAYER, stop_below=ANY_ARRIVAL),
            frame_id=_FRAME,
            samples=[num_samples],
            shape=runner.shape,
            cuts=runner.cuts,
        )
        runner.accept(program)
        return program


def step_time(rounds: Sequence[tuple[int, Sequence[int]]]) -> StepTime:
    """Return the times of a step from measured rounds.

    A stop after each layer costs time. So the parts only divide the time of the step that ran at
    once.

    Args:
        rounds: Per round, the time of the step at once, and the times of its parts: the start, the
            layers and the head.
    """
    whole_ns = statistics.median(whole for whole, _ in rounds)
    parts = [statistics.median(part) for part in zip(*(p for _, p in rounds), strict=True)]
    scale = whole_ns / sum(parts)
    begin, *layers, head = (part * scale for part in parts)
    return StepTime(begin, tuple(layers), head)


def _stop_at_once() -> StopWord:
    """Return a stop that is due at every boundary."""
    stop = StopWord(time.perf_counter_ns)
    stop.lower(NO_STOP)
    return stop


def _together(exits: Sequence[EarlyExit]) -> EarlyExit:
    """Return the early answers after one layer on all texts together."""
    total = sum(e.num_tokens for e in exits)
    confident = sum(e.num_tokens * e.confident for e in exits)
    agreed = sum(e.num_tokens * e.confident * (e.confident_agreement or 0.0) for e in exits)
    return EarlyExit(
        ALL,
        exits[0].layer,
        total,
        sum(e.num_tokens * e.agreement for e in exits) / total,
        sum(e.num_tokens * e.confidence for e in exits) / total,
        confident / total,
        agreed / confident if confident else None,
    )
