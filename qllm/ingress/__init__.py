"""How requests get in and tokens get out: the `Ingress` protocol and its transports.

`inproc` is a queue between threads; `shm` are rings in memory that processes of one machine
share. What a ring's records look like is said once, in `layout`.
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
