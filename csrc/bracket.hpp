// Where the k boundary of a row is: x_[ceil k] and x_[floor k + 1], or an interval around both that is
// narrow enough, with a copy of the entries that it leaves undecided.
//
// As in Floyd-Rivest selection an interval is guessed (from mean and deviation, or from a sample), one
// pass over the row checks it by counting and copies what is undecided, and the copy is cut down
// further until the interval is no wider than what the relaxation pools anyway. Wrong guesses cost a
// pass, never the answer; and where guesses do not help, the boundary is found digit by digit, so that no
// row takes more than a few passes (threshold.hpp counts them).
#pragma once

#include <cmath>

#include "digits.hpp"
#include "kinds.hpp"
#include "sample.hpp"
#include "vectors.hpp"

namespace sparsetopk {
namespace SPARSETOPK_LEVEL {

constexpr std::size_t kShort = 8192;  // rows up to this length are guessed from mean and deviation
constexpr std::size_t kSample = 4096;
constexpr std::size_t kFew = 64;  // among so few, order statistics are found by comparing all pairs
constexpr std::size_t kProbes = 64;
constexpr int kDigit = 13, kShortDigit = 11;  // bits; 5 or 6 digits make a double, 3 a float

// lo <= x_[below] <= x_[above] <= hi, where above = ceil k and below = floor k + 1 count from the
// largest, with the number of keys over hi and that of keys from lo on.
template <class T>
struct Bracket {
  T lo, hi;
  std::size_t above, below;
  std::size_t over_hi = 0, from_lo = 0;
  bool exact = false;   // lo = x_[below] and hi = x_[above]
  bool counted = true;  // and the two numbers are those of these
  bool wide = false;    // most of the row is undecided, it seems, and will be
  std::size_t& read;    // counts entries that are read to find it: of the row, and of copies

  Bracket(double k, T lo_, T hi_, std::size_t& read_)
      : lo(lo_), hi(hi_), above(rank(::ceil(k))), below(rank(k) + 1), read(read_) {}
  // Of a k that is none, which is not looked for, 0.
  static std::size_t rank(double k) { return k > 0 && k < 0x1p62 ? std::size_t(k) : 0; }
  bool holds() const { return over_hi < above && from_lo >= below; }
  std::size_t inside() const { return from_lo - over_hi; }
  void take(std::size_t over_hi_, std::size_t from_lo_) { over_hi = over_hi_, from_lo = from_lo_, counted = true; }
};

// The z above which n normal numbers have their k largest (folded: the k largest in magnitude), and how far
// off it may be: 2.5 standard errors.
struct NormalGuess {
  bool folded;
  double k = -1, z = 0, margin = 0, density = 0;  // density: how many of the numbers there are around z

  void prepare(double k_, std::size_t n) {
    if (k == k_) return;
    k = k_;
    const double share = (k + 0.5) / (double(n) + 1), upper = folded ? share / 2 : share;
    const double tail = upper < 0.5 ? upper : 1 - upper;
    const double s = ::sqrt(-2 * ::log(tail));  // Abramowitz and Stegun 26.2.23, good to 4.5e-4
    const double quantile =
        s - (2.515517 + s * (0.802853 + s * 0.010328)) / (1 + s * (1.432788 + s * (0.189269 + s * 0.001308)));
    z = upper < 0.5 ? quantile : -quantile;
    density = double(n) * (folded ? 2 : 1) * 0.3989422804014327 * ::exp(-quantile * quantile / 2);
    margin = 2.5 * ::sqrt(share * (1 - share) * double(n)) / density;
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

// The smallest of n keys, and the largest of those up to a limit.
template <class T>
struct Ends {
  T smallest = T(HUGE_VAL), largest = -T(HUGE_VAL);

  void add(T key, T limit = T(HUGE_VAL)) {
    smallest = smaller(smallest, key), largest = larger(largest, key <= limit ? key : largest);
  }
  void add(const Ends& other) {
    smallest = smaller(smallest, other.smallest), largest = larger(largest, other.largest);
  }
};
template <bool kAbsolute, class X>
SPARSETOPK_LOOP Ends<Wide<X>> ends(const X* x, std::size_t n, Wide<X> limit) {
  using T = Wide<X>;
  using V = Vector<T>;
  Ends<T> found;
  V lo = all_lanes(found.smallest), hi = all_lanes(found.largest);
  const V none = hi, most = all_lanes(limit);
  std::size_t i = 0;
  for (; i + kWidth<T> <= n; i += kWidth<T>) {
    const V wide = load(x + i), value = kAbsolute ? absolute_lanes(wide) : wide;
    lo = smaller_lanes(lo, value), hi = larger_lanes(hi, value <= most ? value : none);
  }
  for (std::size_t j = 0; j < kWidth<T>; ++j)
    found.smallest = smaller(found.smallest, T(lo[j])), found.largest = larger(found.largest, T(hi[j]));
  for (; i < n; ++i) found.add(key<kAbsolute>(x[i]), limit);
  return found;
}

// How many of n values are over the cut.
template <class T>
inline std::size_t count_over(const T* values, std::size_t n, T cut) {
  constexpr std::size_t kW = kWidth<T>;
  Flags<T> even{}, odd{};
  const Vector<T> over = all_lanes(cut);
  std::size_t i = 0, count = 0;
  for (; i + 2 * kW <= n; i += 2 * kW) even -= load(values + i) > over, odd -= load(values + i + kW) > over;
  even += odd;
  for (std::size_t j = 0; j < kW; ++j) count += std::size_t(even[j]);
  for (; i < n; ++i) count += values[i] > cut;
  return count;
}

// The rank-th largest (from 0) of n values, none of which is NaN: the bits of where it is are halved by counting, which
// vectorises, until they are one number or as many values are over them as there should be.
template <class T>
SPARSETOPK_LOOP T select(const T* values, std::size_t n, std::size_t rank) {
  const Ends<T> all = ends<false>(values, n, T(HUGE_VAL));
  Ordered<T> lo = ordered(all.smallest), hi = ordered(all.largest);
  while (lo < hi) {
    const Ordered<T> middle = lo + (hi - lo) / 2;
    const std::size_t over = count_over(values, n, from_ordered<T>(middle));
    if (over > rank) lo = middle + 1;
    if (over <= rank) hi = middle;
    if (over == rank) break;
  }
  return ends<false>(values, n, from_ordered<T>(hi)).largest;
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
  using V = Vector<T>;
  constexpr T limit = T(Limits<T>::largest);
  const V most = all_lanes(limit), none = -most;
  V smallest = most, largest = none;
  Scan<T> result;
  const auto count = [](unsigned bits) { return std::size_t(__builtin_popcount(bits)); };
  const auto take = [&](V a) {
    result.nan += count(compare_bits<Compare::unordered, T>(a, a));
    result.infinite += count(compare_bits<Compare::above, T>(a, most));
    result.padding += count(compare_bits<Compare::above, T>(none, a));
    smallest = smaller_lanes(smallest, a >= none ? a : most), largest = larger_lanes(largest, a <= most ? a : none);
  };
  std::size_t i = 0;
  for (; i + kWidth<T> <= n; i += kWidth<T>) {
    const V wide = load(x + i);
    take(kAbsolute ? absolute_lanes(wide) : wide);
  }
  for (; i < n; ++i) {
    const T a = key<kAbsolute>(x[i]);
    result.nan += a != a, result.infinite += a > limit, result.padding += a < -limit;
    if (a >= -limit && a <= limit)
      result.smallest = smaller(result.smallest, a), result.largest = larger(result.largest, a);
  }
  for (std::size_t j = 0; j < kWidth<T>; ++j)
    result.smallest = smaller(result.smallest, T(smallest[j])), result.largest = larger(result.largest, T(largest[j]));
  return result;
}

// The ends of what is undecided while the boundary is anywhere in the bracket: no entry below ``from``
// can be selected, and every one above ``to`` is selected whole.
template <class T>
struct Window {
  T from, to;
};

// The undecided entries of a row, copied in order, and the number of keys above them; or the row itself, with what is
// decided among them.
template <class X>
struct Open {
  using T = Wide<X>;
  X* room = nullptr;           // for copies
  const X* entries = nullptr;  // there, or the row
  std::size_t size = 0, whole = 0;
  std::size_t over_hi = 0, from_lo = 0;  // of the copy, how many keys are greater than hi, and how many at least lo
  bool invalid = false;                  // a NaN; or an infinity, for |x|
  Ends<T> range;                         // of all entries, where it is known
  bool ranged = false;

  // Keep what lies in the window of the n entries of ``source``, which may be the copy itself, count what lies
  // above, and (unless that can wait) what is where in the bracket, while it is in the first cache.
  template <bool kAbsolute>
  SPARSETOPK_LOOP void gather(const X* source, std::size_t n, const Window<T>& window, T lo, T hi, bool counts = true) {
    std::size_t kept = 0, seen = 0;
    over_hi = from_lo = 0;
    for (std::size_t i = 0; i < n; i += kTile) {
      if (i + kTile < n) fetch_tile(source + i + kTile, smaller(kTile, n - i - kTile));
      const TilePart tile =
          keep_between<kAbsolute>(source + i, smaller(kTile, n - i), window.from, window.to, room + kept);
      kept += tile.count, whole += tile.over, invalid |= tile.infinite;
      if (kept - seen < kTile && i + kTile < n) continue;  // too few to be worth a loop
      invalid |= any_nan(room + seen, kept - seen);
      if (counts) add<kAbsolute>(room + seen, kept - seen, lo, hi);
      seen = kept;
    }
    entries = room, size = kept, ranged = false;
  }

  // Take all of the row as it is, and see where it ends.
  template <bool kAbsolute>
  SPARSETOPK_LOOP void take(const X* x, std::size_t n, T lo, T hi) {
    using V = Vector<T>;
    constexpr T limit = T(Limits<T>::largest);
    const V low = all_lanes(lo), high = all_lanes(hi), most = all_lanes(limit);
    V smallest = all_lanes(T(HUGE_VAL)), largest = -smallest;
    unsigned strange = 0;  // NaN; or an infinity, for |x|
    std::size_t i = 0;
    over_hi = from_lo = 0;
    for (; i + kWidth<T> <= n; i += kWidth<T>) {
      const V wide = load(x + i), a = kAbsolute ? absolute_lanes(wide) : wide;
      over_hi += std::size_t(__builtin_popcount(compare_bits<Compare::above, T>(a, high)));
      from_lo += std::size_t(__builtin_popcount(compare_bits<Compare::from, T>(a, low)));
      strange |= kAbsolute ? compare_bits<Compare::not_at_most, T>(a, most) : compare_bits<Compare::unordered, T>(a, a);
      smallest = smaller_lanes(smallest, a), largest = larger_lanes(largest, a);
    }
    range = {};
    for (std::size_t j = 0; j < kWidth<T>; ++j) range.add(smallest[j]), range.add(largest[j]);
    for (; i < n; ++i) {
      const T a = key<kAbsolute>(x[i]);
      over_hi += a > hi, from_lo += a >= lo, range.add(a);
      strange |= a != a || (kAbsolute && a > limit);
    }
    entries = x, size = n, invalid |= strange != 0, ranged = true;
  }

  static bool any_nan(const X* some, std::size_t length) {
    std::uint32_t found = 0;
    for (std::size_t j = 0; j < length; ++j) found += widen(some[j]) != widen(some[j]);
    return found > 0;
  }

  // Count where in the bracket ``length`` entries lie.
  template <bool kAbsolute>
  void add(const X* some, std::size_t length, T lo, T hi) {
    for_tiles<kAbsolute>(some, length, [&](const T* keys, std::size_t, std::size_t tile) {
      std::uint32_t over = 0, from = 0;
      for (std::size_t j = 0; j < tile; ++j) {
        over += keys[j] > hi;
        from += keys[j] >= lo;
      }
      over_hi += over, from_lo += from;
    });
  }

  // The same for the whole copy.
  template <bool kAbsolute>
  SPARSETOPK_LOOP void count(T lo, T hi) {
    over_hi = from_lo = 0;
    add<kAbsolute>(entries, size, lo, hi);
  }
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
  return {step_down(T(larger(from - slack * ::fabs(from), -limit))),
          step_up(T(smaller(to + slack * ::fabs(to), limit)))};
}

// Whether the bracket is no wider than a few times what is pooled in any case; ``few``: than many times that, as a step of
// Newton's method takes less time than to cut it.
template <class T, class Kind>
bool pools(const Bracket<T>& bracket, double lam, const Kind& kind, bool few = false) {
  const double pooled = lam * (kind.top(double(bracket.hi)) - Kind::zero);
  // Newton's method may start from further away where S costs next to nothing, and doubles have digits to spare.
  const double widest = sizeof(T) > sizeof(float) || !Kind::kCheap ? 2 : few ? 64 : 16;
  const bool narrow = double(bracket.hi) - double(bracket.lo) <= widest * pooled && bracket.hi < T(Limits<T>::largest);
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
  bracket.hi = least(upper), bracket.lo = least(lower), bracket.exact = true, bracket.counted = false;
}

// A key inside the bracket, about where the boundary is: that of a few in the copy. False if none of them is inside.
template <bool kAbsolute, class X>
SPARSETOPK_LOOP bool probe(const Bracket<Wide<X>>& bracket, const Open<X>& open, Wide<X>& found) {
  using T = Wide<X>;
  const std::size_t probes = open.size < 1024 ? 16 : kProbes;
  T sample[kProbes];
  std::size_t taken = 0;
  Positions positions(open.entries, open.size, probes);
  for (std::size_t i = 0; i < probes; ++i) {
    const T value = key<kAbsolute>(open.entries[positions.next()]);
    if (value >= bracket.lo && value <= bracket.hi) sample[taken++] = value;
  }
  if (taken == 0) return false;
  const double share = (double(bracket.above - bracket.over_hi) - 0.5) / double(bracket.inside());
  found = select(sample, taken, smaller(std::size_t(share * double(taken)), taken - 1));
  return true;
}

// The boundary lies between two keys, one on either side of the cut: the smallest from there on and the largest
// below it.
template <bool kAbsolute, class X>
SPARSETOPK_LOOP void split(Bracket<Wide<X>>& bracket, const X* entries, std::size_t n, Wide<X> cut) {
  using T = Wide<X>;
  T above = bracket.hi, below = bracket.lo;
  for (std::size_t i = 0; i < n; ++i) {
    const T value = key<kAbsolute>(entries[i]);
    if (value >= cut && value < above) above = value;
    if (value < cut && value > below) below = value;
  }
  bracket.hi = above, bracket.lo = below, bracket.exact = true, bracket.counted = false;
  bracket.read += n;
}

// Cut the bracket at a key, by counting.
template <bool kAbsolute, class X>
void cut_at(Bracket<Wide<X>>& bracket, Open<X>& open, Wide<X> cut) {
  open.template count<kAbsolute>(cut, cut);
  bracket.read += open.size;
  const std::size_t greater = open.whole + open.over_hi, at_least = open.whole + open.from_lo;
  if (greater >= bracket.below) {
    bracket.lo = next_up(cut), bracket.from_lo = greater;
  } else if (at_least < bracket.above) {
    bracket.hi = -next_up(-cut), bracket.over_hi = at_least;
  } else if (greater < bracket.above && at_least >= bracket.below) {
    bracket.lo = bracket.hi = cut, bracket.exact = true;
  } else {  // the cut is one of the two
    split<kAbsolute>(bracket, open.entries, open.size, at_least >= bracket.below ? next_up(cut) : cut);
  }
}

// A bracket that is open on one side ends where the copy does, of which all that is not decided is part.
template <bool kAbsolute, class X>
SPARSETOPK_LOOP void close(Bracket<Wide<X>>& bracket, const Open<X>& open) {
  using T = Wide<X>;
  constexpr T limit = T(Limits<T>::largest);
  const bool closed = bracket.lo > -limit && limit > bracket.hi;
  if (closed || open.size == 0) return;
  const bool known = open.ranged && open.range.largest <= limit;
  const Ends<T> all = known ? open.range : ends<kAbsolute>(open.entries, open.size, limit);
  bracket.lo = larger(bracket.lo, all.smallest), bracket.hi = smaller(bracket.hi, all.largest);
  bracket.read += known ? 0 : open.size;
}

// Cut the bracket at keys inside it until it is exact, or no wider than what is pooled in any case. False if it is
// not so far after reading as many entries as are allowed; two more looks at the copy are for a boundary that is found.
template <class X, class Kind>
bool tighten(Bracket<Wide<X>>& bracket, Open<X>& open, double lam, const Kind& kind, std::size_t allowed) {
  constexpr bool kAbsolute = Kind::kAbsolute;
  constexpr std::size_t kStepped = std::is_same<X, float>::value ? kTile : 0;  // as many are added up in float at once
  const std::size_t most = bracket.read + allowed;
  if (!bracket.exact) close<kAbsolute>(bracket, open);
  bracket.exact |= bracket.lo == bracket.hi;
  while (!bracket.exact && !pools(bracket, lam, kind, open.size <= kStepped)) {
    if (bracket.inside() <= kFew) {
      bracket.read += open.size;
      settle<kAbsolute>(bracket, open);
      return true;
    }
    Wide<X> cut;
    bracket.read += kSeeds + kProbes;
    if (bracket.read + open.size > most || !probe<kAbsolute>(bracket, open, cut)) return false;
    cut_at<kAbsolute>(bracket, open, cut);
    if (!bracket.exact && bracket.read + open.size > most) return false;
    bracket.read += open.size;
    open.template gather<kAbsolute>(open.entries, open.size, window(bracket, lam, kind), bracket.lo, bracket.hi);
    bracket.take(open.whole + open.over_hi, open.whole + open.from_lo);
  }
  return true;
}

// The least number that is not before another in order, and the largest that is not after it. They differ from it
// next to 0 alone: no key is ordered where -0 would be, nor where numbers count as 0.
template <class T>
T least_from_ordered(Ordered<T> number) {
  const T value = from_ordered<T>(number);
  return value == 0 && number > kOrderedZero<T> ? next_up(T(0)) : value;
}
template <class T>
T most_to_ordered(Ordered<T> number) {
  const T value = from_ordered<T>(number);
  return value == 0 && number < kOrderedZero<T> ? -next_up(T(0)) : value;
}

// Narrow the bracket to the numbers that share one more digit of ``bits`` bits with the boundary, given all entries
// that are in it; or to the two keys that the boundary lies between, if they differ in this digit.
template <bool kAbsolute, class X>
SPARSETOPK_LOOP void cut_by_digit(Bracket<Wide<X>>& bracket, const X* entries, std::size_t n, int bits) {
  using T = Wide<X>;
  const Ordered<T> first = ordered(bracket.lo), last = ordered(bracket.hi);
  const int shift = larger(bit_width(last - first) - bits, 0);
  std::size_t counts[std::size_t(1) << kDigit], j = std::size_t((last - first) >> shift), over = bracket.over_hi;
  std::memset(counts, 0, (j + 1) * sizeof(counts[0]));
  count_buckets<kAbsolute, T>(entries, n, first, last, shift, counts);
  bracket.read += n;
  for (; j > 0 && over + counts[j] < bracket.above; --j) over += counts[j];
  const Ordered<T> start = first + (Ordered<T>(j) << shift), rest = (Ordered<T>(1) << shift) - 1;
  const bool both = over + counts[j] >= bracket.below;
  if (!both && shift > 0) return split<kAbsolute>(bracket, entries, n, least_from_ordered<T>(start));
  bracket.hi = last - start < rest ? bracket.hi : most_to_ordered<T>(start + rest);
  bracket.lo = least_from_ordered<T>(start);
  bracket.take(over, over + counts[j]);
  bracket.exact = !(bracket.lo < bracket.hi);
  if (both) return;
  while (j > 0 && counts[--j] == 0) {  // every bucket is one number, and this is the next one that there is
  }
  bracket.lo = from_ordered<T>(first + Ordered<T>(j));
}

// The same as ``tighten``, whatever the n entries are, as long as all that lie in the bracket are among them. With d
// digits to a key it reads d n entries at most, and kFew: a digit costs one pass; a copy of a quarter of the entries or
// less is made where two or more digits are left, and costs one more, but saves three quarters of each of these. For
// the last digit of few entries a copy takes the place of the pass. Two keys that the boundary lies between are found
// by one more pass too, unless the last digit tells them apart, and then no digit is left. The copy is of what is in
// the bracket, without what is undecided around it.
template <class X, class Kind>
void tighten_by_digits(Bracket<Wide<X>>& bracket, Open<X>& open, const X* source, std::size_t n, double lam,
                       const Kind& kind, int bits) {
  constexpr bool kAbsolute = Kind::kAbsolute;
  while (!bracket.exact && !pools(bracket, lam, kind)) {
    cut_by_digit<kAbsolute>(bracket, source, n, bits);
    const bool last = bit_width(ordered(bracket.hi) - ordered(bracket.lo)) <= bits;
    if (bracket.exact || (last && bracket.inside() > kFew) || bracket.inside() > n / 4) continue;
    open.template gather<kAbsolute>(source, n, {bracket.lo, bracket.hi}, bracket.lo, bracket.hi);
    bracket.read += n;
    source = open.entries, n = open.size;
    if (n > 0 && n <= kFew) {
      bracket.read += n;
      return settle<kAbsolute>(bracket, open);
    }
  }
}

}  // namespace SPARSETOPK_LEVEL
}  // namespace sparsetopk
