"""A storm of an engine over the device runner, with a fake of its graphs."""

import random
from typing import Any

import pytest

from qllm import QLLMEngine, SamplingParams
from qllm.cuda.backend import cuda_runner
from qllm.cuda.lanes import Bucket
from qllm.engine import build
from qllm.runner.runner import TorchRunner
from tests.support.fake_cuda import FakeCuda
from tests.support.families import VOCAB, make_model

BUCKETS = [Bucket(8, False), Bucket(96, True)]
SAMPLING = SamplingParams(temperature=0.7, top_p=0.95, seed=3, ignore_eos=True)


def on_device(monkeypatch: pytest.MonkeyPatch, fakes: list[FakeCuda], tp: int = 1) -> None:
    def make(model: Any, config: Any) -> TorchRunner:
        fakes.append(FakeCuda())
        return cuda_runner(
            model, tp=tp, num_pages=config.num_blocks, page_size=config.block_size, max_num_seqs=8,
            max_total_tokens=128, graphs=fakes[-1], buckets=BUCKETS, layers_per_stage=1,
        )  # fmt: skip

    monkeypatch.setattr(build, "make_runner", make)


def storm(policy: str) -> tuple[list[tuple[int, ...]], dict[str, Any], QLLMEngine]:
    rng = random.Random(7)
    jobs = [
        ([rng.randrange(VOCAB) for _ in range(rng.choice([5, 40, 70]))], i % 3) for i in range(9)
    ]
    with QLLMEngine.from_model(
        make_model("mixtral"), policy=policy, threads=1, max_num_seqs=8, kernels="reference",
        conformance=True,
    ) as engine:  # fmt: skip
        handles = [
            engine.submit(ids, "LS" if kind == 0 else "BE", 6, sampling=SAMPLING)
            for ids, kind in jobs
        ]
        tokens = [tuple(handle.result(300).token_ids) for handle in handles]
        return tokens, engine.stats(), engine
