"""C++ structs from numpy dtypes, and the one struct that two layouts share.

The layouts of the rings (`qllm.ingress.layout`) and of the device (`qllm.device`) are separate
numpy dtypes. This module has the parts that both layouts need.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

Dtype = np.dtype[Any]

TYPES = {
    "u1": "u8",
    "u2": "u16",
    "u4": "u32",
    "u8": "u64",
    "i4": "i32",
    "i8": "i64",
    "f8": "double",
}
TYPEDEFS = (
    "typedef unsigned char u8;",
    "typedef unsigned short u16;",
    "typedef unsigned int u32;",
    "typedef unsigned long long u64;",
    "typedef int i32;",
    "typedef long long i64;",
)

RING_END: Dtype = np.dtype(
    [(name, "<u8") for name in ("bytes", "tail", "capacity", "at", "seq")]
    + [("wrong_since_ns", "<i8")]
    + [(name, "<u8") for name in ("checked", "known_tail", "held_at", "held_seq")]
)
"""The state of a ring's end in C++; at first all but the first three fields are zero. `bytes` is
the address of the ring, and `tail` that of the reader's word. `capacity` is the ring's size in
bytes, a multiple of a record's line. `at` counts the bytes that this end has written or taken, and
`seq` the records. `wrong_since_ns` is the time since when the next record has had a wrong checksum,
or 0. `checked` is the number of the last record whose checksum was right. For a writer,
`known_tail` is the reader's word as last read. `held_at` and `held_seq` are the place and the
number of the first record that the reader cannot see yet, or 0."""


def c_struct(name: str, dtype: Dtype, known: Mapping[Dtype, str]) -> list[str]:
    """Return the lines of a struct, and of the assertion that struct and dtype have one size.

    Args:
        name: Name of the struct.
        dtype: Fields of the struct.
        known: Names of the structs that may be fields of this struct.
    """
    lines = [f"struct {name} {{"]
    for field in dtype.names or ():
        base, shape = dtype[field].subdtype or (dtype[field], ())
        kind = known[base] if base.names else TYPES[base.str[1:]]
        lines.append(f"  {kind} {field}{''.join(f'[{n}]' for n in shape)};")
    return [*lines, "};", f'static_assert(sizeof({name}) == {dtype.itemsize}, "{name}");', ""]
