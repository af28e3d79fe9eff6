// The lam that leaves so many entries fractional.
#pragma once

#include <cstddef>

#include "problem.hpp"

namespace sparsetopk {

// The smallest lam of each row for which at least ``fractional`` entries, in [1, n], are neither 0 nor selected whole;
// the scale of the row where there is none, and NaN where the row or k is bad. The search stays in [least, 1/least].
// Of the problem lam and the state have no part in it; the operator is none with signs. As _maths/select.py has it.
void choose_lam(const Problem& problem, std::size_t fractional, double least, double* lam);

// The smallest lam of each of ``rows`` rows with which the blocks of the relaxed rank have at least ``size`` entries on
// average; the scale of a row in which every lam does, and NaN where an entry is NaN or +inf. Padding (-inf) does not
// count. ``exponent`` is 1/(p-1).
struct RankSearch {
  double exponent, size, least;
  bool descending;
};
template <class T>
void choose_rank_lam(const RankSearch& asked, std::size_t rows, std::size_t n, const T* x, double* lam,
                     std::size_t threads);

}  // namespace sparsetopk
