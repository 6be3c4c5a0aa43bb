"""The energy of a run, where the machine has a counter: NVML of a GPU, or RAPL of a processor."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qllm.record.trace import Event

POWERCAP = Path("/sys/class/powercap")
NO_COUNTER = "no energy counter can be read here (NVML, RAPL)"

Run = Mapping[str, float | None]
"""`joules` and `computed_tokens` of a run. Joules are None without a counter."""


def nvml_joules() -> float | None:
    """Return the joules of the first GPU since its driver was loaded; None without NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
    except Exception:  # noqa: BLE001 - without a GPU or a driver there is no number
        return None


def _microjoules(root: Path) -> dict[str, tuple[int, int]]:
    """Return the counter and its range of each processor package that can be read."""
    found = {}
    for zone in sorted(root.glob("intel-rapl:[0-9]*")):
        if ":" in zone.name.removeprefix("intel-rapl:"):
            continue  # a part of a package, which the package counts too
        try:
            now, most = (
                int((zone / name).read_text()) for name in ("energy_uj", "max_energy_range_uj")
            )
        except (OSError, ValueError):
            continue
        found[zone.name] = (now, most)
    return found


class Meter:
    """The joules since the meter was made, of all processor packages and the first GPU.

    Args:
        root: Folder of the kernel's power zones.
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        self._root = root
        self._packages, self._gpu = _microjoules(root), nvml_joules()

    def joules(self) -> float | None:
        """Return the joules so far; None if no counter can be read.

        A counter that has started again at zero is taken to have done so once.
        """
        spent: list[float] = []
        for name, (now, most) in _microjoules(self._root).items():
            if name in self._packages:
                begun = self._packages[name][0]
                spent.append((now - begun + (most if now < begun else 0)) / 1e6)
        gpu = nvml_joules()
        if gpu is not None and self._gpu is not None:
            spent.append(gpu - self._gpu)
        return sum(spent) if spent else None


def computed_tokens(events: "Iterable[Event]") -> float:
    """Return the tokens that passes computed, those of unfinished requests too.

    A part of the layers counts as that part of a token. A pass that never ended counts nothing.
    """
    from qllm.record.trace import Planned, Ran  # not above: `bench.common` imports no qllm

    planned: dict[int, float] = {}
    done, num_layers = 0.0, 1
    for event in events:
        if isinstance(event, Planned):
            rows = event.rows
            planned[event.frame_id] = sum(
                (r.hi - r.lo) * (r.end_layer - r.start_layer) for r in rows
            )
            num_layers = max([num_layers, *(r.end_layer for r in rows)])
        elif isinstance(event, Ran) and event.why == "done":
            done += planned.pop(event.frame_id, 0.0)
    return done / num_layers


def answered_tokens(answers: Iterable[Any]) -> float:
    """Return the tokens that answers needed to be computed.

    These are the tokens of the prompts that no cache had, and all tokens of the answers but the
    last, which nothing computes on.

    Args:
        answers: Results of an engine, or `Served` of a server.
    """
    total = 0
    for one in answers:
        if hasattr(one, "spec"):
            prompt, cached = one.spec.num_prompt_tokens, one.num_cached
            output = one.num_output_tokens
        else:
            prompt, output = len(one.prompt_token_ids), len(one.token_ids)
            cached = one.metrics.num_cached_tokens
        total += prompt - (cached or 0) + output - 1 if output else 0
    return float(total)


@contextmanager
def metered(runs: list[Run]) -> Iterator[list[float]]:
    """Add the energy of the block to the runs of a row; the block appends computed tokens."""
    meter, tokens = Meter(), list[float]()
    yield tokens
    runs.append({"joules": meter.joules(), "computed_tokens": sum(tokens)})


def per_ktok(runs: Sequence[Run]) -> str:
    """Return the joules per 1,000 computed tokens of runs, as text, or why there is no number.

    Args:
        runs: `joules` and `computed_tokens` of each run.
    """
    known = [run for run in runs if run["joules"] is not None and run["computed_tokens"]]
    if not known:
        return NO_COUNTER
    joules = sum(run["joules"] or 0.0 for run in known)
    tokens = sum(run["computed_tokens"] or 0.0 for run in known)
    return f"{1e3 * joules / tokens:.3g} J per 1,000 computed tokens"
