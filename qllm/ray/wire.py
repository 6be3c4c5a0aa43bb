"""What front ends and replicas say to each other. Records are those of the rings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from qllm.frontend.routes import RequestView
from qllm.ingress import Submission


@dataclass
class Local:
    """What a front end and the router of its process share of a request."""

    item: Submission
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
    """Names the model and version that the front end serves."""
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
    """A replica lives and its engine does not: the request goes on elsewhere."""

    why: str


Said = Placed | Lost | tuple[int, int, bytes]
"""Or a record: kind, flags, body."""
