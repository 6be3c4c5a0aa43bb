"""Layout of served requests on the device, next to the scheduler's state: tokens, sampling, end.

This is the second block of memory, next to STATE (see `layout`), with the same slots. It has
SERVER, then the arrays of SECTIONS, each at the byte offset that SERVER contains. Addresses are
8-byte numbers. A request holds its slot from the claim until its last record is in its front end's
token ring.
"""

from pathlib import Path

import numpy as np

from qllm.device.layout import I4, I8, Section, c_enums, c_sections, numbers
from qllm.ingress.structs import RING_END, Dtype, c_struct

VERSION = 6
"""Version of everything in this file."""
MOST_STOP_IDS = 8
"""Most token ids that end a request. The device does not serve a request with more."""
MOST_CLAIMS = 16
"""Most records that one call takes from one ring."""
MOST_PUBLISHED = 64
"""Most tokens of one request that one call writes."""
MOST_PENDING = 256
"""Most cancels that are stored per front end, for requests that are still in its rings."""
TEXT_BYTES = 240
"""Most bytes of an error message. Longer messages are cut."""
HEADER = Path(__file__).parent / "csrc" / "serving.h"

FREE, LIVE, ENDED = range(3)
"""Phases of a slot. ENDED: some records of the slot still wait for room in the token ring."""
ADDED, REMOVED = 1, 2
"""Kinds of an event."""
DETACHED, ATTACHED, LEAVING = range(3)
"""States of a front end. LEAVING: the host has seen its end, and `claim` will detach it."""
WELL, BROKEN_RING, BAD_RECORD, FOREIGN_ID, DOUBLE_ID = range(5)
"""Reasons why a front end was cut off. WELL means that it was not cut off."""
SERVE, DRAINED, STOP = range(3)
"""Requests of the front ends to the loop. DRAINED: no new requests come, and no request is left."""
CALLS = (
    *("open", "claim", "arrived", "asked", "decide", "done", "stopped", "failed", "sampled"),
    *("end", "flush", "detach", "show", "find"),
)
"""Functions of the server. A kernel launch selects a function by its index."""
CAUSES = 3
"""Number of causes of recomputed tokens: evicted, retried, preempted (`qllm.record.metrics`)."""

SERVING: Dtype = np.dtype(
    [
        ("seed", "<u8"),
        *numbers("top_k"),
        *numbers("temperature", "top_p", "min_p", kind="<f8"),
        *numbers("deadline_ns", "planned_ns", "last_ran_ns", "stall_ns", "parked_ns"),
        *numbers("parked_at_ns", "frame_id"),
        ("stop_ids", "<i8", (MOST_STOP_IDS,)),
        ("lost_from", "<i4", (CAUSES,)),
        ("lost_to", "<i4", (CAUSES,)),
        ("recomputed", "<i4", (CAUSES,)),
        *numbers("lo", "hi", "depth", kind="<i4"),
        *numbers("num_stop_ids", "max_tokens", "front_end", "flags", kind="<i4"),
        *numbers("phase", "reason", "num_published", "owes", "next", "num_text", kind="<i4"),
        ("text", "u1", (TEXT_BYTES,)),
    ]
)
"""Fields of the request in a slot.

`max_tokens`: most tokens to sample; `front_end`: index of the front end that gets them.
`planned_ns` to `depth` are the numbers of `qllm.record.metrics`: `parked_at_ns` and `frame_id` of
its parked frame, `lo`, `hi` and `depth` of its computed row, and `lost_*`, per cause, the tokens
that must be planned again. `reason` and `text`: its end; `owes`: 1 if records wait for room;
`next` links the slots of a bucket."""

PENDING: Dtype = np.dtype([("request_id", "<i8"), *numbers("reason", "passed", kind="<i4")])
"""A cancel that came before its request was claimed. In `passed`, bit 0 is set once the LS ring was
seen empty, and bit 1 once the BE ring was. If both are set, the request is in neither ring."""

FRONT_END: Dtype = np.dtype(
    [
        *((name, RING_END) for name in ("ls", "be", "cancel", "token")),
        *numbers("number", "progress"),
        *numbers("num_claimed", "num_refused", "num_ended", "num_written"),
        *numbers("state", "why", "held", "owing", "cursor", "num_pending", kind="<i4"),
        ("pending", PENDING, (MOST_PENDING,)),
    ]
)
"""State of a front end. `number`: its number, which the ids of its requests contain. `progress`:
address of its progress word. `num_claimed` counts requests taken out of its rings, and
`num_refused` those of them that ended at once. `num_ended` counts ended requests, `num_written`
records in its token ring. `held`: number of its slots; `owing`: number of those with records that
wait for room; `cursor`: the slot after which the search for these starts."""

EVENT: Dtype = np.dtype([("request_id", "<i8"), *numbers("kind", "slot", kind="<i4")])
"""Event for the host: a request took a slot, or is no longer computed. The caller reads the events
and sets `num_events` to 0."""

SEND: Dtype = np.dtype(
    [*numbers("place", "seq", "request_id", "at_ns"), *numbers("token", "front_end", kind="<i4")]
)
"""A token record with a reserved place in its ring. The threads of a block write all such records
together."""

FETCH: Dtype = np.dtype(
    [
        *numbers(
            "end", "seq", "length", "slot", "first_token", "num_tokens", "sum", "broken", "waits"
        )
    ]
)
"""A request's record that the threads of a block read. They compute the record's checksum, and copy
its tokens into a slot. `end`: address of the ring's end; `seq`: number of the record;
`first_token`: bytes before the tokens, a multiple of 8; `sum`: the checksum; `broken`: 1 if a token
is not in the vocabulary; `waits`: 1 until the record is read."""

SECTIONS = (
    Section("serving", SERVING, "capacity"),
    Section("tokens", I4, "capacity * max_total_tokens"),
    Section("token_ns", I8, "capacity * max_total_tokens"),
    Section("front_ends", FRONT_END, "num_front_ends"),
    Section("buckets", I4, "num_buckets"),
    Section("events", EVENT, "capacity * 4"),
    Section("sends", SEND, "capacity"),
)
"""Contents of the arrays. `tokens`: prompt and output of the request in slot s, from index
s * max_total_tokens on; `token_ns`: time when each was sampled. `buckets`: heads of the chains in
which a slot is found by the id of its request."""

SERVER: Dtype = np.dtype(
    [
        *numbers("version", *(f"at_{section.name}" for section in SECTIONS)),
        *numbers("capacity", "max_total_tokens", "num_front_ends", "num_buckets"),
        *numbers("vocab_size", "ls_slots", "shared_slots", "control"),
        *numbers("first_front_end", "num_held", "num_events", "next_deadline_ns", "most_layers"),
        *numbers("bell_seen", "word", "lowered_ns", "num_steps", "num_tokens"),
        *numbers("num_silent", "num_sends", "num_taken", "next_ring"),
        ("fetch", FETCH),
    ]
)
"""Head of the block: offsets; sizes; then numbers of the server. `ls_slots`: slots that BE requests
leave free; `shared_slots`: slots that every attached front end can have, however many the others
hold; `control`: address of the engine's control block; `num_held`: slots that are not free; `word`
and `lowered_ns`: results of `arrived`. `num_silent`: attached front ends that ring no bell: with
any, a turn looks at the rings anyway; `num_sends`: token records of this turn with reserved places;
`num_taken`: records that this claim took; `next_ring`: the ring where it continues, LS rings first;
`fetch`: the record that it waits for."""

STRUCTS = {"Serving": SERVING, "Pending": PENDING, "FrontEnd": FRONT_END, "Event": EVENT}
STRUCTS |= {"Send": SEND, "Fetch": FETCH, "ServerState": SERVER}
ENUMS = {
    "Phase": {"FREE": FREE, "LIVE": LIVE, "ENDED": ENDED},
    "EventKind": {"ADDED": ADDED, "REMOVED": REMOVED},
    "Attached": {"DETACHED": DETACHED, "ATTACHED": ATTACHED, "LEAVING": LEAVING},
    "Why": {
        "WELL": WELL,
        "BROKEN_RING": BROKEN_RING,
        "BAD_RECORD": BAD_RECORD,
        "FOREIGN_ID": FOREIGN_ID,
        "DOUBLE_ID": DOUBLE_ID,
    },
    "Asked": {"SERVE": SERVE, "DRAINED": DRAINED, "STOP": STOP},
    "ServerCall": {f"SERVER_{name.upper()}": index for index, name in enumerate(CALLS)},
}
_NUMBERS = {
    "ServingVersion": VERSION,
    "MostStopIds": MOST_STOP_IDS,
    "MostClaims": MOST_CLAIMS,
    "MostPublished": MOST_PUBLISHED,
    "MostPending": MOST_PENDING,
    "TextBytes": TEXT_BYTES,
    "Causes": CAUSES,
}


def emit_header() -> str:
    """Return `serving.h`: the structs of the block and the arrays behind it, for C++ and CUDA."""
    lines = [
        "// Made from qllm/device/serving.py by `python -m qllm.device.serving`; do not edit.",
        "#pragma once",
        '#include "../../ingress/csrc/records.h"',
        "namespace qllm {",
        *(f"const i32 k{name} = {value};" for name, value in _NUMBERS.items()),
        *c_enums(ENUMS),
        "",
    ]
    known = {dtype: name for name, dtype in STRUCTS.items()} | {RING_END: "RingEnd"}
    for name, dtype in STRUCTS.items():
        lines += c_struct(name, dtype, known)
    lines += [c_sections("QLLM_SERVER_SECTIONS", SECTIONS, known), "}  // namespace qllm", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    HEADER.write_text(emit_header())
