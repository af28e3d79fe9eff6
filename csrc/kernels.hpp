// The kernels at every instruction-set level: rows [begin, end) of a problem.
#pragma once

#include "problem.hpp"

namespace sparsetopk {

#define SPARSETOPK_DECLARE(level)                                                                            \
  namespace level {                                                                                          \
  void forward(const Problem& problem, std::size_t begin, std::size_t end, void* y);                         \
  void backward(const Problem& problem, std::size_t begin, std::size_t end, const void* g, void* dx,         \
                double* dk, double* dlam);                                                                   \
  }
SPARSETOPK_DECLARE(baseline)
SPARSETOPK_DECLARE(avx2)
SPARSETOPK_DECLARE(avx512)
#undef SPARSETOPK_DECLARE

}  // namespace sparsetopk
