// One row of a top-k operator: its threshold v with sum_i min(S((a_i - v)/lam), phi'(v)) = k phi'(v),
// found in a few passes without a sort. Nothing is allocated: the caller lends a buffer of the row's length.
//
// To find the boundary, and the entries that Newton's method is left with, no row of n > kShort entries is read more
// than 8 times: at most 8 n + 3 kSample entries are read, of the row and of copies. Either the guess holds, and these
// are a sample, one pass to check it, n + kSample at most to tighten it, 5 n for the digits of a double if that does not
// do, and one pass to copy what is undecided; or it does not hold, and then a scan takes the place of the tightening. A
// short row has three passes more at most, and 2 kSample entries: for its moments, for a second guess, and for digits
// that are shorter, as tables that are longer than the row would be slower than passes over it. Not counted is how often
// a sample, or a row of up to kTile entries, is looked at while it is in the first cache.
#pragma once

#include <cmath>

#include "blocks.hpp"
#include "bracket.hpp"
#include "problem.hpp"

namespace sparsetopk {
namespace SPARSETOPK_LEVEL {

constexpr double kNaN = __builtin_nan(""), kInfinity = HUGE_VAL;
constexpr double kSteepest = 1e280;  // keeps sums and products of slopes finite, for any lam > 0

// a -> t = (a - pivot)/lam + delta, by multiplication.
struct Distance {
  double pivot, delta, lam, inverse;
  Distance(double pivot_, double delta_, double lam_) : pivot(pivot_), delta(delta_), lam(lam_), inverse(1 / lam) {}
  double operator()(double a) const { return (a - pivot) * inverse + delta; }
};

inline double clip(double t, double low, double high) {
  const double least = t > low ? t : low;
  return least < high ? least : high;
}

struct Sums {
  double mass = 0;   // sum of S(t) over the entries inside the block
  double slope = 0;  // sum of S'(t) over them
  double above = 0;  // how many entries are selected whole
};

// Adds up over t[0 .. length) + delta; t has room to be filled up to full lanes.
//
// Written so that compilers vectorise it: a value is clipped rather than tested, no condition is used
// twice (gcc would make branches of it), and each lane has its own sums. What is selected whole adds S(top) - S(top):
// added up and taken off at the end, thousands of these would leave nothing of the digits of one entry in the block.
template <class Kind>
SPARSETOPK_LOOP Sums add_up_all(double* t, std::size_t length, double delta, double top, const Kind& kind) {
  constexpr double zero = Kind::zero;
  double mass[kLanes] = {}, slope[kLanes] = {}, above[kLanes] = {};
  const double most = kind.at(top).value;
  for (std::size_t j = length; j % kLanes != 0; ++j) t[j] = -kInfinity;
  for (std::size_t i = 0; i < length; i += kLanes)
    for (std::size_t j = 0; j < kLanes; ++j) {
      const double at = t[i + j] + delta, low = at > zero ? at : zero, clipped = low < top ? low : top;
      const Response response = kind.at(clipped);
      const double whole = at >= top ? 1.0 : 0.0;
      mass[j] += response.value - whole * most;
      slope[j] += at == clipped ? response.slope : 0.0;
      above[j] += whole;
    }
  return {total(mass), total(slope), total(above)};
}

// The same where S is costly: it is computed for the entries inside the block alone.
template <class Kind>
SPARSETOPK_LOOP Sums add_up_inside(const double* t, std::size_t length, double delta, double top, const Kind& kind_) {
  const Kind kind = kind_;  // in registers
  std::uint32_t positions[kTile + 16];
  double inside[kTile + kLanes];
  const std::size_t count = positions_between(t, length, Kind::zero - delta, top - delta, positions);
  for (std::size_t j = 0; j < count; ++j) inside[j] = clip(t[positions[j]] + delta, Kind::zero, top);
  for (std::size_t j = count; j % kLanes != 0; ++j) inside[j] = Kind::zero;
  double mass[kLanes] = {}, slope[kLanes] = {};
  for (std::size_t i = 0; i < count; i += kLanes)
    for (std::size_t j = 0; j < kLanes; ++j) {
      if (!Kind::kVector && inside[i + j] <= Kind::zero) continue;
      const Response response = kind.at(inside[i + j]);
      mass[j] += response.value;
      slope[j] += response.slope;
    }
  std::uint32_t above = 0;
  for (std::size_t j = 0; j < length; ++j) above += t[j] > top - delta;
  return {total(mass), total(slope), double(above)};
}

template <class Kind>
void add_up(double* t, std::size_t length, double delta, double top, const Kind& kind, Sums& sums) {
  const Sums part = Kind::kCheap ? add_up_all(t, length, delta, top, kind) : add_up_inside(t, length, delta, top, kind);
  sums.mass += part.mass, sums.slope += part.slope, sums.above += part.above;
}

// The undecided entries as distances to the pivot in units of lam, a tile at a time; all at once if they
// fit one tile.
struct Distances {
  const void* entries;
  std::size_t size;
  Distance distance;
  void (*fill)(const Distances& self, std::size_t begin, std::size_t length, double* t);
  // The sums of all, where float has the digits; null or false where it has not.
  bool (*in_float)(const Distances& self, double delta, Sums& sums) = nullptr;
};

// A threshold and distances to it in float alone. They are measured from the float that is next to v: near to it they
// are exact, so that t has an error of a few roundings of its own, however small it is.
template <class Kind>
struct FloatDistance {
  float pivot, inverse, delta;

  FloatDistance(const Distance& from, double v)
      : pivot(float(v)),
        inverse(float(from.inverse)),
        delta(float(((double(pivot) - from.pivot) + from.lam * from.delta) * from.inverse)) {}
  // Whether all numbers are of a size that a float has room for, also squared. Where t starts at -1 it is not small
  // where y is.
  static bool fits(double v, double lam) {
    const double size = ::fabs(v);
    return Kind::zero == 0 && lam > 1e-12 && lam < 1e12 && size < 1e25 && (!Kind::kMagnitude || size > 1e-25);
  }
  float operator()(float a) const { return (a - pivot) * inverse + delta; }
};

// Of every lane: the sum of distances inside [from, to), and how many lanes are inside, and above.
struct FloatLanes {
  using V = Vector<float>;
  V sum{};
#if defined(SPARSETOPK_X86) && defined(__AVX512F__)
  // A mask says how many are set in fewer instructions than it takes to count in lanes.
  std::size_t inside = 0, above = 0;
  void add(V distance, V from, V to) {
    const __mmask16 least = _mm512_cmp_ps_mask((__m512)distance, (__m512)from, _CMP_GE_OQ);
    const __mmask16 in = _mm512_mask_cmp_ps_mask(least, (__m512)distance, (__m512)to, _CMP_LT_OQ);
    sum = (V)_mm512_mask_add_ps((__m512)sum, in, (__m512)sum, (__m512)distance);
    inside += std::size_t(__builtin_popcount(in)), above += std::size_t(__builtin_popcount(least ^ in));
  }
  double count_inside() const { return double(inside); }
  double count_above() const { return double(above); }
#else
  Flags<float> inside{}, above{};
  void add(V distance, V from, V to) {
    const Flags<float> least = distance >= from, in = least & (distance < to);
    sum += (V)((Flags<float>)distance & in);
    inside -= in, above -= least & ~in;
  }
  double count_inside() const { return count(inside); }
  double count_above() const { return count(above); }
  static double count(Flags<float> counts) {
    double all = 0;
    for (std::size_t j = 0; j < kWidth<float>; ++j) all += double(counts[j]);
    return all;
  }
#endif
};

// From so many undecided entries on that is worth it: those of 16 bits are widened every time that they are added up.
template <class X>
constexpr std::size_t kManyInFloat = std::is_same<X, float>::value ? 64 : kTile + 1;

// Sums for S(t) = t, from those of a - pivot, as t is that over lam, and delta more. Eight numbers in a row are added in
// float, and what they come to in double; as elsewhere there are kLanes of each, however wide vectors are.
template <class Kind, class X>
SPARSETOPK_LOOP bool add_up_in_float(const Distances& self, double delta, Sums& sums) {
  using V = Vector<float>;
  constexpr std::size_t kBlock = 8 * kLanes, kW = kWidth<float>, kParts = kLanes / kW;
  const double lam = self.distance.lam, v = self.distance.pivot - lam * delta;
  if (!FloatDistance<Kind>::fits(v, lam)) return false;
  const FloatDistance<Kind> distance({self.distance.pivot, delta, lam}, v);
  const double top = Kind::kMagnitude ? v : 1;
  const V pivot = all_lanes(distance.pivot), from = all_lanes(float(-lam * double(distance.delta)));
  const V to = all_lanes(float(lam * (top - double(distance.delta))));
  double in_lanes[kLanes] = {}, away = 0, inside = 0;
  FloatLanes lanes[kParts];
  const auto add = [&](const X* x, std::size_t length) {
    float parts[kLanes];
    for (std::size_t p = 0; p < kParts; ++p) lanes[p].sum = V{};
#pragma GCC unroll 8
    for (std::size_t first = 0; first < length; first += kLanes)
#pragma GCC unroll 4
      for (std::size_t p = 0; p < kParts; ++p) {
        const V wide = load(x + first + p * kW), a = Kind::kAbsolute ? absolute_lanes(wide) : wide;
        lanes[p].add(a - pivot, from, to);
      }
    for (std::size_t p = 0; p < kParts; ++p) store(lanes[p].sum, parts + p * kW);
    for (std::size_t j = 0; j < kLanes; ++j) in_lanes[j] += double(parts[j]);
  };
  const X* x = static_cast<const X*>(self.entries);
  std::size_t i = 0;
  for (; i + kBlock <= self.size; i += kBlock) add(x + i, kBlock);
  const std::size_t rest = (self.size - i) / kLanes * kLanes;
  if (rest > 0) add(x + i, rest), i += rest;
  for (const FloatLanes& part : lanes) inside += part.count_inside(), sums.above += part.count_above();
  for (; i < self.size; ++i) {
    const float a = key<Kind::kAbsolute>(x[i]) - distance.pivot;
    const bool in = a >= from[0] && a < to[0];
    away += in ? double(a) : 0, inside += in, sums.above += a >= to[0];
  }
  sums.mass = (total(in_lanes) + away) * self.distance.inverse + inside * double(distance.delta);
  sums.slope = inside;
  return true;
}

template <bool kAbsolute, class X>
void fill_distances(const Distances& self, std::size_t begin, std::size_t length, double* t) {
  const X* x = static_cast<const X*>(self.entries) + begin;
  const Distance distance = self.distance;
  for (std::size_t j = 0; j < length; ++j) t[j] = distance(double(key<kAbsolute>(x[j])));
}

template <class Kind>
class Equation {
 public:
  Equation(const Distances& distances, const Kind& kind) : distances_(distances), kind_(kind) {}
  Sums operator()(double delta, double top) {
    Sums sums;
    if (distances_.in_float != nullptr && distances_.in_float(distances_, delta, sums)) return sums;
    if (fits()) {
      if (!filled_) distances_.fill(distances_, 0, distances_.size, t_), filled_ = true;
      add_up(t_, distances_.size, delta, top, kind_, sums);
      return sums;
    }
    for (std::size_t i = 0; i < distances_.size; i += kTile) {
      const std::size_t length = smaller(kTile, distances_.size - i);
      distances_.fill(distances_, i, length, t_);
      add_up(t_, length, delta, top, kind_, sums);
    }
    return sums;
  }

 private:
  bool fits() const { return distances_.size <= kTile; }
  const Distances& distances_;
  const Kind& kind_;
  bool filled_ = false;
  double t_[kTile + kLanes];
};

// Between lo and hi; between the thresholds that they stand for, if these are magnitudes that are scales apart.
template <class Kind>
double half_way(double pivot, double lam, double lo, double hi) {
  const double most = pivot - lam * lo, least = pivot - lam * hi;
  if (Kind::kMagnitude && least > 0 && most > 16 * least) return (pivot - ::sqrt(most) * ::sqrt(least)) / lam;
  return lo + (hi - lo) / 2;
}

// The root delta in [lo, hi] by Newton's method kept inside the bracket, as increasing_root does in
// NumPy: a step that leaves it, or three that do not halve it, give way to bisection; done when the
// residual is met or the bracket is a few roundings wide, of delta or of ``unit`` if that is larger. From
// a residual of ``tolerance`` on, one more step is enough, provided that the slope hardly changes over it.
template <class Kind>
SPARSETOPK_LOOP double solve_delta(const Distances& distances, double k, double lam, double lo, double hi, double start,
                                   double unit, double tolerance, const Kind& kind) {
  Equation<Kind> equation(distances, kind);
  const double pivot = distances.distance.pivot;
  const double e = 1 / kind.exponent;
  const bool power = e != 1 && Kind::zero == 0 && kind.second() == 0;
  const double scale = larger(k, 1.0) * kind.prime(pivot - lam * hi);
  double delta = start, width = hi - lo, best = lo, residual = kInfinity, moved = 0, last_slope = 0;
  // The bracket halves at least every four steps: enough of them to reach any double, so that the loop
  // always ends by one of the rules inside it.
  for (int iteration = 0; iteration < 4 * 1200; ++iteration) {
    const double v = pivot - lam * delta;
    const Sums sums = equation(delta, kind.top(v));
    const double left = k - sums.above;
    const double value = sums.mass - left * kind.prime(v);
    if (value <= 0) lo = delta;
    if (value >= 0) hi = delta;
    // In magnitude, where nothing is left of k for a block, v is too low by as much as the next entry is away, however
    // small the mass is, and the residual with it; also where more than k entries are whole and none is left to have a
    // mass. (For p = 2 no mass is small unless v is as close, or it is 0 but for rounding.)
    const bool tells = !Kind::kMagnitude || Kind::kCheap || left > 0 || (left == 0 && sums.mass == 0);
    // And where little is left, x - u = lam t is not small with S(t): the residual counts beside that little.
    const double size = Kind::kMagnitude && left > 0 ? smaller(scale, left * kind.prime(v)) : scale;
    // Of points that are as good, as where S is steep and all have a mass of 0, the last is the nearest to the root.
    if (tells && ::fabs(value) <= residual) best = delta, residual = ::fabs(value);
    const double rounding = Limits<double>::epsilon * larger(::fabs(delta), unit);
    const double middle = half_way<Kind>(pivot, lam, lo, hi);
    if (residual <= 1e-15 * size || hi - lo <= 4 * rounding || middle <= lo || middle >= hi) break;
    double step = value / (sums.slope + lam * kind.second() * left);
    if (power && sums.mass > 0 && left > 0)  // on mass^(p-1): linear in delta for one entry
      step = (sums.mass - ::pow(sums.mass, 1 - e) * ::pow(left, e)) / (e * sums.slope);
    // A step too small to move delta: a little further, over the root if it is that close.
    if (::fabs(step) <= rounding) step = ::copysign(2 * rounding, value);
    const double newton = delta - step;
    bool use_newton = newton > lo && newton < hi;
    const bool straight = ::fabs(step) * ::fabs(sums.slope - last_slope) < moved * sums.slope / 2;
    // What the block has, or should have, may be little beside k: then all of it would be within the tolerance.
    double most = smaller(size, larger(left * kind.prime(v), sums.mass));
    // A two-sided S is flat at both ends: there may be little in its lower entries and little that its upper ones lack.
    if (Kind::zero < 0) most = smaller(most, sums.slope);
    if (use_newton && straight && tells && ::fabs(value) <= tolerance * most) return newton;
    if (iteration % 4 == 3) {
      use_newton = use_newton && hi - lo <= width / 2;
      width = hi - lo;
    }
    const double next = use_newton ? newton : middle;
    moved = ::fabs(next - delta), last_slope = sums.slope, delta = next;
  }
  return best;
}

// A row with its settings. ``buffer`` has room for n entries.
template <class X, class Kind>
struct Row {
  using T = Wide<X>;
  const X* x;
  std::size_t n;
  double k, lam;
  const Kind& kind;
  bool debias;
  std::size_t threads;
  double rounding = Limits<double>::epsilon;  // of its state

  // Adds to ``read`` how many entries the search for the boundary has read.
  State solve(X* buffer, NormalGuess& normal, std::size_t& read) const;
  // Its two halves: a bracket that holds, with a copy of what it leaves undecided; and the threshold, given these. False
  // where a row is known to have no threshold; ``state`` is what it has then.
  bool begin(Bracket<T>& bracket, Open<X>& open, NormalGuess& normal, State& state) const;
  State find(Bracket<T>& bracket, Open<X>& open) const;

 private:
  static constexpr bool kAbsolute = Kind::kAbsolute;
  bool is_wide(const Bracket<T>& bracket, const Moments<T>& row) const;
  bool guess_from_moments(Bracket<T>& bracket, NormalGuess& normal, Moments<T>& row) const;
  bool begin_by_scan(Bracket<T>& bracket, Open<X>& open, State& state) const;
  bool guess_from_sample(Bracket<T>& bracket) const;
  bool gather(Bracket<T>& bracket, Open<X>& open) const;
  bool settles(Bracket<T>& bracket, const Open<X>& open) const;
  void gather_blocks(const Blocks& blocks, const Window<T>& undecided, T lo, T hi, bool all, Open<X>& open) const;
  void gather_by_digits(Bracket<T>& bracket, Open<X>& open, const X* source, std::size_t size) const;
  void gather_otherwise(Bracket<T>& bracket, Open<X>& open, const Moments<T>& row) const;
  double small_threshold(const Open<X>& open, double left, double least, double small, double tolerance) const;
  State from_nearest(const Open<X>& open, double left, State state, double size) const;
  Distances distances_from(const Open<X>& open, const Distance& distance) const;
  State at_gap(const Open<X>& open, State state) const;
  State find_in(Bracket<T>& bracket, Open<X>& open) const;
};

// Whether most of a row with such moments is undecided.
template <class X, class Kind>
bool Row<X, Kind>::is_wide(const Bracket<T>& bracket, const Moments<T>& row) const {
  const Window<T> undecided = window(bracket, lam, kind);
  const double half = row.deviation / 2;
  return double(undecided.from)<row.mean - half&& double(undecided.to)> row.mean + half;
}

template <class X, class Kind>
bool Row<X, Kind>::guess_from_moments(Bracket<T>& bracket, NormalGuess& normal, Moments<T>& row) const {
  row = moments<kAbsolute>(x, n);
  bracket.read += n;
  if (!(row.deviation <= Limits<double>::largest)) return false;
  normal.prepare(k, n);
  const double centre = kAbsolute ? 0 : row.mean;
  const double unit = kAbsolute ? ::sqrt(row.mean * row.mean + row.deviation * row.deviation) : row.deviation;
  const double lo = centre + unit * (normal.z - normal.margin), hi = centre + unit * (normal.z + normal.margin);
  bracket.lo = T(smaller(larger(lo, double(row.smallest)), double(row.largest)));
  bracket.hi = T(larger(smaller(hi, double(row.largest)), double(row.smallest)));
  bracket.wide = is_wide(bracket, row);
  return true;
}

template <class X, class Kind>
bool Row<X, Kind>::guess_from_sample(Bracket<T>& bracket) const {
  T sample[kSample];
  const std::size_t taken = smaller(larger(n / 64, std::size_t(256)), kSample);
  Positions positions(x, n, taken);
  for (std::size_t i = 0; i < taken; ++i) {
    sample[i] = key<kAbsolute>(x[positions.next()]);
    if (!(sample[i] == sample[i])) return false;
  }
  bracket.read += kSeeds + taken;
  constexpr T limit = T(Limits<T>::largest);
  const double share = k / double(n), centre = share * double(taken);
  const double margin = 3 * ::sqrt(double(taken) * share * (1 - share)) + 2;  // the tails of few are longer
  const double first = centre - margin, last = centre + margin;
  bracket.hi = first < 0 ? limit : select(sample, taken, std::size_t(first));
  bracket.lo = last >= double(taken) ? -limit : select(sample, taken, std::size_t(last));
  const Window<T> undecided = window(bracket, lam, kind);
  const std::size_t over = count_over(sample, taken, undecided.to);
  bracket.wide = count_over(sample, taken, -next_up(-undecided.from)) - over > taken / 3;
  return bracket.lo >= -limit && bracket.hi <= limit;
}

// Every block gathers at its own place in the buffer; then they move together.
template <class X, class Kind>
void Row<X, Kind>::gather_blocks(const Blocks& blocks, const Window<T>& undecided, T lo, T hi, bool all,
                                 Open<X>& open) const {
  Open<X> parts[kBlocks];
  blocks.run(threads, [&](std::size_t block, std::size_t begin, std::size_t length) {
    parts[block].room = open.room + begin;
    if (all)
      parts[block].template take<kAbsolute>(x + begin, length, lo, hi);
    else
      parts[block].template gather<kAbsolute>(x + begin, length, undecided, lo, hi);
  });
  open.size = open.over_hi = open.from_lo = 0;
  open.entries = all ? x : open.room, open.ranged = all, open.range = {};
  for (std::size_t block = 0; block < blocks.count; ++block) {
    const Open<X>& part = parts[block];
    if (!all) std::memmove(open.room + open.size, part.room, part.size * sizeof(X));
    open.size += part.size, open.whole += part.whole, open.invalid |= part.invalid;
    open.over_hi += part.over_hi, open.from_lo += part.from_lo, open.range.add(part.range);
  }
}

// Few entries are sorted out at once: whether the two order statistics are among them, and in the bracket.
template <class X, class Kind>
bool Row<X, Kind>::settles(Bracket<T>& bracket, const Open<X>& open) const {
  const T lo = bracket.lo, hi = bracket.hi;
  bracket.take(open.whole, open.whole + open.size);
  bracket.read += open.size;
  if (!bracket.holds()) return false;
  settle<kAbsolute>(bracket, open);
  if (bracket.hi <= hi && bracket.lo >= lo) return true;
  // Outside: a bracket that fails says on which side to look.
  if (bracket.hi > hi) bracket.over_hi = bracket.lo > hi ? bracket.below : bracket.above;
  if (bracket.lo < lo) bracket.from_lo = bracket.hi < lo ? 0 : bracket.above;
  bracket.lo = lo, bracket.hi = hi, bracket.exact = false;
  return false;
}

// Copies what the bracket leaves undecided and counts; whether the bracket holds.
template <class X, class Kind>
bool Row<X, Kind>::gather(Bracket<T>& bracket, Open<X>& open) const {
  const Window<T> undecided = window(bracket, lam, kind);
  open.whole = 0;
  const Blocks blocks(n);
  // An end that is not known yet is found as soon as the row is seen.
  const bool ends = bracket.hi >= T(Limits<T>::largest) || pools(bracket, lam, kind);
  const bool all = bracket.wide && n > kTile && ends;
  if (blocks.count > 1)
    gather_blocks(blocks, undecided, bracket.lo, bracket.hi, all, open);
  else if (all)
    open.template take<kAbsolute>(x, n, bracket.lo, bracket.hi);
  else
    open.template gather<kAbsolute>(x, n, undecided, bracket.lo, bracket.hi, n > kTile);
  bracket.read += n;
  if (open.size <= kFew && !pools(bracket, lam, kind)) return settles(bracket, open);
  if (n <= kTile) open.template count<kAbsolute>(bracket.lo, bracket.hi), bracket.read += open.size;
  bracket.take(open.whole + open.over_hi, open.whole + open.from_lo);
  return bracket.holds();
}

// Copies what is undecided when the digits of the boundary are known. All entries in the bracket are in the source.
template <class X, class Kind>
void Row<X, Kind>::gather_by_digits(Bracket<T>& bracket, Open<X>& open, const X* source, std::size_t size) const {
  tighten_by_digits(bracket, open, source, size, lam, kind, n > kShort ? kDigit : kShortDigit);
  bracket.wide = false;
  gather(bracket, open);
}

template <class X, class Kind>
Distances Row<X, Kind>::distances_from(const Open<X>& open, const Distance& distance) const {
  Distances distances{open.entries, open.size, distance, fill_distances<kAbsolute, X>};
  if constexpr (sizeof(T) == sizeof(float) && std::is_base_of<Power<1>, Kind>::value)
    if (open.size >= kManyInFloat<X>) distances.in_float = add_up_in_float<Kind, X>;
  return distances;
}

// Magnitude: v from ``least`` to ``small``, which is returned if v is not below it.
//
// With a large lam, or p near 1, v is tiny beside the entries, and pivot - lam delta would lose its digits. Measured
// from the least that it can be, v keeps them.
template <class X, class Kind>
double Row<X, Kind>::small_threshold(const Open<X>& open, double left, double least, double small,
                                     double tolerance) const {
  // As S(t) underflows so does v: nothing depends on it, and with v = 0 every entry has what it would have alone. From
  // there on, what v is rounded by is a number also in units of lam.
  if (least < 1e-290 * larger(lam, 1.0)) return 0;
  const Distances distances = distances_from(open, Distance(least, 0, lam));
  const double lo = (least - small) / lam;
  // By as little as ``least`` itself is rounded, v may be below.
  const double hi = 16 * Limits<double>::epsilon * (1 + kind.exponent) * least / lam;
  const double delta = solve_delta(distances, left, lam, lo, hi, lo, least / lam, tolerance, kind);
  return delta > lo ? least - lam * delta : small;
}

// For p > 2: the same threshold, measured from the entry that is nearest to it.
//
// There a response is as steep as it likes: of an entry at t = 1e-16, S is 0.03 for p = 12. With that entry as the pivot
// its t is delta, and has all its digits. ``size`` is what the state is rounded by, in units of lam.
template <class X, class Kind>
State Row<X, Kind>::from_nearest(const Open<X>& open, double left, State state, double size) const {
  const Distance distance(state.pivot, state.delta, lam);
  double pivot = state.pivot, least = kInfinity;
  for (std::size_t i = 0; i < open.size; ++i) {
    const double a = double(key<kAbsolute>(open.entries[i])), away = ::fabs(distance(a));
    if (away < least) least = away, pivot = a;
  }
  const double t = distance(pivot), rounding = 16 * Limits<double>::epsilon * (size + ::fabs(t));
  const Distances distances{open.entries, open.size, Distance(pivot, 0, lam), fill_distances<kAbsolute, X>};
  return {pivot, solve_delta(distances, left, lam, t - rounding, t + rounding, t, 0, 0, kind)};
}

// Where a gap leaves k entries whole and the others 0, every threshold in between is right, and a solver ends at an edge
// of it but for rounding: from there an entry would have 1e-16 instead of 0, and ties a block. The threshold at the key
// below the gap, exactly; or what was found, if there is no such gap.
template <class X, class Kind>
State Row<X, Kind>::at_gap(const Open<X>& open, State state) const {
  const Distance distance(state.pivot, state.delta, lam);
  const double prime = kind.prime(state.pivot - lam * state.delta);
  const double little = kind.inverse(prime * 1e-6), half = kind.inverse(prime / 2);
  const double most = kind.inverse(prime * (1 - 1e-6));
  double last = kInfinity, next = -kInfinity;
  std::size_t whole = open.whole;
  for (std::size_t i = 0; i < open.size; ++i) {
    const double a = double(key<kAbsolute>(open.entries[i]));
    const double t = distance(a);
    if (little < t && t < most) return state;  // not by rounding: there is a block, which is seen soon
    const bool selected = t >= half;
    last = selected ? smaller(last, a) : last, next = selected ? next : larger(next, a);
    whole += selected;
  }
  const bool both = last < kInfinity && next > -kInfinity;
  if (!both || double(whole) != k || kind.alone(last, lam) - Distance(next, 0, lam)(last) > Kind::zero) return state;
  return {next, Kind::zero};
}

// The threshold, given a bracket that holds. One that is exact has told whether there is a gap.
template <class X, class Kind>
State Row<X, Kind>::find(Bracket<T>& bracket, Open<X>& open) const {
  const State state = find_in(bracket, open);
  return bracket.exact || k != ::floor(k) ? state : at_gap(open, state);
}

template <class X, class Kind>
State Row<X, Kind>::find_in(Bracket<T>& bracket, Open<X>& open) const {
  if (!tighten(bracket, open, lam, kind, n + kSample)) gather_by_digits(bracket, open, open.entries, open.size);
  if (Kind::kMagnitude && lam > 0 && bracket.exact && bracket.lo == 0) return {0, 0};
  const double pivot = double(bracket.exact ? bracket.lo : bracket.hi);  // x_[below], or not under it
  if (!bracket.counted && (lam == 0 || bracket.lo == bracket.hi)) {
    open.template count<kAbsolute>(bracket.lo, bracket.hi);
    bracket.take(open.whole + open.over_hi, open.whole + open.from_lo), bracket.read += open.size;
  }
  if (lam == 0) return {double(bracket.hi), k - double(bracket.over_hi)};
  const Distance distance(pivot, 0, lam);
  const double boundary = double(bracket.exact ? bracket.hi : bracket.lo);  // x_[above], or not over it
  const double lo = Kind::zero;
  const double alone = kind.alone(boundary, lam);
  double hi = alone - distance(boundary);
  if (Kind::kFloor) hi = smaller(hi, -distance(0));
  if (!(hi > lo)) return {pivot, lo};  // the gap is too wide to pool anything: the hard answer
  if constexpr (!Kind::kAbsolute)
    // Only ties are undecided: they share equally.
    if (bracket.exact && bracket.lo == bracket.hi && bracket.inside() == open.size)
      return {pivot, kind.inverse((k - double(open.whole)) / double(open.size))};
  const Distances distances = distances_from(open, distance);
  // In float32 an error of 1e-7 before the last step leaves none that could be seen; sums in float have no more digits
  // than for 1e-6.
  const bool in_float = distances.in_float != nullptr;
  // For p > 2 a response is as steep as it likes near 0: there every digit of delta counts.
  const bool steep = Kind::zero == 0 && kind.exponent < 1;
  const double tolerance = steep ? 0 : in_float ? 1e-6 : sizeof(T) == sizeof(float) ? 1e-7 : 0;
  const double left = k - double(open.whole);
  if constexpr (Kind::kMagnitude) {
    const double least = kind.at(alone).value, small = pivot / 64;
    if (least < small) {
      const double v = small_threshold(open, left, least, small, tolerance);
      if (v < small) return steep ? from_nearest(open, left, {v, 0}, v / lam) : State{v, 0};
      hi = smaller(hi, (pivot - small) / lam);
    }
  }
  double start = Kind::kFloor ? hi : lo + (hi - lo) / 2;
  // A mask has the mass of as many keys as are above its centre, if these lie evenly.
  if (!Kind::kMagnitude && !Kind::kFloor && bracket.counted && !bracket.exact) {
    const double centre = Kind::zero == 0 ? kind.exponent / (kind.exponent + 1) : 0;
    const double share = (k - double(bracket.over_hi)) / double(bracket.inside());
    start = clip(centre - distance(pivot + share * (boundary - pivot)), lo, hi);
  }
  const double unit = steep ? 0 : hi - lo;
  // The two-sided mask for p = 2 is next to free, and on so symmetric a response next to the answer.
  if (Kind::zero == -1 && !Kind::kCheap)
    start = solve_delta(distances, left, lam, lo, hi, start, unit, 1e-3, TwoSided<StraightHalf>{});
  const double delta = solve_delta(distances, left, lam, lo, hi, start, unit, tolerance, kind);
  // A threshold at 0 can go no lower: the signed mask then takes fewer than k.
  if (Kind::kFloor && delta >= -distance(0)) return {0, 0};
  if (steep) return from_nearest(open, left, {pivot, delta}, ::fabs(delta));
  return {pivot, delta};
}

// For a row that is not like a normal distribution, after a guess that did not hold.
template <class X, class Kind>
void Row<X, Kind>::gather_otherwise(Bracket<T>& bracket, Open<X>& open, const Moments<T>& row) const {
  // What counting has shown still holds.
  const bool higher = bracket.over_hi >= bracket.below, lower = bracket.from_lo < bracket.above;
  const T lo = higher ? bracket.hi : row.smallest, hi = lower ? bracket.lo : row.largest;
  bracket.lo = lo, bracket.hi = hi, bracket.wide = is_wide(bracket, row);
  if (pools(bracket, lam, kind)) {
    gather(bracket, open);
  } else if (n <= kTile) {  // in the first cache, where halving is faster than guessing
    T keys[kTile];
    for (std::size_t j = 0; j < n; ++j) keys[j] = key<kAbsolute>(x[j]);
    bracket.hi = select(keys, n, bracket.above - 1);
    const T next = -next_up(-bracket.hi);
    const bool both = count_over(keys, n, next) >= bracket.below;
    bracket.lo = both ? bracket.hi : ends<false>(keys, n, next).largest;
    gather(bracket, open);
  } else if (!guess_from_sample(bracket) || !gather(bracket, open)) {
    bracket.lo = row.smallest, bracket.hi = row.largest;
    bracket.take(0, n), open.whole = 0;
    gather_by_digits(bracket, open, x, n);
  }
}

// The careful way: looks at every entry first, and starts from an interval that cannot fail.
template <class X, class Kind>
bool Row<X, Kind>::begin_by_scan(Bracket<T>& bracket, Open<X>& open, State& state) const {
  const Scan<T> row = scan<kAbsolute>(x, n);
  const auto infinite = double(row.infinite);
  bracket.read += n;
  if (row.nan > 0 || (kAbsolute && row.infinite > 0)) return state = {kNaN, 0}, false;
  if (k == 0) return state = {kInfinity, 0}, false;
  // The signed mask may take less than k; the threshold is then 0.
  if (double(n - row.padding) <= k) return state = {Kind::kFloor && lam > 0 ? 0 : -kInfinity, 0}, false;
  if (lam == 0 && infinite >= k) return state = {kInfinity, k}, false;
  if (infinite > k) return state = {kInfinity, infinite}, false;
  if (infinite == k) return state = {double(row.largest), Kind::zero}, false;
  bracket.lo = row.smallest, bracket.hi = row.largest;
  if (n <= kShort) {
    gather(bracket, open);
  } else {
    bracket.take(row.infinite, n - row.padding), open.whole = 0;
    gather_by_digits(bracket, open, x, n);
  }
  return true;
}

template <class X, class Kind>
bool Row<X, Kind>::begin(Bracket<T>& bracket, Open<X>& open, NormalGuess& normal, State& state) const {
  state = {kNaN, 0};
  if (!(k >= 0 && k <= double(n) && lam >= 0 && lam < kInfinity)) return false;
  if (k == 0 || k == double(n)) return begin_by_scan(bracket, open, state);
  if (n > kShort) {
    if (!guess_from_sample(bracket) || !gather(bracket, open)) return begin_by_scan(bracket, open, state);
  } else {
    Moments<T> row;
    if (!guess_from_moments(bracket, normal, row)) return begin_by_scan(bracket, open, state);
    // No normal numbers are so far apart: what they would be is not worth a pass.
    const bool heavy = double(row.largest) - double(row.smallest) > 16 * row.deviation;
    if (heavy) bracket.take(0, n);
    if (heavy || !gather(bracket, open)) gather_otherwise(bracket, open, row);
  }
  return !open.invalid;
}

template <class X, class Kind>
State Row<X, Kind>::solve(X* buffer, NormalGuess& normal, std::size_t& read) const {
  Bracket<T> bracket(k, 0, 0, read);
  Open<X> open;
  open.room = buffer;
  State state;
  return begin(bracket, open, normal, state) ? find(bracket, open) : state;
}

}  // namespace SPARSETOPK_LEVEL
}  // namespace sparsetopk
