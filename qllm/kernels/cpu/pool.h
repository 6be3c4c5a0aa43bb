// A small thread pool. Threads take tasks one by one, so a thread that the system suspends delays
// one task and not a share of them. A waiting thread spins for some microseconds and then sleeps.
#pragma once

#include <stdint.h>

namespace qllm {

using Task = void (*)(const void* context, int64_t task, int64_t then);

// Sets the number of threads for all callers, each caller's own thread included. Callable from any
// thread at any time.
void set_threads(int threads);
int num_threads();

// Runs tasks [0, count) on all threads; returns when all are done. A thread takes up to `most`
// adjacent tasks at a time, and fewer towards the end, so that no thread waits long for another.
// `then` is the task that the thread will probably run next, which may be after the last. While
// another caller uses the threads, the tasks run on the caller's own thread. With a course
// (course.h) some tasks may be done already, or be left for later.
void run_tasks(int64_t count, int64_t most, Task task, const void* context);

namespace {

template <class Body>
void parallel(int64_t count, const Body& body) {
  Task task = [](const void* context, int64_t i, int64_t) { (*(const Body*)context)(i); };
  run_tasks(count, 1, task, &body);
}

// The same with `body(task, then)`.
template <class Body>
void parallel_runs(int64_t count, int64_t most, const Body& body) {
  Task task = [](const void* context, int64_t i, int64_t then) { (*(const Body*)context)(i, then); };
  run_tasks(count, most, task, &body);
}

}  // namespace
}  // namespace qllm
