"""The statistics of experts that come and go."""

from typing import Any

from qllm.engine.storage.waits import ExpertWaits
from qllm.runner.residency import Residency


def expert_stats(residency: Residency | None, waits: ExpertWaits | None) -> dict[str, Any]:
    """Return the statistics of experts; {} if all are in memory. Callable from any thread.

    Args:
        residency: Slots of the runner.
        waits: Frames that wait for experts; None if the runner itself reads all experts.
    """
    if residency is None:
        return {}
    return {
        "file": residency.where,
        "file_bytes": residency.stored_bytes,
        "slot_bytes": residency.num_bytes,
        "resident": residency.num_resident,
        "slots": residency.num_slots,
        "experts": residency.num_experts,
        "waiting": 0,
        "failure": None,
        "blocking": {"loads": residency.num_blocking, "bytes": residency.blocking_bytes},
        **({} if waits is None else waits.stats()),
    }
