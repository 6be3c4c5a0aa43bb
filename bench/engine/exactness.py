"""Rows about tokens: mixed against solo runs, and against `generate` without qllm."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from bench.common import ROOT, Job, make_jobs
from qllm import QLLMEngine, SamplingParams
from qllm.measure.variants import KV_SIZES
from qllm.record.summary import request_metrics
from qllm.record.trace import Parked

ALL_LOGPROBS = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=20)


class ReferenceProcess:
    """A child process that runs `reference.py`."""

    def __init__(self, folder: Path, dtype: str = "bfloat16", threads: int = 1) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "bench.engine.reference", str(folder), dtype, str(threads)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(20)
        except subprocess.TimeoutExpired:
            self._child.kill()

    def ask(self, command: str, **values: Any) -> dict[str, Any]:
        """Send one command and wait for its answer."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps({"command": command, **values}) + "\n")
        self._child.stdin.flush()
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"the reference process ended during {command!r}")
        answer: dict[str, Any] = json.loads(line)
        if answer.pop("qllm_imported"):
            raise RuntimeError("the reference process has imported qllm")
        return answer


def mixed_streams(engine: QLLMEngine, jobs: Sequence[Job], seed: int) -> list[Any]:
    """Return results of a mixed run: the longer half as BE at once, the others as LS meanwhile."""
    rng = np.random.default_rng(seed)
    order = sorted(range(len(jobs)), key=lambda i: -len(jobs[i].token_ids))
    be, ls = order[: len(order) // 2], order[len(order) // 2 :]
    handles = {}
    for i in be:
        job = jobs[i]
        handles[i] = engine.submit(job.token_ids, "BE", job.max_tokens, sampling=ALL_LOGPROBS)
    for i in ls:
        time.sleep(float(rng.exponential(0.05)))
        job = jobs[i]
        handles[i] = engine.submit(job.token_ids, "LS", job.max_tokens, sampling=ALL_LOGPROBS)
    return [handles[i].result(600) for i in range(len(jobs))]


def solo_streams(engine: QLLMEngine, jobs: Sequence[Job]) -> list[Any]:
    """Return results of the same jobs, run one after the other."""
    return [
        engine.submit(j.token_ids, "BE", j.max_tokens, sampling=ALL_LOGPROBS).result(600)
        for j in jobs
    ]


def own_streams(model: Any, jobs: Sequence[Job], exactness: str, seed: int) -> dict[str, Any]:
    """Return mixed and solo runs of one engine."""
    with QLLMEngine.from_model(
        model, exactness=exactness, record=True, conformance=False, threads=1, **KV_SIZES
    ) as engine:
        mixed = mixed_streams(engine, jobs, seed)
        num_mixed = len(engine.trace)
        solo = solo_streams(engine, jobs)
        events = list(engine.trace)[:num_mixed]
    metrics = request_metrics(events)
    return {
        "mixed": mixed,
        "solo": solo,
        "preemptions": sum(isinstance(e, Parked) and e.preempted for e in events),
        "preempt_recomputed_tokens": sum(m.preempt_recomputed_tokens for m in metrics),
    }


def compare_own(runs: dict[str, Any]) -> dict[str, Any]:
    """Return the share of mixed streams equal to their solo run, in tokens and 20 log-probs."""
    pairs = list(zip(runs["mixed"], runs["solo"], strict=True))
    tokens = sum(a.token_ids == b.token_ids for a, b in pairs)
    bits = sum(a.token_ids == b.token_ids and a.logprobs == b.logprobs for a, b in pairs)
    return {
        "streams": len(pairs),
        "token_equal": tokens,
        "logprob_bit_equal": bits,
        "positions": sum(len(b.token_ids) for _, b in pairs),
        "distinct_tokens_per_stream": [len(set(b.token_ids)) for _, b in pairs],
        "preemptions": runs["preemptions"],
        "preempt_recomputed_tokens": runs["preempt_recomputed_tokens"],
    }


def compare_generate(
    streams: Sequence[Any], reference: dict[str, Any], process: ReferenceProcess
) -> dict[str, Any]:
    """Return the share of streams equal to `generate`, and first divergences against the noise."""
    noise = np.asarray(reference["noise"])
    first: list[dict[str, Any]] = []
    for i, (stream, want) in enumerate(zip(streams, reference["tokens"], strict=True)):
        got = list(stream.token_ids)
        at = next((p for p, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), None)
        if at is not None:
            found = process.ask("margin", job=i, position=at, token_id=got[at])
            first.append({"stream": i, "position": at, **found})
    most = float(noise.max())
    shifted = sum(
        list(s.token_ids)[1:] == w[:-1] for s, w in zip(streams, reference["tokens"], strict=True)
    )
    return {
        "streams": len(streams),
        "token_equal": len(streams) - len(first),
        "first_divergences": first,
        "unexplained": sum(d["margin"] > most for d in first),
        "noise_p50": float(np.percentile(noise, 50)),
        "noise_p99": float(np.percentile(noise, 99)),
        "noise_max": most,
        "margin_p50": float(np.median(np.concatenate(reference["margins"]))),
        "equal_if_shifted_by_one": shifted,
    }


def exactness_row(
    load: Any, folder: Path, count: int, seed: int, dtypes: Sequence[str]
) -> dict[str, Any]:
    """Measure rows 1 to 3, per dtype and exactness."""
    short = make_jobs(seed, count - count // 3, (64, 192), (16, 24))
    jobs = short + make_jobs(seed + 1, count // 3, (512, 1024), (16, 24))
    out: dict[str, Any] = {}
    for dtype in dtypes:
        model = load(dtype)
        with ReferenceProcess(folder, dtype) as process:
            reference = process.ask("generate", jobs=jobs)
            for exactness in ("batch-invariant", "order"):
                runs = own_streams(model, jobs, exactness, seed)
                entry = compare_own(runs)
                entry["generate"] = compare_generate(runs["mixed"], reference, process)
                entry["generate_solo"] = compare_generate(runs["solo"], reference, process)
                out[f"{dtype} {exactness}"] = entry
        del model
    return out
