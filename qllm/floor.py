"""A floor for BE: the least share of the time for BE while LS has work, and its cost for LS.

BE is owed a part of the time in which LS has work. When the debt reaches a slice, BE runs for a
slice. So BE gets the share in any window of time, and LS waits for few slices at once:

    debt    0 ........ a slice: BE runs until the first boundary after a slice, which pays the debt
    rate    share + 3 slices per window: the slice that is still owed, the rest of the LS run that
            has to stop first, and the time by which the last BE run was too long
"""

from math import ceil
from typing import NamedTuple

from qllm.errors import ConfigError, shown
from qllm.types import NS_PER_MS

MILLION = 1_000_000
MAX_SHARE = 0.9
MIN_WINDOW_MS, MAX_WINDOW_MS = 100, 3_600_000
MIN_SLICE_MS, MAX_SLICE_MS = 1, 50
"""Limits of the length of a slice. Within these limits, a slice is as long as a segment may be."""
MAX_RATE = 950_000
"""Highest rate in millionths. Under any floor, LS keeps a twentieth of the time."""
ROOM = 3
"""Number of slices per window that are reserved, because runs do not stop and start at once."""


class Floor(NamedTuple):
    """The numbers of a floor. They are integers, so that a device gets the same results."""

    rate: int = 0
    """Part of the time that BE is owed, in millionths; 0 is no floor."""
    window_ns: int = 0
    slice_ns: int = 0
    """Time after which a run of BE stops, at the next boundary."""

    @classmethod
    def of(cls, share: float, window_ms: float, segment_ms: float) -> "Floor":
        """Return the floor for `min_be_share`, `be_share_window_ms` and `max_segment_ms`.

        Raises:
            ConfigError: A value is out of its range, or the values leave too little for LS.
        """
        if not _is_number(share) or not 0 <= share <= MAX_SHARE:
            raise ConfigError(
                f"min_be_share={shown(share)} must be a number in [0, {MAX_SHARE}], a part of the "
                "engine's time; 0 is no floor"
            )
        if not _is_number(window_ms) or not MIN_WINDOW_MS <= window_ms <= MAX_WINDOW_MS:
            raise ConfigError(
                f"be_share_window_ms={shown(window_ms)} must be a number in "
                f"[{MIN_WINDOW_MS}, {MAX_WINDOW_MS}]"
            )
        if not share:
            return cls()
        slice_ms = min(max(segment_ms, MIN_SLICE_MS), MAX_SLICE_MS)
        rate = ceil(MILLION * (share + ROOM * slice_ms / window_ms))
        if rate > MAX_RATE:
            least_ms = ROOM * slice_ms / (MAX_RATE / MILLION - share)
            raise ConfigError(
                f"min_be_share={share:g} of be_share_window_ms={window_ms:g} leaves LS too little, "
                f"since BE runs for {slice_ms:g} ms at once (max_segment_ms); give a window of at "
                f"least {ceil(least_ms)} ms, or a smaller share"
            )
        return cls(rate, int(window_ms * NS_PER_MS), int(slice_ms * NS_PER_MS))

    def delayed_ms(self, wait_ms: float) -> float:
        """Return the longest time that a wait of LS takes if it takes `wait_ms` without a floor.

        The result is right if segments keep their bound and steps may be cut. In any time, BE takes
        at most `rate` of the time, and `ROOM` slices in addition.
        """
        return (wait_ms + ROOM * self.slice_ns / NS_PER_MS) / (1 - self.rate / MILLION)


NO_FLOOR = Floor()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
