// The history of a request, stored as it happens: the numbers of qllm/record/metrics.py that only
// the engine knows. The reference is `MetricsBuilder`; here events are calls.
#pragma once
#include "../../ingress/csrc/rings.h"
#include "scheduler.h"
#include "serving.h"

namespace qllm {

enum Cause { EVICTED = 0, RETRIED = 1, PREEMPTED = 2 };

struct Meter {
  Serving& x;

  QLLM_D explicit Meter(Serving& serving) : x(serving) {}

  QLLM_D void start() {
    x.planned_ns = x.last_ran_ns = x.parked_at_ns = kNone;
    x.stall_ns = x.parked_ns = x.frame_id = 0;
    for (i32 i = 0; i < kCauses; i++) x.lost_from[i] = x.lost_to[i] = x.recomputed[i] = 0;
    x.lo = x.hi = x.depth = 0;
  }
  // Note that its row is in a new program.
  QLLM_D void planned(const Row& row, i64 now_ns) {
    if (x.planned_ns == kNone) x.planned_ns = now_ns;
    if (x.last_ran_ns == kNone) x.last_ran_ns = now_ns;
    if (row.lo < (row.start < x.depth ? x.hi : x.lo)) lose(PREEMPTED, row.lo, x.hi);
    i32 lost = 0;  // mostly nothing is: then nothing is computed again
    for (i32 i = 0; i < kCauses; i++) lost |= x.lost_to[i];
    for (i32 i = 0; lost && i < kCauses; i++) {
      i32 again = least(row.hi, x.lost_to[i]) - most(row.lo, x.lost_from[i]);
      if (again <= 0) continue;
      x.recomputed[i] += again;
      x.lost_from[i] = row.hi;
    }
  }
  // Note that the runner worked on its frame.
  QLLM_D void worked(i64 start_ns, i64 end_ns) {
    unpark(start_ns);
    if (x.last_ran_ns == kNone) return;
    x.stall_ns = most(x.stall_ns, start_ns - x.last_ran_ns);
    x.last_ran_ns = end_ns;
  }
  // Note that the row did the layers below `layer`.
  QLLM_D void reached(const Row& row, i32 layer) {
    if (layer <= row.start) return;
    x.lo = row.lo;
    x.hi = row.hi;
    x.depth = layer;
  }
  QLLM_D void park(i64 frame_id, i64 now_ns) {
    x.frame_id = frame_id;
    x.parked_at_ns = now_ns;
  }
  QLLM_D void unpark(i64 now_ns) {
    if (x.parked_at_ns != kNone && x.parked_at_ns <= now_ns)
      x.parked_ns += now_ns - x.parked_at_ns;
    x.frame_id = 0;
    x.parked_at_ns = kNone;
  }
  // Note that KV from token `lo` on was lost, up to `hi` of the tokens.
  QLLM_D void lose(i32 cause, i32 lo, i32 hi) {
    i32 &from = x.lost_from[cause], &to = x.lost_to[cause];
    hi = most(hi, x.hi);
    bool some = from < to;
    from = some ? least(from, lo) : lo;
    to = some ? most(to, hi) : hi;
    x.lo = x.hi = least(lo, x.hi);
    x.depth = 0;
  }
  QLLM_D void evicted(i64 now_ns) {
    left(now_ns);
    i32 end = 0;
    for (i32 i = 0; i < kCauses; i++) {
      if (x.lost_from[i] < x.lost_to[i]) end = most(end, x.lost_to[i]);
      x.lost_from[i] = x.lost_to[i] = 0;
    }
    lose(EVICTED, 0, end);
  }
  // Note that it holds no KV from now on.
  QLLM_D void left(i64 now_ns) {
    unpark(now_ns);
    if (x.last_ran_ns == kNone) return;
    x.stall_ns = most(x.stall_ns, now_ns - x.last_ran_ns);
    x.last_ran_ns = kNone;
  }
  // Return the computed prompt tokens; those in part of the layers count as that part.
  QLLM_D i32 num_prefilled(i32 num_prompt, i64 num_layers) const {
    i32 whole = least(num_prompt, x.lo), part = least(num_prompt, x.hi) - whole;
    return whole + i32(i64(part) * x.depth / most<i64>(1, num_layers));
  }
};

}  // namespace qllm
