// The end of an op on ranks (qllm/cuda/csrc) with threads as ranks, for the sanitizers:
// random shapes, several calls on the same buffers, a rank that does not come. 2, 4 and 8 ranks
// must give the same bits in each call.
#include <stdio.h>
#include <stdlib.h>

#include <memory>
#include <random>

#include "gathered_norm.cpp"

using namespace qllm;

namespace {

std::mt19937 rng(1);

i64 below(i64 num) { return i64(rng() % u32(num)); }

void check(bool is_right, const char* what) {
  if (is_right) return;
  fprintf(stderr, "%s\n", what);
  abort();
}

struct Free {
  void operator()(char* memory) const { free(memory); }
};
using Memory = std::unique_ptr<char, Free>;

struct Inputs {
  GatheredNorm a{};
  std::vector<u16> residual, parts, slots, gates;
  std::vector<float> weight;
  std::vector<i32> owners;

  Inputs() {
    a.rows = 1 + below(20);
    a.width = 8 * (1 + below(9));
    a.top_k = below(4);
    a.has_parts = !a.top_k || below(2);
    a.rounds_once = i32(below(2));
    a.eps = 0;  // powers of two then change no normed value
    a.scale = 0.5f;
    a.deadline_ns = i64(120) * 1000000000;
    for (auto* values : {&residual, &parts}) values->resize(a.rows * a.width);
    slots.resize(a.rows * a.top_k * a.width);
    gates.resize(a.rows * a.top_k);
    for (auto* values : {&residual, &parts, &slots, &gates})
      for (u16& x : *values) x = u16(0x3e00 + below(0x200) + (below(2) << 15));
    weight.assign(a.width, 1.5f);
    a.gates = gates.data();
    a.weight = weight.data();
    i64 end = 0;
    for (i64* at : {&a.parts, &a.residual, &a.sums, &a.normed}) {
      *at = end;
      end += 2 * a.rows * a.width;
    }
    a.slots = end;
    a.signals = end + 2 * a.rows * a.top_k * a.width;
  }
};

// What one rank does: it computes its parts, calls the kernel, and reads the normed rows, again and
// again. In turn t all values are those of the inputs times 2^t, so normed rows stay the same.
template <int kRanks>
void take_part(const Inputs& in, char* const* parts, i64 rank, const std::vector<char>& wanted) {
  const GatheredNorm& a = in.a;
  const i64 ranks = kRanks;
  Loads<kRanks> net;
  for (int i = 0; i < kRanks; i++) net.parts[i] = parts[i];
  char* own = parts[rank];
  i64 row = 2 * a.width, first = a.columns[rank], num = a.columns[rank + 1] - first;
  std::vector<Eight> space(a.width / kAtOnce);
  float chains[kChains];
  Crowd crowd(1);
  auto write = [](char* to, const u16* from, i64 count, int turn) {
    for (i64 i = 0; i < count; i++) ((u16*)to)[i] = u16(from[i] + (turn << 7));  // bf16's exponent
  };
  for (int turn = 0; turn < 20; turn++) {
    for (i64 t = a.rows * rank / ranks; t < a.rows * (rank + 1) / ranks; t++)
      write(own + a.residual + t * row, &in.residual[t * a.width], a.width, turn);
    for (i64 t = 0; t < a.rows; t++)
      write(own + a.parts + t * row + 2 * first, &in.parts[t * a.width] + first, num, turn);
    for (i64 s = 0; s < a.rows * a.top_k; s++)
      if (in.owners[s] == rank)
        write(own + a.slots + s * row, &in.slots[s * a.width], a.width, turn);
    Block block = {0, 1, 0, 1, &crowd};
    check(gathered_norm(net, a, rank, block, space.data(), chains), "a rank was late");
    check(wanted.empty() || !memcmp(own + a.normed, wanted.data(), wanted.size()), "other bits");
  }
}

// Runs so many ranks; returns the normed rows.
std::vector<char> run(Inputs& in, i64 ranks, const std::vector<char>& wanted) {
  GatheredNorm& a = in.a;
  i64 blocks = 1 + below(3), num_threads = 1 + below(3);
  a.late = a.signals + 4 * blocks * ranks;
  for (i64 i = 0; i <= ranks; i++) a.columns[i] = a.width / 8 * i / ranks * 8;
  in.owners.resize(a.rows * a.top_k);
  for (i32& owner : in.owners) owner = i32(below(ranks));
  a.owners = in.owners.data();
  size_t size = (a.late + 4 + 15) / 16 * 16, results = 2 * a.rows * a.width;
  std::vector<Memory> memory;
  char* parts[kMostRanks];
  for (i64 r = 0; r < ranks; r++) {
    memory.emplace_back((char*)aligned_alloc(16, size));
    parts[r] = memory.back().get();
    memset(parts[r], 0xff, size);
    memset(parts[r] + a.signals, 0, size - a.signals);
  }
  std::vector<std::thread> threads;
  for (i64 r = 0; r < ranks; r++)
    threads.emplace_back([&, r] {
      if (ranks == 2) take_part<2>(in, parts, r, wanted);
      else if (ranks == 4) take_part<4>(in, parts, r, wanted);
      else take_part<8>(in, parts, r, wanted);
    });
  for (auto& thread : threads) thread.join();
  std::vector<char> found(parts[0] + a.normed, parts[0] + a.normed + results);
  for (i64 r = 0; r < ranks; r++) memset(parts[r] + a.signals, 0, size - a.signals);
  check(qllm_run(ranks, parts, 0, &a, blocks, num_threads, -1) == 0, "a block was late");
  for (i64 r = 0; r < ranks; r++)
    check(!memcmp(parts[r] + a.normed, found.data(), results), "blocks have other bits");
  a.deadline_ns = 1000000;
  i64 num_late = qllm_run(ranks, parts, 0, &a, blocks, num_threads, ranks - 1);
  check(num_late == (ranks - 1) * blocks * num_threads, "a rank came without another");
  a.deadline_ns = i64(120) * 1000000000;
  return found;
}

}  // namespace

int main() {
  int num_shapes = 12;
  for (int shape = 0; shape < num_shapes; shape++) {
    Inputs in;
    std::vector<char> wanted;
    for (i64 ranks : {2, 4, 8}) wanted = run(in, ranks, wanted);
  }
  printf("%d shapes\n", num_shapes);
}
