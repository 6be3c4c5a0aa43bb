"""Drafts of the model's own further layer (multi-token prediction, MTP).

The layer computes a token from the token before it and from the model's last hidden state at the
token before that. So the model hands over its last hidden states of all tokens that it commits. The
first draft after the known tokens comes from these states alone. For each further draft the layer
takes its own last state in place of the model's.

    the model     a b c d e        the tokens; its states are those at a b c d
    the layer       b c d e x y    b to e with the model's states, x with the layer's own
                            - -    drafts

Only states that the layer has not read are kept, and only the last ones. After a gap the layer
begins anew, behind the gap. Its drafts can then be worse, but no answer changes.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from qllm.drafters.model import CHUNK, Drafted, DraftModel, Terms
from qllm.drafters.protocol import DraftRequest
from qllm.models.mtp import MtpEmbedding
from qllm.runner.inference import inference
from qllm.runner.runner import TorchRunner
from qllm.runner.sampling.sampler import Sampler
from qllm.scheduler.program import Program
from qllm.types import RequestId, Sampled

MOST_STATES = CHUNK
"""Most unread states of a request. The layer begins with half of them at most, so that new ones fit
while it reads."""
MOST_STATES_OF_ALL = 8 * MOST_STATES
"""Most unread states of all requests. Above it, the request whose newest state is the oldest loses
its states."""


class UnreadStates:
    """The model's last hidden states of consecutive tokens of a request."""

    def __init__(self) -> None:
        self.begin = self.end = 0
        """Range of the tokens."""
        self._parts: deque[Tensor] = deque()

    def __len__(self) -> int:
        return self.end - self.begin

    def add(self, lo: int, x_TD: Tensor) -> None:
        """Add the states of the tokens from `lo` on. They replace all later ones.

        Args:
            lo: First token. If it does not follow the others, the others are dropped.
            x_TD: States, which are copied.
        """
        skipped = max(0, len(x_TD) - MOST_STATES)
        lo, x_TD = lo + skipped, x_TD[skipped:].clone()
        if self.begin <= lo < self.end:
            self._parts = deque([torch.cat([*self._parts])[: lo - self.begin]])
        elif lo != self.end:
            self._parts.clear()
            self.begin = lo
        self._parts.append(x_TD)
        self.end = lo + len(x_TD)
        self.drop_before(self.end - MOST_STATES)

    def drop_before(self, begin: int) -> None:
        """Drop the states of the tokens before `begin`."""
        while self.begin < begin:
            first = self._parts.popleft()
            num = min(len(first), begin - self.begin)
            self.begin += num
            if num < len(first):
                rest = first[num:]
                if len(rest) < num:
                    rest = rest.clone()  # frees the memory of the others
                self._parts.appendleft(rest)

    def of(self, lo: int, hi: int) -> Tensor:
        """Return the states [T, D] of the tokens [lo, hi)."""
        return torch.cat([*self._parts])[lo - self.begin : hi - self.begin]


class _Predicted(Drafted):
    """A request in the layer: its `Drafter`."""

    num_read = 0
    """Number of first tokens that the last pass over the model's states had computed. If KV was
    dropped since, fewer are computed."""
    num_begins = 0
    """Number of times that the layer has begun since it finished a pass over the model's states."""
    last_1D: Tensor | None = None
    """The layer's own last hidden state."""


class _PlacedSampler(Sampler):
    """A sampler whose requests begin behind the first token.

    Args:
        requests: The requests, which know where they begin.
    """

    def __init__(self, requests: Mapping[RequestId, Drafted]) -> None:
        super().__init__()
        self._drafted = requests

    def sample(
        self,
        logits_BV: Tensor,
        request_ids: Sequence[RequestId],
        positions: Sequence[int],
        outputs: Sequence[Sequence[int]],
    ) -> list[Sampled]:
        """See `Sampler`. The random numbers are those of the tokens' places in the request."""
        pairs = zip(request_ids, positions, strict=True)
        places = [self._drafted[i].first + at for i, at in pairs]
        return super().sample(logits_BV, request_ids, places, outputs)


class MtpLayer(DraftModel):
    """The model's further layer, as a draft model of one layer.

    Args:
        runner: Runner of the layer.
        embedding: Input of the layer.
        model: Runner of the whole model, which hands over its states.
        terms: Parts and limits of the engine.
    """

    def __init__(
        self, runner: TorchRunner, embedding: MtpEmbedding, model: TorchRunner, terms: Terms
    ) -> None:
        super().__init__(runner, terms)
        self._embedding, self._norms = embedding, (model.parts.norm, runner.parts.norm)
        runner.sampler = _PlacedSampler(self._drafted)
        self._unread: dict[RequestId, UnreadStates] = {}
        """Unread states. The request whose newest state is the oldest comes first."""
        self._num_unread = 0
        model.on_hidden = self._take
        runner.on_hidden = self._take_own

    def __call__(self, request: DraftRequest) -> _Predicted:
        """Return the drafter of a request."""
        one = self._drafted[request.request_id] = _Predicted(self, request)
        return one

    def forget(self, request_id: RequestId) -> None:
        """Free all data of a request."""
        super().forget(request_id)
        self._drop_states(request_id)

    def propose(self, one: Drafted, token_ids: Sequence[int], most: int) -> list[int]:
        """Return the tokens that the layer chooses next; none if states of the model are missing.

        Args:
            one: The request.
            token_ids: Its tokens.
            most: Most tokens to return.
        """
        states = self._unread.get(one.request_id)
        if states is None or states.end != len(token_ids) - 1:
            return []
        assert isinstance(one, _Predicted)
        num_read = states.begin + 1 - one.first
        if one.first and 0 <= num_read <= min(one.num_read, one.num_computed):
            one.num_computed = num_read  # the rest was computed with the layer's own states
            del one.ids[one.num_same :]
        else:
            self._begin_again(one, states)
        return super().propose(one, token_ids, most)

    def _begin_again(self, one: _Predicted, states: UnreadStates) -> None:
        """Begin a request anew, with the last states.

        If the layer could not read them before others came in their place, it begins with half as
        many.
        """
        one.num_begins += 1
        self._keep_last(states, max(1, MOST_STATES >> one.num_begins))
        self._drop_kv(one)
        one.ids, one.num_same, one.first = [], 0, states.begin + 1

    def _keep_last(self, states: UnreadStates, num: int) -> None:
        before = len(states)
        states.drop_before(states.end - num)
        self._num_unread -= before - len(states)

    def _pass(self, one: Drafted) -> bool:
        """Run a pass, or continue the parked one; return True if it ended."""
        is_done, states = super()._pass(one), self._unread[one.request_id]
        if is_done and states:
            assert isinstance(one, _Predicted)
            self._keep_last(states, states.end - (one.first + one.num_computed - 1))
            one.num_read, one.num_begins = one.num_computed, 0
        return is_done

    def _before_run(self, one: Drafted, program: Program) -> None:
        """Give the layer the states of the tokens before those of a pass."""
        states, row = self._unread[one.request_id], program.rows[0]
        lo, hi = (one.first - 1 + place for place in (row.lo, row.hi))
        of_model, of_layer = self._norms
        assert isinstance(one, _Predicted)
        with inference():
            if hi <= states.end:
                self._embedding.states_TD = of_model(states.of(lo, hi))
            else:
                assert one.last_1D is not None
                self._embedding.states_TD = of_layer(one.last_1D)

    def _take(self, request_id: RequestId, lo: int, x_TD: Tensor) -> None:
        """Keep the model's last hidden states of the tokens from `lo` on."""
        states = self._unread.pop(request_id, None) or UnreadStates()
        self._unread[request_id] = states  # the last one
        before = len(states)
        states.add(lo, x_TD)
        self._num_unread += len(states) - before
        while self._num_unread > MOST_STATES_OF_ALL:
            self._drop_states(next(iter(self._unread)))

    def _take_own(self, request_id: RequestId, lo: int, x_TD: Tensor) -> None:
        """Keep the layer's own last hidden state."""
        one = self._drafted[request_id]
        assert isinstance(one, _Predicted)
        one.last_1D = x_TD[-1:].clone()

    def _drop_states(self, request_id: RequestId) -> None:
        states = self._unread.pop(request_id, None)
        if states is not None:
            self._num_unread -= len(states)
