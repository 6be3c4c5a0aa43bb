"""The native server: the engine loop's half of the native scheduler, on blocks of memory.

The server takes requests out of rings, and puts tokens into rings, by address. Python decodes no
record and makes no object per request. The host's runner reads a request's data from the block. The
same source compiles for a GPU (docs/design/device-loop.md).
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
"""Least number of places for requests, running and waiting. Further requests stay in the rings."""
MIN_TOKEN_RING = 1024
"""Size of the smallest token ring in bytes. The largest end record of a request fits."""
WHY = {
    serving.WELL: "it has left",
    serving.BROKEN_RING: "a record of a ring has had a wrong checksum for too long",
    serving.BAD_RECORD: "a record that is no request or cancel",
    serving.FOREIGN_ID: "it used a request id of another front end",
    serving.DOUBLE_ID: "it used a request id twice",
}
"""Reasons why a front end was cut off, as text."""


class RingAt(NamedTuple):
    """Place of a ring in memory."""

    address: int
    tail: int
    """Address at which the ring's reader writes its position."""
    num_bytes: int


class Event(NamedTuple):
    """An event: a request took a slot (`serving.ADDED`), or is no longer computed (`REMOVED`)."""

    request_id: RequestId
    kind: int
    slot: int


class CutOff(NamedTuple):
    """A front end that was cut off, and the reason."""

    number: int
    why: str


class NativeServer(NativeDecider):
    """A server over the memory of C++, which claims requests, decides and publishes tokens.

    Args:
        policy: A `RankPolicy`; its `rank` is compiled here.
        shape: Layers of the model.
        cuts: Rule for the places where ops are cut.
        limits: Settings that decisions depend on.
        control: Address of the engine's control block. The caller must keep this memory.
        max_total_tokens: Tokens of the longest request, prompt and answer; longer ones fail.
        capacity: Most requests at once. Ended requests whose last records wait for room are
            included.
        max_front_ends: Most front ends at once.
        ls_slots: Slots of `capacity` that BE requests leave free; None is an eighth.
        settings: Further arguments of `NativeDecider`.

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
        """Index in the block of each attached front end."""
        self._silent: set[int] = set()
        """Attached front ends that ring no bell."""
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
            number: Number of the front end, which the ids of its requests contain.
            rings: Places of its RINGS, which are new.
            progress: Address of its progress word.
            rings_bell: True if the front end changes the bell of the control block after a put. If
                False, the server reads its rings whenever a program may stop.

        Raises:
            ConfigError: There are `max_front_ends` already, or the front end's token ring is too
                small.
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
        self.memory.set(bell_seen=-1)  # look at its rings, which may hold records already

    def index_of(self, number: int) -> int:
        """Return the index of an attached front end in the block."""
        return self._indexes[number]

    def indexes(self) -> list[tuple[int, int]]:
        """Return the numbers of the attached front ends, and their indexes in the block."""
        return list(self._indexes.items())

    def forget(self, number: int) -> None:
        """Free the place of a front end that the device's copy of the block has detached."""
        self.memory.array("front_ends")["state"][self._drop(number)] = serving.DETACHED

    def _drop(self, number: int) -> int:
        """Forget the index of a front end, and return it."""
        self._silent.discard(number)
        self.memory.set(num_silent=len(self._silent))
        return self._indexes.pop(number)

    def detach(self, number: int, now_ns: int) -> None:
        """Forget a front end, its requests and the records in its rings."""
        if number in self._indexes:
            self._turn("detach", self._drop(number), serving.WELL, now_ns)

    def cut_off(self) -> list[CutOff]:
        """Return the front ends that `claim` has cut off since the last call."""
        states = self.memory.array("front_ends")["state"]
        gone = [n for n, i in self._indexes.items() if states[i] == serving.DETACHED]
        why = self.memory.array("front_ends")["why"]
        return [CutOff(n, WHY[int(why[self._drop(n)])]) for n in gone]

    def counters(self, number: int) -> dict[str, int]:
        """Return the counters of an attached front end."""
        end = self.memory.array("front_ends")[self._indexes[number]]
        names = ("num_claimed", "num_refused", "num_ended", "num_written", "held", "owing")
        return {name: int(end[name]) for name in names}

    def num_written(self) -> dict[int, int]:
        """Return the number of records written to each attached front end's token ring."""
        written = self.memory.array("front_ends")["num_written"].tolist()
        return {number: written[index] for number, index in self._indexes.items()}

    # -- requests in

    def claim(self, now_ns: int) -> int:
        """Take a bounded number of arrived records, and end requests past their deadlines.

        The caller then applies `changes`, and calls again until the answer is 0.
        """
        taken: int = self._turn("claim", now_ns)
        if taken < 0:
            raise InvariantError("changes were not taken after the last claim")
        return taken

    def changes(self) -> tuple[list[Effect], list[Event]]:
        """Return the changes of requests, in the order to apply: effects on frames, then events.

        A request that was added and removed since the last call has no event.
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
        """Return the smallest priority that `claim` would take now."""
        word: int = self._turn("arrived", now_ns)
        return word

    @property
    def asked(self) -> int:
        """The front ends' request to the loop: `serving.SERVE`, `DRAINED` or `STOP`."""
        answer: int = self._turn("asked")
        return answer

    @property
    def next_deadline_ns(self) -> int | None:
        """Time when the next live request times out; None if no request can time out."""
        at_ns = self.memory.get("next_deadline_ns")
        return None if at_ns == NONE else at_ns

    # -- a live request

    def find(self, request_id: RequestId) -> int:
        """Return the slot of a request.

        Raises:
            InvariantError: The request has no slot.
        """
        slot: int = self._turn("find", request_id)
        if slot < 0:
            raise InvariantError(f"request {request_id} has no slot")
        return slot

    def tokens(self, slot: int) -> list[int]:
        """Return the token ids of the prompt and the output."""
        num_tokens = int(self.block.array("requests")[slot]["num_tokens"])
        first = slot * self.memory.get("max_total_tokens")
        ids: list[int] = self.memory.array("tokens")[first : first + num_tokens].tolist()
        return ids

    def num_prompt_tokens(self, slot: int) -> int:
        """Return the number of tokens of the prompt."""
        return int(self.block.array("requests")[slot]["num_prompt"])

    def max_tokens(self, slot: int) -> int:
        """Return the largest number of tokens to sample."""
        return int(self.memory.array("serving")[slot]["max_tokens"])

    def sampling(self, slot: int) -> SamplingParams:
        """Return the sampling parameters of a request."""
        x = self.memory.array("serving")[slot]
        return SamplingParams(
            temperature=float(x["temperature"]),
            top_k=int(x["top_k"]),
            top_p=float(x["top_p"]),
            min_p=float(x["min_p"]),
            seed=int(x["seed"]),
        )

    def live(self) -> Iterator[int]:
        """Yield the slots of live requests."""
        for slot in np.flatnonzero(self.memory.array("serving")["phase"] == serving.LIVE):
            yield int(slot)

    # -- results of a run, and tokens out

    def failed(self, start_ns: int, end_ns: int) -> tuple[list[Effect], list[int]]:
        """Drop the frame of the running program, which raised, and rerun its requests one by one.

        Returns:
            Effects, and the slots of requests that also failed alone, which must end in `error`.
        """
        program, slots = self._fail(start_ns, end_ns)
        return [Drop(program)], slots

    def sampled(self, slot: int, token_id: int, now_ns: int) -> None:
        """Publish a request's new token, which `done` has counted, or the request's end."""
        self._turn("sampled", slot, token_id, now_ns)

    def end(self, slot: int, reason: int, now_ns: int, text: str = "") -> None:
        """End a live request for a reason of the host.

        Args:
            slot: Slot of the request.
            reason: Index into `qllm.ingress.layout.REASONS`.
            now_ns: The engine's clock.
            text: Message of an error, cut to `serving.TEXT_BYTES`.
        """
        data = text.encode("utf-8", "replace")[: serving.TEXT_BYTES]
        x = self.memory.array("serving")
        x["text"][slot, : len(data)] = np.frombuffer(data, "u1")
        x["num_text"][slot] = len(data)
        self._turn("end", slot, reason, now_ns)

    def flush(self) -> int:
        """Write records that lacked room before; return the number of slots with more."""
        left: int = self._turn("flush")
        return left

    def show(self) -> None:
        """Publish to the front ends how many requests are live and waiting."""
        self._turn("show")

    def check(self) -> None:
        """Check the invariants of both blocks. Tests call it after every step.

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
    """Let a server serve one more front end. The caller must keep the front end's memory.

    Raises:
        ConfigError: The server has no room for the front end (see `NativeServer.attach`).
    """
    rings = {
        name: RingAt(address_of(ring), address_of(tail), len(ring))
        for name, (ring, tail) in block.rings.items()
    }
    progress = block.segment.words[block.PROGRESS : block.PROGRESS + 1]
    server.attach(block.number, rings, address_of(progress))


def sizes_of(config: EngineConfig) -> dict[str, Any]:
    """Return the numbers of requests and of front ends for which a server has room."""
    capacity = max(MIN_CAPACITY, 4 * config.max_num_seqs)
    return {"capacity": capacity, "max_front_ends": MAX_FRONT_ENDS}


def statuses_in(requests: "np.ndarray[Any, np.dtype[Any]]") -> dict[RequestId, RequestStatus]:
    """Return the status of each live request in a scheduler's state (`layout.REQUEST`)."""
    now = requests[np.flatnonzero(requests["live"])]
    found = {}
    for request_id, frame, blocks in zip(
        now["id"].tolist(), now["frame"].tolist(), now["num_blocks"].tolist(), strict=True
    ):
        holds = RequestStatus.RUNNING if blocks else RequestStatus.WAITING
        found[request_id] = RequestStatus.PARKED if frame >= 0 else holds
    return found
