#include "isotonic.hpp"

#include <type_traits>
#include <vector>

#include "pav.hpp"
#include "sort.hpp"

namespace sparsetopk {
namespace {

using pav::Row;
using pav::Workspace;

template <class Phi>
void solve_row(double exponent, const Phi& phi, const Row& row, Workspace& work, double* d, std::int64_t* block) {
  const auto merge = [&](const auto& power) {
    pav::Merger<std::decay_t<decltype(power)>, Phi>(row, power, phi, work).solve(d, block);
  };
  if constexpr (!std::is_same_v<Phi, pav::Exp>)
    if (exponent == 1) return pav::solve_stack(row, phi, work, d, block);
  if (exponent == 1) return merge(Power<1>{});
  if (exponent == 2) return merge(Power<2>{});
  if (exponent == 3) return merge(Power<3>{});
  merge(Power<0>{exponent});
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

}  // namespace

void solve_permutahedron(PhiName phi, double exponent, const FloatRows& x, const FloatRows& w, const double* lam,
                         double* d, std::int64_t* block, std::int64_t* paired) {
  const std::size_t n = x.n;
  Sorter of_x(x), of_w(w);
  Workspace work;
  std::vector<double> d_sorted(n);
  std::vector<std::int64_t> block_sorted(n);
  for (std::size_t row = 0; row < x.rows; ++row) {
    of_x.sort(row);
    if (row < w.rows) of_w.sort(row);
    solve_row(phi, exponent, Row{of_x.values.data(), of_w.values.data(), lam[row], n}, work, d_sorted.data(),
              block_sorted.data());
    for (std::size_t i = 0; i < n; ++i) {
      const std::size_t at = row * n + of_x.order[i];
      d[at] = d_sorted[i];
      block[at] = block_sorted[i];
      paired[at] = of_w.order[i];
    }
  }
}

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
