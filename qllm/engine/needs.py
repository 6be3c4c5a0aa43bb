"""The abilities of a loaded model: the memory of its KV, and drafts."""

from dataclasses import replace
from typing import Any

from qllm.config import EngineConfig
from qllm.cores import memory_bytes
from qllm.drafters.choose import load_drafter
from qllm.drafters.exit import Exit
from qllm.drafters.protocol import MakeDrafter
from qllm.engine.sizes import USUAL, Costs, sized
from qllm.engine.storage.pages import why_not
from qllm.errors import ConfigError
from qllm.models.discover import discover
from qllm.runner.layers.trial import kv_token_bytes
from qllm.runner.runner import TorchRunner


def cpu_costs(config: EngineConfig, runner: TorchRunner) -> Costs:
    """Return the numbers of a model on a CPU that the sizes of KV depend on."""
    shape, charge = runner.shape, runner.charge
    some = sized(replace(config, memory=None), 0, Costs(0))  # sizes can rule out cached KV
    return Costs(
        token_bytes=charge.token_bytes,
        state_bytes=charge.state_bytes,
        state_tokens=shape.state_tokens,
        most_tokens=config.max_num_seqs * (shape.max_position + shape.state_tokens),
        keeps=why_not(some, runner) is None,
    )


def device_costs(model: Any, config: EngineConfig) -> Costs:
    """Return the numbers of a model on a GPU that sizes depend on. Cached KV is on the host."""
    parts = discover(model)
    most = config.max_num_seqs * parts.shape.max_position
    if config.on_device:  # these buffers grow with the longest request
        most = USUAL.kv_tokens
    return Costs(kv_token_bytes(parts, model), most_tokens=most, keeps=False)


def refuse_sizes(config: EngineConfig, runner: TorchRunner) -> None:
    """Refuse sizes that cannot work, so that the error comes at start and not later.

    Raises:
        ConfigError: KV has no room for one request, or cached and swapped KV exceed the memory.
    """
    shape = runner.shape
    if shape.state_tokens and shape.longest(config.pool_tokens) < 2:
        least = shape.state_tokens + config.block_size + 1
        raise ConfigError(
            f"max_kv_tokens={config.max_kv_tokens} has no room for one request: layers carry a "
            f"state, and those of a request take as much memory as the KV of {shape.state_tokens} "
            f"tokens; give at least {least}, and as much for each request that is to run at once"
        )
    kept = config.kept_tokens
    each, memory = kv_token_bytes(runner.parts, runner.model), memory_bytes()
    if (kept + config.swap_kv_tokens) * each > memory:
        raise ConfigError(
            f"prefix_cache_tokens={kept} and swap_kv_tokens={config.swap_kv_tokens} are KV of "
            f"{each} bytes a token, and there are {memory} bytes of memory; give at most "
            f"{memory // each} together"
        )


def drafter_of(config: EngineConfig, runner: TorchRunner) -> MakeDrafter | Exit | None:
    """Return the source of drafts that an engine's settings ask for; None for none.

    Raises:
        ConfigError: The drafter is unknown or asks for a layer that the model does not have, or
            this model or device cannot verify drafts exactly.
    """
    if not config.has_drafts:
        return None
    make, layers = load_drafter(config.draft), runner.shape.num_layers
    if isinstance(make, Exit) and make.layer >= layers:
        raise ConfigError(
            f"draft={config.draft!r} leaves the model after {make.layer} layers, and the model has "
            f"{layers}; give a number in [1, {layers - 1}]"
        )
    if not (why := why_no_drafts(runner)):
        return make
    raise ConfigError(
        f"draft={config.draft!r} cannot be used with this model here: {why}; use draft='none'"
    )


def why_no_drafts(runner: TorchRunner) -> str:
    """Return why this model or device cannot verify drafts exactly; "" if it can."""
    if runner.parts.has_states:
        return "its layers carry a state, which cannot go back when a draft is rejected"
    inexact = runner.backend.why_inexact
    return f"{inexact}, and a draft could change tokens" if inexact else ""
