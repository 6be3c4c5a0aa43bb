"""Sections of a part of `make gpu-check`: each is one JSON line, whatever becomes of the others."""

import json
import os
import time
import traceback
from collections.abc import Callable, Collection
from typing import Any

import torch

from bench.gpu.check import BEGAN, MARK, STICKY
from qllm.errors import DeviceError


class Part:
    """Runs sections and reports each; a failure of one does not lose the others.

    Args:
        dry: On a CPU.
        skip: Sections that a process before this one has reported.
        layers: Of a big model at most; None for as many as fit.
    """

    def __init__(self, dry: bool, skip: Collection[str] = (), layers: int | None = None) -> None:
        self.dry, self.layers = dry, layers
        self.device = "cpu" if dry else "cuda"
        self.failed = False
        self._skip = set(skip)

    def section(
        self, name: str, run: Callable[[], dict[str, Any]], *, set_up: bool = False
    ) -> None:
        """Run one and print what it found, its seconds, and when since the start of the check.

        The process ends where the device answers no more: it can report nothing else.

        Args:
            name: What the result is called.
            run: Finds it.
            set_up: Others need what it makes: it runs in every process, and reports once.
        """
        is_reported = name in self._skip
        if is_reported and not set_up:
            return
        begin, is_hung = time.monotonic(), False
        try:
            found = run()
        except Exception as error:  # noqa: BLE001 - the point is to go on
            self.failed, is_hung = True, isinstance(error, DeviceError)
            text = traceback.format_exc()[-4000:]
            found = {"error": f"{type(error).__name__}: {error}", "trace": text}
        found |= {"section": name, "seconds": round(time.monotonic() - begin, 2)}
        if BEGAN in os.environ:
            found["at_s"] = round(time.time() - float(os.environ[BEGAN]), 1)
        if not is_reported:
            print(MARK + json.dumps(found), flush=True)
        if "error" in found and not self.dry:
            if is_hung:  # a loop that hangs would be waited for
                os._exit(STICKY)
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()  # fails for good after a capture that failed
            except Exception:  # noqa: BLE001 - whatever it is, it stays
                os._exit(STICKY)
