"""Drafters whose proposals are right, wrong or random, whatever the model says."""

import math
import random
from collections.abc import Callable, Mapping, Sequence

import pytest
from torch import nn

from qllm import QLLMEngine
from qllm.drafters.choose import EXIT
from qllm.drafters.exit import Exit
from qllm.drafters.protocol import DraftRequest, MakeDrafter
from qllm.frontend.handle import Result
from qllm.runner.kv import SlabKV
from tests.support.inside import loop_of

Right = Callable[[Sequence[int]], int | None]
"""A function of all tokens so far that returns the next one, or None if it is not known."""


def next_of(streams: Mapping[tuple[int, ...], Sequence[int]]) -> Right:
    """The next token of a stream, by prompt.

    Args:
        streams: Tokens of each answer, by the tokens of its prompt.
    """
    whole = sorted([*prompt, *stream] for prompt, stream in streams.items())

    def right(token_ids: Sequence[int]) -> int | None:
        known = list(token_ids)
        found = (ids for ids in whole if len(ids) > len(known) and ids[: len(known)] == known)
        return next((ids[len(known)] for ids in found), None)

    return right


class Guess:
    """A drafter that proposes the right token with a probability, and else another one."""

    def __init__(self, right: Right, vocab: int, share: float, seed: int) -> None:
        self._right, self._vocab, self._share = right, vocab, share
        self._rng = random.Random(seed)

    def propose(self, token_ids: Sequence[int], most: int) -> list[int]:
        known, found = list(token_ids), list[int]()
        for _ in range(most):
            token = self._right(known)
            if token is None:
                break
            known.append(token)
            is_right = self._rng.random() < self._share
            found.append(token if is_right else (token + 1) % self._vocab)
        return found


class Random:
    """A drafter that proposes any tokens, a random number of them."""

    def __init__(self, vocab: int, seed: int) -> None:
        self._vocab, self._rng = vocab, random.Random(seed)

    def propose(self, token_ids: Sequence[int], most: int) -> list[int]:
        return [self._rng.randrange(self._vocab) for _ in range(self._rng.randrange(most + 1))]


SHARES = {"oracle": 1.0, "wrong": 0.0, "half": 0.6}


OUTPUTS = ("o_proj", "down_proj", "w2", "out_proj", "output_linear")
"""Parts of the names of weights whose products are added to the residual stream."""


def quieten(model: nn.Module, layer: int, factor: float = 0.25) -> nn.Module:
    """Let the layers from `layer` on add less, so that tokens of an early layer are often right."""
    for name, weight in model.named_parameters():
        _, _, place = name.partition("layers.")
        is_late = place and int(place.partition(".")[0]) >= layer
        if is_late and any(output in name for output in OUTPUTS):
            weight.data.mul_(factor)
    return model


def maker(name: str, right: Right, vocab: int) -> MakeDrafter | Exit:
    """The maker of `oracle`, `wrong`, `half` or `random` drafters, or the layer of `exit:E`."""
    if name.startswith(EXIT):
        return Exit(int(name.removeprefix(EXIT)))

    def make(request: DraftRequest) -> Guess | Random:
        seed = request.request_id
        if name == "random":
            return Random(vocab, seed)
        return Guess(right, vocab, SHARES[name], seed)

    return make


def counts(results: Sequence[Result]) -> tuple[int, int]:
    """Accepted and rejected drafts of all results."""
    found = [r.metrics for r in results]
    accepted = sum(m.num_accepted_drafts for m in found)
    return accepted, sum(m.num_rejected_drafts for m in found)


def poison_rejected(patch: pytest.MonkeyPatch) -> None:
    """Overwrite the KV of rejected drafts with NaN after every step."""
    commit = SlabKV.commit

    def poisoned(kv: SlabKV, num_tokens: int) -> None:
        written = kv.written
        commit(kv, num_tokens)
        for slab in kv.slabs if written > num_tokens else ():
            for t in slab or ():
                t.narrow(2, num_tokens, written - num_tokens).fill_(math.nan)

    patch.setattr(SlabKV, "commit", poisoned)


def always_draft(engine: QLLMEngine, make: MakeDrafter, most: int = 4) -> None:
    """Draft from now on, as many tokens as are proposed, however long that takes."""
    engine.call(lambda: loop_of(engine).draft_with(make, most, warn=print, weighs=False))
    drafts = loop_of(engine).drafts
    assert drafts is not None
    drafts._now_ns = lambda: 0


class Told:
    """A drafter that knows the answer of each seed, and gives every fifth token wrong."""

    def __init__(self, request: DraftRequest, answers: Mapping[int | None, Sequence[int]]) -> None:
        self._num_prompt, self._answer = request.num_prompt_tokens, answers[request.sampling.seed]

    def propose(self, token_ids: Sequence[int], most: int) -> list[int]:
        at = len(token_ids) - self._num_prompt
        found = enumerate(self._answer[at : at + most], at)
        return [token ^ (place % 5 == 4) for place, token in found]
