"""A module's own code over random weights: a trial runs this shadow instead of the module.

A shadow has the class, the settings and the children of a module, but shares no tensor with it. Its
weights are random and on the CPU, so it runs wherever the module's weights are (the meta device, a
GPU, packed memory). The matrix of a linear shadow is never built: each input adds to one output, so
a shadow of any width needs only the memory of a few rows.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from inspect import isfunction
from typing import Any

import torch
from torch import Tensor, nn

from qllm.models.weights.quantised_experts import quantised_in
from qllm.models.weights.quantised_linears import linear_in

SMALL = 1 << 16
"""Most values of an attribute tensor for which a shadow has a copy of its own."""
_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module: its children, its weights, its hooks."""
_SCALARS = (bool, int, float, str, type(None), torch.dtype)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (*_SCALARS, tuple)


class Draw:
    """Seeded random tensors of one dtype, on the CPU."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        self.dtype = dtype
        self._made: list[tuple[nn.Module, ShadowState]] = []
        """Shadows with random weights, and the state of each when it was made."""
        self._generator = torch.Generator().manual_seed(seed)

    def watch(self, made: nn.Module) -> None:
        """Record the state of a new shadow."""
        self._made.append((made, ShadowState(made)))

    def kept_more(self) -> str:
        """Return a text that names a shadow which kept a value after a call, or ""."""
        for made, before in self._made:
            if before.differs(made):
                return f"{type(made).__name__} keeps something of one call for the next"
        return ""

    def normal(self, *shape: int) -> Tensor:
        """Return values of a standard normal distribution."""
        made: Tensor = torch.randn(shape, generator=self._generator, dtype=torch.float32)
        rounded: Tensor = made.to(self.dtype)
        return rounded

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """Return uniform values between two bounds."""
        made: Tensor = torch.rand(shape, generator=self._generator, dtype=torch.float32)
        rounded: Tensor = (low + (high - low) * made).to(self.dtype)
        return rounded

    def order(self, size: int) -> Tensor:
        """Return the numbers below `size` in random order."""
        return torch.randperm(size, generator=self._generator)

    def weight(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Draw a random parameter.

        Each row of a matrix is a window of one long random vector, one place after the window of
        the row above. A parameter with one dimension has values near 1, like the weight of a norm,
        so that a missing addition or multiplication is visible.
        """
        if name == "A_log":  # most of a state is preserved
            return self.uniform(-4, 0, *shape)
        made: Tensor
        if len(shape) < 2:
            made = 1 + self.normal(*shape) / 4
            return made
        if len(shape) > 2 or 0 in shape:
            return self.normal(*shape).mul(max(1, shape[-1]) ** -0.5)
        vector = self.normal(shape[0] + shape[1] - 1).mul(shape[1] ** -0.5)
        return vector.unfold(0, shape[1], 1)


class DrawnLinear(nn.Linear):
    """A linear module whose matrix has one value per input, or per output if there are more."""

    def __init__(self, like: nn.Linear, draw: Draw) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = like.in_features, like.out_features
        times = -(-self.in_features // self.out_features)
        places = torch.arange(times * self.out_features) % self.in_features
        self._places = draw.order(self.in_features)[places]
        self._factors = draw.uniform(0.5, 1.5, len(places))
        self._factors[1::2] *= -1
        self._times = times
        if like.bias is None:
            self.register_parameter("bias", None)
        else:
            self.bias = _parameter(draw.normal(self.out_features) / 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, summed in fp32."""
        products = x[..., self._places].float() * self._factors.float()
        y = products.reshape(*x.shape[:-1], self._times, self.out_features).sum(-2)
        y = y if self.bias is None else y + self.bias.float()
        return y.to(x.dtype)

    def __getattr__(self, name: str) -> Any:
        if name != "weight":
            return super().__getattr__(name)
        matrix = torch.zeros(self.out_features, self.in_features, dtype=self._factors.dtype)
        rows = torch.arange(len(self._places)) % self.out_features
        return matrix.index_put_((rows, self._places), self._factors, accumulate=True)


class Stub(nn.Module):
    """A replacement of a child: a function, and the settings of the module."""

    def __init__(self, like: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        settings = {k: v for k, v in vars(like).items() if isinstance(v, _PLAIN) and k != "forward"}
        vars(self).update({k: v for k, v in settings.items() if k not in vars(self)})
        self._function = function

    def forward(self, *args: Any, **given: Any) -> Any:
        """Call the function."""
        return self._function(*args, **given)


def shadow(
    module: nn.Module,
    draw: Draw,
    stubs: Mapping[nn.Module, nn.Module] | None = None,
    **settings: Any,
) -> Any:
    """Return a module's code over random weights.

    Args:
        module: The module, which is not changed.
        draw: Source of the weights. Weights of higher precision than the rest stay wider.
        stubs: Replacements of modules inside it.
        **settings: Attributes of the shadow that replace those of the module.
    """
    dtypes = {p.dtype for p in module.parameters()}
    is_mixed = torch.float32 in dtypes and len(dtypes) > 1
    made = _shadow(module, draw, stubs or {}, is_mixed)
    vars(made).update(settings)
    draw.watch(made)
    return made


def _shadow(
    module: nn.Module, draw: Draw, stubs: Mapping[nn.Module, nn.Module], is_mixed: bool
) -> nn.Module:
    if module in stubs:
        return stubs[module]
    if has_another_forward(module):
        raise ValueError(f"a method of {type(module).__name__} was replaced on the instance")
    made: Any = object.__new__(type(module))
    vars(made).update({k: _own(v) for k, v in vars(module).items()})
    vars(made).pop("forward", None)
    for name in _HOOKS:
        vars(made)[name] = type(vars(made)[name])()
    for kind in ("_parameters", "_buffers"):
        vars(made)[kind] = {
            name: None if own is None else _drawn(name, own, draw, is_mixed)
            for name, own in vars(module)[kind].items()
        }
    vars(made)["_modules"] = {
        name: _child(child, draw, stubs, is_mixed) for name, child in module._modules.items()
    }
    vars(made)["training"] = False
    return made  # type: ignore[no-any-return]


def _child(
    child: nn.Module | None, draw: Draw, stubs: Mapping[nn.Module, nn.Module], is_mixed: bool
) -> nn.Module | None:
    if child is None:
        return None
    if type(child) is nn.Linear and child not in stubs and not has_another_forward(child):
        return DrawnLinear(child, draw)
    return _shadow(child, draw, stubs, is_mixed)


def _drawn(name: str, own: Tensor, draw: Draw, is_mixed: bool) -> Tensor:
    if not own.is_floating_point():
        return own.detach().cpu().clone()
    made = draw.weight(name, tuple(own.shape))
    if is_mixed and own.dtype is torch.float32:
        made = made.float()
    return _parameter(made) if isinstance(own, nn.Parameter) else made


def _parameter(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


def with_attention(config: Any, implementation: str) -> Any:
    """Return a copy of a config that names the attention function."""
    own = copy.copy(getattr(config, "qllm_original", config))
    own._attn_implementation = implementation
    return own


def _own(value: Any) -> Any:
    """Return a shadow's copy of a value, which it may write to."""
    if type(value) in (dict, list, set):
        return copy.copy(value)
    return value.detach().cpu().clone() if _is_small(value) else value


def _is_small(value: Any) -> bool:
    """Return True for a small tensor, which a trial copies. A trial never reads weights."""
    return isinstance(value, Tensor) and value.device.type != "meta" and value.numel() <= SMALL


class ShadowState:
    """The state of a shadow and of its inner modules: attributes, and values of buffers."""

    def __init__(self, made: nn.Module) -> None:
        self._attributes = self._of(made)
        self._tensors = [(tensor, tensor.clone()) for tensor in self._written(made)]

    @staticmethod
    def _of(made: nn.Module) -> object:
        return [(own_values(m), [*map(id, m._buffers.values())]) for m in made.modules()]

    @staticmethod
    def _written(made: nn.Module) -> Iterator[Tensor]:
        for module in made.modules():
            values = (*vars(module).values(), *module._buffers.values())
            yield from filter(_is_small, values)

    def differs(self, made: nn.Module) -> bool:
        """Return True if the shadow's state differs now."""
        if self._attributes != self._of(made):
            return True
        return not all(torch.equal(tensor, before) for tensor, before in self._tensors)


def own_values(owner: object, but: str = "") -> object:
    """Return the attributes of a module or config that its forward may read, for a comparison."""
    own = vars(owner).items()
    found = {k: _comparable(v) for k, v in own if k not in _OF_TORCH and k != but}
    return sorted(found.items())


def _comparable(value: Any) -> object:
    """Return a key that changes with a value: the text of plain values, the identity of others."""
    if isinstance(value, _SCALARS):
        return repr(value)
    if isinstance(value, Mapping):
        return [(str(k), _comparable(v)) for k, v in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [_comparable(v) for v in value]
    return id(value)


def is_replaced(module: nn.Module) -> bool:
    """Return True if a user replaced a method of a module, or of a module inside it."""
    return any(map(has_another_forward, module.modules()))


def has_another_forward(module: nn.Module) -> bool:
    """Return True if a user replaced a method of a module. Our own forwards do not count."""
    own, kind = vars(module), type(module)
    replaced = {k for k in own.keys() - _OF_TORCH if isfunction(getattr(kind, k, None))}
    is_held = linear_in(module) is not None or quantised_in(module) is not None
    if is_held or hasattr(own.get("forward"), "is_ours"):
        replaced.discard("forward")
    return bool(replaced)
