// Ranks as threads of one process, for the thread sanitizer: gathers, stops after any task, and
// calls of the head whose logits are compared. Kernels are replaced by plain loops.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <memory>
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

}  // namespace

int main() {
  auto group = std::make_unique<Group>();
  group->size = kSize;
  group->deadline_ns = int64_t(60) * 1000000000;
  const int64_t processes[kSize] = {getppid(), getpid(), getpid()};
  std::vector<Weights> weights;
  for (int64_t i = 0; i < kSize; i++) weights.emplace_back(i);
  std::vector<Rank> ranks(kSize);
  for (int64_t i = 0; i < kSize; i++) {
    ranks[i].group = group.get();
    ranks[i].rank = i;
    ranks[i].processes = processes;
    ranks[i].pieces = weights[i].pieces.data();
    ranks[i].num_pieces = kPieces;
  }
  Kernels kernels{};
  kernels.linear = linear;
  kernels.best = best;

  std::vector<std::thread> threads;
  for (int64_t i = 1; i < kSize; i++)
    threads.emplace_back([&, i] {
      for (int64_t turn = 0; turn < 20000; turn++) meet(kernels, &ranks[i]);
      serve(kernels, &ranks[i]);
    });
  for (int64_t turn = 0; turn < 20000; turn++) meet(kernels, &ranks[0]);

  std::vector<uint16_t> x(kRows * kWidth), logits(kRows * kVocabulary);
  std::vector<float> peaks(kSize * kRows);
  std::vector<int64_t> ids(kSize * kRows);
  int64_t watch = 0, num_stops = 0;
  unsigned seed = 1;
  for (int64_t turn = 0; turn < 300; turn++) {
    for (int64_t r = 0; r < kRows; r++) x[r * kWidth] = uint16_t(turn + r);
    memset(logits.data(), 0, logits.size() * sizeof logits[0]);
    HeadCall call{};
    call.x = x.data();
    call.rows = kRows;
    call.end_block = kPieces;
    call.vocabulary = kVocabulary;
    if (turn % 2) call.logits = logits.data();
    else call.peaks = peaks.data(), call.ids = ids.data();
    call.desk = turn % 4;
    call.is_new = 1;
    call.grain = kEachExpert;
    call.watch = &watch;
    while (!call.is_done) {
      call.stop_ns = kNever;
      call.tasks_left = 1 + rand_r(&seed) % 40;
      call_ranks(kernels, &ranks[0], kRunHead, &call);
      check(!group->failed, "a rank failed");
      call.is_new = 0;
      num_stops += !call.is_done;
    }
    for (int64_t r = 0; r < kRows; r++)
      for (int64_t i = 0; i < kSize; i++) {
        int64_t first = i * kPieces * kOutputs, last = first + kPieces * kOutputs;
        float peak = -1;
        for (int64_t c = first; c < last; c++) {
          uint16_t logit = uint16_t(x[r * kWidth] + weights[0].values[c]);
          if (call.logits) check(logits[r * kVocabulary + c] == logit, "another logit");
          if (logit > peak) peak = logit;
        }
        if (call.peaks) check(peaks[i * kRows + r] == peak, "another peak");
      }
  }
  check(num_stops > 300, "it hardly stopped");
  call_ranks(kernels, &ranks[0], kEnd, nullptr);
  for (auto& thread : threads) thread.join();
  for (auto& rank : ranks) free_desks(kernels, &rank);
  printf("%ld gathers, %ld stops\n", long(group->gate.load() >> 8), long(num_stops));
}
