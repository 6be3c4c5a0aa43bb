"""Reasoning: where it ends, and its budget: when that is spent, `</think>` is produced."""

from collections.abc import Sequence

from qllm.grammar import Vocabulary
from qllm.types import THINK, THOUGHT

WINDOW = 16
"""Tokens in which a tag lies, however a tokenizer has split it."""


def starts_inside(vocabulary: Vocabulary, prompt_ids: Sequence[int]) -> bool:
    """Whether an answer begins inside its reasoning: the prompt ends with `<think>`."""
    if not prompt_ids:
        return False
    return vocabulary.decode(prompt_ids[-WINDOW:]).rstrip().endswith(THINK)


class Thinking:
    """Follows the reasoning in one answer. Its state is a function of the answer's tokens.

    Args:
        budget: Most tokens of reasoning, all of its passages together, tags not counted; None
            sets no bound.
        vocabulary: Of the model.
        prompt_ids: Of the request; where they end with `<think>` the answer begins inside.
        once: Nothing behind the first `</think>` is reasoning: it has a form, which begins there.
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
        """The tokens that tags are; of a tag that is one a spelled one is not meant as a tag."""
        self._restart()

    def _restart(self) -> None:
        self._num_read = self._num_spent = self._behind = 0
        self._begun: int | None = 0 if self._starts_inside else None
        self._has_spoken = False
        """Whether more than white space was said behind the last tag: `<think>` is none there."""
        self._is_open = False
        """Whether only the last character of the tag that ends it is missing."""
        self.ended: int | None = None
        """Tokens of the answer up to the end of the first passage; None before."""
        self.wrong: str | None = None
        """Why nothing may come behind the reasoning."""

    @property
    def is_inside(self) -> bool:
        """Whether the answer reasons behind the tokens that were read."""
        return self._begun is not None

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
        if self._budget is None or len(outputs) < (limit := self._limit(self._begun)):
            return self._last if self._is_open else None  # no token that has more behind the tag
        place = len(outputs) - limit + self._num_begun(outputs[self._begun : limit])
        return self._end[place] if place < len(self._end) else None

    def _limit(self, begun: int) -> int:
        """Tokens of the answer with which the budget is spent."""
        assert self._budget is not None
        return begun + self._budget - self._num_spent

    def _num_begun(self, spent: Sequence[int]) -> int:
        """How many tokens of the tag the model has produced by itself when its budget is spent."""
        most = min(len(spent), len(self._end) - 1)
        return next((n for n in range(most, 0, -1) if list(spent[-n:]) == self._end[:n]), 0)

    def _read(self, outputs: Sequence[int]) -> None:
        """Look for a tag that ends with the last token that was read."""
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
        """Begin a passage if a tag ends with a token, where nothing else was said."""
        if not self._has_spoken and self._ends(THINK, text, token_id):
            self._begun = self._behind = self._num_read
        elif said := text.strip():
            may_begin = self._ids[THINK] is None and THINK.startswith(said)
            self._has_spoken = self._has_spoken or not may_begin

    def _ends(self, tag: str, text: str, token_id: int) -> bool:
        """Whether a tag is at the end of a text, or inside its last token."""
        own = self._ids[tag]
        return tag in text if own is None else token_id == own
