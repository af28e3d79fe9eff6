// Losses with targets of any kind: completed, smoothed, or compared with the best that selects the labels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "problem.hpp"

namespace sparsetopk {

enum class Completion { none, spread, best };

// A label for each row, or weights (rows, n) of one of the two types.
struct TargetRows {
  const std::int64_t* labels;
  std::int64_t ignored;  // the label of rows that do not count
  const float* singles;
  const double* doubles;
};

// The loss of every row and its gradient, in the place of y, as topk_loss of _maths/value.py has them for mask and
// two_sided; both 0 where a row does not count, and NaN where a label is no class or a weight is not in [0, 1].
// ``smoothing`` takes this share of the targets, and has no part in the best completion.
void completed_loss(const Problem& problem, const TargetRows& targets, Completion completion, double smoothing, void* y,
                    double* value);

}  // namespace sparsetopk
