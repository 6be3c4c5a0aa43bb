// What one instruction set offers; `module.cpp` picks one at run time.
//
// Activations and weights are bf16, sums are fp32 and rounded where transformers' modules round.
// All tensors are dense and row-major unless a stride is given.
#pragma once

#include <stdint.h>

namespace qllm {

// A weight [n, k] in panels of 64 outputs: panel p holds [k / 2][outputs][2], outputs filled up
// with zeros to a multiple of 16. k is even.
struct Matrix {
  const uint16_t* packed;
  const uint16_t* bias;  // [n] or null
  int64_t n, k;
};

// Norm, projection and rotation of one layer's attention.
struct Attention {
  Matrix qkv;
  const uint16_t* norm;              // [D]
  const uint16_t *q_norm, *k_norm;   // [H], [heads * H], or null
  int64_t heads, kv_heads, head_dim; // N, G, H
  int64_t norm_whole;                // q_norm and k_norm span all heads
  float eps, qk_eps, scale;
};

// Queries [lo, hi) of one request, at tokens [at, at + hi - lo) of the op. Its keys of layer l,
// head g and position s are at k + (l * kv_heads + g) * head_stride + s * head_dim.
struct Span {
  uint16_t *k, *v;
  int64_t head_stride, at, lo, hi;
};

struct Router {
  const uint16_t* norm;  // [D]
  Matrix weight;         // [E, D]
  int64_t top_k, renormalise, wide;  // wide: weights in fp32
  float eps;
};

// The experts of one layer, SwiGLU: up is [2F, D] (gate first), down is [D, F].
struct Experts {
  const uint16_t *up, *down;  // packed, one after the other
  int64_t num, width, hidden;          // E, F, D
};

struct Unit {
  int64_t expert, lo, hi;  // rows [lo, hi) of the sorted slots
};

struct Kernels {
  const char* name;
  void (*pack)(uint16_t* packed, const uint16_t* weight, int64_t n, int64_t k, int64_t row_stride,
               int64_t col_stride);
  void (*linear)(uint16_t* y, const uint16_t* x, const Matrix& weight, int64_t rows);
  void (*rms_norm)(uint16_t* y, const uint16_t* x, const uint16_t* weight, float eps, int64_t rows,
                   int64_t width);
  // q [T, N * H]; keys and values go to their slabs
  void (*attend_in)(uint16_t* q, const uint16_t* x, const uint16_t* cos, const uint16_t* sin,
                    int64_t tokens, const Attention& layer, int64_t index, const Span* spans,
                    int64_t num_spans);
  // out [T, N * H]; tokens of no span stay as they are
  void (*attend)(uint16_t* out, const uint16_t* q, const Attention& layer, int64_t index,
                 int64_t window, const Span* spans, int64_t num_spans);
  void (*route)(uint16_t* normed, int64_t* ids, void* weights, const uint16_t* mid,
                int64_t tokens, const Router& router);
  // slots [S, D], rows of x [T, D] by token [S]
  void (*experts)(uint16_t* slots, const uint16_t* x, const int64_t* token, const Unit* units,
                  int64_t num_units, const Experts& layer);
  // out [T, D] = sum over k of weight * slot; inverse [T * K] finds the slots
  void (*combine)(uint16_t* out, const uint16_t* slots, const int64_t* inverse,
                  const void* weights, int64_t wide, int64_t tokens, int64_t top_k,
                  int64_t width);
  // out [num] = x + y * scale; out may be one of them
  void (*add)(uint16_t* out, const uint16_t* x, const uint16_t* y, float scale, int64_t num);
  // Largest logit [rows] so far and the lowest id of it, given logits [rows, num] of the ids from
  // `first`; NaN is larger than any.
  void (*best)(float* peaks, int64_t* ids, const uint16_t* logits, int64_t rows, int64_t num,
               int64_t first);
};

extern const Kernels kPortable;
#if defined(__x86_64__)
extern const Kernels kAvx2, kAvx512, kAvx512Bf16;
#endif

}  // namespace qllm
