"""Messages between front ends and replicas. Records are those of the rings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from qllm.fleet.members import Card
from qllm.fleet.router import Router
from qllm.fleet.routes import RequestView
from qllm.ingress import Submission


@dataclass(eq=False)
class Seen:
    """Facts about replicas that a front end shares with its process's router; they are not sent.

    The router gets this object with the front end's first call, and updates it.
    """

    replicas: Mapping[str, Mapping[str, Any]] | None = None
    """Report of each present replica, by name; None before a replica is known."""
    refused: dict[str, str] = field(default_factory=dict)
    """Permanent reasons why replicas take no request of this front end."""
    card: Card | None = None
    """Card of the engine that the front end serves. The router skips replicas with another card."""
    identity: str | None = None
    """Digest of the card."""
    router: Router | None = None
    load_s: float = 1.0
    """Seconds that the newest replica took to load its engine."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Seen, ()

    def look(self, replicas: Mapping[str, Mapping[str, Any]]) -> None:
        """Record the present replicas. The router's thread calls this."""
        self.refused = {name: why for name, why in self.refused.items() if name in replicas}
        for name in replicas.keys() - (self.replicas or {}).keys():
            self.load_s = replicas[name].get("load_s", self.load_s)
        self.replicas = replicas

    @property
    def serving(self) -> list[str]:
        """Replicas that may get requests of the front end."""
        return [name for name in self.replicas or {} if self.serves(name)]

    def serves(self, name: str) -> bool:
        """Return True if the front end may send requests to a replica that is there now."""
        said = (self.replicas or {}).get(name)
        ours = said is not None and said.get("identity") == self.identity
        return ours and name not in self.refused


@dataclass
class Local:
    """Parts of a request that a front end shares with the router of its process."""

    item: Submission
    seen: Seen = field(default_factory=Seen)
    view: RequestView | None = None
    """The view of the request that the route saw."""
    heard: Callable[[int, int], None] | None = None
    """Function that is called once the request is routed, with its number of tokens and its
    class."""


@dataclass(frozen=True)
class Ask:
    """A request on its way to a replica."""

    key: str
    """Id of the request at replicas. Each time the request is sent, it gets a new id."""
    identity: str
    """`Card.digest` of the engine that the front end serves."""
    flags: int
    body: bytes
    """A request's record. Its times count from now. The arrival is in the past, the deadline in the
    future."""
    local: Local | None = None
    """Data for the router of this process, which is not sent."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Ask, (self.key, self.identity, self.flags, self.body)


class Placed(NamedTuple):
    """The first message of a replica about a request."""

    replica: str


class Lost(NamedTuple):
    """A message: the engine of a living replica has died, so a request continues elsewhere."""

    why: str


class Refused(NamedTuple):
    """A message that a replica refuses a request, which continues elsewhere."""

    why: str
    is_final: bool
    """True if the replica takes no more requests of this front end: its engine has ended, or
    differs."""


Said = Placed | Lost | Refused | tuple[int, int, bytes]
"""A message, or a record: kind, flags, body."""
