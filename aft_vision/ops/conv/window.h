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
void mix_tile(const Vec *map, const Vec *taps, const Shape &s, int64_t y, int64_t x, Vec *out,
              const Aside &aside = Aside()) {
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

}  // namespace

// The weights of all heads for the `side` x `side` taps of their windows: rows of `stride` heads, e^(w - reference) of each
// tap, and last e^-reference, of the sources outside the window. A grid may need less than all taps, `size` x `size` in the
// middle.
struct WindowWeights {
  float *data;
  int64_t stride, side;
  // What `compute_weights` sets them from: (D, bias_side, bias_side), of which the middle counts; null if they are set.
  const float *bias;
  int64_t bias_side;

  const float *outside() const { return data + side * side * stride; }

  // Call `f` with each place of `size` x `size`, and its weights.
  template <typename F>
  void each(int64_t size, F f) const {
    const float *row = data + (side - size) / 2 * (side + 1) * stride;
    for (int64_t y = 0, i = 0; y < size; ++y, row += side * stride)
      for (int64_t x = 0; x < size; ++x, ++i) f(i, row + x * stride);
  }

  // The place i of `size` x `size`.
  const float *tap(int64_t i, int64_t size) const {
    const int64_t edge = (side - size) / 2;
    return data + ((edge + i / size) * side + edge + i % size) * stride;
  }
};

// Set the weights from their bias, if there is one.
void compute_weights(const WindowWeights &weights, int64_t channels, int threads);
