"""What a machine can do, in numbers that a workload is scaled by."""

from dataclasses import dataclass

from qllm.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Throughput and room of one machine with one model."""

    prefill_tokens_per_s: float
    """Prompt tokens per second when nothing else runs."""
    output_tokens_per_s: float
    """Output tokens per second with many requests decoding and no prefill."""
    max_num_seqs: int = 32
    """Seats."""
    max_kv_tokens: int = 65536

    def __post_init__(self) -> None:
        for name in ("prefill_tokens_per_s", "output_tokens_per_s"):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"{name}={value!r} must be > 0")

    def requests_per_s(self, num_prompt_tokens: float, num_output_tokens: float) -> float:
        """Requests of this mean size that the machine completes per second."""
        prefill_s = num_prompt_tokens / self.prefill_tokens_per_s
        return 1 / (prefill_s + num_output_tokens / self.output_tokens_per_s)


REFERENCE = Capacity(prefill_tokens_per_s=20_000.0, output_tokens_per_s=4_000.0)
"""Stands in where nobody measured: rates of a workload then mean nothing of a real machine."""
