// Python bindings in the limited C API: arguments, the GIL, and nothing else. Arrays come as addresses
// (of NumPy arrays and of tensors alike), checked by the callers in sparsetopk._core.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>

#include "cpu.hpp"
#include "ffi.hpp"
#include "isotonic.hpp"
#include "lam.hpp"
#include "parallel.hpp"
#include "pieces.hpp"
#include "problem.hpp"
#include "selection.hpp"

namespace {

using Address = unsigned long long;  // the "K" of PyArg_ParseTuple

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(static_cast<std::uintptr_t>(address));
}

// Whether the lengths make sense together, and every address is one, unless there is nothing at it. That memory is as
// long as they say is for the callers to see to.
bool sound(std::initializer_list<Py_ssize_t> lengths, std::initializer_list<Address> addresses) {
  Py_ssize_t room = std::numeric_limits<Py_ssize_t>::max() / Py_ssize_t(sizeof(double));
  bool empty = false;
  for (const Py_ssize_t length : lengths) {
    empty |= length == 0;
    if (length > 0) room /= length;
    if (length >= 0 && room > 0) continue;
    PyErr_Format(PyExc_ValueError, "lengths must be at least 0 and fit memory, got %zd", length);
    return false;
  }
  for (const Address address : addresses)
    if (address == 0 && !empty) {
      PyErr_SetString(PyExc_ValueError, "the address of an array must not be 0");
      return false;
    }
  return true;
}

// Thrown where a signal has left an exception of Python, as Ctrl-C does.
struct Interrupted {};

// f() while other threads of Python run. Its lock is back afterwards, however f ends; and in a long f now and then, to
// look for signals.
template <class F>
auto without_lock(F&& f) {
  struct Lock {
    PyThreadState* state = PyEval_SaveThread();
    ~Lock() { PyEval_RestoreThread(state); }
    static void look(void* self) {
      Lock& lock = *static_cast<Lock*>(self);
      PyEval_RestoreThread(lock.state);
      const bool interrupted = PyErr_CheckSignals() != 0;
      lock.state = PyEval_SaveThread();
      if (interrupted) throw Interrupted{};
    }
  } lock;
  const sparsetopk::Watch watch(Lock::look, &lock);
  return f();
}

// An entry of the method table: Python must never see an exception of C++, which would end it.
template <PyCFunction function>
PyObject* translated(PyObject* self, PyObject* args) {
  try {
    return function(self, args);
  } catch (const Interrupted&) {
    return nullptr;
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  } catch (const std::length_error&) {  // more than a vector may ever hold
    return PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyObject* simd_level(PyObject*, PyObject*) {
  return PyUnicode_FromString(sparsetopk::simd_name(sparsetopk::simd_level()));
}

PyObject* entries_read(PyObject*, PyObject*) { return PyLong_FromUnsignedLongLong(sparsetopk::entries_read()); }

// What _core/layout.py writes down as well: it compares, when it is imported.
PyObject* layout(PyObject*, PyObject*) {
  using sparsetopk::Dtype;
  using sparsetopk::Operator;
  using sparsetopk::Piece;
  return Py_BuildValue("{s:(nnnnnnnnn), s:n, s:n, s:n, s:n, s:(iiii), s:(iiii)}", "piece",
                       Py_ssize_t(offsetof(Piece, x)), Py_ssize_t(offsetof(Piece, out)), Py_ssize_t(offsetof(Piece, g)),
                       Py_ssize_t(offsetof(Piece, n)), Py_ssize_t(offsetof(Piece, dtype)),
                       Py_ssize_t(offsetof(Piece, kept)), Py_ssize_t(offsetof(Piece, room)),
                       Py_ssize_t(offsetof(Piece, beside)), Py_ssize_t(offsetof(Piece, left)), "piece_size",
                       Py_ssize_t(sizeof(Piece)), "buckets", Py_ssize_t(sparsetopk::kBuckets), "fewest",
                       Py_ssize_t(sparsetopk::kFewest), "block_sums", Py_ssize_t(sparsetopk::kBlockSums), "dtypes",
                       int(Dtype::float32), int(Dtype::float64), int(Dtype::float16), int(Dtype::bfloat16), "operators",
                       int(Operator::mask), int(Operator::magnitude), int(Operator::sign), int(Operator::two_sided));
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
  // Whether they make sense; ``others`` are further arrays, and the state unless it may be 0.
  bool known(std::initializer_list<Address> others) const {
    if (!sound({rows, n}, {x, k, lam}) || !sound({rows, n}, others)) return false;
    if (row_stride < 0 || k_stride < 0 || lam_stride < 0 || threads < 0) {
      PyErr_SetString(PyExc_ValueError, "strides and threads must be at least 0");
      return false;
    }
    if (!(exponent > 0 && exponent < HUGE_VAL)) {
      PyErr_SetString(PyExc_ValueError, "exponent must be a positive number");
      return false;
    }
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
  if (!PyArg_ParseTuple(args, "idpinnnKKnKnKKn", &a.op, &a.exponent, &a.debias, &a.dtype, &a.rows, &a.n, &a.row_stride,
                        &a.x, &a.k, &a.k_stride, &a.lam, &a.lam_stride, &a.state, &y, &a.threads) ||
      !a.known({y}))
    return nullptr;
  sparsetopk::Problem problem = a.problem();
  std::unique_ptr<sparsetopk::State[]> unwanted;
  if (problem.state == nullptr) unwanted.reset(problem.state = new sparsetopk::State[problem.rows]);
  without_lock([&] { sparsetopk::forward(problem, pointer<void>(y)); });
  return Py_NewRef(Py_None);
}

PyObject* threshold_backward(PyObject*, PyObject* args) {
  Arguments a;
  Address g, dx, dk, dlam;
  if (!PyArg_ParseTuple(args, "idpinnnKKnKnKKKKKn", &a.op, &a.exponent, &a.debias, &a.dtype, &a.rows, &a.n,
                        &a.row_stride, &a.x, &a.k, &a.k_stride, &a.lam, &a.lam_stride, &a.state, &g, &dx, &dk, &dlam,
                        &a.threads) ||
      !a.known({a.state, g, dx}))
    return nullptr;
  without_lock([&] {
    sparsetopk::backward(a.problem(), pointer<const void>(g), pointer<void>(dx), pointer<double>(dk),
                         pointer<double>(dlam));
  });
  return Py_NewRef(Py_None);
}

// What every pass over pieces begins with: their address, their number, and the threads.
struct PieceArguments {
  Address begin = 0;
  Py_ssize_t count = 0, threads = 0;
  bool known(std::initializer_list<Address> others = {}) const {
    return sound({count}, {begin}) && sound({threads + 1}, others);
  }
  sparsetopk::Pieces pieces() const {
    return {pointer<sparsetopk::Piece>(begin), std::size_t(count), std::size_t(threads)};
  }
};

// And then, for most of them, the row.
struct SpreadArguments : PieceArguments {
  double exponent = 0, k = 0, lam = 0, pivot = 0, delta = 0;
  int debias = 0, is_long = 0;
  sparsetopk::Spread row() const { return {exponent, debias != 0, k, lam, {pivot, delta}, is_long != 0}; }
};

PyObject* pieces_gather(PyObject*, PyObject* args) {
  PieceArguments a;
  sparsetopk::Bounds bounds{};
  int is_long = 0;
  if (!PyArg_ParseTuple(args, "Knnddddp", &a.begin, &a.count, &a.threads, &bounds.from, &bounds.to, &bounds.lo,
                        &bounds.hi, &is_long) ||
      !a.known())
    return nullptr;
  bounds.is_long = is_long != 0;
  const sparsetopk::Counts counts = without_lock([&] { return sparsetopk::gather(a.pieces(), bounds); });
  return Py_BuildValue("LLLL", counts.over, counts.over_hi, counts.from_lo, counts.invalid);
}

PyObject* pieces_ties(PyObject*, PyObject* args) {
  PieceArguments a;
  double size = 0;
  Address counts = 0;
  if (!PyArg_ParseTuple(args, "KnndK", &a.begin, &a.count, &a.threads, &size, &counts) || !a.known({counts}))
    return nullptr;
  without_lock([&] { sparsetopk::ties(a.pieces(), size, pointer<std::int64_t>(counts)); });
  return Py_NewRef(Py_None);
}

PyObject* pieces_histogram(PyObject*, PyObject* args) {
  PieceArguments a;
  Address first = 0, last = 0, counts = 0;
  int shift = 0;
  if (!PyArg_ParseTuple(args, "KnnKKiK", &a.begin, &a.count, &a.threads, &first, &last, &shift, &counts) ||
      !a.known({counts}))
    return nullptr;
  if (shift < 0 || shift > 63 || (last - first) >> shift >= sparsetopk::kBuckets) {
    PyErr_Format(PyExc_ValueError, "shift must leave at most %d buckets, got %d", int(sparsetopk::kBuckets), shift);
    return nullptr;
  }
  without_lock([&] { sparsetopk::histogram(a.pieces(), first, last, shift, pointer<std::int64_t>(counts)); });
  return Py_NewRef(Py_None);
}

PyObject* pieces_neighbours(PyObject*, PyObject* args) {
  PieceArguments a;
  double cut = 0;
  if (!PyArg_ParseTuple(args, "Knnd", &a.begin, &a.count, &a.threads, &cut) || !a.known()) return nullptr;
  const sparsetopk::Neighbours found = without_lock([&] { return sparsetopk::neighbours(a.pieces(), cut); });
  return Py_BuildValue("dd", found.above, found.below);
}

PyObject* pieces_masses(PyObject*, PyObject* args) {
  SpreadArguments a;
  if (!PyArg_ParseTuple(args, "Knndpddddp", &a.begin, &a.count, &a.threads, &a.exponent, &a.debias, &a.k, &a.lam,
                        &a.pivot, &a.delta, &a.is_long) ||
      !a.known())
    return nullptr;
  const sparsetopk::Masses found = without_lock([&] { return sparsetopk::masses(a.pieces(), a.row()); });
  return Py_BuildValue("ddd", found.mass, found.slope, found.above);
}

PyObject* pieces_apply(PyObject*, PyObject* args) {
  SpreadArguments a;
  if (!PyArg_ParseTuple(args, "Knndpddddp", &a.begin, &a.count, &a.threads, &a.exponent, &a.debias, &a.k, &a.lam,
                        &a.pivot, &a.delta, &a.is_long) ||
      !a.known())
    return nullptr;
  without_lock([&] { sparsetopk::apply(a.pieces(), a.row()); });
  return Py_NewRef(Py_None);
}

PyObject* pieces_block_sums(PyObject*, PyObject* args) {
  SpreadArguments a;
  Address sums = 0;
  if (!PyArg_ParseTuple(args, "KnndpddddpK", &a.begin, &a.count, &a.threads, &a.exponent, &a.debias, &a.k, &a.lam,
                        &a.pivot, &a.delta, &a.is_long, &sums) ||
      !a.known({sums}))
    return nullptr;
  without_lock([&] { sparsetopk::block_sums(a.pieces(), a.row(), pointer<double>(sums)); });
  return Py_NewRef(Py_None);
}

PyObject* pieces_cotangents(PyObject*, PyObject* args) {
  SpreadArguments a;
  Address sums = 0;
  if (!PyArg_ParseTuple(args, "KnndpddddpK", &a.begin, &a.count, &a.threads, &a.exponent, &a.debias, &a.k, &a.lam,
                        &a.pivot, &a.delta, &a.is_long, &sums) ||
      !a.known({sums}))
    return nullptr;
  const double in_lam =
      without_lock([&] { return sparsetopk::cotangents(a.pieces(), a.row(), pointer<const double>(sums)); });
  return PyFloat_FromDouble(in_lam);
}

// How many rows count; -1 - i if row i has a label that is no class.
Py_ssize_t count_rows(const sparsetopk::Problem& problem, const sparsetopk::Targets& targets) {
  if (targets.labels == nullptr) return Py_ssize_t(problem.rows);
  Py_ssize_t count = 0;
  for (std::size_t i = 0; i < problem.rows; ++i) {
    const std::int64_t label = targets.labels[i];
    if (label == targets.ignored) continue;
    if (label < 0 || std::size_t(label) >= problem.n) return -1 - Py_ssize_t(i);
    ++count;
  }
  return count;
}

PyObject* threshold_loss(PyObject*, PyObject* args) {
  Arguments a;
  Address labels, weights, y, value;
  long long ignored = 0;
  int spread = 0, mean = 0;
  if (!PyArg_ParseTuple(args, "idpinnnKKnKnKKLpKpKKn", &a.op, &a.exponent, &a.debias, &a.dtype, &a.rows, &a.n,
                        &a.row_stride, &a.x, &a.k, &a.k_stride, &a.lam, &a.lam_stride, &a.state, &labels, &ignored,
                        &spread, &weights, &mean, &y, &value, &a.threads) ||
      !a.known({a.state, y, value}))
    return nullptr;
  const sparsetopk::Problem problem = a.problem();
  sparsetopk::Targets targets{pointer<const std::int64_t>(labels), ignored, spread != 0,
                              pointer<const double>(weights)};
  const Py_ssize_t count = without_lock([&] {
    const Py_ssize_t found = count_rows(problem, targets);
    if (mean != 0 && found > 0) targets.scale = 1 / double(found);
    if (found >= 0) sparsetopk::loss(problem, targets, pointer<void>(y), pointer<double>(value));
    return found;
  });
  double total = 0;
  for (Py_ssize_t i = 0; count >= 0 && i < a.rows; ++i) total += pointer<const double>(value)[i];
  return Py_BuildValue("nd", count, total);
}

PyObject* select_slots(PyObject*, PyObject* args) {
  int dtype = 0;
  Py_ssize_t rows = 0, n = 0, capacity = 0;
  Address y, indices;
  if (!PyArg_ParseTuple(args, "innKnK", &dtype, &rows, &n, &y, &capacity, &indices) || !sound({rows, n}, {y, indices}))
    return nullptr;
  if (dtype < 0 || dtype > int(sparsetopk::Dtype::bfloat16) || capacity < 1 || capacity > n) {
    PyErr_Format(PyExc_ValueError, "dtype must be in [0, 3] and capacity in [1, n], got %d and %zd", dtype, capacity);
    return nullptr;
  }
  without_lock([&] {
    sparsetopk::select_slots(sparsetopk::Dtype(dtype), std::size_t(rows), std::size_t(n), pointer<const void>(y),
                             std::size_t(capacity), pointer<std::int64_t>(indices));
  });
  return Py_NewRef(Py_None);
}

PyObject* choose_lam(PyObject*, PyObject* args) {
  Arguments a{};
  Address lam = 0;
  Py_ssize_t fractional = 0;
  double least = 0;
  if (!PyArg_ParseTuple(args, "idinnnKKnndKn", &a.op, &a.exponent, &a.dtype, &a.rows, &a.n, &a.row_stride, &a.x, &a.k,
                        &a.k_stride, &fractional, &least, &lam, &a.threads))
    return nullptr;
  a.lam = lam;
  if (!a.known({lam})) return nullptr;
  if (a.op == int(sparsetopk::Operator::sign) || fractional < 1 || fractional > a.n || !(least > 0 && least < 1)) {
    PyErr_SetString(PyExc_ValueError, "op must have no signs, fractional be in [1, n] and least in (0, 1)");
    return nullptr;
  }
  without_lock([&] { sparsetopk::choose_lam(a.problem(), std::size_t(fractional), least, pointer<double>(lam)); });
  return Py_NewRef(Py_None);
}

bool check_itemsize(int itemsize) {
  if (itemsize == sizeof(float) || itemsize == sizeof(double)) return true;
  PyErr_Format(PyExc_ValueError, "itemsize must be 4 or 8, got %d", itemsize);
  return false;
}

bool one_or_all(Py_ssize_t given, Py_ssize_t rows) {
  if (given == 1 || given == rows) return true;
  PyErr_Format(PyExc_ValueError, "x and w must have one row or %zd, got %zd", rows, given);
  return false;
}

bool check_phi(int phi) {
  if (phi >= 0 && phi <= int(sparsetopk::PhiName::exp)) return true;
  PyErr_Format(PyExc_ValueError, "phi must be in [0, %d], got %d", int(sparsetopk::PhiName::exp), phi);
  return false;
}

sparsetopk::FloatRows floats(Py_ssize_t data, Py_ssize_t itemsize, Py_ssize_t rows, Py_ssize_t n) {
  return {pointer<const void>(data), std::size_t(itemsize), std::size_t(rows), std::size_t(n)};
}

PyObject* solve_isotonic(PyObject*, PyObject* args) {
  int phi = 0;
  double exponent = 0;
  Py_ssize_t rows = 0, n = 0, s = 0, w = 0, lam = 0, d = 0, block = 0;
  if (!PyArg_ParseTuple(args, "idnnnnnnn", &phi, &exponent, &rows, &n, &s, &w, &lam, &d, &block)) return nullptr;
  if (!check_phi(phi) || !sound({rows, n}, {Address(s), Address(w), Address(lam), Address(d), Address(block)}))
    return nullptr;
  without_lock([&] {
    sparsetopk::solve_isotonic(sparsetopk::PhiName(phi), exponent, std::size_t(rows), std::size_t(n),
                               pointer<const double>(s), pointer<const double>(w), pointer<const double>(lam),
                               pointer<double>(d), pointer<std::int64_t>(block));
  });
  return Py_NewRef(Py_None);
}

PyObject* argsort_descending(PyObject*, PyObject* args) {
  int itemsize = 0;
  Py_ssize_t rows = 0, n = 0, x = 0, order = 0;
  if (!PyArg_ParseTuple(args, "innnn", &itemsize, &rows, &n, &x, &order)) return nullptr;
  if (!check_itemsize(itemsize) || !sound({rows, n}, {Address(x), Address(order)})) return nullptr;
  without_lock([&] {
    const auto sort = [&](const auto* values) {
      sparsetopk::argsort_descending(std::size_t(rows), std::size_t(n), values, pointer<std::int64_t>(order));
    };
    itemsize == sizeof(float) ? sort(pointer<const float>(x)) : sort(pointer<const double>(x));
  });
  return Py_NewRef(Py_None);
}

PyObject* solve_permutahedron(PyObject*, PyObject* args) {
  int phi = 0;
  double exponent = 0;
  Py_ssize_t n = 0, rows = 0, x_size = 0, x = 0, w_rows = 0, w_size = 0, w = 0, lam = 0, d = 0, block = 0, paired = 0;
  Py_ssize_t threads = 1;
  if (!PyArg_ParseTuple(args, "idnnnnnnnnnnnn", &phi, &exponent, &n, &rows, &x_size, &x, &w_rows, &w_size, &w, &lam, &d,
                        &block, &paired, &threads))
    return nullptr;
  if (!check_phi(phi) || !check_itemsize(int(x_size)) || !check_itemsize(int(w_size)) || !one_or_all(w_rows, rows) ||
      !sound({rows, n}, {Address(x), Address(w), Address(lam), Address(d), Address(block), Address(paired)}) ||
      !sound({threads}, {}))
    return nullptr;
  const bool finite = without_lock([&] {
    return sparsetopk::solve_permutahedron(sparsetopk::PhiName(phi), exponent, floats(x, x_size, rows, n),
                                           floats(w, w_size, w_rows, n), pointer<const double>(lam), pointer<double>(d),
                                           pointer<std::int64_t>(block), pointer<std::int64_t>(paired),
                                           std::size_t(threads));
  });
  return PyBool_FromLong(finite);
}

template <class T>
sparsetopk::Saved<T> saved(Py_ssize_t order, Py_ssize_t first, Py_ssize_t w_order, Py_ssize_t d) {
  return {pointer<std::uint32_t>(order), pointer<std::uint32_t>(first), pointer<std::uint32_t>(w_order), pointer<T>(d)};
}

PyObject* permutahedron_forward(PyObject*, PyObject* args) {
  double exponent = 0;
  int itemsize = 0;
  Py_ssize_t rows = 0, n = 0, x_rows = 0, x = 0, w_rows = 0, w_size = 0, w = 0, lam = 0, y = 0;
  Py_ssize_t order = 0, first = 0, w_order = 0, d = 0, threads = 1;
  if (!PyArg_ParseTuple(args, "dinnnnnnnnnnnnnn", &exponent, &itemsize, &rows, &n, &x_rows, &x, &w_rows, &w_size, &w,
                        &lam, &y, &order, &first, &w_order, &d, &threads))
    return nullptr;
  if (!check_itemsize(itemsize) || !check_itemsize(int(w_size)) || !one_or_all(x_rows, rows) ||
      !one_or_all(w_rows, rows) || !sound({rows, n}, {Address(x), Address(w), Address(lam), Address(y)}) ||
      !sound({threads}, {}))
    return nullptr;
  const bool finite = without_lock([&] {
    const auto run = [&](auto* out) {
      using T = std::decay_t<decltype(*out)>;
      return sparsetopk::permutahedron_forward<T>(exponent, std::size_t(rows), floats(x, sizeof(T), x_rows, n),
                                                  floats(w, w_size, w_rows, n), pointer<const double>(lam), out,
                                                  saved<T>(order, first, w_order, d), std::size_t(threads));
    };
    return itemsize == sizeof(float) ? run(pointer<float>(y)) : run(pointer<double>(y));
  });
  return PyBool_FromLong(finite);
}

PyObject* permutahedron_backward(PyObject*, PyObject* args) {
  double exponent = 0, floor = 0;
  int itemsize = 0, w_size = 0;
  Py_ssize_t rows = 0, n = 0, x_rows = 0, w_rows = 0, order = 0, first = 0, w_order = 0, d = 0, lam = 0, dy = 0, dx = 0;
  Py_ssize_t dw = 0, dlam = 0, threads = 1;
  if (!PyArg_ParseTuple(args, "dinnnninnnnnnnnndn", &exponent, &itemsize, &rows, &n, &x_rows, &w_rows, &w_size, &order,
                        &first, &w_order, &d, &lam, &dy, &dx, &dw, &dlam, &floor, &threads))
    return nullptr;
  if (!check_itemsize(itemsize) || !check_itemsize(w_size) || !one_or_all(x_rows, rows) || !one_or_all(w_rows, rows) ||
      !sound({rows, n}, {Address(order), Address(first), Address(d), Address(lam), Address(dy)}) ||
      !sound({rows, n, Py_ssize_t(dw != 0)}, {Address(w_order)}) || !sound({threads}, {}))
    return nullptr;
  without_lock([&] {
    const auto run = [&](auto* out, auto* out_w) {
      using T = std::decay_t<decltype(*out)>;
      using W = std::decay_t<decltype(*out_w)>;
      sparsetopk::permutahedron_backward<T, W>(exponent, std::size_t(rows), std::size_t(n), std::size_t(x_rows),
                                               std::size_t(w_rows), saved<T>(order, first, w_order, d),
                                               pointer<const double>(lam), pointer<const T>(dy), out, out_w,
                                               pointer<double>(dlam), floor, std::size_t(threads));
    };
    const auto with_w = [&](auto* out) {
      w_size == sizeof(float) ? run(out, pointer<float>(dw)) : run(out, pointer<double>(dw));
    };
    itemsize == sizeof(float) ? with_w(pointer<float>(dx)) : with_w(pointer<double>(dx));
  });
  return Py_NewRef(Py_None);
}

// Function pointers in capsules, as JAX registers them.
PyObject* xla_handlers(PyObject*, PyObject*) {
  PyObject* found = PyDict_New();
#ifdef SPARSETOPK_XLA  // set by the build that has them
  for (const sparsetopk::Handler* handler = sparsetopk::handlers; found != nullptr && handler->name != nullptr;
       ++handler) {
    PyObject* capsule = PyCapsule_New(handler->function, nullptr, nullptr);
    if (capsule == nullptr || PyDict_SetItemString(found, handler->name, capsule) < 0) Py_CLEAR(found);
    Py_XDECREF(capsule);
  }
#endif
  return found;
}

PyMethodDef methods[] = {
    {"simd_level", translated<simd_level>, METH_NOARGS,
     "The vector instruction set that the kernels use: 'baseline', 'avx2' or 'avx512'."},
    {"entries_read", translated<entries_read>, METH_NOARGS,
     "How many entries were read to find the boundaries of rows since the last call of this; see csrc/problem.hpp."},
    {"layout", translated<layout>, METH_NOARGS,
     "Offsets, sizes and numbers that both sides must agree on; see _core/layout.py."},
    {"threshold_forward", translated<threshold_forward>, METH_VARARGS,
     "threshold_forward(op, exponent, debias, dtype, rows, n, row_stride, x, k, k_stride, lam, lam_stride, state, "
     "y, threads): writes y and, unless that is 0, state; see csrc/problem.hpp."},
    {"threshold_backward", translated<threshold_backward>, METH_VARARGS,
     "threshold_backward(op, exponent, debias, dtype, rows, n, row_stride, x, k, k_stride, lam, lam_stride, state, "
     "g, dx, dk, dlam, threads): writes dx and, unless they are 0, dk and dlam."},
    {"pieces_gather", translated<pieces_gather>, METH_VARARGS,
     "pieces_gather(pieces, count, threads, from, to, lo, hi, is_long): keeps what is undecided and counts; returns (over, "
     "over_hi, from_lo, invalid). This and the other passes over pieces: see csrc/pieces.hpp."},
    {"pieces_ties", translated<pieces_ties>, METH_VARARGS,
     "pieces_ties(pieces, count, threads, size, counts): writes how many kept entries of each piece have that size."},
    {"pieces_histogram", translated<pieces_histogram>, METH_VARARGS,
     "pieces_histogram(pieces, count, threads, first, last, shift, counts): writes 1024 counts."},
    {"pieces_neighbours", translated<pieces_neighbours>, METH_VARARGS,
     "pieces_neighbours(pieces, count, threads, cut): the smallest kept entry from the cut on, the largest below."},
    {"pieces_masses", translated<pieces_masses>, METH_VARARGS,
     "pieces_masses(pieces, count, threads, exponent, debias, k, lam, pivot, delta, is_long): (mass, slope, above)."},
    {"pieces_apply", translated<pieces_apply>, METH_VARARGS,
     "pieces_apply(pieces, count, threads, exponent, debias, k, lam, pivot, delta, is_long): writes y."},
    {"pieces_block_sums", translated<pieces_block_sums>, METH_VARARGS,
     "pieces_block_sums(pieces, count, threads, exponent, debias, k, lam, pivot, delta, is_long, sums): writes 8 sums."},
    {"pieces_cotangents", translated<pieces_cotangents>, METH_VARARGS,
     "pieces_cotangents(pieces, count, threads, exponent, debias, k, lam, pivot, delta, is_long, sums): writes dx; returns what "
     "rows without a threshold add to the cotangent of lam."},
    {"threshold_loss", translated<threshold_loss>, METH_VARARGS,
     "threshold_loss(op, exponent, debias, dtype, rows, n, row_stride, x, k, k_stride, lam, lam_stride, state, labels, "
     "ignored, spread, weights, mean, y, value, threads): writes y - t, value and state, with t from labels or weights, "
     "the other 0, and for a mean y - t over the number of rows that count; returns how many do (-1 - i where row i has "
     "a label that is no class) and the sum of value."},
    {"select_slots", translated<select_slots>, METH_VARARGS,
     "select_slots(dtype, rows, n, y, capacity, indices): the indices of the entries of largest magnitude in every "
     "row, in order; see csrc/selection.hpp."},
    {"choose_lam", translated<choose_lam>, METH_VARARGS,
     "choose_lam(op, exponent, dtype, rows, n, row_stride, x, k, k_stride, fractional, least, lam, threads): writes the lam of "
     "every row that leaves so many entries fractional; see csrc/lam.hpp."},
    {"solve_isotonic", translated<solve_isotonic>, METH_VARARGS,
     "solve_isotonic(phi, exponent, rows, n, s, w, lam, d, block): d and the first entry of every entry's block, "
     "for s and w in decreasing order; all arrays by address."},
    {"argsort_descending", translated<argsort_descending>, METH_VARARGS,
     "argsort_descending(itemsize, rows, n, x, order): the stable order of float32 or float64 rows; by address."},
    {"solve_permutahedron", translated<solve_permutahedron>, METH_VARARGS,
     "solve_permutahedron(phi, exponent, n, rows, x_itemsize, x, w_rows, w_itemsize, w, lam, d, block, paired, threads): "
     "d, block and the index into w of every entry of x, for rows in any order, and whether all entries are finite; all "
     "arrays by address."},
    {"permutahedron_forward", translated<permutahedron_forward>, METH_VARARGS,
     "permutahedron_forward(exponent, itemsize, rows, n, x_rows, x, w_rows, w_itemsize, w, lam, y, order, first, w_order, "
     "d, threads): y of rows in any order and what its derivatives need, in sorted order, and whether all entries are "
     "finite; all arrays by address, 0 for those that are not wanted. x and w may be a single row."},
    {"permutahedron_backward", translated<permutahedron_backward>, METH_VARARGS,
     "permutahedron_backward(exponent, itemsize, rows, n, x_rows, w_rows, w_itemsize, order, first, w_order, d, lam, dy, "
     "dx, dw, dlam, floor, threads): the cotangents of x, w and lam; all arrays by address, 0 for one that is not "
     "wanted."},
    {"xla_handlers", translated<xla_handlers>, METH_NOARGS,
     "The handlers of XLA's custom calls by name, in capsules; none if the build did not find XLA's headers."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    "_native",
    "The compiled core of sparsetopk.",
    0,
    methods,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&module); }
