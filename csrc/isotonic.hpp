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

// The same for rows x and w in any order: d and block, and the index of the entry of w that x is paired with, all
// in the order of x. Blocks are named by the place of their first entry in the sorted row. w may be a single row.
void solve_permutahedron(PhiName phi, double exponent, const FloatRows& x, const FloatRows& w, const double* lam,
                         double* d, std::int64_t* block, std::int64_t* paired);

}  // namespace sparsetopk
