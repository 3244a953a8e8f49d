"""AFT-simple with the future masked on a CPU: `scan.cpp`, with sums in float32."""

import torch
from torch import Tensor

from aft_vision.ops.causal.eager import shield_backward, shield_forward
from aft_vision.ops.common.build import compiled
from aft_vision.ops.common.numerics import Qkv, empty_denominator, empty_output
from aft_vision.ops.common.tensors import cast, float_output, neighbours, numbers, pointer, profiled, room, tokens


@shield_forward
def simple_causal_forward(inputs: Qkv, save: bool) -> tuple[Tensor, Tensor]:
    """Return y and the denominators (AFT Eq. 5, causal)."""
    q, k, v, mask = inputs
    out, den = empty_output(q, v), empty_denominator(k, v, save)
    y, bottom = float_output(out), float_output(den)
    tensors, mask = [neighbours(x) for x in (q, k, v)], None if mask is None else mask.contiguous()
    with profiled('aft_vision::scan_forward'):
        compiled().aft_simple_causal_forward(
            numbers(v.shape),
            *map(tokens, tensors),
            pointer(mask),
            tokens(y),
            tokens(bottom if save else None),
            torch.get_num_threads(),
        )
    return (out if y is out else out.copy_(y)), (den if bottom is den else den.copy_(bottom))


@shield_backward
def simple_causal_backward(grad: Tensor, y: Tensor, den: Tensor, inputs: Qkv, need_bias: bool) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v."""
    q, k, v, mask = inputs
    tensors = [neighbours(x) for x in (grad, y, den, q, k, v)]
    mask = None if mask is None else mask.contiguous()
    found = [None if x is None else room(x.shape) for x in (q, k, v)]
    with profiled('aft_vision::scan_backward'):
        compiled().aft_simple_causal_backward(
            numbers(v.shape), *map(tokens, tensors), pointer(mask), *map(tokens, found), torch.get_num_threads()
        )
    return cast(found, (q, k, v), k)
