// Python bindings in the limited C API: argument parsing, the GIL, and nothing else.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "cpu.hpp"
#include "solve.hpp"

namespace {

// A contiguous buffer of doubles, released at the end of its scope.
struct Doubles {
  Py_buffer view{};
  bool held = false;
  bool take(PyObject* object, int flags, Py_ssize_t expected, const char* name) {
    if (PyObject_GetBuffer(object, &view, flags | PyBUF_C_CONTIGUOUS) != 0) return false;
    held = true;
    if (view.len == expected * Py_ssize_t(sizeof(double)) && view.itemsize == sizeof(double)) return true;
    PyErr_Format(PyExc_ValueError, "%s must hold %zd doubles, got %zd bytes", name, expected, view.len);
    return false;
  }
  ~Doubles() {
    if (held) PyBuffer_Release(&view);
  }
};

PyObject* simd_level(PyObject*, PyObject*) { return PyUnicode_FromString(sparsetopk::simd_level()); }

PyObject* solve_threshold(PyObject*, PyObject* args) {
  int op = 0;
  double exponent = 0;
  Py_ssize_t rows = 0, n = 0;
  PyObject *x_object, *k_object, *lam_object, *out_object;
  if (!PyArg_ParseTuple(args, "idnnOOOO", &op, &exponent, &rows, &n, &x_object, &k_object, &lam_object,
                        &out_object))
    return nullptr;
  if (op < 0 || op > int(sparsetopk::Operator::two_sided)) {
    PyErr_Format(PyExc_ValueError, "op must be in [0, %d], got %d", int(sparsetopk::Operator::two_sided), op);
    return nullptr;
  }
  Doubles x, k, lam, out;
  if (!x.take(x_object, PyBUF_SIMPLE, rows * n, "x") || !k.take(k_object, PyBUF_SIMPLE, rows, "k") ||
      !lam.take(lam_object, PyBUF_SIMPLE, rows, "lam") || !out.take(out_object, PyBUF_WRITABLE, 3 * rows, "out"))
    return nullptr;
  PyThreadState* state = PyEval_SaveThread();
  sparsetopk::solve_rows(sparsetopk::Operator(op), exponent, static_cast<const double*>(x.view.buf),
                         std::size_t(rows), std::size_t(n), static_cast<const double*>(k.view.buf),
                         static_cast<const double*>(lam.view.buf),
                         static_cast<sparsetopk::Threshold*>(out.view.buf));
  PyEval_RestoreThread(state);
  return Py_NewRef(Py_None);
}

PyMethodDef methods[] = {
    {"simd_level", simd_level, METH_NOARGS,
     "The widest vector instruction set that this CPU supports: 'baseline', 'avx2' or 'avx512'."},
    {"solve_threshold", solve_threshold, METH_VARARGS,
     "solve_threshold(op, exponent, rows, n, x, k, lam, out): (pivot, delta, residual) of every row, into out."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_core", "The compiled core of sparsetopk.", 0, methods,
    nullptr, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__core() { return PyModule_Create(&module); }
