"""Which tokens a request may not produce next: a form, a list of ids, words, an end too soon."""

from collections.abc import Sequence
from concurrent.futures import Executor

import numpy as np
import numpy.typing as npt
import torch

from qllm.errors import InvariantError
from qllm.grammar import Matcher, Vocabulary
from qllm.kernels.cpu.masks import keep_allowed
from qllm.runner.thinking import Thinking, starts_inside
from qllm.types import SamplingParams

Ids = npt.NDArray[np.int64]


class Limits:
    """The limits of one request. What they forbid depends on its output alone.

    Args:
        sampling: Its settings.
        vocabulary: Of the model.
        matcher: Its grammar, built already; None builds it here, if it has one.
        prompt_ids: Its prompt, which may have begun to reason.

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

    def forbid(self, x_V: npt.NDArray[np.float64], outputs: Sequence[int]) -> str | None:
        """Set the logits of tokens that may not come next to -inf, in place.

        Args:
            x_V: Logits.
            outputs: The tokens of the answer so far.

        Returns:
            Why no token may come next; None if one may.

        Raises:
            ValueError: An id is outside the vocabulary.
        """
        if self._thinking is not None and (end := self._thinking.forced(outputs)) is not None:
            x_V.fill(-np.inf)
            x_V[end] = 0
            return None
        if self._matcher is not None:
            if (why := self._keep_form(self._matcher, x_V, outputs)) is not None:
                return why
            if len(outputs) >= self._min_tokens:
                return None
        if self._allowed.size:
            _check(self._allowed, len(x_V), "allowed_token_ids")
            kept = x_V[self._allowed]
            x_V.fill(-np.inf)
            x_V[self._allowed] = kept
        for *before, last in self._bad:
            if not before or (before == list(outputs[-len(before) :])):
                x_V[last] = -np.inf
        if len(outputs) < self._min_tokens and self._ends.size:
            _check(self._ends, len(x_V), "stop_token_ids")
            kept = x_V[self._ends]
            x_V[self._ends] = -np.inf
            if x_V.max() == -np.inf:  # nothing but an end may come
                x_V[self._ends] = kept
        return None if x_V.max() > -np.inf else "its bad_words allow no further token"

    def _keep_form(
        self, matcher: Matcher, x_V: npt.NDArray[np.float64], outputs: Sequence[int]
    ) -> str | None:
        """Forbid what the form does not allow; behind reasoning, if there is any."""
        if (said := self._of_form(outputs)) is None:
            x_V[self._ends] = -np.inf  # what has a form does not end before it
            return None
        why = None if self._thinking is None else self._thinking.wrong
        if (why := why or matcher.allow(said)) is None:
            keep_allowed(torch.from_numpy(x_V), torch.from_numpy(matcher.words))
        return why

    def go_ahead(self, builder: Executor, outputs: Sequence[int]) -> None:
        """Begin with what the next `forbid` needs, if `outputs` do not end the answer.

        Args:
            builder: Runs it on a thread.
            outputs: The tokens of the answer, with the one that was chosen just now.
        """
        if self._matcher is not None and outputs[-1] not in self._end_ids:
            if self._thinking is not None:
                self._thinking.forced(outputs)  # reads them
            if (said := self._of_form(outputs)) is not None:
                self._matcher.go_ahead(builder, said)

    def _of_form(self, outputs: Sequence[int]) -> Sequence[int] | None:
        """The tokens that the form holds: those behind the reasoning; None while that goes on."""
        if self._thinking is None:
            return outputs
        return None if self._thinking.ended is None else outputs[self._thinking.ended :]


def _thinking(
    sampling: SamplingParams, vocabulary: Vocabulary, prompt_ids: Sequence[int]
) -> Thinking | None:
    """What follows the reasoning: for a budget, and for a form that begins behind it."""
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
