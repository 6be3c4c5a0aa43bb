// The host build of the scheduler as a Python module: functions over the address of a block and
// the address of the policy's compiled rank. Who calls owns both; a call takes microseconds, so
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

// What a function works on, made of the first arguments.
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

// (state, rank, which, number...) and (server, state, rank, which, number...): one of the functions
// above by its number, as a kernel does it.
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

// (..., threads): fill the lane of the chosen stage as so many threads would.
PyObject* turn_fill(PyObject*, PyObject* const* args, Py_ssize_t num) {
  i64 n[5];
  if (!read_numbers(args, num, n)) return nullptr;
  OwnTurns own(n);
  i32 threads = i32(n[4]);
  for (i32 thread = 0; thread < threads; thread++) own.turns.stages.clear({thread, threads});
  for (i32 thread = 0; thread < threads; thread++) own.turns.stages.write({thread, threads});
  Py_RETURN_NONE;
}

// (..., now_ns, stop): what became of the running frame.
PyObject* turn_after(PyObject*, PyObject* const* args, Py_ssize_t num) {
  i64 n[6];
  if (!read_numbers(args, num, n)) return nullptr;
  return PyLong_FromLong(OwnTurns(n).turns.after(n[4], n[5]));
}

// A turn of the whole loop (loop.h), its lane filled as by so many threads. Addresses of server,
// state, rank and lanes; now_ns, threads: the branch of the next stage, or NOTHING.
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

// -- one end of a ring (rings.h); `args[0]` is the address of its RingEnd

PyObject* ring_has_news(PyObject*, PyObject* end) {
  auto* ring = (RingEnd*)PyLong_AsVoidPtr(end);
  if (PyErr_Occurred()) return nullptr;
  return PyBool_FromLong(RingReader(ring).has_news());
}

// (end, now_ns): the next record as (kind, flags, body); None while there is none that is whole;
// False if it is broken for good.
PyObject* ring_read(PyObject*, PyObject* const* args, Py_ssize_t num) {
  if (num != 2) return PyErr_Format(PyExc_TypeError, "2 arguments, not %d", int(num));
  RingReader reader((RingEnd*)PyLong_AsVoidPtr(args[0]));
  i64 now_ns = PyLong_AsLongLong(args[1]);
  if (PyErr_Occurred()) return nullptr;
  i64 length = reader.look(now_ns);
  if (length <= 0) return Py_NewRef(length ? Py_False : Py_None);
  u64 size = u64(length) - kHeader - kTrailer;
  PyObject* body = PyBytes_FromStringAndSize(nullptr, Py_ssize_t(size));
  if (!body) return nullptr;
  reader.copy((u8*)PyBytes_AsString(body), size);
  PyObject* record = Py_BuildValue("(IIN)", reader.kind(), reader.flags(), body);
  if (record) reader.take(u64(length));
  return record;
}

// (end, kind, flags, body): 1, 0 if there is no room for it now, -1 if it is larger than the ring.
PyObject* ring_write(PyObject*, PyObject* args) {
  PyObject* end;
  unsigned kind, flags;
  const char* body;
  Py_ssize_t size;
  if (!PyArg_ParseTuple(args, "OIIy#", &end, &kind, &flags, &body, &size)) return nullptr;
  auto* ring = (RingEnd*)PyLong_AsVoidPtr(end);
  if (PyErr_Occurred()) return nullptr;
  return PyLong_FromLong(RingWriter(ring).write(kind, flags, (const u8*)body, u64(size)));
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
    {"ring_has_news", ring_has_news, METH_O, "See rings.h."},
    {"ring_read", (PyCFunction)(void (*)())ring_read, METH_FASTCALL, "See rings.h."},
    {"ring_write", ring_write, METH_VARARGS, "See rings.h."},
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
