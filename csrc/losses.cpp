// The Fenchel-Young losses of the masks, at one instruction-set level: from the threshold of a row to
// f(x, 1_k) - <x, t>, and from y to the gradient y - t. kernels.cpp says what may not be used here.
#include "kernels.hpp"
#include "threshold.hpp"

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

// The sum of f over the entries of a row, each lane with its own sum.
template <class F>
inline double sum_lanes(std::size_t n, F&& f) {
  double sums[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (std::size_t j = 0; j < kLanes; ++j) sums[j] += f(i + j);
  for (std::size_t j = 0; i + j < n; ++j) sums[j] += f(i + j);
  return total(sums);
}

// f(x, 1_k) = sum_i R*(x_i - tau) + k tau over the candidates; only those above tau need a look each.
template <class X, class Kind>
double value_from_threshold(const LossRow<X, Kind>& row) {
  using T = Wide<X>;
  const Distance distance(row.state.pivot, row.state.delta, row.lam);
  const double tau = row.state.pivot - row.lam * row.state.delta, low = tau + row.lam * Kind::zero;
  const double slack = 4 * Limits<T>::epsilon * (::fabs(row.state.pivot) + ::fabs(tau));
  constexpr double limit = Limits<T>::largest;
  const T from = step_down(T(smaller(larger(low - slack, -limit), limit)));
  double sum = 0, below = 0, whole = 0, over = 0;  // of those selected whole, their number and distance
  for_tiles<false>(row.x, row.n, [&](const T* keys, std::size_t, std::size_t length) {
    std::uint32_t positions[kTile + 16];
    const std::size_t count = positions_between(keys, length, from, T(kInfinity), positions);
    for (std::size_t j = 0; j < count; ++j) {
      const double a = double(keys[positions[j]]), t = distance(a);
      if (t < 1)
        sum += row.kind.conjugate(t);
      else
        whole += 1, over += a - tau;  // and not lam t, where t may overflow
    }
    if (row.kind.penalty(0) == 0) return;
    std::uint32_t candidates = 0;
    for (std::size_t j = 0; j < length; ++j) candidates += keys[j] >= T(-limit);
    below += double(candidates) - double(count);
  });
  return row.lam * (sum - below * row.kind.penalty(0) - whole * row.kind.penalty(1)) + over + row.k * tau;
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

// <x, t> - R(t), where t is 1 at the label and the same at all other candidates, and sums to that of y.
template <class X, class Kind>
double compare_with_spread(const LossRow<X, Kind>& row, std::size_t label) {
  double others = 0, sum = 0;
  for (std::size_t j = 0; j < row.n; ++j) {
    const double x = double(widen(row.x[j]));
    if (j != label && x > -kInfinity) others += 1, sum += x;
  }
  const double own = double(widen(row.x[label])) > -kInfinity ? 1 : 0, mass = smaller(row.k, others + own);
  const double share = others > 0 ? larger(mass - 1, 0.0) / others : 0;  // k may be 1 up to rounding
  for (std::size_t j = 0; j < row.n; ++j)
    if (j != label && double(widen(row.x[j])) > -kInfinity)
      row.y[j] = narrow<X>(Wide<X>(double(widen(row.y[j])) - share));
  const double penalty = row.lam * (own * row.kind.penalty(1) + others * row.kind.penalty(share));
  return compare_with_label(row, label) + (share == 0 ? 0 : share * sum) - penalty;
}

template <class X, class Kind>
double compare_with_weights(const LossRow<X, Kind>& row, const double* t) {
  const X* x = row.x;
  for (std::size_t j = 0; j < row.n; ++j) row.y[j] = narrow<X>(Wide<X>(double(widen(row.y[j])) - t[j]));
  return sum_lanes(row.n, [=](std::size_t j) { return t[j] == 0 ? 0.0 : t[j] * double(widen(x[j])); });
}

template <class X, class Kind>
void loss_rows(const Problem& problem, const Kind& kind, std::size_t begin, std::size_t end, const Targets& targets,
               X* y, double* value) {
  const X* x = static_cast<const X*>(problem.x);
  const std::size_t n = problem.n;
  for (std::size_t i = begin; i < end; ++i) {
    const LossRow<X, Kind> row{x + i * problem.row_stride, y + i * n,        n,   problem.k_of(i),
                               problem.lam_of(i),          problem.state[i], kind};
    if (targets.labels != nullptr && targets.labels[i] == targets.ignored) {
      value[i] = 0;
      for (std::size_t j = 0; j < n; ++j) row.y[j] = narrow<X>(0);
      continue;
    }
    value[i] = value_of(row);
    if (targets.labels != nullptr) {
      const std::size_t label = std::size_t(targets.labels[i]);
      value[i] -= targets.spread ? compare_with_spread(row, label) : compare_with_label(row, label);
    } else if (targets.weights != nullptr) {
      value[i] -= compare_with_weights(row, targets.weights + i * n);
    }
  }
}

}  // namespace

void loss(const Problem& problem, std::size_t begin, std::size_t end, const Targets& targets, void* y, double* value) {
  const auto with = [&](const auto& kind) {
    const auto as = [&](auto zero) {
      loss_rows(problem, kind, begin, end, targets, static_cast<decltype(zero)*>(y), value);
    };
    switch (problem.dtype) {
      case Dtype::float32:
        return as(float{});
      case Dtype::float64:
        return as(double{});
      case Dtype::float16:
        return as(Half{});
      case Dtype::bfloat16:
        return as(BFloat16{});
    }
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
