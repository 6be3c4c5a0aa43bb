// The whole loop as turns, without a host: the work of the device between two stages.
//
//  open     book the stage that ran; between two frames claim arrived requests
//  (read)   Server::read_fetch, then `go_on`, for each request in a ring
//   close    choose the next stage
//  (send)   Sender::send, then Sender::show: records for the front ends
//   (fill)   Stages::clear, then Stages::write, where `fill` says so
//
// A turn does bounded work and leaves all state in the blocks, so a launch may end after any turn.
// Its rules are those of the loop on the host (qllm/engine/loop.py). It does not measure costs;
// qllm/engine/calibrate.py measures them before.
#pragma once
#include "server.h"
#include "turns.h"

namespace qllm {

const i64 kShowNs = kNsPerMs;  // time between two publications of the engine's load
const i64 kMostFetches = 64;   // records that a turn has its block read

struct Loop {
  Server server;
  Turns<Server> turns;
  ServerState* v;
  State* s;
  Lanes* now;
  i64* latencies;

  QLLM_D Loop(ServerState* serves, State* state, RankFunction rank, Lanes* lanes)
      : server(serves, state, rank), turns(server, server.scheduler, serves, lanes), v(serves), s(state),
        now(lanes), latencies((i64*)((u8*)lanes + lanes->at_latencies)) {
    server.holds = true;
  }

  // A turn in three parts: `open`; while `waits`, all threads `Server::read_fetch` and one calls
  // `go_on`; `close`, which gives the branch of the next stage, or NOTHING. Then a `Sender` sends.
  QLLM_D bool waits() const { return v->fetch.waits; }
  QLLM_D_CALL void go_on(i64 now_ns) {
    server.fetched();
    if (++now->num_fetches < kMostFetches)
      server.claim_requests(now_ns);
    else
      server.end_claim(now_ns);
  }
  QLLM_D_CALL void open(i64 now_ns) {
    if (now->in_flight) now->longest_ns = most(now->longest_ns, now_ns - now->now_ns);
    now->now_ns = now_ns;
    now->num_turns++;
    now->turns_left--;
    v->num_events = 0;  // the device has no copy of requests to update
    now->num_fetches = v->num_taken = v->fetch.waits = 0;
    if (now->in_flight) book(now_ns);
    if (s->running < 0) take_in(now_ns);
  }
  QLLM_D_CALL i32 close(i64 now_ns) {
    i64 taken = v->num_taken;
    if (s->running < 0) now->asked = server.asked();
    i32 branch = s->running < 0 && now->asked == STOP ? end(taken, now_ns) : choose(now_ns);
    now->in_flight = branch >= 0;
    now->idle = branch < 0 && !taken;
    now->goes_on = !now->stopped && !now->pause && now->turns_left > 0;
    if (now_ns >= now->shown_ns + kShowNs || !now->goes_on) show(now_ns);
    return branch;
  }

  QLLM_D void show(i64 now_ns) {
    now->shown_ns = now_ns;
    server.show_stats();
  }

  // Book the work of the stage that ran, and publish its tokens.
  QLLM_D_CALL void book(i64 now_ns) {
    bool looks = v->num_silent || load_acquire(&server.control()->bell) != u64(v->bell_seen);
    i64 stop = looks ? server.arrived(now_ns) : v->word;
    if (v->next_deadline_ns != kNone && v->next_deadline_ns <= now_ns) stop = least(stop, kControl);
    i32 became = turns.after(now_ns, stop);
    if (became == PARKED && now->preempted)
      latencies[now->num_preemptions++ % kMostLatencies] = most(now_ns - v->lowered_ns, i64(0));
    if (became != OVER) return;
    const Sampled* found = turns.stages.sampled;
    for (i64 i = 0; i < now->num_sampled; i++) {
      if (found[i].token == kBroken)
        fail(found[i].slot, "the largest logit is not finite: the model's output is broken", now_ns);
      else
        server.sampled(found[i].slot, found[i].token, now_ns);
    }
  }
  // Between two frames, claim requests and write records that lacked room.
  QLLM_D void take_in(i64 now_ns) {
    s->num_effects = 0;
    v->num_events = 0;
    server.flush();
    server.claim(now_ns);
  }
  QLLM_D i32 choose(i64 now_ns) {
    i64 steps = s->next_frame_id;
    i32 branch = turns.before(now_ns);
    if (branch == CANNOT) rerun(now_ns);
    if (now->failure != OK) {
      now->num_policy_errors++;
      now->policy_error = now->failure;
      end_all(i32(kReasonError), why(i32(now->failure)), now_ns);
    }
    v->num_steps += steps != s->next_frame_id || branch < 0;
    return branch < 0 ? NOTHING : branch;
  }
  // Handle a running frame that fits no stage: rerun its rows alone; those that were alone end.
  QLLM_D void rerun(i64 now_ns) {
    i32 count = server.failed(now->start_ns, now_ns);
    for (i32 i = 0; i < count; i++)
      fail(server.scheduler.chosen[i], "its step is larger than every captured stage", now_ns);
  }
  QLLM_D static Text why(i32 failure) {
    switch (failure) {
      case EMPTY_PLAN: return "the policy planned nothing although requests wait";
      case STALLS: return "the policy has waited for too long";
      case NO_KV: return "the policy planned more than the KV holds";
    }
    return "an array of the scheduler's state is too small: a bug";
  }
  QLLM_D_CALL void fail(i32 slot, Text text, i64 now_ns) {
    Serving& x = turns.stages.serving[slot];
    x.num_text = 0;
    while (text && text[x.num_text] && x.num_text < kTextBytes) {
      x.text[x.num_text] = u8(text[x.num_text]);
      x.num_text++;
    }
    server.end(slot, i32(kReasonError), now_ns);
  }
  QLLM_D void end_all(i32 reason, Text text, i64 now_ns) {
    for (i32 slot = 0; slot < v->capacity; slot++) {
      if (turns.stages.serving[slot].phase != LIVE) continue;
      if (reason == i32(kReasonError))
        fail(slot, text, now_ns);
      else
        server.end(slot, reason, now_ns);
    }
  }
  // Stop: end all requests, also those in the rings, a bounded number per turn.
  QLLM_D i32 end(i64 taken, i64 now_ns) {
    now->branch = NOTHING;
    now->fill = 0;
    end_all(i32(kReasonCancelled), nullptr, now_ns);
    now->stopped = !taken && !server.flush();
    v->num_steps++;
    return NOTHING;
  }
};

}  // namespace qllm
