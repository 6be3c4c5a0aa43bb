// Sixteen floats at a time, per instruction set. A kernel is written once over one of these.
//
//   Pairs   32 bf16 as 16 pairs (k, k + 1); `dot` adds both products of a pair to its lane;
//           int8 become bf16 as they are loaded, exactly
//   F       16 floats
//
// `interleave` makes pairs of 16 values and 16 others. `transpose` takes 16 rows of 16 pairs to 16
// rows: the first pair of each, the second, ...
// `pairs_of` rounds 32 floats to bf16.
//
// The order of additions is fixed by the kernels, so the bits of a result depend on the
// instruction set and never on the number of rows or threads.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace qllm {
namespace {  // every instruction set has its own: the linker must not merge anything here

using bf16 = uint16_t;

inline float widen(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

inline bf16 narrow(float x) {  // to nearest, ties to even
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline void transpose_pairs(bf16* to, int64_t to_stride, const bf16* from, int64_t from_stride) {
  for (int i = 0; i < 16; i++)
    for (int r = 0; r < 16; r++) memcpy(to + i * to_stride + 2 * r, from + r * from_stride + 2 * i, 4);
}

template <class V>
inline typename V::Pairs stored_pairs(typename V::F a, typename V::F b) {
  bf16 half[32];
  V::store(half, a);
  V::store(half + 16, b);
  return V::load_pairs(half);
}

#if defined(QLLM_AVX512)

struct Vec {
  using F = __m512;
  using Pairs = __m512i;
  static F zero() { return _mm512_setzero_ps(); }
  static F set(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F load(const bf16* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static float sum(F x) { return _mm512_reduce_add_ps(x); }
  static float top(F x) { return _mm512_reduce_max_ps(x); }
  static F round(F x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static F scale2(F x, F n) { return _mm512_scalef_ps(x, n); }
  static Pairs load_pairs(const bf16* p) { return _mm512_loadu_si512(p); }
  static Pairs load_pairs(const int8_t* p) {
    __m512i both = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
    __m512 low = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(both, 16), 16));
    __m512 high = _mm512_cvtepi32_ps(_mm512_srai_epi32(both, 16));
    __m512i half = _mm512_srli_epi32(_mm512_castps_si512(low), 16);
    return _mm512_or_si512(_mm512_castps_si512(high), half);
  }
  static Pairs set_pair(const bf16* p) {
    int32_t pair;
    memcpy(&pair, p, 4);
    return _mm512_set1_epi32(pair);
  }
  static Pairs interleave(const bf16* a, const bf16* b) {
    __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)a));
    __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)b));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
  }
  static void store_pairs(bf16* p, Pairs x) { _mm512_storeu_si512(p, x); }
  static void transpose(bf16* to, int64_t to_stride, const bf16* from, int64_t from_stride) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(from + i * from_stride);
    for (int i = 0; i < 16; i += 2) {
      b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
      b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
      for (int j = 0; j < 2; j++) {
        a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
        a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
      }
    for (int i = 0; i < 16; i += 8)
      for (int j = 0; j < 4; j++) {
        b[i + j] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0x88);
        b[i + j + 4] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0xdd);
      }
    for (int j = 0; j < 8; j++) {
      _mm512_storeu_si512(to + j * to_stride, _mm512_shuffle_i32x4(b[j], b[j + 8], 0x88));
      _mm512_storeu_si512(to + (j + 8) * to_stride, _mm512_shuffle_i32x4(b[j], b[j + 8], 0xdd));
    }
  }
#if defined(QLLM_BF16)
  // Written as assembly: with the intrinsic, g++ 12 copies every sum and spills most, if there are
  // many (measured: 0.45 of the speed for 8 to 96 rows).
  static F dot(F acc, Pairs a, Pairs b) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
    return acc;
  }
  static void store(bf16* p, F x) {
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x));
  }
  static Pairs pairs_of(F a, F b) { return (__m512i)_mm512_cvtne2ps_pbh(b, a); }
#else
  static F dot(F acc, Pairs a, Pairs b) {
    const __m512i high = _mm512_set1_epi32(int(0xffff0000));
    acc = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)),
                          _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), acc);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, high)),
                           _mm512_castsi512_ps(_mm512_and_si512(b, high)), acc);
  }
  static void store(bf16* p, F x) {
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i out = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    out = _mm512_mask_mov_epi32(out, nan, _mm512_set1_epi32(0x7fc00000));
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(out, 16)));
  }
  static Pairs pairs_of(F a, F b) { return stored_pairs<Vec>(a, b); }
#endif
};

#elif defined(QLLM_AVX2)

struct Vec {
  struct F {
    __m256 a, b;
  };
  struct Pairs {
    __m256i a, b;
  };
#define QLLM_BOTH(op) {_mm256_##op(x.a, y.a), _mm256_##op(x.b, y.b)}
  static F zero() { return set(0.0f); }
  static F set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void store(float* p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
  }
  static __m256 half(const bf16* p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  static F load(const bf16* p) { return {half(p), half(p + 8)}; }
  static F add(F x, F y) { return QLLM_BOTH(add_ps); }
  static F sub(F x, F y) { return QLLM_BOTH(sub_ps); }
  static F mul(F x, F y) { return QLLM_BOTH(mul_ps); }
  static F div(F x, F y) { return QLLM_BOTH(div_ps); }
  static F max(F x, F y) { return QLLM_BOTH(max_ps); }
  static F min(F x, F y) { return QLLM_BOTH(min_ps); }
#undef QLLM_BOTH
  static F fma(F x, F y, F c) {
    return {_mm256_fmadd_ps(x.a, y.a, c.a), _mm256_fmadd_ps(x.b, y.b, c.b)};
  }
  static float sum(F x) {
    float lanes[16], out = 0;
    store(lanes, x);
    for (int step = 8; step; step /= 2)
      for (int i = 0; i < step; i++) lanes[i] += lanes[i + step];
    out = lanes[0];
    return out;
  }
  static float top(F x) {
    float lanes[16];
    store(lanes, x);
    float out = lanes[0];
    for (int i = 1; i < 16; i++) out = lanes[i] > out ? lanes[i] : out;
    return out;
  }
  static F round(F x) {
    return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
            _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
  }
  static __m256 power(__m256 n) {
    __m256i bits = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    bits = _mm256_max_epi32(bits, _mm256_setzero_si256());  // 0 below -126
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23));
  }
  static F scale2(F x, F n) {
    return {_mm256_mul_ps(x.a, power(n.a)), _mm256_mul_ps(x.b, power(n.b))};
  }
  static Pairs load_pairs(const bf16* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 16))};
  }
  static __m256i half(const int8_t* p) {
    __m256i both = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
    __m256 low = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(both, 16), 16));
    __m256 high = _mm256_cvtepi32_ps(_mm256_srai_epi32(both, 16));
    __m256i half = _mm256_srli_epi32(_mm256_castps_si256(low), 16);
    return _mm256_or_si256(_mm256_castps_si256(high), half);
  }
  static Pairs load_pairs(const int8_t* p) { return {half(p), half(p + 16)}; }
  static Pairs set_pair(const bf16* p) {
    int32_t pair;
    memcpy(&pair, p, 4);
    return {_mm256_set1_epi32(pair), _mm256_set1_epi32(pair)};
  }
  static __m256i weave(const bf16* a, const bf16* b) {
    __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)a));
    __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)b));
    return _mm256_or_si256(low, _mm256_slli_epi32(high, 16));
  }
  static Pairs interleave(const bf16* a, const bf16* b) { return {weave(a, b), weave(a + 8, b + 8)}; }
  static void store_pairs(bf16* p, Pairs x) {
    _mm256_storeu_si256((__m256i*)p, x.a);
    _mm256_storeu_si256((__m256i*)(p + 16), x.b);
  }
  static void transpose(bf16* to, int64_t to_stride, const bf16* from, int64_t from_stride) {
    transpose_pairs(to, to_stride, from, from_stride);
  }
  static __m256 dot(__m256 acc, __m256i a, __m256i b) {
    const __m256i high = _mm256_set1_epi32(int(0xffff0000));
    acc = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)),
                          _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)), acc);
    return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(a, high)),
                           _mm256_castsi256_ps(_mm256_and_si256(b, high)), acc);
  }
  static F dot(F acc, Pairs x, Pairs y) { return {dot(acc.a, x.a, y.a), dot(acc.b, x.b, y.b)}; }
  static void store(bf16* p, F x) {
    float lanes[16];
    store(lanes, x);
    for (int i = 0; i < 16; i++) p[i] = narrow(lanes[i]);
  }
  static Pairs pairs_of(F a, F b) { return stored_pairs<Vec>(a, b); }
};

#else

struct Vec {
  struct F {
    float v[16];
  };
  struct Pairs {
    bf16 v[32];
  };
#define QLLM_EACH(expr)                     \
  {                                         \
    F out;                                  \
    for (int i = 0; i < 16; i++) out.v[i] = expr; \
    return out;                             \
  }
  static F zero() QLLM_EACH(0.0f)
  static F set(float x) QLLM_EACH(x)
  static F load(const float* p) QLLM_EACH(p[i])
  static F load(const bf16* p) QLLM_EACH(widen(p[i]))
  static F add(F a, F b) QLLM_EACH(a.v[i] + b.v[i])
  static F sub(F a, F b) QLLM_EACH(a.v[i] - b.v[i])
  static F mul(F a, F b) QLLM_EACH(a.v[i] * b.v[i])
  static F div(F a, F b) QLLM_EACH(a.v[i] / b.v[i])
  static F fma(F a, F b, F c) QLLM_EACH(a.v[i] * b.v[i] + c.v[i])
  static F max(F a, F b) QLLM_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i])
  static F min(F a, F b) QLLM_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i])
  static F round(F a) QLLM_EACH(nearbyintf(a.v[i]))
  static F scale2(F a, F n) QLLM_EACH(ldexpf(a.v[i], int(n.v[i])))
  static F dot(F acc, Pairs a, Pairs b)
      QLLM_EACH(acc.v[i] + widen(a.v[2 * i]) * widen(b.v[2 * i]) +
                widen(a.v[2 * i + 1]) * widen(b.v[2 * i + 1]))
#undef QLLM_EACH
  static void store(float* p, F x) { memcpy(p, x.v, sizeof x.v); }
  static void store(bf16* p, F x) {
    for (int i = 0; i < 16; i++) p[i] = narrow(x.v[i]);
  }
  static Pairs pairs_of(F a, F b) { return stored_pairs<Vec>(a, b); }
  static float sum(F x) {
    for (int step = 8; step; step /= 2)
      for (int i = 0; i < step; i++) x.v[i] += x.v[i + step];
    return x.v[0];
  }
  static float top(F x) {
    float out = x.v[0];
    for (int i = 1; i < 16; i++) out = x.v[i] > out ? x.v[i] : out;
    return out;
  }
  static void transpose(bf16* to, int64_t to_stride, const bf16* from, int64_t from_stride) {
    transpose_pairs(to, to_stride, from, from_stride);
  }
  static Pairs load_pairs(const bf16* p) {
    Pairs out;
    memcpy(out.v, p, sizeof out.v);
    return out;
  }
  static Pairs load_pairs(const int8_t* p) {
    Pairs out;
    for (int i = 0; i < 32; i++) out.v[i] = narrow(p[i]);
    return out;
  }
  static Pairs set_pair(const bf16* p) {
    Pairs out;
    for (int i = 0; i < 16; i++) memcpy(out.v + 2 * i, p, 4);
    return out;
  }
  static Pairs interleave(const bf16* a, const bf16* b) {
    Pairs out;
    for (int i = 0; i < 16; i++) out.v[2 * i] = a[i], out.v[2 * i + 1] = b[i];
    return out;
  }
  static void store_pairs(bf16* p, Pairs x) { memcpy(p, x.v, sizeof x.v); }
};

#endif

// `dot` with one pair for all lanes; the instruction itself reads the pair from memory if it can.
inline Vec::F dot_pair(Vec::F acc, Vec::Pairs a, const bf16* p) {
#if defined(QLLM_BF16)
  struct Two {
    bf16 pair[2];
  };
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(a), "m"(*(const Two*)p));
  return acc;
#else
  return Vec::dot(acc, a, Vec::set_pair(p));
#endif
}

// Rounded to bf16 and back: where transformers' modules round, so do the kernels.
inline Vec::F rounded(Vec::F x) {
  bf16 half[16];
  Vec::store(half, x);
  return Vec::load(half);
}

// exp(x), about 1 ulp, x <= 88; 0 below -87.
inline Vec::F exp(Vec::F x) {
  using V = Vec;
  x = V::min(V::max(x, V::set(-87.0f)), V::set(88.0f));
  V::F n = V::round(V::mul(x, V::set(1.44269504f)));
  V::F r = V::fma(n, V::set(-0.693145752f), x);
  r = V::fma(n, V::set(-1.42860677e-6f), r);
  V::F y = V::set(1.98756915e-4f);
  y = V::fma(y, r, V::set(1.39819995e-3f));
  y = V::fma(y, r, V::set(8.33345188e-3f));
  y = V::fma(y, r, V::set(4.16657963e-2f));
  y = V::fma(y, r, V::set(1.66666657e-1f));
  y = V::fma(y, r, V::set(5.00000000e-1f));
  y = V::fma(V::mul(r, r), y, V::add(r, V::set(1.0f)));
  return V::scale2(y, n);
}

}  // namespace
}  // namespace qllm
