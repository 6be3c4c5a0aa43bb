"""Drafts from what the request has said before: prompt lookup.

The last tokens are searched in the client's prediction, the prompt and the answer. The tokens that
followed them there are proposed. Source: "prompt lookup decoding", A. Saxena, 2023; vLLM's `ngram`.

    prompt    a b c d e f ... a b c        proposed: d e f
              ----- found     ----- the last tokens
"""

from collections.abc import Sequence

from qllm.drafters.protocol import DraftRequest

LEAST = 3
"""Fewest last tokens that must be found."""
LONGEST = 32
"""Number of tokens after which a longer match is no better."""
MOST_PLACES = 16
"""Latest places of the last `LEAST` tokens that are compared."""
INDEXED_AT_ONCE = 1024
"""Most tokens that a call adds to the index. A long prompt is indexed over several calls."""
NO_TOKEN = -1
"""Id between the prediction and the prompt, which no token has."""


class Lookup:
    """The tokens that followed the longest match of the last tokens.

    Of the `MOST_PLACES` latest places where the last `LEAST` tokens came before, the place with the
    longest match wins, and of equal ones the latest. Time per token is constant. Memory is two
    integers and a dictionary entry per token.
    """

    def __init__(self, request: DraftRequest) -> None:
        self._ids = [*request.sampling.prediction_ids, NO_TOKEN]
        """Prediction, `NO_TOKEN`, prompt and answer."""
        self._offset = len(self._ids)
        self._latest: dict[tuple[int, ...], int] = {}
        """Place after the latest occurrence of each sequence of `LEAST` tokens."""
        self._before: list[int] = [0] * LEAST
        """Per place, the place before it with the same last `LEAST` tokens; 0 is none."""

    def propose(self, token_ids: Sequence[int], most: int) -> list[int]:
        """See `Drafter`."""
        ids = self._ids
        ids += token_ids[len(ids) - self._offset :]
        place = self._index(tuple(ids[-LEAST:]))
        best, length = 0, 0
        for _ in range(MOST_PLACES):
            if not place:
                break
            matched = self._matched(place)
            if matched > length:
                best, length = place, matched
            place = self._before[place]
        found = ids[best : best + most] if best else []
        return found[: found.index(NO_TOKEN)] if NO_TOKEN in found else found

    def _index(self, last: tuple[int, ...]) -> int:
        """Add tokens to the index, up to the last; return the latest place of `last` before it."""
        ids, latest, before = self._ids, self._latest, self._before
        start = len(before)
        stop = max(start, min(len(ids), start + INDEXED_AT_ONCE))
        grams = zip(
            *(ids[start - LEAST + k : stop - LEAST + k] for k in range(LEAST)), strict=False
        )
        for place, gram in enumerate(grams, start):
            before.append(latest.get(gram, 0))
            latest[gram] = place
        return latest.get(last, 0)

    def _matched(self, place: int) -> int:
        """Return the number of tokens before `place` that equal the last tokens."""
        ids, end, num = self._ids, len(self._ids), LEAST
        while num < min(LONGEST, place) and ids[place - 1 - num] == ids[end - 1 - num]:
            num += 1
        return num
