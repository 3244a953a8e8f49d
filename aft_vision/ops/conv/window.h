// Windows of sources around the targets of a grid, whose terms are vectors of neighbouring channels, and their weights.

#pragma once

#include "../common/product.h"

namespace {

#if defined(__AVX512F__)
constexpr int TILE = 16;
#else
constexpr int TILE = 14;
#endif

struct Shape {
  int64_t batch, height, width, channels, size;

  int64_t reach() const { return size / 2; }
  int64_t padded() const { return width + size - 1; }
  int64_t map() const { return height * padded() + 1; }  // a zero after it
  int64_t tokens() const { return height * width; }
  int64_t blocks() const { return (channels + LANES - 1) / LANES; }
};

// Terms (H, W) of another map, not padded, with one weight: those of a row count once for each row of a window.
struct Aside {
  const Vec *map = nullptr;
  Vec weight{};
};

// out[x] += sum of taps[dy][dx] * map[y + dy][x + dx] for N targets of a row; the map is padded in x, not in y. Rows of at
// most SPAN taps have a partial sum.
template <int N>
void mix_tile(const Vec *map, const Vec *taps, const Shape &s, int64_t y, int64_t x, Vec *out, const Aside &aside) {
  const int64_t r = s.reach(), end = std::min(r, s.height - 1 - y) + 1, rows = std::max<int64_t>(1, SPAN / s.size);
  for (int64_t dy = std::max<int64_t>(-r, -y); dy < end;) {
    Vec sum[N] = {};
    for (const int64_t stop = std::min(end, dy + rows); dy < stop; ++dy) {
      const Vec *source = map + (y + dy) * s.padded() + x;
      const Vec *tap = taps + (dy + r) * s.size;
      for (int64_t dx = 0; dx < s.size; ++dx)
        for (int i = 0; i < N; ++i) sum[i] += tap[dx] * source[dx + i];
      if (aside.map)
        for (int i = 0; i < N; ++i) sum[i] += aside.weight * aside.map[(y + dy) * s.width + x + i];
    }
    for (int i = 0; i < N; ++i) out[i] += sum[i];
  }
}

// Call f<N> for an N that is known at run time.
template <int N = TILE>
void mix_row(int64_t n, const Vec *map, const Vec *taps, const Shape &s, int64_t y, int64_t x, Vec *out,
             const Aside &aside = Aside()) {
  if (n == N) return mix_tile<N>(map, taps, s, y, x, out, aside);
  if constexpr (N > 1) mix_row<N - 1>(n, map, taps, s, y, x, out, aside);
}

// Cut a length into pieces of nearly equal size, none above TILE, and call f(first, size) for each.
template <typename F>
void in_tiles(int64_t length, F f) {
  const int64_t count = (length + TILE - 1) / TILE;
  for (int64_t i = 0, first = 0; i < count; ++i) {
    const int64_t size = (length - first + count - i - 1) / (count - i);
    f(first, size);
    first += size;
  }
}

// A position bias (D, side, side), of which the `size` x `size` in the middle reach from a token of the grid to another.
struct Bias {
  int64_t channels;
  const float *data;
  int64_t side, size;

  // Biases of a channel from place i on, of which `count` are asked for; those after them may be others.
  Vec read(int64_t channel, int64_t i, int count) const {
    const int64_t start = channel * side * side + i;
    return load(data + start, start + LANES <= channels * side * side ? LANES : count);
  }

  // The reference of the weights of LANES channels: the larger of 0 and the largest bias of each. NaN stays.
  Vec reference(int64_t first, int lanes) const {
    const int64_t taps = side * side, last = std::max<int64_t>(0, taps - LANES);
    Tile tile;
    for (int lane = 0; lane < lanes; ++lane) {
      const int64_t channel = first + lane;
      Vec peak = only(read(channel, last, rest(taps, last)), rest(taps, last));
      for (int64_t i = 0; i < last; i += LANES) peak = larger(read(channel, i, LANES), peak);
      tile.row[lane] = peak;
    }
    tile.transpose();
    Vec peak{};
    for (const Vec &x : tile.row) peak = larger(x, peak);
    return peak;
  }

  // `f` is given each tap in the middle, and the biases of LANES channels there.
  template <typename F>
  void each_tap(int64_t first, int lanes, F f) const {
    const bool whole = size == side;
    const int64_t rows = whole ? 1 : size, length = whole ? size * size : size, edge = (side - size) / 2;
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t start = 0; start < length; start += LANES) {
        Tile tile;
        const int count = rest(length, start);
        for (int lane = 0; lane < lanes; ++lane)
          tile.row[lane] = read(first + lane, (edge + row) * side + edge + start, count);
        tile.transpose();
        for (int i = 0; i < count; ++i) f(row * length + start + i, tile.row[i]);
      }
  }
};

}  // namespace
