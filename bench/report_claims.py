"""The claims of docs/papers.md that have measured rows: statuses, texts, and rows elsewhere.

A row of `bench/results/papers.json` names its claim, and the paper's number is its target. A claim
with such rows holds if each of them that has a number as target reaches it. Otherwise it differs.
Rows of other results are about a claim too, but have targets of their own. The page of results
lists them, and they decide nothing.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bench.report_layout import wrapped
from bench.report_lines import ROOT, with_mark

PAGE = ROOT / "docs" / "papers.md"
CLAIM = re.compile(r"^- \*\*(\w+)\*\*.*?(?=^- \*\*|\n\n|\Z)", re.M | re.S)
STATUS = re.compile(r"\*\*(Holds|Differs|Missing)\*\*\.")
ELSEWHERE: Mapping[str, tuple[str, str]] = {
    "B9": ("capacity-cpu.json", r"tokens/s qllm / vllm"),
    "SI1": ("kv.json", r"`rota` with swap over `fcfs`"),
    "SI6": ("kv.json", r"BE tokens/s over recomputing|over recomputing with the prefix cache"),
    "S9": ("streams.json", r"TTFT after the last piece|mean TTFT, streamed / whole"),
    "S11": ("streams.json", r"prompts as fast as they can be sent"),
    "P10": ("fleet.json", r"short p90 / round robin"),
    "P11": ("fleet.json", r"missed targets / round robin"),
}
"""Result, and pattern of the rows' names, of claims that other benches measure."""


class Found(NamedTuple):
    """A row of a result."""

    name: str
    value: str | None
    """None if the row was not measured."""
    target: str
    """Empty for a row of an older result, which had none."""
    reached: bool | None
    way: str
    claim: str = ""
    """Name of the claim that the row decides."""

    @property
    def text(self) -> str:
        """Return the row as a part of a sentence."""
        asked = "" if self.reached is None else f", {self.target} asked"
        return f"{self.name}: {self.value}{asked} ({self.way})"


def rows_of(document: Mapping[str, Any]) -> Iterator[Found]:
    """Yield the rows of a result, whatever its form."""
    for line in document.get("lines", ()):
        name = line["name"].strip()
        way = "simulated" if "simulated" in name else "live"
        yield Found(name, line["value"], line["target"], line["reached"], way)
    for part in document.get("parts", {}).values():
        for row in part.get("rows", ()):
            yield Found(
                name=row["claim"],
                value=row["here"],
                target=row.get("target", ""),
                reached=row.get("reached"),
                way=row.get("way", ""),
                claim=row.get("name", ""),
            )


def status_of(rows: Sequence[Found]) -> str:
    """Return `Holds` if a row has a number as target, and none misses it."""
    judged = [row.reached for row in rows if row.reached is not None]
    return "Holds" if judged and all(judged) else "Differs"


def with_rows(page: str, documents: Mapping[str, Mapping[str, Any]]) -> str:
    """Return docs/papers.md with the statuses and the numbers of the rows, and with new counts."""
    found = list(rows_of(documents.get("papers.json", {})))

    def entry(match: re.Match[str]) -> str:
        rows = [row for row in found if row.claim == match[1] and row.value is not None]
        if not rows:
            return match[0]
        text, _, files = match[0].partition("\n  `")
        claim = STATUS.split(text)[0].removeprefix("- ")
        said = [row for row in rows if row.reached is not None] or rows
        words = f"{claim}**{status_of(rows)}**. {'; '.join(row.text for row in said)}."
        return "\n".join(wrapped(words, "- ")) + f"\n  `{files}"

    return _counted(CLAIM.sub(entry, page))


def elsewhere(documents: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the table of rows of other results about a claim."""
    lines = ["", "## Rows of other results", ""]
    lines += ["| claim | measured | target | result |", "|---|---|---|---|"]
    for claim, (name, pattern) in ELSEWHERE.items():
        for row in rows_of(documents.get(name, {})):
            if re.search(pattern, row.name):
                target = with_mark(row.target, row.reached)
                cells = (f"{claim}, {row.name}", row.value, target, name)
                lines.append("| " + " | ".join(str(c).replace("|", "\\|") for c in cells) + " |")
    return lines


def _counted(page: str) -> str:
    """Return the page with the table of its counts."""
    words = ("Holds", "Differs", "Missing")
    totals = [0] * 4
    for title, text in (part.split("\n", 1) for part in page.split("\n## ")[1:]):
        claims = [found[0] for found in CLAIM.finditer(text)]
        counts = [len(claims), *(sum(f"**{w}**." in c for c in claims) for w in words)]
        totals = [a + b for a, b in zip(totals, counts, strict=True)]
        row = f"| {title} | {' | '.join(map(str, counts))} |"
        page = re.sub(rf"^\| {re.escape(title)} \|.*$", lambda _, row=row: row, page, flags=re.M)
    return re.sub(r"^\| all \|.*$", f"| all | {' | '.join(map(str, totals))} |", page, flags=re.M)


def names_files(text: str) -> list[str]:
    """Return the paths that a text names in backticks."""
    return re.findall(r"`([\w.-]+/[\w./-]+)`", text)


def names_tests(text: str) -> list[tuple[str, str]]:
    """Return the file and the name of each test that a text names."""
    return re.findall(r"`([\w./-]+\.py)`:\s+`(test_\w+)`", text)


def missing(text: str) -> list[str]:
    """Return the files and tests that a text names and that are not there."""
    files = [name for name in names_files(text) if not (ROOT / name).exists()]
    tests = [
        f"{file}: {test}"
        for file, test in names_tests(text)
        if (ROOT / file).exists() and f"def {test}(" not in (ROOT / file).read_text()
    ]
    return files + tests
