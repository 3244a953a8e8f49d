"""An operation of another package: one file with a declaration and an eager form, registered by a public call."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from contract import CONTRACT, compute, inputs_of
from fuzz import search
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from aft_vision import ops
from aft_vision.ops import reference
from aft_vision.ops.common.inputs import check_qkv
from aft_vision.ops.declaration import OPERATIONS
from aft_vision.ops.full.eager import FullInputs, full_backward, full_forward


class CyclicInputs(NamedTuple):
    """A bias (1, T) of the distance from target to source, as if the sequence were a ring."""

    q: Tensor | None
    k: Tensor
    v: Tensor
    ring: Tensor
    mask: Tensor | None = None


def check(inputs: CyclicInputs) -> None:
    check_qkv(inputs)
    if inputs.ring.shape != (1, inputs.v.shape[1]):
        raise ValueError(f'ring must have shape (1, {inputs.v.shape[1]}) to match v, got {tuple(inputs.ring.shape)}')


def index(inputs: CyclicInputs, target: Tensor, source: Tensor) -> ops.BiasIndex:
    entry = (source - target) % len(source)
    return ops.BiasIndex(entry, torch.ones_like(entry, dtype=torch.bool))


def expand(ring: Tensor) -> Tensor:
    place = torch.arange(ring.shape[1], device=ring.device)
    return ring[0, (place - place[:, None]) % len(place)]  # (T, T)


def full_inputs(inputs: CyclicInputs) -> FullInputs:
    return FullInputs(inputs.q, inputs.k, inputs.v, expand(inputs.ring), inputs.mask)


def forward(inputs: CyclicInputs, save: bool) -> tuple[Tensor, Tensor]:
    return full_forward(full_inputs(inputs), save)


def backward(grad: Tensor, y: Tensor, saved: Tensor, inputs: CyclicInputs, need_bias: bool) -> tuple[Tensor, ...]:
    *found, bias = full_backward(grad, y, saved, full_inputs(inputs), need_bias)
    if not need_bias:
        return *found, bias
    place = torch.arange(len(bias), device=bias.device)
    return *found, bias[place[:, None], (place[:, None] + place) % len(place)].sum(0, keepdim=True)


CYCLIC = ops.Operation(
    'cyclic',
    CyclicInputs,
    forms=(ops.Form('eager', forward, backward),),
    check=check,
    biases=('ring',),
    bias_index=index,
    reference=lambda q, k, v, ring, mask=None: reference.aft_full(q, k, v, expand(ring), mask),
    draw=lambda shape, draw: {'ring': draw(1, shape.tokens)},
)


@pytest.fixture(scope='module', autouse=True)
def registered() -> Iterator[Any]:
    """Register the operation for the tests of this file, in which others do not see it."""
    yield ops.register(CYCLIC)
    del OPERATIONS['cyclic']


@pytest.mark.parametrize('promise', CONTRACT)
def test_it_keeps_the_promises_of_every_operation(promise: str):
    CONTRACT[promise]('cyclic')


def test_it_is_called_by_what_registered_it(registered: Any):
    inputs = inputs_of('cyclic')
    assert torch.equal(registered(*inputs.values(), None, 'auto'), compute('cyclic', **inputs))
    with pytest.raises(ValueError, match=r'ring must have shape \(1, 15\)'):
        compute('cyclic', **inputs | {'ring': torch.zeros(1, 3)})


def test_its_products_are_counted_as_those_of_a_whole_bias():
    inputs = inputs_of('cyclic')
    with FlopCounterMode(display=False) as counter:
        compute('cyclic', **inputs)
    assert counter.get_total_flops() == 2 * 2 * 15 * 15 * (6 + 6)
    assert 'aft_vision::cyclic' in ops.jit_handles()


def test_it_is_fuzzed():
    report = search('cyclic', 'eager', 30)
    assert report.cases >= 15
    assert not report.failures


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="expected a new name, got 'cyclic', which is registered"):
        ops.register(CYCLIC)
