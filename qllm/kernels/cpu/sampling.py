"""Sampling of tokens from rows of logits, in parallel on the threads."""

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int64, c_void_p

from qllm.kernels import cpu


class SampleStruct(ctypes.Structure):
    """`SampleRow` in kernels.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("num", c_int64),
        ("is_half", c_int64),
        ("temperature", c_double),
        ("min_p", c_double),
        ("top_p", c_double),
        ("top_k", c_int64),
        ("share", c_int64),
        ("bias_ids", c_void_p),
        ("bias", c_void_p),
        ("num_bias", c_int64),
        ("repetition", c_double),
        ("frequency", c_double),
        ("presence", c_double),
        ("prompt_ids", c_void_p),
        ("num_prompt", c_int64),
        ("outputs", c_void_p),
        ("num_outputs", c_int64),
        ("forced", c_int64),
        ("words", c_void_p),
        ("allowed", c_void_p),
        ("num_allowed", c_int64),
        ("banned", c_void_p),
        ("num_banned", c_int64),
        ("ends", c_void_p),
        ("num_ends", c_int64),
        ("num_top", c_int64),
        ("top_ids", c_void_p),
        ("top", c_void_p),
        ("token", c_int64),
        ("peak", c_double),
        ("logprob", c_float),
    )


def sample(rows: Sequence[SampleStruct]) -> list[SampleStruct]:
    """Return the rows with their choices. All arrays to which the rows point must be alive."""
    array = (SampleStruct * len(rows))(*rows)
    cpu.native.sample(ctypes.addressof(array), len(rows))
    return list(array)
