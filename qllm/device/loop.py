"""The loop of the device, from the host's side: its blocks, its words, and the host's stand-in.

Everything a turn needs lies in three blocks of memory that host and device see: the scheduler's
STATE, the SERVER of what is served, and the LANES of the captured stages. The host writes them
at set-up, attaches front ends, and then looks at a few words.
"""

from collections.abc import Callable
from typing import Any

from qllm.device.records import Zeros, host_zeros
from qllm.device.server import NativeServer
from qllm.device.stages import branches, check_stages, lanes_of
from qllm.plan import NO_CUTS, ModelShape
from qllm.policy import RankPolicy
from qllm.scheduler.decision import Limits

TURNS = 1_000_000
"""Turns of one launch: seconds of work, and the host gets to see that the loop lives."""


class DeviceLoop:
    """The blocks of a loop.

    Args:
        policy: Ranks.
        stages: A `qllm.cuda.stages.Stages`.
        pages: The `qllm.cuda.pages.Pages` that it writes to; the loop hands them out.
        shape: Of the model.
        limits: Settings.
        control: Address of the engine's control block.
        max_total_tokens: Longest request, prompt and answer.
        now_ns: The engine's clock.
        turns: Most turns of one launch.
        zeros: Makes the memory of all blocks, which the device sees at the same address.
        settings: More of `NativeServer`.

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
        control: int,
        max_total_tokens: int,
        now_ns: Callable[[], int],
        turns: int = TURNS,
        zeros: Zeros = host_zeros,
        **settings: Any,
    ) -> None:
        check_stages(stages, pages, policy, limits, max_total_tokens)
        self.server = NativeServer(
            policy, shape, NO_CUTS, limits,
            control=control, max_total_tokens=max_total_tokens, zeros=zeros, **settings,
        )  # fmt: skip
        self.lanes = lanes_of(stages, shape.num_layers, limits.max_num_seqs, zeros)
        self.keys = branches(list(stages.captured))
        """Keys of the captured stages, in the order of their branches."""
        self.now_ns, self._turns = now_ns, turns

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Addresses of the blocks, with which a turn is launched."""
        return self.server.memory.address, self.server.block.address, self.lanes.address

    # -- the words that the host looks at

    def words_of_launch(self) -> dict[str, int]:
        """What LANES must say before a launch, so that it takes its turns.

        Beside them `launch_ns` has to be written, last of all: the device takes its first look at
        its own clock for that moment.
        """
        return {"turns_left": self._turns, "goes_on": 1, "pause": 0}

    def launch_ns(self) -> int:
        """The engine's time, of a launch that is made now."""
        return max(1, self.now_ns())

    def prepare(self) -> None:
        """Say it in the blocks of the host."""
        self.lanes.set(**self.words_of_launch(), launch_ns=self.launch_ns())

    def heartbeat(self) -> int:
        """Turns taken so far."""
        return self.lanes.get("num_turns")

    def is_stopped(self) -> bool:
        """A front end has asked to stop, every request has ended, and all records are out."""
        return bool(self.lanes.get("stopped"))

    @property
    def takes_more(self) -> bool:
        """Whether the launch that runs takes another turn."""
        return bool(self.lanes.get("goes_on"))

    # -- the host in the device's place

    def turn(self, threads: int = 1) -> int:
        """Take one turn here.

        Args:
            threads: Fill the lane as so many would.

        Returns:
            The branch of the stage to run next, or `lanes.NOTHING`.
        """
        server, state, lanes_at = self.addresses
        rank = self.server.rank_address
        branch: int = self.server.native.loop_turn(
            server, state, rank, lanes_at, self.now_ns(), threads
        )
        return branch
