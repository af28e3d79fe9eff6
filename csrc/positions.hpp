// Which entries of a tile lie between two bounds: the loops that compilers do not vectorise. Two steps: comparisons leave
// a bit for every entry, as fast as a tile is read, and then the bits that are set are gone through. Where they are few
// that costs next to nothing; where they are many, vectors are packed.
#pragma once

#include "vectors.hpp"

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

// a >= b; not a < b, and not a <= b, which NaN is not; a > b; one of them is NaN
enum class Compare { from, not_below, not_at_most, above, unordered };

// Bit i is set if a[i] compares so with b[i].
template <Compare kHow, class T>
inline unsigned compare_bits(Vector<T> a, Vector<T> b) {
#if defined(SPARSETOPK_X86) && defined(__AVX512F__)
  constexpr int kCode = kHow == Compare::from          ? _CMP_GE_OQ
                        : kHow == Compare::not_below   ? _CMP_NLT_UQ
                        : kHow == Compare::not_at_most ? _CMP_NLE_UQ
                        : kHow == Compare::above       ? _CMP_GT_OQ
                                                       : _CMP_UNORD_Q;
  if constexpr (sizeof(T) == 4) return _mm512_cmp_ps_mask((__m512)a, (__m512)b, kCode);
  if constexpr (sizeof(T) == 8) return _mm512_cmp_pd_mask((__m512d)a, (__m512d)b, kCode);
#else
  return bits_of(kHow == Compare::from          ? a >= b
                 : kHow == Compare::not_below   ? ~(a < b)
                 : kHow == Compare::not_at_most ? ~(a <= b)
                 : kHow == Compare::above       ? a > b
                                                : (a != a) | (b != b));
#endif
}

// A bit for every entry of a tile.
class Marks {
 public:
  // Marks keys between the bounds; ``kNaN``: and those that are NaN; ``kEnd``: and sees whether one is infinite.
  template <bool kAbsolute, bool kNaN, bool kEnd = false, class T>
  SPARSETOPK_LOOP void set(const T* x, std::size_t length, T from, T to);

  std::size_t count = 0, over = 0;  // marked keys, and keys above them
  bool infinite = false;            // a key is inf

  // Writes the positions of those that are marked, in order; 16 more may be written.
  void positions(std::size_t length, std::uint32_t* out) const;

  // Positions, from ``begin`` on, and what x has there; 16 more may be written.
  template <class X, class P>
  SPARSETOPK_LOOP void gather(std::size_t length, std::size_t begin, const X* x, P* at, X* x_there) const;

  // Copies what is marked, in order; ``kept`` may be x.
  template <class X>
  void copy(const X* x, std::size_t length, X* kept) const;

 private:
  static constexpr std::size_t kWord = 64;
  bool some(std::size_t length) const { return count > length / 256; }  // in more than a few words
  bool many(std::size_t length) const { return count > length / 8; }
  template <unsigned kUnrolled, class F>
  static void for_bits(std::uint64_t bits, F&& f);
  template <unsigned kUnrolled>
  SPARSETOPK_LOOP void positions_of_words(std::size_t length, std::uint32_t* out) const;
  template <unsigned kUnrolled, class X>
  SPARSETOPK_LOOP X* copy_words(const X* x, std::size_t words, X* kept) const;
  template <class X>
  SPARSETOPK_LOOP X* copy_packs(const X* x, std::size_t words, X* kept) const;
  static std::uint64_t word(const std::uint8_t* bytes) {
    std::uint64_t bits;
    std::memcpy(&bits, bytes, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    bits = __builtin_bswap64(bits);
#endif
    return bits;
  }
  std::uint8_t byte(std::size_t i) const { return std::uint8_t(words_[i / 8] >> i % 8 * 8); }
  // The lowest bit that is set; of 0 any.
  static unsigned lowest(std::uint64_t bits) { return unsigned(__builtin_ctzll(bits | std::uint64_t(1) << 63)); }

  std::uint64_t words_[kTile / kWord];
};

template <bool kAbsolute, bool kNaN, bool kEnd, class T>
SPARSETOPK_LOOP void Marks::set(const T* x, std::size_t length, T from, T to) {
  using V = Vector<T>;
  constexpr std::size_t kW = kWidth<T>, kStep = larger(kW, std::size_t(8));
  std::uint8_t at_least[kTile / 8], above[kTile / 8];
  const V least = all_lanes(from), most = all_lanes(to);
  V largest{};
  T rest = 0;  // of those after the last step
  std::size_t j = 0;
  for (; j + kStep <= length; j += kStep) {
    unsigned lower = 0, upper = 0;
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kStep; i += kW) {
      const V wide = load(x + j + i), key = kAbsolute ? absolute_lanes(wide) : wide;
      lower |= compare_bits<kNaN ? Compare::not_below : Compare::from, T>(key, least) << i;
      upper |= compare_bits<Compare::above, T>(key, most) << i;
      if (kEnd) largest = larger_lanes(key, largest);  // which NaN leaves as it is
    }
    std::memcpy(at_least + j / 8, &lower,
                kStep / 8);  // where a step has two bytes they are in order: x86 has such alone
    std::memcpy(above + j / 8, &upper, kStep / 8);
  }
  if (length % kWord != 0) {
    const std::size_t end = (length + kWord - 1) / kWord * 8;
    std::memset(at_least + j / 8, 0, end - j / 8), std::memset(above + j / 8, 0, end - j / 8);
  }
  for (; j < length; ++j) {
    const T value = key<kAbsolute>(x[j]);
    at_least[j / 8] |= std::uint8_t((kNaN ? !(value < from) : value >= from) << j % 8);
    above[j / 8] |= std::uint8_t((value > to) << j % 8);
    if (kEnd) rest = value > rest ? value : rest;
  }
  constexpr T limit = T(Limits<T>::largest);
  if (kEnd) infinite = rest > limit || bits_of(largest > limit) != 0;
  count = over = 0;
  for (std::size_t i = 0; i * kWord < length; ++i) {
    const std::uint64_t high = word(above + 8 * i), bits = words_[i] = word(at_least + 8 * i) & ~high;
    count += std::size_t(__builtin_popcountll(bits)), over += std::size_t(__builtin_popcountll(high));
  }
}

// f(j) for every bit j of a word, in order; at least ``kUnrolled`` times, so that few of them cost no branch: what
// comes after the last one must do no harm.
template <unsigned kUnrolled, class F>
inline __attribute__((always_inline)) void Marks::for_bits(std::uint64_t bits, F&& f) {
#pragma GCC unroll 8
  for (unsigned i = 0; i < kUnrolled; ++i, bits &= bits - 1) f(lowest(bits));
  for (; bits != 0; bits &= bits - 1) f(lowest(bits));
}

template <unsigned kUnrolled>
SPARSETOPK_LOOP void Marks::positions_of_words(std::size_t length, std::uint32_t* out) const {
  for (std::uint32_t j = 0; j < length; j += kWord) {
    const std::uint64_t bits = words_[j / kWord];
    std::uint32_t* next = out;
    out += __builtin_popcountll(bits);
    for_bits<kUnrolled>(bits, [&](unsigned i) { *next++ = j + i; });
  }
}

inline void Marks::positions(std::size_t length, std::uint32_t* out) const {
  if (!many(length)) return some(length) ? positions_of_words<3>(length, out) : positions_of_words<0>(length, out);
  for (std::uint32_t j = 0; j < length; j += 8) {
    const unsigned bits = byte(j / 8);
    for (std::size_t i = 0; i < 8; ++i) out[i] = j + kSetBits.position[bits][i];
    out += kSetBits.count[bits];
  }
}

template <class X, class P>
SPARSETOPK_LOOP void Marks::gather(std::size_t length, std::size_t begin, const X* x, P* at, X* x_there) const {
  const bool often = some(length);
  for (std::size_t j = 0; j < length; j += kWord, x += kWord) {
    const std::uint64_t bits = words_[j / kWord];
    P* next_at = at;
    X* next = x_there;
    const std::size_t count = std::size_t(__builtin_popcountll(bits));
    at += count, x_there += count;
    const auto take = [&](unsigned i) { *next_at++ = P(begin + j + i), *next++ = x[i]; };
    if (!often || j + kWord > length)
      for_bits<0>(bits, take);
    else
      for_bits<3>(bits, take);
  }
}

// As many entries as a pack has, those that are marked to the front.
template <class X>
constexpr std::size_t kPack = 8;
template <class X>
inline void pack(const X* x, unsigned bits, X* kept) {
  for (std::size_t i = 0; i < 8; ++i) kept[i] = x[kSetBits.position[bits][i]];
}
#if defined(SPARSETOPK_X86) && defined(__AVX512F__)
template <>
constexpr std::size_t kPack<float> = 16;
inline void pack(const double* x, unsigned bits, double* kept) {
  _mm512_storeu_pd(kept, _mm512_maskz_compress_pd(__mmask8(bits), _mm512_loadu_pd(x)));
}
inline void pack(const float* x, unsigned bits, float* kept) {
  _mm512_storeu_ps(kept, _mm512_maskz_compress_ps(__mmask16(bits), _mm512_loadu_ps(x)));
}
#elif defined(SPARSETOPK_X86) && defined(__AVX2__)
inline void pack(const float* x, unsigned bits, float* kept) {
  long long positions;
  std::memcpy(&positions, kSetBits.position[bits], sizeof(positions));
  const __m256i to_front = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(positions));
  _mm256_storeu_ps(kept, _mm256_permutevar8x32_ps(_mm256_loadu_ps(x), to_front));
}
#endif

// Copies what is marked in whole words; nothing is written beyond where the word ends that was read last.
template <unsigned kUnrolled, class X>
SPARSETOPK_LOOP X* Marks::copy_words(const X* x, std::size_t words, X* kept) const {
  for (std::size_t i = 0; i < words; ++i, x += kWord) {
    const std::uint64_t bits = words_[i];
    X* next = kept;
    kept += __builtin_popcountll(bits);
    for_bits<kUnrolled>(bits, [&](unsigned j) { *next++ = x[j]; });
  }
  return kept;
}
template <class X>
SPARSETOPK_LOOP X* Marks::copy_packs(const X* x, std::size_t words, X* kept) const {
  constexpr std::size_t kBits = kPack<X>;
  for (std::size_t i = 0; i < words; ++i)
    for (std::size_t j = 0; j < kWord; j += kBits, x += kBits) {
      const unsigned bits = unsigned(words_[i] >> j) & ((1u << kBits) - 1);
      pack(x, bits, kept);
      kept += __builtin_popcount(bits);
    }
  return kept;
}

template <class X>
void Marks::copy(const X* x, std::size_t length, X* kept) const {
  if (count == length) return void(std::memmove(kept, x, length * sizeof(X)));
  const std::size_t words = length / kWord;
  kept = many(length)          ? copy_packs(x, words, kept)
         : !some(length)       ? copy_words<0>(x, words, kept)
         : count < length / 32 ? copy_words<3>(x, words, kept)
                               : copy_words<8>(x, words, kept);
  for (std::size_t j = words * kWord; j < length; ++j)
    if (words_[words] >> j % kWord & 1) *kept++ = x[j];
}

// In a few vectors, positions are packed as they are found: two steps would cost more than they save.
constexpr std::size_t kFewVectors = 512;  // entries

#if defined(SPARSETOPK_X86) && defined(__AVX512F__)
inline SPARSETOPK_LOOP std::size_t positions_in_few(const float* keys, std::size_t length, float from, float to,
                                                    std::uint32_t* positions) {
  std::size_t count = 0, j = 0;
  const __m512 least = _mm512_set1_ps(from), most = _mm512_set1_ps(to);
  __m512i at = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (; j + 16 <= length; j += 16) {
    const __m512 a = _mm512_loadu_ps(keys + j);
    const __mmask16 inside = _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(a, least, _CMP_GE_OQ), a, most, _CMP_LE_OQ);
    _mm512_storeu_si512(positions + count, _mm512_maskz_compress_epi32(inside, at));
    count += std::size_t(__builtin_popcount(inside));
    at = _mm512_add_epi32(at, _mm512_set1_epi32(16));
  }
  for (; j < length; ++j) {
    positions[count] = std::uint32_t(j);
    count += (keys[j] >= from) & (keys[j] <= to);
  }
  return count;
}
#endif

// The positions j with from <= keys[j] <= to, in order; returns their number. Room for 16 more is needed.
template <class T>
inline std::size_t positions_between(const T* keys, std::size_t length, T from, T to, std::uint32_t* positions) {
#if defined(SPARSETOPK_X86) && defined(__AVX512F__)
  if constexpr (std::is_same<T, float>::value)
    if (length <= kFewVectors) return positions_in_few(keys, length, from, to, positions);
#endif
  Marks marks;
  marks.set<false, false>(keys, length, from, to);
  marks.positions(length, positions);
  return marks.count;
}

// What there is of a tile: entries between the bounds, keys above them, and whether a magnitude is infinite.
struct TilePart {
  std::size_t count, over;
  bool infinite;
};

// Copies the entries of a tile whose keys are between the bounds, in order, and NaN, which is seen there sooner than in
// the row.
template <bool kAbsolute, class X>
inline TilePart keep_between(const X* x, std::size_t length, Wide<X> from, Wide<X> to, X* kept) {
  Marks marks;
  if constexpr (std::is_same<X, Wide<X>>::value)
    marks.set<kAbsolute, true, kAbsolute>(x, length, from, to);
  else
    for_tiles<kAbsolute>(x, length, [&](const Wide<X>* keys, std::size_t, std::size_t) {
      marks.set<false, true, kAbsolute>(keys, length, from, to);
    });
  marks.copy(x, length, kept);
  return {marks.count, marks.over, marks.infinite};
}

}  // namespace SPARSETOPK_LEVEL
}  // namespace sparsetopk
