"""The operations as plain, differentiable aten graphs, for exporters that know no custom operator (ONNX, Core ML).

Equal to `aft_vision.ops` while, in float32, (largest w - w) + (largest k - k) stays below about 87 nats at some source
of every target; beyond that finite, but a target may come out as 0. `aft_conv` is the paper's convolution form, so one
graph serves every grid; w below about -8 at a dominating key costs it digits, and w below about -15 in a window over
the whole grid all of them, though it stays about as large as the values. `mix_matmul` loses none, and serves one
grid; `aft_onehot` and `aft_axial` lose none either. The forms are split in two, so that an exporter can compute the
weights once and keep them as constants.
"""

from aft_vision.ops.axial.aten import aft_axial
from aft_vision.ops.conv.aten import aft_conv, aft_onehot, conv_matrix, conv_means, conv_taps, mix_conv, mix_matmul
from aft_vision.ops.full.aten import aft_full, full_weights, mix_full
from aft_vision.ops.local.aten import aft_local, unbanded
from aft_vision.ops.simple.aten import aft_simple

# fmt: off
__all__ = [
    'aft_axial', 'aft_conv', 'aft_full', 'aft_local', 'aft_onehot', 'aft_simple', 'conv_matrix', 'conv_means',
    'conv_taps', 'full_weights', 'mix_conv', 'mix_full', 'mix_matmul', 'unbanded',
]
