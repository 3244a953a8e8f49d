"""The table of goals: its verdicts, its exit code, and that every kind of figure can be measured."""

import json

import pytest
import torch

from tools.benchmark import goals
from tools.benchmark.__main__ import main
from tools.benchmark.goals import Figure, Goal, Operation


@pytest.mark.parametrize(
    ('value', 'at_most', 'verdict'),
    [(1.5, False, 'goal'), (1.2, False, 'floor'), (0.9, False, 'below'), (0.9, True, 'goal'), (1.6, True, 'below')],
)
def test_a_figure_reaches_its_goal_or_its_floor_or_neither(value: float, at_most: bool, verdict: str):
    floor, goal = (1.5, 1.0) if at_most else (1.0, 1.5)
    assert Goal(1, 'speed', floor, goal, None, at_most).verdict(Figure(value)) == verdict


def test_a_figure_that_cannot_be_measured_is_open_and_fails_nothing(monkeypatch, capsys):
    monkeypatch.setattr(goals, 'make_goals', lambda: [Goal(17, 'on a GPU', 1.0, 2.0, None)])
    main(['--goals', '--allow-load'])
    assert capsys.readouterr().out.splitlines()[-1].split()[-1] == 'open'


def test_a_figure_below_its_floor_makes_the_command_fail(monkeypatch, tmp_path, capsys):
    figures = [
        Goal(1, 'good', 1.0, 2.0, lambda rounds: Figure(1.1)),
        Goal(2, 'bad', 1.0, 2.0, lambda rounds: Figure(0.5)),
    ]
    monkeypatch.setattr(goals, 'make_goals', lambda: figures)
    main(['--goals', '--rows', '1', '--allow-load'])
    with pytest.raises(SystemExit) as exit_info:
        main(['--goals', '--allow-load', '--json', str(tmp_path / 'goals.json')])
    assert exit_info.value.code == 1
    rows = json.loads((tmp_path / 'goals.json').read_text())['rows']
    assert [(row['row'], row['measured'], row['verdict']) for row in rows] == [(1, 1.1, 'floor'), (2, 0.5, 'below')]
    assert '0.50' in capsys.readouterr().out


def test_every_goal_is_at_least_as_hard_as_its_floor():
    for goal in goals.make_goals():
        assert goal.goal <= goal.floor if goal.at_most else goal.goal >= goal.floor, goal.what


OPERATIONS = [
    Operation('aft_full', (1, 5, 64), 1, (5, 5)),
    Operation('aft_local_causal', (1, 40, 64), 1, (40, 4)),
    Operation('aft_simple_causal', (1, 40, 64), 1),
]


@pytest.mark.parametrize('operation', OPERATIONS, ids=lambda operation: operation.name)
@pytest.mark.parametrize('training', [False, True], ids=['forward', 'training'])
def test_operations_are_compared_with_attention_of_the_same_result(operation: Operation, training: bool):
    attention, own = (call() for call in operation.calls(training=training))
    if training:
        assert [x.shape for x in attention] == [x.shape for x in own[:3]] == [torch.Size(operation.shape)] * 3
    else:
        assert attention.shape == own.shape == operation.shape
    assert operation.speed(torch.bfloat16, training)(1).value > 0


def test_memory_and_growth_are_measured():
    operation = OPERATIONS[0]
    assert operation.memory()(1).value > 0
    # q, k, v and y of both, the denominators of AFT-full beside.
    assert 1.0 < operation.kept()(1).value < 2.0
    causal = OPERATIONS[1]
    longer = lambda tokens: causal._replace(shape=(1, tokens, 64), bias=(tokens, 4))  # noqa: E731
    # The scratch of one block is constant, so short sequences grow by less than their length.
    assert 0.5 < goals.memory_exponent(longer, (512, 2048))(1).value <= 1.05
    assert goals.growth(longer, 256)(1).value > 1.0


@pytest.mark.parametrize('training', [False, True], ids=['forward', 'training'])
def test_layers_models_and_the_one_offset_operation_are_measured(training: bool):
    assert goals.layer_speed(64, 64, 1, training)(1).value > 0
    assert goals.onehot_speed(training)(1).value > 0
    assert goals.model_speed('aft_conv_tiny_k11_h32', 'deit_tiny_patch16_224', 1, training=training)(1).value > 0


def test_the_memory_of_a_training_step_is_measured():
    assert 0.5 < goals.model_memory('aft_conv_tiny', 'deit_tiny_patch16_224', 1)(1).value < 3
