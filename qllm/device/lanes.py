"""The captured stages and their lanes, as the native side sees them: which graphs, which tensors.

A third block of memory beside STATE and SERVER: LANES, then the arrays of SECTIONS, each at the
byte offset that LANES names. A stage's index in `stages` is the number of its branch in the
SWITCH. The tensors of a lane are those of `qllm.cuda.lanes.Lane`, by address.
"""

import numpy as np

from qllm.device import layout
from qllm.device.layout import I4, I8, Section, c_enums, c_sections, numbers
from qllm.ingress.structs import Dtype, c_struct

VERSION = 4
"""Version of everything in this file."""
NOTHING, CANNOT = -1, -2
"""Returned instead of a branch: nothing can run now; the running frame fits no stage."""
GOES_ON, PARKED, OVER = range(3)
"""What became of the running frame after a stage."""
BROKEN = -1
"""In place of a token: the largest logit was not finite, so the request has failed."""
TENSORS = (
    *("ids", "pos", "slots", "seq", "gather", "tables", "decode", "prefill", "last", "positions"),
    *("seeds", "top_k", "temperature", "top_p", "min_p", "num_tokens", "tokens", "peaks"),
)
"""Arrays of a lane, each contiguous; 8 bytes per element, `peaks` 4."""

STAGE: Dtype = np.dtype(numbers("start", "end", "tokens", "prefill", "head", "whole", kind="<i4"))
"""One graph: layers [start, end), its bucket, and whether it samples; one that begins at layer 0
embeds."""

LANE: Dtype = np.dtype(
    [
        *numbers(*(f"at_{name}" for name in TENSORS)),
        *numbers("loaded_frame"),
        *numbers("loaded_layer", "loaded_rows", kind="<i4"),
        *numbers("max_rows", "max_pages", "block", "prefill_tiles", kind="<i4"),
    ]
)
"""Addresses; whose data is here: the id of a frame, the layer where its group became this one,
and how many rows of it live; and sizes. A group has one bucket, wherever it is."""

MOST_LATENCIES = 1024
"""Preemptions whose latency is kept, the latest ones."""

SAMPLED: Dtype = np.dtype(numbers("slot", "token", kind="<i4"))

GROUP: Dtype = np.dtype(
    [
        *numbers("frame", "gone"),
        *numbers("layer", "since", "from", "until", "num_tokens", "num_live", kind="<i4"),
        *numbers("prefill", "samples", kind="<i4"),
    ]
)
"""The rows of a frame that cross the layers [from, until), as they were last looked for.

`frame`: its id; `gone`: STATE's `num_gone` then; `layer`: where it was asked for; `since`: where
it became this group; whether one of its rows has more than one token, and whether one samples."""

SECTIONS = (
    Section("stages", STAGE, "num_stages"),
    Section("starts", I4, "num_starts"),
    Section("lanes", LANE, "2"),
    Section("sampled", SAMPLED, "seats"),
    Section("latencies", I8, str(MOST_LATENCIES)),
)
"""`stages`: those that begin at one layer lie together, by class, the best fit first. `starts`:
where those of a class and a layer begin, at class * (num_layers + 1) + layer. `lanes`: of stages,
and of whole steps. `sampled`: what the frame that ended last gave. `latencies`: ns from the put
of a request to the stop for it, of preemption i at i % MOST_LATENCIES; too small by what the
device's clock is behind the host's, which is as long as a launch takes, but never below 0."""

LANES: Dtype = np.dtype(
    [
        *numbers("version", *(f"at_{section.name}" for section in SECTIONS)),
        *numbers("num_stages", "num_starts", "seats", "num_layers", "spare_slot"),
        *numbers("branch", "layer", "fill", "start_ns", "num_sampled", "failure"),
        *numbers("num_turns", "turns_left", "goes_on", "in_flight", "asked", "idle", "stopped"),
        *numbers("num_fetches"),
        *numbers("launch_ns", "clock_ns", "now_ns", "pause", "preempted", "num_preemptions"),
        *numbers("longest_ns", "num_policy_errors", "policy_error", "shown_ns"),
        ("group", GROUP),
    ]
)
"""Offsets and sizes; then of the running frame: the stage that was chosen last, the first layer not
finished, whether the lane of that stage must be filled first, and when it began to run;
`num_sampled`: entries of `sampled`; `failure`: what `decide` answered if it was not OK. Then of the
loop: turns taken, how many more this launch may take, and whether it takes another; whether a stage
runs between two turns; what the front ends ask of it; whether the last turn found nothing to do;
whether it was asked to stop and has; `num_fetches`: records that the block of this turn has read.
`launch_ns`: engine time of a launch, 0 once the device has set its clock by it: `clock_ns` is its
timer at engine time 0; `now_ns`: when the last turn was. `pause`: the host wants the launch to end.
`preempted`: whether the last frame that was parked made way for an arrival; `longest_ns`: from a
turn that chose a stage to the next one, at most; `policy_error`: the last answer of `decide` that
was not OK; `shown_ns`: when the front ends were last shown what the engine holds; `group`: of the
running frame."""

STRUCTS = {"Stage": STAGE, "Lane": LANE, "Sampled": SAMPLED, "Group": GROUP, "Lanes": LANES}
ENUMS = {
    "Branch": {"NOTHING": NOTHING, "CANNOT": CANNOT},
    "Became": {"GOES_ON": GOES_ON, "PARKED": PARKED, "OVER": OVER},
}
HEADER = layout.HEADER.with_name("lanes.h")


def emit_header() -> str:
    """Return `lanes.h`: the structs of this block and the arrays behind it, for C++ and CUDA."""
    lines = [
        "// Made from qllm/device/lanes.py by `python -m qllm.device.lanes`; do not edit.",
        "#pragma once",
        '#include "state.h"',
        "namespace qllm {",
        f"const i64 kLanesVersion = {VERSION};",
        f"const i32 kBroken = {BROKEN};",
        f"const i64 kMostLatencies = {MOST_LATENCIES};",
        *c_enums(ENUMS),
        "",
    ]
    known = {dtype: name for name, dtype in STRUCTS.items()}
    for name, dtype in STRUCTS.items():
        lines += c_struct(name, dtype, known)
    lines += [c_sections("QLLM_LANES_SECTIONS", SECTIONS, known), "}  // namespace qllm", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    HEADER.write_text(emit_header())
