"""A row on equals: an LS stream next to a flood of LS prompts, with a TPOT target and without."""

from itertools import pairwise
from statistics import median
from typing import Any

from bench.energy import Run, answered_tokens, metered
from bench.policies.live import Bench, Setting
from bench.policies.loads import GREEDY, prompts
from qllm import Slo
from qllm.record.trace import Token
from qllm.types import NS_PER_MS

CLIENTS = 8
TARGET_MS = 50.0
FREE = "qllm2:max_prompt_gap_ms=none"
"""Policy whose prompts take whole steps, whatever the target is."""
SIDES = ((FREE, None), ("qllm2", None), ("qllm2", TARGET_MS), ("chunked-priority", None))
REACH = {"gap": 1.1, "rate": 0.9}
"""Targets: the median gap over its bound; the rate of prompts over that of whole steps."""


def _side(
    bench: Bench, name: str, tpot_ms: float | None, num_tokens: int, energy: list[Run]
) -> dict[str, float]:
    """Measure the stream's gaps, and prompt tokens/s, while each client has one prompt running."""
    with bench.engine(Setting.parse(name), prefix_cache=False) as engine:
        (own,) = prompts(bench, 1, 64, 9000)
        stream = engine.submit(own, "LS", 4000, sampling=GREEDY, slo=Slo(tpot_ms=tpot_ms))
        tokens = iter(stream)
        for _ in range(10):
            next(tokens)
        start_ns = engine.now_ns()
        with metered(energy) as computed:
            asked = [
                engine.submit(ids, "LS", 1, sampling=GREEDY)
                for ids in prompts(bench, CLIENTS, num_tokens, 0)
            ]
            computed.append(answered_tokens(handle.result(600) for handle in asked))
        end_ns = engine.now_ns()
        next(tokens)
        stream.cancel()
        stream.result(600)
        at = [
            e.at_ns for e in engine.trace if isinstance(e, Token) and e.request_id == stream.number
        ]
    gaps = [(b - a) / NS_PER_MS for a, b in pairwise(at) if b > start_ns and a < end_ns]
    seconds = (end_ns - start_ns) / 1e9
    return {"p50_ms": median(gaps), "max_ms": max(gaps), "rate": CLIENTS * num_tokens / seconds}


def equals_row(bench: Bench, *, quick: bool) -> dict[str, Any]:
    """Measure the sides in turns; return the median over rounds of each number.

    A rate is compared inside its round, since another process may slow down a round.
    """
    num_tokens, rounds = (128, 1) if quick else (1024, 2)
    found: dict[tuple[str, float | None], list[dict[str, float]]] = {side: [] for side in SIDES}
    energy: dict[tuple[str, float | None], list[Run]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        for name, tpot_ms in SIDES:
            found[name, tpot_ms].append(
                _side(bench, name, tpot_ms, num_tokens, energy[name, tpot_ms])
            )
    whole = [one["rate"] for one in found[FREE, None]]
    sides = []
    for (name, tpot_ms), ones in found.items():
        over = [one["rate"] / rate for one, rate in zip(ones, whole, strict=True)]
        number = {key: median(one[key] for one in ones) for key in ("p50_ms", "max_ms", "rate")}
        side = {"setting": name, "target_ms": tpot_ms, **number, "over_whole": median(over)}
        sides.append(side | {"energy": energy[name, tpot_ms]})
    return {"prompt_tokens": num_tokens, "rounds": rounds, "sides": sides}
