// What the kernels are asked: many rows, each with its own k and lam. No framework, raw pointers only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "response_table.hpp"

namespace sparsetopk {

enum class Operator { mask, magnitude, sign, two_sided };
enum class Dtype { float32, float64, float16, bfloat16 };
inline std::size_t size_of(Dtype dtype) { return dtype == Dtype::float64 ? 8 : dtype == Dtype::float32 ? 4 : 2; }

// The threshold v = pivot - lam * delta of a row, kept apart so that t = (a - pivot)/lam + delta (a is x
// or |x|) loses no digits to a common shift or to a tiny lam. Rows that need no threshold:
//   pivot NaN            the result is NaN
//   pivot -inf           every candidate is selected whole
//   pivot +inf           ``delta`` entries are +inf and share k; or k = 0
//   lam = 0              entries above the pivot are selected, and a mass of ``delta`` of those at it
//   pivot = delta = 0    magnitude: at most k entries are not 0; sign: fewer than k are selected
struct State {
  double pivot, delta;
};

struct Problem {
  Operator op;
  double exponent;                  // 1/(p-1)
  bool debias;                      // magnitude: y + (x - u) instead of y
  Dtype dtype;                      // of x, y, g and dx
  std::size_t rows, n, row_stride;  // of x; y, g and dx are contiguous
  const void* x;
  const double* k;
  std::size_t k_stride;  // 1, or 0 for one k for all rows; so for lam
  const double* lam;
  std::size_t lam_stride;
  State* state;                          // written by forward, read by backward
  std::size_t threads;                   // at most so many
  const ResponseTable* table = nullptr;  // for two_sided: forward, backward and loss set it themselves
  double rounding = 0x1p-52;             // of the states that backward is given: XLA may hold them as float32

  double k_of(std::size_t row) const { return k[row * k_stride]; }
  double lam_of(std::size_t row) const {
    constexpr double least = 0x1p-1000;  // from there down 1/lam may overflow
    const double value = lam[row * lam_stride];
    return value > 0 && value < least ? least : value;
  }
  // Without the sign of a zero: whether 0 or -0 is the largest of a row depends on the order of comparisons, and every
  // instruction-set level has its own.
  void keep(std::size_t row, State found) const { state[row] = {found.pivot + 0.0, found.delta + 0.0}; }
  // Whether lam = 0 for all rows, and so no p has a part in what they are.
  bool hard() const { return lam_stride == 0 && rows > 0 && lam[0] == 0; }
};

// What a loss is compared with: a label for each row, weights, or (both null) nothing.
struct Targets {
  const std::int64_t* labels;
  std::int64_t ignored;   // the label of rows that do not count
  bool spread;            // labels are filled up to a sum of k, evenly, and R of that is added
  const double* weights;  // (rows, n), contiguous
  double scale = 1;       // of the gradient

  // Those of the rows from ``first`` on, of n entries each.
  Targets from_row(std::size_t first, std::size_t n) const {
    Targets part = *this;
    if (labels != nullptr) part.labels += first;
    if (weights != nullptr) part.weights += first * n;
    return part;
  }
};

// y, in [0, 1] or in the units of x.
void forward(const Problem& problem, void* y);

// The cotangents of x, and of k and lam (one per row) where the pointers are not null, from that of y.
void backward(const Problem& problem, const void* g, void* dx, double* dk, double* dlam);

// f(x, 1_k) - <x, t> of every row, and its gradient y - t, scaled, in the place of y, for mask and two_sided; both 0 where a
// row does not count.
void loss(const Problem& problem, const Targets& targets, void* y, double* value);

// How many entries all calls have read to find the boundaries of rows, since the last time that it was asked: of the
// rows and of copies, but neither those that Newton's method reads nor those that y is made of.
std::uint64_t entries_read();

}  // namespace sparsetopk
