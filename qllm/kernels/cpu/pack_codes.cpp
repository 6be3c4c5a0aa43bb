// Codes of checkpoints into the panels of quantised.inc.
#include <math.h>
#include <string.h>

#include "codes.h"
#include "panels.h"
#include "pool.h"

namespace qllm {
namespace {

constexpr float kMostWorth = 0x1p100f;
constexpr uint32_t kExponent = 0x7f800000, kSpareBits = 0xff;

inline float widened(const void* from, int64_t at, int64_t kind) {
  if (kind == kFp32) return ((const float*)from)[at];
  uint16_t half = ((const uint16_t*)from)[at];
  if (kind == kFp16) return (half & 0x7c00) == 0x7c00 ? NAN : widen_half(half);
  uint32_t bits = uint32_t(half) << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

inline void put_worth(uint8_t* to, int64_t at, const void* from, int64_t index, int64_t size) {
  memcpy(to + at * size, (const char*)from + index * size, size);
}

// Eight codes of "i4" as their sizes, with a sign above: 8, which is 0, becomes 0, and 7 a 9.
inline uint32_t with_sign(uint32_t x) {
  x ^= 0x88888888;
  const uint32_t negative = x >> 3 & 0x11111111;
  const uint32_t size = ((x & 0x77777777) ^ negative * 7) + negative;
  return (size & 0x77777777) | (x & 0x88888888);
}

// The first four of eight codes as bytes, each with one of the second four above it.
inline uint32_t folded(uint32_t x) {
  uint64_t wide = (x | uint64_t(x) << 16) & 0x0000ffff0000ffff;
  wide = (wide | wide << 8) & 0x00ff00ff00ff00ff;
  wide = (wide | wide << 4) & 0x0f0f0f0f0f0f0f0f;
  return uint32_t(wide) | uint32_t(wide >> 32) << 4;
}

inline void store(uint8_t* to, uint32_t value) {
  uint16_t x = uint16_t(value);
  memcpy(to, &x, 2);
}

// The low halves of four bytes, next to each other.
inline uint32_t gathered(uint32_t x) {
  x &= 0x0f0f0f0f;
  x = (x | x >> 4) & 0x00ff00ff;
  return (x | x >> 8) & 0xffff;
}

// Eight codes of one output, of 16 the first, into a block.
template <int64_t kCode>
inline void pack_block(uint8_t* to, const uint8_t* from, uint32_t mask) {
  if constexpr (kCode == kI8) {
    for (int64_t q = 0; q < kBlockPairs; q++) memcpy(to + q * 2 * kLanes, from + 2 * q, 2);
    return;
  }
  uint32_t word;
  memcpy(&word, from, 4);
  if constexpr (kCode == kE2m1) {
    word = gathered(word) | gathered(word >> 4) << 16;
    memcpy(to, &word, 4);
    return;
  }
  if constexpr (kCode == kI4) word = with_sign(word);
  word = folded(word & mask);
  store(to, word);
  store(to + 8, word >> 16);
}

// Blocks of one output, of 16 the `lane`th, a `stride` apart; what lacks in the last is 0.
template <int64_t kCode>
void pack_row(uint8_t* to, int64_t stride, int64_t lane, const uint8_t* from, int64_t inputs) {
  constexpr bool wide = kCode == kI8;
  constexpr int64_t bytes = wide ? kBlockInputs : kBlockInputs / 2;
  to += wide ? lane * 2 : kCode == kE2m1 ? lane * 4 : lane / 4 * 16 + lane % 4 * 2;
  int64_t left = wide ? inputs : inputs / 2;
  for (; left >= bytes; left -= bytes, from += bytes, to += stride)
    pack_block<kCode>(to, from, ~uint32_t(0));
  if (left == 0) return;
  uint8_t rest[kBlockInputs] = {};
  memcpy(rest, from, left);
  pack_block<kCode>(to, rest, wide ? ~uint32_t(0) : (uint32_t(1) << 8 * left) - 1);
}

void pack_row(int64_t code, uint8_t* to, int64_t stride, int64_t lane, const uint8_t* from,
              int64_t inputs) {
  auto pack = code == kU4 ? pack_row<kU4> : code == kI4 ? pack_row<kI4>
              : code == kE2m1 ? pack_row<kE2m1> : pack_row<kI8>;  // e4m3 is bytes too
  pack(to, stride, lane, from, inputs);
}

// Whether no code of a group stands for anything but 0.
bool is_empty(const uint8_t* from, int64_t bytes, int64_t code) {
  uint8_t mask = code == kE2m1 ? 0x77 : code == kE4m3 ? 0x7f : 0xff, zero = code == kI4 ? 0x88 : 0;
  for (int64_t i = 0; i < bytes; i++)
    if ((from[i] & mask) != zero) return false;
  return true;
}

inline bool is_good(float worth) {
  float size = fabsf(worth);
  return size == 0 || (size >= 1 / kMostWorth && size <= kMostWorth);
}

// Both sides are met in strides, which no prefetcher follows: without this each line is waited for.
template <int kWritten>
inline void fetch(const uint8_t* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, kWritten);
}

void pack_panel(Codes& c, const Format& f, int64_t index) {
  const int64_t begin = index * kPanel, cols = lesser(kPanel, padded(c.n - begin));
  const int64_t scale = worth_size(f.scale), offset = worth_size(f.offset), size = block_size(f);
  const int64_t groups = (c.k + f.group - 1) / f.group, stride = cols / kLanes * size;
  const bool wide = f.code == kI8 || f.code == kE4m3;
  const int64_t per_byte = wide ? 1 : 2;
  const uint32_t one = f.scale == kFp32 ? 0x3f800000 : f.scale == kFp16 ? 0x3c00 : 0x3f80;
  uint8_t* at = c.packed + index * panel_size(f, kPanel, c.k);
  int64_t found = 0;
  fetch<0>(c.codes + begin * c.k / per_byte, lesser(cols, c.n - begin) * c.k / per_byte);
  for (int64_t g = 0, p = 0; g < groups; g++, p += f.group) {
    const int64_t inputs = lesser(f.group, c.k - p), bytes = inputs / per_byte;
    const int64_t blocks = (inputs + kBlockInputs - 1) / kBlockInputs;
    uint8_t *offsets = at + cols * scale, *codes = offsets + cols * offset, *next = codes + blocks * stride;
    fetch<1>(at, next - at);
    if (begin + cols > c.n) memset(at, 0, next - at);
    for (int64_t o = 0; o < cols && begin + o < c.n; o++) {
      const int64_t row = begin + o, worth_at = row * groups + g;
      const uint8_t* from = c.codes + (row * c.k + p) / per_byte;
      float worth = widened(c.scale, worth_at, f.scale);
      put_worth(at, o, c.scale, worth_at, scale);
      if (!is_good(worth) && !offset && worth > 0 && !isinf(worth) && is_empty(from, bytes, f.code)) {
        memcpy(at + o * scale, &one, scale);
        worth = 1;
      }
      uint32_t bits;
      memcpy(&bits, &worth, 4);
      if ((bits & ~kExponent) || !bits) found |= kNoPower;
      if (bits & kSpareBits) found |= kLong;
      float other = 0;
      if (offset) {
        other = widened(c.offset, worth_at, f.offset);
        put_worth(offsets, o, c.offset, worth_at, offset);
      }
      if (!is_good(worth) || !is_good(other)) {
        found |= kBadWorth;
        float bad = is_good(worth) ? other : worth;
        __atomic_store(&c.worth, &bad, __ATOMIC_RELAXED);
      }
      uint8_t* to = codes + o / kLanes * size;
      if (f.code == kI4 && !offset && worth == 0) {  // kernels know zeros by their code
        static const uint8_t kZeros[kBlockInputs / 2] = {0x88, 0x88, 0x88, 0x88};
        for (int64_t left = inputs; left > 0; left -= kBlockInputs, to += stride)
          pack_row(kI4, to, stride, o % kLanes, kZeros, lesser(kBlockInputs, left));
        continue;
      }
      if (f.code == kE4m3)
        for (int64_t i = 0; i < bytes; i++)
          if ((from[i] & 127) == 127) found |= kNoNumber;
      pack_row(f.code, to, stride, o % kLanes, from, inputs);
    }
    at = next;
  }
  __atomic_fetch_or(&c.found, found, __ATOMIC_RELAXED);
}

}  // namespace

void pack_codes(const Kernels&, Codes* weights, int64_t num, const Format& format) {
  if (num == 0) return;
  int64_t panels = num_panels(weights[0].n);  // all are of one shape
  parallel(num * panels, [&](int64_t task) {
    pack_panel(weights[task / panels], format, task % panels);
  });
}

}  // namespace qllm
