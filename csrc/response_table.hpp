// The response of the two-sided p-norm where it has no closed form: y in [0, 1/2] with y^a - (1-y)^a = -tau for tau
// in [0, 1] and a = p - 1, as a polynomial on each of many intervals.
#pragma once

#include <cstddef>
#include <memory>

namespace sparsetopk {

// An interval of z, which is 1 - tau or tau, whichever is smaller: each octave of it is cut into kParts, so that the
// power of z that y is like near an end is no steeper on one than on another.
struct ResponseInterval {
  static constexpr int kParts = 8, kTerms = 12;
  double middle, scale;   // u = (z - middle) scale is in [-1, 1]
  double value;           // y in the middle
  double slopes[kTerms];  // dy/dz as a polynomial in u
  double unused;
};

struct ResponseTable {
  static constexpr int kOctaves = 53;                                 // of 1 - tau, from 1/2 down to its last bit
  static constexpr int kOfTau = kOctaves * ResponseInterval::kParts;  // the first interval of tau
  double exponent;                                                    // 1/a
  int last;                                                           // the last interval, where tau ends at 0
  std::unique_ptr<ResponseInterval[]> intervals;
};

// That of 1/a = exponent; the last few that were asked for are kept, as one takes a millisecond or two to make.
std::shared_ptr<const ResponseTable> response_table(double exponent);

}  // namespace sparsetopk
