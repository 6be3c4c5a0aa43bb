#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "course.h"
#include "group.h"
#include "pool.h"

namespace qllm {
namespace {

class Pool {
 public:
  // Waits until no caller uses the threads; meanwhile other callers run their tasks themselves.
  void resize(int threads) {
    for (int spins = 0; taken_.exchange(true); spins++) pause(spins);
    {
      std::lock_guard<std::mutex> hold(mutex_);
      stopping_ = true;
      round_.fetch_add(1);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
    workers_.clear();
    stopping_ = false;
    for (int i = 1; i < threads; i++)
      workers_.emplace_back([this, seen = round_.load()] { work(seen); });
    size_.store(threads);
    taken_.store(false);
  }

  int size() const { return size_.load(std::memory_order_relaxed); }

  // Runs tasks [first, count) and returns the first that did not run; without a course all run. The
  // caller runs tasks too. It waits only for workers that entered while tasks were left, so a
  // worker that gets no core delays no other thread. `since` is the time of the caller's last poll.
  int64_t run(int64_t first, int64_t count, int64_t most, Task task, const void* context,
              Course* course, int64_t& since) {
    bool alone = size() < 2 || count - first < 2 || taken_.exchange(true);
    if (alone) {
      for (int64_t i = first; i < count; i++) {
        if (course && course->must_stop(i, since)) return i;
        task(context, i, i + 1);
      }
      return count;
    }
    task_ = task;
    context_ = context;
    count_ = count;
    most_ = most;
    course_ = course;
    next_.store(first, std::memory_order_relaxed);
    gate_.store(0, std::memory_order_release);
    {
      std::lock_guard<std::mutex> hold(mutex_);
      round_.fetch_add(1, std::memory_order_release);
    }
    if (sleepers_.load(std::memory_order_acquire)) wake_.notify_all();
    drain(since);
    gate_.fetch_or(kClosed, std::memory_order_acq_rel);
    for (int spins = 0; gate_.load(std::memory_order_acquire) != kClosed; spins++) pause(spins);
    int64_t end = std::min(next_.load(std::memory_order_relaxed), count);
    taken_.store(false);
    return end;
  }

 private:
  static void pause(int spins) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
    if (spins > 500) std::this_thread::yield();
  }

  bool enter() {
    int inside = gate_.load(std::memory_order_relaxed);
    while (!(inside & kClosed))
      if (gate_.compare_exchange_weak(inside, inside + 1, std::memory_order_acq_rel)) return true;
    return false;
  }

  void drain(int64_t& since) {
    const int64_t threads = size();
    for (int64_t at; (at = next_.load(std::memory_order_relaxed)) < count_;) {
      if (course_ && course_->must_stop(at, since)) return;
      int64_t num = std::max<int64_t>(1, std::min(most_, (count_ - at) / (2 * threads)));
      at = next_.fetch_add(num, std::memory_order_relaxed);
      int64_t end = std::min(at + num, count_), after = end + (threads - 1) * num;
      for (; at < end; at++) task_(context_, at, at + 1 < end ? at + 1 : after);
    }
  }

  void work(uint64_t seen) {
    while (true) {
      int spins = 0;
      while (round_.load(std::memory_order_acquire) == seen && spins < 4000) pause(spins++);
      if (round_.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> hold(mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(hold, [&] { return round_.load() != seen; });
        sleepers_.fetch_sub(1);
      }
      seen = round_.load(std::memory_order_acquire);
      if (stopping_) return;
      if (enter()) {
        int64_t since = course_ ? now_ns() : 0;
        drain(since);
        if (course_) course_->saw(now_ns(), since);
        gate_.fetch_sub(1, std::memory_order_acq_rel);
      }
    }
  }

  static constexpr int kClosed = 1 << 30;

  std::vector<std::thread> workers_;
  std::atomic<int> size_{1};  // threads, the caller included
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> round_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<int> gate_{kClosed};  // workers inside the round, and whether more may enter
  std::atomic<int64_t> next_{0};
  std::atomic<bool> stopping_{false}, taken_{false};
  int64_t count_ = 0, most_ = 1;
  Task task_ = nullptr;
  const void* context_ = nullptr;
  Course* course_ = nullptr;
};

// Never destroyed: threads may outlive main. A forked process has none of the threads, so it makes
// a new pool.
std::atomic<Pool*> instance{new Pool};
std::atomic<pid_t> owner{getpid()};

Pool& pool() { return *instance.load(std::memory_order_relaxed); }

thread_local Course* course_of_thread = nullptr;
thread_local KeptMemory memory_of_thread;
std::atomic<int64_t> num_uses{0};

}  // namespace

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000 + t.tv_nsec;
}

KeptMemory::~KeptMemory() {
  for (auto& [data, size] : found_) free(data);
}

void* KeptMemory::of(int64_t use, int64_t bytes) {
  if (use >= int64_t(found_.size())) found_.resize(use + 1, {nullptr, 0});
  auto& [data, size] = found_[use];
  if (bytes > size) {
    free(data);
    num_bytes_ += bytes - size;
    data = aligned_alloc(64, (bytes + 127) / 64 * 64);
    size = bytes;
  }
  return data;
}

void* kept_memory(int64_t use, int64_t bytes) {
  Course* course = course_of_thread;
  return course ? course->kept(use, bytes) : memory_of_thread.of(use, bytes);
}

int64_t new_use() { return num_uses.fetch_add(1); }

void* Course::kept(int64_t use, int64_t bytes) {
  return memory_.of(use, left_ ? 0 : bytes);
}

void Course::begin(Polls& polls) {
  polls_ = &polls;
  before_ = first_ = done;
  posted_.clear();
  at_ = 0;
  left_ = false;
  since_ = now_ns();
  course_of_thread = this;
}

bool Course::end() {
  course_of_thread = nullptr;
  if (!posted_.empty()) await(*polls_->rank, posted_.back().first);
  saw(now_ns(), since_);
  polls_->tasks_left -= done - before_;
  if (polls_->rank && done > before_) polls_->rank->move();
  polls_ = nullptr;
  kept_bytes = memory_.num_bytes();
  if (left_) return false;
  done = 0;
  return true;
}

int64_t Course::take_longest() { return longest_ns_.exchange(0, std::memory_order_relaxed); }

void Course::saw(int64_t now, int64_t& since) {
  int64_t longest = longest_ns_.load(std::memory_order_relaxed);
  while (now - since > longest && !longest_ns_.compare_exchange_weak(longest, now - since)) {
  }
  since = now;
}

bool Course::must_stop(int64_t task, int64_t& since) {
  const bool is_owner = &since == &since_;
  if (is_owner && polls_->rank && polls_->rank->link) pump_link(*polls_->rank);
  if (!polls_->inside) return false;
  int64_t now = now_ns();
  saw(now, since);
  if (at_ + task == first_) return false;
  if (polls_->rank) polls_->rank->move();
  return polls_->is_due(now);
}

void set_threads(int threads) {
  if (owner.exchange(getpid()) != getpid()) instance.store(new Pool);
  pool().resize(threads);
}
int num_threads() { return pool().size(); }

void run_tasks(int64_t count, int64_t most, Task task, const void* context) {
  Course* course = course_of_thread;
  int64_t none = 0;
  if (!course) {
    pool().run(0, count, most, task, context, nullptr, none);
    return;
  }
  if (course->left_) return;
  int64_t first = std::min(std::max<int64_t>(course->done - course->at_, 0), count), stop = count;
  if (course->polls_->inside)
    stop = std::min(count, std::max<int64_t>(
                               course->before_ - course->at_ + course->polls_->tasks_left, first));
  if (first < stop) {
    course_of_thread = nullptr;  // tasks have no course
    stop = pool().run(first, stop, most, task, context, course, course->since_);
    course_of_thread = course;
    course->done = course->at_ + stop;
  }
  course->at_ += count;
  course->left_ = stop < count;
}

}  // namespace qllm
