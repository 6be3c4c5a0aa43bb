"""The supervisor: it replaces a failed engine, within a limit of restarts."""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from qllm.llm import QLLMEngine
from qllm.server.config import ServerConfig
from qllm.server.requests.front import Front

PERIOD_S = 0.2
"""Seconds between two checks of the engine."""

_log = logging.getLogger("qllm.server.ops.supervisor")


class Restarts:
    """The limit of restarts, and the wait before each restart."""

    def __init__(self, config: ServerConfig) -> None:
        self._most, self._window_s = config.max_restarts, config.restart_window_s
        self._first_s, self._cap_s = config.restart_backoff_s, config.restart_backoff_cap_s
        self._times: deque[float] = deque()

    def wait_s(self, now_s: float) -> float | None:
        """Count a restart at `now_s`. Return the seconds to wait, or None past the limit."""
        while self._times and now_s - self._times[0] > self._window_s:
            self._times.popleft()
        if len(self._times) >= self._most:
            return None
        wait_s = min(self._cap_s, self._first_s * 2.0 ** min(len(self._times), 60))
        self._times.append(now_s)
        return wait_s


def given_up(why: str, config: ServerConfig) -> str:
    """Return the reason why no further engine is started."""
    return (
        f"{why}; the engine is not brought back: max_restarts={config.max_restarts} within "
        f"{config.restart_window_s:g} s"
    )


class Supervisor:
    """A task that replaces `front.engine` after a failure. Lives on one event loop.

    Args:
        front: Owner of the engine.
        make: Function that makes an engine; blocks while the engine loads.
        load_s: Seconds of the first load, used to estimate when clients can retry.
    """

    def __init__(self, front: Front, make: Callable[[], QLLMEngine], load_s: float = 1.0) -> None:
        self._front, self._make = front, make
        self._restarts = Restarts(front.config)
        self._load_s = load_s
        """Duration of the last load, in seconds."""
        self._up_at = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False
        front.back_in_s = self._back_in_s

    def _back_in_s(self) -> int:
        return max(1, math.ceil(self._up_at - time.monotonic()))

    def expect(self, wait_s: float) -> None:
        """Set the estimate for clients: an engine starts to load in `wait_s` seconds."""
        self._up_at = time.monotonic() + wait_s + self._load_s

    def start(self) -> None:
        """Start to watch the engine."""
        self._tasks = [asyncio.create_task(work) for work in (self._run(), self._look())]

    async def close(self) -> None:
        """Stop watching. An engine that is still loading is closed once loaded."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self) -> None:
        front = self._front
        while front.gave_up is None:
            while (why := front.engine.failure) is None:
                await asyncio.sleep(PERIOD_S)
            _log.error("%s", why)
            front.ended[front.engine] = why
            self.expect(0.0)  # an estimate until the wait is known
            await asyncio.to_thread(front.engine.close)  # the next engine needs its memory
            front.gave_up = await self._replace(why)
            if front.gave_up is None:
                await asyncio.to_thread(front.log.go_on, front.engine.replay)
            else:
                front.log.end_all(front.gave_up)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            self._front.log.look()

    async def _replace(self, why: str) -> str | None:
        """Retry until there is an engine, and return None; or return the reason for giving up."""
        while (wait_s := self._restarts.wait_s(time.monotonic())) is not None:
            self.expect(wait_s)
            _log.warning("a new engine will be made in %.1f s", wait_s)
            await asyncio.sleep(wait_s)
            start = time.monotonic()
            try:
                self._front.engine = await self._made()
            except Exception as error:  # noqa: BLE001 - logged, then retried within the limit
                why = f"no new engine could be made: {error}"
                _log.error("%s", why)
                continue
            self._load_s = time.monotonic() - start
            self._front.metrics.restarts.inc()
            _log.warning("a new engine serves after %.1f s", self._load_s)
            return None
        return given_up(why, self._front.config)

    async def _made(self) -> QLLMEngine:
        """Return an engine made on a daemon thread.

        Such a thread does not keep the process alive.
        """
        made: Future[QLLMEngine] = Future()

        def work() -> None:
            try:
                engine = self._make()
            except BaseException as error:  # noqa: BLE001 - raised in the awaiting task
                made.set_exception(error)
                return
            if self._closed:
                engine.close()
            else:
                made.set_result(engine)

        made.set_running_or_notify_cancel()
        threading.Thread(target=work, name="qllm-restart", daemon=True).start()
        return await asyncio.wrap_future(made)
