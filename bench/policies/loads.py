"""Expert weights read per request: prefills cut by tokens against prefills cut by layers."""

import time
from collections.abc import Sequence
from typing import Any

from bench.policies.live import Bench, Setting
from bench.policies.routing import forced
from qllm import QLLMEngine, SamplingParams
from qllm.record.trace import Planned, Token

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
CHUNKED, LAYERED = "chunked:step_tokens=256", "layered:group_tokens=256"
SETTINGS = ("fcfs", CHUNKED, LAYERED, "priority-layered:group_tokens=256")
"""Settings with eight chunks, or eight groups of layers, for 2,048 tokens."""
DECODE_BATCHES = (2, 4, 8)
CONTEXT = 64


def prompts(bench: Bench, count: int, num_tokens: int, offset: int) -> list[list[int]]:
    """Return different cuts of the corpus."""
    step = num_tokens + 17
    ids = bench.corpus
    return [
        [ids[(offset + i * step + j) % len(ids)] for j in range(num_tokens)] for i in range(count)
    ]


def _bytes(engine: QLLMEngine) -> int:
    """Return the expert bytes so far, read between two programs."""
    return int(engine.call(lambda: engine.stats()["expert_bytes"]))


def prefill_only(bench: Bench, setting: Setting, num_tokens: int, count: int) -> dict[str, Any]:
    """Measure expert bytes per prompt, prompts one after the other."""
    with bench.engine(setting) as engine:
        before = _bytes(engine)
        for ids in prompts(bench, count, num_tokens, 0):
            engine.submit(ids, "BE", 1, sampling=GREEDY).result(600)
        return {
            "bytes_per_request": (_bytes(engine) - before) / count,
            "programs_per_request": sum(isinstance(e, Planned) for e in engine.trace) / count,
        }


def co_running(
    bench: Bench, setting: Setting, num_tokens: int, count: int, batch: int
) -> dict[str, Any]:
    """Measure expert bytes from a prompt's submission to its first token while others decode.

    All requests are of one class. The bytes include those of the decodes: all reads of the machine
    until the first token count.
    """
    with bench.engine(setting) as engine:
        deciders = [
            engine.submit(ids, "BE", 4000, sampling=GREEDY)
            for ids in prompts(bench, batch, CONTEXT, 5000)
        ]
        _until_tokens(engine, [d.number for d in deciders], 2)
        total, tokens = 0, 0
        for ids in prompts(bench, count, num_tokens, 0):
            before, seen = _bytes(engine), _num_tokens(engine)
            engine.submit(ids, "BE", 1, sampling=GREEDY).result(600)
            total += _bytes(engine) - before
            tokens += _num_tokens(engine) - seen - 1
        for handle in deciders:
            handle.cancel()
        return {"bytes_per_request": total / count, "decode_tokens_per_request": tokens / count}


def _num_tokens(engine: QLLMEngine) -> int:
    return sum(isinstance(e, Token) for e in list(engine.trace.events))


def _until_tokens(engine: QLLMEngine, numbers: Sequence[int], least: int) -> None:
    """Wait until each of these requests has so many tokens."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        tokens = [e.request_id for e in list(engine.trace.events) if isinstance(e, Token)]
        if all(tokens.count(n) >= least for n in numbers):
            return
        time.sleep(0.02)
    raise TimeoutError(f"no {least} tokens of each of {list(numbers)} in two minutes")


def loads_row(bench: Bench, *, quick: bool) -> dict[str, Any]:
    """Measure bytes per request by routing, mode and policy; name missing policies."""
    num_tokens, count = (1024, 1) if quick else (2048, 2)
    batches = DECODE_BATCHES[1:2] if quick else DECODE_BATCHES
    out: dict[str, Any] = {"prompt_tokens": num_tokens, "context_tokens": CONTEXT, "missing": []}
    settings = [Setting.parse(text) for text in SETTINGS]
    out["missing"] = [s.name for s in settings if not s.is_installed]
    for kind in ("uniform", "skewed"):
        entry: dict[str, Any] = {"prefill_only": {}}
        entry |= {f"co_run_{batch}": {} for batch in batches}
        with forced(bench.model, kind):
            for setting in settings:
                if not setting.is_installed:
                    continue
                found = prefill_only(bench, setting, num_tokens, count)
                entry["prefill_only"][setting.name] = found
                for batch in batches:
                    entry[f"co_run_{batch}"][setting.name] = co_running(
                        bench, setting, num_tokens, count, batch
                    )
        out[kind] = entry
        for mode in [m for m in entry if m != "ratios"]:
            a, b = (entry[mode].get(name) for name in (CHUNKED, LAYERED))
            ratio = a["bytes_per_request"] / b["bytes_per_request"] if a and b else None
            out.setdefault("ratios", {})[f"{kind} {mode}"] = ratio
    return out
