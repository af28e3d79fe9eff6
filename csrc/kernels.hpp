// The kernels at every instruction-set level: rows [begin, end) of a problem, or one piece of a row.
#pragma once

#include "pieces.hpp"
#include "problem.hpp"

namespace sparsetopk {

struct Kernels {
  void (*forward)(const Problem& problem, std::size_t begin, std::size_t end, void* y);
  void (*backward)(const Problem& problem, std::size_t begin, std::size_t end, const void* g, void* dx, double* dk,
                   double* dlam);
  void (*loss)(const Problem& problem, std::size_t begin, std::size_t end, const Targets& targets, void* y,
               double* value);
  // Entries of a dtype as float32, and the other way, as finite as the dtype holds them.
  void (*widen)(Dtype dtype, const void* narrow, std::size_t count, float* wide);
  void (*narrow)(Dtype dtype, const float* wide, std::size_t count, void* narrow);
  Counts (*gather)(Piece& piece, const Bounds& bounds);
  std::int64_t (*ties)(const Piece& piece, double size);
  void (*histogram)(const Piece& piece, std::uint64_t first, std::uint64_t last, int shift, std::int64_t* counts);
  Neighbours (*neighbours)(const Piece& piece, double cut);
  Masses (*masses)(const Piece& piece, const Spread& row);
  void (*apply)(const Piece& piece, const Spread& row);
  void (*block_sums)(const Piece& piece, const Spread& row, double* sums);
  double (*cotangents)(const Piece& piece, const Spread& row, const double* sums);
};

// All of a level: defined where they are, at the end of kernels.cpp, which is compiled for each.
namespace baseline {
extern const Kernels all;
}
namespace avx2 {
extern const Kernels all;
}
namespace avx512 {
extern const Kernels all;
}

// Told by the kernels; see entries_read in problem.hpp.
void add_entries_read(std::size_t count);

// Those for the level that the CPU supports.
extern const Kernels kernels;

}  // namespace sparsetopk
