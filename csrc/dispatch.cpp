// Rows are shared between threads, every call goes to the level that the CPU supports, rows of 16 bits that have no
// kernels are widened, and large outputs go to large pages.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "cpu.hpp"
#include "kernels.hpp"
#include "parallel.hpp"
#include "parts.hpp"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace sparsetopk {
namespace {

// A large output is fresh memory: with pages of 4 KiB the system spends more time on handing them out than the
// kernels on filling them. This asks for large ones, where the system leaves the choice to the program.
void prefer_large_pages(const Problem& problem, void* output) {
#ifdef __linux__
  constexpr std::uintptr_t kPage = 4096, kLarge = 4 << 20;  // a large page has 2 MiB
  const auto begin = reinterpret_cast<std::uintptr_t>(output);
  const std::uintptr_t end = begin + problem.rows * problem.n * size_of(problem.dtype);
  if (end - begin < kLarge) return;
  const std::uintptr_t first = (begin + kPage - 1) / kPage * kPage;
  madvise(reinterpret_cast<void*>(first), end / kPage * kPage - first, MADV_HUGEPAGE);  // a wish: may fail
#else
  (void)problem, (void)output;
#endif
}

Kernels choose() {
#ifdef SPARSETOPK_WIDE  // set by the build that has them
  switch (simd_level()) {
    case SimdLevel::avx512:
      return avx512::all;
    case SimdLevel::avx2:
      return avx2::all;
    case SimdLevel::baseline:
      break;
  }
#endif
  return baseline::all;
}

// run(problem, begin, end) over all rows: many rows are shared between the threads, of few rows each is.
template <class Run>
void for_rows(const Problem& problem, Run run) {
  constexpr std::size_t kGrain = 16384;  // entries: below that, waking a thread costs more than it brings
  const std::size_t total = problem.rows * problem.n;
  Problem inner = problem;
  const bool closed = problem.exponent == 1 || problem.exponent == 2;
  std::shared_ptr<const ResponseTable> table;
  if (problem.op == Operator::two_sided && !closed) table = response_table(problem.exponent);
  inner.table = table.get();
  // 64,000 entries with p = 2 take one thread as long as two, and two threads more of the machine.
  if (total < (problem.exponent == 1 ? 4 : 2) * kGrain) {
    inner.threads = 1;
    return run(inner, 0, problem.rows);
  }
  const bool shared = problem.threads > 1 && problem.rows >= problem.threads;
  if (shared) inner.threads = 1;
  const std::size_t at_least = (kGrain + problem.n - 1) / problem.n;
  const std::size_t even = shared ? (problem.rows + 16 * problem.threads - 1) / (16 * problem.threads) : 1;
  const std::size_t chunk = at_least > even ? at_least : even;
  struct Call {
    const Problem& problem;
    Run& run;
    std::size_t chunk;
  } call{inner, run, chunk};
  parallel_for((problem.rows + chunk - 1) / chunk, shared ? problem.threads : 1,
               [](void* context, std::size_t i) {
                 const Call& call = *static_cast<Call*>(context);
                 const std::size_t begin = i * call.chunk, end = begin + call.chunk;
                 call.run(call.problem, begin, end < call.problem.rows ? end : call.problem.rows);
               },
               &call);
}

// 16 bits have kernels of their own where to read takes longer than to compute: with all of them the core would be twice
// as large.
bool has_kernels(const Problem& problem) {
  const bool is_linear = problem.exponent == 1 && problem.op != Operator::two_sided;
  return size_of(problem.dtype) > 2 || is_linear || problem.hard();
}

// Some rows of a problem as float32, with room for two more arrays of their size.
class Widened {
 public:
  Widened(const Problem& problem, std::size_t most)
      : problem_(problem), size_(most * problem.n), room_(new float[3 * size_]) {}

  Problem rows(std::size_t first, std::size_t count) const {
    Problem part = rows_of(problem_, first, count);
    const std::size_t n = part.n, stride = part.row_stride * size_of(part.dtype);
    const char* x = static_cast<const char*>(part.x);
    if (part.row_stride == n)
      kernels.widen(part.dtype, x, count * n, room_.get());
    else
      for (std::size_t i = 0; i < count; ++i) kernels.widen(part.dtype, x + i * stride, n, room_.get() + i * n);
    part.x = room_.get(), part.dtype = Dtype::float32, part.row_stride = n;
    return part;
  }
  float* one() const { return room_.get() + size_; }
  float* other() const { return one() + size_; }

 private:
  const Problem& problem_;
  std::size_t size_;
  std::unique_ptr<float[]> room_;
};

// f(some, first, count) for as many rows at a time as a cache holds, or one.
template <class F>
void for_widened(const Problem& problem, std::size_t begin, std::size_t end, const F& f) {
  constexpr std::size_t kCached = 16384;  // entries
  const std::size_t most =
      std::min(std::max<std::size_t>(kCached / std::max<std::size_t>(problem.n, 1), 1), end - begin);
  const Widened some(problem, most);
  for (std::size_t first = begin; first < end; first += most) f(some, first, std::min(most, end - first));
}

// The entries of an array from row ``first`` on.
template <class T>
T* from_row(const Problem& problem, T* entries, std::size_t first) {
  using Byte = typename std::conditional<std::is_const<T>::value, const char, char>::type;
  return static_cast<Byte*>(entries) + first * problem.n * size_of(problem.dtype);
}

std::atomic<std::uint64_t> read_so_far{0};

}  // namespace

const Kernels kernels = choose();

void add_entries_read(std::size_t count) { read_so_far.fetch_add(count, std::memory_order_relaxed); }
std::uint64_t entries_read() { return read_so_far.exchange(0, std::memory_order_relaxed); }

void forward(const Problem& problem, void* y) {
  prefer_large_pages(problem, y);
  for_rows(problem, [y](const Problem& p, std::size_t begin, std::size_t end) {
    if (has_kernels(p)) return kernels.forward(p, begin, end, y);
    for_widened(p, begin, end, [&](const Widened& some, std::size_t first, std::size_t count) {
      kernels.forward(some.rows(first, count), 0, count, some.one());
      kernels.narrow(p.dtype, some.one(), count * p.n, from_row(p, y, first));
    });
  });
}

void backward(const Problem& problem, const void* g, void* dx, double* dk, double* dlam) {
  prefer_large_pages(problem, dx);
  for_rows(problem, [=](const Problem& p, std::size_t begin, std::size_t end) {
    if (has_kernels(p)) return kernels.backward(p, begin, end, g, dx, dk, dlam);
    for_widened(p, begin, end, [&](const Widened& some, std::size_t first, std::size_t count) {
      kernels.widen(p.dtype, from_row(p, g, first), count * p.n, some.one());
      kernels.backward(some.rows(first, count), 0, count, some.one(), some.other(), dk ? dk + first : nullptr,
                       dlam ? dlam + first : nullptr);
      kernels.narrow(p.dtype, some.other(), count * p.n, from_row(p, dx, first));
    });
  });
}

void loss(const Problem& problem, const Targets& targets, void* y, double* value) {
  for_rows(problem, [&](const Problem& p, std::size_t begin, std::size_t end) {
    if (size_of(p.dtype) > 2) return kernels.loss(p, begin, end, targets, y, value);
    for_widened(p, begin, end, [&](const Widened& some, std::size_t first, std::size_t count) {
      kernels.loss(some.rows(first, count), 0, count, targets.from_row(first, p.n), some.one(), value + first);
      kernels.narrow(p.dtype, some.one(), count * p.n, from_row(p, y, first));
    });
  });
}

}  // namespace sparsetopk
