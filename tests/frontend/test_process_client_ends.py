"""How engines in processes of their own end, and what keeps them from starting."""

import gc
import os
import re
import signal
import textwrap
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qllm import QLLMEngine, QueueFull
from qllm.errors import (
    ConfigError,
    EngineClosedError,
    ModelError,
    RequestFailedError,
)
from qllm.record.trace import Finished
from qllm.types import FinishReason, RequestStatus
from tests.support.engines import (
    LONG,
    SETTINGS,
    Crash,
    FileGate,
    Unpicklable,
    freeze,
    is_alive,
    open_files,
    pid_of,
    save_model,
)
from tests.support.families import make_model
from tests.support.forked import start_program
from tests.support.waiting import wait_for


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


def test_closing_leaves_nothing(model: str, tmp_path: Path) -> None:
    before = open_files()
    pid = _serve_and_close(model, tmp_path)
    assert left_in_shm(pid) == []
    gc.collect()  # the mapping goes with its last reader
    assert open_files() <= before


def _serve_and_close(model: str, tmp_path: Path) -> int:
    path = str(tmp_path / "socket")
    engine = QLLMEngine.from_pretrained(
        model, policy=FileGate(str(tmp_path / "open")), listen=path, max_waiting=3, record=True,
        **SETTINGS,
    )  # fmt: skip
    pid = pid_of(engine)
    handles = [engine.submit("abc", p, 1500, sampling=LONG) for p in ("LS", "BE", "BE")]
    with pytest.raises(QueueFull, match=r"3 requests wait already \(max_waiting=3\)"):
        engine.submit("abc")
    assert handles[0].status is RequestStatus.WAITING
    handles[2].cancel()
    assert handles[2].result(300).finish_reason is FinishReason.CANCELLED
    wait_for(lambda: engine.num_waiting == 2)
    (tmp_path / "open").touch()
    next(iter(handles[0]))
    assert not engine.drain(timeout_s=0.1)
    with pytest.raises(EngineClosedError, match="drains"):
        engine.submit("abc")
    engine.close()
    engine.close()
    for handle in handles:
        assert handle.result(0).finish_reason is FinishReason.CANCELLED
    ends = [e.request_id for e in engine.trace.events if isinstance(e, Finished)]
    assert sorted(ends) == [handle.number for handle in handles]
    with pytest.raises(EngineClosedError, match="closed"):
        engine.submit("abc")
    with pytest.raises(EngineClosedError, match="closed"):
        engine.checkpoint(tmp_path / "x")
    assert not is_alive(pid)
    assert not os.path.exists(path)
    return pid


def left_in_shm(*pids: int) -> list[str]:
    """Files of ours; other programs have theirs there too, and numbers that hold one of ours."""
    ours = {"qllm", *(str(pid) for pid in (os.getpid(), *pids))}
    return [name for name in os.listdir("/dev/shm") if ours & set(re.findall(r"[a-z]+|\d+", name))]


def test_a_killed_engine_ends_every_handle_and_says_why(model: str, tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with QLLMEngine.from_pretrained(model, listen=path, **SETTINGS) as engine:
        handles = [engine.submit("abc", p, 1500, sampling=LONG) for p in ("LS", "BE", "BE")]
        cancelled = engine.submit("abc", "BE", 1500, sampling=LONG)
        other = QLLMEngine.attach(path)
        theirs = other.submit("abc", "BE", 1500, sampling=LONG)
        seen = next(iter(handles[0])).token_ids
        read: list[Any] = []

        def read_all() -> None:
            try:
                for piece in handles[0]:
                    read.append(piece)
            except RequestFailedError as error:
                read.append(error)

        reader = threading.Thread(target=read_all)
        reader.start()
        freeze(pid_of(engine))
        cancelled.cancel()
        os.kill(pid_of(engine), signal.SIGKILL)
        for handle in handles:
            with pytest.raises(RequestFailedError, match=r"pid \d+. was killed by SIGKILL"):
                handle.result(300)
        with pytest.raises(RequestFailedError, match="the engine is gone"):
            theirs.result(300)
        reader.join(60)
        assert read[0].token_ids == seen
        assert isinstance(read[-1], RequestFailedError)
        assert cancelled.result(300).finish_reason is FinishReason.CANCELLED
        for call in (lambda: engine.submit("a"), engine.stats, lambda: engine.checkpoint("x")):
            with pytest.raises(EngineClosedError, match="was killed by SIGKILL"):
                call()
        assert handles[0].status is RequestStatus.FINISHED
        assert "was killed by SIGKILL" in (engine.failure or "")
        assert "the engine is gone" in (other.failure or "")
        other.close()
        assert other.failure is None
        pid = pid_of(engine)
    assert not os.path.exists(path)
    assert left_in_shm(pid) == []


def test_a_crashed_loop_ends_every_handle(
    model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    policy = Crash(str(tmp_path / "crash"))
    with QLLMEngine.from_pretrained(model, policy=policy, **SETTINGS) as engine:
        handles = [engine.submit("abc", max_tokens=9) for _ in range(3)]
        wait_for(lambda: engine.stats()["num_live"] == 3)
        (tmp_path / "crash").touch()
        for handle in handles:
            with pytest.raises(RequestFailedError, match="crashed: KeyboardInterrupt: enough"):
                handle.result(300)
        wait_for(lambda: not is_alive(pid_of(engine)))
        with pytest.raises(EngineClosedError, match="crashed: KeyboardInterrupt: enough"):
            engine.submit("abc")
    assert "KeyboardInterrupt: enough" in capfd.readouterr().err


def test_a_thread_drains_too() -> None:
    with QLLMEngine.from_model(make_model("mixtral"), **SETTINGS) as engine:
        handle = engine.submit([1, 2], max_tokens=400, sampling=LONG)
        assert not engine.drain(timeout_s=0.001)
        with pytest.raises(EngineClosedError, match="drains"):
            engine.submit([1, 2])
        assert engine.drain()
        assert engine.failure is None
        assert handle.result(0).finish_reason is FinishReason.LENGTH


def test_the_engine_ends_with_its_front_end(model: str) -> None:
    code = f"""
        import os, signal
        from qllm import QLLMEngine, SamplingParams
        engine = QLLMEngine.from_pretrained({model!r}, **{SETTINGS!r})
        engine.submit("a", max_tokens=1900, sampling=SamplingParams(ignore_eos=True))
        print(engine._client._process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    with start_program(textwrap.dedent(code)) as program:
        pid = int(program.stdout.readline())
        assert program.wait(60) == -signal.SIGKILL
    wait_for(lambda: not is_alive(pid))


def asks(engine: QLLMEngine, name: str, path: str) -> Any:
    """What a call answers, or the error that it raises."""
    calls: dict[str, Callable[[], Any]] = {
        "stats": engine.stats,
        "call": lambda: engine.call(os.getpid),
        "checkpoint": lambda: engine.checkpoint(path),
        "restore": lambda: engine.restore(path),
        "trace": lambda: engine.trace,
        "drain": engine.drain,
    }
    try:
        return calls[name]()
    except EngineClosedError as error:
        return str(error)


@pytest.mark.parametrize("first", ["stats", "restore"])
def test_closing_ends_calls_that_wait_for_an_engine_that_stands_still(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    for module in ("process", "rings"):
        monkeypatch.setattr(f"qllm.frontend.{module}.CLOSE_S", 0.3)
    path = str(tmp_path / "socket")
    engine = QLLMEngine.from_pretrained(model, listen=path, record=True, **SETTINGS)
    other = QLLMEngine.attach(path)
    open_ = [engine.submit("a", "BE", 1900, sampling=LONG), other.submit("a", "BE", sampling=LONG)]
    freeze(pid_of(engine))
    found: dict[str, Any] = {}

    def start(work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    def ask(key: str, of: QLLMEngine, name: str) -> None:
        found[key] = asks(of, name, path)

    rest = ("stats", "call", "checkpoint", "restore", "trace", "drain")
    names = [first, *(name for name in rest if name != first)]
    threads = []
    for key, of, name in (("other", other, "stats"), *((name, engine, name) for name in names)):
        threads.append(start(partial(ask, key, of, name)))
        wait_for(of._client._ask_lock.locked)  # type: ignore[attr-defined]
    try:
        threads += [start(other.close), start(engine.close)]
        wait_for(lambda: not any(thread.is_alive() for thread in threads))
    finally:
        engine._client._process.kill()  # type: ignore[attr-defined]
    assert found.pop("drain") is True
    assert found.pop("trace") is engine.trace
    assert len(found) == 5
    assert all("the engine was closed; make a new one" in said for said in found.values()), found
    assert [h.result(0).finish_reason for h in open_] == [FinishReason.CANCELLED] * 2


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_an_engine_that_is_collected_is_closed(
    model: str, tmp_path: Path, in_a_cycle: bool
) -> None:
    path = str(tmp_path / "socket")
    engines = {
        "process": QLLMEngine.from_pretrained(model, listen=path, **SETTINGS),
        "thread": QLLMEngine.from_pretrained(model, run_in="thread", **SETTINGS),
    }
    engines["attached"] = QLLMEngine.attach(path)
    pid, thread = pid_of(engines["process"]), engines["thread"]._client._thread  # type: ignore[attr-defined]
    assert [engine.call(os.getpid) for engine in engines.values()] == [pid, os.getpid(), pid]
    handles = {n: e.submit("a", "BE", 1900, sampling=LONG) for n, e in engines.items()}
    for name in ("attached", "thread", "process"):
        handle = handles[name]
        next(iter(handle))
        held = [engines.pop(name)]
        if in_a_cycle:
            held.append(held)  # type: ignore[arg-type]
        del held
        gc.collect()
        assert handle.result(300).finish_reason is FinishReason.CANCELLED
        assert handle.status is RequestStatus.FINISHED
        assert is_alive(pid) or name == "process"
    wait_for(lambda: not is_alive(pid) and not thread.is_alive(), 60)
    wait_for(lambda: not os.path.exists(path))


# -- what keeps it from starting


def test_errors_of_loading_are_raised_here(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown policy 'qllm3'"):
        QLLMEngine.from_pretrained(model, policy="qllm3")
    with pytest.raises(ConfigError, match=r"run_in='fork' is unknown; use one of process, thread"):
        QLLMEngine.from_pretrained(model, run_in="fork")
    with pytest.raises(ConfigError, match=r"listen='x' needs run_in='process'"):
        QLLMEngine.from_pretrained(model, run_in="thread", listen="x")
    with pytest.raises(ConfigError, match=r"cannot be pickled .* pass run_in='thread'"):
        QLLMEngine.from_pretrained(model, policy=Unpicklable())
    path = tmp_path / "socket"
    with pytest.raises(ModelError, match=r"has no config\.json") as caught:
        QLLMEngine.from_pretrained(str(tmp_path), listen=str(path), **SETTINGS)
    assert "In the engine's process" in caught.value.__notes__[0]
    assert not path.exists()
    path.touch()
    with pytest.raises(ConfigError, match="give a path that does not exist yet"):
        QLLMEngine.from_pretrained(model, listen=str(path), **SETTINGS)
    assert path.exists(), "it is not ours"


def test_a_policy_that_the_engine_cannot_import_is_refused(model: str) -> None:
    code = f"""
        from qllm import QLLMEngine
        from qllm.errors import ConfigError
        class Mine:
            pass
        try:
            QLLMEngine.from_pretrained({model!r}, policy=Mine())
        except ConfigError as error:
            print(error)
    """
    with start_program(textwrap.dedent(code)) as program:
        assert "pass run_in='thread'" in program.stdout.read()
        assert program.wait(60) == 0


def test_a_cancel_and_a_close_end_requests_in_an_engine_that_runs_nothing(
    model: str, tmp_path: Path
) -> None:
    gate = FileGate(str(tmp_path / "open"))
    engine = QLLMEngine.from_pretrained(model, policy=gate, record=True, **SETTINGS)
    first, second = (engine.submit("a", "BE", 8, sampling=LONG) for _ in range(2))
    wait_for(lambda: engine.stats()["num_live"] == 2)
    first.cancel()
    wait_for(lambda: engine.stats()["num_live"] == 1)
    engine.close()
    assert second.result(300).finish_reason is FinishReason.CANCELLED
    ended = [event.reason for event in engine.trace if isinstance(event, Finished)]
    assert ended == [FinishReason.CANCELLED] * 2
