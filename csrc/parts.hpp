// Some rows of a problem at a time, for what is made of whole solved rows: slots, and a choice of lam.
#pragma once

#include <cstddef>

#include "problem.hpp"

#define SPARSETOPK_LEVEL baseline
#include "dtypes.hpp"

namespace sparsetopk {

// f on entries by their type.
template <class F>
void with_entries(Dtype dtype, const void* entries, F&& f) {
  switch (dtype) {
    case Dtype::float32:
      return f(static_cast<const float*>(entries));
    case Dtype::float64:
      return f(static_cast<const double*>(entries));
    case Dtype::float16:
      return f(static_cast<const baseline::Half*>(entries));
    case Dtype::bfloat16:
      return f(static_cast<const baseline::BFloat16*>(entries));
  }
}

// Some rows of a problem.
inline Problem rows_of(const Problem& problem, std::size_t first, std::size_t count) {
  Problem part = problem;
  part.rows = count;
  part.x = static_cast<const char*>(problem.x) + first * problem.row_stride * size_of(problem.dtype);
  part.k += first * problem.k_stride;
  part.lam += first * problem.lam_stride;
  part.state += first;
  return part;
}

}  // namespace sparsetopk
