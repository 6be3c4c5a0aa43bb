"""How tests wait: for a condition, with a limit that does not depend on how fast the machine is."""

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

    The limit counts naps, not the time: a machine that stands still for a minute, or is shared
    with other work, only makes the naps longer.

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
