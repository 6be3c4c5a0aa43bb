"""Modules whose `forward` is replaced for the time of a call."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

Stub = Callable[..., Any]


class Unwind(BaseException):
    """An exception that leaves a model's forward. No `except Exception` of a model catches it."""


@contextmanager
def replaced(stubs: Mapping[nn.Module, Stub]) -> Iterator[None]:
    """Replace `forward` on these instances, and restore it afterwards."""
    before = {module: vars(module).get("forward") for module in stubs}
    try:
        for module, stub in stubs.items():
            vars(module)["forward"] = stub
        yield
    finally:
        for module, own in before.items():
            vars(module).pop("forward", None)
            if own is not None:
                vars(module)["forward"] = own
