"""Structured outputs: which tokens may come next, by llguidance.

    StructuredOutputs -> text of a grammar -> Matcher -> one bit per token

A `Matcher` is a function of the tokens of the answer so far: it takes those that are new to it and
begins again when it is given fewer. So a request that was evicted, restored from a checkpoint or
replayed by another engine has the state that its tokens say, and nothing has to be saved.

What a grammar may cost is bounded: by llguidance's own counters, and where these do not reach by
the CPU time of a process that tries it first (`qllm/grammar_check.py`). To build one gives the
interpreter's lock back; to sort a vocabulary does not, so an engine does it at its start.

The library is imported when it is needed: an engine runs without it, and refuses what needs it.
"""

from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from qllm.errors import InvalidRequestError
from qllm.types import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_GRAMMAR_CHARS = 32_768
"""Longest schema, regular expression, list of choices or grammar."""
_FEW = 32
"""Where fewer than one token in so many is allowed, the allowed ones are copied."""


@lru_cache(maxsize=2)
def _tokens(serialized: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> "LLTokenizer":
    """Sort a vocabulary into a trie: a second for 150,000 tokens, with the interpreter's lock."""
    from llguidance import LLTokenizer

    return LLTokenizer(serialized, n_vocab=vocab_size, eos_token=list(eos_token_ids))


class Vocabulary:
    """The tokens of a model, as grammars need them. Callable from any thread.

    Args:
        tokenizer: Of transformers, with a Rust tokenizer inside; None if the model has none.
        vocab_size: Width of the logits.
        eos_token_ids: Ids that end an answer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(sorted(eos_token_ids))
        self._known: LLTokenizer | None = None

    def refusal(self) -> str | None:
        """Why this model cannot be held to a grammar; None if it can."""
        if find_spec("llguidance") is None:
            return "structured outputs need the package llguidance, which is not installed"
        if getattr(self._tokenizer, "backend_tokenizer", None) is None:
            return "structured outputs need a tokenizer with a tokenizer.json, and there is none"
        if not self.eos_token_ids:
            return "structured outputs need a model with an EOS id, and this one has none"
        return None

    def prepare(self) -> None:
        """Sort the tokens now, not with the first grammar. Twice is once."""
        if self.refusal() is None and self._known is None:
            backend = copy(self._tokenizer.backend_tokenizer)
            backend.no_padding()
            backend.no_truncation()
            self._known = _tokens(backend.to_str(), self.vocab_size, self.eos_token_ids)

    def split(self, words: Sequence[str]) -> list[list[int]]:
        """The token ids of words, at the start of a text and behind a space.

        Raises:
            InvalidRequestError: There are words, but no tokenizer.
        """
        if words and self._tokenizer is None:
            raise InvalidRequestError("bad_words need a tokenizer; use logit_bias")
        found: list[list[int]] = []
        for word in words:
            for text in (word.lstrip(), f" {word.lstrip()}"):
                ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
                if ids and ids not in found and max(ids) < self.vocab_size:
                    found.append(ids)
        return found

    def encode(self, text: str) -> list[int]:
        """The token ids of a text alone.

        Raises:
            InvalidRequestError: There is no tokenizer.
        """
        if self._tokenizer is None:
            raise InvalidRequestError("thinking_token_budget needs a model with a tokenizer")
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def check(self, asked: StructuredOutputs) -> None:
        """Return if an answer can be held to a form. The first time it takes 0.1 s and a process.

        Raises:
            InvalidRequestError: It cannot; says why, and where in a schema.
        """
        if (text := self.refusal()) is not None:
            raise InvalidRequestError(text)
        from qllm.grammar_check import wrong_with

        schema = asked.text() if asked.kind == "json" else None
        if (wrong := wrong_with(_grammar(asked), schema)) is not None:
            raise InvalidRequestError(f"structured_outputs.{asked.kind}{wrong}")

    def matcher(self, asked: StructuredOutputs) -> "Matcher":
        """Build a grammar. One that `check` has let pass is built in bounded time.

        Raises:
            InvalidRequestError: It is no grammar, or too large.
        """
        if (text := self.refusal()) is not None:
            raise InvalidRequestError(text)
        from llguidance import LLMatcher

        from qllm.grammar_check import LIMITS

        self.prepare()
        assert self._known is not None
        found = LLMatcher(self._known, _grammar(asked), log_level=0, limits=LIMITS)
        if found.is_error():
            text = found.get_error().removesuffix("<non-verbose/>").strip()
            raise InvalidRequestError(f"structured_outputs.{asked.kind}: {text}")
        return Matcher(found, self.vocab_size)


def _grammar(asked: StructuredOutputs) -> str:
    """The text that llguidance takes.

    Raises:
        InvalidRequestError: It is too long, or of no known form.
    """
    text = asked.text()
    if len(text) > MOST_GRAMMAR_CHARS:
        raise InvalidRequestError(
            f"structured_outputs.{asked.kind} has {len(text)} characters; at most "
            f"{MOST_GRAMMAR_CHARS} are allowed"
        )
    from llguidance import LLMatcher, grammar_from

    from qllm.grammar_check import JSON_OPTIONS

    if asked.kind == "json":
        return LLMatcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS)
    try:
        return grammar_from(asked.kind, text)  # type: ignore[arg-type]
    except ValueError as error:
        raise InvalidRequestError(f"structured_outputs.{asked.kind}: {error}") from error


class Matcher:
    """A grammar and how far an answer has come in it. One thread at a time.

    Args:
        matcher: Of llguidance, at its start.
        vocab_size: Width of the logits.
    """

    def __init__(self, matcher: "LLMatcher", vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._words = np.zeros((vocab_size + 31) // 32, np.uint32)
        self._address = self._words.ctypes.data
        self._num_taken = 0

    @property
    def error(self) -> str | None:
        """What broke it: a token that it does not allow, or a limit."""
        return (self._matcher.get_error() or "unknown") if self._matcher.is_error() else None

    def follow(self, outputs: Sequence[int]) -> None:
        """Come to where an answer is.

        Args:
            outputs: Its tokens so far; since the last call they only became more, or it began
                again.
        """
        if len(outputs) < self._num_taken:
            self._matcher.reset()
            self._num_taken = 0
        if len(outputs) > self._num_taken:
            self._matcher.consume_tokens([int(i) for i in outputs[self._num_taken :]])
            self._num_taken = len(outputs)

    def forbid(self, x_V: npt.NDArray[np.float64]) -> str | None:
        """Set the logits of all tokens that may not come next to -inf.

        Args:
            x_V: Logits; changed in place.

        Returns:
            Why no token may come next; None if one may.
        """
        self._matcher.unsafe_compute_mask_ptr(self._address, self._words.nbytes)
        num_allowed = int(np.bitwise_count(self._words).sum())
        if (error := self.error) is not None or not num_allowed:
            return f"its grammar allows no further token: {error or 'none is in the vocabulary'}"
        if num_allowed * _FEW < self._vocab_size:
            ids = _ids(self._words)
            kept = x_V[ids]
            x_V.fill(-np.inf)
            x_V[ids] = kept
        else:
            np.invert(self._words, out=self._words)
            bits = self._words.view(np.uint8)
            forbidden_V = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
            x_V[np.flatnonzero(forbidden_V.view(np.bool_))] = -np.inf
        return None


def _ids(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    """The numbers of the bits that are set, which are few."""
    at = np.flatnonzero(words)
    bits = np.unpackbits(words[at].view(np.uint8), bitorder="little")
    found = np.flatnonzero(bits.view(np.bool_))
    ids: npt.NDArray[np.int64] = at[found >> 5] * 32 + (found & 31)
    return ids
