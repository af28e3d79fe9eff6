#include "selection.hpp"

#include <algorithm>
#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

#include "parallel.hpp"
#include "parts.hpp"

namespace sparsetopk {
namespace {

using namespace baseline;

constexpr std::size_t kBlock = 32;

template <std::size_t kBytes>
struct BitsOf;
template <>
struct BitsOf<2> {
  using type = std::uint16_t;
};
template <>
struct BitsOf<4> {
  using type = std::uint32_t;
};
template <>
struct BitsOf<8> {
  using type = std::uint64_t;
};

// Whether a block has an entry that is not 0, of either sign: one word for all, which compilers vectorise.
template <class X>
bool has_nonzero(const X* block) {
  using Bits = typename BitsOf<sizeof(X)>::type;
  Bits all = 0;
  for (std::size_t j = 0; j < kBlock; ++j) all |= bit_cast<Bits>(block[j]);
  return Bits(all << 1) != 0;
}

template <class X>
Wide<X> size_of(X y) {
  const Wide<X> value = widen(y);
  return value > 0 ? value : value < 0 ? -value : Wide<X>(0);
}

// Puts the indices of the entries that are neither 0 nor NaN first into ``found``, and returns how many there
// are. Most entries of a sparse row are 0: whole blocks of them are passed over.
template <class X>
std::size_t find_nonzeros(const X* y, std::size_t n, std::vector<std::int64_t>& found) {
  std::size_t count = 0;
  for (std::size_t begin = 0; begin < n; begin += kBlock) {
    const std::size_t end = std::min(n, begin + kBlock);
    if (end - begin == kBlock && !has_nonzero(y + begin)) continue;
    if (found.size() < count + kBlock) found.resize(2 * found.size() + kBlock);
    for (std::size_t j = begin; j < end; ++j) {
      found[count] = std::int64_t(j);
      count += size_of(y[j]) > 0;
    }
  }
  return count;
}

// The indices that were found and the first of the others, as many as there is room for, in order.
template <class Index>
void fill_up(const std::int64_t* found, std::size_t count, std::size_t capacity, Index* indices) {
  std::size_t next = 0, others = capacity - count;
  for (std::int64_t j = 0; others > 0; ++j) {
    if (next < count && found[next] == j)
      ++next;
    else
      --others;
    *indices++ = Index(j);
  }
  std::copy(found + next, found + count, indices);
}

// Of the indices that were found those of the largest magnitudes, in order; the sum of the other magnitudes.
template <class X, class Index>
double keep_largest(const X* y, const std::int64_t* found, std::size_t count, std::size_t capacity,
                    std::vector<Wide<X>>& sizes, Index* indices) {
  sizes.resize(count);
  std::transform(found, found + count, sizes.begin(), [y](std::int64_t j) { return size_of(y[j]); });
  std::nth_element(sizes.begin(), sizes.begin() + (capacity - 1), sizes.end(), std::greater<>());
  const Wide<X> least = sizes[capacity - 1];
  const auto above = std::count_if(sizes.begin(), sizes.end(), [least](Wide<X> size) { return size > least; });
  std::size_t ties = capacity - std::size_t(above);
  double dropped = 0;
  for (const std::int64_t* j = found; j != found + count; ++j) {
    const Wide<X> size = size_of(y[*j]);
    if (size < least || (size == least && ties == 0)) {
      dropped += double(size);
      continue;
    }
    ties -= size == least;
    *indices++ = Index(*j);
  }
  return dropped;
}

// Rows to slots, one after the other; what they need beside them is kept from row to row.
template <class X>
struct Selector {
  std::vector<std::int64_t> found;
  std::vector<Wide<X>> sizes;

  // The sum of the magnitudes that have no slot.
  template <class Index>
  double operator()(const X* y, std::size_t n, std::size_t capacity, Index* indices) {
    const std::size_t count = find_nonzeros(y, n, found);
    if (count > capacity) return keep_largest(y, found.data(), count, capacity, sizes, indices);
    fill_up(found.data(), count, capacity, indices);
    return 0;
  }
};

template <class X>
void select(std::size_t rows, std::size_t n, const X* y, std::size_t capacity, std::int64_t* indices) {
  Selector<X> row;
  for (std::size_t i = 0; i < rows; ++i) row(y + i * n, n, capacity, indices + i * capacity);
}

template <class X>
void solve_and_select(const Problem& problem, const Slots& slots) {
  const std::size_t n = problem.n, capacity = slots.capacity;
  constexpr std::size_t kEntries = 1 << 14;  // that a thread is given at once, and finds in its cache again
  const std::size_t together = n < kEntries ? kEntries / n : 1, parts = (problem.rows + together - 1) / together;
  const bool shared = parts >= problem.threads;  // else each part is
  parallel_for(parts, shared ? problem.threads : 1, [&](std::size_t i) {
    const std::size_t first = i * together, count = std::min(together, problem.rows - first);
    Problem part = rows_of<X>(problem, first, count);
    if (shared) part.threads = 1;
    const std::unique_ptr<X[]> y(new X[count * n]);
    forward(part, y.get());
    Selector<X> row;
    for (std::size_t j = 0; j < count; ++j) {
      const X* from = y.get() + j * n;
      X* values = static_cast<X*>(slots.values) + (first + j) * capacity;
      std::int32_t* indices = slots.indices + (first + j) * capacity;
      const double dropped = row(from, n, capacity, indices);
      for (std::size_t slot = 0; slot < capacity; ++slot) values[slot] = from[indices[slot]];
      slots.dropped[first + j] = part.state[j].pivot != part.state[j].pivot ? part.state[j].pivot : dropped;
    }
  });
}

}  // namespace

void select_slots(Dtype dtype, std::size_t rows, std::size_t n, const void* y, std::size_t capacity,
                  std::int64_t* indices) {
  with_entries(dtype, y, [&](const auto* entries) { select(rows, n, entries, capacity, indices); });
}

void select(const Problem& problem, const Slots& slots) {
  if (problem.rows == 0 || problem.n == 0) return;
  with_entries(problem.dtype, problem.x,
               [&](const auto* x) { solve_and_select<std::decay_t<decltype(*x)>>(problem, slots); });
}

}  // namespace sparsetopk
