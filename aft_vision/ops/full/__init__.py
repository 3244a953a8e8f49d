"""AFT-full: a position bias for each pair of tokens (AFT Eq. 2)."""

import torch
from torch import Tensor

from aft_vision.ops.common import cpp as compiled
from aft_vision.ops.common.inputs import check_qkv
from aft_vision.ops.declaration import BiasWeights, Form, Operation, lazy_function
from aft_vision.ops.flops import mean_products
from aft_vision.ops.full import aten, cpp, eager
from aft_vision.ops.full.eager import FullInputs
from aft_vision.ops.operator import register, triton_form


def check_full(inputs: FullInputs) -> None:
    """Raise ValueError unless the shapes are those of `ops.aft_full`."""
    check_qkv(inputs)
    bias, tokens = inputs.bias, inputs.v.shape[1]
    if bias.shape != (tokens, tokens):
        raise ValueError(f'bias must have shape {(tokens, tokens)} to match v, got {tuple(bias.shape)}')


FULL = register(
    Operation(
        'aft_full',
        FullInputs,
        forms=(
            Form('cpp', cpp.full_forward, cpp.full_backward, compiled.supports, takes_weights=True),
            triton_form('full.triton', 'full_forward', 'full_backward'),
            # Torch multiplies by the library that is made for the processor.
            Form('eager', eager.full_forward, eager.full_backward, is_candidate=lambda inputs: inputs.v.is_cpu),
        ),
        check=check_full,
        biases=('bias',),
        graph=aten.aft_full,
        weights=BiasWeights(
            ('T', 'T'), cpp.bias_weights, cpp.weights_layout, lambda bias, v: FullInputs(None, v, v, bias)
        ),
        products=lambda x: mean_products(x, x.v[1], False),
        reference=lazy_function('reference', 'aft_full'),
        draw=lambda shape, draw: {'bias': draw(shape.tokens, shape.tokens)},
    )
)
