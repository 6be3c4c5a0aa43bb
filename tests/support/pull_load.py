"""Random requests of a front end that fetches its tokens."""

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from qllm.errors import QueueFullError
from qllm.ingress import Cancel
from qllm.ingress.front_end import FrontEndRings, TokenAt
from qllm.ingress.layout import NUMBER_BITS
from qllm.types import FinishReason, RequestId
from tests.support.pulled import submission, tokens_of
from tests.support.waiting import wait_for


class Load:
    """Requests of one front end, and everything that comes back, in order.

    Args:
        front_end: Puts and takes.
        rng: Sizes, classes and cancels.
        between: Called again and again while it waits.
    """

    def __init__(
        self, front_end: FrontEndRings, rng: random.Random, between: Callable[[], Any]
    ) -> None:
        self.front_end, self.rng, self.between = front_end, rng, between
        self.asked: dict[int, int] = {}
        self.cancelled: set[int] = set()
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.ends: dict[int, FinishReason] = {}
        self.num_full = self.num_records = 0

    def run(self, num_requests: int, cancels: float = 0.1, in_flight: int = 100) -> None:
        for n in range(num_requests):
            self.submit(self.front_end.number << NUMBER_BITS | n)
            if self.rng.random() < cancels:
                victim = self.rng.choice(list(self.asked)[-5:])
                self.cancelled.add(victim)
                self.front_end.cancel(Cancel(RequestId(victim)))
            self.until(lambda: len(self.asked) - len(self.ends) < in_flight)
        self.until(lambda: len(self.ends) == len(self.asked))

    def submit(self, request_id: int) -> None:
        self.asked[request_id] = self.rng.choice([1, 2, 5, 12])
        prompt, priority = self.rng.choice([1, 30, 200]), self.rng.choice([0, 10, 10])
        item = submission(request_id, priority, prompt, self.asked[request_id])
        while True:
            try:
                return self.front_end.submit(item)
            except QueueFullError:
                self.num_full += 1
                self.look()

    def until(self, condition: Callable[[], bool]) -> None:
        wait_for(condition, meanwhile=self.look, what=f"of {len(self.asked)} some did not end")

    def look(self) -> None:
        self.between()
        for record in self.front_end.receive():
            self.num_records += 1
            if isinstance(record, TokenAt):
                request_id = record.sampled.request_id
                assert request_id not in self.ends, "a token after the end"
                self.tokens[request_id].append(record.sampled.token_id)
            else:
                assert record.request_id not in self.ends, "an end twice"
                self.ends[record.request_id] = record.reason

    def check(self) -> None:
        """Each token once and in order; only who was cancelled lacks some."""
        for request_id, count in self.asked.items():
            wanted, found = tokens_of(request_id, count), self.tokens[request_id]
            if self.ends[request_id] is FinishReason.LENGTH:
                assert found == wanted
            else:
                assert self.ends[request_id] is FinishReason.CANCELLED
                assert request_id in self.cancelled
                assert found == wanted[: len(found)]
