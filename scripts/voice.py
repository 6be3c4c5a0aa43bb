"""Print what breaks the mechanical rules of voice in CONTRIBUTING.md: `scripts/voice.py [PATH...]`.

Docstrings, texts under fields, and comments are read; code and messages are not.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("qllm", "policies", "bench", "scripts")
QUESTION = re.compile(r"(What|Who|Whose|Whom|Whether|Where|How|When|Why|Which)\b")
PERSON = re.compile(r"(?i)\b(nobody|somebody|whoever|anybody|everybody|no one|someone)\b")
ENTRY = re.compile(r"^\s+\*{0,2}\w+: +(Of|As|By|In|For|See|The rest)\b")
MOST = 100
"""Most characters of a line of the docs."""


class Breach(NamedTuple):
    """A text that breaks a rule."""

    place: str
    rule: str
    text: str


def texts(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the kind (`docstring`, `comment`) and the text of all that a reader reads."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for item in body if isinstance(body, list) else ():
            value = getattr(getattr(item, "value", None), "value", None)
            if isinstance(item, ast.Expr) and isinstance(value, str):
                yield item.lineno, "docstring", value
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            is_first = line != last + 1
            last = line
            yield line, "comment" if is_first else "more", token.string.lstrip("# ")


def breaches(path: Path) -> Iterator[Breach]:
    """Yield the breaches in a file of Python or Markdown."""
    source = path.read_text()
    name = str(path.relative_to(ROOT))
    if path.suffix == ".md":
        for line, text in enumerate(source.splitlines(), 1):
            if len(text) > MOST:
                yield Breach(f"{name}:{line}", "a line is longer than 100 characters", text)
        return
    for line, kind, text in texts(source):
        place = f"{name}:{line}"
        if kind != "more" and QUESTION.match(text):
            yield Breach(place, "begins with a question word", text)
        if found := PERSON.search(text):
            yield Breach(place, f"{found[0]!r} names no actor", text)
        entries = text.partition("Args:")[2].splitlines() if kind == "docstring" else []
        for entry in entries:
            if ENTRY.match(entry):
                yield Breach(place, "an entry of Args begins with no noun", entry.strip())


def files(paths: list[str]) -> list[Path]:
    """Return the files to read: the given ones, or those of FOLDERS and the docs."""
    places = [ROOT / p for p in paths] or [*(ROOT / f for f in FOLDERS), ROOT / "docs"]
    found: list[Path] = []
    for place in places:
        inside = [*place.rglob("*.py"), *place.rglob("*.md")] if place.is_dir() else [place]
        found += (file for file in inside if "log" not in file.relative_to(ROOT).parts)
    return sorted(found)


def main() -> int:
    """Print every breach, and return 1 if there is one."""
    found = [breach for path in files(sys.argv[1:]) for breach in breaches(path)]
    for place, rule, text in found:
        print(f"{place}: {rule}: {text.splitlines()[0][:80]}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
