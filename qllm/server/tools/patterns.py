"""Patterns that find the parts of an answer, made from the description of its format.

All patterns are for partial matching. For a text without a match, `regex` reports if more text
could still complete a match. No pattern ends with an optional part, so later text never changes a
match. White space and names have a maximum length. So the text that a reader holds back has one
too.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import regex

from qllm.frontend.detokenizer import added_tokens
from qllm.server.tools.format import Format
from qllm.server.tools.values import MARKS

SPACE = r"\s{0,16}"
_FIELD = re.compile(r"\$([a-z]+)")
_FIELDS = {
    "index": "[0-9]{0,9}",
    "id": r"[\w-]{0,64}",
    "type": "(?P<type>[a-z]{1,16})",
    "string": "(?P<string>true|false)",
    "key": rf"(?P<key>[^\n<>{MARKS}]{{1,256}}?)",
}
_NAME = rf"[^\s<>{{}}()\[\]\"{MARKS}]{{1,256}}?"
_SOME = r"(?=[\s\S])"
NEVER = "(?!)"
_SIGN = re.compile("[<>｜|\\[\\]]")


@lru_cache(maxsize=16)
def marks_in(format: Format, tokenizer: Any) -> Mapping[int, str]:
    """Return the tags of a format that are single tokens, by token id.

    A tokenizer never splits an added token. So if a tag is an added token, the same characters in
    other tokens are not a tag.
    """
    texts = {i: token.content for i, token in added_tokens(tokenizer).items()}
    markup = "\n".join(format.markup)
    return {
        i: text
        for i, text in texts.items()
        if len(text) > 2 and text in markup and _SIGN.search(text)
    }


class Forms:
    """The ways in which tags appear in an answer.

    Args:
        marks: Tag of each mark.
    """

    def __init__(self, marks: Mapping[str, str]) -> None:
        self._marks = {text: mark for mark, text in marks.items()}
        tags = sorted(self._marks, key=len, reverse=True)
        self._parts = re.compile("|".join([r"(?<=>)(?=<)", *map(re.escape, tags), r"\s+"]))

    def of(self, text: str) -> str:
        """Return the pattern of a text."""
        found, at = [], 0
        for part in self._parts.finditer(text):
            found.append(regex.escape(text[at : part.start()]))
            at = part.end()
            if not part[0].strip():
                found.append(SPACE)
                continue
            found.append(self._marks[part[0]])
        return "".join([*found, regex.escape(text[at:])])

    def template(self, text: str, names: str) -> str:
        """Return the pattern of a template up to its first value."""
        text = re.split(r"\$(?:arguments|json|value)", text)[0].rstrip()
        parts = _FIELD.split(text)
        fields = {**_FIELDS, "name": f"(?P<name>{names})"}
        return "".join(fields[part] if n % 2 else self.of(part) for n, part in enumerate(parts))


class Patterns(NamedTuple):
    """The patterns of a format."""

    first: Any
    """Tag at the start of an answer, or after another tag: groups "thought", "section", "call"."""
    tags: Any
    """Tag anywhere in content: groups "section", "call", "hidden"."""
    thought: Any
    """End of reasoning, or a call that ends the reasoning."""
    inside: Any
    """A call in a section, or the section's end: groups "call", "close"."""
    argument: Any
    """Start of an argument, or the end of all arguments (group "end")."""
    value: Any
    """End of a raw value. Groups "missing" and "key" mark an end without a tag."""
    last_value: Any
    """End of a raw value at the end of the answer."""
    tail: Any
    """Text after the arguments of a call."""
    rest: Any
    """Text after the arguments of a call (group "tail"), or the start of another call."""
    blank: Any
    """White space, and tags without a meaning of their own."""
    quotes: Mapping[str, str]
    """Pattern of each quote of the notation."""


@lru_cache(maxsize=256)
def patterns_of(
    format: Format,
    marks: tuple[tuple[str, str], ...],
    names: tuple[str, ...],
    *,
    thinks: bool,
) -> Patterns:
    """Return the patterns for the answers of a model.

    Args:
        format: Format of the answers.
        marks: Pairs of a mark and the tag that the mark stands for.
        names: Names of the functions that the model sees. An empty list means no calls.
        thinks: True if a tag of reasoning starts reasoning; False if the tag is content.
    """
    forms = Forms(dict(marks))
    lead = SPACE if format.lead else ""
    calls = lead + _any(_head(forms, format, call, _names(format, names)) for call in format.calls)
    opens = lead + _any(forms.of(begin.rstrip()) for begin, _ in format.sections)
    opens += f"(?={SPACE}{calls})" if format.at_start else ""
    closes = _any(forms.of(end.strip()) for _, end in format.sections)
    begins = f"(?P<section>{opens})" if format.sections else f"(?P<call>{calls})"
    begins = begins if names else NEVER
    another = "" if format.sections else f"(?:{forms.of(format.between.strip())}{SPACE})?"
    hidden = f"(?P<hidden>{_any(map(forms.of, format.hidden))})"
    before, after = format.reasoning or ("", "")
    thought = f"(?P<thought>{forms.of(before.strip())})" if thinks and before else NEVER
    ends = _behind(forms, after) if after else NEVER
    return Patterns(
        first=regex.compile(
            rf"\s{{0,64}}(?:{thought}|{another + begins if format.at_start else NEVER})"
        ),
        tags=regex.compile(f"{NEVER if format.at_start else begins}|{hidden}"),
        thought=regex.compile(f"{ends}|(?={begins}|{hidden})" if format.ends_reasoning else ends),
        inside=regex.compile(f"(?P<close>{SPACE}{closes})|(?P<call>{calls})"),
        **_of_arguments(forms, format, begins),
        blank=regex.compile(rf"(?:\s|[{MARKS}]|{_any(map(forms.of, _openers(format)))})*+"),
        quotes={quote: forms.of(quote) for quote in format.notation.quotes},
    )


def _any(patterns: Iterable[str]) -> str:
    return f"(?:{'|'.join(patterns) or NEVER})"


def _names(format: Format, names: tuple[str, ...]) -> str:
    """Return the pattern of a function's name.

    Without a tag before the name, only known names match.
    """
    known = sorted(names, key=len, reverse=True)
    if not format.at_start:
        known = [name for name in known if not regex.fullmatch(_NAME, name)]
    return _any([*map(regex.escape, known), *([] if format.at_start else [_NAME])])


def _head(forms: Forms, format: Format, call: str, names: str) -> str:
    """Return the pattern of a call before its arguments. Arguments must follow the match."""
    head = forms.template(call, names)
    if "$json" in call:
        return rf"{head}{SPACE if head else ''}(?=\{{)"
    if "$arguments" not in call:
        return f"{head}(?P<empty>)"
    if not format.argument:
        return f"{head}{SPACE}(?={regex.escape(format.notation.outer[0])})"
    return f"{head}{SPACE}(?={_next(forms, format, call)})"


def _next(forms: Forms, format: Format, call: str) -> str:
    """Return the pattern of the texts that may follow an argument."""
    begin, end = format.argument.partition("$key")[0], _tail(call).split()[0]
    return f"{forms.of(begin)}|{forms.of(end)}"


def _tail(call: str) -> str:
    """Return the part of a call's template after the arguments."""
    return re.split(r"\$(?:arguments|json)", call)[-1]


def _openers(format: Format) -> list[str]:
    """Return the texts that begin sections and calls, each up to the first white space."""
    begins = [*format.calls, *(begin for begin, _ in format.sections)]
    found = {re.split(r"\s|\$", begin)[0] for begin in begins} - {""}
    return sorted(found, key=len, reverse=True)


def _behind(forms: Forms, text: str) -> str:
    """Return the pattern of an end text, with the white space before the text."""
    return (SPACE if text[:1].isspace() else "") + forms.of(text.strip())


def _of_arguments(forms: Forms, format: Format, begins: str) -> dict[str, Any]:
    """Return the patterns of arguments and of the text after the arguments."""
    call = format.calls[0]
    tail = _tail(call)
    if not format.argument:
        spare = "[\\s}]{0,16}" if "$json" in call else SPACE  # models close an object twice
        end = spare + forms.of(tail.strip()) if tail.strip() else NEVER
        return {"argument": None, "value": None, "last_value": None, **_ends(end, begins)}
    first, _, rest = tail.lstrip().partition("\n")
    before, after = format.argument.split("$value")
    begin = forms.template(before, "")
    line = "\n?+" if before[-1].isspace() else ""  # without going back: a line break is taken
    close = "\n?" if after[0].isspace() else ""
    missing = ("\n" if close else "") + f"{SPACE}(?P<missing>)(?={begin})"
    ends = f"{close}(?P<missing>)(?={forms.of(tail.strip())}{SPACE}(?:{begins}))"
    lasts = rf"{close}(?P<missing>)(?={forms.of(tail.strip())}\s*\Z)"
    value = f"{close}{forms.of(after.strip())}{SPACE}(?={_next(forms, format, call)})"
    return {
        "argument": regex.compile(
            rf"{SPACE}(?:(?P<end>{forms.of(first)})|{begin}{line}{_SOME if line else ''})"
        ),
        "value": regex.compile(f"{value}|{missing}|{ends}"),
        "last_value": regex.compile(f"{value}|{missing}|{ends}|{lasts}"),
        **_ends(_behind(forms, "\n" + rest) if rest else NEVER, begins),
    }


def _ends(tail: str, begins: str) -> dict[str, Any]:
    return {"tail": regex.compile(tail), "rest": regex.compile(f"(?P<tail>{tail})|(?={begins})")}
