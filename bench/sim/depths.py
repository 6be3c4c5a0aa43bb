"""A choice of depths against fixed depths. Simulated, on a made-up profile or a profile's file.

Three mixes of requests, and the three one after another. The choice is compared with each candidate
alone. A candidate that is over the bound in one of the mixes does not count as a rival, because a
fixed candidate would then break the promise. All arms are audited at the same share.

The last rows compute HELIOS' numbers from sizes. Nothing here ran a model. The last line of stdout
is one JSON document.
"""

import argparse
import random
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import Line, at_least, machine, print_result, result_file, with_lines
from qllm.fleet.choice import Rules
from qllm.models.depth_profile import Bin, DepthEntry, DepthProfile, parsed
from qllm.sim.depths import Asked, Served, candidates_of, simulate_depths

REACH = {"best": 0.95, "worst": 1.2, "single": 1.0}
"""Targets: tokens per second over the best fixed candidate, the worst, and the best for all."""


def _bins(agreed: float) -> tuple[Bin, ...]:
    """Return 10,000 positions, of which confident ones differ less often."""
    differing = round(10_000 * (1 - agreed))
    parts = [differing * part // 100 for part in (10, 20, 30, 20, 12, 6, 2)]
    nums = (100, 200, 700, 1500, 2000, 2500, 3000)
    return tuple(Bin(num, max(0, num - part)) for num, part in zip(nums, parts, strict=True))


def _entry(depth: int, chat: float, code: float, json: float, *per_s: float) -> DepthEntry:
    agreement = {"chat": chat, "code": code, "json": json}
    agreed = sum(agreement.values()) / len(agreement)
    return DepthEntry(depth, agreement, _bins(agreed), *per_s, depth * 50_000_000, 1 << 16)


PROFILE = DepthProfile(
    model="A",
    weights="made up",
    layers=24,
    memory=None,
    batch=8,
    depths=(
        _entry(6, 0.96, 0.90, 0.998, 160.0, 520.0, 1560.0),
        _entry(12, 0.996, 0.965, 0.999, 90.0, 300.0, 900.0),
        _entry(24, 1.0, 1.0, 1.0, 47.0, 160.0, 480.0),
    ),
)
"""A made-up profile of a model of 24 layers, with three candidates as in the paper. Which candidate
is the best within a bound of 2 % depends on the text."""


def mixes(rng: random.Random, count: int, kinds: tuple[str, ...] = ()) -> dict[str, list[Asked]]:
    """Return requests by kind of text."""
    return {
        kind: [Asked(kind, rng.randint(32, 256), rng.randint(32, 192)) for _ in range(count)]
        for kind in kinds or tuple(PROFILE.depths[0].agreement)
    }


class Sizes(NamedTuple):
    """The sizes of a model, and the layers that stay."""

    name: str
    layers: int
    kept: int
    width: int
    vocab: int
    positions: int

    def weight_bytes(self, layers: int) -> int:
        """Return the fp16 bytes of a model of so many layers: 12 matrices of the width a layer."""
        embeddings = (self.vocab + self.positions) * self.width
        return 2 * (layers * 12 * self.width**2 + embeddings)

    def batch(self, layers: int, memory: int, tokens: int) -> float:
        """Return the requests of so many tokens whose KV fits beside the weights."""
        request = 2 * 2 * layers * self.width * tokens
        return max(0, memory - self.weight_bytes(layers)) / request


OPT = (
    Sizes("OPT-1.3B", 24, 6, 2048, 50272, 2050),
    Sizes("OPT-6.7B", 32, 9, 4096, 50272, 2050),
)
"""Published sizes of OPT, and the layers that HELIOS loads."""
PAPER_BATCH, PAPER_SPEED = 15.14, 1.48
GIB = 1 << 30
A100 = 40 * GIB
TOKENS = 2048


def told(name: str, value: float) -> Line:
    """Return a row without a target."""
    return Line(name, f"{value:,.3g}", "-", None)


def computed() -> list[Line]:
    """Return the rows about HELIOS' own numbers, computed from sizes."""
    found = []
    for one in OPT:
        ratio = one.batch(one.kept, A100, TOKENS) / one.batch(one.layers, A100, TOKENS)
        tight = memory_of(one, PAPER_BATCH, TOKENS)
        freed = 1 - one.weight_bytes(one.kept) / one.weight_bytes(one.layers)
        what = f"computed, {one.name}, {one.kept} of {one.layers} layers"
        found += [
            told(f"{what}: part of the weights that is freed", freed),
            told(f"{what}: batch of 2,048 tokens each in 40 GiB, over the whole model", ratio),
            told(f"{what}: GiB in which the batch is {PAPER_BATCH} times as large", tight / GIB),
            told(f"{what}: bound of the throughput of layers alone", one.layers / one.kept),
        ]
    return found


def memory_of(sizes: Sizes, ratio: float, tokens: int) -> float:
    """Return the memory in which a cut model has `ratio` times the batch of the whole one.

    With the memory M, weights W, KV K of a request, and kept parts w and k: (M - w) / k =
    ratio (M - W) / K.
    """
    whole, cut = sizes.weight_bytes(sizes.layers), sizes.weight_bytes(sizes.kept)
    deeper = sizes.layers / sizes.kept
    return (ratio * whole - deeper * cut) / (ratio - deeper)


def arms(
    asked: dict[str, list[Asked]], profile: DepthProfile, rules: Rules, seed: int
) -> dict[str, dict[str, Served]]:
    """Serve each mix, and all one after another, with each candidate and with the choice."""
    together = [one for some in asked.values() for one in some]
    names = [one.name for one in candidates_of(profile)]
    return {
        kind: {
            "auto": simulate_depths(some, [profile], rules=rules, seed=seed),
            **{
                name: simulate_depths(some, [profile], rules=rules, fixed=name, seed=seed)
                for name in names
            },
        }
        for kind, some in {**asked, "all": together}.items()
    }


def lines_of(document: dict[str, Any]) -> list[Line]:
    """Return the rows of a result."""
    found, bound = [], document["config"]["max_disagreement"]
    mixed = {kind: arm for kind, arm in document["arms"].items() if kind != "all"}
    able = {
        name
        for name in document["arms"]["all"]
        if name != "auto" and all(arm[name]["disagreement"] <= bound for arm in mixed.values())
    }
    for kind, arm in mixed.items():
        auto = arm["auto"]["tokens_per_s"]
        speeds = {
            name: one["tokens_per_s"]
            for name, one in arm.items()
            if name != "auto" and one["disagreement"] <= bound
        }
        best, worst = max(speeds, key=lambda x: speeds[x]), min(speeds, key=lambda x: speeds[x])
        what = f"simulated, {kind}: tokens/s of auto over"
        found.append(
            at_least(f"{what} the best fixed ({best})", auto / speeds[best], REACH["best"])
        )
        if worst != best:
            ratio = auto / speeds[worst]
            found.append(at_least(f"{what} the worst fixed ({worst})", ratio, REACH["worst"]))
        found.append(told(f"simulated, {kind}: disagreement of auto", arm["auto"]["disagreement"]))
    arm = document["arms"]["all"]
    best = max(able, key=lambda name: arm[name]["tokens_per_s"])
    ratio = arm["auto"]["tokens_per_s"] / arm[best]["tokens_per_s"]
    what = "simulated, the mixes one after another: tokens/s of auto over the best for all"
    found.append(at_least(f"{what} ({best})", ratio, REACH["single"]))
    found.append(told("simulated, all: disagreement of auto", arm["auto"]["disagreement"]))
    return [*found, *computed()]


def main() -> None:
    """Simulate all arms, and compute the paper's numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000, help="requests of each mix")
    parser.add_argument("--profile", type=Path, help="a file of qllm profile --depths")
    parser.add_argument("--max-disagreement", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=result_file)
    args = parser.parse_args()
    profile = PROFILE if args.profile is None else parsed(args.profile.read_text())
    rules = Rules(max_disagreement=args.max_disagreement)
    kinds = tuple(profile.depths[0].agreement)
    found = arms(mixes(random.Random(args.seed), args.requests, kinds), profile, rules, args.seed)
    document = {
        "bench": "depths",
        "machine": machine(),
        "config": {
            "profile": "made up" if args.profile is None else profile.model,
            "requests": args.requests,
            "max_disagreement": args.max_disagreement,
            "seed": args.seed,
        },
        "arms": {
            kind: {
                name: {
                    "tokens_per_s": round(one.tokens_per_s, 2),
                    "disagreement": round(one.disagreement, 5),
                    "changes": one.changes,
                    "audited": one.audited,
                }
                for name, one in arm.items()
            }
            for kind, arm in found.items()
        },
    }
    print_result(with_lines(document, lines_of(document)), args.out)


if __name__ == "__main__":
    main()
