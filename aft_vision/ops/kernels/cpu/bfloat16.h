// bfloat16 beside float32: vectors of it, tensors of either, and products of pairs where the CPU has them.

#pragma once

#include "vector.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#define WITH_BFLOAT16 __attribute__((target("avx512bf16")))
#else
#define WITH_BFLOAT16
#endif

namespace {

typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * LANES)));

Bits bits_of(Vec x) {
  Bits bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

Vec vec_of(Bits bits) {
  Vec x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// The nearest bfloat16, to even, in the upper half of each lane; the lower is anything.
Bits round_half(Vec x) {
  const Bits bits = bits_of(x);
  return x == x ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000;
}

// Both as bfloat16 in the halves of each lane.
Vec join(Vec low, Vec high) { return vec_of(round_half(low) >> 16 | (round_half(high) & 0xffff0000)); }

Vec low_half(Vec joined) { return vec_of(bits_of(joined) << 16); }

Vec high_half(Vec joined) { return vec_of(bits_of(joined) & 0xffff0000); }

// A (B, T, D) tensor of float32 or bfloat16 whose channels are neighbours.
struct Stream {
  void *data;
  int64_t batch, token;  // strides
  int64_t half;          // whether it is bfloat16

  Vec read(int64_t at, int lanes) const {
    if (lanes < LANES) return read_part(at, lanes);
    if (!half) {
      Vec x;
      std::memcpy(&x, static_cast<float *>(data) + at, sizeof x);
      return x;
    }
    HalfVec x;
    std::memcpy(&x, static_cast<uint16_t *>(data) + at, sizeof x);
    return vec_of(__builtin_convertvector(x, Bits) << 16);
  }

  void write(int64_t at, Vec y, int lanes) const {
    if (!half) return store(static_cast<float *>(data) + at, y, lanes);
    const HalfVec x = __builtin_convertvector(round_half(y) >> 16, HalfVec);
    if (lanes == LANES)
      std::memcpy(static_cast<uint16_t *>(data) + at, &x, sizeof x);
    else
      std::memcpy(static_cast<uint16_t *>(data) + at, &x, 2 * lanes);
  }

 private:
  __attribute__((noinline)) Vec read_part(int64_t at, int lanes) const {
    if (!half) return load(static_cast<float *>(data) + at, lanes);
    HalfVec x{};
    std::memcpy(&x, static_cast<uint16_t *>(data) + at, 2 * lanes);
    return vec_of(__builtin_convertvector(x, Bits) << 16);
  }
};

#if defined(__AVX512F__)
bool multiplies_bfloat16() { return __builtin_cpu_supports("avx512bf16"); }

// sum + x y for both halves of each lane.
WITH_BFLOAT16 inline Vec add_products(Vec sum, Vec x, Vec y) {
  return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
}
#else
bool multiplies_bfloat16() { return false; }

inline Vec add_products(Vec sum, Vec x, Vec y) { return sum + low_half(x) * low_half(y) + high_half(x) * high_half(y); }
#endif

}  // namespace
