"""AFT-conv for a few sequences on a CPU: `wide.cpp`, with sums in float32; the backward is that of `conv.cpp`.

A call with a denominator that underflows is done again by the torch form, which repairs it.
"""

import torch
from torch import Tensor

from aft_vision.ops.common.cpp import (
    LEAST,
    address,
    compiled,
    float_buffer,
    floats,
    lanes,
    narrow_output,
    pack,
    profiled,
    stream,
    whole_vectors,
)
from aft_vision.ops.common.inputs import ConvInputs, empty_denominator, empty_output
from aft_vision.ops.conv import eager as conv
from aft_vision.ops.conv.cpp import conv_backward as conv_backward
from aft_vision.ops.position_bias import kept_weights


def conv_forward(inputs: ConvInputs, save: bool) -> tuple[Tensor, Tensor | None]:
    """Return y and the denominators (AFT Eq. 6)."""
    q, k, v, kernel, (height, width), mask, _ = inputs
    (batch, tokens, channels), (heads, side, _) = v.shape, kernel.shape
    out, den = empty_output(q, v), empty_denominator(k, v, save) if save else None
    y, held = narrow_output(out), list[Tensor]()
    size, stride = min(side, 2 * max(height, width) - 1), whole_vectors(heads) + lanes()
    layout, kept = ('wide', size, stride), kept_weights(kernel)
    taps = None if kept is None else kept.get(layout)
    source = floats(kernel, held) if taps is None else 0
    taps = float_buffer((size * size + 1) * stride) if taps is None else taps
    scratch = float_buffer((2, batch, tokens, stride))
    sizes = batch, height, width, channels, heads, source, side, size, taps.data_ptr(), stride
    streams = *stream(q, held), *stream(k, held), *stream(v, held), address(mask, held)
    fields = *sizes, scratch[0].data_ptr(), scratch[1].data_ptr(), *streams, *stream(y, held), *stream(den, held)
    with profiled('aft_vision::conv_forward'):
        good = compiled().aft_conv_wide_forward(pack(*fields), LEAST, torch.get_num_threads())
    if not good:
        return conv.conv_forward(inputs, save)
    if kept is not None:
        kept[layout] = taps
    return out if y is out else out.copy_(y), den
