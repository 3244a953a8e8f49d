"""The table of goals: its verdicts, its exit code, and that every kind of figure can be measured."""

import json

import pytest
import torch

from tools.benchmark import decode, figures, roofline, sections
from tools.benchmark.__main__ import main
from tools.benchmark.goal_table import make_goals
from tools.benchmark.goals import Figure, Goal, measure_goals
from tools.benchmark.operations import Operation


@pytest.mark.parametrize(
    ('value', 'at_most', 'verdict'),
    [(1.5, False, 'goal'), (1.2, False, 'floor'), (0.9, False, 'below'), (0.9, True, 'goal'), (1.6, True, 'below')],
)
def test_a_figure_reaches_its_goal_or_its_floor_or_neither(value: float, at_most: bool, verdict: str):
    floor, goal = (1.5, 1.0) if at_most else (1.0, 1.5)
    assert Goal(1, 'speed', floor, goal, None, at_most).verdict(Figure(value)) == verdict


def test_a_figure_that_cannot_be_measured_is_open_and_fails_nothing(monkeypatch, capsys):
    monkeypatch.setattr(sections, 'make_goals', lambda: [Goal(17, 'on a GPU', 1.0, 2.0, None)])
    main(['--goals', '--allow-load'])
    assert next(line for line in capsys.readouterr().out.splitlines() if 'on a GPU' in line).split()[-1] == 'open'


def test_the_header_names_every_device_and_two_threads(monkeypatch, capsys):
    table = [
        Goal(1, 'here', 1.0, 2.0, lambda rounds: Figure(torch.get_num_threads())),
        Goal(17, 'on a GPU', 1.0, 2.0, lambda rounds: Figure(1.5), device='cuda'),
        Goal(18, 'open', 1.0, 2.0, None, device='cuda'),
    ]
    monkeypatch.setattr(sections, 'make_goals', lambda: table)
    monkeypatch.setattr('tools.benchmark.__main__.count_cores', lambda: 16)
    monkeypatch.setattr('torch.cuda.get_device_name', lambda place: 'a graphics processor')
    monkeypatch.setattr('torch.backends.cudnn.version', lambda: 90000)
    threads = torch.get_num_threads()
    result = main(['--goals', '--allow-load'])
    assert result['rows'][0]['measured'] == 2
    first, second = result['machine'].splitlines()
    assert ' 2 threads; float32, or bfloat16 where the row says so; torch' in first
    assert second.startswith('a graphics processor;')
    assert ['TF32' in line for line in result['backends'].splitlines()] == [False, True]
    assert capsys.readouterr().out.startswith(f'{result["machine"]}\n{result["backends"]}\n')
    # Of the chosen rows only, and those that are measured.
    for rows, words in (('1', [first]), ('17', [second]), ('18', [first])):
        assert main(['--goals', '--rows', rows, '--allow-load'])['machine'].splitlines() == words
    monkeypatch.setattr('tools.benchmark.__main__.count_cores', lambda: 1)
    assert main(['--goals', '--rows', '1', '--allow-load'])['rows'][0]['measured'] == 1
    assert main(['--goals', '--rows', '1', '--threads', '3', '--allow-load'])['rows'][0]['measured'] == 3
    assert torch.get_num_threads() == threads


def test_a_row_that_is_not_in_the_table_is_rejected():
    with pytest.raises(ValueError, match=r'rows of the goals, 1 to 18, got \[0, 99\]'):
        main(['--goals', '--rows', '1', '99', '0', '--allow-load'])


def test_a_figure_below_its_floor_makes_the_command_fail(monkeypatch, tmp_path, capsys):
    table = [
        Goal(1, 'good', 1.0, 2.0, lambda rounds: Figure(1.1, paper=3.25)),
        Goal(2, 'bad', 1.0, 2.0, lambda rounds: Figure(0.5)),
    ]
    monkeypatch.setattr(sections, 'make_goals', lambda: table)
    main(['--goals', '--rows', '1', '--allow-load'])
    with pytest.raises(SystemExit) as exit_info:
        main(['--goals', '--allow-load', '--json', str(tmp_path / 'goals.json')])
    assert exit_info.value.code == 1
    rows = json.loads((tmp_path / 'goals.json').read_text())['rows']
    assert [(row['row'], row['measured'], row['verdict']) for row in rows] == [(1, 1.1, 'floor'), (2, 0.5, 'below')]
    shown = capsys.readouterr().out
    assert '0.50' in shown
    assert '3.25' in shown


def test_a_figure_that_fails_is_named_and_the_others_are_measured(monkeypatch, tmp_path, capsys):
    def fail(rounds: int) -> Figure:
        assert '1.10' in capsys.readouterr().err
        raise RuntimeError('no kernel\nfor this')

    table = [
        Goal(1, 'good', 1.0, 2.0, lambda rounds: Figure(1.1)),
        Goal(2, 'broken', 1.0, 2.0, fail),
        Goal(3, 'also good', 1.0, 2.0, lambda rounds: Figure(2.1)),
    ]
    monkeypatch.setattr(sections, 'make_goals', lambda: table)
    with pytest.raises(SystemExit) as exit_info:
        main(['--goals', '--allow-load', '--json', str(tmp_path / 'goals.json')])
    assert exit_info.value.code == 1
    rows = json.loads((tmp_path / 'goals.json').read_text())['rows']
    assert [row['verdict'] for row in rows] == ['floor', 'failed', 'goal']
    assert [row['error'] for row in rows] == [None, 'RuntimeError: no kernel', None]
    assert rows[1]['measured'] is None
    line = next(line for line in capsys.readouterr().out.splitlines() if 'broken' in line)
    assert line.endswith('failed: RuntimeError: no kernel')


def test_decoding_that_fails_is_not_tried_for_every_figure(monkeypatch):
    tried: list[int] = []

    def measure(device, rounds: int, **kwargs):
        tried.append(rounds)
        raise RuntimeError('no memory')

    monkeypatch.setattr(figures, 'measure_decode', measure)
    rows = measure_goals([goal for goal in make_goals() if goal.row in (10, 11)], rounds=1)
    assert {row['verdict'] for row in rows} == {'failed'}
    assert tried == [1]


def test_every_goal_is_at_least_as_hard_as_its_floor():
    for goal in make_goals():
        assert goal.goal <= goal.floor if goal.at_most else goal.goal >= goal.floor, goal.what


def test_every_row_is_measured_but_those_of_a_device_that_is_not_here(monkeypatch):
    monkeypatch.setattr('torch.cuda.is_available', lambda: False)
    table = make_goals()
    assert [row for row in range(1, 19) if not any(goal.row == row for goal in table)] == []
    assert {goal.row for goal in table if goal.measure is None} == {17, 18}
    opened = measure_goals([goal for goal in table if goal.row >= 17], rounds=1)
    assert {row['verdict'] for row in opened} == {'open'}
    monkeypatch.setattr('torch.cuda.is_available', lambda: True)
    assert all(goal.measure for goal in make_goals())


def test_a_slow_figure_takes_fewer_rounds():
    taken: list[int] = []

    def measure(rounds: int) -> Figure:
        taken.append(rounds)
        return Figure(1.0)

    goal = Goal(1, 'any', 1.0, 2.0, measure)
    measure_goals([goal, goal._replace(most_rounds=5)], rounds=15)
    measure_goals([goal._replace(most_rounds=5)], rounds=2)
    assert taken == [15, 5, 2]


def test_decoding_is_measured_once_for_all_its_figures(monkeypatch):
    calls: list[int] = []

    def measure(device, rounds: int, **kwargs):
        calls.append(rounds)
        return [
            {
                'model': name,
                'batch_size': batch,
                'ratio': batch + place,
                'ratio_quartiles': (batch, batch + 9),
                'flatness': 1 + place / 10,
                'flatness_quartiles': (1.0, 2.0),
            }
            for batch in (1, 16)
            for place, name in enumerate(decode.MODELS)
        ]

    monkeypatch.setattr(figures, 'measure_decode', measure)
    rows = measure_goals([goal for goal in make_goals() if goal.row in (10, 11)], rounds=15)
    assert calls == [5]
    assert [(row['row'], row['measured'], row['verdict']) for row in rows[:3]] == [
        (10, 2, 'floor'),
        (10, 17, 'goal'),
        (10, 18, 'goal'),
    ]
    assert [row['quartiles'] for row in rows[:3]] == [(1, 10), (16, 25), (16, 25)]
    assert [row['measured'] for row in rows[3:]] == [1.1, 1.2, 1.1, 1.2]
    assert {row['quartiles'] for row in rows[3:]} == {(1.0, 2.0)}


def test_the_roofline_counts_what_must_be_done():
    # As in the arithmetic that the goals of a GPU were taken from: billions of operations, megabytes.
    counts = [
        (round(roofline.count_flops(each) / 1e9, 1), round(roofline.count_bytes(each, torch.bfloat16) / 1e6))
        for _, _, each in roofline.OPERATIONS
    ]
    assert counts == [(15.3, 155), (7.9, 117), (15.1, 154), (257.7, 1611)]


def test_the_share_of_the_roofline_is_measured():
    operation = Operation('aft_conv', (1, 36, 64), 1, (8, 3, 3), (6, 6), 8)
    cpu = torch.device('cpu')
    flops, bandwidth = roofline.device_rates(torch.float32, cpu, 1, side=64, size=2**20)
    assert flops > 1e6
    assert bandwidth > 1e6
    assert 0 < roofline.roofline_share(operation, torch.float32, cpu, side=64, size=2**20)(1).value < 1


OPERATIONS = [
    Operation('aft_full', (1, 5, 64), 1, (5, 5)),
    Operation('aft_local_causal', (1, 40, 64), 1, (40, 4)),
    Operation('aft_simple_causal', (1, 40, 64), 1),
]


@pytest.mark.parametrize('operation', OPERATIONS, ids=lambda operation: operation.name)
@pytest.mark.parametrize('training', [False, True], ids=['forward', 'training'])
def test_operations_are_compared_with_attention_of_the_same_result(operation: Operation, training: bool):
    attention, own, paper = (call() for call in operation.calls(training=training))
    if training:
        assert [x.shape for x in attention] == [x.shape for x in own[:3]] == [torch.Size(operation.shape)] * 3
    else:
        assert attention.shape == own.shape == operation.shape
    for fused, written_out in zip(attention, paper, strict=True):
        torch.testing.assert_close(fused, written_out, rtol=1e-4, atol=1e-5)


def test_memory_is_measured():
    operation = OPERATIONS[0]
    assert figures.memory(operation)(1).value > 0
    # q, k, v and y of both, the denominators of AFT-full beside.
    assert 1.0 < figures.kept(operation)(1).value < 2.0
    # Attention that forms its weights keeps them, and holds them in the forward.
    longer = operation._replace(shape=(2, 128, 64), heads=4, bias=(128, 128))
    for figure in (figures.memory(longer)(1), figures.kept(longer)(1)):
        assert figure.paper < figure.value
    causal = OPERATIONS[1]
    longer = lambda tokens: causal._replace(shape=(1, tokens, 64), bias=(tokens, 4))  # noqa: E731
    # The scratch of one block is constant, so short sequences grow by less than their length.
    assert 0.5 < figures.memory_exponent(longer, (512, 2048))(1).value <= 1.05


def test_the_memory_of_a_training_step_is_measured():
    assert 0.5 < figures.model_memory('aft_conv_tiny', 'deit_tiny_patch16_224', 1)(1).value < 3
