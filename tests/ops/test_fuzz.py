"""A few drawn calls of every form of every operator, the same in each run; `make fuzz` tries many others."""

import shutil
from contextlib import nullcontext

import numpy as np
import oracle
import pytest
import torch
from fuzz import BACKENDS, PAIRS, Case, Inputs, Wrong, check, command, compare, main, reproduce, search
from helpers import assert_close

from aft_vision import ops
from aft_vision.ops.declaration import OPERATIONS

# The interpreter of Triton takes up to a second for one call.
EXAMPLES = {'eager': 8, 'cpp': 8, 'triton': 2}


@pytest.mark.parametrize(('operator', 'backend'), PAIRS, ids=map('-'.join, PAIRS))
def test_drawn_calls_equal_float64(operator: str, backend: str):
    if backend == 'cpp' and shutil.which('c++') is None:
        pytest.skip('there is no compiler here')
    if backend == 'triton':
        pytest.importorskip('triton', minversion='3.6')
    report = search(operator, backend, EXAMPLES[backend])
    assert report.cases >= EXAMPLES[backend] // 2
    assert report.failure is None, f'{report.failure[1]}\n{command(report.failure[0])}'


def test_every_public_operator_is_drawn():
    operators = {name for name, x in vars(ops).items() if name.startswith('aft_') and callable(x)}
    assert {name for name in operators if not name.endswith('_state')} == set(BACKENDS)


@pytest.mark.parametrize('name', OPERATIONS)
def test_the_oracle_gives_what_the_reference_gives(name: str):
    sizes = {'grid': (3, 4), 'heads': 2, 'channels': 2} if OPERATIONS[name].has_grid else {'grid': (1, 9), 'heads': 4}
    inputs = Inputs(Case(name, dtype='float64', batch=2, window=3, gated=True, mask='random', flags=False, **sizes))
    named = inputs.named()
    leaves = {
        n: x.requires_grad_() for n, x in named._asdict().items() if n in ('q', 'k', 'v', *OPERATIONS[name].biases)
    }
    y = OPERATIONS[name].reference(*named)
    expected = {'y': y, **dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), inputs.grad), strict=True))}
    for n, term in inputs.expected().items():
        assert_close(torch.from_numpy(term.value), expected[n].detach(), 1e-12, n)


def plant(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let an operator forget its first source from the fifth token on."""
    whole = getattr(ops, name)

    def forgetful(q, k, v, **others):
        short = whole(q, k.index_fill(1, torch.tensor([0]), -1e4), v, **others)
        return torch.cat([whole(q, k, v, **others)[:, :4], short[:, 4:]], 1)

    monkeypatch.setattr(ops, name, forgetful)


def test_a_planted_mistake_is_found_made_small_and_printed_as_a_command(monkeypatch, capsys):
    plant(monkeypatch, 'aft_simple')
    assert main(['--seconds', '0', '--operator', 'aft_simple', '--backend', 'eager']) == 1
    lines = capsys.readouterr().out.splitlines()
    case = eval(next(line for line in lines if 'reproduce(' in line).split('reproduce(')[1].removesuffix(')"'))
    assert case.tokens <= 16
    with pytest.raises(Wrong):
        reproduce(case)
    monkeypatch.undo()
    reproduce(case)


def test_a_later_token_that_reaches_an_earlier_one_is_found(monkeypatch):
    whole = ops.aft_simple_causal
    monkeypatch.setattr(ops, 'aft_simple_causal', lambda q, k, v, **x: whole(q, k, v, **x) + 3e-5 * k[:, -1:].sigmoid())
    # Of nasty keys, whose bound the leak passes.
    sizes = {'grid': (1, 9), 'heads': 9, 'keys': 'spread', 'key_range': 60}
    case = Case('aft_simple_causal', **sizes, gradients=False, relation='later', seed=1)
    with pytest.raises(Wrong, match='later'):
        check(case)


@pytest.mark.parametrize(('error', 'passes'), [(5e-6, True), (2e-5, False)])
def test_an_error_is_measured_against_the_norm(error: float, passes: bool):
    want = np.ones((2, 3, 4))
    term = oracle.Term(want, want)
    if passes:
        compare('y', torch.from_numpy(want + error), term, 1e-5)
    else:
        with pytest.raises(Wrong, match='norm'):
            compare('y', torch.from_numpy(want + error), term, 1e-5)


def test_a_gradient_may_have_the_rounding_error_of_a_float16_result_below_the_normal_numbers():
    # y is 3.9e-7, and the spacing of float16 there 6e-8.
    sizes = {'grid': (1, 8), 'batch': 3, 'heads': 17}
    biases = {'biases': 'within', 'bias_range': 160}
    check(
        Case('aft_full', dtype='float16', **sizes, keys='spread', **biases, values='index', layout='expanded', seed=153)
    )


@pytest.mark.parametrize(('spacings', 'passes'), [(3, True), (4, False)])
def test_the_rounding_of_four_float16_results_below_the_normal_numbers_moves_a_gradient_by_no_more(
    spacings: int, passes: bool
):
    # By half of the spacing each, and by that of the gradient.
    zeros, found = np.zeros(9), torch.full((9,), spacings * 2.0**-24).half()
    with nullcontext() if passes else pytest.raises(Wrong):
        compare('grad k', found, oracle.Term(zeros, zeros, 4.0), 4e-3, 4e-3, torch.float16)
