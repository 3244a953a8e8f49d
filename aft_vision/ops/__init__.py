"""The operations of AFT as pure functions of tensors.

Shape letters, the same everywhere: B batch, T sequence length (targets), S sources, C model width, D channels of an
operation, H, W token grid, h heads, s window or kernel size, V vocabulary.
"""

from aft_vision.ops import trials
from aft_vision.ops.aft import aft_axial, aft_conv, aft_full, aft_local, aft_onehot, aft_simple
from aft_vision.ops.aft_causal import aft_full_causal, aft_local_causal, aft_simple_causal
from aft_vision.ops.common.inputs import check_heads, check_qkv
from aft_vision.ops.constant_bias import bias_weights
from aft_vision.ops.declaration import Form, Operation, Shape
from aft_vision.ops.decode.block import Block, Dense
from aft_vision.ops.decode.state import (
    LocalState,
    SimpleState,
    aft_local_state,
    aft_simple_state,
    clone_state,
    reorder_state,
)
from aft_vision.ops.decode.step import (
    aft_local_prefill,
    aft_local_step,
    aft_simple_prefill,
    aft_simple_step,
    compile_decoder,
)
from aft_vision.ops.flops import jit_handles, mean_products
from aft_vision.ops.operator import register
from aft_vision.ops.position_bias import (
    factorized_band_row,
    factorized_bias,
    gumbel_kernel,
    hard_kernel,
    kernel_entropy,
    local_band_row,
    local_bias,
    onehot_kernel,
    standardized_kernel,
)
