// AFT-simple with the sums up to each token (AFT Eq. 5, causal), forward and backward, in one pass over the tokens.
//
// The sums of a token are relative to a reference that a key far above it raises, so nothing depends on a later token,
// and no denominator is below 1.

#include <vector>

#include "../common/guard.h"
#include "../common/tensor.h"

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

// The inputs of a call, as Python packs them; q and the mask's elements may be null.
struct Inputs {
  Shape s;
  Stream q, k, v;
  const bool *elements;
};

// The vectors [first, last) of one sequence's channels, and their references.
struct Strip {
  const Inputs &in;
  const Shape &s;
  int64_t b, first, last;
  std::vector<Vec> reference;

  Strip(const Inputs &inputs, int64_t batch, int64_t first_vector, int64_t last_vector)
      : in(inputs),
        s(in.s),
        b(batch),
        first(first_vector),
        last(last_vector),
        reference(last - first, splat(-std::numeric_limits<float>::max())) {}

  bool counts(int64_t t) const { return Mask{in.elements, s.tokens}.counts(b, t); }

  Place at(int64_t t, int64_t i) const {
    const int64_t channel = (first + i) * LANES;
    return {b, t, channel, rest(s.channels, channel)};
  }

  // Whether a key of these tokens raises a reference.
  bool rises(int64_t start, int64_t stop) const {
    std::vector<Vec> peak(reference);
    for (int64_t t = start; t < stop; ++t) {
      if (!counts(t)) continue;
      for (int64_t i = 0; i < last - first; ++i) {
        const Vec key = at(t, i).read(in.k);
        peak[i] = key > peak[i] ? key : peak[i];
      }
    }
    for (int64_t i = 0; i < last - first; ++i)
      if (any((peak[i] > reference[i] + HEADROOM) & below(at(0, i).lanes))) return true;
    return false;
  }

  // The reference from this token on.
  Vec raised(int64_t t, int64_t i) const {
    if (!counts(t)) return reference[i];
    const Vec key = at(t, i).read(in.k);
    return key > reference[i] + HEADROOM ? key : reference[i];
  }

  Vec exponential(int64_t t, int64_t i) const { return exp_(at(t, i).read(in.k) - reference[i]); }
};

struct ForwardCall {
  Inputs in;
  Stream out, den;
};

struct Forward : Strip {
  const ForwardCall &call;
  std::vector<Vec> num, denominator, part_num, part_denominator;

  Forward(const Strip &strip, const ForwardCall &forward)
      : Strip(strip),
        call(forward),
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
        const Place place = at(t, i);
        if (counts(t)) {
          const Vec e = exponential(t, i);
          part_num[i] += e * place.read(in.v);
          part_denominator[i] += e;
        }
        const Vec sum = denominator[i] + part_denominator[i];
        place.write(call.out, gated(place, in.q, sum == Vec{} ? Vec{} : (num[i] + part_num[i]) / sum));
        if (call.den.data) place.write(call.den, sum);
      }
  }
};

struct BackwardCall {
  Inputs in;
  Stream grad, y, den, dq, dk, dv;
};

// From the last token to the first. Sums over the later targets are relative to the reference of the token, which only
// falls on the way.
struct Backward : Strip {
  const BackwardCall &call;
  std::vector<Vec> d_num, d_den, part_d_num, part_d_den;

  Backward(const Strip &strip, const BackwardCall &backward)
      : Strip(strip),
        call(backward),
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
        const Place place = at(t, i);
        const Vec denominator = place.read(call.den);
        const Vec inverse = denominator == Vec{} ? Vec{} : 1.0f / denominator;
        const Spread spread(place, call.grad, call.y, in.q, call.dq);
        part_d_num[i] += spread.a * inverse;
        part_d_den[i] += spread.go * inverse;
        Vec d_value{}, d_key{};
        if (counts(t)) {
          const Vec e = exponential(t, i);
          d_value = e * (d_num[i] + part_d_num[i]);
          d_key = d_value * place.read(in.v) - e * (d_den[i] + part_d_den[i]);
        }
        place.write(call.dv, d_value);
        place.write(call.dk, d_key);
      }
  }
};

// Run a Pass over every strip: all channels of a sequence, or, so that each thread has one, a part of them. Return 1.
template <typename Pass, typename Call>
int run(const Call &call, int threads) {
  const Shape &s = call.in.s;
  const int64_t parts = std::min(s.vectors(), (threads + s.batch - 1) / s.batch);
  Region region;
#pragma omp parallel for collapse(2) num_threads(threads)
  for (int64_t b = 0; b < s.batch; ++b)
    for (int64_t part = 0; part < parts; ++part)
      region.run([&] {
        const Strip strip(call.in, b, part * s.vectors() / parts, (part + 1) * s.vectors() / parts);
        Pass(strip, call).run();
      });
  region.finish();
  return 1;
}

}  // namespace

extern "C" {

AFT_PACKED(aft_simple_causal_forward, ForwardCall)
AFT_PACKED(aft_simple_causal_backward, BackwardCall)

// y and, unless den is null, the denominators, each relative to the reference of its token. None underflows, so the limit of
// the other forms is not needed.
int aft_simple_causal_forward(const ForwardCall *call, float, int threads) {
  return guarded([&] { return run<Forward>(*call, threads); });
}

// Gradients of q, unless it is null, k and v.
int aft_simple_causal_backward(const BackwardCall *call, float, int threads) {
  return guarded([&] { return run<Backward>(*call, threads); });
}
}
