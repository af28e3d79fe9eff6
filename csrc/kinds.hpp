// The scalar functions of each operator: what src/sparsetopk/regularizers.py and phis.py are for NumPy.
//
// With t = (x - v)/lam the distance of an entry to the threshold v, every operator is described by these
// (whether x or |x| is compared is the caller's affair):
//   zero           the t at which an entry starts to be selected
//   top(v)         the t at which it is selected whole: response(top) = prime(v)
//   response(t)    S(t) for zero < t < top
//   slope(t)       S'(t)
//   prime(v)       phi'(v)
//   second(v)      phi''(v)
//   alone(x, lam)  the t of an entry that is selected whole and shares its threshold with no other
#pragma once

#include <cmath>

namespace sparsetopk {

// t^e for the exponents e = q - 1 = 1/(p - 1) that have a closed form, and for any other.
template <int E>
struct Power {
  double exponent = E;
  template <class T>
  T response(T t) const {
    if constexpr (E == 1) return t;
    if constexpr (E == 2) return t * t;
    if constexpr (E == 3) return t * t * t;
  }
  template <class T>
  T slope(T t) const {
    if constexpr (E == 1) return T(1);
    if constexpr (E == 2) return 2 * t;
    if constexpr (E == 3) return 3 * t * t;
  }
};

template <>
struct Power<0> {
  double exponent;
  template <class T>
  T response(T t) const {
    return std::pow(t, T(exponent));
  }
  template <class T>
  T slope(T t) const {
    return T(exponent) * std::pow(t, T(exponent - 1));
  }
};

// phi(x) = x: y in [0, 1]. Also phi(x) = |x| on |x|, where the caller keeps v >= 0.
template <class P>
struct Mask : P {
  static constexpr double zero = 0;
  double top(double) const { return 1; }
  double prime(double) const { return 1; }
  double second(double) const { return 0; }
  double alone(double, double) const { return 1; }
};

// phi(x) = x^2/2 on |x|.
template <class P>
struct Magnitude : P {
  static constexpr double zero = 0;
  double top(double v) const { return v > 0 ? std::pow(v, 1 / P::exponent) : 0; }
  double prime(double v) const { return v; }
  double second(double) const { return 1; }
  // d >= 0 with d^e + lam d = x, by Newton from above: the left side is convex or concave, increasing.
  double alone(double x, double lam) const {
    if (!(x > 0)) return 0;
    if (P::exponent == 1) return x / (1 + lam);
    double lo = 0, hi = std::fmin(std::pow(x, 1 / P::exponent), x / lam), d = hi;
    for (int i = 0; i < 200; ++i) {
      double value = std::pow(d, P::exponent) + lam * d - x;
      (value > 0 ? hi : lo) = d;
      double next = d - value / (P::exponent * std::pow(d, P::exponent - 1) + lam);
      if (!(next > lo && next < hi)) next = lo + (hi - lo) / 2;
      if (std::fabs(next - d) <= 1e-16 * d) break;
      d = next;
    }
    return d;
  }
};

// The two-sided p-norm for p = 2, 3/2 and 4/3 (E = 1, 2, 3), on [-1, 1].
template <int E>
struct TwoSided {
  double exponent = E;
  static constexpr double zero = -1;
  template <class T>
  T response(T t) const {
    if constexpr (E == 1) return (1 + t) / 2;
    if constexpr (E == 2) return (1 + t * std::sqrt(2 - t * t)) / 2;
    if constexpr (E == 3) {
      T u = std::cbrt(2 + std::sqrt(4 + t * t * t * t * t * t));
      T c = (u - t * t / u + t) / 2;
      return c * c * c;
    }
  }
  template <class T>
  T slope(T t) const {
    if constexpr (E == 1) return T(0.5);
    if constexpr (E == 2) return (1 - t * t) / std::sqrt(2 - t * t);
    if constexpr (E == 3) {
      T u = std::cbrt(2 + std::sqrt(4 + t * t * t * t * t * t)), m = u - t * t / u;
      T a = (m + t) / 2, b = (m - t) / 2;  // y^(1/3) and (1-y)^(1/3)
      return 3 * a * a * b * b / (a * a + b * b);
    }
  }
  double top(double) const { return 1; }
  double prime(double) const { return 1; }
  double second(double) const { return 0; }
  double alone(double, double) const { return 1; }
};

}  // namespace sparsetopk
