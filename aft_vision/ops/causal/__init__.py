"""The causal forms of AFT-full, AFT-local and AFT-simple (footnote 2)."""

from torch import Tensor

from aft_vision.ops.causal import aten, eager, local_cpp, simple_cpp
from aft_vision.ops.common import cpp as compiled
from aft_vision.ops.common.inputs import Qkv, check_qkv
from aft_vision.ops.declaration import Form, Operation, lazy_function
from aft_vision.ops.flops import mean_products
from aft_vision.ops.full import check_full
from aft_vision.ops.full.eager import FullInputs
from aft_vision.ops.local.eager import LocalInputs
from aft_vision.ops.operator import register, triton_form


def check_local_causal(inputs: LocalInputs) -> None:
    """Raise ValueError unless the shapes are those of `ops.aft_local_causal`."""
    check_qkv(inputs)
    v, band = inputs.v, inputs.band
    if band.ndim != 2 or band.shape[0] != v.shape[1] or band.shape[1] == 0:
        raise ValueError(f'band must have shape ({v.shape[1]}, s) for a window of s tokens, got {tuple(band.shape)}')


FULL_CAUSAL = register(
    Operation(
        'aft_full_causal',
        FullInputs,
        forms=(Form('eager', eager.full_causal_forward, eager.full_causal_backward),),
        check=check_full,
        causal=True,
        biases=('bias',),
        products=lambda x: mean_products(x, x.v[1], False),
        graph=aten.aft_full_causal,
        reference=lazy_function('reference', 'aft_full_causal'),
        draw=lambda shape, draw: {'bias': draw(shape.tokens, shape.tokens)},
    )
)
LOCAL_CAUSAL = register(
    Operation(
        'aft_local_causal',
        LocalInputs,
        forms=(
            Form('cpp', local_cpp.local_causal_forward, local_cpp.local_causal_backward, local_cpp.supports),
            triton_form('causal.local_triton', 'local_causal_forward', 'local_causal_backward'),
            Form('eager', eager.local_causal_forward, eager.local_causal_backward),
        ),
        check=check_local_causal,
        causal=True,
        biases=('band',),
        products=lambda x: mean_products(x, min(x.v[1], x.band[1]), True),
        graph=aten.aft_local_causal,
        reference=lazy_function('reference', 'aft_local_causal'),
        draw=lambda shape, draw: {'band': draw(shape.tokens, shape.window)},
    )
)
SIMPLE_CAUSAL = register(
    Operation(
        'aft_simple_causal',
        Qkv,
        forms=(
            Form('cpp', simple_cpp.simple_causal_forward, simple_cpp.simple_causal_backward, compiled.supports),
            triton_form('causal.simple_triton', 'simple_causal_forward', 'simple_causal_backward'),
            Form('eager', eager.simple_causal_forward, eager.simple_causal_backward),
        ),
        causal=True,
        products=lambda x: mean_products(x, 0, True),
        graph=aten.aft_simple_causal,
        reference=lazy_function('reference', 'aft_simple_causal'),
    )
)
