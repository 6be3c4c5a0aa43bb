"""One load on a model whose experts are in a file, live and simulated, with the same disk.

The disk has a declared rate: a read of the engine ends when it would on a disk that serves reads
one after the other at this rate. So bytes and waits do not depend on the disk of this machine.
"""

import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from bench.common import Table
from qllm import QLLMEngine, SamplingParams
from qllm.models.loader import load
from qllm.plan import ModelShape
from qllm.record.summary import request_metrics
from qllm.sim.calibrate import LOADS, calibrate
from qllm.sim.costs import CostFile
from qllm.sim.experts import ExpertsOnDisk, Routing, SkewedRouting, TracedRouting
from qllm.sim.run import simulate
from qllm.types import NS_PER_MS, NS_PER_S, Priority
from qllm.workloads.spec import RequestSpec

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
TEXT = "".join(
    f"def area_{i}(width, height):\n    return width * height + {i}\n\n" for i in range(30)
)
LENGTHS, NUM_TOKENS = (60, 200, 8, 120, 30, 300), 24
"""Tokens of each prompt, and of each answer."""
FAST = 1e9
"""Bytes/s of a simulated disk whose times nothing looks at."""
GAP_S = 30.0
"""Virtual seconds between requests of which each follows the end of the one before."""
CLASSES = ("LS", "BE")
MOST_SKEW, NUM_HALVINGS = 3.0, 7
"""Largest skew of a fit, and the number of times that its interval is halved."""
BYTES_PER_S = 20e6
"""Rate of the declared disk. An expert of `tiny` takes 11 ms, far longer than on a real disk."""
BYTES_OFF, TIME_OFF = 0.15, 0.25
"""Largest part by which simulated bytes and waits may differ from those of an engine."""


WORDS = {"bytes": "bytes", "wait": "frames wait", "total": "all requests"}
"""Words of a table for the fields of `DiskUse`."""


class Load(NamedTuple):
    """Requests with the prompts of `LENGTHS`."""

    classes: str
    """Class of each request: L (LS) or B (BE)."""
    at_once: bool
    """True if all arrive together; False if each arrives after the end of the one before."""

    @property
    def names(self) -> list[str]:
        """Return the classes that occur."""
        return [name for name in CLASSES if name[0] in self.classes]


IN_TURN, TOGETHER = Load("BLBLBL", at_once=False), Load("BBBBBB", at_once=True)
FIT = 16, IN_TURN
"""Slots and load whose bytes fit the skew: half of the experts of `tiny`."""
OTHERS = (10, IN_TURN), (24, IN_TURN), (16, TOGETHER)
"""Slots and loads that are then simulated with this skew."""


class PacedDisk:
    """A disk of a declared rate, made of a faster one. Reads end one after the other.

    Args:
        read: Function that reads an expert: number of the layer and of the expert, and memory.
        bytes_per_s: Declared rate.
        clock_s: Clock in seconds.
        sleep_s: Function that sleeps for seconds.
    """

    def __init__(
        self,
        read: Callable[[int, int, Any], None],
        bytes_per_s: float,
        clock_s: Callable[[], float] = time.monotonic,
        sleep_s: Callable[[float], None] = time.sleep,
    ) -> None:
        self._read, self._bytes_per_s = read, bytes_per_s
        self._clock_s, self._sleep_s = clock_s, sleep_s
        self._lock, self._free_s = threading.Lock(), clock_s()
        self.num_late = 0
        """Number of reads for which the real disk took longer than the declared one."""

    def __call__(self, layer: int, expert: int, into: Any) -> None:
        """Read an expert, and return when the declared disk has it."""
        with self._lock:
            self._free_s = max(self._free_s, self._clock_s()) + len(into) / self._bytes_per_s
            end_s = self._free_s
        self._read(layer, expert, into)
        left_s = end_s - self._clock_s()
        if left_s > 0:
            self._sleep_s(left_s)
        else:
            with self._lock:
                self.num_late += 1


class Times(Protocol):
    """The part of a request's metrics that is compared."""

    @property
    def e2e_ms(self) -> float | None: ...


class DiskUse(NamedTuple):
    """The use of a disk by one run."""

    num_bytes: int
    """Bytes of experts that were read."""
    wait_s: float
    """Seconds that frames waited for experts."""
    total_s: float
    """Seconds in which there was a request."""


def use_of(experts: dict[str, Any], load: Load, times: Iterable[Times]) -> DiskUse:
    """Return the use of a disk by the statistics of experts and the metrics of the requests."""
    found = [time.e2e_ms for time in times]
    ended = [ms for ms in found if ms is not None]
    assert len(ended) == len(found) == len(LENGTHS), "each request ends"
    return DiskUse(
        sum(experts[name]["bytes"] for name in CLASSES),
        sum(experts[name]["waits_ms"] for name in CLASSES) * NS_PER_MS / NS_PER_S,
        (max(ended) if load.at_once else sum(ended)) * NS_PER_MS / NS_PER_S,
    )


class Live:
    """A load that an engine has served: its use of the disk, and all tokens.

    Args:
        model: Alias or folder of the model.
        num_slots: Number of experts that fit in memory.
        load: Requests.
        bytes_per_s: Rate of a declared disk; None reads as fast as the real one.
    """

    def __init__(
        self, model: str, num_slots: int, load: Load, bytes_per_s: float | None = None
    ) -> None:
        self.model, self.load = model, load
        self._bytes_per_s = bytes_per_s
        self.shape, self.expert_bytes = _sizes(model)
        self.max_bytes = num_slots * self.expert_bytes
        with (
            tempfile.TemporaryDirectory() as folder,
            QLLMEngine.from_pretrained(
                model,
                run_in="thread",
                threads=1,
                conformance=False,
                prefix_cache=False,
                max_expert_bytes=self.max_bytes,
                expert_dir=folder,
            ) as engine,
        ):
            self.disk = None if bytes_per_s is None else _paced(engine, bytes_per_s)
            self.prompts = self._prompts(engine)
            answers = self._serve(engine)
            self.stats = engine.stats()["experts"]
        assert self.stats["slots"] == num_slots
        assert self.stats["slot_bytes"] == self.max_bytes
        self.tokens = [
            [*prompt, *answer.token_ids]
            for prompt, answer in zip(self.prompts, answers, strict=True)
        ]
        """Prompt and answer of each request."""
        self.use = use_of(self.stats, load, [answer.metrics for answer in answers])

    def _prompts(self, engine: QLLMEngine) -> list[list[int]]:
        tokens = list(engine.tokenizer.encode(TEXT))
        return [tokens[7 * i : 7 * i + num] for i, num in enumerate(LENGTHS)]

    def _serve(self, engine: QLLMEngine) -> list[Any]:
        def submit(i: int) -> Any:
            kind = "LS" if self.load.classes[i] == "L" else "BE"
            return engine.submit(self.prompts[i], kind, NUM_TOKENS, sampling=GREEDY)

        every = range(len(LENGTHS))
        if not self.load.at_once:
            return [submit(i).result(300) for i in every]
        handles = engine.call(lambda: [submit(i) for i in every])
        return [handle.result(300) for handle in handles]

    def simulated(self, routing: Routing, costs: CostFile) -> tuple[DiskUse, dict[str, Any]]:
        """Simulate the same requests.

        Args:
            routing: Experts of their tokens.
            costs: Costs of the model on the machine.

        Returns:
            The use of the disk, and the statistics of experts. Without a declared disk, reads take
            nearly no time.
        """
        disk = ExpertsOnDisk(
            max_bytes=self.max_bytes,
            expert_bytes=self.expert_bytes,
            bytes_per_s=self._bytes_per_s or FAST,
            routing=routing,
        )
        specs = requests_of(LENGTHS, self.load.classes, 0.0 if self.load.at_once else GAP_S)
        found = simulate(specs, "qllm2", costs, disk=disk)
        return use_of(found.experts, self.load, request_metrics(found.events)), found.experts


def _paced(engine: QLLMEngine, bytes_per_s: float) -> PacedDisk:
    """Let the threads of an engine read from a disk of this rate."""
    client: Any = engine._client
    threads = client.loop.waits._threads
    threads._read = disk = PacedDisk(threads._read, bytes_per_s)
    return disk


def _sizes(model: str) -> tuple[ModelShape, int]:
    """Return the shape of a model in bf16, and the bytes of an expert in a file."""
    config: Any = load(model, dtype="bfloat16").model.config
    num = getattr(config, "num_local_experts", None) or config.num_experts
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    layers, top_k = config.num_hidden_layers, config.num_experts_per_tok
    shape = ModelShape(layers, num, top_k, (True,) * layers, config.vocab_size, 4096)
    num_bytes = 3 * config.hidden_size * width * 2
    return shape, -(-num_bytes // 4096) * 4096


def requests_of(lengths: Sequence[int], classes: str, gap_s: float) -> list[RequestSpec]:
    """Return requests of L (LS) and B (BE), with their arrivals so many seconds apart."""
    return [
        RequestSpec(
            at_s=gap_s * i,
            priority=Priority.LS if one == "L" else Priority.BE,
            num_prompt_tokens=num,
            max_tokens=NUM_TOKENS,
        )
        for i, (num, one) in enumerate(zip(lengths, classes, strict=True))
    ]


def recorded(live: Live) -> TracedRouting:
    """Record the experts of the tokens of a load, by the model's own routers."""
    model: Any = load(live.model, dtype="bfloat16").model
    found, top_k = [], live.shape.experts_per_token
    for ids in live.tokens:
        with torch.inference_mode():
            out = model(torch.tensor([ids]), output_router_logits=True)
        layers = [x.reshape(len(ids), -1).topk(top_k).indices.numpy() for x in out.router_logits]
        found.append(np.stack(layers, axis=1))
    return TracedRouting(found)


def fitted_skew(live: Live, costs: CostFile) -> float:
    """Return the skew with which the simulator reads as many bytes as an engine has read."""
    low, high = 0.0, MOST_SKEW
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        found, _ = live.simulated(SkewedRouting(live.shape, middle), costs)
        if found.num_bytes > live.use.num_bytes:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def simulator_rows(table: Table, rounds: int) -> dict[str, Any]:
    """Compare the simulator with an engine, by a routing trace and by a skew.

    The trace is recorded in one run of the engine, and used for all loads. The skew is fitted to
    the bytes of one run. It says little about other sizes of memory, so its rows have no target.

    Args:
        table: Table for the rows.
        rounds: Number of runs of the engine for each load, whose medians are compared.
    """
    short = [one for one in LOADS if one.prompt_tokens <= max(LENGTHS)]
    costs = calibrate("tiny", threads=1, rounds=rounds, loads=short)
    runs = [[Live("tiny", *one, BYTES_PER_S) for _ in range(rounds)] for one in (FIT, *OTHERS)]
    fit, every = runs[0][0], [live for lives in runs for live in lives]
    assert all(live.tokens == fit.tokens for live in every), "tokens depend on no memory"
    skew = fitted_skew(fit, costs)
    traced, drawn = recorded(fit), SkewedRouting(fit.shape, skew)
    by_trace = [ratios(lives, traced, costs) for lives in runs]
    by_skew = [ratios(lives, drawn, costs) for lives in runs[1:]]
    for name, most in (("bytes", BYTES_OFF), ("wait", TIME_OFF), ("total", TIME_OFF)):
        worst, text = _range(by_trace, name)
        table.add(f"simulated / live: {WORDS[name]}", text, f"1 +- {most:g}", worst <= most)
    for name, words in WORDS.items():
        table.add(f"  the same by a fitted skew: {words}", _range(by_skew, name)[1])
    late = sum(live.disk.num_late for live in every if live.disk is not None)
    table.add("  reads slower than the declared disk", f"{late}")
    return {
        "trace": by_trace,
        "skew": by_skew,
        "fitted_skew": skew,
        "bytes_per_s": BYTES_PER_S,
        "rounds": rounds,
        "late_reads": late,
    }


def ratios(lives: Sequence[Live], routing: Routing, costs: CostFile) -> dict[str, float]:
    """Return the use of the disk in the simulator over the median of an engine's runs."""
    found, _ = lives[0].simulated(routing, costs)
    uses = zip(*(live.use for live in lives), strict=True)
    pairs = zip(WORDS, found, uses, strict=True)
    return {name: ours / float(np.median(theirs)) for name, ours, theirs in pairs}


def _range(runs: Sequence[dict[str, float]], name: str) -> tuple[float, str]:
    """Return the largest distance of a ratio from 1, and the text of all."""
    found = [run[name] for run in runs]
    return max(abs(ratio - 1) for ratio in found), f"{min(found):.2f} to {max(found):.2f}"
