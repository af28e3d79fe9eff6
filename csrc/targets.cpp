#include "targets.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <type_traits>
#include <vector>

#include "parallel.hpp"
#include "parts.hpp"
#include "pav.hpp"

// After these, which say at which level.
#include "kinds.hpp"

namespace sparsetopk {
namespace {

using namespace baseline;

// R/lam of entries in [0, 1]; where it is two-sided, of y and of 1 - y.
class Penalty {
 public:
  explicit Penalty(const Problem& problem)
      : two_sided_(problem.op == Operator::two_sided), exponent_(problem.exponent) {}
  double operator()(double y) const {
    double found = 0;
    with_power(exponent_, [&](const auto& power) { found = of(power)(y); });
    return found;
  }
  // Of those that are candidates.
  template <class Flags>
  double sum(std::size_t n, const double* y, const Flags& is_candidate) const {
    double found = 0;
    with_power(exponent_, [&](const auto& power) { found = sum_of(power, n, y, is_candidate); });
    return found;
  }

 private:
  template <class P>
  auto of(const P& power) const {
    return [mask = Mask<P>{power}, two_sided = two_sided_](double y) {
      return mask.penalty(y) + (two_sided ? mask.penalty(1 - y) : 0);
    };
  }
  template <class P, class Flags>
  double sum_of(const P& power, std::size_t n, const double* y, const Flags& is_candidate) const {
    const auto penalty = of(power);
    if constexpr (std::is_same_v<P, Power<1>> || std::is_same_v<P, Power<2>>)
      return sum_lanes(0, n, [=](std::size_t j) { return is_candidate(j) ? penalty(y[j]) : 0.0; });
    double found = 0, last = -1, of_last = 0;  // a power is slow, and most entries are the same
    for (std::size_t j = 0; j < n; ++j) {
      if (!is_candidate(j)) continue;
      if (y[j] != last) last = y[j], of_last = penalty(last);
      found += of_last;
    }
    return found;
  }

  bool two_sided_;
  double exponent_;
};

// Some rows, one after the other, in one thread.
template <class X>
class Part {
 public:
  Part(const Problem& problem, const TargetRows& targets, Completion completion, double smoothing)
      : problem_(problem),
        x_(static_cast<const X*>(problem.x)),
        n_(problem.n),
        targets_(targets),
        completion_(completion),
        smoothing_(smoothing),
        penalty_(problem),
        t_(problem.rows * problem.n),
        added_(problem.rows) {
    problem_.threads = 1;
  }

  void evaluate(X* y, double* value) {
    for (std::size_t i = 0; i < problem_.rows; ++i) {
      read(i);
      if (smoothing_ > 0) smooth(i);
      if (completion_ == Completion::spread) fill(i);
    }
    loss(problem_, {nullptr, 0, false, t_.data()}, y, value);
    if (completion_ == Completion::best) subtract_best(y, value);
    for (std::size_t i = 0; i < problem_.rows; ++i) {
      value[i] += added_[i];
      if (!is_ignored(i)) continue;
      value[i] = 0;
      std::fill_n(y + i * n_, n_, X{});
    }
  }

 private:
  const X* x_of(std::size_t i) const { return x_ + i * problem_.row_stride; }
  bool is_ignored(std::size_t i) const { return targets_.labels != nullptr && targets_.labels[i] == targets_.ignored; }
  auto candidates(std::size_t i) const {
    return [x = x_of(i)](std::size_t j) { return double(widen(x[j])) > -HUGE_VAL; };
  }

  // The targets of a row as weights; NaN where they are none.
  void read(std::size_t i) {
    double* t = t_.data() + i * n_;
    bool good = true;
    if (targets_.labels != nullptr) {
      const std::int64_t label = targets_.labels[i];
      good = label >= 0 && std::size_t(label) < n_;
      if (good) t[label] = 1;
    } else if (targets_.singles != nullptr) {
      good = copy(targets_.singles + i * n_, t);
    } else {
      good = copy(targets_.doubles + i * n_, t);
    }
    if (!good) std::fill_n(t, n_, std::nan(""));
  }

  // Whether all are in [0, 1].
  template <class T>
  bool copy(const T* from, double* t) const {
    int good = 1;
    for (std::size_t j = 0; j < n_; ++j) {
      t[j] = double(from[j]);
      good &= int(from[j] >= 0) & int(from[j] <= 1);
    }
    return good != 0;
  }

  // A share of the targets evenly on the candidates.
  void smooth(std::size_t i) {
    const auto is_candidate = candidates(i);
    double* t = t_.data() + i * n_;
    const double count = sum_lanes(0, n_, [=](std::size_t j) { return is_candidate(j) ? 1.0 : 0.0; });
    const double keep = 1 - smoothing_;
    const double each = smoothing_ * sum_lanes(0, n_, [=](std::size_t j) { return t[j]; }) / std::max(count, 1.0);
    for (std::size_t j = 0; j < n_; ++j) t[j] = is_candidate(j) ? keep * t[j] + each : t[j];
  }

  // Filled up to the sum of y among the candidates; R of that is added to the loss.
  void fill(std::size_t i) {
    const auto is_candidate = candidates(i);
    double* t = t_.data() + i * n_;
    const double sum = sum_lanes(0, n_, [=](std::size_t j) { return t[j]; });
    const double count = sum_lanes(0, n_, [=](std::size_t j) { return is_candidate(j) ? 1.0 : 0.0; });
    const double left = sum_lanes(0, n_, [=](std::size_t j) { return is_candidate(j) ? 1 - t[j] : 0.0; });
    const double share = (std::min(problem_.k_of(i), count) - sum) / (left > 0 ? left : 1);
    for (std::size_t j = 0; j < n_; ++j) t[j] += (is_candidate(j) ? 1 - t[j] : 0.0) * share;
    added_[i] = problem_.lam_of(i) * penalty_.sum(n_, t, is_candidate);
  }

  // The best value with y = 1 on the labels: they are taken whole, and the rest of k is for the others.
  void subtract_best(X* y, double* value) {
    std::vector<X> others(problem_.rows * n_), of_others(others.size());
    std::vector<double> k(problem_.rows), labels(problem_.rows), best(problem_.rows);
    const X none = narrow<X>(Wide<X>(-HUGE_VAL));
    for (std::size_t i = 0; i < problem_.rows; ++i) {
      const X* x = x_of(i);
      const double* t = t_.data() + i * n_;
      for (std::size_t j = 0; j < n_; ++j) {
        others[i * n_ + j] = t[j] > 0 ? none : x[j];
        labels[i] += t[j] > 0;
      }
      const double whole = std::floor(problem_.k_of(i));
      k[i] = std::max(whole - labels[i], 0.0) + (problem_.k_of(i) - whole);
    }
    std::vector<State> state(problem_.rows);
    Problem rest = problem_;
    rest.x = others.data(), rest.row_stride = n_, rest.k = k.data(), rest.k_stride = 1, rest.state = state.data();
    loss(rest, {nullptr, 0, false, nullptr}, of_others.data(), best.data());
    for (std::size_t i = 0; i < problem_.rows; ++i) value[i] += labels[i] * problem_.lam_of(i) * penalty_(1) - best[i];
    std::transform(y, y + others.size(), of_others.begin(), y,
                   [](X a, X b) { return narrow<X>(Wide<X>(widen(a) - widen(b))); });
  }

  Problem problem_;
  const X* x_;
  std::size_t n_;
  TargetRows targets_;
  Completion completion_;
  double smoothing_;
  Penalty penalty_;
  std::vector<double> t_, added_;
};

TargetRows from_row(TargetRows targets, std::size_t first, std::size_t n) {
  if (targets.labels != nullptr) targets.labels += first;
  if (targets.singles != nullptr) targets.singles += first * n;
  if (targets.doubles != nullptr) targets.doubles += first * n;
  return targets;
}

}  // namespace

void completed_loss(const Problem& problem, const TargetRows& targets, Completion completion, double smoothing, void* y,
                    double* value) {
  if (problem.rows == 0 || problem.n == 0) return;
  constexpr std::size_t kRows = 64, kEntries = 1 << 12;  // at once: for the lanes, and what a cache holds
  const std::size_t together = std::clamp<std::size_t>(kEntries / problem.n, 1, kRows);
  with_entries(problem.dtype, problem.x, [&](const auto* x) {
    using X = std::decay_t<decltype(*x)>;
    parallel_for((problem.rows + together - 1) / together, problem.threads, [&](std::size_t i) {
      const std::size_t first = i * together, count = std::min(together, problem.rows - first);
      Part<X> part(rows_of(problem, first, count), from_row(targets, first, problem.n), completion, smoothing);
      part.evaluate(static_cast<X*>(y) + first * problem.n, value + first);
    });
  });
}

}  // namespace sparsetopk
