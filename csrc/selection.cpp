#include "selection.hpp"

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
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
    if (capacity == n) {
      std::iota(indices, indices + n, Index(0));
      return 0;
    }
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

// f(part, first) over rows of a problem, so few at a time that they are found in the cache again. Many such parts are
// shared between the threads, of few parts each is.
template <class X, class F>
void for_parts(const Problem& problem, F&& f) {
  constexpr std::size_t kEntries = 1 << 14;
  const std::size_t together = problem.n < kEntries ? kEntries / problem.n : 1;
  const std::size_t parts = (problem.rows + together - 1) / together;
  // Below that, threads cost more than they bring: 64 rows of 1,000 took a third longer with two.
  constexpr std::size_t kAlone = 1 << 17;
  const bool shared = parts >= problem.threads && problem.rows * problem.n >= kAlone;
  parallel_for(parts, shared ? problem.threads : 1, [&](std::size_t i) {
    const std::size_t first = i * together;
    Problem part = rows_of(problem, first, std::min(together, problem.rows - first));
    if (shared) part.threads = 1;
    f(part, first);
  });
}

template <class X>
void solve_and_select(const Problem& problem, const Slots& slots) {
  const std::size_t n = problem.n, capacity = slots.capacity;
  for_parts<X>(problem, [&](const Problem& part, std::size_t first) {
    const std::unique_ptr<X[]> y(new X[part.rows * n]);
    forward(part, y.get());
    Selector<X> row;
    for (std::size_t i = 0; i < part.rows; ++i) {
      const X* from = y.get() + i * n;
      X* values = static_cast<X*>(slots.values) + (first + i) * capacity;
      std::int32_t* indices = slots.indices + (first + i) * capacity;
      const double dropped = row(from, n, capacity, indices), pivot = part.state[i].pivot;
      for (std::size_t slot = 0; slot < capacity; ++slot) values[slot] = from[indices[slot]];
      slots.dropped[first + i] = pivot != pivot ? pivot : dropped;
    }
  });
}

// The hard mask of rows of a problem, by magnitude if that is what it asks for.
template <class X>
std::unique_ptr<X[]> hard_mask(const Problem& part) {
  const std::size_t entries = part.rows * part.n;
  std::unique_ptr<X[]> y(new X[entries]), sizes;
  std::vector<State> state(part.rows);
  const double none = 0;
  Problem hard = part;
  hard.op = Operator::mask, hard.state = state.data(), hard.lam = &none, hard.lam_stride = 0;
  if (part.op == Operator::magnitude) {
    sizes.reset(new X[entries]);
    for (std::size_t i = 0; i < part.rows; ++i) {
      const X* from = static_cast<const X*>(part.x) + i * part.row_stride;
      std::transform(from, from + part.n, sizes.get() + i * part.n, [](X x) {
        const Wide<X> value = widen(x);  // NaN stays one
        return narrow<X>(value < 0 ? -value : value);
      });
    }
    hard.x = sizes.get(), hard.row_stride = part.n;
  }
  forward(hard, y.get());
  return y;
}

// A row in slots: x, and its hard and its relaxed output.
template <class X>
struct StraightRow {
  const X *x, *hard;
  X* y;  // is 0 afterwards where there is a slot
  std::size_t n;
  bool magnitude;

  // The hard selection first, in the order of the indices as those after it.
  std::size_t order(Selector<X>& selector, std::size_t capacity, X* keys, std::int32_t* indices) const {
    const X most = narrow<X>(std::numeric_limits<Wide<X>>::infinity());
    for (std::size_t j = 0; j < n; ++j) keys[j] = widen(hard[j]) > 0 ? most : y[j];
    selector(keys, n, capacity, indices);
    const auto first = [this](std::int32_t j) { return widen(hard[j]) > 0; };
    return std::size_t(std::stable_partition(indices, indices + capacity, first) - indices);
  }

  double fill(const std::int32_t* indices, std::size_t capacity, std::size_t count, X* values) const {
    for (std::size_t slot = 0; slot < capacity; ++slot) {
      const std::size_t j = std::size_t(indices[slot]);
      const Wide<X> value = slot < count ? widen(hard[j]) * (magnitude ? widen(x[j]) : Wide<X>(1)) : Wide<X>(0);
      values[slot] = narrow<X>(value), y[j] = X{};
    }
    double dropped = 0;
    for (std::size_t j = 0; j < n; ++j) dropped += double(size_of(y[j]));
    return dropped;
  }
};

template <class X>
void solve_straight(const Problem& problem, const Slots& slots, bool* selected) {
  const std::size_t n = problem.n, capacity = slots.capacity;
  for_parts<X>(problem, [&](const Problem& part, std::size_t first) {
    const std::unique_ptr<X[]> y(new X[part.rows * n]), keys(new X[n]), hard = hard_mask<X>(part);
    forward(part, y.get());
    Selector<X> selector;
    for (std::size_t i = 0; i < part.rows; ++i) {
      const std::size_t at = (first + i) * capacity;
      const X* x = static_cast<const X*>(part.x) + i * part.row_stride;
      X* values = static_cast<X*>(slots.values) + at;
      const StraightRow<X> row{x, hard.get() + i * n, y.get() + i * n, n, part.op == Operator::magnitude};
      const std::size_t count = row.order(selector, capacity, keys.get(), slots.indices + at);
      const double dropped = row.fill(slots.indices + at, capacity, count, values), pivot = part.state[i].pivot;
      for (std::size_t slot = 0; slot < capacity; ++slot) selected[at + slot] = slot < count;
      const X none = narrow<X>(std::numeric_limits<Wide<X>>::quiet_NaN());
      const bool crowded = capacity < n && part.k_of(i) > double(capacity);
      if (pivot != pivot || crowded) std::fill_n(values, capacity, none);
      slots.dropped[first + i] = pivot != pivot ? pivot : dropped;
    }
  });
}

// The cotangent of y of a row that it is 0 in: of entries with a slot, and by their signs of those without, for which y
// is found again.
template <class X>
void spread_cotangents(const Problem& row, const SlotCotangents& g, std::size_t i, X* out) {
  const std::int32_t* indices = g.indices + i * g.capacity;
  const X* values = static_cast<const X*>(g.values) + i * g.capacity;
  if (g.dropped[i] != 0) {
    const std::unique_ptr<X[]> y(new X[row.n]);
    State state;
    Problem again = row;
    again.state = &state;
    forward(again, y.get());
    for (std::size_t j = 0; j < row.n; ++j) {
      const Wide<X> value = widen(y[j]);
      if (value > 0 || value < 0) out[j] = narrow<X>(Wide<X>(value > 0 ? g.dropped[i] : -g.dropped[i]));
    }
  }
  for (std::size_t slot = 0; slot < g.capacity; ++slot) {
    if (indices[slot] < 0 || std::size_t(indices[slot]) >= row.n)
      throw std::invalid_argument("indices must be in [0, n), got " + std::to_string(indices[slot]));
    out[indices[slot]] = values[slot];
  }
}

template <class X>
void pull_back(const Problem& problem, const SlotCotangents& g, void* dx, double* dk, double* dlam) {
  const std::size_t n = problem.n;
  for_parts<X>(problem, [&](const Problem& part, std::size_t first) {
    const std::unique_ptr<X[]> of_y(new X[part.rows * n]());
    for (std::size_t i = 0; i < part.rows; ++i)
      spread_cotangents(rows_of(part, i, 1), g, first + i, of_y.get() + i * n);
    backward(part, of_y.get(), static_cast<X*>(dx) + first * n, dk + first, dlam + first);
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

void select_straight(const Problem& problem, const Slots& slots, bool* selected) {
  if (problem.rows == 0 || problem.n == 0) return;
  with_entries(problem.dtype, problem.x,
               [&](const auto* x) { solve_straight<std::decay_t<decltype(*x)>>(problem, slots, selected); });
}

void select_backward(const Problem& problem, const SlotCotangents& g, void* dx, double* dk, double* dlam) {
  if (problem.rows == 0 || problem.n == 0) return;
  with_entries(problem.dtype, problem.x,
               [&](const auto* x) { pull_back<std::decay_t<decltype(*x)>>(problem, g, dx, dk, dlam); });
}

}  // namespace sparsetopk
