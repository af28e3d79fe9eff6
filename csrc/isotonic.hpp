#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace sparsetopk {

enum class PhiName { identity, half_square, abs, exp };

// ``rows`` isotonic problems of length n, one after the other, each with its own lam > 0; see pav.hpp.
// ``exponent`` is 1/(p-1). s and w are finite and in decreasing order; w >= 0 unless phi is the identity.
void solve_isotonic(PhiName phi, double exponent, std::size_t rows, std::size_t n, const double* s, const double* w,
                    const double* lam, double* d, std::int64_t* block);

// Stable argsort of every row in decreasing order.
void argsort_descending(std::size_t rows, std::size_t n, const float* x, std::int64_t* order);
void argsort_descending(std::size_t rows, std::size_t n, const double* x, std::int64_t* order);

// Rows of float32 or float64, by address.
struct FloatRows {
  const void* data;
  std::size_t itemsize, rows, n;
};

// The same for rows x and w in any order: d, the number of the block (from 0) and the index of the entry of w that
// an entry is paired with, all in the order of x. w may be a single row. False if an entry is not finite. Threads
// share rows, and the sort of a long one.
bool solve_permutahedron(PhiName phi, double exponent, const FloatRows& x, const FloatRows& w, const double* lam,
                         double* d, std::int64_t* block, std::int64_t* paired, std::size_t threads);

// The same for x, w and lam of one type. A row without an answer (a number that is not
// finite, lam <= 0, w < 0 where phi is not the identity) has d = NaN, and block and paired in index order.
template <class T>
void solve_permutahedron(PhiName phi, double exponent, std::size_t rows, std::size_t n, const T* x, const T* w,
                         const T* lam, T* d, std::int32_t* block, std::int32_t* paired, std::size_t threads);

// For phi = identity: y = S(d) of ``rows`` rows in the order of x, whose type T is. x and w may be a single row each.
// What the derivatives need is kept in sorted order: d and the first entry of every block, and (unless null) the order
// of x and of w, with as many rows as these have. False if an entry is not finite.
template <class T>
struct Saved {
  std::uint32_t *order, *first, *w_order;
  T* d;
};
template <class T>
bool permutahedron_forward(double exponent, std::size_t rows, const FloatRows& x, const FloatRows& w, const double* lam,
                           T* y, const Saved<T>& saved, std::size_t threads);

// The cotangents of x, w and lam, given that of y, where they are not null. That of x has all rows, that of w, which
// starts at 0, the rows of w. Slopes are those of a lam of at least ``floor``.
template <class T, class W>
void permutahedron_backward(double exponent, std::size_t rows, std::size_t n, std::size_t x_rows, std::size_t w_rows,
                            const Saved<T>& saved, const double* lam, const T* dy, T* dx, W* dw, double* dlam,
                            double floor, std::size_t threads);

// For phi = identity, as JAX has it: y in the order of x beside d, block and paired, of which a row without an answer
// has NaN; lam = 0 gives every entry the w that it is paired with.
template <class T>
struct Kept {
  using Index = std::conditional_t<std::is_const_v<T>, const std::int32_t, std::int32_t>;
  T* d;
  Index *block, *paired;
};
template <class T>
void respond_permutahedron(double exponent, std::size_t rows, std::size_t n, const T* x, const T* w, const T* lam, T* y,
                           const Kept<T>& kept, std::size_t threads);

// The cotangents of x, lam and (unless null) w from that of y. Slopes are those of a lam of at least ``floor``.
template <class T>
struct Pulled {
  T *x, *w, *lam;
};
template <class T>
void pull_permutahedron(double exponent, std::size_t rows, std::size_t n, const T* lam, const Kept<const T>& kept,
                        const T* g, const Pulled<T>& found, double floor, std::size_t threads);

// The value of the problem and the output, for any phi and lam >= 0: f_{phi,R}(x, w) of every row, and y in the order of
// x, whose sign it may have. NaN where a number is not finite, lam is bad, or w < 0 while phi is not the identity.
template <class T>
void evaluate_permutahedron(PhiName phi, double exponent, std::size_t rows, std::size_t n, const T* x, const T* w,
                            const T* lam, T* y, T* value, std::size_t threads);

// min_{z in P(1_k)} sum_i z_i phi*(x_i/z_i) of every row for phi = x^2/2 or exp(x - 1), as _maths/norms.py has it, with
// its derivatives in x and k: infinite where x is not in the domain, NaN where x or k is no number.
template <class T>
void conjugate_of_top_k(PhiName phi, std::size_t rows, std::size_t n, const T* x, const double* k, T* value, T* in_x,
                        T* in_k, std::size_t threads);

}  // namespace sparsetopk
