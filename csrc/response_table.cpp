#include "response_table.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <mutex>

namespace sparsetopk {
namespace {

constexpr int kTerms = ResponseInterval::kTerms, kParts = ResponseInterval::kParts;

struct Point {
  double y, slope;  // slope is dy/d(1 - tau)
};

// y^a and (1-y)^a, and what the equation y^a - (1-y)^a = -tau says of u in y (1 + u).
class TwoSidedEquation {
 public:
  explicit TwoSidedEquation(double exponent) : e_(exponent), a_(1 / exponent) {}

  // At tau, with s = 1 - tau known as precisely. What ``start`` gives is off by 0.4 of itself at most, one step leaves
  // 3e-5 and two leave rounding alone, for any p from 1.05 to 20; the third is for p beyond.
  Point solve(double tau, double s) const {
    double y = start(tau, s);
    for (int i = 0; i < 3; ++i) y = std::min(y * (1 + change(y, tau, s)), 0.5);
    const double low = std::pow(y, a_), high = std::pow(1 - y, a_);
    return {y, e_ * y / (low + high * (y / (1 - y)))};
  }

 private:
  // For p < 2: y^a = s (1 - (1 - 2^-a) s^(e-1)). For p > 2: (1-y)^a = c with c (c - tau) = 4^-a (1 - tau^2), where the
  // right side stands for y^a (1-y)^a. Both are exact for p = 2, and at both ends for any p.
  double start(double tau, double s) const {
    constexpr double least = 1e-300;
    if (a_ < 1) return std::max(std::pow(s + (std::exp2(-a_) - 1) * std::pow(s, e_), e_), least);
    const double most = std::exp2(-2 * a_) * (1 + tau);
    const double rest = s * (1 - most) / (1 - tau / 2 + std::sqrt(tau * tau / 4 + most * s));  // 1 - c
    return std::max(-std::expm1(e_ * std::log1p(-rest)), least);
  }
  // u to the fourth order, by the inverse of the series F + F_1 (u + second u^2 + third u^3) = 0.
  double change(double y, double tau, double s) const {
    const double low = std::pow(y, a_), high = std::pow(1 - y, a_), ratio = y / (1 - y), other = high * ratio;
    const double residual = tau < 0.5 ? (low - high) + tau : (low - std::expm1(a_ * std::log1p(-y))) - s;
    const double first = -residual * e_ / (low + other);
    const double second = (a_ - 1) / 2 * (low - other * ratio) / (low + other);
    const double third = (a_ - 1) * (a_ - 2) / 6 * (low + other * ratio * ratio) / (low + other);
    const double u = first * (1 - first * (second - first * (2 * second * second - third)));
    return std::min(std::max(u, -0.5), 1.0);  // which it is, but where y is lost below the least double
  }
  double e_, a_;
};

// The monomial coefficients of the polynomial through values at nodes, by divided differences.
void interpolate(const std::array<double, kTerms>& nodes, std::array<double, kTerms> values, double* coefficients) {
  for (int order = 1; order < kTerms; ++order)
    for (int i = kTerms - 1; i >= order; --i) values[i] = (values[i] - values[i - 1]) / (nodes[i] - nodes[i - order]);
  std::fill_n(coefficients, kTerms, 0.0);
  for (int i = kTerms - 1; i >= 0; --i) {
    for (int j = kTerms - 1; j > 0; --j) coefficients[j] = coefficients[j - 1] - nodes[i] * coefficients[j];
    coefficients[0] = values[i] - nodes[i] * coefficients[0];
  }
}

// The interval [from, to] of z = tau, or of z = 1 - tau. The slope is interpolated at the nodes of Chebyshev, and y is
// its integral: a rounding of a value would be a large one of a slope.
ResponseInterval interval(const TwoSidedEquation& equation, double from, double to, bool of_tau) {
  const auto at = [&](double z) { return of_tau ? equation.solve(z, 1 - z) : equation.solve(1 - z, z); };
  ResponseInterval result{};
  const double half = (to - from) / 2;
  result.middle = from + half, result.scale = 1 / half;
  result.value = at(result.middle).y;
  std::array<double, kTerms> nodes, values;
  for (int i = 0; i < kTerms; ++i) {
    nodes[i] = std::cos(3.14159265358979323846 * (i + 0.5) / kTerms);
    const double slope = at(result.middle + half * nodes[i]).slope;
    values[i] = of_tau ? -slope : slope;
  }
  interpolate(nodes, values, result.slopes);
  return result;
}

ResponseTable make(double exponent) {
  // For p > 2 the response is steep in the middle, over a tau of about 2^-a.
  const int octaves = exponent > 1 ? 4 : int(std::min(1000.0, 1 / exponent)) + 7;
  const int last = ResponseTable::kOfTau + octaves * kParts;
  ResponseTable table{exponent, last, std::make_unique<ResponseInterval[]>(std::size_t(last) + 1)};
  const TwoSidedEquation equation(exponent);
  for (int i = 0; i < last; ++i) {
    const bool of_tau = i >= ResponseTable::kOfTau;
    const int index = of_tau ? i - ResponseTable::kOfTau : i;
    const double octave = std::ldexp(0.25, -(index / kParts)), width = octave / kParts;
    const double to = 2 * octave - width * (index % kParts);
    table.intervals[i] = interval(equation, to - width, to, of_tau);
  }
  table.intervals[last] = interval(equation, 0, std::ldexp(0.5, -octaves), true);
  return table;
}

}  // namespace

std::shared_ptr<const ResponseTable> response_table(double exponent) {
  static std::mutex mutex;
  static std::array<std::shared_ptr<const ResponseTable>, 8> kept;
  static std::size_t next = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& table : kept)
    if (table && table->exponent == exponent) return table;
  auto table = std::make_shared<const ResponseTable>(make(exponent));
  kept[next++ % kept.size()] = table;
  return table;
}

}  // namespace sparsetopk
