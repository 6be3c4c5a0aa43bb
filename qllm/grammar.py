"""Structured outputs: which tokens may come next, by llguidance.

    StructuredOutputs -> text of a grammar -> Matcher -> one bit per token

A `Matcher` is a function of the tokens of the answer so far: it takes those that are new to it and
begins again when it is given fewer, or others. So a request that was evicted, restored from a
checkpoint or replayed by another engine has the state that its tokens say, and nothing has to be
saved.

What a grammar may cost is bounded: by llguidance's own counters, and where these do not reach by
the CPU time of a process that tries it first (`qllm/grammar_check.py`). To build one gives the
interpreter's lock back; to sort a vocabulary does not, so an engine does it at its start.

The library is imported when it is needed: an engine runs without it, and refuses what needs it.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from copy import copy
from functools import lru_cache
from importlib.util import find_spec
from json import dumps, loads
from typing import TYPE_CHECKING, Any

import numpy as np

from qllm.errors import InvalidRequestError
from qllm.grammar_bounds import Bounds, Sorts, Written
from qllm.grammar_schema import CALLS, bounded
from qllm.types import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_GRAMMAR_CHARS = 32_768
"""Longest schema, regular expression, list of choices or grammar."""


@lru_cache(maxsize=2)
def _tokens(
    serialized: str, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> tuple["LLTokenizer", Sorts]:
    """Sort a vocabulary: two seconds for 150,000 tokens, with the interpreter's lock."""
    from llguidance import LLTokenizer

    found = LLTokenizer(serialized, n_vocab=vocab_size, eos_token=list(eos_token_ids))
    return found, Sorts(lambda token_id: found.decode_bytes([token_id]), vocab_size)


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
        self.bounds = Bounds()
        """How long the parts of JSON may be where its schema does not say it."""
        self._known: tuple[LLTokenizer, Sorts] | None = None

    def refusal(self) -> str | None:
        """Why this model cannot be held to a grammar; None if it can."""
        if find_spec("llguidance") is None:
            return "structured outputs need the package llguidance, which is not installed"
        if getattr(self._tokenizer, "backend_tokenizer", None) is None:
            return "structured outputs need a tokenizer with a tokenizer.json, and there is none"
        if not self.eos_token_ids:
            return "structured outputs need a model with an EOS id, and this one has none"
        if (num := len(self._tokenizer)) > self.vocab_size:
            return (
                f"structured outputs need a logit for every token, and the tokenizer has {num} "
                f"tokens for {self.vocab_size} logits"
            )
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
            InvalidRequestError: There is no tokenizer, or the model cannot produce the text.
        """
        if self._tokenizer is None:
            raise InvalidRequestError("thinking_token_budget needs a model with a tokenizer")
        ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        if not ids or max(ids) >= self.vocab_size:
            raise InvalidRequestError(
                f"thinking_token_budget: this model has no token for {text!r}; leave it out"
            )
        return ids

    def id_of(self, text: str) -> int | None:
        """The added token that a text is; None if the tokenizer may split it."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return next((i for i, token in added.items() if token.content == text), None)

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

        schema = _text(asked) if asked.kind == "json" else None
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
        tokens, sorts = self._known
        found = LLMatcher(tokens, _grammar(asked), log_level=0, limits=LIMITS)
        if found.is_error():
            text = found.get_error().removesuffix("<non-verbose/>").strip()
            raise InvalidRequestError(f"structured_outputs.{asked.kind}: {text}")
        schemas = _schemas(asked)
        written = None if schemas is None else Written(self.bounds.of(schemas), sorts)
        return Matcher(found, self.vocab_size, written, tokens.decode_bytes)


def _text(asked: StructuredOutputs) -> str:
    """Return the text that a form is made of; of a schema, the part that constrains an answer."""
    text = asked.text()
    if asked.kind != "json":
        return text
    try:
        return dumps(bounded(loads(text)))
    except (ValueError, RecursionError):  # llguidance says what is wrong with it
        return text


def _grammar(asked: StructuredOutputs) -> str:
    """The text that llguidance takes.

    Raises:
        InvalidRequestError: It is too long, or of no known form.
    """
    text = _text(asked)
    if len(text) > MOST_GRAMMAR_CHARS:
        raise InvalidRequestError(
            f"structured_outputs.{asked.kind} has {len(text)} characters; at most "
            f"{MOST_GRAMMAR_CHARS} are allowed"
        )
    from llguidance import LLMatcher, grammar_from

    from qllm.grammar_check import JSON_OPTIONS

    try:
        if asked.kind == "json":
            whole = {"true": "{}", "false": '{"not": {}}'}.get(text.strip(), text)
            return LLMatcher.grammar_from_json_schema(whole, defaults=JSON_OPTIONS)
        return grammar_from(asked.kind, text)  # type: ignore[arg-type]
    except ValueError as error:
        raise InvalidRequestError(f"structured_outputs.{asked.kind}: {error}") from error


def _schemas(asked: StructuredOutputs) -> list[Any] | None:
    """Return the schemas of an answer that is JSON, or calls; None if it has another form."""
    if asked.kind == "json":
        return [loads(_text(asked))]
    if asked.kind != "grammar" or not asked.text().startswith(CALLS):
        return None
    from qllm.grammar_check import schemas_in

    return [schema for _, schema in schemas_in(asked.text())]


class Matcher:
    """A grammar and how far an answer has come in it. One thread at a time.

    Args:
        matcher: Of llguidance, at its start.
        vocab_size: Width of the logits.
        written: Of an answer that is JSON: knows which of its parts are as long as they may be.
        bytes_of: Returns the bytes of tokens.
    """

    def __init__(
        self,
        matcher: "LLMatcher",
        vocab_size: int,
        written: Written | None,
        bytes_of: Callable[[list[int]], bytes],
    ) -> None:
        self._matcher, self._written, self._bytes_of = matcher, written, bytes_of
        self.words = np.zeros((vocab_size + 31) // 32, np.int32)
        """After `allow`: token i may come next if bit i % 32 of word i // 32 is set."""
        self._address = self.words.ctypes.data
        self._num_taken = 0
        self._last: int | None = None
        """The last token taken."""
        self._wrong: str | None = None
        """Why no token may come next."""
        self._is_known = False
        """Whether `words` and `_wrong` are of the tokens taken so far."""
        self._ahead: Future[None] | None = None

    def _follow(self, outputs: Sequence[int]) -> None:
        """Come to where an answer is; it grew since the last call, or began again."""
        taken = self._num_taken
        if len(outputs) < taken or (taken and outputs[taken - 1] != self._last):
            self._matcher.reset()
            if self._written is not None:
                self._written.restart()
            self._num_taken, self._is_known = 0, False
        if len(outputs) > self._num_taken:
            new = [int(i) for i in outputs[self._num_taken :]]
            self._matcher.consume_tokens(new)
            if self._written is not None:
                self._written.push(self._bytes_of(new))
            self._num_taken, self._is_known = len(outputs), False
            self._last = int(outputs[-1])

    def _look(self, outputs: Sequence[int]) -> None:
        self._follow(outputs)
        if self._is_known:
            return
        self._matcher.unsafe_compute_mask_ptr(self._address, self.words.nbytes)
        error = self._matcher.get_error() if self._matcher.is_error() else None
        self._wrong = None
        if error is not None or not self.words.any():
            from qllm.grammar_check import NOTHING

            text = (error or "none is in the vocabulary").removesuffix("<non-verbose/>").strip()
            why = "it has no way on, and no end, there; change it" if text == NOTHING else text
            self._wrong = f"its grammar allows no further token behind {len(outputs)}: {why}"
        elif self._written is not None:
            self._written.limit(self.words)
        self._is_known = True

    def allow(self, outputs: Sequence[int]) -> str | None:
        """Set `words` to what may come behind the tokens of an answer so far.

        Returns:
            Why no token may come next; None if one may.
        """
        if self._ahead is not None:
            self._ahead.result()
            self._ahead = None
        self._look(outputs)
        return self._wrong

    def go_ahead(self, builder: Executor, outputs: Sequence[int]) -> None:
        """Let a thread do what the next `allow` needs, if it is asked for these tokens.

        llguidance gives the interpreter's lock back: it runs beside the model's next pass.
        """
        self._ahead = builder.submit(self._look, tuple(outputs))
