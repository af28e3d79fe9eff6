#include "lam.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <type_traits>
#include <vector>

#include "isotonic.hpp"
#include "parallel.hpp"
#include "parts.hpp"

namespace sparsetopk {
namespace {

using namespace baseline;

// By this factor up and down from the scale of the row, so often; then bisections of its logarithm.
constexpr double kStep = 16;
constexpr int kSteps = 40, kBisections = 30;

// Where a row is in its search for the smallest lam that is enough.
struct Search {
  double lam, found, missed;
  bool has_found, has_missed;
  int steps;

  bool is_between() const { return has_found && has_missed; }
  bool is_busy() const { return is_between() ? steps > -kBisections : steps < kSteps; }
  // Up until it is enough, or down until it is not, and then halves what is between.
  void step(bool enough, double least) {
    const bool was_between = is_between();
    (enough ? found : missed) = lam;
    (enough ? has_found : has_missed) = true;
    steps = was_between ? steps - 1 : is_between() ? 0 : steps + 1;
    lam = is_between() ? std::sqrt(found) * std::sqrt(missed)
                       : std::clamp(enough ? lam / kStep : lam * kStep, least, 1 / least);
  }
};

// Some rows, of each the entries within ``fractional`` ranks of the boundary: fewer than that many are open below the
// lam that is looked for, so that those outside are not among them.
template <class X>
class Windows {
 public:
  Windows(const Problem& problem, std::size_t fractional, double least)
      : problem_(problem),
        fractional_(fractional),
        length_(std::min(problem.n, 2 * fractional + 2)),
        least_(least),
        entries_(problem.rows * length_),
        y_(problem.rows * length_),
        k_(problem.rows),
        lam_(problem.rows),
        state_(problem.rows) {}

  void choose(double* lam) {
    std::vector<Search> rows(problem_.rows);
    for (std::size_t i = 0; i < problem_.rows; ++i) rows[i] = begin(i);
    const auto busy = [](const Search& row) { return row.is_busy(); };
    while (std::any_of(rows.begin(), rows.end(), busy)) {
      for (std::size_t i = 0; i < rows.size(); ++i) lam_[i] = rows[i].lam;
      solve();
      for (std::size_t i = 0; i < rows.size(); ++i)
        if (rows[i].is_busy()) rows[i].step(count(i) >= fractional_, least_);
      look_now_and_then();
    }
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (std::isnan(k_[i]))
        lam[i] = k_[i];
      else
        lam[i] = (1 + 8 * kEpsilon) * (rows[i].has_found ? rows[i].found : scale(i));
    }
  }

 private:
  // Of the numbers that such rows are solved in afterwards.
  static constexpr double kEpsilon = Limits<Wide<X>>::epsilon;

  bool is_magnitude() const { return problem_.op == Operator::magnitude; }

  // The window of a row, and the start of its search; a bad row is one whose k is NaN.
  Search begin(std::size_t i) {
    const X* x = static_cast<const X*>(problem_.x) + i * problem_.row_stride;
    const double k = problem_.k_of(i), n = double(problem_.n);
    double* window = entries_.data() + i * length_;
    bool bad = !(k >= 0 && k <= n);
    keys_.resize(problem_.n);
    for (std::size_t j = 0; j < problem_.n; ++j) {
      const double a = double(widen(x[j]));
      keys_[j] = is_magnitude() ? std::fabs(a) : a;
      bad |= is_magnitude() ? !std::isfinite(a) : std::isnan(a);
    }
    if (bad) {
      std::fill(window, window + length_, 0.0);
      k_[i] = std::nan("");
      return {1, 0, 0, false, false, kSteps};
    }
    const double last = std::ceil(k) - double(fractional_) - 1;
    const std::size_t first = last > 0 ? std::min(std::size_t(last), problem_.n - length_) : 0;
    const auto from = keys_.begin() + std::ptrdiff_t(first), to = from + std::ptrdiff_t(length_);
    if (first > 0) std::nth_element(keys_.begin(), from, keys_.end(), std::greater<>());
    std::partial_sort(from, to, keys_.end(), std::greater<>());
    std::copy(from, to, window);
    k_[i] = k - double(first);
    return {scale(i), 0, 0, false, false, 0};
  }

  // The scale of lam at the boundary: from the distance over the window, and not from the whole row, which may have
  // outliers. For magnitude, lam g^(p-1) is such a distance, g the size at the boundary.
  double scale(std::size_t i) const {
    const double* window = entries_.data() + i * length_;
    double high = -HUGE_VAL, low = HUGE_VAL;
    for (std::size_t j = 0; j < length_; ++j) {
      const double a = window[j];
      if (!std::isfinite(a)) continue;  // padding is at no distance
      high = std::max(high, a);
      low = std::min(low, a);
    }
    double distance = high > low ? high / 2 - low / 2 : 0;
    if (is_magnitude()) {
      const double at = std::clamp(std::ceil(k_[i]) - 1, 0.0, double(length_ - 1));
      const double g = window[std::size_t(at)];
      if (g > 0) distance /= std::pow(g, 1 / problem_.exponent);
    }
    return std::clamp(distance > 0 ? distance : 1, least_, 1 / least_);
  }

  void solve() {
    Problem inside = problem_;
    inside.debias = false;
    inside.dtype = Dtype::float64;
    inside.n = inside.row_stride = length_;
    inside.x = entries_.data();
    inside.k = k_.data();
    inside.lam = lam_.data();
    inside.k_stride = inside.lam_stride = inside.threads = 1;
    inside.state = state_.data();
    forward(inside, y_.data());
  }

  // How many entries of a solved window are fractional.
  std::size_t count(std::size_t i) const {
    const State state = state_[i];
    if (!std::isfinite(state.pivot)) return 0;  // of those that are +inf, and share k, none is
    if (is_magnitude()) return count_inside(i, state);
    const double margin = 64 * kEpsilon * std::max(1.0, std::floor(k_[i]));
    const double* y = y_.data() + i * length_;
    return std::size_t(std::count_if(y, y + length_, [margin](double each) {
      const double value = double(widen(narrow<X>(Wide<X>(each))));  // as an output is
      return value > 0 && value < 1 - margin && value < 1;           // a rounding of the threshold must not decide
    }));
  }

  // Of magnitudes: those whose response is below phi'(v) = v, the most that an entry can have. v may be tiny beside the
  // pivot, and is then lost in rounding.
  std::size_t count_inside(std::size_t i, State state) const {
    const double lam = lam_[i], e = problem_.exponent, rounding = 16 * Limits<double>::epsilon;
    const double v = std::max(state.pivot - lam * state.delta, 0.0);
    const double level =
        v * (1 + rounding * std::max(1.0, e)) + rounding * (std::fabs(state.pivot) + lam * std::fabs(state.delta));
    const double* window = entries_.data() + i * length_;
    return std::size_t(std::count_if(window, window + length_, [&](double each) {
      const double t = (each - state.pivot) / lam + state.delta;
      return t > 0 && std::pow(t, e) < level;
    }));
  }

  Problem problem_;
  std::size_t fractional_, length_;
  double least_;
  std::vector<double> entries_, y_;  // in double, which tells where an entry begins to be open
  std::vector<double> k_, lam_;
  std::vector<State> state_;
  std::vector<double> keys_;  // of a row
};

// The entries of a row that are there, in the order of their ranks, and what a solve of these needs.
template <class T>
class RankedRow {
 public:
  RankedRow(const RankSearch& asked, std::size_t n) : asked_(asked), s_(n), w_(n), d_(n), block_(n) {}

  double choose(const T* x, std::size_t n) {
    if (!read(x, n)) return std::nan("");
    const double scale = scale_of();
    if (count_ == 0) return scale;
    Search search{scale, 0, 0, false, false, 0};
    while (search.is_busy()) {
      search.step(is_enough(search.lam), asked_.least);
      look_now_and_then();
    }
    const double lam = (1 + 8 * kEpsilon) * (search.has_found ? search.found : scale);
    return lam < kEpsilon * scale ? scale : lam;
  }

 private:
  static constexpr double kEpsilon = std::numeric_limits<T>::epsilon();

  // False if an entry is NaN or +inf.
  bool read(const T* x, std::size_t n) {
    count_ = 0;
    for (std::size_t i = 0; i < n; ++i) {
      if (!std::isfinite(x[i]) && !(x[i] < 0)) return false;
      if (std::isfinite(x[i])) s_[count_++] = asked_.descending ? -double(x[i]) : double(x[i]);
    }
    std::sort(s_.begin(), s_.begin() + std::ptrdiff_t(count_), std::greater<>());
    for (std::size_t i = 0; i < count_; ++i) w_[i] = double(count_ - i);
    return true;
  }

  double scale_of() const {
    const double range = count_ > 0 ? s_[0] / 2 - s_[count_ - 1] / 2 : 0;
    const double distance = range / std::pow(std::max(double(count_), 1.0), 1 / asked_.exponent);
    return std::clamp(distance > 0 ? distance : 1, asked_.least, 1 / asked_.least);
  }

  bool is_enough(double lam) {
    solve_isotonic(PhiName::identity, asked_.exponent, 1, count_, s_.data(), w_.data(), &lam, d_.data(), block_.data());
    std::size_t blocks = 0;
    for (std::size_t i = 0; i < count_; ++i) blocks += block_[i] == std::int64_t(i);
    return std::min(double(count_), asked_.size) * double(blocks) <= (1 + 1024 * kEpsilon) * double(count_);
  }

  RankSearch asked_;
  std::size_t count_ = 0;
  std::vector<double> s_, w_, d_;
  std::vector<std::int64_t> block_;
};

}  // namespace

template <class T>
void choose_rank_lam(const RankSearch& asked, std::size_t rows, std::size_t n, const T* x, double* lam,
                     std::size_t threads) {
  constexpr std::size_t kEntries = 1 << 10;  // that a thread is given at once
  const std::size_t together = std::max<std::size_t>(1, kEntries / std::max<std::size_t>(n, 1));
  parallel_for((rows + together - 1) / together, threads, [&](std::size_t part) {
    RankedRow<T> row(asked, n);
    for (std::size_t i = part * together; i < std::min(rows, (part + 1) * together); ++i)
      lam[i] = row.choose(x + i * n, n);
  });
}
template void choose_rank_lam(const RankSearch&, std::size_t, std::size_t, const float*, double*, std::size_t);
template void choose_rank_lam(const RankSearch&, std::size_t, std::size_t, const double*, double*, std::size_t);

void choose_lam(const Problem& problem, std::size_t fractional, double least, double* lam) {
  if (problem.rows == 0 || problem.n == 0) return;
  constexpr std::size_t kRows = 64, kEntries = 1 << 14;  // that are searched together, for the lanes, and that suffice
  const std::size_t together = std::clamp<std::size_t>(kEntries / problem.n, 1, kRows);
  with_entries(problem.dtype, problem.x, [&](const auto* x) {
    using X = std::decay_t<decltype(*x)>;
    parallel_for((problem.rows + together - 1) / together, problem.threads, [&](std::size_t i) {
      const std::size_t first = i * together, count = std::min(together, problem.rows - first);
      Windows<X>(rows_of(problem, first, count), fractional, least).choose(lam + first);
    });
  });
}

}  // namespace sparsetopk
