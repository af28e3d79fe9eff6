#include "isotonic.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <type_traits>

#include "parallel.hpp"
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
  for (std::size_t row = 0; row < rows; ++row) {
    look_now_and_then();
    sort_records(x + row * n, n, work);
    for (std::size_t i = 0; i < n; ++i) order[row * n + i] = std::int64_t(work.here[i].index);
  }
}

template <class T>
std::unique_ptr<T[]> uninitialised(std::size_t n) {
  return std::unique_ptr<T[]>(new T[n]);
}

// Rows of either type, one sorted at a time: the order, and the values in that order.
class Sorter {
 public:
  explicit Sorter(const FloatRows& rows)
      : order(uninitialised<std::uint32_t>(rows.n)), values(uninitialised<double>(rows.n)), rows_(rows),
        singles_(single() ? rows.n : 0), doubles_(single() ? 0 : rows.n) {}

  // False if an entry is not finite.
  bool sort(std::size_t row) {
    return single() ? sort(static_cast<const float*>(rows_.data) + row * rows_.n, singles_)
                    : sort(static_cast<const double*>(rows_.data) + row * rows_.n, doubles_);
  }

  std::unique_ptr<std::uint32_t[]> order;
  std::unique_ptr<double[]> values;

 private:
  bool single() const { return rows_.itemsize == sizeof(float); }

  template <class T>
  bool sort(const T* x, SortWorkspace<T>& work) {
    const std::size_t n = rows_.n;
    sort_records(x, n, work);
    for (std::size_t i = 0; i < n; ++i) {
      order[i] = work.here[i].index;
      values[i] = double(value_of<T>(work.here[i].key));
    }
    return n == 0 || (std::isfinite(values[0]) && std::isfinite(values[n - 1]));  // NaN comes last
  }

  FloatRows rows_;
  SortWorkspace<float> singles_;
  SortWorkspace<double> doubles_;
};

// Rows x and w, sorted and solved one at a time.
class Solver {
 public:
  Solver(PhiName phi, double exponent, const FloatRows& x, const FloatRows& w)
      : of_x(x), of_w(w), d(uninitialised<double>(x.n)), first(uninitialised<std::int64_t>(x.n)), phi_(phi),
        exponent_(exponent), n_(x.n), w_rows_(w.rows), work_(x.n) {}

  // False if an entry is not finite; w may be a single row, which is sorted once.
  bool solve(std::size_t row, double lam) {
    if (!of_x.sort(row) || (row < w_rows_ && !of_w.sort(row))) return false;
    solve_row(phi_, exponent_, Row{of_x.values.get(), of_w.values.get(), lam, n_}, work_, d.get(), first.get());
    return true;
  }

  // What was found for the row, in the order of x; blocks are numbered from 0.
  template <class D, class Index>
  void scatter(D* d_of, Index* block, Index* paired) const {
    Index number = -1;
    for (std::size_t i = 0; i < n_; ++i) {
      const std::size_t at = of_x.order[i];
      number += first[i] == std::int64_t(i);
      d_of[at] = D(d[i]);
      block[at] = number;
      paired[at] = Index(of_w.order[i]);
    }
  }

  Sorter of_x, of_w;
  std::unique_ptr<double[]> d;
  std::unique_ptr<std::int64_t[]> first;

 private:
  PhiName phi_;
  double exponent_;
  std::size_t n_, w_rows_;
  Workspace work_;
};

// With D_i = S'(d_i)/lam on a block: dg = sum D_i dx_i / sum D_i, dy_i = D_i (dx_i - dg). x enters through x/lam
// alone, so that the derivative in lam, which is returned, is -J d.
template <class P, class T>
double backward_row(const P& power, std::size_t n, const Saved<T>& row, double lam, const T* dy, T* dx, double* dw) {
  double dlam = 0;
  for (std::size_t begin = 0, end = 0; begin < n; begin = end) {
    double rise = 0, weighted = 0, plain = 0;
    for (end = begin; end < n && row.first[end] == row.first[begin]; ++end) {
      const double steepness = pav::slope(power, double(row.d[end])), in = dy[row.order[end]];
      rise += steepness;
      weighted += steepness * in;
      plain += in;
    }
    // Flat everywhere on the block (p < 2, nothing selected): the limit shares equally.
    const double mean = rise > 0 ? weighted / rise : plain / double(end - begin);
    for (std::size_t i = begin; i < end; ++i) {
      const double d = row.d[i], in = dy[row.order[i]];
      const double out = end - begin == 1 ? 0 : pav::slope(power, d) / lam * (in - mean);
      dx[row.order[i]] = T(out);
      dlam -= out * d;
      if (dw != nullptr) dw[row.w_order[i]] += mean;
    }
  }
  return dlam;
}

}  // namespace

bool solve_permutahedron(PhiName phi, double exponent, const FloatRows& x, const FloatRows& w, const double* lam,
                         double* d, std::int64_t* block, std::int64_t* paired) {
  Solver solver(phi, exponent, x, w);
  for (std::size_t row = 0; row < x.rows; ++row) {
    if (!solver.solve(row, lam[row])) return false;
    solver.scatter(d + row * x.n, block + row * x.n, paired + row * x.n);
  }
  return true;
}

template <class T>
void solve_permutahedron(PhiName phi, double exponent, std::size_t rows, std::size_t n, const T* x, const T* w,
                         const T* lam, T* d, std::int32_t* block, std::int32_t* paired, std::size_t threads) {
  if (rows * n == 0) return;
  constexpr std::size_t kGrain = 2048;  // entries: below that, waking a thread costs more than it brings
  const std::size_t chunk = std::max((kGrain + n - 1) / n, (rows + 4 * threads - 1) / (4 * threads));
  const auto solve_rows = [&](std::size_t begin, std::size_t end) {
    Solver solver(phi, exponent, {x, sizeof(T), rows, n}, {w, sizeof(T), rows, n});
    for (std::size_t row = begin; row < end; ++row) {
      const std::size_t at = row * n;
      const bool solved = lam[row] > 0 && std::isfinite(lam[row]) && solver.solve(row, lam[row]);
      if (solved && (phi == PhiName::identity || solver.of_w.values[n - 1] >= 0)) {
        solver.scatter(d + at, block + at, paired + at);
      } else {
        std::fill_n(d + at, n, std::numeric_limits<T>::quiet_NaN());
        std::iota(block + at, block + at + n, 0);
        std::iota(paired + at, paired + at + n, 0);
      }
    }
  };
  struct Call {
    decltype(solve_rows)& run;
    std::size_t chunk, rows;
  } call{solve_rows, chunk, rows};
  parallel_for(
      (rows + chunk - 1) / chunk, threads,
      [](void* context, std::size_t i) {
        const Call& call = *static_cast<Call*>(context);
        call.run(i * call.chunk, std::min((i + 1) * call.chunk, call.rows));
      },
      &call);
}

template <class T>
bool permutahedron_forward(double exponent, std::size_t rows, std::size_t n, const T* x, const FloatRows& w,
                           const double* lam, T* y, const Saved<T>& saved) {
  Solver solver(PhiName::identity, exponent, {x, sizeof(T), rows, n}, w);
  for (std::size_t row = 0; row < rows; ++row) {
    look_now_and_then();
    const std::size_t at = row * n;
    if (!solver.solve(row, lam[row])) return false;
    with_power(exponent, [&](const auto& power) {
      for (std::size_t i = 0; i < n; ++i)
        y[at + solver.of_x.order[i]] = T(pav::response(power, solver.d[i]) + 0.0);  // 0 for -0
    });
    if (saved.order != nullptr) {
      std::copy_n(solver.of_x.order.get(), n, saved.order + at);
      std::copy_n(solver.first.get(), n, saved.first + at);
      std::copy_n(solver.d.get(), n, saved.d + at);
    }
    if (saved.w_order != nullptr && row < w.rows) std::copy_n(solver.of_w.order.get(), n, saved.w_order + at);
  }
  return true;
}

template <class T>
void permutahedron_backward(double exponent, std::size_t rows, std::size_t n, const Saved<T>& saved,
                            const double* lam, const T* dy, T* dx, double* dw, bool single_w, double* dlam,
                            double floor) {
  with_power(exponent, [&](const auto& power) {
    for (std::size_t row = 0; row < rows; ++row) {
      look_now_and_then();
      const std::size_t at = row * n, w_at = single_w ? 0 : at;
      const Saved<T> one{saved.order + at, saved.first + at, dw == nullptr ? nullptr : saved.w_order + w_at,
                         saved.d + at};
      const double in_lam = backward_row(power, n, one, std::max(lam[row], floor), dy + at, dx + at,
                                         dw == nullptr ? nullptr : dw + w_at);
      if (dlam != nullptr) dlam[row] = in_lam;
    }
  });
}

template void solve_permutahedron(PhiName, double, std::size_t, std::size_t, const float*, const float*, const float*,
                                  float*, std::int32_t*, std::int32_t*, std::size_t);
template void solve_permutahedron(PhiName, double, std::size_t, std::size_t, const double*, const double*,
                                  const double*, double*, std::int32_t*, std::int32_t*, std::size_t);
template bool permutahedron_forward(double, std::size_t, std::size_t, const float*, const FloatRows&, const double*,
                                    float*, const Saved<float>&);
template bool permutahedron_forward(double, std::size_t, std::size_t, const double*, const FloatRows&, const double*,
                                    double*, const Saved<double>&);
template void permutahedron_backward(double, std::size_t, std::size_t, const Saved<float>&, const double*,
                                     const float*, float*, double*, bool, double*, double);
template void permutahedron_backward(double, std::size_t, std::size_t, const Saved<double>&, const double*,
                                     const double*, double*, double*, bool, double*, double);

void solve_isotonic(PhiName phi, double exponent, std::size_t rows, std::size_t n, const double* s, const double* w,
                    const double* lam, double* d, std::int64_t* block) {
  Workspace work(n);
  for (std::size_t row = 0; row < rows; ++row) {
    look_now_and_then();
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
