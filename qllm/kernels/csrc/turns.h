// One turn of the loop: what it does before a stage graph runs, and after.
//
//   before   go on with the running frame, or decide; the branch of the next stage
//   (fill)   Stages::clear, then Stages::write, where `fill` says so
//   after    the frame goes on, is parked, or has ended with `sampled` tokens
//
// Whoever calls takes in what arrived before `before`, and ends requests after `after`.
#pragma once
#include "scheduler.h"
#include "stages.h"

namespace qllm {

struct Turns {
  Scheduler scheduler;
  Stages stages;

  QLLM_HD Turns(State* state, RankFunction rank, Server* server, Lanes* lanes)
      : scheduler(state, rank), stages(state, server, lanes) {}

  // The branch of the next stage. NOTHING: none can run now, see `failure` and the scheduler's
  // `kind`. CANNOT: the running frame fits no stage; `Scheduler::failed` reruns its rows alone.
  QLLM_HD_CALL i32 before(i64 now_ns) {
    State* s = scheduler.s;
    Lanes* now = stages.now;
    now->branch = NOTHING;
    now->fill = 0;
    s->num_effects = 0;  // they are for a host that mirrors frames; hidden states lie by KV slot
    if (s->running >= 0 && is_over()) scheduler.done(i32(now->layer), now->start_ns, now_ns);
    if (s->running < 0 && !decides(now_ns)) return NOTHING;
    Group g = stages.group_at(i32(now->layer));
    i32 branch = stages.next(g);
    now->branch = branch;
    now->fill = branch >= 0 && stages.take_lane(stages.stages[branch], g);
    return branch;
  }
  // Whether a frame runs now.
  QLLM_HD bool decides(i64 now_ns) {
    Lanes* now = stages.now;
    State* s = scheduler.s;
    now->failure = scheduler.decide(now_ns);
    if (now->failure != OK || s->decided_frame < 0) return false;
    now->layer = scheduler.frames[s->running].layer;
    now->start_ns = now_ns;
    return true;
  }
  // Whether nobody of the running frame owes a layer any more.
  QLLM_HD bool is_over() const {
    return stages.group_at(i32(stages.now->layer)).from >= scheduler.s->num_layers;
  }

  // What became of the running frame: GOES_ON, PARKED or ENDED. `stop`: the best class of those who
  // arrived since the decision.
  QLLM_HD_CALL i32 after(i64 now_ns, i64 stop) {
    State* s = scheduler.s;
    Lanes* now = stages.now;
    const Frame& f = scheduler.frames[s->running];
    i32 end = stages.stages[now->branch].end;
    now->layer = end;
    now->num_sampled = 0;
    Group g = stages.group_at(end);
    if (g.from >= s->num_layers) {
      stages.collect();
      scheduler.done(end, now->start_ns, now_ns);
      return ENDED;
    }
    if (f.grain == kGrainStep || !(stop < f.stop_below || is_late(now_ns))) return GOES_ON;
    scheduler.stopped(end - 1, g.from, 0, now->start_ns, now_ns, stop < f.stop_below);
    return PARKED;
  }
  QLLM_HD bool is_late(i64 now_ns) const {
    i64 slice_ns = scheduler.s->slice_ns;
    return slice_ns != kNone && now_ns >= stages.now->start_ns + slice_ns;
  }
};

}  // namespace qllm
