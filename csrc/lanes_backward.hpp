// From the cotangents of outputs back to those of x, k and lam, for many short rows at a time: what cotangents.hpp does
// for one.
#pragma once

#include "cotangents.hpp"
#include "lanes.hpp"

namespace sparsetopk {
namespace SPARSETOPK_LEVEL {

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
  const F whole = kMagnitude ? (sums_.size > 0) & (left >= sums_.size) & ~pinned_ : F{};
  const V rho = whole ? sums_.rho / sums_.size : sums_.rho;
  const V curvature = kMagnitude ? (whole ? all_lanes(T(1)) : left) : none, total = rho + lam_ * curvature;
  const F moves = kMagnitude ? left > 0 : ~F{}, shares = (total > 0) & ~pinned_ & moves;
  const F single = ((sums_.size == 1) & ~pinned_ & moves) | whole;
  mean_ = shares ? (sums_.rho_g + lam_ * debias * sums_.g) / total : none;
  const V alone = shares ? curvature * (rho + lam_ * debias) / total : none;
  // Where entries that are selected whole leave nothing of k, the others are at the threshold by rounding alone.
  scale_ = single | ~moves ? none : inverse_, gain_ = moves ? (single ? alone : debias) : none;
  finite = absolute_lanes(mean_) <= T(1e30);
  if (kAll) {
    dk = (left > 0) & (left < sums_.size) ? prime_ * mean_ : none;
    const V g_t = rho > 0 ? sums_.rho_g_t / rho : none;
    dlam = (mean_ * sums_.rho_t - sums_.rho_g_t) * inverse_;
    // debias - alone, as in output.hpp.
    const V lone = rho * (1 - curvature) / total, rest = debias_ ? (shares ? lone : none) : -alone;
    dlam = (moves ? (single ? g_t * rest : dlam) : none) + sums_.whole_in_lam;
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
    const Cotangents found = backward_row(one_row, problem.state[row], g + row * n, dx + row * n, kAll);
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
