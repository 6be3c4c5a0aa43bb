"""The limits of a request's next token: a grammar, allowed ids, banned words, a least length."""

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from qllm.errors import InvariantError
from qllm.grammar import Matcher, Vocabulary
from qllm.kernels.cpu.masks import keep_allowed
from qllm.runner.sampling.thinking import Thinking, starts_inside
from qllm.types import SamplingParams

Ids = npt.NDArray[np.int64]
WORD_BITS = 32
NO_IDS: Ids = np.empty(0, np.int64)


class Rules(NamedTuple):
    """The rules for the next token."""

    forced: int | None = None
    """Only allowed token. If it is set, the other rules have no effect."""
    words: npt.NDArray[np.int32] | None = None
    """Bits of allowed tokens: bit i % 32 of word i // 32 allows token i. None allows all."""
    allowed: Ids = NO_IDS
    """Only allowed tokens; empty sets no limit."""
    banned: Ids = NO_IDS
    ends: Ids = NO_IDS
    """Tokens that end the answer. They are banned if another token is allowed."""

    def apply(self, x_V: npt.NDArray[np.float64]) -> None:
        """Set the logits of tokens that are not allowed to -inf, in place."""
        if self.forced is not None:
            x_V.fill(-np.inf)
            x_V[self.forced] = 0
            return
        if self.words is not None:
            keep_allowed(torch.from_numpy(x_V), torch.from_numpy(self.words))
        if self.allowed.size:
            kept = x_V[self.allowed]
            x_V.fill(-np.inf)
            x_V[self.allowed] = kept
        x_V[self.banned] = -np.inf
        kept = x_V[self.ends]
        x_V[self.ends] = -np.inf
        if self.ends.size and x_V.max() == -np.inf:
            x_V[self.ends] = kept


class Limits:
    """The limits of one request. The forbidden tokens depend on the request's output alone.

    Args:
        sampling: Settings of the request.
        vocabulary: Vocabulary of the model.
        matcher: Matcher of the request's grammar. None builds the matcher here, if there is a
            grammar.
        prompt_ids: Prompt, which may have started the reasoning.

    Raises:
        InvalidRequestError: The grammar is refused.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        vocabulary: Vocabulary,
        matcher: Matcher | None,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        if matcher is None and sampling.structured_outputs is not None:
            matcher = vocabulary.matcher(sampling.structured_outputs)
        self._matcher = matcher
        self._allowed = _ids(sampling.allowed_token_ids or ())
        self._bad = vocabulary.split(sampling.bad_words)
        self._min_tokens = sampling.min_tokens
        self._thinking = _thinking(sampling, vocabulary, prompt_ids)
        ends = () if sampling.ignore_eos else vocabulary.eos_token_ids
        self._end_ids = frozenset({*ends, *sampling.stop_token_ids})
        self._ends = _ids(sorted(self._end_ids))

    @property
    def follows_outputs(self) -> bool:
        """True if a grammar or reasoning follows the answer token by token, and cannot go back."""
        return self._matcher is not None or self._thinking is not None

    def rules(self, outputs: Sequence[int], vocab_size: int) -> Rules | str:
        """Return the rules for the next token, or the reason that no token is allowed.

        Args:
            outputs: Tokens of the answer so far.
            vocab_size: Number of logits of a row.

        Raises:
            InvariantError: An id is outside the vocabulary.
        """
        if self._thinking is not None and (end := self._thinking.forced(outputs)) is not None:
            return Rules(forced=end)
        words, banned, waits = None, NO_IDS, len(outputs) < self._min_tokens
        if self._matcher is not None:
            if (said := self._of_form(outputs)) is None:
                banned = self._ends  # reasoning before the grammar's text must not end the answer
            elif (why := self._allow(self._matcher, said)) is not None:
                return why
            else:
                words = self._matcher.words
                if len(words) * WORD_BITS < vocab_size:
                    raise InvariantError(
                        f"a mask of {len(words) * WORD_BITS} tokens, and {vocab_size} logits"
                    )
            if not waits:
                return Rules(words=words, banned=banned)
        if self._allowed.size:
            _check(self._allowed, vocab_size, "allowed_token_ids")
        if waits and self._ends.size:
            _check(self._ends, vocab_size, "stop_token_ids")
        bad = [
            last
            for *before, last in self._bad
            if not before or before == list(outputs[-len(before) :])
        ]
        banned = np.concatenate((banned, _ids(bad))) if bad else banned
        return Rules(
            words=words,
            allowed=self._allowed,
            banned=banned,
            ends=self._ends if waits else NO_IDS,
        )

    def _allow(self, matcher: Matcher, said: Sequence[int]) -> str | None:
        """Compute the tokens allowed after `said`; return the reason if the grammar allows none."""
        why = None if self._thinking is None else self._thinking.wrong
        return why or matcher.allow(said)

    def forced(self, outputs: Sequence[int], most: int) -> Sequence[int]:
        """Return the next tokens that the grammar forces; none if it forces none.

        Args:
            outputs: Tokens of the answer so far.
            most: Most tokens to return.
        """
        if self._matcher is None or (said := self._of_form(outputs)) is None:
            return ()
        return self._matcher.forced(said, most)

    def go_ahead(self, builder: Executor, outputs: Sequence[int]) -> None:
        """Start to compute the next `rules` in advance, unless `outputs` end the answer.

        Args:
            builder: Executor that does the work on a thread.
            outputs: Tokens of the answer, including the token that was just chosen.
        """
        if self._matcher is not None and outputs[-1] not in self._end_ids:
            if self._thinking is not None:
                self._thinking.forced(outputs)  # the call reads the outputs
            if (said := self._of_form(outputs)) is not None:
                self._matcher.go_ahead(builder, said)

    def _of_form(self, outputs: Sequence[int]) -> Sequence[int] | None:
        """Return the tokens after the reasoning, for the grammar.

        None while reasoning continues.
        """
        if self._thinking is None:
            return outputs
        return None if self._thinking.ended is None else outputs[self._thinking.ended :]


def _thinking(
    sampling: SamplingParams, vocabulary: Vocabulary, prompt_ids: Sequence[int]
) -> Thinking | None:
    """Return a tracker of the reasoning if a budget or a grammar needs one."""
    budget = sampling.thinking_token_budget
    if sampling.structured_outputs is None:
        return None if budget is None else Thinking(budget, vocabulary, prompt_ids)
    if not starts_inside(vocabulary, prompt_ids):
        return None
    return Thinking(budget, vocabulary, prompt_ids, once=True)


def _ids(ids: Sequence[int]) -> Ids:
    return np.array(ids, np.int64)


def _check(ids: Ids, vocab_size: int, name: str) -> None:
    if ids.max() >= vocab_size:
        raise InvariantError(f"{name} token id {ids.max()} must be in [0, {vocab_size})")
