// One row of the magnitude operator that is spread over many arrays, and never put together: every pass over
// the pieces returns sums, and what they decide is up to the caller, who may add those of other machines.
#pragma once

#include <cstdint>

#include "problem.hpp"

namespace sparsetopk {

// A contiguous part of the row, of at most 2^16 entries. ``out`` has room for n of them: for y, or in the backward dx.
// While the threshold is looked for, the undecided entries are kept: beside it in ``room`` if that is there and they
// are few, with their positions, and y is written already where it is decided; else in ``out``.
struct Piece {
  const void* x;
  void* out;
  const void* g;  // the cotangent of y, for the backward
  std::int64_t n;
  std::int64_t dtype;   // of x, out and g
  std::int64_t kept;    // how many entries are undecided
  void* room;           // for n / kFewest of them and their positions, or null
  std::int64_t beside;  // whether they are kept there
  double left;          // lam = 0: the mass for the entries of this piece that are at the pivot, infinite for all
};

struct Pieces {
  Piece* begin;
  std::size_t count, threads;
};

// The row with its settings and its state; lam > 0 is not below 2^-1000.
struct Spread {
  double exponent;
  bool debias;
  double k, lam;
  State state;
  bool is_long;           // the row is longer than the caches
  bool in_float = false;  // float has the digits for sums over many entries
};

// Sizes |x| are compared as doubles, whatever the dtype.
struct Bounds {
  double from, to;  // what is undecided
  double lo, hi;    // the bracket of the boundary, inside it
  bool is_long;     // the row is longer than the caches
};
constexpr std::int64_t kFewest = 40;
struct Counts {
  std::int64_t over = 0;                  // entries above ``to``
  std::int64_t over_hi = 0, from_lo = 0;  // entries above hi, and entries from lo on
  std::int64_t invalid = 0;               // pieces with a NaN or an infinity
};

// Keeps the undecided entries. In pieces with room beside, what is above them must be selected as it is.
Counts gather(const Pieces& pieces, const Bounds& bounds);

// How many of the kept entries of each piece have a size.
void ties(const Pieces& pieces, double size, std::int64_t* counts);

// Of the kept entries, how many have bits b (as a double, without sign) in [first + (j << shift), first + ((j + 1) <<
// shift)) and b <= last, for j < kBuckets.
constexpr std::size_t kBuckets = 1024;
void histogram(const Pieces& pieces, std::uint64_t first, std::uint64_t last, int shift, std::int64_t* counts);

// Of the kept entries, the smallest from ``cut`` on and the largest below it; infinite if there is none.
struct Neighbours {
  double above, below;
};
Neighbours neighbours(const Pieces& pieces, double cut);

// Over the kept entries, sums of S(t) and S'(t) inside the block, and the number of entries selected whole.
struct Masses {
  double mass, slope, above;
};
Masses masses(const Pieces& pieces, const Spread& row);

// Writes y, or what is left of it to write.
void apply(const Pieces& pieces, const Spread& row);

// The sums that the derivatives need, as BlockSums in cotangents.hpp has them.
constexpr std::size_t kBlockSums = 8;
void block_sums(const Pieces& pieces, const Spread& row, double* sums);

// Writes dx, given these sums over the whole row. Returns the part of the cotangent of lam that rows without a
// threshold have, over these pieces.
double cotangents(const Pieces& pieces, const Spread& row, const double* sums);

}  // namespace sparsetopk
