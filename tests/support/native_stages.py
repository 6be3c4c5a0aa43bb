"""Policies and runners of the native loop over stages."""

from functools import cache
from typing import Any

from qllm.cuda.backend import cuda_runner
from qllm.cuda.lanes import Bucket
from qllm.plugins import load_policy
from qllm.runner.runner import TorchRunner
from qllm.scheduler.decision import Limits
from qllm.types import Grain
from tests.support.fake_cuda import FakeCuda
from tests.support.families import make_model

LIMITS = Limits(
    max_num_seqs=4, max_step_tokens=48, block_size=4, num_blocks=64, grain=Grain.LAYER,
    max_segment_ns=5_000_000, whole_steps=True,
)  # fmt: skip

LONGEST = 60


@cache
def runner_of(family: str, k: int = 1) -> TorchRunner:
    return cuda_runner(
        make_model(family), num_pages=LIMITS.num_blocks, page_size=4, max_num_seqs=4,
        max_total_tokens=LONGEST, graphs=FakeCuda(), layers_per_stage=k,
        buckets=[Bucket(4, False), Bucket(16, True), Bucket(104, True)],
    )  # fmt: skip


def policy_of(name: str) -> Any:
    if name == "chunked-priority":
        return load_policy(name, {"step_tokens": 12})
    settings = {"group_tokens": 12, "max_groups": 3} if "layered" in name else {}
    return load_policy(name, settings)
