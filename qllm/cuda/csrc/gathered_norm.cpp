// The host build: ranks of one process, with threads for each block of a rank.
#include "gathered_norm.h"

#include <memory>
#include <vector>

namespace qllm {
namespace {

// Memory of a block that its threads share.
struct Shared {
  Crowd crowd;
  std::vector<Eight> row;
  float chains[kChains];

  Shared(i32 threads, i64 width) : crowd(threads), row(width / kAtOnce) {}
};

struct Grid {
  i64 blocks, threads;  // of a rank, of a block
  i64 missing;          // the rank that does not come, if it is one
};

// Runs the ranks of a net; returns the number of threads that were late.
template <class Net>
i64 run(const Net& net, const GatheredNorm& a, const Grid& grid) {
  std::vector<std::thread> threads;
  std::vector<std::unique_ptr<Shared>> shared;
  std::atomic<i64> num_late{0};
  for (i64 i = 0; i < Net::kSize * grid.blocks; i++) {
    if (i / grid.blocks == grid.missing) continue;
    shared.push_back(std::make_unique<Shared>(i32(grid.threads), a.width));
    for (i64 t = 0; t < grid.threads; t++)
      threads.emplace_back([&, i, t, own = shared.back().get()] {
        Block block = {i32(i % grid.blocks), i32(grid.blocks), i32(t), i32(grid.threads),
                       &own->crowd};
        num_late += !gathered_norm(net, a, i / grid.blocks, block, own->row.data(), own->chains);
      });
  }
  for (auto& thread : threads) thread.join();
  return num_late;
}

template <int kRanks>
i64 run(char* const* parts, bool is_virtual, const GatheredNorm& a, const Grid& grid) {
  Virtual<kRanks> one = {parts[0], parts[1] - parts[0]};
  Loads<kRanks> own;
  for (int i = 0; i < kRanks; i++) own.parts[i] = parts[i];
  return is_virtual ? run(one, a, grid) : run(own, a, grid);
}

}  // namespace
}  // namespace qllm

// Runs 2, 4 or 8 ranks with buffers at `parts`, which are equally far apart if `is_virtual`. The
// rank `missing` does not come, if it is one. Returns the number of threads that were late.
extern "C" qllm::i64 qllm_run(qllm::i64 ranks, char* const* parts, qllm::i64 is_virtual,
                              const qllm::GatheredNorm* a, qllm::i64 blocks, qllm::i64 threads,
                              qllm::i64 missing) {
  qllm::Grid grid = {blocks, threads, missing};
  if (ranks == 2) return qllm::run<2>(parts, is_virtual, *a, grid);
  if (ranks == 4) return qllm::run<4>(parts, is_virtual, *a, grid);
  return qllm::run<8>(parts, is_virtual, *a, grid);
}

extern "C" qllm::i64 qllm_size() { return sizeof(qllm::GatheredNorm); }
