// AFT-full (AFT Eq. 2): for a sequence and a vector of channels, e^(k - peak) v and e^(k - peak) are two strips, which the
// (T, T) weights multiply; the sums leave the registers divided and gated.

#include <limits>

#include <omp.h>

#include "product.h"

namespace {

struct Shape {
  int64_t batch, tokens, channels;

  // Calls `f` with the item'th block of channels, so that a thread stays with a sequence.
  int64_t blocks() const { return (channels + LANES - 1) / LANES; }
  int64_t items() const { return batch * blocks(); }
  Place place(int64_t item) const {
    const int64_t channel = item % blocks() * LANES;
    return {item / blocks(), 0, channel, rest(channels, channel)};
  }
};

struct Keys {
  const Stream &k, &v;
  const Mask &mask;
  Vec peak;

  Keys(const Stream &k, const Stream &v, const Mask &mask, Place at)
      : k(k), v(v), mask(mask), peak(splat(-std::numeric_limits<float>::max())) {
    for (at.t = 0; at.t < mask.tokens; ++at.t) {
      if (!mask.counts(at.b, at.t)) continue;
      const Vec key = at.read(k);
      peak = key > peak ? key : peak;
    }
  }

  // A token's weight and weighted value: nothing where it does not count or is beyond the sequence.
  void weigh(const Place &at, Vec &top, Vec &bottom) const {
    top = bottom = Vec{};
    if (at.t >= mask.tokens || !mask.counts(at.b, at.t)) return;
    bottom = exp_(at.read(k) - peak);
    top = bottom * at.read(v);
  }
};

// Two strips of the terms of a sequence.
template <typename Op>
class Strips {
 public:
  explicit Strips(int64_t tokens) : words_((tokens + Op::DEPTH - 1) / Op::DEPTH), room_(STRIPS * words_ * LANES) {}

  int64_t words() const { return words_; }
  int64_t strip() const { return words_ * LANES; }
  const typename Op::Word *data() const { return room_.data(); }

  // `f` is given a token and writes its value and its key.
  template <typename F>
  void fill(F f) {
    for (int64_t i = 0; i < words_; ++i) {
      Vec top[Op::DEPTH], bottom[Op::DEPTH];
      for (int j = 0; j < Op::DEPTH; ++j) f(i * Op::DEPTH + j, top[j], bottom[j]);
      store_words<Op>(room_.data() + i * LANES, Op::pack(top));
      store_words<Op>(room_.data() + strip() + i * LANES, Op::pack(bottom));
    }
  }

 private:
  int64_t words_;
  Room<typename Op::Word> room_;
};

// Sums over terms by the weights (words, T) of their rows. `f` is given a row and its two sums; `ahead` a row, before.
template <typename Op, typename Ahead, typename F>
void each_sum(const typename Op::Word *weights, int64_t tokens, const Strips<Op> &x, Ahead ahead, F f) {
  const float zero[STRIPS * LANES] = {};
  float sums[ROWS][STRIPS * LANES];
  for (int64_t t = 0; t < tokens; t += ROWS) {
    const int rows = std::min<int64_t>(ROWS, tokens - t);
    for (int r = 0; r < rows; ++r) ahead(t + r);
    multiply<Op, 1, STRIPS>(
        {weights + t, tokens, 0, 1, x.words(), x.data(), x.strip(), 0, zero, 0, sums[0], STRIPS * LANES}, rows);
    for (int r = 0; r < rows; ++r) f(t + r, load(sums[r], LANES), load(sums[r] + LANES, LANES));
  }
}

template <typename Op>
int forward(const Shape &s, const typename Op::Word *weights, const Stream &q, const Stream &k, const Stream &v,
            const Mask &mask, const Stream &out, const Stream &den, float underflow, int threads) {
  int good = 1;
#pragma omp parallel num_threads(threads) reduction(&& : good)
  {
    Strips<Op> x(s.tokens);
#pragma omp for schedule(static)
    for (int64_t item = 0; item < s.items(); ++item) {
      Place at = s.place(item);
      const Keys keys(k, v, mask, at);
      x.fill([&](int64_t t, Vec &top, Vec &bottom) { keys.weigh({at.b, t, at.channel, at.lanes}, top, bottom); });
      const float fill = mask.fill(at.b);
      const bool more = at.channel + at.lanes < s.channels;
      IntVec lost{};
      each_sum<Op>(
          weights, s.tokens, x,
          [&](int64_t t) {
            // The products leave time to fetch what comes next.
            at.t = t;
            if (q.data) at.prefetch(q);
            const Place next{at.b, t, at.channel + LANES, 0};
            if (more) next.prefetch(k);
            if (more) next.prefetch(v);
          },
          [&](int64_t t, Vec top, Vec bottom) {
            at.t = t;
            bottom += fill;
            if (den.data) at.write(den, bottom);
            at.write(out, gated(at, q, top / bottom));
            lost |= lost_lanes(bottom, at.lanes, underflow);
          });
      good = !any(lost) && good;
    }
  }
  return good;
}

// What the gradient of the weights is made of: rows of targets, and strips of sources whose terms are channels.
template <typename Op>
struct Outer {
  int64_t tokens, strips;
  Room<typename Op::Word> targets, sources;

  explicit Outer(int64_t tokens)
      : tokens(tokens),
        strips((tokens + LANES - 1) / LANES),
        targets(STRIPS * tokens * ROW_WORDS<Op>),
        sources(strips * STRIPS * ROW_WORDS<Op> * LANES) {}

  void set_target(int64_t t, Vec top, Vec bottom) {
    store_row(targets.data() + t * ROW_WORDS<Op>, top);
    store_row(targets.data() + (tokens + t) * ROW_WORDS<Op>, bottom);
  }

  void set_sources(int64_t strip, Tile &top, Tile &bottom) {
    typename Op::Word *to = sources.data() + strip * STRIPS * ROW_WORDS<Op> * LANES;
    top.store_terms<Op>(to);
    bottom.store_terms<Op>(to + ROW_WORDS<Op> * LANES);
  }

  // Adds the sums over channels of target times source to (T, strips * LANES).
  void add(float *found) const {
    const int64_t width = strips * LANES;
    for (int64_t t = 0; t < tokens; t += ROWS) {
      const int rows = std::min<int64_t>(ROWS, tokens - t);
      float *row = found + t * width;
      multiply_strips<Op, ROW_WORDS<Op>>({targets.data() + t * ROW_WORDS<Op>, 1, tokens * ROW_WORDS<Op>, STRIPS,
                                          ROW_WORDS<Op>, sources.data(), STRIPS * ROW_WORDS<Op> * LANES,
                                          ROW_WORDS<Op> * LANES, row, width, row, width},
                                         rows, strips);
    }
  }
};

template <typename Op>
int backward(const Shape &s, const typename Op::Word *weights, const Stream &grad, const Stream &y, const Stream &den,
             const Stream &q, const Stream &k, const Stream &v, const Mask &mask, const Stream &dq, const Stream &dk,
             const Stream &dv, float *d_weights, float underflow, int threads) {
  int good = 1;
#pragma omp parallel num_threads(threads) reduction(&& : good)
  {
    Strips<Op> r(s.tokens);
    Outer<Op> outer(s.tokens);
    Room<float> kept(s.tokens * LANES);
    float *own = d_weights + omp_get_thread_num() * s.tokens * outer.strips * LANES;
#pragma omp for schedule(static)
    for (int64_t item = 0; item < s.items(); ++item) {
      Place at = s.place(item);
      const Keys keys(k, v, mask, at);
      IntVec lost{};
      r.fill([&](int64_t t, Vec &top, Vec &bottom) {
        top = bottom = Vec{};
        if (t >= s.tokens) return;
        at.t = t;
        const Vec below = at.read(den), inverse = 1.0f / below;
        const Spread found(at, grad, y, q, dq);
        lost |= lost_lanes(below, at.lanes, underflow);
        top = only(found.a * inverse, at.lanes);
        bottom = only(-found.go * inverse, at.lanes);
        if (d_weights) outer.set_target(t, top, bottom);
      });
      for (int64_t strip = 0; strip < outer.strips; ++strip) {
        Tile top, bottom;
        for (int i = 0; i < LANES; ++i) {
          at.t = strip * LANES + i;
          keys.weigh(at, top.row[i], bottom.row[i]);
          bottom.row[i] = only(bottom.row[i], at.lanes);
          if (at.t < s.tokens) store(kept.data() + at.t * LANES, bottom.row[i], LANES);
        }
        if (d_weights) outer.set_sources(strip, top, bottom);
      }
      each_sum<Op>(
          weights, s.tokens, r,
          [&](int64_t t) {
            at.t = t;
            at.prefetch(v);
            const Place next{at.b, t, at.channel + LANES, 0};
            if (at.channel + at.lanes >= s.channels) return;
            for (const Stream *x : {&grad, &y, &den, &q, &k})
              if (x->data) next.prefetch(*x);
          },
          [&](int64_t t, Vec top, Vec bottom) {
            at.t = t;
            const Vec e = load(kept.data() + t * LANES, LANES);
            const Vec value = mask.counts(at.b, t) ? at.read(v) : Vec{};
            at.write(dv, top * e);
            at.write(dk, (top * value + bottom) * e);
          });
      if (d_weights) outer.add(own);
      good = !any(lost) && good;
    }
  }
  return good;
}

}  // namespace

extern "C" {

// Floats of a vector.
int aft_lanes() { return LANES; }

// Whether words of two bfloat16 can be multiplied.
int aft_has_pairs() { return MULTIPLIES_BFLOAT16; }

// y and, unless den is null, the denominators; q and mask may be null. `sizes` are B, T, D and whether words are pairs.
// `weights` (T / DEPTH, T) has the words of a pair of sources, or of one, for each target. Returns 0 where a denominator
// is below `underflow`, or NaN.
int aft_full_forward(const int64_t *sizes, const void *weights, Stream q, Stream k, Stream v, const bool *mask, Stream out,
                     Stream den, float underflow, int threads) {
  const Shape s{sizes[0], sizes[1], sizes[2]};
  return with_words(sizes[3], weights, [&](auto op, const auto *words) {
    return forward<decltype(op)>(s, words, q, k, v, {mask, s.tokens}, out, den, underflow, threads);
  });
}

// The gradients of q, unless it is null, k, v and, unless d_weights is null, those of the weights: for each thread a part
// (T, T in whole vectors), which begins with zeros. `weights` has words of targets for each source. Returns 0 as above.
int aft_full_backward(const int64_t *sizes, const void *weights, Stream grad, Stream y, Stream den, Stream q, Stream k, Stream v,
                      const bool *mask, Stream dq, Stream dk, Stream dv, float *d_weights, float underflow, int threads) {
  const Shape s{sizes[0], sizes[1], sizes[2]};
  return with_words(sizes[3], weights, [&](auto op, const auto *words) {
    return backward<decltype(op)>(s, words, grad, y, den, q, k, v, {mask, s.tokens}, dq, dk, dv, d_weights, underflow,
                                  threads);
  });
}
}
