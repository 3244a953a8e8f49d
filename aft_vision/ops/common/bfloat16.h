// bfloat16: its vectors, products of pairs, and tensors of float32 or bfloat16.

#pragma once

#include "vector.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
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

// Round to bfloat16, to nearest even, in the upper half of each lane. The lower half is undefined.
Bits round_half(Vec x) {
  const Bits bits = bits_of(x);
  return x == x ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000;
}

// Pack two vectors as bfloat16 into the halves of each lane.
Vec join(Vec low, Vec high) { return vec_of(round_half(low) >> 16 | (round_half(high) & 0xffff0000)); }

Vec low_half(Vec joined) { return vec_of(bits_of(joined) << 16); }

Vec high_half(Vec joined) { return vec_of(bits_of(joined) & 0xffff0000); }

HalfVec narrow(Vec x) { return __builtin_convertvector(round_half(x) >> 16, HalfVec); }

Vec widen(HalfVec x) { return vec_of(__builtin_convertvector(x, Bits) << 16); }

// Replace numbers too small to be normal by zeros of their sign.
Vec flush(Vec x) {
  const Vec least = splat(1.17549435e-38f);
  return (x < least) & (x > -least) ? vec_of(bits_of(x) & 0x80000000) : x;
}

// Return sum + x y over both halves of each lane, rounded as the instruction vdpbf16ps rounds: the product of the upper
// halves is added first, then that of the lower ones; numbers too small to be normal are zeros before and after each
// sum.
Vec add_products(Vec sum, Vec x, Vec y) {
#if defined(__AVX512BF16__)
  return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
#else
  sum = flush(flush(sum) + flush(high_half(x)) * flush(high_half(y)));
  return flush(sum + flush(low_half(x)) * flush(low_half(y)));
#endif
}

// A (B, T, n) tensor of float32 or bfloat16 with contiguous channels.
struct Stream {
  char *data;
  int64_t batch, token;  // strides
  int64_t half;          // whether it is bfloat16

  Vec read(int64_t at, int lanes) const {
    if (lanes < LANES) return read_part(at, lanes);
    if (!half) return load(reinterpret_cast<float *>(data) + at, LANES);
    HalfVec x;
    std::memcpy(&x, data + 2 * at, sizeof x);
    return widen(x);
  }

  void write(int64_t at, Vec y, int lanes) const {
    if (!half) return store(reinterpret_cast<float *>(data) + at, y, lanes);
    const HalfVec x = narrow(y);
    if (lanes == LANES)
      std::memcpy(data + 2 * at, &x, sizeof x);
    else
      std::memcpy(data + 2 * at, &x, 2 * lanes);
  }

  float read_one(int64_t at) const {
    if (!half) return reinterpret_cast<const float *>(data)[at];
    return vec_of(Bits{} + (uint32_t{reinterpret_cast<const uint16_t *>(data)[at]} << 16))[0];
  }

  void write_one(int64_t at, float y) const {
    if (!half)
      reinterpret_cast<float *>(data)[at] = y;
    else
      reinterpret_cast<uint16_t *>(data)[at] = narrow(splat(y))[0];
  }

  // Prefetch the channels of a token. An address outside the tensor is harmless.
  void prefetch(int64_t at) const { __builtin_prefetch(data + at * (half ? 2 : 4)); }

 private:
  __attribute__((noinline)) Vec read_part(int64_t at, int lanes) const {
    if (!half) return load(reinterpret_cast<float *>(data) + at, lanes);
    HalfVec x{};
    std::memcpy(&x, data + 2 * at, 2 * lanes);
    return widen(x);
  }
};

}  // namespace
