// Rows in the kernels of some level, through float32 where these have none for 16 bits.
#pragma once

#include <algorithm>
#include <memory>

#include "kernels.hpp"
#include "parts.hpp"

namespace sparsetopk {

// 16 bits have kernels of their own where to read takes longer than to compute: with all of them the core would be twice
// as large.
inline bool has_kernels(const Problem& problem) {
  const bool is_linear = problem.exponent == 1 && problem.op != Operator::two_sided;
  return size_of(problem.dtype) > 2 || is_linear || problem.hard();
}

// Some rows of a problem as float32, with room for two more arrays of their size.
class Widened {
 public:
  Widened(const Kernels& kernels, const Problem& problem, std::size_t most)
      : kernels_(kernels), problem_(problem), size_(most * problem.n), room_(new float[3 * size_]) {}

  Problem rows(std::size_t first, std::size_t count) const {
    Problem part = rows_of(problem_, first, count);
    const std::size_t n = part.n, stride = part.row_stride * size_of(part.dtype);
    const char* x = static_cast<const char*>(part.x);
    if (part.row_stride == n)
      kernels_.widen(part.dtype, x, count * n, room_.get());
    else
      for (std::size_t i = 0; i < count; ++i) kernels_.widen(part.dtype, x + i * stride, n, room_.get() + i * n);
    part.x = room_.get(), part.dtype = Dtype::float32, part.row_stride = n;
    return part;
  }
  float* one() const { return room_.get() + size_; }
  float* other() const { return one() + size_; }

 private:
  const Kernels& kernels_;
  const Problem& problem_;
  std::size_t size_;
  std::unique_ptr<float[]> room_;
};

// f(some, first, count) for as many rows at a time as a cache holds, or one.
template <class F>
void for_widened(const Kernels& kernels, const Problem& problem, std::size_t begin, std::size_t end, const F& f) {
  constexpr std::size_t kCached = 16384;  // entries
  const std::size_t most =
      std::min(std::max<std::size_t>(kCached / std::max<std::size_t>(problem.n, 1), 1), end - begin);
  const Widened some(kernels, problem, most);
  for (std::size_t first = begin; first < end; first += most) f(some, first, std::min(most, end - first));
}

// The entries of an array from row ``first`` on.
template <class T>
T* from_row(const Problem& problem, T* entries, std::size_t first) {
  using Byte = typename std::conditional<std::is_const<T>::value, const char, char>::type;
  return static_cast<Byte*>(entries) + first * problem.n * size_of(problem.dtype);
}

inline void forward_in(const Kernels& kernels, const Problem& problem, std::size_t begin, std::size_t end, void* y) {
  if (has_kernels(problem)) return kernels.forward(problem, begin, end, y);
  for_widened(kernels, problem, begin, end, [&](const Widened& some, std::size_t first, std::size_t count) {
    kernels.forward(some.rows(first, count), 0, count, some.one());
    kernels.narrow(problem.dtype, some.one(), count * problem.n, from_row(problem, y, first));
  });
}

inline void backward_in(const Kernels& kernels, const Problem& problem, std::size_t begin, std::size_t end,
                        const void* g, void* dx, double* dk, double* dlam) {
  if (has_kernels(problem)) return kernels.backward(problem, begin, end, g, dx, dk, dlam);
  for_widened(kernels, problem, begin, end, [&](const Widened& some, std::size_t first, std::size_t count) {
    kernels.widen(problem.dtype, from_row(problem, g, first), count * problem.n, some.one());
    kernels.backward(some.rows(first, count), 0, count, some.one(), some.other(), dk ? dk + first : nullptr,
                     dlam ? dlam + first : nullptr);
    kernels.narrow(problem.dtype, some.other(), count * problem.n, from_row(problem, dx, first));
  });
}

// Losses have kernels for no 16 bits.
inline void loss_in(const Kernels& kernels, const Problem& problem, std::size_t begin, std::size_t end,
                    const Targets& targets, void* y, double* value) {
  if (size_of(problem.dtype) > 2) return kernels.loss(problem, begin, end, targets, y, value);
  for_widened(kernels, problem, begin, end, [&](const Widened& some, std::size_t first, std::size_t count) {
    kernels.loss(some.rows(first, count), 0, count, targets.from_row(first, problem.n), some.one(), value + first);
    kernels.narrow(problem.dtype, some.one(), count * problem.n, from_row(problem, y, first));
  });
}

}  // namespace sparsetopk
