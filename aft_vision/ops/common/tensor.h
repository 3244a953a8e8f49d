// Reading and writing tensors a vector of channels at a time, and the gate of the queries.

#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "bfloat16.h"

namespace {

// Return the number of lanes of a vector at `start` that are below `size`.
int rest(int64_t size, int64_t start) { return std::min<int64_t>(LANES, size - start); }

// Call f(integral_constant n) for an n that is known at run time.
template <int N, typename F>
void with_size(int64_t n, F f) {
  if (n == N) return f(std::integral_constant<int, N>{});
  if constexpr (N > 1) with_size<N - 1>(n, f);
}

// Cut a length into pieces of nearly equal size, none above MAX_SIZE, and call f(first, integral_constant size).
template <int MAX_SIZE, typename F>
void in_tiles(int64_t length, F f) {
  const int64_t count = (length + MAX_SIZE - 1) / MAX_SIZE;
  for (int64_t i = 0, first = 0; i < count; ++i) {
    const int64_t size = (length - first + count - i - 1) / (count - i);
    with_size<MAX_SIZE>(size, [&](auto n) { f(first, n); });
    first += size;
  }
}

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

// The heads of the lanes of a block of channels, from the first one's on.
struct Heads {
  int64_t first;
  bool same;  // a head for each channel
  IntVec index;

  Heads(int64_t channel, int64_t each, int64_t heads) : first(channel / each), same(each == 1) {
    for (int lane = 0; lane < LANES; ++lane) index[lane] = std::min((channel + lane) / each, heads - 1) - first;
  }

  // Gather the lanes' numbers from those of all heads, after which LANES others may be read.
  Vec read(const float *of_heads) const {
    const Vec x = load(of_heads + first, LANES);
#if defined(__clang__)
    Vec found;
    for (int lane = 0; lane < LANES; ++lane) found[lane] = x[index[lane]];
    return found;
#else
    return __builtin_shuffle(x, index);
#endif
  }

  void add(float *of_heads, Vec y, int lanes) const {
    float *x = of_heads + first;
    if (same) return store(x, load(x, lanes) + y, lanes);
    float part[LANES];
    store(part, y, LANES);
    for (int lane = 0; lane < lanes;) {
      const int32_t own = index[lane];
      float sum = 0;
      for (; lane < lanes && index[lane] == own; ++lane) sum += part[lane];
      x[own] += sum;
    }
  }
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
  typedef float Quarter __attribute__((vector_size(16)));
  static_assert(LANES % 4 == 0);
  Quarter parts[LANES / 4], sum{};
  std::memcpy(parts, &x, sizeof x);
  for (Quarter part : parts) sum += part;
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// Return the larger number, or NaN if one is NaN.
template <typename T>
T larger(T x, T y) {
  return (x > y) | (x != x) ? x : y;
}

// Return the largest of `least` and of n numbers, of which `read(i, lanes)` gives some from i on. A NaN is kept.
template <typename F>
float largest(int64_t n, float least, F read) {
  const int64_t last = std::max<int64_t>(0, n - LANES);
  const int lanes = rest(n, last);
  Vec peak = below(lanes) ? larger(read(last, lanes), splat(least)) : splat(least);
  for (int64_t i = 0; i < last; i += LANES) peak = larger(read(i, LANES), peak);
  float part[LANES];
  store(part, peak, LANES);
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

// Return the largest key that counts of a sequence for each lane of a place, finite.
Vec largest_keys(Place at, const Stream &k, const Mask &mask) {
  Vec peak = splat(-std::numeric_limits<float>::max());
  for (at.t = 0; at.t < mask.tokens; ++at.t) {
    if (!mask.counts(at.b, at.t)) continue;
    const Vec key = at.read(k);
    peak = key > peak ? key : peak;
  }
  return peak;
}

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
