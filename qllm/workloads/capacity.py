"""The capacity of a machine: numbers that scale a workload."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qllm.errors import ConfigError
from qllm.types import SamplingParams

if TYPE_CHECKING:
    from qllm.llm import QLLMEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Throughput and room of one machine with one model."""

    prefill_tokens_per_s: float
    """Prompt tokens per second while only prompts run."""
    output_tokens_per_s: float
    """Output tokens per second while many requests decode and no prompt runs."""
    max_num_seqs: int = 32
    """Number of seats."""
    max_kv_tokens: int = 65536

    def __post_init__(self) -> None:
        for name in ("prefill_tokens_per_s", "output_tokens_per_s"):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"{name}={value!r} must be > 0")

    def requests_per_s(self, num_prompt_tokens: float, num_output_tokens: float) -> float:
        """Return the number of requests of this mean size that the machine completes per second."""
        prefill_s = num_prompt_tokens / self.prefill_tokens_per_s
        return 1 / (prefill_s + num_output_tokens / self.output_tokens_per_s)

    def times(self, engines: int) -> "Capacity":
        """Return the capacity of several such machines."""
        return Capacity(
            prefill_tokens_per_s=engines * self.prefill_tokens_per_s,
            output_tokens_per_s=engines * self.output_tokens_per_s,
            max_num_seqs=engines * self.max_num_seqs,
            max_kv_tokens=engines * self.max_kv_tokens,
        )


REFERENCE = Capacity(prefill_tokens_per_s=20_000.0, output_tokens_per_s=4_000.0)
"""Default without a measurement. Rates of a workload then describe no real machine."""


def measure_capacity(
    engine: "QLLMEngine",
    corpus: Sequence[int],
    *,
    prompt_tokens: int = 512,
    batch: int = 8,
    output_tokens: int = 24,
) -> Capacity:
    """Measure an idle engine: a few prompts one by one, then a batch that only decodes.

    Args:
        engine: Engine without other requests.
        corpus: Token ids that prompts are cut from.
        prompt_tokens: Tokens of each measured prompt.
        batch: Number of requests that decode together.
        output_tokens: Measured output tokens of each of these requests.
    """
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)

    def prompt(start: int, num: int) -> list[int]:
        return [corpus[(start * num + i) % len(corpus)] for i in range(num)]

    def prefill_s(start: int) -> float:
        begin = time.monotonic()
        engine.submit(prompt(start, prompt_tokens), "LS", 1, sampling=greedy).result()
        return time.monotonic() - begin

    prefill_s(0)  # warms the engine up
    per_prompt_s = min(prefill_s(i) for i in (1, 2, 3))
    handles = [
        engine.submit(prompt(i, 16), "LS", output_tokens, sampling=greedy) for i in range(batch)
    ]
    done = [h.result().metrics for h in handles]
    gaps = [m.tpot_ms for m in done if m is not None and m.tpot_ms is not None]
    return Capacity(
        prefill_tokens_per_s=prompt_tokens / per_prompt_s,
        output_tokens_per_s=batch * 1000 / sorted(gaps)[len(gaps) // 2],
        max_num_seqs=engine.config.max_num_seqs,
        max_kv_tokens=engine.config.pool_tokens,
    )
