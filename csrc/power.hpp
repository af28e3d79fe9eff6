// t^e, its slope and its inverse, with e = q - 1 = 1/(p - 1): the response of the p-norm, for t >= 0. One copy for the
// kernels and for PAV.
#pragma once

#include <cmath>

#ifndef SPARSETOPK_LEVEL  // where it is used outside of the kernels
#define SPARSETOPK_LEVEL baseline
#endif

namespace sparsetopk {
namespace SPARSETOPK_LEVEL {

struct Response {
  double value, slope;
};

// d >= 0 with d^e + linear d = target > 0, from above: the left side is increasing, and convex or concave.
template <class P>
double lone_by_newton(const P& power, double linear, double target) {
  const double e = power.exponent, most = power.inverse(target), other = target / linear;
  double lo = 0, hi = other < most ? other : most, d = hi;
  for (int i = 0; i < 200; ++i) {
    const double y = power.response(d), value = y + linear * d - target;
    (value > 0 ? hi : lo) = d;
    const double next = d - value / (e * y / d + linear);
    // Before the bracket is asked: a last step by rounding alone may leave it, and half of it would be far away.
    if (::fabs(next - d) <= 4e-16 * d) return next;
    d = next > lo && next < hi ? next : lo + (hi - lo) / 2;
  }
  return d;
}

// For the exponents that have a closed form, and (E = 0) for any other. S(t) vectorises (kVector), and costs a
// few multiplications at most (kCheap).
template <int E>
struct Power {
  double exponent = E;
  static constexpr bool kVector = true, kCheap = true, kPlain = true;
  template <class A>
  A response(A t) const {
    if constexpr (E == 1) return t;
    if constexpr (E == 2) return t * t;
    if constexpr (E == 3) return t * t * t;
  }
  double slope(double t) const {
    if constexpr (E == 1) return 1;
    if constexpr (E == 2) return 2 * t;
    if constexpr (E == 3) return 3 * t * t;
  }
  Response at(double t) const { return {response(t), slope(t)}; }
  double inverse(double y) const {
    if constexpr (E == 1) return y;
    if constexpr (E == 2) return ::sqrt(y);
    if constexpr (E == 3) return ::cbrt(y);
  }
  // d >= 0 with d^e + linear d = target: of an entry that shares its threshold with no other, for phi = x^2/2.
  double lone(double linear, double target) const {
    if (!(target > 0)) return 0;
    if constexpr (E == 1) return target / (1 + linear);
    if constexpr (E == 2) return target / (linear / 2 + ::hypot(linear / 2, ::sqrt(target)));
    if constexpr (E == 3) return lone_by_newton(*this, linear, target);
  }
};

template <>
struct Power<0> {
  double exponent;
  static constexpr bool kVector = false, kCheap = false, kPlain = false;
  // Never infinite: t may be the root of the largest double, rounded up.
  double response(double t) const {
    const double y = ::pow(t, exponent);
    return y > 1.7976931348623157e308 ? 1.7976931348623157e308 : y;
  }
  // For p > 2 unbounded at 0: arguments nearer to it share one, as in NumPy.
  double slope(double t) const { return exponent * ::pow(exponent < 1 && t < 1e-140 ? 1e-140 : t, exponent - 1); }
  Response at(double t) const {
    if (exponent < 1 && t < 1e-140) return {response(t), slope(t)};
    const double value = response(t);
    return {value, t > 0 ? exponent * (value / t) : 0.0};
  }
  double inverse(double y) const {
    const double t = ::pow(y, 1 / exponent);
    return t > 1.7976931348623157e308 ? 1.7976931348623157e308 : t;
  }
  double lone(double linear, double target) const { return target > 0 ? lone_by_newton(*this, linear, target) : 0; }
};

}  // namespace SPARSETOPK_LEVEL
}  // namespace sparsetopk
