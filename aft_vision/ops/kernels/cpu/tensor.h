// Tensors (B, T, n) of float32 or bfloat16 as the kernels are given them, read and written a vector of channels at a time.

#pragma once

#include <algorithm>

#include "vector.h"

namespace {

typedef uint16_t HalfVec __attribute__((vector_size(2 * LANES)));
typedef uint32_t WordVec __attribute__((vector_size(4 * LANES)));

// One whose channels are neighbours; `half` is whether it is bfloat16.
struct Array {
  char *data;
  int64_t batch, token, half;
};

// The bits of bfloat16 in the upper half of a word: to the nearest, ties to even; NaN stays NaN.
WordVec round_half(Vec x) {
  WordVec bits;
  std::memcpy(&bits, &x, sizeof bits);
  const WordVec rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return (x == x ? rounded : bits | 0x400000) & 0xffff0000;
}

Vec widen(HalfVec x) {
  const WordVec bits = __builtin_convertvector(x, WordVec) << 16;
  Vec wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

float widen_one(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

HalfVec narrow(Vec x) { return __builtin_convertvector(round_half(x) >> 16, HalfVec); }

Vec get(const char *data, int64_t index, bool half, int lanes) {
  if (!half) return load(reinterpret_cast<const float *>(data) + index, lanes);
  if (lanes == LANES) {
    HalfVec whole;
    std::memcpy(&whole, data + 2 * index, sizeof whole);
    return widen(whole);
  }
  HalfVec x{};
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

// How many lanes of a vector from `start` are within `size`.
int rest(int64_t size, int64_t start) { return std::min<int64_t>(LANES, size - start); }

// A place in a batch: a token of a sequence, and `lanes` channels.
struct Place {
  int64_t b, t, channel;
  int lanes;

  int64_t index(const Array &x) const { return b * x.batch + t * x.token + channel; }

  Vec read(const Array &x) const { return get(x.data, index(x), x.half, lanes); }

  void write(const Array &x, Vec y) const { put(x.data, index(x), x.half, lanes, y); }

  float read_one(const Array &x) const {
    if (!x.half) return reinterpret_cast<const float *>(x.data)[index(x)];
    return widen_one(reinterpret_cast<const uint16_t *>(x.data)[index(x)]);
  }

  void write_one(const Array &x, float y) const {
    if (!x.half)
      reinterpret_cast<float *>(x.data)[index(x)] = y;
    else
      reinterpret_cast<uint16_t *>(x.data)[index(x)] = narrow(splat(y))[0];
  }

  Place later(int64_t tokens) const { return {b, t + tokens, channel, lanes}; }

  // To where nothing is does nothing.
  void prefetch(const Array &x) const { __builtin_prefetch(x.data + index(x) * (x.half ? 2 : 4)); }
};

IntVec below(int count) {
  IntVec index;
  for (int i = 0; i < LANES; ++i) index[i] = i;
  return index < count;
}

// Nothing in the other lanes.
Vec only(Vec x, int lanes) { return lanes == LANES ? x : below(lanes) ? x : Vec{}; }

float total(Vec x) {
  float part[LANES];
  store(part, x, LANES);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) part[i] += part[i + width];
  return part[0];
}

bool any(IntVec lanes) {
  int32_t found = 0;
  for (int i = 0; i < LANES; ++i) found |= lanes[i];
  return found != 0;
}

// Which lanes have a denominator below a limit, or NaN.
IntVec lost_lanes(Vec bottom, int lanes, float limit) { return ~(bottom >= splat(limit)) & below(lanes); }

// A mask (B, T) of the tokens that count; without one all do.
struct Mask {
  const bool *data;
  int64_t tokens;

  bool counts(int64_t b, int64_t t) const { return !data || data[b * tokens + t]; }

  // What is added to the denominators of a sequence: 1 where no token counts, so that 0 / 0 is 0 and nothing is lost.
  float fill(int64_t b) const { return data && !std::memchr(data + b * tokens, true, tokens) ? 1.0f : 0.0f; }
};

// The ratio behind the gate. One division for both would overflow before the ratio does.
Vec gated(const Place &at, const Array &q, Vec ratio) {
  if (!q.data) return ratio;
  const Vec most = splat(87.0f), negated = -at.read(q);
  return ratio / (1.0f + exp_(negated > most ? most : negated));
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

}  // namespace
