// Short rows, many at a time: every lane of a vector has a row of its own, and Newton's steps of all of them are taken
// together. What a lane computes depends on its row alone, not on its neighbours nor on how many there are.
//
// Most rows are finite, with 0 < k < n and a lam of ordinary size: these are solved here. A lane that is not, or that
// takes too many steps, is left to threshold.hpp.
#pragma once

#include "cotangents.hpp"
#include "responses.hpp"

namespace sparsetopk {
namespace SPARSETOPK_LEVEL {

// S(t) = t, so p = 2. Such rows are solved in the type that entries are widened to, all others in double: a steeper S, and
// one that starts at t = -1, need more digits of t than a float has.
template <class Kind>
constexpr bool kLinear = std::is_base_of<Power<1>, Kind>::value;
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

// ------------------------------------------------------------------------------------------------- boundaries

// Batcher's network for merging and sorting: which places are compared, in order.
template <std::size_t kRoom>
struct Network {
  static constexpr std::size_t kSize = kRoom == 8 ? 19 : 63;
  std::uint8_t upper[kSize] = {}, lower[kSize] = {};
  constexpr Network() {
    std::size_t at = 0;
    for (std::size_t p = 1; p < kRoom; p *= 2)
      for (std::size_t q = p; q > 0; q /= 2)
        for (std::size_t j = q % p; j + q < kRoom; j += 2 * q)
          for (std::size_t i = j; i < j + q && i + q < kRoom; ++i)
            if (i / (2 * p) == (i + q) / (2 * p)) upper[at] = std::uint8_t(i), lower[at++] = std::uint8_t(i + q);
  }
};
template <std::size_t kRoom>
constexpr Network<kRoom> kNetwork;

template <class V>
inline void sort_two(V& upper, V& lower) {
  const V a = upper, b = lower;
  upper = larger_lanes(a, b), lower = smaller_lanes(a, b);
}
// The largest first, in every lane.
template <std::size_t kRoom, class V, std::size_t... I>
inline void sort_lanes(V (&some)[kRoom], std::index_sequence<I...>) {
  (sort_two(some[kNetwork<kRoom>.upper[I]], some[kNetwork<kRoom>.lower[I]]), ...);
}

// x_[ceil k] and x_[floor k + 1] of every lane, and whether all keys are finite.
template <class T>
struct LaneBoundary {
  Vector<T> above, below;
  Flags<T> finite;
};

// The rank-th largest in every lane, from 1.
template <class V, std::size_t kCount>
inline V pick(V rank, const V (&sorted)[kCount]) {
  V found = sorted[0];
#pragma GCC unroll 16
  for (std::size_t i = 1; i < kCount; ++i) found = rank > float(i) ? sorted[i] : found;
  return found;
}

// By sorting up to kRoom keys.
template <std::size_t kRoom, class T>
SPARSETOPK_LOOP LaneBoundary<T> boundary_of_few(const Vector<T>* keys, std::size_t n, const Asked<T>& asked) {
  Vector<T> sorted[kRoom], zeros{};
#pragma GCC unroll 16
  for (std::size_t i = 0; i < kRoom; ++i) {
    sorted[i] = i < n ? keys[i] : all_lanes(T(-Limits<T>::largest));
    zeros += sorted[i] * 0;
  }
  sort_lanes(sorted, std::make_index_sequence<Network<kRoom>::kSize>{});
  return {pick(asked.above, sorted), pick(asked.below, sorted), zeros == 0};
}

// Among the largest few, each key sinking to its place.
constexpr int kRanks = 4;
template <class T>
SPARSETOPK_LOOP LaneBoundary<T> boundary_of_largest(const Vector<T>* keys, std::size_t n, const Asked<T>& asked) {
  using V = Vector<T>;
  V first = all_lanes(T(-Limits<T>::largest)), second = first, third = first, fourth = first, zeros{};
  for (std::size_t i = 0; i < n; ++i) {
    const V key = keys[i];
    zeros += key * 0;
    const V a = smaller_lanes(first, key);
    first = larger_lanes(first, key);
    const V b = smaller_lanes(second, a);
    second = larger_lanes(second, a);
    const V c = smaller_lanes(third, b);
    third = larger_lanes(third, b);
    fourth = larger_lanes(fourth, c);
  }
  const V sorted[kRanks] = {first, second, third, fourth};
  return {pick(asked.above, sorted), pick(asked.below, sorted), zeros == 0};
}

// The boundary of sixteen keys, at the same share of them: the keys on either side.
template <class T>
SPARSETOPK_LOOP LaneBoundary<T> boundary_of_sample(const Vector<T>* keys, std::size_t n, const Asked<T>& asked) {
  constexpr std::size_t kTaken = 16;
  Vector<T> sorted[kTaken];
  for (std::size_t i = 0; i < kTaken; ++i) sorted[i] = keys[i * n / kTaken];
  sort_lanes(sorted, std::make_index_sequence<Network<kTaken>::kSize>{});
  const Vector<T> rank = asked.k * (T(kTaken) / T(n));
  return {pick(rank, sorted), pick(rank + 2, sorted), ~Flags<T>{}};
}

template <class T>
struct LaneMoments {
  Vector<T> mean, variance, smallest, largest;
  Flags<T> finite;
};
template <class T>
SPARSETOPK_LOOP LaneMoments<T> moments_of_lanes(const Vector<T>* keys, std::size_t n) {
  using V = Vector<T>;
  const V first = keys[0];  // a common shift does not drown the deviation
  V sum{}, square{}, smallest = first, largest = first;
  for (std::size_t i = 0; i < n; ++i) {
    const V key = keys[i], from_first = key - first;
    sum += from_first, square += from_first * from_first;
    smallest = smaller_lanes(smallest, key), largest = larger_lanes(largest, key);
  }
  const T share = 1 / T(n);
  const V mean = sum * share, variance = larger_lanes(square * share - mean * mean, V{});
  return {first + mean, variance, smallest, largest, square <= T(Limits<T>::largest)};
}

// Sums over every lane. Masks have a mass of 1 for each entry that is selected whole: of all mass, ``above`` has the
// nearest whole number, so that a large k does not drown the rest. The magnitude has these entries in ``above`` alone.
//
// For any other S, mass and slope are those of the block alone, which has ``size`` entries and ``t`` as their sum of t.
template <class V>
struct LaneSums {
  V mass{}, slope{}, above{}, size{}, t{};
};
template <class V>
inline void move_whole_part(LaneSums<V>& sums) {
  const V shift = V{} + (sizeof(sums.mass[0]) == 4 ? 0x1.8p23f : 0x1.8p52), whole = (sums.mass + shift) - shift;
  sums.mass -= whole, sums.above += whole;
}

template <class Kind, class T>
class LaneRows {
 public:
  using V = Vector<T>;
  using F = Flags<T>;
  static constexpr bool kMagnitude = Kind::kMagnitude;

  LaneRows(const V* keys, std::size_t n, const Asked<T>& asked, const Kind& kind)
      : keys_(keys), n_(n), asked_(asked), kind_(kind) {}

  V pivot, delta;
  F solved;  // the lanes that have them
  F known;   // those that had them without a step, exactly

  void solve(NormalGuess& normal);
  V top() const { return kMagnitude ? pivot - asked_.lam * delta : all_lanes(T(1)); }

 private:
  static constexpr T kEpsilon = T(Limits<T>::epsilon);

  void bracket_between(const LaneBoundary<T>& boundary);
  void guess(NormalGuess& normal);
  void guess_others(F few, NormalGuess& normal);
  void start_at_zero();
  SPARSETOPK_LOOP void iterate();
  LaneSums<V> add_up(V from, V at) const { return kLinear<Kind> ? add_up_linear(from, at) : add_up_steep(from, at); }
  LaneSums<V> add_up_linear(V from, V at) const;
  SPARSETOPK_LOOP LaneSums<V> add_up_steep(V from, V at) const;
  SPARSETOPK_LOOP void leave_out(V from, V lo, V hi);
  V root_from(const LaneSums<V>& sums, V left, V at) const;

  const V* keys_;
  std::size_t n_;
  const Asked<T>& asked_;
  const Kind& kind_;
  V lo_, hi_;  // the root delta is between them
  V density_;  // how fast sum z grows with delta, roughly
  F done_;
  V whole_{};  // how many keys were left out as they are selected whole
  V open_[kLinear<Kind> ? 1 : kLongestLane<Kind>];
};

// Sums at the threshold from - lam at.
template <class Kind, class T>
LaneSums<Vector<T>> LaneRows<Kind, T>::add_up_linear(V from, V at) const {
  constexpr std::size_t kBlock = 16, kSums = 4;  // few additions in a row lose few digits, and wait less
  const V zero = all_lanes(T(Kind::zero)), inverse = asked_.inverse, none{};
  const V top = kMagnitude ? from - asked_.lam * at : all_lanes(T(1));
  const V one = all_lanes(T(1));
  LaneSums<V> all;
  const auto add = [&](V key, LaneSums<V>& sums) {
    const V t = (key - from) * inverse + at, clipped = clip_lanes(t, zero, top);
    sums.mass += kMagnitude ? (t < top ? clipped : none) : clipped;
    sums.slope += t == clipped ? one : none;
    if (kMagnitude) sums.above += t >= top ? one : none;
  };
  std::size_t i = 0;
  for (; i + kBlock <= n_; i += kBlock) {
    LaneSums<V> part[kSums];
#pragma GCC unroll 4
    for (std::size_t j = 0; j < kBlock; j += kSums)
#pragma GCC unroll 4
      for (std::size_t s = 0; s < kSums; ++s) add(keys_[i + j + s], part[s]);
    LaneSums<V> block{(part[0].mass + part[1].mass) + (part[2].mass + part[3].mass),
                      (part[0].slope + part[1].slope) + (part[2].slope + part[3].slope),
                      (part[0].above + part[1].above) + (part[2].above + part[3].above)};
    if (!kMagnitude) move_whole_part(block);
    all.mass += block.mass, all.slope += block.slope, all.above += block.above;
  }
  LaneSums<V> rest;
  for (; i < n_; ++i) add(keys_[i], rest);
  if (!kMagnitude) move_whole_part(rest);
  return {all.mass + rest.mass, all.slope + rest.slope, all.above + rest.above};
}

// The same for any S.
template <class Kind, class T>
LaneSums<Vector<T>> LaneRows<Kind, T>::add_up_steep(V from, V at) const {
  const V zero = all_lanes(T(Kind::zero)), one = all_lanes(T(1)), none{}, inverse = asked_.inverse;
  const Kind kind = kind_;  // in registers
  LaneSums<V> sums;
  sums.above = whole_;
  for (std::size_t i = 0; i < n_; ++i) {
    const V t = (keys_[i] - from) * inverse + at;
    const F inside = (t > zero) & (t < one);
    sums.above += t >= one ? one : none;
    if (!Kind::kCheap && bits_of(inside) == 0) continue;
    const Responses<V> response = responses_of(kind, clip_lanes(t, zero, one));
    sums.mass += inside ? response.value : none, sums.slope += inside ? response.slope : none;
    sums.size += inside ? one : none, sums.t += inside ? t : none;
  }
  return sums;
}

// Keys that are 0, or selected whole, at every threshold of the bracket are counted and looked at no more.
template <class Kind, class T>
void LaneRows<Kind, T>::leave_out(V from, V lo, V hi) {
  const V inverse = asked_.inverse, one = all_lanes(T(1)), none{};
  // The pivot may move yet, by which t is rounded anew.
  const V slack =
      T(1e-9) * (1 + absolute_lanes(lo) + absolute_lanes(hi)) + 4 * kEpsilon * absolute_lanes(from) * inverse;
  const V low = T(Kind::zero) - hi - slack, high = 1 - lo + slack;
  std::size_t counts[kWidth<T>] = {}, most = 0;
  for (std::size_t j = 0; j < n_; ++j) {
    const V key = keys_[j], t = (key - from) * inverse;
    whole_ += t >= high ? one : none;
    for (unsigned bits = bits_of((t > low) & (t < high)); bits != 0; bits &= bits - 1) {
      const auto i = std::size_t(__builtin_ctz(bits));
      open_[counts[i]++][i] = key[i];
    }
  }
  for (std::size_t count : counts) most = larger(most, count);
  for (std::size_t i = 0; i < kWidth<T>; ++i)
    for (std::size_t j = counts[i]; j < most; ++j) open_[j][i] = T(-Limits<T>::largest);
  keys_ = open_, n_ = most;
}

// Newton's step for S(t) = t^e, on mass^(p-1), which is linear in delta for one entry; for others on the mass itself. One
// entry alone that shares a whole number goes to the end of the block that it is next to, and over it: there is a gap.
template <class Kind, class T>
Vector<T> LaneRows<Kind, T>::root_from(const LaneSums<V>& sums, V left, V at) const {
  const V one = all_lanes(T(1)), tiny = all_lanes(T(1e-300)), slope = larger_lanes(sums.slope, tiny);
  V step = (sums.mass - left) / slope;
  if constexpr (Kind::zero == 0) {
    const V ratio = larger_lanes(left, V{}) / larger_lanes(sums.mass, tiny);
    const V on_root = sums.mass * (one - root_of(kind_, ratio)) * T(kind_.exponent) / slope;
    step = (sums.mass > 0) & (left >= 0) ? on_root : step;
  }
  const V beyond = 96 * kEpsilon * (one + absolute_lanes(at));
  const F alone = asked_.is_whole() & (sums.size == 1);
  const V to_zero = sums.t - T(Kind::zero) + beyond, to_top = sums.t - one - beyond;
  return at - (alone & (left == 0) ? to_zero : alone & (left == 1) ? to_top : step);
}

// The boundary holds the threshold between its two keys, as in threshold.hpp.
template <class Kind, class T>
void LaneRows<Kind, T>::bracket_between(const LaneBoundary<T>& boundary) {
  const V alone = kMagnitude ? boundary.above / (1 + asked_.lam) : all_lanes(T(1));
  solved = asked_.fits & boundary.finite;
  pivot = boundary.below;
  lo_ = all_lanes(T(Kind::zero)), hi_ = alone - (boundary.above - boundary.below) * asked_.inverse;
  density_ = V{};
  done_ = hi_ <= lo_;  // the gap is too wide to pool anything
  delta = done_ ? lo_ : (lo_ + hi_) / 2;
}

// From mean and deviation, as bracket.hpp does for a single row; where tails are heavy, from a sample.
template <class Kind, class T>
void LaneRows<Kind, T>::guess(NormalGuess& normal) {
  const LaneMoments<T> row = moments_of_lanes<T>(keys_, n_);
  const V lam = asked_.lam, deviation = sqrt_lanes(row.variance);
  V z, peak;
  for (std::size_t i = 0; i < kWidth<T>; ++i) {
    if (i == 0 || asked_.many_ks) normal.prepare(double(asked_.k[i]), n_);
    z[i] = T(normal.z), peak[i] = T(normal.density);
  }
  const V unit = Kind::kAbsolute ? sqrt_lanes(row.variance + row.mean * row.mean) : deviation;
  V boundary = Kind::kAbsolute ? z * unit : row.mean + z * unit;
  density_ = peak * lam / larger_lanes(unit, row.largest * kEpsilon);
  const F heavy = row.largest - row.smallest > 8 * deviation;
  if (bits_of(heavy) != 0) {
    const LaneBoundary<T> sample = boundary_of_sample<T>(keys_, n_, asked_);
    const V middle = (sample.above + sample.below) / 2;
    const V gap = larger_lanes(sample.above - sample.below, absolute_lanes(middle) * kEpsilon + T(1e-30));
    boundary = heavy ? middle : boundary, density_ = heavy ? T(n_) / 16 * 2 * lam / gap : density_;
  }
  // An entry is selected by halves where it is lam/2 over the threshold; further for a steep S.
  const T half = Kind::zero == 0 ? T(kind_.exponent / (kind_.exponent + 1)) : 0;  // on average
  const V start = kMagnitude ? boundary / (1 + lam / 2) : boundary - lam * half;
  const V low = kMagnitude ? larger_lanes(row.smallest / (1 + lam), row.largest * kEpsilon) : row.smallest - lam;
  const V high = row.largest - lam * T(Kind::zero);
  solved = asked_.fits & row.finite, done_ = F{};
  pivot = clip_lanes(start, low, high), delta = V{};
  lo_ = (pivot - high) * asked_.inverse, hi_ = (pivot - low) * asked_.inverse;
  // Where lam is so small that ``low`` is rounded to the smallest entry, the root is between them still.
  const V alone = kMagnitude ? row.smallest / (1 + lam) : all_lanes(T(1));
  const F exact = kMagnitude ? alone >= low : ~F{};
  hi_ = exact ? larger_lanes(hi_, (pivot - row.smallest) * asked_.inverse + alone) : hi_;
}

// The same for some lanes, and what there is for the others.
template <class Kind, class T>
void LaneRows<Kind, T>::guess_others(F few, NormalGuess& normal) {
  const LaneRows other = *this;
  guess(normal);
  pivot = few ? other.pivot : pivot, delta = few ? other.delta : delta, solved = few ? other.solved : solved;
  lo_ = few ? other.lo_ : lo_, hi_ = few ? other.hi_ : hi_, density_ = few ? other.density_ : density_;
  done_ = few ? other.done_ : done_;
}

// The signed mask: whether the threshold is 0, where fewer than k are selected.
template <class Kind, class T>
void LaneRows<Kind, T>::start_at_zero() {
  const LaneSums<V> sums = add_up(V{}, V{});
  const F pinned = sums.mass <= asked_.left(sums.above);
  pivot = pinned ? V{} : pivot, delta = pinned ? V{} : delta, done_ |= pinned;
  hi_ = smaller_lanes(hi_, pivot * asked_.inverse);
  delta = done_ ? delta : smaller_lanes(delta, hi_);
}

// Newton's method kept inside the bracket; a step that leaves it gives way to a secant between its ends, and every
// fourth that has not halved it to bisection. When delta is large beside what it is added to, the pivot moves.
template <class Kind, class T>
void LaneRows<Kind, T>::iterate() {
  constexpr T kTiny = T(1e-30);
  constexpr int kMostSteps = 40;
  // After a guess, two steps are to leave a narrow bracket, and the others should have few keys to look at.
  const bool guessed = bits_of(density_ > 0) != 0;
  const T count = T(n_);
  const V k = asked_.k, lam = asked_.lam, inverse = asked_.inverse, one = all_lanes(T(1)), scale = larger_lanes(k, one);
  const V finest = kMagnitude ? smaller_lanes(one, inverse) : one;  // v = from - lam at has its digits too
  V lo = lo_, hi = hi_, value_lo = -k, value_hi = count - k, from = pivot, at = delta;
  V width = hi - lo, last_side{};
  F done = done_ | ~solved, good = solved;
  known = done_;
  for (int step = 0; step < kMostSteps && bits_of(~done) != 0; ++step) {
    if constexpr (!kLinear<Kind>)
      if (n_ > 16 && (guessed ? step == 2 || step == 4 : step == 0)) leave_out(from, lo, hi);
    const LaneSums<V> sums = add_up(from, at);
    V mass = sums.mass, slope = sums.slope, unit = one;
    if (kMagnitude) {  // sum z - k with z in [0, 1]
      unit = from - lam * at;
      mass = sums.mass / unit, slope = (slope + lam * mass) / unit;
    }
    const V left = asked_.left(sums.above), value = mass - left;
    const F low = (value <= 0) & ~done, high = (value >= 0) & ~done;
    const F new_lo = low & (last_side < 0), new_hi = high & (last_side > 0);
    lo = low ? at : lo, hi = high ? at : hi;
    V newton = at - value / larger_lanes(slope, all_lanes(kTiny));
    if constexpr (!kLinear<Kind>) newton = root_from(sums, left, at);
    const V size = absolute_lanes(value);
    const F close = absolute_lanes(newton - at) <= unit, between = (newton > lo) & (newton < hi);
    const V rounding = kEpsilon * (absolute_lanes(at) + unit * finest), room = hi - lo;
    F met = ((size <= asked_.tolerance * scale) & (close | (slope == 0))) | (size <= kEpsilon / 2 * scale);
    if constexpr (!kLinear<Kind>) {  // little that is left for the block counts as much, as S is not small with t
      const V most = smaller_lanes(scale, larger_lanes(left, mass));
      met = (size == 0) | ((size <= asked_.tolerance * most) & close & ((sums.size > 1) | ~asked_.is_whole()));
    }
    const F stuck = (room <= 4 * rounding) | (between & (absolute_lanes(newton - at) <= rounding));
    const F stops = (met | stuck) & ~done;
    good &= ~stops | (size <= T(1e-4) * scale);
    // Where the entries that are whole leave nothing of k, no other may be left over v, not even by rounding: output and
    // slope would not be 0. threshold.hpp sees to that.
    if (kMagnitude) good &= ~(stops & (sums.mass > 0) & (left <= 0));
    // One entry that shares a whole number with no other is at an edge of a gap: the threshold goes over it, at once, so
    // that no rounding decides on which side it is. Where it has been there, there is no gap, and the root is in between.
    const V beyond = 96 * rounding, over = kLinear<Kind> ? newton - (value > 0 ? beyond : -beyond) : newton;
    const F alone = asked_.is_whole() & ((kLinear<Kind> ? slope : sums.size) == 1) & (value != 0) & (size < 1);
    const F edge = !kMagnitude ? alone & (over > lo) & (over < hi) : F{};
    const F was_there = edge & ((over - lo < 2 * beyond) | (hi - over < 2 * beyond));
    at = stops & close & between ? (edge ? over : newton) : at;
    done |= stops;
    if (bits_of(~done) == 0) break;

    // The end that stays for a second time counts half.
    value_hi = low ? (new_lo ? value_hi / 2 : value_hi) : value, value_lo = low      ? value
                                                                            : new_hi ? value_lo / 2
                                                                                     : value_lo;
    last_side = low ? -one : one;
    V next = newton, other = lo + room * clip_lanes(value_lo / (value_lo - value_hi), T(0.05) * one, T(0.95) * one);
    F use = between;
    if (step < 2) {  // beside the slope here, what it is around here
      const V step_there = value / larger_lanes(larger_lanes(slope, density_), all_lanes(kTiny));
      next = at - step_there;
      if constexpr (!kLinear<Kind>) {  // and over it, so that the bracket has both ends
        const V over = absolute_lanes(step_there) * T(0.3) + T(0.5);
        next = density_ > 0 ? next - (value > 0 ? over : -over) : newton;
      }
      use = (next > lo) & (next < hi);
    }
    if (step % 4 == 3) {
      const F halved = room <= width / 2;
      other = halved ? other : lo + room / 2, use &= halved, width = room;
    }
    next = was_there ? lo + room / 2 : edge ? over : use ? next : other;
    // The pivot moves to the threshold, and the bracket with it, when delta is more than what most t are.
    const V reach = kMagnitude ? smaller_lanes(2 * unit, from * inverse / 4) : smaller_lanes(2 * one, k * (4 / count));
    const F moves = (absolute_lanes(next) > reach) & ~done;
    const V moved = from - lam * next, shift = (moved - from) * inverse, slack = 2 * kEpsilon * absolute_lanes(shift);
    at = done ? at : moves ? next + shift : next;
    lo = moves ? lo + shift - slack : lo, hi = moves ? hi + shift + slack : hi;
    from = moves ? moved : from;
  }
  pivot = from, delta = at, solved = good & done;
}

template <class Kind, class T>
void LaneRows<Kind, T>::solve(NormalGuess& normal) {
  const F few = asked_.below <= T(kRanks);
  if (n_ <= 8) {
    bracket_between(boundary_of_few<8, T>(keys_, n_, asked_));
  } else if (n_ <= 16) {
    bracket_between(boundary_of_few<16, T>(keys_, n_, asked_));
  } else if (bits_of(few) == 0) {
    guess(normal);
  } else {
    bracket_between(boundary_of_largest<T>(keys_, n_, asked_));
    if (bits_of(~few) != 0) guess_others(few, normal);
  }
  // A magnitude of 0 at the boundary is a case of its own.
  if (kMagnitude) solved &= pivot >= T(1e-30);
  if (Kind::kFloor) start_at_zero();
  iterate();
}

// ------------------------------------------------------------------------------------------------------ forward

// y of a row in every lane, from keys.
template <class Kind, class T>
struct LaneCurve {
  using V = Vector<T>;
  Kind kind;
  V pivot, delta, inverse, top, debias_lam, shrink;

  V distance(V key) const { return (key - pivot) * inverse + delta; }
  V operator()(V key) const {
    const V zero = all_lanes(T(Kind::zero)), t = distance(key), at = clip_lanes(t, zero, top);
    return Kind::kMagnitude ? (t < top ? at + debias_lam * at : key * shrink) : at;
  }
};

// Puts outputs in the place of keys. Returns whether entries of a lane are next to an end of the block, so that rounding
// decides on which side: where k is whole these may be at an edge of a gap, which threshold.hpp looks for.
template <class Kind, class T>
SPARSETOPK_LOOP Flags<T> to_outputs(const LaneCurve<Kind, T>& curve, Vector<T>* keys, std::size_t n) {
  const LaneCurve<Kind, T> at = curve;  // in registers
  constexpr T kEpsilon = T(Limits<T>::epsilon);
  const Vector<T> near = Kind::kMagnitude ? 192 * kEpsilon * at.top : 96 * kEpsilon * (1 + absolute_lanes(at.delta));
  const Vector<T> bottom = near / 3,
                  top = at.top - bottom;  // inwards, what iterate() has moved past an end is not meant
  const Vector<T> none{}, one = all_lanes(T(1));
  Vector<T> close{};
  for (std::size_t j = 0; j < n; ++j) {
    const Vector<T> t = at.distance(keys[j]);
    close += (absolute_lanes(t - bottom) < near) | (absolute_lanes(t - top) < near) ? one : none;
    keys[j] = at(keys[j]);
  }
  return close > T(Kind::kMagnitude ? 1 : 0);  // in magnitude one entry may be there
}

// The same for any S, where y is next to an end before t is: as at_gap says, if no entry of the block is clear of both.
template <class Kind>
SPARSETOPK_LOOP Flags<double> to_steep_outputs(const LaneCurve<Kind, double>& curve, Vector<double>* keys,
                                               std::size_t n) {
  using V = Vector<double>;
  const LaneCurve<Kind, double> at = curve;
  const V zero = all_lanes(double(Kind::zero)), one = all_lanes(1.0), none{};
  Flags<double> any{}, clear{};
  for (std::size_t j = 0; j < n; ++j) {
    const V t = at.distance(keys[j]);
    const Flags<double> inside = (t > zero) & (t < one);
    keys[j] = t >= one ? one : none;
    if (!Kind::kCheap && bits_of(inside) == 0) continue;
    const V y = responses_of(at.kind, clip_lanes(t, zero, one)).value;
    keys[j] = inside ? y : keys[j];
    any |= inside, clear |= inside & (y > 1e-6) & (y < 1 - 1e-6);
  }
  return any & ~clear;
}

// A row that lanes are not for.
template <class X, class Kind>
void forward_other(const Problem& problem, const Kind& kind, std::size_t i, X* y, NormalGuess& normal,
                   std::size_t& read) {
  const X* x = static_cast<const X*>(problem.x) + i * problem.row_stride;
  const Row<X, Kind> row{x, problem.n, problem.k_of(i), problem.lam_of(i), kind, problem.debias, 1};
  problem.keep(i, row.solve(y + i * problem.n, normal, read));
  forward_row(row, problem.state[i], y + i * problem.n);
}

template <class X, class Kind>
void forward_lanes(const Problem& problem, const Kind& kind, std::size_t begin, std::size_t end, X* y,
                   NormalGuess& normal, std::size_t& read) {
  using T = Lane<Kind, X>;
  constexpr std::size_t kW = kWidth<T>;
  Vector<T> keys[kLongestLane<Kind>];
  const std::size_t n = problem.n;
  const X* x = static_cast<const X*>(problem.x);
  const bool same = problem.k_stride == 0 && problem.lam_stride == 0;
  Asked<T> asked(problem, begin, 1);
  for (std::size_t first = begin; first < end; first += kW) {
    const std::size_t count = smaller(kW, end - first);
    if (!same) asked.fill(problem, first, count);
    to_lanes<T>(x + first * problem.row_stride, problem.row_stride, count, n, keys);
    if (Kind::kAbsolute)
      for (std::size_t j = 0; j < n; ++j) keys[j] = absolute_lanes(keys[j]);
    LaneRows<Kind, T> rows(keys, n, asked, kind);
    rows.solve(normal);
    const Vector<T> lam = asked.lam, one = all_lanes(T(1));
    const LaneCurve<Kind, T> curve{kind,
                                   rows.pivot,
                                   rows.delta,
                                   asked.inverse,
                                   rows.top(),
                                   problem.debias ? lam : Vector<T>{},
                                   problem.debias ? one : 1 / (1 + lam)};
    Flags<T> unclear;
    if constexpr (kLinear<Kind>)
      unclear = to_outputs(curve, keys, n);
    else
      unclear = to_steep_outputs(curve, keys, n);
    unclear &= asked.is_whole() & ~rows.known;
    to_signed_rows<Kind, T>(problem, first, count, keys, y);
    T pivots[kW], deltas[kW];
    store(rows.pivot, pivots), store(rows.delta, deltas);
    for (std::size_t i = 0; i < count; ++i) problem.keep(first + i, {double(pivots[i]), double(deltas[i])});
    for (unsigned bits = ~bits_of(rows.solved & ~unclear) & ((1u << count) - 1); bits != 0; bits &= bits - 1)
      forward_other(problem, kind, first + std::size_t(__builtin_ctz(bits)), y, normal, read);
  }
}

// --------------------------------------------------------------------------------------------------- hard rows

// Numbers that are ordered as the keys are, and back.
template <class T>
inline Flags<T> ordered_lanes(Vector<T> keys) {
  const Flags<T> bits = (Flags<T>)keys;
  return bits ^ ((bits >> (8 * int(sizeof(T)) - 1)) & ~(Flags<T>{} + Ordered<T>(kOrderedZero<T>)));
}

// How many keys are at least, or (``kOver``) over, the cut.
template <bool kOver, class T>
inline Flags<T> count_lanes(const Vector<T>* keys, std::size_t n, Vector<T> cut) {
  Flags<T> even{}, odd{};
  std::size_t i = 0;
  for (; i + 2 <= n; i += 2) {
    even -= kOver ? keys[i] > cut : keys[i] >= cut;
    odd -= kOver ? keys[i + 1] > cut : keys[i + 1] >= cut;
  }
  if (i < n) even -= kOver ? keys[i] > cut : keys[i] >= cut;
  return even + odd;
}

// x_[ceil k], of any rank: its bits are halved by counting, until they are one number or as many keys are there.
template <class T>
SPARSETOPK_LOOP LaneBoundary<T> boundary_by_halving(const Vector<T>* keys, std::size_t n, const Asked<T>& asked) {
  using V = Vector<T>;
  using F = Flags<T>;
  V smallest = keys[0], largest = keys[0], zeros{};
  for (std::size_t i = 0; i < n; ++i) {
    smallest = smaller_lanes(smallest, keys[i]), largest = larger_lanes(largest, keys[i]);
    zeros += keys[i] * 0;
  }
  const F above = __builtin_convertvector(asked.above, F);
  F lo = ordered_lanes<T>(smallest), hi = ordered_lanes<T>(largest);
  while (bits_of(lo < hi) != 0) {
    const F middle = (lo | hi) - ((lo ^ hi) >> 1);  // half way, rounded up
    const V cut = (V)ordered_lanes<T>((V)middle);
    const F count = count_lanes<false, T>(keys, n, cut);
    const F open = lo < hi, enough = count >= above;
    lo = open & enough ? middle : lo;
    hi = open ? (count == above ? lo : enough ? hi : middle - 1) : hi;
  }
  const V cut = (V)ordered_lanes<T>((V)lo);
  V found = largest;
  for (std::size_t i = 0; i < n; ++i) found = keys[i] >= cut ? smaller_lanes(found, keys[i]) : found;
  return {found, found, zeros == 0};
}

// What write_hard does in output.hpp, in the place of the keys. ``whole`` entries at the pivot have z = 1, and the next
// one what k has beyond whole numbers.
template <class Kind, class T>
SPARSETOPK_LOOP void to_hard_outputs(Vector<T>* keys, std::size_t n, Vector<T> pivot, Vector<T> whole,
                                     Vector<T> fraction) {
  const Vector<T> none{}, one = all_lanes(T(1));
  for (std::size_t j = 0; j < n; ++j) {
    const Vector<T> a = keys[j];
    const Vector<T> shared = whole >= 1 ? one : whole == 0 ? fraction : none;
    const Vector<T> z = a > pivot ? one : a == pivot ? shared : none;
    whole -= a == pivot ? one : none;
    keys[j] = Kind::kMagnitude ? z * a : z;
  }
}

// lam = 0: the largest are selected, whatever p is.
template <class X, class Kind>
void forward_hard_lanes(const Problem& problem, const Kind& kind, std::size_t begin, std::size_t end, X* y,
                        NormalGuess& normal, std::size_t& read) {
  using T = Wide<X>;
  using V = Vector<T>;
  constexpr std::size_t kW = kWidth<T>;
  V keys[kLongestLane<Kind>];
  const std::size_t n = problem.n;
  const X* x = static_cast<const X*>(problem.x);
  Asked<T> asked(problem, begin, 1);
  for (std::size_t first = begin; first < end; first += kW) {
    const std::size_t count = smaller(kW, end - first);
    if (problem.k_stride != 0) asked.fill(problem, first, count);
    to_lanes<T>(x + first * problem.row_stride, problem.row_stride, count, n, keys);
    if (Kind::kAbsolute)
      for (std::size_t j = 0; j < n; ++j) keys[j] = absolute_lanes(keys[j]);
    const bool few = bits_of(asked.above > T(kRanks)) == 0;
    const LaneBoundary<T> boundary = n <= 8    ? boundary_of_few<8, T>(keys, n, asked)
                                     : n <= 16 ? boundary_of_few<16, T>(keys, n, asked)
                                     : few     ? boundary_of_largest<T>(keys, n, asked)
                                               : boundary_by_halving<T>(keys, n, asked);
    const V over = __builtin_convertvector(count_lanes<true, T>(keys, n, boundary.above), V);
    to_hard_outputs<Kind, T>(keys, n, boundary.above, asked.below - 1 - over, asked.fraction);
    to_signed_rows<Kind, T>(problem, first, count, keys, y);
    T pivots[kW], overs[kW];
    store(boundary.above, pivots), store(over, overs);
    for (std::size_t i = 0; i < count; ++i)
      problem.keep(first + i, {double(pivots[i]), problem.k_of(first + i) - double(overs[i])});
    const unsigned solved = bits_of(asked.fits & boundary.finite);
    for (unsigned bits = ~solved & ((1u << count) - 1); bits != 0; bits &= bits - 1)
      forward_other(problem, kind, first + std::size_t(__builtin_ctz(bits)), y, normal, read);
  }
}

// ----------------------------------------------------------------------------------------------------- backward

// The threshold that a forward has left, in every lane: the part of the pivot that T cannot hold goes to delta.
template <class T>
struct LaneStates {
  Vector<T> pivot, delta;
  Flags<T> usual;  // rows that have a threshold

  LaneStates(const Problem& problem, std::size_t begin, std::size_t count) {
    T values[3][kWidth<T>];
    for (std::size_t i = 0; i < kWidth<T>; ++i) {
      const std::size_t row = begin + smaller(i, count - 1);
      const State state = problem.state[row];
      constexpr double kLarge = 1e30;
      const bool fits = ::fabs(state.pivot) <= kLarge && ::fabs(state.delta) <= kLarge;
      const T near = fits ? T(state.pivot) : T(0);
      const double lost = fits ? double(near) - state.pivot : 0;
      const double in_delta = lost == 0 ? state.delta : state.delta + lost / problem.lam_of(row);
      const bool is_usual = fits && ::fabs(in_delta) <= kLarge;
      values[0][i] = near, values[1][i] = is_usual ? T(in_delta) : T(0), values[2][i] = is_usual;
    }
    pivot = load(values[0]), delta = load(values[1]), usual = load(values[2]) > 0;
  }
};

// What BlockSums are in cotangents.hpp, in every lane.
template <class V>
struct LaneBlockSums {
  V rho{}, rho_g{}, rho_t{}, rho_g_t{}, g{}, size{}, whole{}, whole_in_lam{};

  void add(const LaneBlockSums& other) {
    rho += other.rho, rho_g += other.rho_g, rho_t += other.rho_t, rho_g_t += other.rho_g_t;
    g += other.g, size += other.size, whole += other.whole, whole_in_lam += other.whole_in_lam;
  }
};

constexpr std::size_t kSumBlock = 16;  // entries that are added up before they are added to the others

// The cotangents of a group of rows. ``kAll`` if those of k and lam are asked for too.
template <class Kind, class T, bool kAll>
class LaneCotangents {
 public:
  using V = Vector<T>;
  using F = Flags<T>;
  static constexpr bool kMagnitude = Kind::kMagnitude;

  LaneCotangents(const Kind& kind, const Asked<T>& asked, const LaneStates<T>& states, bool debias)
      : kind_(kind),
        lam_(asked.lam),
        inverse_(asked.inverse),
        k_(asked.k),
        pivot_(states.pivot),
        delta_(states.delta),
        debias_(kMagnitude && debias),
        is_whole_(asked.is_whole()) {
    const V v = pivot_ - lam_ * delta_;
    const T rounding = 16 * T(Limits<T>::epsilon);
    // As in output.hpp, what is over v by rounding alone stays in the block.
    top_ = kMagnitude ? (v + rounding * (absolute_lanes(pivot_) + lam_ * absolute_lanes(delta_))) * (1 + rounding)
                      : all_lanes(T(1));
    if (kMagnitude) top_ = top_ > 0 ? top_ : all_lanes(T(1e-37));
    prime_ = kMagnitude ? v : all_lanes(T(1));
    pinned_ = Kind::kFloor ? (pivot_ == 0) & (delta_ == 0) : F{};
    bottom_ = pinned_ ? all_lanes(T(-1)) : all_lanes(T(Kind::zero));
    share_ = debias_ ? all_lanes(T(1)) : 1 / (1 + lam_);
  }

  // Puts rho in the place of the keys: 0 outside of the block, and -1 for magnitudes that are selected whole.
  SPARSETOPK_LOOP void add_up(V* keys, const V* g, std::size_t n);
  SPARSETOPK_LOOP void average();

  V operator()(V rho, V g) const {
    const V inside = rho * scale_ * (g - mean_) + gain_ * g;
    if (kMagnitude) return rho > 0 ? inside : rho < 0 ? share_ * g : V{};
    return rho > 0 ? inside : V{};
  }
  // Keys of the block are not further from the pivot than these, also where rounding decides.
  V least() const { return pivot_ + lam_ * (bottom_ - delta_) - slack(); }
  V most() const { return pivot_ + lam_ * (top_ - delta_) + slack(); }

  V dk, dlam;
  F finite;  // lanes where nothing has overflown

 private:
  V slack() const {
    return 16 * T(Limits<T>::epsilon) * (absolute_lanes(pivot_) + lam_ * (absolute_lanes(delta_) + 1)) + T(1e-37);
  }
  void take(V& key, V g, LaneBlockSums<V>& sums) const;

  Kind kind_;
  V lam_, inverse_, k_, pivot_, delta_;
  bool debias_;
  F is_whole_, pinned_;
  V top_, bottom_, prime_, share_;
  V mean_, scale_, gain_;
  LaneBlockSums<V> sums_;
};

template <class Kind, class T, bool kAll>
inline void LaneCotangents<Kind, T, kAll>::take(V& key, V g, LaneBlockSums<V>& sums) const {
  const V none{}, one = all_lanes(T(1));
  const V t = (key - pivot_) * inverse_ + delta_, at = clip_lanes(t, all_lanes(T(Kind::zero)), top_);
  const F inside = (t > bottom_) & (t < top_);
  if (!Kind::kCheap && bits_of(inside) == 0) {
    key = none;
    return;
  }
  const Responses<V> response = responses_of(kind_, at);
  const V rho = inside ? response.slope : none, cotangent = inside ? g : none, rho_g = rho * cotangent;
  sums.rho += rho, sums.rho_g += rho_g, sums.size += inside ? one : none;
  if (kAll || kMagnitude) sums.g += cotangent;
  if (kAll) sums.rho_t += rho * at, sums.rho_g_t += rho_g * at;
  if (kMagnitude) {
    const F whole = t >= top_;
    sums.whole += whole ? one : none;
    if (kAll && !debias_) sums.whole_in_lam -= whole ? g * key * share_ * share_ : none;
    key = whole ? -one : rho;
  } else {
    if (kAll) sums.whole += inside ? response.value : none;
    key = rho;
  }
}

template <class Kind, class T, bool kAll>
void LaneCotangents<Kind, T, kAll>::add_up(V* keys, const V* g, std::size_t n) {
  constexpr std::size_t kBlock = kSumBlock;
  LaneCotangents self = *this;  // in registers
  LaneBlockSums<V> all, rest;
  std::size_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    LaneBlockSums<V> even, odd;
#pragma GCC unroll 4
    for (std::size_t j = 0; j < kBlock; j += 2) {
      self.take(keys[i + j], g[i + j], even);
      self.take(keys[i + j + 1], g[i + j + 1], odd);
    }
    even.add(odd);
    all.add(even);
  }
  for (; i < n; ++i) self.take(keys[i], g[i], rest);
  all.add(rest);
  sums_ = all;
}

// As Block does in output.hpp.
template <class Kind, class T, bool kAll>
void LaneCotangents<Kind, T, kAll>::average() {
  const V none{}, debias = all_lanes(T(debias_ ? 1 : 0));
  V left = kMagnitude ? k_ - sums_.whole : sums_.whole;
  if (kAll && !kMagnitude)
    for (std::size_t i = 0; i < kWidth<T>; ++i) left[i] = is_whole_[i] ? T(::round(double(left[i]))) : left[i];
  const V curvature = kMagnitude ? left : none, total = sums_.rho + lam_ * curvature;
  const F moves = kMagnitude ? left > 0 : ~F{}, shares = (total > 0) & ~pinned_ & moves;
  const F single = (sums_.size == 1) & ~pinned_ & moves;
  mean_ = shares ? (sums_.rho_g + lam_ * debias * sums_.g) / total : none;
  const V alone = shares ? curvature * (sums_.rho + lam_ * debias) / total : none;
  // Where entries that are selected whole leave nothing of k, the others are at the threshold by rounding alone.
  scale_ = single | ~moves ? none : inverse_, gain_ = moves ? (single ? alone : debias) : none;
  finite = absolute_lanes(mean_) <= T(1e30);
  if (kAll) {
    dk = (left > 0) & (left < sums_.size) ? prime_ * mean_ : none;
    const V t = sums_.rho > 0 ? sums_.rho_t / sums_.rho : none;
    dlam = (mean_ * sums_.rho_t - sums_.rho_g_t) * inverse_;
    // debias - alone, as in output.hpp.
    const V lone = sums_.rho * (1 - curvature) / total, rest = debias_ ? (shares ? lone : none) : -alone;
    dlam = (moves ? (single ? sums_.g * t * rest : dlam) : none) + sums_.whole_in_lam;
    finite &= (absolute_lanes(dlam) <= T(1e30)) & (absolute_lanes(dk) <= T(1e30));
  }
}

// dx without the sign of x, and finite whatever the slope, in the place of rho.
template <class X, class Kind, class T, bool kAll>
SPARSETOPK_LOOP void to_cotangents(const LaneCotangents<Kind, T, kAll>& block, Vector<T>* rho, const Vector<T>* g,
                                   std::size_t n) {
  const LaneCotangents<Kind, T, kAll> at = block;
  const Vector<T> limit = all_lanes(T(Limits<X>::largest));
  for (std::size_t j = 0; j < n; ++j) rho[j] = larger_lanes(-limit, smaller_lanes(limit, at(rho[j], g[j])));
}

// What a group of rows has for k and lam; and the rows that lanes are not for.
template <class X, class Kind, bool kAll>
void finish_backward(const Problem& problem, const Kind& kind, std::size_t first, std::size_t count, unsigned others,
                     const LaneCotangents<Kind, Lane<Kind, X>, kAll>& block, const X* g, X* dx, double* dk,
                     double* dlam) {
  if (kAll)
    for (std::size_t i = 0; i < count; ++i) {
      if (dk != nullptr) dk[first + i] = double(block.dk[i]);
      if (dlam != nullptr) dlam[first + i] = double(block.dlam[i]);
    }
  for (unsigned bits = others & ((1u << count) - 1); bits != 0; bits &= bits - 1) {
    const std::size_t row = first + std::size_t(__builtin_ctz(bits)), n = problem.n;
    const X* x = static_cast<const X*>(problem.x) + row * problem.row_stride;
    const Row<X, Kind> one_row{x, n, problem.k_of(row), problem.lam_of(row), kind, problem.debias, 1};
    const Cotangents found = backward_row(one_row, problem.state[row], g + row * n, dx + row * n);
    if (dk != nullptr) dk[row] = finite<double>(found.k);
    if (dlam != nullptr) dlam[row] = finite<double>(found.lam);
  }
}

template <class X, class Kind, bool kAll>
void backward_lanes(const Problem& problem, const Kind& kind, std::size_t begin, std::size_t end, const X* g, X* dx,
                    double* dk, double* dlam) {
  using T = Lane<Kind, X>;
  using V = Vector<T>;
  constexpr std::size_t kW = kWidth<T>;
  V keys[kLongestTurned<Kind>], gs[kLongestTurned<Kind>];
  const std::size_t n = problem.n;
  const X* x = static_cast<const X*>(problem.x);
  const bool same = problem.k_stride == 0 && problem.lam_stride == 0;
  Asked<T> asked(problem, begin, 1);
  for (std::size_t first = begin; first < end; first += kW) {
    const std::size_t count = smaller(kW, end - first);
    if (!same) asked.fill(problem, first, count);
    const LaneStates<T> states(problem, first, count);
    to_lanes<T>(x + first * problem.row_stride, problem.row_stride, count, n, keys);
    to_lanes<T>(g + first * n, n, count, n, gs);
    if (Kind::kAbsolute)
      for (std::size_t j = 0; j < n; ++j) gs[j] = keys[j] < 0 ? -gs[j] : gs[j], keys[j] = absolute_lanes(keys[j]);
    LaneCotangents<Kind, T, kAll> block(kind, asked, states, problem.debias);
    block.add_up(keys, gs, n);
    block.average();
    to_cotangents<X>(block, keys, gs, n);
    to_signed_rows<Kind, T>(problem, first, count, keys, dx);
    const unsigned others = ~bits_of(asked.fits & states.usual & block.finite);
    finish_backward<X, Kind, kAll>(problem, kind, first, count, others, block, g, dx, dk, dlam);
  }
}

// The same for masks of longer rows, in which few entries have a derivative: these alone become lanes.
template <class X, class Kind, bool kAll>
void backward_few_lanes(const Problem& problem, const Kind& kind, std::size_t begin, std::size_t end, const X* g, X* dx,
                        double* dk, double* dlam) {
  using T = Lane<Kind, X>;
  constexpr std::size_t kW = kWidth<T>, kMost = 3 * kSumBlock;  // a row that has more is for itself
  Vector<T> keys[kMost], gs[kMost];
  std::uint32_t positions[kW][kLongestLaneBackward<Kind> + 16];
  const std::size_t n = problem.n;
  Asked<T> asked(problem, begin, 1);
  for (std::size_t first = begin; first < end; first += kW) {
    const std::size_t count = smaller(kW, end - first);
    if (problem.k_stride != 0 || problem.lam_stride != 0) asked.fill(problem, first, count);
    const LaneStates<T> states(problem, first, count);
    LaneCotangents<Kind, T, kAll> block(kind, asked, states, false);
    const Vector<T> limit = all_lanes(T(Limits<Wide<X>>::largest));
    const Vector<T> least = clip_lanes(block.least(), -limit, limit), most = clip_lanes(block.most(), -limit, limit);
    unsigned others = ~bits_of(asked.fits & states.usual);
    std::size_t counts[kW] = {}, longest = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const X* x = static_cast<const X*>(problem.x) + (first + i) * problem.row_stride;
      const X* cotangents = g + (first + i) * n;
      for_tiles<Kind::kAbsolute>(x, n, [&](const Wide<X>* row, std::size_t, std::size_t) {
        counts[i] = positions_between(row, n, Wide<X>(least[i]), Wide<X>(most[i]), positions[i]);
      });
      if (counts[i] > kMost) others |= 1u << i;
      if (others >> i & 1) counts[i] = 0;
      longest = larger(longest, counts[i]);
      for (std::size_t j = 0; j < counts[i]; ++j) {
        const std::size_t at = positions[i][j];
        const Wide<X> in = widen(cotangents[at]);
        keys[j][i] = T(key<Kind::kAbsolute>(x[at])), gs[j][i] = T(Kind::kAbsolute && widen(x[at]) < 0 ? -in : in);
      }
    }
    // As many as make blocks, so that a row is added up in the same order whichever are beside it.
    longest = (longest + kSumBlock - 1) / kSumBlock * kSumBlock;
    for (std::size_t i = 0; i < kW; ++i)
      for (std::size_t j = counts[i]; j < longest; ++j) keys[j][i] = T(-Limits<T>::largest), gs[j][i] = 0;
    block.add_up(keys, gs, longest);
    block.average();
    to_cotangents<X>(block, keys, gs, longest);
    for (std::size_t i = 0; i < count; ++i) {
      const X* x = static_cast<const X*>(problem.x) + (first + i) * problem.row_stride;
      X* out = dx + (first + i) * n;
      std::memset(out, 0, n * sizeof(X));
      for (std::size_t j = 0; j < counts[i]; ++j) {
        const std::size_t at = positions[i][j];
        out[at] = cotangent<X, Kind>(double(keys[j][i]), x[at]);
      }
    }
    finish_backward<X, Kind, kAll>(problem, kind, first, count, others | ~bits_of(block.finite), block, g, dx, dk,
                                   dlam);
  }
}

}  // namespace SPARSETOPK_LEVEL
}  // namespace sparsetopk
