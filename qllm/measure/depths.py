"""The measured numbers of a model's depths, for `qllm profile --depths`.

agreement, confidence   one run of the whole model over texts: each layer's answers are those of
                        the model that is cut there (qllm.measure.profile)
tokens per second, bytes, tokens of KV   an engine of each depth, one after the other
"""

import gc
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from torch import Tensor

from qllm.config import EngineConfig
from qllm.errors import ConfigError, shown
from qllm.llm import QLLMEngine
from qllm.measure.profile import probing
from qllm.measure.profile_texts import require_tokens, tokens_of
from qllm.models.depth_profile import EDGES, Bin, DepthEntry, DepthProfile, weights_digest
from qllm.models.loader import load
from qllm.record.metrics import RequestMetrics
from qllm.types import SamplingParams

EVERY = 12
"""Most layers of a model of which each is a candidate by default."""
SPREAD = 8
"""Number of candidates of a deeper model by default, the whole model among them."""
BATCH = 8
"""Number of requests that decode together."""
PROMPT, ANSWER = 64, 48
"""Tokens of a measured request."""
ROUNDS = 3
"""Number of times that the requests are measured. The fastest counts: other programs slow one down.
"""
MOST_S = 600.0
"""Longest time for the measured requests of one engine, in seconds."""
TEXTS = ("chat", "code", "json", "prose")
"""Names of the texts that come with the package, files of `qllm/measure/texts`."""


def default_texts() -> dict[str, str]:
    """Return the texts that come with the package, by name. No bench uses them."""
    folder = files("qllm.measure") / "texts"
    return {name: (folder / f"{name}.txt").read_text(encoding="utf-8") for name in TEXTS}


def candidates(layers: int, named: Sequence[int] | None) -> tuple[int, ...]:
    """Return the depths to measure, shallow to deep. The last is the whole model.

    Args:
        layers: Number of layers of the model.
        named: Depths that the user named; None chooses all, or `SPREAD` of them.

    Raises:
        ConfigError: A named depth is no number of layers that the model has.
    """
    for depth in named or ():
        if not 1 <= depth <= layers:
            raise ConfigError(
                f"--candidates: depth {shown(depth)} must be in [1, {layers}], the layers of the "
                "model"
            )
    if named is None:
        num = layers if layers <= EVERY else SPREAD
        named = [round(layers * i / num) for i in range(1, num + 1)]
    return tuple(sorted({*named, layers}))


def bins_of(agreed_T: Tensor, confidence_T: Tensor) -> list[Bin]:
    """Count positions and those that agree, per bin of confidence."""
    nums, right = [0] * len(EDGES), [0] * len(EDGES)
    for agreed, confidence in zip(agreed_T.tolist(), confidence_T.tolist(), strict=True):
        at = bisect_right(EDGES, confidence) - 1
        nums[at] += 1
        right[at] += agreed
    return [Bin(*pair) for pair in zip(nums, right, strict=True)]


def profile_depths(
    model: str,
    texts: Mapping[str, str],
    config: EngineConfig,
    settings: Mapping[str, Any],
    *,
    named: Sequence[int] | None = None,
    tokens: int = 2048,
    threads: int | None = None,
    **how: Any,
) -> DepthProfile:
    """Measure a model at several depths, on the CPU.

    Args:
        model: An alias, a folder, a GGUF file, or a hub id.
        texts: Texts by name.
        config: Settings of the engine that would serve the model, without a depth.
        settings: The same settings as they were given.
        named: Depths to measure; None chooses them. The whole model is always measured.
        tokens: Most tokens of a text.
        threads: Number of threads; None is torch's number.
        how: Keywords of `load`: dtype, trust_remote_code.

    Raises:
        ConfigError: A depth is not one of the model, a text is too short, or a setting does not fit
            this model.
        ModelError: The model cannot be driven safely, has one layer, or its answers are not finite.
    """
    digest = weights_digest(model)
    loaded = load(model, expert_weights=config.expert_weights, **how)
    prefix, kinds = tokens_of(loaded, texts, tokens)
    ids = {name: kind.ids for name, kind in kinds.items()}
    for name, some in ids.items():
        require_tokens(name, some)
    with probing(loaded, config, prefix, threads) as probe:
        layers = probe.runner.shape.num_layers
        depths = candidates(layers, named)
        counted = {
            name: _counted(probe.answers(some), depths, len(some)) for name, some in ids.items()
        }
    name, prompts = loaded.name, _prompts(prefix, ids)
    del loaded, probe
    gc.collect()  # the engines must find the memory of an engine that serves
    return DepthProfile(
        model=name,
        weights=digest,
        layers=layers,
        memory=None if config.memory is None else int(config.memory),
        batch=BATCH,
        depths=tuple(
            DepthEntry(
                depth=depth,
                agreement={
                    name: sum(one.agreed for one in found[at]) / len(ids[name])
                    for name, found in counted.items()
                },
                bins=tuple(_added([found[at] for found in counted.values()])),
                **_served(model, depth, prompts, threads, {**how, **settings}),
            )
            for at, depth in enumerate(depths)
        ),
    )


def _counted(parts: Any, depths: Sequence[int], num: int) -> list[list[Bin]]:
    """Return the bins of each depth on one text."""
    found: list[list[list[Bin]]] = [[] for _ in depths]
    for early in parts:
        answers_T, _ = early[-1]
        for at, depth in enumerate(depths):
            early_T, confidence_T = early[depth - 1]
            found[at].append(bins_of(early_T == answers_T, confidence_T))
    added = [_added(each) for each in found]
    assert all(sum(one.num for one in bins) == num for bins in added)
    return added


def _added(each: Sequence[Sequence[Bin]]) -> list[Bin]:
    """Add the bins of several parts."""
    return [
        Bin(sum(one.num for one in at), sum(one.agreed for one in at))
        for at in zip(*each, strict=True)
    ]


def _prompts(prefix: Sequence[int], ids: Mapping[str, Sequence[int]]) -> list[list[int]]:
    """Return the prompts of the measured requests, from all texts in turn."""
    found, kinds = [], list(ids.values())
    for n in range(BATCH):
        kind = kinds[n % len(kinds)]
        begin = n // len(kinds) * PROMPT % max(1, len(kind) - PROMPT)
        found.append([*prefix, *kind[begin : begin + PROMPT]])
    return found


def _served(
    model: str,
    depth: int,
    prompts: Sequence[Sequence[int]],
    threads: int | None,
    how: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the numbers of an engine of one depth: its sizes, and the speed of its decode."""
    greedy = SamplingParams(temperature=0, ignore_eos=True)
    settings = {"conformance": False, **how, "depth": depth, "threads": threads}
    with QLLMEngine.from_pretrained(model, **settings) as engine:

        def measured(some: Sequence[Sequence[int]], at: int) -> list[RequestMetrics]:
            """Run some requests, which find no cached KV of an earlier round."""
            handles = [
                engine.submit(list(ids), "BE", ANSWER, sampling=greedy, cache_salt=f"round {at}")
                for ids in some
            ]
            return [handle.result(MOST_S).metrics for handle in handles]

        measured(prompts[:1], 0)  # kernels and memory are touched for the first time
        alone = [measured(prompts[:1], at)[0] for at in range(1, ROUNDS + 1)]
        together = [measured(prompts, -at) for at in range(1, ROUNDS + 1)]
        return {
            "alone_per_s": max(_rate(one.tpot_ms) for one in alone),
            "batch_per_s": max(math.fsum(_rate(x.tpot_ms) for x in each) for each in together),
            "prompt_per_s": max(len(prompts[0]) * _rate(one.ttft_ms) for one in alone),
            "weight_bytes": int(engine.stats()["weight_bytes"]),
            "kv_tokens": engine.config.pool_tokens,
        }


def _rate(each_ms: float | None) -> float:
    """Return the number of times per second; a time below a microsecond counts as one."""
    return 1000 / max(1e-3, each_ms or 0)
