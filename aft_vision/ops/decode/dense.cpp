// Linear layers for the few rows of a step of decoding, with the layer norm before and the GELU or the sum after.
//
// Their time is that of reading the weights once, in the order of memory: rows of a matrix that are read in parallel
// would each look like a stream of their own, too short for the hardware's prefetch. Where the batch makes parallel reads
// worth while all the same, the rows are prefetched in order, some way ahead. A repeated prefetch, for every few rows of
// the batch, finds its line in the cache or loads it again.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "dense.h"
#include "../common/guard.h"
#include "../common/vector.h"

namespace {

// Rows of the batch for which the weights are read in order.
constexpr int IN_ORDER = 2;
// Numbers between a weight that is read and one that is prefetched.
constexpr int64_t AHEAD = 4096;

// erf(x), with an error of 1e-7 at most. Minimax polynomials, near 0 of erf(x) / x, elsewhere of log(1 - erf(x)).
Vec erf_(Vec x) {
  const Vec size = x < 0.0f ? -x : x, square = x * x;
  Vec near = splat(-5.96761703e-4f);
  near = near * square + 4.99119423e-3f;
  near = near * square - 2.67681349e-2f;
  near = near * square + 1.12819925e-1f;
  near = near * square - 3.76125336e-1f;
  near = near * square + 1.28379166e-1f;
  near = near * x + x;
  Vec far = size * -1.72853470e-5f + 3.83197126e-4f;
  far = far * square + (size * -3.88396438e-3f + 2.42546219e-2f);
  far = far * size - 1.06777877e-1f;
  far = far * size - 6.34846687e-1f;
  far = far * size - 1.28717512e-1f;
  far = far * size - size;
  far = 1.0f - exp_(far);
  return size > 0.927734375f ? (x < 0.0f ? -far : far) : near;
}

Vec gelu(Vec x) { return 0.5f * x * (1.0f + erf_(x * 0.707106781f)); }

// The products of B rows and N rows of n numbers; those of a row of the first go to a row of `out`.
template <int B, int N>
void products(const float *x, const float *weight, int64_t n, float *out, int64_t width) {
  static_assert(B * N <= LANES);
  Vec found[LANES] = {};
  const int64_t whole = n / LANES * LANES;
  const auto add = [&](Vec *sums, int r, int64_t i, int lanes) {
    const Vec w = load(weight + r * n + i, lanes);
#pragma GCC unroll 16
    for (int b = 0; b < B; ++b) sums[b] += w * load(x + b * n + i, lanes);
  };
  int64_t done = 0;
  if constexpr (B <= IN_ORDER) {
    done = whole / (2 * LANES) * (2 * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < N; ++r) {
      // Two sums, so that one need not wait for the other.
      Vec even[B] = {}, odd[B] = {};
      for (int64_t i = 0; i < done; i += 2 * LANES) {
        add(even, r, i, LANES);
        add(odd, r, i + LANES, LANES);
      }
      for (int b = 0; b < B; ++b) found[r * B + b] = even[b] + odd[b];
    }
  }
  for (; done < whole; done += LANES) {
#pragma GCC unroll 16
    for (int r = 0; r < N; ++r) __builtin_prefetch(weight + AHEAD + done * N + r * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < N; ++r) add(found + r * B, r, done, LANES);
  }
  if (whole < n)
#pragma GCC unroll 16
    for (int r = 0; r < N; ++r) add(found + r * B, r, whole, n - whole);
  float sum[LANES];
  store(sum, sums(found), LANES);
  for (int b = 0; b < B; ++b)
    for (int r = 0; r < N; ++r) out[b * width + r] = sum[r * B + b];
}

// `products` of B rows and `count` rows of weights.
template <int B>
void rows(const float *x, const float *weight, int64_t n, int64_t count, float *out, int64_t width) {
  constexpr int N = LANES / B;
  int64_t r = 0;
  for (; r + N <= count; r += N) products<B, N>(x, weight + r * n, n, out + r, width);
  for (; r < count; ++r) products<B, 1>(x, weight + r * n, n, out + r, width);
}

// Normalise rows: norm(x).
void normalise(const Layer &layer, const float *x, int64_t batch, float *y) {
  const int64_t n = layer.inputs;
  const auto mean = [&](auto value) {
    Sum sum;
    for (int64_t i = 0; i < n; i += LANES) sum.add(value(i, static_cast<int>(std::min<int64_t>(LANES, n - i))));
    float total = 0.0f;
    for (int lane = 0; lane < LANES; ++lane) total += sum.value()[lane];
    return total / n;
  };
  for (int64_t b = 0; b < batch; ++b, x += n, y += n) {
    const float middle = mean([&](int64_t i, int lanes) { return load(x + i, lanes); });
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] - middle;
    const float square = mean([&](int64_t i, int lanes) { return load(y + i, lanes) * load(y + i, lanes); });
    const float scale = 1.0f / std::sqrt(square + layer.eps);
    for (int64_t i = 0; i < n; ++i) y[i] = y[i] * scale * layer.norm_weight[i] + layer.norm_bias[i];
  }
}

// The share of one thread in consecutive layers, each of which reads the whole result of the layer before.
class Worker {
 public:
  Worker(int64_t batch, Region &region) : batch_(batch), region_(region) {}

  // out = layer(x) + residual, which may be null, for the outputs of this thread.
  void run(const Layer &layer, const float *x, const float *residual, float *out) {
    region_.run([&] { compute(layer, x, residual, out); });
#pragma omp barrier
  }

 private:
  void compute(const Layer &layer, const float *x, const float *residual, float *out) {
    const int64_t all = omp_get_num_threads(), own = omp_get_thread_num(), n = layer.inputs, width = layer.outputs;
    const int64_t blocks = (width + LANES - 1) / LANES;
    const int64_t start = blocks * own / all * LANES, stop = std::min(width, blocks * (own + 1) / all * LANES);
    if (layer.norm_weight && start < stop) {
      normal_.resize(batch_ * n);
      normalise(layer, x, batch_, normal_.data());
      x = normal_.data();
    }
    for (int64_t i = start; i < stop; i += LANES) {
      const int64_t count = std::min<int64_t>(LANES, stop - i);
      const float *weight = layer.weight + i * n;
      int64_t b = 0;
      for (; b + 4 <= batch_; b += 4) rows<4>(x + b * n, weight, n, count, out + b * width + i, width);
      for (; b + 2 <= batch_; b += 2) rows<2>(x + b * n, weight, n, count, out + b * width + i, width);
      if (b < batch_) rows<1>(x + b * n, weight, n, count, out + b * width + i, width);
      finish(layer, i, count, residual, out);
    }
  }

  // Apply the bias and what follows the product to some outputs.
  void finish(const Layer &layer, int64_t start, int lanes, const float *residual, float *out) const {
    const Vec bias = layer.bias ? load(layer.bias + start, lanes) : Vec{};
    for (int64_t b = 0; b < batch_; ++b) {
      const int64_t place = b * layer.outputs + start;
      Vec y = load(out + place, lanes) + bias;
      if (layer.gelu) y = gelu(y);
      if (residual) y += load(residual + place, lanes);
      store(out + place, y, lanes);
    }
  }

  int64_t batch_;
  Region &region_;
  std::vector<float> normal_;
};

}  // namespace

extern "C" {

int aft_dense(const Layer *layer, int64_t batch, const float *x, float *out, int threads) {
  Region region;
#pragma omp parallel num_threads(threads_for(layer->inputs * layer->outputs, threads))
  Worker(batch, region).run(*layer, x, nullptr, out);
  return guarded([&] { region.finish(); });
}

int aft_dense_block(const Layer *layers, int64_t batch, const float *x, const float *y, float *sum, float *hidden,
                    float *out, int threads) {
  const int64_t size = batch * layers[2].outputs;
  if (!layers[0].weight)
    for (int64_t i = 0; i < size; ++i) sum[i] = x[i] + y[i];
  const int64_t most = std::max(layers[1].inputs * layers[1].outputs, layers[2].inputs * layers[2].outputs);
  Region region;
#pragma omp parallel num_threads(threads_for(most, threads))
  {
    Worker worker(batch, region);
    if (layers[0].weight) worker.run(layers[0], y, x, sum);
    worker.run(layers[1], sum, nullptr, hidden);
    worker.run(layers[2], hidden, sum, out);
  }
  return guarded([&] { region.finish(); });
}
}
