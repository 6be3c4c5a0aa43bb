"""Layout of the results pages: Markdown in lines of at most 100 columns."""

import re
import textwrap
from collections.abc import Iterator, Sequence

WIDTH = 100
ITEM = re.compile(r"\s*(?:[-*]|\d+\.)\s+")
UNTOUCHED = ("#", "![", "|", "```")


def fold(lines: Sequence[str]) -> list[str]:
    """Return the lines with paragraphs wrapped, and wide tables split or made lists."""
    text = "\n".join(lines).split("\n")
    out: list[str] = []
    at = 0
    while at < len(text):
        end = _end_of_block(text, at)
        block = text[at:end]
        if block[0].startswith("|"):
            out += _table(block)
        elif not block[0].strip() or block[0].startswith(UNTOUCHED):
            out += block
        else:
            out += _wrapped(block)
        at = end
    return out


def _end_of_block(text: Sequence[str], at: int) -> int:
    """Return the line behind a fence, a table, a paragraph or an item that begins at a line."""
    first, end = text[at], at + 1
    if first.startswith("```"):
        while not text[end].startswith("```"):
            end += 1
        return end + 1
    if first.startswith("|"):
        while end < len(text) and text[end].startswith("|"):
            end += 1
    elif first.strip() and not first.startswith(UNTOUCHED):
        while end < len(text) and text[end].strip() and not _begins(text[end]):
            end += 1
    return end


def _begins(line: str) -> bool:
    return line.startswith(UNTOUCHED) or ITEM.match(line) is not None


def _wrapped(block: Sequence[str]) -> list[str]:
    found = ITEM.match(block[0])
    lead = found[0] if found else ""
    words = " ".join([block[0][len(lead) :], *block[1:]])
    return wrapped(words, lead)


def wrapped(words: str, lead: str) -> list[str]:
    """Return words in lines that fit; `lead` begins the first, and later ones are indented."""
    return textwrap.wrap(
        " ".join(words.split()), WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip())[1:-1]]


def _rows(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    written = ["| " + " | ".join(row) + " |" for row in (head, *body)]
    return [written[0], "|" + "---|" * len(head), *written[1:]]


def _table(block: Sequence[str]) -> list[str]:
    """Return a table that fits: as it is, as several with fewer columns, or as a list."""
    if max(map(len, block)) <= WIDTH:
        return list(block)
    head, *body = (_cells(row) for row in (block[0], *block[2:]))
    body = [[*row, *[""] * (len(head) - len(row))] for row in body]
    widths = [max(len(row[i]) for row in (head, *body)) + 3 for i in range(len(head))]
    if len(head) > 4 and widths[0] + max(widths[1:]) < WIDTH:
        out: list[str] = []
        for columns in _groups(widths):
            part = [[row[i] for i in columns] for row in (head, *body)]
            out += ["", *_rows(part[0], part[1:])] if out else _rows(part[0], part[1:])
        return out
    return [line for row in body for line in _item(head, row)]


def _groups(widths: Sequence[int]) -> Iterator[list[int]]:
    """Yield groups of columns that fit, each with the first column."""
    group = [0]
    for i in range(1, len(widths)):
        if len(group) > 1 and sum(widths[j] for j in group) + widths[i] >= WIDTH:
            yield group
            group = [0]
        group.append(i)
    yield group


def _item(head: Sequence[str], row: Sequence[str]) -> list[str]:
    """Return a row as an item: its first cell, then each other cell behind its title."""
    titles = ["" if title == "measured" else title for title in head[1:]]
    named = [f"{title} {cell}".strip() for title, cell in zip(titles, row[1:], strict=True) if cell]
    return wrapped(f"{row[0]}: {'; '.join(named)}" if named else row[0], "- ")
