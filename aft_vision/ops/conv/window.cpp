// The weights of windows of sources, which change only with the position bias (AFT Eq. 6).

#include "../common/guard.h"
#include "window.h"

namespace {

// A position bias (D, side, side), of which the `size` x `size` in the middle are wanted.
struct Bias {
  int64_t channels;
  const float *data;
  int64_t side, size;

  // Biases of a channel from place i on, of which `count` are asked for; those after them may be others.
  Vec read(int64_t channel, int64_t i, int count) const {
    const int64_t start = channel * side * side + i;
    return load(data + start, start + LANES <= channels * side * side ? LANES : count);
  }

  // The reference of the weights of LANES channels: the larger of 0 and the largest bias of each, of all taps, as in the
  // other forms, which may compute the backward. NaN stays.
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

// e^(w - reference) of the taps, and in the last row e^-reference, the weight that every source has without a bias.
void compute_weights(const WindowWeights &weights, int64_t channels, int threads) {
  if (!weights.bias) return;
  const Bias bias{channels, weights.bias, weights.bias_side, weights.side};
  const int64_t square = weights.side * weights.side, stride = weights.stride;
#pragma omp parallel for num_threads(channels * square > FEW_WEIGHTS ? threads : 1) schedule(static)
  for (int64_t first = 0; first < channels; first += LANES) {
    const int lanes = rest(channels, first);
    const Vec peak = bias.reference(first, lanes);
    store(weights.data + square * stride + first, exp_(-peak), LANES);
    bias.each_tap(first, lanes, [&](int64_t i, Vec x) { store(weights.data + i * stride + first, exp_(x - peak), LANES); });
  }
}

extern "C" {

AFT_PACKED(aft_window_weights, WindowWeights)

// The weights of a bias for later calls, which then give none.
int aft_window_weights(const WindowWeights *packed, int channels, int threads) {
  return guarded([&] { compute_weights(*packed, channels, threads); });
}
}
