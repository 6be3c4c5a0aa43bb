"""Structured outputs: the tokens that may come next in an answer, computed by llguidance.

    StructuredOutputs -> text of a grammar -> Matcher -> one bit per token

The result of a `Matcher` depends only on the tokens of the answer so far. The `Matcher` consumes
new tokens, and starts again after fewer or other tokens. So no state has to be saved when a request
is evicted, restored from a checkpoint or replayed by another engine.

llguidance's own counters bound the cost of a grammar. Some grammars are still slow. So a process
with limited CPU time tries each grammar first (`qllm/grammar_check.py`). Building a grammar
releases the interpreter's lock. Sorting a vocabulary does not, so an engine sorts its vocabulary at
start.

llguidance is imported for the first request with a grammar. Without llguidance, an engine refuses
such requests.
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
from qllm.grammar_bounds import Bounds, RawText, Sorts, Written
from qllm.grammar_schema import CALLS, RAW, bounded
from qllm.types import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_GRAMMAR_CHARS = 32_768
"""Most characters of a schema, regular expression, list of choices or grammar."""


@lru_cache(maxsize=2)
def _tokens(
    serialized: str, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> tuple["LLTokenizer", Sorts]:
    """Sort a vocabulary. 150,000 tokens hold the interpreter's lock for two seconds."""
    from llguidance import LLTokenizer

    found = LLTokenizer(serialized, n_vocab=vocab_size, eos_token=list(eos_token_ids))
    return found, Sorts(lambda token_id: found.decode_bytes([token_id]), vocab_size)


class Vocabulary:
    """The tokens of a model, prepared for grammars. Any thread may use a vocabulary.

    Args:
        tokenizer: Tokenizer of transformers with a Rust tokenizer inside, or None.
        vocab_size: Width of the logits.
        eos_token_ids: Ids that end an answer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(sorted(eos_token_ids))
        self.bounds = Bounds()
        """Maximum lengths of parts of JSON for which a schema sets no length."""
        self._known: tuple[LLTokenizer, Sorts] | None = None

    def refusal(self) -> str | None:
        """Return the reason why this model does not support grammars.

        Return None if grammars are supported.
        """
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
        """Sort the tokens now, before the first grammar. Idempotent."""
        if self.refusal() is None and self._known is None:
            backend = copy(self._tokenizer.backend_tokenizer)
            backend.no_padding()
            backend.no_truncation()
            self._known = _tokens(backend.to_str(), self.vocab_size, self.eos_token_ids)

    def split(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each word, both at the start of a text and after a space.

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
        """Return the token ids of a text, without special tokens.

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
        """Return the id of the added token with this text; None if there is no such token."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return next((i for i, token in added.items() if token.content == text), None)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, including special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def check(self, asked: StructuredOutputs) -> None:
        """Refuse a wrong grammar, or one that allows no answer.

        A new grammar takes 0.1 s and a process.

        Raises:
            InvalidRequestError: The grammar is wrong. The message has the reason and the place.
        """
        if (text := self.refusal()) is not None:
            raise InvalidRequestError(text)
        from qllm.grammar_check import wrong_with

        schema = _text(asked) if asked.kind == "json" else None
        if (wrong := wrong_with(_grammar(asked), schema)) is not None:
            raise InvalidRequestError(f"structured_outputs.{asked.kind}{wrong}")

    def matcher(self, asked: StructuredOutputs) -> "Matcher":
        """Build the matcher of a grammar. The time is bounded if `check` has accepted the grammar.

        Raises:
            InvalidRequestError: The text is not a grammar, or the grammar is too large.
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
        written = None
        if schemas is not None:
            written = Written(self.bounds.of(schemas), sorts, _raw_texts(asked))
        return Matcher(found, self.vocab_size, written, tokens.decode_bytes)


def _text(asked: StructuredOutputs) -> str:
    """Return the text of a grammar.

    Of a JSON schema, keep only the parts that constrain an answer.
    """
    text = asked.text()
    if asked.kind != "json":
        return text
    try:
        return dumps(bounded(loads(text)))
    except (ValueError, RecursionError):  # llguidance will report the error
        return text


def _grammar(asked: StructuredOutputs) -> str:
    """Return a grammar as text in llguidance's syntax.

    Raises:
        InvalidRequestError: The grammar is too long, or its syntax is unknown.
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
    """Return the schemas of an answer that is JSON or tool calls; None for other answers."""
    if asked.kind == "json":
        return [loads(_text(asked))]
    if asked.kind != "grammar" or not asked.text().startswith(CALLS):
        return None
    from qllm.grammar_check import schemas_in

    return [schema for _, schema in schemas_in(asked.text())]


def _raw_texts(asked: StructuredOutputs) -> dict[bytes, RawText]:
    """Return the raw texts in an answer of tool calls, by the markers before them."""
    line = asked.text().removeprefix(CALLS).partition("\n")[0]
    if asked.kind != "grammar" or not line.startswith(RAW):
        return {}
    wrong = (ValueError, TypeError, AttributeError, RecursionError)
    try:
        markers = loads(line.removeprefix(RAW))
        return {
            opener.encode(): RawText(end.encode(), may_be_json is True)
            for opener, (end, may_be_json) in markers.items()
        }
    except wrong:  # a client's own grammar may start so
        return {}


class Matcher:
    """A grammar, and the state of one answer in it. Only one thread at a time may use a matcher.

    Args:
        matcher: Matcher of llguidance in its first state.
        vocab_size: Width of the logits.
        written: JSON written so far, which enforces the maximum lengths; None if the answer is not
            JSON.
        bytes_of: Function that returns the bytes of tokens.
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
        """Allowed next tokens after `allow`: token i has bit i % 32 of word i // 32."""
        self._address = self.words.ctypes.data
        self._num_taken = 0
        self._last: int | None = None
        """Last token that was consumed."""
        self._wrong: str | None = None
        """Reason why no token may come next; None if some token may."""
        self._is_known = False
        """True if `words` and `_wrong` belong to the tokens consumed so far."""
        self._ahead: Future[None] | None = None
        self._fork: LLMatcher | None = None
        """A second matcher for `forced`, so that a lookahead does not wait for it."""
        self._num_forked = 0
        """Number of tokens that the second matcher has consumed."""

    def _follow(self, outputs: Sequence[int]) -> None:
        """Consume the new tokens of an answer.

        Start again if the answer does not continue the last one.
        """
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
        """Set `words` to the tokens that may follow an answer.

        Returns:
            The reason why no token may come next; None if some token may.
        """
        if self._ahead is not None:
            self._ahead.result()
            self._ahead = None
        self._look(outputs)
        return self._wrong

    def go_ahead(self, builder: Executor, outputs: Sequence[int]) -> None:
        """Let a thread prepare the next `allow` for these tokens.

        llguidance releases the interpreter's lock, so this work runs during the model's next pass.
        """
        self._ahead = builder.submit(self._look, tuple(outputs))

    def forced(self, outputs: Sequence[int], most: int) -> list[int]:
        """Return the first tokens of the only text that may follow an answer; often none.

        The tokens are llguidance's own split of the text. The model may split the text in another
        way.

        Args:
            outputs: Tokens of the answer so far.
            most: Most tokens to return.
        """
        if self._fork is None:
            if self._ahead is not None:
                self._ahead.result()
            self._fork = self._matcher.deep_copy()
            self._fork.reset()
        if len(outputs) > self._num_forked:
            self._fork.consume_tokens([int(i) for i in outputs[self._num_forked :]])
            self._num_forked = len(outputs)
        return [] if self._fork.is_error() else self._fork.compute_ff_tokens()[:most]
