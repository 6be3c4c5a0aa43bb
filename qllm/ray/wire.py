"""What front ends and replicas say to each other. Records are those of the rings."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from qllm.ingress import Submission


@dataclass(frozen=True)
class Ask:
    """A request on its way to a replica."""

    key: str
    """What replicas call it; another one for each time it is sent."""
    identity: str
    """Of the model and version that the front end serves."""
    flags: int
    body: bytes
    """A request's record, its times counted from now: arrival in the past, deadline to come."""
    asked: Submission | None = None
    """The same for the router of this process; it is not sent."""

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
