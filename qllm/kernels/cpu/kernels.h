// The functions of one instruction set; `module.cpp` picks one set at run time.
// Activations and weights are bf16, sums are fp32 and rounded where transformers' modules round.
// All tensors are dense and row-major unless a stride is given.
#pragma once

#include <stdint.h>

namespace qllm {

enum Code : int64_t { kU4 = 1, kE2m1, kI8, kE4m3, kI4 };
enum Worth : int64_t { kNone, kFp32, kFp16, kBf16 };
enum Products : int64_t {  // how scale * code is computed
  kRounded,                // with rounding to fp32
  kExact,                  // exactly: the products are fp32 numbers
  kPowers,                 // scales are powers of two, there are no offsets, values are normal numbers
};

// How a weight of 4 or 8 bits is packed: see quantised.inc. A value is bf16(scale * code + offset).
struct Format {
  int64_t code;
  int64_t group;          // inputs that share a scale: a multiple of 8, or at least k
  int64_t scale, offset;  // how they are stored; kNone is an offset of zero
  int64_t products;
  int64_t activations;    // any of Activations
};
enum Activations : int64_t {
  kAsTheyAre,     // bf16, and so are the values
  kRoundedInts,   // int8, see ints.inc; for integers
};

// A weight [n, k] in panels of 64 outputs: panel p holds [k / 2][outputs][2], outputs padded with
// zeros to a multiple of 16. k is even. With a format, `packed` has that format. Outputs from
// `first` on, a multiple of 64, may belong to another weight, in another format.
struct Matrix {
  const uint16_t* packed;
  const uint16_t* bias;  // [n] or null; without the outputs of `rest`
  int64_t n, k;
  const Format* format;
  const Matrix* rest;  // or null
  int64_t first;
};

// A weight [n, k] of 4 or 8 bits as a checkpoint has it, and where it is packed.
struct Codes {
  const uint8_t* codes;         // [n, k / 2], the low half of a byte is the even input; or [n, k]
  const void *scale, *offset;   // [n, groups], as the format stores them; offset may be null
  int64_t n, k;
  uint8_t* packed;
  int64_t found;  // any of Found
  float worth;    // the value that kBadWorth is about
};
enum Found : int64_t {
  kNoPower = 1,     // a scale is no power of two
  kLong = 2,        // the product of a scale and a code may have more bits than fp32
  kNoNumber = 4,    // a code is NaN
  kBadWorth = 8,    // a scale or offset is not 0, and not from 2^-100 to 2^100 in size
};

// The same for int8: columns [g * group, (g + 1) * group) of output i have the scale
// scale[g * padded n + i]. group is even.
struct Matrix8 {
  const int8_t* packed;
  const uint16_t* bias;
  int64_t n, k;
  const float* scale;
  int64_t group;
};

enum NormKind : int64_t {
  kRms,      // rounded before it is multiplied by the weight
  kRmsWide,  // rounded after that
  kLayer,    // mean and variance, bias
};

// Weight and bias are padded with zeros to a multiple of 16.
struct Norm {
  const float *weight, *bias;  // [width]; null where there is none
  int64_t kind;
  float eps;
};

// Attention of one layer: N query heads on G KV heads of width H. The slabs hold keys and values of
// that width. With `tail` (MLA), the values are the first H - tail numbers of a key, the latents;
// the slab of values holds the rest of the key, its rotated part.
struct Heads {
  int64_t heads, kv_heads, head_dim, tail;  // N, G, H
  const float* sinks;                       // [N] or null
  float scale;
};

// The norm, projection and rotation before attention.
struct Attention {
  Heads heads;
  Matrix qkv;
  Norm norm, q_norm, k_norm;   // of a head or, with norm_whole, of all
  int64_t norm_whole, cos_width;  // cos is [T, cos_width]: `rotated`, or half of it without its copy
  int64_t rotated;             // values at the start of a head that rotate
  float clip;                  // of queries, keys and values; infinity is none
};

constexpr int64_t kMaxRotated = 256;

// The rotated values of a latent key, and the contents of cos and sin.
enum Rotation : int64_t {
  kHalves,   // x[i] with x[half + i], in bf16
  kPairs,    // x[2 i] with x[2 i + 1], in bf16; they come out in halves
  kComplex,  // x[2 i] with x[2 i + 1], in fp32; cos is [T, tail / 2] complex numbers, sin is not read
};

// The same for MLA. The cache holds one latent of width R = H - tail and `tail` rotated values per
// token. A query of E unrotated values per head is projected into the space of the latents, and the
// output of attention is projected out of it.
struct Latents {
  Heads heads;  // on one KV head
  Matrix down;  // [Q + R + tail, D]: queries, or their low rank; latent; rotated part of the key
  Matrix up;    // [N * (E + tail), Q] from the low rank; packed is null without one
  Norm norm, q_norm, kv_norm;
  const uint16_t *into, *out_of;  // packed [R, E] and [value, R] per head, one after the other
  int64_t key, value;             // E, and the width of a head's output
  int64_t rotation;
};

// Queries [lo, hi) of one request, at tokens [at, at + hi - lo) of the op. Its keys of layer l,
// head g and position s are at k + ((l * kv_heads + g) * capacity + s) * width of a key.
struct Span {
  uint16_t *k, *v;
  int64_t capacity, at, lo, hi;
};

// Number of keys in a block of the softmax; blocks are at fixed positions.
constexpr int64_t kKeys = 64;

// Keys [begin, end) of an attention in parts; `begin` is a multiple of kKeys. `sums` and `softmax`
// keep the state of rows between the parts; with one part, `sums` is null.
struct Part {
  float *sums, *softmax;  // [T, N, H - tail]; [T, N, 2]: largest score and sum
  int64_t begin, end, first, last;
};

enum RouterKind : int64_t {
  kSoftmax,      // over all experts, then top-k
  kSigmoid,      // fp32; `correction` is added for the choice, which is among the best groups
  kSparseMixer,  // two experts: each weighed against those within `jitter` of it
  kSoftmaxFp32,  // as kSoftmax, of logits in fp32; only the groups with the best expert are open
};

struct Router {
  Norm norm;
  Matrix weight;  // [terms * E, D]: a weight in fp32 is the sum of so many in bf16
  int64_t terms, kind, top_k, renormalise, wide;  // wide: weights of experts in fp32
  int64_t groups, top_groups;
  const float* correction;  // [E] or null
  float scaling, jitter;

  int64_t experts() const { return weight.n / terms; }
};

// The place of an expert that may be read from a file.
struct Slot {
  const uint8_t* packed;  // its parts, see Experts; null while it is not in memory
  int64_t used;           // time of its last use, see Sweep
};

// The experts of one layer: up is [2F, D] (gate first), down is [D, F]. With a limit of 0 the gate
// is SwiGLU, else (gpt_oss) gate and up are clamped: (up + 1) * gate * sigmoid(alpha * gate). If
// ranks share each expert, up and down are those of the own inner values and outputs alone.
struct Experts {
  const void *up, *down;               // packed, one after the other
  const float *up_scale, *down_scale;  // of int8, see Matrix8
  const uint16_t *up_bias, *down_bias; // [E, 2F] and [E, D], or null
  int64_t num, width, hidden;          // E, F, D
  int64_t inner, num_inner;            // the own inner values: the first, and how many; else 0 and F
  int64_t column, num_columns;         // the own outputs; else 0 and D
  int64_t group;                       // of int8; 0: the weights are bf16, or have formats
  const Format *up_format, *down_format;
  float alpha, limit;
  Slot* slots;  // [E], where each expert lies by itself; or null
  int64_t up_at, down_at, up_scale_at, down_scale_at;  // bytes before its parts there
};

// A SwiGLU for all rows, packed as one expert; the sigmoid of `gate` [1, D], if there is one,
// scales its output.
struct Mlp {
  const Experts* weights;
  const Matrix* gate;
};

// Gated DeltaNet of one layer, after its projections: rows of q, k [k_heads, key], v and z
// [v_heads, value], b and a [v_heads]. key and value are multiples of 16.
struct DeltaNet {
  int64_t k_heads, v_heads, key, value;
  int64_t taps;        // of the convolution
  const float* conv;   // [taps, channels of q, k and v]
  const float* rate;   // [v_heads]: -exp(A_log)
  const float* step_bias;  // [v_heads]: dt_bias
  Norm norm;           // of a head
};

// Tokens [at, at + num) of the op, all of one request: the states before them, which may be null
// (all zeros), and the states after them, which may be the same. `inputs` gets a copy of the rows of
// the tokens, unless it is null.
struct DeltaSpan {
  const uint16_t* conv_before;  // [channels, taps]: the last inputs
  const float* state_before;    // [v_heads, key, value]
  uint16_t* conv;
  float* state;
  int64_t at, num;
  uint16_t* inputs;
};

struct Unit {
  int64_t expert, lo, hi;  // rows [lo, hi) of the sorted slots
};

// A row of logits from which a token is chosen, as qllm/runner/sampling/definition.py defines it.
struct SampleRow {
  const void* logits;       // [num], bf16 or fp32
  int64_t num, is_half;
  double temperature, min_p, top_p;  // temperature 0 is greedy
  int64_t top_k;            // 0 keeps all
  int64_t share;            // of the weight, in units of 2^-53
  const int64_t* bias_ids;  // distinct
  const double* bias;
  int64_t num_bias;
  double repetition, frequency, presence;
  const int64_t* prompt_ids;  // distinct
  int64_t num_prompt;
  const int64_t* outputs;
  int64_t num_outputs;
  int64_t forced;           // the only token that is allowed, or -1
  const uint32_t* words;    // bit i % 32 of word i / 32 allows token i; or null
  const int64_t* allowed;   // the only tokens that are allowed; none sets no limit
  int64_t num_allowed;
  const int64_t* banned;
  int64_t num_banned;
  const int64_t* ends;      // banned unless no other token is allowed
  int64_t num_ends;
  int64_t num_top;          // likeliest tokens to report; -1 reports no log-probability at all
  int64_t* top_ids;         // [num_top]
  float* top;               // [num_top], log-probabilities
  int64_t token;            // the choice; -1 if there is none
  double peak;              // the largest logit, NaN if one is NaN; without a finite one no choice
  float logprob;            // of the token
};

struct Kernels {
  const char* name;
  void (*pack)(uint16_t* packed, const uint16_t* weight, int64_t n, int64_t k, int64_t row_stride,
               int64_t col_stride);
  void (*unpack)(uint16_t* weight, const uint16_t* packed, int64_t n, int64_t k,
                 int64_t row_stride, int64_t col_stride);
  void (*pack8)(int8_t* packed, const int8_t* weight, int64_t n, int64_t k, int64_t row_stride,
                int64_t col_stride);
  void (*unpack8)(int8_t* weight, const int8_t* packed, int64_t n, int64_t k,
                  int64_t row_stride, int64_t col_stride);
  // The bf16 values of a weight with a format, packed as weights without one
  void (*dequantise)(uint16_t* packed, const Matrix& weight);
  void (*linear)(uint16_t* y, const uint16_t* x, const Matrix& weight, int64_t rows);
  void (*norm)(uint16_t* y, const uint16_t* x, const Norm& norm, int64_t rows, int64_t width);
  // q [T, N * H]; keys and values are written to their slabs
  void (*attend_in)(uint16_t* q, const uint16_t* x, const uint16_t* cos, const uint16_t* sin,
                    int64_t tokens, const Attention& layer, int64_t index, const Span* spans,
                    int64_t num_spans);
  // The part of `attend_in` after its projection: the rows [T, (N + 2 G) H] are changed
  void (*place_heads)(uint16_t* q, uint16_t* qkv, const uint16_t* cos, const uint16_t* sin,
                      const Attention& layer, int64_t index, const Span* spans,
                      int64_t num_spans);
  // q [T, N * H], out [T, N * (H - tail)], which the last part writes; tokens in no span do not
  // change
  void (*attend)(uint16_t* out, const uint16_t* q, const Heads& layer, int64_t index,
                 int64_t window, const Span* spans, int64_t num_spans, const Part& part);
  // q [T, N * H], out [T, N * value], x [T, N * R]
  void (*latents_in)(uint16_t* q, const uint16_t* x, const uint16_t* cos, const uint16_t* sin,
                     int64_t tokens, const Latents& layer, int64_t index, const Span* spans,
                     int64_t num_spans);
  void (*latents_out)(uint16_t* out, const uint16_t* x, const Latents& layer, int64_t tokens);
  // y [T, v_heads * value], x [T, width of a row]; tokens in no span do not change
  void (*delta)(uint16_t* y, const uint16_t* x, const DeltaNet& layer, const DeltaSpan* spans,
                int64_t num_spans);
  void (*route)(uint16_t* normed, int64_t* ids, void* weights, const uint16_t* mid,
                int64_t tokens, const Router& router);
  // slots [S, D]; `token` [S] is the row of x [T, D] of each slot
  void (*experts)(uint16_t* slots, const uint16_t* x, const int64_t* token, const Unit* units,
                  int64_t num_units, const Experts& layer);
  // Its two halves, for units that follow each other. The first writes the own inner values of
  // slots, inner [S, F]. The second reads all of them, and writes the own outputs.
  void (*experts_in)(uint16_t* inner, const uint16_t* x, const int64_t* token, const Unit* units,
                     int64_t num_units, const Experts& layer);
  void (*experts_out)(uint16_t* slots, const uint16_t* inner, const Unit* units,
                      int64_t num_units, const Experts& layer);
  // y and x [T, D]
  void (*mlp)(uint16_t* y, const uint16_t* x, const Mlp& mlp, int64_t rows);
  // y [T, width] = silu(gate) * up, of h [T, 2 * width] with the gate first
  void (*swiglu)(uint16_t* y, const uint16_t* h, int64_t rows, int64_t width);
  // out [T, D] = sum over k of weight * slot; inverse [T * K] contains the slot of each (t, k)
  void (*combine)(uint16_t* out, const uint16_t* slots, const int64_t* inverse,
                  const void* weights, int64_t wide, int64_t tokens, int64_t top_k,
                  int64_t width);
  // out [num] = x + y * scale; out may be one of them
  void (*add)(uint16_t* out, const uint16_t* x, const uint16_t* y, float scale, int64_t num);
  // out [num] *= sigmoid(by), where the sigmoid is rounded first
  void (*gate)(uint16_t* out, const uint16_t* by, int64_t num);
  // Updates the largest logit [rows] and its lowest id with logits [rows, num] of the ids from
  // `first` on; NaN is larger than any number.
  void (*best)(float* peaks, int64_t* ids, const uint16_t* logits, int64_t rows, int64_t num,
               int64_t first);
  // Sets x [num] to -inf where bit i of `words` is 0
  void (*mask)(double* x, const uint32_t* words, int64_t num);
  // Chooses a token of each row
  void (*sample)(SampleRow* rows, int64_t num);
};

// Packs weights of one format. For groups of zeros, a scale that is too large or small becomes 1.
void pack_codes(const Kernels&, Codes* weights, int64_t num, const Format& format);

extern const Kernels kPortable, kAmxEmulated;
#if defined(__x86_64__)
extern const Kernels kAvx2, kAvx512, kAvx512Bf16, kAmx;
#endif

}  // namespace qllm
