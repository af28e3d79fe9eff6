#include "solve.hpp"

#include <vector>

namespace sparsetopk {
namespace {

struct Rows {
  const double* x;
  std::size_t rows, n;
  const double* k;
  const double* lam;
  Threshold* out;
};

template <bool kAbsolute, class Kind>
void solve_all(const Rows& rows, const Kind& kind, bool floor_at_zero) {
  std::vector<double> scratch(kScratch);
  for (std::size_t row = 0; row < rows.rows; ++row)
    rows.out[row] = solve_row<kAbsolute>(rows.x + row * rows.n, rows.n, rows.k[row], rows.lam[row],
                                         floor_at_zero, kind, scratch.data());
}

template <class P>
void solve_power(Operator op, const Rows& rows, const P& power) {
  switch (op) {
    case Operator::mask:
      return solve_all<false>(rows, Mask<P>{power}, false);
    case Operator::sign:
      return solve_all<true>(rows, Mask<P>{power}, true);
    default:
      return solve_all<true>(rows, Magnitude<P>{power}, false);
  }
}

}  // namespace

void solve_rows(Operator op, double exponent, const double* x, std::size_t rows_, std::size_t n, const double* k,
                const double* lam, Threshold* out) {
  const Rows rows{x, rows_, n, k, lam, out};
  if (op == Operator::two_sided) {
    if (exponent == 1) return solve_all<false>(rows, TwoSided<1>{}, false);
    if (exponent == 2) return solve_all<false>(rows, TwoSided<2>{}, false);
    return solve_all<false>(rows, TwoSided<3>{}, false);
  }
  if (exponent == 1) return solve_power(op, rows, Power<1>{});
  if (exponent == 2) return solve_power(op, rows, Power<2>{});
  if (exponent == 3) return solve_power(op, rows, Power<3>{});
  return solve_power(op, rows, Power<0>{exponent});
}

}  // namespace sparsetopk
