// One op as a sequence of tasks: the kernels can leave it after any task and continue it later.
//
// While a thread has a course, the tasks of all its `run_tasks` calls are one sequence. Threads take
// them in order, one or a few small ones at a time, and poll before they take. A thread that finds
// a stop due completes the tasks that it has taken and takes no more. So the first `done` tasks are
// complete, whatever the number of threads. The code of the op after them still runs, but does
// nothing.
//
// To continue, the op is called again from its start with the same course. Calls of `run_tasks`
// whose tasks are done return at once, and `Kept` memory holds their results. So only tasks may
// write memory that outlives a task of an op, unless the op writes the same values again.
#pragma once

#include <stdint.h>

#include <atomic>
#include <utility>
#include <vector>

namespace qllm {

// Monotonic nanoseconds.
int64_t now_ns();

constexpr int64_t kNever = int64_t(1) << 62;

// Memory that a course, or a thread without one, keeps between calls, by the number of its use.
class KeptMemory {
 public:
  KeptMemory() = default;
  KeptMemory(const KeptMemory&) = delete;
  KeptMemory& operator=(const KeptMemory&) = delete;
  ~KeptMemory();  // gives all of it back
  void* of(int64_t use, int64_t bytes);
  int64_t num_bytes() const { return num_bytes_; }

 private:
  std::vector<std::pair<void*, int64_t>> found_;
  int64_t num_bytes_ = 0;
};

struct Rank;  // of group.h

// The stop that a call polls.
struct Polls {
  int64_t inside = 0;  // whether the call may stop between two tasks
  const int64_t* watch = nullptr;  // a word that changes when a stop may be due; or null
  int64_t seen = 0;                // its value when it was read
  int64_t stop_ns = kNever;        // monotonic time after which a stop is due
  int64_t tasks_left = kNever;     // most tasks before a stop
  Rank* rank = nullptr;            // the rank that runs the tasks; or null

  bool is_due(int64_t now) const {
    return (watch && __atomic_load_n(watch, __ATOMIC_ACQUIRE) != seen) || now >= stop_ns;
  }
};

// The part of a course that Python reads.
struct Place {
  int64_t done = 0;        // tasks of the op that are done
  int64_t kept_bytes = 0;  // memory that it keeps
};

class Course : public Place {
 public:
  // Begins or continues an op on this thread, which must have no course; completed tasks are
  // subtracted from `polls`. At least one task runs, if there is one and `polls` allows one.
  void begin(Polls& polls);
  // Ends the call; true if the op is done. Then the next op begins with no completed tasks.
  bool end();

  // The longest time between two polls of a thread since the last call of this; without polls
  // inside ops, the time of the longest op.
  int64_t take_longest();

  // Memory for a use of the op. Once the op is left, it returns the same memory and never grows it:
  // a later product may ask for more than an earlier one, which is not done and still reads it.
  void* kept(int64_t use, int64_t bytes);

  // Tasks that wait for other ranks: see link.h. `post` posts a part, unless a stop is due. It returns
  // the gather; or kNoGather if the op is left, or if an earlier call has passed the gather. On one
  // host it waits until all ranks have come, or until a stop is due. `await` waits for what other hosts
  // send. False if the op is left.
  int64_t post(Rank& rank);
  bool await(Rank& rank, int64_t gather);

  // For the pool. `since` is the time of the thread's previous poll.
  bool must_stop(int64_t task, int64_t& since);
  void saw(int64_t now, int64_t& since);

 private:
  friend void run_tasks(int64_t, int64_t, void (*)(const void*, int64_t, int64_t), const void*);

  KeptMemory memory_;
  Polls* polls_ = nullptr;
  int64_t at_ = 0;         // tasks of the op in the calls that have ended
  int64_t first_ = 0;      // the task that runs without a poll
  int64_t before_ = 0;     // tasks that were done before this call
  int64_t since_ = 0;      // when the owner's thread polled last
  std::vector<std::pair<int64_t, int64_t>> posted_;  // gathers of this call of the op, and their tasks
  bool left_ = false;      // a call of `run_tasks` ended before its last task
  std::atomic<int64_t> longest_ns_{0};
};

// Memory of the course that this thread has, or of the thread.
void* kept_memory(int64_t use, int64_t bytes);
int64_t new_use();

namespace {  // every instruction set has its own, as in vec.h

// One use of such memory: data of tasks for later tasks, on a cache line. Asking for more memory
// for the same use discards its contents.
template <class T>
class Kept {
 public:
  T* of(int64_t size) const { return (T*)kept_memory(use_, size * int64_t(sizeof(T))); }

 private:
  int64_t use_ = new_use();
};

}  // namespace
}  // namespace qllm
