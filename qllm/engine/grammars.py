"""Grammars built on threads. A request with a grammar arrives once the grammar is built."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from qllm.engine.delayed import HoldingIngress, Inbox
from qllm.errors import InvalidRequestError
from qllm.grammar import Matcher, Vocabulary
from qllm.ingress import LOOK, Revision, Submission
from qllm.types import Priority, RequestId

Built = Future[Matcher]


class GrammarIngress(HoldingIngress[Built]):
    """A transport that delays requests until a thread of their class has built their grammar.

    Args:
        inner: The transport.
        vocabulary: The model's vocabulary.
        built: Finished grammars by request. The sampler reads a grammar when its request is added.
    """

    def __init__(
        self, inner: Inbox, vocabulary: Vocabulary, built: dict[RequestId, Matcher]
    ) -> None:
        super().__init__(inner)
        self._vocabulary, self._built = vocabulary, built
        self._builders: dict[bool, ThreadPoolExecutor] = {}
        """Thread pools, one for LS requests (True) and one for BE (False), each made at first use.
        """

    def close(self) -> None:
        """Stop building grammars, without waiting."""
        for builder in self._builders.values():
            builder.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        self._built.clear()  # grammars of requests that were refused

    def _hold(self, item: Submission) -> Built | None:
        form = item.sampling.structured_outputs
        if form is None or item.wrong is not None:
            return None
        is_ls = item.priority < Priority.BE
        if is_ls not in self._builders:
            name = f"qllm-grammar-{'LS' if is_ls else 'BE'}"
            self._builders[is_ls] = ThreadPoolExecutor(1, name)
        work = self._builders[is_ls].submit(self._vocabulary.matcher, form)
        work.add_done_callback(lambda _: self._inner.put(LOOK))
        return work

    def _hold_revision(self, item: Revision) -> Built | None:
        return self._hold(item.rest)

    def _is_ready(self, item: Submission, wanted: Built) -> bool:
        return wanted.done()

    def _let_go(self, item: Submission, wanted: Built) -> Submission:
        bare = replace(item, sampling=replace(item.sampling, structured_outputs=None))
        if wanted.cancel() or not wanted.done():
            return bare  # a cancelled request ends at once
        error = wanted.exception()
        if error is None:
            self._built[item.request_id] = wanted.result()
            return item
        is_ours = isinstance(error, InvalidRequestError)
        text = str(error) if is_ours else f"{type(error).__name__}: {error}"
        return replace(bare, wrong=text)
