#include "selection.hpp"

#include <algorithm>
#include <functional>
#include <vector>

#define SPARSETOPK_LEVEL baseline
#include "dtypes.hpp"

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
void fill_up(const std::int64_t* found, std::size_t count, std::size_t capacity, std::int64_t* indices) {
  std::size_t next = 0, others = capacity - count;
  for (std::int64_t j = 0; others > 0; ++j) {
    if (next < count && found[next] == j)
      ++next;
    else
      --others;
    *indices++ = j;
  }
  std::copy(found + next, found + count, indices);
}

// Of the indices that were found those of the largest magnitudes, in order.
template <class X>
void keep_largest(const X* y, const std::int64_t* found, std::size_t count, std::size_t capacity,
                  std::vector<Wide<X>>& sizes, std::int64_t* indices) {
  sizes.resize(count);
  std::transform(found, found + count, sizes.begin(), [y](std::int64_t j) { return size_of(y[j]); });
  std::nth_element(sizes.begin(), sizes.begin() + (capacity - 1), sizes.end(), std::greater<>());
  const Wide<X> least = sizes[capacity - 1];
  const auto above = std::count_if(sizes.begin(), sizes.end(), [least](Wide<X> size) { return size > least; });
  std::size_t ties = capacity - std::size_t(above);
  for (const std::int64_t* j = found; j != found + count; ++j) {
    const Wide<X> size = size_of(y[*j]);
    if (size < least || (size == least && ties == 0)) continue;
    ties -= size == least;
    *indices++ = *j;
  }
}

template <class X>
void select(std::size_t rows, std::size_t n, const X* y, std::size_t capacity, std::int64_t* indices) {
  std::vector<std::int64_t> found;
  std::vector<Wide<X>> sizes;
  for (std::size_t i = 0; i < rows; ++i, y += n, indices += capacity) {
    const std::size_t count = find_nonzeros(y, n, found);
    if (count <= capacity)
      fill_up(found.data(), count, capacity, indices);
    else
      keep_largest(y, found.data(), count, capacity, sizes, indices);
  }
}

}  // namespace

void select_slots(Dtype dtype, std::size_t rows, std::size_t n, const void* y, std::size_t capacity,
                  std::int64_t* indices) {
  switch (dtype) {
    case Dtype::float32:
      return select(rows, n, static_cast<const float*>(y), capacity, indices);
    case Dtype::float64:
      return select(rows, n, static_cast<const double*>(y), capacity, indices);
    case Dtype::float16:
      return select(rows, n, static_cast<const Half*>(y), capacity, indices);
    case Dtype::bfloat16:
      return select(rows, n, static_cast<const BFloat16*>(y), capacity, indices);
  }
}

}  // namespace sparsetopk
