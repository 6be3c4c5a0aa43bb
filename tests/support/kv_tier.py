"""Engines with a KV file, and loads from it that a test holds back."""

import random
import threading
from pathlib import Path
from typing import Any

import pytest

from qllm import QLLMEngine, SamplingParams
from qllm.engine.costs import StepCosts
from qllm.engine.kv import tier
from qllm.engine.storage import file as kv_file
from qllm.frontend.handle import Result
from tests.support.families import VOCAB

GREEDY = SamplingParams(temperature=0, ignore_eos=True)

SETTINGS: dict[str, Any] = {
    "conformance": False, "threads": 1, "max_kv_tokens": 2048, "kv_dir_gib": 0.01,
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_load_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests rest on no clock: whatever is in the file is waited for."""
    monkeypatch.setattr(tier, "SLACK_NS", 10**15)
    monkeypatch.setattr(tier, "FIRST_NS_PER_BYTE", 0)
    monkeypatch.setattr(StepCosts, "moved", lambda *_: None)


def prompt_of(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(n)]


def engine_of(model: Any, folder: Path | None, **more: Any) -> QLLMEngine:
    place = {} if folder is None else {"kv_dir": folder}
    return QLLMEngine.from_model(model, **{**SETTINGS, **place, **more})


def run(engine: QLLMEngine, ids: list[int], n: int = 8, to: str = "LS", **how: Any) -> Result:
    return engine.submit(ids, to, n, sampling=how.pop("sampling", GREEDY), **how).result(300)


def held_back(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Engines from now on read nothing of their file before this is set."""
    gate = threading.Event()

    class Stuck(kv_file.Blocks):
        def read(self, data: memoryview, at: int) -> bool:
            if threading.current_thread().name == "qllm-kv-read":
                gate.wait()
            return super().read(data, at)

    monkeypatch.setattr(kv_file.open_file, "__defaults__", (Stuck,))
    return gate
