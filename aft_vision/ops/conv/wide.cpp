// AFT-conv with heads of several channels (AFT Eq. 6) for a few sequences, forward. Vectors are of neighbouring channels,
// whose heads are spread over the lanes, so a sequence fills them by itself; `conv.cpp` fills them from sequences side by
// side.
//
// First the exponentials of the keys and the denominators, a vector of heads at a time, then the values. All terms are
// positive: what no window reaches is added up, not subtracted.

#include <memory>
#include <vector>

#include "../common/guard.h"
#include "window.h"

namespace {

// A padded map of the terms of a block of channels or heads, and sums of what lies outside the windows.
class Map {
 public:
  Map(const Shape &s) : s_(s), terms_(s.map()), aside_(s.tokens()), before_(s.height + 1), after_(before_) {}

  Vec *row(int64_t y) { return terms_.data() + y * s_.padded() + s_.reach(); }

  // After all terms have been set.
  void finish() {
    const int64_t r = s_.reach(), width = s_.width;
    for (int64_t y = 0; y < s_.height; ++y) {
      const Vec *x = row(y);
      Vec *aside = aside_.data() + y * width, sum{}, left{}, right{};
      for (int64_t i = 0; i < width; ++i) {
        sum += x[i];
        if (i > r) left += x[i - r - 1];
        aside[i] = left;
      }
      for (int64_t i = width - 1 - r; i-- > 0;) aside[i] += right += x[i + r + 1];
      before_[y + 1] = before_[y] + sum;
      after_[y] = sum;
    }
    for (int64_t y = s_.height; y-- > 0;) after_[y] += after_[y + 1];
  }

  // The sums (H, W) by the taps of a window, and by one weight of all outside it.
  void mix(const Vec *taps, Vec outside, Vec *out) const {
    const int64_t r = s_.reach();
    const Aside aside{r < s_.width - 1 ? aside_.data() : nullptr, outside};
    for (int64_t y = 0; y < s_.height; ++y, out += s_.width) {
      const Vec rows = before_[std::max<int64_t>(0, y - r)] + after_[std::min(s_.height, y + r + 1)];
      std::fill_n(out, s_.width, outside * rows);
      in_tiles<TILE>(s_.width, [&](int64_t x, auto n) { mix_tile<n>(terms_.data(), taps, s_, y, x, out + x, aside); });
    }
  }

 private:
  const Shape &s_;
  std::vector<Vec> terms_, aside_, before_, after_;
};

// The inputs of a call, as Python packs them; q, the mask's elements and den may be null. `scratch` has 2 (B, T) rows of heads,
// as long as those of the weights, a vector more than there are heads.
struct Call {
  int64_t batch, height, width, channels, heads, size;
  WindowWeights weights;
  float *scratch;
  Stream q, k, v;
  const bool *elements;
  Stream out, den;

  Shape shape() const { return {batch, height, width, channels, size}; }
  int64_t stride() const { return weights.stride; }
  float *e() const { return scratch; }
  float *denominators() const { return scratch + batch * height * width * stride(); }
  Mask mask() const { return {elements, height * width}; }
};

// The buffers of a thread.
struct Worker {
  const Call &call;
  const Shape s;
  const Mask mask;
  Map map;
  std::vector<Vec> taps, sums;

  Worker(const Call &call)
      : call(call), s(call.shape()), mask(call.mask()), map(s), taps(s.size * s.size), sums(s.tokens()) {}

  // Sets the terms of a map: `f` is given a token that counts.
  template <typename F>
  void fill(int64_t b, F f) {
    for (int64_t y = 0, t = 0; y < s.height; ++y)
      for (int64_t x = 0; x < s.width; ++x, ++t) map.row(y)[x] = mask.counts(b, t) ? f(t) : Vec{};
    map.finish();
  }

  // Writes e^(k - peak) and the denominators of a block of heads; returns whether none is underflowed.
  bool weigh(int64_t b, int64_t first, float underflow) {
    const Place at{b, 0, first, rest(call.heads, first)};
    const Vec peak = largest_keys(at, call.k, mask);
    fill(b, [&](int64_t t) { return exp_(at.later(t).read(call.k) - peak); });
    call.weights.each(s.size, [&](int64_t i, const float *tap) { taps[i] = load(tap + first, LANES); });
    map.mix(taps.data(), load(call.weights.outside() + first, LANES), sums.data());
    const float extra = mask.fill(b);
    IntVec underflowed{};
    for (int64_t y = 0, t = 0; y < s.height; ++y)
      for (int64_t x = 0; x < s.width; ++x, ++t) {
        const int64_t place = (b * s.tokens() + t) * call.stride() + first;
        const Vec denominator = sums[t] + extra;
        underflowed |= underflowed_lanes(denominator, at.lanes, underflow);
        store(call.e() + place, map.row(y)[x], LANES);
        store(call.denominators() + place, denominator, LANES);
        if (call.den.data) at.later(t).write(call.den, denominator);
      }
    return !any(underflowed);
  }

  // Writes a block of channels of the result.
  void mix(int64_t b, int64_t first) {
    const Heads heads(first, s.channels / call.heads, call.heads);
    const Place at{b, 0, first, rest(s.channels, first)};
    const int64_t start = b * s.tokens() * call.stride();
    fill(b, [&](int64_t t) { return heads.read(call.e() + start + t * call.stride()) * at.later(t).read(call.v); });
    call.weights.each(s.size, [&](int64_t i, const float *tap) { taps[i] = heads.read(tap); });
    map.mix(taps.data(), heads.read(call.weights.outside()), sums.data());
    for (int64_t t = 0; t < s.tokens(); ++t) {
      const Place to = at.later(t);
      to.write(call.out, gated(to, call.q, sums[t] / heads.read(call.denominators() + start + t * call.stride())));
    }
  }
};

int forward(const Call &call, float underflow, int threads) {
  const int64_t heads = (call.heads + LANES - 1) / LANES, blocks = call.shape().blocks();
  int good = 1;
  Region region;
#pragma omp parallel num_threads(threads) reduction(&& : good)
  {
    std::unique_ptr<Worker> worker;
    region.run([&] { worker.reset(new Worker(call)); });
#pragma omp for schedule(static)
    for (int64_t i = 0; i < call.batch * heads; ++i)
      region.run([&] { good = worker->weigh(i / heads, i % heads * LANES, underflow) && good; });
#pragma omp for schedule(static)
    for (int64_t i = 0; i < call.batch * blocks; ++i) region.run([&] { worker->mix(i / blocks, i % blocks * LANES); });
  }
  region.finish();
  return good;
}

}  // namespace

extern "C" {

AFT_PACKED(aft_conv_wide_forward, Call)

// y and, unless den is null, the denominators. Returns 0 where a denominator is below `underflow`, or NaN.
int aft_conv_wide_forward(const Call *call, float underflow, int threads) {
  return guarded([&] {
    compute_weights(call->weights, call->heads, threads);
    return forward(*call, underflow, threads);
  });
}
}
