// The response of the two-sided p-norm on [-1, 0]: y in [0, 1/2] with y^a - (1-y)^a = -tau, where a = p - 1 and tau is
// in [0, 1]. In closed form for p = 2 and 3/2, and by a table for any other p.
#pragma once

#include <cmath>
#include <cstring>

#include "power.hpp"
#include "response_table.hpp"
#include "tiles.hpp"

namespace sparsetopk {
namespace SPARSETOPK_LEVEL {

// p = 2
struct StraightHalf {
  double exponent = 1;
  static constexpr bool kVector = true, kCheap = true, kPlain = true;
  double power(double y) const { return y * y; }
  Response half(double tau) const { return {(1 - tau) / 2, 0.5}; }
};

// p = 3/2
struct RootHalf {
  double exponent = 2;
  static constexpr bool kVector = true, kCheap = false, kPlain = true;
  double power(double y) const { return y * ::sqrt(y); }
  Response half(double tau) const {
    const double root = ::sqrt(2 - tau * tau), rest = (1 + tau) * (1 - tau), other = 1 + tau * root;
    const double scale = rest / (root * other);  // one division for both
    return {0.5 * rest * root * scale, other * scale};
  }
};

struct TableHalf {
  double exponent;
  const ResponseInterval* intervals;
  std::int64_t last;
  static constexpr bool kVector = true, kCheap = false, kPlain = false;
  double power(double y) const { return y > 0 ? y * ::pow(y, 1 / exponent) : 0; }

  explicit TableHalf(const ResponseTable& table)
      : exponent(table.exponent), intervals(table.intervals.get()), last(table.last) {}

  Response half(double tau) const {
    const double s = 1 - tau, z = s < 0.5 ? s : tau;
    const ResponseInterval& at = intervals[index(s, z)];
    const double away = z - at.middle, u = away * at.scale;
    double slope = 0, integral = 0;
#pragma GCC unroll 12
    for (int i = ResponseInterval::kTerms - 1; i >= 0; --i) {
      slope = slope * u + at.slopes[i];
      integral = integral * u + at.slopes[i] * (1.0 / (i + 1));
    }
    const double inside = tau < 1 ? 1.0 : 0.0;
    return {(at.value + away * integral) * inside, ::fabs(slope) * inside};
  }

 private:
  // Counted down from the octave of [1/4, 1/2), by the exponent of z and its first three bits.
  std::int64_t index(double s, double z) const {
    constexpr int kShift = 52 - 3;
    static_assert(ResponseInterval::kParts == 8, "");
    constexpr std::int64_t kFirst = (std::int64_t(1022) << 3) - 1;
    std::int64_t bits;
    std::memcpy(&bits, &z, sizeof(bits));
    const std::int64_t down = larger(kFirst - (bits >> kShift), std::int64_t(0));
    return s < 0.5 ? smaller(down, std::int64_t(ResponseTable::kOfTau - 1))
                   : smaller(down + ResponseTable::kOfTau, last);
  }
};

// f with the half for 1/(p - 1) = e; there is a table where one is needed.
template <class F>
void with_half(double e, const ResponseTable* table, F&& f) {
  if (e == 1) return f(StraightHalf{});
  if (e == 2) return f(RootHalf{});
  f(TableHalf(*table));
}

}  // namespace SPARSETOPK_LEVEL
}  // namespace sparsetopk
