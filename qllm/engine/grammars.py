"""Grammars are built beside the engine loop: a request that has one arrives when it is built."""

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from qllm.errors import InvalidRequestError
from qllm.grammar import Matcher, Vocabulary
from qllm.ingress import Call, Cancel, Ingress, Item, Submission, Update
from qllm.ingress.protocol import ArrivalWord
from qllm.types import Priority, RequestId


class Inbox(Ingress, Protocol):
    """A transport that takes items of this process too."""

    def put(self, item: Item) -> None:
        """Hand over an item. Callable from any thread."""
        ...


class GrammarIngress:
    """A transport that holds requests back while a thread of their class builds their grammar.

    Args:
        inner: The transport.
        vocabulary: Of the model.
        built: Where the sampler finds the grammar of a request when it is added.
    """

    def __init__(
        self, inner: Inbox, vocabulary: Vocabulary, built: dict[RequestId, Matcher]
    ) -> None:
        self._inner, self._vocabulary, self._built = inner, vocabulary, built
        self._held: dict[RequestId, Submission] = {}
        self._updates: dict[RequestId, list[Update]] = {}
        """What was asked meanwhile of requests that are held."""
        self._done: deque[tuple[RequestId, Matcher | str]] = deque()
        self._builders: dict[bool, ThreadPoolExecutor] = {}
        """By whether the class is latency-sensitive; made when there is something to build."""

    @property
    def stop(self) -> ArrivalWord:
        """The word that arrivals lower."""
        return self._inner.stop

    def wait(self, timeout_ns: int | None) -> None:
        """Sleep until something arrives or the time has passed."""
        self._inner.wait(timeout_ns)

    def drain(self) -> list[Item]:
        """Take what has arrived and needs no grammar, and what has got one."""
        items: list[Item] = []
        self._built.clear()  # of requests that were refused
        for item in self._inner.drain():
            if isinstance(item, Submission) and item.wrong is None and self._hold(item):
                continue
            if isinstance(item, Update) and item.request_id in self._held:
                self._updates.setdefault(item.request_id, []).append(item)
                continue
            if isinstance(item, Cancel) and (held := self._held.pop(item.request_id, None)):
                items.append(_without(held))
                self._updates.pop(item.request_id, None)
            items.append(item)
        while self._done:
            number, found = self._done.popleft()
            held = self._held.pop(number, None)
            if held is None:  # cancelled
                continue
            if isinstance(found, Matcher):
                self._built[number] = found
                items.append(held)
            else:
                items.append(replace(_without(held), wrong=found))
            items += self._updates.pop(number, ())
        return items

    @property
    def held(self) -> tuple[Submission, ...]:
        """Requests whose grammar is not built yet."""
        return tuple(self._held.values())

    def close(self) -> None:
        """Build nothing more; nothing is waited for."""
        for builder in self._builders.values():
            builder.shutdown(wait=False, cancel_futures=True)

    def _hold(self, item: Submission) -> bool:
        if item.sampling.structured_outputs is None:
            return False
        self._held[item.request_id] = item
        is_ls = item.priority < Priority.BE
        if is_ls not in self._builders:
            name = f"qllm-grammar-{'LS' if is_ls else 'BE'}"
            self._builders[is_ls] = ThreadPoolExecutor(1, name)
        self._builders[is_ls].submit(self._build, item)
        return True

    def _build(self, item: Submission) -> None:
        form = item.sampling.structured_outputs
        assert form is not None
        found: Matcher | str
        try:
            found = self._vocabulary.matcher(form)
        except InvalidRequestError as error:
            found = str(error)
        except BaseException as error:  # noqa: BLE001 - fails this request, not the engine
            found = f"{type(error).__name__}: {error}"
        self._done.append((item.request_id, found))
        self._inner.put(Call(_nothing, _ignore))  # wakes the loop


def _without(item: Submission) -> Submission:
    return replace(item, sampling=replace(item.sampling, structured_outputs=None))


def _nothing() -> None:
    """What the loop is asked for when it is only to look."""


def _ignore(*_: object) -> None:
    """Nobody waits for the answer."""
