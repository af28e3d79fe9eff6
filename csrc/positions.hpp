// Which entries of a tile lie between two bounds: the one loop that compilers do not vectorise, so that it
// is written with intrinsics on x86.
#pragma once

#include "cpu.hpp"
#include "tiles.hpp"

#ifdef SPARSETOPK_X86
#include <immintrin.h>
#endif

namespace sparsetopk {
namespace SPARSETOPK_LEVEL {

// For every byte the positions of its set bits, in order.
struct SetBits {
  std::uint8_t position[256][8] = {};
  std::uint8_t count[256] = {};
  constexpr SetBits() {
    for (int byte = 0; byte < 256; ++byte)
      for (int bit = 0; bit < 8; ++bit)
        if (byte >> bit & 1) position[byte][count[byte]++] = std::uint8_t(bit);
  }
};
constexpr SetBits kSetBits;

// Bit i is set if from <= keys[i] <= to, for eight keys.
template <class T>
inline unsigned flags(const T* keys, T from, T to) {
  unsigned bits = 0;
  for (unsigned i = 0; i < 8; ++i) bits |= unsigned((keys[i] >= from) & (keys[i] <= to)) << i;
  return bits;
}
#if defined(SPARSETOPK_X86) && defined(__AVX2__)
template <>
inline unsigned flags<float>(const float* keys, float from, float to) {
  const __m256 a = _mm256_loadu_ps(keys);
  return unsigned(_mm256_movemask_ps(_mm256_and_ps(_mm256_cmp_ps(a, _mm256_set1_ps(from), _CMP_GE_OQ),
                                                   _mm256_cmp_ps(a, _mm256_set1_ps(to), _CMP_LE_OQ))));
}
template <>
inline unsigned flags<double>(const double* keys, double from, double to) {
  const auto four = [&](const double* some) {
    const __m256d a = _mm256_loadu_pd(some);
    return unsigned(_mm256_movemask_pd(_mm256_and_pd(_mm256_cmp_pd(a, _mm256_set1_pd(from), _CMP_GE_OQ),
                                                     _mm256_cmp_pd(a, _mm256_set1_pd(to), _CMP_LE_OQ))));
  };
  return four(keys) | four(keys + 4) << 4;
}
#elif defined(SPARSETOPK_X86)
template <>
inline unsigned flags<float>(const float* keys, float from, float to) {
  const auto four = [&](const float* some) {
    const __m128 a = _mm_loadu_ps(some);
    return unsigned(_mm_movemask_ps(_mm_and_ps(_mm_cmpge_ps(a, _mm_set1_ps(from)), _mm_cmple_ps(a, _mm_set1_ps(to)))));
  };
  return four(keys) | four(keys + 4) << 4;
}
#endif

// The positions j with from <= keys[j] <= to, in order; returns their number. Room for 16 more is needed.
template <class T>
SPARSETOPK_LOOP std::size_t positions_between(const T* keys, std::size_t length, T from, T to,
                                              std::uint32_t* positions) {
  std::size_t count = 0, j = 0;
#if defined(SPARSETOPK_X86) && defined(__AVX512F__)
  if constexpr (std::is_same<T, float>::value) {
    const __m512 least = _mm512_set1_ps(from), most = _mm512_set1_ps(to);
    __m512i at = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (; j + 16 <= length; j += 16) {
      const __m512 a = _mm512_loadu_ps(keys + j);
      const __mmask16 inside = _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(a, least, _CMP_GE_OQ), a, most, _CMP_LE_OQ);
      _mm512_storeu_si512(positions + count, _mm512_maskz_compress_epi32(inside, at));
      count += std::size_t(__builtin_popcount(inside));
      at = _mm512_add_epi32(at, _mm512_set1_epi32(16));
    }
  }
#endif
  // Eight positions are written at a time, and as many kept as flags are set.
  for (; j + 8 <= length; j += 8) {
    const unsigned bits = flags(keys + j, from, to);
    for (std::size_t i = 0; i < 8; ++i) positions[count + i] = std::uint32_t(j + kSetBits.position[bits][i]);
    count += kSetBits.count[bits];
  }
  for (; j < length; ++j) {
    positions[count] = std::uint32_t(j);
    count += (keys[j] >= from) & (keys[j] <= to);
  }
  return count;
}

}  // namespace SPARSETOPK_LEVEL
}  // namespace sparsetopk
