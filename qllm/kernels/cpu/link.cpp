#include "link.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "group.h"
#include "ranks.h"

namespace qllm {
namespace {

constexpr int64_t kMagic = 0x32304b4e494c4c51;  // "QLLINK02"
constexpr int kNapMs = 100;
constexpr int64_t kPumpNs = 200 * 1000;  // between two looks at the connections while a rank computes
constexpr int64_t kMost = int64_t(1) << 42;  // bytes or regions of a message
constexpr size_t kChunk = 1 << 18;  // most bytes that are read at once

enum MessageKind : int64_t { kCall = 1, kPart, kGo, kOther, kStop, kReport };

struct Head {
  int64_t magic, kind, call, call_kind;
  int64_t gather, from;  // of kPart, kGo and kOther: number of the gather, and the rank; also of kStop
  void* what;
  int64_t num_regions, num_bytes;  // the bytes after the regions
};

using Bytes = std::vector<char>;

int64_t bytes_of(const Region& r) { return r.row_bytes * r.rows; }

// The bytes of a call's arguments; 0 for an unknown kind.
int64_t arguments_of(int64_t kind) {
  if (kind == kRunSweep) return sizeof(SweepCall);
  if (kind == kRunHead) return sizeof(HeadCall);
  if (kind == kRunEmbed) return sizeof(EmbedCall);
  return kind == kFetch ? sizeof(FetchCall) : 0;
}

// A message: the head, regions, and their bytes.
struct Message {
  Head head{};
  Bytes rest;

  const Region* regions() const { return (const Region*)rest.data(); }
};

std::shared_ptr<Bytes> packed(Head head, const Region* regions, int64_t num, int64_t to) {
  auto is_for = [&](const Region& r) { return r.rank == kAllRanks || to == kAllRanks || r.rank == to; };
  head.magic = kMagic;
  for (int64_t i = 0; i < num; i++)
    if (is_for(regions[i])) head.num_regions++, head.num_bytes += bytes_of(regions[i]);
  auto found = std::make_shared<Bytes>(sizeof head + head.num_regions * sizeof *regions + head.num_bytes);
  char* end = found->data();
  auto put = [&](const void* from, int64_t size) {
    if (size) memcpy(end, from, size);
    end += size;
  };
  put(&head, sizeof head);
  for (int64_t i = 0; i < num; i++)
    if (is_for(regions[i])) put(regions + i, sizeof *regions);
  for (int64_t i = 0; i < num; i++)
    for (int64_t r = 0; is_for(regions[i]) && r < regions[i].rows; r++)
      put(regions[i].at + r * regions[i].stride, regions[i].row_bytes);
  return found;
}

bool is_part(const Head& head) {
  return head.kind == kPart || head.kind == kGo || head.kind == kOther;
}

struct Connection {
  int file;
  std::deque<std::shared_ptr<Bytes>> out;
  size_t sent = 0;  // of the first of `out`
  Bytes in, chunk = Bytes(kChunk);  // what is read of messages that are not complete; and room
  std::deque<Message> inbox;
  bool is_closed = false, is_wrong = false;

  void write() {
    while (!out.empty() && !is_closed) {
      const Bytes& first = *out.front();
      ssize_t num = send(file, first.data() + sent, first.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (num < 0 && errno == EINTR) continue;
      if (num < 0) {
        is_closed = errno != EAGAIN && errno != EWOULDBLOCK;
        return;
      }
      sent += num;
      if (sent < first.size()) continue;
      out.pop_front();
      sent = 0;
    }
  }

  void read() {
    while (!is_closed && !is_wrong) {
      ssize_t num = recv(file, chunk.data(), chunk.size(), MSG_DONTWAIT);
      if (num < 0 && errno == EINTR) continue;
      if (num <= 0) {
        is_closed = num == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
        return;
      }
      in.insert(in.end(), chunk.begin(), chunk.begin() + num);
      take();
      if (size_t(num) < chunk.size()) return;
    }
  }

 private:
  static bool is_count(int64_t num) { return 0 <= num && num < kMost; }

  static size_t size_of(const Head* head) {
    return sizeof *head + head->num_regions * sizeof(Region) + head->num_bytes;
  }

  // Moves complete messages to the inbox.
  void take() {
    size_t at = 0;
    while (in.size() - at >= sizeof(Head)) {
      Message found;
      memcpy(&found.head, in.data() + at, sizeof(Head));
      is_wrong = found.head.magic != kMagic || !is_count(found.head.num_regions) ||
                 !is_count(found.head.num_bytes);
      if (is_wrong) return;
      size_t whole = size_of(&found.head);
      if (in.size() - at < whole) break;
      found.rest.assign(in.begin() + at + sizeof(Head), in.begin() + at + whole);
      inbox.push_back(std::move(found));
      at += whole;
    }
    in.erase(in.begin(), in.begin() + at);
  }
};

}  // namespace

class Wires {
 public:
  explicit Wires(Rank& rank) : rank_(rank), link_(*rank.link), passed_(rank.group->size) {
    for (int64_t i = 0; i < link_.num; i++) {
      connections_.emplace_back();
      connections_.back().file = int(link_.files[i]);
    }
  }

  std::vector<Region> offered, reported;  // parts of the next gather, and of the report

  // Begins the count of the gathers of a call.
  void begin() {
    num_posted_ = awaited_ = 0;
    stopped_ = kNoGather;
    std::fill(passed_.begin(), passed_.end(), int64_t(0));
  }

  int64_t post_part(Head head) {
    head.gather = num_posted_;
    head.from = rank_.rank;
    post_all(head, offered.data(), offered.size());
    write();
    return num_posted_++;
  }

  void post_stop(Head head) {
    head.gather = stopped_ = num_posted_;
    post_all(head, nullptr, 0);
  }

  bool await(int64_t gather, int64_t& stopped) {
    int64_t& end = awaited_ = gather + 1;
    bool all = wait(true, [&] {
      take(end);
      if (rank_.rank && stopped_ != kNoGather) end = std::min(end, stopped_);
      return least_passed() >= end;
    });
    if (end <= gather) stopped = end;
    return all && end > gather;
  }

  void pump() {
    const int64_t now = now_ns();
    if (now - pumped_ns_ < kPumpNs) return;
    pumped_ns_ = now;
    write();
    for (int64_t i = 0; i < num(); i++) read(i);
  }

  // Gathers that this rank has posted and passed: those before a stop.
  int64_t num_gathers() const { return stopped_ == kNoGather ? num_posted_ : stopped_; }
  int64_t num_posted() const { return num_posted_; }

  int64_t num() const { return link_.num; }

  void post(int64_t i, std::shared_ptr<Bytes> bytes) { connections_[i].out.push_back(std::move(bytes)); }

  // Sends one message to all ranks.
  void post_all(const Head& head, const Region* regions, int64_t count) {
    bool differs = std::any_of(regions, regions + count, [](const Region& r) { return r.rank != kAllRanks; });
    std::shared_ptr<Bytes> all = differs ? nullptr : packed(head, regions, count, kAllRanks);
    for (int64_t i = 0; i < num(); i++)
      post(i, differs ? packed(head, regions, count, link_.ranks[i]) : all);
  }

  // Waits until all messages are sent; false on a failure.
  bool flush() {
    return wait(true, [&] {
      return std::all_of(connections_.begin(), connections_.end(), [](const Connection& c) { return c.out.empty(); });
    });
  }

  // Waits for the next message of a rank; false on a failure.
  bool next(int64_t i, Message& found, bool has_deadline = true) {
    std::deque<Message>& inbox = connections_[i].inbox;
    if (!wait(has_deadline, [&] { return !inbox.empty(); }, i)) return false;
    found = std::move(inbox.front());
    inbox.pop_front();
    return true;
  }

  // Writes the bytes of a message to the memory of this rank; false if they lie outside of it, or if
  // the message has more or fewer bytes than its regions.
  bool apply(int64_t i, const Message& message) {
    const Region* regions = message.regions();
    const char* from = message.rest.data() + message.head.num_regions * sizeof *regions;
    int64_t left = message.head.num_bytes;
    for (const Region* r = regions; r < regions + message.head.num_regions; r++) {
      if (!is_inside(*r) || bytes_of(*r) > left) return fail(i, kGarbled);
      left -= bytes_of(*r);
      if (!r->rows) madvise(r->at, r->row_bytes, MADV_REMOVE);
      for (int64_t row = 0; row < r->rows; row++, from += r->row_bytes)
        memcpy(r->at + row * r->stride, from, r->row_bytes);
    }
    return left == 0 || fail(i, kGarbled);
  }

  // Returns false on a call of an unknown kind, or whose arguments lie outside of the memory.
  bool knows(int64_t i, const Head& head) {
    const Region arguments{(char*)head.what, arguments_of(head.call_kind), 0, 1, kAllRanks};
    return is_inside(arguments) || fail(i, kGarbled);
  }

 private:
  Rank& rank_;
  Link& link_;
  std::vector<Connection> connections_;
  int64_t num_posted_ = 0, stopped_ = kNoGather;
  int64_t awaited_ = 0;  // the end of the gathers for which this rank waits, or waited last
  int64_t pumped_ns_ = 0;
  std::vector<int64_t> passed_;  // gathers of the call whose part is in memory, of each rank

  void write() {
    for (Connection& c : connections_) c.write();
  }

  // Reads from a connection. Rank 0 sends new parts on to the ranks that it did not get them from.
  void read(int64_t i) {
    std::deque<Message>& inbox = connections_[i].inbox;
    size_t seen = inbox.size();
    connections_[i].read();
    for (; num() > 1 && seen < inbox.size(); seen++) {
      Head head = inbox[seen].head;
      const bool is_stopped = stopped_ != kNoGather && head.gather >= stopped_;
      if (head.kind != kPart || head.call != rank_.call || is_stopped) continue;
      const Bytes& rest = inbox[seen].rest;
      head.kind = kOther;
      head.from = link_.ranks[i];
      auto found = std::make_shared<Bytes>(sizeof head + rest.size());
      memcpy(found->data(), &head, sizeof head);
      std::copy(rest.begin(), rest.end(), found->begin() + sizeof head);
      for (int64_t j = 0; j < num(); j++)
        if (j != i) post(j, found);
    }
  }

  // Writes the parts of gathers before `end` to memory, and drops what belongs to earlier calls.
  void take(int64_t end) {
    for (int64_t i = 0; i < num(); i++) {
      std::deque<Message>& inbox = connections_[i].inbox;
      for (auto at = inbox.begin(); at != inbox.end() && !rank_.has_failed();) {
        const Head& head = at->head;
        const bool is_of_call = head.call == rank_.call;
        if (is_of_call && head.kind == kStop) stopped_ = head.gather;
        const bool is_next = is_of_call && is_part(head) && head.gather < end;
        if (is_next && !put(i, *at)) return;
        const bool is_old = head.call < rank_.call && (is_part(head) || head.kind == kStop);
        at = is_next || is_old || (is_of_call && head.kind == kStop) ? inbox.erase(at) : at + 1;
      }
    }
  }

  // Writes a part to memory.
  bool put(int64_t i, const Message& part) {
    const Head& head = part.head;
    const int64_t from = head.kind == kOther ? head.from : link_.ranks[i];
    if (from < 0 || from >= rank_.group->size || from == rank_.rank || head.gather != passed_[from])
      return fail(i, kGarbled);
    if (!apply(i, part)) return false;
    passed_[from]++;
    if (rank_.rank == 0) rank_.gathered_bytes += head.num_bytes;
    return true;
  }

  int64_t least_passed() const {
    int64_t least = num_posted_;
    for (int64_t i = 0; i < rank_.group->size; i++)
      if (i != rank_.rank) least = std::min(least, passed_[i]);
    return least;
  }

  bool is_inside(const Region& r) const {
    const int64_t first = r.at - link_.start, most = link_.num_bytes;
    auto fits = [&](int64_t x) { return 0 <= x && x <= most; };
    if (!fits(first) || !fits(r.row_bytes) || !fits(r.stride) || !fits(r.rows)) return false;
    if (!r.row_bytes || r.rows > most / r.row_bytes) return false;  // more rows than memory
    const int64_t last = r.rows ? r.rows - 1 : 0;
    if (last && r.stride > (most - first) / last) return false;
    return r.row_bytes <= most - first - last * r.stride;
  }

  bool fail(int64_t i, Failure why) {
    if (!rank_.has_failed()) link_.failed = link_.ranks[i];
    rank_.fail(why);
    return false;
  }

  // Sends and receives until `done()`. `of` is the connection that keeps this rank waiting; or -1.
  template <class Done>
  bool wait(bool has_deadline, const Done& done, int64_t of = -1) {
    const int64_t end = now_ns() + rank_.group->deadline_ns;
    write();
    while (!done()) {
      if (rank_.has_failed()) return false;
      for (int64_t i = 0; i < num(); i++) {
        if (connections_[i].is_wrong) return fail(i, kGarbled);
        if (connections_[i].is_closed) return fail(i, kDead);
      }
      if (has_deadline && now_ns() > end) return fail(of < 0 ? busy() : of, kLate);
      turn();
    }
    return !rank_.has_failed();
  }

  // The first connection that keeps this rank waiting: it still has to send, or parts are missing.
  int64_t busy() const {
    auto is_free = [&](int64_t i) {
      return connections_[i].out.empty() && passed_[link_.ranks[i]] >= awaited_;
    };
    int64_t i = 0;
    while (i + 1 < num() && is_free(i)) i++;
    return i;
  }

  void turn() {
    std::vector<pollfd> files;
    for (const Connection& c : connections_)
      files.push_back({c.file, short(POLLIN | (c.out.empty() ? 0 : POLLOUT)), 0});
    if (poll(files.data(), files.size(), kNapMs) <= 0) return;
    for (int64_t i = 0; i < num(); i++) {
      if (files[i].revents & POLLOUT) connections_[i].write();
      if (files[i].revents & (POLLIN | POLLHUP | POLLERR)) read(i);
    }
  }
};

namespace {

Wires& wires(Rank& rank) {
  if (!rank.link->wires) rank.link->wires = new Wires(rank);
  return *rank.link->wires;
}

Head head_of(const Rank& rank, MessageKind kind) {
  Head head{};
  head.kind = kind;
  head.call = rank.call;
  return head;
}

// The report of a rank. Parts that come before it belong to gathers that rank 0 has stopped.
bool next_report(Rank& rank, int64_t i, Message& found) {
  do {
    if (!wires(rank).next(i, found)) return false;
  } while (found.head.call != rank.call || found.head.kind != kReport);
  return true;
}

}  // namespace

void offer(Rank& rank, const Region* own, int64_t num) {
  std::vector<Region>& offered = wires(rank).offered;
  offered.clear();
  std::copy_if(own, own + num, std::back_inserter(offered), [](const Region& r) { return bytes_of(r) > 0; });
}

void offer(Rank& rank, std::initializer_list<Region> own) { offer(rank, own.begin(), own.size()); }

void report(Rank& rank, const Region& own) {
  if (bytes_of(own)) wires(rank).reported.push_back(own);
}

int64_t post_link(Rank& rank) {
  if (!rank.rank) rank.group->gate.fetch_add(1 << 8);
  return wires(rank).post_part(head_of(rank, rank.rank ? kPart : kGo));
}

bool await_link(Rank& rank, int64_t gather, int64_t& stopped) {
  const int64_t begin = now_ns();
  bool all = wires(rank).await(gather, stopped);
  rank.group->waited_ns += now_ns() - begin;
  return all;
}

void pump_link(Rank& rank) { wires(rank).pump(); }

int64_t gathers_of_link(const Rank& rank) { return rank.link->wires ? rank.link->wires->num_gathers() : 0; }

void stop_link(Rank& rank) { wires(rank).post_stop(head_of(rank, kStop)); }

void call_link(Rank& rank, int64_t kind, void* what) {
  Wires& w = wires(rank);
  w.begin();
  Head head = head_of(rank, kCall);
  head.call_kind = kind;
  head.what = what;
  w.post_all(head, rank.link->changed, rank.link->num_changed);
  w.flush();
}

void leave_link(Rank& rank) {
  Wires& w = wires(rank);
  Message found;
  if (rank.rank) {
    report(rank, region(rank.group->reports + rank.rank, 1));
    w.post_all(head_of(rank, kReport), w.reported.data(), w.reported.size());
    w.reported.clear();
    w.flush();
    return;
  }
  int64_t none = kNoGather;
  if (w.num_posted() && !await_link(rank, w.num_posted() - 1, none)) return;  // what was stopped, too
  for (int64_t i = 0; i < w.num(); i++)
    if (!next_report(rank, i, found) || !w.apply(i, found)) return;
  w.flush();
}

void serve_link(const Kernels& kernels, Rank& rank) {
  Message found;
  while (wires(rank).next(0, found, false)) {
    if (found.head.kind != kCall) continue;  // a stop of a call that has ended
    if (found.head.call_kind == kEnd) return;
    if (!wires(rank).knows(0, found.head) || !wires(rank).apply(0, found)) return;
    rank.call = found.head.call;
    rank.has_moved = 0;
    wires(rank).begin();
    run_call(kernels, rank, found.head.call_kind, found.head.what);
    if (rank.has_failed()) return;
  }
}

void free_link(Link& link) {
  delete link.wires;
  link.wires = nullptr;
}

}  // namespace qllm
