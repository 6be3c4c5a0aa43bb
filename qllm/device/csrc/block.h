// The block of state, and small functions on it. No pointers are kept between calls.
#pragma once
#include "state.h"

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define QLLM_HD __host__ __device__
#define QLLM_HD_CALL __host__ __device__ __noinline__  // large: inlined everywhere, it is 400 kB
#else
#define QLLM_HD
#define QLLM_HD_CALL
#endif

namespace qllm {

const i64 kNsPerMs = 1000000;
const i64 kNoDeadline = 1LL << 62;
const i64 kNoStop = -(1LL << 31);
const i64 kControl = -(1LL << 30);  // the word of a cancel: smaller than every priority
const i64 kAnyArrival = (1LL << 31) - 1;
const i64 kMaxIdleNs = 10000 * kNsPerMs;
const i64 kMost = 1LL << 62;
const i32 kGrainStep = 0;
const i32 kReadsProgress = 1, kReadsTime = 2;
const i64 kPriorityLs = 0;

// rank(arrival_ns, priority, deadline_ns, prompt_tokens, done_tokens, served_ns, now_ns, out):
// out[0] is the tier, out[1] the key. On the device it is linked in as qllm_rank.
typedef void (*RankFunction)(i64, i64, i64, i64, i64, i64, i64, i64*);
#if defined(__CUDA_ARCH__)
extern "C" __device__ void qllm_rank(i64, i64, i64, i64, i64, i64, i64, i64*);
#endif

template <class T>
QLLM_HD inline T least(T a, T b) {
  return b < a ? b : a;
}
template <class T>
QLLM_HD inline T most(T a, T b) {
  return a < b ? b : a;
}
QLLM_HD inline i64 floor_div(i64 a, i64 b) {  // b > 0; rounds down, as Python does
  return a >= 0 ? a / b : -((b - 1 - a) / b);
}

// A thread of a block that shares work: it takes the numbers equal to `i`, modulo the count.
struct Share {
  i32 thread, threads;

  // Return this thread's first number at or after `first`.
  QLLM_HD i64 from(i64 first) const {
    i64 ahead = (thread - first) % threads;
    return first + (ahead < 0 ? ahead + threads : ahead);
  }
  QLLM_HD bool has(i64 number) const { return number % threads == thread; }
};

// The rows of a frame.
struct Rows {
  Row *first, *last;

  QLLM_HD Row* begin() const { return first; }
  QLLM_HD Row* end() const { return last; }
};

struct Block {
  State* s;
  RankFunction rank_function;
#define X(type, name) type* name;
  QLLM_SECTIONS(X)
#undef X

  QLLM_HD Block(State* state, RankFunction rank) : s(state), rank_function(rank) {
#define X(type, name) name = (type*)((char*)state + state->at_##name);
    QLLM_SECTIONS(X)
#undef X
  }

  // -- requests

  QLLM_HD bool is_decoding(const Request& r) const {
    return r.num_tokens - r.num_computed == 1 && r.num_tokens > r.num_prompt;
  }
  QLLM_HD i64 deadline_ns(const Request& r) const {
    if (r.last_token_ns == kNone) return r.ttft_ns == kNone ? kNone : r.arrival_ns + r.ttft_ns;
    return r.tpot_ns == kNone ? kNone : r.last_token_ns + r.tpot_ns;
  }
  QLLM_HD bool is_between_groups(const Request& r) const {
    return r.front_layer >= 0 && r.frame < 0;
  }
  QLLM_HD i64 blocks_for(i64 num_tokens) const {
    return (num_tokens + s->block_size - 1) / s->block_size;
  }

  // -- rows

  QLLM_HD Row next_row(i32 slot, i64 max_tokens = kMost) const {
    const Request& r = requests[slot];
    Row row;
    row.request_id = r.id;
    row.slot = slot;
    row.end = i32(s->num_layers);
    row.flags = 0;
    if (r.front_layer >= 0) {
      row.lo = r.front_lo;
      row.hi = r.front_hi;
      row.start = r.front_layer;
    } else {
      row.lo = r.num_computed;
      row.hi = i32(least<i64>(r.num_tokens, r.num_computed + max_tokens));
      row.start = 0;
    }
    return row;
  }
  // Level L2: a chunk ends at the last mark at or before its end, or at the first mark there is.
  QLLM_HD void align(Row& row) const {
    const Request& r = requests[row.slot];
    if (!s->num_marks || r.front_layer >= 0 || row.hi >= r.num_tokens) return;
    i32 from = r.num_prompt;  // from here on every token is a block of its own
    if (row.lo >= from || row.hi >= from) return;
    i32 low = 0, high = i32(s->num_marks);
    while (low < high) {  // the first mark after row.hi
      i32 middle = (low + high) / 2;
      if (marks[middle] <= row.hi)
        low = middle + 1;
      else
        high = middle;
    }
    if (low && marks[low - 1] > row.lo)
      row.hi = marks[low - 1];
    else
      row.hi = low < s->num_marks ? least(marks[low], from) : from;
  }
  QLLM_HD Row* rows_of(i32 frame) const { return frame_rows + i64(frame) * s->seats; }
  QLLM_HD Rows all_rows(i32 frame) const {
    Rows rows = {rows_of(frame), rows_of(frame) + frames[frame].num_rows};
    return rows;
  }
  // Return the first layer that a row of a frame still owes.
  QLLM_HD i32 frontier_layer(const Frame& f, const Row& row) const {
    return least(most(f.layer, row.start), row.end);
  }
  // Return true if a row of a frame still owes layers, or waits at the end of the sweep.
  QLLM_HD bool is_live(const Frame& f, const Row& row) const {
    if (row.flags & DEAD) return false;
    return frontier_layer(f, row) < row.end || row.end == s->num_layers;
  }
  // Return true if the request of a row still lives (its slot may have a new owner).
  QLLM_HD bool has_request(const Row& row) const {
    const Request& r = requests[row.slot];
    return r.live && r.id == row.request_id;
  }
  QLLM_HD bool has_live_request(const Row& row) const {
    return !(row.flags & DEAD) && has_request(row);
  }

  // -- costs

  QLLM_HD i64 decode_cost(i64 num_rows) const {
    if (num_rows <= 0) return 0;
    i32 exponent = 0;
    while ((num_rows >> exponent) > 1) exponent++;
    i32 last = i32(s->num_decode_ns) - 1;
    if (exponent >= last) return (s->decode_ns[last] * num_rows) >> last;
    i64 low = s->decode_ns[exponent], high = s->decode_ns[exponent + 1];
    return low + (((high - low) * (num_rows - (1LL << exponent))) >> exponent);
  }
};

// Return the time that worse tiers may take from one step of these decodes.
QLLM_HD inline i64 ride_allowance_ns(const Block& b, i64 num_decodes, i64 least_tpot_ns) {
  i64 predicted = b.decode_cost(num_decodes);
  if (least_tpot_ns != kNone) return most<i64>(0, least_tpot_ns - predicted);
  return i64(double(predicted) * b.s->ride_frac);
}

}  // namespace qllm
