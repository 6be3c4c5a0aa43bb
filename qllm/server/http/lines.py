"""JSON that is one line, whoever reads the lines.

Readers differ in what ends a line. `str.splitlines` of Python, with which clients read events and
files, takes U+0085, U+2028 and U+2029 for an end, which JSON may have in its strings as they are.
"""

_ESCAPES = {end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""The ends of lines that `json.dumps` leaves as they are: it escapes control characters itself."""


def on_one_line(text: str) -> str:
    """Return JSON without an end of a line, from JSON that `json.dumps` has made."""
    for end, escape in _ESCAPES.items():
        text = text.replace(end, escape)
    return text
