"""Layout of the captured stages and their lanes for the native side: graphs and tensors.

This is the third block of memory, next to STATE and SERVER. It has LANES, then the arrays of
SECTIONS, each at the byte offset that LANES contains. A stage's index in `stages` is the number of
its branch in the SWITCH. The tensors of a lane are those of `qllm.cuda.lanes.Lane`, given by
address.
"""

import numpy as np

from qllm.device import layout
from qllm.device.layout import I4, I8, Section, c_enums, c_sections, numbers
from qllm.ingress.structs import Dtype, c_struct

VERSION = 4
"""Version of everything in this file."""
NOTHING, CANNOT = -1, -2
"""Values instead of a branch. NOTHING: nothing can run now. CANNOT: the running frame fits no
stage."""
GOES_ON, PARKED, OVER = range(3)
"""States of the running frame after a stage."""
BROKEN = -1
"""Value instead of a token, if the largest logit was not finite. The request has failed then."""
TENSORS = (
    *("ids", "pos", "slots", "seq", "gather", "tables", "decode", "prefill", "last", "positions"),
    *("seeds", "top_k", "temperature", "top_p", "min_p", "num_tokens", "tokens", "peaks"),
)
"""Arrays of a lane, each contiguous. An element has 8 bytes, or 4 in `peaks`."""

STAGE: Dtype = np.dtype(numbers("start", "end", "tokens", "prefill", "head", "whole", kind="<i4"))
"""One graph: layers [start, end), the graph's bucket, and 1 in `head` if the graph samples. A graph
that begins at layer 0 also embeds."""

LANE: Dtype = np.dtype(
    [
        *numbers(*(f"at_{name}" for name in TENSORS)),
        *numbers("loaded_frame"),
        *numbers("loaded_layer", "loaded_rows", kind="<i4"),
        *numbers("max_rows", "max_pages", "block", "prefill_tiles", kind="<i4"),
    ]
)
"""Addresses of tensors, facts about the loaded data, and sizes.

The loaded data is that of frame `loaded_frame`, of its group from layer `loaded_layer` on, with
`loaded_rows` live rows. A group has one bucket in all its layers."""

MOST_LATENCIES = 1024
"""Number of latest preemptions whose latency is stored."""

SAMPLED: Dtype = np.dtype(numbers("slot", "token", kind="<i4"))

GROUP: Dtype = np.dtype(
    [
        *numbers("frame", "gone"),
        *numbers("layer", "since", "from", "until", "num_tokens", "num_live", kind="<i4"),
        *numbers("prefill", "samples", kind="<i4"),
    ]
)
"""The rows of a frame that cross the layers [from, until), as found by the last search.

`frame`: id of the frame; `gone`: STATE's `num_gone` at the search; `layer`: layer of the search;
`since`: first layer with this group; `prefill`: 1 if a row has more than one token; `samples`: 1
if a row samples."""

SECTIONS = (
    Section("stages", STAGE, "num_stages"),
    Section("starts", I4, "num_starts"),
    Section("lanes", LANE, "2"),
    Section("sampled", SAMPLED, "seats"),
    Section("latencies", I8, str(MOST_LATENCIES)),
)
"""Contents of the arrays.

`stages`: stages by class and first layer, the best fit first. `starts`: index of the first stage of
a class and a layer, at class * (num_layers + 1) + layer. `lanes`: the lane of stages, and that of
whole steps. `sampled`: tokens of the frame that ended last. `latencies`: ns from the put of a
request to the stop for it, of preemption i at i % MOST_LATENCIES. The latencies are too small by
the lag of the device's clock, which is as long as a launch takes. They are never below 0."""

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
"""Head of the block: offsets, sizes, the running frame, and the loop.

Of the running frame: `branch`: the stage chosen last; `layer`: the first unfinished layer; `fill`:
1 if the lane of the stage must be filled first; `start_ns`: when it began to run; `num_sampled`:
entries of `sampled`; `failure`: the answer of `decide` if it was not OK.

Of the loop: `num_turns`: turns taken; `turns_left`: turns that this launch may still take;
`goes_on`: 1 if it takes another; `in_flight`: 1 if a stage runs between two turns; `asked`: the
request of the front ends to the loop; `idle`: 1 if the last turn found no work; `stopped`: 1 if it
was asked to stop and has; `num_fetches`: records that the block of this turn has read. `launch_ns`:
engine time of a launch, 0 once the device has set its clock by it; `clock_ns`: the device's timer
at engine time 0; `now_ns`: time of the last turn; `pause`: 1 if the host wants the launch to end;
`preempted`: 1 if the frame parked last gave way to an arrival; `longest_ns`: longest time from a
turn that chose a stage to the next; `policy_error`: the last answer of `decide` that was not OK;
`shown_ns`: when the engine last published its load to the front ends; `group`: the group of the
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
