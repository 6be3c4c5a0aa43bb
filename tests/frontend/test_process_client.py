"""An engine in a process keeps the promises of one on a thread, and survives what it cannot."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qllm import QLLMEngine, SamplingParams
from qllm.errors import (
    CheckpointError,
    ConfigError,
    EngineClosedError,
    InvalidRequestError,
)
from qllm.frontend.handle import Result
from qllm.ingress.layout import NUMBER_BITS
from qllm.record.trace import Finished
from qllm.types import FinishReason, RequestStatus, Slo
from tests.support.attached import ATTACHED
from tests.support.engines import LONG, SETTINGS, pid_of, save_model
from tests.support.families import VOCAB
from tests.support.forked import start_program
from tests.support.waiting import wait_for

LETTERS = dict.fromkeys((ord(c) for c in "abcdefgh"), 60.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def socket_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("engine") / "socket")


@pytest.fixture(scope="module")
def owner(model: str, socket_path: str) -> Iterator[QLLMEngine]:
    with QLLMEngine.from_pretrained(model, record=True, listen=socket_path, **SETTINGS) as made:
        yield made


@pytest.fixture(scope="module")
def threaded(model: str) -> Iterator[QLLMEngine]:
    with QLLMEngine.from_pretrained(model, run_in="thread", record=True, **SETTINGS) as made:
        yield made


def visible(result: Result) -> tuple[Any, ...]:
    """What does not depend on the clock."""
    m = result.metrics
    counts = (m.priority, m.num_prompt_tokens, m.num_prefilled_tokens, m.num_output_tokens)
    told = (m.name, m.reason, len(m.itl_ms), m.evictions, m.preempt_recomputed_tokens)
    return (
        result.request_id, result.prompt_token_ids, result.token_ids, result.text,
        result.finish_reason, result.logprobs, counts, told,
    )  # fmt: skip


# -- the same promises


REQUESTS: list[dict[str, Any]] = [
    {"prompt": "hello", "max_tokens": 9},
    {"prompt": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "priority": "BE"},
    {"prompt": [1, 2, 3], "max_tokens": 7, "priority": -5, "request_id": "Größe"},
    {"prompt": "x" * 900, "max_tokens": 2, "slo": Slo(100.0, 20.0)},
    {"sampling": SamplingParams(temperature=0.8, seed=3, logit_bias=LETTERS, logprobs=20)},
    {"sampling": SamplingParams(temperature=2, seed=4, top_k=10**30, top_p=0.9, min_p=0.01)},
    {"sampling": SamplingParams(temperature=1, seed=5, presence_penalty=1, frequency_penalty=-1)},
    {"sampling": SamplingParams(temperature=1, seed=6, repetition_penalty=1.3, logprobs=0)},
    {"sampling": SamplingParams(temperature=0, logit_bias={7: 99.0}, stop_token_ids=(7,))},
]


def test_answers_are_those_of_an_engine_on_a_thread(
    owner: QLLMEngine, threaded: QLLMEngine
) -> None:
    for request in REQUESTS:
        keywords = {"prompt": "q", "max_tokens": 12, "request_id": "r", **request}
        want = threaded.submit(**keywords).result(300)
        assert visible(owner.submit(**keywords).result(300)) == visible(want)


def test_stop_strings_end_an_answer_where_they_end_it_on_a_thread(
    owner: QLLMEngine, threaded: QLLMEngine
) -> None:
    sampling = SamplingParams(temperature=1.0, seed=5, logit_bias=LETTERS)
    whole = threaded.submit("q", max_tokens=40, sampling=sampling).result(300)
    for at in (0, 7, 38):
        stop = whole.text[at : at + 2]
        keywords: dict[str, Any] = {"max_tokens": 40, "sampling": sampling, "stop": stop}
        want = threaded.submit("q", request_id="r", **keywords).result(300)
        handle = owner.submit("q", request_id="r", **keywords)
        pieces = "".join(piece.text for piece in handle)
        got = handle.result(300)
        assert want.finish_reason is FinishReason.STOP
        assert pieces == got.text == want.text
        assert visible(got)[:6] == visible(want)[:6]
        assert got.metrics.num_output_tokens == len(got.token_ids)
    long = owner.submit("q", max_tokens=1500, sampling=sampling, stop=whole.text[:2])
    assert long.result(300).text == ""
    wait_for(lambda: owner.stats()["num_live"] == 0)
    ends = {e.request_id: e.reason for e in owner.trace.events if isinstance(e, Finished)}
    assert ends[long.number] is FinishReason.STOP, "the engine went on to the end"


def test_ls_overtakes_be_inside_a_pass(model: str) -> None:
    """Every stream is that of the same request alone."""
    settings = SETTINGS | {"exactness": "batch-invariant", "max_kv_tokens": 8192}
    with QLLMEngine.from_pretrained(model, **settings) as made:
        for i in range(40):  # until one comes inside a pass
            ask = [("BE", [5 + i + k] * 900) for k in range(2)]
            long = [made.submit(prompt, name, 8, sampling=LONG) for name, prompt in ask]
            wait_for(lambda: any(f["state"] == "running" for f in made.stats()["frames"]))
            short = [made.submit(f"hello {i} {k}", "LS", 8, sampling=LONG) for k in range(3)]
            tokens = [handle.result(300).token_ids for handle in (*long, *short)]
            alone = [made.submit(p, n, 8, sampling=LONG).result(300).token_ids for n, p in ask]
            alone += [
                made.submit(f"hello {i} {k}", "LS", 8, sampling=LONG).result(300).token_ids
                for k in range(3)
            ]
            assert tokens == alone
            assert len(set(tokens)) == 5
            if (stats := made.stats())["num_preemptions"]:
                break
    assert stats["num_preemptions"] > 0
    assert stats["kv_blocks_used"] == 0


def test_every_way_to_wait(owner: QLLMEngine) -> None:
    want = owner.submit("hello", max_tokens=9).result(300)
    handle = owner.submit("hello", max_tokens=9)
    assert tuple(t for piece in handle for t in piece.token_ids) == want.token_ids

    async def both() -> tuple[tuple[int, ...], Result]:
        a, b = owner.submit("hello", max_tokens=9), owner.submit("hello", max_tokens=9)
        return tuple([t async for piece in a for t in piece.token_ids]), await b

    tokens, result = asyncio.run(both())
    assert len(tokens) == len(result.token_ids) == 9


def test_cancel_timeout_and_long_text(owner: QLLMEngine) -> None:
    handle = owner.submit("abc", max_tokens=1500, sampling=LONG)
    next(iter(handle))
    assert handle.status is RequestStatus.RUNNING
    handle.cancel()
    assert handle.status is RequestStatus.FINISHED
    result = handle.result(300)
    assert result.finish_reason is FinishReason.CANCELLED
    assert 0 < len(result.token_ids) < 1500
    late = owner.submit("abc", "BE", max_tokens=1500, sampling=LONG, timeout_s=0.05)
    assert late.result(300).finish_reason is FinishReason.TIMEOUT
    wait_for(lambda: owner.stats()["num_live"] == 0)
    assert owner.num_waiting == 0


def test_many_threads_and_no_token_crossed(owner: QLLMEngine) -> None:
    alone = {}
    for n in range(6):
        alone[n] = owner.submit([n + 1], max_tokens=20, sampling=only(n)).result(300).token_ids
        assert set(alone[n]) == {100 + n}
    wrong: list[int] = []

    def work(n: int) -> None:
        handles = [
            owner.submit([n + 1], ["LS", "BE"][i % 2], 20, sampling=only(n)) for i in range(12)
        ]
        wrong.extend(n for handle in handles if handle.result(300).token_ids != alone[n])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == []


def only(n: int) -> SamplingParams:
    return SamplingParams(temperature=1, seed=n, logit_bias={100 + n: 500.0}, ignore_eos=True)


def test_bad_requests_are_refused_here(owner: QLLMEngine) -> None:
    for wrong in ({"prompt": ""}, {"prompt": [VOCAB]}, {"max_tokens": 0}, {"priority": "XX"}):
        with pytest.raises(InvalidRequestError):
            owner.submit(**{"prompt": "a", **wrong})
    with pytest.raises(InvalidRequestError, match="the request is too large: a record of"):
        owner.submit("a", request_id="n" * (5 << 20))
    assert owner.num_waiting == 0
    assert owner.stats()["num_live"] == 0


def test_stats_trace_and_model(owner: QLLMEngine, threaded: QLLMEngine) -> None:
    handle = owner.submit("abc", max_tokens=3, request_id="traced")
    handle.result(300)
    assert owner.stats().keys() == threaded.stats().keys() | {"ring_use"}
    ends = [e.request_id for e in owner.trace.events if isinstance(e, Finished)]
    assert ends.count(handle.number) == 1
    assert len(ends) == len(set(ends))
    assert len(owner.trace) == len(owner.trace.events)
    assert owner.trace.meta == threaded.trace.meta
    assert (owner.drivers, owner.kernels) == (threaded.drivers, threaded.kernels)
    assert abs(owner.now_ns() - owner.trace.events[-1].at_ns) < 60e9
    before = owner._client._control.heartbeat_ns  # type: ignore[attr-defined]
    wait_for(lambda: owner._client._control.heartbeat_ns > before)  # type: ignore[attr-defined]


def test_a_call_runs_in_the_engine(owner: QLLMEngine) -> None:
    assert owner.call(os.getpid) == pid_of(owner) != os.getpid()
    with pytest.raises(ConfigError, match=r"cannot be pickled .* pass run_in='thread'"):
        owner.call(lambda: 1)
    with pytest.raises(ConfigError, match="the answer of call cannot leave"):
        owner.call(threading.Lock)
    for broken in (_pointer, _nested):
        with pytest.raises(ConfigError, match="the answer of call cannot leave"):
            owner.call(broken)
        assert owner.call(os.getpid) == pid_of(owner)
    with pytest.raises(FileNotFoundError):
        owner.call(_missing)


def _pointer() -> Any:
    return ctypes.pointer(ctypes.c_int(1))


def _nested() -> Any:
    found: list[Any] = []
    for _ in range(100_000):
        found = [found]
    return found


def _missing() -> None:
    os.stat("/nowhere/at/all")


def test_checkpoints_go_from_engine_to_engine(
    owner: QLLMEngine, threaded: QLLMEngine, tmp_path: Path
) -> None:
    keywords: dict[str, Any] = {"max_tokens": 300, "sampling": LONG, "request_id": "moved"}
    want = threaded.submit("abc", "BE", **keywords).result(300).token_ids
    for source, target in ((owner, threaded), (threaded, owner), (owner, owner)):
        handle = source.submit("abc", "BE", **keywords)
        next(iter(handle))
        assert source.checkpoint(tmp_path / "file") == 1
        handle.cancel()
        (restored,) = target.restore(tmp_path / "file")
        result = restored.result(300)
        assert result.request_id == "moved"
        assert result.token_ids == want
        assert result.text == "".join(piece.text for piece in restored)
    with pytest.raises(CheckpointError):
        owner.restore(tmp_path / "none")
    assert owner.submit("abc", max_tokens=2).result(300).token_ids == want[:2]


def test_ctrl_c_is_not_for_the_engine(owner: QLLMEngine) -> None:
    os.kill(pid_of(owner), signal.SIGINT)
    assert len(owner.submit("abc", max_tokens=3).result(300).token_ids) == 3


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_an_idle_engine_sleeps(owner: QLLMEngine) -> None:
    wait_for(lambda: owner.stats()["num_live"] == 0)

    def sleeps() -> bool:
        before, mine = cpu_seconds(pid_of(owner)), time.process_time()
        time.sleep(2.0)
        engines = cpu_seconds(pid_of(owner)) - before
        return engines <= 0.03 and time.process_time() - mine < 0.05

    assert any(sleeps() for _ in range(10)), "once what was before is over, it would"


# -- more than one front end


def test_another_front_end_has_its_own_rings(owner: QLLMEngine, socket_path: str) -> None:
    want = owner.submit("hello", max_tokens=9).result(300)
    with QLLMEngine.attach(socket_path) as other:
        assert other.config == owner.config
        handles = [e.submit("hello", max_tokens=9) for e in (owner, other)]
        assert [len(h.result(300).token_ids) for h in handles] == [9, 9]
        assert other.submit("hello", max_tokens=9).result(300).token_ids == want.token_ids
        ours, theirs = (handle.number >> NUMBER_BITS for handle in handles)
        assert ours != theirs
        left = other.submit("hello", max_tokens=1500, sampling=LONG)
        next(iter(left))
    assert left.result(300).finish_reason is FinishReason.CANCELLED
    with pytest.raises(EngineClosedError, match="closed"):
        other.submit("hello")
    assert len(owner.submit("hello", max_tokens=9).result(300).token_ids) == 9
    wait_for(lambda: owner.stats()["num_live"] == 0)
    with pytest.raises(ConfigError, match="no engine listens at"):
        QLLMEngine.attach(socket_path + "x")


def test_a_killed_front_end_frees_its_requests(owner: QLLMEngine, socket_path: str) -> None:
    with start_program(ATTACHED, socket_path) as other:
        number = int(other.stdout.readline())
        assert number >> NUMBER_BITS > 0
        mine = owner.submit("hello", max_tokens=400, sampling=LONG)
        wait_for(lambda: owner.stats()["num_live"] == 4)
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.wait(60) == -signal.SIGKILL
        wait_for(lambda: owner.stats()["num_live"] <= 1)
        assert len(mine.result(300).token_ids) == 400
    ends = {e.request_id: e.reason for e in owner.trace.events if isinstance(e, Finished)}
    assert ends[number] is FinishReason.CANCELLED


def test_ids_of_a_restore_that_failed_are_not_given_again(
    owner: QLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    client: Any = owner._client
    asked: list[int] = []

    def fail(op: str, path: str, first: int) -> Any:
        asked.append(first)
        raise CheckpointError("not whole")

    with monkeypatch.context() as patch:
        patch.setattr(client, "_ask", fail)
        with pytest.raises(CheckpointError):
            owner.restore("anywhere")
    handle = owner.submit([1, 2, 3], "LS", 2)
    assert handle.number >= asked[0] + 1000
    assert len(handle.result(300).token_ids) == 2


IMPORTS = """
import gc, subprocess, sys
from qllm import QLLMEngine

started, popen = [], subprocess.Popen

def seen(*names):
    return [name for name in names if name in sys.modules]

def spawn(*args, **how):
    started.append(seen("transformers", "huggingface_hub"))
    return popen(*args, **how)

subprocess.Popen = spawn
with QLLMEngine.from_pretrained("tiny", threads=1) as engine:
    assert "transformers" in sys.modules
    print(started, engine.call(gc.isenabled), engine.call(gc.get_freeze_count) > 100_000)
    assert engine.chat([{"role": "user", "content": "hi"}], max_tokens=2)[0].token_ids
print(seen("torch", "transformers.modeling_utils"))
"""


def test_a_front_end_imports_no_torch_and_its_engine_starts_before_tokenizers() -> None:
    """It imports no modelling code either, and the engine collects garbage again."""
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[[]] True True", "[]"]
