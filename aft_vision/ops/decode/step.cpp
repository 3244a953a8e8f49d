// One token of AFT-simple and of AFT-local (AFT Eq. 5, 4, causal) with its state, as an operation and inside a block.

#include <algorithm>
#include <limits>
#include <vector>

#include "dense.h"
#include "../common/guard.h"
#include "../common/vector.h"

namespace {

// Fewer sequences than these have their windows summed in as many parts, each of which a thread may take.
constexpr int64_t PARTS = 4;

struct Shape {
  int64_t batch, channels, window;
};

// A (B, D) tensor with contiguous channels.
struct Tokens {
  float *data;
  int64_t batch;  // stride
};

// Row t of the band of a position bias, (s,); to be filled by `band_row` where there are factors of the bias.
struct Band {
  float *row;
  const float *u, *v;  // (T, width) of targets and of sources, or null
  int64_t tokens, width;
};

// The mixer of a block: one of the operations here, or the caller.
enum Mixer : int64_t { SIMPLE, LOCAL, CALLER };

// A block, and the state of its mixer: of AFT-simple `sums` and `ring` are numerator and denominator.
struct Block {
  Layer layers[4];  // qkv, proj, fc1, fc2
  int64_t mixer, gated, window;
  Band band;
  float *reference, *sums, *ring;
  int64_t *position;
  const bool *holds_keys;
};

// The blocks of a decoder, the layer after them, and a workspace: what a block projects and mixes, and two parts of it
// for the layers after the mixer.
struct Decoder {
  const Block *blocks;
  int64_t count, batch;
  Layer head;
  float *projected, *mixed, *sum, *hidden;
};

// The numbers of `ops.decode.eager` by these names, in nats except for `smallest`.
struct Limits {
  float headroom, reach, smallest;
};

// Call f(i, lanes) for every vector of n numbers.
template <typename F>
void for_each_vector(int64_t n, F f) {
  for (int64_t i = 0; i < n; i += LANES) f(i, static_cast<int>(std::min<int64_t>(LANES, n - i)));
}

Vec exp_of(float x) { return exp_(splat(x)); }

// Return the values, 0 where the key is minus infinity: the value may be NaN.
Vec counted(Vec key, Vec value) { return key == splat(-std::numeric_limits<float>::infinity()) ? Vec{} : value; }

// Return whether the exponential of every key, less its reference, can be stored in the ring.
bool fits(const Shape &s, Tokens k, const float *reference, Limits limits) {
  for (int64_t b = 0; b < s.batch; ++b)
    for (int64_t d = 0; d < s.channels; ++d) {
      const float shifted = k.data[b * k.batch + d] - reference[b * s.channels + d];
      const bool hidden = shifted == -std::numeric_limits<float>::infinity();
      if (!(shifted <= limits.headroom && (shifted >= -limits.reach || hidden))) return false;
    }
  return true;
}

// The weights of the tokens of a ring, slot by slot; `largest` is the largest bias, with that of 0 before the window.
struct Row {
  std::vector<float> weights;
  float largest = 0.0f, low = 0.0f;

  Row(const Shape &s, const float *band, int64_t slot, int64_t used) : weights(used) {
    for (int64_t i = 0; i < used; ++i) {
      weights[i] = band[i <= slot ? s.window - 1 - slot + i : i - slot - 1];
      largest = std::max(largest, weights[i]);
      low = std::min(low, weights[i]);
    }
  }

  void exponentiate() {
    for_each_vector(weights.size(), [&](int64_t i, int lanes) {
      store(weights.data() + i, exp_(load(weights.data() + i, lanes) - largest), lanes);
    });
  }
};

// out += weights[i] * slots[i] for `count` slots of n numbers. Slot by slot: in the order of memory.
void add_slots(const float *slots, const float *weights, int64_t count, int64_t n, float *out) {
  for (int64_t i = 0; i < count; ++i)
    for_each_vector(n, [&](int64_t d, int lanes) {
      store(out + d, load(out + d, lanes) + weights[i] * load(slots + i * n + d, lanes), lanes);
    });
}

// row[i], i < s: the product of u[t] and v[t - s + 1 + i], for sources of the sequence; 0 before it.
void band_row(const Band &band, int64_t t, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads_for(size * band.width, threads))
  for (int64_t start = 0; start < size; start += LANES) {
    const int lanes = std::min<int64_t>(LANES, size - start);
    Vec products[LANES] = {};
    for (int i = 0; i < lanes; ++i) {
      const int64_t source = t - size + 1 + start + i;
      if (source >= 0 && source < band.tokens)
        for_each_vector(band.width, [&](int64_t d, int lanes) {
          products[i] += load(band.u + t * band.width + d, lanes) * load(band.v + source * band.width + d, lanes);
        });
    }
    store(band.row + start, sums(products), lanes);
  }
}

// The operation of `aft_local_step`.
int local_step(const Shape &s, Tokens q, Tokens k, Tokens v, Band band, const float *reference, float *sums, float *ring,
               int64_t *position, const bool *holds_keys, float *out, Limits limits, int threads) {
  const int64_t count = *position, slot = count % s.window, width = 2 * s.channels;
  if (count < 0) return 4;
  if (band.u) {
    if (count >= band.tokens) return 3;
    band_row(band, count, s.window, threads);
  }
  if (*holds_keys || !fits(s, k, reference, limits)) return 1;
  Row row(s, band.row, slot, std::min(count + 1, s.window));
  const bool representable = row.largest - row.low <= limits.reach;
  row.exponentiate();
  const Vec older = exp_of(-row.largest);
  const int64_t used = row.weights.size(), parts = s.batch < PARTS ? PARTS : 1;
  std::vector<float> mixed(s.batch * parts * width);
  int good = representable;
  threads = std::min<int64_t>(threads_for(s.batch * used * width, threads), s.batch * parts);
#pragma omp parallel num_threads(threads) reduction(&& : good)
  {
#pragma omp for
    for (int64_t b = 0; b < s.batch; ++b) {
      float *own = sums + b * width, *entry = ring + (b * s.window + slot) * width;
      for_each_vector(s.channels, [&](int64_t d, int lanes) {
        const Vec key = load(k.data + b * k.batch + d, lanes);
        const Vec e = exp_(key - load(reference + b * s.channels + d, lanes));
        for (int64_t i : {d, s.channels + d})
          if (count >= s.window) store(own + i, load(own + i, lanes) + load(entry + i, lanes), lanes);
        store(entry + d, e * counted(key, load(v.data + b * v.batch + d, lanes)), lanes);
        store(entry + s.channels + d, e, lanes);
      });
    }
#pragma omp for
    for (int64_t i = 0; i < s.batch * parts; ++i) {
      const int64_t b = i / parts, start = used * (i % parts) / parts, stop = used * (i % parts + 1) / parts;
      const float *slots = ring + (b * s.window + start) * width;
      if (representable) add_slots(slots, row.weights.data() + start, stop - start, width, &mixed[i * width]);
    }
#pragma omp for
    for (int64_t b = 0; b < s.batch; ++b) {
      const float *found = &mixed[b * parts * width], *own = sums + b * width;
      const auto total = [&](int64_t d, int lanes) {
        Vec sum = older * load(own + d, lanes);
        for (int64_t i = 0; i < parts; ++i) sum += load(found + i * width + d, lanes);
        return sum;
      };
      for_each_vector(s.channels, [&](int64_t d, int lanes) {
        const Vec den = total(s.channels + d, lanes);
        for (int i = 0; i < lanes; ++i) good = good && den[i] >= limits.smallest;
        Vec y = total(d, lanes) / den;
        if (q.data) y *= sigmoid(load(q.data + b * q.batch + d, lanes));
        store(out + b * s.channels + d, y, lanes);
      });
    }
  }
  ++*position;
  return good ? 0 : 2;
}

}  // namespace

extern "C" {

// y (B, D) of a token, which is added to the sums. q may be null; `sizes` are B and D. Returns 0.
int aft_simple_step(const int64_t *sizes, Tokens q, Tokens k, Tokens v, float *reference, float *numerator,
                    float *denominator, float *out, float headroom) {
  const int64_t channels = sizes[1];
  for (int64_t b = 0; b < sizes[0]; ++b)
    for_each_vector(channels, [&](int64_t d, int lanes) {
      const int64_t place = b * channels + d;
      const Vec key = load(k.data + b * k.batch + d, lanes), old = load(reference + place, lanes);
      const Vec moved = key > old + headroom ? key : old;
      const Vec scale = exp_(old - moved), weight = exp_(key - moved);
      const Vec value = counted(key, load(v.data + b * v.batch + d, lanes));
      const Vec num = load(numerator + place, lanes) * scale + weight * value;
      const Vec den = load(denominator + place, lanes) * scale + weight;
      store(reference + place, moved, lanes);
      store(numerator + place, num, lanes);
      store(denominator + place, den, lanes);
      Vec y = den == Vec{} ? Vec{} : num / den;
      if (q.data) y *= sigmoid(load(q.data + b * q.batch + d, lanes));
      store(out + place, y, lanes);
    });
  return 0;
}

// y (B, D) of a token, which goes into a ring of exponentials. q may be null; `sizes` are B, D and s. Returns 0; 1 if a
// key is out of range, or the ring holds keys, where only the row of the band has been written; 2 if y has
// underflowed, where the state is that after the token; 3 if the bias has no row for it; 4 if the position is negative.
int aft_local_step(const int64_t *sizes, Tokens q, Tokens k, Tokens v, Band band, const float *reference, float *sums,
                   float *ring, int64_t *position, const bool *holds_keys, float *out, Limits limits, int threads) {
  return guarded([&] {
    const Shape s{sizes[0], sizes[1], sizes[2]};
    return local_step(s, q, k, v, band, reference, sums, ring, position, holds_keys, out, limits, threads);
  });
}

}

namespace {

// The mixer of a block between its layers. Returns what `aft_local_step` does, or 5 if the caller must mix.
int mix(const Decoder &decoder, const Block &block, Limits limits, int threads) {
  if (block.mixer == CALLER) return 5;
  const int64_t width = block.layers[0].outputs, channels = block.layers[0].inputs;
  const int64_t sizes[] = {decoder.batch, channels, block.window};
  float *keys = decoder.projected + (block.gated ? channels : 0);
  const Tokens q{block.gated ? decoder.projected : nullptr, width}, k{keys, width}, v{keys + channels, width};
  if (block.mixer == SIMPLE)
    return aft_simple_step(sizes, q, k, v, block.reference, block.sums, block.ring, decoder.mixed, limits.headroom);
  return aft_local_step(sizes, q, k, v, block.band, block.reference, block.sums, block.ring, block.position,
                        block.holds_keys, decoder.mixed, limits, threads);
}

}  // namespace

extern "C" {

AFT_PACKED(aft_decode, Decoder)
AFT_PACKED(aft_decode_block, Block)
AFT_PACKED(aft_tokens, Tokens)
AFT_PACKED(aft_step_limits, Limits)

// Takes a token x (B, C), which is overwritten, through the blocks from *place on and through the head, to out (B, n).
// Returns 0; or, with *place at a block that the caller must mix, what `aft_local_step` does, or 5: call it
// again then, with `mixed` (B, C) of that block, which is null otherwise.
int aft_decode(const Decoder *decoder, int64_t *place, float *x, const float *mixed, float *out, Limits limits,
               int threads) {
  const Decoder &d = *decoder;
  for (; *place < d.count; ++*place, mixed = nullptr) {
    const Block &block = d.blocks[*place];
    if (!mixed) {
      if (const int failed = aft_dense(block.layers, d.batch, x, d.projected, threads)) return failed;
      if (const int found = mix(d, block, limits, threads)) return found;
    }
    if (const int failed = aft_dense_block(block.layers + 1, d.batch, x, mixed ? mixed : d.mixed, d.sum, d.hidden, x,
                                           threads))
      return failed;
  }
  return aft_dense(&d.head, d.batch, x, out, threads);
}
}
