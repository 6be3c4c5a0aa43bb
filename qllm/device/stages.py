"""A model's captured stages driven by native code alone: the host's stand-in for the device loop.

On a device a graph holds WHILE { before; SWITCH over the stages; after }, with no CPU in it (see
`csrc/turns.h`). Here the host calls the same functions in the same order and replays the stage that
the native side chose. It is the oracle for the graph: both must take the same branches.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from qllm.decision import Limits
from qllm.device import lanes, serving
from qllm.device.block import Zeros, host_zeros
from qllm.device.deciding import host_calls
from qllm.device.layout import NONE
from qllm.device.records import Records
from qllm.device.scheduler import NativeScheduler
from qllm.errors import ConfigError, InvariantError
from qllm.plan import ANY_ARRIVAL, NO_CUTS, ModelShape
from qllm.policy import Groups, RankPolicy
from qllm.structs import Dtype
from qllm.types import NS_PER_MS, SamplingParams, Slo

NO_SLO = Slo()


class Sampled(NamedTuple):
    """What the request of a slot got from a step."""

    slot: int
    token: int
    """Its next token, or `lanes.BROKEN`: no logit was finite, the request must end."""


def branches(captured: Sequence[Any]) -> list[Any]:
    """Keys of stages in the order of their branches.

    By class and first layer; then the first that fits a group is the best: the most layers, for
    decodes a stage of decodes, the smallest bucket, no head where nobody samples.
    """

    def order(key: Any) -> tuple[int, ...]:
        bucket = key.bucket
        return (key.whole, key.start, -key.end, bucket.prefill, bucket.tokens, key.head)

    return sorted(captured, key=order)


def lanes_of(stages: Any, num_layers: int, seats: int, zeros: Zeros = host_zeros) -> Records:
    """The block that names the captured stages and the tensors of their lanes.

    Args:
        stages: A `qllm.cuda.stages.Stages`.
        num_layers: L.
        seats: Most rows of a frame.
        zeros: Makes its memory.
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


# -- what must hold so that every frame has a stage


def check_stages(
    stages: Any, pages: Any, policy: RankPolicy, limits: Limits, max_total_tokens: int
) -> None:
    """Refuse settings under which a decision could find no stage.

    Frames of a policy with groups may still be too large where cohorts of several classes are
    overdue at once: their rows are rerun one by one then.

    Args:
        stages: A `qllm.cuda.stages.Stages`.
        pages: The `qllm.cuda.pages.Pages` that it writes to.
        policy: Ranks.
        limits: Of the scheduler.
        max_total_tokens: Longest sequence.

    Raises:
        ConfigError: Names the setting and what to change.
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
    """Look whether stages lead from layer to layer, in each bucket."""
    for bucket in {key.bucket for key in keys}:
        ends = {key.start: key.end for key in keys if key.bucket == bucket}
        layers = [*sorted(ends), num_layers]
        if layers[0] or any(ends[a] != b for a, b in pairwise(layers)):
            raise ConfigError(
                f"stages of {bucket.tokens} tokens begin at layers {layers[:-1]} only"
            )


def _check_cuts(groups: Groups, starts: set[int], num_layers: int) -> None:
    """Look whether a cohort stops between stages only."""
    for num in range(1, min(groups.most, num_layers) + 1):
        cuts = {num_layers * i // num for i in range(1, num)}
        if not cuts <= starts:
            raise ConfigError(
                f"cohorts of {num} groups stop at layers {sorted(cuts)}, stages begin at layers "
                f"{sorted(starts)}; set layers_per_stage to 1 or max_groups to less than {num}"
            )


# -- the loop


class StageLoop:
    """Turns of the loop, each one call of native code and one replay.

    Args:
        policy: Ranks.
        stages: A `qllm.cuda.stages.Stages` whose tensors this machine can write.
        pages: The `qllm.cuda.pages.Pages` that it writes to; the native side hands them out.
        shape: Of the model.
        limits: Settings.
        max_total_tokens: Longest sequence.
        capacity: Most live requests.
        calls: Makes the native functions for a policy; by default those of this machine.
        zeros: Makes the memory of all blocks.

    Raises:
        ConfigError: The policy cannot be compiled, or the stages do not fit the settings.
    """

    def __init__(
        self,
        policy: RankPolicy,
        stages: Any,
        pages: Any,
        shape: ModelShape,
        limits: Limits,
        *,
        max_total_tokens: int,
        capacity: int = 64,
        calls: Callable[[RankPolicy], Any] = host_calls,
        zeros: Zeros = host_zeros,
    ) -> None:
        check_stages(stages, pages, policy, limits, max_total_tokens)
        self.scheduler = NativeScheduler(
            policy, shape, NO_CUTS, limits, capacity=capacity, calls=calls, zeros=zeros
        )
        sizes = {"capacity": capacity, "max_total_tokens": max_total_tokens}
        sizes |= {"num_front_ends": 1, "num_buckets": 1}  # requests come from `add`, not from rings
        self.server = Records(serving.SERVER, serving.SECTIONS, sizes, serving.VERSION, zeros)
        self.lanes = lanes_of(stages, shape.num_layers, limits.max_num_seqs, zeros)
        self._tokens = self.server.array("tokens").reshape(capacity, max_total_tokens)
        self._stages = stages
        self._keys = branches(list(stages.captured))
        self.trace: list[int] = []
        """The branches taken so far."""

    # -- requests come and go

    def add(
        self,
        ids: Sequence[int],
        *,
        priority: int,
        arrival_ns: int,
        sampling: SamplingParams,
        seed: int,
        max_tokens: int,
        request_id: int,
        slo: Slo = NO_SLO,
    ) -> int:
        """Take a request in and return its slot. The device must be able to sample for it.

        Who calls ends it, after `max_tokens` tokens at the latest.

        Raises:
            InvariantError: It is too long, or all slots are taken.
        """
        longest = self._tokens.shape[1]
        if len(ids) + max_tokens > longest:
            raise InvariantError(
                f"request {request_id} has up to {len(ids) + max_tokens} tokens, {longest} fit"
            )
        times = [NONE if ms is None else int(ms * NS_PER_MS) for ms in slo]
        slot = self.scheduler.call("add", request_id, priority, arrival_ns, *times, len(ids))
        if slot < 0:
            raise InvariantError(f"there is no slot for request {request_id}")
        record = self.server.array("serving")[slot : slot + 1]
        record["seed"], record["max_tokens"] = seed, max_tokens
        for name in ("top_k", "temperature", "top_p", "min_p"):
            record[name] = getattr(sampling, name)
        self._tokens[slot, : len(ids)] = ids
        return slot

    def remove(self, slot: int) -> None:
        """A request has ended, for whatever reason."""
        self.scheduler.call("remove", slot)

    def token_ids(self, slot: int) -> list[int]:
        """Prompt and sampled tokens of a live request."""
        num = self.scheduler.block.array("requests")[slot]["num_tokens"]
        return [int(token) for token in self._tokens[slot, :num]]

    # -- a turn

    def before(self, now_ns: int) -> int:
        """Choose the next stage and fill its lane.

        Returns:
            Its branch; `lanes.NOTHING` while none can run, `lanes.CANNOT` if the running frame
            fits none.
        """
        native, where = self.scheduler.native, self._addresses
        branch: int = native.turn_before(*where, now_ns)
        if self.lanes.get("fill"):
            native.turn_fill(*where, 1)
        return branch

    def replay(self, branch: int) -> None:
        """Run a stage, as the SWITCH does."""
        self.trace.append(branch)
        self._stages.replay(self._keys[branch])

    def after(self, now_ns: int, stop: int = ANY_ARRIVAL) -> int:
        """Take in what the stage did.

        Args:
            now_ns: When it was done.
            stop: The best class of those who arrived since the last decision.

        Returns:
            What became of its frame: `lanes.GOES_ON`, `PARKED`, or `OVER`, see `sampled`.
        """
        became: int = self.scheduler.native.turn_after(*self._addresses, now_ns, stop)
        return became

    @property
    def sampled(self) -> list[Sampled]:
        """What the frame that ended in the last turn gave."""
        found = self.lanes.array("sampled")[: self.lanes.get("num_sampled")]
        return [Sampled(int(slot), int(token)) for slot, token in found]

    @property
    def _addresses(self) -> tuple[int, int, int, int]:
        scheduler = self.scheduler
        block, rank = scheduler.block.address, scheduler.rank_address
        return block, rank, self.server.address, self.lanes.address
