// AFT-conv with heads of several channels (AFT Eq. 6): the columns of a head, e^(k - peak) [v | 1] of some sequences side
// by side, are cut into strips, which the head's weights multiply.
//
// A weight depends on the distance alone, so all that a head has of them is a table (2H - 1, 2W - 1) of distances, small
// enough for the nearest cache: the targets of a piece of a grid row are neighbours in it. Only what is within reach of
// the kernel is multiplied; all else has one weight, which multiplies its sum. All terms are positive.

#include <limits>
#include <memory>

#include <omp.h>

#include "columns.h"
#include "../common/guard.h"

namespace {

// How many tokens earlier memory that is not read in its order is fetched, a line at a time between other work: where that
// is little, and where it is more.
constexpr int64_t FAR = 14, NEAR = 4;

template <typename Op>
struct Table {
  const typename Op::Word *words;
  const float *outside;
  int64_t stride;  // of a head
};

// `e` is room for e^(k - peak), (B, T, h).
template <typename Op>
struct Inputs {
  const Shape &s;
  Table<Op> table;
  Stream q, k, v;
  Mask mask;
  float *e, underflow;

  // Those of a head of a group at a token, from its first sequence on.
  const float *weights(const Group &g, int64_t head, int64_t t) const {
    return e + (g.b * s.tokens() + t) * s.heads + g.head + head;
  }
  const bool *counts(const Group &g, int64_t t) const {
    return mask.data ? mask.data + g.b * mask.tokens + t : nullptr;
  }
};

template <typename Op>
void weigh(const Inputs<Op> &in, int threads) {
  const Shape &s = in.s;
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static)
  for (int64_t b = 0; b < s.batch; ++b)
    for (int64_t head = 0; head < s.heads; head += LANES) {
      Place at{b, 0, head, rest(s.heads, head)};
      Vec peak = splat(-std::numeric_limits<float>::max());
      for (at.t = 0; at.t < s.tokens(); ++at.t) {
        if (!in.mask.counts(b, at.t)) continue;
        const Vec key = at.read(in.k);
        peak = key > peak ? key : peak;
      }
      for (at.t = 0; at.t < s.tokens(); ++at.t) {
        const Vec found = in.mask.counts(b, at.t) ? exp_(at.read(in.k) - peak) : Vec{};
        store(in.e + (b * s.tokens() + at.t) * s.heads + head, found, at.lanes);
      }
    }
}

// `f` is given a head of the group, a token of a piece of a row, and its sums.
template <typename Op, typename F>
void sum_piece(const Group &g, const Table<Op> &table, const Sources<Op> &x, int64_t row, int64_t piece, float *start,
               float *sums, F f) {
  const Shape &s = g.s;
  const Piece &at = x.piece(piece);
  float part[ROWS * STRIPS * LANES];
  const int64_t strips = g.strips(), distances = 2 * s.width - 1, first = s.first(row);
  // Neighbours in the table are the targets from the last of the piece to the first.
  const int64_t distance = (s.height - 1 + first - row) * distances + s.width - 1 + at.first * Op::DEPTH -
                           (at.column + at.count - 1);
  for (int64_t i = 0; i < g.heads; ++i) {
    for (int64_t strip = 0; strip < strips; ++strip)
      store(start + strip * LANES, table.outside[g.head + i] * x.beyond(i, row, piece, strip), LANES);
    multiply_spans<Op, 1>(
        {table.words + (g.head + i) * table.stride + distance, Op::DEPTH, distances, s.stop(row) - first,
         at.stop - at.first, x.data(i, first, at.first), x.strip(), x.row(), start, 0, sums, strips * LANES},
        at.count, strips, part);
    for (int j = 0; j < at.count; ++j) f(i, j, sums + (at.count - 1 - j) * strips * LANES);
  }
}

// The channels of a head at a token, of one sequence of a group after another. A vector goes on over the next head's.
struct Channels {
  const Stream x;
  int64_t start;
  bool whole;

  Channels(const Stream &x, const Group &g, int64_t head, int64_t t)
      : x(x),
        start(g.b * x.batch + t * x.token + (g.head + head) * g.s.per_head),
        whole((g.head + head) * g.s.per_head + vectors_of(g.s.per_head) <= g.s.channels) {}

  void prefetch(int64_t image, int64_t distance) const { x.prefetch(start + image * x.batch + distance); }

  Vec read(int64_t image, int64_t c, int64_t width) const {
    return x.read(start + image * x.batch + c, whole ? LANES : rest(width, c));
  }
};

// The columns of a token and head: weighted values and weights.
template <typename Op>
void enter(const Inputs<Op> &in, const Group &g, int64_t head, int64_t t, float *columns) {
  const int64_t width = g.s.per_head, images = g.images, tokens = g.s.tokens(), hop = tokens * g.s.heads;
  const bool *counts = in.counts(g, t);
  const float *weights = in.weights(g, head, t);
  const int64_t ahead = in.v.token * FAR;
  const Channels values(in.v, g, head, t);
  for (int64_t image = 0; image < images; ++image, columns += width + 1) {
    const float weight = weights[image * hop];
    values.prefetch(image, ahead);
    if (!counts || counts[image * tokens])
      for (int64_t c = 0; c < width; c += LANES) store(columns + c, weight * values.read(image, c, width), LANES);
    else
      std::fill_n(columns, width, 0.0f);
    columns[width] = weight;
  }
  store(columns, Vec{}, LANES);
}

// What a thread works with.
template <typename Op>
struct Forward {
  const Inputs<Op> &in;
  const Stream &out, &den;
  Sources<Op> x;
  Rows entering, sums, ratios;
  std::vector<float> fill;

  Forward(const Inputs<Op> &in, const Cut &cut, const Stream &out, const Stream &den)
      : in(in),
        out(out),
        den(den),
        x(in.s, cut),
        entering(Op::DEPTH, cut.columns(in.s)),
        sums(ROWS + 1, cut.columns(in.s)),
        ratios(ROWS * cut.images, cut.heads * in.s.per_head),
        fill(cut.images) {}

  bool run(const Group &g) {
    for (int64_t image = 0; image < g.images; ++image) fill[image] = in.mask.fill(g.b + image);
    x.each_word([&](int64_t row, int64_t word, int64_t t, int64_t count) {
      for (int64_t head = 0; head < g.heads; ++head) {
        for (int64_t i = 0; i < count; ++i) enter(in, g, head, t + i, entering[i]);
        x.set(head, row, word, entering, count, g.strips());
      }
    });
    x.finish(g.heads, g.strips());
    bool good = true;
    x.each_piece([&](int64_t row, int64_t piece, int64_t t, int64_t count) {
      sum_piece<Op>(g, in.table, x, row, piece, sums[ROWS], sums[0], [&](int64_t head, int64_t i, const float *found) {
        good &= divide(g, head, t + i, found, ratios[i * g.images] + head * in.s.per_head);
      });
      for (int64_t i = 0; i < count; ++i)
        for (int64_t image = 0; image < g.images; ++image)
          g.vectors(image, t + i, [&](const Place &at, int64_t c) {
            at.later(NEAR).prefetch(in.q);
            at.write(out, gated(at, in.q, load(ratios[i * g.images + image] + c, LANES)));
          });
    });
    return good;
  }

  // The ratios of a token and head for each sequence, from the sums of its columns; returns whether none is lost.
  bool divide(const Group &g, int64_t head, int64_t t, const float *found, float *ratio) const {
    const int64_t width = in.s.per_head, images = g.images, hop = ratios.width();
    const float underflow = in.underflow;
    bool good = true;
    for (int64_t image = 0; image < images; ++image, found += width + 1, ratio += hop) {
      const float bottom = found[width] + fill[image], inverse = 1.0f / bottom;
      good &= bottom >= underflow;
      if (den.data) Place{g.b + image, t, g.head + head, 1}.write_one(den, bottom);
      for (int64_t c = 0; c < width; c += LANES) store(ratio + c, load(found + c, LANES) * inverse, LANES);
    }
    return good;
  }
};

// d_table is the thread's own; null if nobody asks for it.
template <typename Op>
struct Backward {
  const Inputs<Op> &in;
  const Stream &grad, &y, &den, &dq, &dk, &dv;
  float *d_table;
  Sources<Op> r;
  Outer<Op> outer;
  Rows entering, sums, a, go;

  Backward(const Inputs<Op> &in, const Cut &cut, const Stream &grad, const Stream &y, const Stream &den, const Stream &dq,
           const Stream &dk, const Stream &dv, float *d_table)
      : in(in),
        grad(grad),
        y(y),
        den(den),
        dq(dq),
        dk(dk),
        dv(dv),
        d_table(d_table),
        r(in.s, cut),
        outer(in.s, cut),
        entering(LANES, cut.columns(in.s)),
        sums(ROWS + 1, cut.columns(in.s)),
        a(ROWS * cut.images, cut.heads * in.s.per_head),
        go(Op::DEPTH * cut.images, cut.heads * in.s.per_head) {}

  bool run(const Group &g) {
    bool good = true;
    r.each_word([&](int64_t row, int64_t word, int64_t t, int64_t count) {
      for (int64_t i = 0; i < count; ++i) spread(g, t + i, i);
      for (int64_t head = 0; head < g.heads; ++head) {
        for (int64_t i = 0; i < count; ++i) {
          good &= divide(g, head, t + i, i, entering[i]);
          if (d_table) outer.set_target(head, t + i, entering[i], g.strips());
        }
        r.set(head, row, word, entering, count, g.strips());
      }
    });
    r.finish(g.heads, g.strips());
    r.each_piece([&](int64_t row, int64_t piece, int64_t t, int64_t count) {
      sum_piece<Op>(g, in.table, r, row, piece, sums[ROWS], sums[0], [&](int64_t head, int64_t i, const float *found) {
        collect(g, head, t + i, found, a[i * g.images] + head * in.s.per_head);
      });
      for (int64_t i = 0; i < count; ++i)
        for (int64_t image = 0; image < g.images; ++image)
          g.vectors(image, t + i,
                    [&](const Place &at, int64_t c) { at.write(dv, load(a[i * g.images + image] + c, LANES)); });
    });
    for (int64_t head = 0; d_table && head < g.heads; ++head) {
      outer.each_strip([&](int64_t row, int64_t strip, int64_t t, int64_t count) {
        for (int64_t i = 0; i < count; ++i) enter(in, g, head, t + i, entering[i]);
        outer.set_sources(row, strip, entering, count, g.strips());
      });
      outer.add(head, d_table + (g.head + head) * in.table.stride, g.strips());
    }
    return good;
  }

  // What the gate makes of a token's gradients, kept as the i'th.
  void spread(const Group &g, int64_t t, int64_t i) {
    for (int64_t image = 0; image < g.images; ++image)
      g.vectors(image, t, [&](const Place &at, int64_t c) {
        for (const Stream *x : {&grad, &y, &in.q}) at.later(NEAR).prefetch(*x);
        const Spread found(at, grad, y, in.q, dq);
        store(a[i * g.images + image] + c, found.a, LANES);
        store(go[i * g.images + image] + c, found.go, LANES);
      });
  }

  // The columns of the i'th kept token and a head; returns whether no denominator is lost.
  bool divide(const Group &g, int64_t head, int64_t t, int64_t i, float *columns) const {
    const int64_t width = in.s.per_head, images = g.images, hop = a.width();
    const float *top = a[i * images] + head * width, *product = go[i * images] + head * width;
    bool good = true;
    for (int64_t image = 0; image < images; ++image, columns += width + 1, top += hop, product += hop) {
      const float bottom = Place{g.b + image, t, g.head + head, 1}.read_one(den), inverse = 1.0f / bottom;
      good &= bottom >= in.underflow;
      Vec sum{};
      for (int64_t c = 0; c < width; c += LANES) {
        store(columns + c, load(top + c, LANES) * inverse, LANES);
        sum += only(load(product + c, LANES), rest(width, c));
      }
      columns[width] = -total(sum) * inverse;
    }
    store(columns, Vec{}, LANES);
    return good;
  }

  // The gradients of a token's keys and, kept for each sequence, values from the sums of a head's columns.
  void collect(const Group &g, int64_t head, int64_t t, const float *found, float *d_values) const {
    const int64_t width = in.s.per_head, images = g.images, tokens = in.s.tokens(), hop = a.width();
    const bool *counts = in.counts(g, t);
    const float *weights = in.weights(g, head, t);
    const int64_t ahead = in.v.token * NEAR;
    const Channels values(in.v, g, head, t);
    for (int64_t image = 0; image < images; ++image, found += width + 1, d_values += hop) {
      const float weight = weights[image * tokens * in.s.heads];
      values.prefetch(image, ahead);
      Vec product{};
      for (int64_t c = 0; c < width; c += LANES) {
        const Vec top = load(found + c, LANES);
        store(d_values + c, top * weight, LANES);
        if (!counts || counts[image * tokens]) product += only(top * values.read(image, c, width), rest(width, c));
      }
      Place{g.b + image, t, g.head + head, 1}.write_one(dk, (total(product) + found[width]) * weight);
    }
  }
};

// Calls what `make` makes, a pointer, for each thread with every group; returns whether nothing is lost.
template <typename Op, typename F>
int each_group(const Inputs<Op> &in, int threads, F make) {
  const Cut cut(in.s, threads);
  int good = 1;
  weigh(in, threads);
  Region region;
#pragma omp parallel num_threads(threads) reduction(&& : good)
  {
    decltype(make(cut, 0)) worker;
    region.run([&] { worker = make(cut, omp_get_thread_num()); });
#pragma omp for schedule(static)
    for (int64_t item = 0; item < cut.count(in.s); ++item)
      region.run([&] { good = worker->run(Group(in.s, cut, item)) && good; });
  }
  region.finish();
  return good;
}

Shape shape_of(const int64_t *sizes) {
  return {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5] / 2, sizes[3] / sizes[4]};
}

}  // namespace

extern "C" {

// y and, unless den is null, the denominators; q and mask may be null. `sizes` are B, H, W, D, h, s, whether words are
// pairs, and the words of a head's table, (2H - 1, 2W - 1) distances with room for a vector behind, pairs those of
// neighbours. `outside` (h) is the weight beyond the kernel; e (B, T, h) is room. Returns 0 where a denominator is below
// `underflow`, or NaN.
int aft_conv_forward(const int64_t *sizes, const void *table, const float *outside, Stream q, Stream k, Stream v,
                     const bool *mask, float *e, Stream out, Stream den, float underflow, int threads) {
  return guarded([&] {
    const Shape s = shape_of(sizes);
    return with_words(sizes[6], table, [&](auto op, const auto *words) {
      typedef decltype(op) Op;
      const Inputs<Op> in{s, {words, outside, sizes[7]}, q, k, v, {mask, s.tokens()}, e, underflow};
      return each_group(in, threads, [&](const Cut &cut, int) { return std::make_unique<Forward<Op>>(in, cut, out, den); });
    });
  });
}

// The gradients of q, unless it is null, k, v and, unless d_table is null, those of the tables: for each thread a part
// (h, words), which begins with zeros. `table` has the distances from a source to its targets. Returns 0 as above.
int aft_conv_backward(const int64_t *sizes, const void *table, const float *outside, Stream grad, Stream y, Stream den,
                      Stream q, Stream k, Stream v, const bool *mask, float *e, Stream dq, Stream dk, Stream dv,
                      float *d_table, float underflow, int threads) {
  return guarded([&] {
    const Shape s = shape_of(sizes);
    return with_words(sizes[6], table, [&](auto op, const auto *words) {
      typedef decltype(op) Op;
      const Inputs<Op> in{s, {words, outside, sizes[7]}, q, k, v, {mask, s.tokens()}, e, underflow};
      return each_group(in, threads, [&](const Cut &cut, int thread) {
        float *own = d_table ? d_table + thread * s.heads * sizes[7] : nullptr;
        return std::make_unique<Backward<Op>>(in, cut, grad, y, den, dq, dk, dv, own);
      });
    });
  });
}
}
