"""The reasoning budget: when it is spent, the tokens of `</think>` are produced."""

from collections.abc import Sequence

from qllm.grammar import Vocabulary
from qllm.types import THINK, THOUGHT

WINDOW = 16
"""Tokens in which a tag lies, however a tokenizer has split it."""


class Thinking:
    """Follows the reasoning in one answer. Its state is a function of the answer's tokens.

    Args:
        budget: Most tokens of reasoning, all of its passages together, tags not counted.
        vocabulary: Of the model.
        prompt_ids: Of the request; where they end with `<think>` the answer begins inside.
    """

    def __init__(self, budget: int, vocabulary: Vocabulary, prompt_ids: Sequence[int]) -> None:
        self._budget, self._vocabulary = budget, vocabulary
        self._end = vocabulary.encode(THOUGHT)
        text = vocabulary.decode(prompt_ids[-WINDOW:]) if prompt_ids else ""
        self._starts_inside = text.rstrip().endswith(THINK)
        self._restart()

    def _restart(self) -> None:
        self._num_read = self._num_spent = self._behind = 0
        self._begun: int | None = 0 if self._starts_inside else None

    def forced(self, outputs: Sequence[int]) -> int | None:
        """The token that must come next, as part of `</think>`; None if any may.

        Args:
            outputs: The tokens of the answer so far; since the last call they only became more, or
                it began again.
        """
        if len(outputs) < self._num_read:
            self._restart()
        while self._num_read < len(outputs):
            self._num_read += 1
            self._read(outputs)
        if self._begun is None:
            return None
        limit = self._begun + self._budget - self._num_spent
        if len(outputs) < limit:
            return None
        place = len(outputs) - limit + self._num_begun(outputs[self._begun : limit])
        return self._end[place] if place < len(self._end) else None

    def _num_begun(self, spent: Sequence[int]) -> int:
        """How many tokens of the tag the model has produced by itself when its budget is spent."""
        most = min(len(spent), len(self._end) - 1)
        return next((n for n in range(most, 0, -1) if list(spent[-n:]) == self._end[:n]), 0)

    def _read(self, outputs: Sequence[int]) -> None:
        """Look for a tag that ends with the last token that was read."""
        first = max(self._num_read - WINDOW, self._behind)
        text = self._vocabulary.decode(outputs[first : self._num_read])
        if self._begun is None:
            if THINK in text:
                self._begun = self._behind = self._num_read
        elif THOUGHT in text:
            last = outputs[first : self._num_read]
            tag = next(
                n for n in range(1, WINDOW + 1) if THOUGHT in self._vocabulary.decode(last[-n:])
            )
            num = self._num_read - tag - self._begun
            self._num_spent = min(self._budget, self._num_spent + max(0, num))
            self._begun, self._behind = None, self._num_read
