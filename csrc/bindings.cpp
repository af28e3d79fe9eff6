// Python bindings in the limited C API: argument parsing and nothing else.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "cpu.hpp"

namespace {

PyObject* simd_level(PyObject*, PyObject*) {
  return PyUnicode_FromString(sparsetopk::simd_level());
}

PyMethodDef methods[] = {
    {"simd_level", simd_level, METH_NOARGS,
     "The widest vector instruction set that this CPU supports: 'baseline', 'avx2' or 'avx512'."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_core", "The compiled core of sparsetopk.", 0, methods,
    nullptr, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__core() { return PyModule_Create(&module); }
