// The passes over tokens around the products of AFT-full and AFT-conv (AFT Eq. 2 and 6): e^(k - peak) [v | 1] enters a
// product, the gated ratio of its sums leaves it, and the same for the gradients.
//
// AFT-full multiplies rows of tokens, where a vector of channels is a vector of memory. AFT-conv multiplies rows of
// channels, so tiles of as many tokens as channels are transposed in registers on their way.

#include <algorithm>
#include <limits>
#include <vector>

#include "vector.h"

namespace {

typedef uint16_t HalfVec __attribute__((vector_size(2 * LANES)));
typedef uint32_t WordVec __attribute__((vector_size(4 * LANES)));

// A thread should have several pieces of work, so that threads end together.
constexpr int64_t PIECES = 4;

struct Shape {
  int64_t batch, tokens, channels, heads;

  int64_t per_head() const { return channels / heads; }

  // What is added to the denominators of each sequence: 1 where no token counts, so that 0 / 0 is 0 and nothing is lost.
  std::vector<float> fill(const bool *mask) const {
    std::vector<float> found(batch);
    for (int64_t b = 0; mask && b < batch; ++b) found[b] = !std::memchr(mask + b * tokens, true, tokens);
    return found;
  }
};

// A (B, T, n) tensor of float32, or bfloat16, whose channels are neighbours.
struct Array {
  char *data;
  int64_t batch, token, half;
};

// A workspace (2, B, T, D) in rows of tokens, or (h, c + 1, B, T) in rows of channels.
struct Space {
  char *data;
  int64_t half;
};

Vec widen(HalfVec x) {
  const WordVec bits = __builtin_convertvector(x, WordVec) << 16;
  Vec wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// To the nearest, ties to even; NaN stays NaN.
HalfVec narrow(Vec x) {
  WordVec bits;
  std::memcpy(&bits, &x, sizeof bits);
  const WordVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector(x == x ? rounded : (bits >> 16) | 0x40, HalfVec);
}

Vec get(const char *data, int64_t index, bool half, int lanes) {
  if (!half) return load(reinterpret_cast<const float *>(data) + index, lanes);
  HalfVec x{};
  if (lanes == LANES)
    std::memcpy(&x, data + 2 * index, sizeof x);
  else
    std::memcpy(&x, data + 2 * index, 2 * lanes);
  return widen(x);
}

void put(char *data, int64_t index, bool half, int lanes, Vec x) {
  if (!half) return store(reinterpret_cast<float *>(data) + index, x, lanes);
  const HalfVec y = narrow(x);
  if (lanes == LANES)
    std::memcpy(data + 2 * index, &y, sizeof y);
  else
    std::memcpy(data + 2 * index, &y, 2 * lanes);
}

// A place in a batch: a token of a sequence, and `lanes` channels.
struct Place {
  int64_t b, t, channel;
  int lanes;

  Vec read(const Array &x) const { return get(x.data, b * x.batch + t * x.token + channel, x.half, lanes); }

  void write(const Array &x, Vec y) const { put(x.data, b * x.batch + t * x.token + channel, x.half, lanes, y); }
};

int rest(int64_t size, int64_t start) { return std::min<int64_t>(LANES, size - start); }

IntVec below(int count) {
  IntVec index;
  for (int i = 0; i < LANES; ++i) index[i] = i;
  return index < count;
}

// What the gate and the division make of a gradient.
struct Spread {
  Vec a, go;

  // Writes the gradient of q.
  Spread(const Place &at, const Array &grad, const Array &y, const Array &q, const Array &dq) : a(at.read(grad)) {
    go = a * at.read(y);
    if (!q.data) return;
    const Vec gate = sigmoid(at.read(q));
    a *= gate;
    at.write(dq, go - go * gate);
  }
};

// The ratio behind the gate. One division for both would overflow before the ratio does.
Vec gated(const Place &at, const Array &q, Vec top, Vec bottom) {
  if (!q.data) return top / bottom;
  const Vec most = splat(87.0f), negated = -at.read(q);
  return top / bottom / (1.0f + exp_(negated > most ? most : negated));
}

// Which lanes have a denominator below a limit, or NaN.
IntVec lost_lanes(Vec bottom, int lanes, float limit) { return ~(bottom >= splat(limit)) & below(lanes); }

bool any(IntVec lanes) {
  int32_t found = 0;
  for (int i = 0; i < LANES; ++i) found |= lanes[i];
  return found != 0;
}

// Rows of tokens, a head for each channel. `f` is given a sequence and a range of channels, as wide as threads allow:
// memory is read fastest in its order.
template <typename F>
void each_range(const Shape &s, int threads, F f) {
  const int64_t vectors = (s.channels + LANES - 1) / LANES;
  const int64_t parts = std::min(vectors, threads > 1 ? (PIECES * threads + s.batch - 1) / s.batch : 1);
#pragma omp parallel for num_threads(threads)
  for (int64_t item = 0; item < s.batch * parts; ++item) {
    const int64_t part = item % parts;
    f(item / parts, part * vectors / parts * LANES, std::min((part + 1) * vectors / parts * LANES, s.channels));
  }
}

// `f` gives lanes that are lost; returns whether there are none.
template <typename F>
int each_place(const Shape &s, int threads, F f) {
  int good = 1;
  each_range(s, threads, [&](int64_t b, int64_t first, int64_t stop) {
    IntVec lost{};
    for (int64_t t = 0; t < s.tokens; ++t)
      for (int64_t d = first; d < stop; d += LANES) lost |= f(Place{b, t, d, rest(stop, d)});
    if (any(lost)) {
#pragma omp atomic write
      good = 0;
    }
  });
  return good;
}

struct TokenRows {
  const Shape &s;

  int64_t value(const Place &at) const { return (at.b * s.tokens + at.t) * s.channels + at.channel; }
  int64_t key(const Place &at) const { return s.batch * s.tokens * s.channels + value(at); }

  void enter(const Array &k, const Array &v, const bool *mask, const Space &x, int threads) const {
    each_range(s, threads, [&](int64_t b, int64_t first, int64_t stop) {
      std::vector<Vec> peak((stop - first + LANES - 1) / LANES, splat(-std::numeric_limits<float>::max()));
      for (int64_t t = 0; t < s.tokens; ++t) {
        if (mask && !mask[b * s.tokens + t]) continue;
        for (int64_t d = first; d < stop; d += LANES) {
          Vec &most = peak[(d - first) / LANES];
          const Vec key = Place{b, t, d, rest(stop, d)}.read(k);
          most = key > most ? key : most;
        }
      }
      for (int64_t t = 0; t < s.tokens; ++t) {
        const bool counts = !mask || mask[b * s.tokens + t];
        for (int64_t d = first; d < stop; d += LANES) {
          const Place at{b, t, d, rest(stop, d)};
          const Vec e = counts ? exp_(at.read(k) - peak[(d - first) / LANES]) : Vec{};
          put(x.data, value(at), x.half, at.lanes, e * at.read(v));
          put(x.data, key(at), x.half, at.lanes, e);
        }
      }
    });
  }

  int leave(const Space &y, const Array &q, const bool *mask, const Array &out, const Array &den, float underflow,
            int threads) const {
    const std::vector<float> fill = s.fill(mask);
    return each_place(s, threads, [&](const Place &at) {
      const Vec bottom = get(y.data, key(at), y.half, at.lanes) + fill[at.b];
      if (den.data) at.write(den, bottom);
      at.write(out, gated(at, q, get(y.data, value(at), y.half, at.lanes), bottom));
      return lost_lanes(bottom, at.lanes, underflow);
    });
  }

  int spread(const Array &grad, const Array &y, const Array &den, const Array &q, const Array &dq, const Space &r,
             float underflow, int threads) const {
    return each_place(s, threads, [&](const Place &at) {
      const Vec bottom = at.read(den), inverse = 1.0f / bottom;
      const Spread found(at, grad, y, q, dq);
      put(r.data, value(at), r.half, at.lanes, found.a * inverse);
      put(r.data, key(at), r.half, at.lanes, -found.go * inverse);
      return lost_lanes(bottom, at.lanes, underflow);
    });
  }

  void collect(const Space &z, const Space &x, const Array &v, const Array &dk, const Array &dv, int threads) const {
    each_place(s, threads, [&](const Place &at) {
      const Vec e = get(x.data, key(at), x.half, at.lanes), top = get(z.data, value(at), z.half, at.lanes);
      at.write(dv, top * e);
      at.write(dk, (top * at.read(v) + get(z.data, key(at), z.half, at.lanes)) * e);
      return IntVec{};
    });
  }
};

// GCC knows Clang's name from version 12 on.
#if defined(__clang__)
#define SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define SHUFFLE(x, y, ...) __builtin_shuffle(x, y, IntVec{__VA_ARGS__})
#endif

// As many tokens as channels; a row is a vector.
struct Tile {
  Vec row[LANES] = {};

  // Rows become columns: shuffling halves into one another as often as an index has bits rotates row into column.
  void transpose() {
    for (int width = LANES; width > 1; width /= 2) {
      Vec mixed[LANES];
      for (int i = 0; i < LANES / 2; ++i) {
        const Vec x = row[i], y = row[i + LANES / 2];
#if defined(__AVX512F__)
        mixed[2 * i] = SHUFFLE(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        mixed[2 * i + 1] = SHUFFLE(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#else
        mixed[2 * i] = SHUFFLE(x, y, 0, 8, 1, 9, 2, 10, 3, 11);
        mixed[2 * i + 1] = SHUFFLE(x, y, 4, 12, 5, 13, 6, 14, 7, 15);
#endif
      }
      std::copy_n(mixed, LANES, row);
    }
  }
};

// Rows of channels, in heads of c. A tile begins at a place and has `count` tokens. There are more rows than a processor
// foresees, so each is fetched for the next tile.
struct ChannelRows {
  const Shape &s;

  static Vec fetch(const Space &x, int64_t index, int count) {
    __builtin_prefetch(x.data + (index + LANES) * (x.half ? 2 : 4), 0);
    return get(x.data, index, x.half, count);
  }

  static void keep(const Space &x, int64_t index, int count, Vec y) {
    __builtin_prefetch(x.data + (index + LANES) * (x.half ? 2 : 4), 1);
    put(x.data, index, x.half, count, y);
  }

  int64_t row(int64_t index, const Place &at) const { return (index * s.batch + at.b) * s.tokens + at.t; }
  int64_t value(int64_t channel, const Place &at) const {
    return row(channel / s.per_head() * (s.per_head() + 1) + channel % s.per_head(), at);
  }
  int64_t key(int64_t head, const Place &at) const { return row((head + 1) * (s.per_head() + 1) - 1, at); }

  // `f` is given the first place of each tile of tokens, how many they are, and room for a row of each head; it gives
  // lanes that are lost. Returns whether there are none.
  template <typename F>
  int each_tile(int threads, F f) const {
    const int64_t tiles = (s.tokens + LANES - 1) / LANES;
    int good = 1;
#pragma omp parallel num_threads(threads) reduction(&& : good)
    {
      std::vector<Vec> first(s.heads), second(s.heads);
#pragma omp for
      for (int64_t item = 0; item < s.batch * tiles; ++item) {
        const Place at{item / tiles, item % tiles * LANES, 0, 0};
        good = !any(f(at, rest(s.tokens, at.t), first, second)) && good;
      }
    }
    return good;
  }

  // Vectors of tokens, one for each of some channels.
  static Tile columns(const Array &x, const Place &at, int count) {
    Tile tile;
    for (int i = 0; i < count; ++i) tile.row[i] = Place{at.b, at.t + i, at.channel, at.lanes}.read(x);
    tile.transpose();
    return tile;
  }

  // `write` is given each token's place and its vector of channels.
  template <typename F>
  static void tokens(Tile &tile, const Place &at, int count, F write) {
    tile.transpose();
    for (int i = 0; i < count; ++i) write(Place{at.b, at.t + i, at.channel, at.lanes}, tile.row[i]);
  }

  // `f` is given a place for each vector of some width.
  template <typename F>
  static void vectors(const Place &at, int64_t width, F f) {
    for (int64_t c = 0; c < width; c += LANES) f(Place{at.b, at.t, c, rest(width, c)});
  }

  std::vector<float> peaks(const Array &k, const bool *mask, int threads) const {
    std::vector<float> found(s.batch * s.heads);
#pragma omp parallel for num_threads(threads)
    for (int64_t b = 0; b < s.batch; ++b)
      vectors({b, 0, 0, 0}, s.heads, [&](const Place &at) {
        Vec most = splat(-std::numeric_limits<float>::max());
        for (int64_t t = 0; t < s.tokens; ++t) {
          if (mask && !mask[b * s.tokens + t]) continue;
          const Vec key = Place{b, t, at.channel, at.lanes}.read(k);
          most = key > most ? key : most;
        }
        store(&found[b * s.heads + at.channel], most, at.lanes);
      });
    return found;
  }

  void enter(const Array &k, const Array &v, const bool *mask, const Space &x, int threads) const {
    const std::vector<float> peak = peaks(k, mask, threads);
    each_tile(threads, [&](const Place &start, int count, std::vector<Vec> &e, std::vector<Vec> &) {
      IntVec counts = below(count);
      for (int i = 0; mask && i < count; ++i) counts[i] &= -int32_t(mask[start.b * s.tokens + start.t + i]);
      vectors(start, s.heads, [&](const Place &at) {
        const Tile keys = columns(k, at, count);
        for (int i = 0; i < at.lanes; ++i) {
          const int64_t head = at.channel + i;
          e[head] = counts ? exp_(keys.row[i] - splat(peak[at.b * s.heads + head])) : Vec{};
          keep(x, key(head, at), count, e[head]);
        }
      });
      vectors(start, s.channels, [&](const Place &at) {
        const Tile values = columns(v, at, count);
        for (int i = 0; i < at.lanes; ++i) {
          const int64_t channel = at.channel + i;
          keep(x, value(channel, at), count, e[channel / s.per_head()] * values.row[i]);
        }
      });
      return IntVec{};
    });
  }

  int leave(const Space &y, const Array &q, const bool *mask, const Array &out, const Array &den, float underflow,
            int threads) const {
    const std::vector<float> fill = s.fill(mask);
    return each_tile(threads, [&](const Place &start, int count, std::vector<Vec> &inverse, std::vector<Vec> &) {
      IntVec lost{};
      vectors(start, s.heads, [&](const Place &at) {
        Tile tile;
        for (int i = 0; i < at.lanes; ++i) {
          tile.row[i] = fetch(y, key(at.channel + i, at), count) + fill[at.b];
          inverse[at.channel + i] = 1.0f / tile.row[i];
          lost |= lost_lanes(tile.row[i], count, underflow);
        }
        if (den.data) tokens(tile, at, count, [&](const Place &to, Vec found) { to.write(den, found); });
      });
      vectors(start, s.channels, [&](const Place &at) {
        Tile tile;
        for (int i = 0; i < at.lanes; ++i) {
          const int64_t channel = at.channel + i;
          tile.row[i] = fetch(y, value(channel, at), count) * inverse[channel / s.per_head()];
        }
        tokens(tile, at, count, [&](const Place &to, Vec x) { to.write(out, gated(to, q, x, splat(1.0f))); });
      });
      return lost;
    });
  }

  int spread(const Array &grad, const Array &y, const Array &den, const Array &q, const Array &dq, const Space &r,
             float underflow, int threads) const {
    return each_tile(threads, [&](const Place &start, int count, std::vector<Vec> &inverse, std::vector<Vec> &sum) {
      IntVec lost{};
      vectors(start, s.heads, [&](const Place &at) {
        const Tile tile = columns(den, at, count);
        for (int i = 0; i < at.lanes; ++i) {
          lost |= lost_lanes(tile.row[i], count, underflow);
          inverse[at.channel + i] = 1.0f / tile.row[i];
          sum[at.channel + i] = Vec{};
        }
      });
      vectors(start, s.channels, [&](const Place &at) {
        Tile a, go;
        for (int i = 0; i < count; ++i) {
          const Spread found(Place{at.b, at.t + i, at.channel, at.lanes}, grad, y, q, dq);
          a.row[i] = found.a;
          go.row[i] = found.go;
        }
        a.transpose();
        go.transpose();
        for (int i = 0; i < at.lanes; ++i) {
          const int64_t channel = at.channel + i, head = channel / s.per_head();
          keep(r, value(channel, at), count, a.row[i] * inverse[head]);
          sum[head] -= go.row[i];
        }
      });
      for (int64_t head = 0; head < s.heads; ++head)
        keep(r, key(head, start), count, sum[head] * inverse[head]);
      return lost;
    });
  }

  void collect(const Space &z, const Space &x, const Array &v, const Array &dk, const Array &dv, int threads) const {
    each_tile(threads, [&](const Place &start, int count, std::vector<Vec> &e, std::vector<Vec> &sum) {
      for (int64_t head = 0; head < s.heads; ++head) {
        e[head] = fetch(x, key(head, start), count);
        sum[head] = fetch(z, key(head, start), count);
      }
      vectors(start, s.channels, [&](const Place &at) {
        Tile tile = columns(v, at, count);
        for (int i = 0; i < at.lanes; ++i) {
          const int64_t channel = at.channel + i, head = channel / s.per_head();
          const Vec top = fetch(z, value(channel, at), count);
          sum[head] += top * tile.row[i];
          tile.row[i] = top * e[head];
        }
        tokens(tile, at, count, [&](const Place &to, Vec found) { to.write(dv, found); });
      });
      vectors(start, s.heads, [&](const Place &at) {
        Tile tile;
        for (int i = 0; i < at.lanes; ++i) tile.row[i] = sum[at.channel + i] * e[at.channel + i];
        tokens(tile, at, count, [&](const Place &to, Vec found) { to.write(dk, found); });
      });
      return IntVec{};
    });
  }
};

// Calls `f` with the layout of the workspaces; `sizes` are B, T, D, h, and whether it is rows of channels.
template <typename F>
auto lay_out(const int64_t *sizes, F f) {
  const Shape s{sizes[0], sizes[1], sizes[2], sizes[3]};
  return sizes[4] ? f(ChannelRows{s}) : f(TokenRows{s});
}

}  // namespace

extern "C" {

// Fills a workspace with e^(k - peak) [v | 1], where peak is the largest key of a sequence; mask may be null.
void aft_pass_enter(const int64_t *sizes, Array k, Array v, const bool *mask, Space x, int threads) {
  lay_out(sizes, [&](const auto &rows) { rows.enter(k, v, mask, x, threads); });
}

// y and, unless den is null, the denominators from the sums; q and mask may be null. A sequence without tokens has
// zeros, and denominators of 1. Returns 0 where one is below `underflow`, or NaN.
int aft_pass_leave(const int64_t *sizes, Space sums, Array q, const bool *mask, Array out, Array den, float underflow,
                   int threads) {
  return lay_out(sizes, [&](const auto &rows) { return rows.leave(sums, q, mask, out, den, underflow, threads); });
}

// The gradients of the sums, and of q unless it is null. 0 where a denominator is below `underflow`, or NaN.
int aft_pass_spread(const int64_t *sizes, Array grad, Array y, Array den, Array q, Array dq, Space r, float underflow,
                    int threads) {
  return lay_out(sizes, [&](const auto &rows) { return rows.spread(grad, y, den, q, dq, r, underflow, threads); });
}

// The gradients of k and v from those of what entered, z, and what entered, x.
void aft_pass_collect(const int64_t *sizes, Space z, Space x, Array v, Array dk, Array dv, int threads) {
  lay_out(sizes, [&](const auto &rows) { rows.collect(z, x, v, dk, dv, threads); });
}
}
