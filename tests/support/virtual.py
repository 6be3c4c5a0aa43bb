"""An event loop on a virtual clock: waits take exactly their time, however slow the machine is."""

import asyncio


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that does not sleep: where nothing is ready, its time jumps to what is due."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        due = [timer.when() for timer in self._scheduled if not timer.cancelled()]
        if not self._ready and due:
            self.now_s = max(self.now_s, min(due))
        super()._run_once()
