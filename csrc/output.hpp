// From the threshold of a row to its output.
#pragma once

#include "threshold.hpp"

namespace sparsetopk {
namespace SPARSETOPK_LEVEL {

// Gives |x| its sign back; adding 0 makes 0 of -0, on either side.
template <class Kind, class X>
inline X with_sign(double y, X x) {
  return narrow<X>(Wide<X>(Kind::kAbsolute ? __builtin_copysign(y, double(widen(x)) + 0.0) + 0.0 : y));
}

// A solved row that has a threshold, as a function of the key.
template <class Kind>
struct Curve {
  static constexpr bool kMagnitude = Kind::kMagnitude;
  Kind kind;
  Distance distance;
  double k, lam, v, top;
  bool debias;
  bool pinned;  // the signed mask at v = 0, where no threshold is shared

  Curve(const Kind& kind_, State state, double k_, double lam_, bool debias_, double epsilon)
      : kind(kind_),
        distance(state.pivot, state.delta, lam_),
        k(k_),
        lam(lam_),
        v(state.pivot - lam * state.delta),
        top(whole_from(state, epsilon)),
        debias(debias_),
        pinned(Kind::kFloor && state.pivot == 0 && state.delta == 0) {}

  // The t from which on an entry is selected whole; one at 0 never is. In magnitude what is over v by rounding alone
  // stays in the block, which so is never left without a share of k.
  double whole_from(State state, double epsilon) const {
    if (!kMagnitude) return kind.top(v);
    const double rounding = 16 * epsilon;
    const double level = v + rounding * (::fabs(state.pivot) + lam * ::fabs(state.delta));
    const double from = kind.top(level) * (1 + rounding);
    return from > 0 ? from : next_up(0 * v);
  }

  // Entries of the block have bottom < t < top. Pinned at 0, those at 0 are among them.
  double bottom() const { return pinned ? -1 : Kind::zero; }

  double whole(double a) const {
    if (!kMagnitude) return 1;
    if (debias) return a;
    const double d = kind.alone(a, lam);
    return d > 0 ? smaller(kind.at(d).value, a) : 0;  // d may be beyond the largest double
  }
  double output(double a) const {
    const double t = distance(a);
    if (!(t > Kind::zero)) return 0;
    if (t >= top) return whole(a);
    const double y = kind.at(t).value + (kMagnitude && debias ? over(a) : 0.0);
    return kMagnitude ? smaller(y, a) : y;  // also where sums of the largest numbers there are overflow
  }
  // a - v = lam t, which keeps its digits also where t is too small to have any.
  double over(double a) const { return (a - distance.pivot) + lam * distance.delta; }

  // The same without branches, for responses that cost next to nothing; ``debiased`` is 1 or 0.
  double cheap_output(double a, double debiased, double shrink) const {
    const double t = distance(a), at = clip(t, Kind::zero, top), y = kind.at(at).value;
    if (!kMagnitude) return y;
    return t < top ? y + (t > 0 ? debiased * over(a) : 0.0) : a * shrink;
  }
};

// Replaces keys by outputs.
template <class Kind>
SPARSETOPK_LOOP void outputs(const Curve<Kind>& row, double* __restrict some, std::size_t count) {
  const Curve<Kind> curve = row;
  for (std::size_t j = 0; j < count; ++j) {
    if constexpr (Kind::kVector && !Kind::kMagnitude)
      some[j] = curve.kind.at(clip(curve.distance(some[j]), Kind::zero, curve.top)).value;
    else
      some[j] = curve.output(some[j]);
  }
}

// The same with bounds for keys: below ``from`` they are left out, above ``to`` selected whole; between,
// t decides.
template <class X, class Kind>
struct Solved : Curve<Kind> {
  using T = Wide<X>;
  T from, to;

  Solved(const Row<X, Kind>& row, State state)
      : Curve<Kind>(row.kind, state, row.k, row.lam, row.debias, row.rounding) {
    const double low = this->v + this->lam * Kind::zero, high = this->v + this->lam * this->top;
    const double slack = 4 * Limits<T>::epsilon * (::fabs(state.pivot) + ::fabs(this->v) + ::fabs(high));
    constexpr double limit = Limits<T>::largest;
    from = step_down(T(smaller(larger(low - slack, -limit), limit)));
    to = step_up(T(smaller(larger(high + slack, -limit), limit)));
    // Without debias the output depends on a also where it is selected whole.
    if (Kind::kMagnitude && !row.debias) to = T(limit);
  }
};

// Every entry by the same formula, for responses that cost next to nothing.
template <class X, class Kind>
struct Formula {
  Curve<Kind> curve;
  double debiased, shrink;

  explicit Formula(const Curve<Kind>& curve_)
      : curve(curve_), debiased(curve.debias ? 1 : 0), shrink(curve.debias ? 1 : 1 / (1 + curve.lam)) {}
  X operator()(X x) const {
    return with_sign<Kind>(curve.cheap_output(double(key<Kind::kAbsolute>(x)), debiased, shrink), x);
  }
};

// The same in float alone, which is four times as fast.
template <class X, class Kind>
struct FloatFormula {
  static constexpr bool kAbsolute = Kind::kAbsolute, kMagnitude = Kind::kMagnitude;
  Kind kind;
  FloatDistance<Kind> distance;
  float top, debias_lam, shrink;

  explicit FloatFormula(const Curve<Kind>& curve)
      : kind(curve.kind),
        distance(curve.distance, curve.v),
        top(float(curve.top)),
        debias_lam(curve.debias ? float(curve.lam) : 0),
        shrink(curve.debias ? 1 : float(1 / (1 + curve.lam))) {}
  X operator()(X x) const {
    const float wide = widen(x), a = kAbsolute ? absolute(wide) : wide, t = distance(a);
    const float low = t > 0 ? t : 0, at = low < top ? low : top, inside = kind.response(at);
    // No magnitude is above its entry, not even by rounding.
    const float y = !kMagnitude ? inside : t < top ? smaller(inside + debias_lam * at, a) : a * shrink;
    return narrow<X>(kAbsolute ? __builtin_copysignf(y, wide + 0.0f) + 0.0f : y);
  }
};

template <class X, class F>
inline void write_lanes(const F& f, const X* x, X* y) {
  for (std::size_t j = 0; j < kLanes; ++j) y[j] = f(x[j]);
}

template <class X, class F>
SPARSETOPK_LOOP void write_all(const F& formula, const X* __restrict x, std::size_t n, X* __restrict y) {
  const F f = formula;  // in registers: y might be anything
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) write_lanes(f, x + i, y + i);
  if (i == n) return;
  if (n >= kLanes) return write_lanes(f, x + n - kLanes, y + n - kLanes);
  X some[kLanes] = {}, out[kLanes];
  std::memcpy(some, x, n * sizeof(X));
  write_lanes(f, some, out);
  std::memcpy(y, out, n * sizeof(X));
}

// write(f) with y as a function of x, where S costs next to nothing.
template <class X, class Kind, class Write>
void with_formula(const Curve<Kind>& curve, Write&& write) {
  if constexpr (sizeof(Wide<X>) == sizeof(float) && Kind::zero == 0)
    if (FloatDistance<Kind>::fits(curve.v, curve.lam)) return write(FloatFormula<X, Kind>(curve));
  write(Formula<X, Kind>(curve));
}
template <class X, class Kind>
void write_cheap(const Curve<Kind>& curve, const X* x, std::size_t n, X* y) {
  with_formula<X>(curve, [=](const auto& f) { write_all(f, x, n, y); });
}

// y where S is costly: 0 or 1 (or x) for most entries, and S for those in between.
template <class X, class Kind>
void write_inside(const Solved<X, Kind>& row, const X* x, std::size_t n, X* y) {
  using T = Wide<X>;
  for_tiles<Kind::kAbsolute>(x, n, [&](const T* keys, std::size_t i, std::size_t length) {
    std::uint32_t positions[kTile + 16];
    double some[kTile];
    const std::size_t count = positions_between(keys, length, row.from, row.to, positions);
    const T to = row.to;
    for (std::size_t j = 0; j < length; ++j)
      y[i + j] = with_sign<Kind>(double(keys[j] > to ? (Kind::kMagnitude ? keys[j] : T(1)) : T(0)), x[i + j]);
    for (std::size_t j = 0; j < count; ++j) some[j] = double(keys[positions[j]]);
    outputs<Kind>(row, some, count);
    for (std::size_t j = 0; j < count; ++j) {
      const std::size_t at = positions[j];
      y[i + at] = with_sign<Kind>(some[j], x[i + at]);
    }
  });
}

// Hard rows: z = 1 for keys above the pivot, and a mass of ``delta`` for those at it, the first ones first.
//
// Over a part of a row: f(x, g) for keys above the pivot, and 0. Returns where the first tile begins that has keys at it.
template <class Kind, class X, class F>
std::size_t write_above(const X* __restrict x, const X* __restrict g, std::size_t n, double pivot, X* __restrict y,
                        F f) {
  std::size_t first = n;
  const auto at = Wide<X>(pivot);
  for (std::size_t i = 0; i < n; i += kTile) {
    const std::size_t length = smaller(kTile, n - i);
    std::uint32_t ties = 0;
    for (std::size_t j = 0; j < length; ++j) {
      const Wide<X> a = key<Kind::kAbsolute>(x[i + j]);
      const X value = f(x[i + j], g[i + j]);
      y[i + j] = a > at ? value : X{};
      ties += a == at;
    }
    if (ties > 0) first = smaller(first, i);
  }
  return first;
}

template <class X, class Kind, class F>
SPARSETOPK_LOOP void write_hard(const Row<X, Kind>& row, State state, const X* g, X* y, F f) {
  using T = Wide<X>;
  std::size_t first[kBlocks];
  const Blocks blocks(row.n);
  blocks.run(row.threads, [&](std::size_t block, std::size_t begin, std::size_t length) {
    first[block] = write_above<Kind>(row.x + begin, g + begin, length, state.pivot, y + begin, f);
  });
  double left = state.delta;
  for (std::size_t block = 0; block < blocks.count; ++block) {
    const std::size_t begin = smaller(row.n, block * blocks.size + first[block]);
    const std::size_t end = smaller(row.n, (block + 1) * blocks.size);
    for (std::size_t i = begin; i < end && left > 0; i += kTile)
      for_tiles<Kind::kAbsolute>(
          row.x + i, smaller(kTile, end - i), [&](const T* keys, std::size_t, std::size_t length) {
            std::uint32_t positions[kTile + 16];
            const std::size_t count = positions_between(keys, length, T(state.pivot), T(state.pivot), positions);
            for (std::size_t j = 0; j < count && left > 0; ++j, left -= 1) {
              const std::size_t at = i + positions[j];
              y[at] = narrow<X>(T(smaller(left, 1.0)) * widen(f(row.x[at], g[at])) + T(0));
            }
          });
  }
}

// No magnitude is above its entry, also where sums of the largest numbers that there are overflow.
template <class X>
void hold_down(const X* x, std::size_t n, X* y) {
  for (std::size_t j = 0; j < n; ++j)
    if (!(::fabs(double(widen(y[j]))) <= ::fabs(double(widen(x[j]))))) y[j] = x[j];
}

template <class X, class Kind>
void forward_row(const Row<X, Kind>& row, State state, X* y) {
  const X* x = row.x;
  if (state.pivot != state.pivot) {
    for (std::size_t j = 0; j < row.n; ++j) y[j] = narrow<X>(Wide<X>(kNaN));
  } else if (state.pivot == -kInfinity) {
    Row<X, Kind> plain = row;
    plain.debias |= row.lam == 0;
    const Solved<X, Kind> solved(plain, {0, 0});
    for (std::size_t j = 0; j < row.n; ++j) {
      const double a = double(key<Kind::kAbsolute>(x[j]));
      y[j] = with_sign<Kind>(a > -kInfinity ? solved.whole(a) : 0.0, x[j]);
    }
  } else if (row.lam == 0) {
    const auto whole = [](X a, X) { return Kind::kMagnitude ? a : with_sign<Kind>(1.0, a); };
    write_hard(row, state, x, y, whole);
  } else if (state.pivot == kInfinity) {
    const double share = row.k > 0 ? row.k / state.delta : 0;
    for (std::size_t j = 0; j < row.n; ++j) y[j] = narrow<X>(Wide<X>(double(widen(x[j])) == kInfinity ? share : 0.0));
  } else {
    const Blocks blocks(row.n);
    if constexpr (Kind::kCheap) {
      const Curve<Kind> curve(row.kind, state, row.k, row.lam, row.debias, row.rounding);
      blocks.run(row.threads, [&](std::size_t, std::size_t begin, std::size_t length) {
        write_cheap(curve, x + begin, length, y + begin);
      });
      if (Kind::kMagnitude && state.pivot > 1e300) hold_down(x, row.n, y);
    } else {
      const Solved<X, Kind> solved(row, state);
      blocks.run(row.threads, [&](std::size_t, std::size_t begin, std::size_t length) {
        write_inside(solved, x + begin, length, y + begin);
      });
    }
  }
}

}  // namespace SPARSETOPK_LEVEL
}  // namespace sparsetopk
