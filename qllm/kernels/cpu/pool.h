// A small thread pool: tasks are taken one by one, so a thread that the system stops holds up one
// task and not a share. Waiting spins for some microseconds and then sleeps.
#pragma once

#include <stdint.h>

namespace qllm {

using Task = void (*)(const void* context, int64_t task);

// Threads that compute, the caller included. Not while `run` is under way.
void set_threads(int threads);
int num_threads();

// Run tasks [0, count) on all threads; returns when all are done. While another caller has
// the threads, the tasks run on the caller's own.
void run_tasks(int64_t count, Task task, const void* context);

namespace {

template <class Body>
void parallel(int64_t count, const Body& body) {
  run_tasks(count, [](const void* context, int64_t i) { (*(const Body*)context)(i); }, &body);
}

}  // namespace
}  // namespace qllm
