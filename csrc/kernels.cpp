// All operators and element types at one instruction-set level; compiled once for each.
//
// No inline function of the standard library may be instantiated here: the linker keeps one copy of
// such a function, and a copy with wide vectors would then run on machines that lack them.
#include "kernels.hpp"
#include "lanes_backward.hpp"
#include "lanes_forward.hpp"
#include "spread.hpp"

namespace sparsetopk {
namespace SPARSETOPK_LEVEL {
namespace {

template <class X, class Kind>
struct Rows {
  const Problem& problem;
  const Kind& kind;

  Row<X, Kind> operator[](std::size_t i) const {
    const X* x = static_cast<const X*>(problem.x) + i * problem.row_stride;
    return {x, problem.n, problem.k_of(i), problem.lam_of(i), kind, problem.debias, problem.threads, problem.rounding};
  }
};

// f(kind, X{}) with the type that is asked for, of 16 bits only if ``kNarrow``.
template <bool kNarrow, class Kind, class F>
void with_dtype(Dtype dtype, const Kind& kind, F&& f) {
  if constexpr (kNarrow) {
    if (dtype == Dtype::float16) return f(kind, Half{});
    if (dtype == Dtype::bfloat16) return f(kind, BFloat16{});
  }
  if (dtype == Dtype::float64) return f(kind, double{});
  f(kind, float{});
}

template <class F>
void with_magnitude(double e, Dtype dtype, F&& f) {
  if (e == 1) return with_dtype<true>(dtype, Magnitude<Power<1>>{}, f);
  with_dtype<true>(dtype, Magnitude<Power<0>>{{e}}, f);
}

// f(kind, X{}) with what the problem asks for.
template <class F>
void with_types(const Problem& problem, F&& f) {
  const bool hard = problem.hard();
  const double e = hard ? 1 : problem.exponent;
  const auto with = [&](const auto& kind) {
    with_dtype<kLinear<typename std::decay<decltype(kind)>::type>>(problem.dtype, kind, f);
  };
  switch (hard && problem.op == Operator::two_sided ? Operator::mask : problem.op) {
    case Operator::mask:
      if (e == 1) return with(Mask<Power<1>>{});
      if (e == 2) return with(Mask<Power<2>>{});
      if (e == 3) return with(Mask<Power<3>>{});
      return with(Mask<Power<0>>{{e}});
    case Operator::magnitude:
      if (e == 1) return with(Magnitude<Power<1>>{});
      return with(Magnitude<Power<0>>{{e}});
    case Operator::sign:
      if (e == 1) return with(Sign<Power<1>>{});
      return with(Sign<Power<0>>{{{e}}});
    case Operator::two_sided:
      return with_half(e, problem.table,
                       [&](const auto& half) { with(TwoSided<typename std::decay<decltype(half)>::type>{half}); });
  }
}

void forward(const Problem& problem, std::size_t begin, std::size_t end, void* y) {
  with_types(problem, [&](const auto& kind, auto zero) {
    using X = decltype(zero);
    using Kind = typename std::decay<decltype(kind)>::type;
    const Rows<X, Kind> rows{problem, kind};
    NormalGuess normal{Kind::kAbsolute};
    std::size_t read = 0;
    if constexpr (kHasLanes<Kind>)
      if (fit_lanes(problem, kind, kLongestLane<Kind>)) {
        auto run = forward_lanes<X, Kind>;
        if constexpr (kLinear<Kind>)
          if (problem.hard()) run = forward_hard_lanes<X, Kind>;
        return run(problem, kind, begin, end, static_cast<X*>(y), normal, read), add_entries_read(read);
      }
    if constexpr (kLinear<Kind>)
      if (!problem.hard() && fit_lanes(problem, kind, kLongestFew<Kind>)) {
        forward_few_lanes<X, Kind>(problem, kind, begin, end, static_cast<X*>(y), normal, read);
        return add_entries_read(read);
      }
    for (std::size_t i = begin; i < end; ++i) {
      const Row<X, Kind> row = rows[i];
      X* out = static_cast<X*>(y) + i * problem.n;
      problem.keep(i, row.solve(out, normal, read));
      forward_row(row, problem.state[i], out);
    }
    add_entries_read(read);
  });
}

void backward(const Problem& problem, std::size_t begin, std::size_t end, const void* g, void* dx, double* dk,
              double* dlam) {
  const bool all = dk != nullptr || dlam != nullptr;
  with_types(problem, [&](const auto& kind, auto zero) {
    using X = decltype(zero);
    using Kind = typename std::decay<decltype(kind)>::type;
    const Rows<X, Kind> rows{problem, kind};
    if constexpr (kHasLanes<Kind>)
      if (fit_lanes(problem, kind, kLongestLaneBackward<Kind>) && !problem.hard()) {
        auto run = all ? backward_lanes<X, Kind, true> : backward_lanes<X, Kind, false>;
        if constexpr (!Kind::kMagnitude)
          if (problem.n > kLongestTurned<Kind>)
            run = all ? backward_few_lanes<X, Kind, true> : backward_few_lanes<X, Kind, false>;
        return run(problem, kind, begin, end, static_cast<const X*>(g), static_cast<X*>(dx), dk, dlam);
      }
    for (std::size_t i = begin; i < end; ++i) {
      const std::size_t at = i * problem.n;
      const Cotangents row =
          backward_row(rows[i], problem.state[i], static_cast<const X*>(g) + at, static_cast<X*>(dx) + at, all);
      if (dk != nullptr) dk[i] = finite<double>(row.k);
      if (dlam != nullptr) dlam[i] = finite<double>(row.lam);
    }
  });
}

// What the type cannot hold is its largest number.
template <class X>
void narrow_finite(const float* wide, std::size_t count, X* x) {
  constexpr float limit = float(Limits<X>::largest);
  float some[kTile];
  for (std::size_t i = 0; i < count; i += kTile) {
    const std::size_t length = smaller(kTile, count - i);
    for (std::size_t j = 0; j < length; ++j) {
      const float value = wide[i + j];
      some[j] = value > limit ? limit : value < -limit ? -limit : value;
    }
    narrow_all(some, length, x + i);
  }
}

void widen_entries(Dtype dtype, const void* narrow, std::size_t count, float* wide) {
  if (dtype == Dtype::float16) return widen_all(static_cast<const Half*>(narrow), count, wide);
  widen_all(static_cast<const BFloat16*>(narrow), count, wide);
}

void narrow_entries(Dtype dtype, const float* wide, std::size_t count, void* narrow) {
  if (dtype == Dtype::float16) return narrow_finite(wide, count, static_cast<Half*>(narrow));
  narrow_finite(wide, count, static_cast<BFloat16*>(narrow));
}

Counts gather(Piece& piece, const Bounds& bounds) {
  Counts counts;
  with_dtype<true>(Dtype(piece.dtype), 0,
                   [&](int, auto zero) { counts = gather_piece<decltype(zero)>(piece, bounds); });
  return counts;
}

std::int64_t ties(const Piece& piece, double size) {
  std::int64_t count = 0;
  with_dtype<true>(Dtype(piece.dtype), 0, [&](int, auto zero) { count = ties_piece<decltype(zero)>(piece, size); });
  return count;
}

void histogram(const Piece& piece, std::uint64_t first, std::uint64_t last, int shift, std::int64_t* counts) {
  with_dtype<true>(Dtype(piece.dtype), 0,
                   [&](int, auto zero) { histogram_piece<decltype(zero)>(piece, first, last, shift, counts); });
}

Neighbours neighbours(const Piece& piece, double cut) {
  Neighbours found{};
  with_dtype<true>(Dtype(piece.dtype), 0,
                   [&](int, auto zero) { found = neighbours_piece<decltype(zero)>(piece, cut); });
  return found;
}

Masses masses(const Piece& piece, const Spread& row) {
  Masses found{};
  with_magnitude(row.exponent, Dtype(piece.dtype),
                 [&](const auto& kind, auto zero) { found = masses_piece<decltype(zero)>(piece, row, kind); });
  return found;
}

void apply(const Piece& piece, const Spread& row) {
  with_magnitude(row.exponent, Dtype(piece.dtype),
                 [&](const auto& kind, auto zero) { apply_piece<decltype(zero)>(piece, row, kind); });
}

void block_sums(const Piece& piece, const Spread& row, double* sums) {
  with_magnitude(row.exponent, Dtype(piece.dtype),
                 [&](const auto& kind, auto zero) { block_sums_piece<decltype(zero)>(piece, row, kind, sums); });
}

double cotangents(const Piece& piece, const Spread& row, const double* sums) {
  double in_lam = 0;
  with_magnitude(row.exponent, Dtype(piece.dtype), [&](const auto& kind, auto zero) {
    in_lam = cotangents_piece<decltype(zero)>(piece, row, kind, sums);
  });
  return in_lam;
}

}  // namespace

void loss(const Problem& problem, std::size_t begin, std::size_t end, const Targets& targets, void* y,
          double* value);  // in losses.cpp

const Kernels all = {forward,   backward,   loss,   widen_entries, narrow_entries, gather,    ties,
                     histogram, neighbours, masses, apply,         block_sums,     cotangents};

}  // namespace SPARSETOPK_LEVEL
}  // namespace sparsetopk
