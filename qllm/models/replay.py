"""Replay: drive a layer whose glue is unknown, by hooks on the unmodified layer.

A layer is called more than once over the same rows. While it runs, the modules of interest are
replaced, on the instance, by stubs that hand back what they produced before or unwind the call:

    attend   layer(x): norm, attention (real), unwind                        keep attention's output
    route    layer(x): norm, [attention], add, norm, router (real), experts: unwind
                                                     keep the experts' input, ids, weights, and
                                                     what their siblings (router, shared) returned
    combine  layer(x): norm, [attention], add, norm, [router], [experts], add         the new x

[...] is a stored result. Between `route` and `combine` the experts run outside, in segments. Only
norms and adds run again, and they are deterministic, so the bits are those of one plain call.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from qllm.errors import ModelError

Kept = Tensor | tuple[Tensor | None, ...]
"""What a module returned: a tensor, or a tuple of tensors."""


class _Unwind(BaseException):
    """Leaves the layer's forward; no `except Exception` of a model may catch it."""


class Routed(NamedTuple):
    """What `route` keeps of its rows, all on the layer's device."""

    hidden: Tensor
    """Input of the experts, [T, D]."""
    topk_ids: Tensor
    """[T, K]"""
    topk_weights: Tensor
    """[T, K]"""
    siblings: dict[str, Kept]
    """Outputs of the modules beside the experts that ran before them, by child name."""


class ReplayLayer:
    """One decoder layer and its parts. Holds no state of any request.

    Not for use from two threads at once: during a call the parts' `forward` is replaced.

    Args:
        layer: The decoder layer; takes x_1TD first and returns it, or a tuple that starts with it.
        attention: Its attention module.
        router: Its router; None for a dense layer.
        experts: Its experts module; None for a dense layer.

    Raises:
        ModelError: A part is not inside the layer.
    """

    def __init__(
        self,
        layer: nn.Module,
        attention: nn.Module,
        router: nn.Module | None = None,
        experts: nn.Module | None = None,
    ) -> None:
        self.layer = layer
        self.attention = attention
        self.experts = experts
        # Length of the tuple that attention returns: 2 everywhere in transformers, else as seen.
        self._attention_len: int | None = 2
        self._siblings: dict[str, nn.Module] = {}
        if experts is not None:
            self._siblings = _siblings(layer, attention, router, experts)
            self._bind = inspect.signature(experts.forward).bind

    def attend(self, x_TD: Tensor, /, **kwargs: object) -> Tensor:
        """Run norm and attention; return attention's own output, of x_TD's leading shape.

        Raises:
            ModelError: The layer never called its attention.
        """
        real = self.attention.forward
        found: list[Tensor] = []

        def stub(*args: object, **kw: object) -> Any:  # noqa: ANN401
            out = real(*args, **kw)
            self._attention_len = len(out) if isinstance(out, tuple) else None
            found.append(out[0] if isinstance(out, tuple) else out)
            raise _Unwind

        self._call(x_TD, {self.attention: stub}, kwargs)
        if len(found) != 1:
            raise self._error(f"called its attention {len(found)} times")
        return found[0][0]

    def route(self, x_TD: Tensor, attn_TD: Tensor, /, **kwargs: object) -> Routed:
        """Run up to the experts on stored attention output.

        Raises:
            ModelError: The layer never reached its experts, or called a part twice.
        """
        assert self.experts is not None
        once = _Once()
        memo: dict[str, Kept] = {}
        taken: list[tuple[Tensor, Tensor, Tensor]] = []

        def experts(*args: object, **kw: object) -> Any:  # noqa: ANN401
            hidden, ids, weights = list(self._bind(*args, **kw).arguments.values())[:3]
            taken.append((hidden, ids, weights))
            raise _Unwind

        stubs: dict[nn.Module, Callable[..., Any]] = {
            self.attention: once.returning("attention", self._attention_out(attn_TD)),
            self.experts: experts,
        }
        for name, module in self._siblings.items():
            stubs[module] = once.keeping(name, module.forward, memo)
        self._call(x_TD, stubs, kwargs)
        self._check(once, ["attention"])
        if len(taken) != 1:
            raise self._error("never reached its experts")
        hidden, ids, weights = taken[0]
        return Routed(hidden.reshape(-1, hidden.shape[-1]), ids, weights, memo)

    def combine(
        self,
        x_TD: Tensor,
        attn_TD: Tensor,
        siblings: Mapping[str, Kept] | None = None,
        experts_TD: Tensor | None = None,
        /,
        **kwargs: object,
    ) -> Tensor:
        """Run the whole layer on stored results; return the new x_TD.

        A dense layer is given no siblings and no experts' output, and runs its MLP here.

        Raises:
            ModelError: The layer did not call each stored part exactly once.
        """
        once = _Once()
        expected = ["attention"]
        stubs = {self.attention: once.returning("attention", self._attention_out(attn_TD))}
        if self.experts is not None:
            assert siblings is not None
            assert experts_TD is not None
            expected.append("experts")
            stubs[self.experts] = once.returning("experts", experts_TD)
            for name, kept in siblings.items():
                expected.append(name)
                stubs[self._siblings[name]] = once.returning(name, kept)
        out = self._call(x_TD, stubs, kwargs)
        self._check(once, expected)
        if isinstance(out, tuple):
            out = out[0]
        if not isinstance(out, Tensor):
            raise self._error(f"returned {type(out).__name__}, no hidden states")
        return out[0]

    def _attention_out(self, attn_TD: Tensor) -> Kept:
        out = attn_TD[None]
        n = self._attention_len
        return out if n is None else (out, *([None] * (n - 1)))

    def _call(
        self,
        x_TD: Tensor,
        stubs: Mapping[nn.Module, Callable[..., Any]],
        kwargs: Mapping[str, object],
    ) -> Any:  # noqa: ANN401
        with _replaced(stubs):
            try:
                return self.layer(x_TD[None], **kwargs)
            except _Unwind:
                return None

    def _check(self, once: "_Once", expected: Iterable[str]) -> None:
        for name in {*once.calls, *expected}:
            found = once.calls.get(name, 0)
            if found != 1:
                raise self._error(f"called its {name} {found} times")

    def _error(self, what: str) -> ModelError:
        return ModelError(
            f"{type(self.layer).__name__} cannot be replayed: it {what}; "
            "this family needs a driver of its own"
        )


class _Once:
    """Makes stubs and counts their calls."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    def returning(self, name: str, kept: Kept) -> Callable[..., Kept]:
        def stub(*_: object, **__: object) -> Kept:
            self.calls[name] = self.calls.get(name, 0) + 1
            return kept

        return stub

    def keeping(
        self, name: str, real: Callable[..., Kept], memo: dict[str, Kept]
    ) -> Callable[..., Kept]:
        def stub(*args: object, **kwargs: object) -> Kept:
            self.calls[name] = self.calls.get(name, 0) + 1
            memo[name] = out = real(*args, **kwargs)
            return out

        return stub


@contextmanager
def _replaced(stubs: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace `forward` on these instances, and put back what was there."""
    before = {module: module.__dict__.get("forward") for module in stubs}
    try:
        for module, stub in stubs.items():
            module.__dict__["forward"] = stub
        yield
    finally:
        for module, own in before.items():
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = own


def _siblings(
    layer: nn.Module, attention: nn.Module, router: nn.Module | None, experts: nn.Module
) -> dict[str, nn.Module]:
    """The modules beside the experts in the MoE block, whose work must not be done twice."""
    parents = {child: parent for parent in layer.modules() for child in parent.children()}
    if experts not in parents or attention not in parents:
        raise ModelError(f"{type(layer).__name__} does not contain its attention and experts")
    block = parents[experts]
    found = dict(block.named_children()) if block is not layer else {}
    if router is not None and router not in found.values():
        found["router"] = router
    return {n: m for n, m in found.items() if m is not experts and m is not attention}
