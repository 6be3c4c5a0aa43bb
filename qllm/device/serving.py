"""What the device keeps of a request beside the scheduler's state: tokens, sampling, its end.

A second block of memory beside STATE (see `layout`), with the same slots: SERVER, then the arrays
of SECTIONS, each at the byte offset that SERVER names. Addresses in it are 8-byte numbers.
"""

import numpy as np

from qllm.device import layout
from qllm.device.layout import I4, Dtype, Section, _numbers

VERSION = 1
"""Of everything in this file."""
MOST_STOP_IDS = 8
"""Ids that end a request on the device; one with more is not served there."""

SERVING: Dtype = np.dtype(
    [
        *_numbers("seed", "top_k"),
        *_numbers("temperature", "top_p", "min_p", kind="<f8"),
        *_numbers("deadline_ns"),
        ("stop_ids", "<i8", (MOST_STOP_IDS,)),
        *_numbers("num_stop_ids", "max_tokens", "front_end", "flags", kind="<i4"),
    ]
)
"""Of the live request in a slot. `max_tokens`: sampled ones; `front_end`: who gets them."""

SECTIONS = (
    Section("serving", SERVING, "capacity"),
    Section("tokens", I4, "capacity * max_total_tokens"),
)
"""`tokens`: of the request in slot s, prompt and sampled, from s * max_total_tokens on."""

SERVER: Dtype = np.dtype(
    [
        *_numbers("version", *(f"at_{section.name}" for section in SECTIONS)),
        *_numbers("capacity", "max_total_tokens"),
    ]
)

STRUCTS: dict[str, Dtype] = {"Serving": SERVING, "ServerState": SERVER}
HEADER = layout.HEADER.with_name("serving.h")


def emit_header() -> str:
    """Return `serving.h`: the structs of this block, for C++ and CUDA."""
    lines = [*layout.header_of("serving"), '#include "state.h"', "namespace qllm {"]
    lines += [
        f"const i64 kServingVersion = {VERSION};",
        f"const i32 kMostStopIds = {MOST_STOP_IDS};",
    ]
    lines += layout.struct_lines(STRUCTS)
    lines += layout.section_lines("QLLM_SERVER_SECTIONS", SECTIONS, STRUCTS)
    return "\n".join([*lines, "}  // namespace qllm", ""])


if __name__ == "__main__":
    HEADER.write_text(emit_header())
