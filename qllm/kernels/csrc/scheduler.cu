// The device build: one thread does what a launch asks for; the policy's rank is linked in.
#include "calls.h"
#include "rings.h"
#include "server.h"

// Call a function of the scheduler by number.
extern "C" __global__ void qllm_call(qllm::State* state, qllm::i32 which, qllm::i64 n0,
                                     qllm::i64 n1, qllm::i64 n2, qllm::i64 n3, qllm::i64 n4,
                                     qllm::i64 n5, qllm::i64* answer) {
  if (threadIdx.x || blockIdx.x) return;
  const qllm::i64 numbers[] = {n0, n1, n2, n3, n4, n5};
  *answer = qllm::call(state, nullptr, which, numbers);
}

// Take the next record of a ring into `body` (of `room` bytes): its length, 0 if there is none that
// is whole, -1 if it is broken for good or longer than `room`.
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

// Write one record; `done` is what RingWriter::write returns.
extern "C" __global__ void qllm_ring_write(qllm::RingEnd* end, qllm::u32 kind, qllm::u32 flags,
                                           const qllm::u8* body, qllm::u64 num_body,
                                           qllm::i64* done) {
  if (threadIdx.x == 0 && blockIdx.x == 0)
    *done = qllm::RingWriter(end).write(kind, flags, body, num_body);
}

// Take what has arrived; `answer` is what Server::claim returns.
extern "C" __global__ void qllm_claim(qllm::ServerState* server, qllm::State* state,
                                      qllm::i64 now_ns, qllm::i64* answer) {
  if (threadIdx.x == 0 && blockIdx.x == 0)
    *answer = qllm::Server(server, state, nullptr).claim(now_ns);
}

// A request has one more token.
extern "C" __global__ void qllm_sampled(qllm::ServerState* server, qllm::State* state,
                                        qllm::i32 slot, qllm::i32 token, qllm::i64 now_ns) {
  if (threadIdx.x == 0 && blockIdx.x == 0)
    qllm::Server(server, state, nullptr).sampled(slot, token, now_ns);
}

// Write what found no room before and show what is held; `answer` is how many slots still owe.
extern "C" __global__ void qllm_publish(qllm::ServerState* server, qllm::State* state,
                                        qllm::i64* answer) {
  if (threadIdx.x || blockIdx.x) return;
  qllm::Server made(server, state, nullptr);
  *answer = made.flush();
  made.show();
}
