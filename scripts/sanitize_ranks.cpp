// Ranks for the sanitizers: as threads that share memory, and as processes with connections. They
// make gathers, stops after any task, and calls of the head whose logits are compared. Then one rank
// gets messages that no rank sends. Kernels are replaced by plain loops.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <new>
#include <thread>
#include <vector>

#include "pool.h"
#include "ranks.h"

using namespace qllm;

namespace {

constexpr int64_t kSize = 3, kRows = 5, kWidth = 8, kPieces = 4, kOutputs = 16;
constexpr int64_t kVocabulary = kSize * kPieces * kOutputs;

void check(bool is_right, const char* what) {
  if (is_right) return;
  fprintf(stderr, "%s\n", what);
  abort();
}

// Logit (row, output) of a weight is x[row] + its number.
void linear(uint16_t* y, const uint16_t* x, const Matrix& weight, int64_t rows) {
  parallel(weight.n, [&](int64_t c) {
    for (int64_t r = 0; r < rows; r++) y[r * weight.n + c] = x[r * kWidth] + weight.packed[c];
  });
}

void best(float* peaks, int64_t* ids, const uint16_t* logits, int64_t rows, int64_t num,
          int64_t first) {
  parallel(rows, [&](int64_t r) {
    for (int64_t c = 0; c < num; c++)
      if (logits[r * num + c] > peaks[r]) {
        peaks[r] = logits[r * num + c];
        ids[r] = first + c;
      }
  });
}

struct Weights {
  std::vector<uint16_t> values = std::vector<uint16_t>(kVocabulary);
  std::vector<Matrix> matrices;
  std::vector<Piece> pieces;

  explicit Weights(int64_t rank) {
    for (int64_t i = 0; i < kVocabulary; i++) values[i] = uint16_t(i * 37 % 1009);
    for (int64_t p = 0; p < kPieces; p++) {
      int64_t first = (rank * kPieces + p) * kOutputs;
      matrices.push_back({values.data() + first, nullptr, kOutputs, kWidth, nullptr, nullptr, 0});
    }
    for (int64_t p = 0; p < kPieces; p++)
      pieces.push_back({&matrices[p], (rank * kPieces + p) * kOutputs, p});
  }
};

// The memory of all ranks.
struct Memory {
  Group group{};
  HeadCall call{};
  uint16_t x[kRows * kWidth], logits[kRows * kVocabulary];
  float peaks[kSize * kRows];
  int64_t ids[kSize * kRows];
};

Memory& new_memory(int64_t num_bytes = sizeof(Memory)) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* at = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  check(at != MAP_FAILED, "no memory");
  Memory& made = *new (at) Memory;
  made.group.size = kSize;
  made.group.deadline_ns = int64_t(60) * 1000000000;
  return made;
}

Rank rank_of(int64_t number, Memory& memory, const std::vector<Weights>& weights) {
  Rank rank{};
  rank.group = &memory.group;
  rank.rank = number;
  rank.pieces = weights[number].pieces.data();
  rank.num_pieces = kPieces;
  return rank;
}

// Calls of the head, of which rank 0 stops many. Their results are compared.
void make_calls(const Kernels& kernels, Rank& own, Memory& m, const std::vector<Weights>& weights) {
  int64_t watch = 0, num_stops = 0;
  unsigned seed = 1;
  const Region changed[] = {region(m.x, kRows * kWidth), region(&m.call, 1)};
  for (int64_t turn = 0; turn < 300; turn++) {
    for (int64_t r = 0; r < kRows; r++) m.x[r * kWidth] = uint16_t(turn + r);
    memset(m.logits, 0, sizeof m.logits);
    HeadCall& call = m.call = {};
    call.x = m.x;
    call.rows = kRows;
    call.end_block = kPieces;
    call.vocabulary = kVocabulary;
    if (turn % 2) call.logits = m.logits;
    else call.peaks = m.peaks, call.ids = m.ids;
    call.desk = turn % 4;
    call.is_new = 1;
    call.grain = kEachExpert;
    call.watch = &watch;
    while (!call.is_done) {
      call.stop_ns = kNever;
      call.tasks_left = 1 + rand_r(&seed) % 40;
      if (own.link) own.link->changed = changed, own.link->num_changed = 2;
      call_ranks(kernels, &own, kRunHead, &call);
      check(!m.group.failed, "a rank failed");
      call.is_new = 0;
      num_stops += !call.is_done;
    }
    for (int64_t r = 0; r < kRows; r++)
      for (int64_t i = 0; i < kSize; i++) {
        int64_t first = i * kPieces * kOutputs, last = first + kPieces * kOutputs;
        float peak = -1;
        for (int64_t c = first; c < last; c++) {
          uint16_t logit = uint16_t(m.x[r * kWidth] + weights[0].values[c]);
          if (call.logits) check(m.logits[r * kVocabulary + c] == logit, "another logit");
          if (logit > peak) peak = logit;
        }
        if (call.peaks) check(m.peaks[i * kRows + r] == peak, "another peak");
      }
  }
  check(num_stops > 300, "it hardly stopped");
  if (own.link) own.link->num_changed = 0;
  call_ranks(kernels, &own, kEnd, nullptr);
  printf("%ld gathers, %ld stops\n", long(m.group.gate.load() >> 8), long(num_stops));
}

void as_threads(const Kernels& kernels, const std::vector<Weights>& weights) {
  const int64_t processes[kSize] = {getppid(), getpid(), getpid()};
  Memory& memory = new_memory();
  std::vector<Rank> ranks;
  for (int64_t i = 0; i < kSize; i++) {
    ranks.push_back(rank_of(i, memory, weights));
    ranks[i].processes = processes;
  }
  auto meet_often = [&](Rank& rank) {
    for (int64_t turn = 0; turn < 20000; turn++) meet(kernels, &rank);
  };
  std::vector<std::thread> threads;
  for (int64_t i = 1; i < kSize; i++)
    threads.emplace_back([&, i] {
      meet_often(ranks[i]);
      serve(kernels, &ranks[i]);
    });
  meet_often(ranks[0]);
  make_calls(kernels, ranks[0], memory, weights);
  for (auto& thread : threads) thread.join();
  for (auto& rank : ranks) free_desks(kernels, &rank);
}

// Each process has a copy of the memory, at the same address.
void as_processes(const Kernels& kernels, const std::vector<Weights>& weights) {
  Memory& memory = new_memory();
  int64_t files[kSize - 1], numbers[kSize - 1];
  pid_t processes[kSize - 1];
  auto link_of = [&](int64_t num, const int64_t* own, const int64_t* others) {
    return Link{(char*)&memory, sizeof memory, num, own, others, nullptr, 0, 0, nullptr};
  };
  auto meet_often = [&](Rank& rank) {
    for (int64_t turn = 0; turn < 200; turn++) meet(kernels, &rank);
  };
  for (int64_t i = 1; i < kSize; i++) {
    int ends[2];
    check(!socketpair(AF_UNIX, SOCK_STREAM, 0, ends), "no connection");
    files[i - 1] = ends[0];
    numbers[i - 1] = i;
    processes[i - 1] = fork();
    if (processes[i - 1] == 0) {
      for (int64_t j = 0; j < i; j++) close(int(files[j]));  // so that the end of rank 0 is seen
      const int64_t file = ends[1], zero = 0;
      Link link = link_of(1, &file, &zero);
      Rank rank = rank_of(i, memory, weights);
      rank.link = &link;
      meet_often(rank);
      serve(kernels, &rank);
      free_desks(kernels, &rank);
      _exit(memory.group.failed ? 1 : 0);
    }
    close(ends[1]);
  }
  Link link = link_of(kSize - 1, files, numbers);
  Rank own = rank_of(0, memory, weights);
  own.link = &link;
  meet_often(own);
  make_calls(kernels, own, memory, weights);
  free_desks(kernels, &own);
  for (int64_t i = 1; i < kSize; i++) {
    int code = -1;
    waitpid(processes[i - 1], &code, 0);
    check(code == 0, "the process of a rank has failed");
    close(int(files[i - 1]));
  }
}

struct Words {  // a head of link.cpp, and a region
  int64_t magic = 0x32304b4e494c4c51, kind = 1, call = 1, call_kind = kFetch, gather = 0, from = 0;
  int64_t what = 0, num_regions = 1, num_bytes = 64;
  Region region{};
};

// Sends a message to a rank that waits for calls; returns the failure with which the rank ends.
int64_t failure_of(const Kernels& kernels, Memory& memory, int64_t num_bytes, const Words& words) {
  const char zeros[64] = {};
  int ends[2];
  check(!socketpair(AF_UNIX, SOCK_STREAM, 0, ends), "no connection");
  check(write(ends[0], &words, sizeof words) == sizeof words, "not sent");
  check(write(ends[0], zeros, sizeof zeros) == sizeof zeros, "not sent");
  close(ends[0]);
  const int64_t file = ends[1], zero = 0;
  Link link{(char*)&memory, num_bytes, 1, &file, &zero, nullptr, 0, 0, nullptr};
  Rank rank{};
  rank.group = &memory.group;
  rank.rank = 1;
  rank.link = &link;
  memory.group.failed = 0;
  memory.group.deadline_ns = int64_t(60) * 1000000000;
  serve(kernels, &rank);
  free_desks(kernels, &rank);
  close(ends[1]);
  return memory.group.failed;
}

// Calls with odd regions. A rank writes into its memory, or fails. It writes nowhere else.
void odd_messages(const Kernels& kernels) {
  const int64_t num_bytes = int64_t(1) << 38, big = int64_t(1) << 32;
  const int64_t odd[] = {0, 1, 3, 64, big, num_bytes, num_bytes + 1, kNever, INT64_MIN, INT64_MAX, -1, -64};
  Memory& memory = new_memory(num_bytes);
  int64_t num_garbled = 0, num_applied = 0;
  auto send = [&](const Words& words) {
    int64_t found = failure_of(kernels, memory, num_bytes, words);
    check(found == kGarbled || found == kDead, "a message that no rank sends is no failure");
    (found == kGarbled ? num_garbled : num_applied)++;  // kDead: the end of the connection
  };
  const auto from_start = [&](int64_t num) { return uint64_t(&memory) + uint64_t(num); };
  char* const at = (char*)memory.x;
  Words valid;
  valid.what = int64_t(&memory.call);
  for (int64_t row_bytes : odd)
    for (int64_t stride : odd)
      for (int64_t rows : odd) {
        Words words = valid;
        words.region = {at, row_bytes, stride, rows, kAllRanks};
        send(words);
      }
  for (int64_t first : odd)
    for (int64_t num : odd) {
      Words words = valid;
      words.region = {(char*)from_start(first), 64, 0, 1, kAllRanks};
      send(words);
      words.region.at = at;
      words.num_bytes = num;
      send(words);
      words.num_regions = first;
      send(words);
      words = valid;
      words.region = {at, 64, 0, 1, kAllRanks};
      words.call_kind = first;
      send(words);
      words.call_kind = kFetch;
      words.what = int64_t(from_start(first < 0 || first > num_bytes ? first : num_bytes - 8));
      send(words);
    }
  check(num_garbled > 1000 && num_applied > 10, "all messages are alike");
  printf("%ld messages refused, %ld applied or not complete\n", long(num_garbled), long(num_applied));
}

}  // namespace

int main() {
  std::vector<Weights> weights;
  for (int64_t i = 0; i < kSize; i++) weights.emplace_back(i);
  Kernels kernels{};
  kernels.linear = linear;
  kernels.best = best;
  as_processes(kernels, weights);  // before there are threads
  odd_messages(kernels);
  as_threads(kernels, weights);
}
