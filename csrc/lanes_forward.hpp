// From the thresholds of rows in lanes to their outputs: of short rows, of longer ones that have few entries left after
// one pass, and of hard ones.
#pragma once

#include "lanes_threshold.hpp"

namespace sparsetopk {
namespace SPARSETOPK_LEVEL {

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

// The lanes of which some output is far enough from both ends that no rounding has put it there: such a row has a block.
template <class T>
SPARSETOPK_LOOP Flags<T> have_block(const Vector<T>* y, std::size_t n, Vector<T> least, Vector<T> most) {
  const Vector<T> none{}, one = all_lanes(T(1));
  Vector<T> clear{};
  for (std::size_t j = 0; j < n; ++j) clear += (y[j] > least) & (y[j] < most) ? one : none;
  return clear > 0;
}

// Puts outputs in the place of keys. Returns whether entries of a lane are next to an end of the block, so that rounding
// decides on which side: where k is whole and no other entry is in the block, these may be at an edge of a gap, which
// threshold.hpp looks for.
template <class Kind, class T>
SPARSETOPK_LOOP Flags<T> to_outputs(const LaneCurve<Kind, T>& curve, Vector<T>* keys, std::size_t n) {
  const LaneCurve<Kind, T> at = curve;  // in registers
  constexpr T kEpsilon = T(Limits<T>::epsilon);
  const Vector<T> near = Kind::kMagnitude ? 192 * kEpsilon * at.top : 96 * kEpsilon * (1 + absolute_lanes(at.delta));
  // Inwards, as what iterate() has moved past an end is not meant; seen from the middle, both ends are one.
  const Vector<T> middle = at.top / 2, end = middle - near / 3;
  const Vector<T> none{}, one = all_lanes(T(1));
  Vector<T> close{};
  for (std::size_t j = 0; j < n; ++j) {
    const Vector<T> away = absolute_lanes(at.distance(keys[j]) - middle);
    close += absolute_lanes(away - end) < near ? one : none;
    keys[j] = at(keys[j]);
  }
  if (Kind::kMagnitude) return close > 1;  // one entry may be there
  const Flags<T> unclear = close > 0;
  if (bits_of(unclear) == 0) return unclear;
  const Vector<T> least = larger_lanes(2 * near, all_lanes(T(1e-5)));
  return unclear & ~have_block<T>(keys, n, least, 1 - least);
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

template <class X, class Kind>
Row<X, Kind> row_of(const Problem& problem, const Kind& kind, std::size_t i) {
  const X* x = static_cast<const X*>(problem.x) + i * problem.row_stride;
  return {x, problem.n, problem.k_of(i), problem.lam_of(i), kind, problem.debias, 1};
}

// A row that lanes are not for.
template <class X, class Kind>
void forward_other(const Problem& problem, const Kind& kind, std::size_t i, X* y, NormalGuess& normal,
                   std::size_t& read) {
  const Row<X, Kind> row = row_of<X>(problem, kind, i);
  problem.keep(i, row.solve(y + i * problem.n, normal, read));
  forward_row(row, problem.state[i], y + i * problem.n);
}

// What is done with rows besides writing y: nothing. A group is given with its keys, once these are solved, and with its
// outputs in their place, before they are written; and every row at last, with those lanes that solved it or not.
struct NothingElse {
  template <class T, class Rows>
  void with_keys(std::size_t, std::size_t, const Vector<T>*, const Rows&) {}
  template <class T>
  void with_outputs(Vector<T>*) {}
  void with_rows(unsigned) {}
};

template <class X, class Kind, class Also>
void forward_lanes_also(const Problem& problem, const Kind& kind, std::size_t begin, std::size_t end, X* y,
                        NormalGuess& normal, std::size_t& read, Also&& also) {
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
    also.template with_keys<T>(first, count, keys, rows);
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
    also.template with_outputs<T>(keys);
    to_signed_rows<Kind, T>(problem, first, count, keys, y);
    T pivots[kW], deltas[kW];
    store(rows.pivot, pivots), store(rows.delta, deltas);
    for (std::size_t i = 0; i < count; ++i) problem.keep(first + i, {double(pivots[i]), double(deltas[i])});
    const unsigned solved = bits_of(rows.solved & ~unclear);
    for (unsigned bits = ~solved & ((1u << count) - 1); bits != 0; bits &= bits - 1)
      forward_other(problem, kind, first + std::size_t(__builtin_ctz(bits)), y, normal, read);
    also.with_rows(solved);
  }
}

template <class X, class Kind>
void forward_lanes(const Problem& problem, const Kind& kind, std::size_t begin, std::size_t end, X* y,
                   NormalGuess& normal, std::size_t& read) {
  forward_lanes_also(problem, kind, begin, end, y, normal, read, NothingElse{});
}

// Up to there rows have so few entries left after one pass that these are best solved in lanes. Measured.
template <class Kind>
constexpr std::size_t kLongestFew = kLinear<Kind> ? 1024 : 0;

// The entries that a group of longer rows is left with, as lanes.
template <class Kind, class T>
struct FewLanes {
  using V = Vector<T>;
  static constexpr std::size_t kMost = 96;  // a row that has more is for itself
  V keys[kMost];
  std::size_t longest = 0;
  T above[kWidth<T>] = {}, below[kWidth<T>] = {}, near[kWidth<T>] = {}, counts[kWidth<T>], whole[kWidth<T>] = {};
  unsigned taken = 0, exact = 0;  // lanes that have a row, and those of which the boundary is known

  // Whether the row may be one of them: its undecided entries are those of a bracket that holds.
  template <class X>
  bool take(std::size_t lane, const Row<X, Kind>& row, const Bracket<Wide<X>>& bracket, const Open<X>& open) {
    const bool narrow = bracket.exact ? bracket.lo < bracket.hi : pools(bracket, row.lam, row.kind);
    if (!narrow || open.size == 0 || open.size > kMost) return false;
    for (std::size_t j = 0; j < open.size; ++j) keys[j][lane] = T(key<Kind::kAbsolute>(open.entries[j]));
    const double share = bracket.counted ? (row.k - double(bracket.over_hi)) / double(bracket.inside()) : 0.5;
    above[lane] = T(bracket.exact ? bracket.hi : bracket.lo), below[lane] = T(bracket.exact ? bracket.lo : bracket.hi);
    near[lane] = T(double(bracket.hi) + share * (double(bracket.lo) - double(bracket.hi)));
    counts[lane] = T(open.size), whole[lane] = T(open.whole);
    longest = larger(longest, open.size);
    taken |= 1u << lane, exact |= unsigned(bracket.exact) << lane;
    return true;
  }
  // Fills up the lanes to as many as make blocks, so that a row is added up in the same order whichever are beside it.
  void fill_up() {
    longest = (longest + kSumBlock - 1) / kSumBlock * kSumBlock;
    for (std::size_t i = 0; i < kWidth<T>; ++i) {
      if (!(taken >> i & 1)) counts[i] = 0;
      for (std::size_t j = std::size_t(counts[i]); j < longest; ++j) keys[j][i] = T(-Limits<T>::largest);
      if (!(taken >> i & 1)) counts[i] = 1;
    }
  }
};

template <class X, class Kind>
void forward_few_lanes(const Problem& problem, const Kind& kind, std::size_t begin, std::size_t end, X* y,
                       NormalGuess& normal, std::size_t& read) {
  using T = Lane<Kind, X>;
  constexpr std::size_t kW = kWidth<T>;
  const std::size_t n = problem.n;
  Asked<T> all(problem, begin, 1);
  for (std::size_t first = begin; first < end; first += kW) {
    const std::size_t count = smaller(kW, end - first);
    if (problem.k_stride != 0 || problem.lam_stride != 0) all.fill(problem, first, count);
    const unsigned fits = bits_of(all.fits);
    FewLanes<Kind, T> few;
    for (std::size_t i = 0; i < count; ++i) {
      const Row<X, Kind> row = row_of<X>(problem, kind, first + i);
      X* out = y + (first + i) * n;
      Bracket<Wide<X>> bracket(row.k, 0, 0, read);
      Open<X> open;
      open.room = out;
      State state;
      const bool begun = row.begin(bracket, open, normal, state);
      if (begun && (fits >> i & 1) && few.take(i, row, bracket, open)) continue;
      problem.keep(first + i, begun ? row.find(bracket, open) : state);
      forward_row(row, problem.state[first + i], out);
    }
    if (few.taken == 0) continue;
    few.fill_up();
    Asked<T> asked = all;
    const Vector<T> whole = load(few.whole);
    asked.k -= whole, asked.above -= whole, asked.below -= whole;
    Flags<T> used;
    for (std::size_t i = 0; i < kW; ++i) used[i] = few.taken >> i & 1 ? -1 : 0;
    LaneRows<Kind, T> rows(few.keys, few.longest, asked, kind);
    rows.solve_between({load(few.above), load(few.below), used}, load(few.counts), load(few.near));
    const LaneCurve<Kind, T> curve{kind, rows.pivot, rows.delta, asked.inverse, rows.top(), asked.lam, asked.lam};
    const unsigned unclear = bits_of(to_outputs(curve, few.keys, few.longest) & asked.is_whole()) & ~few.exact;
    const unsigned solved = bits_of(rows.solved) & ~unclear;
    for (std::size_t i = 0; i < count; ++i) {
      if (!(few.taken >> i & 1)) continue;
      if (solved >> i & 1) {
        problem.keep(first + i, {double(rows.pivot[i]), double(rows.delta[i])});
        forward_row(row_of<X>(problem, kind, first + i), problem.state[first + i], y + (first + i) * n);
      } else {
        forward_other(problem, kind, first + i, y, normal, read);
      }
    }
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

}  // namespace SPARSETOPK_LEVEL
}  // namespace sparsetopk
