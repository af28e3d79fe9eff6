// The scalar functions of each operator: what src/sparsetopk/_maths/scalars.py is for the front-ends.
//
// With t = (a - v)/lam the distance of a key (x, or |x|) to the threshold v, an operator is:
//   zero           the t at which an entry starts to be selected
//   top(v)         the t at which it is selected whole: response(top) = prime(v)
//   at(t)          S(t) and S'(t) for zero < t < top
//   prime, second  phi'(v) and phi''(v)
//   inverse(y)     t with S(t) = y, for masks
//   conjugate(t)   R*(lam t)/lam = t S(t) - R(S(t))/lam, for masks and t <= 1
//   penalty(y)     R(y)/lam, for masks
//   alone(a, lam)  the t of an entry that is selected whole and shares its threshold with no other
//   kAbsolute      keys are |x|;  kFloor  the threshold is never below 0;  kMagnitude  phi is x^2/2
//   kVector        S is plain arithmetic that vectorises;  kCheap  and costs a few multiplications at most
//   kPlain         R* is plain arithmetic too, for masks
#pragma once

#include <cmath>

#include "positions.hpp"
#include "power.hpp"
#include "two_sided.hpp"

namespace sparsetopk {
namespace SPARSETOPK_LEVEL {

// phi(x) = x: y in [0, 1].
template <class P>
struct Mask : P {
  static constexpr bool kAbsolute = false, kFloor = false, kMagnitude = false;
  static constexpr double zero = 0;
  double top(double) const { return 1; }
  double prime(double) const { return 1; }
  double second() const { return 0; }
  double alone(double, double) const { return 1; }
  double penalty(double y) const { return y * P::inverse(y) * (P::exponent / (P::exponent + 1)); }
  double conjugate(double t) const { return t > 0 ? P::response(t) * t / (P::exponent + 1) : 0.0; }
};

// phi(x) = |x|: the same on |x|, with v >= 0.
template <class P>
struct Sign : Mask<P> {
  static constexpr bool kAbsolute = true, kFloor = true;
};

// phi(x) = x^2/2, on |x|.
template <class P>
struct Magnitude : P {
  static constexpr bool kAbsolute = true, kFloor = false, kMagnitude = true;
  static constexpr double zero = 0;
  double top(double v) const { return v > 0 ? P::inverse(v) : 0; }
  double prime(double v) const { return v; }
  double second() const { return 1; }
  double alone(double a, double lam) const { return P::lone(lam, a); }
};

// The two-sided p-norm, on [-1, 1]. The smaller of y and 1 - y is computed, which keeps its relative precision.
template <class H>
struct TwoSided : H {
  static constexpr bool kAbsolute = false, kFloor = false, kMagnitude = false;
  static constexpr double zero = -1;
  double top(double) const { return 1; }
  double prime(double) const { return 1; }
  double second() const { return 0; }
  double inverse(double y) const {
    return H::exponent == 1 ? 2 * y - 1 : ::pow(y, 1 / H::exponent) - ::pow(1 - y, 1 / H::exponent);
  }
  double alone(double, double) const { return 1; }
  Response at(double t) const {
    const Response half = H::half(t < 0 ? -t : t);
    return {t > 0 ? 1 - half.value : half.value, half.slope};
  }
  double penalty(double y) const { return (H::power(y) + H::power(1 - y)) * (H::exponent / (H::exponent + 1)); }
  double conjugate(double t) const {
    const double y = t > -1 ? at(t).value : 0;
    return (y > 0 ? t * y : 0) - penalty(y);
  }
};

// S(t) = t, so p = 2.
template <class Kind>
constexpr bool kLinear = std::is_base_of<Power<1>, Kind>::value;

}  // namespace SPARSETOPK_LEVEL
}  // namespace sparsetopk
