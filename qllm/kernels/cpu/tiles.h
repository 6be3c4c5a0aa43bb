// AMX: eight tiles of 16 rows of 64 bytes, and products of two tiles of bf16, or of bytes. Without
// QLLM_TILES there are no tiles; QLLM_EMULATE has the same arithmetic in plain C++, so that code
// for tiles can be tested on a machine without them.
//
// Instructions are written as assembly and not taken from immintrin.h: the header of g++ 12 does
// not declare that they read and write memory.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(QLLM_TILES)

namespace qllm {
namespace {  // every instruction set has its own, as in vec.h

#if defined(QLLM_EMULATE)
typedef uint32_t Words[16][16];  // a tile

inline float flushed(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bits &= bits & 0x7f800000 ? 0xffffffff : 0x80000000;
  memcpy(&x, &bits, 4);
  return x;
}
inline float half(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return flushed(x);
}
// Even and odd values of k apart, then both to the sum. The loops over j are for the vectoriser.
inline __attribute__((always_inline)) void add_products(Words c, const Words a, const Words b) {
  for (int i = 0; i < 16; i++) {
    float even[16] = {}, odd[16] = {}, sums[16];
    for (int k = 0; k < 16; k++) {
      float x = half(a[i][k] << 16), y = half(a[i][k] & 0xffff0000);
      for (int j = 0; j < 16; j++) {
        even[j] = flushed(__builtin_fmaf(x, half(b[k][j] << 16), even[j]));
        odd[j] = flushed(__builtin_fmaf(y, half(b[k][j] & 0xffff0000), odd[j]));
      }
    }
    memcpy(sums, c[i], sizeof sums);
    for (int j = 0; j < 16; j++)
      sums[j] = flushed(flushed(sums[j]) + flushed(even[j] + odd[j]));
    memcpy(c[i], sums, sizeof sums);
  }
}
inline void dot_plain(Words c, const Words a, const Words b) { add_products(c, a, b); }
#if defined(__x86_64__)  // tests run this much: 20 times faster, the same bits
inline bool has_fma() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
__attribute__((target("avx2,fma"))) inline void dot_fma(Words c, const Words a, const Words b) {
  add_products(c, a, b);
}
#else
inline bool has_fma() { return false; }
inline void dot_fma(Words c, const Words a, const Words b) { add_products(c, a, b); }
#endif
#endif

// While one of these lives, the thread owns the tiles. Their contents before are lost.
class Tiles {
#if !defined(QLLM_EMULATE)

 public:
  // Sets the tiles up for inputs of `bytes` bytes: a row of tiles 4 and 5, four in each row of 6
  // and 7.
  explicit Tiles(int64_t bytes = 64) {
    struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    config.row_bytes[4] = config.row_bytes[5] = uint16_t(bytes);
    config.rows[6] = config.rows[7] = uint8_t(bytes / 4);
    asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
  }
  ~Tiles() { asm volatile("tilerelease" : : : "memory"); }  // makes a switch of threads cheaper

  template <int T>
  void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(T));
  }
  // Sixteen rows, `stride` bytes apart.
  template <int T>
  void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
  }
  // Sixteen contiguous rows of 16 numbers of 32 bits.
  template <int T>
  void store(void* to) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(int64_t(64)), "i"(T) : "memory");
  }
  // Adds to C the product of A, 16 rows of 32 values, and B, 16 pairs of rows of 16 values.
  template <int C, int A, int B>
  void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }
  // The same for signed bytes in A and unsigned bytes in B, four adjacent ones per sum: whole
  // numbers.
  template <int C, int A, int B>
  void dot_bytes() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }

#else

  Words at_[8];
  int64_t bytes_;

  int64_t rows(int tile) const { return tile > 5 ? bytes_ / 4 : 16; }
  int64_t row_bytes(int tile) const { return tile == 4 || tile == 5 ? bytes_ : 64; }

 public:
  explicit Tiles(int64_t bytes = 64) : bytes_(bytes) {}
  template <int T>
  void zero() {
    memset(at_[T], 0, sizeof at_[T]);
  }
  template <int T>
  void load(const void* from, int64_t stride) {
    for (int i = 0; i < rows(T); i++)
      memcpy(at_[T][i], (const char*)from + i * stride, row_bytes(T));
  }
  template <int T>
  void store(void* to) {
    memcpy(to, at_[T], sizeof at_[T]);
  }
  // As Intel's manual defines TDPBF16PS.
  template <int C, int A, int B>
  void dot() {
    (has_fma() ? dot_fma : dot_plain)(at_[C], at_[A], at_[B]);
  }
  template <int C, int A, int B>
  void dot_bytes() {
    for (int i = 0; i < 16; i++)
      for (int j = 0; j < 16; j++) {
        const int8_t* x = (const int8_t*)at_[A][i];
        int32_t sum = 0;
        for (int64_t k = 0; k < bytes_; k++) sum += x[k] * ((const uint8_t*)&at_[B][k / 4][j])[k % 4];
        at_[C][i][j] += uint32_t(sum);
      }
  }

#endif
};

}  // namespace
}  // namespace qllm

#endif
