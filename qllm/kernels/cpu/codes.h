// Codes of quantised weights as sixteen floats, per instruction set.
#pragma once

#include "vec.h"

namespace qllm {
namespace {  // every instruction set has its own, as in vec.h

inline float widen_half(uint16_t x) {  // of fp16
  uint32_t bits = uint32_t(x & 0x7fff) << 13;
  float out;
  memcpy(&out, &bits, 4);
  out *= 0x1p112f;  // also right where fp16 is subnormal
  return x & 0x8000 ? -out : out;
}

inline float widen_float8(uint8_t x) {  // of e4m3fn, finite
  return widen_half(uint16_t((x & 0x80) << 8 | (x & 0x7f) << 7)) * 256;
}

#if defined(QLLM_AVX512)

inline Vec::F load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
// The floats at 16 codes of a table of 16: the 4 bits of each of 16 words, from bit `shift` on.
inline Vec::F look_up(const float* table, const uint16_t* words, int shift) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)words));
  return _mm512_permutexvar_ps(_mm512_srli_epi32(wide, shift), _mm512_loadu_ps(table));
}
// The same for 16 bytes; the second 8 lie 16 bytes after the first.
inline Vec::F look_up(const float* table, const uint8_t* bytes, int shift) {
  __m128i first = _mm_loadl_epi64((const __m128i*)bytes);
  __m128i both = _mm_unpacklo_epi64(first, _mm_loadl_epi64((const __m128i*)(bytes + 16)));
  __m512i wide = _mm512_srli_epi32(_mm512_cvtepu8_epi32(both), shift);
  return _mm512_permutexvar_ps(wide, _mm512_loadu_ps(table));
}
// The bf16 values at 32 codes, times powers of two. A code is 4 bits of a word; the second 8 values
// of the table are the first with a sign. `exponents` are added to those of nonzero values.
inline Vec::Pairs look_up_scaled(const bf16* table, const uint16_t* words, int shift,
                                 Vec::Pairs exponents) {
  __m512i index = _mm512_srli_epi16(_mm512_loadu_si512(words), shift);
  __m512i both = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)table));
  __m512i value = _mm512_permutexvar_epi16(index, both);
  __mmask32 some = _mm512_test_epi16_mask(index, _mm512_set1_epi16(7));
  return _mm512_mask_add_epi16(value, some, value, exponents);
}
// Exponents of 16 powers of two, one per pair.
inline Vec::Pairs exponents_of(Vec::F powers) {
  __m512i high = _mm512_sub_epi32(_mm512_castps_si512(powers), _mm512_set1_epi32(0x3f800000));
  return _mm512_or_si512(high, _mm512_srli_epi32(high, 16));
}
inline Vec::F load_int8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline Vec::F load_float8(const uint8_t* p) {
  __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
  __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(0x3fff));
  half = _mm256_or_si256(half, _mm256_and_si256(wide, _mm256_set1_epi16(int16_t(0x8000))));
  return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256));
}
// The first 8 of 16 floats, each twice; then the same of the second 8.
inline void twice(Vec::F x, Vec::F& low, Vec::F& high) {
  const __m512i first = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  low = _mm512_permutexvar_ps(first, x);
  high = _mm512_permutexvar_ps(_mm512_add_epi32(first, _mm512_set1_epi32(8)), x);
}

#else

template <class Value>
inline Vec::F each(const Value& value) {
  float out[16];
  for (int i = 0; i < 16; i++) out[i] = value(i);
  return Vec::load(out);
}
inline Vec::F load_half(const uint16_t* p) {
  return each([=](int i) { return widen_half(p[i]); });
}
inline Vec::F look_up(const float* table, const uint16_t* words, int shift) {
  return each([=](int i) { return table[words[i] >> shift & 15]; });
}
inline Vec::F look_up(const float* table, const uint8_t* bytes, int shift) {
  return each([=](int i) { return table[bytes[i / 8 * 16 + i % 8] >> shift & 15]; });
}
inline Vec::F load_int8(const int8_t* p) {
  return each([=](int i) { return float(p[i]); });
}
inline Vec::F load_float8(const uint8_t* p) {
  return each([=](int i) { return widen_float8(p[i]); });
}
inline void twice(Vec::F x, Vec::F& low, Vec::F& high) {
  float lanes[16];
  Vec::store(lanes, x);
  low = each([&](int i) { return lanes[i / 2]; });
  high = each([&](int i) { return lanes[8 + i / 2]; });
}

#endif

}  // namespace
}  // namespace qllm
