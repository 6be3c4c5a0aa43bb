"""Questions to replicas, asked from any thread."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

from qllm.errors import EngineClosedError, QllmError
from qllm.frontend.rings import CLOSE_S

ASK_S = 30.0
"""Seconds that a question waits for a replica's answer."""


class LoopThread:
    """An event loop on a thread of its own.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.close()

    def close(self) -> None:
        """Stop the loop and cancel its remaining work."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)


class Calls:
    """Questions to replicas.

    The loop that receives tokens must not ask questions, because callers may hold the loop's locks.

    Args:
        engines: Handle of the deployment.
    """

    def __init__(self, engines: Any) -> None:
        self._engines = engines
        self._thread = LoopThread("qllm-calls")

    def one(self, method: str, *args: Any, timeout_s: float = ASK_S, at: str | None = None) -> Any:
        """Return the answer of one replica: the named one, or any.

        Raises:
            EngineClosedError: No replica answered in time.
        """
        return self._run(ask(self._engines, method, *args, at=at), timeout_s)

    def all(self, method: str, *args: Any) -> list[Any]:
        """Return the answers of all replicas that answer."""
        return list(self._run(self._all(method, *args), ASK_S))

    async def _all(self, method: str, *args: Any) -> list[Any]:
        asked = self._engines.broadcast(method, *args)
        found = await asked.results_async(timeout_s=ASK_S, return_exceptions=True)
        return [item for item in found if not isinstance(item, BaseException)]

    def _run(self, work: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._thread.loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise EngineClosedError(f"no replica has answered for {timeout_s:.0f} s") from None
        except QllmError:
            raise
        except Exception as error:  # errors of Ray: the deployment or the replica has ended
            raise EngineClosedError(f"no replica answers: {error}") from error

    def close(self) -> None:
        """Stop asking."""
        self._thread.close()


async def ask(engines: Any, method: str, *args: Any, at: str | None = None) -> Any:
    """Return the answer of one replica: the named one, or any."""
    return await getattr(engines, method).remote(*args, at=at)
