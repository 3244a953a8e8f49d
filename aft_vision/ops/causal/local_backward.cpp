// The gradients of AFT-local with the sums up to each token: blocks of targets, last to first.
//
// A source's gradient is complete with the block that it is in. Those of the sources before that block wait in a ring,
// at the reference of the block, as do the exponentials that the gradient of the band is a product of.

#include <cmath>
#include <optional>

#include "local.h"

namespace {

// out[i * stride + j] = the products of row i of x and row j of y.
template <class P>
__attribute__((noinline)) void multiply_rows(const Vec *x, const Vec *y, int64_t length, int64_t row, float *out,
                                             int64_t stride) {
  constexpr int TARGETS = P::TARGETS, SOURCES = P::SOURCES;
  Vec sums[TARGETS][SOURCES] = {};
  for (int64_t n = 0; n < length; ++n)
    for (int i = 0; i < TARGETS; ++i)
      for (int j = 0; j < SOURCES; ++j) sums[i][j] = P::add(sums[i][j], x[i * row + n], y[j * row + n]);
  for (int i = 0; i < TARGETS; ++i)
    for (int j = 0; j < SOURCES; ++j) out[i * stride + j] = total(sums[i][j]);
}

// An item on its way back through the blocks.
struct Walk {
  Item item;
  std::vector<Vec> references;
  Vec reference;
  Pair d_state;
  std::vector<Pair> waiting;  // gradients of the exponentials of sources in the window, a ring
  int64_t added;              // sources from here on have had a part of their gradients

  Walk(const Source &source, int64_t index, int64_t ring)
      : item(source.s, index), d_state{}, waiting(ring), added(source.s.tokens) {
    Reference moving(source, item);
    for (int64_t t = 0; t < source.s.tokens; t += source.s.step) {
      moving.move(source, item, t, std::min(t + source.s.step, source.s.tokens));
      references.push_back(moving.value);
    }
    reference = references.back();
  }
};

// The state of a thread for an item's block: the gradients of its targets' sums, and sums of them from each target on, as
// sources before the window have them.
struct Scratch {
  std::vector<Pair> terms, later;

  Scratch(int64_t step, int64_t after) : terms(step), later(step + 1 + after) {}
};

template <class P>
struct Backward {
  static constexpr int TARGETS = P::TARGETS, SOURCES = P::SOURCES;

  const Shape &s;
  const Source &source;
  Weights<P> w;
  Stream grad, y, den, q, dq, dk, dv;
  float *dband;
  float underflow;
  // The block, the first source of its windows and of those of the block after it.
  int64_t start = 0, stop = 0, low = 0, after = 0;
  int64_t ring = 0, row = 0;  // vectors of a row of `rows` and `entries`
  Packed<P> packed = {};
  // [values | keys] of all items: (step, row) and, a ring, (sources, row), in tiles (sources / LANES, row, LANES).
  std::vector<Vec> rows = {}, entries = {};

  void prepare() {
    ring = (s.window - 1 + s.step + 2 * SOURCES - 1) / SOURCES * SOURCES;
    // Rows a power of two apart would all take one place of the cache.
    row = P::VECTORS * s.items() + 1;
    if (dband) {
      rows.resize((s.step + TARGETS) * row);
      entries.resize(ring * row);
    }
  }

  void plan(int64_t from) {
    after = low;
    start = from;
    w.move(start);
    stop = std::min(start + s.step, s.tokens);
    if (stop == s.tokens) after = stop;
    low = std::max<int64_t>(0, start - s.window + 1);
    packed.plan(low, stop, [&](int64_t j, int64_t n) {
      const int64_t first = std::max(start, j), last = std::min(stop, j + n - 1 + s.window);
      return std::pair(start + round_down<P>(first - start), start + round_up<P>(last - start));
    });
  }

  bool run(Walk &x, int64_t index, Scratch &scratch) {
    const bool good = differentiate(x.item, index, scratch);
    enter(x, index);
    x.d_state += scratch.later[0];
    for (const Tile &tile : packed.tiles) {
      Pair found[P::HEIGHT];
      std::fill_n(found, tile.size, scratch.later[tile.end - start]);
      packed.mix(tile, scratch.terms.data() + (tile.begin - start) / P::TERMS, found);
      int64_t slot = tile.first % ring;
      for (int64_t i = 0; i < tile.size; ++i) {
        x.waiting[slot] += found[i];
        if (++slot == ring) slot = 0;
      }
    }
    add(x, start);
    return good;
  }

  // Whether no denominator of the block is below the limit.
  bool differentiate(const Item &item, int64_t index, Scratch &scratch) {
    const int64_t count = stop - start;
    scratch.later[count] = scratch.later[count + 1] = Pair{};
    Pair next{};
    Vec least = splat(std::numeric_limits<float>::max());
    for (int64_t t = stop - 1; t >= start; --t) {
      const Vec g = item.read(grad, t), go = g * item.read(y, t), denominator = item.read(den, t);
      least = denominator < least ? denominator : least;
      const Vec inverse = denominator < splat(underflow) ? Vec{} : 1.0f / denominator;
      Vec a = g;
      if (q.data) {
        const Vec gate = sigmoid(item.read(q, t));
        a *= gate;
        item.write(dq, t, go - go * gate);
      }
      const Pair r{a * inverse, -go * inverse};
      if ((t - start) % P::TERMS == 0) scratch.terms[(t - start) / P::TERMS] = P::pack(r, next);
      next = r;
      scratch.later[t - start] = w.older(t) * r;
      scratch.later[t - start] += scratch.later[t - start + 1];
      if (dband) P::keep(&rows[(t - start) * row + P::VECTORS * index], r);
    }
    bool good = true;
    for (int lane = 0; lane < item.lanes; ++lane) good = good && least[lane] >= underflow;
    return good;
  }

  // Move to the block's reference, and add the sources that the block after it had before its windows.
  void enter(Walk &x, int64_t index) {
    const Vec moved = x.references[start / s.step];
    const bool again = any(moved != x.reference);
    if (again) {
      add(x, after);
      x.added = after;
      // In two halves: the factor may vanish where the gradients are large.
      const Vec half = exp_(0.5f * (moved - x.reference));
      x.d_state *= half;
      x.d_state *= half;
      x.reference = moved;
    }
    for (int64_t t = low; t < (again ? stop : after); ++t) {
      x.waiting[t % ring] = t < after ? x.d_state : Pair{};
      if (!dband) continue;
      keep_entry(t % ring, index, source.entry(x.item, t, x.reference));
    }
  }

  void keep_entry(int64_t slot, int64_t index, const Pair &x) {
    if constexpr (TILED<P>) {
      const Vec packed = join(x.values, x.keys);
      Vec *to = tile_of(slot) + index * LANES;
      for (int lane = 0; lane < LANES; ++lane) to[lane][slot % LANES] = packed[lane];
    } else {
      P::keep(&entries[slot * row + P::VECTORS * index], x);
    }
  }

  // Return the n'th vector of an entry.
  Vec entry(int64_t slot, int64_t n) const {
    if constexpr (!TILED<P>) return entries[slot * row + n];
    Vec x;
    for (int lane = 0; lane < LANES; ++lane) x[lane] = tile_of(slot)[n * LANES + lane][slot % LANES];
    return x;
  }

  Vec *tile_of(int64_t slot) { return &entries[slot / LANES * row * LANES]; }
  const Vec *tile_of(int64_t slot) const { return &entries[slot / LANES * row * LANES]; }

  // Give sources of the block from `first` on, or of the window before it, the gradients that wait for them.
  void add(const Walk &x, int64_t first) const {
    for (int64_t t = first; t < stop; ++t) {
      const Pair entry = source.entry(x.item, t, x.reference), &found = x.waiting[t % ring];
      Vec values = found.values * entry.keys, keys = found.values * entry.values + found.keys * entry.keys;
      if (t >= x.added) {
        values += x.item.read(dv, t);
        keys += x.item.read(dk, t);
      }
      x.item.write(dv, t, values);
      x.item.write(dk, t, keys);
    }
  }

  // The gradient of the band for TARGETS targets; `products` is a buffer for them and their sources.
  void multiply(int64_t target, std::vector<float> &products) const {
    const int64_t begin = std::max<int64_t>(0, target - s.window + 1) / SOURCES * SOURCES;
    const int64_t last = std::min(target + TARGETS, stop) - 1, stride = ring + SOURCES, SIZE = sizeof(Vec);
    const Vec *x = &rows[(target - start) * row];
    for (int64_t j = begin; j <= last; j += SOURCES) {
      float *out = &products[j - begin];
      if constexpr (TILED<P>)
        multiply_tiles(TileProduct{x, row * SIZE, LANES * row * SIZE, SIZE, tile_of(j % ring), SIZE, row * LANES * SIZE,
                                   LANES * SIZE, row - 1, nullptr, 0, Sums(out, products.size() - (j - begin), stride, SOURCES)});
      else
        multiply_rows<P>(x, &entries[j % ring * row], row - 1, row, out, stride);
    }
    for (int64_t t = target; t <= last; ++t) {
      // The first place of the window that is in the sequence, and its source.
      const int64_t first = std::max<int64_t>(0, s.window - 1 - t), source = t - s.window + 1 + first;
      const typename P::Number *weights = w.row(t);
      const float *found = &products[(t - target) * stride + source - begin];
      float *out = dband + t * s.window;
      std::fill_n(out, first, 0.0f);
      float sum = 0.0f;
      for (int64_t i = first; i < s.window; ++i) {
        const float weight = P::value(weights[i]);
        out[i] = weight > 0.0f ? found[i - first] * weight : 0.0f;
        sum += out[i] * 0.0f;
      }
      if (sum == 0.0f) continue;
      for (int64_t i = first; i < s.window; ++i)
        if (!std::isfinite(out[i])) out[i] = multiply_exactly(t, source + i - first) * P::value(weights[i]);
    }
  }

  // A source that hardly weighs may lie far above a small denominator, and overflow float32.
  double multiply_exactly(int64_t target, int64_t source) const {
    const Vec *x = &rows[(target - start) * row];
    double sum = 0.0;
    for (int64_t n = 0; n < row - 1; ++n) {
      const Vec y = entry(source % ring, n);
      for (int lane = 0; lane < LANES; ++lane) sum += P::exact(x[n], y, lane);
    }
    return sum;
  }
};

template <class P>
int backward(Backward<P> block, int threads) {
  const Shape &s = block.s;
  block.prepare();
  std::vector<Walk> items;
  for (int64_t i = 0; i < s.items(); ++i) items.emplace_back(block.source, i, block.ring);
  int good = 1;
  Region region;
#pragma omp parallel num_threads(threads) reduction(&& : good)
  {
    [[maybe_unused]] typename P::State state;
    std::optional<Scratch> scratch;
    std::vector<float> products;
    region.run([&] {
      scratch.emplace(s.step, P::STEP + 1);
      products.resize((block.ring + P::SOURCES) * P::TARGETS);
    });
    for (int64_t start = (s.tokens - 1) / s.step * s.step; start >= 0; start -= s.step) {
#pragma omp single
      region.run([&] { block.plan(start); });
#pragma omp for
      for (int64_t t = block.start; t <= block.stop; ++t) region.run([&] { block.w.fill(t); });
#pragma omp for
      for (size_t i = 0; i < block.packed.tiles.size(); ++i)
        region.run([&] {
          block.packed.fill(block.packed.tiles[i],
                            [&](int64_t from, int64_t target) { return block.w.targets(target, from); });
        });
#pragma omp for
      for (int64_t i = 0; i < s.items(); ++i)
        region.run([&] { good = block.run(items[i], i, *scratch) && good; });
      if (block.dband) {
#pragma omp for
        for (int64_t target = block.start; target < block.stop; target += P::TARGETS)
          region.run([&] { block.multiply(target, products); });
      }
    }
  }
  region.finish();
  return good;
}

struct BackwardCall {
  Call call;
  Stream grad, y, den, dq, dk, dv;
  float *dband;
};

}  // namespace

extern "C" {

AFT_PACKED(aft_local_causal_backward, BackwardCall)

// The gradients of q, k, v and, unless `dband` is null, of the band, (T, s). Targets with a denominator below `underflow`
// count for nothing: returns 0 where there are any.
int aft_local_causal_backward(const BackwardCall *packed, float headroom, float underflow, int threads) {
  return guarded([&] {
    const BackwardCall &x = *packed;
    const Call &call = x.call;
    const Source source{call.s, call.k, call.v, call.mask, headroom};
    return with_products(call.operands, [&](auto products) {
      using P = decltype(products);
      return backward<P>({call.s, source, {call.s, call.band}, x.grad, x.y, x.den, call.q, x.dq, x.dk, x.dv, x.dband,
                          underflow}, threads);
    });
  });
}
}
