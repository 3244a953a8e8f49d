"""AFT-simple with the future masked on a CPU: `scan.cpp`, with sums in float32."""

from torch import Tensor

from aft_vision.ops.causal.eager import shield_backward, shield_forward
from aft_vision.ops.common.cpp import address, cast, run_backward, run_forward, stream
from aft_vision.ops.common.inputs import Qkv


@shield_forward
def simple_causal_forward(inputs: Qkv, save: bool) -> tuple[Tensor, Tensor | None]:
    """Return y and the denominators (AFT Eq. 5, causal)."""
    keep_alive: list[Tensor] = []
    found = run_forward('simple_causal', inputs, _call(inputs, keep_alive), keep_alive, save)
    assert found is not None
    return found


@shield_backward
def simple_causal_backward(grad: Tensor, y: Tensor, den: Tensor, inputs: Qkv, need_bias: bool) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v."""
    keep_alive: list[Tensor] = []
    found = run_backward('simple_causal', (grad, y, den), inputs, _call(inputs, keep_alive), keep_alive, ())
    assert found is not None
    return cast(found, inputs[:3], inputs.k)


def _call(inputs: Qkv, keep_alive: list[Tensor]) -> tuple[int, ...]:
    # The fields of `Inputs` in C++; `keep_alive` gets the tensors that must outlive the call.
    q, k, v, mask = inputs
    return *v.shape, *stream(q, keep_alive), *stream(k, keep_alive), *stream(v, keep_alive), address(mask, keep_alive)
