"""Servers of the papers' model: ours and peers over HTTP, started for one run each."""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from bench.papers.rows import World
from bench.policies.live import Timing
from bench.serving.servers import PEERS, InstallError, Peer, Place, free_port, installed, serving
from qllm.measure.random_moe import cache_dir, make_random_moe
from qllm.types import Priority, Slo
from qllm.workloads.client import Server, send_http
from qllm.workloads.measure import Served, report
from qllm.workloads.spec import RequestSpec
from qllm.workloads.tokens import with_tokens

WARM_S = 5.0
"""Seconds in which a new server answers two short requests."""


def home_of(world: World, peer: Peer) -> Path:
    """Return the environment of a peer.

    Raises:
        InstallError: The peer is not installed, and this run may not install it or failed to.
    """
    cache = cache_dir() / "peers"
    is_there = peer.environment is None or (cache / f"{peer.environment}.json").exists()
    if not is_there and not world.scale.install:
        raise InstallError(f"{peer.name} is not installed here; run with --install")
    return installed(peer, cache)


class CoreTime(NamedTuple):
    """Nanoseconds in which threads ran, and in which they could run and waited for a core."""

    ran: int
    waited: int

    def waited_since(self, before: "CoreTime") -> float:
        """Return the part of the time since `before` in which threads waited for a core."""
        ran, waited = self.ran - before.ran, self.waited - before.waited
        return waited / (ran + waited) if ran + waited else 0.0


def core_time(session: int) -> CoreTime:
    """Return the time of all threads in a session of processes, from the kernel's scheduler.

    A thread that has ended does not count.
    """
    ran, waited = 0, 0
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(place.name)) != session:
                continue
            for file in place.glob("task/*/schedstat"):
                times = file.read_text().split()
                ran, waited = ran + int(times[0]), waited + int(times[1])
        except OSError:  # the process or the thread has ended
            continue
    return CoreTime(ran, waited)


class Started(NamedTuple):
    """A server that runs, and the session of its processes."""

    server: Server
    session: int


@contextmanager
def started(world: World, peer: Peer, warm: Sequence[RequestSpec]) -> Iterator[Started]:
    """Start a server, and send it the first two requests with four tokens each.

    Raises:
        InstallError: The peer is not there.
    """
    from transformers import AutoTokenizer

    model = make_random_moe(size=world.scale.size, seed=0)
    place = Place(home_of(world, peer), model, free_port(), 1)
    server = peer.server(place, AutoTokenizer.from_pretrained(model))
    with (
        tempfile.TemporaryDirectory(prefix="qllm-papers-") as folder,
        serving(peer, place, Path(folder) / "log") as process,
    ):
        arrivals = with_tokens(list(warm[:2]), world.bench.corpus)
        first = [replace(a, at_s=0.0, max_tokens=4) for a in arrivals]
        send_http(server, first, WARM_S, until_answered=True)
        yield Started(server, process.pid)


def rows_of_server(
    world: World,
    arm: str,
    requests: Sequence[RequestSpec],
    timing: Timing,
    slo: Slo,
    be_slo: Slo | None = None,
) -> dict[str, Any]:
    """Serve requests by a server; return what `bench.policies.live.run_requests` returns of them.

    Raises:
        InstallError: The peer is not there.
    """
    peer = PEERS[arm]
    with started(world, peer, requests) as (server, _):
        arrivals = with_tokens(requests, world.bench.corpus)
        served = send_http(server, arrivals, timing.total_s, until_answered=True)
    return samples_of(served, timing, {Priority.LS: slo, Priority.BE: be_slo or Slo()}, peer)


def samples_of(
    served: Sequence[Served], timing: Timing, slos: Mapping[int, Slo], peer: Peer
) -> dict[str, Any]:
    """Return the classes and the samples of LS.

    Raises:
        RuntimeError: A request failed.
    """
    found = report(served, timing.window, slos)
    if errors := sum(of["errors"] for of in found.values()):
        said = next(s.error for s in served if s.error)
        raise RuntimeError(f"{errors} requests to {peer.name} failed: {said}")
    window = timing.window
    counted = [s for s in served if s.spec.priority == Priority.LS and window.counts(s.spec)]
    return {
        "classes": {name: found[name] for name in ("LS", "BE") if name in found},
        "samples": {
            "ttft_ms": [s.ttft_ms(window.stop_s) for s in counted],
            "tpot_ms": [t for s in counted if (t := s.tpot_ms) is not None],
            "e2e_ms": {s.spec.name: s.e2e_ms(window.stop_s) for s in counted},
            "met": sum(s.meets(slos[Priority.LS]) for s in counted),
        },
    }
