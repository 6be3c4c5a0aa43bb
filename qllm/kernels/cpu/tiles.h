// AMX: eight tiles of 16 rows of 64 bytes, and the product of two of bf16. Where QLLM_TILES is
// not defined there are none; QLLM_EMULATE has the same arithmetic in plain C++, so that what is
// built on tiles can be tested on a machine without them.
//
// Instructions are written here and not taken from immintrin.h: g++ 12 does not say there that
// they read and write memory.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(QLLM_TILES)

namespace qllm {
namespace {  // every instruction set has its own, as in vec.h

// Tiles are the thread's own while one of these lives. What was in them is lost.
class Tiles {
#if !defined(QLLM_EMULATE)

 public:
  Tiles() {
    struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
  }
  ~Tiles() { asm volatile("tilerelease" : : : "memory"); }  // cheaper to switch threads

  template <int T>
  void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(T));
  }
  // Sixteen rows, `stride` bytes apart.
  template <int T>
  void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
  }
  // Sixteen rows of 16 floats, one after the other.
  template <int T>
  void store(float* to) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(int64_t(64)), "i"(T) : "memory");
  }
  // Adds to C the product of A, 16 rows of 32 values, and B, 16 pairs of rows of 16 values.
  template <int C, int A, int B>
  void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }

#else

  uint32_t at_[8][16][16];

  static float flushed(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (!(bits & 0x7f800000)) bits &= 0x80000000;
    memcpy(&x, &bits, 4);
    return x;
  }
  static float half(uint32_t pair, bool high) {
    uint32_t bits = high ? pair & 0xffff0000 : pair << 16;
    float x;
    memcpy(&x, &bits, 4);
    return flushed(x);
  }

 public:
  template <int T>
  void zero() {
    memset(at_[T], 0, sizeof at_[T]);
  }
  template <int T>
  void load(const void* from, int64_t stride) {
    for (int i = 0; i < 16; i++) memcpy(at_[T][i], (const char*)from + i * stride, 64);
  }
  template <int T>
  void store(float* to) {
    memcpy(to, at_[T], sizeof at_[T]);
  }
  // As Intel's manual has TDPBF16PS: even and odd values of k apart, then both to the sum.
  template <int C, int A, int B>
  void dot() {
    for (int i = 0; i < 16; i++)
      for (int j = 0; j < 16; j++) {
        float part[2] = {0, 0}, sum;
        for (int k = 0; k < 16; k++)
          for (int odd = 0; odd < 2; odd++) {
            float x = half(at_[A][i][k], odd), y = half(at_[B][k][j], odd);
            part[odd] = flushed(__builtin_fmaf(x, y, part[odd]));
          }
        memcpy(&sum, &at_[C][i][j], 4);
        sum = flushed(flushed(sum) + flushed(part[0] + part[1]));
        memcpy(&at_[C][i][j], &sum, 4);
      }
  }

#endif
};

}  // namespace
}  // namespace qllm

#endif
