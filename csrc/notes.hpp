// What the first pass of a backward over part of a row notes for the second one: which entries are in the block, and what
// dx there is made of. Without a buffer of its own, as dx has room for it.
#pragma once

#include "positions.hpp"

namespace sparsetopk {
namespace SPARSETOPK_LEVEL {

// The entries of some tiles of a row that may have a derivative of their own: where they are, x and g.
template <class X>
struct Chunk {
  // Entries that are worth a pass, and as many as positions reach.
  static constexpr std::size_t kEnough = 256, kLongest = 64 * kTile;
  std::uint16_t at[kTile + 16];  // from ``begin`` on
  X x[kTile + 16], g[kTile + 16];
  std::size_t begin = 0, length = 0, count = 0;

  bool has_room(const Marks& marks) const { return count + marks.count <= kTile && length < kLongest; }

  // Those of the next tile; x where it is asked for.
  SPARSETOPK_LOOP void append(const Marks& marks, const X* x_tile, const X* g_tile, std::size_t tile, bool with_x) {
    marks.gather(tile, length, g_tile, at + count, g + count);
    for (std::size_t j = count; with_x && j < count + marks.count; ++j) x[j] = x_tile[at[j] - length];
    count += marks.count, length += tile;
  }
  void clear() { begin += length, length = count = 0; }

  // What is in the place of g to where it belongs.
  SPARSETOPK_LOOP void scatter(X* dx) const {
    for (std::size_t j = 0; j < count; ++j) dx[begin + at[j]] = g[j];
  }
};

// Chunks behind each other in the part of dx that is theirs: g, x if ``kX``, where they are, and two numbers. The second pass takes
// the last one first, and overwrites dx from where its tiles begin: the chunks before end there at the latest.
template <class X, bool kX>
class Notes {
 public:
  Notes() = default;
  explicit Notes(X* dx) : begin_(reinterpret_cast<unsigned char*>(dx)), end_(begin_) {}
  bool complete() const { return complete_; }
  bool empty() const { return end_ == begin_; }
  void give_up() { complete_ = false; }

  SPARSETOPK_LOOP void add(const Chunk<X>& some) {
    const std::uint32_t sizes[2] = {std::uint32_t(some.length), std::uint32_t(some.count)};
    const std::size_t room = (some.begin + some.length) * sizeof(X), used = std::size_t(end_ - begin_);
    complete_ &= used + some.count * ((kX ? 2 : 1) * sizeof(X) + sizeof(some.at[0])) + sizeof(sizes) <= room;
    if (!complete_) return;
    put(some.g, some.count * sizeof(X));
    if (kX) put(some.x, some.count * sizeof(X));
    put(some.at, some.count * sizeof(some.at[0])), put(sizes, sizeof(sizes));
  }
  // The last chunk, which ends before ``end``.
  SPARSETOPK_LOOP void take(Chunk<X>& some, std::size_t end) {
    std::uint32_t sizes[2];
    get(sizes, sizeof(sizes));
    some.length = sizes[0], some.count = sizes[1], some.begin = end - some.length;
    get(some.at, some.count * sizeof(some.at[0]));
    if (kX) get(some.x, some.count * sizeof(X));
    get(some.g, some.count * sizeof(X));
  }

 private:
  void put(const void* from, std::size_t size) { std::memcpy(end_, from, size), end_ += size; }
  void get(void* to, std::size_t size) { end_ -= size, std::memcpy(to, end_, size); }

  unsigned char *begin_ = nullptr, *end_ = nullptr;
  bool complete_ = true;
};

}  // namespace SPARSETOPK_LEVEL
}  // namespace sparsetopk
