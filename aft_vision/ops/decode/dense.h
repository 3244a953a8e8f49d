// The interface of `dense.cpp`.

#pragma once

#include <algorithm>
#include <cstdint>

// Numbers to read from which on starting a thread pays.
constexpr int64_t THREAD_NUMBERS = 16384;

// The number of threads for reading some numbers, of those that are allowed.
inline int threads_for(int64_t numbers, int threads) {
  return std::clamp<int64_t>(numbers / THREAD_NUMBERS, 1, std::max(threads, 1));
}

// act(norm(x) weight^T + bias), each part but the product optional.
struct Layer {
  const float *norm_weight, *norm_bias;  // (inputs,)
  const float *weight, *bias;            // (outputs, inputs), (outputs,)
  int64_t inputs, outputs;
  float eps;
  int32_t gelu;
};

extern "C" {

// Both return 0, or a code of failure.

// out (batch, outputs) = layer(x), of x (batch, inputs).
int aft_dense(const Layer *layer, int64_t batch, const float *x, float *out, int threads);

// The part of a block after its mixer, of layers proj, fc1, fc2: x += proj(y), or x += y where proj has no weight, then
// out = x + fc2(fc1(x)). `sum` is a buffer for x, `hidden` for the outputs of fc1.
int aft_dense_block(const Layer *layers, int64_t batch, const float *x, const float *y, float *sum, float *hidden,
                    float *out, int threads);
}
