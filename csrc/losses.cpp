// The Fenchel-Young losses of the masks, at one instruction-set level: from the threshold of a row to
// f(x, 1_k) - <x, t>, and from y to the gradient y - t. kernels.cpp says what may not be used here, and dispatch.cpp
// widens rows of 16 bits.
#include <type_traits>

#include "kernels.hpp"
#include "lanes_forward.hpp"

namespace sparsetopk {
namespace SPARSETOPK_LEVEL {
namespace {

template <class X, class Kind>
struct LossRow {
  const X* x;
  X* y;
  std::size_t n;
  double k, lam;
  State state;
  const Kind& kind;
};

// Of a row with a threshold, sums over the candidates: R* of those that are not selected whole, and of the others, which
// have R*(1), how far they are beyond that.
struct ValueSums {
  double conjugates = 0, beyond = 0;
};

// Where R* is plain arithmetic, every entry by the same formula.
template <class Kind, class T>
SPARSETOPK_LOOP void add_plain_values(const T* keys, std::size_t length, const Distance& from, double whole,
                                      const Kind& some, ValueSums& sums) {
  const Kind kind = some;  // in registers
  const Distance distance = from;
  sums.conjugates += sum_lanes(
      0, length, [=](std::size_t j) { return kind.conjugate(clip(distance(double(keys[j])), Kind::zero, 1)); });
  sums.beyond += sum_lanes(0, length, [=](std::size_t j) { return larger(double(keys[j]) - whole, 0.0); });
  const double nothing = kind.penalty(0);
  if (nothing == 0) return;
  // No candidate has no R either.
  constexpr double limit = Limits<T>::largest;
  sums.conjugates += nothing * sum_lanes(0, length, [=](std::size_t j) { return keys[j] < T(-limit) ? 1.0 : 0.0; });
}

// Elsewhere only those above ``least``, which are over the threshold or next to it, need a look each.
template <class Kind, class T>
void add_other_values(const T* keys, std::size_t length, const Distance& distance, double whole, T least,
                      const Kind& kind, ValueSums& sums) {
  std::uint32_t positions[kTile + 16];
  const std::size_t count = positions_between(keys, length, least, T(kInfinity), positions);
  for (std::size_t j = 0; j < count; ++j) {
    const double a = double(keys[positions[j]]);
    sums.conjugates += kind.conjugate(smaller(distance(a), 1.0)), sums.beyond += larger(a - whole, 0.0);
  }
  const double nothing = kind.penalty(0);
  if (nothing == 0) return;
  constexpr double limit = Limits<T>::largest;
  std::uint32_t candidates = 0;
  for (std::size_t j = 0; j < length; ++j) candidates += keys[j] >= T(-limit);
  sums.conjugates -= nothing * (double(candidates) - double(count));
}

// f(x, 1_k) = sum_i R*(x_i - tau) + k tau over the candidates.
template <class X, class Kind>
double value_from_threshold(const LossRow<X, Kind>& row) {
  using T = Wide<X>;
  const Distance distance(row.state.pivot, row.state.delta, row.lam);
  const double tau = row.state.pivot - row.lam * row.state.delta, low = tau + row.lam * Kind::zero;
  const double slack = 4 * Limits<T>::epsilon * (::fabs(row.state.pivot) + ::fabs(tau)), whole = tau + row.lam;
  constexpr double limit = Limits<T>::largest;
  const T least = step_down(T(smaller(larger(low - slack, -limit), limit)));
  ValueSums sums;
  for_tiles<false>(row.x, row.n, [&](const T* keys, std::size_t, std::size_t length) {
    if constexpr (Kind::kPlain)
      add_plain_values(keys, length, distance, whole, row.kind, sums);
    else
      add_other_values(keys, length, distance, whole, least, row.kind, sums);
  });
  return row.lam * sums.conjugates + sums.beyond + row.k * tau;
}

// <x, y> - R(y) where y is 0 or 1, or lam = 0, or an infinite entry is selected.
template <class X, class Kind>
double value_from_output(const LossRow<X, Kind>& row) {
  const double one = row.kind.penalty(1), zero = row.kind.penalty(0);
  double value = 0;
  for (std::size_t j = 0; j < row.n; ++j) {
    const double x = double(widen(row.x[j])), y = double(widen(row.y[j]));
    if (y > 0) value += y * x;
    if (x > -kInfinity) value -= row.lam * (y > 0 ? one : zero);
  }
  return value;
}

template <class X, class Kind>
double value_of(const LossRow<X, Kind>& row) {
  if (row.state.pivot != row.state.pivot) return kNaN;
  const bool soft = row.lam > 0 && ::fabs(row.state.pivot) < kInfinity;
  return soft ? value_from_threshold(row) : value_from_output(row);
}

template <class X, class Kind>
double compare_with_label(const LossRow<X, Kind>& row, std::size_t label) {
  row.y[label] = narrow<X>(Wide<X>(double(widen(row.y[label])) - 1));
  return double(widen(row.x[label]));
}

// t that is 1 at the label and the same at all other candidates, and sums to what y does.
struct Filled {
  double share = 0, penalty = 0;  // R(t)

  Filled() = default;
  // ``own`` is 1 if the label is a candidate, else 0.
  template <class X, class Kind>
  Filled(const LossRow<X, Kind>& row, double own, double others) {
    const double mass = smaller(row.k, others + own);
    share = others > 0 ? larger(mass - 1, 0.0) / others : 0;  // k may be 1 up to rounding
    penalty = row.lam * (own * row.kind.penalty(1) + others * row.kind.penalty(share));
  }
  // <x, t> - R(t), given the sum of the others.
  double value(double label, double sum) const { return label + (share == 0 ? 0 : share * sum) - penalty; }
};

// Takes the share from every candidate.
template <class X>
SPARSETOPK_LOOP void take_share(const X* __restrict x, X* __restrict y, std::size_t n, double share) {
  for (std::size_t j = 0; j < n; ++j) {
    const double old = double(widen(y[j]));
    y[j] = narrow<X>(Wide<X>(double(widen(x[j])) > -kInfinity ? old - share : old));
  }
}

template <class X, class Kind>
double compare_with_spread(const LossRow<X, Kind>& row, std::size_t label) {
  const X* x = row.x;
  const auto is_candidate = [=](std::size_t j) { return double(widen(x[j])) > -kInfinity; };
  const auto sum = [&](auto&& f) { return sum_lanes(0, label, f) + sum_lanes(label + 1, row.n, f); };
  const double others = sum([=](std::size_t j) { return is_candidate(j) ? 1.0 : 0.0; });
  const double all = sum([=](std::size_t j) { return is_candidate(j) ? double(widen(x[j])) : 0.0; });
  const Filled t(row, is_candidate(label) ? 1 : 0, others);
  const X own = row.y[label];
  take_share(x, row.y, row.n, t.share);
  row.y[label] = own;
  return t.value(compare_with_label(row, label), all);
}

template <class X, class Kind>
double compare_with_weights(const LossRow<X, Kind>& row, const double* t) {
  const X* x = row.x;
  for (std::size_t j = 0; j < row.n; ++j) row.y[j] = narrow<X>(Wide<X>(double(widen(row.y[j])) - t[j]));
  return sum_lanes(0, row.n, [=](std::size_t j) { return t[j] == 0 ? 0.0 : t[j] * double(widen(x[j])); });
}

// The loss of rows, from their outputs and states.
template <class X, class Kind>
struct LossRows {
  const Problem& problem;
  const Kind& kind;
  const Targets& targets;
  X* y;
  double* value;

  LossRow<X, Kind> operator[](std::size_t i) const {
    const X* x = static_cast<const X*>(problem.x) + i * problem.row_stride;
    return {x, y + i * problem.n, problem.n, problem.k_of(i), problem.lam_of(i), problem.state[i], kind};
  }
  bool counts(std::size_t i) const { return targets.labels == nullptr || targets.labels[i] != targets.ignored; }
  void leave_out(std::size_t i) const {
    value[i] = 0;
    for (std::size_t j = 0; j < problem.n; ++j) y[i * problem.n + j] = narrow<X>(0);
  }
  std::size_t label(std::size_t i) const { return std::size_t(targets.labels[i]); }

  // What is taken from the value of a row, and from its outputs, without what is spread.
  double compare(const LossRow<X, Kind>& row, std::size_t i) const {
    if (targets.labels != nullptr) return compare_with_label(row, label(i));
    return targets.weights != nullptr ? compare_with_weights(row, targets.weights + i * row.n) : 0;
  }
  void finish(std::size_t i) const {
    if (!counts(i)) return leave_out(i);
    const LossRow<X, Kind> row = (*this)[i];
    const bool spread = targets.labels != nullptr && targets.spread;
    value[i] = value_of(row);
    value[i] -= spread ? compare_with_spread(row, label(i)) : compare(row, i);
    scale_row(row);
  }
  void scale_row(const LossRow<X, Kind>& row) const {
    const double scale = targets.scale;
    if (scale != 1)
      for (std::size_t j = 0; j < row.n; ++j) row.y[j] = narrow<X>(Wide<X>(double(widen(row.y[j])) * scale));
  }
};

// The same in lanes, together with the outputs, for p = 2: what NothingElse has in lanes_forward.hpp.
template <class Kind>
class LossLanes {
 public:
  explicit LossLanes(const LossRows<float, Kind>& rows) : rows_(rows) {}

  template <class T, class Solved>
  void with_keys(std::size_t first, std::size_t count, const Vector<T>* keys, const Solved& solved) {
    first_ = first, count_ = count;
    T pivots[kWidth<T>], deltas[kWidth<T>];
    store(solved.pivot, pivots), store(solved.delta, deltas);
    for (std::size_t i = 0; i < kWidth<T>; i += kDoubles)
      add_up(reinterpret_cast<const T*>(keys) + i, kWidth<T>, pivots + i, deltas + i, i);
  }
  template <class T>
  void with_outputs(Vector<T>* y) {
    const Targets& targets = rows_.targets;
    if (targets.labels == nullptr) return;
    const std::size_t n = rows_.problem.n;
    T shares[kWidth<T>] = {};
    for (std::size_t i = 0; i < count_; ++i) {
      if (!rows_.counts(first_ + i)) continue;
      if (targets.spread) filled_[i] = fill(rows_[first_ + i]);
      shares[i] = T(filled_[i].share);
      own_[i] = double(float(y[rows_.label(first_ + i)][i]));
    }
    const Vector<T> share = load(shares), scale = all_lanes(T(targets.scale));
    for (std::size_t j = 0; j < n; ++j) y[j] = (y[j] - share) * scale;
  }
  void with_rows(unsigned solved) {
    for (std::size_t i = 0; i < count_; ++i)
      if (!(solved >> i & 1) || !rows_.counts(first_ + i))
        rows_.finish(first_ + i);
      else
        finish(first_ + i, i);
  }

 private:
  static constexpr std::size_t kMost = kWidth<float>, kDoubles = kWidth<double>;

  // The value of rows, and the sum of their entries. f = sum_i z_i (a_i - v - z_i/2)/lam + k v with z = lam y: in double,
  // as a loss may be small beside f.
  template <class T>
  SPARSETOPK_LOOP void add_up(const T* keys, std::size_t stride, const T* pivots, const T* deltas, std::size_t at) {
    using V = Vector<double>;
    constexpr std::size_t kSums = 4;
    const Problem& problem = rows_.problem;
    double ks[kDoubles], lams[kDoubles];
    for (std::size_t i = 0; i < kDoubles; ++i) {
      const std::size_t row = first_ + smaller(at + i, count_ - 1);
      ks[i] = problem.k_of(row), lams[i] = problem.lam_of(row);
    }
    const V lam = load(lams), zero{}, v = load<T, double>(pivots) - lam * load<T, double>(deltas);
    V values[kSums] = {}, sums[kSums] = {};
    const auto add = [&](std::size_t j, V& value, V& sum) {
      const V a = load<T, double>(keys + j * stride), over = a - v, z = clip_lanes(over, zero, lam);
      value += z * (over - z * 0.5), sum += a;
    };
    std::size_t j = 0;
    for (; j + kSums <= problem.n; j += kSums)
#pragma GCC unroll 4
      for (std::size_t i = 0; i < kSums; ++i) add(j + i, values[i], sums[i]);
    for (; j < problem.n; ++j) add(j, values[0], sums[0]);
    store(((values[0] + values[1]) + (values[2] + values[3])) / lam + load(ks) * v, values_ + at);
    store((sums[0] + sums[1]) + (sums[2] + sums[3]), sums_ + at);
  }
  // Most rows have the k and lam of the row before.
  const Filled& fill(const LossRow<float, Kind>& row) {
    if (row.k != k_ || row.lam != lam_) k_ = row.k, lam_ = row.lam, last_ = Filled(row, 1, double(row.n - 1));
    return last_;
  }
  void finish(std::size_t i, std::size_t lane) {
    const LossRow<float, Kind> row = rows_[i];
    rows_.value[i] = values_[lane];
    if (rows_.targets.labels == nullptr) {
      rows_.value[i] -= rows_.compare(row, i);
      return rows_.scale_row(row);
    }
    const std::size_t label = rows_.label(i);
    const double x = double(row.x[label]);
    row.y[label] = float((own_[lane] - 1) * rows_.targets.scale);
    rows_.value[i] -= filled_[lane].value(x, sums_[lane] - x);
  }

  const LossRows<float, Kind>& rows_;
  std::size_t first_ = 0, count_ = 0;
  double values_[kMost], sums_[kMost], own_[kMost];
  double k_ = kNaN, lam_ = kNaN;
  Filled last_, filled_[kMost];
};

template <class X, class Kind>
void loss_rows(const LossRows<X, Kind>& rows, std::size_t begin, std::size_t end) {
  const Problem& problem = rows.problem;
  // For float64 the size of the core is worth more than the time.
  if constexpr (kLinear<Kind> && std::is_same<X, float>::value)
    if (!problem.hard() && fit_lanes(problem, rows.kind, kLongestLane<Kind>)) {
      NormalGuess normal{Kind::kAbsolute};
      std::size_t read = 0;
      forward_lanes_also(problem, rows.kind, begin, end, rows.y, normal, read, LossLanes<Kind>(rows));
      return add_entries_read(read);
    }
  constexpr std::size_t kCached = 16384;  // entries that the loss finds in the cache where the forward left them
  const std::size_t step = problem.n > 0 && problem.n < kCached ? kCached / problem.n : 1;
  for (std::size_t i = begin; i < end; i += step) {
    const std::size_t to = end - i < step ? end : i + step;
    all.forward(problem, i, to, rows.y);
    for (std::size_t row = i; row < to; ++row) rows.finish(row);
  }
}

}  // namespace

void loss(const Problem& problem, std::size_t begin, std::size_t end, const Targets& targets, void* y, double* value) {
  const auto with = [&](const auto& kind) {
    const auto as = [&](auto zero) {
      using X = decltype(zero);
      using Kind = typename std::decay<decltype(kind)>::type;
      loss_rows(LossRows<X, Kind>{problem, kind, targets, static_cast<X*>(y), value}, begin, end);
    };
    problem.dtype == Dtype::float64 ? as(double{}) : as(float{});
  };
  const double e = problem.exponent;
  if (problem.op == Operator::two_sided)
    return with_half(e, problem.table,
                     [&](const auto& half) { with(TwoSided<typename std::decay<decltype(half)>::type>{half}); });
  if (e == 1) return with(Mask<Power<1>>{});
  if (e == 2) return with(Mask<Power<2>>{});
  if (e == 3) return with(Mask<Power<3>>{});
  with(Mask<Power<0>>{{e}});
}

}  // namespace SPARSETOPK_LEVEL
}  // namespace sparsetopk
