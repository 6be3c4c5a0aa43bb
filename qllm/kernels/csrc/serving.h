// Made from qllm/device/serving.py by `python -m qllm.device.serving`; do not edit.
#pragma once
#include "state.h"
namespace qllm {
const i64 kServingVersion = 1;
const i32 kMostStopIds = 8;

struct Serving {
  i64 seed;
  i64 top_k;
  double temperature;
  double top_p;
  double min_p;
  i64 deadline_ns;
  i64 stop_ids[8];
  i32 num_stop_ids;
  i32 max_tokens;
  i32 front_end;
  i32 flags;
};
static_assert(sizeof(Serving) == 128, "Serving");

struct ServerState {
  i64 version;
  i64 at_serving;
  i64 at_tokens;
  i64 capacity;
  i64 max_total_tokens;
};
static_assert(sizeof(ServerState) == 40, "ServerState");

// The arrays of a block: X(type, name).
#define QLLM_SERVER_SECTIONS(X) X(Serving, serving) X(i32, tokens)
}  // namespace qllm
