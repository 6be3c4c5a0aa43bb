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

// The two codes of a byte as two bytes, as integers of 4 bits are kept.
struct Spread {
  uint16_t of[256];
  explicit Spread(bool has_sign) {
    for (int i = 0; i < 256; i++)
      of[i] = uint16_t(one(i & 15, has_sign) | one(i >> 4, has_sign) << 8);
  }
  static int one(int code, bool has_sign) {
    if (!has_sign) return code;
    return code < 8 ? ((8 - code) & 7) | 8 : code - 8;
  }
};
const Spread kUnsignedCodes(false), kSignedCodes(true);

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

// Blocks of one output, of 16 the `lane`th, a `stride` apart.
void pack_row(uint8_t* to, int64_t stride, int64_t lane, const uint8_t* from, int64_t inputs,
              int64_t code) {
  const bool wide = code == kI8 || code == kE4m3;
  const int64_t bytes = wide ? kBlockInputs : kBlockInputs / 2;
  const Spread& spread = code == kI4 ? kSignedCodes : kUnsignedCodes;
  if (code == kU4 || code == kI4) to += lane / 4 * 16 + lane % 4 * 2;
  else to += lane * (wide ? 2 : 4);
  for (int64_t left = wide ? inputs : inputs / 2; left > 0; left -= bytes, from += bytes, to += stride) {
    uint8_t rest[kBlockInputs] = {};
    const uint8_t* s = from;
    if (left < bytes) s = (const uint8_t*)memcpy(rest, from, left);
    if (code == kU4 || code == kI4) {
      uint16_t second[2] = {};
      if (left > 2) second[0] = spread.of[s[2]];
      if (left > 3) second[1] = spread.of[s[3]];
      store(to, spread.of[s[0]] | second[0] << 4);
      store(to + 8, (left > 1 ? spread.of[s[1]] : 0) | second[1] << 4);
    } else if (code == kE2m1) {
      uint32_t word;
      memcpy(&word, s, 4);
      store(to, gathered(word));
      store(to + 2, gathered(word >> 4));
    } else {
      for (int64_t q = 0; q < kBlockPairs; q++) memcpy(to + q * 2 * kLanes, s + 2 * q, 2);
    }
  }
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

void pack_panel(Codes& c, const Format& f, int64_t index) {
  const int64_t begin = index * kPanel, cols = lesser(kPanel, padded(c.n - begin));
  const int64_t scale = worth_size(f.scale), offset = worth_size(f.offset), size = block_size(f);
  const int64_t groups = (c.k + f.group - 1) / f.group, stride = cols / kLanes * size;
  const bool wide = f.code == kI8 || f.code == kE4m3;
  const int64_t per_byte = wide ? 1 : 2;
  const uint32_t one = f.scale == kFp32 ? 0x3f800000 : f.scale == kFp16 ? 0x3c00 : 0x3f80;
  uint8_t* at = c.packed + index * panel_size(f, kPanel, c.k);
  int64_t found = 0;
  for (int64_t g = 0, p = 0; g < groups; g++, p += f.group) {
    const int64_t inputs = lesser(f.group, c.k - p), bytes = inputs / per_byte;
    const int64_t blocks = (inputs + kBlockInputs - 1) / kBlockInputs;
    uint8_t *offsets = at + cols * scale, *codes = offsets + cols * offset, *next = codes + blocks * stride;
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
        for (int64_t b = 0; b < blocks; b++)
          pack_row(to + b * stride, stride, o % kLanes, kZeros, lesser(kBlockInputs, inputs - b * kBlockInputs), kI4);
        continue;
      }
      if (f.code == kE4m3)
        for (int64_t i = 0; i < bytes; i++)
          if ((from[i] & 127) == 127) found |= kNoNumber;
      pack_row(to, stride, o % kLanes, from, inputs, f.code);
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
