// Consecutive ops of a program in one call: the native half of qllm/runner/sweep.py, which
// mirrors these structs.
#pragma once

#include "course.h"
#include "kernels.h"

namespace qllm {

enum Grain : int64_t { kEachStep = 0, kEachLayer = 1, kEachExpert = 2 };  // of qllm/types.py

// As OpKind of qllm/scheduler/program.py.
enum Kind : int64_t { kAttn = 1, kRoute = 2, kExperts = 3, kCombine = 4 };

// A layer with kernels for every part.
struct Layer {
  const Attention* attention;  // one of these three is not null
  const Latents* latents;
  const DeltaNet* deltas;
  const Norm* first_norm;  // before `into` and `gate`
  const Matrix* into;      // the projection to the inputs of `deltas`
  const Matrix* gate;      // of what `attention` returns; or null
  const Matrix* out;
  const Router* router;  // null in a dense layer, as its experts
  const Experts* experts;
  const Mlp* mlp;    // shared experts, or the MLP of a dense layer; or null
  const Norm* norm;  // before the MLP in a dense layer
  int64_t index, window, expert_bytes;
  float scale;  // factor of the terms that are added to the residual stream
  const struct Share* share;  // of a rank (ranks.h), whose heads and experts these are; or null
};

// One op of every layer, over tokens [lo, hi); for an ATTN op, also its spans. States belong to one
// layer: the next one with states begins with a new call. So does the next op that has some.
struct LayerOp {
  int64_t kind, lo, hi;
  const Span* spans;
  int64_t num_spans, whole;  // whole: every token is in a span
  const uint16_t *cos, *sin;
  const DeltaSpan* states;  // by rounds, each of `round_nums` spans that run together
  const int64_t* round_nums;
  int64_t num_rounds;
};

struct Sweep {
  const Layer* layers;
  const LayerOp* parts;  // of one layer, in order
  int64_t num_parts, end_layer;
  int64_t tokens, width, top_k, wide;  // T, D, K; weights are fp32

  // x [T, D] is the input of the layer, `next` its output: each layer swaps the two.
  uint16_t *x, *next;
  uint16_t *mid, *normed, *shared;   // [T, D]; output of the shared experts
  void* weights;                     // [T, K]
  uint16_t* slots;                   // [S, D], S = T * K
  int64_t *ids, *token, *inverse;    // [S]
  Unit* units;                       // room for S

  // Units of one range: at most so many rows, at least one unit, and a time limit as in `Work` of
  // qllm/runner/layers/work.py.
  int64_t unit_rows, range_rows;
  double range_ns, unit_ns, row_ns;
  int64_t key_values;  // most values, of keys and of values, that one attention task reads

  // Progress inside the op that has begun; all other state is in the tensors.
  Course* course;

  // Return at the boundaries of this grain if a stop is due: the word at `watch` is not `seen`, or
  // the monotonic clock is past `stop_ns`, or `tasks_left` tasks are done. Without a watch, return
  // at every boundary between ops or ranges. At the grain of experts every task of an op ends at a
  // boundary.
  int64_t grain;  // as Grain of qllm/types.py
  const int64_t* watch;
  int64_t seen, stop_ns, tasks_left;
  int64_t single;  // return after the first op or range

  // The current place; `pos` and `num_units` are those of an EXPERTS op.
  int64_t layer, part, pos, num_units;

  // The work of this call: its time, the longest time between two polls of a thread, and the op in
  // which that was.
  int64_t num_layers, call_ns, longest_ns, longest_kind, slots_done, expert_bytes;
  int64_t failed;  // a router gave an id of no expert

  // Experts that may be read from a file. Units of experts in memory move before the others. A call
  // returns at the first unit whose expert is missing. A range that was left keeps its units.
  int64_t begun;    // end of the range inside which the op was left; or 0
  int64_t missing;  // the call returned because an expert is not in memory
  int64_t clock;    // time of the last use of an expert: a number of ranges

  // Of a rank: see ranks.h. Else null.
  Rank* rank;
  struct Desk* desk;
  uint16_t *heads, *inner, *queries;  // [T, .] of all ranks: attention's output, inner values of the
                                      // MLP, and queries and keys before norms over all heads
  int64_t rows_from;  // least rows of an ATTN op whose output projection is split by rows
  uint16_t* expert_inner;  // [S, F], inner values of slots, if ranks share each expert
  int64_t piece_rows;      // least rows of a piece: ranks on other hosts get an op's rows in pieces
};

// Runs until `end_layer` or a boundary.
void sweep(const Kernels& kernels, Sweep* s);

// The first half of an ATTN op: `seen` is what the heads return for its rows. Returns the width of a
// row. `enter` replaces `Kernels::attend_in`, unless it is null.
using Enter = void (*)(const Kernels& k, uint16_t* q, const uint16_t* x, const Sweep& s,
                       const Layer& layer, const LayerOp& part);
int64_t attended(const Kernels& k, const Sweep& s, const Layer& layer, const LayerOp& part,
                 const uint16_t*& seen, Enter enter);

// `Kernels::best` of rows over blocks of the head, of `width` ids each; the last may be narrower.
struct HeadBlocks {
  float* peaks;
  int64_t* ids;
  const uint16_t* x;
  int64_t rows;
  const Matrix* const* blocks;
  int64_t width, end;

  // The same as in Sweep. The head counts as the inside of a layer: it returns early only at the
  // grain of experts.
  Course* course;
  int64_t grain;
  const int64_t* watch;
  int64_t seen, stop_ns, tasks_left, single;

  int64_t at;  // the first block that is not done

  // The work of this call.
  int64_t call_ns, longest_ns;
};

// Runs until `end` or a boundary.
void head(const Kernels& kernels, HeadBlocks* s);

}  // namespace qllm
