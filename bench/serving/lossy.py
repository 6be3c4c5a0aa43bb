"""Lossy answers of a server: what a cut model gains, whether the bound holds, what audits cost.

    auto     `lossy: true`: the server chooses among the whole model and two that are cut
    NAME     the same requests at one model, with nothing to choose

The profile is measured first, on the package's texts. The requests are other texts: chats, code and
JSON, made of drawn words. All models of a server are loaded in every arm, and the arms alternate.
Every answer of `auto` is read by the whole model afterwards, and each token that differs counts.

A random model agrees with its depths by chance, so `auto` stays with the whole one there. `--model`
takes another one. The output is a table, then one JSON line.
"""

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from transformers import AutoTokenizer

from bench.common import Table, machine, plain, result_file
from bench.energy import Run, answered_tokens, metered
from bench.serving.qllm_serve import Serve, serving
from qllm import QLLMEngine
from qllm.config import engine_config
from qllm.fleet.choice import DENSE, Rules
from qllm.measure.depths import default_texts, profile_depths
from qllm.measure.random_moe import make_random_moe
from qllm.models import depth_profile
from qllm.models.depth_profile import DepthProfile
from qllm.record.summary import percentile
from qllm.types import Priority
from qllm.workloads.client import TIERS, Server, saturate_http, talk_http
from qllm.workloads.spec import Arrival

TARGETS = {"batch": 0.9, "best": 0.95, "worst": 1.2, "single": 1.0, "be": 0.93, "ttft": 1.05}
MEMORY = {"300m": "2GiB", "1m": "1GiB"}
AT_ONCE = 4
"""Requests that are open at the same time."""
MOST_S = 600.0
"""Most seconds for the answers of an arm, or for one audit."""
KINDS = {
    "chat": "User: Tell me why a {} is a {} without its {}.\nAssistant:",
    "code": "class {0}:\n    def __init__(self, {1}):\n        self.x = {1}\n\n    def {2}(self):",
    "json": '[{{"{0}": 1, "{1}": "{2}"}}, {{"{0}": 2, "{1}": "',
}
"""Begin of the requests' texts, by kind."""
WORDS = ("river", "lamp", "window", "table", "garden", "bottle", "engine", "letter", "market")


class Arm(NamedTuple):
    """The answers of one arm to one mix."""

    prompts: Sequence[Sequence[int]]
    answers: Sequence[Sequence[int]]
    """Token ids of each prompt and of its answer."""
    seconds: float
    """Time to the last token."""
    energy: Run

    @property
    def per_s(self) -> float:
        """Return tokens of answers per second."""
        return sum(map(len, self.answers)) / self.seconds


class Side(NamedTuple):
    """A server, and the tokenizer of its models."""

    url: str
    tokenizer: Any

    def arrival(
        self, name: str, text: str, num: int, at_s: float = 0.0, priority: Priority = Priority.LS
    ) -> Arrival:
        """Return a request with a text."""
        ids = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return Arrival(at_s=at_s, name=name, priority=priority, token_ids=ids, max_tokens=num)

    def asks(self, model: str) -> Server:
        """Return the form of requests: LS to a model, BE to the whole one. `auto` allows a loss."""
        lossy = {"lossy": True} if model == "auto" else {}
        ls = {"model": model, "return_token_ids": True, **lossy}
        be = {"service_tier": TIERS[Priority.BE]}
        return Server(url=self.url, model="whole", bodies={Priority.LS: ls, Priority.BE: be})


def texts_of(kind: str, count: int, seed: int) -> list[str]:
    """Return the prompts of a mix."""
    rng = random.Random(f"{kind} {seed}")
    return [KINDS[kind].format(*rng.sample(WORDS, 3)) * 2 for _ in range(count)]


def run_arm(side: Side, texts: Sequence[str], num: int, model: str) -> Arm:
    """Send the requests of a mix, `AT_ONCE` at a time.

    Raises:
        RuntimeError: A request was not answered.
    """
    runs = list[Run]()
    arrivals = [side.arrival(str(i), text, num) for i, text in enumerate(texts)]
    with metered(runs) as computed:
        served = saturate_http(side.asks(model), arrivals, AT_ONCE, MOST_S)
        computed.append(answered_tokens(served))
    if wrong := [one.error for one in served if not one.done]:
        raise RuntimeError(f"{len(wrong)} requests to {model!r} were not answered: {wrong[0]}")
    answers = {one.spec.name: one.token_ids for one in served}
    return Arm(
        prompts=[arrival.token_ids for arrival in arrivals],
        answers=[answers[arrival.name] for arrival in arrivals],
        seconds=max(one.token_s[-1] for one in served),
        energy=runs[0],
    )


def disagreement(url: str, arm: Arm) -> tuple[int, int]:
    """Return the tokens of an arm, and those that the whole model would not choose."""
    differing = num = 0
    for prompt, ids in zip(arm.prompts, arm.answers, strict=True):
        read = {
            "model": "whole", "prompt": [*prompt, *ids], "max_tokens": 1, "temperature": 0,
            "prompt_logprobs": 1, "service_tier": "flex",
        }  # fmt: skip
        answer = httpx.post(f"{url}/v1/completions", json=read, timeout=MOST_S)
        answer.raise_for_status()
        scores = answer.json()["choices"][0]["prompt_logprobs"][len(prompt) :]
        for token_id, score in zip(ids, scores, strict=True):
            num += 1
            differing += next(i for i, x in score.items() if x["rank"] == 1) != str(token_id)
    return num, differing


@contextmanager
def server(
    folder: Path, depths: Sequence[int], profile: Path, share: float, bound: float
) -> Iterator[Serve]:
    """Serve a model whole and at some depths, with lossy answers."""
    also = [text for depth in depths for text in ("--also", f"at{depth}={folder}@{depth}")]
    with serving(
        str(folder), "--served-model-name", "whole", *also, "--auto", "true", "--lossy", "true",
        "--depth-profile", str(profile), "--audit-share", str(share),
        "--max-disagreement", str(bound), "--threads", "1",
        "--set", "conformance=false", "--set", "max_kv_tokens=16384",
    ) as made:  # fmt: skip
        yield made


def learn(side: Side, num: int) -> None:
    """Send answers until closed candidates have read enough of them, so that only a share is."""
    count = DENSE * Rules().trials + 2
    run_arm(side, texts_of("chat", count, 99), num, "auto")
    deadline = time.monotonic() + MOST_S
    while _audits(side.url) < count and time.monotonic() < deadline:
        time.sleep(0.2)


def _audits(url: str) -> float:
    """Return the fewest audits of a candidate that is cut."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    found = [x for x in lines if x.startswith("qllm:lossy_audits_total") and '"at' in x]
    return min(float(x.rpartition(" ")[2]) for x in found)


def beside_be(side: Side, seconds: float, seed: int, num: int) -> dict[str, Any]:
    """Send lossy LS requests beside endless BE; return TTFTs of LS, and tokens of BE per second."""
    rng, at_s, ls, runs = random.Random(seed), 0.0, list[Arrival](), list[Run]()
    while (at_s := at_s + rng.expovariate(1.0)) < seconds:
        text = texts_of("chat", 1, rng.randrange(1 << 30))[0]
        ls.append(side.arrival(f"ls-{len(ls)}", text, 8, at_s))
    be = (
        side.arrival(f"be-{n}", f"{n} {' '.join(rng.sample(WORDS, 5)) * 4}", num, 0.0, Priority.BE)
        for n in itertools.count()
    )
    with metered(runs) as computed:
        served = talk_http(side.asks("auto"), ls, seconds, batch=be, depth=2)
        computed.append(answered_tokens(served))
    end_s = max(one.token_s[-1] for one in served if one.token_s)
    of_be = [one for one in served if one.spec.priority == Priority.BE]
    return {
        "ttft_ms": [one.ttft_ms(end_s) for one in served if one.spec.priority == Priority.LS],
        "be_per_s": answered_tokens(of_be) / end_s,
        "energy": runs[0],
    }


class Room(NamedTuple):
    """The room for KV in an engine with a budget of memory."""

    tokens: int
    num_bytes: float
    """Bytes that the rule gives to KV, before it rounds."""
    token_bytes: float


def room(folder: Path, depth: int, memory: str) -> Room:
    """Return the room for KV of a model at a depth."""
    with QLLMEngine.from_pretrained(
        folder, depth=depth, memory=memory, conformance=False, threads=1
    ) as engine:
        told = engine.stats()["memory"]
        tokens = engine.config.pool_tokens
        return Room(tokens, told["free_bytes"], told["kv_bytes"] / tokens)


def sizes(table: Table, folder: Path, profile: DepthProfile, memory: str) -> dict[str, Room]:
    """Add the rows on sizes and speeds of half the layers; return the rooms for KV."""
    half = next(one for one in profile.depths if one.depth == profile.layers // 2)
    whole = profile.depths[-1]
    rooms = [room(folder, depth, memory) for depth in (half.depth, whole.depth)]
    batch = rooms[0].tokens / rooms[1].tokens
    fits = [one.num_bytes / one.token_bytes for one in rooms]
    value = batch / (fits[0] / fits[1])
    text = f"{value:.2f} ({batch:.2f} times as many)"
    name = "KV tokens (largest batch), half the layers / whole, over the ratio of bytes"
    table.add(name, text, f">= {TARGETS['batch']}", value >= TARGETS["batch"])
    for what, key in (("alone", "alone_per_s"), ("8 together", "batch_per_s")):
        ratio = getattr(half, key) / getattr(whole, key)
        text = f"{ratio:.2f} ({half.agreed:.1%} of the tokens agree)"
        table.add(f"speed of decode in the profile, {what}, half the layers / whole", text)
    return {"half": rooms[0], "whole": rooms[1]}


def mixes(
    table: Table, side: Side, names: Sequence[str], count: int, num: int, rounds: int, bound: float
) -> dict[str, Any]:
    """Add the rows on mixes; return tokens per second of each arm."""
    order = [*KINDS, "all"]
    rates: dict[str, dict[str, list[float]]] = {k: {n: [] for n in names} for k in order}
    wrong: dict[str, dict[str, list[tuple[int, int]]]] = {k: {n: [] for n in names} for k in order}
    energy: dict[str, list[Run]] = {k: [] for k in order}
    for seed in range(rounds):
        asked = {kind: texts_of(kind, count, seed) for kind in KINDS}
        asked["all"] = [text for kind in KINDS for text in asked[kind]]
        for kind, some in asked.items():
            for name in random.Random(seed).sample(list(names), len(names)):
                arm = run_arm(side, some, num, name)
                rates[kind][name].append(arm.per_s)
                energy[kind] += [arm.energy] if name == "auto" else []
                wrong[kind][name].append(disagreement(side.url, arm))
    mean = {k: {n: statistics.mean(x) for n, x in of.items()} for k, of in rates.items()}
    part = {
        k: {n: sum(d for _, d in x) / sum(num for num, _ in x) for n, x in of.items()}
        for k, of in wrong.items()
    }
    for kind in order:
        auto = mean[kind]["auto"]
        kinds = KINDS if kind == "all" else (kind,)
        able = [n for n in names if n != "auto" and all(part[k][n] <= bound for k in kinds)]
        best = max(able, key=lambda n: mean[kind][n])
        worst = min(able, key=lambda n: mean[kind][n])
        least = TARGETS["single" if kind == "all" else "best"]
        what = "the mixes one after another" if kind == "all" else kind
        ratio = auto / mean[kind][best]
        text = f"{ratio:.2f} ({auto:.1f} / {mean[kind][best]:.1f})"
        name, target = f"{what}: tokens/s, auto / best fixed ({best})", f">= {least}"
        table.add(name, text, target, ratio >= least, energy=energy[kind])
        if worst != best:
            ratio = auto / mean[kind][worst]
            least = TARGETS["worst"]
            name = f"{what}: tokens/s, auto / worst fixed ({worst})"
            target = f">= {least}"
            table.add(name, f"{ratio:.2f}", target, ratio >= least, energy=energy[kind])
        loss = part[kind]["auto"]
        of_auto = f"{what}: part of the tokens of auto that differs"
        table.add(of_auto, f"{loss:.4f}", f"<= {bound}", loss <= bound)
    return {"tokens_per_s": rates, "differing": part}


def audits(table: Table, found: Mapping[str, Sequence[Mapping[str, Any]]], share: float) -> None:
    """Add the rows on the cost of audits."""
    be = {name: statistics.mean(x["be_per_s"] for x in runs) for name, runs in found.items()}
    p99 = {
        name: percentile([t for x in runs for t in x["ttft_ms"]], 99)
        for name, runs in found.items()
    }
    ratio, least = be["audited"] / be["not"], TARGETS["be"]
    name = f"BE tokens/s, {share:.0%} of LS answers audited / none"
    energy = [run["energy"] for run in found["audited"]]
    table.add(name, f"{ratio:.2f}", f">= {least}", ratio >= least, energy=energy)
    ratio, most = p99["audited"] / p99["not"], TARGETS["ttft"]
    text = f"{ratio:.2f} ({p99['audited']:.0f} / {p99['not']:.0f} ms)"
    table.add(f"LS TTFT p99, {share:.0%} audited / none", text, f"<= {most}", ratio <= most)


def main() -> None:
    """Measure, print the table and the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, a few requests")
    parser.add_argument("--model", help="a model of your own; default: random, 300M")
    parser.add_argument("--max-disagreement", type=float, default=0.02)
    parser.add_argument("--memory", help="budget of an engine in the profile, as 2GiB")
    parser.add_argument("--out", type=result_file)
    args = parser.parse_args()
    size = "1m" if args.quick else "300m"
    count, num, rounds, seconds = (4, 12, 1, 4.0) if args.quick else (40, 64, 3, 60.0)
    folder = Path(args.model) if args.model else make_random_moe(size=size)
    settings = {"memory": args.memory or MEMORY[size]}
    config = engine_config(settings)
    share, table = 0.05, Table()
    tokens = 128 if args.quick else 1024
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    depths = sorted({max(1, layers // 4), layers // 2})
    how = {"named": depths, "tokens": tokens, "threads": 1}
    profile = profile_depths(str(folder), default_texts(), config, settings, **how)
    rooms = sizes(table, folder, profile, settings["memory"])
    with tempfile.TemporaryDirectory(prefix="qllm-lossy-") as place:
        file = Path(place) / "depths.json"
        depth_profile.write(profile, file)
        names = ("auto", "whole", *(f"at{depth}" for depth in depths))
        bound = args.max_disagreement
        with (
            server(folder, depths, file, share, bound) as first,
            server(folder, depths, file, 1e-9, bound) as none,
        ):
            tokenizer = AutoTokenizer.from_pretrained(folder)
            sides = {"audited": Side(first.url, tokenizer), "not": Side(none.url, tokenizer)}
            for side in sides.values():
                learn(side, num)
            found = mixes(table, sides["audited"], names, count, num, rounds, bound)
            runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
            for seed in range(rounds):
                for name in sorted(sides, reverse=seed % 2 == 1):
                    runs[name].append(beside_be(sides[name], seconds, seed, num))
    audits(table, runs, share)
    about = {
        "model": args.model or size, "depths": depths, "count": count, "tokens": num,
        "rounds": rounds, "max_disagreement": args.max_disagreement, "audit_share": share,
        "memory": settings["memory"],
    }  # fmt: skip
    rows = {"profile": profile._asdict(), "rooms": rooms, **found, "beside": runs}
    result = {"bench": "lossy", "machine": machine(), "config": about, "rows": plain(rows)}
    table.finish(result, args.out)


if __name__ == "__main__":
    main()
