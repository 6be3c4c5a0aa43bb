"""What front ends and replicas say to each other. Records are those of the rings."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from qllm.ingress import Submission

from .load import Load


@dataclass
class Local:
    """What a front end and the router of its process share of a request."""

    item: Submission
    load: Load | None = None
    """Where it is counted, once it is routed."""


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
