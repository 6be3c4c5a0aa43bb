"""Programs that others wrote, run against the server unchanged."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import qllm
from qllm.measure.random_moe import cache_dir
from tests.support.serving import Serving, serving, tiny_engine

CLIENTS = Path(sys.prefix) / "clients" / "bin" / "python"
"""Has guidellm; `make test-outside` puts it there."""
VLLM = next(
    cache_dir().glob("peers/vllm*/bin/vllm"), cache_dir() / "peers" / "vllm" / "bin" / "vllm"
)
"""Where `make bench-peers` puts it; `make test-peers` runs the tests that need it."""


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with tiny_engine(conformance=False) as engine, serving(engine) as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer() -> str:
    return str(Path(qllm.__file__).parent / "models" / "tiny")


def run(*command: str, cwd: Path) -> None:
    variables = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | variables, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


@pytest.mark.skipif(not CLIENTS.exists(), reason=f"no {CLIENTS}: `make test-outside` makes it")
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm(served: Serving, tokenizer: str, tmp_path: Path, route: str) -> None:
    run(
        str(CLIENTS), "-m", "guidellm", "run",
        "--backend", f"kind=openai_http,target={served.url},model=tiny,request_format={route}",
        "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=4",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        "--tokenizer", f"kind=hf_auto,model={tokenizer}", "--output", "kind=json,path=found.json",
        "--disable-console-interactive", cwd=tmp_path,
    )  # fmt: skip
    (found,) = json.loads((tmp_path / "found.json").read_text())["benchmarks"]
    totals = {"successful": 4, "errored": 0, "incomplete": 0, "total": 4}
    assert found["metrics"]["request_totals"] == totals


@pytest.mark.peers
@pytest.mark.parametrize(
    ("backend", "endpoint"),
    [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")],
)
def test_vllm_bench_serve(
    served: Serving, tokenizer: str, tmp_path: Path, backend: str, endpoint: str
) -> None:
    run(
        str(VLLM), "bench", "serve", "--backend", backend, "--base-url", served.url,
        "--endpoint", endpoint, "--model", "tiny", "--tokenizer", tokenizer,
        "--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "8",
        "--num-prompts", "6", "--request-rate", "20", "--ignore-eos", "--save-result",
        "--result-dir", str(tmp_path), "--result-filename", "found.json", cwd=tmp_path,
    )  # fmt: skip
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["completed"], found["total_output_tokens"]) == (6, 48)
    assert found["p99_ttft_ms"] > 0
