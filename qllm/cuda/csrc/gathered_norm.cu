// The device build. QLLM_NET is a net, QLLM_IS_LOSSY is true or false. A launch has `blocks` blocks
// of threads for each rank that it runs, and `width` bf16 of dynamic shared memory.
#include "gathered_norm.h"

extern "C" __global__ void qllm_gathered_norm(const __grid_constant__ qllm::QLLM_NET net,
                                              qllm::i64 rank,
                                              const __grid_constant__ qllm::GatheredNorm a) {
  extern __shared__ qllm::Eight row[];
  __shared__ float chains[qllm::kChains];
  const qllm::Block block = {qllm::i32(blockIdx.x), qllm::i32(gridDim.x), qllm::i32(threadIdx.x),
                             qllm::i32(blockDim.x)};
  qllm::gathered_norm<qllm::QLLM_NET, QLLM_IS_LOSSY>(net, a, rank + blockIdx.y, block,
                                                     row, chains);
}
