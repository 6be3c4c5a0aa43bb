"""The time that each part of the bench of the papers takes, from this machine's measured rates."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from bench.papers.parts import (
    LAYERED_OUTPUT_LIVE,
    LAYERED_SETTINGS,
    layered_timing,
    long_prompts,
)
from bench.papers.prompts import LAPS, LAPS_LOADS, chats_per_s, laps_timing
from bench.papers.prompts import chats as chats_of
from bench.papers.rates import FRONTIER, POINT, policies_of, workload_of
from bench.papers.rotation import ARMS, LOAD, OUTPUT, PROMPT, drain_s
from bench.papers.rows import World

STREAM_RUNS = 2 * 2 + 3
"""Runs per seed of the part `streams`: two workloads in two forms, and three policies."""


class Span(NamedTuple):
    """Seconds from the least, without a drain, to the most, with whole drains."""

    least_s: float
    most_s: float

    def times(self, count: float) -> "Span":
        """Return the span of several runs."""
        return Span(count * self.least_s, count * self.most_s)

    def text(self) -> str:
        """Return the span in minutes."""
        return f"{self.least_s / 60:,.0f} to {self.most_s / 60:,.0f} min"


def total(spans: Iterator[Span]) -> Span:
    """Return the sum of spans."""
    least, most = 0.0, 0.0
    for span in spans:
        least, most = least + span.least_s, most + span.most_s
    return Span(least, most)


def _rates(world: World) -> Iterator[Span]:
    scale = world.scale
    for i, load in enumerate(scale.loads):
        timing = workload_of(world, load)[1]
        runs = len(policies_of(scale) if i == 0 else POINT) + 1 + len(scale.arms)
        if load == max(scale.loads):
            runs += len(FRONTIER)
        yield Span(timing.window.end_s, timing.total_s).times(runs * len(scale.seeds))


def _layered(world: World) -> Iterator[Span]:
    scale = world.scale
    requests = long_prompts(world.capacity, scale.count, scale.prompt, LAYERED_OUTPUT_LIVE, 1)
    timing = layered_timing(world.capacity, requests, scale.prompt[1])
    yield Span(timing.window.end_s, timing.total_s).times(len(LAYERED_SETTINGS))


def _rotation(world: World) -> Iterator[Span]:
    seeds, count = world.scale.rota
    capacity = world.capacity
    pair_s = 2 * PROMPT / capacity.prefill_tokens_per_s + 8 * OUTPUT / capacity.output_tokens_per_s
    arrivals_s = count * pair_s / (2 * LOAD)
    yield Span(pair_s, pair_s)
    runs = seeds * (len(ARMS) + 1)
    yield Span(arrivals_s, arrivals_s + drain_s(pair_s)).times(runs)


def _laps(world: World) -> Iterator[Span]:
    scale = world.scale
    for seed in scale.seeds:
        for load in LAPS_LOADS.values():
            requests = chats_of(chats_per_s(world.capacity, load), scale.chats, seed)
            timing = laps_timing(requests, scale.timing.drain_s)
            last_s = max(r.at_s for r in requests)
            yield Span(last_s, timing.total_s).times(len(LAPS))


def _streams(world: World) -> Iterator[Span]:
    seconds = world.scale.stream_s
    yield Span(seconds, 2 * seconds).times(STREAM_RUNS * len(world.scale.seeds))


def _hogs(world: World) -> Iterator[Span]:
    seconds, runs = world.scale.hog_s, 3 + len(world.scale.arms)
    yield Span(seconds, 1.5 * seconds).times(2 * runs)


ESTIMATES: Mapping[str, Callable[[World], Iterator[Span]]] = {
    "rates": _rates,
    "layered": _layered,
    "rotation": _rotation,
    "laps": _laps,
    "streams": _streams,
    "hogs": _hogs,
}
"""Parts whose runs have a known length. `layered-sim` is simulated, and takes seconds."""


def estimated(world: World, part: str) -> Span | None:
    """Return the time of a part; None for a part that is simulated.

    It is computed from the rates of this machine (`World.capacity`, measured at the first use), and
    has no time for starts of engines and servers.
    """
    spans = ESTIMATES.get(part)
    return None if spans is None else total(spans(world))


def lines(world: World, parts: list[str]) -> list[str]:
    """Return a line per part, and the sum."""
    capacity = world.capacity
    found = {part: estimated(world, part) for part in parts}
    out = [
        f"at {capacity.prefill_tokens_per_s:,.0f} prompt and "
        f"{capacity.output_tokens_per_s:,.0f} output tokens/s of this machine, without starts of "
        "engines and servers:"
    ]
    for part, span in found.items():
        out.append(f"{part:<12} {'simulated, seconds' if span is None else span.text()}")
    whole = total(span for span in found.values() if span is not None)
    return [*out, f"{'together':<12} {whole.text()}"]
