// Where a row is looked at first.
#pragma once

#include "tiles.hpp"

namespace sparsetopk {
namespace SPARSETOPK_LEVEL {

constexpr std::size_t kSeeds = 8;  // entries that decide where

// Positions in a row of n entries, one at random in each of ``count`` <= n parts of equal length. At even distances
// they would meet entries of one kind only in a row with channels of that distance. What is random is a hash of the
// length and a few entries: the same for the same row on any number of threads, whatever the instruction set.
class Positions {
 public:
  template <class X>
  Positions(const X* x, std::size_t n, std::size_t count)
      : count_(count), length_(n / count), surplus_(n % count), random_(n) {
    for (std::size_t i = 0; i < kSeeds; ++i) {
      std::uint64_t bits = 0;
      std::memcpy(&bits, x + (n - 1) * i / (kSeeds - 1), sizeof(X));
      random_ = (random_ ^ bits) * 0x9e3779b97f4a7c15u;  // odd, with bits as if random: those of the golden ratio
      random_ ^= random_ >> 29;
    }
  }

  // That in the next part.
  std::size_t next() {
    const std::size_t begin = end_;
    end_ += length_, fraction_ += surplus_;
    if (fraction_ >= count_) fraction_ -= count_, ++end_;
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;  // Knuth's linear congruential generator
    return begin + std::size_t((random_ >> 32) * (end_ - begin) >> 32);
  }

 private:
  std::size_t count_, length_, surplus_, fraction_ = 0, end_ = 0;
  std::uint64_t random_;
};

}  // namespace SPARSETOPK_LEVEL
}  // namespace sparsetopk
