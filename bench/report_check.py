"""Checks of the committed results: each row can be lost, and its tree can be checked out again."""

import subprocess
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bench.report_claims import PAGE, missing, rows_of, with_rows
from bench.report_lines import ROOT

SINCE = "2026-11-29"
"""Results of this day or later count as current. Older ones say why they were not made again."""
ZEN4 = "a quiet Zen 4 machine is needed, as the other rows of this page are from one"
NOT_AGAIN: Mapping[str, str] = {
    "gpu-h100.json": "a GPU is needed",
    "perplexity_talk.json": "the model `talk` has to be trained first",
    **dict.fromkeys(
        (
            "beside_mask.json",
            "capacity-cpu.json",
            "cpu_kernels.json",
            "decide-native.json",
            "decide.json",
            "delta_net.json",
            "engine-cpu.json",
            "fleet.json",
            "floor.json",
            "four_bits.json",
            "four_bits_2048.json",
            "four_bits_openvino.json",
            "kv.json",
            "on_ray.json",
            "over_http.json",
            "papers.json",
            "peers-cpu.json",
            "policies-cpu.json",
            "rate.json",
            "real_size.json",
            "sim_speed.json",
            "soak.json",
            "streams.json",
            "ttft.json",
            "validate_sim.json",
            "weights.json",
        ),
        ZEN4,
    ),
}
"""Reason why an older result was not measured again."""


def commits(value: Any) -> Iterator[str]:
    """Yield every commit that a result names."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key == "commit" and isinstance(inner, str):
                yield inner
            else:
                yield from commits(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from commits(inner)


def day_of(commit: str) -> str | None:
    """Return the day of a commit; None for one that this repository does not have."""
    command = ["git", "-C", str(ROOT), "show", "-s", "--format=%cs", commit, "--"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def result_problems(
    name: str, document: Mapping[str, Any], day_of: Callable[[str], str | None] = day_of
) -> Iterator[str]:
    """Yield the reasons why a result is not fit to be printed."""
    for row in rows_of(document):
        if not row.target:
            yield f"the row {row.name[:60]!r} has no target; a number that cannot miss is 'printed'"
    if f"`{name}`" not in (ROOT / "bench" / "README.md").read_text():
        yield "bench/README.md does not name the bench that makes it"
    days = []
    for commit in sorted(set(commits(document))):
        if commit.endswith("-dirty"):
            yield f"the tree of {commit} cannot be checked out again; measure it again"
        elif day := day_of(commit):
            days.append(day)
        else:
            yield f"commit {commit} is not in this repository"
    if days and min(days) < SINCE and name not in NOT_AGAIN:
        yield (
            f"a row is of {min(days)}, older than {SINCE}; measure it again, or give the reason in "
            "NOT_AGAIN"
        )
    if days and min(days) >= SINCE and name in NOT_AGAIN:
        yield "all rows were measured again; take it out of NOT_AGAIN"


def problems(documents: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what is wrong with the results, and with what docs/papers.md says of them."""
    found = [
        f"{name}: {text}" for name, of in documents.items() for text in result_problems(name, of)
    ]
    page = PAGE.read_text()
    found += [f"docs/papers.md names {name}, which is not there" for name in missing(page)]
    if with_rows(page, documents) != page:
        found.append("docs/papers.md has other numbers than the results; run `make bench-report`")
    return found
