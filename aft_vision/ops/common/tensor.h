// Reading and writing tensors a vector of channels at a time, and the gate of the queries.

#pragma once

#include <algorithm>

#include "bfloat16.h"

namespace {

// Return the number of lanes of a vector at `start` that are below `size`.
int rest(int64_t size, int64_t start) { return std::min<int64_t>(LANES, size - start); }

// A place in a batch: a token of a sequence, and `lanes` of its channels.
struct Place {
  int64_t b, t, channel;
  int lanes;

  int64_t index(const Stream &x) const { return b * x.batch + t * x.token + channel; }

  Place later(int64_t tokens) const { return {b, t + tokens, channel, lanes}; }

  Vec read(const Stream &x) const { return x.read(index(x), lanes); }

  void write(const Stream &x, Vec y) const { x.write(index(x), y, lanes); }

  float read_one(const Stream &x) const { return x.read_one(index(x)); }

  void write_one(const Stream &x, float y) const { x.write_one(index(x), y); }

  void prefetch(const Stream &x) const { x.prefetch(index(x)); }
};

// Return all ones in the first `count` lanes, and zeros in the others.
IntVec below(int count) {
  IntVec index;
  for (int i = 0; i < LANES; ++i) index[i] = i;
  return index < count;
}

// Return the first `lanes` lanes of x, and zeros in the others.
Vec only(Vec x, int lanes) { return lanes == LANES ? x : below(lanes) ? x : Vec{}; }

// Return the sum of the lanes.
float total(Vec x) {
  float part[LANES];
  store(part, x, LANES);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) part[i] += part[i + width];
  return part[0];
}

// Return the larger number, or NaN if one is NaN.
template <typename T>
T larger(T x, T y) {
  return (x > y) | (x != x) ? x : y;
}

// Return the largest lane. A NaN is kept.
float largest(Vec x) {
  float part[LANES];
  store(part, x, LANES);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) part[i] = larger(part[i + width], part[i]);
  return part[0];
}

bool any(IntVec lanes) {
  int32_t found = 0;
  for (int i = 0; i < LANES; ++i) found |= lanes[i];
  return found != 0;
}

// Return the lanes whose denominator is below a limit, or NaN.
IntVec underflowed_lanes(Vec denominator, int lanes, float limit) {
  return ~(denominator >= splat(limit)) & below(lanes);
}

// A mask (B, T) of the tokens that count; null where all do.
struct Mask {
  const bool *data;
  int64_t tokens;

  bool counts(int64_t b, int64_t t) const { return !data || data[b * tokens + t]; }

  // Return the addend of the denominators of a sequence: 1 where no token counts, so that 0 / 0 becomes 0 / 1, else 0.
  float fill(int64_t b) const { return data && !std::memchr(data + b * tokens, true, tokens) ? 1.0f : 0.0f; }
};

// Return sigmoid(q) ratio. A single division by the product of both denominators could overflow.
Vec gated(const Place &at, const Stream &q, Vec ratio) {
  if (!q.data) return ratio;
  const Vec most = splat(87.0f), negated = -at.read(q);
  return ratio / (1.0f + exp_(negated > most ? most : negated));
}

// The gradients behind the gate and the division: `a` of the ratio, and `go` = grad y.
struct Spread {
  Vec a, go;

  // Compute both, and write the gradient of q.
  Spread(const Place &at, const Stream &grad, const Stream &y, const Stream &q, const Stream &dq) : a(at.read(grad)) {
    go = a * at.read(y);
    if (!q.data) return;
    const Vec gate = sigmoid(at.read(q));
    a *= gate;
    at.write(dq, go - go * gate);
  }
};

}  // namespace
