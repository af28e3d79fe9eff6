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

namespace sparsetopk {

template <class T>
using SortKey = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;

// The larger the value, the smaller the key.
template <class T>
inline SortKey<T> descending_key(T value) {
  value += T(0);  // -0.0 to 0.0
  SortKey<T> bits;
  std::memcpy(&bits, &value, sizeof(T));
  constexpr SortKey<T> sign = SortKey<T>(1) << (8 * sizeof(T) - 1);
  if (value != value) return ~SortKey<T>(0);
  return bits & sign ? bits : ~(bits | sign);
}

// The value back from its key; -0.0 has become 0.0.
template <class T>
inline T value_of(SortKey<T> key) {
  constexpr SortKey<T> sign = SortKey<T>(1) << (8 * sizeof(T) - 1);
  if (!(key & sign)) key = ~key & ~sign;
  T value;
  std::memcpy(&value, &key, sizeof(T));
  return value;
}

// Ordered by key, then by index: no two are equal, so that any sort of them is stable.
template <class T>
struct SortRecord {
  SortKey<T> key;
  std::uint32_t index;
  bool operator<(const SortRecord& other) const {
    return key < other.key || (key == other.key && index < other.index);
  }
};

// Digits of 8 bits: their tables are quickly set up, and what the passes write to stays in the nearest cache.
constexpr std::size_t kDigitBits = 8, kDigits = std::size_t(1) << kDigitBits;
template <class T>
constexpr std::size_t kPasses = sizeof(T);

// What the sort needs to work in; kept from row to row.
template <class T>
struct SortWorkspace {
  explicit SortWorkspace(std::size_t n) : here(new SortRecord<T>[n]), there(new SortRecord<T>[n]) {}
  std::unique_ptr<SortRecord<T>[]> here, there;
  std::uint32_t counts[kPasses<T>][kDigits];
};

constexpr std::size_t kShortestRadixRow = 64;  // below it the tables cost more than comparing

template <class T>
std::size_t digit(const SortRecord<T>& record, std::size_t pass) {
  return std::size_t(record.key >> (kDigitBits * pass)) & (kDigits - 1);
}

template <class T>
void radix_sort(std::size_t n, SortWorkspace<T>& work) {
  std::memset(work.counts, 0, sizeof(work.counts));
  for (std::size_t i = 0; i < n; ++i)
    for (std::size_t pass = 0; pass < kPasses<T>; ++pass) ++work.counts[pass][digit(work.here[i], pass)];
  for (std::size_t pass = 0; pass < kPasses<T>; ++pass) {
    std::uint32_t* starts = work.counts[pass];
    if (starts[digit(work.here[0], pass)] == n) continue;  // all share this digit
    std::exclusive_scan(starts, starts + kDigits, starts, std::uint32_t(0));
    for (std::size_t i = 0; i < n; ++i) work.there[starts[digit(work.here[i], pass)]++] = work.here[i];
    std::swap(work.here, work.there);
  }
}

// The entries of a row in decreasing order, in work.here; at most 2^32 - 1 of them.
template <class T>
void sort_records(const T* x, std::size_t n, SortWorkspace<T>& work) {
  bool sorted = true;
  for (std::size_t i = 0; i < n; ++i) {
    work.here[i] = {descending_key(x[i]), std::uint32_t(i)};
    sorted = sorted && (i == 0 || work.here[i - 1].key <= work.here[i].key);
  }
  if (!sorted && n < kShortestRadixRow) std::sort(work.here.get(), work.here.get() + n);
  if (!sorted && n >= kShortestRadixRow) radix_sort(n, work);
}

}  // namespace sparsetopk
