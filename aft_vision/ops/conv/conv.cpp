// AFT-conv with heads of several channels (AFT Eq. 6): the columns of a head, e^(k - peak) [v | 1] of some sequences side
// by side, are cut into strips, which the head's weights multiply.
//
// A weight depends only on the distance, so the weights of a head are a table (2H - 1, 2W - 1) of distances, small
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

// The position bias (h, s, s), and whether sources beyond it count.
struct Kernel {
  int64_t heads;
  const float *data;
  int64_t size, global;

  // Biases of a head from a tap on, of which `count` are asked for; those after them may be others.
  Vec read(int64_t i, int64_t tap, int count) const {
    const int64_t start = i * size * size + tap;
    return load(data + start, start + LANES <= heads * size * size ? LANES : count);
  }

  // The reference of the weights of a head: its largest bias, or the 0 beyond the kernel. NaN stays.
  float reference(int64_t i) const {
    const float least = global ? 0.0f : -std::numeric_limits<float>::max();
    return largest(size * size, least, [&](int64_t tap, int count) { return read(i, tap, count); });
  }

  // Call `f` with some neighbouring taps of a row that reach from a token of the grid to another, how many, and their place
  // in a table (2H - 1, 2W - 1) of distances.
  template <typename F>
  void each_run(const Shape &s, F f) const {
    const int64_t half = size / 2, y = std::min(half, s.height - 1), x = std::min(half, s.width - 1);
    for (int64_t dy = -y; dy <= y; ++dy)
      for (int64_t dx = -x; dx <= x; dx += LANES)
        f((half + dy) * size + half + dx, rest(x + 1, dx), (s.height - 1 + dy) * (2 * s.width - 1) + s.width - 1 + dx);
  }
};

// The weights e^(w - reference) of every head by the distance from target to source, and the one beyond the kernel.
template <typename Op>
struct Table {
  typename Op::Word *words;
  float *outside;
  int64_t stride;  // of a head: (2H - 1, 2W - 1) words, and zeros for more than a vector; pairs are those of neighbours

  // A place in the table of a head. In tiles a word has the weights of two distances, and a pair begins at any of them.
  auto at(int64_t head, int64_t distance) const {
    if constexpr (TILED<Op>)
      return reinterpret_cast<const uint16_t *>(words + head * stride) + distance;
    else
      return words + head * stride + distance;
  }

  // Fill it, by the distance from a source to its targets if it is `turned`.
  void fill(const Shape &s, const Kernel &kernel, bool turned, int threads) const {
    const int64_t distances = (2 * s.height - 1) * (2 * s.width - 1);
    Region region;
#pragma omp parallel num_threads(s.heads * distances > FEW_WEIGHTS ? threads : 1)
    {
      std::vector<float> row;
      region.run([&] { row.resize(Op::DEPTH * stride + LANES); });
#pragma omp for schedule(static)
      for (int64_t head = 0; head < s.heads; ++head) region.run([&] {
        const Vec reference = splat(kernel.reference(head));
        outside[head] = kernel.global ? exp_(-reference)[0] : 0.0f;
        std::fill_n(row.begin(), distances, outside[head]);
        kernel.each_run(s, [&](int64_t tap, int count, int64_t place) {
          float *to = row.data() + place;
          store(to, below(count) ? exp_(kernel.read(head, tap, count) - reference) : load(to, LANES), LANES);
        });
        if (turned) std::reverse(row.begin(), row.begin() + distances);
        for (int64_t i = 0; i < stride; i += LANES) {
          typename Op::Word *to = words + head * stride + i;
          Vec x[Op::DEPTH];
          for (int j = 0; j < Op::DEPTH; ++j)
            if constexpr (TILED<Op>)
              store_row<Op>(to + j * ROW_WORDS<Op>, load(row.data() + Op::DEPTH * i + j * LANES, LANES));
            else
              x[j] = load(row.data() + i + j, LANES);
          if constexpr (!TILED<Op>) store_words<Op>(to, Op::pack(x));
        }
      });
    }
    region.finish();
  }
};

// `e` is scratch for e^(k - peak), (B, T, h).
template <typename Op>
struct Inputs {
  const Shape &s;
  Table<Op> table;
  Stream q, k, v;
  Mask mask;
  float *e, underflow;

  // The exponentials of a head of a group at a token, from its first sequence on.
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
      const Vec peak = largest_keys(at, in.k, in.mask);
      for (at.t = 0; at.t < s.tokens(); ++at.t) {
        const Vec found = in.mask.counts(b, at.t) ? exp_(at.read(in.k) - peak) : Vec{};
        store(in.e + (b * s.tokens() + at.t) * s.heads + head, found, at.lanes);
      }
    }
}

// Multiply the weights of a head of the group and some targets by all strips.
template <typename Op>
void multiply_piece(const Group &g, const Table<Op> &table, const Sources<Op> &x, const Targets &to, int64_t head,
                    const float *start, const Sums &sums) {
  const Shape &s = g.s;
  const Piece &at = x.piece(to.piece);
  const int64_t strips = g.strips(), distances = 2 * s.width - 1, length = at.stop - at.first;
  const int64_t first = s.first(to.row), rows = s.stop(to.row + to.rows - 1) - first;
  const auto *weights = table.at(g.head + head, (s.height - 1 + first - to.row) * distances + s.width - 1 +
                                                    at.first * Op::DEPTH - (to.column + to.count - 1));
  if constexpr (TILED<Op>) {
    constexpr int64_t SIZE = sizeof(typename Op::Word), HALF = SIZE / 2;
    const int64_t block = to.rows > 1 ? -distances * HALF : 0;
    for (int64_t strip = 0; strip < strips; strip += STRIPS)
      for (int64_t word = 0; word < length; word += LANES) {
        const int64_t some = std::min<int64_t>(STRIPS, strips - strip);
        const Sums out(sums.data + strip * LANES, sums.rows * sums.row - strip * LANES, sums.row, some * LANES);
        multiply_tiles(TileProduct{weights + word * Op::DEPTH, HALF, block, distances * HALF,
                                   x.data(head, first, at.first + word) + strip * x.strip(), LANES * SIZE,
                                   some > 1 ? x.strip() * SIZE : 0, x.row() * SIZE, rows,
                                   word ? out.data : start + strip * LANES, word ? out.row : 0, out});
      }
  } else {
    multiply_spans<1>(Product<Op>{weights, Op::DEPTH, distances, rows, length, x.data(head, first, at.first), x.strip(),
                                  x.row(), start, 0, sums},
                      to.count, strips);
  }
}

// Call `f` with a head of the group, the index and the token of each target of a product, and its sums.
template <typename Op, typename F>
void sum_piece(const Group &g, const Table<Op> &table, const Sources<Op> &x, const Targets &to, float *start,
               const Rows &rows, F f) {
  const int64_t strips = g.strips(), first = g.s.first(to.row), stop = g.s.stop(to.row + to.rows - 1);
  const Sums sums = rows.sums(strips * LANES);
  for (int64_t i = 0; i < g.heads; ++i) {
    for (int64_t strip = 0; strip < strips; ++strip)
      store(start + strip * LANES, table.outside[g.head + i] * x.beyond(i, first, stop, to.piece, strip), LANES);
    multiply_piece(g, table, x, to, i, start, sums);
    to.each([&](int64_t j, int64_t t, int64_t row) { f(i, j, t, sums.data + row * sums.row); });
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

// The buffers of a thread.
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
        sums(Op::HEIGHT + 1, cut.columns(in.s)),
        ratios(Op::HEIGHT * cut.images, cut.heads * in.s.per_head),
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
    x.each_product([&](const Targets &to) {
      sum_piece(g, in.table, x, to, sums[Op::HEIGHT], sums,
                [&](int64_t head, int64_t i, int64_t t, const float *found) {
                  good &= divide(g, head, t, found, ratios[i * g.images] + head * in.s.per_head);
                });
      to.each([&](int64_t i, int64_t t, int64_t) {
        for (int64_t image = 0; image < g.images; ++image)
          g.vectors(image, t, [&](const Place &at, int64_t c) {
            at.later(NEAR).prefetch(in.q);
            at.write(out, gated(at, in.q, load(ratios[i * g.images + image] + c, LANES)));
          });
      });
    });
    return good;
  }

  // The ratios of a token and head for each sequence, from the sums of its columns; returns whether none is underflowed.
  bool divide(const Group &g, int64_t head, int64_t t, const float *found, float *ratio) const {
    const int64_t width = in.s.per_head, images = g.images, hop = ratios.width();
    const float underflow = in.underflow;
    bool good = true;
    for (int64_t image = 0; image < images; ++image, found += width + 1, ratio += hop) {
      const float denominator = found[width] + fill[image], inverse = 1.0f / denominator;
      good &= denominator >= underflow;
      if (den.data) Place{g.b + image, t, g.head + head, 1}.write_one(den, denominator);
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
        sums(Op::HEIGHT + 1, cut.columns(in.s)),
        a(Op::HEIGHT * cut.images, cut.heads * in.s.per_head),
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
    r.each_product([&](const Targets &to) {
      sum_piece(g, in.table, r, to, sums[Op::HEIGHT], sums,
                [&](int64_t head, int64_t i, int64_t t, const float *found) {
                  collect(g, head, t, found, a[i * g.images] + head * in.s.per_head);
                });
      to.each([&](int64_t i, int64_t t, int64_t) {
        for (int64_t image = 0; image < g.images; ++image)
          g.vectors(image, t, [&](const Place &at, int64_t c) { at.write(dv, load(a[i * g.images + image] + c, LANES)); });
      });
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

  // A token's gradients after the gate, kept as the i'th.
  void spread(const Group &g, int64_t t, int64_t i) {
    for (int64_t image = 0; image < g.images; ++image)
      g.vectors(image, t, [&](const Place &at, int64_t c) {
        for (const Stream *x : {&grad, &y, &in.q}) at.later(NEAR).prefetch(*x);
        const Spread found(at, grad, y, in.q, dq);
        store(a[i * g.images + image] + c, found.a, LANES);
        store(go[i * g.images + image] + c, found.go, LANES);
      });
  }

  // The columns of the i'th kept token and a head; returns whether no denominator is underflowed.
  bool divide(const Group &g, int64_t head, int64_t t, int64_t i, float *columns) const {
    const int64_t width = in.s.per_head, images = g.images, hop = a.width();
    const float *d_num = a[i * images] + head * width, *product = go[i * images] + head * width;
    bool good = true;
    for (int64_t image = 0; image < images; ++image, columns += width + 1, d_num += hop, product += hop) {
      const float denominator = Place{g.b + image, t, g.head + head, 1}.read_one(den), inverse = 1.0f / denominator;
      good &= denominator >= in.underflow;
      Vec sum{};
      for (int64_t c = 0; c < width; c += LANES) {
        store(columns + c, load(d_num + c, LANES) * inverse, LANES);
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
        const Vec d_num = load(found + c, LANES);
        store(d_values + c, d_num * weight, LANES);
        if (!counts || counts[image * tokens]) product += only(d_num * values.read(image, c, width), rest(width, c));
      }
      Place{g.b + image, t, g.head + head, 1}.write_one(dk, (total(product) + found[width]) * weight);
    }
  }
};

// Call what `make` makes, a pointer, for each thread with every group; return whether nothing is underflowed.
template <typename Op, typename F>
int each_group(const Inputs<Op> &in, int threads, F make) {
  const Cut cut(in.s, threads);
  int good = 1;
  weigh(in, threads);
  Region region;
#pragma omp parallel num_threads(threads) reduction(&& : good)
  {
    [[maybe_unused]] typename Op::State state;
    decltype(make(cut, 0)) worker;
    region.run([&] { worker = make(cut, omp_get_thread_num()); });
#pragma omp for schedule(static)
    for (int64_t item = 0; item < cut.count(in.s); ++item)
      region.run([&] { good = worker->run(Group(in.s, cut, item)) && good; });
  }
  region.finish();
  return good;
}

// The gradient of the kernel from the sums of each thread for its tables, (threads, h, stride).
void kernel_grad(const Shape &s, const Kernel &kernel, const float *sums, int64_t stride, int threads, float *out) {
  for (int64_t head = 0; head < s.heads; ++head) {
    float *found = out + head * kernel.size * kernel.size;
    const Vec reference = splat(kernel.reference(head));
    std::fill_n(found, kernel.size * kernel.size, 0.0f);
    kernel.each_run(s, [&](int64_t tap, int count, int64_t place) {
      Vec sum{};
      for (int i = 0; i < threads; ++i) sum += load(sums + (i * s.heads + head) * stride + place, count);
      store(found + tap, sum * exp_(kernel.read(head, tap, count) - reference), count);
    });
  }
}

// The inputs of a call, as Python packs them; q and mask may be null. `scratch` is for h tables of `words`, the weight
// beyond each, and (B, T, h) exponentials.
struct Call {
  int64_t batch, height, width, channels;
  Kernel kernel;
  int64_t operands, words;
  float *scratch;
  Stream q, k, v;
  const bool *mask;

  Shape shape() const { return {batch, height, width, channels, kernel.heads, kernel.size / 2, channels / kernel.heads}; }

  // Call `f` with the inputs and how to multiply, the table filled.
  template <typename F>
  int with_inputs(const Shape &s, bool turned, float underflow, int threads, F f) const {
    return with_operands(operands, scratch, [&](auto op, const auto *) {
      typedef decltype(op) Op;
      float *outside = scratch + kernel.heads * words;
      const Table<Op> table{reinterpret_cast<typename Op::Word *>(scratch), outside, words};
      table.fill(s, kernel, turned, threads);
      return f(Inputs<Op>{s, table, q, k, v, {mask, s.tokens()}, outside + kernel.heads, underflow}, op);
    });
  }
};

struct ForwardCall {
  Call call;
  Stream out, den;
};

struct BackwardCall {
  Call call;
  Stream grad, y, den, dq, dk, dv;
  float *d_table, *d_kernel;
};

}  // namespace

extern "C" {

AFT_PACKED(aft_conv_forward, ForwardCall)
AFT_PACKED(aft_conv_backward, BackwardCall)

// y and, unless den is null, the denominators. Returns 0 where a denominator is below `underflow`, or NaN.
int aft_conv_forward(const ForwardCall *packed, float underflow, int threads) {
  return guarded([&] {
    const Call &call = packed->call;
    const Shape s = call.shape();
    return call.with_inputs(s, false, underflow, threads, [&](const auto &in, auto op) {
      typedef Forward<decltype(op)> Worker;
      return each_group(in, threads,
                        [&](const Cut &cut, int) { return std::make_unique<Worker>(in, cut, packed->out, packed->den); });
    });
  });
}

// The gradients of q, unless it is null, k, v and, unless d_kernel is null, the kernel; d_table is then zeros (threads,
// h, words), in which each thread sums, and else null. Returns 0 as above.
int aft_conv_backward(const BackwardCall *packed, float underflow, int threads) {
  return guarded([&] {
    const BackwardCall &given = *packed;
    const Call &call = given.call;
    const Shape s = call.shape();
    const int64_t own = call.kernel.heads * call.words;
    const int good = call.with_inputs(s, true, underflow, threads, [&](const auto &in, auto op) {
      typedef Backward<decltype(op)> Worker;
      return each_group(in, threads, [&](const Cut &cut, int thread) {
        return std::make_unique<Worker>(in, cut, given.grad, given.y, given.den, given.dq, given.dk, given.dv,
                                        given.d_table ? given.d_table + thread * own : nullptr);
      });
    });
    if (good && given.d_kernel) kernel_grad(s, call.kernel, given.d_table, call.words, threads, given.d_kernel);
    return good;
  });
}
}
