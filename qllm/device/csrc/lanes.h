// Made from qllm/device/lanes.py by `python -m qllm.device.lanes`; do not edit.
#pragma once
#include "state.h"
namespace qllm {
const i64 kLanesVersion = 4;
const i32 kBroken = -1;
const i64 kMostLatencies = 1024;
enum Branch { NOTHING = -1, CANNOT = -2 };
enum Became { GOES_ON = 0, PARKED = 1, OVER = 2 };

struct Stage {
  i32 start;
  i32 end;
  i32 tokens;
  i32 prefill;
  i32 head;
  i32 whole;
};
static_assert(sizeof(Stage) == 24, "Stage");

struct Lane {
  i64 at_ids;
  i64 at_pos;
  i64 at_slots;
  i64 at_seq;
  i64 at_gather;
  i64 at_tables;
  i64 at_decode;
  i64 at_prefill;
  i64 at_last;
  i64 at_positions;
  i64 at_seeds;
  i64 at_top_k;
  i64 at_temperature;
  i64 at_top_p;
  i64 at_min_p;
  i64 at_num_tokens;
  i64 at_tokens;
  i64 at_peaks;
  i64 loaded_frame;
  i32 loaded_layer;
  i32 loaded_rows;
  i32 max_rows;
  i32 max_pages;
  i32 block;
  i32 prefill_tiles;
};
static_assert(sizeof(Lane) == 176, "Lane");

struct Sampled {
  i32 slot;
  i32 token;
};
static_assert(sizeof(Sampled) == 8, "Sampled");

struct Group {
  i64 frame;
  i64 gone;
  i32 layer;
  i32 since;
  i32 from;
  i32 until;
  i32 num_tokens;
  i32 num_live;
  i32 prefill;
  i32 samples;
};
static_assert(sizeof(Group) == 48, "Group");

struct Lanes {
  i64 version;
  i64 at_stages;
  i64 at_starts;
  i64 at_lanes;
  i64 at_sampled;
  i64 at_latencies;
  i64 num_stages;
  i64 num_starts;
  i64 seats;
  i64 num_layers;
  i64 spare_slot;
  i64 branch;
  i64 layer;
  i64 fill;
  i64 start_ns;
  i64 num_sampled;
  i64 failure;
  i64 num_turns;
  i64 turns_left;
  i64 goes_on;
  i64 in_flight;
  i64 asked;
  i64 idle;
  i64 stopped;
  i64 num_fetches;
  i64 launch_ns;
  i64 clock_ns;
  i64 now_ns;
  i64 pause;
  i64 preempted;
  i64 num_preemptions;
  i64 longest_ns;
  i64 num_policy_errors;
  i64 policy_error;
  i64 shown_ns;
  Group group;
};
static_assert(sizeof(Lanes) == 328, "Lanes");

// The arrays of a block: X(type, name).
#define QLLM_LANES_SECTIONS(X) X(Stage, stages) X(i32, starts) X(Lane, lanes) X(Sampled, sampled) X(i64, latencies)
}  // namespace qllm
