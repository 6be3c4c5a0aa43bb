"""Our expert kernels for plain models of transformers, on the CPU, without an engine.

    import qllm.transformers
    model = AutoModelForCausalLM.from_pretrained(
        name, dtype="bfloat16", experts_implementation="qllm"
    )
    model.generate(**inputs)

The import registers "qllm" in transformers' `ALL_EXPERTS_FUNCTIONS`. The first call of each block
of experts packs the weights. The packed weights replace the module's weights, so weights are in
memory once. Until weights are restored, the module's parameters are on the meta device.
`release(model)` restores every bit. `state_dict()`, and so `save_pretrained`, restores the weights
too.

Some calls run with `grouped_mm`: experts that the kernels do not support (another activation or
gate, another dtype or device, quantised weights), calls that need gradients, and blocks whose check
fails. A warning reports each reason once.
"""

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from qllm.errors import ModelError
from qllm.kernels import cpu
from qllm.models.weights.quantised_experts import WEIGHTS, quantised_in
from qllm.runner.layers.native_experts import NativeBank, is_covered
from qllm.runner.layers.work import Work
from qllm.runner.reference import unit

NAME = "qllm"
CHECKED_ROWS = 16
"""Number of rows of the first call that are compared with `grouped_mm`."""
BOUND = 8.0
"""Largest allowed difference, in changes caused by one rounding of the input. The start-up check
has the same bound."""
_HELD, _FAILED = "_qllm_experts", "_qllm_failed"
_log = logging.getLogger("qllm")
_said: set[str] = set()


class _Held:
    """The packed weights of one block of experts."""

    def __init__(self, module: nn.Module) -> None:
        self._bank = NativeBank(module)
        self._bank.pack()
        vars(module).pop("forward")  # the class's forward uses `ALL_EXPERTS_FUNCTIONS`
        register: Any = module.register_state_dict_pre_hook
        self._hook = register(lambda one, *_: _give_back(one))

    def give_back(self) -> None:
        """Put the weights back into the module."""
        self._hook.remove()
        self._bank.unpack()

    def run(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return the experts' weighted sum [T, D]."""
        work = Work(self._bank, ids_TK, 1 << 30)
        work.run(cpu.dense(x_TD), 0, len(work.units))
        return work.combine(0, len(x_TD), weights_TK, x_TD.dtype)


def experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute a module of experts with our kernels.

    Args:
        self: Module, as `use_experts_implementation` made it.
        hidden_states: Rows [T, D].
        top_k_index: Experts of each token, [T, K].
        top_k_weights: Weights of these experts, [T, K].

    Returns:
        Rows [T, D].

    Raises:
        ModelError: An engine serves the model.
    """
    given = hidden_states, top_k_index, top_k_weights
    held: _Held | None = vars(self).get(_HELD)
    why = _why_not(self, hidden_states, held is not None)
    if why is not None:
        _say(type(self).__name__, why)
        _give_back(self)
        return _plain(self, given)
    if not len(hidden_states):
        return torch.zeros_like(hidden_states)
    cpu.set_threads(torch.get_num_threads())
    with torch.no_grad():
        return _taken(self, given) if held is None else held.run(*given)


def release(model: nn.Module) -> None:
    """Put the weights of all experts of a model back into the modules, with the same bits.

    Args:
        model: Model with `experts_implementation="qllm"`. The model's next call packs the weights
            again.
    """
    for module in model.modules():
        _give_back(module)


def _plain(module: nn.Module, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    found: Tensor = grouped_mm_experts_forward(module, *given)
    return found


def _give_back(module: nn.Module) -> None:
    held: _Held | None = vars(module).pop(_HELD, None)
    if held is not None:
        held.give_back()


def _why_not(module: Any, x_TD: Tensor, is_packed: bool) -> str | None:
    """Return the reason why our kernels cannot run a call; None if they can."""
    if cpu.MISSING is not None:
        return cpu.MISSING
    if vars(module).get(_FAILED):
        return "their check failed"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x_TD, *module.parameters())):
        return "the call needs gradients; run it under torch.no_grad()"
    if module._is_expert_parallel or not module.has_gate or module.has_post_expert_norm:
        return "their layout is not one that our kernels know"
    if x_TD.dtype is not torch.bfloat16 or x_TD.device.type != "cpu":
        return f"they are given {x_TD.dtype} on {x_TD.device.type}, and need bfloat16 on the CPU"
    if not is_packed and (quantised_in(module) is not None or not is_covered(module)):
        return "our kernels are not made for their gate, dtype, device or shape"
    return None


def _say(name: str, why: str) -> None:
    if why not in _said:
        _said.add(why)
        _log.warning("%s runs with grouped_mm in place of qllm: %s", name, why)


def _taken(module: nn.Module, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Check the first rows, pack the weights, and run.

    If the check fails, run transformers' code.
    """
    if any(getattr(module, name).device.type == "meta" for name in WEIGHTS):
        raise ModelError(
            "the experts of this model are packed for an engine that serves it; close that engine "
            "first, or load the model once more"
        )
    x_TD, ids_TK, weights_TK = (t[:CHECKED_ROWS] for t in given)
    expected = _plain(module, (x_TD, ids_TK, weights_TK)).float()
    noise = torch.ones_like(x_TD)
    noise[:, ::2] += 2 * unit(x_TD.dtype)
    spread_T = (_plain(module, (x_TD * noise, ids_TK, weights_TK)).float() - expected).norm(dim=-1)
    held = _Held(module)
    found = held.run(x_TD, ids_TK, weights_TK).float()
    floor_T = expected.norm(dim=-1) * unit(x_TD.dtype)
    error_T = (found - expected).norm(dim=-1)
    if not bool((error_T <= BOUND * torch.maximum(spread_T, floor_T)).all()):
        held.give_back()
        vars(module)[_FAILED] = True
        _say(type(module).__name__, "their check failed")
        return _plain(module, given)
    vars(module)[_HELD] = held
    return held.run(*given)


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
