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
  if (size == 2) memcpy(to + at * 2, (const char*)from + index * 2, 2);
  if (size == 4) memcpy(to + at * 4, (const char*)from + index * 4, 4);
}

// Eight codes of "i4" as sizes with a sign above them: the code 8, of value 0, becomes 0, and 7
// becomes 9.
inline uint32_t with_sign(uint32_t x) {
  x ^= 0x88888888;
  const uint32_t negative = x >> 3 & 0x11111111;
  const uint32_t size = ((x & 0x77777777) ^ negative * 7) + negative;
  return (size & 0x77777777) | (x & 0x88888888);
}

// Four codes as bytes, of the low half of a word.
inline uint32_t spread(uint32_t x) {
  x = (x | x << 8) & 0x00ff00ff;
  return (x | x << 4) & 0x0f0f0f0f;
}

// The first four of eight codes as bytes, each with a code of the second four in its high half.
inline uint32_t folded(uint32_t x) { return spread(x & 0xffff) | spread(x >> 16) << 4; }

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

// Eight codes of 4 bits in the layout of a block, half of them in each half of the word.
template <int64_t kCode>
inline uint32_t turned(uint32_t x) {
  if constexpr (kCode == kE2m1) return gathered(x) | gathered(x >> 4) << 16;
  return folded(kCode == kI4 ? with_sign(x) : x);
}

// Eight codes of one output into a block; the output is the first of 16.
template <int64_t kCode>
inline void pack_block(uint8_t* to, const uint8_t* from, uint32_t mask) {
  if constexpr (kCode == kI8) {
    for (int64_t q = 0; q < kBlockPairs; q++) memcpy(to + q * 2 * kLanes, from + 2 * q, 2);
    return;
  }
  uint32_t word;
  memcpy(&word, from, 4);
  if constexpr (kCode == kE2m1) {
    word = turned<kCode>(word);
    memcpy(to, &word, 4);
    return;
  }
  if constexpr (kCode == kI4) word = with_sign(word);
  word = folded(word & mask);
  store(to, word);
  store(to + 8, word >> 16);
}

// Blocks of one output, the `lane`th of 16, a `stride` apart; missing codes of the last block are
// 0.
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
              : code == kE2m1 ? pack_row<kE2m1> : pack_row<kI8>;  // e4m3 codes are bytes, too
  pack(to, stride, lane, from, inputs);
}

// `kNum` whole blocks of four outputs in codes of 4 bits; the first output is 0, 4, 8 or 12. The
// same as `pack_row` four times, with the words side by side.
template <int64_t kCode, int64_t kNum>
inline uint8_t* pack_blocks(uint8_t* to, int64_t stride, const uint8_t* from, int64_t row) {
  uint32_t x[4 * kNum];
  for (int64_t r = 0; r < 4; r++) memcpy(x + r * kNum, from + r * row, kNum * sizeof *x);
  for (uint32_t& word : x) word = turned<kCode>(word);
  for (int64_t i = 0; i < kNum; i++, to += stride) {
    const uint32_t a = x[i], b = x[kNum + i], c = x[2 * kNum + i], d = x[3 * kNum + i];
    uint32_t out[4] = {a, b, c, d};
    if (kCode != kE2m1) {
      out[0] = (a & 0xffff) | b << 16, out[1] = (c & 0xffff) | d << 16;
      out[2] = a >> 16 | (b & 0xffff0000), out[3] = c >> 16 | (d & 0xffff0000);
    }
    memcpy(to, out, sizeof out);
  }
  return to;
}

template <int64_t kCode>
void pack_four(uint8_t* to, int64_t stride, const uint8_t* from, int64_t row, int64_t blocks) {
  constexpr int64_t kMost = 4, kWord = kBlockInputs / 2;
  for (; blocks >= kMost; blocks -= kMost, from += kMost * kWord)
    to = pack_blocks<kCode, kMost>(to, stride, from, row);
  for (; blocks; blocks--, from += kWord) to = pack_blocks<kCode, 1>(to, stride, from, row);
}

// Returns true if all codes of a group have the value 0.
bool is_empty(const uint8_t* from, int64_t bytes, int64_t code) {
  uint8_t mask = code == kE2m1 ? 0x77 : code == kE4m3 ? 0x7f : 0xff, zero = code == kI4 ? 0x88 : 0;
  for (int64_t i = 0; i < bytes; i++)
    if ((from[i] & mask) != zero) return false;
  return true;
}

// Returns true if a code of e4m3 is NaN: all bits but the sign are set.
bool has_no_number(const uint8_t* from, int64_t num) {
  uint64_t carried = 0, word;
  for (; num >= 8; num -= 8, from += 8) {
    memcpy(&word, from, 8);
    carried |= (word & 0x7f7f7f7f7f7f7f7f) + 0x0101010101010101;
  }
  bool found = carried & 0x8080808080808080;
  for (int64_t i = 0; i < num; i++) found |= (from[i] & 0x7f) == 0x7f;
  return found;
}

inline bool is_good(float worth) {
  float size = fabsf(worth);
  return size == 0 || (size >= 1 / kMostWorth && size <= kMostWorth);
}

// Reads and writes have strides that no prefetcher follows: without this the code waits for each
// line.
template <int kWritten>
inline void fetch(const uint8_t* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, kWritten);
}

// One group of inputs of the outputs of a panel.
struct Group {
  Codes& c;
  const Format& f;
  int64_t index, begin, cols;          // of the group; first output, and outputs with padding
  int64_t inputs, row;                 // of this group; bytes of an output's codes, of all inputs
  const uint8_t* from;                 // codes of the first output
  uint8_t *scales, *offsets, *blocks;  // destinations

  int64_t num_outputs() const { return lesser(cols, c.n - begin); }
  int64_t num_bytes() const { return inputs / codes_per_byte(f); }
  int64_t stride() const { return cols / kLanes * block_size(f); }
};

// Writes the scale and offset of one output; returns the Found bits of both.
int64_t put_worths(const Group& g, int64_t output, bool& is_zero) {
  const Format& f = g.f;
  const int64_t groups = (g.c.k + f.group - 1) / f.group, at = (g.begin + output) * groups + g.index;
  const int64_t size = worth_size(f.scale), offset_size = worth_size(f.offset);
  const uint32_t one = f.scale == kFp32 ? 0x3f800000 : f.scale == kFp16 ? 0x3c00 : 0x3f80;
  float worth = widened(g.c.scale, at, f.scale), other = 0;
  put_worth(g.scales, output, g.c.scale, at, size);
  if (!is_good(worth) && !offset_size && worth > 0 && !isinf(worth) &&
      is_empty(g.from + output * g.row, g.num_bytes(), f.code)) {
    memcpy(g.scales + output * size, &one, size);
    worth = 1;
  }
  int64_t found = 0;
  uint32_t bits;
  memcpy(&bits, &worth, 4);
  if ((bits & ~kExponent) || !bits) found |= kNoPower;
  if (bits & kSpareBits) found |= kLong;
  if (offset_size) {
    other = widened(g.c.offset, at, f.offset);
    put_worth(g.offsets, output, g.c.offset, at, offset_size);
  }
  if (!is_good(worth) || !is_good(other)) {
    found |= kBadWorth;
    float bad = is_good(worth) ? other : worth;
    __atomic_store(&g.c.worth, &bad, __ATOMIC_RELAXED);
  }
  is_zero = f.code == kI4 && !offset_size && worth == 0;
  return found;
}

// Writes the codes of one output; returns their Found bits.
int64_t put_codes(const Group& g, int64_t output, bool is_zero) {
  const int64_t lane = output % kLanes;
  const uint8_t* from = g.from + output * g.row;
  uint8_t* to = g.blocks + output / kLanes * block_size(g.f);
  if (is_zero) {  // kernels recognise zeros by their code
    static const uint8_t kZeros[kBlockInputs / 2] = {0x88, 0x88, 0x88, 0x88};
    for (int64_t left = g.inputs; left > 0; left -= kBlockInputs, to += g.stride())
      pack_row(kI4, to, g.stride(), lane, kZeros, lesser(kBlockInputs, left));
    return 0;
  }
  pack_row(g.f.code, to, g.stride(), lane, from, g.inputs);
  return g.f.code == kE4m3 && has_no_number(from, g.inputs) ? kNoNumber : 0;
}

int64_t pack_group(const Group& g) {
  bool zeros[kPanel];
  int64_t found = 0;
  const int64_t outputs = g.num_outputs(), code = g.f.code;
  for (int64_t o = 0; o < outputs; o++) found |= put_worths(g, o, zeros[o]);
  auto four = code == kI4 ? pack_four<kI4> : code == kU4 ? pack_four<kU4> : pack_four<kE2m1>;
  const bool is_whole = codes_per_byte(g.f) == 2 && g.inputs % kBlockInputs == 0;
  for (int64_t o = 0; o < outputs;) {
    const bool* z = zeros + o;
    if (!is_whole || o + 4 > outputs || z[0] || z[1] || z[2] || z[3]) {
      for (int64_t end = lesser(o + 4, outputs); o < end; o++) found |= put_codes(g, o, zeros[o]);
      continue;
    }
    uint8_t* to = g.blocks + o / kLanes * block_size(g.f) + o % kLanes / 4 * 16;
    four(to, g.stride(), g.from + o * g.row, g.row, g.inputs / kBlockInputs);
    o += 4;
  }
  return found;
}

void pack_panel(Codes& c, const Format& f, int64_t index) {
  const int64_t begin = index * kPanel, cols = lesser(kPanel, padded(c.n - begin));
  const int64_t per_byte = codes_per_byte(f);
  const uint8_t* from = c.codes + begin * c.k / per_byte;
  uint8_t* at = c.packed + index * panel_size(f, kPanel, c.k);
  int64_t found = 0;
  fetch<0>(from, lesser(cols, c.n - begin) * c.k / per_byte);
  for (int64_t g = 0, p = 0; p < c.k; g++, p += f.group) {
    const int64_t inputs = lesser(f.group, c.k - p);
    uint8_t *offsets = at + cols * worth_size(f.scale), *blocks = offsets + cols * worth_size(f.offset);
    Group group{c, f, g, begin, cols, inputs, c.k / per_byte, from + p / per_byte, at, offsets, blocks};
    uint8_t* next = blocks + (inputs + kBlockInputs - 1) / kBlockInputs * group.stride();
    fetch<1>(at, next - at);
    if (begin + cols > c.n) memset(at, 0, next - at);
    found |= pack_group(group);
    at = next;
  }
  __atomic_fetch_or(&c.found, found, __ATOMIC_RELAXED);
}

}  // namespace

void pack_codes(const Kernels&, Codes* weights, int64_t num, const Format& format) {
  if (num == 0) return;
  int64_t panels = num_panels(weights[0].n);  // all have one shape
  parallel(num * panels, [&](int64_t task) {
    pack_panel(weights[task / panels], format, task % panels);
  });
}

}  // namespace qllm
