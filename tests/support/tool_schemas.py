"""Random JSON schemas of a tool's arguments, of the kinds that tools of agents have."""

from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]

KEYS = ["a", "path", "old_string", "is_new", "x2", "Größe"]
WORDS = ["", "a", "two words", "true", "12", "None", "[1]", "line\nline", 'a "quote"', "<b>&amp;"]
STRINGS: st.SearchStrategy[Schema] = st.sampled_from([
    {}, {"maxLength": 5}, {"minLength": 2, "maxLength": 9}, {"pattern": "^[a-z]{2,4}(-x)?$"},
    {"pattern": "^[0-9]+/[0-9]{2}$", "maxLength": 8}, {"format": "date"}, {"format": "uuid"},
    {"description": "A text.", "maxLength": 20},
]).map(lambda more: {"type": "string", **more})  # fmt: skip
NUMBERS: st.SearchStrategy[Schema] = st.sampled_from([
    {"type": "integer"}, {"type": "integer", "minimum": 10, "maximum": 99},
    {"type": "number", "multipleOf": 0.5, "minimum": -3, "maximum": 900},
])  # fmt: skip
LITERALS: st.SearchStrategy[Schema] = st.sampled_from(
    [{"type": "boolean"}, {"type": "null"}, {"const": True}, {"enum": [False, None]}]
)
ENUMS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=3, unique=True)
SIMPLE = STRINGS | NUMBERS | LITERALS | ENUMS.map(lambda values: {"enum": values})
MIXED: st.SearchStrategy[Schema] = st.sampled_from([
    {"type": ["string", "null"], "maxLength": 9}, {"type": ["integer", "string"]},
    {"anyOf": [{"type": "string", "minLength": 3}, {"type": "integer", "minimum": 7}]},
    {"anyOf": [{"enum": ["auto", "5"]}, {"type": "boolean"}]},
    {"enum": ["auto", 3, None, "3"]},
    {"oneOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}]},
    {"$ref": "#/$defs/word"}, {"anyOf": [{"$ref": "#/$defs/word"}, {"type": "null"}]},
])  # fmt: skip


def _deeper(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    lists = st.builds(
        lambda items, least: {"type": "array", "items": items, "minItems": least, "maxItems": 3},
        inner, st.integers(0, 2),
    )  # fmt: skip
    return lists | objects(inner)


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    """Objects with some of the usual keys, each of them required or not."""
    keys = draw(st.lists(st.sampled_from(KEYS), max_size=4, unique=True))
    needed = [key for key in keys if draw(st.booleans())]
    properties = {key: draw(inner) for key in keys}
    return {
        "type": "object",
        "properties": properties,
        "required": needed,
        "additionalProperties": False,
    }


WORD = {"$defs": {"word": {"type": "string", "maxLength": 7}}}
ARGUMENTS: st.SearchStrategy[Schema] = objects(
    st.recursive(SIMPLE | MIXED, _deeper, max_leaves=4)
).map(lambda schema: {**schema, **WORD})
"""Schemas of arguments."""
NAMES = st.lists(
    st.sampled_from(["f", "get_weather", "Read-File", "mcp__a__b"]),
    min_size=1, max_size=3, unique=True,
)  # fmt: skip


@st.composite
def tools(draw: st.DrawFn) -> list[dict[str, Any]]:
    """One or more tools."""
    return [
        {"type": "function", "function": {"name": name, "parameters": draw(ARGUMENTS)}}
        for name in draw(NAMES)
    ]
