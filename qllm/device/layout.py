"""Layout of the native scheduler's state: numpy dtypes, and the C header made from them.

The state is one block of memory: STATE, then the arrays of SECTIONS, each at the byte offset that
STATE contains. The block has no pointers, so it can be at any address, be copied, or be mapped into
a device. Numbers are little-endian. An unknown time is NONE.

A *slot* is the index of a live request or frame. The slot does not change while the request or
frame lives.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qllm.ingress.structs import TYPEDEFS, Dtype, c_struct

VERSION = 6
"""Version of everything in this file. The extension refuses blocks of other versions."""
NONE = -(2**63)
"""Value of a time or a threshold that is not set."""
COST_LEVELS = 32
"""Most entries of a cost table."""
HEADER = Path(__file__).parent / "csrc" / "state.h"

IDLE, WAIT, START, RESUME = range(4)
"""Kinds of a decision: no request lives; wait until `wait_until_ns`; make a frame; resume a
frame."""
OK, EMPTY_PLAN, STALLS, NO_KV, NO_ROOM = range(5)
"""Answers of `decide`. NO_ROOM is a broken invariant: an array of the block is too small."""
KILL, DROP, EVICT, SPLIT = range(1, 5)
"""Kinds of an effect, as in `qllm.scheduler.decision`."""
NOWHERE, ADMITTED, WAITING, UNRANKED = range(4)
"""Lists of the order that a request can be in."""
SAMPLES, DEAD = 1, 2
"""Flags of a row."""
CALLS = (
    *("start", "add_slots", "rank_anew", "add", "remove", "evict", "adopt", "new_frame", "park"),
    *("decide", "done", "stopped", "failed"),
)
"""Functions of the scheduler. A kernel launch selects a function by its index."""
MOST_NUMBERS = 6
"""Most arguments of a call."""


def numbers(*names: str, kind: str = "<i8") -> list[tuple[str, Any]]:
    """Return fields of one type."""
    return [(name, kind) for name in names]


REQUEST: Dtype = np.dtype(
    [
        *numbers("id", "arrival_ns", "priority", "ttft_ns", "tpot_ns", "served_ns"),
        *numbers("last_progress_ns", "first_token_ns", "last_token_ns", "tier", "key"),
        *numbers("mark", "gone"),
        *numbers("num_prompt", "num_tokens", "num_computed", kind="<i4"),
        *numbers("num_blocks", "first_block", "last_block", kind="<i4"),
        *numbers("front_lo", "front_hi", "front_layer", "frame", kind="<i4"),
        *numbers("evictions", "preemptions", "failures", "place", "next", "live", kind="<i4"),
    ]
)
"""State of a request. `front_layer` and `frame` are -1 without one; `next` links free slots; `mark`
and `gone` mark requests that take part in the present decision."""

ROW: Dtype = np.dtype(
    [("request_id", "<i8"), *numbers("lo", "hi", "start", "end", "slot", "flags", kind="<i4")]
)

FRAME: Dtype = np.dtype(
    [
        *numbers("id", "parked_ns", "stop_below"),
        *numbers("num_rows", "layer", "inside", "grain", "next", "reserved", kind="<i4"),
    ]
)
"""State of a frame. `layer`: the first unfinished layer; `inside`: 1 if that layer is begun. Its
rows start in `frame_rows` at `seats` times its slot."""

TIER: Dtype = np.dtype(
    [
        ("tier", "<i8"),
        *numbers("decodes", "decodes_end", "prefills", "prefills_end", kind="<i4"),
        *numbers("waiting", "waiting_end", "admitted_end", "cohort", kind="<i4"),
    ]
)
"""Ranges of the scratch arrays of the same names."""

EFFECT: Dtype = np.dtype(
    [*numbers("frame_id", "request_id", "for_request"), *numbers("kind", "lost", kind="<i4")]
)


class Section(NamedTuple):
    """An array of the block."""

    name: str
    dtype: Dtype
    size: str
    """Number of elements, as a product of fields of STATE and numbers."""


I4: Dtype = np.dtype("<i4")
I8: Dtype = np.dtype("<i8")
SECTIONS = (
    Section("requests", REQUEST, "capacity"),
    Section("frames", FRAME, "capacity"),
    Section("frame_rows", ROW, "capacity * seats"),
    Section("parked", I4, "capacity"),
    Section("admitted", I4, "capacity"),
    Section("waiting", I4, "capacity"),
    Section("unranked", I4, "capacity"),
    Section("suspects", I4, "capacity"),
    Section("next_block", I4, "num_blocks"),
    Section("free_blocks", I4, "num_blocks"),
    Section("marks", I4, "num_marks"),
    Section("effects", EFFECT, "capacity * 4"),
    Section("tiers", TIER, "capacity"),
    Section("order", I4, "capacity"),
    Section("decodes", I4, "capacity"),
    Section("prefills", I4, "capacity"),
    Section("chosen", I4, "capacity"),
    Section("plan_rows", ROW, "seats * 3"),
)
"""Contents of the arrays. `parked`: frames, oldest first. `admitted`, `waiting`: the order, best
first. `next_block` links the blocks of a request; `free_blocks` is a stack of `num_free`. `marks`:
positions where chunks may end (level L2). `tiers` and the arrays after it are scratch of one
call."""

_LIMITS = numbers("capacity", "seats", "num_blocks", "num_marks", "num_layers")
_LIMITS += numbers("max_step_tokens", "block_size", "finest_grain", "max_segment_ns")
_LIMITS += numbers("whole_steps", "floor_rate", "floor_window_ns", "floor_slice_ns")
_POLICY = numbers("grain", "reads", "chunk_tokens", "step_tokens", "slack_min_tokens")
_POLICY += numbers("slack_tpot_ms", "group_tokens", "max_groups", "ride_unbounded")
_POLICY += numbers("max_prompt_gap_ms", "max_be_stall_ms")
_COUNTERS = numbers("ride_credit_ns", "ride_margin_ns", "ride_spent_ns", "ride_best_ns")
_COUNTERS += numbers("owed_ns", "owed_since_ns", "owed_ls", "owed_grows", "owed_pays")
_COUNTERS += numbers("ls_ns", "be_ns", "paid_ns")
_COUNTERS += numbers("idle_since_ns", "num_live", "num_free")
_COUNTERS += numbers("free_request", "free_frame", "next_frame_id", "epoch", "num_odd", "num_gone")
_COUNTERS += numbers("running", "num_parked", "num_admitted", "num_waiting", "num_unranked")
_COUNTERS += numbers("num_suspects", "num_effects")
_DECISION = numbers("kind", "decided_frame", "slice_ns", "wait_until_ns", "stuck")

STATE: Dtype = np.dtype(
    [
        *numbers("version", *(f"at_{section.name}" for section in SECTIONS)),
        *_LIMITS,
        *_POLICY,
        ("ride_frac", "<f8"),
        ("decode_ns", "<i8", (COST_LEVELS,)),
        *numbers("num_decode_ns", "prefill_token_ns"),
        *_COUNTERS,
        *_DECISION,
    ]
)
"""Head of the block: offsets; the limits (`whole_steps` is 0 or 1); the policy's shape, with 0 for
settings that are None; the cost table; the counters; and the last decision. `num_gone` counts
requests that ended or lost their KV. `owed_ns` to `paid_ns` are those of
`qllm.scheduler.be_share.Owed`."""

STRUCTS = {"Request": REQUEST, "Row": ROW, "Frame": FRAME, "Tier": TIER, "Effect": EFFECT}
STRUCTS |= {"State": STATE}
ENUMS = {
    "Kind": {"IDLE": IDLE, "WAIT": WAIT, "START": START, "RESUME": RESUME},
    "Answer": {
        "OK": OK,
        "EMPTY_PLAN": EMPTY_PLAN,
        "STALLS": STALLS,
        "NO_KV": NO_KV,
        "NO_ROOM": NO_ROOM,
    },
    "EffectKind": {"KILL": KILL, "DROP": DROP, "EVICT": EVICT, "SPLIT": SPLIT},
    "Place": {
        "NOWHERE": NOWHERE,
        "ADMITTED": ADMITTED,
        "WAITING": WAITING,
        "UNRANKED": UNRANKED,
    },
    "RowFlag": {"SAMPLES": SAMPLES, "DEAD": DEAD},
    "Call": {f"CALL_{name.upper()}": index for index, name in enumerate(CALLS)},
}


def place(
    head: Dtype, sections: Sequence[Section], sizes: Mapping[str, int]
) -> tuple[dict[str, int], int]:
    """Return the byte offset of each section after a head, and the bytes of the whole block."""
    at, offsets = head.itemsize, {}
    for section in sections:
        offsets[section.name] = at
        at += -(-section.dtype.itemsize * count_of(section, sizes) // 8) * 8
    return offsets, at


def count_of(section: Section, sizes: Mapping[str, int]) -> int:
    """Return the number of elements of a section."""
    count = 1
    for factor in section.size.split(" * "):
        count *= sizes[factor] if factor in sizes else int(factor)
    return count


def emit_header() -> str:
    """Return `state.h`: the structs of the block and the arrays behind it, for C++ and CUDA."""
    lines = [
        "// Made from qllm/device/layout.py by `python -m qllm.device.layout`; do not edit.",
        "#pragma once",
        "namespace qllm {",
        *TYPEDEFS,
        f"const i64 kVersion = {VERSION};",
        "const i64 kNone = -9223372036854775807LL - 1;",
        f"const i32 kCostLevels = {COST_LEVELS};",
        f"const i32 kMostNumbers = {MOST_NUMBERS};",
        *c_enums(ENUMS),
        "",
    ]
    known = {dtype: name for name, dtype in STRUCTS.items()}
    for name, dtype in STRUCTS.items():
        lines += c_struct(name, dtype, known)
    lines += [c_sections("QLLM_SECTIONS", SECTIONS, known), "}  // namespace qllm", ""]
    return "\n".join(lines)


def c_enums(enums: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return C enums, one per line."""
    lines = []
    for enum, names in enums.items():
        values = ", ".join(f"{name} = {value}" for name, value in names.items())
        lines.append(f"enum {enum} {{ {values} }};")
    return lines


def c_sections(macro: str, sections: Sequence[Section], known: Mapping[Dtype, str]) -> str:
    """Return a C macro that lists the arrays of a block."""
    types = {**known, I4: "i32", I8: "i64"}
    arrays = " ".join(f"X({types[s.dtype]}, {s.name})" for s in sections)
    return f"// The arrays of a block: X(type, name).\n#define {macro}(X) {arrays}"


if __name__ == "__main__":
    HEADER.write_text(emit_header())
