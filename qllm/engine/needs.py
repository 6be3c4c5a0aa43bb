"""The abilities of a loaded model: the memory of its KV, and drafts."""

from dataclasses import replace
from typing import Any

from qllm.config import EngineConfig
from qllm.cores import memory_bytes
from qllm.cuda.shares import most_kv_bytes
from qllm.drafters.choose import load_drafter
from qllm.drafters.exit import Exit
from qllm.drafters.model import DraftModel
from qllm.drafters.protocol import MakeDrafter
from qllm.engine.draft_model import OwnModel
from qllm.engine.sizes import USUAL, Costs, sized
from qllm.engine.storage.pages import why_not
from qllm.errors import ConfigError
from qllm.models.discover import discover
from qllm.runner.layers.trial import kv_token_bytes
from qllm.runner.runner import TorchRunner


def cpu_costs(config: EngineConfig, runner: TorchRunner, drafting: OwnModel | None = None) -> Costs:
    """Return the numbers of a model on a CPU that the sizes of KV depend on.

    Args:
        config: Settings.
        runner: Runner of the model.
        drafting: The draft model, which holds KV of the same tokens.
    """
    shape, charge = runner.shape, runner.charge
    some = sized(replace(config, memory=None), 0, Costs(0))  # sizes can rule out cached KV
    return Costs(
        token_bytes=charge.token_bytes,
        state_bytes=charge.state_bytes,
        state_tokens=shape.state_tokens,
        most_tokens=config.max_num_seqs * (shape.max_position + shape.state_tokens),
        keeps=why_not(some, runner) is None,
        draft_bytes=0 if drafting is None else drafting.token_bytes,
    )


def device_costs(model: Any, config: EngineConfig) -> Costs:
    """Return the numbers of a model on a GPU that sizes depend on. Cached KV is on the host."""
    parts = discover(model)
    most = config.max_num_seqs * parts.shape.max_position
    if config.on_device:  # these buffers grow with the longest request
        most = USUAL.kv_tokens
    token_bytes = kv_token_bytes(parts, model)
    if config.tp > 1:
        token_bytes = most_kv_bytes(model, parts, config.tp, token_bytes)
    return Costs(token_bytes, most_tokens=most, keeps=False)


def refuse_sizes(
    config: EngineConfig, runner: TorchRunner, drafting: OwnModel | None = None
) -> None:
    """Refuse sizes that cannot work, so that the error comes at start and not later.

    Raises:
        ConfigError: KV has no room for one request, or cached KV, swapped KV, or KV of the draft
            model exceed the memory.
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
    draft_bytes = 0 if drafting is None else drafting.token_bytes
    if config.pool_tokens * draft_bytes > memory:
        raise ConfigError(
            f"draft={config.draft!r}: the draft model holds KV of up to max_kv_tokens="
            f"{config.pool_tokens} tokens, {draft_bytes} bytes each, and there are {memory} bytes "
            f"of memory; give max_kv_tokens at most {memory // draft_bytes}"
        )


def drafter_of(
    config: EngineConfig, runner: TorchRunner, own: DraftModel | None = None
) -> MakeDrafter | Exit | None:
    """Return the source of drafts that an engine's settings ask for; None for none.

    Args:
        config: Settings.
        runner: Runner of the model.
        own: The draft model, if the settings name one.

    Raises:
        ConfigError: The drafter is unknown or asks for a layer that the model does not have, or
            this model or device cannot verify drafts exactly.
    """
    if not config.has_drafts:
        return None
    make = load_drafter(config.draft) if own is None else own
    layers = runner.shape.num_layers
    if isinstance(make, Exit) and make.layer >= layers:
        raise ConfigError(
            f"draft={config.draft!r} leaves the model after {make.layer} layers, and the model has "
            f"{layers}; give a number in [1, {layers - 1}]"
        )
    if not (why := why_no_drafts(runner, by_rows=isinstance(make, Exit))):
        return make
    raise ConfigError(
        f"draft={config.draft!r} cannot be used with this model here: {why}; use draft='none'"
    )


def why_no_drafts(runner: TorchRunner, *, by_rows: bool) -> str:
    """Return why this model or device cannot verify drafts exactly; "" if it can.

    Args:
        runner: Runner of the model.
        by_rows: True if the model's first layers draft (`Exit`).
    """
    if by_rows and runner.parts.has_states:
        return "its layers carry a state, which draft rows would change"
    inexact = runner.backend.why_inexact
    return f"{inexact}, and a draft could change tokens" if inexact else ""
