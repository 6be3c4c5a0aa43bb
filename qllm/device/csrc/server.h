// The loop's half of the native scheduler: the engine loop's work (qllm/engine/loop.py) between two
// programs. Requests come out of rings and tokens go into rings, and no object is made for either.
//
// Work per call is bounded by the capacity of the block, by `kMostPublished` tokens per request, and
// by the records that a call takes out of rings: at most `kMostClaims` of each. Where a block of
// threads reads requests (`shares`), a claim ends at each and `claim_requests` continues it, so
// there a turn takes fewer than `kMostFetches` (loop.h) of all rings. The caller runs it on one
// thread, passes the time in, and takes `effects` and `events`.
#pragma once
#include "claim.h"

namespace qllm {

struct Server : Claimer {
  QLLM_D Server(ServerState* server, State* state, RankFunction rank)
      : Claimer(server, state, rank) {}

  // Free all slots; the caller has written sizes and offsets, and started the scheduler.
  QLLM_D void open() {
    for (i64 i = 0; i < v->num_buckets; i++) buckets[i] = -1;
    for (i64 i = 0; i < v->capacity; i++) serving[i].phase = FREE;
    v->next_deadline_ns = kNone;
    v->word = kAnyArrival;
  }

  // -- input

  // Take a bounded number of arrived records: cancels, then LS requests, then BE requests. End
  // requests past their deadlines. Return the records taken, -1 if effects or events were left.
  QLLM_D_CALL i32 claim(i64 now_ns) {
    if (!has_room()) return -1;
    v->bell_seen = i64(load_acquire(&control()->bell));
    v->word = kAnyArrival;
    store_fenced((u64*)&control()->heartbeat_ns, u64(now_ns));
    i64 num = v->num_front_ends;
    v->num_taken = v->next_ring = 0;
    for (i32 n = 0; n < num; n++)
      if (front_ends[n].state == LEAVING) detach(n, WELL, now_ns);
    for (i64 n = 0; n < num; n++) v->num_taken += take_cancels(turn(n), now_ns);
    return claim_requests(now_ns);
  }
  // Continue a claim after its record was fetched, at the ring of that record, so that a wrong
  // record delays no other ring.
  QLLM_D_CALL i32 claim_requests(i64 now_ns) {
    i64 num = v->num_front_ends;
    for (; v->next_ring < 2 * num; v->next_ring++) {
      v->num_taken += take_requests(turn(v->next_ring % num), v->next_ring >= num, now_ns);
      if (v->fetch.waits) return i32(v->num_taken);
    }
    return end_claim(now_ns);
  }
  // Serve rings that were not reached sooner in the next claim.
  QLLM_D_CALL i32 end_claim(i64 now_ns) {
    v->first_front_end = (v->first_front_end + 1) % v->num_front_ends;
    expire(now_ns);
    return i32(v->num_taken);
  }
  QLLM_D bool has_room() const {
    return v->num_events <= v->capacity && scheduler.s->num_effects <= v->capacity;
  }
  QLLM_D void expire(i64 now_ns) {
    if (v->next_deadline_ns == kNone || v->next_deadline_ns > now_ns) return;
    v->next_deadline_ns = kNone;
    for (i32 slot = 0; slot < v->capacity; slot++) {
      i64 deadline_ns = serving[slot].deadline_ns;
      if (serving[slot].phase == LIVE && deadline_ns != kNone && deadline_ns <= now_ns)
        finish(slot, kReasonTimeout, now_ns);
    }
    find_deadline();
  }
  // Return the smallest priority that `claim` would take, when the bell rings during a program.
  QLLM_D_CALL i64 arrived(i64 now_ns) {
    v->bell_seen = i64(load_acquire(&control()->bell));
    v->word = kAnyArrival;
    if (load_acquire(&control()->stop)) lower(kControl, now_ns);
    for (i32 n = 0; n < v->num_front_ends; n++) {
      if (front_ends[n].state != ATTACHED) continue;
      if (RingReader(&front_ends[n].cancel).has_news()) lower(kControl, now_ns);
      lower_by(n, false, now_ns);
      lower_by(n, true, now_ns);
    }
    return v->word;
  }
  // Return the front ends' request to the loop.
  QLLM_D i32 asked() const {
    if (load_acquire(&control()->stop)) return STOP;
    if (!load_acquire(&control()->drain) || v->num_held) return SERVE;
    for (i32 n = 0; n < v->num_front_ends; n++) {
      FrontEnd& f = front_ends[n];
      if (f.state != ATTACHED) continue;
      if (RingReader(&f.ls).has_news() || RingReader(&f.be).has_news()) return SERVE;
    }
    return DRAINED;
  }

  // -- the decision and results of a run, as in the scheduler, with the meters

  QLLM_D_CALL i32 decide(i64 now_ns) {
    State* s = scheduler.s;
    i64 first = s->num_effects;
    i32 answer = scheduler.decide(now_ns);
    for (i64 i = first; i < s->num_effects; i++) count(scheduler.effects[i], now_ns);
    if (answer || s->kind != START) return answer;
    i64 most_layers = v->most_layers;
    for (const Row& row : scheduler.all_rows(i32(s->decided_frame))) {
      most_layers = most<i64>(most_layers, row.end);
      Meter(serving[row.slot]).planned(row, now_ns);
    }
    v->most_layers = most_layers;
    return answer;
  }
  QLLM_D void count(const Effect& effect, i64 now_ns) {
    if (effect.kind == SPLIT) {
      for (i32 slot = 0; slot < v->capacity; slot++)
        if (serving[slot].phase == LIVE && serving[slot].frame_id == effect.frame_id)
          Meter(serving[slot]).unpark(now_ns);
      return;
    }
    i32 slot = find(effect.request_id);
    if (slot < 0) return;
    if (effect.kind == EVICT)
      Meter(serving[slot]).evicted(now_ns);
    else
      Meter(serving[slot]).unpark(now_ns);
  }
  QLLM_D i32 done(i32 high, i64 start_ns, i64 end_ns) {
    worked(start_ns, end_ns, i32(scheduler.s->num_layers));
    return scheduler.done(high, start_ns, end_ns);
  }
  QLLM_D void stopped(i32 high, i32 layer, i32 inside, i64 start_ns, i64 end_ns, i32 preempted) {
    i32 frame = worked(start_ns, end_ns, layer);
    scheduler.stopped(high, layer, inside, start_ns, end_ns, preempted);
    const i64 id = scheduler.frames[frame].id;
    for (const Row& row : scheduler.all_rows(frame))
      if (scheduler.has_live_request(row)) Meter(serving[row.slot]).park(id, end_ns);
  }
  // Handle the running frame, which raised. Leave requests that failed alone in `chosen`; return
  // their number.
  QLLM_D i32 failed(i64 start_ns, i64 end_ns) {
    i32 frame = worked(start_ns, end_ns, 0);
    for (const Row& row : scheduler.all_rows(frame))
      if (scheduler.has_live_request(row)) Meter(serving[row.slot]).lose(RETRIED, row.lo, row.hi);
    return scheduler.failed();
  }
  // Note that the running frame's rows did the layers below `layer`; return that frame.
  QLLM_D_CALL i32 worked(i64 start_ns, i64 end_ns, i32 layer) {
    i32 frame = i32(scheduler.s->running);
    for (const Row& row : scheduler.all_rows(frame)) {
      if (!scheduler.has_live_request(row)) continue;
      Meter meter(serving[row.slot]);
      meter.worked(start_ns, end_ns);
      meter.reached(row, least(layer, row.end));
    }
    return frame;
  }

  // -- output

  // Publish a request's new token, which `done` has counted.
  QLLM_D_CALL void sampled(i32 slot, i32 token, i64 now_ns) {
    const Request& r = requests[slot];
    Serving& x = serving[slot];
    if (x.phase != LIVE) return;
    i64 at = slot * v->max_total_tokens + r.num_tokens - 1;
    tokens[at] = token;
    token_ns[at] = now_ns;
    v->num_tokens++;
    bool stops = false;
    for (i32 i = 0; i < x.num_stop_ids; i++) stops |= x.stop_ids[i] == token;
    if (stops)
      finish(slot, kReasonStop, now_ns);
    else if (r.num_tokens - r.num_prompt >= x.max_tokens)
      finish(slot, kReasonLength, now_ns);
    else
      publish(slot);
  }
  // End a request for a reason of the host; `serving` has the text.
  QLLM_D void end(i32 slot, i32 reason, i64 now_ns) {
    if (serving[slot].phase == LIVE) finish(slot, reason, now_ns);
  }
  // Count a step, and publish the engine's load to the front ends.
  QLLM_D void show() {
    v->num_steps++;
    show_stats();
  }
  QLLM_D_CALL void show_stats() {
    const State* s = scheduler.s;
    i64 waiting = s->num_waiting;
    for (i64 i = 0; i < s->num_unranked; i++)
      waiting += !requests[scheduler.unranked[i]].num_blocks;
    ControlMemory* c = control();
    u64 version = c->stats_version;
    store_fenced(&c->stats_version, version + 1);
    fence();
    store_fenced(&c->num_steps, u64(v->num_steps));
    store_fenced(&c->num_live, u64(s->num_live));
    store_fenced(&c->num_waiting, u64(waiting));
    fence();
    store_fenced(&c->stats_version, version + 2);
    for (i32 n = 0; n < v->num_front_ends; n++) {
      FrontEnd& f = front_ends[n];
      u64 progress = (u64(f.num_claimed) & 0xFFFFFFFFu) << 32 | u64(waiting);
      if (f.state == ATTACHED) store_fenced((u64*)f.progress, progress);
    }
  }
};

}  // namespace qllm
