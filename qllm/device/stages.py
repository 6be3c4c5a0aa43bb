"""Captured stages for the native side: their order as branches, and checks.

A branch is a stage's index in the SWITCH. A decision might need a stage that does not exist.
Settings that allow this are refused here, at set-up.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from qllm.device import lanes
from qllm.device.records import Records, Zeros, host_zeros
from qllm.errors import ConfigError
from qllm.ingress.structs import Dtype
from qllm.policy import Groups, RankPolicy
from qllm.scheduler.decision import Limits


def branches(captured: Sequence[Any]) -> list[Any]:
    """Return keys of stages in the order of their branches.

    The keys are sorted by class and first layer. After that, the first key that fits a group is the
    best: most layers, a stage of decodes for decodes, the smallest bucket, no unused head.
    """

    def order(key: Any) -> tuple[int, ...]:
        bucket = key.bucket
        return (key.whole, key.start, -key.end, bucket.prefill, bucket.tokens, key.head)

    return sorted(captured, key=order)


def lanes_of(stages: Any, num_layers: int, seats: int, zeros: Zeros = host_zeros) -> Records:
    """Return the block with the captured stages and the addresses of their lanes' tensors.

    Args:
        stages: A `qllm.cuda.stages.Stages`.
        num_layers: Number of layers of the model.
        seats: Most rows of a frame.
        zeros: Function that allocates the block's memory.
    """
    keys = branches(list(stages.captured))
    num_starts = 2 * (num_layers + 1)
    sizes = {"num_stages": len(keys), "num_starts": num_starts, "seats": seats}
    out = Records(lanes.LANES, lanes.SECTIONS, sizes, lanes.VERSION, zeros)
    out.set(num_layers=num_layers)
    for branch, key in enumerate(keys):
        numbers = (key.start, key.end, *key.bucket, key.head, key.whole)
        out.array("stages")[branch] = numbers
    begins = [key.whole * (num_layers + 1) + key.start for key in keys]
    out.array("starts")[:] = np.searchsorted(begins, range(num_starts))
    for whole in (False, True):
        _describe(stages.lanes[whole], out.array("lanes")[int(whole) : int(whole) + 1])
    out.set(spare_slot=len(stages.lanes[True].hidden_SD) - 1)
    return out


def _describe(lane: Any, record: np.ndarray[Any, Dtype]) -> None:
    tensors = {**lane.on_device, "tokens": lane.tokens_R, "peaks": lane.peaks_R}
    for name in lanes.TENSORS:
        record[f"at_{name}"] = tensors[name].data_ptr()
    for name in ("max_rows", "max_pages", "block", "prefill_tiles"):
        record[name] = getattr(lane, name)
    record["loaded_frame"] = -1


# -- checks that every frame has a stage


def check_stages(
    stages: Any, pages: Any, policy: RankPolicy, limits: Limits, max_total_tokens: int
) -> None:
    """Refuse settings under which a decision could find no stage.

    Frames of a policy with groups may still be too large if cohorts of several classes are overdue
    at once. The rows of such frames run again one by one.

    Args:
        stages: A `qllm.cuda.stages.Stages`.
        pages: Pages (`qllm.cuda.pages.Pages`) that the stages write.
        policy: A `RankPolicy`.
        limits: Limits of the scheduler.
        max_total_tokens: Tokens of the longest sequence.

    Raises:
        ConfigError: A setting does not fit; the message contains it and the remedy.
    """
    if limits.batch_invariant:
        raise ConfigError("exactness='batch-invariant' is not there with captured stages")
    if limits.num_blocks > pages.num_pages:
        raise ConfigError(f"{limits.num_blocks} KV blocks do not fit {pages.num_pages} pages")
    if limits.block_size != pages.page_size:
        raise ConfigError(f"a block has {limits.block_size} tokens, a page {pages.page_size}")
    for whole in (True, False):
        _check_sizes(stages, whole, limits, max_total_tokens)
        _check_chain([key for key in stages.captured if key.whole == whole], stages.num_layers)
    if policy.groups is not None:
        starts = {key.start for key in stages.captured if not key.whole}
        _check_cuts(policy.groups, starts, stages.num_layers)


def _check_sizes(stages: Any, whole: bool, limits: Limits, max_total_tokens: int) -> None:
    lane, seats = stages.lanes[whole], limits.max_num_seqs
    for what, has, wants in (
        ("rows of a stage (max_num_seqs of the runner)", lane.max_rows, seats),
        ("tokens of a sequence", lane.max_pages * limits.block_size, max_total_tokens),
        ("tokens of a decode stage", _most_tokens(stages, whole, False), seats),
        (
            "tokens of a prefill stage",
            _most_tokens(stages, whole, True),
            limits.max_step_tokens + seats,
        ),
    ):
        if has < wants:
            raise ConfigError(f"{what}: {has} were captured for, up to {wants} can come")


def _most_tokens(stages: Any, whole: bool, prefill: bool) -> int:
    found = [key.bucket for key in stages.captured if key.whole == whole]
    return max((bucket.tokens for bucket in found if bucket.prefill == prefill), default=0)


def _check_chain(keys: list[Any], num_layers: int) -> None:
    """Check that the stages of each bucket cover the layers without a gap or an overlap."""
    for bucket in {key.bucket for key in keys}:
        ends = {key.start: key.end for key in keys if key.bucket == bucket}
        layers = [*sorted(ends), num_layers]
        if layers[0] or any(ends[a] != b for a, b in pairwise(layers)):
            raise ConfigError(
                f"stages of {bucket.tokens} tokens begin at layers {layers[:-1]} only"
            )


def _check_cuts(groups: Groups, starts: set[int], num_layers: int) -> None:
    """Check that a cohort stops only at layers where a stage begins."""
    for num in range(1, min(groups.most, num_layers) + 1):
        cuts = {num_layers * i // num for i in range(1, num)}
        if not cuts <= starts:
            raise ConfigError(
                f"cohorts of {num} groups stop at layers {sorted(cuts)}, stages begin at layers "
                f"{sorted(starts)}; set layers_per_stage to 1 or max_groups to less than {num}"
            )
