"""AFT-simple with the future masked on a CPU: `scan.cpp`, with sums in float32."""

import torch
from torch import Tensor
from torch.profiler import record_function

from aft_vision.ops.causal.eager import shield_backward, shield_forward
from aft_vision.ops.common.build import compiled, library
from aft_vision.ops.common.numerics import accumulate_dtype, empty_denominator, empty_output
from aft_vision.ops.common.tensors import cast, float_output, neighbours, numbers, on_cpu, pointer, room, tokens


def covers_simple_causal(q: Tensor | None, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether this is made for such inputs: a CPU, sums in float32."""
    return on_cpu(q, k, v, mask) and accumulate_dtype(v) == torch.float32 and library() is not None


@shield_forward
def simple_causal_forward(
    q: Tensor | None, k: Tensor, v: Tensor, mask: Tensor | None, save: bool
) -> tuple[Tensor, Tensor]:
    """y and the denominators (AFT Eq. 5, causal)."""
    out, den = empty_output(q, v), empty_denominator(k, v, save)
    y, bottom = float_output(out), float_output(den)
    inputs, mask = [neighbours(x) for x in (q, k, v)], None if mask is None else mask.contiguous()
    with record_function('aft_vision::scan_forward'):
        compiled().aft_simple_causal_forward(
            numbers(v.shape),
            *map(tokens, inputs),
            pointer(mask),
            tokens(y),
            tokens(bottom if save else None),
            torch.get_num_threads(),
        )
    return (out if y is out else out.copy_(y)), (den if bottom is den else den.copy_(bottom))


@shield_backward
def simple_causal_backward(
    grad: Tensor,
    y: Tensor,
    den: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    need_bias: bool,
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v."""
    inputs = [neighbours(x) for x in (grad, y, den, q, k, v)]
    mask = None if mask is None else mask.contiguous()
    found = [None if x is None else room(x.shape) for x in (q, k, v)]
    with record_function('aft_vision::scan_backward'):
        compiled().aft_simple_causal_backward(
            numbers(v.shape), *map(tokens, inputs), pointer(mask), *map(tokens, found), torch.get_num_threads()
        )
    return cast(found, (q, k, v), k)
