#include "group.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <utility>

#include "kernels.h"
#include "ranks.h"

namespace qllm {
namespace {

constexpr int64_t kSpins = 4000, kYields = 200;
constexpr int64_t kNapNs = 200 * 1000;           // of a rank in a call
constexpr int64_t kLongNapNs = 100 * 1000 * 1000;  // of a rank between two calls

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void ring(Group& g) {
  g.bell.fetch_add(1);
  if (g.sleepers.load()) syscall(SYS_futex, (int32_t*)&g.bell, FUTEX_WAKE, kMaxRanks, nullptr);
}

void sleep(Group& g, int32_t bell, int64_t ns) {
  timespec t{ns / 1000000000, ns % 1000000000};
  syscall(SYS_futex, (int32_t*)&g.bell, FUTEX_WAIT, bell, &t);
}

// Waits until `done()`: spins, then yields, then sleeps until `ring`. Between two looks at `done` it
// calls `look(sleeps)`, and gives up if that returns true.
template <class Done, class Look>
void wait(Group& g, int64_t nap_ns, const Done& done, const Look& look) {
  for (int64_t i = 0; !done(); i++) {
    if (i < kSpins) {
      pause();
    } else if (i < kSpins + kYields) {
      sched_yield();
    } else {
      g.sleepers.fetch_add(1);
      int32_t bell = g.bell.load();
      if (!done()) sleep(g, bell, nap_ns);
      g.sleepers.fetch_sub(1);
    }
    if (look(i >= kSpins + kYields)) return;
  }
}

// Other code of rank 0's process may have waited for the rank before. Then it is no child any more.
bool is_dead(int64_t process) {
  siginfo_t info{};
  if (waitid(P_PID, id_t(process), &info, WEXITED | WNOHANG | WNOWAIT) == 0) return info.si_pid;
  return kill(pid_t(process), 0) == -1 && errno == ESRCH;
}

// The end of waiting for others: a failure, the deadline, or a process that has ended. Processes are
// looked for only while this rank sleeps.
class Patience {
 public:
  explicit Patience(Rank& rank) : rank_(rank), end_(now_ns() + rank.group->deadline_ns) {}

  bool is_over(bool sleeps) {
    if (rank_.has_failed()) return true;
    if (!sleeps) return false;
    for (int64_t i = 1; rank_.rank == 0 && i < rank_.group->size; i++)
      if (is_dead(rank_.processes[i])) rank_.fail(kDead);
    if (rank_.rank && getppid() != rank_.processes[0]) rank_.fail(kDead);
    if (now_ns() > end_) rank_.fail(kLate);
    return rank_.has_failed();
  }

 private:
  Rank& rank_;
  int64_t end_;
};

void wait_for_ranks(Rank& rank) {
  Group& g = *rank.group;
  Patience patience(rank);
  auto all = [&] {
    for (int64_t i = 1; i < g.size; i++)
      if (g.reports[i].call.load(std::memory_order_acquire) != rank.call) return false;
    return true;
  };
  wait(g, kNapNs, all, [&](bool sleeps) { return patience.is_over(sleeps); });
}

}  // namespace

void Rank::stop() {
  group->stopped.store(call, std::memory_order_release);
  link ? stop_link(*this) : ring(*group);
}

Desk::Desk() = default;
Desk::~Desk() = default;

void Rank::fail(Failure why) {
  int64_t none = 0;
  group->failed.compare_exchange_strong(none, why);
  ring(*group);
}

void Rank::move() {
  if (__atomic_exchange_n(&has_moved, 1, __ATOMIC_RELAXED)) return;
  group->moved.store(call, std::memory_order_release);
}

Desk& Rank::desk(int64_t number) {
  if (!desks) desks = new std::vector<std::unique_ptr<Desk>>;
  if (number >= int64_t(desks->size())) desks->resize(number + 1);
  auto& found = (*desks)[number];
  if (!found) found = std::make_unique<Desk>();
  return *found;
}

template <class Leave>
bool Rank::pass(const Leave& leave) {
  Group& g = *group;
  uint64_t seen = g.gate.load(std::memory_order_acquire), next;
  const uint64_t number = seen >> 8;
  do next = int64_t(seen & 255) + 1 == g.size ? (number + 1) << 8 : seen + 1;
  while (!g.gate.compare_exchange_weak(seen, next, std::memory_order_acq_rel));
  if (next >> 8 != number) {
    ring(g);
    return true;
  }
  auto is_complete = [&] { return g.gate.load(std::memory_order_acquire) >> 8 != number; };
  Patience patience(*this);
  bool left = false;
  wait(g, kNapNs, is_complete, [&](bool sleeps) {
    if (!patience.is_over(sleeps) && !leave()) return false;
    seen = g.gate.load(std::memory_order_acquire);
    while (seen >> 8 == number && !left)
      left = g.gate.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel);
    return true;
  });
  return !left;
}

int64_t Course::post(Rank& rank) {
  if (left_) return kNoGather;
  const int64_t at = at_++;
  if (done > at) return kNoGather;  // an earlier call has passed it
  Group& g = *rank.group;
  if (done > before_) rank.move();
  auto must_leave = [&] {
    int64_t now = now_ns();
    saw(now, since_);
    if (rank.rank) return g.stopped.load(std::memory_order_acquire) == rank.call;
    // Without this, all ranks might leave a gather that they would pass
    bool may_stop = __atomic_load_n(&rank.has_moved, __ATOMIC_RELAXED) || g.moved.load(std::memory_order_acquire) == rank.call;
    return polls_->inside && may_stop && polls_->is_due(now);
  };
  left_ = polls_->inside && done - before_ >= polls_->tasks_left;
  left_ = left_ || (rank.link ? must_leave() : !rank.pass(must_leave));
  if (left_) return kNoGather;
  done = at + 1;
  if (!rank.link) return 0;
  const int64_t gather = post_link(rank);
  posted_.emplace_back(gather, at);
  return gather;
}

bool Course::await(Rank& rank, int64_t gather) {
  int64_t stopped = kNoGather;
  if (left_ || gather == kNoGather || !rank.link || await_link(rank, gather, stopped)) return !left_;
  left_ = true;
  for (auto [number, at] : posted_)
    if (number == stopped) done = at;  // what comes after it is done again
  return false;
}

void meet(const Kernels&, Rank* rank) {
  int64_t stopped = kNoGather;
  if (rank->link) {
    offer(*rank, {});
    await_link(*rank, post_link(*rank), stopped);
  } else {
    rank->pass([] { return false; });
  }
}

void call_ranks(const Kernels& kernels, Rank* rank, int64_t kind, void* what) {
  Group& g = *rank->group;
  const int64_t number = g.call.load() + 1;
  g.kind = kind;
  g.stopped_before = g.stopped.load();
  g.what = what;
  rank->call = number;
  rank->has_moved = 0;
  g.call.store(number);
  rank->link ? call_link(*rank, kind, what) : ring(g);
  if (!rank->has_failed()) run_call(kernels, *rank, kind, what);
  g.failure = g.failed.load();
  g.num_gathers = int64_t(g.gate.load() >> 8);
  g.gathered_bytes = g.bytes.load();
}

void leave_call(Rank& rank) {
  rank.group->bytes.fetch_add(std::exchange(rank.gathered_bytes, 0));
  if (rank.link) return leave_link(rank);
  if (rank.rank == 0) return wait_for_ranks(rank);
  rank.group->reports[rank.rank].call.store(rank.call, std::memory_order_release);
  ring(*rank.group);
}

void serve(const Kernels& kernels, Rank* rank) {
  if (rank->link) return serve_link(kernels, *rank);
  Group& g = *rank->group;
  while (true) {
    auto is_called = [&] { return g.call.load() != rank->call; };
    wait(g, kLongNapNs, is_called, [&](bool sleeps) {
      return rank->has_failed() || (sleeps && getppid() != rank->processes[0]);
    });
    if (!is_called() || rank->has_failed()) return;
    rank->call = g.call.load();
    rank->has_moved = 0;
    if (g.kind == kEnd) return;
    run_call(kernels, *rank, g.kind, g.what);
    if (rank->has_failed()) return;
  }
}

void free_desks(const Kernels&, Rank* rank) {
  delete rank->desks;
  rank->desks = nullptr;
  if (rank->link) free_link(*rank->link);
}

}  // namespace qllm
