// The debt of time to BE while LS has work (qllm/scheduler/be_share.py), and the plan that pays it.
#pragma once
#include "shapes.h"

namespace qllm {

const i64 kMillion = 1000000;

struct BeShare : Shapes {
  QLLM_HD BeShare(State* state, RankFunction rank, i64 now) : Shapes(state, rank, now) {}

  QLLM_HD static bool is_be(const Request& r) { return r.priority > kPriorityLs; }
  QLLM_HD bool is_be(const Row& row) const { return is_be(requests[row.slot]); }

  // Count a decision at which no request has work.
  QLLM_HD void rest() {
    pass();
    s->owed_ls = s->owed_grows = 0;
  }
  // Count the time up to a decision, when all are ranked; return BE's plan if it is owed a slice.
  QLLM_HD_CALL Plan turn() {
    if (!s->floor_rate) return no_plan();
    pass();
    bool ls = false, be = false;
    for (i32 i = 0; i < s->num_admitted; i++) (is_be(requests[admitted[i]]) ? be : ls) = true;
    for (i32 i = 0; i < s->num_waiting; i++) (is_be(requests[waiting[i]]) ? be : ls) = true;
    s->owed_ls = ls;
    s->owed_grows = ls && be && is_possible();
    if (!be) s->owed_ns = least<i64>(s->owed_ns, 0);  // no request of BE is left
    if (!s->owed_grows || s->owed_ns < s->floor_slice_ns) return no_plan();
    return plan();
  }
  // Shorten a plan of the policy that may be cut, so that it ends when BE is owed a slice.
  QLLM_HD void cut(Plan& plan) const {
    if (!s->owed_grows || plan.grain == kGrainStep) return;
    bool ls = false;
    for (i32 i = 0; i < plan.num_rows; i++) ls |= !is_be(plan.rows[i]);
    if (!ls) return;
    i64 left = -floor_div((s->owed_ns - s->floor_slice_ns) * kMillion, s->floor_rate);
    if (plan.slice_ns != kNone) left = least(left, plan.slice_ns);
    plan.slice_ns = most<i64>(1, left);
  }
  // Count a run of `tokens` tokens, of which `be_tokens` were BE's.
  QLLM_HD static void ran(State* s, i64 be_tokens, i64 tokens, i64 elapsed_ns) {
    i64 be_ns = tokens ? elapsed_ns * be_tokens / tokens : 0;
    if (s->owed_pays)
      s->owed_ns -= elapsed_ns;
    else if (s->owed_ls)
      s->owed_ns = most(s->owed_ns - be_ns, least<i64>(s->owed_ns, 0));
    s->ls_ns += tokens ? elapsed_ns - be_ns : 0;
    s->be_ns += be_ns;
    s->paid_ns += s->owed_pays ? elapsed_ns : 0;
    s->owed_pays = 0;
  }

 private:
  // Count the time since the last decision, at most one window of it.
  QLLM_HD void pass() {
    i64 elapsed = now_ns - s->owed_since_ns;
    s->owed_since_ns = now_ns;
    if (s->owed_pays) {  // the run raised, and took its time
      s->owed_ns -= elapsed;
      s->paid_ns += elapsed;
      s->owed_pays = 0;
    }
    if (s->owed_grows)
      s->owed_ns += floor_div(least(elapsed, s->floor_window_ns) * s->floor_rate, kMillion);
    s->owed_ns = least(s->owed_ns, s->floor_window_ns * s->floor_rate / kMillion);
  }

  // Return true if BE could run.
  QLLM_HD_CALL bool is_possible() const {
    return be_frame(false) >= 0 || loose(other_rows, 1).num_rows;
  }
  // Return the plan of one slice, which no arrival stops.
  QLLM_HD_CALL Plan plan() const {
    Plan plan = {other_rows, 0, be_frame(true), finest_grain(), kNoStop, s->floor_slice_ns};
    if (plan.frame < 0) plan.num_rows = loose(other_rows, s->seats).num_rows;
    if (plan.num_rows) return plan;
    if (plan.frame < 0) plan.frame = be_frame(false);
    plan.num_rows = live_rows(plan.frame, other_rows);
    return plan;
  }
  // Return the oldest parked frame with rows of BE, and no others if `alone`; -1 without one.
  QLLM_HD i32 be_frame(bool alone) const {
    for (i32 i = 0; i < s->num_parked; i++) {
      const Frame& f = frames[parked[i]];
      bool be = false, ls = false;
      for (const Row& row : all_rows(parked[i]))
        if (is_live(f, row)) (is_be(row) ? be : ls) = true;
      if (be && !(alone && ls)) return parked[i];
    }
    return -1;
  }
  QLLM_HD bool is_loose(const Request& r) const { return is_be(r) && r.frame < 0; }

  // Find rows of BE outside of frames, up to `count`, as seats, tokens and free KV allow.
  QLLM_HD_CALL Batch loose(Row* rows, i64 count) const {
    Batch out = empty_batch(rows, slice_tokens(s->floor_slice_ns));
    i64 spare = s->seats - count;
    for (i32 slot = -1; out.seats > spare && (slot = next_decode(slot)) >= 0;) {
      Row row = next_row(slot);
      if (need(row) <= out.free_blocks) take(out, row);
    }
    for (i32 slot = -1; out.seats > spare && out.tokens > 0 && (slot = next_prefill(slot)) >= 0;) {
      Row row = piece(next_row(slot, out.tokens)), aligned = row;
      align(aligned);
      i64 blocks = need(aligned);
      if (blocks <= out.free_blocks) {
        take_prefill(out, row);
        out.free_blocks -= blocks - need(row);
      } else if (!requests[slot].num_blocks) {
        break;
      }
    }
    return out;
  }
  // Return the decode with the least recent progress after `after`.
  QLLM_HD i32 next_decode(i32 after) const {
    i32 first = -1;
    for (i32 i = 0; i < s->num_admitted; i++) {
      i32 slot = admitted[i];
      if (!is_loose(requests[slot]) || !is_decoding(requests[slot])) continue;
      if ((after < 0 || waited_longer(after, slot)) && (first < 0 || waited_longer(slot, first)))
        first = slot;
    }
    return first;
  }
  // Return the next prefill after `after`: first requests that hold KV, then the others.
  QLLM_HD i32 next_prefill(i32 after) const {
    bool held = after < 0 || requests[after].num_blocks;
    i32 first = held ? next_prefill_of(admitted, i32(s->num_admitted), after) : -1;
    if (first >= 0) return first;
    return next_prefill_of(waiting, i32(s->num_waiting), held ? -1 : after);
  }
  QLLM_HD i32 next_prefill_of(const i32* order, i32 count, i32 after) const {
    i32 first = -1;
    for (i32 i = 0; i < count; i++) {
      i32 slot = order[i];
      if (!is_loose(requests[slot]) || is_decoding(requests[slot])) continue;
      if ((after < 0 || is_older(after, slot)) && (first < 0 || is_older(slot, first)))
        first = slot;
    }
    return first;
  }
  QLLM_HD bool is_older(i32 slot, i32 other) const {
    const Request &a = requests[slot], &b = requests[other];
    if (a.priority != b.priority) return a.priority < b.priority;
    if (a.arrival_ns != b.arrival_ns) return a.arrival_ns < b.arrival_ns;
    return a.id < b.id;
  }
  // Return a row under way with as many layers as fit a slice, if time cannot stop its step.
  QLLM_HD Row piece(Row row) const {
    if (finest_grain() > kGrainStep || !groups() || !row.start) return row;
    i64 whole_ns = most<i64>(1, (row.hi - row.lo) * s->prefill_token_ns);
    i64 layers = most<i64>(1, s->floor_slice_ns * s->num_layers / whole_ns);
    row.end = i32(least<i64>(row.end, row.start + layers));
    return row;
  }
};

}  // namespace qllm
