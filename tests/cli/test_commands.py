"""The command line, the demo and what it is made of."""

import builtins
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from qllm.cli import app
from qllm.cli.app import FAILED, INTERRUPTED
from qllm.frontend.handle import Handle, Piece
from qllm.frontend.streaming_prompt import StreamingPrompt
from qllm.measure.random_moe import make_random_moe
from qllm.plan import Row
from qllm.record.trace import Arrived, Event, Finished, Planned, Ran, Token, Trace
from qllm.types import FinishReason, Grain, Priority
from qllm.workloads.mix import Mix, Waits, compare, make_workload, only, send, solo_tokens
from tests.support.files import ROOT
from tests.support.forked import start_program

runner = CliRunner()
CORPUS = range(3, 250)
SMALL = Mix(
    seconds=1.0,
    ls_rate=10.0,
    ls_prompt=(4, 8),
    ls_output=(2, 4),
    be_burst=4,
    be_rate=2.0,
    be_prompt=(16, 32),
    be_output=(8, 400),
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_moe(tmp_path_factory.mktemp("models") / "small", size="1m")


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    events: list[Event] = [
        Arrived(at_ns=0, request_id=0, priority=0, num_prompt_tokens=3, max_tokens=2, name="chat"),
        Planned(
            at_ns=1_000_000,
            frame_id=1,
            rows=(Row(0, 0, 3, 0, 2),),
            grain=Grain.EXPERT,
            stop_below=0,
        ),
        Ran(
            start_ns=1_000_000,
            at_ns=7_000_000,
            frame_id=1,
            start=(0, 0),  # type: ignore[arg-type]
            end=(4, 0),  # type: ignore[arg-type]
            why="done",
            segments=4,
        ),
        Token(at_ns=7_500_000, request_id=0, token_id=5),
        Finished(at_ns=8_000_000, request_id=0, reason=FinishReason.LENGTH),
    ]
    path = tmp_path / "run.jsonl"
    Trace(events, {"model": "none"}).write_jsonl(path)
    return path


# -- commands


def test_help_is_quick_and_leaves_torch_alone() -> None:
    code = (
        "import sys\nfrom qllm.cli import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit as stop:\n"
        "    sys.exit(stop.code or 'torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for command in ("demo", "run", "trace", "policies", "models"):
        assert command in done.stdout


def test_policies_lists_what_is_installed() -> None:
    done = runner.invoke(app, ["policies"])
    assert done.exit_code == 0
    for text in ("fcfs", "priority", "qllm2", "max_be_stall_ms=1000", "yield_expert"):
        assert text in done.stdout


def test_models_lists_the_aliases() -> None:
    done = runner.invoke(app, ["models"])
    assert done.exit_code == 0
    assert "tiny" in done.stdout
    assert "Qwen/Qwen3-30B-A3B" in done.stdout


def test_trace_prints_metrics(trace_file: Path) -> None:
    done = runner.invoke(app, ["trace", str(trace_file)])
    assert done.exit_code == 0
    assert "TTFT p50 / p99, ms" in done.stdout
    assert "7.5 / 7.5" in done.stdout


def test_trace_is_converted_for_perfetto(trace_file: Path) -> None:
    out = trace_file.with_suffix(".json")
    done = runner.invoke(app, ["trace", str(trace_file), "--perfetto", str(out)])
    assert done.exit_code == 0
    assert json.loads(out.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["trace", "nowhere.jsonl"], "nowhere.jsonl"),
        (["trace", __file__], "not a qllm trace"),
        (["run", "no-such-model", "Hi"], "known aliases"),
        (["run", "tiny", "Hi", "--policy", "best"], "unknown policy 'best'; installed: "),
        (["run", "tiny", "Hi", "--set", "seats=3"], "unknown setting 'seats'"),
        (["run", "tiny", "Hi", "--set", "attention=flash3"], "'attention' is gone: CUDA has one"),
        (["run", "tiny", "Hi", "--set", "seats"], "NAME=VALUE"),
        (["run", "tiny", "Hi", "--temperature", "-1"], "temperature=-1.0"),
        (["run", "tiny", "Hi", "--device", "cuda:1"], "CUDA_VISIBLE_DEVICES=1"),
        (["run", "tiny", "Hi", "--set", "device=cpu"], "give it as --device"),
        (["bench", "tiny", "--workload", "S2", "--device", "gpu"], "device='gpu' is unknown"),
        (["serve", "tiny", "--device", "cuda:1"], "CUDA_VISIBLE_DEVICES=1"),
        (["demo", "--policies", "fcfs,best"], "unknown policy 'best'; installed: "),
        (["demo", "--policies", ","], "at least one policy"),
        (["demo", "--seconds", "0"], "seconds=0.0"),
        (["demo", "--size", "9t"], "size='9t'"),
        (["demo", "--exactness", "rough"], "exactness='rough'"),
    ],
)
def test_an_error_is_one_line_on_stderr(arguments: list[str], text: str) -> None:
    done = runner.invoke(app, arguments)
    assert done.exit_code == FAILED
    assert done.stdout == ""
    assert text in done.stderr
    assert done.stderr.count("\n") == 1


def test_run_answers_with_a_model_from_a_folder(model: Path) -> None:
    arguments = ["run", str(model), "import os", "--max-tokens", "5", "--seed", "1"]
    first, second = (runner.invoke(app, arguments) for _ in range(2))
    assert first.exit_code == 0, first.stderr
    assert len(first.stdout) > 1
    assert first.stdout == second.stdout
    assert runner.invoke(app, [*arguments, "--raw"]).stdout != first.stdout


def test_a_model_without_a_chat_template_says_that_it_goes_on(model: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(model, plain)
    (plain / "chat_template.jinja").unlink()
    arguments = ["run", str(plain), "import os", "--max-tokens", "2"]
    assert "no chat template" in runner.invoke(app, arguments).stderr
    assert "no chat template" not in runner.invoke(app, [*arguments, "--raw"]).stderr
    arguments[1] = str(model)
    assert "no chat template" not in runner.invoke(app, arguments).stderr


def test_the_packaged_model_answers() -> None:
    done = runner.invoke(app, ["run", "tiny", "What does json.dumps do?", "--max-tokens", "8"])
    assert done.exit_code == 0, done.stderr
    assert done.stdout.strip()


def test_run_takes_a_prompt_from_a_pipe(model: Path) -> None:
    arguments = ["run", str(model), "--max-tokens", "5", "--temperature", "0"]
    text = "import os\n# Ünïcödé " * 40
    whole = runner.invoke(app, [*arguments, text])
    piped = runner.invoke(app, [*arguments, "--stdin"], input=text.encode())
    assert piped.exit_code == 0, piped.stderr
    assert piped.stdout == whole.stdout
    assert "read for" in piped.stderr
    rest = runner.invoke(app, [*arguments, text[:50], "--stdin", "--raw"], input=text[50:].encode())
    assert rest.stdout == runner.invoke(app, [*arguments, text, "--raw"]).stdout


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"abc\xff", "no UTF-8 near byte 3"),
        ("é".encode()[:1], "no UTF-8 near byte"),
        (b"word " * 40_000, "so far, and at most"),
    ],
)
def test_a_pipe_that_is_wrong_says_so(model: Path, data: bytes, said: str) -> None:
    done = runner.invoke(app, ["run", str(model), "--stdin"], input=data)
    assert done.exit_code == 2
    assert said in done.stderr


def test_run_reads_while_the_pipe_is_open() -> None:
    """The engine has computed what came before the pipe ends."""
    code = "from qllm.cli import main\nmain()"
    with start_program(code, "run", "tiny", "--stdin", "--max-tokens", "3") as child:
        for i in range(20):
            child.stdin.write(f"line {i} of what is retrieved\n")
            child.stdin.flush()
        child.stdin.close()
        assert child.stdout.read().strip()
        assert child.wait(120) == 0


def test_ctrl_c_leaves_a_pipe_that_is_still_open(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[StreamingPrompt] = []
    append = StreamingPrompt.append

    def interrupted(self: StreamingPrompt, piece: str) -> None:
        append(self, piece)
        if self not in prompts and "stop" in piece:
            prompts.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr(StreamingPrompt, "append", interrupted)
    done = runner.invoke(app, ["run", str(model), "--stdin"], input=b"stop here")
    assert done.exit_code == INTERRUPTED, done.stderr
    assert done.stdout == ""
    assert prompts[0].handle.finish_reason is FinishReason.CANCELLED


def test_chat_keeps_its_history(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    original = Handle.__init__

    def count(self: Handle, **kwargs: object) -> None:
        asked.append(len(kwargs["prompt_token_ids"]))  # type: ignore[arg-type]
        original(self, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Handle, "__init__", count)
    done = runner.invoke(
        app, ["run", str(model), "--max-tokens", "4"], input="One\n\nOne\n", catch_exceptions=False
    )
    assert done.exit_code == 0
    assert len(asked) == 2
    assert asked[1] > 2 * asked[0] - 4


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles: list[Handle] = []
    original = Handle.__iter__

    def interrupted(self: Handle) -> Iterator[Piece]:
        handles.append(self)
        for number, piece in enumerate(original(self)):
            if number == 1 and len(handles) == 1:
                raise KeyboardInterrupt
            yield piece

    questions = iter(["One", KeyboardInterrupt(), "Two"])

    def ask(_: str = "") -> str:
        question = next(questions, EOFError())
        if isinstance(question, str):
            return question
        raise question

    monkeypatch.setattr(Handle, "__iter__", interrupted)
    monkeypatch.setattr(builtins, "input", ask)
    done = runner.invoke(app, ["run", str(model), "--max-tokens", "200"])
    assert done.exit_code == 0, done.stderr
    stopped, answered = (h.finish_reason for h in handles)
    assert stopped is FinishReason.CANCELLED
    assert answered in (FinishReason.STOP, FinishReason.LENGTH)


# -- the model of the demo


def test_a_model_is_made_once(model: Path) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in model.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= before.keys()
    assert make_random_moe(model, size="1m") == model
    assert before == {file.name: file.stat().st_mtime_ns for file in model.iterdir()}
    assert [f.name for f in model.parent.iterdir()] == [model.name]


def test_nothing_is_left_of_a_model_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr("qllm.measure.random_moe._random_model", fail)
    with pytest.raises(RuntimeError, match="no more"):
        make_random_moe(tmp_path / "model", size="1m")
    assert list(tmp_path.iterdir()) == []


# -- the workload


def test_a_workload_is_a_function_of_its_seed() -> None:
    one = make_workload(SMALL, CORPUS)
    assert one == make_workload(SMALL, CORPUS)
    assert one != make_workload(Mix(seed=1, ls_rate=10.0), CORPUS)
    assert [a.at_s for a in one] == sorted(a.at_s for a in one)
    ls, be = only(one, Priority.LS), only(one, Priority.BE)
    assert len(be) == 6
    assert all(4 <= len(a.token_ids) <= 8 and 2 <= a.max_tokens <= 4 for a in ls)
    assert all(0 < a.at_s < 0.9 for a in ls)


def test_ls_arrives_at_its_rate_and_be_changes_nothing_of_it() -> None:
    mix = Mix(seconds=1000.0, ls_rate=2.0, ls_tail=0.0, be_burst=0, be_rate=0.0)
    alone = make_workload(mix, CORPUS)
    mixed = make_workload(Mix(seconds=1000.0, ls_rate=2.0, ls_tail=0.0), CORPUS)
    assert 1800 < len(alone) < 2200
    assert only(mixed, Priority.LS) == alone


def test_who_is_not_served_counts_as_waiting() -> None:
    waits = Waits(served=(1.0, 2.0, 3.0), censored=())
    assert waits.percentile(50) == (2.0, False)
    waits = Waits(served=(1.0, 2.0), censored=(9.0,))
    assert waits.percentile(50) == (2.0, False)
    assert waits.percentile(100) == (9.0, True)
    assert Waits(served=(), censored=()).percentile(50) is None


def test_a_sent_workload_ends_with_its_window_and_answers_as_alone(model: Path) -> None:
    from qllm.llm import QLLMEngine

    arrivals = make_workload(SMALL, CORPUS)
    ticks: list[float] = []
    settings: dict[str, Any] = {
        "threads": 1,
        "conformance": False,
        "exactness": "batch-invariant",
        "run_in": "thread",
    }
    with QLLMEngine.from_pretrained(model, record=True, **settings) as engine:
        done = send(engine, arrivals, SMALL.seconds, ticks.append)
    assert ticks == sorted(ticks)
    assert 1.0 <= done.window_s < 1.5
    answers = done.tokens()
    assert answers.keys() == {a.name for a in arrivals}
    waits = done.waits(Priority.LS)
    assert len(waits.all) == len(only(arrivals, Priority.LS))
    ends = [e for e in done.trace if isinstance(e, Finished)]
    assert len(ends) == len(arrivals)
    with QLLMEngine.from_pretrained(model, **settings) as engine:
        counts = {name: len(ids) for name, ids in answers.items()}
        solo = solo_tokens(engine, arrivals, counts, budget_s=60.0)
    found = compare(answers, solo)
    assert found.checked == sum(1 for ids in answers.values() if ids)
    assert found.different == ()


def test_a_different_answer_is_found() -> None:
    solo = {"a": (1, 2, 3), "b": (1, 2, 3), "c": (1, 2, 3), "d": (1,)}
    found = compare({"a": (1, 2), "b": (1, 3), "c": ()}, solo)
    assert (found.equal, found.checked, found.different) == (1, 2, ("b",))


# -- the demo


def test_the_demo_prints_its_table_and_writes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = tmp_path / "out"
    arguments = ["--seconds", "1", "--size", "1m", "--ls-rate", "8", "--no-tiny"]
    done = runner.invoke(app, ["demo", *arguments, "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    for text in ("LS TTFT p99", "fcfs", "priority", "qllm2", "LS alone", "equal to solo run"):
        assert text in done.stdout
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "qllm2.perfetto.json").read_text())["traceEvents"]
    assert len(Trace.read_jsonl(out / "qllm2.jsonl")) > 0
    assert runner.invoke(app, ["trace", str(out / "fcfs.jsonl")]).exit_code == 0


def test_doctor_says_what_a_floor_for_be_costs_ls() -> None:
    settings = ["min_be_share=0.1", "be_share_window_ms=500", "max_segment_ms=5"]
    given = [word for text in settings for word in ("--set", text)]
    done = runner.invoke(app, ["doctor", *given])
    assert done.exit_code == 0
    said = " ".join(done.stdout.split())
    assert "BE has 0.1 of every 500 ms" in said
    # (wait + 3 slices of 5 ms) / (1 - 0.1 - 3 * 5 / 500)
    assert "from 0 ms to 17, 100 ms to 132, 1,000 ms to 1,167 at most, in pieces of 10 ms" in said
    wrong = runner.invoke(app, ["doctor", "--set", "min_be_share=2"])
    assert wrong.exit_code != 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "until its TPOT target, without one for 100 ms or four decode steps"),
        (["--set", "policy.max_prompt_gap_ms=1500"], "without one for 1,500 ms"),
        (["--set", "policy.max_prompt_gap_ms=none"], "no bound: under qllm2 with"),
    ],
)
def test_doctor_says_which_gaps_prompts_make(given: list[str], said: str) -> None:
    done = runner.invoke(app, ["doctor", *given])
    assert done.exit_code == 0
    assert said in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "drafts none; --set draft=auto proposes tokens (drafters: auto, lookup, grammar"),
        (["--set", "draft=lookup"], "drafts lookup, at most 4 tokens per step and request"),
        (
            ["--set", "draft=model:tiny"],
            "drafts model:tiny, at most 4 tokens per step and request; the draft model tiny is "
            "compared with the model at start",
        ),
    ],
)
def test_doctor_says_who_drafts(given: list[str], said: str) -> None:
    done = runner.invoke(app, ["doctor", *given])
    assert done.exit_code == 0
    assert said in " ".join(done.stdout.split())


def test_doctor_refuses_a_draft_model_that_is_not_there() -> None:
    done = runner.invoke(app, ["doctor", "--set", "draft=model:not here"])
    assert done.exit_code == 2
    assert "model 'not here' is no alias, no folder here and no hub id" in done.stderr


def test_doctor_refuses_an_unknown_drafter() -> None:
    done = runner.invoke(app, ["doctor", "--set", "draft=ngram"])
    assert done.exit_code == 2
    assert "draft='ngram' is unknown; use one of none, auto, lookup, grammar" in done.stderr


def test_doctor_says_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    from qllm.kernels import cpu

    done = runner.invoke(app, ["doctor"])
    assert done.exit_code == 0
    assert cpu.kind() in done.stdout
    said = " ".join(done.stdout.split())
    assert re.search(r"memory [\d.]+ GiB of [\d.]+ are free", said)
    assert re.search(r"its KV 65,536 tokens of [\d.]+ GiB for it", said)
    assert "its prefix cache 16,384 tokens" in said
    assert "its stops before every task of an op" in said
    assert "none; --set min_be_share=0.05" in " ".join(done.stdout.split())
    monkeypatch.setattr(cpu, "MISSING", "nobody built them")
    assert "nobody built them" in runner.invoke(app, ["doctor"]).stdout
