"""A few drawn calls of every form of every operator, the same in each run; `make fuzz` tries many others."""

import shutil

import pytest
import torch
from fuzz import BACKENDS, PAIRS, Case, Wrong, command, main, reproduce, search

from aft_vision import ops

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
    line = next(line for line in lines if 'reproduce(' in line)
    case = eval(line.split('reproduce(')[1].removesuffix(')"'), {'Case': Case})
    assert case.tokens <= 16
    with pytest.raises(Wrong):
        reproduce(case)
    monkeypatch.undo()
    reproduce(case)
