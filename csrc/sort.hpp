// Stable descending argsort of one row, by a radix sort from the least significant digit.
//
// Floats become unsigned keys of the same order, reversed; equal values keep the order of their indices,
// -0.0 equals 0.0, and a NaN ends up somewhere. No framework.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>
#include <vector>

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
  return bits & sign ? bits : ~(bits | sign);
}

template <class T>
struct SortRecord {
  SortKey<T> key;
  std::uint32_t index;
};

// What the sort needs to work in; kept from row to row.
template <class T>
struct SortWorkspace {
  std::vector<SortRecord<T>> here, there;
};

constexpr std::size_t kShortestRadixRow = 256;  // below this the histograms cost more than comparing
constexpr int kDigitBits = 8;
constexpr std::size_t kDigits = std::size_t(1) << kDigitBits;

template <class T, class Index>
void argsort_by_comparing(const T* x, std::size_t n, Index* order) {
  std::iota(order, order + n, Index(0));
  std::stable_sort(order, order + n,
                   [x](Index i, Index j) { return descending_key(x[i]) < descending_key(x[j]); });
}

// order is a permutation with x[order[0]] >= x[order[1]] >= ...
template <class T, class Index>
void argsort_descending(const T* x, std::size_t n, Index* order, SortWorkspace<T>& work) {
  constexpr std::size_t kPasses = sizeof(T);
  if (n < kShortestRadixRow || n > std::numeric_limits<std::uint32_t>::max())
    return argsort_by_comparing(x, n, order);
  std::vector<std::size_t> counts(kPasses * kDigits, 0);
  work.here.resize(n);
  work.there.resize(n);
  bool sorted = true;
  SortKey<T> before = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const SortKey<T> key = descending_key(x[i]);
    work.here[i] = {key, std::uint32_t(i)};
    for (std::size_t pass = 0; pass < kPasses; ++pass)
      ++counts[pass * kDigits + ((key >> (kDigitBits * pass)) & (kDigits - 1))];
    sorted = sorted && before <= key;
    before = key;
  }
  if (sorted) return std::iota(order, order + n, Index(0));
  for (std::size_t pass = 0; pass < kPasses; ++pass) {
    std::size_t* starts = counts.data() + pass * kDigits;
    if (std::find(starts, starts + kDigits, n) != starts + kDigits) continue;  // all share this digit
    std::exclusive_scan(starts, starts + kDigits, starts, std::size_t(0));
    for (const SortRecord<T>& record : work.here)
      work.there[starts[(record.key >> (kDigitBits * pass)) & (kDigits - 1)]++] = record;
    std::swap(work.here, work.there);
  }
  for (std::size_t i = 0; i < n; ++i) order[i] = Index(work.here[i].index);
}

}  // namespace sparsetopk
