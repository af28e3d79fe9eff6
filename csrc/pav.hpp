// The isotonic problem of one row, by pool adjacent violators (Best et al., 2000):
//
//   min_{v_1 >= ... >= v_n}  sum_i R*(s_i - v_i) + w_i phi(v_i),   s and w in decreasing order.
//
// No framework. The answer is d_i = (s_i - v_i)/lam, block by block: emit(first, end, delta) is called for every block,
// in order. A block keeps delta = (s_first - g)/lam instead of its threshold g, so that neither a common shift of s
// nor a tiny lam costs digits. See src/sparsetopk/_numpy/pav.py for the same in NumPy.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>

#include "power.hpp"

namespace sparsetopk {

using SPARSETOPK_LEVEL::Power;

// f with t -> t^exponent.
template <class F>
void with_power(double exponent, const F& f) {
  if (exponent == 1) return f(Power<1>{});
  if (exponent == 2) return f(Power<2>{});
  if (exponent == 3) return f(Power<3>{});
  f(Power<0>{exponent});
}

namespace pav {

constexpr double kEps = std::numeric_limits<double>::epsilon();
constexpr double kInf = std::numeric_limits<double>::infinity();

class Row {
 public:
  Row(const double* s_, const double* w_, double lam_, std::size_t n_)
      : s(s_), w(w_), lam(lam_), n(n_), inverse_(1 / lam), rest_(1) {
    if (lam < 1e-290 || lam > 1e290) inverse_ = rest_ = 1 / std::sqrt(lam);  // 1/lam may overflow, or lose digits
  }
  // In units of lam.
  double distance(double from, double to) const { return (from - to) * inverse_ * rest_; }
  // d of an entry of the block with that first entry and delta.
  double d(std::size_t i, std::size_t first, double delta) const { return distance(s[i], s[first]) + delta; }

  const double *s, *w;
  double lam;
  std::size_t n;

 private:
  double inverse_, rest_;
};

// What rows of length n need to work in. Not initialised: pages that are never written cost nothing.
struct Workspace {
  explicit Workspace(std::size_t n)
      : other(new std::size_t[n]), delta(new double[n]), weight(new double[n]), stack(new Pool[n + 1]) {}
  // A block on the stack, with the sum of (s_i - s_first)/lam and that of w.
  struct Pool {
    std::size_t first;
    double offset, weight, delta;
  };
  std::unique_ptr<std::size_t[]> other;
  std::unique_ptr<double[]> delta, weight;
  std::unique_ptr<Pool[]> stack;
};

// An increasing function at one point; ``size`` is that of the terms which ``value`` is the sum of.
struct At {
  double value, slope, size;
};

// The root of f in [lo, hi] by Newton's method kept inside the bracket, as increasing_root in NumPy: a step
// that leaves it, or three that do not halve it, give way to bisection. Done when the value is within a few
// roundings of its terms, or when the bracket is a few roundings wide.
template <class F>
double increasing_root(const F& f, double lo, double hi, double start) {
  double x = std::min(std::max(start, lo), hi), best = x, residual = kInf, width = hi - lo;
  for (int iteration = 0; iteration < 4 * 1200; ++iteration) {  // enough halvings to reach any double
    const At at = f(x);
    if (at.value != at.value) break;
    if (at.value <= 0) lo = x;
    if (at.value >= 0) hi = x;
    if (std::fabs(at.value) < residual) {
      best = x;
      residual = std::fabs(at.value);
    }
    const double rounding = kEps * std::fabs(x), middle = lo + (hi - lo) / 2;
    if (residual <= 4 * kEps * at.size || hi - lo <= 4 * rounding || middle <= lo || middle >= hi) break;
    double step = at.value / at.slope;
    if (std::fabs(step) <= rounding) step = std::copysign(2 * rounding, at.value);
    bool newton = x - step > lo && x - step < hi;
    if (iteration % 4 == 3) {
      newton = newton && hi - lo <= width / 2;
      width = hi - lo;
    }
    x = newton ? x - step : middle;
  }
  return best;
}

// |t|^e and its slope for t of either sign.
template <class P>
double response(const P& power, double t) {
  return std::copysign(power.response(std::fabs(t)), t);
}
template <class P>
double slope(const P& power, double t) {
  return power.slope(std::fabs(t));
}

// prime and second are phi' and phi''; alone is d of an entry that shares its threshold with no other,
// S(d) = w phi'(s - lam d).
struct Identity {
  double prime(double) const { return 1; }
  double second(double) const { return 0; }
  template <class P>
  double alone(double, double w, double, const P& power) const {
    return std::copysign(power.inverse(std::fabs(w)), w);
  }
};

struct HalfSquare {
  double prime(double g) const { return g; }
  double second(double) const { return 1; }
  // d^e + lam w d = w s
  template <class P>
  double alone(double s, double w, double lam, const P& power) const {
    return power.lone(lam * w, w * s);
  }
};

struct Exp {
  // Beyond the largest float only the sign of a residual matters.
  double prime(double g) const { return std::exp(std::min(g - 1, 709.7)); }
  double second(double g) const { return prime(g); }
  // d^e = w exp(s - lam d - 1), solved for log d: e log d + lam d = log w + s - 1 overflows nowhere.
  template <class P>
  double alone(double s, double w, double lam, const P& power) const {
    if (!(w > 0)) return 0;
    const double target = std::log(w) + s - 1, e = power.exponent;
    // Both terms on the left increase, so the sign at d = 1 tells on which side of it the root lies.
    const bool above = target > lam;
    const double hi = std::min(target / e, above ? std::log(std::max(target / lam, 1.0)) : 0.0);
    const auto equation = [&](double log_d) {
      const double linear = lam * std::exp(log_d);
      return At{e * log_d + linear - target, e + linear, std::fabs(e * log_d) + std::fabs(target)};
    };
    return std::exp(increasing_root(equation, above ? 0 : (target - lam) / e, hi, hi));
  }
};

// Closed-form merges, for p = 2: delta of a block from its size, the sum of (s_i - s_first)/lam and that of w.
inline double pooled(const Identity&, double size, double offset, double weight, double, double) {
  return (weight - offset) / size;
}
inline double pooled(const HalfSquare&, double size, double offset, double weight, double s, double lam) {
  return (s * weight - offset) / (size + lam * weight);
}

// p = 2: the classic stack of blocks. Every entry is pushed once and merged at most once: O(n).
template <class Phi, class Emit>
void solve_stack(const Row& row, const Phi& phi, Workspace& work, const Emit& emit) {
  const Power<1> power{};
  using Pool = Workspace::Pool;
  // The last block is beside the stack, in registers, and at the bottom of the stack is one that nothing merges with.
  Pool* const stack = work.stack.get();
  std::size_t top = 0;
  Pool last{0, 0, 0, -kInf};
  const auto gap = [&](const Pool& left, const Pool& right) {
    return row.distance(row.s[left.first], row.s[right.first]);
  };
  const auto violate = [&](const Pool& left, const Pool& right) { return left.delta - right.delta > gap(left, right); };
  const auto merged = [&](const Pool& left, const Pool& right, std::size_t end) {
    const double offset = left.offset + (right.offset - double(end - right.first) * gap(left, right));
    const double weight = left.weight + right.weight;
    return Pool{left.first, offset, weight,
                pooled(phi, double(end - left.first), offset, weight, row.s[left.first], row.lam)};
  };
  for (std::size_t i = 0; i < row.n; ++i) {
    const Pool now{i, 0, row.w[i], phi.alone(row.s[i], row.w[i], row.lam, power)};
    if (!violate(last, now)) {
      stack[top++] = last;
      last = now;
      continue;
    }
    for (last = merged(last, now, i + 1); violate(stack[top - 1], last); --top)
      last = merged(stack[top - 1], last, i + 1);
  }
  stack[top] = last;
  for (std::size_t block = 1; block <= top; ++block)
    emit(stack[block].first, block < top ? stack[block + 1].first : row.n, stack[block].delta);
}

// Any p and phi. Solved neighbours are merged in pairs of equal length. A block contributes
//   sum_B S((s_i - g)/lam) - w_i phi'(g),
// which is 0 at its own threshold and decreases in g, so what two neighbours pool is one scalar root: the last
// blocks of the left one with thresholds below g, the first ones of the right one with thresholds above. Where
// nothing pools a merge costs O(1); all of them together cost O(n log n) at most, times the steps of Newton.
template <class P, class Phi>
class Merger {
 public:
  Merger(const Row& row, const P& power, const Phi& phi, Workspace& work)
      : row_(row), power_(power), phi_(phi), work_(work) {}

  template <class Emit>
  void solve(const Emit& emit) {
    for (std::size_t i = 0; i < row_.n; ++i) {
      work_.other[i] = i;
      work_.weight[i] = row_.w[i];
      work_.delta[i] = phi_.alone(row_.s[i], row_.w[i], row_.lam, power_);
      for (std::size_t width = 1; (i + 1) % (2 * width) == 0; width *= 2)
        merge(i + 1 - 2 * width, i + 1 - width, i + 1);
    }
    // What is left over are solved pieces of decreasing length, one for every bit of n.
    for (std::size_t width = 1, end = row_.n; width <= row_.n; width *= 2) {
      if (!(row_.n & width)) continue;
      if (end < row_.n) merge(end - width, end, row_.n);
      end -= width;
    }
    for (std::size_t first = 0; first < row_.n; first = work_.other[first] + 1)
      emit(first, work_.other[first] + 1, work_.delta[first]);
  }

 private:
  struct Span {
    std::size_t first, end;
    double weight;
  };

  // The blocks of [from, to) that a threshold at s_middle - lam x pools, middle being where two pieces meet.
  Span span(std::size_t from, std::size_t middle, std::size_t to, double x) const {
    const double pivot = row_.s[middle];
    const auto threshold = [&](std::size_t b) { return work_.delta[b] - row_.distance(row_.s[b], pivot); };
    Span span{work_.other[middle - 1], work_.other[middle] + 1, 0};
    span.weight = work_.weight[span.first] + work_.weight[middle];
    while (span.first > from) {
      const std::size_t next = work_.other[span.first - 1];
      if (!(threshold(next) > x)) break;
      span.first = next;
      span.weight += work_.weight[next];
    }
    while (span.end < to) {
      if (!(threshold(span.end) < x)) break;
      span.weight += work_.weight[span.end];
      span.end = work_.other[span.end] + 1;
    }
    return span;
  }

  // Sums in lanes: the compiler may not reorder floating-point sums, but it can fill its vectors with these.
  At add_up(const double* s, std::size_t n, double pivot, double x) const {
    constexpr std::size_t kWidth = 8;
    double mass[kWidth] = {}, rise[kWidth] = {}, size[kWidth] = {};
    const auto add = [&](double value, std::size_t j) {
      const double t = row_.distance(value, pivot) + x, y = power_.response(std::fabs(t));
      mass[j] += std::copysign(y, t);
      size[j] += y;
      rise[j] += slope(power_, t);
    };
    std::size_t i = 0;
    for (; i + kWidth <= n; i += kWidth)
      for (std::size_t j = 0; j < kWidth; ++j) add(s[i + j], j);
    for (std::size_t j = 0; i < n; ++i, ++j) add(s[i], j);
    At at{0, 0, 0};
    for (std::size_t j = 0; j < std::min(n, kWidth); ++j) {
      at.value += mass[j];
      at.slope += rise[j];
      at.size += size[j];
    }
    return at;
  }

  // In pieces, so that the rounding of a long sum stays near that of its terms.
  At sums(const Span& span, double pivot, double x) const {
    constexpr std::size_t kPiece = 1024;
    At total{0, 0, 0};
    for (std::size_t i = span.first; i < span.end; i += kPiece) {
      const At piece = add_up(row_.s + i, std::min(kPiece, span.end - i), pivot, x);
      total.value += piece.value;
      total.slope += piece.slope;
      total.size += piece.size;
    }
    const double g = pivot - row_.lam * x, expected = phi_.prime(g) * span.weight;
    return {total.value - expected, total.slope + row_.lam * phi_.second(g) * span.weight,
            total.size + std::fabs(expected)};
  }

  void merge(std::size_t from, std::size_t middle, std::size_t to) {
    const std::size_t left = work_.other[middle - 1];
    const double pivot = row_.s[middle], lo = work_.delta[middle];
    const double hi = work_.delta[left] - row_.distance(row_.s[left], pivot);
    if (!(lo < hi)) return;  // the left threshold is the higher one, as it should
    const double share = double(middle - left) / double(work_.other[middle] + 1 - left);
    const auto equation = [&](double x) { return sums(span(from, middle, to, x), pivot, x); };
    const double x = increasing_root(equation, lo, hi, lo + share * (hi - lo));
    const Span pool = span(from, middle, to, x);
    work_.other[pool.first] = pool.end - 1;
    work_.other[pool.end - 1] = pool.first;
    work_.weight[pool.first] = pool.weight;
    work_.delta[pool.first] = x + row_.distance(row_.s[pool.first], pivot);
  }

  const Row& row_;
  const P power_;
  const Phi phi_;
  Workspace& work_;
};

// For phi = |.|: v = max(v, 0); what is moved to 0 stands alone there (Nemeth & Nemeth, 2012).
template <class Emit>
auto truncated(const Row& row, const Emit& emit) {
  return [&row, &emit](std::size_t first, std::size_t end, double delta) {
    if (!(row.s[first] - row.lam * delta < 0)) return emit(first, end, delta);
    for (std::size_t i = first; i < end; ++i) emit(i, i + 1, row.s[i] / row.lam);
  };
}

}  // namespace pav
}  // namespace sparsetopk
