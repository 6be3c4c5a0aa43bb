"""The wait of BE for LS work of other engines on the same cores.

    another engine has LS work      plans of BE alone are held, at most until `until_ns`
    BE has been held that long      BE runs for one slice, then it is held again
    no other engine has LS work     plans run as the policy made them

A run of BE under pressure is followed by a hold that is longer by the share of BE: `min_be_share`,
or `LEAST_SHARE` if that is less. So BE of this engine keeps at least the share of the time, and
makes progress within the bound that its policy declares (I14). Rows of LS are never held. The class
knows no clock, and no other engine: the engine tells it when the pressure changes.
"""

from dataclasses import replace

from qllm.floor import MILLION, Floor
from qllm.plan import Plan
from qllm.types import NS_PER_MS

LEAST_SHARE = 0.01
"""Least share of the time that BE has while other engines have LS work."""
SLICE_NS = 5 * NS_PER_MS
"""Length of BE's runs under pressure, if the engine's BE floor has none."""


class Pressure:
    """The state of the holds of one engine.

    Args:
        floor: BE floor of the engine, which may ask for a larger share and other slices.
        max_stall_ms: Longest time without progress that the policy declares; None is no bound.
    """

    def __init__(self, floor: Floor, max_stall_ms: float | None) -> None:
        self._slice_ns = floor.slice_ns or SLICE_NS
        self._share = max(LEAST_SHARE, floor.rate / MILLION)
        self._most_ns = None if max_stall_ms is None else int(max_stall_ms * NS_PER_MS / 2)
        self.is_on = False
        """True while another engine has LS work."""
        self.until_ns = 0
        """Time at which BE runs although the pressure is on."""
        self.num_holds = 0
        """Number of decisions that held BE."""
        self._runs = False

    def set(self, is_on: bool, now_ns: int) -> None:
        """Record whether another engine has LS work now."""
        if is_on and not self.is_on:
            self._hold(self._slice_ns, now_ns)
        self.is_on = is_on

    def holds(self, now_ns: int) -> bool:
        """Return True if a plan of BE alone must wait now, until `until_ns`."""
        if not self.is_on or now_ns >= self.until_ns:
            return False
        self.num_holds += 1
        return True

    def cut(self, plan: Plan) -> Plan:
        """Return a plan of BE that runs now. Under pressure, it runs for one slice."""
        self._runs = self.is_on
        if not self.is_on:
            return plan
        slices = [x for x in (plan.slice_ns, self._slice_ns) if x is not None]
        return replace(plan, slice_ns=min(slices))

    def ran(self, start_ns: int, end_ns: int) -> None:
        """Record the end of a run. After a run of BE under pressure, the next hold begins."""
        if self._runs:
            self._hold(end_ns - start_ns, end_ns)
        self._runs = False

    def _hold(self, run_ns: int, now_ns: int) -> None:
        hold_ns = int(run_ns * (1 / self._share - 1))
        self.until_ns = now_ns + (hold_ns if self._most_ns is None else min(hold_ns, self._most_ns))
