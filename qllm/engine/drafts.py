"""Drafted tokens: a drafter proposes next tokens, and the request's next row verifies them.

The model samples its own token at each position of the row, up to the first that differs from the
draft. So a drafter changes how many tokens a step gives, and never which tokens. The loop asks the
drafters between two programs. Whatever a drafter does, the requests continue: a wrong proposal is
dropped, counted and logged. With `Exit` the request's own rows draft, and there is no drafter.

A draft model takes longer than other drafters. Arrivals stop it, and it does not draft while an LS
request waits for its first token.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from qllm.drafters.exit import Exit
from qllm.drafters.model import DraftModel
from qllm.drafters.protocol import Drafter, DraftRequest, MakeDrafter, TokenIds
from qllm.engine.costs import blend
from qllm.engine.protocol import Deciding
from qllm.errors import contained, shown, told
from qllm.plan import Row
from qllm.policy import CostTable
from qllm.record import trace
from qllm.runner.protocol import Runner
from qllm.scheduler.drafts import Utility
from qllm.scheduler.program import Program
from qllm.scheduler.request import Request
from qllm.types import NS_PER_MS, Priority, RequestId, Sampled

if TYPE_CHECKING:
    from qllm.engine.loop import Live

TURN_NS = 2 * NS_PER_MS
"""Time for all drafters between two programs. A single call that takes longer is too slow. A draft
model is not bound by it."""
REST_TOKENS = 64
"""Tokens for which a drafter is not asked after it was too slow twice."""


class _Drafting:
    """The drafter of one request, and the request's tokens."""

    def __init__(
        self,
        drafter: Drafter | None,
        token_ids: list[int],
        utility: Utility,
        stop_ids: Collection[int],
    ) -> None:
        self.drafter = drafter
        """The drafter; None after it raised, and where rows draft."""
        self.stop_ids = stop_ids
        """Tokens that end the answer."""
        self.guesses: tuple[int, ...] = ()
        """Tokens that draft rows chose since the last known token."""
        self.ids = token_ids
        self.utility = utility
        self.asked_at = 0
        """Number of known tokens when the drafter was asked last."""
        self.num_slow = 0
        """Number of slow calls since the last rest."""
        self.rests_until = 0
        """Number of known tokens from which the drafter is asked again."""


class _ExitCosts:
    """The measured times of draft rows, and of the rows that verify their tokens.

    Each draft row is a program, so the engine's time between two programs counts too.

    Args:
        exit_share: Part of the layers that draft rows run.
    """

    def __init__(self, exit_share: float) -> None:
        self._share = exit_share
        self._draft_ns = self._between_ns = 0
        self._verify_ns: dict[int, int] = {}
        """Time of a row that verifies, by its number of tokens."""
        self._last: tuple[RequestId, int] | None = None
        """The request of the last program, and its end; None after a pause."""

    def paused(self) -> None:
        """Note that the engine waits, or runs a part of a program."""
        self._last = None

    def ran(self, program: Program, start_ns: int, end_ns: int) -> None:
        """Learn from a program that ran from start to end without a stop."""
        last, self._last = self._last, None
        if len(program.rows) > 1:
            return
        (row,), (num,), elapsed_ns = program.rows, program.samples, end_ns - start_ns
        self._last = row.request_id, end_ns
        if last is not None and last[0] == row.request_id:
            self._between_ns = blend(self._between_ns, start_ns - last[1])
        if program.exits and num:
            self._draft_ns = blend(self._draft_ns, elapsed_ns)
        elif row.start_layer and num:
            self._verify_ns[num] = blend(self._verify_ns.get(num, 0), elapsed_ns)

    def extra_ns(self, costs: CostTable, num_drafts: int) -> int:
        """Return the time of drafts, beyond that of a row that verifies tokens in all layers."""
        whole_ns, num = costs.decode(num_drafts + 1), num_drafts + 1
        verify_ns = self._verify_ns.get(num) or round(whole_ns * (1 - self._share))
        draft_ns = self._draft_ns or round(costs.decode(1) * self._share)
        return num * (draft_ns + self._between_ns) + verify_ns - whole_ns if num_drafts else 0


class Drafts:
    """The drafters of all requests.

    Args:
        scheduler: Scheduler, which gets numbers of drafted tokens.
        runner: Runner, which gets the tokens.
        make: Maker of drafters, or the layer at which drafts leave the model.
        most: Most drafted tokens of a row.
        emit: Receiver of events.
        now_ns: The engine's clock.
        warn: Receiver of a text about each cause of faults, once.
        weighs: True drafts as many tokens as pay (`Utility`); False always drafts the most.
    """

    def __init__(
        self,
        scheduler: Deciding,
        runner: Runner,
        make: MakeDrafter | Exit,
        most: int,
        emit: Callable[[trace.Event], Any],
        now_ns: Callable[[], int],
        warn: Callable[[str], object],
        *,
        weighs: bool = True,
    ) -> None:
        self._scheduler, self._runner, self._make, self._most = scheduler, runner, make, most
        self._weighs = weighs
        self._exit_layer = make.layer if isinstance(make, Exit) else 0
        self._exit_costs = _ExitCosts(self._exit_layer / runner.shape.num_layers)
        self._model = make if isinstance(make, DraftModel) else None
        """The draft model, if drafts come from one."""
        self._extra_ns: Callable[[int], int] | None = None
        """Function from a number of drafts to the time that making them takes; None if none."""
        if self._exit_layer:
            self._extra_ns = lambda num: self._exit_costs.extra_ns(scheduler.costs, num)
        elif self._model is not None:
            self._extra_ns = self._model.extra_ns
        self._emit, self._now_ns, self._warn = emit, now_ns, warn
        self._drafting: dict[RequestId, _Drafting] = {}
        self._usual = Utility()
        """Drafts of all requests, with which a new one begins."""
        self._last: RequestId = -1
        """Request that was asked last. The next turn begins after it."""
        self.counts: dict[str, Counter[str]] = {
            name: Counter(accepted=0, rejected=0) for name in ("LS", "BE")
        }
        """Accepted and rejected drafts by class."""
        self.faults: Counter[str] = Counter()
        """Proposals that were dropped, in whole or in part, by cause."""

    def ask(self, live: Mapping[RequestId, "Live"]) -> bool:
        """Ask the drafters of decoding requests, within the time of a turn.

        BE requests draft nothing while an LS request decodes, because their longer rows would delay
        its tokens. Draft rows pay only for a request that decodes alone, because each of them is a
        step for the others too.

        Returns:
            True if an arrival stopped the draft model.
        """
        model = self._model
        if model is not None:
            model.begin_turn(may_draft=not any(_waits(one.request) for one in live.values()))
        admitted = [one for one in live.values() if one.request.block_table]  # few of those waiting
        decoding = [one for one in admitted if _may_draft(one.request)]
        has_ls = any(one.request.priority <= Priority.LS for one in decoding)
        if self._exit_layer:
            decoding = self._alone(admitted, decoding)
        end_ns = self._now_ns() + TURN_NS
        first = next((n for n, x in enumerate(decoding) if x.request.request_id > self._last), 0)
        for one in (*decoding[first:], *decoding[:first]):
            request = one.request
            has_time = self._now_ns() < end_ns if model is None else model.may_draft
            if has_ls and request.priority > Priority.LS:
                self._scheduler.draft(request.request_id, 0)
            elif has_time:
                self._draft(one, len(decoding) - 1)
                self._last = request.request_id
        return model is not None and model.was_stopped

    def verified(
        self, program: Program, sampled: Sequence[Sampled], ran: tuple[int, int] | None = None
    ) -> None:
        """Take the tokens that a program sampled, and record the verified drafts.

        Args:
            program: Program that ended.
            sampled: Its tokens.
            ran: Its start and end in nanoseconds; None if it was stopped in between.
        """
        if ran is None:
            self.paused()
        elif self._exit_layer:
            self._exit_costs.ran(program, *ran)
        for r in program.exits:
            if program.samples[r]:
                self._drafted(program.rows[r])
        for token in sampled:
            if (drafting := self._drafting.get(token.request_id)) is not None:
                drafting.ids.append(token.token_id)
        if max(program.samples) > 1:
            self._count(program, sampled)

    def _count(self, program: Program, sampled: Sequence[Sampled]) -> None:
        """Count and record the drafts that a program verified."""
        chosen = Counter([token.request_id for token in sampled])
        for row, num in zip(program.rows, program.samples, strict=True):
            if num > 1 and (count := chosen[row.request_id]):
                is_ls = self._scheduler.requests[row.request_id].priority <= Priority.LS
                counts = self.counts["LS" if is_ls else "BE"]
                counts.update(accepted=count - 1, rejected=num - count)
                if (drafting := self._drafting.get(row.request_id)) is not None:
                    drafting.utility.saw(num - 1, count - 1)
                    self._usual.saw(num - 1, count - 1)
                self._emit(
                    trace.Verified(
                        at_ns=self._now_ns(),
                        request_id=row.request_id,
                        num_drafts=num - 1,
                        num_accepted=count - 1,
                    )
                )

    def paused(self) -> None:
        """Note that the engine waits, or runs a part of a program."""
        self._exit_costs.paused()

    def stats(self) -> dict[str, Any]:
        """Return accepted and rejected drafts by class, and faults by cause. For any thread."""
        model = {} if self._model is None else {"model": self._model.stats()}
        return {**self.by_class(), "faults": dict(self.faults), **model}

    def by_class(self) -> dict[str, dict[str, int]]:
        """Return accepted and rejected drafts by class. For any thread."""
        return {name: dict(count) for name, count in self.counts.items()}

    def forget(self, request_id: RequestId) -> None:
        """Forget a request that has ended."""
        self._drafting.pop(request_id, None)
        if self._model is not None:
            self._model.forget(request_id)

    def _draft(self, live: "Live", num_others: int) -> None:
        """Ask the drafter of a request, once for each of its tokens.

        Args:
            live: The request.
            num_others: Number of other decoding requests.
        """
        request_id, known = live.request.request_id, live.request.num_tokens
        drafting = self._drafting.get(request_id)
        if drafting is None:
            drafting = self._drafting[request_id] = self._begin(live)
        if drafting.asked_at == known or known < drafting.rests_until:
            return
        drafting.asked_at = known
        asked = live.submission.sampling.draft_tokens
        most = self._most if asked is None else min(asked, self._most)
        if self._weighs:
            costs = self._scheduler.costs
            most = drafting.utility.most(costs, num_others, most, self._extra_ns)
        if self._exit_layer:
            drafting.guesses = ()
            self._scheduler.draft(request_id, most, self._exit_layer)
            return
        found = self._proposed(drafting, most) if most else []
        num = self._scheduler.draft(request_id, len(found)) if found else 0
        if num:
            self._runner.draft(request_id, found[:num])
            at_ns, ids = self._now_ns(), tuple(found[:num])
            self._emit(trace.Drafted(at_ns=at_ns, request_id=request_id, token_ids=ids))

    def _alone(self, admitted: list["Live"], decoding: list["Live"]) -> list["Live"]:
        """Return the requests whose rows may draft, and let the others verify what they drafted."""
        running = [x for x in admitted if x.request.is_decoding and not x.request.is_hidden]
        if not self._weighs or len(running) < 2:
            return decoding
        for one in admitted:
            if one.request.exit_layer:
                self._scheduler.draft(one.request.request_id, 0)
        return []

    def _drafted(self, row: Row) -> None:
        """Take the token that a draft row chose, or let the request verify its drafts.

        A row that left its frame before HEAD chose none.
        """
        request_id = row.request_id
        drafting, request = self._drafting.get(request_id), self._scheduler.requests.get(request_id)
        front = None if request is None else request.frontier
        if drafting is None or front is None or front[1:] != (row.hi, row.end_layer):
            return
        guess = self._runner.guess(request_id)
        if guess is None or guess in drafting.stop_ids or not self._scheduler.add_draft(request_id):
            self._scheduler.draft(request_id, 0)
            return
        drafting.guesses = (*drafting.guesses, guess)
        self._runner.draft(request_id, drafting.guesses)
        at_ns, ids = self._now_ns(), drafting.guesses
        self._emit(trace.Drafted(at_ns=at_ns, request_id=request_id, token_ids=ids))

    def _begin(self, live: "Live") -> _Drafting:
        request_id = live.request.request_id
        request = DraftRequest(
            request_id,
            live.request.num_prompt_tokens,
            live.submission.sampling,
            partial(self._runner.forced, request_id),
        )
        ids, stop_ids = self._runner.token_ids(request_id), live.submission.stop_ids
        utility = Utility.like(self._usual)
        if isinstance(self._make, Exit):
            return _Drafting(None, ids, utility, stop_ids)
        try:
            with contained():
                return _Drafting(self._make(request), ids, utility, stop_ids)
        except Exception as error:  # noqa: BLE001 - a drafter cannot end a request
            self._fault("raised", f"raised {told(error)}; its request has no drafts")
            return _Drafting(None, ids, utility, stop_ids)

    def _proposed(self, drafting: _Drafting, most: int) -> list[int]:
        """Return what a drafter proposes, up to the first id that cannot be verified.

        A token that ends the answer is not drafted, because no token follows it. The row that
        verifies the drafts before this token samples the token itself.

        Args:
            drafting: The request and its drafter.
            most: Most tokens to return.
        """
        if drafting.drafter is None:
            return []
        begin_ns = self._now_ns()
        try:
            with contained():
                proposed = drafting.drafter.propose(TokenIds(drafting.ids), most)
                found = list(islice(proposed, most))
        except Exception as error:  # noqa: BLE001 - a drafter cannot end a request
            drafting.drafter = None
            self._fault("raised", f"raised {told(error)}; its request has no drafts any more")
            return []
        if self._model is None and self._now_ns() - begin_ns > TURN_NS:
            drafting.num_slow += 1
            if drafting.num_slow > 1:  # one slow call may be a pause of the machine
                drafting.rests_until, drafting.num_slow = len(drafting.ids) + REST_TOKENS, 0
            self._fault("slow", f"took longer than {TURN_NS / NS_PER_MS:g} ms")
            return []
        vocab_size = self._runner.shape.vocab_size
        for n, token_id in enumerate(found):
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                text = f"proposed {shown(token_id)}; a token id is an int in [0, {vocab_size})"
                self._fault("no token id", text)
                return found[:n]
            if token_id in drafting.stop_ids:
                return found[:n]
        return found

    def _fault(self, cause: str, text: str) -> None:
        """Count a fault, and report the first of its cause."""
        self.faults[cause] += 1
        if self.faults[cause] == 1:
            self._warn(f"a drafter {text} (said once; later ones are counted)")


def _may_draft(request: Request) -> bool:
    """Return True if the next row of an admitted request may verify drafted tokens."""
    return (
        request.frontier is None
        and request.is_decoding
        and not (request.is_hidden or request.failures)
    )


def _waits(request: Request) -> bool:
    """Return True if an LS request waits for its first token."""
    return (
        request.priority <= Priority.LS and not request.num_output_tokens and not request.is_hidden
    )
