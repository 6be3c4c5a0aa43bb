"""What an engine must do whose loop is on the device, a real one or not."""

import os
import signal
import subprocess
import sys
from typing import Any

from qllm import QLLMEngine, SamplingParams
from qllm.types import FinishReason, RequestStatus
from tests.support.attached import ATTACHED
from tests.support.engines import LONG, SETTINGS, pid_of
from tests.support.waiting import wait_for

GPU = SETTINGS | {"max_num_seqs": 4, "max_step_tokens": 48, "preempt_at": "layer"}
GPU |= {"max_kv_tokens": 1024, "block_size": 16}


def serves_an_engine(model: str, path: str, *, is_quick: bool = False) -> None:
    """Tokens are those of the host's loop over the same runner, and all else works.

    Args:
        model: A folder.
        path: Of a socket.
        is_quick: On a GPU a step takes a millisecond: the longest answer ends before a front end
            has started, and what is stopped is a long answer, not a long prompt.
    """
    questions = [
        ("BE", [5 + i] * (20 + 15 * i), SamplingParams(temperature=0.0, ignore_eos=True))
        for i in range(3)
    ]
    questions += [
        ("LS", f"hello {i}", SamplingParams(temperature=0.8, seed=i, top_p=0.9)) for i in range(4)
    ]

    def answers_of(engine: QLLMEngine) -> list[tuple[Any, ...]]:
        alone = [engine.submit(p, c, 8, sampling=s).result(300) for c, p, s in questions]
        return [(r.token_ids, r.text, r.finish_reason) for r in alone]

    on_device: dict[str, Any] = {"device": "cuda", **GPU}
    with QLLMEngine.from_pretrained(model, **on_device) as host:
        wanted = answers_of(host)
    with QLLMEngine.from_pretrained(model, loop="conditional", listen=path, **on_device) as engine:
        assert answers_of(engine) == wanted
        handles = [engine.submit(p, c, 8, sampling=s) for c, p, s in questions]
        assert [len(h.result(300).token_ids) for h in handles] == [len(w[0]) for w in wanted]
        _use(engine, path, is_quick)


def _use(engine: QLLMEngine, path: str, is_quick: bool) -> None:
    long = engine.submit([7] * 40, "BE", 900 if is_quick else 200, sampling=LONG)
    next(iter(long))
    assert long.status in (RequestStatus.RUNNING, RequestStatus.PARKED)
    stats = engine.stats()
    assert stats["num_live"] == 1
    assert stats["kv_blocks_used"] > 0
    wait_for(lambda: any(frame["tokens"] > 0 for frame in engine.stats()["frames"]))
    with QLLMEngine.attach(path) as other:
        assert other.submit("hello", max_tokens=3).result(300).token_ids
        left = other.submit("hello", "BE", 200, sampling=LONG)
        next(iter(left))
    assert left.result(300).finish_reason is FinishReason.CANCELLED
    command = [sys.executable, "-c", ATTACHED.replace("1500", "200"), path]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as killed:
        assert killed.stdin is not None
        assert killed.stdout is not None
        killed.stdout.readline()
        killed.stdin.write("\n")
        killed.stdin.flush()
        assert killed.wait(60) == -signal.SIGKILL
    wait_for(lambda: engine.stats()["num_live"] <= 1)
    assert engine.call(os.getpid) == pid_of(engine)
    long.cancel()
    ended = long.result(300).finish_reason
    assert ended is FinishReason.CANCELLED or (is_quick and ended is FinishReason.LENGTH)
    while not engine.stats()["num_preemptions"]:  # an LS request comes inside a BE step, soon
        slow = engine.submit([9] * 45, "BE", 400 if is_quick else 2, sampling=LONG)
        if is_quick:
            next(iter(slow))
        else:
            wait_for(lambda: engine.stats()["frames"])
        engine.submit("abc", "LS", 2, sampling=LONG).result(300)
        slow.result(300)
    stats = engine.stats()
    assert stats["num_preemptions"] > 0
    assert len(stats["preempt_latencies_ms"]) == stats["num_preemptions"]
    assert all(0 <= ms < 10_000 for ms in stats["preempt_latencies_ms"])
    assert stats["longest_segment_ms"] > 0
    assert stats["expert_bytes"] > 0
    assert stats["kv_blocks_used"] == stats["num_live"] == 0
