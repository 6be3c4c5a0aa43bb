"""Number of replicas, chosen by the lateness of LS requests and the amount of waiting BE work.

Ray Serve's own policy counts requests. It treats a BE request of 4,000 tokens like an LS request of
20. But a replica full of BE work is no reason for another replica, because it serves its LS
requests at once.
"""

from math import ceil
from typing import Any

LATENESS, BE_TOKENS = "ls_lateness", "be_tokens"
"""Names of replicas' metrics: TTFT of LS over target, and tokens of BE requests not computed
yet."""
DOWN_BELOW = 0.5
"""Part of the LS target below which a replica may be removed."""
MOST_AT_ONCE = 2.0
"""Largest factor by which the number of replicas grows at once."""


def wanted(
    now: int, lateness: list[float], be_tokens: list[float], be_tokens_per_replica: int | None
) -> int:
    """Return the number of replicas that the load needs; the caller applies bounds and delays.

    Args:
        now: Number of present replicas.
        lateness: TTFT over target, per replica. The worst replica counts.
        be_tokens: Tokens of BE requests not computed yet, per replica.
        be_tokens_per_replica: Tokens per replica above which another replica is needed; None
            disables this rule.
    """
    worst = max(lateness, default=0.0)
    if worst > 1:
        for_ls = max(now + 1, ceil(now * min(worst, MOST_AT_ONCE)))
    else:
        for_ls = now - (worst < DOWN_BELOW)
    for_be = ceil(sum(be_tokens) / be_tokens_per_replica) if be_tokens_per_replica else 0
    return max(for_ls, for_be)


class Scaling:
    """The autoscaling policy of the engines' deployment. Ray Serve calls it.

    Args:
        be_tokens_per_replica: Tokens as for `wanted`.
    """

    def __init__(self, be_tokens_per_replica: int | None = None) -> None:
        self._be_tokens = be_tokens_per_replica

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the wanted number of replicas and an empty state.

        Args:
            context: Ray's `AutoscalingContext`.
        """
        found = context.aggregated_metrics or {}
        late, backlog = (list(found.get(name, {}).values()) for name in (LATENESS, BE_TOKENS))
        if not late:  # no replica has reported yet, or requests wait for a first replica
            is_asked = context.target_num_replicas == 0 and context.total_num_requests > 0
            return int(is_asked) or context.target_num_replicas, {}
        return wanted(context.target_num_replicas, late, backlog, self._be_tokens), {}
