// From the cotangent of a row's output back to those of x, k and lam.
#pragma once

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

// Entries that may have a derivative of their own: where they are, x and g.
template <class X>
struct Entries {
  static constexpr std::size_t kChunk = 256;  // as many as are dealt with at a time
  std::uint32_t at[kChunk + kTile + 16];
  X x[kChunk + kTile + 16], g[kChunk + kTile + 16];
  std::size_t count = 0;

  // Those of a tile that begins at ``begin``, behind what there is, but for g.
  void append(const Marks& marks, const X* x_tile, const X* g_tile, std::size_t begin, std::size_t length) {
    marks.gather(length, begin, x_tile, g_tile, at + count, x + count);
    count += marks.count;
  }
  // What g has where the first of them are.
  void fetch(const X* all, std::size_t some) {
    for (std::size_t j = 0; j < some; ++j) g[j] = all[at[j]];
  }
  // Leaves out the first chunk.
  void drop_chunk() {
    count -= kChunk;
    std::memmove(at, at + kChunk, count * sizeof(at[0])), std::memmove(x, x + kChunk, count * sizeof(X));
  }
};

// The same as t, and g with the sign of x.
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

// The entries of a block as the first pass over part of a row notes them: chunks behind each other in the part of dx that
// is theirs. The second pass takes the last ones first, and overwrites all from the first position of a chunk on: that
// must be behind the chunks before.
template <class X>
class Notes {
 public:
  Notes() = default;
  Notes(X* dx, std::size_t n) : place_(reinterpret_cast<unsigned char*>(dx)), room_(n * sizeof(X)) {}
  bool complete() const { return complete_; }
  bool empty() const { return size_ == 0; }
  void give_up() { complete_ = false; }

  void add(const Entries<X>& some, std::size_t count) {
    complete_ &= size_ * kNote <= some.at[0] * sizeof(X) && (size_ + kChunk) * kNote <= room_;
    if (!complete_) return;
    unsigned char* chunk = place_ + size_ * kNote;
    std::memcpy(chunk, some.at, count * 4);
    std::memcpy(chunk + kChunk * 4, some.x, count * sizeof(X));
    std::memcpy(chunk + kChunk * (4 + sizeof(X)), some.g, count * sizeof(X));
    size_ += count;
  }
  // The last chunk.
  void take(Entries<X>& some) {
    some.count = size_ % kChunk == 0 ? kChunk : size_ % kChunk;
    size_ -= some.count;
    const unsigned char* chunk = place_ + size_ * kNote;
    std::memcpy(some.at, chunk, some.count * 4);
    std::memcpy(some.x, chunk + kChunk * 4, some.count * sizeof(X));
    std::memcpy(some.g, chunk + kChunk * (4 + sizeof(X)), some.count * sizeof(X));
  }

 private:
  static constexpr std::size_t kChunk = Entries<X>::kChunk, kNote = 4 + 2 * sizeof(X);
  unsigned char* place_ = nullptr;
  std::size_t room_ = 0, size_ = 0;
  bool complete_ = true;
};

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

// Whether so much of a tile is in the block that all of it is computed: to leave out the others would cost more.
template <class Kind>
bool is_dense(const Marks& marks, std::size_t length) {
  return Kind::kVector && marks.count > length / 4;
}

// Adds up part of a row, and notes the entries of its block.
template <class X, class Kind>
BlockSums sum_part(const Solved<X, Kind>& row, const X* x, const X* g, std::size_t n, Notes<X>& notes) {
  BlockLanes lanes;
  BlockSums sums;
  Entries<X> entries;
  const auto add = [&](std::size_t count) {
    entries.fetch(g, count);
    add_some(row, entries.x, entries.g, count, lanes, sums);
    if (kNotes<Kind>) notes.add(entries, count);
  };
  for_tiles<Kind::kAbsolute>(x, n, [&](const Wide<X>* keys, std::size_t i, std::size_t length) {
    Marks marks;
    marks.set<false, false>(keys, length, row.from, row.to);
    if (is_dense<Kind>(marks, length)) {
      notes.give_up();
      return add_some(row, x + i, g + i, length, lanes, sums);
    }
    if (Kind::kMagnitude) sums.whole += double(marks.over);
    entries.append(marks, x + i, g + i, i, length);
    for (; entries.count >= Entries<X>::kChunk; entries.drop_chunk()) add(Entries<X>::kChunk);
  });
  if (entries.count > 0) add(entries.count);
  sums.add(lanes.sums());
  return sums;
}

// What the block adds to the derivatives of its entries: dx_i = b g_i + rho_i/lam (g_i - mean), b = 1 for
// the debiased magnitude, else 0. An entry that is the block alone feels the curvature of phi alone; and so does each
// of a block of magnitudes that as much of k is left for as it has entries: they are equal, and selected whole.
struct Block {
  double mean = 0, scale, debias, alone = 0;
  bool single;
  double dk, dlam;

  template <class Kind>
  Block(const Curve<Kind>& row, const BlockSums& sums)
      : scale(1 / row.lam), debias(Kind::kMagnitude && row.debias ? 1 : 0), single(sums.size == 1 && !row.pinned) {
    const bool is_whole = row.k == ::floor(row.k);
    const double left = Kind::kMagnitude ? row.k - sums.whole : is_whole ? ::round(sums.whole) : sums.whole;
    const bool whole = Kind::kMagnitude && sums.size > 0 && left >= sums.size;
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
      const double t = sums.rho > 0 ? sums.rho_t / sums.rho : 0;
      // debias - alone, in which a large lam would leave no digits of the difference.
      const double rest = debias > 0 && total > 0 ? rho * (1 - curvature) / total : -alone;
      dlam = sums.g * t * rest;
    }
    dlam += sums.whole_in_lam;
  }
  double operator()(double rho, double g) const {
    if (single) return alone * g;
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
  for (std::size_t j = 0; j < some.count; ++j) {
    const double t = some.t[j], g = cotangents[j];
    if constexpr (Kind::kVector) {
      const double value = block(solved.kind.at(clip(t, Kind::zero, top)).slope, g);
      const double outside = Kind::kMagnitude && t >= top ? g * shrink : 0.0;
      cotangents[j] = ((t > bottom) & (t < top)) ? value : outside;
    } else if (t > bottom && t < top) {
      cotangents[j] = block(solved.kind.at(t).slope, g);
    } else {
      const bool whole = Kind::kMagnitude && t >= top;
      cotangents[j] = !whole ? 0 : solved.debias ? g : g * lone(solved, double(key<true>(x[j]))).in_x;
    }
  }
}

// Gives dx the sign that g had.
template <class X, class Kind>
inline X cotangent(double value, X x) {
  return finite<X>(Kind::kAbsolute && double(widen(x)) < 0 ? 0.0 - value : value);
}

// dx of some entries, where they are.
template <class X, class Kind>
void write_entries(const Solved<X, Kind>& row, const Block& block, Entries<X>& entries, X* dx) {
  Candidates some(row, entries.x, entries.g, entries.count);
  to_cotangents(row, block, entries.x, some);
  for (std::size_t j = 0; j < some.count; ++j) entries.g[j] = cotangent<X, Kind>(some.g[j], entries.x[j]);
  for (std::size_t j = 0; j < some.count; ++j) dx[entries.at[j]] = entries.g[j];
}

// dx over a tile, of which ``entries`` are in the block: others have 0, or g if they are selected whole.
template <class X, class Kind>
void write_tile(const Solved<X, Kind>& row, const Block& block, const Wide<X>* keys, const X* g, std::size_t length,
                Entries<X>& entries, X* dx) {
  entries.fetch(g, entries.count);
  if constexpr (Kind::kMagnitude) {
    const auto to = row.to;
    for (std::size_t j = 0; j < length; ++j) dx[j] = keys[j] > to ? g[j] : X{};
  } else {
    std::memset(dx, 0, length * sizeof(X));
  }
  write_entries(row, block, entries, dx);
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
  Entries<X> entries;
  for_tiles<Kind::kAbsolute>(x, n, [&](const Wide<X>* keys, std::size_t i, std::size_t length) {
    Marks marks;
    marks.set<false, false>(keys, length, row.from, row.to);
    if (is_dense<Kind>(marks, length)) return write_dense(row, block, x + i, g + i, length, dx + i);
    entries.count = 0;
    entries.append(marks, x + i, g + i, 0, length);
    write_tile(row, block, keys, g + i, length, entries, dx + i);
  });
}

// The same from what sum_part has noted in dx.
template <class X, class Kind>
void write_noted(const Solved<X, Kind>& row, const Block& block, Notes<X>& notes, std::size_t n, X* dx) {
  Entries<X> entries;
  std::size_t end = n;
  while (!notes.empty()) {
    notes.take(entries);
    const std::size_t begin = entries.at[0];
    std::memset(dx + begin, 0, (end - begin) * sizeof(X));
    write_entries(row, block, entries, dx);
    end = begin;
  }
  std::memset(dx, 0, end * sizeof(X));
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
  Entries<X> entries;
  for_tiles<Kind::kAbsolute>(x, n, [&](const Wide<X>* keys, std::size_t, std::size_t) {
    BlockLanes lanes;
    BlockSums sums;
    Marks marks;
    marks.set<false, false>(keys, n, row.from, row.to);
    entries.append(marks, x, g, 0, n);
    entries.fetch(g, entries.count);
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

// A row in at most ``kParts`` blocks.
template <std::size_t kParts, class X, class Kind>
Cotangents backward_blocks(const Row<X, Kind>& row, const Solved<X, Kind>& solved, const Blocks& blocks, const X* g,
                           X* dx) {
  BlockSums parts[kParts];
  Notes<X> notes[kParts];
  blocks.run(row.threads, [&](std::size_t block, std::size_t begin, std::size_t length) {
    notes[block] = Notes<X>(dx + begin, length);
    parts[block] = sum_part(solved, row.x + begin, g + begin, length, notes[block]);
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

template <class X, class Kind>
Cotangents backward_row(const Row<X, Kind>& row, State state, const X* g, X* dx) {
  if (is_special(row.lam, state)) return backward_special(row, state, g, dx);
  const Solved<X, Kind> solved(row, state);
  if (row.n <= kTile) return backward_tile(solved, row.x, g, row.n, dx);
  const Blocks blocks(row.n);
  return blocks.count == 1 ? backward_blocks<1>(row, solved, blocks, g, dx)
                           : backward_blocks<kBlocks>(row, solved, blocks, g, dx);
}

}  // namespace SPARSETOPK_LEVEL
}  // namespace sparsetopk
