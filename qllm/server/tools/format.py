"""Descriptions of the ways in which models write reasoning and tool calls.

A description is data. `reader` uses the description to read answers, and `forced` to make the
grammar of forced calls. The templates of a description are texts with fields:

    $name        the name of a function
    $arguments   all arguments of the call
    $json        a JSON object with the name and the arguments

White space of a template may be absent or longer in an answer.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Notation:
    """A way to write JSON values."""

    quotes: tuple[str, ...] = ('"',)
    """Texts that begin and end a string. All are read. A grammar writes the first."""
    escapes: bool = True
    """True if a backslash in a string begins an escape."""
    bare: bool = False
    """True if keys have no quotes, and any word that is not a literal is a string."""
    outer: str = "{:}"
    """Characters around the outermost object, and between its keys and values."""
    comma: str = ", "
    """Text between two members, as a grammar writes it."""
    literals: tuple[str, str, str] = ("true", "false", "null")
    """Texts of true, false and null, also for an argument that the format writes separately."""
    is_sorted: bool = False
    """True if members are written in the order of their keys."""


JSON = Notation()
LENIENT = Notation(quotes=('"', "'"))
"""JSON that may contain literals of Python, because models confuse the two."""
PYTHON = Notation(quotes=("'", '"'), bare=True, outer="(=)", literals=("True", "False", "None"))
"""Keyword arguments of a call in Python."""


@dataclass(frozen=True)
class Format:
    """A way to write reasoning and tool calls.

    With an `argument` template, each argument is written separately: a text unchanged, another
    value as JSON. Without this template, all arguments are one object in a `notation`.
    """

    name: str
    calls: tuple[str, ...]
    """Templates of a call. All are read. A grammar writes the first."""
    signs: tuple[str, ...]
    """Texts that together identify the format. Each is in the chat template, or a token."""
    keys: tuple[str, str] = ("name", "arguments")
    """Keys of the name and the arguments in `$json`."""
    notation: Notation = JSON
    argument: str = ""
    """Template of an argument, with the fields `$key` and `$value`.

    `$string` is "true" if the value is a text. `$type` is the type of the value in a JSON schema.
    """
    is_escaped: bool = False
    """True if special characters of names and keys are escaped, as in XML."""
    sections: tuple[tuple[str, str], ...] = ()
    """Texts before the first call and after the last one. All are read. A grammar writes the first.
    """
    lead: str = ""
    """White space between content and the calls after the content."""
    between: str = ""
    """Text between two calls."""
    at_start: bool = False
    """True if calls have no tag. Such calls begin the answer and name a known function."""
    reasoning: tuple[str, str] | None = ("<think>\n", "\n</think>\n\n")
    """Texts before and after reasoning; None if the model has none."""
    ends_reasoning: bool = False
    """True if a call inside reasoning ends it."""
    hidden: tuple[str, ...] = ()
    """Texts that are removed from the content."""
    has_heads: bool = False
    """True if each message of an answer begins with its own head. `harmony` reads such answers."""

    @property
    def markup(self) -> tuple[str, ...]:
        """All texts and templates of the format."""
        sections = [text for pair in self.sections for text in pair]
        quotes = [] if self.argument else self.notation.quotes
        return (
            *self.calls, self.argument, *sections, *quotes, *(self.reasoning or ()), *self.hidden
        )  # fmt: skip
