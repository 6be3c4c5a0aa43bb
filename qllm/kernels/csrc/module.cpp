// The host build of the scheduler as a Python module: functions over the address of a block and
// the address of the policy's compiled rank. Who calls owns both; a call takes microseconds, so
// it keeps the GIL.
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <tuple>
#include <utility>

#include "scheduler.h"

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

PyMethodDef methods[] = {
    QLLM_METHOD(start),  QLLM_METHOD(add_slots), QLLM_METHOD(rank_anew), QLLM_METHOD(add),
    QLLM_METHOD(remove), QLLM_METHOD(evict),     QLLM_METHOD(adopt),     QLLM_METHOD(new_frame),
    QLLM_METHOD(park),   QLLM_METHOD(decide),    QLLM_METHOD(done),      QLLM_METHOD(stopped),
    QLLM_METHOD(failed), {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_scheduler", "The scheduler over raw addresses.",
                      -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__scheduler() {
  PyObject* self = PyModule_Create(&module);
  if (self && PyModule_AddIntConstant(self, "VERSION", long(kVersion)) < 0) Py_CLEAR(self);
  return self;
}
