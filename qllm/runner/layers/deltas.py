"""Gated DeltaNet with this project's kernel instead of the module's forward.

One call runs all requests of a step. The states are in the tensors of `RecurrentMixer`. A token's
bits depend neither on the cuts of its prompt nor on the other rows.

    begin   return the states that an op reads, and those that it writes: `Carried`
    put     store the written states when the op is done; an op without `put` restarts
"""

from collections.abc import Sequence
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qllm.errors import InvariantError
from qllm.kernels import cpu
from qllm.kernels.cpu import is_usable
from qllm.kernels.cpu.deltas import HEAD_MULTIPLE, DeltaNet, DeltaSpan, DeltaSpans, DeltaState
from qllm.kernels.cpu.norms import Norm
from qllm.kernels.cpu.quantised import matrix_of
from qllm.kernels.quantised import Quantised
from qllm.models.arguments import cache_argument
from qllm.models.discover import LayerParts
from qllm.models.heard import is_heard
from qllm.models.parts.known import delta_linears, delta_net
from qllm.models.weights.quantised_linears import is_read, weight_of
from qllm.runner.layers.attention import Span, Step
from qllm.runner.states import NewState, tensors_of


def is_delta_net(parts: LayerParts) -> bool:
    """Return True if the module with a layer's state is a known Gated DeltaNet."""
    attn, new_state = parts.self_attn, parts.new_state
    return (
        attn is not None and new_state is not None and delta_net(attn, new_state).kind is not None
    )


def delta_mixer(parts: LayerParts, arena: cpu.Arena | None) -> "DeltaMixer | None":
    """Return the mixer of a layer with a Gated DeltaNet that kernels can run; else None.

    Args:
        parts: Parts of the layer.
        arena: Allocator of packed weights; None uses no kernels.
    """
    attn: Any = parts.self_attn
    if arena is None or not is_delta_net(parts):
        return None
    if is_heard(attn):
        return None  # the module computes instead, so that its hooks run
    widths = (attn.head_k_dim, attn.head_v_dim)
    are_read = all(map(is_usable, (attn.conv1d.weight[:, 0], attn.norm.weight)))
    are_read = are_read and all(map(is_read, delta_linears(attn)))
    if not are_read or any(width % HEAD_MULTIPLE for width in widths):
        return None
    assert parts.new_state is not None
    return DeltaMixer(attn, parts.new_state, arena)


class DeltaMixer:
    """The Gated DeltaNet of one layer, run over the spans of a step.

    Args:
        module: Module of the model, a known Gated DeltaNet.
        new_state: Function that makes a state of this layer.
        arena: Allocator of packed weights.
    """

    def __init__(self, module: Any, new_state: NewState, arena: cpu.Arena) -> None:
        self._new_state, self.index = new_state, module.layer_idx
        self.name, self.cache_name = type(module).__name__, cache_argument(module)
        self.covered = (*delta_linears(module), module.conv1d)
        """Modules of the model that are never called."""
        self.kernel = DeltaNet(
            matrix_of(_rows_of(module), arena=arena),
            matrix_of([weight_of(module.out_proj)], arena=arena),
            module.conv1d.weight[:, 0],
            -module.A_log.detach().float().exp(),
            module.dt_bias,
            Norm(module.norm.weight, module.norm.variance_epsilon),
            k_heads=module.num_k_heads,
            key=module.head_k_dim,
        )

    forward = None
    """Always None, because the module's forward is never called."""

    def __call__(self, forward: object = None, *args: Any, **given: Any) -> Tensor:
        """Compute the output of the module's forward; the cache argument is a `Step`.

        Args:
            forward: Forward of the module, which is not called.
            args: Input x, [1, T, D], first or by name.
            given: Other keyword arguments.
        """
        x_1TD = args[0] if args else given["hidden_states"]
        step: Step = given[self.cache_name]
        carried = self.begin(step.spans)
        out_TD = self.kernel(x_1TD[0], carried.spans, step.num_attended)
        carried.put()
        step.reach()
        return out_TD.unsqueeze(0)

    def begin(self, spans: Sequence[Span]) -> "Carried":
        """Return the states of an op over spans. The op writes none of the states that it reads."""
        return Carried(self.index, [self._pieces(row) for row in _of_requests(spans)])

    def _pieces(self, span: Span) -> list["Piece"]:
        """Return a span in pieces that end where the span leaves a state."""
        kv, at, first, last = span
        states, found = kv.states, list[Piece]()
        before, after = states.advance(self.index, first, kv.committed, self._state)
        width, begin = self.kernel.into.num_out, kv.committed
        inputs = states.inputs(self.index, begin, width, self._rerun)
        for lo, hi in pairwise(states.stops(first, last)):
            if found:
                before, after = after, self._state()
            kept = None if inputs is None else inputs[lo - begin : hi - begin]
            found.append(Piece(kv, before, after, at + lo - first, lo, hi, kept))
        return found

    def _rerun(self, before: Any, inputs_TW: Tensor, after: Any) -> None:
        self.kernel.carry(_inside(before), inputs_TW, _inside(after))

    def _state(self) -> Any:
        """Return a state of transformers with tensors that the kernel writes."""
        state, tensors = self._new_state(), self.kernel.new_state()
        state.lazy_initialization(
            conv_states=tensors.conv.unsqueeze(0), recurrent_states=tensors.heads.unsqueeze(0)
        )
        state.has_previous_state[0] = True
        return state


class Piece(NamedTuple):
    """Tokens [lo, hi) of one request, at [at, at + hi - lo) of the op, and their states."""

    kv: Any
    before: Any | None
    after: Any
    at: int
    lo: int
    hi: int
    inputs: Tensor | None

    @property
    def span(self) -> DeltaSpan:
        """The piece in the layout that the kernel reads."""
        before = None if self.before is None else _inside(self.before)
        num = self.hi - self.lo
        return DeltaSpan(before, _inside(self.after), self.at, num, self.inputs)


class Carried:
    """The states that one op of a layer reads and writes. A frame parked inside the op keeps them.

    Args:
        layer: Index of the layer.
        rows: Pieces of each request, in order.
    """

    def __init__(self, layer: int, rows: Sequence[Sequence[Piece]]) -> None:
        self._layer, self._pieces = layer, [piece for row in rows for piece in row]
        rounds = [[p.span for p in some if p is not None] for some in zip_longest(*rows)]
        self.spans = DeltaSpans(rounds)
        """Spans that run at once. The pieces of one request run one after the other."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the states that are not stored yet. Callable from any thread."""
        return sum(t.nbytes for p in self._pieces for t in tensors_of(p.after).values())

    def put(self) -> None:
        """Store the states that the op wrote."""
        for kv, _, after, _, _, hi, _ in self._pieces:
            kv.states.put(self._layer, hi, after, kv.committed)


def _inside(state: Any) -> DeltaState:
    return DeltaState(state.conv_states[0][0], state.recurrent_states[0][0])


def _of_requests(spans: Sequence[Span]) -> list[Span]:
    """Return one span per request. The spans of one request must be adjacent."""
    found: list[Span] = []
    for span in spans:
        last = found[-1] if found else None
        if last is None or last.kv is not span.kv:
            found.append(span)
        elif (last.hi, last.at + last.hi - last.lo) == (span.lo, span.at):
            found[-1] = last._replace(hi=span.hi)
        else:
            raise InvariantError(f"tokens {span.lo} to {span.hi} do not follow {last.hi} (I9)")
    return found


def _rows_of(module: Any) -> list[Tensor | Quantised]:
    """Return all projections of the input, in the order of stacking: q, k, v, z, b, a."""
    if not hasattr(module, "in_proj_qkvz"):
        return [weight_of(getattr(module, f"in_proj_{x}")) for x in ("qkv", "z", "b", "a")]
    heads, key = module.num_k_heads, module.head_k_dim
    share = module.num_v_heads // heads
    widths = (key, key, share * module.head_v_dim, share * module.head_v_dim)
    found: list[Tensor | Quantised] = []
    for name, sizes in (("qkvz", widths), ("ba", (share, share))):
        weight = weight_of(getattr(module, f"in_proj_{name}"))
        order = torch.split(torch.arange(weight.shape[0]).reshape(heads, -1), list(sizes), 1)
        rows = torch.cat([part.flatten() for part in order])
        found.append(weight.rows(rows) if isinstance(weight, Quantised) else weight[rows])
    return found
