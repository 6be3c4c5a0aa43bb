// The Python module: functions over raw addresses. The caller owns the memory; the GIL is free
// while a kernel runs.
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <tuple>
#include <utility>

#include "course.h"
#include "kernels.h"
#include "pool.h"
#include "ranks.h"
#include "sweep.h"

namespace {

using namespace qllm;

const Kernels* kernels = &kPortable;

template <class T>
struct Argument {  // integers
  static T of(PyObject* x) { return T(PyLong_AsLongLong(x)); }
};
template <class T>
struct Argument<T*> {  // addresses, 0 is null
  static T* of(PyObject* x) { return (T*)PyLong_AsLongLong(x); }
};
template <class T>
struct Argument<const T&> {  // addresses of structs
  static const T& of(PyObject* x) { return *(const T*)PyLong_AsLongLong(x); }
};
template <>
struct Argument<float> {
  static float of(PyObject* x) { return float(PyFloat_AsDouble(x)); }
};

// Calls `body` with the arguments, without the GIL.
template <class... A, class Body, size_t... I>
PyObject* called(PyObject* const* args, Py_ssize_t num, const Body& body,
                 std::index_sequence<I...>) {
  if (num != Py_ssize_t(sizeof...(A)))
    return PyErr_Format(PyExc_TypeError, "%d arguments, not %d", int(sizeof...(A)), int(num));
  std::tuple<A...> values{Argument<A>::of(args[I])...};
  if (PyErr_Occurred()) return nullptr;
  PyThreadState* state = PyEval_SaveThread();
  body(std::get<I>(values)...);
  PyEval_RestoreThread(state);
  Py_RETURN_NONE;
}

template <auto Value, class Type>
struct Function;

template <auto Member, class... A>
struct Function<Member, void (*Kernels::*)(A...)> {
  static PyObject* call(PyObject*, PyObject* const* args, Py_ssize_t num) {
    return called<A...>(args, num, kernels->*Member, std::index_sequence_for<A...>());
  }
};

template <auto Free, class... A>
struct Function<Free, void (*)(const Kernels&, A...)> {
  static PyObject* call(PyObject*, PyObject* const* args, Py_ssize_t num) {
    auto body = [](A... values) { Free(*kernels, values...); };
    return called<A...>(args, num, body, std::index_sequence_for<A...>());
  }
};

#if defined(__x86_64__)
// True if the processor has tiles and Linux lets this process use them. Their registers are large,
// so a process must ask.
bool has_tiles() {
#if defined(__linux__)
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  constexpr unsigned kNeeded = 1u << 22 | 1u << 24 | 1u << 25;  // bf16, tiles, bytes
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kNeeded) != kNeeded) return false;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}
#endif

bool supported(const Kernels* k) {
#if defined(__x86_64__)
  bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  bool halves = wide && __builtin_cpu_supports("avx512bf16") &&
                __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
  if (k == &kAmx) return halves && has_tiles();
  if (k == &kAvx512Bf16) return halves;
  if (k == &kAvx512) return wide;
  if (k == &kAvx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return k == &kPortable || k == &kAmxEmulated;
}

const Kernels* const kAll[] = {
#if defined(__x86_64__)
    &kAmx, &kAvx512Bf16, &kAvx512, &kAvx2,
#endif
    &kPortable, &kAmxEmulated};

PyObject* available(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  for (const Kernels* k : kAll) {
    if (!names || !supported(k)) continue;
    PyObject* name = PyUnicode_FromString(k->name);
    if (!name || PyList_Append(names, name)) Py_CLEAR(names);
    Py_XDECREF(name);
  }
  return names;
}

PyObject* use(PyObject*, PyObject* name) {
  PyObject* bytes = PyUnicode_AsUTF8String(name);
  if (!bytes) return nullptr;
  const char* text = PyBytes_AsString(bytes);
  bool found = false;
  for (const Kernels* k : kAll)
    if (text && !strcmp(k->name, text) && supported(k)) {
      kernels = k;
      found = true;
    }
  Py_DECREF(bytes);
  if (!found) return PyErr_Format(PyExc_ValueError, "this machine has no %R kernels", name);
  Py_RETURN_NONE;
}

PyObject* threads(PyObject*, PyObject* number) {
  long count = PyLong_AsLong(number);
  if (PyErr_Occurred()) return nullptr;
  if (count < 1) return PyErr_Format(PyExc_ValueError, "%ld threads; at least 1", count);
  PyThreadState* state = PyEval_SaveThread();
  set_threads(int(count));
  PyEval_RestoreThread(state);
  Py_RETURN_NONE;
}

PyObject* new_course(PyObject*, PyObject*) {
  return PyLong_FromLongLong((long long)(intptr_t)(new Course));
}

PyObject* delete_course(PyObject*, PyObject* address) {
  auto course = (Course*)(intptr_t)PyLong_AsLongLong(address);
  if (PyErr_Occurred()) return nullptr;
  delete course;
  Py_RETURN_NONE;
}

// Copies of at most so many bytes keep the GIL: they take less time than waiting to get it back.
constexpr int64_t kShort = 1 << 18;

PyObject* copy_rows(PyObject*, PyObject* const* args, Py_ssize_t num) {
  if (num != 5) return PyErr_Format(PyExc_TypeError, "5 arguments, not %d", int(num));
  long long given[5];
  for (int i = 0; i < 5; i++) given[i] = PyLong_AsLongLong(args[i]);
  if (PyErr_Occurred()) return nullptr;
  char *to = (char*)given[0], *table = (char*)given[1];
  const int64_t *numbers = (const int64_t*)given[2], rows = given[3], bytes = given[4];
  PyThreadState* state = rows * bytes > kShort ? PyEval_SaveThread() : nullptr;
  for (int64_t i = 0; i < rows; i++) memcpy(to + i * bytes, table + numbers[i] * bytes, bytes);
  if (state) PyEval_RestoreThread(state);
  Py_RETURN_NONE;
}

#define QLLM_FUNCTION(name, value, header) \
  {#name, (PyCFunction)(void (*)())Function<value, decltype(value)>::call, METH_FASTCALL, header}
#define QLLM_KERNEL(name) QLLM_FUNCTION(name, &Kernels::name, "See kernels.h.")

PyMethodDef methods[] = {
    {"available", available, METH_NOARGS, "Names of what this machine can run, best first."},
    {"use", use, METH_O, "Choose kernels by name."},
    {"threads", threads, METH_O, "Set the number of threads."},
    QLLM_KERNEL(pack),
    QLLM_KERNEL(unpack),
    QLLM_KERNEL(pack8),
    QLLM_KERNEL(unpack8),
    QLLM_KERNEL(dequantise),
    QLLM_KERNEL(linear),
    QLLM_KERNEL(norm),
    QLLM_KERNEL(attend_in),
    QLLM_KERNEL(place_heads),
    QLLM_KERNEL(attend),
    QLLM_KERNEL(latents_in),
    QLLM_KERNEL(latents_out),
    QLLM_KERNEL(delta),
    QLLM_KERNEL(route),
    QLLM_KERNEL(experts),
    QLLM_KERNEL(experts_in),
    QLLM_KERNEL(experts_out),
    QLLM_KERNEL(mlp),
    QLLM_KERNEL(swiglu),
    QLLM_KERNEL(combine),
    QLLM_KERNEL(add),
    QLLM_KERNEL(gate),
    QLLM_KERNEL(best),
    QLLM_KERNEL(mask),
    QLLM_KERNEL(sample),
    QLLM_FUNCTION(pack_codes, &pack_codes, "See kernels.h."),
    QLLM_FUNCTION(sweep, &sweep, "See sweep.h."),
    QLLM_FUNCTION(head, &head, "See sweep.h."),
    QLLM_FUNCTION(serve, &serve, "See group.h."),
    QLLM_FUNCTION(call_ranks, &call_ranks, "See group.h."),
    QLLM_FUNCTION(meet, &meet, "See group.h."),
    QLLM_FUNCTION(free_desks, &free_desks, "See group.h."),
    {"new_course", new_course, METH_NOARGS, "Address of a new course: see course.h."},
    {"delete_course", delete_course, METH_O, "Free a course and its memory."},
    {"copy_rows", (PyCFunction)(void (*)())copy_rows, METH_FASTCALL,
     "Copy rows of a table: to, table, their numbers, how many, bytes of one."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", "CPU kernels over raw addresses.", -1,
                      methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
  for (const Kernels* k : kAll)
    if (supported(k)) {
      kernels = k;
      break;
    }
  return PyModule_Create(&module);
}
