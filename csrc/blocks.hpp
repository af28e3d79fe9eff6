// A long row in blocks, which threads share. The blocks depend on the length alone, and results are put
// together in their order: they do not depend on the number of threads.
#pragma once

#include "parallel.hpp"
#include "tiles.hpp"

namespace sparsetopk {
namespace SPARSETOPK_LEVEL {

constexpr std::size_t kBlocks = 64;

struct Blocks {
  std::size_t n, size = 65536, count = 1;
  explicit Blocks(std::size_t n_) : n(n_) {
    if (n <= size) return;
    size = larger(size, (n + kBlocks - 1) / kBlocks);
    count = (n + size - 1) / size;
  }
  // f(block, begin, length) for every block.
  template <class F>
  void run(std::size_t threads, F&& f) const {
    if (count <= 1) return f(0, 0, n);
    struct Call {
      const Blocks& blocks;
      F& f;
    } call{*this, f};
    parallel_for(
        count, threads,
        [](void* context, std::size_t block) {
          const Call& call = *static_cast<Call*>(context);
          const std::size_t begin = block * call.blocks.size;
          call.f(block, begin, smaller(call.blocks.size, call.blocks.n - begin));
        },
        &call);
  }
};

}  // namespace SPARSETOPK_LEVEL
}  // namespace sparsetopk
