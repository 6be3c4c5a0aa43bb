"""Our engine on a folder of bf16 weights, timed in its own process.

    python -m bench.models.ours_rate FOLDER THREADS MAX_SEGMENT_MS EXPERT_WEIGHTS SEATS

Questions and answers: `answering.py`.
"""

import sys
import time
from pathlib import Path
from typing import Any

from bench.models.answering import answer, of_rows
from qllm import Handle, QLLMEngine, SamplingParams

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
KV_TOKENS = 1 << 17
"""Tokens of KV: a state of linear attention counts as some thousands, and 48 rows have one each.
Memory is used only as needed."""
LONGEST_S = 600


def memory_gb() -> dict[str, float]:
    """Return the anonymous memory of this process now, and the most memory that it had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kb = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith("kB")}
    return {"now_gb": round(kb["RssAnon"] / 1e6, 2), "peak_gb": round(kb["VmHWM"] / 1e6, 2)}


def token_times(handle: Handle, start_ns: int) -> list[float]:
    """Return the engine's times of a request's tokens, in seconds since the start."""
    metrics = handle.result(LONGEST_S).metrics
    assert metrics.ttft_ms is not None
    times = [(metrics.arrival_ns - start_ns) / 1e9 + metrics.ttft_ms / 1e3]
    for gap_ms in metrics.itl_ms:
        times.append(times[-1] + gap_ms / 1e3)
    return times


class Asked:
    """An engine, and the questions that it answers."""

    def __init__(self, engine: QLLMEngine) -> None:
        self._engine = engine

    def rates(self, prompt: list[int], tokens: int) -> tuple[float, float]:
        """Return the seconds of a prompt, and of a token after the first."""
        found = self.many({"prompts": [prompt], "tokens": tokens})
        return found["prompt_s"], found["token_s"]

    def many(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Answer different prompts at once."""
        start = self._engine.now_ns()
        handles = [
            self._engine.submit(prompt, "LS", asked["tokens"], sampling=GREEDY)
            for prompt in asked["prompts"]
        ]
        return of_rows([token_times(handle, start) for handle in handles])

    def mixed(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Answer prompts of BE, and those of LS that arrive meanwhile."""
        start, start_ns = time.perf_counter(), self._engine.now_ns()
        work = [self._engine.submit(prompt, "BE", 1, sampling=GREEDY) for prompt in asked["be"]]
        chats, due = [], []
        for at, prompt in zip(asked["at"], asked["ls"], strict=True):
            time.sleep(max(0.0, start + at - time.perf_counter()))
            due.append((self._engine.now_ns() - start_ns) / 1e9)
            chats.append(self._engine.submit(prompt, "LS", asked["tokens"], sampling=GREEDY))
        firsts = [token_times(chat, start_ns)[0] for chat in chats]
        ttft = [first - at for first, at in zip(firsts, due, strict=True)]
        return {"ttft_s": ttft, "be_s": max(token_times(one, start_ns)[-1] for one in work)}


def main() -> None:
    """Answer until the input ends."""
    folder, threads, segment_ms, weights, seats = sys.argv[1:]
    start = time.perf_counter()
    with QLLMEngine.from_pretrained(
        folder,
        threads=int(threads),
        run_in="thread",
        max_segment_ms=float(segment_ms),
        expert_weights=weights,
        max_num_seqs=int(seats),
        max_kv_tokens=KV_TOKENS,
        prefix_cache=False,
        conformance=False,
    ) as engine:
        about: dict[str, Any] = {"name": "qllm", "kernels": engine.kernels}
        about |= {"load_s": round(time.perf_counter() - start, 1), **memory_gb()}
        ours = Asked(engine)
        answer(ours.rates, about, ours.many, ours.mixed)


if __name__ == "__main__":
    main()
