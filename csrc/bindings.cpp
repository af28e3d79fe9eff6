// Python bindings in the limited C API: argument parsing, the GIL, and nothing else.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <type_traits>

#include "cpu.hpp"
#include "isotonic.hpp"
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

// The arrays of these come as addresses: their callers made them, contiguous and of the right size.
template <class T>
T* address(Py_ssize_t value) {
  return reinterpret_cast<T*>(value);
}

bool check_itemsize(int itemsize) {
  if (itemsize == sizeof(float) || itemsize == sizeof(double)) return true;
  PyErr_Format(PyExc_ValueError, "itemsize must be 4 or 8, got %d", itemsize);
  return false;
}

bool check_phi(int phi) {
  if (phi >= 0 && phi <= int(sparsetopk::PhiName::exp)) return true;
  PyErr_Format(PyExc_ValueError, "phi must be in [0, %d], got %d", int(sparsetopk::PhiName::exp), phi);
  return false;
}

PyObject* solve_isotonic(PyObject*, PyObject* args) {
  int phi = 0;
  double exponent = 0;
  Py_ssize_t rows = 0, n = 0, s = 0, w = 0, lam = 0, d = 0, block = 0;
  if (!PyArg_ParseTuple(args, "idnnnnnnn", &phi, &exponent, &rows, &n, &s, &w, &lam, &d, &block)) return nullptr;
  if (!check_phi(phi)) return nullptr;
  PyThreadState* state = PyEval_SaveThread();
  sparsetopk::solve_isotonic(sparsetopk::PhiName(phi), exponent, std::size_t(rows), std::size_t(n),
                             address<const double>(s), address<const double>(w), address<const double>(lam),
                             address<double>(d), address<std::int64_t>(block));
  PyEval_RestoreThread(state);
  return Py_NewRef(Py_None);
}

PyObject* argsort_descending(PyObject*, PyObject* args) {
  int itemsize = 0;
  Py_ssize_t rows = 0, n = 0, x = 0, order = 0;
  if (!PyArg_ParseTuple(args, "innnn", &itemsize, &rows, &n, &x, &order)) return nullptr;
  if (!check_itemsize(itemsize)) return nullptr;
  PyThreadState* state = PyEval_SaveThread();
  const auto sort = [&](const auto* values) {
    sparsetopk::argsort_descending(std::size_t(rows), std::size_t(n), values, address<std::int64_t>(order));
  };
  itemsize == sizeof(float) ? sort(address<const float>(x)) : sort(address<const double>(x));
  PyEval_RestoreThread(state);
  return Py_NewRef(Py_None);
}

PyObject* solve_permutahedron(PyObject*, PyObject* args) {
  int phi = 0;
  double exponent = 0;
  Py_ssize_t n = 0, rows = 0, x_size = 0, x = 0, w_rows = 0, w_size = 0, w = 0, lam = 0, d = 0, block = 0, paired = 0;
  if (!PyArg_ParseTuple(args, "idnnnnnnnnnnn", &phi, &exponent, &n, &rows, &x_size, &x, &w_rows, &w_size, &w, &lam,
                        &d, &block, &paired))
    return nullptr;
  if (!check_phi(phi)) return nullptr;
  const auto floats = [&](Py_ssize_t data, Py_ssize_t itemsize, Py_ssize_t rows) {
    return sparsetopk::FloatRows{address<const void>(data), std::size_t(itemsize), std::size_t(rows), std::size_t(n)};
  };
  PyThreadState* state = PyEval_SaveThread();
  const bool finite = sparsetopk::solve_permutahedron(
      sparsetopk::PhiName(phi), exponent, floats(x, x_size, rows), floats(w, w_size, w_rows),
      address<const double>(lam), address<double>(d), address<std::int64_t>(block), address<std::int64_t>(paired));
  PyEval_RestoreThread(state);
  return PyBool_FromLong(finite);
}

template <class T>
sparsetopk::Saved<T> saved(Py_ssize_t order, Py_ssize_t first, Py_ssize_t w_order, Py_ssize_t d) {
  return {address<std::uint32_t>(order), address<std::uint32_t>(first), address<std::uint32_t>(w_order),
          address<T>(d)};
}

PyObject* permutahedron_forward(PyObject*, PyObject* args) {
  double exponent = 0;
  int itemsize = 0;
  Py_ssize_t rows = 0, n = 0, x = 0, w_rows = 0, w_size = 0, w = 0, lam = 0, y = 0;
  Py_ssize_t order = 0, first = 0, w_order = 0, d = 0;
  if (!PyArg_ParseTuple(args, "dinnnnnnnnnnnn", &exponent, &itemsize, &rows, &n, &x, &w_rows, &w_size, &w, &lam, &y,
                        &order, &first, &w_order, &d))
    return nullptr;
  if (!check_itemsize(itemsize)) return nullptr;
  const sparsetopk::FloatRows weights{address<const void>(w), std::size_t(w_size), std::size_t(w_rows),
                                      std::size_t(n)};
  PyThreadState* state = PyEval_SaveThread();
  const auto run = [&](auto* out) {
    using T = std::decay_t<decltype(*out)>;
    return sparsetopk::permutahedron_forward<T>(exponent, std::size_t(rows), std::size_t(n), address<const T>(x),
                                                weights, address<const double>(lam), out,
                                                saved<T>(order, first, w_order, d));
  };
  const bool finite = itemsize == sizeof(float) ? run(address<float>(y)) : run(address<double>(y));
  PyEval_RestoreThread(state);
  return PyBool_FromLong(finite);
}

PyObject* permutahedron_backward(PyObject*, PyObject* args) {
  double exponent = 0, floor = 0;
  int itemsize = 0, single_w = 0;
  Py_ssize_t rows = 0, n = 0, order = 0, first = 0, w_order = 0, d = 0, lam = 0, dy = 0, dx = 0, dw = 0, dlam = 0;
  if (!PyArg_ParseTuple(args, "dinnnnnnnnnnpnd", &exponent, &itemsize, &rows, &n, &order, &first, &w_order, &d, &lam,
                        &dy, &dx, &dw, &single_w, &dlam, &floor))
    return nullptr;
  if (!check_itemsize(itemsize)) return nullptr;
  PyThreadState* state = PyEval_SaveThread();
  const auto run = [&](auto* out) {
    using T = std::decay_t<decltype(*out)>;
    sparsetopk::permutahedron_backward<T>(exponent, std::size_t(rows), std::size_t(n),
                                          saved<T>(order, first, w_order, d), address<const double>(lam),
                                          address<const T>(dy), out, address<double>(dw), single_w != 0,
                                          address<double>(dlam), floor);
  };
  itemsize == sizeof(float) ? run(address<float>(dx)) : run(address<double>(dx));
  PyEval_RestoreThread(state);
  return Py_NewRef(Py_None);
}

PyMethodDef methods[] = {
    {"simd_level", simd_level, METH_NOARGS,
     "The widest vector instruction set that this CPU supports: 'baseline', 'avx2' or 'avx512'."},
    {"solve_threshold", solve_threshold, METH_VARARGS,
     "solve_threshold(op, exponent, rows, n, x, k, lam, out): (pivot, delta, residual) of every row, into out."},
    {"solve_isotonic", solve_isotonic, METH_VARARGS,
     "solve_isotonic(phi, exponent, rows, n, s, w, lam, d, block): d and the first entry of every entry's block, "
     "for s and w in decreasing order; all arrays by address."},
    {"argsort_descending", argsort_descending, METH_VARARGS,
     "argsort_descending(itemsize, rows, n, x, order): the stable order of float32 or float64 rows; by address."},
    {"solve_permutahedron", solve_permutahedron, METH_VARARGS,
     "solve_permutahedron(phi, exponent, n, rows, x_itemsize, x, w_rows, w_itemsize, w, lam, d, block, paired): d, "
     "block and the index into w of every entry of x, for rows in any order, and whether all entries are finite; all "
     "arrays by address."},
    {"permutahedron_forward", permutahedron_forward, METH_VARARGS,
     "permutahedron_forward(exponent, itemsize, rows, n, x, w_rows, w_itemsize, w, lam, y, order, first, w_order, d): y "
     "of rows in any order and what its derivatives need, in sorted order, and whether all entries are finite; all "
     "arrays by address, 0 for those that are not wanted."},
    {"permutahedron_backward", permutahedron_backward, METH_VARARGS,
     "permutahedron_backward(exponent, itemsize, rows, n, order, first, w_order, d, lam, dy, dx, dw, single_w, dlam, "
     "floor): the cotangents of x, w and lam; all arrays by address, 0 for one that is not wanted."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_core", "The compiled core of sparsetopk.", 0, methods,
    nullptr, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__core() { return PyModule_Create(&module); }
