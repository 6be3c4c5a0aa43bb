"""Drafts from the grammar of the answer: tokens that it forces next."""

from collections.abc import Sequence

from qllm.drafters.protocol import DraftRequest


class Forced:
    """The tokens that the grammar of a request allows as the only text.

    A grammar forces a text. The model may write the same text with other tokens. So these tokens
    are verified like all drafts.
    """

    def __init__(self, request: DraftRequest) -> None:
        self._request = request

    def propose(self, token_ids: Sequence[int], most: int) -> Sequence[int]:
        """See `Drafter`."""
        outputs = token_ids[self._request.num_prompt_tokens :]
        return self._request.forced(outputs, most)
