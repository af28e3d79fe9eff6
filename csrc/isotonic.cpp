#include "isotonic.hpp"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "pav.hpp"
#include "sort.hpp"

namespace sparsetopk {
namespace {

using pav::Row;
using pav::Workspace;

// f with t -> t^exponent.
template <class F>
void with_power(double exponent, const F& f) {
  if (exponent == 1) return f(Power<1>{});
  if (exponent == 2) return f(Power<2>{});
  if (exponent == 3) return f(Power<3>{});
  f(Power<0>{exponent});
}

template <class Phi>
void solve_row(double exponent, const Phi& phi, const Row& row, Workspace& work, double* d, std::int64_t* block) {
  const auto merge = [&](const auto& power) {
    pav::Merger<std::decay_t<decltype(power)>, Phi>(row, power, phi, work).solve(d, block);
  };
  if constexpr (!std::is_same_v<Phi, pav::Exp>)
    if (exponent == 1) return pav::solve_stack(row, phi, work, d, block);
  with_power(exponent, merge);
}

void solve_row(PhiName phi, double exponent, const Row& row, Workspace& work, double* d, std::int64_t* block) {
  work.reserve(row.n);
  switch (phi) {
    case PhiName::identity:
      return solve_row(exponent, pav::Identity{}, row, work, d, block);
    case PhiName::half_square:
      return solve_row(exponent, pav::HalfSquare{}, row, work, d, block);
    case PhiName::exp:
      return solve_row(exponent, pav::Exp{}, row, work, d, block);
    case PhiName::abs:
      solve_row(exponent, pav::Identity{}, row, work, d, block);
      return pav::truncate(row, d, block);
  }
}

template <class T>
void argsort_rows(std::size_t rows, std::size_t n, const T* x, std::int64_t* order) {
  SortWorkspace<T> work(n);
  for (std::size_t row = 0; row < rows; ++row) argsort_descending(x + row * n, n, order + row * n, work);
}

// Rows of either type: their order, and their values in that order.
class Sorter {
 public:
  explicit Sorter(const FloatRows& rows)
      : order(rows.n), values(rows.n), rows_(rows), singles_(single() ? rows.n : 0), doubles_(single() ? 0 : rows.n) {}

  void sort(std::size_t row) {
    single() ? sort(static_cast<const float*>(rows_.data) + row * rows_.n, singles_)
             : sort(static_cast<const double*>(rows_.data) + row * rows_.n, doubles_);
  }

  // NaN comes last, so the ends tell.
  bool finite() const { return values.empty() || (std::isfinite(values.front()) && std::isfinite(values.back())); }

  std::vector<std::uint32_t> order;
  std::vector<double> values;

 private:
  bool single() const { return rows_.itemsize == sizeof(float); }

  template <class T>
  void sort(const T* x, SortWorkspace<T>& work) {
    argsort_descending(x, rows_.n, order.data(), work);
    for (std::size_t i = 0; i < rows_.n; ++i) values[i] = double(x[order[i]]);
  }

  FloatRows rows_;
  SortWorkspace<float> singles_;
  SortWorkspace<double> doubles_;
};

struct BlockSums {
  double rise, weighted, plain, size;
};

// With D_i = S'(d_i)/lam on a block: dg = sum D_i dx_i / sum D_i, dy_i = D_i (dx_i - dg); x enters through x/lam
// alone, so that the derivative in lam is -J d. Returns that of lam.
template <class P, class T>
double backward_row(const P& power, const Solved& row, const T* dy, T* dx, double* dw, double floor,
                    std::vector<BlockSums>& sums) {
  const std::size_t n = row.n;
  sums.assign(n == 0 ? 0 : std::size_t(*std::max_element(row.block, row.block + n)) + 1, {0, 0, 0, 0});
  for (std::size_t i = 0; i < n; ++i) {
    BlockSums& sum = sums[std::size_t(row.block[i])];
    const double rise = pav::slope(power, row.d[i]);
    sum.rise += rise;
    sum.weighted += rise * dy[i];
    sum.plain += dy[i];
    sum.size += 1;
  }
  const double lam = std::max(*row.lam, floor);
  double dlam = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const BlockSums& sum = sums[std::size_t(row.block[i])];
    // Flat everywhere on the block (p < 2, nothing selected): the limit shares equally.
    const double mean = sum.rise > 0 ? sum.weighted / sum.rise : sum.plain / sum.size;
    const double at = sum.size == 1 ? 0 : pav::slope(power, row.d[i]) / lam * (dy[i] - mean);
    dx[i] = T(at);
    dlam -= at * row.d[i];
    if (dw != nullptr) dw[row.paired[i]] += mean;
  }
  return dlam;
}

}  // namespace

bool solve_permutahedron(PhiName phi, double exponent, const FloatRows& x, const FloatRows& w, const double* lam,
                         double* d, std::int64_t* block, std::int64_t* paired) {
  const std::size_t n = x.n;
  Sorter of_x(x), of_w(w);
  Workspace work;
  std::vector<double> d_sorted(n);
  std::vector<std::int64_t> block_sorted(n);
  for (std::size_t row = 0; row < x.rows; ++row) {
    of_x.sort(row);
    if (row < w.rows) of_w.sort(row);
    if (!of_x.finite() || !of_w.finite()) return false;
    solve_row(phi, exponent, Row{of_x.values.data(), of_w.values.data(), lam[row], n}, work, d_sorted.data(),
              block_sorted.data());
    std::int64_t number = -1;
    for (std::size_t i = 0; i < n; ++i) {
      const std::size_t at = row * n + of_x.order[i];
      number += block_sorted[i] == std::int64_t(i);
      d[at] = d_sorted[i];
      block[at] = number;
      paired[at] = of_w.order[i];
    }
  }
  return true;
}

template <class T>
void permutahedron_backward(double exponent, const Solved& solved, const T* dy, T* dx, double* dw, bool single_w,
                            double* dlam, double floor) {
  std::vector<BlockSums> sums;
  const auto all_rows = [&](const auto& power) {
    for (std::size_t row = 0; row < solved.rows; ++row) {
      const std::size_t at = row * solved.n;
      const Solved one{1, solved.n, solved.lam + row, solved.d + at, solved.block + at, solved.paired + at};
      double* dw_row = dw == nullptr || single_w ? dw : dw + at;
      const double in_lam = backward_row(power, one, dy + at, dx + at, dw_row, floor, sums);
      if (dlam != nullptr) dlam[row] = in_lam;
    }
  };
  with_power(exponent, all_rows);
}

template void permutahedron_backward(double, const Solved&, const float*, float*, double*, bool, double*, double);
template void permutahedron_backward(double, const Solved&, const double*, double*, double*, bool, double*, double);

void solve_isotonic(PhiName phi, double exponent, std::size_t rows, std::size_t n, const double* s, const double* w,
                    const double* lam, double* d, std::int64_t* block) {
  Workspace work;
  for (std::size_t row = 0; row < rows; ++row) {
    const std::size_t at = row * n;
    solve_row(phi, exponent, Row{s + at, w + at, lam[row], n}, work, d + at, block + at);
  }
}

void argsort_descending(std::size_t rows, std::size_t n, const float* x, std::int64_t* order) {
  argsort_rows(rows, n, x, order);
}

void argsort_descending(std::size_t rows, std::size_t n, const double* x, std::int64_t* order) {
  argsort_rows(rows, n, x, order);
}

}  // namespace sparsetopk
