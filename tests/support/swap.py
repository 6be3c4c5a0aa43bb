"""A state machine in which KV is swapped out and in, and a pool too small for its requests."""

from dataclasses import replace
from typing import Any

from qllm.plan import Plan
from qllm.policy import View
from qllm.record.metrics import RequestMetrics
from qllm.sim.world import LIMITS, World
from qllm.types import CAPABILITIES, Cap
from tests.support.scheduling import Fuzz


def short_of_kv(num_blocks: int, num_swap_blocks: int = 10_000) -> Any:
    return replace(
        LIMITS,
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks,
        capabilities=CAPABILITIES | Cap.KV_SWAP,
    )


def metrics_of(world: World) -> list[RequestMetrics]:
    found = [world.metrics[i] for i in sorted(world.finished)]
    return [m for m in found if m is not None]


class SwapFuzz(Fuzz):
    """Like `Fuzz`, and moves KV of random requests out."""

    def ending(self, view: View, rows: list[Any]) -> Plan:
        plan = super().ending(view, rows)
        gone = {row.request_id for row in rows} | set(plan.drop)
        room, out = view.num_free_swap_blocks, []
        for q in view.requests:
            size = -(-q.num_written_tokens // view.block_size)
            ran = q.is_admitted and q.last_progress_ns > q.admitted_ns
            if ran and q.request_id not in gone and size <= room and self.r.random() < 0.6:
                room -= size
                out.append(q.request_id)
        return replace(plan, swap_out=tuple(out))
