#include "selection.hpp"

#include <algorithm>
#include <functional>
#include <vector>

#define SPARSETOPK_LEVEL baseline
#include "dtypes.hpp"

namespace sparsetopk {
namespace {

using namespace baseline;

template <class X>
Wide<X> size_of(X y) {
  const Wide<X> value = widen(y);
  return value > 0 ? value : value < 0 ? -value : Wide<X>(0);
}

// The capacity-th largest magnitude, and how many of those equal to it are taken.
template <class X>
std::pair<Wide<X>, std::size_t> boundary(const X* y, std::size_t n, std::size_t capacity,
                                         std::vector<Wide<X>>& sizes) {
  sizes.clear();
  for (std::size_t j = 0; j < n; ++j)
    if (size_of(y[j]) > 0) sizes.push_back(size_of(y[j]));
  if (sizes.size() <= capacity) return {0, capacity - sizes.size()};
  std::nth_element(sizes.begin(), sizes.begin() + (capacity - 1), sizes.end(), std::greater<>());
  const Wide<X> at = sizes[capacity - 1];
  const auto above = std::count_if(sizes.begin(), sizes.end(), [at](Wide<X> size) { return size > at; });
  return {at, capacity - std::size_t(above)};
}

template <class X>
void select(std::size_t rows, std::size_t n, const X* y, std::size_t capacity, std::int64_t* indices) {
  std::vector<Wide<X>> sizes;
  for (std::size_t i = 0; i < rows; ++i, y += n, indices += capacity) {
    auto [least, ties] = boundary(y, n, capacity, sizes);
    for (std::size_t j = 0, slot = 0; slot < capacity; ++j) {
      const Wide<X> size = size_of(y[j]);
      if (size < least || (size == least && ties == 0)) continue;
      ties -= size == least;
      indices[slot++] = std::int64_t(j);
    }
  }
}

}  // namespace

void select_slots(Dtype dtype, std::size_t rows, std::size_t n, const void* y, std::size_t capacity,
                  std::int64_t* indices) {
  switch (dtype) {
    case Dtype::float32: return select(rows, n, static_cast<const float*>(y), capacity, indices);
    case Dtype::float64: return select(rows, n, static_cast<const double*>(y), capacity, indices);
    case Dtype::float16: return select(rows, n, static_cast<const Half*>(y), capacity, indices);
    case Dtype::bfloat16: return select(rows, n, static_cast<const BFloat16*>(y), capacity, indices);
  }
}

}  // namespace sparsetopk
