// AFT-local with the sums up to each token (AFT Eq. 4, causal): blocks of targets.
//
// The exponentials of a block and of the window before it stay in the cache as maps, one for each vector of channels,
// and a few targets at a time are multiplied by their weights, which all maps share.

#include "local.h"

namespace {

// An item on its way through the blocks. Its map holds the sources from s - 1 before the block to the end of it.
struct Forward {
  Item item;
  int64_t first;
  Reference reference;
  Vec least;         // the smallest denominator
  Pair state, part;  // sums over what no window of the block and of the next targets has
  std::vector<Pair> map;

  Forward(const Source &source, int64_t index)
      : item(source.s, index),
        first(source.first(item)),
        reference(source, item),
        least(splat(std::numeric_limits<float>::max())),
        state{},
        part{},
        map(source.s.window - 1 + source.s.step) {}

  void enter(const Source &source, int64_t start, int64_t stop) {
    const int64_t before = source.s.window - 1;
    const Vec old = reference.value;
    reference.move(source, item, start, stop);
    const bool again = differ(old, reference.value);
    if (again) state *= exp_(old - reference.value);
    for (int64_t i = again ? 0 : before; i < before + stop - start; ++i)
      map[i] = source.entry(item, start - before + i, reference.value);
  }

  // The sums of a tile's targets; `left` is the first source of the map that has not left the window.
  void mix_tile(const Packed &packed, const Weights &w, const Tile &tile, int64_t start, int64_t &left, Pair *sums) {
    for (; left < tile.first - start; ++left) part += map[left];
    Pair older = state;
    older += part;
    for (int64_t i = 0; i < tile.size; ++i) sums[i] = w.older(tile.first + i) * older;
    mix(tile.size, map.data() + left, packed.weights.data() + tile.offset, tile.end - tile.begin, sums);
  }

  void leave(int64_t start, int64_t stop, int64_t left) {
    for (; left < stop - start; ++left) part += map[left];
    state += part;
    part = Pair{};
    std::copy(map.begin() + (stop - start), map.end(), map.begin());
  }
};

int forward(const Shape &s, Tokens q, const Source &source, const Weights &w, Tokens out, Tokens den, float underflow,
            int threads) {
  const int64_t parts = std::min<int64_t>(threads, s.items());
  int good = 1;
#pragma omp parallel for num_threads(threads) reduction(&& : good)
  for (int64_t share = 0; share < parts; ++share) {
    std::vector<Forward> items;
    for (int64_t i = share * s.items() / parts; i < (share + 1) * s.items() / parts; ++i) items.emplace_back(source, i);
    Packed packed;
    for (int64_t start = 0; start < s.tokens; start += s.step) {
      const int64_t stop = std::min(start + s.step, s.tokens);
      packed.plan(start, stop, [&](int64_t t, int64_t n) { return std::pair(t - s.window + 1, t + n); });
      for (const Tile &tile : packed.tiles) packed.fill(tile, w);
      for (Forward &x : items) {
        x.enter(source, start, stop);
        int64_t left = 0;
        for (const Tile &tile : packed.tiles) {
          Pair sums[ROWS];
          x.mix_tile(packed, w, tile, start, left, sums);
          for (int64_t i = 0; i < tile.size; ++i) {
            const int64_t t = tile.first + i;
            const Vec bottom = sums[i].keys;
            if (t >= x.first) x.least = bottom < x.least ? bottom : x.least;
            Vec y = bottom == Vec{} ? Vec{} : sums[i].values / bottom;
            if (q.data) y *= sigmoid(x.item.read(q, t));
            x.item.write(out, t, y);
            if (den.data) x.item.write(den, t, bottom);
          }
        }
        x.leave(start, stop, left);
      }
    }
    for (const Forward &x : items)
      for (int lane = 0; lane < x.item.lanes; ++lane) good = good && x.least[lane] >= underflow;
  }
  return good;
}

}  // namespace

extern "C" {

// y and, unless den is null, the denominators, each relative to the reference of its block. `sizes` are B, T, D, s and
// the targets of a block; `band` is (T, s); q and mask may be null. Returns 0 where a denominator that should not be is
// below `underflow`: its result is wrong.
int aft_local_causal_forward(const int64_t *sizes, Tokens q, Tokens k, Tokens v, const bool *mask, const float *band,
                             Tokens out, Tokens den, float underflow, int threads) {
  const Shape s{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]};
  return forward(s, q, {s, k, v, mask}, Weights(s, band, threads), out, den, underflow, threads);
}
}
