// Where the k boundary of a row is: x_[ceil k] and x_[floor k + 1], or an interval around both that is
// narrow enough, with a copy of the entries that it leaves undecided.
//
// As in Floyd-Rivest selection an interval is guessed (from mean and deviation, or from a sample), one
// pass over the row checks it by counting and copies what is undecided, and the copy is cut down
// further until the interval is no wider than what the relaxation pools anyway. Wrong guesses cost a
// pass, never the answer.
#pragma once

#include <cmath>

#include "kinds.hpp"

namespace sparsetopk {
namespace SPARSETOPK_LEVEL {

constexpr std::size_t kShort = 8192;  // rows up to this length are guessed from mean and deviation
constexpr std::size_t kSample = 4096;
constexpr std::size_t kFew = 64;  // among so few, order statistics are found by comparing all pairs

// lo <= x_[below] <= x_[above] <= hi, where above = ceil k and below = floor k + 1 count from the
// largest, with the number of keys over hi and that of keys from lo on.
template <class T>
struct Bracket {
  T lo, hi;
  std::size_t above, below;
  std::size_t over_hi = 0, from_lo = 0;
  bool exact = false;  // lo = x_[below] and hi = x_[above]

  Bracket(double k, T lo_, T hi_)
      : lo(lo_), hi(hi_), above(std::size_t(::ceil(k))), below(std::size_t(k) + 1) {}
};

// The z above which n normal numbers have their k largest (folded: the k largest in magnitude), and how far
// off it may be: 2.5 standard errors.
struct NormalGuess {
  bool folded;
  double k = -1, z = 0, margin = 0;

  void prepare(double k_, std::size_t n) {
    if (k == k_) return;
    k = k_;
    const double share = (k + 0.5) / (double(n) + 1), upper = folded ? share / 2 : share;
    const double tail = upper < 0.5 ? upper : 1 - upper;
    const double s = ::sqrt(-2 * ::log(tail));  // Abramowitz and Stegun 26.2.23, good to 4.5e-4
    const double quantile = s - (2.515517 + s * (0.802853 + s * 0.010328)) /
                                    (1 + s * (1.432788 + s * (0.189269 + s * 0.001308)));
    z = upper < 0.5 ? quantile : -quantile;
    const double density = (folded ? 2 : 1) * 0.3989422804014327 * ::exp(-quantile * quantile / 2);
    margin = 2.5 * ::sqrt(share * (1 - share) / double(n)) / density;
  }
};

template <class T>
struct Moments {
  double mean, deviation;
  T smallest, largest;
};

template <bool kAbsolute, class X>
SPARSETOPK_LOOP Moments<Wide<X>> moments(const X* x, std::size_t n) {
  using T = Wide<X>;
  T sum[kLanes] = {}, square[kLanes] = {}, lo[kLanes], hi[kLanes];
  const T first = key<kAbsolute>(x[0]);
  for (std::size_t j = 0; j < kLanes; ++j) lo[j] = hi[j] = first;
  // Distances to the first entry: a common shift does not drown the deviation.
  const auto take = [&](T value, std::size_t j) {
    const T from_first = value - first;
    sum[j] += from_first;
    square[j] += from_first * from_first;
    lo[j] = value < lo[j] ? value : lo[j];
    hi[j] = value > hi[j] ? value : hi[j];
  };
  for_tiles<kAbsolute>(x, n, [&](const T* keys, std::size_t, std::size_t length) {
    std::size_t i = 0;
    for (; i + kLanes <= length; i += kLanes)
      for (std::size_t j = 0; j < kLanes; ++j) take(keys[i + j], j);
    for (std::size_t j = 0; i < length; ++i, ++j) take(keys[i], j);
  });
  const double mean = total(sum) / double(n), variance = total(square) / double(n) - mean * mean;
  return {double(first) + mean, ::sqrt(larger(variance, 0.0)), least(lo), most(hi)};
}

// The rank-th largest (from 0) of n values, which are reordered: Hoare's selection.
template <class T>
SPARSETOPK_LOOP T select(T* values, std::size_t n, std::size_t rank) {
  std::size_t begin = 0, end = n;
  while (end - begin > 1) {
    const T a = values[begin], b = values[begin + (end - begin) / 2], c = values[end - 1];
    const T pivot = larger(smaller(a, b), smaller(larger(a, b), c));
    std::size_t i = begin, j = end - 1;
    for (;; ++i, --j) {
      while (values[i] > pivot) ++i;
      while (pivot > values[j]) --j;
      if (i >= j) break;
      const T swap = values[i];
      values[i] = values[j], values[j] = swap;
    }
    if (i == j) {  // values[i] is the pivot
      if (rank == i) return values[i];
      (rank < i ? end : begin) = rank < i ? i : i + 1;
    } else {
      (rank < i ? end : begin) = i;
    }
  }
  return values[rank];
}

// All keys of a row that are finite, by their ends, and the numbers of those that are not.
template <class T>
struct Scan {
  T smallest = T(Limits<T>::largest), largest = T(-Limits<T>::largest);
  std::size_t infinite = 0, padding = 0, nan = 0;
};

template <bool kAbsolute, class X>
SPARSETOPK_LOOP Scan<Wide<X>> scan(const X* x, std::size_t n) {
  using T = Wide<X>;
  constexpr T limit = T(Limits<T>::largest);
  Scan<T> result;
  for_tiles<kAbsolute>(x, n, [&](const T* keys, std::size_t, std::size_t length) {
    for (std::size_t j = 0; j < length; ++j) {
      const T value = keys[j];
      result.nan += value != value;
      result.infinite += value > limit;
      result.padding += value < -limit;
      if (value >= -limit && value < result.smallest) result.smallest = value;
      if (value <= limit && value > result.largest) result.largest = value;
    }
  });
  return result;
}

// The undecided entries of a row, copied in order, and the number of keys above them.
template <class X>
struct Open {
  X* entries = nullptr;
  std::size_t size = 0, whole = 0;
  bool invalid = false;  // a NaN; or an infinity, for |x|

  // Keep what lies in [from, to] of the n entries of ``source``, which may be the copy itself, and count
  // what lies above.
  template <bool kAbsolute>
  SPARSETOPK_LOOP void gather(const X* source, std::size_t n, Wide<X> from, Wide<X> to) {
    using T = Wide<X>;
    constexpr T limit = T(Limits<T>::largest);
    std::size_t kept = 0;
    for_tiles<kAbsolute>(source, n, [&](const T* keys, std::size_t i, std::size_t length) {
      std::uint32_t positions[kTile + 16];
      std::uint32_t over = 0, bad = 0;
      for (std::size_t j = 0; j < length; ++j) {
        over += keys[j] > to;
        bad += kAbsolute ? !(keys[j] <= limit) : keys[j] != keys[j];
      }
      const std::size_t count = positions_between(keys, length, from, to, positions);
      if (count == length)
        std::memmove(entries + kept, source + i, length * sizeof(X));
      else
        for (std::size_t j = 0; j < count; ++j) entries[kept + j] = source[i + positions[j]];
      kept += count, whole += over, invalid |= bad != 0;
    });
    size = kept;
  }

  // How many keys are greater than hi, and how many at least lo.
  template <bool kAbsolute>
  SPARSETOPK_LOOP void count(Wide<X> lo, Wide<X> hi, std::size_t& over_hi, std::size_t& from_lo) const {
    over_hi = from_lo = whole;
    for_tiles<kAbsolute>(static_cast<const X*>(entries), size,
                         [&](const Wide<X>* keys, std::size_t, std::size_t length) {
                           std::uint32_t over = 0, from = 0;
                           for (std::size_t j = 0; j < length; ++j) {
                             over += keys[j] > hi;
                             from += keys[j] >= lo;
                           }
                           over_hi += over, from_lo += from;
                         });
  }
};

// The ends of what is undecided while the boundary is anywhere in the bracket: no entry below ``from``
// can be selected, and every one above ``to`` is selected whole.
template <class T>
struct Window {
  T from, to;
};

// A little outwards, so that rounding a bound never excludes an entry.
template <class T>
inline T step_down(T x) {
  return x - absolute(x) * T(Limits<T>::epsilon) - Limits<T>::tiniest;
}
template <class T>
inline T step_up(T x) {
  return x + absolute(x) * T(Limits<T>::epsilon) + Limits<T>::tiniest;
}

// The next number, for one that is not the largest. Where subnormal numbers count as 0, the one after 0 is normal.
inline float next_up(float x) {
  const std::uint32_t bits = bit_cast<std::uint32_t>(x);
  const float next = x == 0 ? 1e-45f : bit_cast<float>(x > 0 ? bits + 1 : bits - 1);
  return next > x ? next : 0x1p-126f;
}
inline double next_up(double x) {
  const std::uint64_t bits = bit_cast<std::uint64_t>(x);
  const double next = x == 0 ? 5e-324 : bit_cast<double>(x > 0 ? bits + 1 : bits - 1);
  return next > x ? next : 0x1p-1022;
}

template <class T, class Kind>
Window<T> window(const Bracket<T>& bracket, double lam, const Kind& kind) {
  const double lowest = double(bracket.lo) - lam * kind.alone(double(bracket.lo), lam);
  const double highest = double(bracket.hi) - lam * Kind::zero;
  const double from = (Kind::kFloor ? larger(lowest, 0.0) : lowest) + lam * Kind::zero;
  const double to = highest + lam * kind.top(highest);
  constexpr double limit = Limits<T>::largest;
  const double slack = 4 * Limits<double>::epsilon;
  return {step_down(T(larger(from - slack * ::fabs(from), -limit))), step_up(T(smaller(to + slack * ::fabs(to), limit)))};
}

// Whether the bracket is no wider than what is pooled in any case.
template <class T, class Kind>
bool pools(const Bracket<T>& bracket, double lam, const Kind& kind) {
  const double pooled = lam * (kind.top(double(bracket.hi)) - Kind::zero);
  const bool narrow = double(bracket.hi) - double(bracket.lo) <= 2 * pooled && bracket.hi < T(Limits<T>::largest);
  // In magnitude lam is a pure number, and a large one pools what is scales apart: the pivot must be of the size
  // of the threshold. A boundary at 0 is a case of its own: find out.
  return narrow && (!Kind::kMagnitude || double(bracket.hi) - double(bracket.lo) <= 16 * double(bracket.lo));
}

// Of at most kFew keys inside the bracket, the two that it is about: x_[r] is the smallest key that has
// fewer than r greater ones.
template <bool kAbsolute, class X>
SPARSETOPK_LOOP void settle(Bracket<Wide<X>>& bracket, const Open<X>& open) {
  using T = Wide<X>;
  T inside[kFew], upper[kLanes], lower[kLanes];
  std::size_t count = 0, over = bracket.over_hi;
  if (open.size <= kFew) {  // no need to look which ones are inside
    count = open.size, over = open.whole;
    for (std::size_t i = 0; i < count; ++i) inside[i] = key<kAbsolute>(open.entries[i]);
    if (count == 0) return;
  } else {
    for (std::size_t i = 0; i < open.size; ++i) {
      const T value = key<kAbsolute>(open.entries[i]);
      if (value >= bracket.lo && value <= bracket.hi && count < kFew) inside[count++] = value;
    }
  }
  for (std::size_t i = count; i % kLanes != 0; ++i) inside[i] = inside[0];  // as if it were there once
  for (std::size_t i = 0; i < kLanes; ++i) upper[i] = lower[i] = T(Limits<T>::largest);
  const std::uint32_t above = std::uint32_t(bracket.above - over), below = std::uint32_t(bracket.below - over);
  for (std::size_t first = 0; first < count; first += kLanes) {
    std::uint32_t greater[kLanes] = {};
    for (std::size_t j = 0; j < count; ++j)
      for (std::size_t i = 0; i < kLanes; ++i) greater[i] += inside[j] > inside[first + i];
    for (std::size_t i = 0; i < kLanes; ++i) {
      const T value = greater[i] < above ? inside[first + i] : upper[i];
      upper[i] = smaller(upper[i], value);
    }
    for (std::size_t i = 0; i < kLanes; ++i) {
      const T value = greater[i] < below ? inside[first + i] : lower[i];
      lower[i] = smaller(lower[i], value);
    }
  }
  bracket.hi = least(upper), bracket.lo = least(lower), bracket.exact = true;
}

// A key inside the bracket, about where the boundary is: that of a few spread over the copy.
template <bool kAbsolute, class X>
SPARSETOPK_LOOP Wide<X> probe(const Bracket<Wide<X>>& bracket, const Open<X>& open) {
  using T = Wide<X>;
  constexpr std::size_t kMost = 63;
  const std::size_t probes = open.size < 1024 ? 15 : kMost;
  T sample[kMost + 1];
  std::size_t taken = 0, stride = larger(open.size / probes, std::size_t(1));
  for (; taken == 0; stride = 1)  // there is one inside: sooner or later it is looked at
    for (std::size_t i = 0; i < open.size && taken <= probes; i += stride) {
      const T value = key<kAbsolute>(open.entries[i]);
      if (value >= bracket.lo && value <= bracket.hi) sample[taken++] = value;
    }
  const double inside = double(bracket.from_lo - bracket.over_hi);
  const double share = (double(bracket.above - bracket.over_hi) - 0.5) / inside;
  return select(sample, taken, smaller(std::size_t(share * double(taken)), taken - 1));
}

// Cut the bracket at keys inside it until it is exact, or no wider than what is pooled in any case.
template <class X, class Kind>
void tighten(Bracket<Wide<X>>& bracket, Open<X>& open, double lam, const Kind& kind) {
  constexpr bool kAbsolute = Kind::kAbsolute;
  using T = Wide<X>;
  bracket.exact |= bracket.lo == bracket.hi;
  while (!bracket.exact) {
    if (pools(bracket, lam, kind)) return;
    if (bracket.from_lo - bracket.over_hi <= kFew) return settle<kAbsolute>(bracket, open);
    const T cut = probe<kAbsolute>(bracket, open);
    std::size_t greater, at_least;
    open.template count<kAbsolute>(cut, cut, greater, at_least);
    if (greater >= bracket.below) {
      bracket.lo = next_up(cut), bracket.from_lo = greater;
    } else if (at_least < bracket.above) {
      bracket.hi = -next_up(-cut), bracket.over_hi = at_least;
    } else if (greater < bracket.above && at_least >= bracket.below) {
      bracket.lo = bracket.hi = cut, bracket.exact = true;
    } else {  // the cut is one of the two; the other is the key next to it
      const bool is_lower = at_least >= bracket.below;
      T next = is_lower ? bracket.hi : bracket.lo;
      for (std::size_t i = 0; i < open.size; ++i) {
        const T value = key<kAbsolute>(open.entries[i]);
        if (is_lower ? value > cut && value < next : value < cut && value > next) next = value;
      }
      bracket.hi = is_lower ? next : cut, bracket.lo = is_lower ? cut : next, bracket.exact = true;
    }
    const Window<T> narrower = window(bracket, lam, kind);
    open.template gather<kAbsolute>(open.entries, open.size, narrower.from, narrower.to);
  }
}

}  // namespace SPARSETOPK_LEVEL
}  // namespace sparsetopk
