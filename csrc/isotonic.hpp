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

}  // namespace sparsetopk
