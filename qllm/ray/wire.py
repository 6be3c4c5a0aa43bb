"""What front ends and replicas say to each other. Records are those of the rings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from qllm.fleet.members import Card
from qllm.fleet.router import Router
from qllm.fleet.routes import RequestView
from qllm.ingress import Submission


@dataclass(eq=False)
class Seen:
    """What a front end and the router of its process know of replicas. It is not sent.

    The router gets it with the front end's first call, and keeps it up to date.
    """

    replicas: Mapping[str, Mapping[str, Any]] | None = None
    """What each replica that is there says of itself, by name; None before it is known."""
    refused: dict[str, str] = field(default_factory=dict)
    """Why replicas take no request of this front end, for good."""
    card: Card | None = None
    """What the engine says that the front end speaks for: others are passed over."""
    identity: str | None = None
    """Its digest."""
    router: Router | None = None
    load_s: float = 1.0
    """For which the last replica that came has loaded its engine."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Seen, ()

    def look(self, replicas: Mapping[str, Mapping[str, Any]]) -> None:
        """Note which replicas there are; called on the router's thread."""
        self.refused = {name: why for name, why in self.refused.items() if name in replicas}
        for name in replicas.keys() - (self.replicas or {}).keys():
            self.load_s = replicas[name].get("load_s", self.load_s)
        self.replicas = replicas

    @property
    def serving(self) -> list[str]:
        """Replicas that may get requests of the front end."""
        return [name for name in self.replicas or {} if self.serves(name)]

    def serves(self, name: str) -> bool:
        """Whether a replica that is there may get requests of the front end."""
        said = (self.replicas or {}).get(name)
        ours = said is not None and said.get("identity") == self.identity
        return ours and name not in self.refused


@dataclass
class Local:
    """What a front end and the router of its process share of a request."""

    item: Submission
    seen: Seen = field(default_factory=Seen)
    view: RequestView | None = None
    """As the route saw it."""
    heard: Callable[[int, int], None] | None = None
    """Told how many tokens it has and its class, once it is routed."""


@dataclass(frozen=True)
class Ask:
    """A request on its way to a replica."""

    key: str
    """What replicas call it; another one for each time it is sent."""
    identity: str
    """`Card.digest` of the engine that the front end speaks for."""
    flags: int
    body: bytes
    """A request's record, its times counted from now: arrival in the past, deadline to come."""
    local: Local | None = None
    """For the router of this process; it is not sent."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Ask, (self.key, self.identity, self.flags, self.body)


class Placed(NamedTuple):
    """The first thing a replica says of a request."""

    replica: str


class Lost(NamedTuple):
    """A replica lives and its engine has died with the request, which goes on elsewhere."""

    why: str


class Refused(NamedTuple):
    """A replica does not take a request, which goes on elsewhere."""

    why: str
    is_final: bool
    """It takes none of this front end any more: its engine has ended, or is another one."""


Said = Placed | Lost | Refused | tuple[int, int, bytes]
"""Or a record: kind, flags, body."""
