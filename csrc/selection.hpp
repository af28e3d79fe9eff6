// The nonzero entries of rows in a fixed number of slots.
#pragma once

#include <cstddef>
#include <cstdint>

#include "problem.hpp"

namespace sparsetopk {

// The indices of the ``capacity`` entries of each row with the largest magnitudes, in increasing order. Of equal
// ones, as are the zeros that fill the slots up, the first come first; NaN is like 0. y is contiguous.
void select_slots(Dtype dtype, std::size_t rows, std::size_t n, const void* y, std::size_t capacity,
                  std::int64_t* indices);

}  // namespace sparsetopk
