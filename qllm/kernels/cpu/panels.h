// The layout of packed weights, the same for every instruction set: see kernels.h and
// quantised.inc.
#pragma once

#include "kernels.h"

namespace qllm {
namespace {

constexpr int64_t kPanel = 64, kLanes = 16;
constexpr int64_t kBlockInputs = 8, kBlockPairs = kBlockInputs / 2;

inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }
inline int64_t num_panels(int64_t n) { return (n + kPanel - 1) / kPanel; }

inline int64_t codes_per_byte(const Format& f) { return f.code == kI8 || f.code == kE4m3 ? 1 : 2; }
inline int64_t block_size(const Format& f) { return kLanes * kBlockInputs / codes_per_byte(f); }
inline int64_t worth_size(int64_t kind) { return kind == kNone ? 0 : kind == kFp32 ? 4 : 2; }

// Bytes of `cols` outputs.
inline int64_t panel_size(const Format& f, int64_t cols, int64_t k) {
  int64_t groups = (k + f.group - 1) / f.group, per_block = cols / kLanes * block_size(f);
  int64_t whole = k / f.group * ((f.group + kBlockInputs - 1) / kBlockInputs);
  int64_t blocks = whole + (k % f.group + kBlockInputs - 1) / kBlockInputs;
  return groups * cols * (worth_size(f.scale) + worth_size(f.offset)) + blocks * per_block;
}

}  // namespace
}  // namespace qllm
