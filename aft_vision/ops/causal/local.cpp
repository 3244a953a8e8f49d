// AFT-local with the sums up to each token (AFT Eq. 4, causal): blocks of targets.
//
// The exponentials of a block and of the window before it stay in the cache as maps, one for each vector of channels,
// and a few targets at a time are multiplied by their weights, which all maps share.

#include "local.h"

namespace {

// An item on its way through the blocks. Its map holds the sources from s - 1 before the block to the end of it.
template <class P>
struct Forward {
  Item item;
  IntVec first;
  Reference reference;
  IntVec underflowed;  // whether a denominator is below its limit
  Pair state, part;    // sums over the sources that no window of the block and of the next targets has
  int64_t base, left;  // the first source of the map, and the first of the vectors that have not left the window
  std::vector<Pair> map;

  Forward(const Source &source, int64_t index)
      : item(source.s, index),
        first(source.first(item)),
        reference(source, item),
        underflowed{},
        state{},
        part{},
        base(round_down<P>(1 - source.s.window)),
        left(0),
        map((source.s.window + source.s.step + P::STEP) / P::TERMS + 1) {}

  void enter(const Source &source, int64_t start, int64_t stop) {
    const Vec old = reference.value;
    reference.move(source, item, start, stop);
    const bool again = any(old != reference.value);
    if (again) {
      // In two halves: the factor may vanish where the sums are large.
      const Vec half = exp_(0.5f * (old - reference.value));
      state *= half;
      state *= half;
    }
    for (int64_t t = again ? base : round_down<P>(start); t < stop; t += P::TERMS) {
      const Pair one = source.entry(item, t, reference.value);
      const bool two = P::TERMS > 1 && t + 1 < stop;
      map[(t - base) / P::TERMS] = P::pack(one, two ? source.entry(item, t + 1, reference.value) : Pair{});
    }
  }

  // Remove the sources before this one from the window.
  void leave(int64_t source) {
    for (; base + left * P::TERMS < source; ++left) part += P::sum(map[left]);
  }

  // The sums of a tile's targets.
  void mix(const Packed<P> &packed, const Weights<P> &w, const Tile &tile, Pair *sums) {
    leave(tile.begin);
    Pair older = state;
    older += part;
    for (int64_t i = 0; i < tile.size; ++i) sums[i] = w.older(tile.first + i) * older;
    if constexpr (TILED<P>)
      w.mix(tile, map.data() + left, sums);
    else
      packed.mix(tile, map.data() + left, sums);
  }

  // Move to the windows of the next block.
  void advance(int64_t source) {
    leave(source);
    state += part;
    part = Pair{};
    std::copy(map.begin() + left, map.end(), map.begin());
    base = source;
    left = 0;
  }
};

template <class P>
void write(Forward<P> &x, const Weights<P> &w, Limits limits, const Tile &tile, const Pair *sums, const Stream &q,
           const Stream &out, const Stream &den) {
  for (int64_t i = 0; i < tile.size; ++i) {
    const int64_t t = tile.first + i;
    const Vec denominator = sums[i].keys;
    const IntVec underflowed = denominator < splat(w.limit(t, limits));
    x.underflowed |= underflowed & (IntVec{} + static_cast<int32_t>(t) >= x.first);
    Vec y = denominator == Vec{} ? Vec{} : sums[i].values / denominator;
    if (q.data) y *= sigmoid(x.item.read(q, t));
    x.item.write(out, t, y);
    if (den.data) x.item.write(den, t, underflowed ? Vec{} : denominator);
  }
}

template <class P>
int forward(const Source &source, const float *band, Stream q, Stream out, Stream den, Limits limits, int threads) {
  const Shape &s = source.s;
  const int64_t parts = std::min<int64_t>(threads, s.items());
  int good = 1;
  Region region;
#pragma omp parallel for num_threads(threads) reduction(&& : good)
  for (int64_t share = 0; share < parts; ++share) region.run([&] {
    [[maybe_unused]] typename P::State state;
    std::vector<Forward<P>> items;
    for (int64_t i = share * s.items() / parts; i < (share + 1) * s.items() / parts; ++i) items.emplace_back(source, i);
    Weights<P> w(s, band);
    Packed<P> packed;
    for (int64_t start = 0; start < s.tokens; start += s.step) {
      const int64_t stop = std::min(start + s.step, s.tokens);
      w.move(start);
      for (int64_t t = start; t <= stop; ++t) w.fill(t);
      packed.plan(start, stop, [&](int64_t t, int64_t n) {
        return std::pair(round_down<P>(t - s.window + 1), round_up<P>(t + n));
      });
      for (const Tile &tile : packed.tiles)
        if (!TILED<P>) packed.fill(tile, [&](int64_t target, int64_t from) { return w.sources(target, from); });
      for (Forward<P> &x : items) {
        x.enter(source, start, stop);
        for (const Tile &tile : packed.tiles) {
          Pair sums[P::HEIGHT];
          x.mix(packed, w, tile, sums);
          write(x, w, limits, tile, sums, q, out, den);
        }
        x.advance(round_down<P>(stop - s.window + 1));
      }
    }
    for (const Forward<P> &x : items)
      for (int lane = 0; lane < x.item.lanes; ++lane) good = good && !x.underflowed[lane];
  });
  region.finish();
  return good;
}

struct ForwardCall {
  Call call;
  Stream out, den;
};

}  // namespace

extern "C" {

AFT_PACKED(aft_local_causal_forward, ForwardCall)
AFT_PACKED(aft_local_limits, Limits)

// y and, unless den is null, the denominators, each relative to the reference of its block, or 0 where it is below its
// limit. No key exceeds its reference by more than `headroom`, in nats. Returns 0 where a denominator that should not be is
// below its limit: its result may be wrong.
int aft_local_causal_forward(const ForwardCall *packed, float headroom, Limits limits, int threads) {
  return guarded([&] {
    const Call &call = packed->call;
    const Source source{call.s, call.k, call.v, call.mask, headroom};
    return with_products(call.operands, [&](auto products) {
      return forward<decltype(products)>(source, call.band, call.q, packed->out, packed->den, limits, threads);
    });
  });
}
}
