#pragma once

#include <cstddef>
#include <cstdint>

namespace sparsetopk {

enum class PhiName { identity, half_square, abs, exp };

// ``rows`` isotonic problems of length n, one after the other, each with its own lam > 0; see pav.hpp.
// ``exponent`` is 1/(p-1). s and w are finite and in decreasing order; w >= 0 unless phi is the identity.
void solve_isotonic(PhiName phi, double exponent, std::size_t rows, std::size_t n, const double* s, const double* w,
                    const double* lam, double* d, std::int64_t* block);

// Stable argsort of every row in decreasing order.
void argsort_descending(std::size_t rows, std::size_t n, const float* x, std::int64_t* order);
void argsort_descending(std::size_t rows, std::size_t n, const double* x, std::int64_t* order);

// Rows of float32 or float64, by address.
struct FloatRows {
  const void* data;
  std::size_t itemsize, rows, n;
};

// The same for rows x and w in any order: d, the number of the block (from 0) and the index of the entry of w that
// an entry is paired with, all in the order of x. w may be a single row. False if an entry is not finite: then
// nothing is solved.
bool solve_permutahedron(PhiName phi, double exponent, const FloatRows& x, const FloatRows& w, const double* lam,
                         double* d, std::int64_t* block, std::int64_t* paired);

// What solve_permutahedron found, for the derivatives.
struct Solved {
  std::size_t rows, n;
  const double *lam, *d;
  const std::int64_t *block, *paired;
};

// For phi = identity: the cotangents of x, w and lam, given that of y = S(d). Those of w and lam may be null; that of
// w starts at 0 and is summed over rows if w is a single one. Slopes are those of a lam of at least ``floor``.
template <class T>
void permutahedron_backward(double exponent, const Solved& solved, const T* dy, T* dx, double* dw, bool single_w,
                            double* dlam, double floor);

}  // namespace sparsetopk
