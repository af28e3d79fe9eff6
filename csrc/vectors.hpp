// Vectors as wide as the instruction set has them, with a row in every lane: loads and stores turn rows into lanes.
#pragma once

#include <cmath>
#include <utility>

#include "cpu.hpp"
#include "tiles.hpp"

#ifdef SPARSETOPK_X86
#include <immintrin.h>
#endif

namespace sparsetopk {
namespace SPARSETOPK_LEVEL {

#if defined(__AVX512F__)
constexpr std::size_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr std::size_t kVectorBytes = 32;
#else
constexpr std::size_t kVectorBytes = 16;
#endif

template <class T>
struct VectorTypes;
template <>
struct VectorTypes<float> {
  typedef float values __attribute__((vector_size(kVectorBytes)));
  typedef std::int32_t flags __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VectorTypes<double> {
  typedef double values __attribute__((vector_size(kVectorBytes)));
  typedef std::int64_t flags __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using Vector = typename VectorTypes<T>::values;
template <class T>
using Flags = typename VectorTypes<T>::flags;  // -1 for true, 0 for false
template <class T>
constexpr std::size_t kWidth = kVectorBytes / sizeof(T);

template <class T>
inline Vector<T> all_lanes(T value) {
  return Vector<T>{} + value;
}

// The larger and the smaller, b where a or b is NaN: one instruction, where compilers take two next to a constant.
#ifdef SPARSETOPK_X86
#if defined(__AVX512F__)
#define SPARSETOPK_LANES(name, bits)                                                                           \
  if constexpr (bits == 32) return (V)_mm512_mask_##name##_ps((__m512)a, __mmask16(-1), (__m512)a, (__m512)b); \
  if constexpr (bits == 64) return (V)_mm512_mask_##name##_pd((__m512d)a, __mmask8(-1), (__m512d)a, (__m512d)b);
#elif defined(__AVX2__)
#define SPARSETOPK_LANES(name, bits)                                            \
  if constexpr (bits == 32) return (V)_mm256_##name##_ps((__m256)a, (__m256)b); \
  if constexpr (bits == 64) return (V)_mm256_##name##_pd((__m256d)a, (__m256d)b);
#else
#define SPARSETOPK_LANES(name, bits)                                         \
  if constexpr (bits == 32) return (V)_mm_##name##_ps((__m128)a, (__m128)b); \
  if constexpr (bits == 64) return (V)_mm_##name##_pd((__m128d)a, (__m128d)b);
#endif
template <class V>
inline V larger_lanes(V a, V b) {
  SPARSETOPK_LANES(max, 8 * sizeof(a[0]))
}
template <class V>
inline V smaller_lanes(V a, V b) {
  SPARSETOPK_LANES(min, 8 * sizeof(a[0]))
}
#undef SPARSETOPK_LANES
#else
template <class V>
inline V larger_lanes(V a, V b) {
  return a > b ? a : b;
}
template <class V>
inline V smaller_lanes(V a, V b) {
  return a < b ? a : b;
}
#endif
template <class V>
inline V clip_lanes(V t, V low, V high) {
  return smaller_lanes(larger_lanes(t, low), high);
}
template <class V>
inline V absolute_lanes(V a) {
  using F = Flags<typename std::decay<decltype(a[0])>::type>;
  return (V)((F)a & ~(F)-V{});  // all bits but the sign
}
template <class V>
inline V sqrt_lanes(V a) {
  for (std::size_t i = 0; i < sizeof(V) / sizeof(a[0]); ++i) a[i] = sizeof(a[0]) == 4 ? ::sqrtf(a[i]) : ::sqrt(a[i]);
  return a;
}

// Bit i is set if lane i is true.
template <class F>
inline unsigned bits_of(F flags) {
#if defined(SPARSETOPK_X86) && defined(__AVX512DQ__)
  if constexpr (sizeof(flags[0]) == 4) return unsigned(_mm512_movepi32_mask((__m512i)flags));
  if constexpr (sizeof(flags[0]) == 8) return unsigned(_mm512_movepi64_mask((__m512i)flags));
#elif defined(SPARSETOPK_X86) && defined(__AVX2__)
  if constexpr (sizeof(flags[0]) == 4) return unsigned(_mm256_movemask_ps((__m256)flags));
  if constexpr (sizeof(flags[0]) == 8) return unsigned(_mm256_movemask_pd((__m256d)flags));
#elif defined(SPARSETOPK_X86)
  if constexpr (sizeof(flags[0]) == 4) return unsigned(_mm_movemask_ps((__m128)flags));
  if constexpr (sizeof(flags[0]) == 8) return unsigned(_mm_movemask_pd((__m128d)flags));
#endif
  unsigned bits = 0;
  for (unsigned i = 0; i < sizeof(F) / sizeof(flags[0]); ++i) bits |= unsigned(flags[i] != 0) << i;
  return bits;
}

// a and b in turn, from their first halves and from their second.
template <class V, std::size_t... I>
inline void interleave(V a, V b, V& first, V& second, std::index_sequence<I...>) {
  constexpr int kHalf = sizeof...(I) / 2, kAll = sizeof...(I);
#if defined(__clang__)
  first = __builtin_shufflevector(a, b, int(I / 2 + I % 2 * kAll)...);
  second = __builtin_shufflevector(a, b, int(kHalf + I / 2 + I % 2 * kAll)...);
#else
  using F = Flags<typename std::decay<decltype(a[0])>::type>;
  first = __builtin_shuffle(a, b, F{int(I / 2 + I % 2 * kAll)...});
  second = __builtin_shuffle(a, b, F{int(kHalf + I / 2 + I % 2 * kAll)...});
#endif
}

// As many rows as lanes, ``kColumns`` to a row, become lanes, or (from lanes) rows: ``kStages`` perfect shuffles of all.
template <std::size_t kStages, std::size_t kVectors, class V>
inline __attribute__((always_inline)) void shuffle(V (&rows)[kVectors]) {
  if constexpr (kStages > 0) {
    V turned[kVectors];
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kVectors / 2; ++i)
      interleave(rows[i], rows[i + kVectors / 2], turned[2 * i], turned[2 * i + 1],
                 std::make_index_sequence<sizeof(V) / sizeof(rows[0][0])>{});
    shuffle<kStages - 1>(turned);
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kVectors; ++i) rows[i] = turned[i];
  }
}
constexpr std::size_t log2_of(std::size_t n) { return n <= 1 ? 0 : 1 + log2_of(n / 2); }

// As many floats as a vector has doubles.
typedef float FewFloats __attribute__((vector_size(kVectorBytes / 2)));

// As many entries as lanes, widened to T; and the first of them, with 0 behind.
template <class X, class T = Wide<X>>
inline Vector<T> load(const X* x) {
  Vector<T> v;
  if constexpr (std::is_same<X, T>::value) {
    std::memcpy(&v, x, sizeof(v));
  } else if constexpr (std::is_same<X, float>::value) {
    FewFloats some;
    std::memcpy(&some, x, sizeof(some));
    v = __builtin_convertvector(some, Vector<T>);
  } else {
    Wide<X> wide[kWidth<T>];
    widen_all(x, kWidth<T>, wide);
    for (std::size_t i = 0; i < kWidth<T>; ++i) v[i] = T(wide[i]);
  }
  return v;
}
template <class X, class T = Wide<X>>
inline Vector<T> load_some(const X* x, std::size_t count) {
  T wide[kWidth<T>] = {};
  for (std::size_t i = 0; i < count; ++i) wide[i] = T(widen(x[i]));
  return load(wide);
}
template <class X, class T = Wide<X>>
inline void store(Vector<T> v, X* x) {
  if constexpr (std::is_same<X, T>::value) {
    std::memcpy(x, &v, sizeof(v));
  } else if constexpr (std::is_same<X, float>::value) {
    const FewFloats some = __builtin_convertvector(v, FewFloats);
    std::memcpy(x, &some, sizeof(some));
  } else {
    Wide<X> wide[kWidth<T>];
    for (std::size_t i = 0; i < kWidth<T>; ++i) wide[i] = Wide<X>(v[i]);
    narrow_all(wide, kWidth<T>, x);
  }
}
template <class X, class T = Wide<X>>
inline void store_some(Vector<T> v, X* x, std::size_t count) {
  T wide[kWidth<T>];
  std::memcpy(wide, &v, sizeof(v));
  for (std::size_t i = 0; i < count; ++i) x[i] = narrow<X>(Wide<X>(wide[i]));
}

}  // namespace SPARSETOPK_LEVEL
}  // namespace sparsetopk
