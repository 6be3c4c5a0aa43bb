// The end of an op on ranks, in one kernel: gather, residual, norm, and the normed rows on all
// ranks.
//
// Each rank owns some rows. It loads the parts of its rows from the ranks that computed them, adds
// the residual, norms the sum, and stores sum and norm on all ranks. Ranks split the outputs of
// products, so a value of a part is whole, and no part is added to another. With routed experts,
// the owner adds the slots of a token in the order of its experts. So bits do not depend on ranks,
// blocks or threads. They are those of the CPU kernels (`norm_row`, `combine` and `add` of
// kernels/cpu).
//
// The lossy form is that of TokenWeave (arXiv:2505.11329): parts are partial sums of whole rows, and
// the fabric adds them, in an order that is not specified.
#pragma once

#include "nets.h"

namespace qllm {

constexpr int kChains = 16;  // sums of squares, of every 16th value

// Arguments, equal on all ranks. Tensors are offsets in bytes in a rank's buffer, of bf16, and
// start at multiples of 16.
struct GatheredNorm {
  i64 rows, width;    // of all ranks; the width is a multiple of 8
  i64 top_k;          // slots of a token; 0 without routed experts
  i64 parts;          // [rows, width]: rank r computes the columns [columns[r], columns[r + 1])
  i64 slots;          // [rows, top_k, width]: a rank computes the slots that it owns
  i64 residual;       // [rows, width], read by the owner of a row; it may be `sums`
  i64 sums, normed;   // [rows, width]: results, on all ranks
  i64 signals;        // [blocks, ranks] u32, zero before the first call: how often they met
  i64 late;           // u32, zero before the first call: 1 if a rank did not come in time
  i64 columns[kMostRanks + 1];  // multiples of 8, the last is the width
  const i32* owners;   // [rows, top_k], ranks
  const void* gates;   // [rows, top_k], factors of slots: fp32 if `wide_gates`, else bf16
  const float* weight; // [width], of the norm
  i64 deadline_ns;     // longest wait for a rank
  float eps, scale;    // `scale` is a factor of what is added to the residual
  i32 wide_gates, has_parts;  // has_parts: with slots, parts are added (shared experts)
  i32 rounds_once;     // the norm rounds after the weight only
  i32 unused;
};

QLLM_BOTH float widen(u32 x) { return float_of(x << 16); }

QLLM_BOTH u32 narrow(float x) {  // to nearest, ties to even
  u32 bits = bits_of(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

QLLM_BOTH float rounded(float x) { return widen(narrow(x)); }

struct Floats {
  float x[kAtOnce];
};

QLLM_BOTH float value(const Eight& given, i64 i) {
  return widen((given.pairs[i / 2] >> (i % 2 * 16)) & 0xffff);
}

QLLM_BOTH Floats wide(const Eight& given) {
  Floats out;
  for (int i = 0; i < kAtOnce; i++) out.x[i] = value(given, i);
  return out;
}

QLLM_BOTH Eight packed(const Floats& given) {
  Eight out;
  for (int i = 0; i < kAtOnce / 2; i++)
    out.pairs[i] = narrow(given.x[2 * i]) | narrow(given.x[2 * i + 1]) << 16;
  return out;
}

QLLM_BOTH Floats load(const char* buffer, i64 tensor, i64 index) {
  return wide(fetch(buffer + tensor + 2 * index));
}

// Waits until this block of all ranks is here; false if a rank is late.
template <class Net>
QLLM_BOTH bool meet(const Net& net, const GatheredNorm& a, i64 rank, const Block& block) {
  i64 ours = a.signals + 4 * block.number * Net::kSize;
  u32 turn = look((const u32*)(net.part(rank) + ours) + rank) + 1;
  bool came = true;
  net.fence();
  block.wait();
  for (i64 i = block.first; i < Net::kSize; i += block.step)
    publish((u32*)(net.part(i) + ours) + rank, turn);
  for (i64 i = block.first; i < Net::kSize; i += block.step) {
    const u32* word = (const u32*)(net.part(rank) + ours) + i;
    i64 end = now_ns() + a.deadline_ns;
    while (came && i32(look(word) - turn) < 0) {
      rest();
      came = now_ns() < end;
    }
  }
  if (!came) publish((u32*)(net.part(rank) + a.late), 1);
  came = block.all(came);
  net.fence();
  return came;
}

// What the ranks computed of eight values of a row.
template <class Net>
QLLM_BOTH Floats gather(const Net& net, const GatheredNorm& a, i64 row, i64 column) {
  Floats y{};
  for (i64 k = 0; k < a.top_k; k++) {
    i64 slot = row * a.top_k + k;
    float gate = a.wide_gates ? ((const float*)a.gates)[slot] : widen(((const u16*)a.gates)[slot]);
    Floats x = load(net.part(a.owners[slot]), a.slots, slot * a.width + column);
    for (int i = 0; i < kAtOnce; i++) {
      float product = x.x[i] * gate;
      y.x[i] += a.wide_gates ? product : rounded(product);
    }
  }
  if (!a.has_parts) return y;
  i64 rank = 0;
  while (column >= a.columns[rank + 1]) rank++;
  Floats x = load(net.part(rank), a.parts, row * a.width + column);
  if (!a.top_k) return x;
  for (int i = 0; i < kAtOnce; i++) x.x[i] = rounded(y.x[i]) + x.x[i];
  return x;
}

// 1 / sqrt(mean(x^2) + eps), of the sums of squares.
QLLM_BOTH float inverse_rms(const float* chains, const GatheredNorm& a) {
  float sums[kChains];
  for (int i = 0; i < kChains; i++) sums[i] = chains[i];
  for (int step = kChains / 2; step; step /= 2)
    for (int i = 0; i < step; i++) sums[i] = sums[i] + sums[i + step];
  return 1.0f / sqrtf(sums[0] / float(a.width) + a.eps);
}

QLLM_BOTH float chain(const Eight* row, i64 width, i64 first) {
  float sum = 0;
  for (i64 c = first; c < width; c += kChains) {
    float x = value(row[c / kAtOnce], c % kAtOnce);
    sum = sum + x * x;  // the square is exact
  }
  return sum;
}

// One block's share of a rank's rows. `row` [width / 8] and `chains` [kChains] are the block's own.
// False if a rank is late; results are then unspecified.
template <class Net, bool kIsLossy = false>
QLLM_BOTH bool gathered_norm(const Net& net, const GatheredNorm& a, i64 rank, const Block& block,
                             Eight* row, float* chains) {
  if (!meet(net, a, rank, block)) return false;
  i64 end = a.rows * (rank + 1) / Net::kSize, step = kAtOnce * block.step;
  for (i64 r = a.rows * rank / Net::kSize + block.number; r < end; r += block.count) {
    i64 first = r * a.width;
    for (i64 c = kAtOnce * block.first; c < a.width; c += step) {
      Floats x = load(net.part(rank), a.residual, first + c), y;
      if constexpr (kIsLossy)
        y = wide(net.reduce(a.parts + 2 * (first + c)));
      else
        y = gather(net, a, r, c);
      for (int i = 0; i < kAtOnce; i++) x.x[i] = x.x[i] + rounded(rounded(y.x[i]) * a.scale);
      Eight sum = packed(x);
      row[c / kAtOnce] = sum;
      net.store(a.sums + 2 * (first + c), sum);
    }
    block.wait();
    for (i64 i = block.first; i < kChains; i += block.step) chains[i] = chain(row, a.width, i);
    block.wait();
    float scale = inverse_rms(chains, a);
    for (i64 c = kAtOnce * block.first; c < a.width; c += step) {
      Floats x = wide(row[c / kAtOnce]);
      for (int i = 0; i < kAtOnce; i++) {
        float y = x.x[i] * scale;
        x.x[i] = a.weight[c + i] * (a.rounds_once ? y : rounded(y));
      }
      net.store(a.normed + 2 * (first + c), packed(x));
    }
    // No wait: in the next row a thread writes the columns that it alone has read here, and all
    // threads wait before `chains` are written.
  }
  return meet(net, a, rank, block);
}

}  // namespace qllm
