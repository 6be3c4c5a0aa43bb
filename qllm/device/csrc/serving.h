// Made from qllm/device/serving.py by `python -m qllm.device.serving`; do not edit.
#pragma once
#include "../../ingress/csrc/records.h"
namespace qllm {
const i32 kServingVersion = 6;
const i32 kMostStopIds = 8;
const i32 kMostClaims = 16;
const i32 kMostPublished = 64;
const i32 kMostPending = 256;
const i32 kTextBytes = 240;
const i32 kCauses = 3;
enum Phase { FREE = 0, LIVE = 1, ENDED = 2 };
enum EventKind { ADDED = 1, REMOVED = 2 };
enum Attached { DETACHED = 0, ATTACHED = 1, LEAVING = 2 };
enum Why { WELL = 0, BROKEN_RING = 1, BAD_RECORD = 2, FOREIGN_ID = 3, DOUBLE_ID = 4 };
enum Asked { SERVE = 0, DRAINED = 1, STOP = 2 };
enum ServerCall { SERVER_OPEN = 0, SERVER_CLAIM = 1, SERVER_ARRIVED = 2, SERVER_ASKED = 3, SERVER_DECIDE = 4, SERVER_DONE = 5, SERVER_STOPPED = 6, SERVER_FAILED = 7, SERVER_SAMPLED = 8, SERVER_END = 9, SERVER_FLUSH = 10, SERVER_DETACH = 11, SERVER_SHOW = 12, SERVER_FIND = 13 };

struct Serving {
  u64 seed;
  i64 top_k;
  double temperature;
  double top_p;
  double min_p;
  i64 deadline_ns;
  i64 planned_ns;
  i64 last_ran_ns;
  i64 stall_ns;
  i64 parked_ns;
  i64 parked_at_ns;
  i64 frame_id;
  i64 stop_ids[8];
  i32 lost_from[3];
  i32 lost_to[3];
  i32 recomputed[3];
  i32 lo;
  i32 hi;
  i32 depth;
  i32 num_stop_ids;
  i32 max_tokens;
  i32 front_end;
  i32 flags;
  i32 phase;
  i32 reason;
  i32 num_published;
  i32 owes;
  i32 next;
  i32 num_text;
  u8 text[240];
};
static_assert(sizeof(Serving) == 488, "Serving");

struct Pending {
  i64 request_id;
  i32 reason;
  i32 passed;
};
static_assert(sizeof(Pending) == 16, "Pending");

struct FrontEnd {
  RingEnd ls;
  RingEnd be;
  RingEnd cancel;
  RingEnd token;
  i64 number;
  i64 progress;
  i64 num_claimed;
  i64 num_refused;
  i64 num_ended;
  i64 num_written;
  i32 state;
  i32 why;
  i32 held;
  i32 owing;
  i32 cursor;
  i32 num_pending;
  Pending pending[256];
};
static_assert(sizeof(FrontEnd) == 4488, "FrontEnd");

struct Event {
  i64 request_id;
  i32 kind;
  i32 slot;
};
static_assert(sizeof(Event) == 16, "Event");

struct Send {
  i64 place;
  i64 seq;
  i64 request_id;
  i64 at_ns;
  i32 token;
  i32 front_end;
};
static_assert(sizeof(Send) == 40, "Send");

struct Fetch {
  i64 end;
  i64 seq;
  i64 length;
  i64 slot;
  i64 first_token;
  i64 num_tokens;
  i64 sum;
  i64 broken;
  i64 waits;
};
static_assert(sizeof(Fetch) == 72, "Fetch");

struct ServerState {
  i64 version;
  i64 at_serving;
  i64 at_tokens;
  i64 at_token_ns;
  i64 at_front_ends;
  i64 at_buckets;
  i64 at_events;
  i64 at_sends;
  i64 capacity;
  i64 max_total_tokens;
  i64 num_front_ends;
  i64 num_buckets;
  i64 vocab_size;
  i64 ls_slots;
  i64 shared_slots;
  i64 control;
  i64 first_front_end;
  i64 num_held;
  i64 num_events;
  i64 next_deadline_ns;
  i64 most_layers;
  i64 bell_seen;
  i64 word;
  i64 lowered_ns;
  i64 num_steps;
  i64 num_tokens;
  i64 num_silent;
  i64 num_sends;
  i64 num_taken;
  i64 next_ring;
  Fetch fetch;
};
static_assert(sizeof(ServerState) == 312, "ServerState");

// The arrays of a block: X(type, name).
#define QLLM_SERVER_SECTIONS(X) X(Serving, serving) X(i32, tokens) X(i64, token_ns) X(FrontEnd, front_ends) X(i32, buckets) X(Event, events) X(Send, sends)
}  // namespace qllm
