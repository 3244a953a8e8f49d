// AFT-full (AFT Eq. 2): for a sequence and a vector of channels, e^(k - peak) v and e^(k - peak) are two strips, which the
// (T, T) weights multiply; the sums leave the registers divided and gated.

#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include <omp.h>

#include "../common/guard.h"
#include "../common/product.h"

namespace {

// Blocks of channels that are processed together for a tile of rows, so that weights larger than the nearest cache are
// read once for all of them.
constexpr int64_t NEAR_BYTES = 2 << 20, BLOCKS = 6;

// Some blocks of channels of a sequence, a vector each.
struct Group {
  int64_t b, first, count, channels;

  Place place(int64_t block, int64_t t) const {
    const int64_t channel = (first + block) * LANES;
    return {b, t, channel, rest(channels, channel)};
  }
};

struct Shape {
  int64_t batch, tokens, channels;

  int64_t blocks() const { return (channels + LANES - 1) / LANES; }

  // A product of more terms writes its sums less often: `always` where each would have those of a block.
  int64_t together(int threads, bool always = false) const {
    if (!always && tokens * tokens * int64_t(sizeof(float)) <= NEAR_BYTES) return 1;
    return std::max<int64_t>(1, std::min({BLOCKS, blocks(), batch * blocks() / threads}));
  }

  // Ordered so that a thread stays with a sequence.
  int64_t groups(int64_t together) const { return (blocks() + together - 1) / together; }

  Group group(int64_t item, int64_t together) const {
    const int64_t first = item % groups(together) * together;
    return {item / groups(together), first, std::min(together, blocks() - first), channels};
  }
};

struct Keys {
  const Stream &k, &v;
  const Mask &mask;
  Vec peak;

  Keys(const Stream &k, const Stream &v, const Mask &mask, const Group &g, int64_t block)
      : k(k), v(v), mask(mask), peak(largest_keys(g.place(block, 0), k, mask)) {}

  // A token's weight and weighted value: 0 where it is masked or beyond the sequence.
  void weigh(const Place &at, Vec &numerator, Vec &denominator) const {
    numerator = denominator = Vec{};
    if (at.t >= mask.tokens || !mask.counts(at.b, at.t)) return;
    denominator = exp_(at.read(k) - peak);
    numerator = denominator * at.read(v);
  }
};

// Two strips of the terms of a sequence for each block of a group.
template <typename Op>
class Strips {
 public:
  Strips(int64_t tokens, int64_t blocks)
      : words_(words_of<Op>(tokens)), buffer_(blocks * STRIPS * words_ * LANES) {}

  int64_t words() const { return words_; }
  int64_t strip() const { return words_ * LANES; }
  const typename Op::Word *data(int64_t block) const { return buffer_.data() + block * STRIPS * strip(); }

  // `f` gets a token and writes its value and its key.
  template <typename F>
  void fill(int64_t block, F f) {
    typename Op::Word *to = buffer_.data() + block * STRIPS * strip();
    for (int64_t i = 0; i < words_; ++i, to += LANES) {
      Vec numerator[Op::DEPTH], denominator[Op::DEPTH];
      for (int j = 0; j < Op::DEPTH; ++j) f(i * Op::DEPTH + j, numerator[j], denominator[j]);
      store_words<Op>(to, Op::pack(numerator));
      store_words<Op>(to + strip(), Op::pack(denominator));
    }
  }

 private:
  int64_t words_;
  Buffer<typename Op::Word> buffer_;
};

// Sums over terms by the weights of `tile_weights`. `f` gets a block, a row and its two sums; `ahead` a block and a row,
// before.
template <typename Op, typename Ahead, typename F>
void each_sum(const typename Op::Word *weights, int64_t tokens, int64_t blocks, const Strips<Op> &x, Ahead ahead, F f) {
  const float zero[STRIPS * LANES] = {};
  float sums[Op::HEIGHT * STRIPS * LANES];
  const Sums out(sums, STRIPS * LANES);
  for (int64_t t = 0; t < tokens; t += Op::HEIGHT) {
    const int rows = std::min<int64_t>(Op::HEIGHT, tokens - t);
    const typename Op::Word *tile = weights + t * x.words();
    for (int64_t i = 0; i < blocks; ++i) {
      for (int r = 0; r < rows; ++r) ahead(i, t + r);
      if constexpr (TILED<Op>)
        multiply_strips<LANES>(Product<Op>{tile, 1, Op::HEIGHT * LANES, x.words() / LANES, LANES, x.data(i), x.strip(),
                                           LANES * LANES, nullptr, 0, out},
                               rows, STRIPS);
      else
        multiply_spans<1>(Product<Op>{tile, Op::HEIGHT, 0, 1, x.words(), x.data(i), x.strip(), 0, zero, 0, out}, rows,
                          STRIPS);
      for (int r = 0; r < rows; ++r) f(i, t + r, load(sums + r * out.row, LANES), load(sums + r * out.row + LANES, LANES));
    }
  }
}

// The inputs and outputs of a forward; q, the mask's elements and den may be null.
struct Forward {
  Shape s;
  Stream q, k, v;
  Mask mask;
  Stream out, den;
  float underflow;
};

template <typename Op>
int forward(const Forward &call, const typename Op::Word *weights, int threads) {
  const Shape &s = call.s;
  const int64_t together = s.together(threads);
  int good = 1;
  Region region;
#pragma omp parallel num_threads(threads) reduction(&& : good)
  {
    [[maybe_unused]] typename Op::State state;
    std::optional<Strips<Op>> strips;
    region.run([&] { strips.emplace(s.tokens, together); });
#pragma omp for schedule(static)
    for (int64_t item = 0; item < s.batch * s.groups(together); ++item) region.run([&] {
      Strips<Op> &x = *strips;
      const Group g = s.group(item, together);
      for (int64_t i = 0; i < g.count; ++i) {
        const Keys keys(call.k, call.v, call.mask, g, i);
        x.fill(i, [&](int64_t t, Vec &num, Vec &denominator) { keys.weigh(g.place(i, t), num, denominator); });
      }
      const float fill = call.mask.fill(g.b);
      const bool more = g.first + g.count < s.blocks();
      IntVec underflowed{};
      each_sum<Op>(
          weights, s.tokens, g.count, x,
          [&](int64_t i, int64_t t) {
            // The products leave time to prefetch the next operands.
            if (call.q.data) g.place(i, t).prefetch(call.q);
            if (!more) return;
            const Place next = g.place(i + g.count, t);
            next.prefetch(call.k);
            next.prefetch(call.v);
          },
          [&](int64_t i, int64_t t, Vec numerator, Vec denominator) {
            const Place at = g.place(i, t);
            denominator += fill;
            if (call.den.data) at.write(call.den, denominator);
            at.write(call.out, gated(at, call.q, numerator / denominator));
            underflowed |= underflowed_lanes(denominator, at.lanes, call.underflow);
          });
      good = !any(underflowed) && good;
    });
  }
  region.finish();
  return good;
}

// The operands of the gradient of the weights: rows of targets, and strips of sources whose terms are the values and the
// keys of channels.
template <typename Op>
class Outer {
 public:
  Outer(int64_t tokens, int64_t blocks)
      : tokens_(tokens),
        strips_((tokens + LANES - 1) / LANES),
        blocks_(blocks),
        targets_((blocks * tokens + Op::HEIGHT) * WORDS),
        sources_(strips_ * blocks * WORDS * LANES) {}

  int64_t strips() const { return strips_; }
  int64_t width() const { return strips_ * LANES; }

  void set_target(int64_t block, int64_t t, Vec d_num, Vec d_den) {
    typename Op::Word *to = target(block, t);
    store_row<Op>(to, d_num);
    store_row<Op>(to + ROW_WORDS<Op>, d_den);
  }

  void set_sources(int64_t block, int64_t strip, Tile &numerator, Tile &denominator) {
    typename Op::Word *to = sources_.data() + (strip * blocks_ + block) * WORDS * LANES;
    numerator.store_terms<Op>(to);
    denominator.store_terms<Op>(to + ROW_WORDS<Op> * LANES);
  }

  // Adds the sums over the channels of some blocks of target times source to (T, width).
  void add(int64_t blocks, float *found) {
    const float zero[STRIPS * LANES] = {};
    float part[Op::HEIGHT * STRIPS * LANES];
    for (int64_t t = 0; t < tokens_; t += Op::HEIGHT) {
      const int rows = std::min<int64_t>(Op::HEIGHT, tokens_ - t);
      for (int64_t i = 0; i < strips_; i += STRIPS) {
        const int64_t count = std::min<int64_t>(STRIPS, strips_ - i);
        multiply_strips<WORDS>(Product<Op>{target(0, t), 1, tokens_ * WORDS, blocks, WORDS,
                                           sources_.data() + i * blocks_ * WORDS * LANES, blocks_ * WORDS * LANES,
                                           WORDS * LANES, TILED<Op> ? nullptr : zero, 0,
                                           Sums(part, STRIPS * LANES)},
                               rows, count);
        for (int r = 0; r < rows; ++r)
          for (int64_t n = 0; n < count * LANES; n += LANES) {
            float *to = found + (t + r) * width() + i * LANES + n;
            store(to, load(to, LANES) + load(part + r * STRIPS * LANES + n, LANES), LANES);
          }
      }
    }
  }

 private:
  static constexpr int WORDS = STRIPS * ROW_WORDS<Op>;

  typename Op::Word *target(int64_t block, int64_t t) { return targets_.data() + (block * tokens_ + t) * WORDS; }

  int64_t tokens_, strips_, blocks_;
  Buffer<typename Op::Word> targets_, sources_;
};

// The inputs and outputs of a backward; q, dq, the mask's elements and d_weights may be null.
struct Gradients {
  Shape s;
  Stream grad, y, den, q, k, v;
  Mask mask;
  Stream dq, dk, dv;
  float underflow, *d_weights;

  // The inputs and outputs of a thread, which has d_weights of its own.
  Gradients of_thread(int thread) const {
    Gradients own = *this;
    if (d_weights) own.d_weights += thread * s.tokens * ((s.tokens + LANES - 1) / LANES * LANES);
    return own;
  }
};

// A thread of a backward, with its buffers.
template <typename Op>
struct Backward : Gradients {
  Strips<Op> r;
  Outer<Op> outer;
  Buffer<float> kept;

  Backward(const Gradients &call, int64_t together)
      : Gradients(call),
        r(s.tokens, together),
        outer(s.tokens, d_weights ? together : 0),
        kept(together * s.tokens * LANES) {}

  // The gradients of the sums of a block, and of q; returns the lanes whose denominators are underflowed.
  IntVec spread(const Group &g, int64_t block) {
    IntVec underflowed{};
    r.fill(block, [&](int64_t t, Vec &d_num, Vec &d_den) {
      d_num = d_den = Vec{};
      if (t >= s.tokens) return;
      const Place at = g.place(block, t);
      const Vec sum = at.read(den), inverse = 1.0f / sum;
      const Spread found(at, grad, y, q, dq);
      underflowed |= underflowed_lanes(sum, at.lanes, underflow);
      d_num = only(found.a * inverse, at.lanes);
      d_den = only(-found.go * inverse, at.lanes);
      if (d_weights) outer.set_target(block, t, d_num, d_den);
    });
    return underflowed;
  }

  // The exponentials of a block once more.
  void enter(const Group &g, int64_t block) {
    const Keys keys(k, v, mask, g, block);
    for (int64_t strip = 0; strip < outer.strips(); ++strip) {
      Tile numerator, denominator;
      for (int i = 0; i < LANES; ++i) {
        const Place at = g.place(block, strip * LANES + i);
        keys.weigh(at, numerator.row[i], denominator.row[i]);
        denominator.row[i] = only(denominator.row[i], at.lanes);
        if (at.t < s.tokens) store(kept.data() + (block * s.tokens + at.t) * LANES, denominator.row[i], LANES);
      }
      if (d_weights) outer.set_sources(block, strip, numerator, denominator);
    }
  }

  bool run(const typename Op::Word *weights, const Group &g) {
    IntVec underflowed{};
    for (int64_t i = 0; i < g.count; ++i) {
      underflowed |= spread(g, i);
      enter(g, i);
    }
    const bool more = g.first + g.count < s.blocks();
    each_sum<Op>(
        weights, s.tokens, g.count, r,
        [&](int64_t i, int64_t t) {
          g.place(i, t).prefetch(v);
          if (!more) return;
          for (const Stream *x : {&grad, &y, &den, &q, &k})
            if (x->data) g.place(i + g.count, t).prefetch(*x);
        },
        [&](int64_t i, int64_t t, Vec d_num, Vec d_den) {
          const Place at = g.place(i, t);
          const Vec e = load(kept.data() + (i * s.tokens + t) * LANES, LANES);
          const Vec value = mask.counts(g.b, t) ? at.read(v) : Vec{};
          at.write(dv, d_num * e);
          at.write(dk, (d_num * value + d_den) * e);
        });
    if (d_weights) outer.add(g.count, d_weights);
    return !any(underflowed);
  }
};

template <typename Op>
int backward(const Gradients &call, const typename Op::Word *weights, int threads) {
  const Shape &s = call.s;
  const int64_t together = s.together(threads, TILED<Op> && call.d_weights);
  int good = 1;
  Region region;
#pragma omp parallel num_threads(threads) reduction(&& : good)
  {
    [[maybe_unused]] typename Op::State state;
    std::unique_ptr<Backward<Op>> worker;
    region.run([&] { worker.reset(new Backward<Op>(call.of_thread(omp_get_thread_num()), together)); });
#pragma omp for schedule(static)
    for (int64_t item = 0; item < s.batch * s.groups(together); ++item)
      region.run([&] { good = worker->run(weights, s.group(item, together)) && good; });
  }
  region.finish();
  return good;
}

// The largest bias of a target, which its weights are relative to. NaN stays.
float peak_of(const float *row, int64_t tokens) {
  return largest(tokens, -std::numeric_limits<float>::infinity(),
                 [&](int64_t s, int lanes) { return load(row + s, lanes); });
}

// Where a word of a product's weights is: (words, rows) for a block of rows after another, in tiles (words / LANES, rows,
// LANES).
template <typename Op>
int64_t place_of(int64_t words, int64_t row, int64_t word) {
  const int64_t from = row % Op::HEIGHT, start = (row - from) * words, first = word % LANES;
  return TILED<Op> ? start + (word - first) * Op::HEIGHT + from * LANES + first : start + word * Op::HEIGHT + from;
}

// Fill `out` with the weights e^(bias - peak) of a bias (T, T), 0 beyond it: of targets by their sources, or of sources
// by their targets.
template <typename Op>
void tile_weights(const float *bias, int64_t tokens, bool by_source, typename Op::Word *out, int threads) {
  // The rows of a square: a vector of terms, or of rows of a product.
  constexpr int SIDE = std::min(Op::HEIGHT, LANES);
  const int down = by_source ? LANES : SIDE, across = by_source ? SIDE : LANES;
  const int64_t words = words_of<Op>(tokens), terms = words * Op::DEPTH, rows = rows_of<Op>(tokens);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t t = 0; t < (by_source ? terms : rows); t += down) {
    float peaks[LANES] = {};
    for (int i = 0; i < down && t + i < tokens; ++i) peaks[i] = peak_of(bias + (t + i) * tokens, tokens);
    for (int64_t s = 0; s < (by_source ? rows : terms); s += across) {
      Tile x;
      for (int i = 0; i < down && t + i < tokens && s < tokens; ++i) {
        const int lanes = rest(tokens, s);
        x.row[i] = only(exp_(load(bias + (t + i) * tokens + s, lanes) - peaks[i]), lanes);
      }
      if (by_source == TILED<Op>) x.transpose();
      const int64_t row = by_source ? s : t, term = by_source ? t : s;
      if constexpr (TILED<Op>) {
        for (int i = 0; i < SIDE; ++i) store_row<Op>(out + place_of<Op>(words, row + i, term / Op::DEPTH), x.row[i]);
      } else {
        for (int i = 0; i < LANES && term + i < terms; i += Op::DEPTH) {
          const typename Op::Words found = Op::pack(x.row + i);
          std::memcpy(out + place_of<Op>(words, row, (term + i) / Op::DEPTH), &found, SIDE * sizeof(typename Op::Word));
        }
      }
    }
  }
}

// The gradient (T, T) of the bias from the sums of each thread for its weights, (threads, T, T in whole vectors).
void bias_grad(const float *bias, int64_t tokens, const float *sums, int threads, float *out) {
  const int64_t width = (tokens + LANES - 1) / LANES * LANES;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t t = 0; t < tokens; ++t) {
    const float *row = bias + t * tokens, peak = peak_of(row, tokens);
    for (int64_t s = 0; s < tokens; s += LANES) {
      const int lanes = rest(tokens, s);
      Vec sum{};
      for (int i = 0; i < threads; ++i) sum += load(sums + (i * tokens + t) * width + s, LANES);
      store(out + t * tokens + s, sum * exp_(load(row + s, lanes) - peak), lanes);
    }
  }
}

// A bias (T, T), or null where its weights are set, and these.
struct BiasWeights {
  int64_t tokens, operands;
  const float *bias;
  void *words;

  // Set the weights from their bias, if there is one, as `tile_weights` lays them out.
  void compute(bool by_source, int threads) const {
    if (!bias) return;
    with_operands(operands, words, [&](auto op, const auto *) {
      typedef decltype(op) Op;
      tile_weights<Op>(bias, tokens, by_source, static_cast<typename Op::Word *>(words), threads);
    });
  }
};

// The inputs of a call, as Python packs them; q and the mask's elements may be null.
struct Call {
  BiasWeights weights;
  int64_t batch, channels;
  Stream q, k, v;
  const bool *elements;

  Shape shape() const { return {batch, weights.tokens, channels}; }
  Mask mask() const { return {elements, weights.tokens}; }
};

struct ForwardCall {
  Call call;
  Stream out, den;
};

struct BackwardCall {
  Call call;
  Stream grad, y, den, dq, dk, dv;
  float *d_weights, *d_bias;
};

}  // namespace

extern "C" {

AFT_PACKED(aft_full_weights, BiasWeights)
AFT_PACKED(aft_full_forward, ForwardCall)
AFT_PACKED(aft_full_backward, BackwardCall)

// Floats of a vector.
int aft_lanes() { return LANES; }

// How the kernels multiply bfloat16 the fastest. On Intel's Emerald Rapids the instruction of pairs runs once in two cycles,
// half the terms of two float32 multiplications; on AMD's Zen 4 it has twice the terms.
int aft_operands() {
  if (has_tiles()) return TILES;
#if defined(__AVX512BF16__)
  if (!__builtin_cpu_is("intel")) return PAIRS;
#endif
  return SINGLE;
}

// Rows of a block of the weights of a bias, and words of a row.
int aft_full_rows(int operands) {
  return with_operands(operands, nullptr, [](auto op, const auto *) { return decltype(op)::HEIGHT; });
}
int aft_full_words(int operands, int tokens) {
  return with_operands(operands, nullptr, [&](auto op, const auto *) -> int { return words_of<decltype(op)>(tokens); });
}

// The weights of a bias for later forward calls, which then give none.
int aft_full_weights(const BiasWeights *weights, int threads) {
  return guarded([&] { weights->compute(false, threads); });
}

// y and, unless den is null, the denominators. Returns 0 where a denominator is below `underflow`, or NaN.
int aft_full_forward(const ForwardCall *packed, float underflow, int threads) {
  return guarded([&] {
    const auto &[call, out, den] = *packed;
    const Forward found{call.shape(), call.q, call.k, call.v, call.mask(), out, den, underflow};
    call.weights.compute(false, threads);
    return with_operands(call.weights.operands, call.weights.words, [&](auto op, const auto *words) {
      return forward<decltype(op)>(found, words, threads);
    });
  });
}

// The gradients of q, unless it is null, k, v and, unless d_bias is null, the bias; d_weights is then zeros (threads,
// T, T in whole vectors), in which each thread sums, and else null. Returns 0 as above.
int aft_full_backward(const BackwardCall *packed, float underflow, int threads) {
  return guarded([&] {
    const auto &[call, grad, y, den, dq, dk, dv, d_weights, d_bias] = *packed;
    const Gradients found{call.shape(), grad, y, den, call.q, call.k, call.v, call.mask(),
                          dq, dk, dv, underflow, d_weights};
    call.weights.compute(true, threads);
    const int good = with_operands(call.weights.operands, call.weights.words, [&](auto op, const auto *words) {
      return backward<decltype(op)>(found, words, threads);
    });
    if (good && d_bias) bias_grad(call.weights.bias, call.weights.tokens, d_weights, threads, d_bias);
    return good;
  });
}
}
