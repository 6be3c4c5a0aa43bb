"""A module's own code over drawn weights: what a trial runs in the place of the module.

A shadow has the class, the settings and the children of a module, and shares no tensor with it: its
weights are drawn, on the CPU, so it can be run whatever holds the module's weights (the meta
device, a GPU, packed memory). A linear module is drawn as a product that reads no matrix: every
input goes into one output, so a shadow of any width takes the memory of a few rows.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qllm.models.quantised_experts import quantised_in
from qllm.models.quantised_linears import linear_in

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (bool, int, float, str, type(None), tuple, torch.dtype)


class Draw:
    """Seeded random tensors of one dtype, on the CPU."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        self.dtype = dtype
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Values of a standard normal distribution."""
        made: Tensor = torch.randn(shape, generator=self._generator, dtype=torch.float32)
        rounded: Tensor = made.to(self.dtype)
        return rounded

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """Values between two bounds."""
        made: Tensor = torch.rand(shape, generator=self._generator, dtype=torch.float32)
        rounded: Tensor = (low + (high - low) * made).to(self.dtype)
        return rounded

    def order(self, size: int) -> Tensor:
        """The numbers below `size`, in any order."""
        return torch.randperm(size, generator=self._generator)

    def weight(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Draw a parameter. The rows of a matrix are of one vector, each a place further.

        Vectors are near one: as norms are, and so that what is added, multiplied or left out shows.
        """
        if name == "A_log":  # most of a state stays
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
        """The product, summed in fp32."""
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
    """What stands for a child: a function, and the settings of the module."""

    def __init__(self, like: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        settings = {k: v for k, v in vars(like).items() if isinstance(v, _PLAIN) and k != "forward"}
        vars(self).update({k: v for k, v in settings.items() if k not in vars(self)})
        self._function = function

    def forward(self, *args: Any, **given: Any) -> Any:
        """Call the function."""
        return self._function(*args, **given)


def shadow(
    module: nn.Module, draw: Draw, stubs: Mapping[nn.Module, nn.Module] | None = None
) -> Any:
    """A module's code over drawn weights.

    Args:
        module: It is not changed.
        draw: Of the weights; those of another precision than the rest stay wider.
        stubs: Modules in it -> what stands for them.
    """
    dtypes = {p.dtype for p in module.parameters()}
    is_mixed = torch.float32 in dtypes and len(dtypes) > 1
    return _shadow(module, draw, stubs or {}, is_mixed)


def _shadow(
    module: nn.Module, draw: Draw, stubs: Mapping[nn.Module, nn.Module], is_mixed: bool
) -> nn.Module:
    if module in stubs:
        return stubs[module]
    if has_another_forward(module):
        raise ValueError(f"the forward of {type(module).__name__} was replaced on the instance")
    made: Any = object.__new__(type(module))
    vars(made).update(vars(module))
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
    """A copy of a config that names the function which attends."""
    own = copy.copy(getattr(config, "qllm_original", config))
    own._attn_implementation = implementation
    return own


def is_replaced(module: nn.Module) -> bool:
    """Return whether a user replaced the forward of a module or of one inside it."""
    return any(map(has_another_forward, module.modules()))


def has_another_forward(module: nn.Module) -> bool:
    """Return whether a user replaced the forward of a module; our own forwards do not count."""
    own = vars(module).get("forward")
    is_held = linear_in(module) is not None or quantised_in(module) is not None
    return own is not None and not is_held and not hasattr(own, "is_ours")
