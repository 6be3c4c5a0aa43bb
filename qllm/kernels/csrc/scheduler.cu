// The device build of the scheduler: one thread decides; the policy's rank is linked in.
#include "scheduler.h"

// One decision at a time of the engine's clock; `answer` is an Answer.
extern "C" __global__ void qllm_decide(qllm::State* state, qllm::i64 now_ns, qllm::i32* answer) {
  if (threadIdx.x == 0 && blockIdx.x == 0)
    *answer = qllm::Scheduler(state, nullptr).decide(now_ns);
}

// The frame that ran has reached its end, or (`done` is 0) has stopped at a boundary.
extern "C" __global__ void qllm_ran(qllm::State* state, qllm::i32 done, qllm::i32 high,
                                    qllm::i32 layer, qllm::i32 inside, qllm::i32 preempted,
                                    qllm::i64 start_ns, qllm::i64 end_ns) {
  if (threadIdx.x || blockIdx.x) return;
  qllm::Scheduler scheduler(state, nullptr);
  if (done)
    scheduler.done(high, start_ns, end_ns);
  else
    scheduler.stopped(high, layer, inside, start_ns, end_ns, preempted);
}
