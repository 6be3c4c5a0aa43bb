"""Threads that render, tokenise and submit the prompts of one class, off the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from qllm.frontend.waker import Waker

LONG_THREADS = 2
"""Number of threads for long jobs, so that one long prompt does not wait for another."""


class _Job(NamedTuple):
    function: Callable[[], Any]
    future: "asyncio.Future[Any]"
    waker: Waker
    abandon: Callable[[Any], object]


class TextWork:
    """Threads for the text work of one class.

    Short jobs share one thread and run in order. One wake-up of this thread also serves the jobs
    that arrive while the thread works. Long jobs have threads of their own.
    """

    def __init__(self, name: str) -> None:
        self.pool = ThreadPoolExecutor(LONG_THREADS, f"qllm-text-{name}")
        self._short = ThreadPoolExecutor(1, f"qllm-short-{name}")
        self._jobs: deque[_Job] = deque()
        self._is_working = False
        self._awaited: set[asyncio.Future[Any]] = set()

    async def run(
        self, function: Callable[[], Any], *, is_short: bool, abandon: Callable[[Any], object]
    ) -> Any:
        """Call a function on a thread and return its result.

        Args:
            function: Job to run.
            is_short: True if the job takes no longer than waking a thread.
            abandon: Function that receives the result if the caller no longer waits.
        """
        job = _Job(function, asyncio.get_running_loop().create_future(), Waker.here(), abandon)
        if not is_short:
            self.pool.submit(self._do, job)
        else:
            self._jobs.append(job)  # before the check, because `_do_all` first clears the mark
            if not self._is_working:
                self._is_working = True
                self._short.submit(self._do_all)
        self._awaited.add(job.future)
        try:
            return await job.future
        finally:
            self._awaited.discard(job.future)

    def _do_all(self) -> None:
        self._is_working = False
        while self._jobs:
            self._do(self._jobs.popleft())

    @staticmethod
    def _do(job: _Job) -> None:
        if job.future.cancelled():
            return
        try:
            result = job.function()
        except BaseException as error:  # noqa: BLE001 - raised in the awaiting task
            job.waker.call(partial(_tell, job, None, error))
        else:
            job.waker.call(partial(_tell, job, result, None))

    def close(self) -> None:
        """Cancel all waiting jobs and start no new ones. Must run on the event loop."""
        for future in list(self._awaited):
            future.cancel()
        for pool in (self.pool, self._short):
            pool.shutdown(wait=False, cancel_futures=True)


def _tell(job: _Job, result: Any, error: BaseException | None) -> None:
    """Give the result to the waiting task. Runs on the event loop."""
    if job.future.done():  # the waiting task was cancelled
        if error is None:
            job.abandon(result)
    elif error is not None:
        job.future.set_exception(error)
    else:
        job.future.set_result(result)
