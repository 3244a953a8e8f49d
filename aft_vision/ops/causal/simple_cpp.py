"""AFT-simple with the future masked on a CPU: `scan.cpp`, with sums in float32."""

import torch
from torch import Tensor

from aft_vision.ops.causal.eager import shield_backward, shield_forward
from aft_vision.ops.common.cpp import address, cast, compiled, float_buffer, float_output, pack, profiled, tokens
from aft_vision.ops.common.inputs import Qkv, empty_denominator, empty_output


@shield_forward
def simple_causal_forward(inputs: Qkv, save: bool) -> tuple[Tensor, Tensor]:
    """Return y and the denominators (AFT Eq. 5, causal)."""
    out, den = empty_output(inputs.q, inputs.v), empty_denominator(inputs.k, inputs.v, save)
    y, denominator = float_output(out), float_output(den)
    keep_alive: list[Tensor] = []
    fields = *_call(inputs, keep_alive), *tokens(y, keep_alive), *tokens(denominator if save else None, keep_alive)
    with profiled('aft_vision::scan_forward'):
        compiled().aft_simple_causal_forward(pack('aft_simple_causal_forward', *fields), torch.get_num_threads())
    return (out if y is out else out.copy_(y)), (den if denominator is den else den.copy_(denominator))


@shield_backward
def simple_causal_backward(grad: Tensor, y: Tensor, den: Tensor, inputs: Qkv, need_bias: bool) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v."""
    q, k, v, _ = inputs
    found = [None if x is None else float_buffer(x.shape) for x in (q, k, v)]
    keep_alive: list[Tensor] = []
    fields = _call(inputs, keep_alive)
    for x in (grad, y, den, *found):
        fields += tokens(x, keep_alive)
    with profiled('aft_vision::scan_backward'):
        compiled().aft_simple_causal_backward(pack('aft_simple_causal_backward', *fields), torch.get_num_threads())
    return cast(found, (q, k, v), k)


def _call(inputs: Qkv, keep_alive: list[Tensor]) -> tuple[int, ...]:
    # The fields of `Call` in C++; `keep_alive` gets the tensors that must outlive the call.
    q, k, v, mask = inputs
    return *v.shape, *tokens(q, keep_alive), *tokens(k, keep_alive), *tokens(v, keep_alive), address(mask, keep_alive)
