#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "pool.h"

namespace qllm {
namespace {

class Pool {
 public:
  // Waits until nobody has the threads: other callers run their tasks themselves meanwhile.
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

  // The caller takes tasks too, and waits only for workers that entered while there were some: a
  // worker that gets no core holds nobody up.
  void run(int64_t count, int64_t most, Task task, const void* context) {
    bool alone = size() < 2 || count < 2 || taken_.exchange(true);
    if (alone) {
      for (int64_t i = 0; i < count; i++) task(context, i, i + 1);
      return;
    }
    task_ = task;
    context_ = context;
    count_ = count;
    most_ = most;
    next_.store(0, std::memory_order_relaxed);
    gate_.store(0, std::memory_order_release);
    {
      std::lock_guard<std::mutex> hold(mutex_);
      round_.fetch_add(1, std::memory_order_release);
    }
    if (sleepers_.load(std::memory_order_acquire)) wake_.notify_all();
    drain();
    gate_.fetch_or(kClosed, std::memory_order_acq_rel);
    for (int spins = 0; gate_.load(std::memory_order_acquire) != kClosed; spins++) pause(spins);
    taken_.store(false);
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

  void drain() {
    const int64_t threads = size();
    for (int64_t at; (at = next_.load(std::memory_order_relaxed)) < count_;) {
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
        drain();
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
};

// Never destroyed: threads may outlive main. A fork has none of them, so it begins anew.
std::atomic<Pool*> instance{new Pool};
std::atomic<pid_t> owner{getpid()};

Pool& pool() { return *instance.load(std::memory_order_relaxed); }

}  // namespace

void set_threads(int threads) {
  if (owner.exchange(getpid()) != getpid()) instance.store(new Pool);
  pool().resize(threads);
}
int num_threads() { return pool().size(); }

void run_tasks(int64_t count, int64_t most, Task task, const void* context) {
  pool().run(count, most, task, context);
}

}  // namespace qllm
