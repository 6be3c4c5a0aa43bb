"""Sessions of agents. A turn's prompt is the last prompt, the last answer, and a tool's result.

Source: vLLM's post on AgentX (2026-09-08), quoted in vllm-project/vllm#57103. Medians: 43 turns a
session, 142,000 tokens in and 444 out, more than 96 % of a prompt seen before, subagents in 44 % of
the sessions. We read 142,000 as the prompt of the last turn, and 444 as the answer of one turn. A
turn in the source is one request. Then all prompts have about 130 times the tokens of all answers.
vLLM with Mooncake (2026-05-06) has a factor of 131. Spreads, tool waits, the system prompt and the
number and size of subagents are ours.
"""

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

from qllm.types import Priority
from qllm.workloads.lengths import Lengths, around, between
from qllm.workloads.spec import Arrival, RequestSpec, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Sessions:
    """A rule that makes sessions."""

    system: int
    """Tokens of the system prompt and tools, at the start of every session and subagent."""
    question: Lengths
    """Tokens of the user's question, once per session and subagent."""
    result: Lengths
    """Tokens of a tool's result, which the next turn adds to the prompt."""
    answer: Lengths
    """Tokens of a turn's answer."""
    context: int
    """Most tokens of prompt and answer together. A session ends before it would exceed this number.
    """
    turns: Lengths
    """Number of turns in a session, without the turns of subagents."""
    wait_ms: Lengths
    """Milliseconds that a tool takes, from an answer to the next turn."""
    with_subagents: float
    """Share of the sessions with subagents."""
    subagents: Lengths
    """Number of subagents in such a session, one after the other. The agent waits for each
    subagent.
    """
    subagent_turns: Lengths

    def scaled(self, factor: float, wait_factor: float = 1.0) -> Self:
        """Return the same rule with scaled numbers of tokens, and scaled waits."""
        return replace(
            self,
            system=max(1, round(self.system * factor)),
            question=self.question.scaled(factor),
            result=self.result.scaled(factor),
            answer=self.answer.scaled(factor),
            context=round(self.context * factor),
            wait_ms=self.wait_ms.scaled(wait_factor),
        )

    def session(
        self,
        name: str,
        rng: random.Random,
        *,
        at_s: float = 0.0,
        first: Turn | None = None,
        subagents: Priority = Priority.BE,
    ) -> list[RequestSpec]:
        """Return the turns of one session and its subagents, in order.

        Args:
            name: Prefix of the turns' names.
            rng: Source of every draw.
            at_s: Least time of every turn.
            first: Place of the first turn after another session; None if the session follows none.
            subagents: Class of the subagents' turns. The agent's own turns are LS.
        """
        count = self.turns.at(rng.uniform(0, 100))
        agent = list(self._turns(name, rng, count, at_s, Priority.LS, first))
        calls: set[int] = set()
        if rng.random() < self.with_subagents:
            most = self.subagents.at(rng.uniform(0, 100))
            calls = set(rng.sample(range(len(agent) - 1), min(len(agent) - 1, most)))
        out: list[RequestSpec] = []
        for number, turn in enumerate(agent):
            if turn.follows is not None and out:  # follows the subagent's last turn, if called
                turn = replace(turn, follows=turn.follows._replace(after=out[-1].name))
            out.append(turn)
            if number in calls:
                count = self.subagent_turns.at(rng.uniform(0, 100))
                called = Turn(turn.name, 0.0)
                out += self._turns(f"{turn.name}.sub", rng, count, at_s, subagents, called)
        return out

    def _turns(
        self,
        name: str,
        rng: random.Random,
        count: int,
        at_s: float,
        priority: Priority,
        first: Turn | None,
    ) -> Iterator[RequestSpec]:
        """Yield the turns of one agent, until their context is full."""
        prompt, follows = self.system + self.question.at(rng.uniform(0, 100)), first
        for number in range(count):
            answer = self.answer.at(rng.uniform(0, 100))
            if prompt + answer > self.context:
                return
            turn = f"{name}.{number}"
            yield RequestSpec(
                at_s=at_s,
                priority=priority,
                num_prompt_tokens=prompt,
                max_tokens=answer,
                name=turn,
                num_shared=self.system,
                follows=follows,
            )
            follows = Turn(turn, self.wait_ms.at(rng.uniform(0, 100)) / 1000, extends=turn)
            prompt += answer + self.result.at(rng.uniform(0, 100))


AGENTS = Sessions(
    system=18_000,
    question=around(500, 1.0),
    result=around(1100, 1.2),
    answer=around(444, 0.8),
    context=200_000,
    turns=around(44, 0.5),  # a few sessions end early, with a full context
    wait_ms=around(1000, 1.2),
    with_subagents=0.44,
    subagents=between(1, 3),
    subagent_turns=around(8, 0.5),
)


class Conversations:
    """The requests of a workload. Each is held until the request that it follows has ended.

    Args:
        requests: Requests with their tokens, in order of time.
    """

    def __init__(self, requests: Iterable[Arrival]) -> None:
        self.first: list[Arrival] = []
        """Requests that follow no other request."""
        self._held = defaultdict[str, list[Arrival]](list)
        self._extended = set[str]()
        self._said: dict[str, tuple[int, ...]] = {}
        for request in requests:
            if request.follows is None:
                self.first.append(request)
            else:
                self._held[request.follows.after].append(request)
                self._extended.add(request.follows.extends)

    def extends(self, name: str) -> bool:
        """Return True if a later prompt begins with the prompt and answer of the request `name`."""
        return name in self._extended

    def holds(self, name: str) -> bool:
        """Return True if a request waits for the end of the request `name`."""
        return name in self._held

    def ended(self, request: Arrival, answer: Sequence[int], at_s: float) -> list[Arrival]:
        """Return the requests that follow an ended one, with due times and whole prompts.

        Args:
            request: Request that has ended, with its whole prompt.
            answer: Output tokens of this request.
            at_s: Time at which this request ended, in seconds.
        """
        if request.name in self._extended:
            self._said[request.name] = (*request.token_ids, *answer)
        out = []
        for held in self._held.pop(request.name, ()):
            assert held.follows is not None
            said = self._said.pop(held.follows.extends, ())
            ids = (*said, *held.token_ids)
            out.append(replace(held, at_s=at_s + held.follows.wait_s, token_ids=ids))
        return out
