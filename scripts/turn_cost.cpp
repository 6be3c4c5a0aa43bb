// An iteration of the device's loop on the host, counted by callgrind. See turn_cost.py.
#include <valgrind/callgrind.h>

#include "loop.h"

using namespace qllm;

namespace {

const Share kAlone = {0, 1};

// The work that the threads of a block share, done by one.
void share(Loop& loop) {
  Sender(loop.v).send(kAlone);
  if (loop.now->fill) loop.turns.stages.clear(kAlone);
  if (loop.now->fill) loop.turns.stages.write(kAlone);
}

}  // namespace

// The verdict of `qllm2`: the class, then the arrival.
extern "C" void rank(i64 arrival_ns, i64 priority, i64, i64, i64, i64, i64, i64* out) {
  out[0] = priority;
  out[1] = arrival_ns;
}

// Run an iteration. Count the part of one thread, the shared part, both, or nothing.
extern "C" i32 take_turn(const i64* blocks, i64 now_ns, i32 counts_serial, i32 counts_shared) {
  if (counts_serial) CALLGRIND_TOGGLE_COLLECT;
  Loop loop((ServerState*)blocks[0], (State*)blocks[1], (RankFunction)blocks[2], (Lanes*)blocks[3]);
  loop.server.shares = true;
  for (loop.open(now_ns); loop.waits(); loop.go_on(now_ns)) {
    if (counts_serial != counts_shared) CALLGRIND_TOGGLE_COLLECT;
    loop.server.read_fetch(kAlone);
    if (counts_serial != counts_shared) CALLGRIND_TOGGLE_COLLECT;
  }
  i32 branch = loop.close(now_ns);
  if (counts_serial != counts_shared) CALLGRIND_TOGGLE_COLLECT;
  share(loop);
  if (counts_serial != counts_shared) CALLGRIND_TOGGLE_COLLECT;
  Sender(loop.v).show();
  if (counts_serial) CALLGRIND_TOGGLE_COLLECT;
  return branch;
}

// Write the counts since the last report, under a name.
extern "C" void report(const char* name) { CALLGRIND_DUMP_STATS_AT(name); }
