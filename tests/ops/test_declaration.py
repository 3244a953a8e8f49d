"""The contract of every declared operation, and a declaration that is not complete."""

import pytest
from contract import CONTRACT

from aft_vision.ops.declaration import OPERATIONS, Form, Operation
from aft_vision.ops.full.eager import FullInputs, full_backward, full_forward


@pytest.mark.parametrize('name', OPERATIONS)
@pytest.mark.parametrize('promise', CONTRACT)
def test_an_operation_keeps(promise: str, name: str):
    CONTRACT[promise](name)


def test_an_operation_with_a_bias_needs_a_forward_mode():
    form = Form('eager', full_forward, full_backward)
    with pytest.raises(ValueError, match='expected bias_index for aft_full, got None'):
        Operation('aft_full', FullInputs, (form,), biases=('bias',))
