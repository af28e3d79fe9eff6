// The threshold of one row: v with sum_i min(S((x_i - v)/lam), phi'(v)) = k phi'(v).
//
// No framework and no allocation: a row is read a few times, and at most kScratch entries are copied.
// The answer is (pivot, delta) with v = pivot - lam * delta and pivot the entry just below the
// boundary, so that t = (x - pivot)/lam + delta loses no digits to a common shift or to a tiny lam.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>

#include "kinds.hpp"

namespace sparsetopk {

struct Threshold {
  double pivot;
  double delta;
  double residual;  // by how much the two sides of the equation differ
};

constexpr std::size_t kScratch = 8192;
constexpr std::size_t kSample = 1024;

// Lanes of independent accumulators: the compiler may not reorder floating-point sums, but it can fill
// its vectors with these, and the result does not depend on how wide they are.
constexpr std::size_t kLanes = 32;

template <bool kAbsolute, class T>
inline T key(T x) {
  return kAbsolute ? std::fabs(x) : x;
}

// f(x_i, lane) over the row, lane by lane.
template <class T, class F>
inline void for_lanes(const T* x, std::size_t n, F&& f) {
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (std::size_t j = 0; j < kLanes; ++j) f(x[i + j], j);
  for (std::size_t j = 0; i < n; ++i, ++j) f(x[i], j);
}

template <class C>
inline double sum_lanes(const C (&lanes)[kLanes]) {
  double total = 0;
  for (C lane : lanes) total += lane;
  return total;
}

// How many keys are greater than ``bound``.
template <bool kAbsolute, class T>
std::size_t count_above(const T* x, std::size_t n, T bound) {
  std::ptrdiff_t lanes[kLanes] = {};
  for_lanes(x, n, [&](T value, std::size_t j) { lanes[j] += key<kAbsolute>(value) > bound; });
  std::ptrdiff_t total = 0;
  for (auto lane : lanes) total += lane;
  return std::size_t(total);
}

// x_[rank], the rank-th largest key (from 1), without changing the row: as in Floyd-Rivest selection
// a sample brackets it, counting checks the bracket, and what is left is copied once it is few.
template <bool kAbsolute, class T>
T order_statistic(const T* x, std::size_t n, std::size_t rank, T* scratch) {
  T lo = -std::numeric_limits<T>::infinity(), hi = std::numeric_limits<T>::infinity();
  std::size_t above = 0, inside = n;  // keys > hi, keys in [lo, hi]
  bool stalled = false;
  for (;;) {
    if (lo == hi) return lo;
    const bool few = inside <= kScratch;
    // Every entry of the first sample counts, so it need not look at those between.
    const std::size_t every = few ? 1 : inside / kSample, stride = inside == n ? every : 1;
    std::size_t taken = 0, seen = 0;
    for (std::size_t i = 0; i < n; i += stride) {
      const T value = key<kAbsolute>(x[i]);
      if (value < lo || value > hi) continue;
      if (stride == 1 && seen++ % every != 0) continue;
      if (taken < kScratch) scratch[taken++] = value;
    }
    const auto at = [&](std::size_t position) {
      std::nth_element(scratch, scratch + position, scratch + taken, std::greater<T>());
      return scratch[position];
    };
    if (few) return at(rank - above - 1);
    const double share = (double(rank - above) - 0.5) / double(inside);
    const double centre = share * double(taken);
    // With few different values the bracket may not shrink: then split it at one of them, which does.
    const double margin = stalled ? 0 : 3 * std::sqrt(double(taken) * share * (1 - share)) + 1;
    const T up = at(std::size_t(std::max(0.0, centre - margin)));
    const T down = at(std::size_t(std::min(double(taken - 1), centre + margin)));
    const std::size_t over_up = count_above<kAbsolute>(x, n, up);
    const T under = std::nextafter(down, -std::numeric_limits<T>::infinity());
    const std::size_t from_down = count_above<kAbsolute>(x, n, under);  // keys >= down
    const std::size_t before = inside, end = above + inside;
    if (over_up >= rank) {
      lo = std::nextafter(up, std::numeric_limits<T>::infinity());
      inside = over_up - above;
    } else if (from_down < rank) {
      hi = under;
      above = from_down;
      inside = end - above;
    } else {
      lo = down;
      hi = up;
      above = over_up;
      inside = from_down - above;
    }
    stalled = inside == before;
  }
}

struct Sums {
  double mass = 0;   // sum of S(t) over the entries inside the block
  double slope = 0;  // sum of S'(t) over them
  double above = 0;  // how many entries are selected whole
};

template <bool kAbsolute, class T, class Kind>
Sums add_up(const T* x, std::size_t n, double pivot, double lam, double delta, double top, const Kind& kind) {
  constexpr double zero = Kind::zero;
  const double harmless = (zero + top) / 2;  // in the domain of S; what comes of it is not used
  double mass[kLanes] = {}, slope[kLanes] = {}, above[kLanes] = {};
  for_lanes(x, n, [&](T value, std::size_t j) {
    const double t = (double(key<kAbsolute>(value)) - pivot) / lam + delta;
    const bool inside = t > zero && t < top;
    const double at = inside ? t : harmless;
    const double response = kind.response(at), steepness = kind.slope(at);
    mass[j] += inside ? response : 0.0;
    slope[j] += inside ? steepness : 0.0;
    above[j] += t >= top && t > zero ? 1.0 : 0.0;
  });
  return {sum_lanes(mass), sum_lanes(slope), sum_lanes(above)};
}

// What add_up has to look at: the whole row, or a copy of the entries that delta in [lo, hi] leaves
// open, with the number of those that are selected whole in any case.
template <class T>
struct Open {
  const T* x;
  std::size_t n;
  double selected;
};

template <bool kAbsolute, class T, class Kind>
Open<T> open_entries(const T* x, std::size_t n, double pivot, double lam, double lo, double hi, const Kind& kind,
                     T* scratch) {
  const double from = Kind::zero - hi, to = std::max(kind.top(pivot), kind.top(pivot - lam * hi)) - lo;
  std::size_t open = 0, selected = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const double t = (double(key<kAbsolute>(x[i])) - pivot) / lam;
    if (t >= to) {
      ++selected;
    } else if (t > from) {
      if (open == kScratch) return {x, n, 0};
      scratch[open++] = x[i];
    }
  }
  return {scratch, open, double(selected)};
}

// The root in [lo, hi] by Newton's method kept inside the bracket, as increasing_root does in NumPy:
// a step that leaves it, or three that do not halve it, give way to bisection; done when the residual
// is met or the bracket is a few roundings wide, of delta or of ``unit`` if that is larger.
template <bool kAbsolute, class T, class Kind>
Threshold solve_delta(const Open<T>& open, double k, double lam, double pivot, double lo, double hi, double start,
                      const Kind& kind) {
  const double e = 1 / kind.exponent;
  const bool power = e != 1 && Kind::zero == 0 && kind.second(1) == 0;
  const double tol = 1e-15 * std::max(k, 1.0) * kind.prime(pivot - lam * hi);
  // For p > 2 a response is as steep as it likes near 0: there every digit of delta counts.
  const double unit = Kind::zero == 0 && kind.exponent < 1 ? 0 : hi - lo;
  double delta = start, width = hi - lo;
  Threshold best{pivot, start, std::numeric_limits<double>::infinity()};
  // The bracket halves at least every four steps: enough of them to reach any double, so that the loop
  // always ends by one of the rules inside it.
  for (int iteration = 0; iteration < 4 * 1200; ++iteration) {
    const double v = pivot - lam * delta;
    const Sums sums = add_up<kAbsolute>(open.x, open.n, pivot, lam, delta, kind.top(v), kind);
    const double left = k - open.selected - sums.above;
    const double value = sums.mass - left * kind.prime(v);
    if (value <= 0) lo = delta;
    if (value >= 0) hi = delta;
    if (std::fabs(value) < best.residual) best = {pivot, delta, std::fabs(value)};
    const double rounding = std::numeric_limits<double>::epsilon() * std::max(std::fabs(delta), unit);
    const double middle = lo + (hi - lo) / 2;
    if (best.residual <= tol || hi - lo <= 4 * rounding || middle <= lo || middle >= hi) break;
    double step = value / (sums.slope + lam * kind.second(v) * left);
    if (power && sums.mass > 0 && left > 0)  // on mass^(p-1): linear in delta for one entry
      step = (sums.mass - std::pow(sums.mass, 1 - e) * std::pow(left, e)) / (e * sums.slope);
    // A step too small to move delta: a little further, over the root if it is that close.
    if (std::fabs(step) <= rounding) step = std::copysign(2 * rounding, value);
    const double newton = delta - step;
    bool use_newton = newton > lo && newton < hi;
    if (iteration % 4 == 3) {
      use_newton = use_newton && hi - lo <= width / 2;
      width = hi - lo;
    }
    delta = use_newton ? newton : middle;
  }
  return best;
}

// One row: 0 <= k, lam > 0, no NaN, at most k keys +inf. ``floor_at_zero`` keeps v >= 0, for phi = |x|.
// Where at most k keys are above -inf nothing is open, and the threshold returned has no meaning.
template <bool kAbsolute, class T, class Kind>
Threshold solve_row(const T* x, std::size_t n, double k, double lam, bool floor_at_zero, const Kind& kind,
                    T* scratch) {
  const std::size_t whole = std::size_t(k);
  const double lo = Kind::zero;
  if (whole >= n) return {0, lo, 0};
  const double pivot = order_statistic<kAbsolute>(x, n, whole + 1, scratch);
  if (k == 0 || std::isinf(pivot)) return {pivot, lo, 0};
  double boundary = pivot;  // x_[ceil k]: another entry only if k is an integer and the pivot not tied
  if (k == double(whole) && count_above<kAbsolute>(x, n, T(pivot)) == whole) {
    boundary = std::numeric_limits<double>::infinity();
    for (std::size_t i = 0; i < n; ++i) {
      const double value = key<kAbsolute>(x[i]);
      if (value > pivot && value < boundary) boundary = value;
    }
  }
  double hi = kind.alone(boundary, lam) - (boundary - pivot) / lam;
  if (floor_at_zero) hi = std::min(hi, pivot / lam);
  if (!(hi > lo)) return {pivot, lo, 0};  // the gap is too wide to pool anything: the hard answer
  const auto open = open_entries<kAbsolute>(x, n, pivot, lam, lo, hi, kind, scratch);
  const double start = floor_at_zero ? hi : lo + (hi - lo) / 2;
  return solve_delta<kAbsolute>(open, k, lam, pivot, lo, hi, start, kind);
}

}  // namespace sparsetopk
