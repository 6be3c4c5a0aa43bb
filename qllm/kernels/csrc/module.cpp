// The host build of the scheduler as a Python module: functions over the address of a block and
// the address of the policy's compiled rank. Who calls owns both; a call takes microseconds, so
// it keeps the GIL.
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <tuple>
#include <utility>

#include "calls.h"
#include "rings.h"
#include "turns.h"

namespace {

using namespace qllm;

template <auto Member, class Type>
struct Function;

template <auto Member, class Result, class... A>
struct Function<Member, Result (Scheduler::*)(A...)> {
  static PyObject* call(PyObject*, PyObject* const* args, Py_ssize_t num) {
    if (num != Py_ssize_t(sizeof...(A)) + 2)
      return PyErr_Format(PyExc_TypeError, "%d arguments, not %d", int(sizeof...(A)) + 2, int(num));
    return run(args, std::index_sequence_for<A...>());
  }

 private:
  template <size_t... I>
  static PyObject* run(PyObject* const* args, std::index_sequence<I...>) {
    auto* state = (State*)PyLong_AsVoidPtr(args[0]);
    auto rank = (RankFunction)PyLong_AsVoidPtr(args[1]);
    std::tuple<A...> values{A(PyLong_AsLongLong(args[I + 2]))...};
    if (PyErr_Occurred()) return nullptr;
    Scheduler scheduler(state, rank);
    if constexpr (std::is_void_v<Result>) {
      (scheduler.*Member)(std::get<I>(values)...);
      Py_RETURN_NONE;
    } else {
      return PyLong_FromLongLong((scheduler.*Member)(std::get<I>(values)...));
    }
  }
};

#define QLLM_METHOD(name)                                                                       \
  {#name,                                                                                       \
   (PyCFunction)(void (*)())Function<&Scheduler::name, decltype(&Scheduler::name)>::call,       \
   METH_FASTCALL, "See scheduler.h."}

// (state, rank, which, number...): one of the functions above by its number, as a kernel does it.
PyObject* call_by_number(PyObject*, PyObject* const* args, Py_ssize_t num) {
  i64 numbers[kMostNumbers] = {};
  if (num < 3 || num > 3 + kMostNumbers)
    return PyErr_Format(PyExc_TypeError, "3 to %d arguments, not %d", 3 + kMostNumbers, int(num));
  auto* state = (State*)PyLong_AsVoidPtr(args[0]);
  auto rank = (RankFunction)PyLong_AsVoidPtr(args[1]);
  i64 which = PyLong_AsLongLong(args[2]);
  for (Py_ssize_t i = 3; i < num; i++) numbers[i - 3] = PyLong_AsLongLong(args[i]);
  if (PyErr_Occurred()) return nullptr;
  return PyLong_FromLongLong(call(state, rank, i32(which), numbers));
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
        turns(scheduler, (State*)n[0], (ServerState*)n[2], (Lanes*)n[3]) {}
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
    {"call", (PyCFunction)(void (*)())call_by_number, METH_FASTCALL, "See calls.h."},
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
