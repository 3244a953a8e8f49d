"""The compiled forms in each kind of product and in the vectors of each set of instructions that the processor has."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from helpers import assert_matches_reference, change, kernels_run, make_inputs, single
from instructions import KINDS, MULTIPLIED, OTHERS, Place, find_missing, places
from torch import Tensor

from aft_vision import ops
from aft_vision.ops import reference, trials
from aft_vision.ops.common import build, cpp

pytestmark = [
    pytest.mark.cpp,
    pytest.mark.usefixtures('compiled'),
    pytest.mark.filterwarnings("error:.*has no '.*' form"),
]
RUN = [place for place in places() if place.instructions in build.runnable_instructions()]


@contextmanager
def running(place: Place) -> Iterator[None]:
    with cpp.use_instructions(place.instructions), cpp.multiply_bfloat16_as(KINDS[place.kind]):
        yield


@pytest.mark.parametrize('others', ['', 'masked'])
@pytest.mark.parametrize('place', RUN, ids='-'.join)
def test_a_form_equals_float64(place: Place, others: str):
    expected, form = getattr(reference, place.operation), getattr(ops, place.operation)
    with running(place):
        for sizes in (MULTIPLIED | OTHERS)[place.operation, place.form]:
            inputs = change(place.operation, make_inputs(place.operation, *sizes), others)
            for dtype in (torch.float32, torch.bfloat16) if place.kind == 'single' else (torch.bfloat16,):

                def op(**inputs: Tensor) -> Tensor:
                    return form(**inputs, backend=place.form)

                assert_matches_reference(op, expected, inputs, dtype)


def test_every_form_is_among_them_and_runs_its_own_code():
    assert not find_missing()
    name, sizes = 'aft_full', MULTIPLIED['aft_full', 'cpp'][0]
    for instructions in build.runnable_instructions():
        with cpp.use_instructions(instructions):
            inputs = single(make_inputs(name, *sizes))
            assert kernels_run(lambda inputs=inputs: ops.aft_full(**inputs, backend='cpp').sum().backward())
            assert cpp.lanes() == (16 if instructions.startswith('avx512') else 8)


@pytest.mark.parametrize('instructions', build.runnable_instructions())
def test_trials_find_nothing_wrong(instructions: str):
    with cpp.use_instructions(instructions):
        assert trials.try_forms({*KINDS.values()}) == {}
        assert cpp.failures == {}


@pytest.mark.parametrize(('operation', 'form'), MULTIPLIED, ids='-'.join)
def test_pairs_in_loops_equal_those_of_the_instruction_bit_for_bit(operation: str, form: str):
    if 'avx512_bf16' not in build.runnable_instructions():
        pytest.skip('this processor has no instruction for pairs of bfloat16')
    for sizes in MULTIPLIED[operation, form]:
        results = []
        for instructions in ('avx512', 'avx512_bf16'):
            inputs = single(make_inputs(operation, *sizes), torch.bfloat16)
            with running(Place(operation, form, 'pairs', instructions)):
                y = getattr(ops, operation)(**inputs, backend=form)
                leaves = [x for x in inputs.values() if isinstance(x, Tensor)]
                results.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
        assert all(map(torch.equal, *results))
