// The kernels at every instruction-set level: rows [begin, end) of a problem, or one piece of a row.
#pragma once

#include "pieces.hpp"
#include "problem.hpp"

namespace sparsetopk {

#define SPARSETOPK_DECLARE(level)                                                                                \
  namespace level {                                                                                              \
  void forward(const Problem& problem, std::size_t begin, std::size_t end, void* y);                             \
  void backward(const Problem& problem, std::size_t begin, std::size_t end, const void* g, void* dx, double* dk, \
                double* dlam);                                                                                   \
  Counts gather(Piece& piece, const Bounds& bounds);                                                             \
  std::int64_t ties(const Piece& piece, double size);                                                            \
  void histogram(const Piece& piece, std::uint64_t first, std::uint64_t last, int shift, std::int64_t* counts);  \
  Neighbours neighbours(const Piece& piece, double cut);                                                         \
  Masses masses(const Piece& piece, const Spread& row);                                                          \
  void apply(const Piece& piece, const Spread& row);                                                             \
  void block_sums(const Piece& piece, const Spread& row, double* sums);                                          \
  double cotangents(const Piece& piece, const Spread& row, const double* sums);                                  \
  void loss(const Problem& problem, std::size_t begin, std::size_t end, const Targets& targets, void* y,         \
            double* value);                                                                                      \
  }
SPARSETOPK_DECLARE(baseline)
SPARSETOPK_DECLARE(avx2)
SPARSETOPK_DECLARE(avx512)
#undef SPARSETOPK_DECLARE

struct Kernels {
  decltype(&baseline::forward) forward;
  decltype(&baseline::backward) backward;
  decltype(&baseline::loss) loss;
  decltype(&baseline::gather) gather;
  decltype(&baseline::ties) ties;
  decltype(&baseline::histogram) histogram;
  decltype(&baseline::neighbours) neighbours;
  decltype(&baseline::masses) masses;
  decltype(&baseline::apply) apply;
  decltype(&baseline::block_sums) block_sums;
  decltype(&baseline::cotangents) cotangents;
};

// Told by the kernels; see entries_read in problem.hpp.
void add_entries_read(std::size_t count);

// Those for the level that the CPU supports.
extern const Kernels kernels;

}  // namespace sparsetopk
