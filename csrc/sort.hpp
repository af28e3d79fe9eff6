// Stable descending argsort of one row, by a radix sort from the least significant digit.
//
// Floats become unsigned keys of the same order, reversed; equal values keep the order of their indices,
// -0.0 equals 0.0, and NaN comes last, as in NumPy. No framework.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <type_traits>

#include "parallel.hpp"

namespace sparsetopk {

template <class T>
using SortKey = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;

// The bits of a value as a number that is the smaller the larger the value is, and the other way. Without a branch: no
// processor foresees the signs of a row.
template <class T>
inline SortKey<T> reversed(SortKey<T> bits) {
  using Signed = std::make_signed_t<SortKey<T>>;
  return bits ^ (SortKey<T>(~(Signed(bits) >> (8 * sizeof(T) - 1))) >> 1);
}
template <class T>
inline SortKey<T> descending_key(T value) {
  value += T(0);  // -0.0 to 0.0
  SortKey<T> bits;
  std::memcpy(&bits, &value, sizeof(T));
  return reversed<T>(bits) | -SortKey<T>(value != value);
}
template <class T>
inline T value_of(SortKey<T> key) {
  key = reversed<T>(key);
  T value;
  std::memcpy(&value, &key, sizeof(T));
  return value;
}

// Ordered by key, then by index: no two are equal, so that any sort of them is stable.
template <class T>
struct SortRecord {
  SortKey<T> key;
  std::uint32_t index;
  bool operator<(const SortRecord& other) const { return key < other.key || (key == other.key && index < other.index); }
};

// Bits of a digit: tables of short ones are quickly set up, long ones need fewer passes. Measured, as the lengths.
constexpr int kShortSortDigit = 8, kLongSortDigit = 11;
constexpr std::size_t kShortestRadixSort = 64;  // below it any table costs more than comparing
constexpr std::size_t kShortestLongDigitSort = 1024;
constexpr std::size_t kShortestDividedSort = std::size_t(1) << 15;  // from there on a row does not fit the second cache
constexpr std::size_t kSortBuckets = std::size_t(1) << kLongSortDigit;

inline int bits_below(std::uint64_t number) { return number == 0 ? 0 : 64 - __builtin_clzll(number); }

// Sorts by the lowest ``bits`` of the keys, from the least significant digit on. The result is in one of the two places.
template <int kDigit, class T>
SortRecord<T>* sort_by_digits(SortRecord<T>* here, SortRecord<T>* there, std::size_t n, int bits) {
  constexpr std::size_t kDigits = std::size_t(1) << kDigit;
  std::uint32_t starts[kDigits];
  for (int shift = 0; shift < bits; shift += kDigit) {
    const auto digit = [shift](const SortRecord<T>& r) { return std::size_t(r.key >> shift) & (kDigits - 1); };
    std::fill_n(starts, kDigits, 0u);
    for (std::size_t i = 0; i < n; ++i) ++starts[digit(here[i])];
    if (starts[digit(here[0])] == n) continue;  // all share this digit
    std::exclusive_scan(starts, starts + kDigits, starts, 0u);
    for (std::size_t i = 0; i < n; ++i) there[starts[digit(here[i])]++] = here[i];
    std::swap(here, there);
  }
  return here;
}

template <class T>
SortRecord<T>* sort_records(SortRecord<T>* here, SortRecord<T>* there, std::size_t n, int bits) {
  if (n >= kShortestLongDigitSort) return sort_by_digits<kLongSortDigit>(here, there, n, bits);
  if (n >= kShortestRadixSort) return sort_by_digits<kShortSortDigit>(here, there, n, bits);
  std::sort(here, here + n);
  return here;
}

// What the sort needs to work in; kept from row to row.
template <class T>
struct SortWorkspace {
  explicit SortWorkspace(std::size_t n) : here(new SortRecord<T>[n]), there(new SortRecord<T>[n]) {}
  std::unique_ptr<SortRecord<T>[]> here, there;
};

template <class T>
bool is_descending(const T* x, std::size_t n) {
  constexpr std::size_t kBlock = 512;  // compared without a branch
  for (std::size_t begin = 1; begin < n; begin += kBlock) {
    bool ordered = true;
    for (std::size_t i = begin; i < std::min(begin + kBlock, n); ++i) ordered &= x[i - 1] >= x[i];
    if (!ordered) return false;
  }
  return n == 0 || x[0] == x[0];
}

// Puts the records of a row into buckets by the first digit in which its keys differ: record(i) is in here[starts[j],
// starts[j + 1]), in order of i, if that digit is j. Keys count from the first. Threads share parts of the row.
template <class T>
struct Divided {
  SortKey<T> first;
  int below;  // bits that are below the digit
};
template <class T>
Divided<T> divide(const T* x, std::size_t n, SortRecord<T>* here, std::size_t* starts, std::size_t threads) {
  constexpr std::size_t kMostParts = 16;
  const std::size_t parts = std::min(threads, kMostParts);
  const auto for_parts = [&](const auto& f) {
    parallel_for(parts, parts, [&](std::size_t part) { f(part, n * part / parts, n * (part + 1) / parts); });
  };
  SortKey<T> least[kMostParts], most[kMostParts];
  for_parts([&](std::size_t part, std::size_t begin, std::size_t end) {
    SortKey<T> lo = ~SortKey<T>(0), hi = 0;
    for (std::size_t i = begin; i < end; ++i)
      lo = std::min(lo, descending_key(x[i])), hi = std::max(hi, descending_key(x[i]));
    least[part] = lo, most[part] = hi;
  });
  const SortKey<T> first = *std::min_element(least, least + parts), last = *std::max_element(most, most + parts);
  const int below = std::max(0, bits_below(last - first) - kLongSortDigit);
  const std::unique_ptr<std::uint32_t[]> counts(new std::uint32_t[parts * kSortBuckets]());
  const auto digit = [&](SortKey<T> key) { return std::size_t((key - first) >> below); };
  for_parts([&](std::size_t part, std::size_t begin, std::size_t end) {
    std::uint32_t* mine = counts.get() + part * kSortBuckets;
    for (std::size_t i = begin; i < end; ++i) ++mine[digit(descending_key(x[i]))];
  });
  std::size_t start = 0;
  for (std::size_t j = 0; j < kSortBuckets; ++j) {
    starts[j] = start;
    for (std::size_t part = 0; part < parts; ++part) {
      std::uint32_t& count = counts[part * kSortBuckets + j];
      start += count, count = std::uint32_t(start - count);
    }
  }
  starts[kSortBuckets] = n;
  for_parts([&](std::size_t part, std::size_t begin, std::size_t end) {
    std::uint32_t* mine = counts.get() + part * kSortBuckets;
    for (std::size_t i = begin; i < end; ++i) {
      const SortKey<T> key = descending_key(x[i]);
      here[mine[digit(key)]++] = {key - first, std::uint32_t(i)};
    }
  });
  return {first, below};
}

// The order of a row's entries, and its values in that order; at most 2^32 - 1 of them. A long row is divided first, so
// that each part is sorted in the cache.
template <class T, class Index, class Value>
void sort_descending(const T* x, std::size_t n, SortWorkspace<T>& work, Index* order, Value* values,
                     std::size_t threads) {
  if (is_descending(x, n)) {
    std::iota(order, order + n, Index(0));
    for (std::size_t i = 0; i < n; ++i) values[i] = Value(x[i] + T(0));
    return;
  }
  SortRecord<T>*here = work.here.get(), *there = work.there.get();
  const auto sort_some = [&](std::size_t begin, std::size_t end, SortKey<T> first, int bits) {
    const SortRecord<T>* sorted = sort_records(here + begin, there + begin, end - begin, bits);
    for (std::size_t i = begin; i < end; ++i) {
      order[i] = Index(sorted[i - begin].index);
      values[i] = Value(value_of<T>(first + sorted[i - begin].key));
    }
  };
  if (n < kShortestDividedSort) {
    for (std::size_t i = 0; i < n; ++i) here[i] = {descending_key(x[i]), std::uint32_t(i)};
    return sort_some(0, n, 0, 8 * sizeof(T));
  }
  std::size_t starts[kSortBuckets + 1];
  const Divided<T> divided = divide(x, n, here, starts, threads);
  parallel_for(kSortBuckets, threads, [&](std::size_t j) {
    if (starts[j] < starts[j + 1]) sort_some(starts[j], starts[j + 1], divided.first, divided.below);
  });
}

}  // namespace sparsetopk
