// Values of the isotonic problem: f_{phi,R}, and the conjugate of the unregularised one for w = 1_k.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

#include "isotonic.hpp"
#include "parallel.hpp"
#include "pav.hpp"

// After these, which say at which level.
#include "kinds.hpp"

namespace sparsetopk {
namespace {

using SPARSETOPK_LEVEL::Mask;

bool is_even(PhiName phi) { return phi == PhiName::half_square || phi == PhiName::abs; }
bool is_straight(PhiName phi) { return phi == PhiName::identity || phi == PhiName::abs; }

double phi_of(PhiName phi, double u) {
  if (phi == PhiName::half_square) return u * u / 2;
  if (phi == PhiName::exp) return std::exp(u - 1);
  return phi == PhiName::abs ? std::fabs(u) : u;
}

double prime_of(PhiName phi, double u) {
  if (phi == PhiName::half_square) return pav::HalfSquare{}.prime(u);
  return phi == PhiName::exp ? pav::Exp{}.prime(u) : 1;
}

// R/lam, S and R*/lam, of numbers of either sign.
template <class P>
struct PNorm {
  Mask<P> of;
  double penalty(double y) const { return of.penalty(std::fabs(y)); }
  double conjugate(double t) const { return of.conjugate(std::fabs(t)); }
  double response(double t) const { return std::copysign(of.response(std::fabs(t)), t); }
};

// One row of the isotonic problem in the order of x, and what a solve of it gives.
template <class T, class P>
class Row {
 public:
  Row(PhiName phi, P power, std::size_t n)
      : phi_(phi), reg_{{power}}, n_(n), a_(n), w_(n), d_(n), mass_(n), weight_(n), size_(n), block_(n), paired_(n) {}

  // False for a row without an answer.
  bool evaluate(const T* x, const T* w, double lam, T* y, T* value) {
    if (!(lam >= 0 && std::isfinite(lam))) return false;
    for (std::size_t i = 0; i < n_; ++i) {
      a_[i] = is_even(phi_) ? std::fabs(x[i]) : x[i];
      if (!std::isfinite(x[i]) || !std::isfinite(w[i]) || (phi_ != PhiName::identity && w[i] < 0)) return false;
    }
    // lam = 0 has no blocks: of a solve it needs the pairs alone.
    const T used = lam > 0 ? std::max(T(lam), std::numeric_limits<T>::min()) : T(1);
    solve_permutahedron<T>(phi_, reg_.of.exponent, 1, n_, a_.data(), w, &used, d_.data(), block_.data(), paired_.data(),
                           1);
    for (std::size_t i = 0; i < n_; ++i) w_[i] = double(w[paired_[i]]);
    const double found = lam > 0 ? soft(double(used), y) : hard(y);
    for (std::size_t i = 0; i < n_; ++i) y[i] = (is_even(phi_) && x[i] < 0 ? -y[i] : y[i]) + T(0);
    *value = T(found);
    return true;
  }

 private:
  double hard(T* y) const {
    double total = 0;
    for (std::size_t i = 0; i < n_; ++i) {
      total += phi_of(phi_, a_[i]) * w_[i];
      y[i] = T(prime_of(phi_, a_[i]) * w_[i]);
    }
    return total;
  }

  // R*(a - u) + sum_i w_i phi(u_i).
  double soft(double lam, T* y) {
    std::fill(mass_.begin(), mass_.end(), 0), std::fill(weight_.begin(), weight_.end(), 0);
    std::fill(size_.begin(), size_.end(), 0);
    for (std::size_t i = 0; i < n_; ++i) {
      const std::size_t block = std::size_t(block_[i]);
      mass_[block] += reg_.response(d_[i]), weight_[block] += w_[i], ++size_[block];
    }
    double total = 0;
    for (std::size_t i = 0; i < n_; ++i) {
      const std::size_t block = std::size_t(block_[i]);
      const double a = double(a_[i]), d = double(d_[i]), lam_d = lam * d;
      const bool pinned =
          phi_ == PhiName::abs && lam_d >= a * (1 - 4 * double(std::numeric_limits<T>::epsilon())) && size_[block] == 1;
      double u = pinned ? 0 : a - lam_d;
      // Precise also where u is tiny.
      if (phi_ == PhiName::half_square && weight_[block] > 0) u = mass_[block] / weight_[block];
      const bool lone = is_straight(phi_) && size_[block] == 1 && !pinned;
      total += lone ? a * w_[i] - lam * reg_.penalty(w_[i]) : lam * reg_.conjugate(d) + w_[i] * phi_of(phi_, u);
      y[i] = T(lone ? w_[i] : reg_.response(d));
    }
    return total;
  }

  PhiName phi_;
  PNorm<P> reg_;
  std::size_t n_;
  std::vector<T> a_;
  std::vector<double> w_;
  std::vector<T> d_;
  std::vector<double> mass_, weight_, size_;  // of every block
  std::vector<std::int32_t> block_, paired_;
};

// The conjugate of one row: z_i = min(y_i/g, 1), where the largest entries stand alone and the others share what these
// leave of k.
template <class T>
class ConjugateRow {
 public:
  ConjugateRow(PhiName phi, std::size_t n) : phi_(phi), n_(n), s_(n), sums_(n + 1) {}

  void evaluate(const T* x, double k, T* value, T* in_x, T* in_k) {
    const bool bad = !(k >= 0 && k <= double(n_)) || std::any_of(x, x + n_, [](T one) { return std::isnan(one); });
    const auto is_outside = [this](T one) { return !std::isfinite(one) || (phi_ == PhiName::exp && one < 0); };
    const bool outside = std::any_of(x, x + n_, is_outside);
    if (bad || outside) return fill(bad ? NAN : 0, bad ? NAN : HUGE_VAL, value, in_x, in_k);
    std::transform(x, x + n_, s_.begin(), [](T one) { return std::fabs(double(one)); });
    std::sort(s_.begin(), s_.end());
    sums_[0] = 0;
    std::partial_sum(s_.begin(), s_.end(), sums_.begin() + 1);
    const std::size_t alone = count_alone(k);
    const double left = k - double(alone), mass = sums_[n_ - alone];
    if (!(left > 0) && mass > 0) return fill(0, HUGE_VAL, value, in_x, in_k);
    const double mean = left > 0 ? mass / left : 0;
    double total = left > 0 ? left * conjugate(mean) : 0;
    for (std::size_t i = n_ - alone; i < n_; ++i) total += conjugate(s_[i]);
    const double least = alone > 0 ? s_[n_ - alone] : HUGE_VAL, shared = left > 0 ? slope(mean) : 0;
    *value = T(total), *in_k = T(left > 0 ? conjugate(mean) - mean * slope(mean) : 0);
    for (std::size_t i = 0; i < n_; ++i) {
      const double size = std::fabs(double(x[i])), found = size >= least ? slope(size) : shared;
      in_x[i] = T(x[i] < 0 ? -found : found);  // at the kink of |.| that of the right, as JAX has it
    }
  }

 private:
  void fill(double slope, double found, T* value, T* in_x, T* in_k) const {
    std::fill_n(in_x, n_, T(slope));
    *value = T(found), *in_k = T(slope);
  }

  // Those at least the mean that is left for them, and so are all that are larger.
  std::size_t count_alone(double k) const {
    std::size_t count = 0;
    while (count < n_) {
      const double left = k - double(count);
      if (!(left >= 1 && s_[n_ - count - 1] * left >= sums_[n_ - count])) break;
      ++count;
    }
    return count;
  }

  // phi* and its slope; that of y log(y) at 0 is kept finite.
  double conjugate(double y) const { return phi_ == PhiName::half_square ? y * y / 2 : y * std::log(clipped(y)); }
  double slope(double y) const {
    if (phi_ == PhiName::half_square) return y;
    return std::log(clipped(y)) + (y >= double(std::numeric_limits<T>::min()) ? 1 : 0);
  }
  static double clipped(double y) { return std::max(y, double(std::numeric_limits<T>::min())); }

  PhiName phi_;
  std::size_t n_;
  std::vector<double> s_, sums_;
};

// f(row, i) for every row, with one that is made for some of them.
template <class Make, class F>
void for_each_row(std::size_t rows, std::size_t n, std::size_t threads, const Make& make, const F& f) {
  constexpr std::size_t kEntries = 1 << 11;  // that a thread is given at once
  const std::size_t together = std::max<std::size_t>(1, kEntries / std::max<std::size_t>(n, 1));
  parallel_for((rows + together - 1) / together, threads, [&](std::size_t part) {
    auto row = make();
    for (std::size_t i = part * together; i < std::min(rows, (part + 1) * together); ++i) {
      look_now_and_then();
      f(row, i);
    }
  });
}

}  // namespace

template <class T>
void evaluate_permutahedron(PhiName phi, double exponent, std::size_t rows, std::size_t n, const T* x, const T* w,
                            const T* lam, T* y, T* value, std::size_t threads) {
  with_power(exponent, [&](auto power) {
    const auto make = [&] { return Row<T, decltype(power)>(phi, power, n); };
    for_each_row(rows, n, threads, make, [&](auto& row, std::size_t i) {
      if (row.evaluate(x + i * n, w + i * n, double(lam[i]), y + i * n, value + i)) return;
      std::fill_n(y + i * n, n, std::numeric_limits<T>::quiet_NaN());
      value[i] = std::numeric_limits<T>::quiet_NaN();
    });
  });
}

template <class T>
void conjugate_of_top_k(PhiName phi, std::size_t rows, std::size_t n, const T* x, const double* k, T* value, T* in_x,
                        T* in_k, std::size_t threads) {
  const auto make = [&] { return ConjugateRow<T>(phi, n); };
  for_each_row(rows, n, threads, make, [&](ConjugateRow<T>& row, std::size_t i) {
    row.evaluate(x + i * n, k[i], value + i, in_x + i * n, in_k + i);
  });
}

#define SPARSETOPK_VALUES(T)                                                                                        \
  template void evaluate_permutahedron(PhiName, double, std::size_t, std::size_t, const T*, const T*, const T*, T*, \
                                       T*, std::size_t);                                                            \
  template void conjugate_of_top_k(PhiName, std::size_t, std::size_t, const T*, const double*, T*, T*, T*, std::size_t);
SPARSETOPK_VALUES(float)
SPARSETOPK_VALUES(double)
#undef SPARSETOPK_VALUES

}  // namespace sparsetopk
