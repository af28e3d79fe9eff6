// Keys as integers of the same order, and how many of them fall into buckets of equal width: the bits of a key
// are its digits, by which it is found in a number of passes that no row can raise.
#pragma once

#include "tiles.hpp"

namespace sparsetopk {
namespace SPARSETOPK_LEVEL {

template <class T>
using Ordered = typename std::conditional<sizeof(T) == sizeof(std::uint32_t), std::uint32_t, std::uint64_t>::type;
template <class T>
constexpr Ordered<T> kOrderedZero = Ordered<T>(1) << (8 * sizeof(T) - 1);

// Increasing in the value, and one number for all that count as 0.
template <class T>
inline Ordered<T> ordered(T value) {
  const Ordered<T> bits = bit_cast<Ordered<T>>(value == 0 ? T(0) : value);
  return bits & kOrderedZero<T> ? ~bits : bits | kOrderedZero<T>;
}
template <class T>
inline T from_ordered(Ordered<T> number) {
  return bit_cast<T>(number & kOrderedZero<T> ? number ^ kOrderedZero<T> : ~number);
}

inline int bit_width(std::uint64_t number) { return number == 0 ? 0 : 64 - __builtin_clzll(number); }

// Adds to counts[j] how many keys, ordered as numbers of type T, are in [first + (j << shift), first + ((j + 1) <<
// shift)) and not above last. NaN is outside of any range of numbers.
template <bool kAbsolute, class T, class X, class Count>
SPARSETOPK_LOOP void count_buckets(const X* x, std::size_t n, Ordered<T> first, Ordered<T> last, int shift,
                                   Count* counts) {
  const Ordered<T> range = last - first;
  for (std::size_t i = 0; i < n; i += kTile) {
    const std::size_t length = smaller(kTile, n - i);
    std::uint32_t bucket[kTile], inside[kTile];
    for (std::size_t j = 0; j < length; ++j) {
      const Ordered<T> from_first = ordered(T(key<kAbsolute>(x[i + j]))) - first;
      bucket[j] = from_first <= range ? std::uint32_t(from_first >> shift) : 0u;
      inside[j] = from_first <= range;
    }
    for (std::size_t j = 0; j < length; ++j) counts[bucket[j]] += inside[j];
  }
}

}  // namespace SPARSETOPK_LEVEL
}  // namespace sparsetopk
