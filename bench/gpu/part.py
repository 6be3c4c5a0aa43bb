"""Sections of a part of `make gpu-check`: each is one JSON line, even if others fail."""

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
    """A runner of sections that reports each; a failure of one does not lose the others.

    Args:
        dry: True on a CPU.
        skip: Sections that an earlier process has reported.
        layers: Most layers of a big model; None for as many as fit.
    """

    def __init__(self, dry: bool, skip: Collection[str] = (), layers: int | None = None) -> None:
        self.dry, self.layers = dry, layers
        self.device = "cpu" if dry else "cuda"
        self.failed = False
        self._skip = set(skip)

    def section(
        self, name: str, run: Callable[[], dict[str, Any]], *, set_up: bool = False
    ) -> None:
        """Run a section; print its result, its seconds, and its time since the check's start.

        The process ends if the device does not answer: it can report nothing else.

        Args:
            name: Name of the result.
            run: Function that returns it.
            set_up: True if other sections need it: it runs in every process, and reports once.
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
            if is_hung:  # a loop that hangs would block the exit
                os._exit(STICKY)
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()  # fails for good after a failed capture
            except Exception:  # noqa: BLE001 - whatever it is, it stays
                os._exit(STICKY)
