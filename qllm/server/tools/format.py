"""Descriptions of the ways in which models write reasoning and tool calls.

A description is data. `reader` reads answers by it, and a grammar of forced calls writes by it. Its
templates are texts with fields: `$name` is the name of a function, `$arguments` all its arguments,
`$json` a JSON object with the name and the arguments. White space in a template may be absent in an
answer, or longer.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Notation:
    """A way to write JSON values."""

    quotes: tuple[str, ...] = ('"',)
    """Texts that begin and end a string; the first one is written."""
    escapes: bool = True
    """True if a backslash in a string begins an escape."""
    bare: bool = False
    """True if keys have no quotes, and a word that is no literal is a string."""
    outer: str = "{:}"
    """Characters around the outermost object, and between its keys and values."""
    comma: str = ", "
    """Text between two members, as it is written."""
    literals: tuple[str, str, str] = ("true", "false", "null")
    """True, false and null, as they are written; also in an argument that is written by itself."""
    is_sorted: bool = False
    """True if members are written in the order of their keys."""


JSON = Notation()
LENIENT = Notation(quotes=('"', "'"))
"""JSON, or the literals of Python, as models write them where JSON was meant."""
PYTHON = Notation(quotes=("'", '"'), bare=True, outer="(=)", literals=("True", "False", "None"))
"""Keyword arguments of a call in Python."""


@dataclass(frozen=True)
class Format:
    """A way to write reasoning and tool calls.

    With an `argument` template, each argument is written by itself, its text as it is or as JSON.
    Without one, all arguments are one object in a `notation`.
    """

    name: str
    calls: tuple[str, ...]
    """Templates of a call. The first one is written; all are read."""
    signs: tuple[str, ...]
    """Texts that together tell the format: in the chat template, or tokens of the tokenizer."""
    keys: tuple[str, str] = ("name", "arguments")
    """Keys of the name and the arguments in `$json`, as they are written."""
    notation: Notation = JSON
    argument: str = ""
    """Template of an argument, with the fields `$key` and `$value`.

    `$string` is "true" if the value is a text. `$type` is the type of the value in a JSON schema.
    """
    is_escaped: bool = False
    """True if names and keys have their special characters escaped, as in XML."""
    sections: tuple[tuple[str, str], ...] = ()
    """Texts before and after all calls. The first pair is written; all are read."""
    lead: str = ""
    """White space between content and the calls behind it."""
    between: str = ""
    """Text between two calls."""
    at_start: bool = False
    """True if calls have no tag: they begin the answer, and their functions are known."""
    reasoning: tuple[str, str] | None = ("<think>\n", "\n</think>\n\n")
    """Texts before and after reasoning; None if the model has none."""
    ends_reasoning: bool = False
    """True if a call inside reasoning ends it."""
    hidden: tuple[str, ...] = ()
    """Texts that are no part of the content."""
    has_heads: bool = False
    """True if each message of an answer begins with a head of its own: `harmony` reads these."""

    @property
    def markup(self) -> tuple[str, ...]:
        """All texts and templates of the format."""
        sections = [text for pair in self.sections for text in pair]
        quotes = [] if self.argument else self.notation.quotes
        return (
            *self.calls, self.argument, *sections, *quotes, *(self.reasoning or ()), *self.hidden
        )  # fmt: skip
