"""JSON on a single line for every kind of reader.

Readers disagree on which characters end a line. Python's `str.splitlines`, with which clients read
events and files, splits at U+0085, U+2028 and U+2029. JSON strings may contain them unescaped.
"""

_ESCAPES = {end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""Line ends that `json.dumps` leaves unescaped; it escapes control characters itself."""


def on_one_line(text: str) -> str:
    """Return JSON made by `json.dumps`, with all remaining line ends escaped."""
    for end, escape in _ESCAPES.items():
        text = text.replace(end, escape)
    return text
