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

// Rows of the operator in such slots, as JAX has them.
struct Slots {
  std::size_t capacity;
  void* values;  // in the dtype of x
  std::int32_t* indices;
  double* dropped;  // the sum of the magnitudes of a row that have no slot; NaN where the row is
};

// Solves the problem and fills its slots: of y a few rows at a time are in the cache, and no more is kept.
void select(const Problem& problem, const Slots& slots);

// The same with the hard selection first, with the value 1 (or x), and then the entries that compete with it, with the
// value 0; indices increase in each part. ``selected`` says which slots are of the first; ``dropped`` is of what the
// relaxed operator gives. NaN where a row is, or where k is too large for the slots.
void select_straight(const Problem& problem, const Slots& slots, bool* selected);

// The cotangents of what was selected: of values in the dtype of x, and of dropped.
struct SlotCotangents {
  std::size_t capacity;
  const std::int32_t* indices;
  const void* values;
  const double* dropped;
};

// Those of x, k and lam (one per row), from the state that ``select`` left.
void select_backward(const Problem& problem, const SlotCotangents& g, void* dx, double* dk, double* dlam);

}  // namespace sparsetopk
