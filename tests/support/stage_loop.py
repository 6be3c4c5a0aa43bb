"""A model's captured stages driven by the native scheduler alone, without rings around it.

The host calls the functions of `csrc/turns.h` in the order of the device's loop and replays the
stage that they chose. `qllm.device.loop` is the same with the native server and its rings.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from qllm.device import serving
from qllm.device.deciding import host_calls
from qllm.device.layout import NONE
from qllm.device.records import Records, Zeros, host_zeros
from qllm.device.stages import branches, check_stages, lanes_of
from qllm.errors import InvariantError
from qllm.plan import ANY_ARRIVAL, NO_CUTS, ModelShape
from qllm.policy import RankPolicy
from qllm.scheduler.decision import Limits
from qllm.types import NS_PER_MS, SamplingParams, Slo
from tests.support.native_scheduler import NativeScheduler

NO_SLO = Slo()


class Sampled(NamedTuple):
    """What the request of a slot got from a step."""

    slot: int
    token: int
    """Its next token, or `lanes.BROKEN`: no logit was finite, the request must end."""


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
