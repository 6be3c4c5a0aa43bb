"""Two ranks of a model on this machine's GPU, or on two: the tokens of one device.

The ranks share a device if there is one, and have a device each if there are two or more.
"""

from collections.abc import Callable, Iterator
from typing import Any

from qllm.cuda.backend import cuda_runner
from qllm.types import Grain

FAMILIES = ("mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3")
TP = 2


def equal_tokens(family: str, device: str) -> dict[str, Any]:
    """Compare whole steps, and steps with a boundary between experts; raise if tokens differ."""
    from tests.support.captured import BUCKETS, NUM_PAGES, forget, sampling_of, schedule
    from tests.support.families import make_model

    tokens, names = [], {}
    for tp in (1, TP):
        runner = cuda_runner(
            make_model(family).to(device), tp=tp, num_pages=NUM_PAGES, page_size=4, max_num_seqs=4,
            max_total_tokens=96, buckets=BUCKETS, layers_per_stage=1,
        )  # fmt: skip
        for grain, temperature in ((Grain.STEP, 0.8), (Grain.LAYER, 0.0), (Grain.EXPERT, 0.8)):
            tokens.append(schedule(runner, sampling_of(temperature), grain))
            forget(runner)
        names = runner.names
        runner.close()
    half = len(tokens) // 2
    if tokens[:half] != tokens[half:]:
        raise AssertionError(f"{family}: {TP} ranks chose {tokens[half:]}, not {tokens[:half]}")
    return {"ranks": names["ranks"], "stages": names["stages"], "streams": 3 * half}


def sections(device: str, dry: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield every section by name."""
    for family in FAMILIES[:1] if dry else FAMILIES:
        yield f"shared_{family}", lambda family=family: equal_tokens(family, device)
