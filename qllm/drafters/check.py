"""A check of a drafter before it serves: `check_drafter` runs it in an engine of the model `tiny`.

The engine answers the same requests twice, without drafts and with the drafter: LS and BE requests,
greedy and sampled, with a prediction, with a grammar, and with a stop string. The answers must be
equal. The drafter must not raise, and must propose token ids.
"""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from statistics import median
from typing import Any, NamedTuple

from qllm.drafters.protocol import Drafter, DraftRequest, MakeDrafter
from qllm.errors import ConfigError, InvariantError, shown
from qllm.types import MOST_DRAFTS, NS_PER_MS, SamplingParams, StructuredOutputs

CODE = "def area(width, height):\n    return width * height\n"
FORM = StructuredOutputs(
    json={
        "type": "object",
        "properties": {"identifier": {"type": "integer"}, "is_available": {"type": "boolean"}},
        "required": ["identifier", "is_available"],
    }
)
REQUESTS: tuple[tuple[str, str, SamplingParams], ...] = (
    ("LS", "a b c a b c a b c", SamplingParams(temperature=0, ignore_eos=True)),
    ("BE", "one two one two one two", SamplingParams(temperature=0, ignore_eos=True)),
    ("LS", f"Rename width:\n{CODE}", SamplingParams(temperature=0, prediction=CODE)),
    ("LS", CODE, SamplingParams(temperature=0.8, seed=1, ignore_eos=True)),
    ("LS", "Item: ", SamplingParams(temperature=0, structured_outputs=FORM)),
    ("BE", f"{CODE}{CODE}", SamplingParams(temperature=0, stop=("return",))),
    ("LS", "x", SamplingParams(temperature=1, seed=2, repetition_penalty=1.2)),
)
"""Class, prompt and settings of each request."""
NEW = 48
"""Most tokens of an answer."""


class Report(NamedTuple):
    """Counts and times that `check_drafter` saw."""

    num_requests: int
    num_tokens: int
    """Number of tokens of all answers."""
    accepted: int
    """Number of drafted tokens that the model chose too."""
    rejected: int
    num_slow: int
    """Number of calls that took more than 2 ms. Their proposals were dropped."""
    call_ms: float
    """Median time of a call in ms."""
    longest_call_ms: float

    @property
    def accepted_share(self) -> float:
        """Accepted drafts as a part of all verified drafts; 0 without any."""
        return self.accepted / max(1, self.accepted + self.rejected)


class _Timed:
    """A drafter whose calls are timed."""

    def __init__(self, drafter: Drafter, times_ns: list[int]) -> None:
        self._drafter, self._times_ns = drafter, times_ns

    def propose(self, token_ids: Sequence[int], most: int) -> Iterable[int]:
        """See `Drafter`."""
        begin_ns = time.perf_counter_ns()
        try:
            return list(islice(self._drafter.propose(token_ids, most), most))
        finally:
            self._times_ns.append(time.perf_counter_ns() - begin_ns)


def check_drafter(make: MakeDrafter, *, most: int = 4) -> Report:
    """Run a drafter in an engine, and look for what it must not do.

    Args:
        make: Class of the drafter, or a function that returns the drafter of a request.
        most: Most drafted tokens of a step, 1 to 16. The drafter is always asked for so many.

    Raises:
        ConfigError: The drafter raised, or proposed what is no token id; the message says what.
        InvariantError: The drafter changed an answer. This is our own bug.
    """
    if not callable(make) or not 1 <= most <= MOST_DRAFTS:
        raise ConfigError(
            f"make={shown(make)}, most={shown(most)} must be a class of drafters, or a function "
            f"that returns one, and an integer in [1, {MOST_DRAFTS}]"
        )
    from qllm.llm import QLLMEngine

    times_ns: list[int] = []
    said: list[str] = []

    def timed(request: DraftRequest) -> Drafter:
        return _Timed(make(request), times_ns)

    with QLLMEngine.from_pretrained(
        "tiny",
        run_in="thread",
        conformance=False,
        draft="lookup",  # so that predictions are read
    ) as engine:
        client: Any = engine.client
        loop = client.loop
        engine.call(lambda: setattr(loop, "drafts", None))
        expected = _answers(engine)
        engine.call(lambda: loop.draft_with(timed, most, said.append, weighs=False))
        found = _answers(engine)
        faults = Counter(engine.stats()["drafts"]["faults"])
    num_slow = faults.pop("slow", 0)
    if faults:
        raise ConfigError(next(text for text in said if "took longer" not in text))
    for (_, prompt, _), one, other in zip(REQUESTS, found, expected, strict=True):
        if (one.token_ids, one.finish_reason) != (other.token_ids, other.finish_reason):
            raise InvariantError(f"drafts changed the answer to {prompt!r}: {one!r}, {other!r}")
    return Report(
        num_requests=len(found),
        num_tokens=sum(len(r.token_ids) for r in found),
        accepted=sum(r.metrics.num_accepted_drafts for r in found),
        rejected=sum(r.metrics.num_rejected_drafts for r in found),
        num_slow=num_slow,
        call_ms=median(times_ns or [0]) / NS_PER_MS,
        longest_call_ms=max(times_ns, default=0) / NS_PER_MS,
    )


def _answers(engine: Any) -> list[Any]:
    handles = [
        engine.submit(prompt, priority, NEW, sampling=sampling)
        for priority, prompt, sampling in REQUESTS
    ]
    return [handle.result() for handle in handles]
