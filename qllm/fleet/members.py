"""Engines of a fleet: their addresses, states and times of the next attempt.

out --(connected, and equal to the others)--> up --(ended)--> out, for a growing time
"""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

from qllm.errors import ConfigError, QllmError, shown
from qllm.frontend.rings import RingClient

OF_ONE_ENGINE = {
    "conformance", "handover_gib", "kv_dir", "kv_dir_gib", "kv_dir_reset", "record", "role",
    "memory", "swap_kv_tokens", "tp", "rank_deadline_s", "max_expert_bytes", "expert_dir",
    "shared_cores", "tp_hosts", "tp_secret_file",
}  # fmt: skip
"""Settings that may differ between the engines of a fleet, because no answer depends on them."""
CHOSEN = "chosen by the engine"
"""Value in place of a size that an engine chose. Another engine may have another size."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays in seconds before the fleet connects again to an engine that has ended."""

    first_s: float = 1.0
    """Delay in seconds after the first end. It doubles after each further end."""
    cap_s: float = 60.0
    """Upper limit of the doubled delay."""
    calm_s: float = 600.0
    """Time after which an earlier end of the engine no longer counts."""

    def wait_s(self, num_gone: int) -> float:
        """Return the delay in seconds after `num_gone` ends in a row."""
        return min(self.cap_s, self.first_s * 2.0 ** min(max(0, num_gone - 1), 60))


class Member:
    """One engine of a fleet. Its fields change under the fleet's lock.

    Args:
        name: Address of the engine.
        meet: Function that connects to the engine.
        backoff: Delays before new attempts.
    """

    def __init__(self, name: str, meet: Callable[[], RingClient], backoff: Backoff) -> None:
        self.name, self._meet, self._backoff = name, meet, backoff
        self.client: RingClient | None = None
        """The client while the engine is up."""
        self.why = "it was not met yet"
        """The reason why the engine does not serve."""
        self.num_met = 0
        """Number of connections to engines at the address, one after the other."""
        self.keeps_file = True
        """True if KV in the engine's file may outlive the engine. It is True until the first
        connection."""
        self.kv_tokens = 0
        """Tokens of the engine's KV at the last connection."""
        self._num_gone = 0
        self._up_s = 0.0
        self.next_s = 0.0
        """Time of the next attempt to connect, on the clock of `time.monotonic`."""

    def meet(self, like: "Card | None") -> RingClient:
        """Connect to the engine. The caller then adds the engine, or calls `is_out`.

        Args:
            like: Card to which the engine's card must be equal.

        Raises:
            ConfigError: The engine differs from the fleet's other engines, or settings are wrong.
            EngineClosedError: No engine answers.
        """
        client = self._meet()
        try:
            if like is not None:
                like.check(card_of(self.name, client.hello))
        except ConfigError:
            client.close()
            raise
        return client

    def is_up(self, client: RingClient) -> None:
        """Record that the engine serves."""
        self.client, self.why = client, ""
        self.keeps_file = client.config.kv_dir is not None
        self.kv_tokens = client.config.pool_tokens
        self.num_met += 1
        self._up_s = time.monotonic()

    def is_out(self, why: str) -> float:
        """Record that the engine does not serve; return the seconds until the next attempt."""
        now_s = time.monotonic()
        if self.client is not None and now_s - self._up_s >= self._backoff.calm_s:
            self._num_gone = 0
        self.client, self.why = None, why
        self._num_gone += 1
        wait_s = self._backoff.wait_s(self._num_gone)
        self.next_s = now_s + wait_s
        return wait_s


@dataclass(frozen=True, slots=True)
class Card:
    """The properties that must be equal among engines that may continue each other's answers."""

    name: str
    parts: dict[str, Any]

    def check(self, other: "Card") -> None:
        """Raise if another engine may not serve in the same fleet.

        Raises:
            ConfigError: The engines differ; the message names the differences.
        """
        for part, ours in self.parts.items():
            theirs = other.parts[part]
            if ours != theirs and CHOSEN not in (ours, theirs):
                raise ConfigError(
                    f"the engine at {other.name} cannot serve beside that at {self.name}: {part} "
                    f"is {shown(theirs):.200} there and {shown(ours):.200} here, and an answer "
                    "must not depend on the engine; start both with the same model, release and "
                    "settings"
                )

    @property
    def digest(self) -> str:
        """A digest that is equal for equal cards, in all processes."""
        text = json.dumps(self.parts, sort_keys=True, default=sorted)  # `sorted` writes sets
        return blake2b(text.encode(), digest_size=16).hexdigest()


def card_of(name: str, hello: Any) -> Card:
    """Return the card of an engine: the properties on which its answers depend.

    Args:
        name: Address of the engine.
        hello: A `Hello`, `RemoteHello` or `EngineCard`.
    """
    info, config = hello.info._asdict(), asdict(hello.config)
    config |= dict.fromkeys(info.pop("chosen"), CHOSEN)
    parts = {what: config[what] for what in config if what not in OF_ONE_ENGINE}
    del info["name"]  # the same model may have different names and places
    info["kernels"] = {key: name for key, name in info["kernels"].items() if key != "ranks"}
    parts |= {what if what not in config else f"{what} in use": info[what] for what in info}
    return Card(name, {**parts, "policy": hello.trace_meta["policy"]})


def meet_all(members: list[Member]) -> tuple[Card, dict[Member, RingClient]]:
    """Connect to every engine at once.

    Returns:
        The common card, and the engines that answer.

    Raises:
        QllmError: No engine answers, or an engine differs from the others.
    """
    met: dict[Member, RingClient] = {}
    failed: dict[Member, Exception] = {}

    def connect(member: Member) -> None:
        try:
            met[member] = member.meet(None)
        except Exception as error:  # noqa: BLE001 - raised below, on the caller's thread
            failed[member] = error

    threads = [threading.Thread(target=connect, args=(member,)) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    there = [member for member in members if member in met]
    cards = [card_of(member.name, met[member].hello) for member in there]
    try:
        for member, error in failed.items():
            if isinstance(error, ConfigError) or not isinstance(error, QllmError) or not there:
                raise error
            member.is_out(str(error))
        for card in cards[1:]:
            cards[0].check(card)
    except BaseException:
        for client in met.values():
            client.close()
        raise
    return cards[0], met


def takes_requests(member: Member) -> bool:
    """Return True if an engine serves and does not drain."""
    client = member.client
    return client is not None and client.failure is None and not client.draining


def is_full(member: Member) -> bool:
    """Return True if as many requests wait at an engine as are allowed."""
    client = member.client
    return client is not None and client.num_waiting >= client.config.max_waiting


def none_serves(members: dict[str, Member]) -> str:
    """Return the reason why no engine takes requests."""
    whys = "; ".join(f"{name}: {member.why or 'it drains'}" for name, member in members.items())
    return f"none of {len(members)} engines serves ({whys})"
