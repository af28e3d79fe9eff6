// How a row is read: in tiles that fit the first cache, widened to the type that is computed in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "dtypes.hpp"

namespace sparsetopk {
namespace SPARSETOPK_LEVEL {

constexpr std::size_t kTile = 1024;

// Loops worth a function of their own: one copy for all operators that share it.
#define SPARSETOPK_LOOP __attribute__((noinline))

// Independent accumulators: the compiler may not reorder floating-point sums, but it can fill its
// vectors with these, and the result does not depend on how wide the vectors are.
constexpr std::size_t kLanes = 16;

template <class A>
constexpr A smaller(A a, A b) {
  return b < a ? b : a;
}
template <class A>
constexpr A larger(A a, A b) {
  return a < b ? b : a;
}

// Halves at a time, which vectorises.
template <class A, class F>
inline A reduce(A (&lanes)[kLanes], F&& f) {
  static_assert(kLanes == 16, "");
  for (std::size_t j = 0; j < 8; ++j) lanes[j] = f(lanes[j], lanes[j + 8]);
  for (std::size_t j = 0; j < 4; ++j) lanes[j] = f(lanes[j], lanes[j + 4]);
  return f(f(lanes[0], lanes[1]), f(lanes[2], lanes[3]));
}
template <class A>
inline A least(A (&lanes)[kLanes]) {
  return reduce(lanes, smaller<A>);
}
template <class A>
inline A most(A (&lanes)[kLanes]) {
  return reduce(lanes, larger<A>);
}
template <class A>
inline double total(A (&lanes)[kLanes]) {
  return double(reduce(lanes, [](A a, A b) { return a + b; }));
}

// The sum of f over [begin, end), each lane with its own sum.
template <class F>
inline double sum_lanes(std::size_t begin, std::size_t end, F&& f) {
  double sums[kLanes] = {};
  std::size_t i = begin;
  for (; i + kLanes <= end; i += kLanes)
    for (std::size_t j = 0; j < kLanes; ++j) sums[j] += f(i + j);
  for (std::size_t j = 0; i + j < end; ++j) sums[j] += f(i + j);
  return total(sums);
}

inline float absolute(float x) { return __builtin_fabsf(x); }
inline double absolute(double x) { return __builtin_fabs(x); }

// What is compared: x, or |x|.
template <bool kAbsolute, class X>
inline Wide<X> key(X x) {
  return kAbsolute ? absolute(widen(x)) : widen(x);
}

// Asks for a tile that is looked at next: no prefetcher goes on where a page ends.
template <class X>
inline void fetch_tile(const X* x, std::size_t length) {
  constexpr std::size_t kLine = 64 / sizeof(X);
  for (std::size_t j = 0; j < length; j += kLine) __builtin_prefetch(x + j);
}

// f(keys, position, length) for every tile of x, in order.
template <bool kAbsolute, class X, class F>
inline void for_tiles(const X* x, std::size_t n, F&& f) {
  for (std::size_t i = 0; i < n; i += kTile) {
    const std::size_t length = smaller(kTile, n - i);
    if constexpr (!kAbsolute && std::is_same<X, Wide<X>>::value) {
      f(x + i, i, length);
    } else {
      Wide<X> keys[kTile];
      widen_all(x + i, length, keys);
      if (kAbsolute)
        for (std::size_t j = 0; j < length; ++j) keys[j] = absolute(keys[j]);
      f(static_cast<const Wide<X>*>(keys), i, length);
    }
  }
}

}  // namespace SPARSETOPK_LEVEL
}  // namespace sparsetopk
