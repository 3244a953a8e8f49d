// The products of the causal AFT-local: a few rows at a time, of float32, or of bfloat16 in pairs or tiles, with sums in
// float32.

#pragma once

#include <algorithm>
#include <type_traits>

#include "../common/tile.h"

namespace {

// Rows of a product whose sums fill the registers.
#if defined(__AVX512F__)
constexpr int ROWS = 12;
#else
constexpr int ROWS = 6;
#endif
// Terms that are added up by themselves first.
constexpr int64_t PIECE = 512;

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

// Of every way to multiply: HEIGHT rows, whose weights have EDGE others next to the window that a piece of a product may
// read, take STEP terms at a time; the gradient of the band has TARGETS by SOURCES sums at a time.
struct Vectors {
  static constexpr int HEIGHT = ROWS, EDGE = 16, TARGETS = 4;
#if defined(__AVX512F__)
  static constexpr int SOURCES = 6;
#else
  static constexpr int SOURCES = 3;
#endif
  static_assert(ROWS + 1 < EDGE);
  struct State {};
};

// Products in float32: each term by itself.
struct Single : Vectors {
  static constexpr int STEP = 1;
  using Number = float;
  static constexpr int TERMS = 1;    // in a vector of a map
  static constexpr int VECTORS = 2;  // in a row's pair

  static Number number(float x) { return x; }
  static float value(Number x) { return x; }
  static float join(Number first, Number) { return first; }

  static Pair pack(const Pair &first, const Pair &) { return first; }
  static Pair sum(const Pair &packed) { return packed; }
  static void keep(Vec *row, const Pair &x) { std::memcpy(row, &x, sizeof x); }
  static double exact(Vec x, Vec y, int lane) { return static_cast<double>(x[lane]) * y[lane]; }

  static Vec add(Vec sum, Vec x, Vec y) { return sum + x * y; }
};

// Products of bfloat16 with sums in float32: two neighbouring terms, or the values and the keys of one, share a lane.
struct Halves {
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
};

struct Half : Halves, Vectors {
  static constexpr int STEP = 2;

  static Vec add(Vec sum, Vec x, Vec y) { return add_products(sum, x, y); }
};

struct Tiles : Halves {
  static constexpr int HEIGHT = TILE_ROWS, EDGE = TILE_ROWS + TILE_TERMS, STEP = TILE_TERMS;
  static constexpr int TARGETS = TILE_ROWS, SOURCES = TILE_COLUMNS;
  typedef TileState State;
};

template <class P>
constexpr bool TILED = std::is_same_v<P, Tiles>;

// out[i] += sum of weights[j][i] * x[j] for N rows.
template <class P, int N>
__attribute__((noinline)) void mix_rows(const Pair *x, const float *weights, int64_t length, Pair *out) {
  Vec values[N] = {}, keys[N] = {};
  for (int64_t j = 0; j < length; ++j)
    for (int i = 0; i < N; ++i) {
      const Vec weight = splat(weights[j * N + i]);
      values[i] = P::add(values[i], x[j].values, weight);
      keys[i] = P::add(keys[i], x[j].keys, weight);
    }
  for (int i = 0; i < N; ++i) out[i] += Pair{values[i], keys[i]};
}

// The first multiple of P::TERMS from x on, and the last up to it.
template <class P>
int64_t round_up(int64_t x) {
  return (x + P::TERMS - 1) & -P::TERMS;
}

template <class P>
int64_t round_down(int64_t x) {
  return x & -P::TERMS;
}

// The sums of `mix_rows` for an N that is known at run time, one piece of the terms after the other.
template <class P, int N = ROWS>
void mix(int64_t n, const Pair *x, const float *weights, int64_t length, Pair *out) {
  if (n == N) {
    for (int64_t j = 0; j < length; j += PIECE)
      mix_rows<P, N>(x + j, weights + j * N, std::min(PIECE, length - j), out);
  } else if constexpr (N > 1) {
    mix<P, N - 1>(n, x, weights, length, out);
  }
}

// The same by tiles, of bfloat16 weights whose rows and steps of terms are so many bytes apart.
void mix_tiles(int64_t n, const Pair *x, const void *weights, int64_t row, int64_t step, int64_t terms, Pair *out) {
  Pair found[TILE_ROWS];
  multiply_tiles(TileProduct{weights, row, n > LANES ? LANES * row : 0, step, x, sizeof(Pair), sizeof(Vec),
                             LANES * sizeof(Pair), terms / TILE_TERMS, nullptr, 0,
                             Sums(reinterpret_cast<float *>(found), TILE_ROWS * 2 * LANES, 2 * LANES, 2 * LANES)});
  for (int64_t i = 0; i < n; ++i) out[i] += found[i];
}

}  // namespace
