// Runs every kernel of every instruction set of this machine on exactly as much memory as it may
// touch, with odd sizes, and compares the bits of 1 and of 3 threads; for `sanitize-kernels`.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <cmath>
#include <random>
#include <thread>
#include <vector>

#include "kernels.h"
#include "panels.h"
#include "pool.h"
#include "sweep.h"

using namespace qllm;
using Half = std::vector<uint16_t>;

namespace {

constexpr int64_t kEachTask = 2;  // Grain::EXPERT of qllm/types.py

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
    Half back(n * width);
    k.unpack(back.data(), data.data(), n, width, width, 1);
    if (back != weight) abort();
    matrix = {data.data(), biased ? bias.data() : nullptr, n, width, nullptr};
  }
};

struct Eights {  // int8, one after the other
  std::vector<int8_t> data;
  std::vector<float> scale;
  Eights(const Kernels& k, int64_t num, int64_t n, int64_t width, int64_t group) {
    int64_t padded = (n + 15) / 16 * 16, groups = (width + group - 1) / group;
    scale.assign(num * groups * padded, 0.01f);
    for (int64_t e = 0; e < num; e++) {
      std::vector<int8_t> weight(n * width), packed(padded * width), back(n * width);
      for (auto& x : weight) x = int8_t(noise());
      k.pack8(packed.data(), weight.data(), n, width, width, 1);
      k.unpack8(back.data(), packed.data(), n, width, width, 1);
      if (back != weight) abort();
      data.insert(data.end(), packed.begin(), packed.end());
    }
  }
};

struct Quantised {  // scales and codes of bytes that are finite as any kind of number
  std::vector<uint8_t> data;
  Format format;
  Quantised(Code code, Worth scale, Worth offset, int64_t n, int64_t k, int64_t group,
            Products products, int64_t num = 1)
      : format{code, group, scale, offset, products} {
    auto size_of = [](Worth kind) { return kind == kNone ? 0 : kind == kFp32 ? 4 : 2; };
    int64_t padded = (n + 15) / 16 * 16, one = code == kI8 || code == kE4m3 ? 8 : 4, size = 0;
    for (int64_t p = 0; p < k; p += group) {
      int64_t inputs = group < k - p ? group : k - p;
      size += padded * (size_of(scale) + size_of(offset) + (inputs + 7) / 8 * one);
    }
    data.resize(size * num);
    for (auto& x : data) x = uint8_t(0x20 + noise() % 16);
  }
  Matrix matrix(int64_t n, int64_t k, const uint16_t* bias) const {
    return {(const uint16_t*)data.data(), bias, n, k, &format};
  }
};

struct Normed {  // filled up to a multiple of 16, as the kernels may read it
  std::vector<float> weight, bias;
  Norm norm;
  Normed(int64_t width, NormKind kind)
      : weight((width + 15) / 16 * 16, 0.5f), bias(kind == kLayer ? weight : std::vector<float>()) {
    norm = {weight.data(), kind == kLayer ? bias.data() : nullptr, kind, 1e-6f};
  }
};

struct Results {
  std::vector<Half> all;
  void add(const Half& x) { all.push_back(x); }
};

void quantised(const Kernels& k, Results& results) {
  const int64_t width = 70;
  for (Code code : {kU4, kI4, kE2m1, kI8, kE4m3})
    for (Worth scale : {kFp32, kFp16, kBf16})
      for (int64_t n : {1, 50, 130}) {
        Worth offset = n == 50 ? kNone : scale;
        Products products = n == 1 ? kRounded : n == 50 && code == kE2m1 ? kPowers : kExact;
        Quantised weight(code, scale, offset, n, width, n == 130 ? width : 32, products);
        Half bias = values(n), packed((n + 15) / 16 * 16 * width);
        Matrix matrix = weight.matrix(n, width, bias.data());
        k.dequantise(packed.data(), matrix);
        results.add(packed);
        for (int64_t rows : {1, 4, 5, 97}) {
          Half x = values(rows * width), y(rows * n);
          k.linear(y.data(), x.data(), matrix, rows);
          results.add(y);
        }
      }
}

void products(const Kernels& k, Results& results) {
  for (int64_t n : {1, 17, 100, 130})
    for (int64_t rows : {1, 5, 7, 97}) {
      Packed weight(k, n, 70, n % 2);
      Half x = values(rows * 70), y(rows * n);
      k.linear(y.data(), x.data(), weight.matrix, rows);
      results.add(y);
    }
  Half x = values(9 * 70), y(9 * 70);
  for (NormKind kind : {kRms, kRmsWide, kLayer}) {
    Normed norm(70, kind);
    k.norm(y.data(), x.data(), norm.norm, 9, 70);
    results.add(y);
  }
}

// Slabs of two requests, and spans of 61 tokens that write and read them.
struct Slabs {
  static constexpr int64_t kCapacity = 150, kTokens = 61, kIndex = 1;
  Half k, v, other_k, other_v;
  Span spans[3];
  Slabs(int64_t groups, int64_t key, int64_t value)
      : k(values(2 * groups * kCapacity * key)), v(values(2 * groups * kCapacity * value)),
        other_k(k), other_v(v) {
    spans[0] = {k.data(), v.data(), kCapacity, 0, 93, kCapacity};
    spans[1] = {other_k.data(), other_v.data(), kCapacity, 58, 0, 1};
    spans[2] = {other_k.data(), other_v.data(), kCapacity, 59, 1, 3};
  }
};

void attention(const Kernels& k, Results& results, int64_t heads, int64_t groups, int64_t h,
               int64_t window) {
  const int64_t width = 70, tokens = Slabs::kTokens;
  Packed qkv(k, (heads + 2 * groups) * h, width, true);
  Normed norm(width, kRms), one(h, kRms), q_norm(heads * h, kRms), k_norm(groups * h, kRms);
  bool whole = heads % 2, half_table = heads == 8;
  std::vector<float> sinks(heads, 1.5f);
  Attention a{{heads, groups, h, 0, window ? sinks.data() : nullptr, 1 / std::sqrt(float(h))},
              qkv.matrix, norm.norm, whole ? q_norm.norm : one.norm,
              whole ? k_norm.norm : one.norm, whole, half_table ? h / 2 : h, h, whole ? 0.5f : INFINITY};
  Slabs slabs(groups, h, h);
  Half x = values(tokens * width);
  Half cos = values(tokens * a.cos_width), sin = values(tokens * a.cos_width);
  Half q(tokens * heads * h), out(tokens * heads * h);
  k.attend_in(q.data(), x.data(), cos.data(), sin.data(), tokens, a, Slabs::kIndex, slabs.spans, 3);
  Half rows = values(tokens * qkv.matrix.n);
  k.place_heads(q.data(), rows.data(), cos.data(), sin.data(), a, Slabs::kIndex, slabs.spans, 3);
  results.add(q);
  std::vector<float> sums(tokens * heads * h), softmax(tokens * heads * 2);
  for (int64_t begin : {0, 64}) {
    Part part{sums.data(), softmax.data(), begin, begin ? Slabs::kCapacity : 64, !begin, begin > 0};
    k.attend(out.data(), q.data(), a.heads, Slabs::kIndex, window, slabs.spans, 3, part);
  }
  results.add(slabs.k);
  results.add(out);
}

void latents(const Kernels& k, Results& results, int64_t heads, bool low_rank, Rotation rotation) {
  const int64_t width = 70, rank = 64, tail = 32, key = 14, value = 18, tokens = Slabs::kTokens;
  int64_t q_width = heads * (key + tail), q_rank = low_rank ? 38 : q_width;
  Packed down(k, q_rank + rank + tail, width), up(k, q_width, q_rank);
  Normed norm(width, kRms), q_norm(q_rank, kRms), kv_norm(rank, kRms);
  Half into, out_of;
  for (int64_t n = 0; n < heads; n++) {
    Packed one(k, rank, key), two(k, value, rank);
    into.insert(into.end(), one.data.begin(), one.data.end());
    out_of.insert(out_of.end(), two.data.begin(), two.data.end());
  }
  Latents m{{heads, 1, rank + tail, tail, nullptr, 0.2f}, down.matrix,
            low_rank ? up.matrix : Matrix{}, norm.norm, q_norm.norm, kv_norm.norm,
            into.data(), out_of.data(), key, value, rotation};
  Slabs slabs(1, rank, tail);
  Half x = values(tokens * width), cos = values(2 * tokens * tail), sin = values(tokens * tail);
  Half q(tokens * heads * (rank + tail)), mid(tokens * heads * rank), out(tokens * heads * value);
  k.latents_in(q.data(), x.data(), cos.data(), sin.data(), tokens, m, Slabs::kIndex, slabs.spans,
               3);
  Part whole{nullptr, nullptr, 0, Slabs::kCapacity, 1, 1};
  k.attend(mid.data(), q.data(), m.heads, Slabs::kIndex, 0, slabs.spans, 3, whole);
  k.latents_out(out.data(), mid.data(), m, tokens);
  results.add(slabs.k);
  results.add(slabs.v);
  results.add(out);
}

void routers(const Kernels& k, Results& results) {
  const int64_t width = 70, num = 12, tokens = 11;
  for (RouterKind kind : {kSigmoid, kSparseMixer, kSoftmaxFp32}) {
    Packed weight(k, num, width, kind == kSparseMixer);
    Normed norm(width, kLayer);
    std::vector<float> correction(num, 0.1f);
    int64_t top_k = kind == kSigmoid ? 5 : 2;
    Half mid = values(tokens * width), normed(tokens * width), weights(tokens * top_k);
    std::vector<int64_t> ids(tokens * top_k);
    Router router{norm.norm, weight.matrix, 1, kind, top_k, 1, 0, 4, 2, correction.data(), 2.5f, 0.02f};
    k.route(normed.data(), ids.data(), weights.data(), mid.data(), tokens, router);
    results.add(normed);
    results.add(weights);
  }
}

void experts(const Kernels& k, Results& results) {
  const int64_t width = 70, hidden = 38, num = 5, tokens = 11, top_k = 2;
  Packed weight(k, num, width);
  Normed norm(width, kRms);
  Half mid = values(tokens * width), normed(tokens * width);
  std::vector<int64_t> ids(tokens * top_k), token, inverse(tokens * top_k);
  std::vector<float> weights(tokens * top_k);
  Router router{norm.norm, weight.matrix, 1, kSoftmax, top_k, 1, 1, 1, 1, nullptr, 1, 0};
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
  Half slots(tokens * top_k * width), out(tokens * width);
  auto run = [&](const Experts& layer) {
    k.experts(slots.data(), normed.data(), token.data(), units.data(), int64_t(units.size()),
              layer);
    k.combine(out.data(), slots.data(), inverse.data(), weights.data(), 1, tokens, top_k, width);
    results.add(slots);
    results.add(out);
  };
  Half up, down, up_bias = values(num * 2 * hidden), down_bias = values(num * width);
  for (int64_t e = 0; e < num; e++) {
    Packed one(k, 2 * hidden, width), two(k, width, hidden);
    up.insert(up.end(), one.data.begin(), one.data.end());
    down.insert(down.end(), two.data.begin(), two.data.end());
  }
  auto whole = [&](const void* up, const void* down, const float* up_scale, const float* down_scale,
                   int64_t group) {
    Experts found{};
    found.up = up, found.down = down, found.up_scale = up_scale, found.down_scale = down_scale;
    found.num = num, found.width = hidden, found.hidden = width;
    found.num_inner = hidden, found.num_columns = width, found.group = group;
    return found;
  };
  Experts plain = whole(up.data(), down.data(), nullptr, nullptr, 0);
  run(plain);
  Quantised four(kU4, kFp16, kFp16, 2 * hidden, width, 32, kExact, num);
  Quantised eight(kI8, kBf16, kNone, width, hidden, hidden, kExact, num);
  Experts mixed = plain;
  mixed.up = four.data.data(), mixed.up_format = &four.format;
  mixed.down = eight.data.data(), mixed.down_format = &eight.format;
  run(mixed);
  Experts clamped = plain;
  clamped.up_bias = up_bias.data(), clamped.down_bias = down_bias.data();
  clamped.alpha = 1.7f, clamped.limit = 0.5f;
  run(clamped);
  for (int64_t group : {width, int64_t(32)}) {
    Eights eight_up(k, num, 2 * hidden, width, group), eight_down(k, num, width, hidden, group);
    run(whole(eight_up.data.data(), eight_down.data.data(), eight_up.scale.data(),
              eight_down.scale.data(), group));
  }
  results.add(normed);
  Packed gate(k, 1, width);
  Mlp shared{&plain, &gate.matrix};
  k.mlp(out.data(), normed.data(), shared, tokens);
  results.add(out);
  Half both = values(tokens * 2 * hidden), gated(tokens * hidden);
  k.swiglu(gated.data(), both.data(), tokens, hidden);
  results.add(gated);
}

// A DeltaNet of random weights, and spans of two requests: one begins, one goes on.
struct Recurrent {
  static constexpr int64_t kWidth = 70, kTokens = 90, kTaps = 4;
  static constexpr int64_t kMixed = 2 * 2 * 32 + 4 * 48, kGiven = kMixed + 4 * (48 + 2);
  Packed into, out;
  Normed first, norm;
  std::vector<float> conv, rate, bias;
  DeltaNet net;
  Half conv_before, convs[2];
  std::vector<float> before, states[2];
  DeltaSpan spans[2];
  explicit Recurrent(const Kernels& k)
      : into(k, kGiven, kWidth), out(k, kWidth, 4 * 48), first(kWidth, kRms), norm(48, kRms),
        conv(kTaps * kMixed, 0.3f), rate(4, -0.5f), bias(4, 0.1f),
        net{2, 4, 32, 48, kTaps, conv.data(), rate.data(), bias.data(), norm.norm},
        conv_before(values(kMixed * kTaps)), before(4 * 32 * 48, 0.01f) {
    for (int i = 0; i < 2; i++) convs[i].resize(kMixed * kTaps), states[i].resize(before.size());
    spans[0] = {nullptr, nullptr, convs[0].data(), states[0].data(), 1, 70, nullptr};
    spans[1] = {conv_before.data(), before.data(), convs[1].data(), states[1].data(), 71, 2, nullptr};
  }
  // Bits of the states after the spans.
  std::vector<uint32_t> last() const {
    std::vector<uint32_t> found;
    for (auto& state : states)
      for (float x : state) memcpy(&found.emplace_back(), &x, 4);
    for (auto& conv : convs) found.insert(found.end(), conv.begin(), conv.end());
    return found;
  }
};

void deltas(const Kernels& k, Results& results) {
  Recurrent r(k);
  Half given = values(Recurrent::kTokens * Recurrent::kGiven), out(Recurrent::kTokens * 4 * 48);
  k.delta(out.data(), given.data(), r.net, r.spans, 2);
  Half by = values(int64_t(out.size()));
  k.gate(out.data(), by.data(), int64_t(out.size()));
  results.add(out);
  Half last;
  for (uint32_t x : r.last()) last.push_back(uint16_t(x)), last.push_back(uint16_t(x >> 16));
  results.add(last);
}

Results everything(const Kernels& k) {
  noise.seed(1);
  Results results;
  products(k, results);
  quantised(k, results);
  for (int64_t window : {0, 40}) {
    attention(k, results, 4, 2, 32, window);
    attention(k, results, 3, 3, 64, window);
    attention(k, results, 8, 1, 96, window);
    attention(k, results, 17, 1, 128, window);
    attention(k, results, 50, 1, 32, window);
  }
  for (bool low_rank : {false, true}) {
    latents(k, results, 3, low_rank, low_rank ? kPairs : kHalves);
    latents(k, results, 49, low_rank, kComplex);
  }
  deltas(k, results);
  routers(k, results);
  experts(k, results);
  return results;
}

// Two callers at once while threads start and end, in many small rounds.
int pool() {
  std::atomic<int64_t> done{0};
  auto caller = [&](int threads) {
    for (int round = 0; round < 2000; round++) {
      if (round % 100 == 0) set_threads(1 + (threads + round / 100) % 4);
      parallel_runs(1 + round % 5, 1 + round % 3, [&](int64_t task, int64_t then) {
        done.fetch_add(then > task, std::memory_order_relaxed);
      });
    }
  };
  for (int threads : {2, 4, 1, 3}) {
    std::thread other(caller, threads);
    caller(threads + 1);
    other.join();
  }
  return done.load() == 4 * 2 * 2000 * 3 ? 0 : 1;
}

// Weights of a stack that several threads pack at once, as readers of a checkpoint do.
int packing() {
  for (Code code : {kU4, kI4, kE2m1, kI8, kE4m3})
    for (Worth scale : {kFp32, kFp16, kBf16})
      for (int64_t n : {1, 50, 130})
        for (int64_t k : {64, 70}) {
          Format format{code, n == 130 ? k : 32, scale, n == 50 ? kNone : scale, kExact, 0};
          const int64_t per_byte = codes_per_byte(format), groups = (k + format.group - 1) / format.group;
          const int64_t whole = n / kPanel, rest = padded(n % kPanel);
          const int64_t size = whole * panel_size(format, kPanel, k) + (rest ? panel_size(format, rest, k) : 0);
          std::vector<uint8_t> codes(n * k / per_byte), worths(n * groups * worth_size(scale));
          for (auto& x : codes) x = uint8_t(noise());
          for (auto& x : worths) x = uint8_t(0x20 + noise() % 16);
          std::vector<std::vector<uint8_t>> places(8, std::vector<uint8_t>(size));
          std::vector<int64_t> found(places.size());
          auto pack = [&](size_t i) {
            Codes one{codes.data(), worths.data(), n == 50 ? nullptr : worths.data(), n, k,
                      places[i].data(), 0, 0};
            pack_codes(kPortable, &one, 1, format);
            found[i] = one.found;
          };
          std::vector<std::thread> readers;
          for (size_t i = 0; i < places.size(); i++) readers.emplace_back(pack, i);
          for (auto& reader : readers) reader.join();
          for (size_t i = 1; i < places.size(); i++)
            if (places[i] != places[0] || found[i] != found[0]) return 1;
        }
  return 0;
}

// Blocks of the head, the last one narrower, whole and then while another thread asks it to stop:
// it continues with the task after the last finished one.
int polled_head() {
  const int64_t width = 70, wide = 640, num = 5, rows = 3;
  std::vector<Packed> weights;
  for (int64_t i = 0; i < num; i++) weights.emplace_back(kPortable, i + 1 < num ? wide : 7, width);
  std::vector<const Matrix*> blocks;
  for (auto& one : weights) blocks.push_back(&one.matrix);
  Half x = values(rows * width);
  std::vector<float> wanted;
  for (bool rings : {false, true, true}) {
    std::atomic<bool> is_over{false};
    int64_t word = 0;
    std::thread bell([&] {
      while (!is_over.load()) __atomic_fetch_add(&word, int64_t(rings), __ATOMIC_RELEASE);
    });
    std::vector<float> peaks(rows, -INFINITY);
    std::vector<int64_t> ids(rows);
    Course course;
    HeadBlocks s{};
    s.peaks = peaks.data(), s.ids = ids.data(), s.x = x.data(), s.rows = rows;
    s.blocks = blocks.data(), s.width = wide, s.end = num, s.course = &course;
    s.grain = kEachTask, s.watch = &word, s.stop_ns = s.tasks_left = kNever;
    for (; s.at < num; head(kPortable, &s)) s.seen = __atomic_load_n(&word, __ATOMIC_ACQUIRE);
    is_over.store(true);
    bell.join();
    if (wanted.empty()) wanted = peaks;
    if (peaks != wanted) return 1;
  }
  return 0;
}

// A layer with states, whole and then while another thread asks it to stop: its ops go on with the
// task after the last finished one, and their states are those of an op that was not left.
int polled_states() {
  const int64_t width = Recurrent::kWidth, tokens = Recurrent::kTokens;
  Recurrent r(kPortable);
  Half x = values(tokens * width), wanted;
  std::vector<uint32_t> last;
  const int64_t nums[] = {1, 1};
  for (bool rings : {false, true, true}) {
    std::atomic<bool> is_over{false};
    int64_t word = 0;
    std::thread bell([&] {
      while (!is_over.load()) __atomic_fetch_add(&word, int64_t(rings), __ATOMIC_RELEASE);
    });
    Half from = x, next(x.size()), mid(x.size());
    Layer layer{};
    layer.deltas = &r.net, layer.first_norm = &r.first.norm, layer.scale = 1;
    layer.into = &r.into.matrix, layer.out = &r.out.matrix;
    LayerOp part{};
    part.kind = kAttn, part.hi = tokens, part.states = r.spans, part.round_nums = nums;
    part.num_rounds = 2;
    Course course;
    Sweep s{};
    s.layers = &layer, s.parts = &part, s.num_parts = s.end_layer = 1, s.course = &course;
    s.tokens = tokens, s.width = width, s.x = from.data(), s.next = next.data();
    s.mid = mid.data(), s.grain = kEachTask, s.watch = &word, s.stop_ns = s.tasks_left = kNever;
    for (; s.layer < 1; sweep(kPortable, &s)) s.seen = __atomic_load_n(&word, __ATOMIC_ACQUIRE);
    is_over.store(true);
    bell.join();
    if (wanted.empty()) wanted = mid, last = r.last();
    if (mid != wanted || r.last() != last) return 1;
  }
  return 0;
}

// Rows of several sizes with every setting: their tokens and log-probabilities.
std::vector<float> sampled(const Kernels& k) {
  std::vector<SampleRow> rows;
  std::vector<Half> logits;
  std::vector<std::vector<int64_t>> ids;
  std::vector<std::vector<float>> tops;
  const std::vector<uint32_t> words(64, 0xfffffff7);
  const std::vector<double> bias{1.5};
  static const int64_t some[] = {0, 1, 2, 0};
  for (int64_t num : {4, 64, 100, 700, 1024, 2048})
    for (int64_t kind = 0; kind < 8; kind++) {
      logits.emplace_back(num);
      for (int64_t i = 0; i < num; i++)  // bf16 of 1 to 2, and the same below 0
        logits.back()[i] = uint16_t(0x3f80 | ((i * 40503 + kind) & 0x807f));
      ids.emplace_back(5);
      tops.emplace_back(5);
      SampleRow r{};
      r.num = num, r.is_half = 1, r.forced = r.num_top = -1;
      r.temperature = kind ? 0.7 : 0, r.top_p = kind & 1 ? 0.9 : 1, r.top_k = kind & 2 ? 3 : 0;
      r.min_p = kind == 5 ? 0.1 : 0, r.repetition = kind == 6 ? 1.2 : 1;
      r.frequency = kind == 7 ? 0.3 : 0, r.share = (int64_t(1) << 53) - 1 - kind * 1000000007;
      if (kind & 4) {
        r.bias_ids = r.outputs = r.prompt_ids = r.banned = r.ends = some, r.bias = bias.data();
        r.num_bias = r.num_banned = r.num_ends = 1, r.num_outputs = 4, r.num_prompt = 3;
        r.words = words.data(), r.num_top = std::min<int64_t>(num, 5);
      }
      rows.push_back(r);
    }
  for (size_t i = 0; i < rows.size(); i++) {
    rows[i].logits = logits[i].data();
    rows[i].top_ids = ids[i].data(), rows[i].top = tops[i].data();
  }
  k.sample(rows.data(), int64_t(rows.size()));
  std::vector<float> found;
  for (auto& r : rows) {
    found.push_back(float(r.token)), found.push_back(r.logprob);
    for (int64_t i = 0; i < r.num_top; i++) found.push_back(float(r.top_ids[i])), found.push_back(r.top[i]);
  }
  return found;
}

}  // namespace

int main() {
  std::vector<const Kernels*> all{&kPortable, &kAmxEmulated};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) all.push_back(&kAvx2);
  if (__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl")) {
    all.push_back(&kAvx512);
    if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi")) all.push_back(&kAvx512Bf16);
  }
#endif
  for (const Kernels* k : all) {
    set_threads(1);
    Results alone = everything(*k);
    set_threads(3);
    if (everything(*k).all != alone.all) return printf("%s: threads change bits\n", k->name), 1;
    if (sampled(*k) != sampled(kPortable)) return printf("%s: other tokens\n", k->name), 1;
    printf("%s: ok\n", k->name);
  }
  if (pool()) return printf("pool: tasks got lost\n"), 1;
  printf("pool: ok\n");
  set_threads(3);
  if (packing()) return printf("packing: bits differ\n"), 1;
  if (polled_head()) return printf("head: bits differ\n"), 1;
  if (polled_states()) return printf("states: bits differ\n"), 1;
  printf("packing, head, states: ok\n");
  set_threads(1);
  return 0;
}
