// S and S' of every operator on vectors, an entry to a lane: what kinds.hpp has for one number. Plain arithmetic, so that
// all instruction sets agree to the last bit.
#pragma once

#include "kinds.hpp"
#include "vectors.hpp"

namespace sparsetopk {
namespace SPARSETOPK_LEVEL {

// base^exponent for base >= 0 and any exponent > 0, between 2^-1000 and 2^1000, and 0 below: 2^(exponent log2 base). Of
// the digits of y it loses as many as log2 y has before its point, which t = 1 +- rounding loses too.
inline Vector<double> power_lanes(Vector<double> base, double exponent) {
  using V = Vector<double>;
  using F = Flags<double>;
  constexpr std::int64_t kOne = 0x3ff0000000000000, kHalf = 0x3fe6a09e667f3bcd;  // the bits of 1, and of 2^(-1/2)
  constexpr double kShift = 0x1.8p52;                                            // its last digit is 1
  // base = 2^whole m, with m from 2^(-1/2) to 2^(1/2); log m = 2 artanh s.
  const F bits = (F)base + (kOne - kHalf);
  const F biased = (bits >> 52) & 0x7ff;
  const V whole = (V)(biased | 0x4330000000000000) - (0x1p52 + 1023), m = (V)((F)base - ((biased - 1023) << 52));
  const V s = (m - 1) / (m + 1), square = s * s;
  V series{};
#pragma GCC unroll 12
  for (int i = 10; i >= 0; --i) series = series * square + 1.0 / (2 * i + 1);
  constexpr double kTwoOverLog2 = 2.8853900817779268;
  const V log2 = whole + s * series * kTwoOverLog2, limit = all_lanes(1000.0);
  const V z = log2 * exponent, near = clip_lanes(z, -limit, limit), shifted = near + kShift;
  // 2^z = 2^digits e^r.
  const V digits = shifted - kShift, r = (near - digits) * 0.6931471805599453;
  constexpr double kInverseFactorials[] = {
      1,          1,           1.0 / 2,      1.0 / 6,       1.0 / 24,       1.0 / 120,       1.0 / 720,
      1.0 / 5040, 1.0 / 40320, 1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};
  V power{};
#pragma GCC unroll 14
  for (int i = 13; i >= 0; --i) power = power * r + kInverseFactorials[i];
  const F scale = ((F)shifted - (F)all_lanes(kShift)) << 52;
  return z <= -limit ? V{} : (V)((F)power + scale);
}

template <class V>
struct Responses {
  V value, slope;
};

template <class V>
inline Responses<V> responses_of(const Power<1>&, V t) {
  return {t, V{} + 1};
}
inline Responses<Vector<double>> responses_of(const Power<2>&, Vector<double> t) { return {t * t, 2 * t}; }
inline Responses<Vector<double>> responses_of(const Power<3>&, Vector<double> t) { return {t * t * t, 3 * (t * t)}; }
inline Responses<Vector<double>> responses_of(const Power<0>& power, Vector<double> t) {
  const Vector<double> value = power_lanes(t, power.exponent);
  return {value, t > 0 ? power.exponent * value / t : Vector<double>{}};
}
// As a loop over the lanes, of which compilers make vectors.
template <class H>
inline Responses<Vector<double>> responses_of(const TwoSided<H>& kind, Vector<double> t) {
  double values[kWidth<double>], slopes[kWidth<double>], at[kWidth<double>];
  store(t, at);
  for (std::size_t i = 0; i < kWidth<double>; ++i) {
    const Response response = kind.at(at[i]);
    values[i] = response.value, slopes[i] = response.slope;
  }
  return {load(values), load(slopes)};
}

// ratio^(p-1) for ratio >= 0.
inline Vector<double> root_of(const Power<2>&, Vector<double> ratio) { return sqrt_lanes(ratio); }
template <int E>
inline Vector<double> root_of(const Power<E>& power, Vector<double> ratio) {
  return power_lanes(ratio, 1 / power.exponent);
}

}  // namespace SPARSETOPK_LEVEL
}  // namespace sparsetopk
