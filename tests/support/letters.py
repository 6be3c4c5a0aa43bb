"""A tokenizer with one token for each letter."""

from typing import Any


class Letters:
    """A tokenizer of which every character is a token."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(x) for x in text]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))
