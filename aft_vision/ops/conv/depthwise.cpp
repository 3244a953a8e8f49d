// AFT-conv with a kernel per channel (AFT Eq. 6, h = D), forward and backward, in one pass over a block of channels.
//
// A block is as many neighbouring channels as a vector has lanes. Its exponentials live in padded maps that stay in the
// cache; no (B, T, D) intermediate is written.

#include <vector>

#include "../common/guard.h"
#include "window.h"

namespace {

// A denominator may lose at most this factor of the global sum by cancellation, as in `ops.conv.eager` in float32.
constexpr float CANCELLATION = 16.0f;

// grad[dy][dx] += sum over targets of g * map[y + dy][x + dx], for one dy and N neighbouring dx from `first`.
template <int N>
void tap_grad_tile(const Vec *g, const Vec *map, const Shape &s, int64_t dy, int64_t first, Vec *grad) {
  for (int64_t y = std::max<int64_t>(0, -dy); y < std::min(s.height, s.height - dy); ++y) {
    const Vec *target = g + y * s.padded() + s.reach();
    const Vec *source = map + (y + dy) * s.padded() + first;
    Vec sum[N] = {};
    for (int64_t x = 0; x < s.width; ++x)
      for (int i = 0; i < N; ++i) sum[i] += target[x] * source[x + i];
    for (int i = 0; i < N; ++i) grad[i] += sum[i];
  }
}

// exp(w) - outside of a block of channels, in a window of s x s sources around each target.
struct Window {
  static constexpr bool ONE_SOURCE = false;
  const Shape &s;
  std::vector<Vec> taps, flipped;

  Window(const Shape &shape, const WindowWeights &weights, const int64_t *, int64_t first, int lanes)
      : s(shape), taps(s.size * s.size) {
    const Vec outside = load(weights.outside() + first, lanes);
    weights.each(s.size, [&](int64_t i, const float *tap) { taps[i] = load(tap + first, lanes) - outside; });
  }

  // For `mix_transposed`.
  void flip() { flipped.assign(taps.rbegin(), taps.rend()); }

  void mix(const Vec *map, Vec *out) const { mix(map, taps.data(), out); }

  void mix_transposed(const Vec *map, Vec *out) const { mix(map, flipped.data(), out); }

  void mix(const Vec *map, const Vec *by, Vec *out) const {
    for (int64_t y = 0; y < s.height; ++y)
      in_tiles<TILE>(s.width, [&](int64_t x, auto n) { mix_tile<n>(map, by, s, y, x, out + y * s.width + x); });
  }

  void add_grad(const Vec *g, const Vec *map, Vec *grad) const {
    const int64_t r = s.reach();
    for (int64_t dy = -r; dy <= r; ++dy)
      in_tiles<TILE>(s.size, [&](int64_t dx, auto n) {
        tap_grad_tile<n>(g, map, s, dy, dx, grad + (dy + r) * s.size + dx);
      });
  }
};

// The weights of one source of each target, at an offset of its own for every channel. Its maps are not padded, but have
// a zero after their tokens.
struct OneOffset {
  static constexpr bool ONE_SOURCE = true;
  const Shape &s;
  Vec tap;
  std::vector<int32_t> sources, targets;  // (T, LANES): where in a map each token's is, or the zero

  OneOffset(const Shape &shape, const WindowWeights &weights, const int64_t *offset, int64_t first, int lanes)
      : s(shape),
        tap(load(weights.data + first, lanes) - load(weights.outside() + first, lanes)),
        sources(s.tokens() * LANES, s.tokens() * LANES),
        targets(sources) {
    for (int lane = 0; lane < lanes; ++lane) {
      const int64_t dy = offset[2 * (first + lane)], dx = offset[2 * (first + lane) + 1];
      if (dy <= -s.height || dy >= s.height || dx <= -s.width || dx >= s.width) continue;
      for (int64_t y = std::max<int64_t>(0, -dy); y < std::min(s.height, s.height - dy); ++y)
        for (int64_t x = std::max<int64_t>(0, -dx); x < std::min(s.width, s.width - dx); ++x) {
          const int64_t target = (y * s.width + x) * LANES + lane, source = target + (dy * s.width + dx) * LANES;
          sources[target] = source;
          targets[source] = target;
        }
    }
  }

  void flip() {}

  static Vec gather(const Vec *map, const int32_t *index) {
    const float *x = reinterpret_cast<const float *>(map);
    Vec found;
    for (int lane = 0; lane < LANES; ++lane) found[lane] = x[index[lane]];
    return found;
  }

  void mix(const Vec *map, Vec *out) const { mix(map, sources.data(), out); }

  void mix_transposed(const Vec *map, Vec *out) const { mix(map, targets.data(), out); }

  void mix(const Vec *map, const int32_t *index, Vec *out) const {
    for (int64_t t = 0; t < s.tokens(); ++t) out[t] += tap * gather(map, index + t * LANES);
  }

  void add_grad(const Vec *g, const Vec *map, Vec *grad) const {
    Sum sum;
    for (int64_t t = 0; t < s.tokens(); ++t) sum.add(g[t] * gather(map, sources.data() + t * LANES));
    grad[0] += sum.value();
  }
};

// The inputs of a call, as Python packs them; q, the mask's elements and offset may be null. With offsets, (D, 2), there is
// one tap, which belongs to the source at the offset.
struct Inputs {
  Shape s;
  WindowWeights weights;
  const int64_t *offset;
  Stream q, k, v;
  const bool *elements;

  Mask mask() const { return {elements, s.tokens()}; }
};

// Maps (H, W + s - 1), and a zero, of e^(k - max) and of it times v: of a thread, since nothing writes over what is around
// the tokens.
struct Maps {
  std::vector<Vec> keys, values;
};

// Channels [first, first + lanes) of one sequence: what its exponentials sum to, and padded maps of them.
template <typename Taps>
struct Block {
  const Shape &s;
  int64_t first;
  int lanes;
  Taps taps;
  std::vector<Vec> &keys, &values;
  // `fill` is the addend of the denominators of a sequence in which no token counts.
  Vec outside, key_sum, value_sum, fill;

  Block(const Inputs &in, Maps &maps, int64_t index)
      : s(in.s),
        first(index * LANES),
        lanes(rest(s.channels, first)),
        taps(s, in.weights, in.offset, first, lanes),
        keys(maps.keys),
        values(maps.values),
        outside(load(in.weights.outside() + first, lanes)) {}

  int64_t place(int64_t t) const { return t / s.width * s.padded() + s.reach() + t % s.width; }

  void exponentials(const Inputs &in, int64_t b) {
    const Place start{b, 0, first, lanes};
    const Vec peak = largest_keys(start, in.k, in.mask());
    Sum all_keys, all_values;
    for (int64_t t = 0; t < s.tokens(); ++t) {
      const bool counts = in.mask().counts(b, t);
      const Vec e = counts ? exp_(start.later(t).read(in.k) - peak) : Vec{};
      const Vec ev = counts ? e * start.later(t).read(in.v) : Vec{};
      keys[place(t)] = e;
      values[place(t)] = ev;
      all_keys.add(e);
      all_values.add(ev);
    }
    key_sum = all_keys.value();
    value_sum = all_values.value();
    fill = splat(in.mask().fill(b));
  }

  // Which lanes of a denominator, a sum of positive terms that was found by subtraction, have lost digits, or are NaN.
  IntVec loses_digits(Vec denominator, float underflow) const {
    const Vec least = key_sum * outside;  // of all sources without a bias
    return ~((denominator * CANCELLATION >= least) & (denominator >= splat(underflow)));
  }
};

struct ForwardCall {
  Inputs in;
  Stream out, den;
};

template <typename Taps>
int forward(const ForwardCall &call, float underflow, int threads) {
  const Inputs &in = call.in;
  const Shape &s = in.s;
  int good = 1;
  Region region;
#pragma omp parallel num_threads(threads) reduction(&& : good)
  {
    std::vector<Vec> num, denominator;
    Maps maps;
    region.run([&] {
      for (auto *x : {&maps.keys, &maps.values}) x->resize(s.map());
      num.resize(s.tokens());
      denominator.resize(s.tokens());
    });
#pragma omp for
    for (int64_t index = 0; index < s.blocks(); ++index) region.run([&] {
      Block<Taps> block(in, maps, index);
      for (int64_t b = 0; b < s.batch; ++b) {
        block.exponentials(in, b);
        std::fill(num.begin(), num.end(), block.outside * block.value_sum);
        std::fill(denominator.begin(), denominator.end(), block.outside * block.key_sum + block.fill);
        block.taps.mix(block.values.data(), num.data());
        block.taps.mix(block.keys.data(), denominator.data());
        IntVec inexact{};
        for (int64_t t = 0; t < s.tokens(); ++t) {
          const Place at{b, t, block.first, block.lanes};
          inexact |= block.loses_digits(denominator[t], underflow);
          at.write(call.out, gated(at, in.q, num[t] / denominator[t]));
          if (call.den.data) at.write(call.den, denominator[t]);
        }
        good = good && !any(inexact & below(block.lanes));
      }
    });
  }
  region.finish();
  return good;
}

// The batch is cut into `slices`, which threads take. `grad_taps` is a buffer for the gradients of the taps that each sums,
// (slices, size, size, D), and `grad_bias` has the shape of the bias; null if nobody asks for the gradient of the bias.
struct BackwardCall {
  Inputs in;
  int64_t slices;
  Stream grad, y, den, dq, dk, dv;
  float *grad_taps, *grad_bias;
};

template <typename Taps>
int backward(const BackwardCall &call, float underflow, int threads) {
  const Inputs &in = call.in;
  const Shape &s = in.s;
  const int64_t square = s.size * s.size, slices = call.slices;
  int good = 1;
  Region region;
#pragma omp parallel num_threads(threads) reduction(&& : good)
  {
    std::vector<Vec> d_num, d_den, d_values, d_keys, d_taps, denominators;
    Maps maps;
    region.run([&] {
      for (auto *x : {&d_num, &d_den, &maps.keys, &maps.values}) x->resize(s.map());
      for (auto *x : {&d_values, &d_keys}) x->resize(s.tokens());
      d_taps.resize(square);
      denominators.resize(call.den.data ? 0 : s.tokens());
    });
#pragma omp for collapse(2)
    for (int64_t slice = 0; slice < slices; ++slice)
      for (int64_t index = 0; index < s.blocks(); ++index) region.run([&] {
        Block<Taps> block(in, maps, index);
        block.taps.flip();
        std::fill(d_taps.begin(), d_taps.end(), Vec{});
        for (int64_t b = slice * s.batch / slices; b < (slice + 1) * s.batch / slices; ++b) {
          block.exponentials(in, b);
          if (!call.den.data) {
            std::fill(denominators.begin(), denominators.end(), block.outside * block.key_sum + block.fill);
            block.taps.mix(block.keys.data(), denominators.data());
          }
          Sum d_num_sum, d_den_sum;
          IntVec inexact{};
          for (int64_t t = 0; t < s.tokens(); ++t) {
            const Place at{b, t, block.first, block.lanes};
            const Vec denominator = call.den.data ? at.read(call.den) : denominators[t];
            inexact |= block.loses_digits(denominator, underflow);
            const Spread spread(at, call.grad, call.y, in.q, call.dq);
            const int64_t place = block.place(t);
            // A lane beyond the channels has den = 0, and is never stored.
            d_num_sum.add(d_num[place] = spread.a / denominator);
            d_den_sum.add(d_den[place] = -spread.go / denominator);
          }
          good = good && !any(inexact & below(block.lanes));
          std::fill(d_values.begin(), d_values.end(), block.outside * d_num_sum.value());
          std::fill(d_keys.begin(), d_keys.end(), block.outside * d_den_sum.value());
          block.taps.mix_transposed(d_num.data(), d_values.data());
          block.taps.mix_transposed(d_den.data(), d_keys.data());
          for (int64_t t = 0; t < s.tokens(); ++t) {
            const Place at{b, t, block.first, block.lanes};
            const Vec e = block.keys[block.place(t)];
            at.write(call.dv, d_values[t] * e);
            // A masked token has e = 0, and a value that may be anything.
            at.write(call.dk, d_keys[t] * e + d_values[t] * block.values[block.place(t)]);
          }
          if (!call.grad_taps) continue;
          if constexpr (Taps::ONE_SOURCE) {
            // y - v of the source cancels where it has nearly all of the weight; from the mean of all it does not.
            const Vec mean = block.value_sum / (block.key_sum + block.fill);
            for (int64_t t = 0; t < s.tokens(); ++t) {
              const int64_t place = block.place(t);
              d_num[place] *= block.outside * block.key_sum / denominators[t];
              block.values[place] -= mean * block.keys[place];
            }
            block.taps.add_grad(d_num.data(), block.values.data(), d_taps.data());
          } else {
            block.taps.add_grad(d_num.data(), block.values.data(), d_taps.data());
            block.taps.add_grad(d_den.data(), block.keys.data(), d_taps.data());
          }
        }
        if (call.grad_taps)
          for (int64_t i = 0; i < square; ++i)
            store(call.grad_taps + (slice * square + i) * s.channels + block.first, d_taps[i], block.lanes);
      });
  }
  region.finish();
  return good;
}

// The gradient of the bias from those of its taps.
void bias_grad(const BackwardCall &call, int threads) {
  const Shape &s = call.in.s;
  const WindowWeights &weights = call.in.weights;
  const int64_t taps = s.size * s.size, side = weights.bias_side, edge = (side - s.size) / 2;
  std::fill_n(call.grad_bias, s.channels * side * side, 0.0f);
#pragma omp parallel for num_threads(s.channels * taps > FEW_WEIGHTS ? threads : 1) schedule(static)
  for (int64_t i = 0; i < taps; ++i) {
    float *to = call.grad_bias + (edge + i / s.size) * side + edge + i % s.size;
    for (int64_t c = 0; c < s.channels; c += LANES) {
      const int lanes = rest(s.channels, c);
      Vec sum{};
      for (int64_t slice = 0; slice < call.slices; ++slice)
        sum += load(call.grad_taps + (slice * taps + i) * s.channels + c, lanes);
      sum *= load(weights.tap(i, s.size) + c, lanes);
      for (int lane = 0; lane < lanes; ++lane) to[(c + lane) * side * side] = sum[lane];
    }
  }
}

}  // namespace

extern "C" {

AFT_PACKED(aft_depthwise_forward, ForwardCall)
AFT_PACKED(aft_depthwise_backward, BackwardCall)

// y and, unless den is null, the denominators, at the references of the keys and of the bias. Returns 0 where a denominator
// has lost digits, or is below `underflow`: discard the result.
int aft_depthwise_forward(const ForwardCall *call, float underflow, int threads) {
  return guarded([&] {
    compute_weights(call->in.weights, call->in.s.channels, threads);
    return (call->in.offset ? forward<OneOffset> : forward<Window>)(*call, underflow, threads);
  });
}

// Gradients of q, k, v, and, unless grad_bias is null, of the bias. Without `den`, it is computed again. Returns 0 as the
// forward does.
int aft_depthwise_backward(const BackwardCall *call, float underflow, int threads) {
  return guarded([&] {
    compute_weights(call->in.weights, call->in.s.channels, threads);
    const int good = (call->in.offset ? backward<OneOffset> : backward<Window>)(*call, underflow, threads);
    if (good && call->grad_bias) bias_grad(*call, threads);
    return good;
  });
}
}
