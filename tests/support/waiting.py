"""How tests wait: for a condition, with a limit that only a hang reaches."""

import time
from collections.abc import Callable
from typing import Any

NAP_S = 0.005


def wait_for(
    condition: Callable[[], Any],
    seconds: float = 120.0,
    *,
    meanwhile: Callable[[], Any] = lambda: None,
    what: str = "it did not happen",
) -> None:
    """Wait until a condition is true.

    The limit counts naps, not the time: a machine that stands still for a minute only makes one nap
    longer. Where other work takes the processor from what is waited for, naps go on; so the limit
    is far above what an idle machine needs.

    Args:
        condition: Returns something true at last.
        seconds: Limit, as naps of an idle machine.
        meanwhile: Called before each nap.
        what: Message of the AssertionError after the limit.
    """
    for _ in range(round(seconds / NAP_S)):
        if condition():
            return
        meanwhile()
        time.sleep(NAP_S)
    raise AssertionError(what)
