"""Text work of one class, off the event loop: prompts are rendered, tokenised and submitted."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from qllm.frontend.waker import Waker

THREADS = 2
"""So that one long prompt does not wait for another."""


class TextWork:
    """Threads of one class, so that no LS prompt waits behind the text of BE prompts."""

    def __init__(self, name: str) -> None:
        self.pool = ThreadPoolExecutor(THREADS, f"qllm-text-{name}")
        self._awaited: set[asyncio.Future[Any]] = set()

    async def run(self, function: Callable[[], Any], abandon: Callable[[Any], object]) -> Any:
        """Call a function on a thread and return its result.

        Args:
            function: What to do.
            abandon: Gets the result if nobody waits any more.
        """
        future, waker = asyncio.get_running_loop().create_future(), Waker.here()

        def tell(result: Any, error: BaseException | None) -> None:
            if future.done():  # its task was cancelled
                if error is None:
                    abandon(result)
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def work() -> None:
            if future.cancelled():
                return
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                waker.call(partial(tell, None, error))
            else:
                waker.call(partial(tell, result, None))

        self.pool.submit(work)
        self._awaited.add(future)
        try:
            return await future
        finally:
            self._awaited.discard(future)

    def close(self) -> None:
        """Begin nothing more; who still waits is cancelled. On the event loop."""
        for future in list(self._awaited):
            future.cancel()
        self.pool.shutdown(wait=False, cancel_futures=True)
