"""Limits of decisions, derived from an engine's settings."""

from qllm.config import EngineConfig
from qllm.scheduler.decision import Limits
from qllm.types import CAPABILITIES, NS_PER_MS, Cap


def limits_of(
    config: EngineConfig, capabilities: Cap = CAPABILITIES, *, whole_steps: bool = False
) -> Limits:
    """Return the limits of an engine whose runner has these capabilities.

    Args:
        config: Settings.
        capabilities: Abilities of the runner.
        whole_steps: True if each boundary inside a step costs a launch.
    """
    if config.num_swap_blocks:
        capabilities |= Cap.KV_SWAP
    return Limits(
        max_num_seqs=config.max_num_seqs,
        max_step_tokens=config.max_step_tokens,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        grain=config.grain,
        max_segment_ns=int(min(config.max_segment_ms, 1e6) * NS_PER_MS),
        batch_invariant=config.batch_invariant,
        capabilities=capabilities,
        num_swap_blocks=config.num_swap_blocks,
        whole_steps=whole_steps,
        floor=config.floor,
    )
