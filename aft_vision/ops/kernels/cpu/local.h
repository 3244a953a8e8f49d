// What both passes of the causal AFT-local share: the weights of a band, a few rows of a product, and the tokens.

#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "bfloat16.h"

namespace {

// Rows of a product whose sums fill the registers.
#if defined(__AVX512F__)
constexpr int ROWS = 12;
#else
constexpr int ROWS = 6;
#endif
// Terms that are added up by themselves first.
constexpr int64_t PIECE = 512;
// Weights beside the window that a piece of a product may read.
constexpr int64_t EDGE = 16;
// How far a key of a block may exceed those before it, in nats, and how far these may exceed its reference.
constexpr float HEADROOM = 60.0f, SLACK = 8.0f;

struct Shape {
  int64_t batch, tokens, channels, window, step;

  int64_t vectors() const { return (channels + LANES - 1) / LANES; }
  int64_t items() const { return batch * vectors(); }
};

// The values' and the keys' part of a sum, or of an entry of a map.
struct Pair {
  Vec values, keys;

  Pair &operator+=(const Pair &x) {
    values += x.values;
    keys += x.keys;
    return *this;
  }

  Pair &operator*=(Vec x) {
    values *= x;
    keys *= x;
    return *this;
  }
};

Pair operator*(float weight, const Pair &x) { return {weight * x.values, weight * x.keys}; }

// Products in float32: each term by itself.
struct Single {
  using Number = float;
  static constexpr int TERMS = 1;   // that a vector of a map has
  static constexpr int VECTORS = 2;  // of a row's pair

  static Number number(float x) { return x; }
  static float value(Number x) { return x; }
  static float join(Number first, Number) { return first; }

  static Pair pack(const Pair &first, const Pair &) { return first; }
  static Pair sum(const Pair &packed) { return packed; }
  static void keep(Vec *row, const Pair &x) { std::memcpy(row, &x, sizeof x); }
  static double exact(Vec x, Vec y, int lane) { return static_cast<double>(x[lane]) * y[lane]; }

  // out[i] += sum of weights[j][i] * x[j] for N rows.
  template <int N>
  __attribute__((noinline)) static void mix(const Pair *x, const float *weights, int64_t length, Pair *out) {
    Vec values[N] = {}, keys[N] = {};
    for (int64_t j = 0; j < length; ++j)
      for (int i = 0; i < N; ++i) {
        values[i] += weights[j * N + i] * x[j].values;
        keys[i] += weights[j * N + i] * x[j].keys;
      }
    for (int i = 0; i < N; ++i) out[i] += Pair{values[i], keys[i]};
  }
};

// Products of bfloat16 with sums in float32: two neighbouring terms, or the values and the keys of one, share a lane.
struct Half {
  using Number = uint16_t;
  static constexpr int TERMS = 2, VECTORS = 1;

  static Number number(float x) { return round_half(splat(x))[0] >> 16; }
  static float value(Number x) { return vec_of(Bits{} + (static_cast<uint32_t>(x) << 16))[0]; }
  static float join(Number first, Number second) {
    const uint32_t bits = first | static_cast<uint32_t>(second) << 16;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  }

  static Pair pack(const Pair &first, const Pair &second) {
    return {::join(first.values, second.values), ::join(first.keys, second.keys)};
  }
  static Pair sum(const Pair &packed) {
    return {low_half(packed.values) + high_half(packed.values), low_half(packed.keys) + high_half(packed.keys)};
  }
  static void keep(Vec *row, const Pair &x) { *row = ::join(x.values, x.keys); }
  static double exact(Vec x, Vec y, int lane) {
    return Single::exact(low_half(x), low_half(y), lane) + Single::exact(high_half(x), high_half(y), lane);
  }

  template <int N>
  WITH_BFLOAT16 __attribute__((noinline)) static void mix(const Pair *x, const float *weights, int64_t length,
                                                          Pair *out) {
    Vec values[N] = {}, keys[N] = {};
    for (int64_t j = 0; j < length; ++j)
      for (int i = 0; i < N; ++i) {
        const Vec weight = splat(weights[j * N + i]);
        values[i] = add_products(values[i], x[j].values, weight);
        keys[i] = add_products(keys[i], x[j].keys, weight);
      }
    for (int i = 0; i < N; ++i) {
      out[i].values += values[i];
      out[i].keys += keys[i];
    }
  }
};

// The first multiple of P::TERMS from x on, and the last up to it.
template <class P>
int64_t round_up(int64_t x) {
  return (x + P::TERMS - 1) & -P::TERMS;
}

template <class P>
int64_t round_down(int64_t x) {
  return x & -P::TERMS;
}

// The sums of `mix` for an N that is known at run time, a piece of the terms after the other.
template <class P, int N = ROWS>
void mix(int64_t n, const Pair *x, const float *weights, int64_t length, Pair *out) {
  if (n == N) {
    for (int64_t j = 0; j < length; j += PIECE)
      P::template mix<N>(x + j, weights + j * N, std::min(PIECE, length - j), out);
  } else if constexpr (N > 1) {
    mix<P, N - 1>(n, x, weights, length, out);
  }
}

// e^x for x <= 0, down to the smallest number: a key may lie e^60 above its reference, and make it count.
Vec exp_to_the_least(Vec x) {
  const Vec root = exp_(0.5f * x);
  return x < splat(-87.0f) ? root * root : exp_(x);
}

// exp(w - reference of its row) of a band (T, s): left of the window of a target the weight of a source before it, right
// of it zeros for the future.
template <class P>
class Weights {
 public:
  Weights(const Shape &s, const float *band, int threads)
      : width_(s.window + 2 * EDGE), window_(s.window), data_(new Number[(s.tokens + 1) * width_]) {
#pragma omp parallel for num_threads(threads)
    for (int64_t t = 0; t <= s.tokens; ++t) fill(s, band, t);
  }

  // Of the sources from `source` on that a vector of a map has, and of the targets.
  float sources(int64_t target, int64_t source) const {
    const Number *x = row(target) + source - target + window_ - 1;
    return P::join(x[0], x[1]);
  }

  float targets(int64_t target, int64_t source) const {
    const Number *x = row(target) + source - target + window_ - 1;
    return P::join(x[0], P::TERMS > 1 ? x[width_ - 1] : Number{});
  }

  float older(int64_t target) const { return P::value(row(target)[-1]); }

  // Of the window's sources.
  const typename P::Number *row(int64_t target) const { return data_.get() + target * width_ + EDGE; }

 private:
  using Number = typename P::Number;

  int64_t width_, window_;
  std::unique_ptr<Number[]> data_;

  void fill(const Shape &s, const float *band, int64_t t) {
    Number *out = data_.get() + t * width_;
    std::fill_n(out, width_, Number{});
    if (t == s.tokens) return;
    const float *in = band + t * s.window;
    // Of the window's places, those from `first` on are in the sequence.
    const int64_t first = std::max<int64_t>(0, s.window - 1 - t);
    float peak = t < s.window ? -std::numeric_limits<float>::infinity() : 0.0f;
    for (int64_t i = first; i < s.window; ++i) peak = std::max(peak, in[i]);
    if (t >= s.window) std::fill_n(out, EDGE, P::number(exp_to_the_least(splat(-peak))[0]));
    for (int64_t i = first; i < s.window; i += LANES) {
      const int lanes = std::min<int64_t>(LANES, s.window - i);
      const Vec x = exp_to_the_least(load(in + i, lanes) - peak);
      Stream{out, 0, 0, P::TERMS > 1}.write(EDGE + i, x, lanes);
    }
  }
};

// Some rows of a product, and where the weights of its terms [begin, end) are.
struct Tile {
  int64_t first, size, begin, end, offset;
};

// The weights of a block, in the order in which they are multiplied.
template <class P>
struct Packed {
  std::vector<Tile> tiles;
  std::vector<float> weights;

  // Rows [first, stop) in pieces of nearly equal size; `reach` gives the terms of a piece.
  template <typename R>
  void plan(int64_t first, int64_t stop, R reach) {
    tiles.clear();
    int64_t offset = 0;
    const int64_t count = (stop - first + ROWS - 1) / ROWS;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t size = (stop - first + count - i - 1) / (count - i);
      const auto [begin, end] = reach(first, size);
      tiles.push_back({first, size, begin, end, offset});
      offset += (end - begin) / P::TERMS * size;
      first += size;
    }
    weights.resize(offset);
  }

  // `weight` gives those of a row and of the terms of a vector.
  template <typename W>
  void fill(const Tile &tile, W weight) {
    float *next = weights.data() + tile.offset;
    for (int64_t term = tile.begin; term < tile.end; term += P::TERMS)
      for (int64_t row = tile.first; row < tile.first + tile.size; ++row) *next++ = weight(row, term);
  }

  // out[i] += the sums of a tile's rows; `x` are its terms.
  void mix(const Tile &tile, const Pair *x, Pair *out) const {
    ::mix<P>(tile.size, x, weights.data() + tile.offset, (tile.end - tile.begin) / P::TERMS, out);
  }
};

// A vector of channels of one sequence.
struct Item {
  int64_t b, channel;
  int lanes;

  Item(const Shape &s, int64_t index)
      : b(index / s.vectors()),
        channel(index % s.vectors() * LANES),
        lanes(std::min<int64_t>(LANES, s.channels - channel)) {}

  Vec read(const Stream &x, int64_t t) const { return x.read(b * x.batch + t * x.token + channel, lanes); }

  void write(const Stream &x, int64_t t, Vec y) const { x.write(b * x.batch + t * x.token + channel, y, lanes); }
};

struct Source {
  const Shape &s;
  Stream k, v;
  const bool *mask;

  bool counts(const Item &item, int64_t t) const { return !mask || mask[item.b * s.tokens + t]; }

  // e^(k - reference) [v | 1]; nothing for a token that does not count, or before the sequence.
  Pair entry(const Item &item, int64_t t, Vec reference) const {
    if (t < 0 || !counts(item, t)) return Pair{};
    const Vec e = exp_(item.read(k, t) - reference);
    return {e * item.read(v, t), e};
  }

  // The first token of a sequence that counts.
  int64_t first(const Item &item) const {
    int64_t t = 0;
    while (t < s.tokens && !counts(item, t)) ++t;
    return t;
  }
};

// The references of an item's blocks, one after the other. They never fall, and move only where they must: what has been
// made at one must be made again at the next.
struct Reference {
  Vec value, past;  // and the largest key so far, a finite number

  Reference(const Source &source, const Item &item) {
    past = splat(-std::numeric_limits<float>::max() / 4);
    if (source.counts(item, 0)) past = larger(item.read(source.k, 0), past);
    value = past;
  }

  // To the block of targets [start, stop).
  void move(const Source &source, const Item &item, int64_t start, int64_t stop) {
    Vec peak = splat(-std::numeric_limits<float>::infinity());
    for (int64_t t = start; t < stop; ++t)
      if (source.counts(item, t)) peak = larger(item.read(source.k, t), peak);
    const Vec level = larger(past, peak - HEADROOM);
    value = value >= level - SLACK ? value : level;
    past = larger(past, peak);
  }

  static Vec larger(Vec x, Vec y) { return x > y ? x : y; }
};

bool differ(Vec x, Vec y) {
  const IntVec different = x != y;
  int32_t found = 0;
  for (int i = 0; i < LANES; ++i) found |= different[i];
  return found != 0;
}

}  // namespace
