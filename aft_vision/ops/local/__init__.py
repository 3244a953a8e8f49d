"""AFT-local: position biases inside a window (AFT Eq. 4)."""

from torch import Tensor

from aft_vision.ops.common.inputs import check_qkv
from aft_vision.ops.declaration import Form, Operation, lazy_function
from aft_vision.ops.flops import mean_products
from aft_vision.ops.local import aten, eager
from aft_vision.ops.local.eager import LocalInputs
from aft_vision.ops.operator import register


def check_local(inputs: LocalInputs) -> None:
    """Raise ValueError unless the shapes are those of `ops.aft_local`."""
    check_qkv(inputs)
    band, tokens = inputs.band, inputs.v.shape[1]
    if band.ndim != 2 or band.shape[0] != tokens or band.shape[1] % 2 == 0:
        raise ValueError(
            f'band must have shape ({tokens}, 2 * s - 1) for a window of s tokens, got {tuple(band.shape)}'
        )


LOCAL = register(
    Operation(
        'aft_local',
        LocalInputs,
        forms=(Form('eager', eager.local_forward, eager.local_backward),),
        check=check_local,
        biases=('band',),
        graph=aten.aft_local,
        products=lambda x: mean_products(x, min(x.v[1], x.band[1]), True),
        reference=lazy_function('reference', 'aft_local'),
        draw=lambda shape, draw: {'band': draw(shape.tokens, 2 * shape.window - 1)},
    )
)
