"""Where Triton's interpreter (see conftest.py) has to be mended, and the devices of a test."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor
_dot = interpreter.InterpreterBuilder.create_dot
_cast = interpreter.InterpreterBuilder.cast_impl


def _patch_for_numpy_2_4(tensor: Any, scope: Any) -> None:
    """Loop bounds are arrays of one number, which numpy >= 2.4 does not take for an int."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _widened(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    bits = handle.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def _dot_for_bf16(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
    """The interpreter of Triton 3.6 multiplies the bits of bf16 as integers."""
    return _dot(self, _widened(a), _widened(b), d, *how)


def _cast_to_nearest(self: Any, src: Any, dst_type: Any) -> Any:
    """The interpreter of Triton 3.6 cuts fp32 off where a device rounds to the nearest bf16."""
    if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
        return _cast(self, src, dst_type)
    bits = np.ascontiguousarray(src.data).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = np.where(np.isnan(src.data), (bits >> 16) | 0x40, rounded)
    return interpreter.TensorHandle(rounded.astype(np.uint16), tl.bfloat16)


_patch_lang = interpreter._patch_lang
_patched: set[str] = set()
"""Modules of the language that are patched until the end of the launch."""


class _Scope(interpreter._LangPatchScope):
    """The patches of a whole launch."""

    def restore(self) -> None:
        super().restore()
        _patched.clear()


def _patch_once(fn: Any) -> Any:
    """Patch the language once in a launch.

    The interpreter does so again whenever one function of Triton calls another, and restores only
    what the launch itself has patched.
    """
    langs = _languages(fn)
    if langs <= _patched:
        return interpreter._LangPatchScope()
    scope = _patch_lang(fn)
    if not _patched:
        scope.__class__ = _Scope
    _patched.update(langs)
    return scope


@cache
def _languages(fn: Any) -> frozenset[str]:
    """Return the names of the modules of the language that a function sees."""
    return frozenset(v.__name__ for v in fn.__globals__.values() if v is tl or v is tl.core)


interpreter._patch_lang = _patch_once
interpreter._patch_lang_tensor = _patch_for_numpy_2_4
interpreter.InterpreterBuilder.cast_impl = _cast_to_nearest
interpreter.InterpreterBuilder.create_dot = _dot_for_bf16

DEVICES = pytest.mark.parametrize(
    "device",
    [
        pytest.param(
            "cpu",
            marks=pytest.mark.skipif(
                torch.cuda.is_available(), reason="where there is a GPU, kernels are compiled"
            ),
        ),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)


@contextmanager
def unwritten(whole: int = -1) -> Iterator[None]:
    """Let memory that nobody has written hold what would be seen: infinity, or `whole`."""
    empty = torch.empty

    def filled(*shape: Any, **how: Any) -> torch.Tensor:
        x = empty(*shape, **how)
        return x.fill_(math.inf if x.is_floating_point() else whole)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", filled)
        yield
