// The device build: one thread does the work of a launch, except where a block reads requests,
// writes token records or fills a lane. The policy's rank is linked in.
#include "calls.h"
#include "loop.h"

// Call a function of the scheduler by number.
extern "C" __global__ void qllm_call(qllm::State* state, qllm::i32 which, qllm::i64 n0,
                                     qllm::i64 n1, qllm::i64 n2, qllm::i64 n3, qllm::i64 n4,
                                     qllm::i64 n5, qllm::i64* answer) {
  if (threadIdx.x || blockIdx.x) return;
  const qllm::i64 numbers[] = {n0, n1, n2, n3, n4, n5};
  *answer = qllm::call(state, nullptr, which, numbers);
}

// Take the next record of a ring into `body` (of `room` bytes): return its length, 0 without a
// whole record, -1 if it is broken for good or longer than `room`.
extern "C" __global__ void qllm_ring_read(qllm::RingEnd* end, qllm::i64 now_ns, qllm::u8* body,
                                          qllm::u64 room, qllm::i64* length) {
  if (threadIdx.x || blockIdx.x) return;
  qllm::RingReader reader(end);
  *length = reader.look(now_ns);
  if (*length <= 0) return;
  qllm::u64 num_body = qllm::u64(*length) - qllm::kHeader - qllm::kTrailer;
  if (num_body > room) {
    *length = -1;
    return;
  }
  reader.copy(body, num_body);
  reader.take(qllm::u64(*length));
}

// Write one record; `done` is the result of RingWriter::write.
extern "C" __global__ void qllm_ring_write(qllm::RingEnd* end, qllm::u32 kind, qllm::u32 flags,
                                           const qllm::u8* body, qllm::u64 num_body,
                                           qllm::i64* done) {
  if (threadIdx.x == 0 && blockIdx.x == 0)
    *done = qllm::RingWriter(end).write(kind, flags, body, num_body);
}

// Call a function of the server by number: claim, decide, publish and the others.
extern "C" __global__ void qllm_server_call(qllm::ServerState* server, qllm::State* state,
                                            qllm::i32 which, qllm::i64 n0, qllm::i64 n1,
                                            qllm::i64 n2, qllm::i64 n3, qllm::i64 n4, qllm::i64 n5,
                                            qllm::i64* answer) {
  if (threadIdx.x || blockIdx.x) return;
  const qllm::i64 numbers[] = {n0, n1, n2, n3, n4, n5};
  *answer = qllm::server_call(server, state, nullptr, which, numbers);
}

// The work of the loop before a stage (turns.h): choose its branch, and fill its lane with all
// threads of one block.
extern "C" __global__ void qllm_before(qllm::State* state, qllm::ServerState* server,
                                       qllm::Lanes* lanes, qllm::i64 now_ns, qllm::i64* branch) {
  qllm::Scheduler scheduler(state, nullptr);
  qllm::Turns<qllm::Scheduler> turns(scheduler, scheduler, server, lanes);
  if (threadIdx.x == 0) *branch = turns.before(now_ns);
  __syncthreads();
  if (!lanes->fill) return;
  const qllm::Share mine = {qllm::i32(threadIdx.x), qllm::i32(blockDim.x)};
  turns.stages.clear(mine);
  __syncthreads();
  turns.stages.write(mine);
}

// The work of the loop after a stage.
extern "C" __global__ void qllm_after(qllm::State* state, qllm::ServerState* server,
                                      qllm::Lanes* lanes, qllm::i64 now_ns, qllm::i64 stop, qllm::i64* became) {
  if (threadIdx.x || blockIdx.x) return;
  qllm::Scheduler scheduler(state, nullptr);
  qllm::Turns<qllm::Scheduler> turns(scheduler, scheduler, server, lanes);
  *became = turns.after(now_ns, stop);
}

// -- the loop

// Engine time: the device's timer, set by the host's clock at each launch. It never goes back.
__device__ inline qllm::i64 engine_ns(qllm::Lanes* lanes) {
  qllm::u64 timer;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(timer));
  if (lanes->launch_ns) lanes->clock_ns = qllm::i64(timer) - lanes->launch_ns;
  lanes->launch_ns = 0;
  return qllm::most(qllm::i64(timer) - lanes->clock_ns, lanes->now_ns);
}
// The parts of a turn that one thread does. They are separate functions, so that the kernel keeps
// none of their values in registers.
__device__ __noinline__ void open_turn(qllm::ServerState* server, qllm::State* state,
                                       qllm::Lanes* lanes, bool first) {
  qllm::Loop loop(server, state, nullptr, lanes);
  loop.server.shares = true;
  if (first)
    loop.open(engine_ns(lanes));
  else
    loop.go_on(lanes->now_ns);
}
__device__ __noinline__ qllm::i32 close_turn(qllm::ServerState* server, qllm::State* state,
                                             qllm::Lanes* lanes) {
  qllm::i32 branch = qllm::Loop(server, state, nullptr, lanes).close(lanes->now_ns);
  if (lanes->idle) __nanosleep(2000);
  return branch;
}
// All threads of the block read the records that came in.
__device__ __noinline__ void fetch_turn(qllm::ServerState* server, qllm::State* state) {
  const qllm::Share mine = {qllm::i32(threadIdx.x), qllm::i32(blockDim.x)};
  qllm::Server(server, state, nullptr).read_fetch(mine);
}
// The part that the threads of one block share: send token records, fill the lane.
__device__ __noinline__ void share_turn(qllm::ServerState* server, qllm::State* state,
                                        qllm::Lanes* lanes) {
  const qllm::Share mine = {qllm::i32(threadIdx.x), qllm::i32(blockDim.x)};
  qllm::Sender sender(server);
  sender.send(mine);
  __syncthreads();
  if (threadIdx.x == 0) sender.show();
  if (!lanes->fill) return;
  qllm::Block block(state, nullptr);
  qllm::Stages stages(block, server, lanes);
  stages.clear(mine);
  __syncthreads();
  stages.write(mine);
  __syncthreads();
}

// The loop as the body of a WHILE node: it sets if the loop continues, and the body of a SWITCH.
extern "C" __device__ __cudart_builtin__ void CUDARTAPI
cudaGraphSetConditional(cudaGraphConditionalHandle, unsigned int);
extern "C" __global__ void __launch_bounds__(256, 1)
qllm_turn(qllm::ServerState* server, qllm::State* state, qllm::Lanes* lanes, qllm::u64 run,
          qllm::u64 stage) {
  qllm::i32 branch = qllm::NOTHING;
  if (threadIdx.x == 0) open_turn(server, state, lanes, true);
  __syncthreads();
  while (server->fetch.waits) {
    fetch_turn(server, state);
    __syncthreads();
    if (threadIdx.x == 0) open_turn(server, state, lanes, false);
    __syncthreads();
  }
  if (threadIdx.x == 0) branch = close_turn(server, state, lanes);
  __syncthreads();
  share_turn(server, state, lanes);
  if (threadIdx.x) return;
  cudaGraphSetConditional((cudaGraphConditionalHandle)stage, unsigned(branch));
  cudaGraphSetConditional((cudaGraphConditionalHandle)run, lanes->goes_on ? 1u : 0u);
}
