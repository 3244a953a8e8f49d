"""AFT-full on a CPU: `full.cpp`, with sums in float32.

A call with a denominator that underflows is done again by the torch form, which repairs it.
"""

import functools
import math

import torch
from torch import Tensor

from aft_vision.ops.common.cpp import (
    CPU,
    SINGLE,
    address,
    cast,
    compiled,
    float_buffer,
    floats,
    lanes,
    operands,
    pack,
    run_backward,
    run_forward,
    stream,
    whole_vectors,
)
from aft_vision.ops.full import eager as full
from aft_vision.ops.full.eager import FullInputs

# Elements of the gradient of the weights, which each thread sums in a buffer of its own.
MAX_ELEMENTS = 1 << 27


def bias_weights(bias: Tensor, v: Tensor) -> Tensor:
    """Compute the weights of a position bias, which change only with it.

    Args:
        bias: (T, T).
        v: values, whose type is that of the operands.

    Returns:
        (blocks of targets, words of sources, rows of a block) in float32, or these and 2 in bfloat16: as the kernels
        read it, the weight of each source relative to the largest of its target.
    """
    keep_alive: list[Tensor] = []
    fields = _place_weights(bias, v, None, keep_alive)
    compiled().aft_full_weights(pack('aft_full_weights', *fields), torch.get_num_threads())
    return keep_alive[0]


def weights_layout(bias: Tensor, v: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape and the type of the weights of a position bias (T, T)."""
    return _layout(operands(v), len(bias), lanes())


@functools.cache
def _layout(kind: int, count: int, lanes: int) -> tuple[tuple[int, ...], torch.dtype]:
    rows, words = compiled().aft_full_rows(kind), compiled().aft_full_words(kind, count)
    blocks = -(-count // rows)
    return ((blocks, words, rows), torch.float32) if kind == SINGLE else ((blocks, words, rows, 2), torch.bfloat16)


def full_forward(inputs: FullInputs, save: bool, weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return y and the denominators (AFT Eq. 2)."""
    keep_alive: list[Tensor] = []
    found = run_forward('full', inputs, _call(inputs, weights, keep_alive), keep_alive, save)
    return found or full.full_forward(inputs, save)


def full_backward(grad: Tensor, y: Tensor, den: Tensor, inputs: FullInputs, need_bias: bool) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v and bias."""
    bias, count = inputs.bias, inputs.v.shape[1]
    by_thread = (torch.get_num_threads() if need_bias else 0, count, whole_vectors(count))
    if math.prod(by_thread) > MAX_ELEMENTS:
        return full.full_backward(grad, y, den, inputs, need_bias)
    d_weights = torch.zeros(by_thread, dtype=torch.float32, device=CPU) if need_bias else None
    d_bias = float_buffer(bias.shape) if need_bias else None
    keep_alive: list[Tensor] = []
    fields = _call(inputs, None, keep_alive)
    found = run_backward('full', (grad, y, den), inputs, fields, keep_alive, (d_weights, d_bias))
    if found is None:
        return full.full_backward(grad, y, den, inputs, need_bias)
    return cast((*found, d_bias), inputs[:4], inputs.k)


def _call(inputs: FullInputs, weights: Tensor | None, keep_alive: list[Tensor]) -> tuple[int, ...]:
    # The fields of `Call` in C++; `keep_alive` gets the tensors that must outlive the call.
    q, k, v, bias, mask = inputs
    sizes = *_place_weights(bias, v, weights, keep_alive), len(v), v.shape[2]
    return *sizes, *stream(q, keep_alive), *stream(k, keep_alive), *stream(v, keep_alive), address(mask, keep_alive)


def _place_weights(bias: Tensor, v: Tensor, weights: Tensor | None, keep_alive: list[Tensor]) -> tuple[int, ...]:
    # The fields of `BiasWeights` in C++: weights, if they are given, or a place for them and the bias, from which they
    # are computed first.
    if weights is not None:
        return len(bias), operands(v), 0, weights.data_ptr()
    shape, dtype = weights_layout(bias, v)
    weights = torch.empty(shape, dtype=dtype, device=CPU)
    keep_alive.append(weights)
    return len(bias), operands(v), floats(bias, keep_alive), weights.data_ptr()
