// From the cotangent of a row's output back to those of x, k and lam.
#pragma once

#include "digits.hpp"
#include "notes.hpp"
#include "output.hpp"

namespace sparsetopk {
namespace SPARSETOPK_LEVEL {

// What the cotangents need to know of the whole row. On the block, with rho_i = S'(t_i) and g_i the
// cotangent of y_i with the sign of x_i:
struct BlockSums {
  double rho = 0, rho_g = 0, rho_t = 0, rho_g_t = 0;  // sums of rho_i, rho_i g_i, ...
  double g = 0;                                       // sum of g_i
  double size = 0;                                    // number of entries of the block
  double whole = 0;                                   // number of entries that are selected whole; for
                                                      // masks what they leave of k, the sum of S(t_i)
  double whole_in_lam = 0;                            // what these add to the cotangent of lam

  void add(const BlockSums& other) {
    rho += other.rho, rho_g += other.rho_g, rho_t += other.rho_t, rho_g_t += other.rho_g_t;
    g += other.g, size += other.size, whole += other.whole, whole_in_lam += other.whole_in_lam;
  }
};

// The same in lanes.
struct BlockLanes {
  double rho[kLanes] = {}, rho_g[kLanes] = {}, rho_t[kLanes] = {}, rho_g_t[kLanes] = {}, g[kLanes] = {},
         size[kLanes] = {}, whole[kLanes] = {};

  BlockSums sums() {
    return {total(rho), total(rho_g), total(rho_t), total(rho_g_t), total(g), total(size), total(whole), 0};
  }
};

// Entries as t, and g with the sign of x.
struct Candidates {
  double t[kTile + kLanes], g[kTile + kLanes];
  std::size_t count;

  template <class X, class Kind>
  Candidates(const Solved<X, Kind>& row, const X* x, const X* cotangents, std::size_t count_) : count(count_) {
    const Distance distance = row.distance;
    for (std::size_t j = 0; j < count; ++j) t[j] = distance(double(key<Kind::kAbsolute>(x[j])));
    for (std::size_t j = 0; j < count; ++j) {
      const double in = double(widen(cotangents[j]));
      g[j] = Kind::kAbsolute && double(widen(x[j])) < 0 ? -in : in;
    }
    for (std::size_t j = count; j % kLanes != 0; ++j) t[j] = Kind::zero - 1, g[j] = 0;
  }
};

template <class Kind>
SPARSETOPK_LOOP void add_block(const Curve<Kind>& row, const Candidates& some, BlockLanes& all) {
  BlockLanes sums = all;
  const Curve<Kind> solved = row;
  const double bottom = solved.bottom(), top = solved.top;
  for (std::size_t i = 0; i < some.count; i += kLanes)
    for (std::size_t j = 0; j < kLanes; ++j) {
      const double t = some.t[i + j], at = clip(t, Kind::zero, top);
      const bool between = (t > bottom) & (t < top);
      const double inside = between ? 1.0 : 0.0, cotangent = between ? some.g[i + j] : 0.0;  // others may be NaN
      if (Kind::kMagnitude) sums.whole[j] += t >= top ? 1.0 : 0.0;
      if (!Kind::kVector && inside == 0) continue;
      const Response response = solved.kind.at(at);
      const double slope = response.slope * inside;
      if (!Kind::kMagnitude) sums.whole[j] += response.value * inside;
      sums.rho[j] += slope, sums.rho_g[j] += slope * cotangent, sums.rho_t[j] += slope * at;
      sums.rho_g_t[j] += slope * at * cotangent, sums.g[j] += cotangent, sums.size[j] += inside;
    }
  all = sums;
}

// Whether only the block has derivatives, so that dx has room for what the second pass must know of it.
template <class Kind>
constexpr bool kNotes = !Kind::kMagnitude;

// Whether all that a derivative has of its entry is that it is in the block: S' is 1, and no sign is given back.
template <class Kind>
constexpr bool kEven = kLinear<Kind> && kNotes<Kind> && !Kind::kAbsolute;

template <class X, class Kind>
using NotesOf = Notes<X, !kEven<Kind>>;

// The derivative of an entry that is selected whole and not debiased, y = S(d) with S(d) + lam d = a.
struct Lone {
  double in_x, in_lam;
};
template <class Kind>
Lone lone(const Curve<Kind>& row, double a) {
  const double d = row.kind.alone(a, row.lam), slope = row.kind.exponent == 1 ? 1 : row.kind.at(d).slope;
  const double share = slope < kSteepest ? slope / (slope + row.lam) : 1;
  return {share, -d * share};
}

// Adds up some entries, given what x and g have there.
template <class X, class Kind>
void add_some(const Solved<X, Kind>& row, const X* x, const X* g, std::size_t count, BlockLanes& lanes,
              BlockSums& sums) {
  const Candidates some(row, x, g, count);
  add_block(row, some, lanes);
  if constexpr (Kind::kMagnitude)
    for (std::size_t j = 0; j < count && !row.debias; ++j)
      if (some.t[j] >= row.top) sums.whole_in_lam += some.g[j] * lone(row, double(key<true>(x[j]))).in_lam;
}

// The same where entries of the block are all alike, for the cotangents of x alone; g has room to be filled up.
template <class X>
SPARSETOPK_LOOP void add_even(X* g, std::size_t count, BlockLanes& all) {
  double sums[kLanes];
  std::memcpy(sums, all.rho_g, sizeof(sums));
  for (std::size_t j = count; j % kLanes != 0; ++j) g[j] = X{};
  for (std::size_t i = 0; i < count; i += kLanes)
    for (std::size_t j = 0; j < kLanes; ++j) sums[j] += double(widen(g[i + j]));
  std::memcpy(all.rho_g, sums, sizeof(sums));
  all.rho[0] += double(count), all.size[0] += double(count);
}

// Whether so much of a tile is in the block that all of it is computed: to leave out the others would cost more.
template <class Kind>
bool is_dense(const Marks& marks, std::size_t length) {
  return Kind::kVector && marks.count > length / 4;
}

// Adds up part of a row, and notes the entries of its block; unless ``all``, for the cotangents of x alone.
template <class X, class Kind>
BlockSums sum_part(const Solved<X, Kind>& row, const X* x, const X* g, std::size_t n, NotesOf<X, Kind>& notes,
                   bool all) {
  BlockLanes lanes;
  BlockSums sums;
  Chunk<X> chunk;
  const bool with_x = all || !kEven<Kind>;
  const auto add = [&] {
    if (with_x)
      add_some(row, chunk.x, chunk.g, chunk.count, lanes, sums);
    else
      add_even(chunk.g, chunk.count, lanes);
    if (kNotes<Kind>) notes.add(chunk);
    chunk.clear();
  };
  for_tiles<Kind::kAbsolute>(x, n, [&](const Wide<X>* keys, std::size_t i, std::size_t length) {
    Marks marks;
    marks.set<false, false>(keys, length, row.from, row.to);
    if (is_dense<Kind>(marks, length)) {
      notes.give_up();
      return add_some(row, x + i, g + i, length, lanes, sums);
    }
    if (Kind::kMagnitude) sums.whole += double(marks.over);
    if (!chunk.has_room(marks)) add();
    chunk.append(marks, x + i, g + i, length, with_x);
    if (chunk.count >= Chunk<X>::kEnough) add();
  });
  add();
  sums.add(lanes.sums());
  return sums;
}

// What the block adds to the derivatives of its entries: dx_i = b g_i + rho_i/lam (g_i - mean), b = 1 for
// the debiased magnitude, else 0. An entry that is the block alone feels the curvature of phi alone; and so does each
// of a block of magnitudes that as much of k is left for as it has entries: they are equal within rounding, and selected whole.
struct Block {
  double mean = 0, scale, debias, alone = 0;
  bool single;
  double dk, dlam;

  template <class Kind>
  Block(const Curve<Kind>& row, const BlockSums& sums)
      : scale(1 / row.lam), debias(Kind::kMagnitude && row.debias ? 1 : 0), single(sums.size == 1 && !row.pinned) {
    const bool is_whole = row.k == ::floor(row.k);
    const double left = Kind::kMagnitude ? row.k - sums.whole : is_whole ? ::round(sums.whole) : sums.whole;
    const bool whole = Kind::kMagnitude && !row.pinned && sums.size > 0 && left >= sums.size;
    const double rho = whole ? sums.rho / sums.size : sums.rho;
    const double curvature = whole ? 1 : row.kind.second() * left;
    const double total = rho + row.lam * curvature;
    // In magnitude a block that nothing is left for is one by rounding alone. Its entries, that much above v, are 0 and
    // stay 0; if they are far above it, v is so tiny that others were taken for whole, and they keep what they have.
    const bool moves = !Kind::kMagnitude || left > 0;
    single = (single && moves) || whole;
    if (!moves && row.lam * sums.rho_t <= 1e-3 * row.v * sums.rho) scale = debias = 0;
    if (total > 0 && !row.pinned && moves) {
      mean = (sums.rho_g + row.lam * debias * sums.g) / total;
      alone = curvature * (rho + row.lam * debias) / total;
    }
    // v, from sum_B S(t_i) = v left with S(t) = t S'(t)/e: it has its digits where pivot - lam delta has none of them.
    const double prime = Kind::kMagnitude && left > 0 ? sums.rho_t / (row.kind.exponent * left) : row.kind.prime(row.v);
    // Where all of the block is selected whole, or nothing of it, it is one by rounding alone.
    dk = left > 0 && left < sums.size ? prime * mean : 0;
    dlam = moves ? (mean * sums.rho_t - sums.rho_g_t) / row.lam : 0;
    if (single) {
      const double g_t = rho > 0 ? sums.rho_g_t / rho : 0;  // of each its own t: with a large lam they may differ
      // debias - alone, in which a large lam would leave no digits of the difference.
      const double rest = debias > 0 && total > 0 ? rho * (1 - curvature) / total : -alone;
      dlam = g_t * rest;
    }
    dlam += sums.whole_in_lam;
  }
  double operator()(double rho, double g) const { return single ? alone * g : shared(rho, g); }
  // Where the block is not single.
  double shared(double rho, double g) const {
    const double gain = rho * scale;
    return debias * g + (gain < kSteepest ? gain : kSteepest) * (g - mean);
  }
};

// A finite number of the output's type, whatever the slope.
template <class X>
inline X finite(double value) {
  constexpr double limit = Limits<X>::largest;
  return narrow<X>(Wide<X>(value > limit ? limit : value < -limit ? -limit : value));
}

// Replaces g by dx, without the sign of x.
template <class X, class Kind>
SPARSETOPK_LOOP void to_cotangents(const Curve<Kind>& row, const Block& block_, const X* x, Candidates& some) {
  const Curve<Kind> solved = row;
  const Block block = block_;
  const double bottom = solved.bottom(), top = solved.top, shrink = solved.debias ? 1 : 1 / (1 + solved.lam);
  double* __restrict cotangents = some.g;  // so that no table of a response could be what is written
  const auto for_all = [&](auto&& derivative) {
    for (std::size_t j = 0; j < some.count; ++j) {
      const double t = some.t[j], g = cotangents[j], inside = derivative(t, g);
      const double outside = Kind::kMagnitude && t >= top ? g * shrink : 0.0;
      cotangents[j] = (t > bottom) & (t < top) ? inside : outside;
    }
  };
  if constexpr (Kind::kVector) {  // without a branch, so that compilers vectorise it
    if (block.single)
      for_all([&](double, double g) { return block.alone * g; });
    else
      for_all([&](double t, double g) { return block.shared(solved.kind.at(clip(t, Kind::zero, top)).slope, g); });
  } else {
    for (std::size_t j = 0; j < some.count; ++j) {
      const double t = some.t[j], g = cotangents[j];
      const bool whole = Kind::kMagnitude && t >= top;
      if (t > bottom && t < top)
        cotangents[j] = block(solved.kind.at(t).slope, g);
      else
        cotangents[j] = !whole ? 0 : solved.debias ? g : g * lone(solved, double(key<true>(x[j]))).in_x;
    }
  }
}

// The same where entries of the block are all alike.
template <class X>
SPARSETOPK_LOOP void to_even_cotangents(const Block& block, X* g, std::size_t count) {
  const double mean = block.mean, gain = block.single ? 0 : smaller(block.scale, kSteepest);
  for (std::size_t j = 0; j < count; ++j) g[j] = finite<X>(gain * (double(widen(g[j])) - mean));
}

// Gives dx the sign that g had.
template <class X, class Kind>
inline X cotangent(double value, X x) {
  return finite<X>(Kind::kAbsolute && double(widen(x)) < 0 ? 0.0 - value : value);
}

// Replaces g by dx.
template <class X, class Kind>
void to_entries(const Solved<X, Kind>& row, const Block& block, Chunk<X>& chunk) {
  Candidates some(row, chunk.x, chunk.g, chunk.count);
  to_cotangents(row, block, chunk.x, some);
  for (std::size_t j = 0; j < some.count; ++j) chunk.g[j] = cotangent<X, Kind>(some.g[j], chunk.x[j]);
}

// dx over a tile, of which ``entries`` are in the block: others have 0, or g if they are selected whole.
template <class X, class Kind>
void write_tile(const Solved<X, Kind>& row, const Block& block, const Wide<X>* keys, const X* g, std::size_t length,
                Chunk<X>& entries, X* dx) {
  if constexpr (Kind::kMagnitude) {
    const auto to = row.to;
    for (std::size_t j = 0; j < length; ++j) dx[j] = keys[j] > to ? g[j] : X{};
  } else {
    std::memset(dx, 0, length * sizeof(X));
  }
  to_entries(row, block, entries);
  entries.scatter(dx);
}

// The same where most are in the block.
template <class X, class Kind>
void write_dense(const Solved<X, Kind>& row, const Block& block, const X* x, const X* g, std::size_t length, X* dx) {
  Candidates some(row, x, g, length);
  to_cotangents(row, block, x, some);
  for (std::size_t j = 0; j < length; ++j) dx[j] = cotangent<X, Kind>(some.g[j], x[j]);
}

template <class X, class Kind>
void write_cotangents(const Solved<X, Kind>& row, const Block& block, const X* x, const X* g, std::size_t n, X* dx) {
  for_tiles<Kind::kAbsolute>(x, n, [&](const Wide<X>* keys, std::size_t i, std::size_t length) {
    Marks marks;
    marks.set<false, false>(keys, length, row.from, row.to);
    if (is_dense<Kind>(marks, length)) return write_dense(row, block, x + i, g + i, length, dx + i);
    Chunk<X> entries;
    entries.append(marks, x + i, g + i, length, true);
    write_tile(row, block, keys, g + i, length, entries, dx + i);
  });
}

// The same from what sum_part has noted in dx.
template <class X, class Kind>
void write_noted(const Solved<X, Kind>& row, const Block& block, NotesOf<X, Kind>& notes, std::size_t n, X* dx) {
  Chunk<X> chunk;
  for (std::size_t end = n; !notes.empty(); end = chunk.begin) {
    notes.take(chunk, end);
    if constexpr (kEven<Kind>)
      to_even_cotangents(block, chunk.g, chunk.count);
    else
      to_entries(row, block, chunk);
    std::memset(dx + chunk.begin, 0, chunk.length * sizeof(X));
    chunk.scatter(dx);
  }
}

struct Cotangents {
  double k, lam;
};

// Rows without a threshold: locally nothing moves, or everything selected does.
template <class X, class Kind>
Cotangents backward_special(const Row<X, Kind>& row, State state, const X* g, X* dx) {
  const bool invalid = state.pivot != state.pivot;
  for (std::size_t j = 0; j < row.n; ++j) dx[j] = narrow<X>(Wide<X>(invalid ? kNaN : 0.0));
  if (invalid) return {kNaN, kNaN};
  if (Kind::kMagnitude && row.lam == 0 && state.pivot != -kInfinity)
    write_hard(row, state, g, dx, [](X, X cotangent) { return cotangent; });
  if (Kind::kMagnitude && state.pivot == -kInfinity) {
    const bool plain = row.debias || row.lam == 0;
    const Solved<X, Kind> solved(row, {0, 0});
    double dlam = 0;
    for (std::size_t j = 0; j < row.n; ++j) {
      const Lone entry = plain ? Lone{1, 0} : lone(solved, double(key<true>(row.x[j])));
      const double cotangent = double(widen(g[j]));
      dx[j] = finite<X>(entry.in_x * cotangent);
      dlam += entry.in_lam * (widen(row.x[j]) < 0 ? -cotangent : cotangent);
    }
    return {0, dlam};
  }
  double mean = 0;
  if (row.lam > 0 && state.pivot == kInfinity && state.delta > 0)  // these share k
    for (std::size_t j = 0; j < row.n; ++j)
      if (double(widen(row.x[j])) == kInfinity) mean += double(widen(g[j])) / state.delta;
  return {mean, 0};
}

// A row of a single tile, read once.
template <class X, class Kind>
Cotangents backward_tile(const Solved<X, Kind>& row, const X* x, const X* g, std::size_t n, X* dx) {
  Cotangents result{0, 0};
  for_tiles<Kind::kAbsolute>(x, n, [&](const Wide<X>* keys, std::size_t, std::size_t) {
    Chunk<X> entries;
    BlockLanes lanes;
    BlockSums sums;
    Marks marks;
    marks.set<false, false>(keys, n, row.from, row.to);
    entries.append(marks, x, g, n, true);
    if (Kind::kMagnitude) sums.whole = double(marks.over);
    add_some(row, entries.x, entries.g, entries.count, lanes, sums);
    sums.add(lanes.sums());
    const Block block(row, sums);
    write_tile(row, block, keys, g, n, entries, dx);
    result = {block.dk, block.dlam};
  });
  return result;
}

// Whether a row is without a threshold.
inline bool is_special(double lam, State state) { return lam == 0 || !(::fabs(state.pivot) < kInfinity); }

// The lowest number of a key in [low, high] that ``reaches``, as do all above it; the one after high if none does. It is
// looked for near ``guess`` first.
template <class T, class F>
Ordered<T> first_key(T low, T high, T guess, F&& reaches) {
  using N = Ordered<T>;
  N begin = ordered(low), end = ordered(high) + 1, at = smaller(larger(ordered(guess), begin), N(end - 1));
  for (N step = 1; begin < end; step = larger(step, N(step + step))) {
    if (reaches(from_ordered<T>(at)))
      end = at, at -= smaller(step, N((end - begin + 1) / 2));
    else
      begin = at + 1, at = begin + smaller(N(step - 1), N((end - begin) / 2));
  }
  return end;
}

// Leaves between the bounds what is in the block and nothing else: no t is below that of a lower key.
template <class X, class Kind>
void hold_to_block(Solved<X, Kind>& row) {
  using T = Wide<X>;
  const T low = row.from, high = row.to;
  const double bottom = row.bottom(), top = row.top;
  const auto guess = [&](double t) { return T(row.v + row.lam * t); };
  row.from = from_ordered<T>(first_key(low, high, guess(bottom), [&](T a) { return row.distance(a) > bottom; }));
  row.to = from_ordered<T>(first_key(low, high, guess(top), [&](T a) { return row.distance(a) >= top; }) - 1);
}

// A row in at most ``kParts`` blocks.
template <std::size_t kParts, class X, class Kind>
Cotangents backward_blocks(const Row<X, Kind>& row, const Solved<X, Kind>& solved, const Blocks& blocks, const X* g,
                           X* dx, bool all) {
  BlockSums parts[kParts];
  NotesOf<X, Kind> notes[kParts];
  blocks.run(row.threads, [&](std::size_t block, std::size_t begin, std::size_t length) {
    notes[block] = NotesOf<X, Kind>(dx + begin);
    parts[block] = sum_part(solved, row.x + begin, g + begin, length, notes[block], all);
  });
  for (std::size_t block = 1; block < blocks.count; ++block) parts[0].add(parts[block]);
  const Block block(solved, parts[0]);
  blocks.run(row.threads, [&](std::size_t part, std::size_t begin, std::size_t length) {
    if (kNotes<Kind> && notes[part].complete())
      write_noted(solved, block, notes[part], length, dx + begin);
    else
      write_cotangents(solved, block, row.x + begin, g + begin, length, dx + begin);
  });
  return {block.dk, block.dlam};
}

// Those of k and lam if ``all`` are asked for.
template <class X, class Kind>
Cotangents backward_row(const Row<X, Kind>& row, State state, const X* g, X* dx, bool all) {
  if (is_special(row.lam, state)) return backward_special(row, state, g, dx);
  Solved<X, Kind> solved(row, state);
  if (row.n <= kTile) return backward_tile(solved, row.x, g, row.n, dx);
  if constexpr (kEven<Kind>) hold_to_block(solved);
  const Blocks blocks(row.n);
  return blocks.count == 1 ? backward_blocks<1>(row, solved, blocks, g, dx, all)
                           : backward_blocks<kBlocks>(row, solved, blocks, g, dx, all);
}

}  // namespace SPARSETOPK_LEVEL
}  // namespace sparsetopk
