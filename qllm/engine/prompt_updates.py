"""Updates of a streaming prompt between two programs: it grows, changes, or becomes whole.

    keep          first tokens that the client left unchanged
    num_kept      those of the first tokens whose KV is still valid: all, or none

No KV stays valid if rope factors follow the length and have just changed, or if a layer carries a
state. No program runs during an update, so no prompt changes under a running row (I12). A parked
row continues if the row ends before the first change. Otherwise the row is killed, and tokens
committed before the row stay.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from qllm.engine.effects import Effects
from qllm.engine.kv.prefix import PrefixCache
from qllm.engine.protocol import Deciding
from qllm.errors import InvalidRequestError
from qllm.ingress import Revision, Submission
from qllm.ingress.admission import refusal
from qllm.record import trace
from qllm.runner.protocol import Runner
from qllm.scheduler.request import Request


class Revised(NamedTuple):
    """Result of a revision, for the counters of its request."""

    num_kept: int
    num_lost: int
    """Tokens that were computed in every layer and must be computed again."""


class PromptUpdates:
    """The executor of revisions, with counts of their cost.

    Args:
        scheduler: State and decisions.
        runner: Owner of prompts and KV.
        effects: Executor of the scheduler's effects.
        prefix: The prefix cache, or None.
        emit: Receiver of events.
        now_ns: The engine's clock.
    """

    def __init__(
        self,
        scheduler: Deciding,
        runner: Runner,
        effects: Effects,
        prefix: PrefixCache | None,
        emit: Callable[[trace.Event], Any],
        now_ns: Callable[[], int],
    ) -> None:
        self._scheduler, self._runner, self._effects = scheduler, runner, effects
        self._prefix, self._emit, self._now_ns = prefix, emit, now_ns
        self.num_revisions = 0
        self.lost_tokens = 0
        """Computed tokens that a revision changed, or whose rope factors a revision changed."""
        self.num_restarts = 0
        """Prompts computed again from the first token, although the first token was unchanged."""

    def whole(self, before: Submission, request: Request, item: Revision) -> Submission:
        """Return the request with a revision applied.

        Raises:
            InvalidRequestError: The revision is one that our front ends never send, or the prompt
                is too long.
        """
        if not request.is_open:
            raise InvalidRequestError("its prompt was whole already, and cannot change any more")
        if item.keep > len(before.token_ids):
            raise InvalidRequestError(
                f"it keeps {item.keep} tokens of a prompt of {len(before.token_ids)}"
            )
        whole = replace(
            item.rest,
            token_ids=(*before.token_ids[: item.keep], *item.rest.token_ids),
            name=before.name,
            priority=before.priority,
            arrival_ns=before.arrival_ns,
            cache_salt=before.cache_salt,
        )
        wrong = refusal(whole, self._runner.shape, self._scheduler.limits.max_kv_tokens)
        if wrong is not None:
            raise InvalidRequestError(wrong)
        return whole

    def apply(self, whole: Submission, request: Request, item: Revision, record: bool) -> None:
        """Continue a request with another prompt.

        Args:
            whole: Result of `whole`.
            request: The request to change.
            item: The revision.
            record: True writes the prompt to the record.
        """
        number, count, keep = request.request_id, len(whole.token_ids), item.keep
        now = self._now_ns()
        put_ns = min(item.arrival_ns, now)
        request.revised_ns = put_ns
        done = self._revise(whole, request, keep, now)
        if self._prefix is not None:
            self._prefix.revised(number, whole, done.num_kept)
        self.num_revisions += 1
        self.lost_tokens += done.num_lost
        shown = record and not whole.is_open
        self._emit(
            trace.Revised(
                at_ns=put_ns,
                request_id=number,
                num_same=keep,
                num_kept=done.num_kept,
                num_lost=done.num_lost,
                num_prompt_tokens=count,
                is_open=whole.is_open,
                max_tokens=whole.max_tokens,
                token_ids=whole.token_ids if shown else None,
                sampling=trace.sampling_to_dict(whole.sampling) if shown else None,
            )
        )

    def _revise(self, whole: Submission, request: Request, keep: int, now_ns: int) -> Revised:
        number, count = request.request_id, len(whole.token_ids)
        asks = whole.sampling.prompt_logprobs is not None
        if not whole.is_open:
            keep = min(keep, count - 1)  # the last token must be computed: it gives the logits
        kept = 0 if asks else self._runner.keepable(number, keep, count)
        self.num_restarts += kept == 0 < min(keep, request.num_written_tokens)
        if not whole.is_open:
            request.is_open = False
            request.max_tokens, request.slo = whole.max_tokens, whole.slo
        had_kv = request.is_admitted or request.num_swapped_tokens > 0
        before = request.num_computed_tokens if had_kv else 0
        for effect in self._scheduler.revise(number, kept, count, now_ns):
            self._effects.apply(effect)
        written, table = request.num_written_tokens, tuple(request.block_table)
        self._runner.revise(number, whole.token_ids, whole.sampling, written, table)
        lost = max(0, before - request.num_computed_tokens) if had_kv else 0
        return Revised(min(kept, request.num_computed_tokens) if lost else kept, lost)


def why(error: Exception) -> str:
    """Return the error text of a request whose revision could not be applied."""
    is_ours = isinstance(error, InvalidRequestError)
    return str(error) if is_ours else f"{type(error).__name__}: {error}"
