"""The native server: the engine loop's half of the native scheduler, on blocks of memory.

It takes requests out of rings and puts tokens into rings by address. No record is decoded in
Python and no object is made per request; what the host's runner needs of one is read from the
block. The same source compiles for a GPU (docs/device-scheduler.md).
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from qllm.config import EngineConfig
from qllm.device import serving
from qllm.device.deciding import NativeDecider
from qllm.device.layout import NONE
from qllm.device.records import Records, host_zeros
from qllm.errors import ConfigError, InvariantError
from qllm.ingress.memory import FrontEndMemory
from qllm.ingress.structs import RING_END
from qllm.ingress.words import address_of
from qllm.plan import CutRule, ModelShape
from qllm.scheduler.decision import Drop, Effect, Limits
from qllm.types import RequestId, RequestStatus, SamplingParams

RINGS = ("ls", "be", "cancel", "token")
MAX_FRONT_ENDS = 16
MIN_CAPACITY = 256
"""Requests that there is room for at least, in steps or waiting; further ones stay in the rings."""
MIN_TOKEN_RING = 1024
"""Bytes: the largest end of a request fits."""
WHY = {
    serving.WELL: "it has left",
    serving.BROKEN_RING: "a record of a ring has had a wrong checksum for too long",
    serving.BAD_RECORD: "a record that is no request or cancel",
    serving.FOREIGN_ID: "it used a request id of another front end",
    serving.DOUBLE_ID: "it used a request id twice",
}
"""What is told of a front end that was cut off."""


class RingAt(NamedTuple):
    """Where a ring lies."""

    address: int
    tail: int
    """Address of its reader's word."""
    num_bytes: int


class Event(NamedTuple):
    """A request took a slot (`serving.ADDED`), or is computed no more (`serving.REMOVED`)."""

    request_id: RequestId
    kind: int
    slot: int


class CutOff(NamedTuple):
    """A front end whose rings make no sense."""

    number: int
    why: str


class NativeServer(NativeDecider):
    """Claims, decides, publishes. One owner: the loop.

    Large because it is the one way to the memory that the C++ server works in.

    Args:
        policy: A `RankPolicy`; its `rank` is compiled here.
        shape: Layers of the model.
        cuts: Where ops are cut.
        limits: Settings.
        control: Address of the engine's control block; whoever gives it keeps its memory.
        max_total_tokens: Longest request, prompt and answer; a longer one ends in an error.
        capacity: Requests at once, those included whose last records wait for room.
        max_front_ends: Front ends at once.
        ls_slots: Of `capacity`, those that BE requests leave free.
        settings: More of `NativeDecider`.

    Raises:
        ConfigError: The policy cannot be compiled, numba or the extension is missing, or the
            sizes do not fit each other.
    """

    def __init__(
        self,
        policy: Any,
        shape: ModelShape,
        cuts: CutRule,
        limits: Limits,
        *,
        control: int,
        max_total_tokens: int,
        capacity: int = 256,
        max_front_ends: int = 8,
        ls_slots: int | None = None,
        **settings: Any,
    ) -> None:
        self.max_front_ends = max_front_ends
        ls_slots = capacity // 8 if ls_slots is None else ls_slots
        shared_slots = max(1, capacity // (2 * max_front_ends))
        spoken_for = ls_slots + shared_slots * (max_front_ends - 1)
        if spoken_for >= capacity:
            raise ConfigError(
                f"capacity={capacity} must exceed the {spoken_for} slots kept for LS requests "
                f"(ls_slots={ls_slots}) and for {max_front_ends - 1} other front ends; raise it"
            )
        sizes = {
            "capacity": capacity,
            "max_total_tokens": max_total_tokens,
            "num_front_ends": max_front_ends,
            "num_buckets": 1 << (capacity - 1).bit_length(),
        }
        zeros = settings.get("zeros", host_zeros)
        self.memory = Records(serving.SERVER, serving.SECTIONS, sizes, serving.VERSION, zeros)
        self.memory.set(
            control=control,
            vocab_size=shape.vocab_size,
            ls_slots=ls_slots,
            shared_slots=shared_slots,
        )
        super().__init__(policy, shape, cuts, limits, capacity=capacity, **settings)
        self._indexes: dict[int, int] = {}
        """Per attached front end its index in the block."""
        self._silent: set[int] = set()
        """Those of them that ring no bell."""
        self._turn("open")

    def _turn(self, name: str, *numbers: int) -> Any:
        function = getattr(self.native, f"server_{name}")
        return function(self.memory.address, self.block.address, self._rank.address, *numbers)

    # -- front ends

    def attach(
        self, number: int, rings: Mapping[str, RingAt], progress: int, *, rings_bell: bool = True
    ) -> None:
        """Serve one more front end.

        Args:
            number: In the ids of its requests.
            rings: Where its RINGS lie; they are fresh.
            progress: Address of its progress word.
            rings_bell: It changes the bell of the control block after it has put something; the
                rings of one that does not are looked at whenever a program may stop.

        Raises:
            ConfigError: There are `max_front_ends`, or its token ring is too small.
        """
        ends = self.memory.array("front_ends")
        taken = set(self._indexes.values())
        index = next((i for i in range(self.max_front_ends) if i not in taken), None)
        if index is None:
            raise ConfigError(f"all {self.max_front_ends} front ends are attached")
        if rings["token"].num_bytes < MIN_TOKEN_RING:
            raise ConfigError(
                f"a token ring of {rings['token'].num_bytes} bytes must have {MIN_TOKEN_RING}"
            )
        end = np.zeros(1, serving.FRONT_END)
        for name in RINGS:
            end[name] = np.array((*rings[name], *[0] * 7), RING_END)
        end["number"] = number
        end["progress"] = progress
        end["state"] = serving.ATTACHED
        ends[index] = end[0]
        self._indexes[number] = index
        if not rings_bell:
            self._silent.add(number)
            self.memory.set(num_silent=len(self._silent))
        self.memory.set(bell_seen=-1)  # what it has put already was seen without it

    def index_of(self, number: int) -> int:
        """Where an attached front end lies in the block."""
        return self._indexes[number]

    def indexes(self) -> list[tuple[int, int]]:
        """Numbers of the attached front ends, and where they lie in the block."""
        return list(self._indexes.items())

    def forget(self, number: int) -> None:
        """A front end is detached already, in a copy of the block: its place is free."""
        self.memory.array("front_ends")["state"][self._drop(number)] = serving.DETACHED

    def _drop(self, number: int) -> int:
        """Forget where a front end lies, and return it."""
        self._silent.discard(number)
        self.memory.set(num_silent=len(self._silent))
        return self._indexes.pop(number)

    def detach(self, number: int, now_ns: int) -> None:
        """Forget a front end, its requests and what is in its rings."""
        if number in self._indexes:
            self._turn("detach", self._drop(number), serving.WELL, now_ns)

    def cut_off(self) -> list[CutOff]:
        """The front ends that `claim` has cut off since the last call."""
        states = self.memory.array("front_ends")["state"]
        gone = [n for n, i in self._indexes.items() if states[i] == serving.DETACHED]
        why = self.memory.array("front_ends")["why"]
        return [CutOff(n, WHY[int(why[self._drop(n)])]) for n in gone]

    def counters(self, number: int) -> dict[str, int]:
        """What was taken from an attached front end and given to it."""
        end = self.memory.array("front_ends")[self._indexes[number]]
        names = ("num_claimed", "num_refused", "num_ended", "num_written", "held", "owing")
        return {name: int(end[name]) for name in names}

    def num_written(self) -> dict[int, int]:
        """Per attached front end the records in its token ring so far."""
        written = self.memory.array("front_ends")["num_written"].tolist()
        return {number: written[index] for number, index in self._indexes.items()}

    # -- in

    def claim(self, now_ns: int) -> int:
        """Take a bounded part of what has arrived, and end what is past its deadline.

        The caller then takes `changes`, and calls again until it is told 0.
        """
        taken: int = self._turn("claim", now_ns)
        if taken < 0:
            raise InvariantError("changes were not taken after the last claim")
        return taken

    def changes(self) -> tuple[list[Effect], list[Event]]:
        """What has become of requests: effects on frames, to be done first, then events.

        A request that came and went in the meantime is not told of.
        """
        removed: list[Event] = []
        added: dict[int, Event] = {}
        count = self.memory.get("num_events")
        self.memory.set(num_events=0)
        for event in map(Event._make, self.memory.array("events")[:count].tolist()):
            if event.kind == serving.ADDED:
                added[event.slot] = event
            elif added.pop(event.slot, None) is None:
                removed.append(event)
        return self._take_effects(), [*removed, *added.values()]

    def arrived(self, now_ns: int) -> int:
        """The smallest priority that `claim` would take now."""
        word: int = self._turn("arrived", now_ns)
        return word

    @property
    def asked(self) -> int:
        """What the front ends ask of the loop: `serving.SERVE`, `DRAINED` or `STOP`."""
        answer: int = self._turn("asked")
        return answer

    @property
    def next_deadline_ns(self) -> int | None:
        """When the next live request times out."""
        at_ns = self.memory.get("next_deadline_ns")
        return None if at_ns == NONE else at_ns

    # -- a live request

    def find(self, request_id: RequestId) -> int:
        """The slot of a request.

        Raises:
            InvariantError: It has none.
        """
        slot: int = self._turn("find", request_id)
        if slot < 0:
            raise InvariantError(f"request {request_id} has no slot")
        return slot

    def tokens(self, slot: int) -> list[int]:
        """Ids of the prompt and of what was sampled."""
        num_tokens = int(self.block.array("requests")[slot]["num_tokens"])
        first = slot * self.memory.get("max_total_tokens")
        ids: list[int] = self.memory.array("tokens")[first : first + num_tokens].tolist()
        return ids

    def num_prompt_tokens(self, slot: int) -> int:
        """How many of its tokens are the prompt."""
        return int(self.block.array("requests")[slot]["num_prompt"])

    def max_tokens(self, slot: int) -> int:
        """Most tokens to sample."""
        return int(self.memory.array("serving")[slot]["max_tokens"])

    def sampling(self, slot: int) -> SamplingParams:
        """How the next token of a request is chosen."""
        x = self.memory.array("serving")[slot]
        return SamplingParams(
            temperature=float(x["temperature"]),
            top_k=int(x["top_k"]),
            top_p=float(x["top_p"]),
            min_p=float(x["min_p"]),
            seed=int(x["seed"]),
        )

    def live(self) -> Iterator[int]:
        """The slots of live requests."""
        for slot in np.flatnonzero(self.memory.array("serving")["phase"] == serving.LIVE):
            yield int(slot)

    # -- what became of a program, and the way out

    def failed(self, start_ns: int, end_ns: int) -> tuple[list[Effect], list[int]]:
        """The running program raised: drop its frame and rerun its requests one by one.

        Returns:
            Effects, and the slots of requests that failed alone: they must end in `error`.
        """
        program, slots = self._fail(start_ns, end_ns)
        return [Drop(program)], slots

    def sampled(self, slot: int, token_id: int, now_ns: int) -> None:
        """A request has one more token, which `done` has counted: publish it, or its end."""
        self._turn("sampled", slot, token_id, now_ns)

    def end(self, slot: int, reason: int, now_ns: int, text: str = "") -> None:
        """End a live request for a reason of the host's.

        Args:
            slot: Of the request.
            reason: Index of `qllm.ingress.layout.REASONS`.
            now_ns: The time.
            text: Of an error; cut to `serving.TEXT_BYTES`.
        """
        data = text.encode("utf-8", "replace")[: serving.TEXT_BYTES]
        x = self.memory.array("serving")
        x["text"][slot, : len(data)] = np.frombuffer(data, "u1")
        x["num_text"][slot] = len(data)
        self._turn("end", slot, reason, now_ns)

    def flush(self) -> int:
        """Write what found no room before; how many slots still have something to write."""
        left: int = self._turn("flush")
        return left

    def show(self) -> None:
        """Show the front ends how many requests live and wait."""
        self._turn("show")

    def check(self) -> None:
        """Check the invariants of both blocks; called by tests after every step.

        Raises:
            InvariantError: Requests, slots, KV blocks and order do not agree.
        """
        requests, x = self.block.array("requests"), self.memory.array("serving")
        live = [int(slot) for slot in np.flatnonzero(requests["live"])]
        if live != list(self.live()):
            raise InvariantError("the scheduler and the server differ in who lives")
        tables: dict[RequestId, list[int]] = {}
        for slot in live:
            table = tables.setdefault(int(requests["id"][slot]), [])
            self.block.extend_table(slot, table)
            if self.find(int(requests["id"][slot])) != slot:
                raise InvariantError(f"slot {slot} is not where its id says")
        self.block.check_blocks(tables)
        self.block.check_order({RequestId(int(requests["id"][slot])): slot for slot in live})
        held = np.flatnonzero(x["phase"] != serving.FREE)
        for name, count in (("held", len(held)), ("owing", int(x["owes"][held].sum()))):
            if int(self.memory.array("front_ends")[name].sum()) != count:
                raise InvariantError(f"front ends and slots differ in what is {name}")
        if self.memory.get("num_held") != len(held):
            raise InvariantError(f"{len(held)} slots are held, not num_held")


def attach(server: NativeServer, block: FrontEndMemory) -> None:
    """Let a server serve one more front end, whose memory the caller keeps.

    Raises:
        ConfigError: See `NativeServer.attach`.
    """
    rings = {
        name: RingAt(address_of(ring), address_of(tail), len(ring))
        for name, (ring, tail) in block.rings.items()
    }
    progress = block.segment.words[block.PROGRESS : block.PROGRESS + 1]
    server.attach(block.number, rings, address_of(progress))


def sizes_of(config: EngineConfig) -> dict[str, Any]:
    """How many requests and front ends a server has room for."""
    capacity = max(MIN_CAPACITY, 4 * config.max_num_seqs)
    return {"capacity": capacity, "max_front_ends": MAX_FRONT_ENDS}


def statuses_in(requests: "np.ndarray[Any, np.dtype[Any]]") -> dict[RequestId, RequestStatus]:
    """Where the live requests of a scheduler's state are (`layout.REQUEST`)."""
    now = requests[np.flatnonzero(requests["live"])]
    found = {}
    for request_id, frame, blocks in zip(
        now["id"].tolist(), now["frame"].tolist(), now["num_blocks"].tolist(), strict=True
    ):
        holds = RequestStatus.RUNNING if blocks else RequestStatus.WAITING
        found[request_id] = RequestStatus.PARKED if frame >= 0 else holds
    return found
