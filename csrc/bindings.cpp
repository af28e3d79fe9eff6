// Python bindings in the limited C API: arguments, the GIL, and nothing else. Arrays come as addresses
// (of NumPy arrays and of tensors alike), checked by the callers in sparsetopk.core.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

#include "cpu.hpp"
#include "problem.hpp"

namespace {

using Address = unsigned long long;  // the "K" of PyArg_ParseTuple

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(static_cast<std::uintptr_t>(address));
}

PyObject* simd_level(PyObject*, PyObject*) {
  return PyUnicode_FromString(sparsetopk::simd_name(sparsetopk::simd_level()));
}

// The arguments that forward and backward have in common.
struct Arguments {
  int op, debias, dtype;
  double exponent;
  Py_ssize_t rows, n, row_stride, k_stride, lam_stride, threads;
  Address x, k, lam, state;

  sparsetopk::Problem problem() const {
    return {sparsetopk::Operator(op),
            exponent,
            debias != 0,
            sparsetopk::Dtype(dtype),
            std::size_t(rows),
            std::size_t(n),
            std::size_t(row_stride),
            pointer<const void>(x),
            pointer<const double>(k),
            std::size_t(k_stride),
            pointer<const double>(lam),
            std::size_t(lam_stride),
            pointer<sparsetopk::State>(state),
            std::size_t(threads)};
  }
  bool known() const {
    if (op >= 0 && op <= int(sparsetopk::Operator::two_sided) && dtype >= 0 &&
        dtype <= int(sparsetopk::Dtype::bfloat16))
      return true;
    PyErr_Format(PyExc_ValueError, "op must be in [0, 3] and dtype in [0, 3], got %d and %d", op, dtype);
    return false;
  }
};

PyObject* threshold_forward(PyObject*, PyObject* args) {
  Arguments a;
  Address y;
  if (!PyArg_ParseTuple(args, "idpinnnKKnKnKKn", &a.op, &a.exponent, &a.debias, &a.dtype, &a.rows, &a.n,
                        &a.row_stride, &a.x, &a.k, &a.k_stride, &a.lam, &a.lam_stride, &a.state, &y, &a.threads) ||
      !a.known())
    return nullptr;
  PyThreadState* state = PyEval_SaveThread();
  sparsetopk::forward(a.problem(), pointer<void>(y));
  PyEval_RestoreThread(state);
  return Py_NewRef(Py_None);
}

PyObject* threshold_backward(PyObject*, PyObject* args) {
  Arguments a;
  Address g, dx, dk, dlam;
  if (!PyArg_ParseTuple(args, "idpinnnKKnKnKKKKKn", &a.op, &a.exponent, &a.debias, &a.dtype, &a.rows, &a.n,
                        &a.row_stride, &a.x, &a.k, &a.k_stride, &a.lam, &a.lam_stride, &a.state, &g, &dx, &dk,
                        &dlam, &a.threads) ||
      !a.known())
    return nullptr;
  PyThreadState* state = PyEval_SaveThread();
  sparsetopk::backward(a.problem(), pointer<const void>(g), pointer<void>(dx), pointer<double>(dk),
                       pointer<double>(dlam));
  PyEval_RestoreThread(state);
  return Py_NewRef(Py_None);
}

PyMethodDef methods[] = {
    {"simd_level", simd_level, METH_NOARGS,
     "The vector instruction set that the kernels use: 'baseline', 'avx2' or 'avx512'."},
    {"threshold_forward", threshold_forward, METH_VARARGS,
     "threshold_forward(op, exponent, debias, dtype, rows, n, row_stride, x, k, k_stride, lam, lam_stride, state, "
     "y, threads): writes y and state; see csrc/problem.hpp."},
    {"threshold_backward", threshold_backward, METH_VARARGS,
     "threshold_backward(op, exponent, debias, dtype, rows, n, row_stride, x, k, k_stride, lam, lam_stride, state, "
     "g, dx, dk, dlam, threads): writes dx and, unless they are 0, dk and dlam."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_core", "The compiled core of sparsetopk.", 0, methods,
    nullptr, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__core() { return PyModule_Create(&module); }
