"""The compiled steps of decoding: where they run, and that they are those of torch, states included."""

from itertools import cycle

import pytest
import torch
from helpers import NASTY_KEYS, assert_close, make_inputs, make_nasty, nasty_keys, plain, threads
from torch import Tensor

from aft_vision import ops
from aft_vision.ops.decode import step, step_cpp

pytestmark = [pytest.mark.cpp, pytest.mark.usefixtures('compiled')]


def run(inputs: dict[str, Tensor | None], *backends: str) -> Tensor:
    """All tokens one by one, by these backends in turn, in the simple form where there is no band."""
    batch, tokens, dim = inputs['v'].shape
    band = inputs.get('band')
    state = ops.aft_simple_state(batch, dim) if band is None else ops.aft_local_state(batch, dim, band.shape[1])
    rows, turn = [], cycle(backends or ('auto',))
    for t in range(tokens):
        q, k, v = (None if inputs[name] is None else inputs[name][:, t] for name in 'qkv')
        if band is None:
            y, state = ops.aft_simple_step(q, k, v, state, next(turn))
        else:
            y, state = ops.aft_local_step(q, k, v, band[t], state, next(turn))
        rows.append(y)
    return torch.stack(rows, 1)


def step_inputs(s: int | None, T: int = 40, D: int = 19, B: int = 2) -> dict[str, Tensor | None]:
    return plain(make_inputs('aft_simple' if s is None else 'aft_local_causal', T, D, s, B=B))


@pytest.mark.parametrize('keys', ['ordinary', *NASTY_KEYS])
@pytest.mark.parametrize(
    ('s', 'bias'), [(None, 'ordinary'), (1, 'ordinary'), (9, 'plus_minus_80'), (60, 'ordinary'), (60, 'within_50')]
)
def test_a_step_is_that_of_torch(s: int | None, keys: str, bias: str):
    inputs = make_nasty(step_inputs(s), keys, bias)
    expected = run(inputs, 'eager').double()
    # A state can be continued from by the other form.
    for backends in (('auto',), ('eager', 'auto', 'auto')):
        assert_close(run(inputs, *backends), expected, 2e-6)


def test_an_unknown_backend_is_an_error():
    with pytest.raises(ValueError, match="backend must be 'auto' or 'eager', got 'cpp'"):
        run(step_inputs(None), 'cpp')


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize('s', [None, 9])
def test_half_precision_is_widened(s: int | None, dtype: torch.dtype):
    inputs = {name: x.to(dtype) for name, x in step_inputs(s).items()}
    y = run(inputs)
    assert y.dtype == dtype
    expected = run({name: x.float() for name, x in inputs.items()})
    assert torch.equal(y, expected.to(dtype))


@pytest.mark.parametrize('s', [None, 9])
def test_a_token_without_a_query_has_no_gate(s: int | None):
    inputs = step_inputs(s)
    gated = run(inputs)
    y = run(inputs | {'q': None})
    assert_close(torch.sigmoid(inputs['q']) * y, gated.double(), 1e-6)


@pytest.mark.parametrize('s', [None, 9])
@pytest.mark.parametrize('batch', [2, 3, 5])
def test_rows_and_threads_change_nothing(batch: int, s: int | None):
    # A window that is worth three threads.
    inputs = step_inputs(s, D=19 if s is None else 1500, B=batch)
    y = run(inputs)
    row = run({name: x[1:2] if name in 'qkv' else x for name, x in inputs.items()})
    # The first token goes to torch's exp, which rounds by the length of what it is given.
    assert_close(row, y[1:2].double(), 1e-6)
    with threads(3):
        assert torch.equal(run(inputs), y)


@pytest.mark.parametrize('s', [None, 9])
def test_parts_of_a_fused_projection_are_read_where_they_are(s: int | None):
    inputs = step_inputs(s)
    fused = torch.cat([inputs[name] for name in 'qkv'], -1)
    parts = dict(zip('qkv', fused.split(19, -1), strict=True))
    expected = run(inputs)
    assert torch.equal(run(inputs | parts), expected)
    turned = {name: inputs[name].mT.contiguous().mT for name in 'qkv'}
    assert torch.equal(run(inputs | turned), expected)


def test_it_covers_float32_states_that_lie_in_order():
    k = torch.zeros(2, 6)
    state = ops.aft_local_state(2, 6, 3)
    for each in (state, ops.aft_simple_state(2, 6)):
        assert step.step_kernels('auto', each, k) is step_cpp
        assert step.step_kernels('eager', each, k) is None
    assert not step_cpp.supports_step(ops.aft_local_state(2, 6, 3, torch.float64), k)
    assert not step_cpp.supports_step(state, k, k.to('meta'))
    assert not step_cpp.supports_step(state._replace(ring=state.ring.mT.contiguous().mT), k)


@pytest.mark.parametrize('s', [None, 9])
def test_nothing_is_differentiated(s: int | None):
    # Neither by the compiled form nor by what it leaves to torch: the first token, and one far above the others.
    inputs = {name: x.requires_grad_() for name, x in step_inputs(s).items()}
    assert not run(inputs).requires_grad
    assert not run(inputs | {'k': nasty_keys(inputs['k'].detach())['last_at_200'].requires_grad_()}).requires_grad
