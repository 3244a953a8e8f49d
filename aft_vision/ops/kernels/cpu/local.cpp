// AFT-local with the sums up to each token (AFT Eq. 4, causal): blocks of targets, forward and backward.
//
// The exponentials of a block and of the window before it stay in the cache as maps, one for each vector of channels,
// and a few targets at a time are multiplied by their weights, which all maps share.

#include <algorithm>
#include <limits>
#include <vector>

#include "vector.h"

namespace {

// Rows of a product whose sums fill the registers.
#if defined(__AVX512F__)
constexpr int ROWS = 12;
#else
constexpr int ROWS = 6;
#endif
// Terms that are added up by themselves first.
constexpr int64_t PIECE = 512;

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

// out[i] += sum of weights[j][i] * x[j] for N rows.
template <int N>
__attribute__((noinline)) void mix_tile(const Pair *x, const float *weights, int64_t length, Pair *out) {
  Vec values[N] = {}, keys[N] = {};
  for (int64_t j = 0; j < length; ++j)
    for (int i = 0; i < N; ++i) {
      values[i] += weights[j * N + i] * x[j].values;
      keys[i] += weights[j * N + i] * x[j].keys;
    }
  for (int i = 0; i < N; ++i) out[i] += Pair{values[i], keys[i]};
}

// The same for an N that is known at run time, a piece of the terms after the other.
template <int N = ROWS>
void mix(int64_t n, const Pair *x, const float *weights, int64_t length, Pair *out) {
  if (n == N) {
    for (int64_t j = 0; j < length; j += PIECE)
      mix_tile<N>(x + j, weights + j * N, std::min(PIECE, length - j), out);
  } else if constexpr (N > 1) {
    mix<N - 1>(n, x, weights, length, out);
  }
}

// Some rows of a product, and where the weights of its terms [begin, end) are.
struct Tile {
  int64_t first, size, begin, end;
  size_t offset;
};

// exp(w - reference) of the window, (T, s), and of any source before it, (T,).
struct Weights {
  const float *window, *older;
};

// The weights of a block, in the order in which they are multiplied.
struct Packed {
  std::vector<Tile> tiles;
  std::vector<float> weights;

  // Rows [first, stop) in pieces of nearly equal size; `reach` gives the terms of a piece, `weight` that of a row.
  template <typename R, typename W>
  void pack(int64_t first, int64_t stop, R reach, W weight) {
    tiles.clear();
    weights.clear();
    const int64_t count = (stop - first + ROWS - 1) / ROWS;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t size = (stop - first + count - i - 1) / (count - i);
      const auto [begin, end] = reach(first, size);
      const size_t offset = weights.size();
      tiles.push_back({first, size, begin, end, offset});
      weights.resize(offset + (end - begin) * size);
      float *next = weights.data() + offset;
      for (int64_t term = begin; term < end; ++term)
        for (int64_t row = first; row < first + size; ++row) *next++ = weight(row, term);
      first += size;
    }
  }
};

// What a target gives a source, zero in its future.
float weight_of(const Shape &s, const Weights &w, int64_t target, int64_t source) {
  const int64_t place = source - target + s.window - 1;
  return place >= s.window ? 0.0f : place >= 0 ? w.window[target * s.window + place] : w.older[target];
}

// A vector of channels of one sequence.
struct Item {
  int64_t b, channel;
  int lanes;

  Item(const Shape &s, int64_t index)
      : b(index / s.vectors()),
        channel(index % s.vectors() * LANES),
        lanes(std::min<int64_t>(LANES, s.channels - channel)) {}

  float *at(const Tokens &x, int64_t t) const { return x.data + b * x.batch + t * x.token + channel; }

  Vec read(const Tokens &x, int64_t t) const { return load(at(x, t), lanes); }

  void write(const Tokens &x, int64_t t, Vec y) const { store(at(x, t), y, lanes); }
};

struct Source {
  const Shape &s;
  Tokens k, v;
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

bool differ(Vec x, Vec y) {
  const IntVec different = x != y;
  int32_t found = 0;
  for (int i = 0; i < LANES; ++i) found |= different[i];
  return found != 0;
}

// An item on its way through the blocks. Its map holds the sources from s - 1 before the block to the end of it.
struct Forward {
  Item item;
  int64_t first;
  Vec reference, least;  // and the smallest denominator
  Pair state, part;      // sums over what no window of the block and of the next targets has
  std::vector<Pair> map;

  Forward(const Source &source, int64_t index)
      : item(source.s, index),
        first(source.first(item)),
        reference(splat(-std::numeric_limits<float>::max())),
        least(splat(std::numeric_limits<float>::max())),
        state{},
        part{},
        map(source.s.window - 1 + source.s.step) {}

  void enter(const Source &source, int64_t start, int64_t stop, Vec moved) {
    const int64_t before = source.s.window - 1;
    const bool again = differ(reference, moved);
    if (again) {
      state *= exp_(reference - moved);
      reference = moved;
    }
    for (int64_t i = again ? 0 : before; i < before + stop - start; ++i)
      map[i] = source.entry(item, start - before + i, reference);
  }

  // The sums of a tile's targets; `left` is the first source of the map that has not left the window.
  void mix_tile(const Packed &packed, const Weights &w, const Tile &tile, int64_t start, int64_t &left, Pair *sums) {
    for (; left < tile.first - start; ++left) part += map[left];
    Pair older = state;
    older += part;
    for (int64_t i = 0; i < tile.size; ++i) sums[i] = w.older[tile.first + i] * older;
    mix(tile.size, map.data() + left, packed.weights.data() + tile.offset, tile.end - tile.begin, sums);
  }

  void leave(int64_t start, int64_t stop, int64_t left) {
    for (; left < stop - start; ++left) part += map[left];
    state += part;
    part = Pair{};
    std::copy(map.begin() + (stop - start), map.end(), map.begin());
  }
};

int forward(const Shape &s, Tokens q, const Source &source, const Weights &w, Tokens references, Tokens out, Tokens den,
            float underflow, int threads) {
  const int64_t parts = std::min<int64_t>(threads, s.items());
  int good = 1;
#pragma omp parallel for num_threads(threads) reduction(&& : good)
  for (int64_t share = 0; share < parts; ++share) {
    std::vector<Forward> items;
    for (int64_t i = share * s.items() / parts; i < (share + 1) * s.items() / parts; ++i) items.emplace_back(source, i);
    Packed packed;
    for (int64_t start = 0, block = 0; start < s.tokens; start += s.step, ++block) {
      const int64_t stop = std::min(start + s.step, s.tokens);
      packed.pack(
          start, stop, [&](int64_t t, int64_t n) { return std::pair(t - s.window + 1, t + n); },
          [&](int64_t target, int64_t from) { return weight_of(s, w, target, from); });
      for (Forward &x : items) {
        x.enter(source, start, stop, x.item.read(references, block));
        int64_t left = 0;
        for (const Tile &tile : packed.tiles) {
          Pair sums[ROWS];
          x.mix_tile(packed, w, tile, start, left, sums);
          for (int64_t i = 0; i < tile.size; ++i) {
            const int64_t t = tile.first + i;
            const Vec bottom = sums[i].keys;
            if (t >= x.first) x.least = bottom < x.least ? bottom : x.least;
            Vec y = bottom == Vec{} ? Vec{} : sums[i].values / bottom;
            if (q.data) y *= sigmoid(x.item.read(q, t));
            x.item.write(out, t, y);
            if (den.data) x.item.write(den, t, bottom);
          }
        }
        x.leave(start, stop, left);
      }
    }
    for (const Forward &x : items)
      for (int lane = 0; lane < x.item.lanes; ++lane) good = good && x.least[lane] >= underflow;
  }
  return good;
}

// The gradients that go through the targets of one block.
struct Backward {
  const Shape &s;
  const Source &source;
  Weights w;
  Tokens grad, y, den, q, references, dq, dk, dv, d_state, rows, entries;
  float underflow;
  int64_t start, stop, low, left;  // the block, the first source of its windows, and that of the block before
  Packed packed;

  void pack() {
    packed.pack(
        low, stop,
        [&](int64_t j, int64_t n) { return std::pair(std::max(start, j), std::min(stop, j + n - 1 + s.window)); },
        [&](int64_t from, int64_t target) { return weight_of(s, w, target, from); });
  }

  void run(int64_t index, std::vector<Pair> &r, std::vector<Pair> &later) const {
    const Item item(s, index);
    const Vec reference = item.read(references, start / s.step);
    differentiate(item, r, later);
    Pair sum{item.read(d_state, 0), item.read(d_state, 1)};
    if (stop < s.tokens) sum *= exp_(reference - item.read(references, start / s.step + 1));
    sum += later[0];
    item.write(d_state, 0, sum.values);
    item.write(d_state, 1, sum.keys);
    for (int64_t t = left; t < low; ++t) add(item, t, source.entry(item, t, reference), sum);
    for (const Tile &tile : packed.tiles) {
      Pair found[ROWS];
      std::fill_n(found, tile.size, later[tile.end - start]);
      mix(tile.size, r.data() + (tile.begin - start), packed.weights.data() + tile.offset, tile.end - tile.begin, found);
      for (int64_t i = 0; i < tile.size; ++i) {
        const Pair entry = source.entry(item, tile.first + i, reference);
        add(item, tile.first + i, entry, found[i]);
        keep(item, entries, tile.first + i - low, entry);
      }
    }
  }

  // Of the sums of the block's targets, and sums of them from each target on, as sources before the window have them.
  void differentiate(const Item &item, std::vector<Pair> &r, std::vector<Pair> &later) const {
    later[stop - start] = Pair{};
    for (int64_t t = stop - 1; t >= start; --t) {
      const Vec g = item.read(grad, t), go = g * item.read(y, t), bottom = item.read(den, t);
      const Vec inverse = bottom < splat(underflow) ? Vec{} : 1.0f / bottom;
      Vec a = g;
      if (q.data) {
        const Vec gate = sigmoid(item.read(q, t));
        a *= gate;
        item.write(dq, t, go - go * gate);
      }
      r[t - start] = {a * inverse, -go * inverse};
      later[t - start] = w.older[t] * r[t - start];
      later[t - start] += later[t - start + 1];
      keep(item, rows, t - start, r[t - start]);
    }
  }

  void add(const Item &item, int64_t t, const Pair &entry, const Pair &found) const {
    item.write(dv, t, item.read(dv, t) + found.values * entry.keys);
    item.write(dk, t, item.read(dk, t) + found.values * entry.values + found.keys * entry.keys);
  }

  // Write a pair to a row of [values | keys], (n, 2, B, D).
  void keep(const Item &item, const Tokens &x, int64_t row, const Pair &pair) const {
    if (!x.data) return;
    float *place = x.data + row * x.token + item.b * s.channels + item.channel;
    store(place, pair.values, item.lanes);
    store(place + s.batch * s.channels, pair.keys, item.lanes);
  }
};

Shape shape_of(const int64_t *sizes) { return {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]}; }

}  // namespace

extern "C" {

// y and, unless den is null, the denominators, each relative to the reference of its block. `sizes` are B, T, D, s and
// the targets of a block; `window`, (T, s), and `older`, (T,), are the weights; `references` are (B, blocks, D). q and
// mask may be null. Returns 0 where a denominator that should not be is below `underflow`: its result is wrong.
int aft_local_causal_forward(const int64_t *sizes, Tokens q, Tokens k, Tokens v, const bool *mask, const float *window,
                             const float *older, Tokens references, Tokens out, Tokens den, float underflow,
                             int threads) {
  const Shape s = shape_of(sizes);
  return forward(s, q, {s, k, v, mask}, {window, older}, references, out, den, underflow, threads);
}

// Adds to the gradients of k and v, and writes that of q, what goes through one block of targets, last block first;
// `place` is start, stop, and the first sources of its windows and of those of the block before. `d_state`, (B, 2, D),
// goes from block to block and begins as zeros. Unless they are null, `rows`, (C, 2, B, D), become the gradients of the
// sums and `entries`, (L, 2, B, D), the exponentials of the windows. Targets with a denominator below `underflow` count
// for nothing.
void aft_local_causal_backward(const int64_t *sizes, const int64_t *place, Tokens grad, Tokens y, Tokens den, Tokens q,
                               Tokens k, Tokens v, const bool *mask, const float *window, const float *older,
                               Tokens references, Tokens dq, Tokens dk, Tokens dv, Tokens d_state, Tokens rows,
                               Tokens entries, float underflow, int threads) {
  const Shape s = shape_of(sizes);
  const Source source{s, k, v, mask};
  Backward block{s,       source, {window, older}, grad,      y,        den,      q,        references, dq, dk, dv,
                 d_state, rows,   entries,         underflow, place[0], place[1], place[2], place[3],   {}};
  block.pack();
#pragma omp parallel num_threads(threads)
  {
    std::vector<Pair> r(s.step), later(s.step + 1);
#pragma omp for
    for (int64_t index = 0; index < s.items(); ++index) block.run(index, r, later);
  }
}
}
