"""A request of a workload by its lengths: what simulator, benchmark and trace files share."""

from dataclasses import dataclass, field

from qllm.types import Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """One request, before anybody chose its tokens."""

    at_s: float
    """Arrival since the start of the workload, in seconds."""
    priority: int
    """Its class, as `qllm.types.Priority`."""
    num_prompt_tokens: int
    max_tokens: int
    """Output tokens; fixed, the end of a sequence is ignored."""
    name: str = ""
    slo: Slo = field(default_factory=Slo)
