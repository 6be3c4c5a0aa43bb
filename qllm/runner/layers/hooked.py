"""Hooked layers: drivers of layers of unknown structure, by hooks on the unmodified layer.

A layer is called three times over the same rows. During a call, stubs replace submodules of this
instance. A stub returns an earlier result or unwinds the call:

    attend    layer(x): norm, attention: unwind                          -> attention's output
    route     layer(x): norm, [attention], add, norm, shared, router, experts: unwind
                                          -> input, ids and weights of the experts; shared outputs
    combine   layer(x): norm, [attention], add, norm, [shared], router, [experts], add  -> new x

[...] is a stored result. The experts run outside, between the last two calls. Norms, adds and the
router run again on the same rows, so the bits are equal to those of one plain call. A dense layer
has no `route`, and `combine` runs its MLP. A `HookedLayer` stores no data of a request. The results
of a call are tensors in the frame, so the next call may have the rows of another frame.
"""

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from qllm.errors import ModelError
from qllm.models.replaced import Stub, Unwind, replaced

RouterExtras = Tensor | tuple[Tensor | None, ...]
Beside = Mapping[int, Tensor]
"""Tensors that a module returned after its first result, by their place in the tuple."""
NOTHING: Beside = {}


class RoutedRows(NamedTuple):
    """The arguments of the experts, and the outputs of shared experts."""

    hidden: Tensor
    """Input of the experts, [T, D]."""
    ids: Tensor
    """Ids of the experts, [T, K]."""
    weights: Tensor
    """Weights of the experts, [T, K]."""
    siblings: dict[str, RouterExtras]
    """Outputs of shared experts that ran before routed ones, by child name, each [T, width]."""


class HookedLayer:
    """One decoder layer and its parts.

    The `forward` of submodules is replaced during a call, so only one thread may use a model.

    Args:
        layer: Layer whose first argument is x_1TD. It returns the new x_1TD, or a tuple that starts
            with the new x_1TD.
        attention: Attention inside the layer. It returns its output, or a tuple that starts with
            its output. None if the layer has no attention; `attend` then returns an empty tensor,
            [T, 0].
        router: Router inside the layer; None if there is no router, or the router is not known.
        experts: Experts inside the layer; None in a dense layer.
        mixer: Function called instead of the attention's forward. The forward is the function's
            first argument.
        attention_len: Length of the attention's tuple; 0 if it returns no tuple. Attention modules
            of transformers return (output, weights); `attend` updates the length.
    """

    def __init__(
        self,
        layer: nn.Module,
        attention: nn.Module | None,
        router: nn.Module | None = None,
        experts: nn.Module | None = None,
        mixer: Stub | None = None,
        attention_len: int = 2,
    ) -> None:
        self._layer, self._mixer = layer, mixer
        self._attention = attention
        self._attention_len = attention_len
        self._experts = experts
        self._siblings: dict[str, nn.Module] = {}
        if experts is not None:
            self._expert_args = inspect.signature(experts.forward)
            self._siblings = _siblings(layer, experts, (attention, router, experts))

    def attend(self, x_TD: Tensor, **kwargs: object) -> Tensor:
        """Run norm and attention; return attention's own output, [T, D].

        Raises:
            ModelError: The layer did not call its attention.
        """
        return self.attend_all(x_TD, **kwargs)[0]

    def attend_all(self, x_TD: Tensor, **kwargs: object) -> tuple[Tensor, Beside]:
        """Run norm and attention as `attend` does; also return the attention's other outputs."""
        if self._attention is None:
            return x_TD[:, :0], NOTHING
        real: Stub = self._attention.forward
        if self._mixer is not None:
            real = partial(self._mixer, real)
        found: list[Any] = []

        def attention(*args: object, **given: object) -> None:
            out = real(*args, **given)
            self._attention_len = len(out) if isinstance(out, tuple) else 0
            found.extend(out if isinstance(out, tuple) else (out,))
            raise Unwind

        self._call(x_TD, {self._attention: attention}, kwargs)
        if not found:
            raise self._error("did not call its attention")
        return found[0][0], tensors_beside(found)

    def route(
        self, x_TD: Tensor, attn_TD: Tensor, beside: Beside = NOTHING, **kwargs: object
    ) -> RoutedRows:
        """Run the layer up to the experts on the stored output of attention.

        Raises:
            ModelError: The layer did not reach its experts, or called a submodule twice.
        """
        calls = _Calls()
        outs: dict[str, RouterExtras] = {}
        taken: list[Tensor] = []

        def experts(*args: object, **given: object) -> None:
            taken.extend(self._expert_args.bind(*args, **given).args[:3])
            raise Unwind

        assert self._experts is not None
        stubs = {**self._stored_attention(calls, attn_TD, beside), self._experts: experts}
        for name, module in self._siblings.items():
            stubs[module] = calls.keeping(name, module.forward, outs)
        self._call(x_TD, stubs, kwargs)
        if not taken:
            raise self._error("did not reach its experts")
        self._check(calls, *self._attention_name, *outs)
        hidden, ids, weights = (t.reshape(-1, t.shape[-1]) for t in taken)
        return RoutedRows(hidden, ids, weights, outs)

    def combine(
        self,
        x_TD: Tensor,
        attn_TD: Tensor,
        siblings: Mapping[str, RouterExtras] | None = None,
        experts_TD: Tensor | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Run the whole layer on stored results; return the new x_TD.

        Raises:
            ModelError: The layer did not call each submodule with a stored result exactly once.
        """
        return self.combine_all(x_TD, attn_TD, NOTHING, siblings, experts_TD, **kwargs)[0]

    def combine_all(
        self,
        x_TD: Tensor,
        attn_TD: Tensor,
        beside: Beside,
        siblings: Mapping[str, RouterExtras] | None = None,
        experts_TD: Tensor | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Beside]:
        """Run the layer as `combine` does, with the attention's other outputs.

        Return the layer's other outputs too.
        """
        calls = _Calls()
        names = self._attention_name
        stubs = self._stored_attention(calls, attn_TD, beside)
        if self._experts is not None:
            names.append("experts")
            stubs[self._experts] = calls.returning("experts", experts_TD)
        for name, kept in (siblings or {}).items():
            assert isinstance(kept, Tensor)
            names.append(name)
            stubs[self._siblings[name]] = calls.restoring(name, kept)
        out = self._call(x_TD, stubs, kwargs)
        self._check(calls, *names)
        first = out[0] if isinstance(out, tuple) else out
        if not isinstance(first, Tensor):
            raise self._error(f"returned {type(first).__name__}, no hidden states")
        return first[0], tensors_beside(out if isinstance(out, tuple) else ())

    @property
    def _attention_name(self) -> list[str]:
        return [] if self._attention is None else ["attention"]

    def _stored_attention(
        self, calls: "_Calls", attn_TD: Tensor, beside: Beside
    ) -> dict[nn.Module, Stub]:
        if self._attention is None:
            return {}
        n = self._attention_len
        out = (attn_TD[None], *(beside.get(i) for i in range(1, n))) if n else attn_TD[None]
        return {self._attention: calls.returning("attention", out)}

    def _call(
        self, x_TD: Tensor, stubs: Mapping[nn.Module, Stub], kwargs: Mapping[str, object]
    ) -> object:
        with replaced(stubs):
            try:
                return self._layer(x_TD[None], **kwargs)
            except Unwind:
                return None

    def _check(self, calls: "_Calls", *names: str) -> None:
        for name in names:
            found = calls.count.get(name, 0)
            if found != 1:
                raise self._error(f"called its {name} {found} times, not once")

    def _error(self, what: str) -> ModelError:
        return ModelError(
            f"{type(self._layer).__name__} cannot be hooked: it {what}; "
            "this family needs a driver of its own"
        )


def tensors_beside(out: Sequence[Any]) -> Beside:
    """Return the tensors in a module's tuple, without the tuple's first item."""
    return {i: t for i, t in enumerate(out) if i and isinstance(t, Tensor)}


class _Calls:
    """A factory of stubs, which counts the calls of each stub."""

    def __init__(self) -> None:
        self.count: dict[str, int] = {}

    def _add(self, name: str) -> None:
        self.count[name] = self.count.get(name, 0) + 1

    def returning(self, name: str, value: object) -> Stub:
        def stub(*_: object, **__: object) -> object:
            self._add(name)
            return value

        return stub

    def keeping(self, name: str, real: Stub, outs: dict[str, RouterExtras]) -> Stub:
        """Return a stub that runs a submodule and keeps a row-wise output.

        `combine` runs a submodule again if its output is not row-wise.
        """

        def stub(*args: Any, **given: Any) -> object:
            self._add(name)
            out = real(*args, **given)
            x = _first(args, given)
            if isinstance(out, Tensor) and out.shape[:-1] == x.shape[:-1]:
                outs[name] = out.reshape(-1, out.shape[-1])
            return out

        return stub

    def restoring(self, name: str, kept: Tensor) -> Stub:
        def stub(*args: Any, **given: Any) -> Tensor:
            self._add(name)
            return kept.view(*_first(args, given).shape[:-1], kept.shape[-1])

        return stub


def _first(args: tuple[Any, ...], given: Mapping[str, Any]) -> Tensor:
    found: Tensor = args[0] if args else next(iter(given.values()))
    return found


def _siblings(
    layer: nn.Module, experts: nn.Module, others: tuple[nn.Module | None, ...]
) -> dict[str, nn.Module]:
    """Return the other modules with weights in the MoE block: shared experts."""
    block = next((m for m in layer.modules() if any(c is experts for c in m.children())), None)
    if block is None:
        raise ModelError(f"{type(layer).__name__} does not contain the experts it is given")
    if block is layer:
        return {}
    return {
        name: module
        for name, module in block.named_children()
        if not any(module is other for other in others) and any(True for _ in module.parameters())
    }
