// Vectors of channels and their exponential, by the vector extensions of GCC and Clang.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t IntVec __attribute__((vector_size(4 * LANES)));

// Select lanes of two vectors; those of the second count from LANES on. GCC has Clang's builtin from version 12 on.
#if defined(__clang__)
#define SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define SHUFFLE(x, y, ...) __builtin_shuffle(x, y, IntVec{__VA_ARGS__})
#endif

// Return the lane of x and y that `fold` adds in a lane, from the first or the second half of every group.
constexpr int place(int group, int half, int lane) {
  const int part = lane / (group / 2);
  return part % 2 * LANES + part / 2 * group + half * (group / 2) + lane % (group / 2);
}

// Add the two halves of every GROUP lanes, alternately of x and of y.
template <int GROUP, int... LANE>
Vec fold(Vec x, Vec y, std::integer_sequence<int, LANE...>) {
  return SHUFFLE(x, y, place(GROUP, 0, LANE)...) + SHUFFLE(x, y, place(GROUP, 1, LANE)...);
}

// Return the sums of LANES vectors, one in each lane.
template <int COUNT = LANES>
Vec sums(Vec *x) {
  if constexpr (COUNT > 1) {
    for (int i = 0; i < COUNT / 2; ++i)
      x[i] = fold<COUNT>(x[i], x[i + COUNT / 2], std::make_integer_sequence<int, LANES>{});
    return sums<COUNT / 2>(x);
  }
  return x[0];
}

Vec splat(float x) { return x - Vec{}; }

Vec load(const float *p, int lanes) {
  if (lanes == LANES) {
    Vec whole;
    std::memcpy(&whole, p, sizeof whole);
    return whole;
  }
  Vec x{};
  std::memcpy(&x, p, 4 * lanes);
  return x;
}

void store(float *p, Vec x, int lanes) {
  if (lanes == LANES)
    std::memcpy(p, &x, sizeof x);
  else
    std::memcpy(p, &x, 4 * lanes);
}

// Return e^x for x <= 88, 0 below -87.3. The relative error is below 2e-7. The polynomial is that of Cephes' expf.
Vec exp_(Vec x) {
  const Vec shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
  const IntVec vanishes = x < splat(-87.3f);
  const Vec clamped = vanishes ? splat(-87.3f) : x;
  const Vec rounded = clamped * 1.44269504f + shift;
  const Vec n = rounded - shift;
  const Vec r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  IntVec bits;
  std::memcpy(&bits, &rounded, sizeof bits);
  IntVec power = (bits + 127) << 23;  // the low bits of `rounded` are n
  Vec scale;
  std::memcpy(&scale, &power, sizeof scale);
  return vanishes ? Vec{} : p * scale;
}

Vec sigmoid(Vec x) {
  const Vec most = splat(87.0f);
  const Vec negated = -x;
  return 1.0f / (1.0f + exp_(negated > most ? most : negated));
}

// A sum of many terms in two levels. A single float32 sum would lose precision.
class Sum {
 public:
  void add(Vec x) {
    part_ += x;
    if (++count_ % 64 == 0) {
      total_ += part_;
      part_ = Vec{};
    }
  }

  Vec value() const { return total_ + part_; }

 private:
  Vec total_{}, part_{};
  int64_t count_ = 0;
};

}  // namespace
