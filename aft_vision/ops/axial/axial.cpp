// AFT-axial: the exponentials of keys and values mixed along columns, then along rows, a block of channels at a time.
//
// A block is as many neighbouring channels as a vector has lanes, each with the weights of its head, so nothing is
// transposed, whatever the number of heads. The denominators are those of blocks of heads.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <type_traits>
#include <vector>

#include "../common/guard.h"
#include "../common/tensor.h"

namespace {

#if defined(__AVX512F__)
constexpr int TILE = 28;
#else
constexpr int TILE = 14;
#endif

struct Shape {
  int64_t batch, height, width, channels, heads;

  int64_t tokens() const { return height * width; }
  int64_t each() const { return channels / heads; }  // channels of a head
  int64_t head_blocks() const { return (heads + LANES - 1) / LANES; }
  int64_t padded_heads() const { return head_blocks() * LANES; }
  int64_t blocks() const { return (channels + LANES - 1) / LANES; }
  int64_t padded_channels() const { return blocks() * LANES; }

  // Heads whose channels fill whole blocks, or all of them.
  int64_t unit() const { return std::min(heads, LANES / std::gcd<int64_t, int64_t>(each(), LANES)); }
  int64_t units() const { return (heads + unit() - 1) / unit(); }
};

// f(integral_constant n) for an n that is known at run time.
template <int N = TILE, typename F>
void with_size(int64_t n, F f) {
  if (n == N) return f(std::integral_constant<int, N>{});
  if constexpr (N > 1) with_size<N - 1>(n, f);
}

// Cut a length into pieces of nearly equal size, none above TILE: f(first, integral_constant size).
template <typename F>
void in_tiles(int64_t length, F f) {
  const int64_t count = (length + TILE - 1) / TILE;
  for (int64_t i = 0, first = 0; i < count; ++i) {
    const int64_t size = (length - first + count - i - 1) / (count - i);
    with_size(size, [&](auto n) { f(first, n); });
    first += size;
  }
}

// A bias (h, 2s - 1) along an axis of L tokens.
struct Bias {
  const float *data;
  int64_t heads, reach, length;

  float at(int64_t head, int64_t distance) const {
    return head < heads && distance > -reach && distance < reach ? data[head * (2 * reach - 1) + reach - 1 + distance] : 0.0f;
  }

  // e^(w - largest of the head), (2L - 1, padded heads), by the distance from target to source.
  std::vector<float> weigh(int64_t padded_heads) const {
    std::vector<float> table((2 * length - 1) * padded_heads);
    for (int64_t first = 0; first < padded_heads; first += LANES) {
      const auto read = [&](int64_t i) {
        float x[LANES];
        for (int lane = 0; lane < LANES; ++lane) x[lane] = at(first + lane, i - (length - 1));
        return load(x, LANES);
      };
      // Finite, so that a head of minus infinity has no weights.
      Vec peak = splat(-std::numeric_limits<float>::max());
      for (int64_t i = 0; i < 2 * length - 1; ++i) {
        const Vec x = read(i);
        peak = x > peak ? x : peak;
      }
      for (int64_t i = 0; i < 2 * length - 1; ++i) store(&table[i * padded_heads + first], exp_(read(i) - peak), LANES);
    }
    return table;
  }
};

// Of each lane of a block of channels, the head.
struct Heads {
  int64_t first;
  bool same;  // a head for each channel
  int32_t head[LANES];

  Heads(int64_t channel, int64_t each, int64_t heads) : first(channel), same(each == 1) {
    for (int lane = 0; lane < LANES; ++lane) head[lane] = std::min((channel + lane) / each, heads - 1);
  }

  // From numbers of all heads.
  Vec read(const float *x) const {
    if (same) return load(x + first, LANES);
    if (head[0] == head[LANES - 1]) return splat(x[head[0]]);
    Vec found;
    for (int lane = 0; lane < LANES; ++lane) found[lane] = x[head[lane]];
    return found;
  }

  void add(float *x, Vec y, int lanes) const {
    if (same) return store(x + first, load(x + first, lanes) + y, lanes);
    for (int lane = 0; lane < lanes; ++lane) x[head[lane]] += y[lane];
  }
};

// The weights of the lanes of a block along both axes, and products with them.
struct Weights {
  const Shape &s;
  // By the distance from target to source, and from source to target.
  std::vector<Vec> rows, columns, turned_rows, turned_columns;

  Weights(const Shape &shape, const Heads &heads, const std::vector<float> &row_table, const std::vector<float> &column_table)
      : s(shape), rows(expand(heads, row_table)), columns(expand(heads, column_table)) {
    turned_rows.assign(rows.rbegin(), rows.rend());
    turned_columns.assign(columns.rbegin(), columns.rend());
  }

  std::vector<Vec> expand(const Heads &heads, const std::vector<float> &table) const {
    std::vector<Vec> found(table.size() / s.padded_heads());
    for (size_t i = 0; i < found.size(); ++i) found[i] = heads.read(&table[i * s.padded_heads()]);
    return found;
  }

  // A line (W) along columns.
  void along_columns(const Vec *x, const std::vector<Vec> &table, Vec *out) const {
    in_tiles(s.width, [&](int64_t first, auto n) {
      Vec sum[n] = {};
      const Vec *tap = &table[s.width - 1 - first];
      for (int64_t source = 0; source < s.width; ++source)
        for (int i = 0; i < n; ++i) sum[i] += tap[source - i] * x[source];
      for (int i = 0; i < n; ++i) out[first + i] = sum[i];
    });
  }

  // The row y of what maps (H, W) are along rows: f(token, sum).
  template <typename F>
  void along_rows(const Vec *x, const std::vector<Vec> &table, int64_t y, F f) const {
    const Vec *tap = &table[s.height - 1 - y];
    in_tiles(s.width, [&](int64_t first, auto n) {
      Vec sum[n] = {};
      for (int64_t source = 0; source < s.height; ++source)
        for (int i = 0; i < n; ++i) sum[i] += tap[source] * x[source * s.width + first + i];
      for (int i = 0; i < n; ++i) f(y * s.width + first + i, sum[i]);
    });
  }
};

// grad[L - 1 + source - target] += the sum over lines of g[target] * x[source], on an axis whose tokens are `step` apart.
void add_table_grad(const Vec *g, const Vec *x, int64_t length, int64_t step, int64_t lines, int64_t line, Vec *grad) {
  for (int64_t source = 0; source < length; ++source)
    in_tiles(length, [&](int64_t first, auto n) {
      Vec sum[n] = {};
      for (int64_t i = 0; i < lines; ++i)
        for (int j = 0; j < n; ++j) sum[j] += g[(first + j) * step + i * line] * x[source * step + i * line];
      for (int j = 0; j < n; ++j) grad[length - 1 + source - first - j] += sum[j];
    });
}

// e^(k - largest of the sequence) of a block of heads, 0 where the mask is, (T).
void exponentials(const Shape &s, const Stream &k, const Mask &mask, int64_t b, int64_t first, Vec *e) {
  const Place start{b, 0, first, rest(s.heads, first)};
  Vec peak = splat(-std::numeric_limits<float>::max());
  for (int64_t t = 0; t < s.tokens(); ++t) {
    if (!mask.counts(b, t)) continue;
    const Vec key = start.later(t).read(k);
    peak = key > peak ? key : peak;
  }
  for (int64_t t = 0; t < s.tokens(); ++t)
    e[t] = mask.counts(b, t) ? only(exp_(start.later(t).read(k) - peak), start.lanes) : Vec{};
}

struct Inputs {
  Shape s;
  Stream q, k, v;
  Mask mask;
  std::vector<float> rows, columns;
};

int forward(const Inputs &in, const Stream &out, const Stream &den, float least, int threads) {
  const Shape &s = in.s;
  const int64_t padded = s.padded_heads(), tokens = s.tokens();
  // Of e^k, and of the inverse denominators, (B, T, padded heads).
  std::vector<float> keys(s.batch * tokens * padded), inverse(keys.size());
  int good = 1;
  Region region;
#pragma omp parallel num_threads(threads) reduction(&& : good)
  {
    std::vector<Vec> e, half, line;
    region.run([&] {
      e.resize(tokens);
      half.resize(tokens);
      line.resize(s.width);
    });
#pragma omp for collapse(2)
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t block = 0; block < s.head_blocks(); ++block) region.run([&] {
        const int64_t first = block * LANES;
        const int lanes = rest(s.heads, first);
        const Weights weights(s, Heads(first, 1, s.heads), in.rows, in.columns);
        exponentials(s, in.k, in.mask, b, first, e.data());
        for (int64_t y = 0; y < s.height; ++y)
          weights.along_columns(&e[y * s.width], weights.columns, &half[y * s.width]);
        const float fill = in.mask.fill(b);
        for (int64_t y = 0; y < s.height; ++y)
          weights.along_rows(half.data(), weights.rows, y, [&](int64_t t, Vec bottom) {
            bottom += fill;
            good = good && !any(lost_lanes(bottom, lanes, least));
            const int64_t at = (b * tokens + t) * padded + first;
            store(&keys[at], e[t], LANES);
            store(&inverse[at], only(1.0f / bottom, lanes), LANES);
            if (den.data) Place{b, t, first, lanes}.write(den, bottom);
          });
      });
#pragma omp for collapse(2)
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t block = 0; block < s.blocks(); ++block) region.run([&] {
        const Place start{b, 0, block * LANES, rest(s.channels, block * LANES)};
        const Heads heads(start.channel, s.each(), s.heads);
        const Weights weights(s, heads, in.rows, in.columns);
        for (int64_t y = 0; y < s.height; ++y) {
          for (int64_t x = 0; x < s.width; ++x) {
            const int64_t t = y * s.width + x;
            line[x] = in.mask.counts(b, t) ? heads.read(&keys[(b * tokens + t) * padded]) * start.later(t).read(in.v) : Vec{};
          }
          weights.along_columns(line.data(), weights.columns, &half[y * s.width]);
        }
        for (int64_t y = 0; y < s.height; ++y)
          weights.along_rows(half.data(), weights.rows, y, [&](int64_t t, Vec num) {
            const Place at = start.later(t);
            at.write(out, gated(at, in.q, num * heads.read(&inverse[(b * tokens + t) * padded])));
          });
      });
  }
  region.finish();
  return good;
}


// Where the backward keeps what its phases share: for each token and head (padded), and for each token and channel.
struct Shared {
  std::vector<float> keys, d_keys, targets;  // e^k; the gradient at keys, and of e^k behind them; at values
  std::vector<float> d_rows, d_columns;      // of the tables, (parts, 2L - 1, padded heads)
};

class Backward {
 public:
  Backward(const Inputs &inputs, const Stream &grad, const Stream &y, const Stream &den, const Stream &dq, const Stream &dk,
           const Stream &dv, int64_t parts, bool need_bias)
      : in(inputs), s(inputs.s), grad(grad), y(y), den(den), dq(dq), dk(dk), dv(dv), parts(parts), need_bias(need_bias) {
    const int64_t padded = s.padded_heads();
    shared.keys.resize(s.batch * s.tokens() * padded);
    shared.d_keys.resize(shared.keys.size());
    shared.targets.resize(s.batch * s.tokens() * s.padded_channels());
    shared.d_rows.resize(need_bias ? parts * (2 * s.height - 1) * padded : 0);
    shared.d_columns.resize(need_bias ? parts * (2 * s.width - 1) * padded : 0);
  }

  int run(float least, int threads) {
    int good = 1;
    Region region;
#pragma omp parallel num_threads(threads) reduction(&& : good)
    {
      std::vector<Vec> maps[5];
      std::vector<float> inverse;
      region.run([&] {
        for (auto &x : maps) x.resize(s.tokens());
        inverse.resize(s.padded_heads());
      });
#pragma omp for collapse(2)
      for (int64_t b = 0; b < s.batch; ++b)
        for (int64_t t = 0; t < s.tokens(); ++t) region.run([&] { good = good && spread(b, t, least, inverse.data()); });
#pragma omp for collapse(2)
      for (int64_t part = 0; part < parts; ++part)
        for (int64_t block = 0; block < s.head_blocks(); ++block) region.run([&] { mix_keys(part, block * LANES, maps); });
#pragma omp for collapse(2)
      for (int64_t part = 0; part < parts; ++part)
        for (int64_t unit = 0; unit < s.units(); ++unit) region.run([&] { mix_values(part, unit * s.unit(), maps); });
    }
    region.finish();
    return good;
  }

  // Of a bias (h, 2s - 1), from that of its table and the table.
  void write_bias_grad(const std::vector<float> &d_table, const std::vector<float> &table, const Bias &bias, float *out) const {
    const int64_t padded = s.padded_heads(), rows = 2 * bias.length - 1;
    for (int64_t head = 0; head < s.heads; ++head)
      for (int64_t i = 0; i < 2 * bias.reach - 1; ++i) {
        const int64_t row = i - bias.reach + bias.length;
        float sum = 0;
        if (row >= 0 && row < rows)
          for (int64_t part = 0; part < parts; ++part) sum += d_table[(part * rows + row) * padded + head];
        out[head * (2 * bias.reach - 1) + i] = sum ? sum * table[row * padded + head] : 0.0f;
      }
  }

  Shared shared;

 private:
  // The gradients at the values and keys of a target, and that of q; whether no denominator is lost.
  bool spread(int64_t b, int64_t t, float least, float *inverse) {
    bool good = true;
    for (int64_t first = 0; first < s.heads; first += LANES) {
      const Place at{b, t, first, rest(s.heads, first)};
      const Vec bottom = at.read(den);
      good = good && !any(lost_lanes(bottom, at.lanes, least));
      store(inverse + first, only(1.0f / bottom, at.lanes), LANES);
    }
    float *d_key = &shared.d_keys[(b * s.tokens() + t) * s.padded_heads()];
    float *target = &shared.targets[(b * s.tokens() + t) * s.padded_channels()];
    for (int64_t first = 0; first < s.channels; first += LANES) {
      const Place at{b, t, first, rest(s.channels, first)};
      const Heads heads(first, s.each(), s.heads);
      const Spread spread(at, grad, y, in.q, dq);
      const Vec top = heads.read(inverse);
      store(target + first, only(spread.a * top, at.lanes), LANES);
      heads.add(d_key, -spread.go * top, at.lanes);
    }
    return good;
  }

  // What the sequences of a part and a block of heads get through the denominators.
  void mix_keys(int64_t part, int64_t first, std::vector<Vec> *maps) {
    Vec *e = maps[0].data(), *target = maps[1].data(), *d_key = maps[4].data();
    const Weights weights(s, Heads(first, 1, s.heads), in.rows, in.columns);
    TableGrads grads(*this);
    for (int64_t b = part * s.batch / parts; b < (part + 1) * s.batch / parts; ++b) {
      exponentials(s, in.k, in.mask, b, first, e);
      float *keys = &shared.keys[b * s.tokens() * s.padded_heads() + first];
      float *d_keys = &shared.d_keys[b * s.tokens() * s.padded_heads() + first];
      for (int64_t t = 0; t < s.tokens(); ++t) {
        store(keys + t * s.padded_heads(), e[t], LANES);
        target[t] = load(d_keys + t * s.padded_heads(), LANES);
      }
      transpose(weights, target, e, maps[2].data(), maps[3].data(), d_key, grads);
      for (int64_t t = 0; t < s.tokens(); ++t) store(d_keys + t * s.padded_heads(), d_key[t], LANES);
    }
    grads.add_to(part, Heads(first, 1, s.heads), rest(s.heads, first));
  }

  // The gradients of v and k of some heads from `first_head` on.
  void mix_values(int64_t part, int64_t first_head, std::vector<Vec> *maps) {
    const int64_t last_head = std::min(s.heads, first_head + s.unit());
    for (int64_t first = first_head * s.each(); first < last_head * s.each(); first += LANES) {
      const Heads heads(first, s.each(), s.heads);
      const Weights weights(s, heads, in.rows, in.columns);
      TableGrads grads(*this);
      for (int64_t b = part * s.batch / parts; b < (part + 1) * s.batch / parts; ++b)
        mix_block(b, first, heads, weights, grads, maps);
      grads.add_to(part, heads, rest(s.channels, first));
    }
    for (int64_t b = part * s.batch / parts; b < (part + 1) * s.batch / parts; ++b)
      for (int64_t t = 0; t < s.tokens(); ++t) {
        const int64_t row = (b * s.tokens() + t) * s.padded_heads();
        for (int64_t first = first_head; first < last_head; first += LANES) {
          const Place at{b, t, first, rest(last_head, first)};
          at.write(dk, load(&shared.keys[row + first], at.lanes) * load(&shared.d_keys[row + first], at.lanes));
        }
      }
  }

  struct TableGrads;

  void mix_block(int64_t b, int64_t first, const Heads &heads, const Weights &weights, TableGrads &grads,
                 std::vector<Vec> *maps) {
    Vec *value = maps[0].data(), *target = maps[1].data(), *d_value = maps[4].data();
    const Place start{b, 0, first, rest(s.channels, first)};
    const float *keys = &shared.keys[b * s.tokens() * s.padded_heads()];
    float *d_keys = &shared.d_keys[b * s.tokens() * s.padded_heads()];
    for (int64_t t = 0; t < s.tokens(); ++t) {
      value[t] = in.mask.counts(b, t) ? heads.read(keys + t * s.padded_heads()) * start.later(t).read(in.v) : Vec{};
      target[t] = load(&shared.targets[(b * s.tokens() + t) * s.padded_channels() + first], LANES);
    }
    transpose(weights, target, value, maps[2].data(), maps[3].data(), d_value, grads);
    for (int64_t t = 0; t < s.tokens(); ++t) {
      const Place at = start.later(t);
      at.write(dv, d_value[t] * heads.read(keys + t * s.padded_heads()));
      if (in.mask.counts(b, t)) heads.add(d_keys + t * s.padded_heads(), d_value[t] * at.read(in.v), at.lanes);
    }
  }

  // The gradients of both tables, of the lanes of a block.
  struct TableGrads {
    Backward &all;
    std::vector<Vec> rows, columns;

    explicit TableGrads(Backward &backward) : all(backward) {
      if (!all.need_bias) return;
      rows.resize(2 * all.s.height - 1);
      columns.resize(2 * all.s.width - 1);
    }

    // To those of the heads of a part, which no other thread has.
    void add_to(int64_t part, const Heads &heads, int lanes) const {
      const int64_t padded = all.s.padded_heads();
      for (size_t i = 0; i < rows.size(); ++i)
        heads.add(&all.shared.d_rows[(part * rows.size() + i) * padded], rows[i], lanes);
      for (size_t i = 0; i < columns.size(); ++i)
        heads.add(&all.shared.d_columns[(part * columns.size() + i) * padded], columns[i], lanes);
    }
  };

  // d_source = W^T target, and the gradients of the tables at `source`.
  void transpose(const Weights &weights, const Vec *target, const Vec *source, Vec *half, Vec *mixed, Vec *d_source,
                 TableGrads &grads) const {
    for (int64_t y = 0; y < s.height; ++y)
      weights.along_rows(target, weights.turned_rows, y, [&](int64_t t, Vec sum) { half[t] = sum; });
    for (int64_t y = 0; y < s.height; ++y) {
      const int64_t row = y * s.width;
      weights.along_columns(half + row, weights.turned_columns, d_source + row);
      if (need_bias) weights.along_columns(source + row, weights.columns, mixed + row);
    }
    if (!need_bias) return;
    add_table_grad(half, source, s.width, 1, s.height, s.width, grads.columns.data());
    add_table_grad(target, mixed, s.height, s.width, s.width, 1, grads.rows.data());
  }

  const Inputs &in;
  const Shape &s;
  const Stream &grad, &y, &den, &dq, &dk, &dv;
  const int64_t parts;
  const bool need_bias;
};

// Sizes as Python gives them: B, H, W, D, h, and the s of both biases.
struct Call {
  Shape s;
  Bias row_bias, column_bias;
  Inputs in;

  Call(const int64_t *sizes, const float *rows, const float *columns, Stream q, Stream k, Stream v, const bool *mask)
      : s{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]},
        row_bias{rows, s.heads, sizes[5], s.height},
        column_bias{columns, s.heads, sizes[6], s.width},
        in{s, q, k, v, {mask, s.tokens()}, row_bias.weigh(s.padded_heads()), column_bias.weigh(s.padded_heads())} {}
};

}  // namespace

extern "C" {

// y and, unless den has no data, the denominators, at the references of keys and biases. `sizes` are B, H, W, D, h, and
// the s of the biases (h, 2s - 1). q and mask may be null. Returns 0 where a denominator has lost digits: the result is
// to be thrown away.
int aft_axial_forward(const int64_t *sizes, const float *row_bias, const float *column_bias, Stream q, Stream k, Stream v,
                      const bool *mask, Stream out, Stream den, float least, int threads) {
  return guarded([&] {
    const Call call(sizes, row_bias, column_bias, q, k, v, mask);
    return forward(call.in, out, den, least, threads);
  });
}

// Gradients of q, k, v and, unless they are null, of both biases. Returns 0 as the forward does.
int aft_axial_backward(const int64_t *sizes, const float *row_bias, const float *column_bias, Stream grad, Stream y,
                       Stream den, Stream q, Stream k, Stream v, const bool *mask, Stream dq, Stream dk, Stream dv,
                       float *d_row_bias, float *d_column_bias, float least, int threads) {
  return guarded([&] {
    const Call call(sizes, row_bias, column_bias, q, k, v, mask);
    // So many that threads end together.
    const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(call.s.batch, (4 * threads - 1) / call.s.units() + 1));
    Backward backward(call.in, grad, y, den, dq, dk, dv, parts, d_row_bias);
    const int good = backward.run(least, threads);
    if (d_row_bias) {
      backward.write_bias_grad(backward.shared.d_rows, call.in.rows, call.row_bias, d_row_bias);
      backward.write_bias_grad(backward.shared.d_columns, call.in.columns, call.column_bias, d_column_bias);
    }
    return good;
  });
}
}
