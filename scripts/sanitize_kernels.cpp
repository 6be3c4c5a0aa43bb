// Runs every kernel of every instruction set of this machine on exactly as much memory as it may
// touch, with odd sizes, and compares the bits of 1 and of 3 threads; for `sanitize-kernels`.
#include <stdio.h>
#include <string.h>

#include <atomic>
#include <cmath>
#include <random>
#include <thread>
#include <vector>

#include "kernels.h"
#include "pool.h"

using namespace qllm;
using Half = std::vector<uint16_t>;

namespace {

std::mt19937 noise(1);

Half values(int64_t num) {  // about -1 to 1
  Half out(num);
  for (auto& x : out) {
    float value = float(int(noise() % 2001) - 1000) / 1000;
    uint32_t bits;
    memcpy(&bits, &value, 4);
    x = uint16_t(bits >> 16);
  }
  return out;
}

struct Packed {
  Half data, bias;
  Matrix matrix;
  Packed(const Kernels& k, int64_t n, int64_t width, bool biased = false)
      : data((n + 15) / 16 * 16 * width), bias(biased ? values(n) : Half()) {
    Half weight = values(n * width);
    k.pack(data.data(), weight.data(), n, width, width, 1);
    matrix = {data.data(), biased ? bias.data() : nullptr, n, width};
  }
};

struct Results {
  std::vector<Half> all;
  void add(const Half& x) { all.push_back(x); }
};

void products(const Kernels& k, Results& results) {
  for (int64_t n : {1, 17, 100, 130})
    for (int64_t rows : {1, 5, 7, 97}) {
      Packed weight(k, n, 70, n % 2);
      Half x = values(rows * 70), y(rows * n);
      k.linear(y.data(), x.data(), weight.matrix, rows);
      results.add(y);
    }
  Half x = values(9 * 70), weight = values(70), y(9 * 70);
  k.rms_norm(y.data(), x.data(), weight.data(), 1e-6f, 9, 70);
  results.add(y);
}

void attention(const Kernels& k, Results& results, int64_t heads, int64_t groups, int64_t h,
               int64_t window) {
  const int64_t width = 70, capacity = 150, layers = 2, tokens = 61, index = 1;
  Packed qkv(k, (heads + 2 * groups) * h, width, true);
  Half norm = values(width), q_norm = values(h), k_norm = values(h);
  Attention a{qkv.matrix, norm.data(), q_norm.data(), k_norm.data(), heads, groups, h,
              0,          1e-6f,       1e-6f,         1 / std::sqrt(float(h))};
  Half keys = values(layers * groups * capacity * h), kept = values(layers * groups * capacity * h);
  Half other_keys = keys, other_kept = kept;
  Span spans[] = {{keys.data(), kept.data(), capacity * h, 0, 93, capacity},
                  {other_keys.data(), other_kept.data(), capacity * h, 58, 0, 1},
                  {other_keys.data(), other_kept.data(), capacity * h, 59, 1, 3}};
  Half x = values(tokens * width), cos = values(tokens * h), sin = values(tokens * h);
  Half q(tokens * heads * h), out(tokens * heads * h);
  k.attend_in(q.data(), x.data(), cos.data(), sin.data(), tokens, a, index, spans, 3);
  k.attend(out.data(), q.data(), a, index, window, spans, 3);
  results.add(keys);
  results.add(out);
}

void experts(const Kernels& k, Results& results) {
  const int64_t width = 70, hidden = 38, num = 5, tokens = 11, top_k = 2;
  Packed weight(k, num, width);
  Half norm = values(width), mid = values(tokens * width), normed(tokens * width);
  std::vector<int64_t> ids(tokens * top_k), token, inverse(tokens * top_k);
  std::vector<float> weights(tokens * top_k);
  Router router{norm.data(), weight.matrix, top_k, 1, 1, 1e-6f};
  k.route(normed.data(), ids.data(), weights.data(), mid.data(), tokens, router);
  std::vector<Unit> units;
  for (int64_t e = 0; e < num; e++) {
    Unit unit{e, int64_t(token.size()), 0};
    for (size_t i = 0; i < ids.size(); i++)
      if (ids[i] == e) {
        inverse[i] = int64_t(token.size());
        token.push_back(int64_t(i) / top_k);
      }
    unit.hi = int64_t(token.size());
    if (unit.hi > unit.lo) units.push_back(unit);
  }
  Half up, down;
  for (int64_t e = 0; e < num; e++) {
    Packed one(k, 2 * hidden, width), two(k, width, hidden);
    up.insert(up.end(), one.data.begin(), one.data.end());
    down.insert(down.end(), two.data.begin(), two.data.end());
  }
  Experts layer{up.data(), down.data(), num, hidden, width};
  Half slots(tokens * top_k * width), out(tokens * width);
  k.experts(slots.data(), normed.data(), token.data(), units.data(), int64_t(units.size()), layer);
  k.combine(out.data(), slots.data(), inverse.data(), weights.data(), 1, tokens, top_k, width);
  results.add(normed);
  results.add(slots);
  results.add(out);
}

Results everything(const Kernels& k) {
  noise.seed(1);
  Results results;
  products(k, results);
  for (int64_t window : {0, 40}) {
    attention(k, results, 4, 2, 32, window);
    attention(k, results, 3, 3, 64, window);
    attention(k, results, 8, 1, 96, window);
    attention(k, results, 17, 1, 128, window);
  }
  experts(k, results);
  return results;
}

// Two callers at once, threads that come and go, many small rounds.
int pool() {
  std::atomic<int64_t> done{0};
  auto caller = [&] {
    for (int round = 0; round < 2000; round++)
      parallel(1 + round % 5, [&](int64_t) { done.fetch_add(1, std::memory_order_relaxed); });
  };
  for (int threads : {2, 4, 1, 3}) {
    set_threads(threads);
    std::thread other(caller);
    caller();
    other.join();
  }
  return done.load() == 4 * 2 * 2000 * 3 ? 0 : 1;
}

}  // namespace

int main() {
  std::vector<const Kernels*> all{&kPortable};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) all.push_back(&kAvx2);
  if (__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl")) {
    all.push_back(&kAvx512);
    if (__builtin_cpu_supports("avx512bf16")) all.push_back(&kAvx512Bf16);
  }
#endif
  for (const Kernels* k : all) {
    set_threads(1);
    Results alone = everything(*k);
    set_threads(3);
    if (everything(*k).all != alone.all) return printf("%s: threads change bits\n", k->name), 1;
    printf("%s: ok\n", k->name);
  }
  if (pool()) return printf("pool: tasks got lost\n"), 1;
  printf("pool: ok\n");
  set_threads(1);
  return 0;
}
