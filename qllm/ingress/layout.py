"""Layout of the bytes that front ends and the engine share: numpy dtypes, and C from them.

Every record starts with HEADER and ends with TRAILER. Both hold the record's sequence number.
Between them are the record's fixed fields, and then arrays whose lengths are among the fields. All
numbers are little-endian. Every field is at a multiple of its size.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from qllm.ingress.structs import RING_END, TYPEDEFS, Dtype, c_struct
from qllm.types import MAX_TIME_MS, PRIORITY_LIMIT

MAGIC = 0x716C_6C6D_5249_4E47
"""First word of every shared segment ("qllmRING")."""
VERSION = 7
"""Version of everything in this file. A segment of another version is refused."""
LINE = 64
"""Bytes of a cache line. A record's size is a multiple of a line, and no two writers share a
line."""
NUMBER_BITS = 40
"""Bits of a request id for the front end's count. An id is (front end << NUMBER_BITS) | count."""
RECORDS = Path(__file__).parent / "csrc" / "records.h"
"""Path of the file with the result of `emit_records`, for the engine's ends in C++."""

HEADER: Dtype = np.dtype([("seq", "<u8"), ("length", "<u4"), ("kind", "<u2"), ("flags", "<u2")])
"""First bytes of a record. `length` counts its bytes, header and trailer included, and is a
multiple of LINE."""
TRAILER: Dtype = np.dtype([("crc", "<u4"), ("reserved", "<u4"), ("seq", "<u8")])
"""Last bytes of a record. `crc` is the CRC-32 (zlib) of all bytes before the trailer. `seq` is
written last."""

REQUEST_KIND, CANCEL_KIND, TOKEN_KIND, FINISH_KIND, PROMPT_KIND, UPDATE_KIND = 1, 2, 3, 4, 5, 6
REVISE_KIND = 7

HAS_DEADLINE, IGNORE_EOS, HAS_CACHE, HAS_LIMITS, IS_OPEN = 1, 2, 4, 8, 16
"""Flags of a request. With HAS_CACHE, `cache_salt` (zeros if none) and the f8 `cache_ttl_s` (NaN if
none) follow its arrays, CACHE_BYTES together. With HAS_LIMITS, u4 bytes and JSON come last: the
fields of SamplingParams without a field here. With IS_OPEN the prompt is streaming, and revisions
may follow."""
SALT_BYTES, CACHE_BYTES = 32, 40
REQUEST: Dtype = np.dtype(
    [
        ("header", HEADER),
        ("request_id", "<u8"),
        ("arrival_ns", "<i8"),
        ("deadline_ns", "<i8"),
        ("seed", "<u8"),
        ("top_k", "<u8"),
        ("temperature", "<f8"),
        ("top_p", "<f8"),
        ("min_p", "<f8"),
        ("repetition_penalty", "<f8"),
        ("presence_penalty", "<f8"),
        ("frequency_penalty", "<f8"),
        ("slo_ttft_ms", "<f8"),
        ("slo_tpot_ms", "<f8"),
        ("priority", "<i4"),
        ("logprobs", "<i4"),
        ("max_tokens", "<u4"),
        ("num_stop_ids", "<u4"),
        ("num_stop_token_ids", "<u4"),
        ("num_logit_bias", "<u4"),
        ("num_prompt", "<u4"),
        ("num_stops", "<u4"),
        ("num_name_bytes", "<u4"),
        ("num_stop_bytes", "<u4"),
        ("num_output", "<u4"),
        ("prompt_logprobs", "<u4"),
    ]
)
"""Fixed fields of a request. A target of NaN is "no target", and logprobs = -1 is "none".
prompt_logprobs is one more than the alternatives per token, and 0 is "none". These arrays follow,
in this order: i8 stop_ids, i8 stop_token_ids, f8 bias values, u4 bias ids, u4 prompt, u4 output so
far (of a request that an engine left unfinished), u4 bytes per stop string, name, stop strings
(UTF-8). The engine stores stop strings only for checkpoints, and does not look for them."""

REVISE: Dtype = np.dtype([("header", HEADER), ("keep", "<u4"), ("reserved", "<u4")])
"""A revision, in the ring of its request and after that request. From `request_id` on, it has the
fields of a request, flags included. The new prompt is the old one's first `keep` tokens, and then
the tokens of this record. With IS_OPEN more revisions may follow, and only the tokens count.
Without IS_OPEN the prompt is whole, and the sampling is that of this record."""

CANCEL: Dtype = np.dtype(
    [("header", HEADER), ("request_id", "<u8"), ("reason", "<u4"), ("reserved", "<u4")]
)
"""A cancel. `reason` is an index into REASONS."""

SETS_PRIORITY, PAUSES, RESUMES = 1, 2, 4
"""Bits of `what` in an update."""
UPDATE: Dtype = np.dtype(
    [("header", HEADER), ("request_id", "<u8"), ("priority", "<i4"), ("what", "<u4")]
)
"""An update, in the cancel ring and as long as a cancel: a new class, a pause, or the pause's
end."""

HAS_LOGPROBS, HAS_CONFIDENCE = 1, 2
"""Flags of a token."""
TOKEN: Dtype = np.dtype(
    [
        ("header", HEADER),
        ("request_id", "<u8"),
        ("at_ns", "<i8"),
        ("logprob", "<f8"),
        ("token_id", "<u4"),
        ("num_top", "<u4"),
    ]
)
"""A token. After its fields come f8 log-probabilities and u4 ids of the alternatives, most likely
first. With HAS_CONFIDENCE an f8 follows: the largest probability."""

PROMPT: Dtype = np.dtype(
    [
        ("header", HEADER),
        ("request_id", "<u8"),
        ("first", "<u4"),
        ("num_tokens", "<u4"),
        ("num_top", "<u4"),
        ("reserved", "<u4"),
    ]
)
"""Log-probabilities of tokens of a prompt, from number `first` on (0 is the prompt's second token).
This record comes before the request's first token. After its fields come f4 of the tokens, f4 of
the alternatives (`num_top` per token, most likely first), and u4 ids of the alternatives."""

HAS_METRICS, HAS_ERROR, HAS_CACHED, HAS_PIECES, HAS_DRAFTS = 1, 2, 4, 8, 16
"""Flags of a finish. With HAS_CACHED, u4 num_cached_tokens follows the error. With HAS_PIECES, f8
open_ms, u4 num_revisions and u4 revise_lost_tokens follow. With HAS_DRAFTS, u4 num_accepted_drafts
and u4 num_rejected_drafts come last."""
FINISH: Dtype = np.dtype(
    [
        ("header", HEADER),
        ("request_id", "<u8"),
        ("arrival_ns", "<i8"),
        ("queue_ms", "<f8"),
        ("parked_ms", "<f8"),
        ("max_stall_ms", "<f8"),
        ("reason", "<u4"),
        ("priority", "<i4"),
        ("num_prompt_tokens", "<u4"),
        ("num_prefilled_tokens", "<u4"),
        ("preemptions", "<u4"),
        ("evictions", "<u4"),
        ("evict_recomputed_tokens", "<u4"),
        ("retry_recomputed_tokens", "<u4"),
        ("preempt_recomputed_tokens", "<u4"),
        ("num_error_bytes", "<u4"),
    ]
)
"""The end of a request. The error comes after the fields, in UTF-8. Metrics that the front end
computes from the times of tokens are omitted."""

REASONS = ("stop", "length", "cancelled", "timeout", "error")

MAX_ERROR_BYTES = 2000

CONTROL_MEMORY: Dtype = np.dtype(
    [
        ("magic", "<u8"),
        ("version", "<u4"),
        ("pid", "<u4"),
        ("zero_ns", "<i8"),
        ("reserved0", "u1", (LINE - 24,)),
        ("bell", "<u8"),
        ("reserved1", "u1", (LINE - 8,)),
        ("drain", "<u8"),
        ("stop", "<u8"),
        ("reserved2", "u1", (LINE - 16,)),
        ("heartbeat_ns", "<i8"),
        ("stats_version", "<u8"),
        ("num_steps", "<u8"),
        ("num_live", "<u8"),
        ("num_waiting", "<u8"),
        ("reserved3", "u1", (LINE - 40,)),
        ("num_error_bytes", "<u8"),
        ("error", "u1", (MAX_ERROR_BYTES,)),
        ("reserved4", "u1", (40,)),
    ]
)
"""The control block, one per engine. `zero_ns` is CLOCK_MONOTONIC at engine time 0. `bell` gets a
new, unused number from each front end that wrote a record. So two writes at once still change
`bell`. Front ends write `drain` and `stop`. The engine writes the rest; `stats_version` is odd
while the statistics change. `error` is the reason why the engine ended."""

FRONT_END: Dtype = np.dtype(
    [
        ("magic", "<u8"),
        ("version", "<u4"),
        ("number", "<u4"),
        ("capacity", "<u8", (4,)),
        ("reserved0", "u1", (LINE - 48,)),
        ("ls_tail", "<u8"),
        ("be_tail", "<u8"),
        ("cancel_tail", "<u8"),
        ("progress", "<u8"),
        ("reserved1", "u1", (LINE - 32,)),
        ("token_tail", "<u8"),
        ("reserved2", "u1", (LINE - 8,)),
    ]
)
"""The block of a front end. Its four rings follow (LS, BE, cancel, token), `capacity` bytes each. A
tail counts the bytes that the ring's reader has taken. `progress`: requests taken << 32 | requests
waiting."""

STRUCTS = {
    "qllm_header": HEADER,
    "qllm_trailer": TRAILER,
    "qllm_request": REQUEST,
    "qllm_revise": REVISE,
    "qllm_cancel": CANCEL,
    "qllm_update": UPDATE,
    "qllm_token": TOKEN,
    "qllm_prompt": PROMPT,
    "qllm_finish": FINISH,
    "qllm_control": CONTROL_MEMORY,
    "qllm_front_end": FRONT_END,
}

_C = {"u1": "uint8_t", "u2": "uint16_t", "u4": "uint32_t", "u8": "uint64_t"}
_C |= {"i4": "int32_t", "i8": "int64_t", "f8": "double"}
_PACK = {"u1": "B", "u2": "H", "u4": "I", "u8": "Q", "i4": "i", "i8": "q", "f8": "d"}


def body_struct(record: Dtype) -> struct.Struct:
    """Packs the fixed fields of a record, in order, without its header."""
    codes = (_PACK[field.str[1:]] for name, field in _fields(record) if name != "header")
    return struct.Struct("<" + "".join(codes))


def offset(block: Dtype, name: str) -> int:
    """Return the offset of a field, in bytes."""
    assert block.fields is not None
    return int(block.fields[name][1])


def cell(block: Dtype, name: str) -> int:
    """Return the index of an 8-byte field in a view of 8-byte words."""
    assert block[name].itemsize == 8
    assert offset(block, name) % 8 == 0
    return offset(block, name) // 8


def _fields(dtype: Dtype) -> Iterator[tuple[str, Dtype]]:
    assert dtype.fields is not None
    assert dtype.names is not None
    for name in dtype.names:
        yield name, dtype.fields[name][0]


_NUMBERS: dict[str, int] = {
    "VERSION": VERSION,
    "LINE": LINE,
    "REQUEST_KIND": REQUEST_KIND,
    "CANCEL_KIND": CANCEL_KIND,
    "TOKEN_KIND": TOKEN_KIND,
    "FINISH_KIND": FINISH_KIND,
    "PROMPT_KIND": PROMPT_KIND,
    "UPDATE_KIND": UPDATE_KIND,
    "REVISE_KIND": REVISE_KIND,
    "HAS_DEADLINE": HAS_DEADLINE,
    "IGNORE_EOS": IGNORE_EOS,
    "IS_OPEN": IS_OPEN,
    "HAS_LOGPROBS": HAS_LOGPROBS,
    "HAS_METRICS": HAS_METRICS,
    "HAS_ERROR": HAS_ERROR,
    "MAX_TIME_MS": MAX_TIME_MS,
    "PRIORITY_LIMIT": PRIORITY_LIMIT,
    **{f"REASON_{reason.upper()}": i for i, reason in enumerate(REASONS)},
}


def emit_header() -> str:
    """Return a C header (C99) with a struct per record and block, for a front end in C."""
    lines = ["#ifndef QLLM_RINGS_H", "#define QLLM_RINGS_H", "#include <stdint.h>", ""]
    numbers = {"MAGIC": f"{MAGIC:#x}ULL", **_NUMBERS}
    lines += [f"#define QLLM_{name} {value}" for name, value in numbers.items()]
    known = {dtype: name for name, dtype in STRUCTS.items()}
    for struct_name, dtype in STRUCTS.items():
        lines += ["", f"struct {struct_name} {{"]
        for name, field in _fields(dtype):
            base, shape = field.subdtype or (field, ())
            kind = f"struct {known[base]}" if base in known else _C[base.str[1:]]
            lines.append(f"    {kind} {name}{''.join(f'[{n}]' for n in shape)};")
        lines.append("};")
    return "\n".join([*lines, "", "#endif", ""])


def emit_records() -> str:
    """Return `records.h`: the same structs for the engine's ends, in C++ for host and device."""
    numbers = {"NUMBER_BITS": NUMBER_BITS, **_NUMBERS}
    del numbers["VERSION"]  # the version of the layout; that of the extension covers both
    structs = {
        "RecordHeader": HEADER,
        "RequestRecord": REQUEST,
        "CancelRecord": CANCEL,
        "TokenRecord": TOKEN,
        "FinishRecord": FINISH,
        "ControlMemory": CONTROL_MEMORY,
        "RingEnd": RING_END,
    }
    known = {dtype: name for name, dtype in structs.items()}
    lines = [
        "// Made from qllm/ingress/layout.py by `python -m qllm.ingress.layout`; do not edit.",
        "#pragma once",
        "namespace qllm {",
        *TYPEDEFS,
        *(f"const u32 k{name.title().replace('_', '')} = {n};" for name, n in numbers.items()),
        "",
    ]
    for struct_name, dtype in structs.items():
        lines += c_struct(struct_name, dtype, known)
    return "\n".join([*lines, "}  // namespace qllm", ""])


if __name__ == "__main__":
    RECORDS.write_text(emit_records())
