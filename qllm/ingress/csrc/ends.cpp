// The ends of rings as a Python module, for machines whose stores become visible in any order: the
// records of rings.h, and single words of shared memory. Who calls owns the memory; a call takes
// less than a microsecond per hundred bytes, so it keeps the GIL.
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "rings.h"

namespace {

using namespace qllm;

// -- one end of a ring; the first argument is the address of its RingEnd

PyObject* has_news(PyObject*, PyObject* end) {
  auto* ring = (RingEnd*)PyLong_AsVoidPtr(end);
  if (PyErr_Occurred()) return nullptr;
  return PyBool_FromLong(RingReader(ring).has_news());
}

// (end, now_ns): the next record as (kind, flags, body); None while there is none that is whole;
// False if it is broken for good.
PyObject* read(PyObject*, PyObject* const* args, Py_ssize_t num) {
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
PyObject* write(PyObject*, PyObject* args) {
  PyObject* end;
  unsigned kind, flags;
  const char* body;
  Py_ssize_t size;
  if (!PyArg_ParseTuple(args, "OIIy#", &end, &kind, &flags, &body, &size)) return nullptr;
  auto* ring = (RingEnd*)PyLong_AsVoidPtr(end);
  if (PyErr_Occurred()) return nullptr;
  return PyLong_FromLong(RingWriter(ring).write(kind, flags, (const u8*)body, u64(size)));
}

// -- a word of shared memory by its address

PyObject* load(PyObject*, PyObject* address) {
  auto* word = (const u64*)PyLong_AsVoidPtr(address);
  if (PyErr_Occurred()) return nullptr;
  return PyLong_FromUnsignedLongLong(load_acquire(word));
}

// (address, value)
PyObject* store(PyObject*, PyObject* const* args, Py_ssize_t num) {
  if (num != 2) return PyErr_Format(PyExc_TypeError, "2 arguments, not %d", int(num));
  auto* word = (u64*)PyLong_AsVoidPtr(args[0]);
  u64 value = PyLong_AsUnsignedLongLong(args[1]);
  if (PyErr_Occurred()) return nullptr;
  store_release(word, value);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"has_news", has_news, METH_O, "Whether the next record, or its beginning, is there."},
    {"read", (PyCFunction)(void (*)())read, METH_FASTCALL, "Take the next record."},
    {"write", write, METH_VARARGS, "Write one record."},
    {"load", load, METH_O, "Load a word with acquire."},
    {"store", (PyCFunction)(void (*)())store, METH_FASTCALL, "Store a word with release."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_ends", "Ends of rings over raw addresses.",
                      -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__ends() { return PyModule_Create(&module); }
