"""The grammar of an answer that must call tools, in the markup of the model.

The grammar is made from the description of the format (`format`). The reader of the answers uses
the same description. A text that is a single token of the tokenizer is forced as this token.
Arguments in JSON get the white space of chat templates. So a forced call looks like the calls that
the model was trained on.
"""

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qllm.grammar_check import JSON_OPTIONS
from qllm.grammar_schema import CALLS, LARK, RAW, bounded, closed
from qllm.server.http.errors import ApiError
from qllm.server.tools.choose import format_of
from qllm.server.tools.forced_values import (
    NO_TEXT,
    Part,
    UnheldError,
    joined,
    json_rule,
    parts_of,
    quoted,
    slashed,
    target,
    text_terminal,
)
from qllm.server.tools.format import JSON, Format
from qllm.server.tools.formats import HERMES
from qllm.server.tools.harmony import ENDS, START
from qllm.server.tools.patterns import marks_in
from qllm.server.tools.tool_choice import Choice
from qllm.types import StructuredOutputs

MOST_CALLS = 8
"""Most calls in an answer that must call a tool."""
_FIELD = re.compile(r"\$(name|json|arguments|index|key|value|string|type)")
_SIGN = re.compile(r"[<\[][^\s$<>\]]{2,}[>\]]?")
"""A tag inside a template of the format, or the start of a tag up to a field."""
_KNOWN = frozenset(
    ("type", "properties", "required", "additionalProperties", "patternProperties", "$defs")
) | {"definitions", "minProperties", "maxProperties", "x-guidance"}
"""Keywords of an object whose members are written one by one."""
_NAME = re.compile(r"[^\s<>{}()\[\]\"]{1,256}")
_KEY = re.compile(r"(?! )[^\n<>\"]{1,256}(?<! )")
_BARE_KEY = re.compile(r"[\w$@.-]{1,256}")
"""Names and keys that a reader can recognise between tags."""


def form_of_calls(
    choice: Choice, answer: Mapping[str, Any] | None, tool_calls: str, tokenizer: Any
) -> StructuredOutputs:
    """Return the grammar of an answer that calls tools, as structured outputs.

    Args:
        choice: Tools that may be called.
        answer: JSON schema of an answer that is allowed instead of calls; None allows only calls.
        tool_calls: Name of the format of the model's answers, or `auto`.
        tokenizer: The model's tokenizer.

    Raises:
        ApiError: The markup cannot hold a tool.
    """
    form = format_of(tokenizer, tool_calls) or HERMES
    return StructuredOutputs(grammar=grammar(choice, form, tokens_in(form, tokenizer), answer))


def tokens_in(form: Format, tokenizer: Any) -> dict[str, int]:
    """Return the texts of a format that are single tokens of a tokenizer, with their token ids."""
    return {text: i for i, text in marks_in(form, tokenizer).items()}


def grammar(
    choice: Choice, form: Format, tokens: Mapping[str, int], answer: Mapping[str, Any] | None = None
) -> str:
    """Return the Lark grammar of calls.

    Args:
        choice: Tools that may be called.
        form: Format of the model's calls.
        tokens: Ids of the texts of the format that are single tokens.
        answer: JSON schema of an answer that is allowed instead of calls; None allows only calls.

    Raises:
        ApiError: The markup cannot hold a tool.
    """
    return _Grammar(form, tokens).of(choice, answer)


class _Grammar:
    """A writer of one grammar."""

    def __init__(self, form: Format, tokens: Mapping[str, int]) -> None:
        self._form, self._tokens = form, tokens
        texts = sorted(tokens, key=len, reverse=True)
        self._parts = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self._rules: list[str] = []
        self._raw: dict[str, str] = {}
        """Markers around raw text: the marker after the text, by the marker before the text."""
        self._json: set[str] = set()
        """Markers before values that are written as JSON."""
        self._where = ""
        """Name of the current tool and argument, used in the names of rules."""
        self._refs: dict[str, str] = {}
        """Rules of the references (`$ref`) of the current tool."""

    def of(self, choice: Choice, answer: Mapping[str, Any] | None) -> str:
        """Return the whole grammar."""
        names = [self._tool(n, tool["function"]) for n, tool in enumerate(choice.tools)]
        form = self._form
        begin, end = form.sections[0] if form.sections else ("", "")
        more = f"({self._text(form.between)} call){{0,{MOST_CALLS - 1}}}"
        if not choice.parallel or _has_one(form):
            more = ""
        self._add("call", " | ".join(names))
        self._add("calls", f"{self._lead()} {self._text(begin)} call {more} {self._text(end)}")
        if answer is not None:
            self._add("answer", _json_answer(answer))
        start = f"start: calls{'' if answer is None else ' | answer'}"
        if not self._raw:
            return CALLS + "\n".join([start, *self._rules])
        tags = sorted({tag for text in form.markup for tag in _SIGN.findall(text)})
        self._add("TAGGED", slashed(f"(?s:.*)({'|'.join(map(re.escape, tags))})(?s:.*)"))
        self._add("NO_TEXT", NO_TEXT)
        raw = {opener: (end, opener in self._json) for opener, end in self._raw.items()}
        head = f"{CALLS}{RAW}{json.dumps(raw)}\n"
        return head + "\n".join([start, *self._rules])

    def _add(self, name: str, body: str) -> str:
        self._rules.append(f"{name}: {body}")
        return name

    def _new(self, body: str) -> str:
        """Add a rule under a new name.

        An error message finds the tool and the argument in this name.
        """
        return self._add(f"{self._where}_{len(self._rules)}", body)

    def _text(self, text: str) -> str:
        """Return a text of the format as tokens and terminals."""
        return " ".join(self._spelled(text))

    def _spelled(self, text: str) -> Iterator[str]:
        at = 0
        for token in self._parts.finditer(text):
            if token.start() > at:
                yield quoted(text[at : token.start()])
            yield f"<[{self._tokens[token[0]]}]>"
            at = token.end()
        if at < len(text):
            yield quoted(text[at:])

    def _lead(self) -> str:
        """Return the white space that may precede calls, after reasoning or after content."""
        _, after = self._form.reasoning or ("", "")
        leads = {self._form.lead, after[len(after.rstrip()) :]} - {""}
        return f"({' | '.join(map(quoted, sorted(leads)))})?" if self._form.lead else ""

    def _tool(self, index: int, function: Mapping[str, Any]) -> str:
        """Add the rule of a call of a function."""
        name, given = function["name"], function.get("parameters") or {"type": "object"}
        schema = bounded(closed(given) if function.get("strict") is True else given)
        self._refs, self._where = {}, f"tool_{index}_{_slug(name)}"
        rule = self._where
        try:
            fields = _FIELD.split(_inside(self._form))
            body = [
                self._field(part, name, schema) if n % 2 else self._text(part)
                for n, part in enumerate(fields)
            ]
        except UnheldError as error:
            text = f"a call of {name!r:.80} cannot be held in the form of this model's calls "
            text += f"({self._form.name}): {error}; change its schema, or use tool_choice 'auto'"
            raise ApiError(400, text, param="tools") from error
        return self._add(rule, " ".join(filter(None, body)))

    def _field(self, field: str, name: str, schema: Any) -> str:
        """Return the part of the grammar that replaces a field of a call's template."""
        form = self._form
        if field == "name":
            return quoted(self._written(name, _NAME))
        if field == "index":
            return "/0|[1-9][0-9]{0,3}/"
        if not form.argument and (field == "json" or form.notation.escapes):
            _refuse_lark(schema)
        if field == "json":
            first, second = form.keys
            head = f'{{"{first}": {json.dumps(name, ensure_ascii=False)}, "{second}": '
            return f'{quoted(head)} {json_rule(schema, schema)} "}}"'
        if form.argument:
            members = self._members(schema, schema)
            return " ".join(
                self._argument(key, part, schema) + ("" if is_needed else "?")
                for key, part, is_needed in members
            )
        if form.notation.bare:
            return self._object(schema, schema, form.notation.outer)
        return json_rule(schema, schema)

    def _written(self, name: str, allowed: re.Pattern[str]) -> str:
        """Return a name or a key as the format writes it.

        Raises:
            UnheldError: A reader would take the name or key for something else.
        """
        written = html.escape(name) if self._form.is_escaped else name
        if not allowed.fullmatch(written) or self._parts.search(written):
            raise UnheldError(f"{name!r:.80} has characters of the markup")
        return written

    # -- objects whose members are written one by one

    def _members(self, schema: Any, root: Any) -> list[tuple[str, Any, bool]]:
        """Return the members of an object: key, schema, and True if the member is required.

        If the object also allows members that are not named, the grammar still has only the named
        ones.

        Raises:
            UnheldError: A keyword constrains more than the members' keys and schemas.
        """
        seen = 0
        while isinstance(schema, Mapping) and schema.keys() - _KNOWN == {"$ref"} and seen < 16:
            schema, seen = target(str(schema["$ref"]), root), seen + 1
        if not isinstance(schema, Mapping):
            raise UnheldError(f"{json.dumps(schema):.80} is no schema of an object")
        if wrong := sorted(schema.keys() - _KNOWN):
            raise UnheldError(f"{wrong[0]!r} of an object is not known there")
        if schema.get("type", "object") not in ("object", ["object"]):
            raise UnheldError(f"type {schema['type']!r:.80} is no object")
        known, needed = schema.get("properties") or {}, schema.get("required") or []
        others = schema.get("additionalProperties", True)
        members = dict(known) | {key: others for key in needed if key not in known}
        least, most = schema.get("minProperties", 0), schema.get("maxProperties", len(members))
        if least > len(set(needed)) or most < len(members):
            raise UnheldError("its numbers of properties leave a choice between the named ones")
        keys = sorted(members, key=str.lower) if self._form.notation.is_sorted else members
        return [(key, members[key], key in needed) for key in keys]

    def _argument(self, key: str, schema: Any, root: Any) -> str:
        """Add the rule of one argument that the format writes with the template of arguments."""
        tool, self._where = self._where, f"{self._where}_{_slug(key)}"
        try:
            return self._new(" | ".join(self._ways(key, parts_of(schema, root), root)))
        except UnheldError as error:
            raise UnheldError(f"argument {key!r:.80}: {error}") from error
        finally:
            self._where = tool

    def _ways(self, key: str, parts: Sequence[Part], root: Any) -> Iterator[str]:
        """Yield the ways to write an argument."""
        before, after = self._form.argument.split("$value")
        is_told = "$string" in before or "$type" in before
        texts = [part.schema for part in parts if part.kind == "string"]
        others = [part for part in parts if part.kind != "string"]
        if texts and LARK in texts[0]:
            head = self._head(before, key, "string")
            yield f"{head} {self._given(texts[0])} {self._text(after)}"
        elif texts:
            terminal = f"({' | '.join(f'({text_terminal(x, root)})' for x in texts)})"
            if others and not is_told:
                # A lexer that has begun a text reads a literal as text, so both are one terminal.
                literals = [part for part in others if part.kind in ("boolean", "null")]
                others = [part for part in others if part not in literals]
                words = [word for part in literals for word in self._literals(part, root)]
                terminal = " | ".join([f"{terminal} & ~NO_TEXT", *words])
            head = self._head(before, key, "string")
            self._raw[_plain(before, key, "string")] = self._end(after)
            yield f"{head} {self._raw_text(terminal, after)}"
        groups: dict[str, list[Part]] = {}
        for part in others:
            groups.setdefault(part.kind if "$type" in before else "", []).append(part)
        for kind, some in groups.items():
            values = " | ".join(self._values(some, root))
            self._json.add(_plain(before, key, kind))
            yield f"{self._head(before, key, kind)} ({values}) {self._text(after)}"

    def _head(self, before: str, key: str, kind: str) -> str:
        """Return the text of an argument before the value."""
        parts = _FIELD.split(before)
        given = _fields(key, kind)
        return " ".join(
            quoted(self._written(given[part], _KEY)) if n % 2 else self._text(part)
            for n, part in enumerate(parts)
            if part
        )

    def _values(self, parts: Sequence[Part], root: Any) -> Iterator[str]:
        """Yield the ways to write a value that is not a text."""
        own = [part for part in parts if self._is_own(part)]
        for part in own:
            yield from self._literals(part, root)
        if others := [part.schema for part in parts if part not in own]:
            yield self._new(json_rule(joined(others), root))

    def _is_own(self, part: Part) -> bool:
        """Return True if the format writes the literals of a part differently from JSON."""
        are_json = self._form.notation.literals == JSON.literals
        return part.kind in ("boolean", "null") and not are_json

    def _literals(self, part: Part, root: Any) -> Iterator[str]:
        """Yield the literals of a part."""
        schema, seen = part.schema, 0
        while isinstance(schema, Mapping) and "$ref" in schema and seen < 16:
            schema, seen = target(str(schema["$ref"]), root), seen + 1
        if wrong := sorted(schema.keys() & {"$ref", "anyOf", "oneOf", "allOf", "not", "if"}):
            raise UnheldError(f"{wrong[0]!r} of literals is not known there")
        true, false, null = self._form.notation.literals
        both: dict[bool | None, str] = {True: true, False: false}
        names: dict[bool | None, str] = {None: null} if part.kind == "null" else both
        given = [schema[key] for key in ("const",) if key in schema]
        allowed = given or schema.get("enum", list(names))
        found = [names[value] for value in names if any(value is x for x in allowed)]
        if not found:
            raise UnheldError("no literal is allowed")
        yield from map(quoted, found)

    def _end(self, after: str) -> str:
        """Return the text that ends raw text: `after` up to its first token, or all of `after`."""
        token = self._parts.search(after)
        return after if token is None else after[: token.end()]

    def _given(self, schema: Mapping[str, Any]) -> str:
        """Add the rule of a text that must match a client's own grammar."""
        return self._new(f"%lark {{\n{schema[LARK]}\n}}")

    def _raw_text(self, terminal: str, after: str) -> str:
        """Return raw text of a terminal, followed by the marker. The raw text contains no tag."""
        number = len(self._rules)
        self._add(f"TEXT_{number}", f"({terminal}) & ~TAGGED")
        first, *rest = self._spelled(after)
        if first.startswith("<["):
            return f"TEXT_{number} {' '.join([first, *rest])}"
        self._add(f"RAW_{number}", f"TEXT_{number} {first}")
        if rest:
            return f"RAW_{number} {' '.join(rest)}"
        return self._add(f"raw_{number}[lazy]", f"RAW_{number}").removesuffix("[lazy]")

    # -- values in a notation other than JSON

    def _value(self, schema: Any, root: Any) -> str:
        """Add the rule of a value in the format's notation."""
        ref = schema.get("$ref") if isinstance(schema, Mapping) else None
        if isinstance(ref, str) and ref in self._refs:
            return self._refs[ref]
        if isinstance(ref, str):
            self._refs[ref] = name = f"ref_{len(self._refs)}_{len(self._rules)}"
            return self._add(name, self._value(target(ref, root), root))
        ways = [self._way(part, root) for part in parts_of(schema, root)]
        return self._new(" | ".join(ways))

    def _way(self, part: Part, root: Any) -> str:
        notation, schema = self._form.notation, part.schema
        if part.kind == "string" and not notation.escapes:
            quote = notation.quotes[0]
            if LARK in schema:
                return f"{self._text(quote)} {self._given(schema)} {self._text(quote)}"
            self._raw[quote] = quote
            return f"{self._text(quote)} {self._raw_text(text_terminal(schema, root), quote)}"
        if self._is_own(part):
            return " | ".join(self._literals(part, root))
        if part.kind == "array":
            return self._array(schema, root)
        if part.kind == "object":
            return self._object(schema, root, "{:}")
        return self._new(json_rule(schema, root))

    def _object(self, schema: Any, root: Any, outer: str) -> str:
        """Return the grammar of an object: members, some of them optional, with commas between."""
        assign = outer[1]
        members = self._members(schema, root)
        comma = quoted(self._form.notation.comma)
        written = []
        for key, part, is_needed in members:
            is_quoted = self._form.notation.escapes and assign == ":"
            if not is_quoted and not _BARE_KEY.fullmatch(key):
                raise UnheldError(f"{key!r:.80} has characters of the markup")
            sign = f"{assign} " if is_quoted else assign
            name = json.dumps(key, ensure_ascii=False) if is_quoted else key
            written.append((f"{quoted(name + sign)} {self._value(part, root)}", is_needed))
        later = [f"({comma} {member}){'' if is_needed else '?'}" for member, is_needed in written]
        begun = ""
        for n in reversed(range(len(written))):
            member, is_needed = written[n]
            first = " ".join([member, *later[n + 1 :]])
            skipped = "" if is_needed else f" | {begun}" if begun else " | "
            begun = self._new(first + skipped)
        return " ".join(filter(None, [quoted(outer[0]), begun, quoted(outer[2])]))

    def _array(self, schema: Mapping[str, Any], root: Any) -> str:
        """Return the grammar of a list."""
        known = {"type", "items", "minItems", "maxItems", "$defs", "definitions"}
        if "$ref" in schema and schema.keys() <= known | {"$ref"}:
            return self._value({"$ref": schema["$ref"]}, root)
        if wrong := sorted(schema.keys() - known):
            raise UnheldError(f"{wrong[0]!r} of a list is not known there")
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        item, comma = self._value(schema.get("items", {}), root), self._form.notation.comma
        more = f"({quoted(comma)} {item}){{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        return f'"[" ({item} {more}){"?" if least == 0 else ""} "]"'


def _refuse_lark(schema: Any) -> None:
    """Refuse an object with a member that must match a client's own grammar.

    Raises:
        UnheldError: There is such a member.
    """
    members = schema.get("properties") if isinstance(schema, Mapping) else None
    for key, part in (members or {}).items():
        if isinstance(part, Mapping) and LARK in part:
            text = f"{key!r:.80} has a grammar of syntax 'lark', but is written inside JSON, whose "
            raise UnheldError(text + "escapes it cannot describe; use syntax 'regex'")


def _has_one(form: Format) -> bool:
    """Return True if an answer has at most one call.

    The end of the call may end the answer, or no tag may mark the start of a next call.
    """
    return form.has_heads or (form.at_start and not form.sections)


def _inside(form: Format) -> str:
    """Return the template of a call without the message's start.

    The prompt already has this start.
    """
    call = form.calls[0]
    if form.has_heads:
        call = call.removeprefix(f"{START}assistant")
        for end in ENDS:
            call = call.removesuffix(end)
    return call


def _slug(name: str) -> str:
    """Return a name in the characters that a rule's name may have."""
    return re.sub("[^a-z0-9]+", "_", name.lower())[:64]


def _plain(before: str, key: str, kind: str) -> str:
    """Return the text of an argument before the value, as an answer contains it."""
    given = _fields(key, kind)
    return re.sub(r"\$([a-z]+)", lambda found: given[found[1]], before)


def _fields(key: str, kind: str) -> dict[str, str]:
    """Return the fields of an argument's template that are written before the value."""
    return {"key": key, "type": kind, "string": "true" if kind == "string" else "false"}


def _json_answer(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({'x-guidance': JSON_OPTIONS, **bounded(schema)})}"
