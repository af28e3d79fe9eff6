// t^e and its slope, with e = q - 1 = 1/(p - 1): the response of the p-norm, for t >= 0.
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

// For the exponents that have a closed form, and (E = 0) for any other. S(t) vectorises (kVector), and costs a
// few multiplications at most (kCheap).
template <int E>
struct Power {
  double exponent = E;
  static constexpr bool kVector = true, kCheap = true;
  double response(double t) const {
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
};

template <>
struct Power<0> {
  double exponent;
  static constexpr bool kVector = false, kCheap = false;
  // Never infinite: t may be the root of the largest double, rounded up.
  double response(double t) const {
    const double y = ::pow(t, exponent);
    return y > 1.7976931348623157e308 ? 1.7976931348623157e308 : y;
  }
  // For p > 2 unbounded at 0: arguments nearer to it share one, as in NumPy.
  double slope(double t) const {
    return exponent * ::pow(exponent < 1 && t < 1e-140 ? 1e-140 : t, exponent - 1);
  }
  Response at(double t) const {
    if (exponent < 1 && t < 1e-140) return {response(t), slope(t)};
    const double value = response(t);
    return {value, t > 0 ? exponent * (value / t) : 0.0};
  }
};

}  // namespace SPARSETOPK_LEVEL
}  // namespace sparsetopk
