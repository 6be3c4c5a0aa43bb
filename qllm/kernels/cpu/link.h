// Ranks on several hosts. Each maps memory of its own, at the same addresses. Rank 0 has a
// connection to every other rank, and these have one to rank 0.
//
//   kCall    from rank 0: a call, with the tensors that Python has changed since the call before
//   kPart    to rank 0: a rank's part of a gathered tensor
//   kGo      from rank 0: its part. All ranks pass the gather
//   kOther   from rank 0: the part of another rank, if there are more than two
//   kStop    from rank 0, in the place of kGo: no rank passes this gather of the call, or a later one
//   kReport  to rank 0: the end of a rank's part of a call
//
// The gathers of a call have numbers. A rank posts its part and computes on. It awaits a gather where
// it reads the parts of the others. Between two tasks it sends and receives.
//
// Rank 0's stop takes no gather of its own. The other ranks poll nothing, and see the stop where they
// await the gather. They go back to it, and post their part again when the call continues.
#pragma once

#include <stdint.h>

#include <initializer_list>

namespace qllm {

struct Kernels;
struct Rank;
class Wires;

// Rows of bytes in the memory of all ranks.
struct Region {
  char* at;
  int64_t row_bytes, stride, rows;  // no rows: the memory of `row_bytes` bytes is given back
  int64_t rank;  // the only rank that needs the bytes, or that sends them; or kAllRanks
};
constexpr int64_t kAllRanks = -1;
constexpr int64_t kNoGather = -1;

template <class T>
Region region(T* at, int64_t num, int64_t stride = 0, int64_t rows = 1) {
  constexpr int64_t bytes = sizeof(T);
  return {(char*)at, num * bytes, stride * bytes, num ? rows : 0, kAllRanks};
}

// Python fills the fields.
struct Link {
  char* start;  // of the memory of all ranks
  int64_t num_bytes;
  int64_t num;                    // connections
  const int64_t *files, *ranks;   // the file, and the rank at the other end, of each
  const Region* changed;          // what the next call carries
  int64_t num_changed;
  int64_t failed;  // the rank at the other end of the connection that failed first; or 0
  Wires* wires;    // of link.cpp
};

// Sets this rank's part of the next gather.
void offer(Rank& rank, std::initializer_list<Region> own);
void offer(Rank& rank, const Region* own, int64_t num);

// Adds bytes to this rank's report of the call that runs.
void report(Rank& rank, const Region& own);

// Sends this rank's part of the next gather. Returns the gather's number in the call.
int64_t post_link(Rank& rank);

// Waits until the parts of all ranks are in memory, of all gathers up to this one. False on a
// failure, or if rank 0 has stopped the call at one of them: then `stopped` is its number, and the
// gathers before it are complete.
bool await_link(Rank& rank, int64_t gather, int64_t& stopped);

// Sends and receives what is possible now. Nothing that is received changes the memory of the ranks.
void pump_link(Rank& rank);

int64_t gathers_of_link(const Rank& rank);  // that the call which runs has passed
void stop_link(Rank& rank);
void call_link(Rank& rank, int64_t kind, void* what);
void leave_link(Rank& rank);
void serve_link(const Kernels& kernels, Rank& rank);
void free_link(Link& link);

// Arguments of a call, in the memory of all ranks: regions that rank 0 needs. Each rank sends its own.
struct FetchCall {
  const Region* regions;
  int64_t num;
};

}  // namespace qllm
