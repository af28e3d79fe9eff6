// Rows are shared between threads, every call goes to the level that the CPU supports, and large outputs
// to large pages.
#include <atomic>
#include <cstdint>

#include "cpu.hpp"
#include "parallel.hpp"
#include "widened.hpp"

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

std::atomic<std::uint64_t> read_so_far{0};

}  // namespace

const Kernels kernels = choose();

void add_entries_read(std::size_t count) { read_so_far.fetch_add(count, std::memory_order_relaxed); }
std::uint64_t entries_read() { return read_so_far.exchange(0, std::memory_order_relaxed); }

void forward(const Problem& problem, void* y) {
  prefer_large_pages(problem, y);
  for_rows(problem,
           [y](const Problem& p, std::size_t begin, std::size_t end) { forward_in(kernels, p, begin, end, y); });
}

void backward(const Problem& problem, const void* g, void* dx, double* dk, double* dlam) {
  prefer_large_pages(problem, dx);
  for_rows(problem, [=](const Problem& p, std::size_t begin, std::size_t end) {
    backward_in(kernels, p, begin, end, g, dx, dk, dlam);
  });
}

void loss(const Problem& problem, const Targets& targets, void* y, double* value) {
  for_rows(problem, [&](const Problem& p, std::size_t begin, std::size_t end) {
    loss_in(kernels, p, begin, end, targets, y, value);
  });
}

}  // namespace sparsetopk
