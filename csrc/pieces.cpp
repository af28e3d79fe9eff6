// Pieces are shared between threads; their results are put together in their order, so that these do not depend
// on the number of threads.
#include "pieces.hpp"

#include <atomic>
#include <cmath>
#include <vector>

#include "kernels.hpp"
#include "parallel.hpp"

namespace sparsetopk {
namespace {

// f(i) for i in [0, count).
template <class F>
void for_each(std::size_t count, std::size_t threads, const F& f) {
  F copy = f;
  parallel_for(count, threads, [](void* context, std::size_t i) { (*static_cast<F*>(context))(i); }, &copy);
}

// f(piece, i) for every piece.
template <class F>
void for_pieces(const Pieces& pieces, F&& f) {
  const auto call = [&](std::size_t i) { f(pieces.begin[i], i); };
  for_each(pieces.count, pieces.threads, call);
}

// What f(piece) returns, of all pieces.
template <class F>
auto results(const Pieces& pieces, F&& f) {
  std::vector<decltype(f(*pieces.begin))> all(pieces.count);
  for_pieces(pieces, [&](Piece& piece, std::size_t i) { all[i] = f(piece); });
  return all;
}

}  // namespace

Counts gather(const Pieces& pieces, const Bounds& bounds) {
  Counts total;
  for (const Counts& part : results(pieces, [&](Piece& piece) { return kernels.gather(piece, bounds); })) {
    total.over += part.over, total.over_hi += part.over_hi, total.from_lo += part.from_lo;
    total.invalid += part.invalid;
  }
  return total;
}

void ties(const Pieces& pieces, double size, std::int64_t* counts) {
  for_pieces(pieces, [&](Piece& piece, std::size_t i) { counts[i] = kernels.ties(piece, size); });
}

void histogram(const Pieces& pieces, std::uint64_t first, std::uint64_t last, int shift, std::int64_t* counts) {
  constexpr std::size_t kGroup = 64;  // pieces that share counts, as these are longer than what most pieces keep
  std::vector<std::atomic<std::int64_t>> shared(kBuckets);
  const auto count_group = [&](std::size_t group) {
    std::int64_t own[kBuckets] = {};
    for (std::size_t i = group * kGroup; i < pieces.count && i < (group + 1) * kGroup; ++i)
      kernels.histogram(pieces.begin[i], first, last, shift, own);
    for (std::size_t j = 0; j < kBuckets; ++j)
      if (own[j] != 0) shared[j].fetch_add(own[j], std::memory_order_relaxed);
  };
  for_each((pieces.count + kGroup - 1) / kGroup, pieces.threads, count_group);
  for (std::size_t j = 0; j < kBuckets; ++j) counts[j] = shared[j].load();
}

Neighbours neighbours(const Pieces& pieces, double cut) {
  Neighbours found{HUGE_VAL, -HUGE_VAL};
  for (const Neighbours& part : results(pieces, [&](Piece& piece) { return kernels.neighbours(piece, cut); })) {
    if (part.above < found.above) found.above = part.above;
    if (part.below > found.below) found.below = part.below;
  }
  return found;
}

Masses masses(const Pieces& pieces, const Spread& row) {
  Masses total{0, 0, 0};
  Spread asked = row;
  asked.in_float = true;
  for (const int is_double : results(pieces, [](Piece& piece) { return int(piece.dtype == int(Dtype::float64)); }))
    asked.in_float &= is_double == 0;
  for (const Masses& part : results(pieces, [&](Piece& piece) { return kernels.masses(piece, asked); }))
    total.mass += part.mass, total.slope += part.slope, total.above += part.above;
  return total;
}

void apply(const Pieces& pieces, const Spread& row) {
  for_pieces(pieces, [&](Piece& piece, std::size_t) { kernels.apply(piece, row); });
}

void block_sums(const Pieces& pieces, const Spread& row, double* sums) {
  std::vector<double> all(pieces.count * kBlockSums);
  for_pieces(pieces, [&](Piece& piece, std::size_t i) { kernels.block_sums(piece, row, &all[i * kBlockSums]); });
  for (std::size_t j = 0; j < kBlockSums; ++j) sums[j] = 0;
  for (std::size_t i = 0; i < all.size(); ++i) sums[i % kBlockSums] += all[i];
}

double cotangents(const Pieces& pieces, const Spread& row, const double* sums) {
  double in_lam = 0;
  for (const double part : results(pieces, [&](Piece& piece) { return kernels.cotangents(piece, row, sums); }))
    in_lam += part;
  return in_lam;
}

}  // namespace sparsetopk
