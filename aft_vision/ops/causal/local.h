// Shared by both passes of the causal AFT-local: the weights of a band, the tokens, and their references.

#pragma once

#include <vector>

#include "../common/guard.h"
#include "../common/tensor.h"
#include "local_products.h"

namespace {

// How far a new reference lies above the keys before it, in nats, so that it stays while they grow.
constexpr float SLACK = 8.0f;
// A weight below the largest of its row by this, in nats, is no normal number.
constexpr float RANGE = 87.0f;

struct Shape {
  int64_t batch, tokens, channels, window, step;

  int64_t vectors() const { return (channels + LANES - 1) / LANES; }
  int64_t items() const { return batch * vectors(); }
};

// The thresholds of denominators, below which one may have lost a term: of all targets, and of those with a weight that
// vanishes, though a key far above its reference may make it count.
struct Limits {
  float underflow, vanishing;
};

// The inputs of a call, as Python packs them; q and mask may be null.
struct Call {
  Shape s;
  int64_t operands;
  const float *band;  // (T, s)
  Stream q, k, v;
  const bool *mask;
};

// Some rows of a product, and where the weights of its terms [begin, end) are.
struct Tile {
  int64_t first, size, begin, end, offset;
};

// exp(w - reference of its row) of a band (T, s) for the targets of a block: left of the window of a target the weight
// of a source before it, right of it zeros for the future.
template <class P>
class Weights {
 public:
  Weights(const Shape &s, const float *band)
      : tokens_(s.tokens),
        window_(s.window),
        width_(s.window + 2 * EDGE),
        band_(band),
        data_((s.step + 1 + P::HEIGHT) * width_),
        vanishes_(s.step + 1) {}

  // Move to the block from `start` on, whose targets must then be filled, and the one after it.
  void move(int64_t start) { start_ = start; }

  void fill(int64_t t) {
    Number *out = data_.data() + (t - start_) * width_;
    std::fill_n(out, width_, Number{});
    if (t == tokens_) return;
    const float *in = band_ + t * window_;
    // Only the places of the window from `first` on are in the sequence.
    const int64_t first = std::max<int64_t>(0, window_ - 1 - t);
    // Finite, so that a row of minus infinity has no weights.
    const float most = std::numeric_limits<float>::max();
    float peak = t < window_ ? -most : 0.0f, low = t < window_ ? most : 0.0f;
    for (int64_t i = first; i < window_; ++i) {
      peak = std::max(peak, in[i]);
      low = in[i] >= -most ? std::min(low, in[i]) : low;
    }
    vanishes_[t - start_] = peak - low > RANGE;
    if (t >= window_) std::fill_n(out, EDGE, P::number(exp_(splat(-peak))[0]));
    for (int64_t i = first; i < window_; i += LANES) {
      const int lanes = std::min<int64_t>(LANES, window_ - i);
      Stream{reinterpret_cast<char *>(out), 0, 0, P::TERMS > 1}.write(EDGE + i, exp_(load(in + i, lanes) - peak), lanes);
    }
  }

  // The threshold of a target's denominators.
  float limit(int64_t t, Limits limits) const { return vanishes_[t - start_] ? limits.vanishing : limits.underflow; }

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

  // Their number in the window.
  const typename P::Number *row(int64_t target) const { return data_.data() + (target - start_) * width_ + EDGE; }

  // out[i] += the sums of a tile's targets, whose weights tiles read here: those of a source have a place less in each row.
  void mix(const Tile &tile, const Pair *x, Pair *out) const {
    mix_tiles(tile.size, x, row(tile.first) + tile.begin - tile.first + window_ - 1, (width_ - 1) * sizeof(Number),
              P::STEP * sizeof(Number), tile.end - tile.begin, out);
  }

 private:
  using Number = typename P::Number;
  static constexpr int64_t EDGE = P::EDGE;

  int64_t tokens_, window_, width_, start_ = 0;
  const float *band_;
  std::vector<Number> data_;
  std::vector<char> vanishes_;
};

// The weights of a block, in the order in which they are multiplied.
template <class P>
struct Packed {
  std::vector<Tile> tiles;
  std::vector<float> weights;

  // Multiply rows [first, stop) in pieces of nearly equal size; `reach` gives the terms of a piece.
  template <typename R>
  void plan(int64_t first, int64_t stop, R reach) {
    tiles.clear();
    int64_t offset = 0;
    const int64_t count = (stop - first + P::HEIGHT - 1) / P::HEIGHT;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t size = (stop - first + count - i - 1) / (count - i);
      const auto [begin, end] = reach(first, size);
      const int64_t terms = (end - begin + P::STEP - 1) / P::STEP * P::STEP;
      tiles.push_back({first, size, begin, begin + terms, offset});
      offset += terms / P::TERMS * (TILED<P> ? P::HEIGHT : size);
      first += size;
    }
    weights.resize(offset);
  }

  // `weight` returns the weights of a row and of the terms of a vector.
  template <typename W>
  void fill(const Tile &tile, W weight) {
    float *to = weights.data() + tile.offset;
    for (int64_t term = tile.begin, word = 0; term < tile.end; term += P::TERMS, ++word)
      for (int64_t i = 0; i < tile.size; ++i) {
        const int64_t first = word % LANES;
        to[TILED<P> ? (word - first) * P::HEIGHT + i * LANES + first : word * tile.size + i] =
            weight(tile.first + i, term);
      }
  }

  // out[i] += the sums of a tile's rows; `x` are its terms.
  void mix(const Tile &tile, const Pair *x, Pair *out) const {
    const float *from = weights.data() + tile.offset;
    if constexpr (TILED<P>)
      mix_tiles(tile.size, x, from, LANES * sizeof(float), P::HEIGHT * LANES * sizeof(float), tile.end - tile.begin, out);
    else
      ::mix<P>(tile.size, x, from, (tile.end - tile.begin) / P::TERMS, out);
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

  Vec read(const Stream &x, int64_t t) const { return Place{b, t, channel, lanes}.read(x); }

  void write(const Stream &x, int64_t t, Vec y) const { Place{b, t, channel, lanes}.write(x, y); }
};

struct Source {
  const Shape &s;
  Stream k, v;
  const bool *mask;
  float headroom;  // how far a key may exceed its reference, in nats

  bool counts(const Item &item, int64_t t) const { return !mask || mask[item.b * s.tokens + t]; }

  // e^(k - reference) [v | 1]; nothing for a token that does not count, or before the sequence.
  Pair entry(const Item &item, int64_t t, Vec reference) const {
    if (t < 0 || !counts(item, t)) return Pair{};
    const Vec e = exp_(item.read(k, t) - reference);
    return {e * item.read(v, t), e};
  }

  // The first token of each channel that counts, with a key above minus infinity.
  IntVec first(const Item &item) const {
    IntVec found = IntVec{} + static_cast<int32_t>(s.tokens), waits = ~IntVec{};
    for (int64_t t = 0; t < s.tokens && any(waits); ++t) {
      if (!counts(item, t)) continue;
      const IntVec seen = item.read(k, t) > splat(-std::numeric_limits<float>::infinity());
      found = (seen & waits) != 0 ? IntVec{} + static_cast<int32_t>(t) : found;
      waits &= ~seen;
    }
    return found;
  }
};

// The references of an item's blocks, one after the other. They never fall, and move only where they must: what has
// been made at one must be made again at the next.
struct Reference {
  Vec value, past;  // and the largest key so far, never minus infinity

  Reference(const Source &source, const Item &item) {
    past = splat(-std::numeric_limits<float>::max() / 4);
    if (source.counts(item, 0)) past = larger(item.read(source.k, 0), past);
    value = past;
  }

  // Move to the block of targets [start, stop).
  void move(const Source &source, const Item &item, int64_t start, int64_t stop) {
    Vec peak = splat(-std::numeric_limits<float>::infinity());
    for (int64_t t = start; t < stop; ++t)
      if (source.counts(item, t)) peak = larger(item.read(source.k, t), peak);
    const Vec least = peak - source.headroom;
    value = value >= larger(past, least) ? value : larger(past + SLACK, least);
    past = larger(past, peak);
  }

  static Vec larger(Vec x, Vec y) { return x > y ? x : y; }
};

// Call `pass` with the products of operands.
template <class F>
int with_products(int64_t operands, F pass) {
  if (operands == TILES) return pass(Tiles{});
  if (operands == PAIRS) return pass(Half{});
  return pass(Single{});
}

}  // namespace
