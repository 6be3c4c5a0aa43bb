// Whole numbers, per instruction set: products of signed and unsigned bytes, added up exactly.
//
//   Bytes   unsigned, of 16 outputs times 4 inputs: [output][input]
//   Four    4 signed ones, for all 16 outputs
//   Ints    16 sums
//
// `codes` and `bytes` take apart a block of quantised.inc, into inputs 0 to 3 and 4 to 7. No sum
// here saturates: where there is no VNNI, bytes become 16 bits before they are multiplied.
#pragma once

#include "vec.h"

namespace qllm {
namespace {  // every instruction set has its own, as in vec.h

#if defined(QLLM_AVX512)

struct Whole {
  using Ints = __m512i;
  using Bytes = __m512i;
#if defined(QLLM_VNNI)
  using Four = __m512i;
  static Four four(const int8_t* p) {
    int32_t all;
    memcpy(&all, p, 4);
    return _mm512_set1_epi32(all);
  }
  // Written as assembly: with the intrinsic, g++ 12 copies every sum and spills most (measured: 0.6
  // of the speed).
  static Ints dot(Ints sum, Bytes w, Four x) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
    return sum;
  }
#else
  struct Four {
    __m512i even, odd;
  };
  static Four four(const int8_t* p) {
    int32_t all;
    memcpy(&all, p, 4);
    __m512i x = _mm512_set1_epi32(all);
    return {_mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8), _mm512_srai_epi16(x, 8)};
  }
  static Ints dot(Ints sum, Bytes w, Four x) {
    __m512i even = _mm512_and_si512(w, _mm512_set1_epi16(0xff)), odd = _mm512_srli_epi16(w, 8);
    even = _mm512_madd_epi16(even, x.even);
    return _mm512_add_epi32(sum, _mm512_add_epi32(even, _mm512_madd_epi16(odd, x.odd)));
  }
#endif
  static Ints set(int32_t x) { return _mm512_set1_epi32(x); }
  static Ints load(const int32_t* p) { return _mm512_loadu_si512(p); }
  static Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
  static Vec::F floats(Ints x) { return _mm512_cvtepi32_ps(x); }
  static Bytes load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static void store(uint8_t* p, Bytes x) { _mm512_storeu_si512(p, x); }

  // The value that `table` has for each code of 4 bits.
  static void codes(Bytes (&out)[2], const uint8_t* block, const uint8_t* table) {
    const __m512i order = _mm512_set4_epi32(0x0f0e0706, 0x0d0c0504, 0x0b0a0302, 0x09080100);
    const __m512i low = _mm512_set1_epi8(15);
    __m512i both = _mm512_shuffle_epi8(_mm512_loadu_si512(block), order);
    __m512i worth = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
    out[0] = _mm512_shuffle_epi8(worth, _mm512_and_si512(both, low));
    out[1] = _mm512_shuffle_epi8(worth, _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
  }
  // Values of codes of 8 bits, plus 128.
  static void bytes(Bytes (&out)[2], const uint8_t* block) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                           8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int i = 0; i < 2; i++) {
      __m512i both = _mm512_permutexvar_epi16(order, _mm512_loadu_si512(block + 64 * i));
      out[i] = _mm512_xor_si512(both, _mm512_set1_epi8(char(0x80)));
    }
  }
};

#elif defined(QLLM_AVX2)

struct Whole {
  struct Ints {
    __m256i a, b;
  };
  using Bytes = Ints;
  struct Four {
    __m256i even, odd;
  };
  static Four four(const int8_t* p) {
    int32_t all;
    memcpy(&all, p, 4);
    __m256i x = _mm256_set1_epi32(all);
    return {_mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), _mm256_srai_epi16(x, 8)};
  }
  static __m256i dot(__m256i sum, __m256i w, Four x) {
    __m256i even = _mm256_and_si256(w, _mm256_set1_epi16(0xff)), odd = _mm256_srli_epi16(w, 8);
    even = _mm256_madd_epi16(even, x.even);
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, _mm256_madd_epi16(odd, x.odd)));
  }
  static Ints dot(Ints sum, Bytes w, Four x) { return {dot(sum.a, w.a, x), dot(sum.b, w.b, x)}; }
  static Ints set(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
  static Ints load(const int32_t* p) { return load((const uint8_t*)p); }
  static Ints add(Ints x, Ints y) {
    return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
  }
  static Vec::F floats(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
  static Bytes load(const uint8_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
  }
  static void store(uint8_t* p, Bytes x) {
    _mm256_storeu_si256((__m256i*)p, x.a);
    _mm256_storeu_si256((__m256i*)(p + 32), x.b);
  }
  static void codes(Bytes (&out)[2], const uint8_t* block, const uint8_t* table) {
    const __m256i order = _mm256_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15, 0,
                                           1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    const __m256i low = _mm256_set1_epi8(15);
    __m256i worth = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
    Bytes both = load(block);
    auto found = [&](__m256i x) { return _mm256_shuffle_epi8(worth, _mm256_and_si256(x, low)); };
    both = {_mm256_shuffle_epi8(both.a, order), _mm256_shuffle_epi8(both.b, order)};
    out[0] = {found(both.a), found(both.b)};
    out[1] = {found(_mm256_srli_epi16(both.a, 4)), found(_mm256_srli_epi16(both.b, 4))};
  }
  static void bytes(Bytes (&out)[2], const uint8_t* block) {
    const __m256i sign = _mm256_set1_epi8(char(0x80));
    for (int i = 0; i < 2; i++) {
      Bytes two = load(block + 64 * i);
      __m256i first = _mm256_unpacklo_epi16(two.a, two.b), second = _mm256_unpackhi_epi16(two.a, two.b);
      out[i] = {_mm256_xor_si256(_mm256_permute2x128_si256(first, second, 0x20), sign),
                _mm256_xor_si256(_mm256_permute2x128_si256(first, second, 0x31), sign)};
    }
  }
};

#else

struct Whole {
  struct Ints {
    int32_t v[16];
  };
  struct Bytes {
    uint8_t v[64];
  };
  struct Four {
    int32_t v[4];
  };
  static Four four(const int8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
  static Ints dot(Ints sum, const Bytes& w, const Four& x) {
    for (int o = 0; o < 16; o++)
      for (int i = 0; i < 4; i++) sum.v[o] += w.v[4 * o + i] * x.v[i];
    return sum;
  }
  static Ints set(int32_t x) {
    Ints out;
    for (int32_t& one : out.v) one = x;
    return out;
  }
  static Ints load(const int32_t* p) {
    Ints out;
    memcpy(out.v, p, sizeof out.v);
    return out;
  }
  static Ints add(Ints a, const Ints& b) {
    for (int i = 0; i < 16; i++) a.v[i] += b.v[i];
    return a;
  }
  static Vec::F floats(const Ints& x) {
    float out[16];
    for (int i = 0; i < 16; i++) out[i] = float(x.v[i]);
    return Vec::load(out);
  }
  static Bytes load(const uint8_t* p) {
    Bytes out;
    memcpy(out.v, p, sizeof out.v);
    return out;
  }
  static void store(uint8_t* p, const Bytes& x) { memcpy(p, x.v, sizeof x.v); }
  static void codes(Bytes (&out)[2], const uint8_t* block, const uint8_t* table) {
    for (int o = 0; o < 16; o++)
      for (int i = 0; i < 4; i++) {
        uint8_t both = block[o / 4 * 16 + i / 2 * 8 + o % 4 * 2 + i % 2];
        out[0].v[4 * o + i] = table[both & 15];
        out[1].v[4 * o + i] = table[both >> 4];
      }
  }
  static void bytes(Bytes (&out)[2], const uint8_t* block) {
    for (int o = 0; o < 16; o++)
      for (int i = 0; i < 8; i++)
        out[i / 4].v[4 * o + i % 4] = block[i / 2 * 32 + o * 2 + i % 2] ^ 0x80;
  }
};

#endif

}  // namespace
}  // namespace qllm
