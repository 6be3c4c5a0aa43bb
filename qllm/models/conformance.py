"""Start-up conformance: a runner against the model's own forward, bit by bit.

    A   prefill uncut        decode while B is parked inside a layer        decode
    B            prefill, parked at every boundary          decode, parked at every boundary

A and B have one prompt, so one pass of `model.forward` says what both must give. The model is put
to the implementations that a runner is equal to (experts: grouped_mm, attention: sdpa where the
family has it) while it runs, and back. A runner with kernels of its own is checked twice: with
transformers' modules bit by bit, and as it is for closeness.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qllm.compile import compile_program
from qllm.errors import ModelError
from qllm.models.discover import base_model
from qllm.models.loader import EXPERTS_IMPLEMENTATION
from qllm.plan import NO_STOP, START, Index, Plan, Program, Row
from qllm.types import Grain, RequestId, SamplingParams

if TYPE_CHECKING:
    from qllm.runner import TorchRunner

NUM_PROMPT = 12
NUM_DECODE = 2
CLOSE = {torch.float32: 1e-3}
"""Level L2 multiplies in other blocks than `model.forward`, and our kernels sum in another order:
close is enough, in units of the largest logit; 0.1 for 16-bit dtypes."""
_A, _B, _C = -1, -2, -3


class _Always:
    """Stops at every boundary."""

    word = NO_STOP
    stop_at_ns: int | None = None

    def now_ns(self) -> int:
        return 0


def check(model: nn.Module, runner: "TorchRunner") -> None:
    """Compare a runner without requests with the forward of its model.

    Raises:
        ModelError: They differ, or a layer cannot be driven; names family, layer and driver.
    """
    prompt, exact = _prompt(runner.shape.vocab_size), runner.compute.is_exact
    with torch.inference_mode(), _pinned(model):
        with runner.as_reference():
            expected = _reference(model, prompt)
            if not exact:
                with _probing(model, runner) as probe:
                    probe.compare(prompt, expected)
        with _probing(model, runner) as probe:
            probe.compare(prompt, expected)


def _prompt(vocab_size: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (NUM_PROMPT,), generator=generator).tolist()


@contextmanager
def _pinned(model: nn.Module) -> Iterator[None]:
    config = base_model(model).config
    before = config._attn_implementation, getattr(config, "_experts_implementation", None)
    try:
        config._attn_implementation = "sdpa" if getattr(model, "_supports_sdpa", 1) else "eager"
        if before[1] is not None:
            config._experts_implementation = EXPERTS_IMPLEMENTATION
        yield
    finally:
        config._attn_implementation = before[0]
        if before[1] is not None:
            config._experts_implementation = before[1]


def _reference(model: nn.Module, prompt: list[int]) -> list[Tensor]:
    """Logits [V] after the prompt and after each greedily decoded token."""
    device = next(model.parameters()).device
    ids, cache = torch.tensor([prompt], device=device), None
    # As `generate` does: the rows of a product may depend on how many there are.
    last = "logits_to_keep" in inspect.signature(model.forward).parameters
    only: dict[str, Any] = {"logits_to_keep": 1} if last else {}
    out = []
    for _ in range(NUM_DECODE + 1):
        result: Any = model(input_ids=ids, past_key_values=cache, use_cache=True, **only)
        cache = result.past_key_values
        out.append(result.logits[0, -1])
        ids = out[-1].argmax().view(1, 1)
    return out


@contextmanager
def _probing(model: nn.Module, runner: "TorchRunner") -> Iterator["_Probe"]:
    """A probe; afterwards the runner is as it was."""
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


class _Probe:
    """Runs programs and compares what they give."""

    def __init__(self, model: nn.Module, runner: "TorchRunner") -> None:
        self.model = model
        self.runner = runner
        self.programs: list[Program] = []
        self.logits: dict[tuple[RequestId, int], Tensor] = {}
        self._last: tuple[Program, Index] | None = None
        self._exact = runner.compute.is_exact
        self._prompt: list[int] = []
        self._expected: list[Tensor] = []
        self._same_tokens = True

    def take(self, request_id: RequestId, num_tokens: int, logits_V: Tensor) -> None:
        """Keep the logits after a request's first `num_tokens` tokens."""
        self.logits[request_id, num_tokens] = logits_V

    def passed(self, program: Program, index: Index, begin_ns: int, end_ns: int) -> None:
        """Remember what ran last, to say what failed."""
        self._last = program, index

    def compare(self, prompt: list[int], expected: list[Tensor]) -> None:
        """Run A and B as the module says."""
        self._prompt, self._expected = prompt, expected
        for request_id in (_A, _B):
            self._add(request_id)
        self._step(_A, 0, "an uncut prefill")
        parked = self._begin(_B, 0, Grain.EXPERT)
        index, half = START, self.runner.shape.num_layers // 2
        while index != parked.end:
            index = self._run(parked, index)
            inside = parked.inside_layer(index) and parked.layer_at(index) >= half
            if inside and (_A, NUM_PROMPT + 1) not in self.logits:
                self._step(_A, 1, "a decode step while another request was parked")
        self._end(parked, "a prefill that was parked at every boundary")
        self._step(_A, 2, "a decode step")
        self._step(_B, 1, "a decode step that was parked at every boundary", Grain.EXPERT)

    def _add(self, request_id: RequestId) -> None:
        greedy = SamplingParams(temperature=0)
        most = NUM_PROMPT + NUM_DECODE + 2
        self.runner.add(request_id, self._prompt, greedy, NUM_PROMPT, most)

    def _begin(self, request_id: RequestId, num_done: int, grain: Grain) -> Program:
        """A program of one pass: the prompt, or decoded token number `num_done`."""
        hi = NUM_PROMPT + num_done
        row = Row(request_id, hi - 1 if num_done else 0, hi, 0, self.runner.shape.num_layers)
        program = compile_program(
            Plan(rows=(row,), grain=grain, stop_below=0),
            frame_id=-1 - len(self.programs),
            samples=[True],
            shape=self.runner.shape,
            cuts=self.runner.cuts,
        )
        self._last = None
        self.runner.accept(program)
        self.programs.append(program)
        return program

    def _run(self, program: Program, start: Index) -> Index:
        try:
            return self.runner.run(program, start, _Always())
        except Exception as error:
            at = start.op
            if self._last is not None and self._last[0] is program:
                at = min(self._last[1].op + 1, len(program.ops) - 1)
            op = program.ops[at]
            raise ModelError(
                f"{self._family()} cannot be driven: {op.kind.name} of {self._layer(op.layer)} "
                f"raised {type(error).__name__}: {error}"
            ) from error

    def _end(self, program: Program, what: str) -> None:
        """Finish a program and compare the logits it gave."""
        sampled = self.runner.finish(program)
        row = program.rows[0]
        expected = self._expected[row.hi - NUM_PROMPT]
        found = self.logits.get((row.request_id, row.hi))
        if not self._same_tokens:
            return  # close logits, another token
        if found is None or not self._agree(found, expected):
            raise ModelError(self._message(what, found, expected))
        token = int(expected.argmax())
        if [s.token_id for s in sampled] != [token]:
            if self._exact:
                raise ModelError(
                    f"{self._family()} sampled {sampled}, not token {token}, in {what}"
                )
            self._same_tokens = False

    def _step(
        self, request_id: RequestId, num_done: int, what: str, grain: Grain = Grain.STEP
    ) -> None:
        program = self._begin(request_id, num_done, grain)
        index = START
        while index != program.end:
            index = self._run(program, index)
        self._end(program, what)

    def _agree(self, found: Tensor, expected: Tensor) -> bool:
        if self._exact:
            return torch.equal(found, expected)
        error = (found.float() - expected.float()).abs().max()
        return bool(error <= CLOSE.get(expected.dtype, 0.1) * expected.float().abs().max())

    def _family(self) -> str:
        return f"model {base_model(self.model).config.model_type!r}"

    def _layer(self, layer: int) -> str:
        if layer == self.runner.shape.num_layers:
            return "the output head"
        return f"layer {layer} (driver {self.runner.drivers[layer].value!r})"

    def _message(self, what: str, found: Tensor | None, expected: Tensor) -> str:
        error = "none" if found is None else f"{(found.float() - expected.float()).abs().max():.3g}"
        return (
            f"{self._family()}: the logits of {what} differ from model.forward (largest "
            f"difference {error}); {self._first_difference()}. Report the family, or set "
            "conformance=False to serve it all the same"
        )

    def _first_difference(self) -> str:
        """Run the prompt once more, layer by layer, beside the model's own layers."""
        outs: list[Tensor] = []

        def keep(_: nn.Module, __: object, out: Any) -> None:
            outs.append((out[0] if isinstance(out, tuple) else out)[0])

        hooks = [p.layer.register_forward_hook(keep) for p in self.runner.parts.layers]
        try:
            with self.runner.as_reference():
                _reference(self.model, self._prompt)
        finally:
            for hook in hooks:
                hook.remove()
        self._add(_C)
        program = self._begin(_C, 0, Grain.LAYER)
        index = self._run(program, START)
        for layer, out in enumerate(outs[: self.runner.shape.num_layers]):
            while program.layer_at(index) <= layer:
                index = self._run(program, index)
            x_TD = self.runner.export_frame(program, index).get("x")
            if x_TD is None or not self._agree(x_TD, out):
                return f"first different: {self._layer(layer)}"
        while index != program.end:
            index = self._run(program, index)
        found = self.logits.get((_C, NUM_PROMPT))
        if found is None or not self._agree(found, self._expected[0]):
            return f"first different: {self._layer(self.runner.shape.num_layers)}"
        return "a prefill stopped between layers agrees"
