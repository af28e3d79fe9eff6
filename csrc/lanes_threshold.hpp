// The thresholds of many short rows at a time: boundaries, and Newton's method, in every lane.
#pragma once

#include "lanes.hpp"

namespace sparsetopk {
namespace SPARSETOPK_LEVEL {

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
      : keys_(keys), n_(n), counts_(all_lanes(T(n))), asked_(asked), kind_(kind) {}

  V pivot, delta;
  F solved;  // the lanes that have them
  F known;   // those that had them without a step, exactly

  void solve(NormalGuess& normal);
  // The same for some entries of each row, ``counts`` of them, from a boundary that is known to be between two keys, and
  // about half way between them.
  void solve_between(const LaneBoundary<T>& boundary, V counts, V near);
  V top() const { return kMagnitude ? pivot - asked_.lam * delta : all_lanes(T(1)); }

 private:
  static constexpr T kEpsilon = T(Limits<T>::epsilon);

  void bracket_between(const LaneBoundary<T>& boundary);
  void guess(NormalGuess& normal);
  void guess_others(F few, NormalGuess& normal);
  F looks_wide() const;
  V wide_start(const LaneMoments<T>& row, V deviation) const;
  void start_at_zero();
  void finish();
  SPARSETOPK_LOOP void iterate();
  LaneSums<V> add_up(V from, V at) const { return kLinear<Kind> ? add_up_linear(from, at) : add_up_steep(from, at); }
  LaneSums<V> add_up_linear(V from, V at) const;
  SPARSETOPK_LOOP LaneSums<V> add_up_steep(V from, V at) const;
  SPARSETOPK_LOOP void leave_out(V from, V lo, V hi);
  V root_from(const LaneSums<V>& sums, V left, V at) const;

  const V* keys_;
  std::size_t n_;
  V counts_;  // how many of them there are in every lane
  const Asked<T>& asked_;
  const Kind& kind_;
  V lo_, hi_;  // the root delta is between them
  F ends_;     // the lanes in which that is sure; else hi_ may be below the root
  V density_;  // how fast sum z grows with delta, roughly
  F done_;
  V whole_{};  // how many keys were left out as they are selected whole
  V open_[kLinear<Kind> ? 1 : kLongestLane<Kind>];
};

// Sums at the threshold from - lam at.
template <class Kind, class T>
LaneSums<Vector<T>> LaneRows<Kind, T>::add_up_linear(V from, V at) const {
  constexpr std::size_t kBlock = kSumBlock, kSums = 4;  // few additions in a row lose few digits, and wait less
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

// Newton's step for S(t) = t^e, on mass^(p-1), which is linear in delta for one entry; for others on the mass itself. Where
// the block is left nothing of a whole number, or as much as it has entries, there is a gap at one of its ends: the
// threshold goes over that, by more than float32 rounds a state.
template <class Kind, class T>
Vector<T> LaneRows<Kind, T>::root_from(const LaneSums<V>& sums, V left, V at) const {
  const V one = all_lanes(T(1)), tiny = all_lanes(T(1e-300)), slope = larger_lanes(sums.slope, tiny);
  V step = (sums.mass - left) / slope;
  if constexpr (Kind::zero == 0) {
    const V ratio = larger_lanes(left, V{}) / larger_lanes(sums.mass, tiny);
    const V on_root = sums.mass * (one - root_of(kind_, ratio)) * T(kind_.exponent) / slope;
    step = (sums.mass > 0) & (left >= 0) ? on_root : step;
  }
  const V beyond = T(96 * Limits<float>::epsilon) * (one + absolute_lanes(at));
  const V t = sums.t / larger_lanes(sums.size, one);  // of all entries of the block, if these are equal
  const F shared = asked_.is_whole() & (sums.size > 0);
  step = shared & (left == 0) ? t - T(Kind::zero) + beyond : step;
  return at - (shared & (left == sums.size) ? t - one - beyond : step);
}

// The boundary holds the threshold between its two keys, as in threshold.hpp.
template <class Kind, class T>
void LaneRows<Kind, T>::bracket_between(const LaneBoundary<T>& boundary) {
  const V alone = kMagnitude ? boundary.above / (1 + asked_.lam) : all_lanes(T(1));
  solved = asked_.fits & boundary.finite;
  pivot = boundary.below;
  lo_ = all_lanes(T(Kind::zero)), hi_ = alone - (boundary.above - boundary.below) * asked_.inverse;
  density_ = V{}, ends_ = ~F{};
  done_ = hi_ <= lo_;  // the gap is too wide to pool anything
  delta = done_ ? lo_ : (lo_ + hi_) / 2;
}

// Masks whose lam is more than what entries differ by: hardly one is selected whole, and the boundary tells nothing of v.
template <class Kind>
constexpr bool kMayBeWide = kLinear<Kind> && !Kind::kMagnitude && !Kind::kAbsolute;

// Whether lam seems to be such, by sixteen entries.
template <class Kind, class T>
Flags<T> LaneRows<Kind, T>::looks_wide() const {
  constexpr std::size_t kTaken = 16;
  V smallest = keys_[0], largest = keys_[0];
  for (std::size_t i = 1; i < kTaken; ++i) {
    const V key = keys_[i * n_ / kTaken];
    smallest = smaller_lanes(smallest, key), largest = larger_lanes(largest, key);
  }
  return asked_.lam > 2 * (largest - smallest);
}

// The v with sum_i max(x_i - v, 0) = lam k, were the entries normal: below their mean by lam k/n where all are over v, and
// by less where some are not. Roughly: Newton's method does the rest.
template <class Kind, class T>
Vector<T> LaneRows<Kind, T>::wide_start(const LaneMoments<T>& row, V deviation) const {
  constexpr int kMantissa = sizeof(T) == 4 ? 23 : 52, kBias = sizeof(T) == 4 ? 127 : 1023;
  const V below = asked_.lam * asked_.k * (1 / T(n_)), c = below / larger_lanes(deviation, all_lanes(T(1e-30)));
  const V log2 = __builtin_convertvector((F)c, V) * T(1 / double(std::int64_t(1) << kMantissa)) - T(kBias);
  const V less = c < T(0.5) ? T(-0.3) * log2 : T(0.16) / (c * (1 + c * c * c / 2));
  return row.mean - below + less * deviation;
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
  V start = kMagnitude ? boundary / (1 + lam / 2) : boundary - lam * half;
  if constexpr (kMayBeWide<Kind>) {
    const F wide = lam > row.largest - row.smallest;
    start = wide ? wide_start(row, deviation) : start, density_ = wide ? V{} : density_;
  }
  const V low = kMagnitude ? larger_lanes(row.smallest / (1 + lam), row.largest * kEpsilon) : row.smallest - lam;
  const V high = row.largest - lam * T(Kind::zero);
  solved = asked_.fits & row.finite, done_ = F{};
  pivot = clip_lanes(start, low, high), delta = V{};
  lo_ = (pivot - high) * asked_.inverse, hi_ = (pivot - low) * asked_.inverse;
  // Where lam is so small that ``low`` is rounded to the smallest entry, the root is between them still.
  const V alone = kMagnitude ? row.smallest / (1 + lam) : all_lanes(T(1));
  const F exact = kMagnitude ? alone >= low : ~F{};
  ends_ = exact;
  hi_ = exact ? larger_lanes(hi_, (pivot - row.smallest) * asked_.inverse + alone) : hi_;
}

// The same for some lanes, and what there is for the others.
template <class Kind, class T>
void LaneRows<Kind, T>::guess_others(F few, NormalGuess& normal) {
  const LaneRows other = *this;
  guess(normal);
  pivot = few ? other.pivot : pivot, delta = few ? other.delta : delta, solved = few ? other.solved : solved;
  lo_ = few ? other.lo_ : lo_, hi_ = few ? other.hi_ : hi_, density_ = few ? other.density_ : density_;
  done_ = few ? other.done_ : done_, ends_ = few ? other.ends_ : ends_;
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
  const V k = asked_.k, lam = asked_.lam, inverse = asked_.inverse, one = all_lanes(T(1)), scale = larger_lanes(k, one);
  const V finest = kMagnitude ? smaller_lanes(one, inverse) : one;  // v = from - lam at has its digits too
  V lo = lo_, hi = hi_, value_lo = -k, value_hi = counts_ - k, from = pivot, at = delta;
  V width = hi - lo, last_side{};
  F done = done_ | ~solved, good = solved, below = ends_;  // below hi, as is known
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
    below |= high;
    lo = low ? at : lo, hi = high ? at : hi;
    V newton = at - value / larger_lanes(slope, all_lanes(kTiny));
    if constexpr (!kLinear<Kind>) newton = root_from(sums, left, at);
    const V size = absolute_lanes(value);
    const F close = absolute_lanes(newton - at) <= unit, between = (newton > lo) & (newton < hi);
    const V rounding = kEpsilon * (absolute_lanes(at) + unit * finest), room = hi - lo;
    F met = ((size <= asked_.tolerance * scale) & (close | (slope == 0))) | (size <= kEpsilon / 2 * scale);
    if constexpr (!kLinear<Kind>) {  // little that is left for the block counts as much, as S is not small with t
      V most = smaller_lanes(scale, larger_lanes(left, mass));
      if (Kind::zero < 0) most = smaller_lanes(most, slope);  // it is flat at both ends
      met = (size == 0) | ((size <= asked_.tolerance * most) & close & ((sums.size > 1) | ~asked_.is_whole()));
    }
    const F stuck = (room <= 4 * rounding) | (between & (absolute_lanes(newton - at) <= rounding));
    const F stops = (met | stuck) & ~done;
    good &= ~stops | ((size <= T(1e-4) * scale) & (met | below));
    // Where the entries that are whole leave nothing of k, no other may be left over v, not even by rounding: output and
    // slope would not be 0. threshold.hpp sees to that.
    if (kMagnitude) good &= ~(stops & (sums.mass > 0) & (left <= 0));
    // One entry that shares a whole number with no other is at an edge of a gap: the threshold goes over it, at once, so
    // that no rounding decides on which side it is. Where it has been there, there is no gap, and the root is in between.
    const V beyond = 96 * rounding, over = kLinear<Kind> ? newton - (value > 0 ? beyond : -beyond) : newton;
    const F alone = asked_.is_whole() & ((kLinear<Kind> ? slope : sums.size) == 1) & (value != 0) & (size < 1);
    const F edge = !kMagnitude ? alone & (over > lo) & (over < hi) : F{};
    const F was_there = edge & ((over - lo < 2 * beyond) | (hi - over < 2 * beyond));
    // Rounding may put the root just outside of what little is left between the ends: then it is that end.
    at = stops & close ? (edge & between ? over : clip_lanes(newton, lo, hi)) : at;
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
    const V reach =
        kMagnitude ? smaller_lanes(2 * unit, from * inverse / 4) : smaller_lanes(2 * one, k * (4 / counts_));
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
  F few = asked_.below <= T(kRanks);
  if constexpr (kMayBeWide<Kind>)
    if (n_ > 16) few &= ~looks_wide();
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
  finish();
}

template <class Kind, class T>
void LaneRows<Kind, T>::solve_between(const LaneBoundary<T>& boundary, V counts, V near) {
  bracket_between(boundary);
  counts_ = counts;
  const V start = kMagnitude ? near / (1 + asked_.lam / 2) : near - asked_.lam / 2;
  delta = done_ ? delta : clip_lanes((pivot - start) * asked_.inverse, lo_, hi_);
  finish();
}

template <class Kind, class T>
void LaneRows<Kind, T>::finish() {
  // A magnitude of 0 at the boundary is a case of its own.
  if (kMagnitude) solved &= pivot >= T(1e-30);
  if (Kind::kFloor) start_at_zero();
  iterate();
}

}  // namespace SPARSETOPK_LEVEL
}  // namespace sparsetopk
