// Which entries of a tile lie between two bounds: the loops that compilers do not vectorise, so that they
// are written with intrinsics on x86.
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

// What there is of a tile: entries that are kept, keys above them, and whether any key is NaN or (of magnitudes)
// infinite.
struct TilePart {
  std::size_t count = 0, over = 0;
  bool invalid = false;
};

// Whole vectors from the front of a tile as far as there are any, with ``done`` entries; the rest is for the caller.
// What is written ends where the vector ends that was read last, so that x and ``kept`` may be the same.
#if defined(SPARSETOPK_X86) && defined(__AVX512F__)
template <bool kAbsolute>
inline TilePart keep_vectors(const float* x, std::size_t length, float from, float to, float* kept, std::size_t& done) {
  const __m512 least = _mm512_set1_ps(from), most = _mm512_set1_ps(to),
               limit = _mm512_set1_ps(float(Limits<float>::largest));
  TilePart part;
  __mmask16 invalid = 0;
  std::size_t j = 0;
  for (; j + 16 <= length; j += 16) {
    const __m512 a = _mm512_loadu_ps(x + j), key = kAbsolute ? _mm512_abs_ps(a) : a;
    const __mmask16 up = _mm512_cmp_ps_mask(key, most, _CMP_GT_OQ);
    const __mmask16 inside = _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(key, least, _CMP_GE_OQ), key, most, _CMP_LE_OQ);
    invalid |= kAbsolute ? _mm512_cmp_ps_mask(key, limit, _CMP_NLE_UQ) : _mm512_cmp_ps_mask(key, key, _CMP_UNORD_Q);
    _mm512_storeu_ps(kept + part.count, _mm512_maskz_compress_ps(inside, a));
    part.count += std::size_t(__builtin_popcount(inside)), part.over += std::size_t(__builtin_popcount(up));
  }
  part.invalid = invalid != 0, done = j;
  return part;
}
template <bool kAbsolute>
inline TilePart keep_vectors(const double* x, std::size_t length, double from, double to, double* kept,
                             std::size_t& done) {
  const __m512d least = _mm512_set1_pd(from), most = _mm512_set1_pd(to),
                limit = _mm512_set1_pd(Limits<double>::largest);
  TilePart part;
  __mmask8 invalid = 0;
  std::size_t j = 0;
  for (; j + 8 <= length; j += 8) {
    const __m512d a = _mm512_loadu_pd(x + j), key = kAbsolute ? _mm512_abs_pd(a) : a;
    const __mmask8 up = _mm512_cmp_pd_mask(key, most, _CMP_GT_OQ);
    const __mmask8 inside = _mm512_mask_cmp_pd_mask(_mm512_cmp_pd_mask(key, least, _CMP_GE_OQ), key, most, _CMP_LE_OQ);
    invalid |= kAbsolute ? _mm512_cmp_pd_mask(key, limit, _CMP_NLE_UQ) : _mm512_cmp_pd_mask(key, key, _CMP_UNORD_Q);
    _mm512_storeu_pd(kept + part.count, _mm512_maskz_compress_pd(inside, a));
    part.count += std::size_t(__builtin_popcount(inside)), part.over += std::size_t(__builtin_popcount(up));
  }
  part.invalid = invalid != 0, done = j;
  return part;
}
#elif defined(SPARSETOPK_X86) && defined(__AVX2__)
template <bool kAbsolute>
inline TilePart keep_vectors(const float* x, std::size_t length, float from, float to, float* kept, std::size_t& done) {
  const __m256 least = _mm256_set1_ps(from), most = _mm256_set1_ps(to),
               limit = _mm256_set1_ps(float(Limits<float>::largest));
  const __m256 sign = _mm256_set1_ps(-0.0f);
  TilePart part;
  int invalid = 0;
  std::size_t j = 0;
  for (; j + 8 <= length; j += 8) {
    const __m256 a = _mm256_loadu_ps(x + j), key = kAbsolute ? _mm256_andnot_ps(sign, a) : a;
    const int up = _mm256_movemask_ps(_mm256_cmp_ps(key, most, _CMP_GT_OQ));
    const int inside =
        _mm256_movemask_ps(_mm256_and_ps(_mm256_cmp_ps(key, least, _CMP_GE_OQ), _mm256_cmp_ps(key, most, _CMP_LE_OQ)));
    invalid |=
        _mm256_movemask_ps(kAbsolute ? _mm256_cmp_ps(key, limit, _CMP_NLE_UQ) : _mm256_cmp_ps(key, key, _CMP_UNORD_Q));
    long long positions;
    std::memcpy(&positions, kSetBits.position[inside], sizeof(positions));
    const __m256i to_front = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(positions));
    _mm256_storeu_ps(kept + part.count, _mm256_permutevar8x32_ps(a, to_front));
    part.count += kSetBits.count[inside], part.over += kSetBits.count[up];
  }
  part.invalid = invalid != 0, done = j;
  return part;
}
#endif
template <bool kAbsolute, class X>
inline TilePart keep_vectors(const X*, std::size_t, Wide<X>, Wide<X>, X*, std::size_t& done) {
  done = 0;
  return {};
}

// Copies the entries of a tile whose keys are between the bounds, in order.
template <bool kAbsolute, class X>
SPARSETOPK_LOOP TilePart keep_between(const X* x, std::size_t length, Wide<X> from, Wide<X> to, X* kept) {
  using T = Wide<X>;
  constexpr T limit = T(Limits<T>::largest);
  std::size_t done;
  TilePart part = keep_vectors<kAbsolute>(x, length, from, to, kept, done);
  x += done, length -= done, kept += part.count;
  if (length == 0) return part;
  for_tiles<kAbsolute>(x, length, [&](const T* keys, std::size_t, std::size_t) {
    std::uint32_t positions[kTile + 16];
    std::uint32_t over = 0, bad = 0;
    for (std::size_t j = 0; j < length; ++j) {
      over += keys[j] > to;
      bad += kAbsolute ? !(keys[j] <= limit) : keys[j] != keys[j];
    }
    const std::size_t count = positions_between(keys, length, from, to, positions);
    if (count == length)
      std::memmove(kept, x, length * sizeof(X));
    else
      for (std::size_t j = 0; j < count; ++j) kept[j] = x[positions[j]];
    part.count += count, part.over += over, part.invalid |= bad != 0;
  });
  return part;
}

}  // namespace SPARSETOPK_LEVEL
}  // namespace sparsetopk
