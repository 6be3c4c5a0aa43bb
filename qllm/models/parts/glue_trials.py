"""Trials of a layer's glue, and of its experts' block: the code that joins their parts.

The parts are replaced by stubs, functions that differ from each other. So a part that the glue
omits, swaps or scales changes the result.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qllm.models.arguments import cache_argument, parameters_of
from qllm.models.parts.drawn import Draw, Stub, shadow
from qllm.models.parts.trials import LARGE, calls, differs, positions_for, rows, trial


def _beside(module: nn.Module, known: set[Any], what: str) -> str:
    """Return a text that names unknown children with weights, or ""."""
    kept = {child for child in module.children() if any(True for _ in child.parameters())}
    names = ", ".join(sorted(type(child).__name__ for child in kept - known))
    return f"it has parts beside {what}: {names}" if names else ""


def _line(draw: Draw) -> Callable[[Tensor], Tensor]:
    """Return a function that replaces a module."""
    factor, added = (float(value) for value in draw.uniform(0.5, 1.5, 2))
    return lambda x: x * factor + added


def _first(args: tuple[Any, ...], given: dict[str, Any]) -> Tensor:
    found: Tensor = args[0] if args else next(v for v in given.values() if isinstance(v, Tensor))
    return found


_AS_TUPLES = ((True, False), (True, True), (False, False), (False, True))
"""Combinations of "attention returns a tuple" and "MLP returns a tuple"."""


@trial
def layer(
    module: Any, draw: Draw, kind: str, attn: nn.Module, block: nn.Module, is_long: bool
) -> Iterator[str]:
    """Compare the glue of a layer with norm, attention, sum, norm, MLP, sum; yield differences.

    Args:
        module: The layer.
        draw: Source of inputs.
        kind: "plain", or "scaled" if each added term is multiplied.
        attn: Module that sees other tokens.
        block: The layer's MLP, or its experts.
        is_long: True tries many tokens too.
    """
    norms = module.input_layernorm, module.post_attention_layernorm
    yield _beside(module, {attn, block, *norms}, "norms, attention and MLP")
    scale = module.residual_multiplier if kind == "scaled" else None
    lines = [_line(draw) for _ in range(4)]
    first, second, attend, feed = lines
    width, takes = norms[0].weight.numel(), parameters_of(attn)
    names = {"position_embeddings", "attention_mask", cache_argument(attn)} & takes.keys()
    said = []
    for attn_is_tuple, block_is_tuple in _AS_TUPLES:
        told = _Told(names)

        def attended(*args: Any, told: _Told = told, **given: Any) -> Tensor:
            told.check(args, given)
            return attend(_first(args, given))

        stubs: dict[nn.Module, nn.Module] = {
            norms[0]: Stub(norms[0], first),
            norms[1]: Stub(norms[1], second),
            attn: Stub(attn, _in_a_tuple(attended) if attn_is_tuple else attended),
            block: Stub(block, _in_a_tuple(feed) if block_is_tuple else feed),
        }
        made = shadow(module, draw, stubs)
        said.append("")
        for x in calls(rows(draw, width, 0.25, 1, 4, LARGE), is_long):
            mid = _plus(x, attend(first(x)), scale)
            expected = _plus(mid, feed(second(mid)), scale)
            try:
                out = made(x[None], **told.of(module, draw, len(x)))
            except (TypeError, ValueError) as error:
                said[-1] = f"it raised {type(error).__name__}: {error}"
                break
            out = out[0] if isinstance(out, tuple) else out
            said[-1] = said[-1] or differs("its output", out, expected[None])
        if not said[-1]:
            return
    yield said[0]


class _Told:
    """Arguments of a layer other than hidden states, all of which its attention must receive.

    Args:
        names: Names of the attention's arguments that the layer must pass.
    """

    def __init__(self, names: set[str]) -> None:
        self._names = names
        self._values: dict[str, Any] = {}

    def of(self, module: nn.Module, draw: Draw, count: int) -> dict[str, Any]:
        """Return the arguments of a call with `count` tokens."""
        self._values = {
            "position_embeddings": (draw.normal(1, count, 4), draw.normal(1, count, 4)),
            "attention_mask": draw.normal(1, 1, count, count),
            cache_argument(module): object(),
            **positions_for(module, count),
        }
        return self._values

    def check(self, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        """Check the arguments of an attention.

        Raises:
            ValueError: One is missing, or is a value that the layer made.
        """
        found = [*args, *given.values()]
        for name, value in self._values.items():
            is_needed = name in self._names or not isinstance(value, Tensor | tuple)
            if is_needed and not any(x is value for x in found):
                raise ValueError(f"the attention is not given the {name} of the layer")
        known = [_first(args, given), *self._values.values()]
        for value in found:
            if not isinstance(value, bool | None) and not any(value is x for x in known):
                raise ValueError(f"the attention is given a {type(value).__name__} by the layer")


def _plus(x: Tensor, y: Tensor, scale: float | None) -> Tensor:
    return x + y if scale is None else x + y * scale


def _in_a_tuple(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, None]]:
    return lambda *args, **given: (function(*args, **given), None)


@trial
def block(
    module: Any,
    draw: Draw,
    router: Any,
    experts: Any,
    shared: nn.Module | None,
    gate: nn.Module | None,
) -> Iterator[str]:
    """Compare a block with router, experts, and the added shared experts; yield differences.

    Args:
        module: The block.
        draw: Source of inputs.
        router: Module that chooses experts.
        experts: The routed experts.
        shared: Experts that every token uses.
        gate: Module whose sigmoid scales the shared experts.
    """
    yield _beside(module, {router, experts, shared, gate}, "router and experts")
    width = int(router.weight.shape[1])
    xs, share = [*calls(rows(draw, width, 0.25, 1, 2, 4, 8, LARGE))], _line(draw)
    choose, run = _chooser(draw, width, experts.num_experts), _runner(draw, experts)
    said = ""
    for made_of in (lambda *found: found, lambda *found: found[::-1]):  # ids are last, or first
        stubs: dict[nn.Module, nn.Module] = {
            router: Stub(router, partial(_given_to, choose, made_of)),
            experts: Stub(experts, run),
        }
        if shared is not None:
            stubs[shared] = Stub(shared, share)
        made = shadow(module, draw, stubs)
        said = ""
        for x in xs:
            _, weights, ids = choose(x)
            expected = run(x, ids, weights)
            if shared is not None:
                name = next((n for n, child in module.named_children() if child is gate), None)
                scale = 1.0 if name is None else torch.sigmoid(getattr(made, name)(x))
                expected = expected + (share(x) if name is None else scale * share(x))
            out = made(x[None])
            out = out[0] if isinstance(out, tuple) else out
            said = said or differs("its output", out, expected[None])
        if not said:
            return
    yield said


def _chooser(draw: Draw, width: int, num_experts: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Return a replacement of a router that gives logits, weights and ids of two experts."""
    factors = draw.normal(width)

    def choose(x: Tensor) -> tuple[Tensor, ...]:
        logits = (x.reshape(-1, width) * factors).reshape(-1, 2, width // 2).sum(-1)
        return logits, logits.sigmoid(), (logits.abs() * 8).long() % num_experts

    return choose


def _given_to(
    choose: Callable[[Tensor], tuple[Tensor, ...]],
    made_of: Callable[..., tuple[Tensor, ...]],
    *args: Any,
    **given: Any,
) -> tuple[Tensor, ...]:
    return made_of(*choose(_first(args, given)))


def _runner(draw: Draw, experts: nn.Module) -> Callable[..., Tensor]:
    """Return a replacement of experts that takes their arguments."""
    signature, together = inspect.signature(type(experts).forward), _line(draw)

    def run(*args: Any, **given: Any) -> Tensor:
        _, hidden, ids, weights = signature.bind(None, *args, **given).args[:4]
        scales: Tensor = (weights * (1 + ids)).sum(-1, keepdim=True)
        return together(hidden) * scales.to(hidden.dtype)

    return run
