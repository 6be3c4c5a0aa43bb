"""Transport of requests in and tokens out: the `Ingress` protocol and its implementations.

`inproc` is a queue between threads. `shm` has rings in memory that processes of one machine share.
`layout` defines the records of a ring.
"""

from qllm.ingress.inproc import InprocIngress, StopWord
from qllm.ingress.protocol import (
    CONTROL,
    LOOK,
    ArrivalWord,
    Call,
    Cancel,
    Ingress,
    Item,
    Revision,
    Submission,
    Update,
)

__all__ = [
    "CONTROL",
    "LOOK",
    "ArrivalWord",
    "Call",
    "Cancel",
    "Ingress",
    "InprocIngress",
    "Item",
    "Revision",
    "StopWord",
    "Submission",
    "Update",
]
