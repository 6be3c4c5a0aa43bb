"""Prompts of `soak.py`, and the check of their answers."""

import json
import random
from typing import Any, NamedTuple

NUM_CASES = 24
MALFORMED: tuple[bytes, ...] = (
    b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"{}", b'{"prompt": 1}', b'{"prompt": []}',
    b'{"prompt": "a", "max_tokens": -1}', b'{"prompt": "a", "max_tokens": "9"}',
    b'{"prompt": "a", "temperature": -1}', b'{"prompt": "a", "unknown": 1}',
    b'{"prompt": "a", "model": "other"}', b'{"prompt": [99999999]}', b'{"prompt": "\\ud800"}',
    b'{"prompt": "a", "n": 0}', b"[" * 5000, b'{"prompt": "a", "stop": [1]}',
)  # fmt: skip


class Case(NamedTuple):
    """A prompt and its only right answer."""

    prompt: str
    max_tokens: int
    text: str = ""

    def body(self, is_ls: bool, stream: bool) -> dict[str, Any]:
        """Return the body of the request: greedy, exactly `max_tokens`."""
        return {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "service_tier": "priority" if is_ls else "flex",
            "stream": stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        }


def make_cases(seed: int) -> list[Case]:
    """Return prompts that differ in their first words and in length."""
    rng = random.Random(seed)
    words = ("def", "class", "return", "import", "for", "while", "value", "index", "list", "map")
    return [
        Case(
            f"{rng.choice(words)}_{n}({' '.join(rng.choices(words, k=rng.randint(2, 60)))}",
            rng.choice((4, 8, 16, 32, 48)),
        )
        for n in range(NUM_CASES)
    ]


class StreamCheck:
    """A check of one stream: its tokens are the case's, and its end comes once and last."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.text = ""
        self.ends: list[str] = []
        self.usage: dict[str, int] | None = None
        self.is_done = False
        self.wrong: list[str] = []

    def take(self, data: str) -> None:
        """Check one event."""
        if self.is_done:
            self.wrong.append(f"{data!r:.100} after [DONE]")
        if data == "[DONE]":
            self.is_done = True
            return
        body = json.loads(data)
        if "error" in body:
            self.wrong.append(f"error {body['error']['message']!r}")
            return
        for choice in body["choices"]:
            if self.ends and choice["text"]:
                self.wrong.append("text after the end")
            self.text += choice["text"]
            if choice["finish_reason"]:
                self.ends.append(choice["finish_reason"])
        self.usage = body.get("usage") or self.usage
        if not self.case.text.startswith(self.text):
            self.wrong.append(f"{self.text!r} is no beginning of {self.case.text!r}")

    def whole(self) -> list[str]:
        """Return the faults of a stream that was read to its end."""
        tokens = (self.usage or {}).get("completion_tokens")
        checks = {
            f"ends {self.ends}": self.ends == ["length"],
            f"text {self.text!r} is not {self.case.text!r}": self.text == self.case.text,
            f"{tokens} tokens, not {self.case.max_tokens}": tokens == self.case.max_tokens,
            "no [DONE]": self.is_done,
        }
        return [*self.wrong, *(text for text, is_right in checks.items() if not is_right)]
