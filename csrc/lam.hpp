// The lam that leaves so many entries fractional.
#pragma once

#include <cstddef>

#include "problem.hpp"

namespace sparsetopk {

// The smallest lam of each row for which at least ``fractional`` entries, in [1, n], are neither 0 nor selected whole;
// the scale of the row where there is none, and NaN where the row or k is bad. The search stays in [least, 1/least].
// Of the problem lam and the state have no part in it; the operator is none with signs. As _maths/select.py has it.
void choose_lam(const Problem& problem, std::size_t fractional, double least, double* lam);

}  // namespace sparsetopk
