// Made from qllm/device/layout.py by `python -m qllm.device.layout`; do not edit.
#pragma once
namespace qllm {
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;
const i64 kVersion = 6;
const i64 kNone = -9223372036854775807LL - 1;
const i32 kCostLevels = 32;
const i32 kMostNumbers = 6;
enum Kind { IDLE = 0, WAIT = 1, START = 2, RESUME = 3 };
enum Answer { OK = 0, EMPTY_PLAN = 1, STALLS = 2, NO_KV = 3, NO_ROOM = 4 };
enum EffectKind { KILL = 1, DROP = 2, EVICT = 3, SPLIT = 4 };
enum Place { NOWHERE = 0, ADMITTED = 1, WAITING = 2, UNRANKED = 3 };
enum RowFlag { SAMPLES = 1, DEAD = 2 };
enum Call { CALL_START = 0, CALL_ADD_SLOTS = 1, CALL_RANK_ANEW = 2, CALL_ADD = 3, CALL_REMOVE = 4, CALL_EVICT = 5, CALL_ADOPT = 6, CALL_NEW_FRAME = 7, CALL_PARK = 8, CALL_DECIDE = 9, CALL_DONE = 10, CALL_STOPPED = 11, CALL_FAILED = 12 };

struct Request {
  i64 id;
  i64 arrival_ns;
  i64 priority;
  i64 ttft_ns;
  i64 tpot_ns;
  i64 served_ns;
  i64 last_progress_ns;
  i64 first_token_ns;
  i64 last_token_ns;
  i64 tier;
  i64 key;
  i64 mark;
  i64 gone;
  i32 num_prompt;
  i32 num_tokens;
  i32 num_computed;
  i32 num_blocks;
  i32 first_block;
  i32 last_block;
  i32 front_lo;
  i32 front_hi;
  i32 front_layer;
  i32 frame;
  i32 evictions;
  i32 preemptions;
  i32 failures;
  i32 place;
  i32 next;
  i32 live;
};
static_assert(sizeof(Request) == 168, "Request");

struct Row {
  i64 request_id;
  i32 lo;
  i32 hi;
  i32 start;
  i32 end;
  i32 slot;
  i32 flags;
};
static_assert(sizeof(Row) == 32, "Row");

struct Frame {
  i64 id;
  i64 parked_ns;
  i64 stop_below;
  i32 num_rows;
  i32 layer;
  i32 inside;
  i32 grain;
  i32 next;
  i32 reserved;
};
static_assert(sizeof(Frame) == 48, "Frame");

struct Tier {
  i64 tier;
  i32 decodes;
  i32 decodes_end;
  i32 prefills;
  i32 prefills_end;
  i32 waiting;
  i32 waiting_end;
  i32 admitted_end;
  i32 cohort;
};
static_assert(sizeof(Tier) == 40, "Tier");

struct Effect {
  i64 frame_id;
  i64 request_id;
  i64 for_request;
  i32 kind;
  i32 lost;
};
static_assert(sizeof(Effect) == 32, "Effect");

struct State {
  i64 version;
  i64 at_requests;
  i64 at_frames;
  i64 at_frame_rows;
  i64 at_parked;
  i64 at_admitted;
  i64 at_waiting;
  i64 at_unranked;
  i64 at_suspects;
  i64 at_next_block;
  i64 at_free_blocks;
  i64 at_marks;
  i64 at_effects;
  i64 at_tiers;
  i64 at_order;
  i64 at_decodes;
  i64 at_prefills;
  i64 at_chosen;
  i64 at_plan_rows;
  i64 capacity;
  i64 seats;
  i64 num_blocks;
  i64 num_marks;
  i64 num_layers;
  i64 max_step_tokens;
  i64 block_size;
  i64 finest_grain;
  i64 max_segment_ns;
  i64 whole_steps;
  i64 floor_rate;
  i64 floor_window_ns;
  i64 floor_slice_ns;
  i64 grain;
  i64 reads;
  i64 chunk_tokens;
  i64 step_tokens;
  i64 slack_min_tokens;
  i64 slack_tpot_ms;
  i64 group_tokens;
  i64 max_groups;
  i64 ride_unbounded;
  i64 max_prompt_gap_ms;
  i64 max_be_stall_ms;
  double ride_frac;
  i64 decode_ns[32];
  i64 num_decode_ns;
  i64 prefill_token_ns;
  i64 ride_credit_ns;
  i64 ride_margin_ns;
  i64 ride_spent_ns;
  i64 ride_best_ns;
  i64 owed_ns;
  i64 owed_since_ns;
  i64 owed_ls;
  i64 owed_grows;
  i64 owed_pays;
  i64 ls_ns;
  i64 be_ns;
  i64 paid_ns;
  i64 idle_since_ns;
  i64 num_live;
  i64 num_free;
  i64 free_request;
  i64 free_frame;
  i64 next_frame_id;
  i64 epoch;
  i64 num_odd;
  i64 num_gone;
  i64 running;
  i64 num_parked;
  i64 num_admitted;
  i64 num_waiting;
  i64 num_unranked;
  i64 num_suspects;
  i64 num_effects;
  i64 kind;
  i64 decided_frame;
  i64 slice_ns;
  i64 wait_until_ns;
  i64 stuck;
};
static_assert(sizeof(State) == 888, "State");

// The arrays of a block: X(type, name).
#define QLLM_SECTIONS(X) X(Request, requests) X(Frame, frames) X(Row, frame_rows) X(i32, parked) X(i32, admitted) X(i32, waiting) X(i32, unranked) X(i32, suspects) X(i32, next_block) X(i32, free_blocks) X(i32, marks) X(Effect, effects) X(Tier, tiers) X(i32, order) X(i32, decodes) X(i32, prefills) X(i32, chosen) X(Row, plan_rows)
}  // namespace qllm
