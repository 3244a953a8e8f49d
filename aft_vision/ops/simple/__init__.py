"""AFT-simple: no position bias (AFT Eq. 5)."""

from aft_vision.ops.common.inputs import Qkv, empty_context
from aft_vision.ops.declaration import Form, Operation, lazy_function
from aft_vision.ops.flops import mean_products
from aft_vision.ops.operator import register, triton_form
from aft_vision.ops.simple import aten, eager

SIMPLE = register(
    Operation(
        'aft_simple',
        Qkv,
        forms=(
            triton_form('simple.triton', 'simple_forward', 'simple_backward'),
            Form('eager', eager.simple_forward, eager.simple_backward),
        ),
        empty_saved=empty_context,
        graph=aten.aft_simple,
        products=lambda x: mean_products(x, 0, True),
        reference=lazy_function('reference', 'aft_simple'),
    )
)
