#include "isotonic.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <type_traits>

#include "parallel.hpp"
#include "pav.hpp"
#include "sort.hpp"

namespace sparsetopk {
namespace {

using pav::Row;
using pav::Workspace;

template <class Phi, class Emit>
void solve_row(double exponent, const Phi& phi, const Row& row, Workspace& work, const Emit& emit) {
  const auto merge = [&](const auto& power) {
    pav::Merger<std::decay_t<decltype(power)>, Phi>(row, power, phi, work).solve(emit);
  };
  if constexpr (!std::is_same_v<Phi, pav::Exp>)
    if (exponent == 1) return pav::solve_stack(row, phi, work, emit);
  with_power(exponent, merge);
}

template <class Emit>
void solve_row(PhiName phi, double exponent, const Row& row, Workspace& work, const Emit& emit) {
  switch (phi) {
    case PhiName::identity:
      return solve_row(exponent, pav::Identity{}, row, work, emit);
    case PhiName::half_square:
      return solve_row(exponent, pav::HalfSquare{}, row, work, emit);
    case PhiName::exp:
      return solve_row(exponent, pav::Exp{}, row, work, emit);
    case PhiName::abs:
      return solve_row(exponent, pav::Identity{}, row, work, pav::truncated(row, emit));
  }
}

template <class T>
std::unique_ptr<T[]> uninitialised(std::size_t n) {
  return std::unique_ptr<T[]>(new T[n]);
}

template <class T>
void argsort_rows(std::size_t rows, std::size_t n, const T* x, std::int64_t* order) {
  SortWorkspace<T> work(n);
  const auto values = uninitialised<T>(n);
  for (std::size_t row = 0; row < rows; ++row) {
    look_now_and_then();
    sort_descending(x + row * n, n, work, order + row * n, values.get(), 1);
  }
}

// run(begin, end, threads) for parts of the rows, which threads share; a part may use what is left of them.
template <class Run>
void for_rows(std::size_t rows, std::size_t n, std::size_t threads, const Run& run) {
  if (rows * n == 0) return;
  constexpr std::size_t kGrain = 2048;  // entries: below that, waking a thread costs more than it brings
  const bool shared = threads > 1 && rows >= threads;
  const std::size_t even = shared ? (rows + 4 * threads - 1) / (4 * threads) : rows;
  const std::size_t chunk = std::max((kGrain + n - 1) / n, even), parts = (rows + chunk - 1) / chunk;
  parallel_for(parts, shared ? threads : 1,
               [&](std::size_t i) { run(i * chunk, std::min((i + 1) * chunk, rows), shared ? 1 : threads); });
}

// Rows of either type, one sorted at a time: the order, and the values in that order.
class Sorter {
 public:
  Sorter(const FloatRows& rows, std::size_t threads)
      : order(uninitialised<std::uint32_t>(rows.n)),
        values(uninitialised<double>(rows.n)),
        rows_(rows),
        threads_(threads),
        singles_(single() ? rows.n : 0),
        doubles_(single() ? 0 : rows.n) {}

  // False if an entry is not finite. A single row is sorted once.
  bool sort(std::size_t row) {
    row = std::min(row, rows_.rows - 1);
    if (row != sorted_) single() ? sort<float>(row, singles_) : sort<double>(row, doubles_);
    sorted_ = row;
    return rows_.n == 0 || (std::isfinite(values[0]) && std::isfinite(values[rows_.n - 1]));  // NaN comes last
  }

  std::unique_ptr<std::uint32_t[]> order;
  std::unique_ptr<double[]> values;

 private:
  bool single() const { return rows_.itemsize == sizeof(float); }

  template <class T>
  void sort(std::size_t row, SortWorkspace<T>& work) {
    const T* x = static_cast<const T*>(rows_.data) + row * rows_.n;
    sort_descending(x, rows_.n, work, order.get(), values.get(), threads_);
  }

  FloatRows rows_;
  std::size_t threads_, sorted_ = std::size_t(-1);
  SortWorkspace<float> singles_;
  SortWorkspace<double> doubles_;
};

// Rows x and w, either of which may be a single row, sorted and solved one at a time.
class Solver {
 public:
  Solver(PhiName phi, double exponent, const FloatRows& x, const FloatRows& w, std::size_t threads)
      : of_x(x, threads), of_w(w, threads), phi_(phi), exponent_(exponent), n_(x.n), work_(x.n) {}

  // emit(i, d, first) for all entries in sorted order, with the first entry of their block. False if an entry is not finite.
  template <class Emit>
  bool solve(std::size_t number, double lam, const Emit& emit) {
    look_now_and_then();
    if (!of_x.sort(number) || !of_w.sort(number)) return false;
    const Row row(of_x.values.get(), of_w.values.get(), lam, n_);
    solve_row(phi_, exponent_, row, work_, [&](std::size_t first, std::size_t end, double delta) {
      for (std::size_t i = first; i < end; ++i) emit(i, row.d(i, first, delta), first);
    });
    return true;
  }

  // The same with what is found in the order of x; blocks are numbered from 0.
  template <class D, class Index>
  bool solve(std::size_t number, double lam, D* d_of, Index* block, Index* paired) {
    Index at_block = -1;
    return solve(number, lam, [&](std::size_t i, double d, std::size_t first) {
      const std::size_t at = of_x.order[i];
      at_block += first == i;
      d_of[at] = D(d);
      block[at] = at_block;
      paired[at] = Index(of_w.order[i]);
    });
  }

  Sorter of_x, of_w;

 private:
  PhiName phi_;
  double exponent_;
  std::size_t n_;
  Workspace work_;
};

// The mean of g over a block, weighted by the slopes at d. Sums in lanes: so the compiler can fill its vectors.
template <class P, class T>
double block_mean(const P& power, std::size_t n, const T* d, const T* g) {
  constexpr std::size_t kWidth = 4;
  double rise[kWidth] = {}, weighted[kWidth] = {}, plain[kWidth] = {};
  const auto add = [&](std::size_t i, std::size_t j) {
    const double steepness = pav::slope(power, double(d[i]));
    rise[j] += steepness, weighted[j] += steepness * double(g[i]), plain[j] += double(g[i]);
  };
  std::size_t i = 0;
  for (; i + kWidth <= n; i += kWidth)
    for (std::size_t j = 0; j < kWidth; ++j) add(i + j, j);
  for (std::size_t j = 0; i < n; ++i, ++j) add(i, j);
  const auto total = [](const double (&lanes)[kWidth]) { return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]); };
  // Flat everywhere on the block (p < 2, nothing selected): the limit shares equally.
  return total(rise) > 0 ? total(weighted) / total(rise) : total(plain) / double(n);
}

// With D_i = S'(d_i)/lam on a block: dg = sum D_i dx_i / sum D_i, dy_i = D_i (dx_i - dg). x enters through x/lam
// alone, so that the derivative in lam is -J d. ``g`` has room for dy in sorted order.
template <class P, class T, class W>
void backward_row(const P& power, std::size_t n, const Saved<T>& row, double lam, const T* dy, T* g, T* dx, W* dw,
                  double* dlam) {
  if (dlam != nullptr) *dlam = 0;
  for (std::size_t begin = 0, end = 0; begin < n; begin = end) {
    for (end = begin; end < n && row.first[end] == row.first[begin]; ++end) g[end] = dy[row.order[end]];
    const bool alone = end - begin == 1;
    const double mean = alone ? double(g[begin]) : block_mean(power, end - begin, row.d + begin, g + begin);
    const auto derivative = [&](std::size_t i) {
      return alone ? 0 : pav::slope(power, double(row.d[i])) / lam * (double(g[i]) - mean);
    };
    if (dx != nullptr)
      for (std::size_t i = begin; i < end; ++i) dx[row.order[i]] = T(derivative(i));
    if (dlam != nullptr)
      for (std::size_t i = begin; i < end; ++i) *dlam -= derivative(i) * double(row.d[i]);
    if (dw != nullptr)
      for (std::size_t i = begin; i < end; ++i) dw[row.w_order[i]] += W(mean);
  }
}

// y of a row with phi = identity beside what ``solve`` gives; for lam = 0 d is 0, and every entry a block of its own.
// False if an entry is not finite.
template <class P, class T>
bool respond_row(const P& power, Solver& solver, std::size_t number, double lam, std::size_t n, const T* w, T* y,
                 const Kept<T>& kept) {
  std::int32_t at_block = -1;
  const auto keep = [&](std::size_t i, double d, std::size_t first) {
    const std::size_t at = solver.of_x.order[i];
    at_block += first == i;
    y[at] = T(pav::response(power, d) + 0.0);  // 0 for -0
    kept.d[at] = T(d), kept.block[at] = at_block, kept.paired[at] = std::int32_t(solver.of_w.order[i]);
  };
  if (lam > 0) return solver.solve(number, std::max(lam, double(std::numeric_limits<T>::min())), keep);
  if (!solver.of_x.sort(number) || !solver.of_w.sort(number)) return false;
  for (std::size_t i = 0; i < n; ++i) keep(i, 0, i);
  for (std::size_t i = 0; i < n; ++i) y[i] = w[kept.paired[i]] + T(0);
  return true;
}

// As ``backward_row``, for what is kept in the order of x. ``sums`` has room for every block.
struct BlockSum {
  double rise, weighted, plain;
  std::size_t size;
  double mean() const { return rise > 0 ? weighted / rise : plain / double(size); }
};
template <class P, class T>
void pull_row(const P& power, std::size_t n, double lam, const Kept<const T>& row, const T* g, BlockSum* sums, T* dx,
              T* dw, T* dlam) {
  std::fill_n(sums, n, BlockSum{});
  for (std::size_t i = 0; i < n; ++i) {
    const double steepness = pav::slope(power, double(row.d[i]));
    BlockSum& sum = sums[row.block[i]];
    sum.rise += steepness, sum.weighted += steepness * double(g[i]), sum.plain += double(g[i]), ++sum.size;
  }
  double in_lam = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const BlockSum& sum = sums[row.block[i]];
    const bool alone = sum.size == 1;
    const double mean = alone ? double(g[i]) : sum.mean(), d = double(row.d[i]);
    const double in_x = alone ? 0 : pav::slope(power, d) / lam * (double(g[i]) - mean);
    dx[i] = T(in_x);
    in_lam -= in_x * d;
    if (dw != nullptr) dw[row.paired[i]] = T(mean);
  }
  *dlam = T(in_lam);
}

// Indices that come back from XLA.
void check_indices(const std::int32_t* indices, std::size_t n) {
  const auto good = [n](std::int32_t index) { return index >= 0 && std::size_t(index) < n; };
  if (!std::all_of(indices, indices + n, good)) throw std::invalid_argument("indices must be in [0, n)");
}

}  // namespace

template <class T>
void respond_permutahedron(double exponent, std::size_t rows, std::size_t n, const T* x, const T* w, const T* lam, T* y,
                           const Kept<T>& kept, std::size_t threads) {
  for_rows(rows, n, threads, [&](std::size_t begin, std::size_t end, std::size_t inner) {
    Solver solver(PhiName::identity, exponent, {x, sizeof(T), rows, n}, {w, sizeof(T), rows, n}, inner);
    for (std::size_t row = begin; row < end; ++row) {
      const std::size_t at = row * n;
      const Kept<T> own{kept.d + at, kept.block + at, kept.paired + at};
      bool solved = false;
      if (lam[row] >= 0 && std::isfinite(lam[row]))
        with_power(exponent, [&](const auto& power) {
          solved = respond_row(power, solver, row, lam[row], n, w + at, y + at, own);
        });
      if (solved) continue;
      std::fill_n(y + at, n, std::numeric_limits<T>::quiet_NaN());
      std::fill_n(own.d, n, std::numeric_limits<T>::quiet_NaN());
      std::iota(own.block, own.block + n, 0);
      std::iota(own.paired, own.paired + n, 0);
    }
  });
}

template <class T>
void pull_permutahedron(double exponent, std::size_t rows, std::size_t n, const T* lam, const Kept<const T>& kept,
                        const T* g, const Pulled<T>& found, double floor, std::size_t threads) {
  for_rows(rows, n, threads, [&](std::size_t begin, std::size_t end, std::size_t) {
    const auto sums = uninitialised<BlockSum>(n);
    for (std::size_t row = begin; row < end; ++row) {
      look_now_and_then();
      const std::size_t at = row * n;
      const Kept<const T> own{kept.d + at, kept.block + at, kept.paired + at};
      T *dx = found.x + at, *dw = found.w == nullptr ? nullptr : found.w + at;
      check_indices(own.block, n), check_indices(own.paired, n);
      const bool invalid = std::isnan(own.d[0]);
      if (invalid || lam[row] == 0) {
        const T same = invalid ? own.d[0] : T(0);
        std::fill_n(dx, n, same), found.lam[row] = same;
        for (std::size_t i = 0; dw != nullptr && i < n; ++i) dw[own.paired[i]] = invalid ? same : g[at + i];
        continue;
      }
      const double floored = std::max(double(lam[row]), floor);
      with_power(exponent, [&](const auto& power) {
        pull_row(power, n, floored, own, g + at, sums.get(), dx, dw, found.lam + row);
      });
    }
  });
}

bool solve_permutahedron(PhiName phi, double exponent, const FloatRows& x, const FloatRows& w, const double* lam,
                         double* d, std::int64_t* block, std::int64_t* paired, std::size_t threads) {
  std::atomic<bool> finite{true};
  for_rows(x.rows, x.n, threads, [&](std::size_t begin, std::size_t end, std::size_t inner) {
    Solver solver(phi, exponent, x, w, inner);
    for (std::size_t row = begin; row < end && finite; ++row)
      if (!solver.solve(row, lam[row], d + row * x.n, block + row * x.n, paired + row * x.n)) finite = false;
  });
  return finite;
}

template <class T>
void solve_permutahedron(PhiName phi, double exponent, std::size_t rows, std::size_t n, const T* x, const T* w,
                         const T* lam, T* d, std::int32_t* block, std::int32_t* paired, std::size_t threads) {
  for_rows(rows, n, threads, [&](std::size_t begin, std::size_t end, std::size_t inner) {
    Solver solver(phi, exponent, {x, sizeof(T), rows, n}, {w, sizeof(T), rows, n}, inner);
    for (std::size_t row = begin; row < end; ++row) {
      const std::size_t at = row * n;
      const bool is_lam = lam[row] > 0 && std::isfinite(lam[row]);
      const bool is_w = phi == PhiName::identity || std::all_of(w + at, w + at + n, [](T value) { return value >= 0; });
      if (is_lam && is_w && solver.solve(row, lam[row], d + at, block + at, paired + at)) continue;
      std::fill_n(d + at, n, std::numeric_limits<T>::quiet_NaN());
      std::iota(block + at, block + at + n, 0);
      std::iota(paired + at, paired + at + n, 0);
    }
  });
}

template <class T>
bool permutahedron_forward(double exponent, std::size_t rows, const FloatRows& x, const FloatRows& w, const double* lam,
                           T* y, const Saved<T>& saved, std::size_t threads) {
  const std::size_t n = x.n;
  std::atomic<bool> finite{true};
  for_rows(rows, n, threads, [&](std::size_t begin, std::size_t end, std::size_t inner) {
    Solver solver(PhiName::identity, exponent, x, w, inner);
    const std::uint32_t *order = solver.of_x.order.get(), *w_order = solver.of_w.order.get();
    for (std::size_t row = begin; row < end && finite; ++row) {
      const bool keeps = saved.d != nullptr;
      T *out = y + row * n, *d_of = keeps ? saved.d + row * n : nullptr;
      std::uint32_t* first_of = keeps ? saved.first + row * n : nullptr;
      bool solved = false;
      with_power(exponent, [&](const auto& power) {
        const auto respond = [&](std::size_t i, double d) {
          out[order[i]] = T(pav::response(power, d) + 0.0);
        };  // 0 for -0
        if (!keeps)
          solved = solver.solve(row, lam[row], [&](std::size_t i, double d, std::size_t) { respond(i, d); });
        else
          solved = solver.solve(row, lam[row], [&](std::size_t i, double d, std::size_t first) {
            respond(i, d);
            d_of[i] = T(d), first_of[i] = std::uint32_t(first);
          });
      });
      if (!solved) finite = false;
      if (saved.order != nullptr && row < x.rows) std::copy_n(order, n, saved.order + row * n);
      if (saved.w_order != nullptr && row < w.rows) std::copy_n(w_order, n, saved.w_order + row * n);
    }
  });
  return finite;
}

template <class T, class W>
void permutahedron_backward(double exponent, std::size_t rows, std::size_t n, std::size_t x_rows, std::size_t w_rows,
                            const Saved<T>& saved, const double* lam, const T* dy, T* dx, W* dw, double* dlam,
                            double floor, std::size_t threads) {
  if (dw != nullptr && w_rows < rows) threads = 1;  // all rows add to one
  for_rows(rows, n, threads, [&](std::size_t begin, std::size_t end, std::size_t) {
    const auto g = uninitialised<T>(n);
    for (std::size_t row = begin; row < end; ++row) {
      look_now_and_then();
      const std::size_t at = row * n, x_at = x_rows < rows ? 0 : at, w_at = w_rows < rows ? 0 : at;
      const bool has_w = dw != nullptr;
      const Saved<T> one{saved.order + x_at, saved.first + at, has_w ? saved.w_order + w_at : nullptr, saved.d + at};
      with_power(exponent, [&](const auto& power) {
        backward_row(power, n, one, std::max(lam[row], floor), dy + at, g.get(), dx == nullptr ? nullptr : dx + at,
                     has_w ? dw + w_at : nullptr, dlam == nullptr ? nullptr : dlam + row);
      });
    }
  });
}

#define SPARSETOPK_ISOTONIC(T)                                                                                      \
  template void solve_permutahedron(PhiName, double, std::size_t, std::size_t, const T*, const T*, const T*, T*,    \
                                    std::int32_t*, std::int32_t*, std::size_t);                                     \
  template void respond_permutahedron(double, std::size_t, std::size_t, const T*, const T*, const T*, T*,           \
                                      const Kept<T>&, std::size_t);                                                 \
  template void pull_permutahedron(double, std::size_t, std::size_t, const T*, const Kept<const T>&, const T*,      \
                                   const Pulled<T>&, double, std::size_t);                                          \
  template bool permutahedron_forward(double, std::size_t, const FloatRows&, const FloatRows&, const double*, T*,   \
                                      const Saved<T>&, std::size_t);                                                \
  template void permutahedron_backward(double, std::size_t, std::size_t, std::size_t, std::size_t, const Saved<T>&, \
                                       const double*, const T*, T*, float*, double*, double, std::size_t);          \
  template void permutahedron_backward(double, std::size_t, std::size_t, std::size_t, std::size_t, const Saved<T>&, \
                                       const double*, const T*, T*, double*, double*, double, std::size_t);
SPARSETOPK_ISOTONIC(float)
SPARSETOPK_ISOTONIC(double)
#undef SPARSETOPK_ISOTONIC

void solve_isotonic(PhiName phi, double exponent, std::size_t rows, std::size_t n, const double* s, const double* w,
                    const double* lam, double* d, std::int64_t* block) {
  Workspace work(n);
  for (std::size_t row = 0; row < rows; ++row) {
    look_now_and_then();
    const std::size_t at = row * n;
    const Row one(s + at, w + at, lam[row], n);
    solve_row(phi, exponent, one, work, [&](std::size_t first, std::size_t end, double delta) {
      for (std::size_t i = first; i < end; ++i) {
        d[at + i] = one.d(i, first, delta);
        block[at + i] = std::int64_t(first);
      }
    });
  }
}

void argsort_descending(std::size_t rows, std::size_t n, const float* x, std::int64_t* order) {
  argsort_rows(rows, n, x, order);
}

void argsort_descending(std::size_t rows, std::size_t n, const double* x, std::int64_t* order) {
  argsort_rows(rows, n, x, order);
}

}  // namespace sparsetopk
