// Short rows, many at a time: every lane of a vector has a row of its own, and Newton's steps of all of them are taken
// together. What a lane computes depends on its row alone, not on its neighbours nor on how many there are.
//
// Most rows are finite, with 0 < k < n and a lam of ordinary size: these are solved here. A lane that is not, or that
// takes too many steps, is left to threshold.hpp.
#pragma once

#include "output.hpp"
#include "responses.hpp"

namespace sparsetopk {
namespace SPARSETOPK_LEVEL {

// Rows with S(t) = t are solved in the type that entries are widened to, all others in double: a steeper S, and one that
// starts at t = -1, need more digits of t than a float has.
template <class Kind, class X>
using Lane = typename std::conditional<kLinear<Kind>, Wide<X>, double>::type;

// From that length on a row for itself is as fast, as it has fewer entries left after one pass. Measured.
template <class Kind>
constexpr std::size_t kLongestLane = kLinear<Kind>  ? 256
                                     : Kind::kCheap ? 128
                                                    : 32;
template <class Kind>
constexpr std::size_t kLongestLaneBackward = Kind::kMagnitude ? 128 : 512;
// Up to there all entries become lanes for a backward, and of longer masks those that have a derivative.
template <class Kind>
constexpr std::size_t kLongestTurned = Kind::kMagnitude ? 128 : 16;

// The operators that have lanes. A magnitude with another p has none: its block may end as far from v as it likes.
template <class Kind>
constexpr bool kHasLanes = kLinear<Kind> || !Kind::kMagnitude;

// Whether rows are solved in lanes: short ones, however many there are, so that a row is the same in every batch. For
// p > 2 a response is as steep as it likes near 0, and threshold.hpp measures t from there.
template <class Kind>
inline bool fit_lanes(const Problem& problem, const Kind& kind, std::size_t longest) {
  return problem.n > 0 && problem.n <= longest && kind.exponent >= 1;
}

constexpr std::size_t kSumBlock = 16;  // entries that are added up before they are added to the others

// What a group of rows is asked, a row to a lane.
template <class T>
struct Asked {
  using V = Vector<T>;
  V k, lam, inverse;  // 1/lam
  V above, below;     // ceil k, floor k + 1
  V fraction;         // k - floor k, which has digits that a large k has no room for
  Flags<T> fits;      // whether a lane is for here
  bool many_ks;       // whether k differs from lane to lane
  T tolerance;        // of sum z beside k, before a last step

  static constexpr T kLeastLam = sizeof(T) == 4 ? T(1e-12) : T(1e-100), kMostLam = 1 / kLeastLam;

  Asked(const Problem& problem, std::size_t begin, std::size_t count) { fill(problem, begin, count); }

  void fill(const Problem& problem, std::size_t begin, std::size_t count) {
    T values[7][kWidth<T>];
    many_ks = problem.k_stride != 0;
    tolerance = T(problem.dtype == Dtype::float64 ? 2e-15 : sizeof(T) == sizeof(float) ? 3e-7 : 1e-10);
    const std::size_t last = problem.k_stride == 0 && problem.lam_stride == 0 ? 1 : kWidth<T>;
    for (std::size_t i = 0; i < last; ++i) {
      const std::size_t row = begin + smaller(i, count - 1);
      const double one_k = problem.k_of(row), one_lam = problem.lam_of(row);
      // Next to 0 and to n all of y hangs on digits that a float has not.
      constexpr double kMargin = 1e-3;
      const bool is_k = one_k >= kMargin && one_k <= double(problem.n) - kMargin;
      const bool is_lam = problem.hard() || (one_lam >= double(kLeastLam) && one_lam <= double(kMostLam));
      const double a_k = is_k ? one_k : 0.5, a_lam = is_lam && one_lam > 0 ? one_lam : 1, floor = ::floor(a_k);
      values[0][i] = T(a_k), values[1][i] = T(a_lam), values[2][i] = T(1 / a_lam);
      values[3][i] = T(floor < a_k ? floor + 1 : floor), values[4][i] = T(floor + 1);
      values[5][i] = is_k && is_lam, values[6][i] = T(a_k - floor);
    }
    for (std::size_t i = last; i < kWidth<T>; ++i)
      for (auto& value : values) value[i] = value[0];
    k = load(values[0]), lam = load(values[1]), inverse = load(values[2]);
    above = load(values[3]), below = load(values[4]), fits = load(values[5]) > 0, fraction = load(values[6]);
  }
  Flags<T> is_whole() const { return above < below; }
  // k less a whole number.
  V left(V whole) const { return (below - 1 - whole) + fraction; }
};

// ------------------------------------------------------------------------------------------ rows to lanes and back

// A group of kWidth rows that lie behind each other, each of kColumns < kWidth entries.
template <std::size_t kColumns, class T, class X>
inline void turn_to_lanes(const X* x, Vector<T>* lanes) {
  constexpr std::size_t kW = kWidth<T>;
  Vector<T> block[kColumns];
#pragma GCC unroll 16
  for (std::size_t i = 0; i < kColumns; ++i) block[i] = load<X, T>(x + i * kW);
  shuffle<log2_of(kW)>(block);
#pragma GCC unroll 16
  for (std::size_t i = 0; i < kColumns; ++i) lanes[i] = block[i];
}
template <std::size_t kColumns, class T, class X>
inline void turn_to_rows(const Vector<T>* lanes, X* y) {
  constexpr std::size_t kW = kWidth<T>;
  Vector<T> block[kColumns];
#pragma GCC unroll 16
  for (std::size_t i = 0; i < kColumns; ++i) block[i] = lanes[i];
  shuffle<log2_of(kColumns)>(block);
#pragma GCC unroll 16
  for (std::size_t i = 0; i < kColumns; ++i) store<X, T>(block[i], y + i * kW);
}

// lanes[j] has entry j of ``count`` rows, and of the last again where there are fewer than lanes.
template <class T, class X>
SPARSETOPK_LOOP void to_lanes(const X* x, std::size_t stride, std::size_t count, std::size_t n, Vector<T>* lanes) {
  constexpr std::size_t kW = kWidth<T>;
  const auto row = [&](std::size_t i) { return x + smaller(i, count - 1) * stride; };
  Vector<T> block[kW];
  if (count == kW && stride == n) {
    if (n == 8 && 8 < kW) return turn_to_lanes<8, T>(x, lanes);
    if (n == 4 && 4 < kW) return turn_to_lanes<4, T>(x, lanes);
    if (n == 2 && 2 < kW) return turn_to_lanes<2, T>(x, lanes);
  }
  if (n < kW) {
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kW; ++i) block[i] = load_some<X, T>(row(i), n);
    shuffle<log2_of(kW)>(block);
#pragma GCC unroll 16
    for (std::size_t j = 0; j < n; ++j) lanes[j] = block[j];
    return;
  }
  for (std::size_t begin = 0; begin < n; begin += kW) {
    const std::size_t first = smaller(begin, n - kW);  // the last block begins earlier rather than ends later
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kW; ++i) block[i] = load<X, T>(row(i) + first);
    shuffle<log2_of(kW)>(block);
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kW; ++i) lanes[first + i] = block[i];
  }
}

// The other way: y has ``count`` rows of n entries, with the signs of x if that is given, whose rows are ``stride``
// apart.
template <class T, class X>
SPARSETOPK_LOOP void to_rows(const Vector<T>* lanes, std::size_t count, std::size_t n, X* y, const X* x,
                             std::size_t stride) {
  using V = Vector<T>;
  constexpr std::size_t kW = kWidth<T>;
  if (count == kW && x == nullptr) {
    if (n == 8 && 8 < kW) return turn_to_rows<8, T>(lanes, y);
    if (n == 4 && 4 < kW) return turn_to_rows<4, T>(lanes, y);
    if (n == 2 && 2 < kW) return turn_to_rows<2, T>(lanes, y);
  }
  V block[kW];
  for (std::size_t begin = 0; begin < n; begin += kW) {
    const std::size_t length = smaller(kW, n), first = smaller(begin, n - length);
    if (n >= kW) {
#pragma GCC unroll 16
      for (std::size_t j = 0; j < kW; ++j) block[j] = lanes[first + j];
    } else {
      for (std::size_t j = 0; j < kW; ++j) block[j] = lanes[smaller(j, n - 1)];
    }
    shuffle<log2_of(kW)>(block);
    if (x != nullptr)
      for (std::size_t i = 0; i < count; ++i) {
        const X* row = x + i * stride + first;
        const V sign = n < kW ? load_some<X, T>(row, n) : load<X, T>(row);
        block[i] = (sign < 0 ? -block[i] : block[i]) + T(0);  // 0 and not -0
      }
    if (n < kW)
      for (std::size_t i = 0; i < count; ++i) store_some<X, T>(block[i], y + i * n, n);
    else
      for (std::size_t i = 0; i < count; ++i) store<X, T>(block[i], y + i * n + first);
  }
}

// The group of rows that begins at the given one, as the operator sees it: with the signs of x, or as it is.
template <class Kind, class T, class X>
inline void to_signed_rows(const Problem& problem, std::size_t begin, std::size_t count, const Vector<T>* lanes, X* y) {
  const X* x = static_cast<const X*>(problem.x) + begin * problem.row_stride;
  to_rows<T>(lanes, count, problem.n, y + begin * problem.n, Kind::kAbsolute ? x : nullptr, problem.row_stride);
}

}  // namespace SPARSETOPK_LEVEL
}  // namespace sparsetopk
