// The ops of layers on one rank (group.h), with its share of the weights: see
// qllm/sharded/plan.py. Tensors that all ranks read are in shared memory; an op that needs another
// rank's part of one has a gather before it.
#pragma once

#include "group.h"
#include "sweep.h"

namespace qllm {

// The share of a rank in one layer. Columns are those of the residual stream.
struct Share {
  const Matrix* out;  // the own columns of Layer::out; or null
  int64_t column, num_columns;
  int64_t head_column;  // of the own heads, among the inputs of Layer::out
  const Norm *q_norm, *k_norm;  // of the queries and keys of all ranks; or null
  int64_t q_width, k_width, q_column, k_column;
  int64_t has_keys;  // whether the rank before this one has other keys
  int64_t first_expert, num_experts;  // the first of the own experts; experts of all ranks
  const Matrix *into, *down, *gate;   // of shared experts or of a dense layer; or null
  int64_t width, inner, num_inner;    // inner values of all ranks, and the own ones
};

// Arguments of calls, in shared memory.
struct SweepCall {
  Sweep sweep;  // `parts` are those of rank 0, then those of rank 1, ...
  int64_t desk, is_new;            // is_new: nothing on it is done
  int64_t done, inside, kept_bytes;  // results: tasks of the op that rank 0 has done; whether any
                                     // rank has done some; memory of desks
};
struct HeadCall {
  const uint16_t* x;  // [rows, width]
  int64_t rows, first_block, end_block;
  float* peaks;       // [ranks, rows], with `ids`; or null
  int64_t* ids;
  uint16_t* logits;   // [rows, vocabulary]; or null
  int64_t vocabulary;
  int64_t desk, is_new;
  int64_t grain;  // as in Sweep, with the next ones
  const int64_t* watch;
  int64_t seen, stop_ns, tasks_left;
  int64_t is_done, call_ns, longest_ns, kept_bytes;  // results
};
struct EmbedCall {
  uint16_t* x;  // [num, row]
  const int64_t* ids;
  int64_t num;
};

// The ops of a layer, for a sweep with a rank.
void attend_on_rank(const Kernels& k, const Sweep& s, const Layer& layer, const LayerOp& part);
void route_on_rank(const Kernels& k, const Sweep& s, const Layer& layer, const LayerOp& part);
void combine_on_rank(const Kernels& k, const Sweep& s, const Layer& layer, const LayerOp& part);

// Units [s.pos, stop) of the own experts, or the own share of all experts.
void experts_on_rank(const Kernels& k, const Sweep& s, const Layer& layer, int64_t stop);
inline bool are_cut(const Experts& e) { return e.num_inner < e.width; }  // each is shared by ranks

// A rank's part of a call.
void run_call(const Kernels& kernels, Rank& rank, int64_t kind, void* what);

}  // namespace qllm
