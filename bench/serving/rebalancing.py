"""Rows of `bench.serving.fleet`: stalled BE requests migrate to the other engine, or stay.

There are two engines of the 300M model, a thread each. BE arrives first, then LS at random for some
time. The mix makes one engine busier than the other:

    shared   route `prefix`, all LS begin with the same 1,024 tokens, so one engine gets most of it
    pinned   a user's own route: LS belongs to the first engine, BE goes to the one with most room
    class    route `class`: LS is spread, so few requests stall
"""

import random
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from qllm import QLLMEngine, SamplingParams
from qllm.config import EngineConfig
from qllm.fleet.rebalance import REBALANCE_S
from qllm.fleet.routes import EngineView, RequestView, Route, by_class, by_prefix
from qllm.ingress.remote.meeting import Address, Meeting
from qllm.measure.random_moe import make_random_moe
from qllm.measure.variants import KV_SIZES
from qllm.record.summary import percentile, request_metrics
from qllm.sim.fleet import simulate_fleet
from qllm.sim.presets import preset
from qllm.types import Priority
from qllm.workloads.spec import RequestSpec

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    **KV_SIZES,
    "threads": 1, "conformance": False, "exactness": "batch-invariant", "handover_gib": 1.0,
    "swap_kv_tokens": 8192, "prefix_cache": True,
}  # fmt: skip
VOCABULARY = 16000


def pinned(request: RequestView, engines: Any) -> EngineView:
    """Route LS to the first engine, as if its data were there."""
    return engines[0] if request.is_ls else by_class(request, engines)


MIXES: dict[str, tuple[Route, int]] = {
    "shared": (by_prefix, 1024), "pinned": (pinned, 0), "class": (by_class, 0)
}  # fmt: skip


@contextmanager
def two_engines() -> Iterator[str]:
    """Start two engines that connect to front ends over NIXL; yield their addresses."""
    with ExitStack() as stack:
        model, addresses = make_random_moe(size="300m"), []
        for _ in range(2):
            with socket.create_server(("127.0.0.1", 0)) as server:
                address = Address("127.0.0.1", int(server.getsockname()[1]))
            meeting = Meeting(address, "tcp", b"")
            stack.enter_context(QLLMEngine.from_pretrained(model, meeting=meeting, **SETTINGS))
            addresses.append(str(address))
        yield ",".join(addresses)


def serve(there: str, mix: str, rebalance_s: float, rate: float, ls_s: float, seed: int) -> Any:
    """Serve one mix; return the waits of BE and LS, and the tokens of BE."""
    rng = random.Random(seed)
    route, shared = MIXES[mix]

    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(8, VOCABULARY) for _ in range(tokens)]

    head = prompt(shared)
    be_prompts = [prompt(256) for _ in range(8)]
    ls: list[Any] = []
    with QLLMEngine.connect(there, route=route, rebalance_s=rebalance_s) as front:
        front.reset_prefix_cache()
        began = time.monotonic()
        be = [front.submit(p, "BE", 96, sampling=GREEDY) for p in be_prompts]
        done_s: dict[int, float] = {}

        def wait(number: int) -> None:
            be[number].result(timeout=600)
            done_s[number] = time.monotonic() - began

        threads = [threading.Thread(target=wait, args=(i,)) for i in range(len(be))]
        for thread in threads:
            thread.start()
        at_s = 0.0
        while (at_s := at_s + rng.expovariate(rate)) < ls_s:
            time.sleep(max(0.0, began + at_s - time.monotonic()))
            ls.append(front.submit([*head, *prompt(96)], "LS", 16, sampling=GREEDY))
        for thread in threads:
            thread.join()
        ttft_ms = [handle.result(timeout=600).metrics.ttft_ms for handle in ls]
        assert front.fleet is not None
        engines = front.fleet.engines()
    return {
        "be_mean_s": round(statistics.mean(done_s.values()), 2),
        "be_last_s": round(max(done_s.values()), 2),
        "ls": len(ls),
        "ls_ttft_p50_ms": round(percentile(ttft_ms, 50), 1),
        "ls_ttft_p99_ms": round(percentile(ttft_ms, 99), 1),
        "moved": sum(engine["moved"] for engine in engines),
        "sent": [engine["sent"] for engine in engines],
        "tokens": [handle.token_ids for handle in be],
    }


def capacity(there: str) -> float:
    """Return LS requests per second that the first engine serves, without a common beginning."""
    count, rng = 24, random.Random(0)
    with QLLMEngine.connect(there, route=pinned, rebalance_s=0) as front:
        began = time.monotonic()
        handles = [
            front.submit(
                [rng.randrange(8, VOCABULARY) for _ in range(96)], "LS", 16, sampling=GREEDY
            )
            for _ in range(count)
        ]
        for handle in handles:
            handle.result(timeout=600)
        return count / (time.monotonic() - began)


def bound(quick: bool, seed: int) -> dict[str, Any]:
    """Measure LS beyond the first engine's capacity; the second engine has half of BE alone.

    The row has BE completion and LS TTFT if stalled requests migrate after 1 s, or after the
    default, over never; the three run in turns.
    """
    rows: list[dict[float, Any]] = []
    rounds, ls_s = (1, 8.0) if quick else (3, 14.0)
    with two_engines() as there:
        serve(there, "class", 0, 3.0, 1.0, seed)  # the first pass touches the weights
        rate = 1.3 * capacity(there)
        for number in range(rounds):
            arms = (0.0, 1.0, REBALANCE_S)
            arms = arms[number % 3 :] + arms[: number % 3]
            found = {a: serve(there, "pinned", a, rate, ls_s, seed + number) for a in arms}
            told = {a: {k: v for k, v in arm.items() if k != "tokens"} for a, arm in found.items()}
            print(number, told, flush=True)
            rows.append(found)
    keys = ("be_mean_s", "be_last_s", "ls_ttft_p50_ms", "ls_ttft_p99_ms")
    ratios = {
        f"after {after_s} s over never": {
            **_medians([{k: row[after_s][k] / row[0.0][k] for k in keys} for row in rows]),
            "moved": [row[after_s]["moved"] for row in rows],
        }
        for after_s in (1.0, REBALANCE_S)
    }
    same = all(len({str(arm.pop("tokens")) for arm in row.values()}) == 1 for row in rows)
    runs = [{str(after_s): arm for after_s, arm in row.items()} for row in rows]
    return {"ls_per_s": round(rate, 2), **ratios, "same_tokens": same, "runs": runs}


def simulated(quick: bool, seed: int) -> dict[str, Any]:
    """Measure the same with two simulated engines of the 300M model on a CPU, without other work.

    `load` is that of one engine by LS: with `pinned` all of it goes to the first.
    """
    costs = preset("cpu", "300m", "auto")
    config = EngineConfig(max_kv_tokens=65536, handover_gib=1.0)
    capacity = costs.capacity(config)
    ls_s = 96 / capacity.prefill_tokens_per_s + 16 / capacity.output_tokens_per_s
    found: dict[str, Any] = {"simulated": costs.title}
    for mix, times in (("pinned", 1), ("class", 2)):
        for load in (0.7,) if quick else (0.7, 1.0, 1.4):
            rows = []
            for number in range(1 if quick else 5):
                specs = mixed(random.Random(seed + number), times * load / ls_s)
                arms = {}
                for after_s in (0.0, 1.0, REBALANCE_S):
                    served = simulate_fleet(
                        specs, "qllm2", costs, engines=2, route=MIXES[mix][0], config=config,
                        seconds=None, rebalance_s=after_s,
                    )  # fmt: skip
                    seen = request_metrics(served.events)
                    be_ms = [r.e2e_ms for r in seen if r.priority > Priority.LS]
                    ttft_ms = [r.ttft_ms for r in seen if r.priority <= Priority.LS]
                    arms[after_s] = {
                        "be_mean_s": statistics.mean(be_ms) / 1000,
                        "be_last_s": max(be_ms) / 1000,
                        "ls_ttft_p50_ms": percentile(ttft_ms, 50),
                        "ls_ttft_p99_ms": percentile(ttft_ms, 99),
                        "moved": served.trace.meta["moved"],
                    }
                rows.append(arms)
            found[f"{mix}, load {load}"] = {
                "stays": _medians([row[0.0] for row in rows]),
                **{
                    f"after {after_s} s over never": _medians(
                        [{k: v / row[0.0][k] for k, v in row[after_s].items() if k != "moved"}
                         | {"moved": row[after_s]["moved"]} for row in rows]
                    )
                    for after_s in (1.0, REBALANCE_S)
                },
            }  # fmt: skip
    return found


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(row[key] for row in rows), 3) for key in rows[0]}


def mixed(rng: random.Random, rate: float) -> list[RequestSpec]:
    """Return eight BE requests, and LS that arrives at random for 30 s."""
    specs = [
        RequestSpec(at_s=0.0, priority=Priority.BE, num_prompt_tokens=256, max_tokens=96)
        for _ in range(8)
    ]
    at_s = 0.0
    while (at_s := at_s + rng.expovariate(rate)) < 30:
        ls = RequestSpec(at_s=at_s, priority=Priority.LS, num_prompt_tokens=96, max_tokens=16)
        specs.append(ls)
    return specs


def rebalance(quick: bool, seed: int) -> dict[str, Any]:
    """Measure BE completion and LS TTFT with the default `rebalance_s` over never, alternated."""
    rows: dict[str, Any] = {}
    rounds, ls_s = (1, 12.0) if quick else (2, 20.0)
    with two_engines() as there:
        serve(there, "class", 0, 3.0, 4.0, seed)  # the first pass touches the weights
        for mix in MIXES:
            pairs = []
            for number in range(rounds):
                arms = (REBALANCE_S, 0.0) if number % 2 else (0.0, REBALANCE_S)
                found = {a: serve(there, mix, a, 1.5, ls_s, seed + number) for a in arms}
                same = len({str(arm.pop("tokens")) for arm in found.values()}) == 1
                print(mix, found, flush=True)
                pairs.append(
                    {"moves": found[REBALANCE_S], "stays": found[0.0], "same_tokens": same}
                )
            rows[mix] = {
                "moves_over_stays": {
                    key: round(
                        statistics.median(
                            pair["moves"][key] / pair["stays"][key] for pair in pairs
                        ),
                        2,
                    )
                    for key in ("be_mean_s", "be_last_s", "ls_ttft_p50_ms", "ls_ttft_p99_ms")
                },
                "pairs": pairs,
            }
    return rows
