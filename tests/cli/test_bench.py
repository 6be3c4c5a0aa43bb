"""`qllm bench`: its table, its JSON and its errors."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qllm.cli import app
from qllm.cli.app import FAILED
from qllm.errors import ConfigError
from qllm.measure.bench import BenchLoad, corpus_of
from qllm.measure.random_moe import make_random_moe
from qllm.types import Priority
from qllm.workloads.capacity import Capacity
from qllm.workloads.files import write_requests
from qllm.workloads.spec import RequestSpec

runner = CliRunner()
CAPACITY = Capacity(prefill_tokens_per_s=2000.0, output_tokens_per_s=200.0)


def small_trace(folder: Path) -> Path:
    requests = [
        RequestSpec(
            at_s=0.1 * i,
            priority=Priority.BE if i % 2 else Priority.LS,
            num_prompt_tokens=8 + 24 * (i % 2),
            max_tokens=3,
            name=f"r{i}",
        )
        for i in range(10)
    ]
    write_requests(folder / "trace.jsonl", requests)
    return folder / "trace.jsonl"


def test_policies_are_compared_on_a_trace_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    model = make_random_moe(tmp_path / "model", size="1m")
    out = tmp_path / "out.json"
    arguments = ["bench", str(model), "--trace", str(small_trace(tmp_path)), "--threads", "1"]
    arguments += ["--policy", "qllm2:ride_frac=0/1,mlfq", "--seconds", "0.85", "--warmup", "0.15"]
    arguments += ["--drain", "3", "--out", str(out)]
    done = runner.invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    for text in (
        "TTFT p50 / p90 / p99 / max, ms",
        "qllm2:ride_frac=0",
        "SLO attainment",
        "BE",
    ):
        assert text in done.stdout
    document = json.loads(out.read_text())
    assert list(document["runs"]) == ["qllm2:ride_frac=0", "qllm2:ride_frac=1", "mlfq"]
    assert document["offered_per_s"].keys() == {"LS", "BE"}
    for run in document["runs"].values():
        assert run["LS"]["arrived"] == run["LS"]["finished"] == 4  # 0.2, 0.4, 0.6, 0.8
        assert run["BE"]["arrived"] == run["BE"]["finished"] == 5
        assert run["LS"]["ttft_ms"]["p50"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["1m"], "give either a named workload or a trace file"),
        (["1m", "--workload", "S99"], "unknown workload 'S99'; known: S1"),
        (["1m", "--workload", "S2", "--scale", "cv=99"], "cv=99.0 must be in"),
        (["--workload", "S2"], "give MODEL to serve here, or --url"),
        (["1m", "--workload", "S2", "--policy", "none-such"], "unknown policy 'none-such'"),
        (["1m", "--workload", "S2", "--slo", "fast"], "ttft"),
        (["1m", "--workload", "S2", "--capacity", "5"], "must be PREFILL,OUTPUT"),
        (["--url", "http://127.0.0.1:9", "--workload", "S2"], "give --model"),
        (
            ["--url", "http://127.0.0.1:9", "--model", "m", "--workload", "S2"],
            "scaled by the machine's capacity: give --capacity",
        ),
        (
            ["--url", "http://x", "--model", "m", "--workload", "S2", "--be-body", "{"],
            "the body of BE is not JSON",
        ),
    ],
)
def test_what_is_wrong_is_one_line(arguments: list[str], message: str) -> None:
    done = runner.invoke(app, ["bench", *arguments])
    assert done.exit_code == FAILED
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_load_ends_before_its_drain_and_names_its_rates() -> None:
    load = BenchLoad(name="S2", warmup_s=5.0, window_s=20.0, drain_s=10.0)
    requests, about = load.requests(CAPACITY)
    assert max(r.at_s for r in requests) < 25
    assert load.window.stop_s == 35
    assert about["nominal_per_s"].keys() == about["offered_per_s"].keys() == {"LS", "BE"}
    with pytest.raises(ConfigError, match="nothing arrives"):
        BenchLoad(name="S2", window_s=0.01, warmup_s=0, scale={"load": 1e-9}).requests(
            Capacity(prefill_tokens_per_s=1e-6, output_tokens_per_s=1e-6, max_num_seqs=0)
        )


def test_without_a_tokenizer_ids_are_small() -> None:
    ids = corpus_of(None)
    assert 10 <= min(ids) < max(ids) < 1000
