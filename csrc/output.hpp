// From the threshold of a row to its output, and back from the output's cotangent to those of x, k, lam.
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

// y of part of a row where S costs next to nothing.
template <class X, class Kind>
void write_cheap(const Curve<Kind>& curve, const X* x, std::size_t n, X* y) {
  if constexpr (sizeof(Wide<X>) == sizeof(float) && Kind::zero == 0)
    if (FloatDistance<Kind>::fits(curve.v, curve.lam)) return write_all(FloatFormula<X, Kind>(curve), x, n, y);
  write_all(Formula<X, Kind>(curve), x, n, y);
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

// What the cotangents need to know of the whole row. On the block, with rho_i = S'(t_i) and g_i the
// cotangent of y_i with the sign of x_i:
struct BlockSums {
  double rho = 0, rho_g = 0, rho_t = 0, rho_g_t = 0;  // sums of rho_i, rho_i g_i, ...
  double g = 0;                                       // sum of g_i
  double size = 0;                                    // number of entries of the block
  double whole = 0;                                   // number of entries that are selected whole; for
                                                      // masks what they leave of k, the sum of S(t_i)
  double whole_in_lam = 0;                            // what these add to the cotangent of lam

  void add(const BlockSums& other) {
    rho += other.rho, rho_g += other.rho_g, rho_t += other.rho_t, rho_g_t += other.rho_g_t;
    g += other.g, size += other.size, whole += other.whole, whole_in_lam += other.whole_in_lam;
  }
};

// The entries of a tile that may have a derivative of their own: t and g at the given positions.
struct Candidates {
  std::uint32_t positions[kTile + 16];
  double t[kTile + kLanes], g[kTile + kLanes];
  std::size_t count;

  template <class X, class Kind>
  void gather(const Solved<X, Kind>& row, const X* x, const Wide<X>* keys, const X* g_row, std::size_t length) {
    count = positions_between(keys, length, row.from, row.to, positions);
    if (count == length)
      for (std::size_t j = 0; j < count; ++j) take(row, j, keys[j], x[j], g_row[j]);
    else
      for (std::size_t j = 0; j < count; ++j) take(row, j, keys[positions[j]], x[positions[j]], g_row[positions[j]]);
    fill_lanes<Kind>();
  }
  // The same for positions that are known, in a longer part of the row.
  template <class X, class Kind>
  void gather_known(const Solved<X, Kind>& row, const X* x, const X* g_row) {
    for (std::size_t j = 0; j < count; ++j) {
      const std::size_t at = positions[j];
      take(row, j, key<Kind::kAbsolute>(x[at]), x[at], g_row[at]);
    }
    fill_lanes<Kind>();
  }

 private:
  template <class X, class Kind>
  void take(const Solved<X, Kind>& row, std::size_t j, Wide<X> a, X x, X cotangent) {
    t[j] = row.distance(double(a));
    const double in = double(widen(cotangent));
    g[j] = Kind::kAbsolute && double(widen(x)) < 0 ? -in : in;
  }
  template <class Kind>
  void fill_lanes() {
    for (std::size_t j = count; j % kLanes != 0; ++j) t[j] = Kind::zero - 1, g[j] = 0;
  }
};

template <class Kind>
SPARSETOPK_LOOP void add_block(const Curve<Kind>& row, const Candidates& some, BlockSums& sums) {
  double rho[kLanes] = {}, rho_g[kLanes] = {}, rho_t[kLanes] = {}, rho_g_t[kLanes] = {}, g[kLanes] = {},
         size[kLanes] = {}, whole[kLanes] = {};
  const Curve<Kind> solved = row;
  const double bottom = solved.bottom(), top = solved.top;
  for (std::size_t i = 0; i < some.count; i += kLanes)
    for (std::size_t j = 0; j < kLanes; ++j) {
      const double t = some.t[i + j], at = clip(t, Kind::zero, top);
      const double inside = ((t > bottom) & (t < top)) ? 1.0 : 0.0;
      if (Kind::kMagnitude) whole[j] += t >= top ? 1.0 : 0.0;
      if (!Kind::kVector && inside == 0) continue;
      const Response response = solved.kind.at(at);
      const double slope = response.slope * inside, cotangent = some.g[i + j] * inside;
      if (!Kind::kMagnitude) whole[j] += response.value * inside;
      rho[j] += slope, rho_g[j] += slope * cotangent, rho_t[j] += slope * at;
      rho_g_t[j] += slope * at * cotangent, g[j] += cotangent, size[j] += inside;
    }
  sums.add({total(rho), total(rho_g), total(rho_t), total(rho_g_t), total(g), total(size), total(whole), 0});
}

// Whether dx holds the positions of the block between the two passes.
template <class X, class Kind>
constexpr bool kNotes = !Kind::kMagnitude && sizeof(X) >= 4;

// The derivative of an entry that is selected whole and not debiased, y = S(d) with S(d) + lam d = a.
struct Lone {
  double in_x, in_lam;
};
template <class Kind>
Lone lone(const Curve<Kind>& row, double a) {
  const double d = row.kind.alone(a, row.lam), slope = row.kind.exponent == 1 ? 1 : row.kind.at(d).slope;
  const double share = slope < kSteepest ? slope / (slope + row.lam) : 1;
  return {share, -d * share};
}

template <class X, class Kind>
void add_tile(const Solved<X, Kind>& row, const Wide<X>* keys, std::size_t length, const Candidates& some,
              BlockSums& sums) {
  if (some.count > 0) add_block(row, some, sums);
  if constexpr (Kind::kMagnitude) {
    std::uint32_t over = 0;
    for (std::size_t j = 0; j < length; ++j) over += keys[j] > row.to;
    sums.whole += over;
    if (row.debias) return;
    for (std::size_t j = 0; j < some.count; ++j)
      if (some.t[j] >= row.top) sums.whole_in_lam += some.g[j] * lone(row, double(keys[some.positions[j]])).in_lam;
  }
}

// Adds up part of a row. Where only the block has derivatives, the positions of its entries are noted in
// dx, as 32-bit numbers behind each other: there is room, and they need not be looked for again.
template <class X, class Kind>
BlockSums sum_part(const Solved<X, Kind>& row, const X* x, const X* g, std::size_t n, X* dx, std::size_t& noted) {
  BlockSums sums;
  Candidates some;
  noted = 0;
  for_tiles<Kind::kAbsolute>(x, n, [&](const Wide<X>* keys, std::size_t i, std::size_t length) {
    some.gather(row, x + i, keys, g + i, length);
    add_tile(row, keys, length, some, sums);
    if constexpr (kNotes<X, Kind>) {
      for (std::size_t j = 0; j < some.count; ++j) some.positions[j] += std::uint32_t(i);
      std::memcpy(reinterpret_cast<char*>(dx) + 4 * noted, some.positions, 4 * some.count);
      noted += some.count;
    }
  });
  return sums;
}

// What the block adds to the derivatives of its entries: dx_i = b g_i + rho_i/lam (g_i - mean), b = 1 for
// the debiased magnitude, else 0. An entry that is the block alone feels the curvature of phi alone.
struct Block {
  double mean = 0, scale, debias, alone = 0;
  bool single;
  double dk, dlam;

  template <class Kind>
  Block(const Curve<Kind>& row, const BlockSums& sums)
      : scale(1 / row.lam), debias(Kind::kMagnitude && row.debias ? 1 : 0), single(sums.size == 1 && !row.pinned) {
    const bool is_whole = row.k == ::floor(row.k);
    const double left = Kind::kMagnitude ? row.k - sums.whole : is_whole ? ::round(sums.whole) : sums.whole;
    const double curvature = row.kind.second() * left;
    const double total = sums.rho + row.lam * curvature;
    // In magnitude a block that nothing is left for is one by rounding alone. Its entries, that much above v, are 0 and
    // stay 0; if they are far above it, v is so tiny that others were taken for whole, and they keep what they have.
    const bool moves = !Kind::kMagnitude || left > 0;
    single &= moves;
    if (!moves && row.lam * sums.rho_t <= 1e-3 * row.v * sums.rho) scale = debias = 0;
    if (total > 0 && !row.pinned && moves) {
      mean = (sums.rho_g + row.lam * debias * sums.g) / total;
      alone = curvature * (sums.rho + row.lam * debias) / total;
    }
    // v, from sum_B S(t_i) = v left with S(t) = t S'(t)/e: it has its digits where pivot - lam delta has none of them.
    const double prime = Kind::kMagnitude && left > 0 ? sums.rho_t / (row.kind.exponent * left) : row.kind.prime(row.v);
    // Where all of the block is selected whole, or nothing of it, it is one by rounding alone.
    dk = left > 0 && left < sums.size ? prime * mean : 0;
    dlam = moves ? (mean * sums.rho_t - sums.rho_g_t) / row.lam : 0;
    if (single) {
      const double t = sums.rho > 0 ? sums.rho_t / sums.rho : 0;
      // debias - alone, in which a large lam would leave no digits of the difference.
      const double rest = debias > 0 && total > 0 ? sums.rho * (1 - curvature) / total : -alone;
      dlam = sums.g * t * rest;
    }
    dlam += sums.whole_in_lam;
  }
  double operator()(double rho, double g) const {
    if (single) return alone * g;
    const double gain = rho * scale;
    return debias * g + (gain < kSteepest ? gain : kSteepest) * (g - mean);
  }
};

// A finite number of the output's type, whatever the slope.
template <class X>
inline X finite(double value) {
  constexpr double limit = Limits<X>::largest;
  return narrow<X>(Wide<X>(value > limit ? limit : value < -limit ? -limit : value));
}

// Replaces g by dx, without the sign of x.
template <class T, class Kind>
SPARSETOPK_LOOP void to_cotangents(const Curve<Kind>& row, const Block& block_, const T* keys, Candidates& some) {
  const Curve<Kind> solved = row;
  const Block block = block_;
  const double bottom = solved.bottom(), top = solved.top, shrink = solved.debias ? 1 : 1 / (1 + solved.lam);
  double* __restrict cotangents = some.g;  // so that no table of a response could be what is written
  for (std::size_t j = 0; j < some.count; ++j) {
    const double t = some.t[j], g = cotangents[j];
    if constexpr (Kind::kVector) {
      const double value = block(solved.kind.at(clip(t, Kind::zero, top)).slope, g);
      const double outside = Kind::kMagnitude && t >= top ? g * shrink : 0.0;
      cotangents[j] = ((t > bottom) & (t < top)) ? value : outside;
    } else if (t > bottom && t < top) {
      cotangents[j] = block(solved.kind.at(t).slope, g);
    } else {
      const bool whole = Kind::kMagnitude && t >= top;
      cotangents[j] = !whole ? 0 : solved.debias ? g : g * lone(solved, double(keys[some.positions[j]])).in_x;
    }
  }
}

template <class X, class Kind>
inline X cotangent(double value, X x) {
  return finite<X>(Kind::kAbsolute && double(widen(x)) < 0 ? 0.0 - value : value);
}

// dx over a tile, from the cotangents of the candidates; others have 0, or g if they are selected whole.
template <class X, class Kind>
void scatter(const Solved<X, Kind>& row, const X* x, const Wide<X>* keys, const X* g, std::size_t length,
             const Candidates& some, X* dx) {
  if (some.count == length) {
    for (std::size_t j = 0; j < length; ++j) dx[j] = cotangent<X, Kind>(some.g[j], x[j]);
    return;
  }
  if constexpr (Kind::kMagnitude) {
    const auto to = row.to;
    for (std::size_t j = 0; j < length; ++j) dx[j] = keys[j] > to ? g[j] : X{};
  } else {
    std::memset(dx, 0, length * sizeof(X));
  }
  for (std::size_t j = 0; j < some.count; ++j)
    dx[some.positions[j]] = cotangent<X, Kind>(some.g[j], x[some.positions[j]]);
}

template <class X, class Kind>
void write_cotangents(const Solved<X, Kind>& row, const Block& block, const X* x, const X* g, std::size_t n, X* dx) {
  Candidates some;
  for_tiles<Kind::kAbsolute>(x, n, [&](const Wide<X>* keys, std::size_t i, std::size_t length) {
    some.gather(row, x + i, keys, g + i, length);
    to_cotangents(row, block, keys, some);
    scatter(row, x + i, keys, g + i, length, some, dx + i);
  });
}

// The same from the positions that sum_part has noted in dx, last ones first: the j-th is at least j, so that
// what is written never meets a note that is not read yet.
template <class X, class Kind>
void write_noted(const Solved<X, Kind>& row, const Block& block, const X* x, const X* g, std::size_t n,
                 std::size_t noted, X* dx) {
  Candidates some;
  std::size_t end = n;
  while (noted > 0) {
    some.count = noted % kTile == 0 ? kTile : noted % kTile;
    noted -= some.count;
    std::memcpy(some.positions, reinterpret_cast<const char*>(dx) + 4 * noted, 4 * some.count);
    some.gather_known(row, x, g);
    to_cotangents(row, block, static_cast<const Wide<X>*>(nullptr), some);  // which no mask looks at
    const std::size_t begin = some.positions[0];
    std::memset(dx + begin, 0, (end - begin) * sizeof(X));
    for (std::size_t j = 0; j < some.count; ++j)
      dx[some.positions[j]] = cotangent<X, Kind>(some.g[j], x[some.positions[j]]);
    end = begin;
  }
  std::memset(dx, 0, end * sizeof(X));
}

struct Cotangents {
  double k, lam;
};

// Rows without a threshold: locally nothing moves, or everything selected does.
template <class X, class Kind>
Cotangents backward_special(const Row<X, Kind>& row, State state, const X* g, X* dx) {
  const bool invalid = state.pivot != state.pivot;
  for (std::size_t j = 0; j < row.n; ++j) dx[j] = narrow<X>(Wide<X>(invalid ? kNaN : 0.0));
  if (invalid) return {kNaN, kNaN};
  if (Kind::kMagnitude && row.lam == 0 && state.pivot != -kInfinity)
    write_hard(row, state, g, dx, [](X, X cotangent) { return cotangent; });
  if (Kind::kMagnitude && state.pivot == -kInfinity) {
    const bool plain = row.debias || row.lam == 0;
    const Solved<X, Kind> solved(row, {0, 0});
    double dlam = 0;
    for (std::size_t j = 0; j < row.n; ++j) {
      const Lone entry = plain ? Lone{1, 0} : lone(solved, double(key<true>(row.x[j])));
      const double cotangent = double(widen(g[j]));
      dx[j] = finite<X>(entry.in_x * cotangent);
      dlam += entry.in_lam * (widen(row.x[j]) < 0 ? -cotangent : cotangent);
    }
    return {0, dlam};
  }
  double mean = 0;
  if (row.lam > 0 && state.pivot == kInfinity && state.delta > 0)  // these share k
    for (std::size_t j = 0; j < row.n; ++j)
      if (double(widen(row.x[j])) == kInfinity) mean += double(widen(g[j])) / state.delta;
  return {mean, 0};
}

// A row of a single tile, read once.
template <class X, class Kind>
Cotangents backward_tile(const Solved<X, Kind>& row, const X* x, const X* g, std::size_t n, X* dx) {
  Cotangents result{0, 0};
  Candidates some;
  for_tiles<Kind::kAbsolute>(x, n, [&](const Wide<X>* keys, std::size_t, std::size_t) {
    BlockSums sums;
    some.gather(row, x, keys, g, n);
    add_tile(row, keys, n, some, sums);
    const Block block(row, sums);
    to_cotangents(row, block, keys, some);
    scatter(row, x, keys, g, n, some, dx);
    result = {block.dk, block.dlam};
  });
  return result;
}

// Whether a row is without a threshold.
inline bool is_special(double lam, State state) { return lam == 0 || !(::fabs(state.pivot) < kInfinity); }

template <class X, class Kind>
Cotangents backward_row(const Row<X, Kind>& row, State state, const X* g, X* dx) {
  if (is_special(row.lam, state)) return backward_special(row, state, g, dx);
  const Solved<X, Kind> solved(row, state);
  if (row.n <= kTile) return backward_tile(solved, row.x, g, row.n, dx);
  BlockSums parts[kBlocks];
  std::size_t noted[kBlocks];
  const Blocks blocks(row.n);
  blocks.run(row.threads, [&](std::size_t block, std::size_t begin, std::size_t length) {
    parts[block] = sum_part(solved, row.x + begin, g + begin, length, dx + begin, noted[block]);
  });
  for (std::size_t block = 1; block < blocks.count; ++block) parts[0].add(parts[block]);
  const Block block(solved, parts[0]);
  blocks.run(row.threads, [&](std::size_t part, std::size_t begin, std::size_t length) {
    if (kNotes<X, Kind> && noted[part] < length)
      write_noted(solved, block, row.x + begin, g + begin, length, noted[part], dx + begin);
    else
      write_cotangents(solved, block, row.x + begin, g + begin, length, dx + begin);
  });
  return {block.dk, block.dlam};
}

}  // namespace SPARSETOPK_LEVEL
}  // namespace sparsetopk
