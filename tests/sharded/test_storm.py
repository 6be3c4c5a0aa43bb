"""Every rank is killed or stopped at every operation: each request is answered once, and the same.

The signal comes up to 2 ms after the start of the operation, so anywhere in it or in the next.
"""

import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qllm.kernels import cpu
from tests.support.engines import state
from tests.support.rank_faults import METHODS, signal_at
from tests.support.rank_hosts import RankHost, tiny_model
from tests.support.replay import COMPLETIONS, SAMPLED, SETTINGS, Asks, Client, body
from tests.support.serving import serving, tiny_engine
from tests.support.waiting import wait_for

assert cpu.MISSING is None, cpu.MISSING
TP, DEADLINE_S = 2, 2
REFUSED = 503
"""Status of a request that comes while a server makes a new engine."""
ALONE: dict[str, Any] = SETTINGS | {"prefix_cache": False}
"""Settings under which an answer does not tell the tokens that were cached."""
SHORT_OF_KV = ALONE | {"max_kv_tokens": 640, "swap_kv_tokens": 4096}
BE: Asks = [
    (COMPLETIONS, body(i, max_tokens=60, stream=True, service_tier="flex", **how))
    for i, how in [(40, {"temperature": 0}), (41, SAMPLED), (42, SAMPLED)]
]
LS: Asks = [(COMPLETIONS, body(20, temperature=0, max_tokens=8, stream=True))]


@pytest.fixture(scope="module")
def expected() -> Iterator[list[Any]]:
    """Answers of one process."""
    with serving(engine := tiny_engine(**ALONE)) as served:
        yield [Client(served, *ask).answer() for ask in BE + LS]
        engine.close()


CASES = [
    *(("one host", operation) for operation in METHODS),
    *(("two hosts", operation) for operation in METHODS if METHODS[operation] == "run"),
]
"""Places of the ranks, and operations. A swap makes no call of ranks."""


@contextmanager
def hosts_of(place: str) -> Iterator[list[str]]:
    """Yield the hosts of the ranks except rank 0."""
    if place == "one host":
        yield []
        return
    with RankHost(tiny_model, secret=b"") as host:
        yield [host.address]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("place", "operation"), CASES)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", range(TP))
def test_every_request_is_answered_once_whatever_rank_fails_at_whatever_operation(
    rank: int, how: signal.Signals, place: str, operation: str, expected: list[Any]
) -> None:
    """LS requests come one after the other, and preempt BE requests, until the engine is new."""
    with hosts_of(place) as hosts:
        ranks = {"tp": TP, "tp_hosts": hosts, "rank_deadline_s": DEADLINE_S}
        serve_and_fail(rank, how, operation, ranks, expected)


def serve_and_fail(
    rank: int, how: signal.Signals, operation: str, ranks: dict[str, Any], expected: list[Any]
) -> None:
    policy = "rota" if operation.startswith("swap") else "qllm2"
    new = partial(tiny_engine, policy=policy, **ranks, **SHORT_OF_KV)
    delay_s = 0.002 * random.Random(f"{rank} {how} {operation}").random()
    with serving(new(), new, restart_backoff_s=0) as served:
        engine = served.front.engine
        pids = [one["pid"] for one in engine.stats()["ranks"]]
        engine.call(partial(signal_at, operation, rank, how, delay_s))
        clients, late = [Client(served, *ask) for ask in BE], list[Client]()
        is_seen = False
        while served.front.engine is engine:
            if not late or not late[-1].is_alive():
                assert len(late) < 100, "no operation of this kind"
                late.append(Client(served, *LS[0]))
            late[-1].join(0.2)
            time.sleep(0.5 * (late[-1].status == REFUSED))
            if rank == 0 and not is_seen and is_stopped(pids[0]):
                is_seen = True
                engine.end_if_stuck(DEADLINE_S)  # the supervisor sees that the engine is silent
        assert [client.answer() for client in clients] == expected[:-1]
        for client in late:
            client.join()
        begun = [client for client in late if client.status != REFUSED]
        assert [client.answer() for client in begun] == expected[-1:] * len(begun)
        assert begun
        assert served.metric("qllm:engine_restarts_total") == 1
        wait_for(lambda: not any(map(is_there, pids)))
        served.front.engine.close()


def is_there(pid: int) -> bool:
    try:
        return state(Path(f"/proc/{pid}/stat")) != "Z"
    except OSError:
        return False


def is_stopped(pid: int) -> bool:
    return is_there(pid) and state(Path(f"/proc/{pid}/stat")) == "T"
