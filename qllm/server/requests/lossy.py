"""Lossy answers of a server: the candidate of a request, audits of answers, and their metrics.

request -> `pick` -> an answer of one or more candidates -> sent
                                 |
                                 `-> chosen for an audit? -> the whole model reads it, as BE
                                                          -> so do closed candidates
"""

import asyncio
import itertools
import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from qllm.errors import (
    ConfigError,
    EngineClosedError,
    InvalidRequestError,
    QllmError,
    QueueFullError,
    RequestFailedError,
    naming,
)
from qllm.fleet.audit import choices, num_differing
from qllm.fleet.choice import Candidate, Choice, Rules
from qllm.fleet.lossy import Course, Lossy, check_sampling
from qllm.frontend.handle import Handle, Result, all_ended
from qllm.models.depth_profile import DepthEntry, DepthProfile, read
from qllm.server.config import ServerConfig
from qllm.server.http.errors import ApiError
from qllm.server.requests.ask import Ask
from qllm.server.requests.front import Front
from qllm.types import Logprobs, Priority, SamplingParams

MOST_AUDITS = 32
"""Open audits at which a whole model gets the lossy requests, until there are fewer."""
AT_ONCE = 2
"""Most audits that engines compute at once."""
AGAIN_S = 1.0
"""Seconds after which an audit asks an engine again that could not take it."""

_log = logging.getLogger("qllm.server")


def _candidate(front: Front, entry: DepthEntry) -> Candidate:
    """Return a model as the choice sees it."""
    return Candidate(
        name=front.model_name,
        model=front.config.model,
        depth=entry.depth,
        is_whole=front.is_whole,
        tokens_per_s=entry.batch_per_s,
        agreement=entry.agreed,
        low=entry.low,
    )


class LossyFronts:
    """The candidates of a server, and the audits of their answers. Lives on one event loop.

    Args:
        fronts: The models of the server, the first model first. All are candidates.
        config: Settings: the bound, and the share of audits.

    Raises:
        ConfigError: A model has no profile, or no entry for its depth; there is no whole model; or
            an engine cannot give requests away.
        ModelError: A model's files cannot be found.
    """

    def __init__(self, fronts: Sequence[Front], config: ServerConfig) -> None:
        entries = entries_of([front.config for front in fronts])
        choice = Choice(
            [_candidate(*both) for both in zip(fronts, entries, strict=True)],
            Rules(max_disagreement=config.max_disagreement),
        )
        self._kept = choice.candidates
        by_name = {front.model_name: front for front in fronts}
        self._fronts = {one.name: by_name[one.name] for one in self._kept}
        wholes = [one for one in self._kept if one.is_whole]
        self._reference = {
            one.name: next((x for x in wholes if x.model == one.model), wholes[0]).name
            for one in self._kept
        }
        """The whole model that audits each candidate: its own, or else the first."""
        self._share = config.audit_share
        token_s = {
            front.model_name: 1 / entry.prompt_per_s
            for front, entry in zip(fronts, entries, strict=True)
        }
        self._lossy = Lossy(choice, self._fronts, token_s, self._on_move, self._on_end)
        self._loop: asyncio.AbstractEventLoop | None = None
        """Event loop of the server, after `start`."""
        self._audits: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._numbers = itertools.count(1)
        self._tokens = dict.fromkeys(self._fronts, 0)
        """Tokens of lossy answers by candidate."""
        self._tell()

    def start(self) -> None:
        """Let audits run on the running event loop."""
        self._loop = asyncio.get_running_loop()

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and an answer: those that each candidate can have, less one.

        An audit makes one more token.
        """
        return min(front.max_model_len for front in self._fronts.values()) - 1

    def lines(self) -> list[str]:
        """Return the lines for the log at start."""
        told = [
            f"{one.name} ({'whole' if one.is_whole else f'{one.agreement:.1%} agree'})"
            for one in self._kept
        ]
        bound = self._lossy.bound
        return [
            f"lossy    {', '.join(told)}; at most {bound:.1%} of the tokens may differ, and "
            f"{self._share:.0%} of the answers are audited"
        ]

    def told(self) -> dict[str, dict[str, Any]]:
        """Return the standing of each candidate by name, for the live page."""
        return {
            name: {"open": standing.is_open, "bound": standing.bound, "tokens": self._tokens[name]}
            for name, standing in self._lossy.standing().items()
        }

    # -- requests

    def pick(self, max_tokens: int) -> Front:
        """Return the front of the candidate that gets a request now.

        A whole model gets it while the candidate is down, or while audits are behind.

        Args:
            max_tokens: Tokens that the request asks for; 0 if it names no number.

        Raises:
            ApiError: 400, the request does not say how long the answer may become.
        """
        if max_tokens < 1:
            raise ApiError(
                400,
                "lossy=true needs max_tokens of at least 1, so that each candidate has room for "
                "the whole answer",
                param="max_tokens",
            )
        found = self._fronts[self._lossy.current]
        if len(self._audits) >= MOST_AUDITS or found.unavailable() is not None:
            return self._fronts[self._reference[found.model_name]]
        return found

    def check(self, params: SamplingParams, ask: Ask) -> None:
        """Refuse a request whose answer no audit could judge.

        Args:
            params: Settings of sampling.
            ask: The request.

        Raises:
            InvalidRequestError: A setting does not go with lossy answers.
        """
        if ask.num_choices != 1 or ask.opened is not None:
            what = f"{ask.num_choices} answers (prompts * n)"
            if ask.opened is not None:
                what = "a prompt in pieces"
            raise InvalidRequestError(
                f"lossy=true with {what}: a lossy request has one whole prompt and one answer; "
                "send several requests, or leave out lossy"
            )
        check_sampling(params)

    def begin(self, handle: Handle, ask: Ask, front: Front) -> None:
        """Follow a lossy answer that was submitted just now.

        Raises:
            InvalidRequestError: A candidate could not hold it.
        """
        num, most, max_tokens = len(handle.prompt_token_ids), self.longest, ask.max_tokens or 1
        if num + max_tokens > most:
            raise InvalidRequestError(
                f"a prompt of {num} tokens and max_tokens={max_tokens} are more than the {most} "
                "that every candidate of lossy answers can hold; make them shorter, or leave out "
                "lossy"
            )
        self._lossy.begin(handle, front.model_name)

    # -- audits

    def _on_move(self, name: str) -> None:
        self._fronts[name].metrics.losses["switches"].inc()

    def _on_end(self, course: Course) -> None:
        """Take an answer that has ended. Called on the thread that delivered its last token."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the server has ended
                self._loop.call_soon_threadsafe(self._ended, course)

    def _ended(self, course: Course) -> None:
        """Count an answer, and begin its audit if it is chosen for one."""
        parts = course.parts()
        for n, (name, begin, end) in enumerate(parts):
            told = self._fronts[name].metrics.losses
            told["requests"].inc(int(n + 1 == len(parts)))
            told["tokens"].inc(end - begin)
            self._tokens[name] += end - begin
        self._tell()
        is_cut = any(self._lossy.is_cut(name) for name, *_ in parts)
        if not is_cut and len(self._audits) >= MOST_AUDITS:
            return  # closed candidates read a later answer
        if self._lossy.is_audited(course, self._share):
            task = asyncio.get_running_loop().create_task(self._audit(course))
            self._audits.add(task)
            task.add_done_callback(self._audits.discard)

    async def _audit(self, course: Course) -> None:
        """Let whole models read an answer, and closed candidates too, and count what differs.

        If the answer cannot be read, all tokens of candidates that are cut count as different: a
        bound that cannot be measured does not hold.
        """
        parts = [part for part in course.parts() if self._lossy.is_cut(part[0])]
        async with self._turn:
            try:
                found = await self._compared(course, parts)
            except QllmError as error:
                _log.warning("an audit of a lossy answer failed: %s", error)
                found = [(name, end - begin, end - begin) for name, begin, end in parts]
        for name, num, differing in found:
            told = self._fronts[name].metrics.losses
            told["audits"].inc()
            told["audited_tokens"].inc(num)
            told["differing_tokens"].inc(differing)
            self._lossy.audited(name, num, differing)
        self._tell()

    async def _compared(
        self, course: Course, parts: Sequence[tuple[str, int, int]]
    ) -> list[tuple[str, int, int]]:
        """Return candidate, positions and differing positions of each part and closed candidate."""
        prompt = course.handle.prompt_token_ids
        ids, begin = [*prompt, *course.handle.token_ids], len(prompt)
        closed = [x for x in self._lossy.shadowed if x not in {part[0] for part in parts}]
        names = [self._reference[name] for name in (*(part[0] for part in parts), *closed)]
        scores = {name: await self._read(self._fronts[name], ids) for name in dict.fromkeys(names)}
        found = []
        for name, first, end in parts:
            own = scores[self._reference[name]][: begin + end]
            found.append((name, *num_differing(ids[: begin + end], own, begin + first)))
        for name in closed:
            try:
                own = await self._read(self._fronts[name], ids)
            except QllmError as error:  # it stays closed, and the others are judged without it
                _log.warning("%r could not read an answer: %s", name, error)
                continue
            chosen = [*prompt, *choices(own, begin)]
            found.append((name, *num_differing(chosen, scores[self._reference[name]], begin)))
        return found

    async def _read(self, front: Front, ids: list[int]) -> Sequence[Logprobs | None]:
        """Let a model read tokens as BE; return its log-probabilities of each.

        An audit caches no KV: no client waits for it, and its pages would displace those of
        requests.

        Raises:
            RequestFailedError: The model's engines died too often.
        """
        how: dict[str, Any] = {
            "sampling": SamplingParams(temperature=0, prompt_logprobs=1),
            "request_id": f"audit-{next(self._numbers)}",
            "cache_ttl_s": 0,
        }
        while True:
            submit = partial(front.engine.submit, ids, Priority.BE, 1, **how)
            try:
                handle = await front.in_thread(Priority.BE, submit)
                break
            except (EngineClosedError, QueueFullError):
                if front.gave_up is not None:
                    raise
                await asyncio.sleep(AGAIN_S)
        front.keep(handle)
        try:
            await all_ended([handle])
        finally:
            handle.cancel()
        # a result of many tokens is not made on the event loop
        result: Result = await front.in_thread(Priority.BE, handle.result, 0)
        if result.prompt_logprobs is None:
            raise RequestFailedError(f"the audit has ended ({result.finish_reason.value})")
        return result.prompt_logprobs

    async def close(self) -> None:
        """End all audits."""
        for task in list(self._audits):
            task.cancel()
        if self._audits:
            await asyncio.wait(self._audits, timeout=30)

    def _tell(self) -> None:
        """Set the gauges of all candidates."""
        for name, told in self._lossy.standing().items():
            losses = self._fronts[name].metrics.losses
            losses["open"].set(told.is_open)
            losses["disagreement_bound"].set(told.bound)


def entries_of(configs: Sequence[ServerConfig]) -> list[DepthEntry]:
    """Return the entry of each model in the profile of its depths. No model is loaded for this.

    Args:
        configs: Settings of each model, those of the first model first.

    Raises:
        ConfigError: A profile, or an entry, is missing.
        ModelError: A model's files cannot be found.
    """
    profiles: dict[str, DepthProfile] = {}
    found = []
    if (file := configs[0].depth_profile) is not None:
        with naming("depth_profile", file):
            file.open("rb").close()
    for config in configs:
        where = config.model
        if where not in profiles:
            profiles[where] = read(where, file if where == configs[0].model else None)
        depth = config.engine.get("depth") or profiles[where].layers
        entry = next((one for one in profiles[where].depths if one.depth == depth), None)
        if entry is None:
            has = ", ".join(str(one.depth) for one in profiles[where].depths)
            raise ConfigError(
                f"the profile of {where!r} has no depth {depth}, which {config.model_name!r} has; "
                f"it has {has}; measure it with qllm profile {where} --depths --candidates {depth}"
            )
        found.append(entry)
    return found
