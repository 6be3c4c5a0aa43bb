"""A reader of GPT-OSS's Harmony format, from the tokens of an answer.

    <|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>content<|return|>

OpenAI's library for this format downloads a vocabulary. This reader instead finds the marks among
the special tokens of the model's tokenizer.
"""

import re
from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple

from qllm.frontend.detokenizer import Detokenizer

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKS = (START, CHANNEL, "<|constrain|>", MESSAGE, *ENDS)
_TO = re.compile(r"\bto=(\S+)")
_HEADS = {
    CHANNEL: re.compile(r"\s*\w*(\s+to=\S+)?(\s+\w+)?\s*"),
    "<|constrain|>": re.compile(r"\s*\w*\s*"),
}
_ROLE = re.compile(r"\s*(assistant)?(\s*to=\S+)?\s*")
"""Text of a head before or after `START`: a role and a recipient. Any other text is content."""
FUNCTIONS = "functions."
"""Prefix of the recipient in a call of one of the request's functions."""

Kind = Literal["head", "reasoning_content", "content", "call", "arguments"]


class HarmonyPart(NamedTuple):
    """A piece of an answer."""

    kind: Kind
    """Kind of the piece.

    A "head" is not shown. A "call" is a function's name. "arguments" belong to the last call.
    """
    text: str
    num_tokens: int = 0


def marks_of(tokenizer: Any) -> dict[int, str]:
    """Return the marks by token id.

    The mapping is empty if the tokenizer lacks one of the marks.
    """
    found = {tokenizer.convert_tokens_to_ids(mark): mark for mark in MARKS}
    is_known = len(found) == len(MARKS) and not {None, tokenizer.unk_token_id} & found.keys()
    return found if is_known else {}


class Harmony:
    """A parser that splits an answer into its parts, token by token.

    Args:
        tokenizer: The model's tokenizer.
        marks: Marks by token id, from `marks_of`.
        prompt: Token ids of the prompt. The answer continues the prompt's last message.
        names: Names of the functions that the model sees. The model may omit the prefix
            "functions.".
    """

    def __init__(
        self,
        tokenizer: Any,
        marks: dict[int, str],
        prompt: Sequence[int],
        names: Collection[str] = (),
    ) -> None:
        self._marks, self._names = marks, names
        self._is_head = False
        self._head = ""
        self._unseen = [("", "")]
        """Marks of a head, each with the text after the mark. If no message follows, all are
        content.
        """
        self._kind: Kind = "content"
        starts = [at for at, token_id in enumerate(prompt) if marks.get(token_id) == START]
        at = starts[-1] if starts else len(prompt)
        self._text = Detokenizer(tokenizer, prompt=prompt[:at])
        for token_id in prompt[at:]:
            self.push(token_id)
        self._unseen = [(mark, "") for mark, _ in self._unseen[-1:]]

    @property
    def kind(self) -> Kind:
        """The kind of the next text."""
        return "head" if self._is_head else self._kind

    def push(self, token_id: int) -> list[HarmonyPart]:
        """Take a token, and return the parts that are certain."""
        mark = self._marks.get(token_id)
        if mark is None:
            text, _ = self._text.push([token_id])
            return self._said(text, 1)
        parts = self._said(self._text.break_off(), 0)
        if mark == MESSAGE and self._is_head:
            return [*parts, *self._begin()]
        if mark in ENDS or mark == START or (mark == CHANNEL and not self._is_head):
            parts += self._no_head()
            self._is_head, self._head = mark not in ENDS, ""
        self._head += f" {mark} "
        self._unseen.append((mark, ""))
        return parts

    def finish(self) -> list[HarmonyPart]:
        """Return the remaining parts at the end of the answer.

        A head without a message becomes content.
        """
        parts = self._said(self._text.finish(), 0)
        if self._is_head and all(self._is_known(*part) for part in self._unseen):
            return [*parts, *(HarmonyPart("head", text) for _, text in self._unseen)]
        return [*parts, *self._no_head()]

    @staticmethod
    def _is_known(mark: str, text: str) -> bool:
        """Return True if a text after a mark is a valid part of a head."""
        return _HEADS.get(mark, _ROLE).fullmatch(text) is not None

    def _said(self, text: str, num_tokens: int) -> list[HarmonyPart]:
        if not self._is_head:
            return [HarmonyPart(self._kind, text, num_tokens)]
        self._head += text
        mark, said = self._unseen[-1]
        self._unseen[-1] = mark, said + text
        return []

    def _no_head(self) -> list[HarmonyPart]:
        """Return the text of a supposed head that ended without a message, as content."""
        text, self._unseen, self._kind = "".join(x for _, x in self._unseen), [("", "")], "content"
        return [HarmonyPart("content", text)] if text else []

    def _begin(self) -> list[HarmonyPart]:
        """Return the parts of a complete head, and begin the message of the head."""
        parts: list[HarmonyPart] = []
        for mark, text in self._unseen:
            kind: Kind = "head" if self._is_known(mark, text) else "content"
            parts.append(HarmonyPart(kind, text))
        self._unseen, self._is_head = [("", "")], False
        channel = re.search(r"<\|channel\|> (\w+)", self._head)
        recipient = _TO.search(self._head)
        self._kind = "content"
        name = None if recipient is None else recipient[1].removeprefix(FUNCTIONS)
        if recipient is not None and name and (name != recipient[1] or name in self._names):
            self._kind = "arguments"
            parts.append(HarmonyPart("call", name))
        elif recipient is not None or (channel is not None and channel[1] == "analysis"):
            self._kind = "reasoning_content"
        return parts
