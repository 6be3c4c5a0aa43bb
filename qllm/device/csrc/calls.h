// The functions of scheduler and server by number; a kernel launch selects one.
#pragma once
#include "server.h"

namespace qllm {

// `n` holds the arguments in the order of the function's own. A void function answers 0.
QLLM_HD_CALL inline i64 call(State* state, RankFunction rank, i32 which, const i64* n) {
  Scheduler s(state, rank);
  switch (which) {
    case CALL_START: return s.start(), 0;
    case CALL_ADD_SLOTS: return s.add_slots(n[0]), 0;
    case CALL_RANK_ANEW: return s.rank_anew(), 0;
    case CALL_ADD: return s.add(n[0], n[1], n[2], n[3], n[4], n[5]);
    case CALL_REMOVE: return s.remove(i32(n[0])), 0;
    case CALL_EVICT: return s.evict(i32(n[0]), n[1]), 0;
    case CALL_ADOPT: return s.adopt(i32(n[0])), 0;
    case CALL_NEW_FRAME: return s.new_frame();
    case CALL_PARK: return s.park(i32(n[0])), 0;
    case CALL_DECIDE: return s.decide(n[0]);
    case CALL_DONE: return s.done(i32(n[0]), n[1], n[2]);
    case CALL_STOPPED:
      return s.stopped(i32(n[0]), i32(n[1]), i32(n[2]), n[3], n[4], i32(n[5])), 0;
    case CALL_FAILED: return s.failed();
  }
  return -1;
}

// The functions of the server. It has its own `decide` and results of a run, with the meters.
QLLM_D_CALL inline i64 server_call(ServerState* server, State* state, RankFunction rank, i32 which,
                                   const i64* n) {
  Server s(server, state, rank);
  switch (which) {
    case SERVER_OPEN: return s.open(), 0;
    case SERVER_CLAIM: return s.claim(n[0]);
    case SERVER_ARRIVED: return s.arrived(n[0]);
    case SERVER_ASKED: return s.asked();
    case SERVER_DECIDE: return s.decide(n[0]);
    case SERVER_DONE: return s.done(i32(n[0]), n[1], n[2]);
    case SERVER_STOPPED:
      return s.stopped(i32(n[0]), i32(n[1]), i32(n[2]), n[3], n[4], i32(n[5])), 0;
    case SERVER_FAILED: return s.failed(n[0], n[1]);
    case SERVER_SAMPLED: return s.sampled(i32(n[0]), i32(n[1]), n[2]), 0;
    case SERVER_END: return s.end(i32(n[0]), i32(n[1]), n[2]), 0;
    case SERVER_FLUSH: return s.flush();
    case SERVER_DETACH: return s.detach(i32(n[0]), i32(n[1]), n[2]), 0;
    case SERVER_SHOW: return s.show(), 0;
    case SERVER_FIND: return s.find(n[0]);
  }
  return -1;
}

}  // namespace qllm
