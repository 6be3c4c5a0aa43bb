// The host build of the scheduler as a Python module: functions over the address of a block and
// the address of the policy's compiled rank. The caller owns both. A call takes microseconds, so
// it keeps the GIL.
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <tuple>
#include <utility>

#include "calls.h"
#include "loop.h"

namespace {

using namespace qllm;

// The objects that a function works on, made of the first arguments.
template <class Owner>
struct Made;

template <>
struct Made<Scheduler> {
  static constexpr Py_ssize_t num = 2;
  static Scheduler of(PyObject* const* args) {
    return {(State*)PyLong_AsVoidPtr(args[0]), (RankFunction)PyLong_AsVoidPtr(args[1])};
  }
};

template <>
struct Made<Server> {
  static constexpr Py_ssize_t num = 3;
  static Server of(PyObject* const* args) {
    return {(ServerState*)PyLong_AsVoidPtr(args[0]), (State*)PyLong_AsVoidPtr(args[1]),
            (RankFunction)PyLong_AsVoidPtr(args[2])};
  }
};

template <class Owner, auto Member, class Type>
struct Function;

template <class Owner, auto Member, class Result, class RingMemory, class... A>
struct Function<Owner, Member, Result (RingMemory::*)(A...)> {
  static constexpr Py_ssize_t num_args = Made<Owner>::num + sizeof...(A);

  static PyObject* call(PyObject*, PyObject* const* args, Py_ssize_t num) {
    if (num != num_args)
      return PyErr_Format(PyExc_TypeError, "%d arguments, not %d", int(num_args), int(num));
    return run(args, std::index_sequence_for<A...>());
  }

 private:
  template <size_t... I>
  static PyObject* run(PyObject* const* args, std::index_sequence<I...>) {
    std::tuple<A...> values{A(PyLong_AsLongLong(args[Made<Owner>::num + I]))...};
    for (Py_ssize_t i = 0; i < Made<Owner>::num; i++) PyLong_AsVoidPtr(args[i]);
    if (PyErr_Occurred()) return nullptr;
    Owner owner = Made<Owner>::of(args);
    if constexpr (std::is_void_v<Result>) {
      (owner.*Member)(std::get<I>(values)...);
      Py_RETURN_NONE;
    } else {
      return PyLong_FromLongLong((owner.*Member)(std::get<I>(values)...));
    }
  }
};
template <class Owner, auto Member, class Result, class RingMemory, class... A>
struct Function<Owner, Member, Result (RingMemory::*)(A...) const>
    : Function<Owner, Member, Result (RingMemory::*)(A...)> {};

#define QLLM_FUNCTION(owner, name)                                             \
  (PyCFunction)(void (*)())Function<owner, &owner::name, decltype(&owner::name)>::call, \
      METH_FASTCALL
#define QLLM_METHOD(name) {#name, QLLM_FUNCTION(Scheduler, name), "See scheduler.h."}
#define QLLM_SERVER_METHOD(name) {"server_" #name, QLLM_FUNCTION(Server, name), "See server.h."}

// (state, rank, which, number...) and (server, state, rank, which, number...): call a function
// above by its number, as a kernel does.
template <class Owner>
PyObject* call_by_number(PyObject*, PyObject* const* args, Py_ssize_t num) {
  const Py_ssize_t fixed = Made<Owner>::num + 1;
  i64 numbers[kMostNumbers] = {};
  if (num < fixed || num > fixed + kMostNumbers)
    return PyErr_Format(PyExc_TypeError, "%d to %d arguments, not %d", int(fixed),
                        int(fixed + kMostNumbers), int(num));
  void* at[3] = {};
  for (Py_ssize_t i = 0; i < fixed - 1; i++) at[i] = PyLong_AsVoidPtr(args[i]);
  i32 which = i32(PyLong_AsLongLong(args[fixed - 1]));
  for (Py_ssize_t i = fixed; i < num; i++) numbers[i - fixed] = PyLong_AsLongLong(args[i]);
  if (PyErr_Occurred()) return nullptr;
  if constexpr (std::is_same_v<Owner, Server>)
    return PyLong_FromLongLong(
        server_call((ServerState*)at[0], (State*)at[1], (RankFunction)at[2], which, numbers));
  else
    return PyLong_FromLongLong(call((State*)at[0], (RankFunction)at[1], which, numbers));
}

// -- the turns of the loop (turns.h); addresses of state, rank, server and lanes come first

template <int Count>
bool read_numbers(PyObject* const* args, Py_ssize_t num, i64 (&numbers)[Count]) {
  if (num != Count) {
    PyErr_Format(PyExc_TypeError, "%d arguments, not %d", Count, int(num));
    return false;
  }
  for (int i = 0; i < Count; i++) numbers[i] = PyLong_AsLongLong(args[i]);
  return !PyErr_Occurred();
}

struct OwnTurns {
  Scheduler scheduler;
  Turns<Scheduler> turns;
  explicit OwnTurns(const i64* n)
      : scheduler((State*)n[0], (RankFunction)n[1]),
        turns(scheduler, scheduler, (ServerState*)n[2], (Lanes*)n[3]) {}
};

// (..., now_ns): the branch of the next stage, NOTHING or CANNOT.
PyObject* turn_before(PyObject*, PyObject* const* args, Py_ssize_t num) {
  i64 n[5];
  if (!read_numbers(args, num, n)) return nullptr;
  return PyLong_FromLong(OwnTurns(n).turns.before(n[4]));
}

// (..., threads): fill the lane of the chosen stage as a block of so many threads would.
PyObject* turn_fill(PyObject*, PyObject* const* args, Py_ssize_t num) {
  i64 n[5];
  if (!read_numbers(args, num, n)) return nullptr;
  OwnTurns own(n);
  i32 threads = i32(n[4]);
  for (i32 thread = 0; thread < threads; thread++) own.turns.stages.clear({thread, threads});
  for (i32 thread = 0; thread < threads; thread++) own.turns.stages.write({thread, threads});
  Py_RETURN_NONE;
}

// (..., now_ns, stop): the state of the running frame.
PyObject* turn_after(PyObject*, PyObject* const* args, Py_ssize_t num) {
  i64 n[6];
  if (!read_numbers(args, num, n)) return nullptr;
  return PyLong_FromLong(OwnTurns(n).turns.after(n[4], n[5]));
}

// A turn of the whole loop (loop.h), with its lane filled as by so many threads. Addresses of
// server, state, rank and lanes; now_ns, threads: the branch of the next stage, or NOTHING.
PyObject* loop_turn(PyObject*, PyObject* const* args, Py_ssize_t num) {
  i64 n[6];
  if (!read_numbers(args, num, n)) return nullptr;
  Loop loop((ServerState*)n[0], (State*)n[1], (RankFunction)n[2], (Lanes*)n[3]);
  i32 threads = i32(n[5]);
  loop.server.shares = true;
  for (loop.open(n[4]); loop.waits(); loop.go_on(n[4]))
    for (i32 i = 0; i < threads; i++) loop.server.read_fetch({i, threads});
  i32 branch = loop.close(n[4]);
  Sender sender(loop.v);
  for (i32 i = 0; i < threads; i++) sender.send({i, threads});
  sender.show();
  for (i32 i = 0; loop.now->fill && i < threads; i++) loop.turns.stages.clear({i, threads});
  for (i32 i = 0; loop.now->fill && i < threads; i++) loop.turns.stages.write({i, threads});
  return PyLong_FromLong(branch);
}

PyMethodDef methods[] = {
    QLLM_METHOD(start),  QLLM_METHOD(add_slots), QLLM_METHOD(rank_anew), QLLM_METHOD(add),
    QLLM_METHOD(remove), QLLM_METHOD(evict),     QLLM_METHOD(adopt),     QLLM_METHOD(new_frame),
    QLLM_METHOD(park),   QLLM_METHOD(decide),    QLLM_METHOD(done),      QLLM_METHOD(stopped),
    QLLM_METHOD(failed),
    QLLM_SERVER_METHOD(open),    QLLM_SERVER_METHOD(claim),   QLLM_SERVER_METHOD(arrived),
    QLLM_SERVER_METHOD(asked),   QLLM_SERVER_METHOD(decide),  QLLM_SERVER_METHOD(done),
    QLLM_SERVER_METHOD(stopped), QLLM_SERVER_METHOD(failed),  QLLM_SERVER_METHOD(sampled),
    QLLM_SERVER_METHOD(end),     QLLM_SERVER_METHOD(flush),   QLLM_SERVER_METHOD(detach),
    QLLM_SERVER_METHOD(show),    QLLM_SERVER_METHOD(find),
    {"call", (PyCFunction)(void (*)())call_by_number<Scheduler>, METH_FASTCALL, "See calls.h."},
    {"server_call", (PyCFunction)(void (*)())call_by_number<Server>, METH_FASTCALL, "See calls.h."},
    {"loop_turn", (PyCFunction)(void (*)())loop_turn, METH_FASTCALL, "See loop.h."},
    {"turn_before", (PyCFunction)(void (*)())turn_before, METH_FASTCALL, "See turns.h."},
    {"turn_fill", (PyCFunction)(void (*)())turn_fill, METH_FASTCALL, "See turns.h."},
    {"turn_after", (PyCFunction)(void (*)())turn_after, METH_FASTCALL, "See turns.h."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_scheduler", "The scheduler over raw addresses.",
                      -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__scheduler() {
  PyObject* self = PyModule_Create(&module);
  bool ok = self && PyModule_AddIntConstant(self, "STATE_VERSION", long(kVersion)) == 0 &&
            PyModule_AddIntConstant(self, "SERVING_VERSION", long(kServingVersion)) == 0 &&
            PyModule_AddIntConstant(self, "LANES_VERSION", long(kLanesVersion)) == 0;
  if (!ok) Py_CLEAR(self);
  return self;
}
