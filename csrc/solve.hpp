#pragma once

#include <cstddef>

#include "threshold.hpp"

namespace sparsetopk {

enum class Operator { mask, magnitude, sign, two_sided };

// The thresholds of ``rows`` rows of length n, one after the other, each with its own k and lam.
// ``exponent`` is 1/(p-1); two_sided takes 1, 2 and 3. See solve_row for what a row must fulfil.
void solve_rows(Operator op, double exponent, const double* x, std::size_t rows, std::size_t n, const double* k,
                const double* lam, Threshold* out);

}  // namespace sparsetopk
