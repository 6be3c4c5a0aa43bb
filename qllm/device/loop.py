"""The host's view of the device's loop: blocks, words, and a turn that the host runs.

All data of a turn is in three blocks of memory that host and device can read: STATE of the
scheduler, SERVER of the served requests, and LANES of the captured stages. The host writes the
blocks at set-up, attaches front ends, and then reads a few words.
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
"""Most turns of one launch. They take seconds, so that the host regularly sees launches end."""


class DeviceLoop:
    """The blocks of a loop.

    Args:
        policy: A `RankPolicy`.
        stages: A `qllm.cuda.stages.Stages`.
        pages: Pages (`qllm.cuda.pages.Pages`) that the stages write. The loop allocates the pages.
        shape: Shape of the model.
        limits: Settings that decisions depend on.
        control: Address of the engine's control block.
        max_total_tokens: Tokens of the longest request, prompt and answer.
        now_ns: The engine's clock.
        turns: Most turns of one launch.
        zeros: Function that allocates all blocks. The device must see them at the same addresses.
        settings: Further arguments of `NativeServer`.

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
        """Addresses of the blocks, the arguments of a turn."""
        return self.server.memory.address, self.server.block.address, self.lanes.address

    # -- words that the host writes and reads

    def words_of_launch(self) -> dict[str, int]:
        """Return words that LANES must contain before a launch, so that it takes its turns.

        The host writes `launch_ns` after these words, as the last one. The device sets its clock by
        `launch_ns`.
        """
        return {"turns_left": self._turns, "goes_on": 1, "pause": 0}

    def launch_ns(self) -> int:
        """Return the engine's time for a launch that starts now."""
        return max(1, self.now_ns())

    def prepare(self) -> None:
        """Write the words of a launch into the host's block."""
        self.lanes.set(**self.words_of_launch(), launch_ns=self.launch_ns())

    def heartbeat(self) -> int:
        """Return the number of turns taken so far."""
        return self.lanes.get("num_turns")

    def is_stopped(self) -> bool:
        """Return True if a front end asked to stop, and all requests and records are done."""
        return bool(self.lanes.get("stopped"))

    @property
    def takes_more(self) -> bool:
        """True if the running launch takes another turn."""
        return bool(self.lanes.get("goes_on"))

    # -- the host instead of the device

    def turn(self, threads: int = 1) -> int:
        """Take one turn on the host.

        Args:
            threads: Number of threads of a block to imitate when the lane is filled.

        Returns:
            The branch of the stage to run next, or `lanes.NOTHING`.
        """
        server, state, lanes_at = self.addresses
        rank = self.server.rank_address
        branch: int = self.server.native.loop_turn(
            server, state, rank, lanes_at, self.now_ns(), threads
        )
        return branch
