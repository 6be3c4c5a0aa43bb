"""`make gpu-check` walked on a CPU, and what it makes of parts that fail or take too long."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import check as gpu_check

ROOT = Path(__file__).resolve().parent.parent

BIG = {"model", "decode", "ls_alone", "mixed_chunked-priority", "mixed_qllm2"}
LOADS = {"capacity", "load_fcfs"}
PEERS = {"interference", "loop_on_device", "peer_eager", "peer_continuous_batching"}


def test_the_budgets_fit_into_eight_minutes() -> None:
    assert sum(gpu_check.BUDGETS_S.values()) < 8 * 60


@pytest.mark.exhaustive
def test_tests_for_a_gpu_import_only_what_is_there() -> None:
    """The machine with the GPU has torch, transformers, cupy; no server, no NIXL, no pydantic."""
    missing = ("fastapi", "nixl", "openai", "pydantic", "starlette", "uvicorn")
    collect = (
        f"import sys; sys.modules.update(dict.fromkeys({missing})); import pytest; "
        "sys.exit(pytest.main(['-q', '--collect-only', '-p', 'no:cacheprovider', *sys.argv[1:]]))"
    )

    def collected(*what: str) -> set[str]:
        command = [sys.executable, "-c", collect, "-m", "gpu", *what]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:]
        return {line for line in done.stdout.splitlines() if "::" in line}

    chosen = collected(*gpu_check.gpu_tests(), gpu_check.ENGINES)
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "gpu", "tests"]
    every = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert chosen == {line for line in every.stdout.splitlines() if "::" in line}
    assert len(chosen) > 20


def test_a_part_that_fails_or_hangs_keeps_what_it_said() -> None:
    line = gpu_check.MARK + json.dumps({"section": "a", "x": 1})
    say = f"print({line!r}, flush=True); print({gpu_check.MARK!r} + '{{\"sec', flush=True); "
    for end, budget, status in (
        ("1 / 0", 20, 1),
        ("import time; time.sleep(60)", 3, "out of time"),
    ):
        part = gpu_check.run_part("p", [sys.executable, "-c", say + end], budget)
        assert part["status"] == status
        assert part["sections"] == {"a": {"x": 1}}
        assert not gpu_check.is_ok(part)
    part = gpu_check.run_part("p", [sys.executable, "-c", say], 20)
    assert gpu_check.is_ok(part)
    part["sections"]["a"]["error"] = "no"
    assert not gpu_check.is_ok(part)


def dry_run(out: Path, *parts: str) -> dict[str, Any]:
    env = os.environ | {"OUT": str(out), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "bench.gpu.check", "--dry-run", "--parts", *parts]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    errors = {n: s.get("error") for p in found["parts"].values() for n, s in p["sections"].items()}
    assert done.returncode == 0, (done.stdout[-500:], done.stderr[-500:], errors)
    assert list(found["parts"]) == list(parts)
    return {name: set(part["sections"]) for name, part in found["parts"].items()}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_dry_run_walks_every_part(tmp_path: Path) -> None:
    found = dry_run(tmp_path, *gpu_check.BUDGETS_S)
    assert found["exact"] == {"tokens_mixtral"}
    assert found["qwen3"] == BIG | PEERS
    assert found["mixtral"] == BIG | LOADS
    assert {"ceilings", "attention_1x1", "experts_qwen3_1", "sample_top_p_1.0"} <= found["kernels"]


@pytest.mark.slow
def test_a_dry_run_walks_a_part(tmp_path: Path) -> None:
    assert dry_run(tmp_path, "exact") == {"exact": {"tokens_mixtral"}}


def test_without_a_gpu_the_real_run_says_what_to_do(tmp_path: Path) -> None:
    env = os.environ | {"OUT": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "bench.gpu.check"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no CUDA device; use --dry-run" in done.stdout
