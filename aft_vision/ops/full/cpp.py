"""AFT-full on a CPU: `full.cpp`, with sums in float32.

A call with a denominator that underflows is done again by the torch form, which repairs it.
"""

import ctypes
import math

import torch
from torch import Tensor

from aft_vision.ops.common.build import compiled
from aft_vision.ops.common.numerics import empty_denominator, empty_output
from aft_vision.ops.common.product import LEAST, multiplies_pairs, whole_vectors
from aft_vision.ops.common.tensors import (
    cast,
    narrow_neighbours,
    narrow_output,
    number,
    numbers,
    pointer,
    profiled,
    room,
    stream,
)
from aft_vision.ops.full import eager as full
from aft_vision.ops.full.eager import FullInputs

# Of the gradient of the weights, of which each thread sums a part by itself.
MOST_ELEMENTS = 1 << 27


def full_forward(inputs: FullInputs, save: bool) -> tuple[Tensor, Tensor]:
    """Return y and the denominators (AFT Eq. 2)."""
    q, k, v, bias, mask = inputs
    out, den = empty_output(q, v), empty_denominator(k, v, save)
    y = narrow_output(out)
    tensors, mask_ = [narrow_neighbours(x) for x in (q, k, v)], None if mask is None else mask.contiguous()
    threads, pairs = torch.get_num_threads(), multiplies_pairs(v)
    weights = _weights(bias, pairs, by_source=False, threads=threads)
    with profiled('aft_vision::full_forward'):
        good = compiled().aft_full_forward(
            numbers((*v.shape, pairs)),
            pointer(weights),
            *map(stream, tensors),
            pointer(mask_),
            stream(y),
            stream(den if save else None),
            number(LEAST),
            threads,
        )
    if not good:
        return full.full_forward(inputs, save)
    return out if y is out else out.copy_(y), den


def full_backward(
    grad: Tensor, y: Tensor, den: Tensor, inputs: FullInputs, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and bias."""
    q, k, v, bias, mask = inputs
    tokens, threads, pairs = v.shape[1], torch.get_num_threads(), multiplies_pairs(v)
    parts = (threads if need_bias else 0, tokens, whole_vectors(tokens))
    if math.prod(parts) > MOST_ELEMENTS:
        return full.full_backward(grad, y, den, inputs, need_bias)
    tensors, mask_ = (
        [narrow_neighbours(x) for x in (grad, y, den, q, k, v)],
        None if mask is None else mask.contiguous(),
    )
    dq, dk, dv = (None if x is None else narrow_output(x.new_empty(x.shape)) for x in (q, k, v))
    d_weights = torch.zeros(parts, dtype=torch.float32, device='cpu')
    weights = _weights(bias, pairs, by_source=True, threads=threads)
    with profiled('aft_vision::full_backward'):
        good = compiled().aft_full_backward(
            numbers((*v.shape, pairs)),
            pointer(weights),
            *map(stream, tensors),
            pointer(mask_),
            *map(stream, (dq, dk, dv)),
            pointer(d_weights if need_bias else None),
            number(LEAST),
            threads,
        )
    if not good:
        return full.full_backward(grad, y, den, inputs, need_bias)
    d_bias = None
    if need_bias:
        bias_ = bias.float()
        exp = (bias_ - bias_.amax(dim=1, keepdim=True)).exp_()
        d_bias = (d_weights[0] if threads == 1 else d_weights.sum(0))[:, :tokens].mul_(exp)
    found = cast((dq, dk, dv, d_bias), (q, k, v, bias), k)
    return found[0], found[1], found[2], found[3].contiguous()


def _weights(bias: Tensor, pairs: bool, by_source: bool, threads: int) -> Tensor:
    # exp(bias - row maximum), as words of a product's rows: (tiles, words, rows of a tile).
    tokens, rows = len(bias), compiled().aft_rows()
    bias = bias.float().contiguous()
    out = room((-(-tokens // rows), -(-tokens // (1 + pairs)), rows))
    compiled().aft_full_weights(
        pointer(bias), ctypes.c_int64(tokens), ctypes.c_int(by_source), ctypes.c_int(pairs), pointer(out), threads
    )
    return out
