"""The delivery of sampled tokens to the sink, and the ends of answers that follow from them."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qllm.engine.protocol import Sink
from qllm.record import trace
from qllm.types import FinishReason, RequestId, Sampled

if TYPE_CHECKING:
    from qllm.engine.loop import Live

Finish = Callable[[RequestId, FinishReason, str | None], None]
"""A function that ends a request."""


class Delivery:
    """The way of sampled tokens out of the engine.

    Args:
        sink: Receiver of tokens.
        live: Unfinished requests.
        emit: Receiver of events.
        finish: Function that ends a request.
    """

    def __init__(
        self,
        sink: Sink,
        live: Mapping[RequestId, "Live"],
        emit: Callable[[trace.Event], Any],
        finish: Finish,
    ) -> None:
        self._sink, self._live, self._emit, self._finish = sink, live, emit, finish

    def deliver(self, sampled: Sequence[Sampled], at_ns: int) -> None:
        """Deliver the tokens of a program, which their requests already count."""
        later = Counter([token.request_id for token in sampled])
        for token in sampled:
            later[token.request_id] -= 1
            self._token(token, later[token.request_id], at_ns)

    def _token(self, sampled: Sampled, num_later: int, at_ns: int) -> None:
        """Deliver a token, and end its request if the token is the last one.

        Args:
            sampled: The token.
            num_later: Number of later tokens of the request that are not delivered yet.
            at_ns: Time when the program ended.
        """
        request_id = sampled.request_id
        live = self._live.get(request_id)
        if live is None:
            return
        if sampled.error is not None:
            self._finish(request_id, FinishReason.ERROR, sampled.error)
            return
        logprob = sampled.logprobs.chosen if sampled.logprobs else None
        self._emit(
            trace.Token(
                at_ns=at_ns, request_id=request_id, token_id=sampled.token_id, logprob=logprob
            )
        )
        try:
            stopped = self._sink.on_token(sampled, at_ns)
        except Exception as error:  # noqa: BLE001 - fails this request (a tokenizer), not the engine
            self._finish(request_id, FinishReason.ERROR, f"{type(error).__name__}: {error}")
            return
        if stopped or sampled.token_id in live.submission.stop_ids:
            self._finish(request_id, FinishReason.STOP, None)
        elif live.request.num_output_tokens - num_later >= live.request.max_tokens:
            self._finish(request_id, FinishReason.LENGTH, None)
