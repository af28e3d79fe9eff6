#include "targets.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <type_traits>
#include <vector>

#include "parallel.hpp"
#include "parts.hpp"

namespace sparsetopk {
namespace {

using namespace baseline;

// R(y)/lam of an entry; of most entries it is asked for the same y.
class Penalty {
 public:
  explicit Penalty(const Problem& problem)
      : two_sided_(problem.op == Operator::two_sided), p_(1 + 1 / problem.exponent), last_(0), value_(at(0)) {}
  double operator()(double y) {
    if (y != last_) last_ = y, value_ = at(y);
    return value_;
  }

 private:
  double at(double y) const {
    return (std::pow(std::fabs(y), p_) + (two_sided_ ? std::pow(std::fabs(1 - y), p_) : 0)) / p_;
  }
  bool two_sided_;
  double p_, last_, value_;
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
  double* t_of(std::size_t i) { return t_.data() + i * n_; }
  bool is_ignored(std::size_t i) const { return targets_.labels != nullptr && targets_.labels[i] == targets_.ignored; }
  static bool is_candidate(X x) { return double(widen(x)) > -HUGE_VAL; }

  // The targets of a row as weights; NaN where they are none.
  void read(std::size_t i) {
    double* t = t_of(i);
    bool good = true;
    if (targets_.labels != nullptr) {
      const std::int64_t label = targets_.labels[i];
      good = label >= 0 && std::size_t(label) < n_;
      if (good) t[label] = 1;
    } else {
      for (std::size_t j = 0; j < n_; ++j) {
        t[j] = targets_.doubles != nullptr ? targets_.doubles[i * n_ + j] : double(targets_.singles[i * n_ + j]);
        good &= t[j] >= 0 && t[j] <= 1;
      }
    }
    if (!good) std::fill_n(t, n_, std::nan(""));
  }

  // A share of the targets evenly on the candidates.
  void smooth(std::size_t i) {
    const X* x = x_of(i);
    double* t = t_of(i);
    const double count = double(std::count_if(x, x + n_, is_candidate));
    const double each = smoothing_ * std::accumulate(t, t + n_, 0.0) / std::max(count, 1.0);
    for (std::size_t j = 0; j < n_; ++j)
      if (is_candidate(x[j])) t[j] = (1 - smoothing_) * t[j] + each;
  }

  // Filled up to the sum of y among the candidates; R of that is added to the loss.
  void fill(std::size_t i) {
    const X* x = x_of(i);
    double *t = t_of(i), left = 0, sum = 0, count = 0, penalties = 0;
    for (std::size_t j = 0; j < n_; ++j) {
      sum += t[j];
      if (is_candidate(x[j])) left += 1 - t[j], count += 1;
    }
    const double share = (std::min(problem_.k_of(i), count) - sum) / (left > 0 ? left : 1);
    for (std::size_t j = 0; j < n_; ++j) {
      if (!is_candidate(x[j])) continue;
      t[j] += (1 - t[j]) * share;
      penalties += penalty_(t[j]);
    }
    added_[i] = problem_.lam_of(i) * penalties;
  }

  // The best value with y = 1 on the labels: they are taken whole, and the rest of k is for the others.
  void subtract_best(X* y, double* value) {
    std::vector<X> others(problem_.rows * n_), of_others(others.size());
    std::vector<double> k(problem_.rows), labels(problem_.rows), best(problem_.rows);
    const X none = narrow<X>(Wide<X>(-HUGE_VAL));
    for (std::size_t i = 0; i < problem_.rows; ++i) {
      const X* x = x_of(i);
      const double* t = t_of(i);
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
  constexpr std::size_t kRows = 64, kEntries = 1 << 14;  // at once, for the lanes, and what suffices
  const std::size_t together = std::clamp<std::size_t>(kEntries / problem.n, 1, kRows);
  with_entries(problem.dtype, problem.x, [&](const auto* x) {
    using X = std::decay_t<decltype(*x)>;
    parallel_for((problem.rows + together - 1) / together, problem.threads, [&](std::size_t i) {
      const std::size_t first = i * together, count = std::min(together, problem.rows - first);
      Part<X> part(rows_of<X>(problem, first, count), from_row(targets, first, problem.n), completion, smoothing);
      part.evaluate(static_cast<X*>(y) + first * problem.n, value + first);
    });
  });
}

}  // namespace sparsetopk
