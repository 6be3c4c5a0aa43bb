// One turn of the loop: its work before a stage graph runs, and after.
//
//  before   continue the running frame, or decide; the branch of the next stage
//   (fill)   Stages::clear, then Stages::write, where `fill` says so
//  after    the frame continues, is parked, or has ended with `sampled` tokens
//
// The caller claims arrivals before `before`, and ends requests after `after`.
#pragma once
#include "scheduler.h"
#include "stages.h"

namespace qllm {

// `Decider` has `decide`, `done` and `stopped` of the scheduler, or of a server with meters.
template <class Decider>
struct Turns {
  Decider& decider;
  Stages stages;
  State* s;
  Lanes* now;

  QLLM_HD Turns(Decider& decides, const Block& block, ServerState* server, Lanes* lanes)
      : decider(decides), stages(block, server, lanes), s(block.s), now(lanes) {}

  // Return the branch of the next stage. NOTHING: none can run now, see `failure` and the
  // scheduler's `kind`. CANNOT: the running frame fits no stage; `Scheduler::failed` reruns its rows alone.
  QLLM_HD_CALL i32 before(i64 now_ns) {
    now->branch = NOTHING;
    now->fill = 0;
    s->num_effects = 0;  // they are for a host that mirrors frames; hidden states lie by KV slot
    const Group& g = now->group;
    if (s->running >= 0 && is_over()) decider.done(i32(now->layer), now->start_ns, now_ns);
    if (s->running < 0) {
      if (!begins(now_ns)) return NOTHING;
      stages.group_at(i32(now->layer));
    }
    i32 branch = stages.next(g);
    now->branch = branch;
    now->fill = branch >= 0 && stages.take_lane(stages.stages[branch], g);
    return branch;
  }
  // Decide; return true if a frame runs now.
  QLLM_HD bool begins(i64 now_ns) {
    now->failure = decider.decide(now_ns);
    if (now->failure != OK || s->decided_frame < 0) return false;
    now->layer = stages.running().layer;
    now->start_ns = now_ns;
    return true;
  }
  // Return true if no row of the running frame owes a layer.
  QLLM_HD bool is_over() {
    return stages.group_at(i32(now->layer)).from >= s->num_layers;
  }

  // Return the state of the running frame: GOES_ON, PARKED or OVER. `stop`: the best class of the
  // requests that arrived since the decision.
  QLLM_HD_CALL i32 after(i64 now_ns, i64 stop) {
    const Frame& f = stages.running();
    i32 end = stages.stages[now->branch].end;
    now->layer = end;
    now->num_sampled = 0;
    // At the end of the sweep no row owes a layer, so no group is searched.
    const i32 from = end < s->num_layers ? stages.group_at(end).from : end;
    if (from >= s->num_layers) {
      stages.collect();
      decider.done(end, now->start_ns, now_ns);
      return OVER;
    }
    if (f.grain == kGrainStep || !(stop < f.stop_below || is_late(now_ns))) return GOES_ON;
    now->preempted = stop < f.stop_below && stop != kControl;
    decider.stopped(end - 1, from, 0, now->start_ns, now_ns, i32(now->preempted));
    return PARKED;
  }
  QLLM_HD bool is_late(i64 now_ns) const {
    return s->slice_ns != kNone && now_ns >= now->start_ns + s->slice_ns;
  }
};

}  // namespace qllm
