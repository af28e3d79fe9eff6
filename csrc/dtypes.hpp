// The element types: float and double are computed in as they are, 16-bit floats in float.
//
// Conversions are plain integer arithmetic that compilers vectorise, the same on every machine. Many halves at once are
// left to the processor, where it has instructions: these give the same, and no mode for subnormal numbers concerns them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace sparsetopk {
namespace SPARSETOPK_LEVEL {

struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline float widen(BFloat16 x) { return bit_cast<float>(std::uint32_t(x.bits) << 16); }
inline float widen(Half x) {
  const std::uint32_t sign = std::uint32_t(x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  const std::uint32_t normal = (rest << 13) + 0x38000000u;  // from half's bias of the exponent to float's
  // A subnormal half is a normal float. It is never made of a subnormal one, which the processor may be told to
  // take for 0: as the fraction of 2^-14 it comes out exactly.
  const std::uint32_t tiny = bit_cast<std::uint32_t>(bit_cast<float>(normal + 0x800000u) - 0x1p-14f);
  const std::uint32_t finite = rest < 0x400u ? tiny : normal;
  const std::uint32_t special = rest >= 0x7c00u ? 0x7f800000u : 0u;  // infinity and NaN
  return bit_cast<float>(finite | special | sign);
}

template <class X>
using Wide = decltype(widen(X{}));

// Rounds to nearest, ties to even.
template <class X>
inline X narrow(Wide<X> x) {
  return x;
}
template <>
inline BFloat16 narrow<BFloat16>(float x) {
  const std::uint32_t bits = bit_cast<std::uint32_t>(x);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {std::uint16_t(x != x ? 0x7fc0u : rounded)};
}
template <>
inline Half narrow<Half>(float x) {
  const std::uint32_t bits = bit_cast<std::uint32_t>(x), sign = (bits >> 16) & 0x8000u;
  const std::uint32_t size = bits & 0x7fffffffu;
  // Below 2^-14 half is subnormal: adding 0.5 lines its units up with float's last bits.
  const std::uint32_t tiny = bit_cast<std::uint32_t>(bit_cast<float>(size) + 0.5f) - 0x3f000000u;
  const std::uint32_t normal = (size - 0x38000000u + 0xfffu + ((size >> 13) & 1u)) >> 13;
  const std::uint32_t finite = size < 0x38800000u ? tiny : normal;
  const std::uint32_t all = size > 0x7f800000u ? 0x7e00u : size >= 0x47800000u ? 0x7c00u : finite;
  return {std::uint16_t(all | sign)};
}

template <class X>
inline void widen_all(const X* x, std::size_t n, Wide<X>* wide) {
  for (std::size_t i = 0; i < n; ++i) wide[i] = widen(x[i]);
}
template <class X>
inline void narrow_all(const Wide<X>* wide, std::size_t n, X* x) {
  for (std::size_t i = 0; i < n; ++i) x[i] = narrow<X>(wide[i]);
}
#ifdef __F16C__
template <>
inline void widen_all(const Half* x, std::size_t n, float* wide) {
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(wide + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
  for (; i < n; ++i) wide[i] = widen(x[i]);
}
template <>
inline void narrow_all(const float* wide, std::size_t n, Half* x) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(x + i), _mm256_cvtps_ph(_mm256_loadu_ps(wide + i), kNearest));
  for (; i < n; ++i) x[i] = narrow<Half>(wide[i]);
}
#endif

template <class X>
struct Limits;
template <>
struct Limits<double> {
  static constexpr double largest = 1.7976931348623157e308, epsilon = 2.220446049250313e-16, tiniest = 5e-324;
};
template <>
struct Limits<float> {
  static constexpr double largest = 3.4028234663852886e38, epsilon = 1.1920928955078125e-7;
  static constexpr float tiniest = 1e-45f;
};
template <>
struct Limits<Half> {
  static constexpr double largest = 65504;
};
template <>
struct Limits<BFloat16> {
  static constexpr double largest = 3.3895313892515355e38;
};

}  // namespace SPARSETOPK_LEVEL
}  // namespace sparsetopk
