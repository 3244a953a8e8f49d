"""AFT-full on a CPU: `full.cpp`, with sums in float32.

A call with a denominator that underflows is done again by the torch form, which repairs it.
"""

import math

import torch
from torch import Tensor

from aft_vision.ops.common.cpp import (
    LEAST,
    address,
    cast,
    compiled,
    float_buffer,
    floats,
    multiplies_pairs,
    narrow_like,
    narrow_output,
    pack,
    profiled,
    rows,
    stream,
    whole_vectors,
)
from aft_vision.ops.common.inputs import FullInputs, empty_denominator, empty_output
from aft_vision.ops.full import eager as full
from aft_vision.ops.position_bias import kept_weights

# Elements of the gradient of the weights, which each thread sums for its own part.
MOST_ELEMENTS = 1 << 27


def full_forward(inputs: FullInputs, save: bool) -> tuple[Tensor, Tensor | None]:
    """Return y and the denominators (AFT Eq. 2)."""
    q, k, v, _, _ = inputs
    out, den = empty_output(q, v), empty_denominator(k, v, save) if save else None
    y, held = narrow_output(out), list[Tensor]()
    layout, kept = (rows(), multiplies_pairs(inputs.v)), kept_weights(inputs.bias)
    weights = None if kept is None else kept.get(layout)
    fields = *_call(inputs, held, weights), *stream(y, held), *stream(den, held)
    with profiled('aft_vision::full_forward'):
        good = compiled().aft_full_forward(pack(*fields), LEAST, torch.get_num_threads())
    if not good:
        return full.full_forward(inputs, save)
    if kept is not None:
        kept[layout] = held[0]
    return out if y is out else out.copy_(y), den


def full_backward(
    grad: Tensor, y: Tensor, den: Tensor, inputs: FullInputs, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and bias."""
    q, k, v, bias, _ = inputs
    tokens, threads = v.shape[1], torch.get_num_threads()
    parts = (threads if need_bias else 0, tokens, whole_vectors(tokens))
    if math.prod(parts) > MOST_ELEMENTS:
        return full.full_backward(grad, y, den, inputs, need_bias)
    dq, dk, dv = narrow_like(q), narrow_like(k), narrow_like(v)
    d_weights = torch.zeros(parts, dtype=torch.float32, device='cpu') if need_bias else None
    d_bias = float_buffer(bias.shape) if need_bias else None
    held: list[Tensor] = []
    fields = _call(inputs, held)
    for x in (grad, y, den, dq, dk, dv):
        fields += stream(x, held)
    fields += address(d_weights, held), address(d_bias, held)
    with profiled('aft_vision::full_backward'):
        good = compiled().aft_full_backward(pack(*fields), LEAST, threads)
    if not good:
        return full.full_backward(grad, y, den, inputs, need_bias)
    found = cast((dq, dk, dv, d_bias), (q, k, v, bias), k)
    return found[0], found[1], found[2], found[3]


def _call(inputs: FullInputs, held: list[Tensor], weights: Tensor | None = None) -> tuple[int, ...]:
    # The fields of `Call` in C++, which fills the weights unless they are given; `held` gets the tensors that must
    # outlive the call, first the weights.
    q, k, v, bias, mask = inputs
    shape, pairs = v.shape, multiplies_pairs(v)
    if weights is None:
        tokens, tile = shape[1], rows()
        # A word for each row of a tile, for the terms of each tile.
        held.append(float_buffer(-(-tokens // tile) * tile * -(-tokens // (1 + pairs))))
        source = floats(bias, held)
    else:
        held.append(weights)
        source = 0
    streams = *stream(q, held), *stream(k, held), *stream(v, held)
    return *shape, pairs, source, held[0].data_ptr(), *streams, address(mask, held)
