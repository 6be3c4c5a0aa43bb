// The ranks of one model: processes that share memory at the same addresses. Rank 0 belongs to the
// engine. The others run `serve` and make the same calls with their own weights.
//
// In a call all ranks run the same ops. At a gather a rank waits until all ranks have written their
// part of a tensor. All ranks pass a gather, or none does, and every op ends with one. So ranks
// that stop are in the same op. Rank 0 alone polls the engine's stop. It sets `stopped`, which the
// others poll: between two tasks, and while they wait at a gather.
//
// Ranks on other hosts have no such memory: see link.h. There, some ops have no gather, and each rank
// computes all of them. So another rank may be some ops ahead of rank 0 when the call stops. It goes
// on there, because rank 0 has passed all gathers before that place.
#pragma once

#include <stdint.h>

#include <atomic>
#include <memory>
#include <vector>

#include "course.h"
#include "link.h"

namespace qllm {

struct Kernels;
struct Layer;
struct Matrix;
struct Unit;

constexpr int64_t kMaxRanks = 64;

enum CallKind : int64_t { kRunSweep = 1, kRunHead, kRunEmbed, kEnd, kFetch };
enum Failure : int64_t {
  kLate = 1,  // a rank waited for longer than the deadline
  kDead,      // the process of a rank has ended
  kApart,     // ranks stopped in different ops (I11)
  kGarbled,   // a rank on another host sent something else than a message
};

// What a rank tells rank 0 of a call.
struct alignas(64) Report {
  std::atomic<int64_t> call{0};  // the last call that the rank has left
  int64_t layer, part, inside;   // the op in which it stopped; whether some of the op is done
  int64_t longest_ns, longest_kind, slots_done, expert_bytes, kept_bytes;
  int64_t gathers;  // from other hosts: those that the rank has passed in the call
};

// The part of a group that Python reads.
struct GroupHead {
  int64_t size, deadline_ns;
  // After a call: any of Failure, or 0; complete gathers, and the bytes that ranks had written
  int64_t failure, num_gathers, gathered_bytes;
  int64_t waited_ns;  // in which rank 0 waited for parts from other hosts, of all calls
};

// In shared memory, which is zero at first.
struct Group : GroupHead {
  alignas(64) std::atomic<int64_t> failed;   // any of Failure, the first; then all ranks give up
  alignas(64) std::atomic<uint64_t> gate;    // complete gathers * 256 + ranks that wait at the next
  alignas(64) std::atomic<int64_t> stopped;  // the last call that rank 0 has stopped
  std::atomic<int64_t> moved;                // the last call in which a rank has done a task
  alignas(64) std::atomic<int64_t> bytes;    // of parts of gathered tensors, of the calls that ended
  alignas(64) std::atomic<int64_t> call;     // the last call that has begun, of `kind`
  int64_t kind, stopped_before;  // `stopped` when it began
  void* what;  // any of the calls of ranks.h, in shared memory
  alignas(64) std::atomic<int32_t> bell;  // changes with each event for which a process may sleep
  std::atomic<int32_t> sleepers;
  Report reports[kMaxRanks];
};

static_assert(sizeof(Group) <= 1 << 14, "GROUP_BYTES of qllm/sharded/group.py");

// The place of one frame on a rank.
struct Desk {
  Course course;
  std::vector<int64_t> token, inverse;  // as in Sweep, of the layer `sorted`
  std::vector<Unit> units;              // those of the own experts
  int64_t num_units = 0, pos = 0, sorted = -1;
  int64_t layer = 0, part = 0;  // the op, if the desk is not new
  int64_t piece = 0;            // the first piece of the head that is not done
  Desk();
  ~Desk();
  void clear(int64_t of_layer, int64_t of_part) {
    course.done = pos = piece = 0;
    sorted = -1;
    layer = of_layer;
    part = of_part;
  }
};

// Consecutive outputs of the head, all of one block of the vocabulary.
struct Piece {
  const Matrix* weight;
  int64_t first, block;  // number of the first output, and of the block
};

// A rank in its process. Python fills the fields.
struct Rank {
  Group* group;
  int64_t rank;
  const int64_t* processes;  // of the ranks
  const Layer* layers;
  const Piece* pieces;
  int64_t num_pieces;
  const char* table;  // embeddings of the token ids from `first_id` on
  int64_t first_id, num_ids, row_bytes;
  std::vector<std::unique_ptr<Desk>>* desks;  // by number
  int64_t call, has_moved;  // the call that runs; whether this rank has done a task in it
  int64_t gathered_bytes;   // of this rank's parts of gathered tensors, in the call that runs
  Link* link;  // to ranks on other hosts, if all others are there; or null

  Desk& desk(int64_t number);
  // Waits for all ranks, calling `leave` meanwhile; false if it returned true and one is missing.
  template <class Leave>
  bool pass(const Leave& leave);
  void move();  // says that this call has done a task
  void stop();  // stops the call on all ranks
  void fail(Failure why);
  bool has_failed() const { return group->failed.load(std::memory_order_relaxed); }
};

// A gather outside of any op. No rank leaves it.
void meet(const Kernels&, Rank* rank);

// Makes a call on all ranks. The caller is rank 0; `what` is in shared memory.
void call_ranks(const Kernels& kernels, Rank* rank, int64_t kind, void* what);

// Ends a rank's part of a call. Rank 0 waits for the parts of all.
void leave_call(Rank& rank);

// Takes part in calls until kEnd, a failure, or the end of the process of rank 0.
void serve(const Kernels& kernels, Rank* rank);

void free_desks(const Kernels&, Rank* rank);

}  // namespace qllm
