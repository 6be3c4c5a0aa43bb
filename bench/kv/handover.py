"""Row of `bench.kv` about a request that migrates to another engine."""

import socket
import statistics
import time
from contextlib import ExitStack
from typing import Any

from bench.kv.parts import GREEDY, make_engine, make_ids, wait_until
from qllm import QLLMEngine
from qllm.frontend.request_log import RequestLog
from qllm.frontend.saved_request import SavedRequest
from qllm.ingress.remote.meeting import Address, Meeting

NUM = 64
"""Tokens of the answer; the request migrates in its middle."""
SETTINGS: dict[str, Any] = {"handover_gib": 1.0, "swap_kv_tokens": 8192}


def _engine(stack: ExitStack, model: str, profile: str) -> tuple[QLLMEngine, QLLMEngine]:
    """Start an engine, and a front end that connects like one of another host."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address("127.0.0.1", int(server.getsockname()[1]))
    meeting = Meeting(address, profile, b"")
    owner = stack.enter_context(make_engine(model, meeting=meeting, **SETTINGS))
    far = QLLMEngine.connect(str(address), profile=profile)
    return owner, stack.enter_context(far)


def _moved(
    engines: list[tuple[QLLMEngine, QLLMEngine]], ids: list[int], to: str, with_kv: bool
) -> dict[str, Any]:
    """Migrate one request from the first engine; return the time to the second's next token."""
    (first, near), (second, far) = engines
    for engine in (first, second):
        engine.reset_prefix_cache()

    left: list[int] = []

    def go_on(entry: SavedRequest) -> None:
        left.append(len(entry.handle.token_ids))
        if not with_kv:
            entry.source = None
        far.replay(entry)

    log = RequestLog(3, lambda: None)
    log.go_on(go_on)
    taken = far.stats()["handover"]["taken"]
    handle = near.submit(ids, to, NUM, sampling=GREEDY)
    log.keep(handle)
    wait_until(lambda: len(handle.token_ids) >= NUM // 2)
    client: Any = near._client
    start = time.perf_counter()
    client.give_away(handle.number)
    wait_until(lambda: left and len(handle.token_ids) > left[0])
    seconds = time.perf_counter() - start
    tokens = handle.result(600).token_ids
    came = far.stats()["handover"]["taken"] - taken
    return {"seconds": seconds, "tokens": tokens, "came": came}


def handover_row(model: str, rounds: int, context: int, profile: str) -> dict[str, Any]:
    """Measure the time from the order to the next token: with the KV over recomputing it.

    Both engines have `THREADS` threads; one engine computes at a time. Half of the rounds are LS,
    the others BE.
    """
    arms: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    with ExitStack() as stack:
        engines = [_engine(stack, model, profile) for _ in range(2)]
        _moved(engines, make_ids(899, 300), "BE", True)  # the first pass touches the weights
        for i in range(rounds):
            for with_kv in (True, False) if i % 2 else (False, True):
                ids, to = make_ids(900 + i, context), ("LS", "BE")[i % 2]
                arms[with_kv].append(_moved(engines, ids, to, with_kv))
        alone = [engines[0][0].submit(make_ids(900 + i, context), "BE", NUM, sampling=GREEDY)
                 .result(600).token_ids for i in range(rounds)]  # fmt: skip
        given = engines[0][1].stats()["handover"]
    pairs = list(zip(arms[True], arms[False], strict=True))
    return {
        "context": context,
        "profile": profile,
        "with_kv_s": statistics.median(a["seconds"] for a in arms[True]),
        "computed_s": statistics.median(a["seconds"] for a in arms[False]),
        "handover_over_computing": statistics.median(a["seconds"] / b["seconds"] for a, b in pairs),
        "pairs": [a["seconds"] / b["seconds"] for a, b in pairs],
        "asked": 0.1,
        "given_tokens": given["given_tokens"],
        "same_tokens": all(
            a["tokens"] == b["tokens"] == c for (a, b), c in zip(pairs, alone, strict=True)
        ),
        "hits_due": all(a["came"] == 1 for a in arms[True])
        and not any(b["came"] for b in arms[False]),
    }
