// AFT-axial: the exponentials of keys and values mixed along columns, then along rows, a block of channels at a time.
//
// A block is as many neighbouring channels as a vector has lanes, each with the weights of its head, so nothing is
// transposed, whatever the number of heads. The denominators are those of blocks of heads. Distances without a bias
// have one weight, which multiplies the sums of their tokens: nothing is subtracted.

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "../common/guard.h"
#include "../common/tensor.h"

namespace {

// Targets, or sources, of an axis and lines next to each other whose sums the registers hold.
constexpr int ALONG = 4;
#if defined(__AVX512F__)
constexpr int ACROSS = 6;
#else
constexpr int ACROSS = 2;
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

// A bias (h, 2s - 1) along an axis of L tokens.
struct Bias {
  const float *data;
  int64_t heads, reach, length;

  float at(int64_t head, int64_t distance) const {
    const bool learned = head < heads && distance > -reach && distance < reach;
    return learned ? data[head * (2 * reach - 1) + reach - 1 + distance] : 0.0f;
  }

  // e^(w - largest of the head), (2L - 1, padded heads), by the distance from target to source.
  std::vector<float> weigh(int64_t padded_heads) const {
    std::vector<float> table((2 * length - 1) * padded_heads + LANES);
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

// The weights of all heads along both axes, (2L - 1, padded heads), and the s of their biases.
struct Tables {
  std::vector<float> rows, columns;
  int64_t row_reach, column_reach;
};

// The lines of maps (H, W) along one axis: the distances between the tokens of a line, and between lines.
struct Lines {
  int64_t length, step, count, line_stride;
};

// The weights of the lanes of a block along one axis, by the distance from target to source, and from source to target.
struct Axis {
  Lines lines;
  int64_t reach;  // all distances from this one on have the same weight
  std::vector<Vec> table, turned;

  Axis(const Lines &lines, int64_t reach, const Heads &heads, const std::vector<float> &weights, int64_t padded_heads)
      : lines(lines), reach(std::min(reach, lines.length)), table(2 * lines.length - 1) {
    for (size_t i = 0; i < table.size(); ++i) table[i] = heads.read(&weights[i * padded_heads]);
    turned.assign(table.rbegin(), table.rend());
  }

  // The sources within reach of any of some targets.
  int64_t low(int64_t target) const { return std::max<int64_t>(0, target - reach + 1); }
  int64_t high(int64_t target, int64_t count) const { return std::min(lines.length, target + count - 1 + reach); }

  // The weighted sum over the sources of each target, by the table or by the turned one.
  void mix(const Vec *x, const std::vector<Vec> &weights, Vec *out) const {
    std::vector<Vec> after;
    in_tiles<ACROSS>(lines.count, [&](int64_t line, auto count) {
      mix_lines<decltype(count)::value>(x + line * lines.line_stride, weights, after, out + line * lines.line_stride);
    });
  }

  // grad[L - 1 + source - target] += the sum over lines of g[target] * x[source], for distances within reach at least.
  void add_table_grad(const Vec *g, const Vec *x, Vec *grad) const {
    in_tiles<ALONG>(lines.length, [&](int64_t source, auto sources) {
      constexpr int M = decltype(sources)::value;
      const int64_t first = low(source);
      in_tiles<ACROSS>(high(source, M) - first, [&](int64_t place, auto targets) {
        constexpr int N = decltype(targets)::value;
        const int64_t target = first + place;
        Vec *own = grad + lines.length - 1 + source - target;
        add_tile_grad<M, N>(g + target * lines.step, x + source * lines.step, own);
      });
    });
  }

 private:
  // N neighbouring lines from x on. `after` keeps, for each tile, the sum of the sources after those within reach.
  template <int N>
  void mix_lines(const Vec *x, const std::vector<Vec> &weights, std::vector<Vec> &after, Vec *out) const {
    const int64_t tiles = (lines.length + ALONG - 1) / ALONG;
    const bool whole = reach == lines.length;
    Vec before[N] = {}, last[N] = {};
    if (!whole) {
      after.resize(tiles * N);
      for (int64_t tile = tiles - 1, end = lines.length; tile >= 0; --tile) {
        add_sources<N>(x, high(tile * ALONG, ALONG), end, last);
        end = high(tile * ALONG, ALONG);
        std::copy_n(last, N, &after[tile * N]);
      }
    }
    for (int64_t tile = 0, seen = 0; tile < tiles; ++tile) {
      const int64_t target = tile * ALONG;
      Vec beyond[N] = {};
      if (!whole) {
        add_sources<N>(x, seen, low(target), before);
        seen = low(target);
        for (int i = 0; i < N; ++i) beyond[i] = table[0] * (before[i] + after[tile * N + i]);
      }
      with_size<ALONG>(std::min<int64_t>(ALONG, lines.length - target), [&](auto targets) {
        constexpr int M = decltype(targets)::value;
        const Vec *tap = &weights[lines.length - 1 - target];
        mix_tile<M, N>(x, tap, low(target), high(target, ALONG), beyond, out + target * lines.step);
      });
    }
  }

  template <int N>
  void add_sources(const Vec *x, int64_t first, int64_t last, Vec *sum) const {
    for (int64_t source = first; source < last; ++source)
      for (int i = 0; i < N; ++i) sum[i] += x[source * lines.step + i * lines.line_stride];
  }

  template <int M, int N>
  void mix_tile(const Vec *x, const Vec *tap, int64_t first, int64_t last, const Vec *beyond, Vec *out) const {
    const int64_t step = lines.step, line_stride = lines.line_stride;
    Vec sum[M][N];
    for (int j = 0; j < M; ++j)
      for (int i = 0; i < N; ++i) sum[j][i] = beyond[i];
    for (int64_t source = first; source < last; ++source)
      for (int i = 0; i < N; ++i) {
        const Vec value = x[source * step + i * line_stride];
        for (int j = 0; j < M; ++j) sum[j][i] += tap[source - j] * value;
      }
    for (int j = 0; j < M; ++j)
      for (int i = 0; i < N; ++i) out[j * step + i * line_stride] = sum[j][i];
  }

  template <int M, int N>
  void add_tile_grad(const Vec *g, const Vec *x, Vec *grad) const {
    const int64_t step = lines.step, line_stride = lines.line_stride;
    Vec sum[M][N] = {};
    for (int64_t line = 0; line < lines.count; ++line)
      for (int i = 0; i < N; ++i) {
        const Vec value = g[i * step + line * line_stride];
        for (int j = 0; j < M; ++j) sum[j][i] += value * x[j * step + line * line_stride];
      }
    for (int j = 0; j < M; ++j)
      for (int i = 0; i < N; ++i) grad[j - i] += sum[j][i];
  }
};

// The weights of both axes for the lanes of a block.
struct Weights {
  Axis rows, columns;

  Weights(const Shape &s, const Heads &heads, const Tables &tables)
      : rows({s.height, s.width, s.width, 1}, tables.row_reach, heads, tables.rows, s.padded_heads()),
        columns({s.width, 1, s.height, s.width}, tables.column_reach, heads, tables.columns, s.padded_heads()) {}

  // The weighted sum over the sources of each target takes their place.
  void mix(Vec *maps, Vec *half) const {
    columns.mix(maps, columns.table, half);
    rows.mix(half, rows.table, maps);
  }
};

// e^(k - largest of the sequence) of a block of heads, 0 where the mask is, (T).
void exponentials(const Shape &s, const Stream &k, const Mask &mask, int64_t b, int64_t first, Vec *e) {
  const Place start{b, 0, first, rest(s.heads, first)};
  const Vec peak = largest_keys(start, k, mask);
  for (int64_t t = 0; t < s.tokens(); ++t)
    e[t] = mask.counts(b, t) ? only(exp_(start.later(t).read(k) - peak), start.lanes) : Vec{};
}

struct Inputs {
  Shape s;
  Stream q, k, v;
  Mask mask;
  Tables tables;
};

int forward(const Inputs &in, const Stream &out, const Stream &den, float least, int threads) {
  const Shape &s = in.s;
  const int64_t padded = s.padded_heads(), tokens = s.tokens();
  // Strides of e^k and of the inverse denominators, (B, T, padded heads).
  std::vector<float> keys(s.batch * tokens * padded + LANES), inverse(keys.size());
  int good = 1;
  Region region;
#pragma omp parallel num_threads(threads) reduction(&& : good)
  {
    std::vector<Vec> maps, half;
    region.run([&] {
      maps.resize(tokens);
      half.resize(tokens);
    });
#pragma omp for collapse(2)
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t block = 0; block < s.head_blocks(); ++block) region.run([&] {
        const int64_t first = block * LANES;
        const int lanes = rest(s.heads, first);
        const Weights weights(s, Heads(first, 1, s.heads), in.tables);
        exponentials(s, in.k, in.mask, b, first, maps.data());
        for (int64_t t = 0; t < tokens; ++t) store(&keys[(b * tokens + t) * padded + first], maps[t], LANES);
        weights.mix(maps.data(), half.data());
        const float fill = in.mask.fill(b);
        for (int64_t t = 0; t < tokens; ++t) {
          const Vec denominator = maps[t] + fill;
          good = good && !any(underflowed_lanes(denominator, lanes, least));
          store(&inverse[(b * tokens + t) * padded + first], only(1.0f / denominator, lanes), LANES);
          if (den.data) Place{b, t, first, lanes}.write(den, denominator);
        }
      });
#pragma omp for collapse(2)
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t block = 0; block < s.blocks(); ++block) region.run([&] {
        const Place start{b, 0, block * LANES, rest(s.channels, block * LANES)};
        const Heads heads(start.channel, s.each(), s.heads);
        const Weights weights(s, heads, in.tables);
        for (int64_t t = 0; t < tokens; ++t) {
          const Vec key = heads.read(&keys[(b * tokens + t) * padded]);
          maps[t] = in.mask.counts(b, t) ? key * start.later(t).read(in.v) : Vec{};
        }
        weights.mix(maps.data(), half.data());
        for (int64_t t = 0; t < tokens; ++t) {
          const Place at = start.later(t);
          at.write(out, gated(at, in.q, maps[t] * heads.read(&inverse[(b * tokens + t) * padded])));
        }
      });
  }
  region.finish();
  return good;
}

// Buffers that the phases of the backward share: for each token and head (padded), and for each token and channel.
struct Shared {
  std::vector<float> keys, d_keys, targets;  // e^k; the gradient at keys, then of e^k; at values
  std::vector<float> d_rows, d_columns;      // gradients of the tables, (slices, 2L - 1, padded heads)
};

class Backward {
 public:
  Backward(const Inputs &inputs, const Stream &grad, const Stream &y, const Stream &den, const Stream &dq,
           const Stream &dk, const Stream &dv, int64_t slices, bool need_bias)
      : in(inputs),
        s(inputs.s),
        grad(grad),
        y(y),
        den(den),
        dq(dq),
        dk(dk),
        dv(dv),
        slices(slices),
        need_bias(need_bias) {
    const int64_t padded = s.padded_heads();
    shared.keys.resize(s.batch * s.tokens() * padded + LANES);
    shared.d_keys.resize(shared.keys.size());
    shared.targets.resize(s.batch * s.tokens() * s.padded_channels());
    shared.d_rows.resize(need_bias ? slices * (2 * s.height - 1) * padded : 0);
    shared.d_columns.resize(need_bias ? slices * (2 * s.width - 1) * padded : 0);
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
        inverse.resize(s.padded_heads() + LANES);
      });
#pragma omp for collapse(2)
      for (int64_t b = 0; b < s.batch; ++b)
        for (int64_t t = 0; t < s.tokens(); ++t)
          region.run([&] { good = good && spread(b, t, least, inverse.data()); });
#pragma omp for collapse(2)
      for (int64_t slice = 0; slice < slices; ++slice)
        for (int64_t block = 0; block < s.head_blocks(); ++block)
          region.run([&] { mix_keys(slice, block * LANES, maps); });
#pragma omp for collapse(2)
      for (int64_t slice = 0; slice < slices; ++slice)
        for (int64_t unit = 0; unit < s.units(); ++unit) region.run([&] { mix_values(slice, unit * s.unit(), maps); });
    }
    region.finish();
    return good;
  }

  // The gradient of a bias (h, 2s - 1), from its table and the gradient of that.
  void write_bias_grad(const std::vector<float> &d_table, const std::vector<float> &table, const Bias &bias,
                       float *out) const {
    const int64_t padded = s.padded_heads(), rows = 2 * bias.length - 1;
    for (int64_t head = 0; head < s.heads; ++head)
      for (int64_t i = 0; i < 2 * bias.reach - 1; ++i) {
        const int64_t row = i - bias.reach + bias.length;
        float sum = 0;
        if (row >= 0 && row < rows)
          for (int64_t slice = 0; slice < slices; ++slice) sum += d_table[(slice * rows + row) * padded + head];
        out[head * (2 * bias.reach - 1) + i] = sum ? sum * table[row * padded + head] : 0.0f;
      }
  }

  Shared shared;

 private:
  // The gradients at the values and keys of a target, and that of q; whether no denominator is underflowed.
  bool spread(int64_t b, int64_t t, float least, float *inverse) {
    bool good = true;
    for (int64_t first = 0; first < s.heads; first += LANES) {
      const Place at{b, t, first, rest(s.heads, first)};
      const Vec denominator = at.read(den);
      good = good && !any(underflowed_lanes(denominator, at.lanes, least));
      store(inverse + first, only(1.0f / denominator, at.lanes), LANES);
    }
    float *d_key = &shared.d_keys[(b * s.tokens() + t) * s.padded_heads()];
    float *target = &shared.targets[(b * s.tokens() + t) * s.padded_channels()];
    for (int64_t first = 0; first < s.channels; first += LANES) {
      const Place at{b, t, first, rest(s.channels, first)};
      const Heads heads(first, s.each(), s.heads);
      const Spread spread(at, grad, y, in.q, dq);
      const Vec inverse_denominator = heads.read(inverse);
      store(target + first, only(spread.a * inverse_denominator, at.lanes), LANES);
      heads.add(d_key, -spread.go * inverse_denominator, at.lanes);
    }
    return good;
  }

  // The gradients that the sequences of a slice and a block of heads get through the denominators.
  void mix_keys(int64_t slice, int64_t first, std::vector<Vec> *maps) {
    Vec *e = maps[0].data(), *target = maps[1].data(), *d_key = maps[4].data();
    const Weights weights(s, Heads(first, 1, s.heads), in.tables);
    TableGrads grads(*this);
    for (int64_t b = slice * s.batch / slices; b < (slice + 1) * s.batch / slices; ++b) {
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
    grads.add_to(slice, Heads(first, 1, s.heads), rest(s.heads, first));
  }

  // The gradients of v and k of some heads from `first_head` on.
  void mix_values(int64_t slice, int64_t first_head, std::vector<Vec> *maps) {
    const int64_t last_head = std::min(s.heads, first_head + s.unit());
    for (int64_t first = first_head * s.each(); first < last_head * s.each(); first += LANES) {
      const Heads heads(first, s.each(), s.heads);
      const Weights weights(s, heads, in.tables);
      TableGrads grads(*this);
      for (int64_t b = slice * s.batch / slices; b < (slice + 1) * s.batch / slices; ++b)
        mix_block(b, first, heads, weights, grads, maps);
      grads.add_to(slice, heads, rest(s.channels, first));
    }
    for (int64_t b = slice * s.batch / slices; b < (slice + 1) * s.batch / slices; ++b)
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

    // Add them to those of the heads of a slice, which no other thread has.
    void add_to(int64_t slice, const Heads &heads, int lanes) const {
      const int64_t padded = all.s.padded_heads();
      for (size_t i = 0; i < rows.size(); ++i)
        heads.add(&all.shared.d_rows[(slice * rows.size() + i) * padded], rows[i], lanes);
      for (size_t i = 0; i < columns.size(); ++i)
        heads.add(&all.shared.d_columns[(slice * columns.size() + i) * padded], columns[i], lanes);
    }
  };

  // d_source = W^T target, and the gradients of the tables at `source`.
  void transpose(const Weights &weights, const Vec *target, const Vec *source, Vec *half, Vec *mixed, Vec *d_source,
                 TableGrads &grads) const {
    weights.rows.mix(target, weights.rows.turned, half);
    weights.columns.mix(half, weights.columns.turned, d_source);
    if (!need_bias) return;
    weights.columns.mix(source, weights.columns.table, mixed);
    weights.columns.add_table_grad(half, source, grads.columns.data());
    weights.rows.add_table_grad(target, mixed, grads.rows.data());
  }

  const Inputs &in;
  const Shape &s;
  const Stream &grad, &y, &den, &dq, &dk, &dv;
  const int64_t slices;
  const bool need_bias;
};

// The inputs of a call, as Python packs them: s of the biases (h, 2s - 1), and q and mask, which may be null.
struct Packed {
  int64_t batch, height, width, channels, heads, row_reach, column_reach;
  const float *row_bias, *column_bias;
  Stream q, k, v;
  const bool *mask;
};

struct ForwardCall {
  Packed packed;
  Stream out, den;
};

struct BackwardCall {
  Packed packed;
  Stream grad, y, den, dq, dk, dv;
  float *d_row_bias, *d_column_bias;
};

struct Call {
  Shape s;
  Bias row_bias, column_bias;
  Inputs in;

  explicit Call(const Packed &p)
      : s{p.batch, p.height, p.width, p.channels, p.heads},
        row_bias{p.row_bias, s.heads, p.row_reach, s.height},
        column_bias{p.column_bias, s.heads, p.column_reach, s.width},
        in{s,
           p.q,
           p.k,
           p.v,
           {p.mask, s.tokens()},
           {row_bias.weigh(s.padded_heads()), column_bias.weigh(s.padded_heads()), p.row_reach, p.column_reach}} {}
};

}  // namespace

extern "C" {

AFT_PACKED(aft_axial_forward, ForwardCall)
AFT_PACKED(aft_axial_backward, BackwardCall)

// y and, unless den has no data, the denominators, at the references of keys and biases. Returns 0 where a denominator
// has lost digits: discard the result.
int aft_axial_forward(const ForwardCall *packed, float least, int threads) {
  return guarded([&] { return forward(Call(packed->packed).in, packed->out, packed->den, least, threads); });
}

// Gradients of q, k, v and, unless they are null, of both biases. Returns 0 as the forward does.
int aft_axial_backward(const BackwardCall *packed, float least, int threads) {
  return guarded([&] {
    const auto &[inputs, grad, y, den, dq, dk, dv, d_row_bias, d_column_bias] = *packed;
    const Call call(inputs);
    // Enough slices that the threads end together.
    const int64_t slices = std::max<int64_t>(1, std::min<int64_t>(call.s.batch, (4 * threads - 1) / call.s.units() + 1));
    Backward backward(call.in, grad, y, den, dq, dk, dv, slices, d_row_bias);
    const int good = backward.run(least, threads);
    if (d_row_bias) {
      backward.write_bias_grad(backward.shared.d_rows, call.in.tables.rows, call.row_bias, d_row_bias);
      backward.write_bias_grad(backward.shared.d_columns, call.in.tables.columns, call.column_bias, d_column_bias);
    }
    return good;
  });
}
}
