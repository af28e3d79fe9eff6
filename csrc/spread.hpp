// The passes over one piece of a row that is spread over many arrays; see pieces.hpp.
#pragma once

#include "cotangents.hpp"
#include "pieces.hpp"

namespace sparsetopk {
namespace SPARSETOPK_LEVEL {

// The same comparison with keys of type T: a >= least(bound) if and only if a >= bound, for finite a.
template <class T>
T least_from(double bound) {
  constexpr double limit = Limits<T>::largest;
  if (bound > limit) return T(kInfinity);
  const T rounded = T(larger(bound, -limit));
  return double(rounded) < bound ? next_up(rounded) : rounded;
}
// And a <= most(bound) if and only if a <= bound.
template <class T>
T most_to(double bound) {
  return -least_from<T>(-bound);
}

// Writes past the caches, in which so long a row would not stay: memory is not read before it is written. By whole
// vectors, as every store has its price.
inline void stream_vector(void* to, const void* from) {
#if defined(SPARSETOPK_X86) && defined(__AVX512F__)
  _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_loadu_si512(from));
#elif defined(SPARSETOPK_X86) && defined(__AVX2__)
  _mm256_stream_si256(static_cast<__m256i*>(to), _mm256_loadu_si256(static_cast<const __m256i*>(from)));
#elif defined(SPARSETOPK_X86)
  _mm_stream_si128(static_cast<__m128i*>(to), _mm_loadu_si128(static_cast<const __m128i*>(from)));
#else
  std::memcpy(to, from, kVectorBytes);
#endif
}
inline void stream(void* to, const void* from, std::size_t bytes) {
  const auto* source = static_cast<const char*>(from);
  auto* target = static_cast<char*>(to);
  const std::size_t odd = reinterpret_cast<std::uintptr_t>(to) % kVectorBytes;
  std::size_t i = odd == 0 ? 0 : smaller(kVectorBytes - odd, bytes);
  std::memcpy(target, source, i);
  for (; i + kVectorBytes <= bytes; i += kVectorBytes) stream_vector(target + i, source + i);
  std::memcpy(target + i, source + i, bytes - i);
}
inline void end_of_stream() {
#ifdef SPARSETOPK_X86
  _mm_sfence();
#endif
}

// The same for outputs, which need no other place before.
template <class X, class F>
SPARSETOPK_LOOP void stream_all(const F& formula, const X* x, std::size_t n, X* y) {
  constexpr std::size_t kStep = larger(kLanes, kVectorBytes / sizeof(X));
  if (reinterpret_cast<std::uintptr_t>(y) % kVectorBytes != 0) return write_all(formula, x, n, y);
  const F f = formula;
  std::size_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    alignas(kVectorBytes) X some[kStep];
#pragma GCC unroll 4
    for (std::size_t j = 0; j < kStep; j += kLanes) write_lanes(f, x + i + j, some + j);
#pragma GCC unroll 8
    for (std::size_t j = 0; j < kStep; j += kVectorBytes / sizeof(X)) stream_vector(y + i + j, some + j);
  }
  if (i < n) write_all(f, x + i, n - i, y + i);
  end_of_stream();
}

// The undecided entries of a piece, wherever they are kept.
template <class X>
struct Kept {
  X* entries;
  std::size_t size;
  std::uint16_t* positions;  // if they are kept beside

  explicit Kept(const Piece& piece)
      : entries(static_cast<X*>(piece.beside ? piece.room : piece.out)),
        size(std::size_t(piece.kept)),
        positions(reinterpret_cast<std::uint16_t*>(entries + piece.n / kFewest)) {}
};

// f(begin, length, out) for the tiles of a piece: of a long row each goes through the first cache.
template <class X, class F>
void write_piece(const Piece& piece, bool is_long, F&& f) {
  const std::size_t n = std::size_t(piece.n);
  const X* x = static_cast<const X*>(piece.x);
  X* out = static_cast<X*>(piece.out);
  if (!is_long) return f(0, n, out);
  X tile[kTile];
  for (std::size_t i = 0; i < n; i += kTile) {
    const std::size_t length = smaller(kTile, n - i);
    if (i + kTile < n) fetch_tile(x + i + kTile, smaller(kTile, n - i - kTile));
    f(i, length, tile);
    stream(out + i, tile, length * sizeof(X));
  }
  end_of_stream();
}

// y where it is decided: x above the bound, else 0.
template <class X>
SPARSETOPK_LOOP void write_over(const Wide<X>* __restrict keys, const X* __restrict x, std::size_t n, Wide<X> bound,
                                X* __restrict y) {
  for (std::size_t j = 0; j < n; ++j) y[j] = keys[j] > bound ? x[j] : X{};
}

// Keeps what is undecided beside, and writes what is decided: 0, or x. False if there is too little room.
template <class X>
bool gather_beside(const Piece& piece, bool is_long, Open<X>& open, const Window<Wide<X>>& window, Wide<X> lo,
                   Wide<X> hi) {
  using T = Wide<X>;
  const T from = window.from, to = window.to;
  const Kept<X> kept(piece);
  const std::size_t n = std::size_t(piece.n), room = n / kFewest;
  std::size_t seen = 0;
  bool fits = true;
  write_piece<X>(piece, is_long, [&](std::size_t i, std::size_t length, X* y) {
    const X* x = static_cast<const X*>(piece.x) + i;
    for_tiles<true>(x, length, [&](const T* keys, std::size_t begin, std::size_t part) {
      if (!fits) return;
      std::uint32_t positions[kTile + 16];
      Marks marks;
      marks.set<false, true, true>(keys, part, from, to);
      fits = open.size + marks.count <= room;
      if (!fits) return;
      write_over(keys, x + begin, part, to, y + begin);
      marks.positions(part, positions);
      for (std::size_t j = 0; j < marks.count; ++j) {
        kept.entries[open.size + j] = x[begin + positions[j]];
        kept.positions[open.size + j] = std::uint16_t(i + begin + positions[j]);
      }
      open.size += marks.count, open.whole += marks.over;
      open.invalid |= marks.infinite;
      if (open.size - seen < kTile && i + begin + part < n) return;  // too few to be worth a loop
      open.invalid |= Open<X>::any_nan(kept.entries + seen, open.size - seen);
      open.template add<true>(kept.entries + seen, open.size - seen, lo, hi);
      seen = open.size;
    });
  });
  return fits;
}

template <class X>
Counts gather_piece(Piece& piece, const Bounds& bounds) {
  using T = Wide<X>;
  const Window<T> window{least_from<T>(bounds.from), most_to<T>(bounds.to)};
  const T lo = least_from<T>(bounds.lo), hi = most_to<T>(bounds.hi);
  Open<X> open;
  piece.beside = piece.room != nullptr;
  open.room = Kept<X>(piece).entries;
  if (piece.beside && !gather_beside(piece, bounds.is_long, open, window, lo, hi)) piece.beside = 0, open = Open<X>{};
  if (!piece.beside) {
    open.room = static_cast<X*>(piece.out);
    open.template gather<true>(static_cast<const X*>(piece.x), std::size_t(piece.n), window, lo, hi);
  }
  piece.kept = std::int64_t(open.size);
  return {std::int64_t(open.whole), std::int64_t(open.whole + open.over_hi), std::int64_t(open.whole + open.from_lo),
          open.invalid};
}

template <class X>
std::int64_t ties_piece(const Piece& piece, double size) {
  const Kept<X> kept(piece);
  std::int64_t count = 0;
  for (std::size_t i = 0; i < kept.size; ++i) count += double(key<true>(kept.entries[i])) == size;
  return count;
}

template <class X>
void histogram_piece(const Piece& piece, std::uint64_t first, std::uint64_t last, int shift, std::int64_t* counts) {
  const Kept<X> kept(piece);
  constexpr std::uint64_t zero = kOrderedZero<double>;
  count_buckets<true, double>(static_cast<const X*>(kept.entries), kept.size, first | zero, last | zero, shift, counts);
}

template <class X>
Neighbours neighbours_piece(const Piece& piece, double cut) {
  const Kept<X> kept(piece);
  Neighbours found{kInfinity, -kInfinity};
  for (std::size_t i = 0; i < kept.size; ++i) {
    const double a = double(key<true>(kept.entries[i]));
    if (a >= cut) found.above = smaller(found.above, a);
    if (a < cut) found.below = larger(found.below, a);
  }
  return found;
}

template <class X, class Kind>
Masses masses_piece(const Piece& piece, const Spread& row, const Kind& kind) {
  const Distance distance(row.state.pivot, 0, row.lam);
  const Kept<X> kept(piece);
  Distances distances{kept.entries, kept.size, distance, fill_distances<true, X>};
  if constexpr (sizeof(Wide<X>) == sizeof(float) && std::is_base_of<Power<1>, Kind>::value)
    if (row.in_float && kept.size > kTile) distances.in_float = add_up_in_float<Kind, X>;
  Equation<Kind> equation(distances, kind);
  const Sums sums = equation(row.state.delta, kind.top(row.state.pivot - row.lam * row.state.delta));
  return {sums.mass, sums.slope, sums.above};
}

template <class X, class Kind>
Row<X, Kind> row_of(const Piece& piece, const Spread& row, const Kind& kind) {
  return {static_cast<const X*>(piece.x), std::size_t(piece.n), row.k, row.lam, kind, row.debias, 1};
}
inline State state_of(const Piece& piece, const Spread& row) {
  return {row.state.pivot, row.lam == 0 ? piece.left : row.state.delta};
}

// lam = 0: the size from which on everything in the piece is selected, if all of its entries at the pivot are, or none.
template <class X>
bool cuts_hard(const Piece& piece, const Spread& row, Wide<X>& bound) {
  using T = Wide<X>;
  if (row.lam != 0 || !(::fabs(row.state.pivot) < kInfinity) || !(piece.left <= 0 || piece.left == kInfinity))
    return false;
  const T pivot = most_to<T>(row.state.pivot);
  bound = piece.left > 0                  ? least_from<T>(row.state.pivot)
          : pivot < T(Limits<T>::largest) ? next_up(pivot)
                                          : T(kInfinity);
  return true;
}

// Writes y for lam = 0, and returns what is left of the mass for the entries at the pivot.
template <class X, class Kind>
double hard_part(const Row<X, Kind>& row, double pivot, double left, X* y) {
  for (std::size_t j = 0; j < row.n; ++j) {
    const double a = double(key<true>(row.x[j])), z = a > pivot ? 1 : a == pivot ? smaller(left, 1.0) : 0;
    if (a == pivot) left -= z;
    y[j] = with_sign<Kind>(z * a, row.x[j]);
  }
  return left;
}

// y where it was undecided.
template <class X, class Kind>
void apply_beside(const Piece& piece, const Row<X, Kind>& row, State state) {
  const Kept<X> kept(piece);
  X* out = static_cast<X*>(piece.out);
  X y[kTile];
  double left = state.delta;
  for (std::size_t i = 0; i < kept.size; i += kTile) {
    Row<X, Kind> part = row;
    part.x = kept.entries + i, part.n = smaller(kTile, kept.size - i);
    if (row.lam == 0)
      left = hard_part(part, state.pivot, left, y);
    else
      forward_row(part, state, y);
    for (std::size_t j = 0; j < part.n; ++j) out[kept.positions[i + j]] = y[j];
  }
}

template <class X, class Kind>
void apply_piece(const Piece& piece, const Spread& row, const Kind& kind) {
  const Row<X, Kind> all = row_of<X>(piece, row, kind);
  const State state = state_of(piece, row);
  if (piece.beside && ::fabs(state.pivot) < kInfinity) return apply_beside(piece, all, state);
  Wide<X> bound;
  const bool hard = cuts_hard<X>(piece, row, bound);
  if (!hard && is_special(row.lam, state)) return forward_row(all, state, static_cast<X*>(piece.out));
  if constexpr (Kind::kCheap)
    if (!hard) {
      if (state.pivot > 1e300) return forward_row(all, state, static_cast<X*>(piece.out));  // which holds them down
      const Curve<Kind> curve(kind, state, row.k, row.lam, row.debias, all.rounding);
      return with_formula<X>(curve, [&](const auto& f) {
        X* y = static_cast<X*>(piece.out);
        row.is_long ? stream_all(f, all.x, all.n, y) : write_all(f, all.x, all.n, y);
      });
    }
  if (!hard) {
    const Solved<X, Kind> solved(all, state);
    return write_piece<X>(piece, row.is_long, [&](std::size_t begin, std::size_t length, X* y) {
      write_inside(solved, all.x + begin, length, y);
    });
  }
  write_piece<X>(piece, row.is_long, [&](std::size_t begin, std::size_t length, X* y) {
    for (std::size_t j = 0; j < length; ++j) {
      const X x = all.x[begin + j];
      const Wide<X> a = key<true>(x);
      y[j] = (a >= bound) & (a > 0) ? x : X{};
    }
  });
}

template <class X, class Kind>
void block_sums_piece(const Piece& piece, const Spread& row, const Kind& kind, double* sums) {
  static_assert(sizeof(BlockSums) == kBlockSums * sizeof(double) && !kNotes<Kind>, "");
  BlockSums found;
  NotesOf<X, Kind> none;
  if (!is_special(row.lam, row.state)) {
    const Solved<X, Kind> solved(row_of<X>(piece, row, kind), row.state);
    found = sum_part<X, Kind>(solved, static_cast<const X*>(piece.x), static_cast<const X*>(piece.g),
                              std::size_t(piece.n), none, true);
  }
  std::memcpy(sums, &found, sizeof(found));
}

template <class X, class Kind>
double cotangents_piece(const Piece& piece, const Spread& row, const Kind& kind, const double* sums) {
  const Row<X, Kind> part = row_of<X>(piece, row, kind);
  const X* g = static_cast<const X*>(piece.g);
  Wide<X> bound;
  if (cuts_hard<X>(piece, row, bound)) {
    write_piece<X>(piece, row.is_long, [&](std::size_t begin, std::size_t length, X* dx) {
      for (std::size_t j = 0; j < length; ++j)
        dx[j] = key<true>(part.x[begin + j]) >= bound ? finite<X>(double(widen(g[begin + j]))) : X{};
    });
    return 0;
  }
  if (is_special(row.lam, row.state))
    return backward_special(part, state_of(piece, row), g, static_cast<X*>(piece.out)).lam;
  const BlockSums total{sums[0], sums[1], sums[2], sums[3], sums[4], sums[5], sums[6], sums[7]};
  const Solved<X, Kind> solved(part, row.state);
  const Block block(solved, total);
  write_piece<X>(piece, row.is_long, [&](std::size_t begin, std::size_t length, X* dx) {
    write_cotangents(solved, block, part.x + begin, g + begin, length, dx);
  });
  return 0;
}

}  // namespace SPARSETOPK_LEVEL
}  // namespace sparsetopk
