// AFT-simple with the sums up to each token (AFT Eq. 5, causal), forward and backward, in one pass over the tokens.
//
// The sums of a token are relative to a reference that a key far above it raises, so nothing depends on a later token,
// and no denominator is below 1.

#include <algorithm>
#include <limits>
#include <vector>

#include "../common/guard.h"
#include "../common/vector.h"

namespace {

// How far a key may exceed its reference, in nats. It is less than float32 allows, so that the inverse of a
// denominator leaves a small gradient its digits.
constexpr float HEADROOM = 20.0f;
// Tokens that are added up by themselves first, as in `Sum`.
constexpr int64_t TILE = 64;

struct Shape {
  int64_t batch, tokens, channels;

  int64_t vectors() const { return (channels + LANES - 1) / LANES; }
};

bool any(IntVec x, int lanes) {
  int32_t found = 0;
  for (int i = 0; i < LANES; ++i) found |= i < lanes ? x[i] : 0;
  return found != 0;
}

// The vectors [first, last) of one sequence's channels, and their references.
struct Strip {
  const Shape &s;
  int64_t b, first, last;
  Tokens k;
  const bool *mask;
  std::vector<Vec> reference;

  Strip(const Shape &shape, int64_t batch, int64_t first_vector, int64_t last_vector, Tokens keys, const bool *all_masks)
      : s(shape),
        b(batch),
        first(first_vector),
        last(last_vector),
        k(keys),
        mask(all_masks ? all_masks + batch * s.tokens : nullptr),
        reference(last - first, splat(-std::numeric_limits<float>::max())) {}

  bool counts(int64_t t) const { return !mask || mask[t]; }

  int lanes(int64_t i) const { return std::min<int64_t>(LANES, s.channels - (first + i) * LANES); }

  float *at(const Tokens &x, int64_t t, int64_t i) const {
    return x.data + b * x.batch + t * x.token + (first + i) * LANES;
  }

  Vec read(const Tokens &x, int64_t t, int64_t i) const { return load(at(x, t, i), lanes(i)); }

  // Whether a key of these tokens raises a reference.
  bool rises(int64_t start, int64_t stop) const {
    std::vector<Vec> peak(reference);
    for (int64_t t = start; t < stop; ++t) {
      if (!counts(t)) continue;
      for (int64_t i = 0; i < last - first; ++i) {
        const Vec key = read(k, t, i);
        peak[i] = key > peak[i] ? key : peak[i];
      }
    }
    for (int64_t i = 0; i < last - first; ++i)
      if (any(peak[i] > reference[i] + HEADROOM, lanes(i))) return true;
    return false;
  }

  // The reference from this token on.
  Vec raised(int64_t t, int64_t i) const {
    if (!counts(t)) return reference[i];
    const Vec key = read(k, t, i);
    return key > reference[i] + HEADROOM ? key : reference[i];
  }

  Vec exponential(int64_t t, int64_t i) const { return exp_(read(k, t, i) - reference[i]); }
};

struct Forward : Strip {
  Tokens q, v, out, den;
  std::vector<Vec> num, denominator, part_num, part_denominator;

  Forward(const Strip &strip, Tokens queries, Tokens values, Tokens result, Tokens denominators)
      : Strip(strip),
        q(queries),
        v(values),
        out(result),
        den(denominators),
        num(last - first),
        denominator(num),
        part_num(num),
        part_denominator(num) {}

  void run() {
    for (int64_t start = 0; start < s.tokens; start += TILE) {
      const int64_t stop = std::min(start + TILE, s.tokens);
      if (!rises(start, stop)) {
        scan(start, stop);
      } else {
        for (int64_t t = start; t < stop; ++t) {
          raise(t);
          scan(t, t + 1);
        }
      }
      for (int64_t i = 0; i < last - first; ++i) {
        num[i] += part_num[i];
        denominator[i] += part_denominator[i];
        part_num[i] = part_denominator[i] = Vec{};
      }
    }
  }

  void raise(int64_t t) {
    for (int64_t i = 0; i < last - first; ++i) {
      const Vec moved = raised(t, i);
      const Vec scale = exp_(reference[i] - moved);  // 1 where nothing moves
      reference[i] = moved;
      num[i] *= scale;
      denominator[i] *= scale;
      part_num[i] *= scale;
      part_denominator[i] *= scale;
    }
  }

  // Not inlined: a token must give the same bits by itself and among others.
  __attribute__((noinline)) void scan(int64_t start, int64_t stop) {
    for (int64_t t = start; t < stop; ++t)
      for (int64_t i = 0; i < last - first; ++i) {
        if (counts(t)) {
          const Vec e = exponential(t, i);
          part_num[i] += e * read(v, t, i);
          part_denominator[i] += e;
        }
        const Vec sum = denominator[i] + part_denominator[i];
        Vec y = sum == Vec{} ? Vec{} : (num[i] + part_num[i]) / sum;
        if (q.data) y *= sigmoid(read(q, t, i));
        store(at(out, t, i), y, lanes(i));
        if (den.data) store(at(den, t, i), sum, lanes(i));
      }
  }
};

// From the last token to the first. Sums over the later targets are relative to the reference of the token, which only
// falls on the way.
struct Backward : Strip {
  Tokens grad, y, den, q, v, dq, dk, dv;
  std::vector<Vec> d_num, d_den, part_d_num, part_d_den;

  Backward(const Strip &strip, Tokens upstream, Tokens result, Tokens denominators, Tokens queries, Tokens values,
           Tokens d_queries, Tokens d_keys, Tokens d_values)
      : Strip(strip),
        grad(upstream),
        y(result),
        den(denominators),
        q(queries),
        v(values),
        dq(d_queries),
        dk(d_keys),
        dv(d_values),
        d_num(last - first),
        d_den(d_num),
        part_d_num(d_num),
        part_d_den(d_num) {}

  void run() {
    const int64_t tiles = (s.tokens + TILE - 1) / TILE, width = last - first;
    std::vector<Vec> before(tiles * width), within(TILE * width);
    std::vector<char> rising(tiles);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t start = tile * TILE, stop = std::min(start + TILE, s.tokens);
      std::copy(reference.begin(), reference.end(), before.begin() + tile * width);
      rising[tile] = rises(start, stop);
      if (rising[tile]) follow(start, stop, within.data());
    }
    for (int64_t tile = tiles - 1; tile >= 0; --tile) {
      const int64_t start = tile * TILE, stop = std::min(start + TILE, s.tokens);
      if (!rising[tile]) {
        move_to(before.data() + tile * width);
        scan(start, stop);
      } else {
        const std::vector<Vec> after(reference);
        std::copy_n(before.begin() + tile * width, width, reference.begin());
        follow(start, stop, within.data());
        reference = after;
        for (int64_t t = stop - 1; t >= start; --t) {
          move_to(within.data() + (t - start) * width);
          scan(t, t + 1);
        }
      }
      for (int64_t i = 0; i < width; ++i) {
        d_num[i] += part_d_num[i];
        d_den[i] += part_d_den[i];
        part_d_num[i] = part_d_den[i] = Vec{};
      }
    }
  }

  // Raise the references by these tokens, and keep those of each.
  void follow(int64_t start, int64_t stop, Vec *references) {
    for (int64_t t = start; t < stop; ++t)
      for (int64_t i = 0; i < last - first; ++i) *references++ = reference[i] = raised(t, i);
  }

  void move_to(const Vec *references) {
    for (int64_t i = 0; i < last - first; ++i) {
      const Vec scale = exp_(references[i] - reference[i]);
      reference[i] = references[i];
      d_num[i] *= scale;
      d_den[i] *= scale;
      part_d_num[i] *= scale;
      part_d_den[i] *= scale;
    }
  }

  void scan(int64_t start, int64_t stop) {
    for (int64_t t = stop - 1; t >= start; --t)
      for (int64_t i = 0; i < last - first; ++i) {
        const Vec g = read(grad, t, i), go = g * read(y, t, i), denominator = read(den, t, i);
        const Vec inverse = denominator == Vec{} ? Vec{} : 1.0f / denominator;
        Vec a = g;
        if (q.data) {
          const Vec gate = sigmoid(read(q, t, i));
          a *= gate;
          store(at(dq, t, i), go - go * gate, lanes(i));
        }
        part_d_num[i] += a * inverse;
        part_d_den[i] += go * inverse;
        Vec d_value{}, d_key{};
        if (counts(t)) {
          const Vec e = exponential(t, i);
          d_value = e * (d_num[i] + part_d_num[i]);
          d_key = d_value * read(v, t, i) - e * (d_den[i] + part_d_den[i]);
        }
        store(at(dv, t, i), d_value, lanes(i));
        store(at(dk, t, i), d_key, lanes(i));
      }
  }
};

// f of every strip: all channels of a sequence, or, so that each thread has one, a part of them.
template <typename F>
void for_each_strip(const Shape &s, Tokens k, const bool *mask, int threads, F f) {
  const int64_t parts = std::min(s.vectors(), (threads + s.batch - 1) / s.batch);
  Region region;
#pragma omp parallel for collapse(2) num_threads(threads)
  for (int64_t b = 0; b < s.batch; ++b)
    for (int64_t part = 0; part < parts; ++part)
      region.run([&] { f(Strip(s, b, part * s.vectors() / parts, (part + 1) * s.vectors() / parts, k, mask)); });
  region.finish();
}

// The inputs of a call, as Python packs them; q and mask may be null.
struct Call {
  Shape s;
  Tokens q, k, v;
  const bool *mask;
};

struct ForwardCall {
  Call call;
  Tokens out, den;
};

struct BackwardCall {
  Call call;
  Tokens grad, y, den, dq, dk, dv;
};

}  // namespace

extern "C" {

AFT_PACKED(aft_simple_causal_forward, ForwardCall)
AFT_PACKED(aft_simple_causal_backward, BackwardCall)

// y and, unless den is null, the denominators, each relative to the reference of its token.
int aft_simple_causal_forward(const ForwardCall *packed, int threads) {
  return guarded([&] {
    const Call &x = packed->call;
    for_each_strip(x.s, x.k, x.mask, threads,
                   [&](const Strip &strip) { Forward(strip, x.q, x.v, packed->out, packed->den).run(); });
  });
}

// Gradients of q, unless it is null, k and v.
int aft_simple_causal_backward(const BackwardCall *packed, int threads) {
  return guarded([&] {
    const BackwardCall &own = *packed;
    const Call &x = own.call;
    for_each_strip(x.s, x.k, x.mask, threads, [&](const Strip &strip) {
      Backward(strip, own.grad, own.y, own.den, x.q, x.v, own.dq, own.dk, own.dv).run();
    });
  });
}
}
