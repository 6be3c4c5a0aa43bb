"""Reasoning in answers: its end, and its budget. When the budget is spent, `</think>` is forced."""

from collections.abc import Sequence

from qllm.grammar import Vocabulary
from qllm.types import THINK, THOUGHT

WINDOW = 16
"""Most tokens that a tokenizer makes of a tag."""


def starts_inside(vocabulary: Vocabulary, prompt_ids: Sequence[int]) -> bool:
    """Return True if an answer starts inside its reasoning: the prompt ends with `<think>`."""
    if not prompt_ids:
        return False
    return vocabulary.decode(prompt_ids[-WINDOW:]).rstrip().endswith(THINK)


class Thinking:
    """The state of the reasoning in one answer. The state is a function of the answer's tokens.

    Args:
        budget: Most tokens of reasoning in all passages together, tags not counted; None sets no
            bound.
        vocabulary: Vocabulary of the model.
        prompt_ids: Prompt of the request. If it ends with `<think>`, the answer starts inside its
            reasoning.
        once: True if only the first passage is reasoning. A grammar then starts after the first
            `</think>`.
    """

    def __init__(
        self,
        budget: int | None,
        vocabulary: Vocabulary,
        prompt_ids: Sequence[int],
        *,
        once: bool = False,
    ) -> None:
        self._budget, self._vocabulary, self._once = budget, vocabulary, once
        self._end = [] if budget is None else vocabulary.encode(THOUGHT)
        self._last = vocabulary.encode(THOUGHT[-1])[0] if once else None
        self._starts_inside = starts_inside(vocabulary, prompt_ids)
        self._ids = {tag: vocabulary.id_of(tag) for tag in (THINK, THOUGHT)}
        """Token of each tag, or None. If a tag has a token of its own, the same text in other
        tokens is no tag."""
        self._restart()

    def _restart(self) -> None:
        self._num_read = self._num_spent = self._behind = 0
        self._begun: int | None = 0 if self._starts_inside else None
        self._has_spoken = False
        """True if more than white space follows the last tag. Then `<think>` is no tag."""
        self._is_open = False
        """True if only the last character of the end tag is missing."""
        self.ended: int | None = None
        """Number of answer tokens up to the end of the first passage; None before."""
        self.wrong: str | None = None
        """Reason that no token is allowed after the reasoning."""

    @property
    def is_inside(self) -> bool:
        """True if the tokens read so far end inside the reasoning."""
        return self._begun is not None

    def forced(self, outputs: Sequence[int]) -> int | None:
        """Return the next token if it is forced as part of `</think>`; None if any is allowed.

        Args:
            outputs: Tokens of the answer so far. They continue the tokens of the last call, or
                start again.
        """
        if len(outputs) < self._num_read:
            self._restart()
        while self._num_read < len(outputs):
            self._num_read += 1
            self._read(outputs)
        if self._begun is None:
            return None
        if self._budget is None or len(outputs) < (limit := self._limit(self._begun)):
            # the last token of the tag without any text after the tag
            return self._last if self._is_open else None
        place = len(outputs) - limit + self._num_begun(outputs[self._begun : limit])
        return self._end[place] if place < len(self._end) else None

    def _limit(self, begun: int) -> int:
        """Return the number of answer tokens at which the budget is spent."""
        assert self._budget is not None
        return begun + self._budget - self._num_spent

    def _num_begun(self, spent: Sequence[int]) -> int:
        """Return the number of tag tokens that the model itself produced at the end of `spent`."""
        most = min(len(spent), len(self._end) - 1)
        return next((n for n in range(most, 0, -1) if list(spent[-n:]) == self._end[:n]), 0)

    def _read(self, outputs: Sequence[int]) -> None:
        """Find a tag that ends with the last token that was read."""
        if self._once and self.ended is not None:
            return
        first = max(self._num_read - WINDOW, self._behind)
        last = outputs[first : self._num_read]
        text = self._vocabulary.decode(last)
        self._is_open = self._once and text.endswith(THOUGHT[:-1])
        if self._begun is None:
            self._look_for_begin(text, outputs[self._num_read - 1])
        elif self._ends(THOUGHT, text, outputs[self._num_read - 1]):
            tag = next(
                n for n in range(1, WINDOW + 1) if THOUGHT in self._vocabulary.decode(last[-n:])
            )
            num = max(0, self._num_read - tag - self._begun)
            if self._budget is not None:
                self._num_spent = min(self._budget, self._num_spent + num)
            self._begun, self._behind, self._has_spoken = None, self._num_read, False
            if self.ended is None:
                self.ended = self._num_read
            if self._once and (more := text.partition(THOUGHT)[2].strip()):
                self.wrong = f"its reasoning ends inside a token that goes on with {more!r}"

    def _look_for_begin(self, text: str, token_id: int) -> None:
        """Start a passage if a tag ends with a token and no other text came before the tag."""
        if not self._has_spoken and self._ends(THINK, text, token_id):
            self._begun = self._behind = self._num_read
        elif said := text.strip():
            may_begin = self._ids[THINK] is None and THINK.startswith(said)
            self._has_spoken = self._has_spoken or not may_begin

    def _ends(self, tag: str, text: str, token_id: int) -> bool:
        """Return True if a tag ends with the last token of a text, or inside it."""
        own = self._ids[tag]
        return tag in text if own is None else token_id == own
