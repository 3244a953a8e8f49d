import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tools.compare_seeds import choose_metrics, draw_seeds, main, read_seeds


def make_run(folder: Path, accuracies: list[float], **metrics: float) -> Path:
    folder.mkdir()
    mean = sum(accuracies) / len(accuracies)
    spread = None if len(accuracies) == 1 else 0.0123
    result = {
        'seeds': list(range(len(accuracies))),
        'test_accuracy': {'mean': mean, 'std': spread},
        **{f'test_{name}': {'mean': value, 'std': spread} for name, value in metrics.items()},
        'validation_accuracy': {'mean': 1.0, 'std': 0.0},
        'seconds_per_epoch': {'mean': 12.34, 'std': None},
        'memory_mb': {'mean': 456.7, 'std': None},
        'parameters': 1234567,
        'runs': [{'test_accuracy': a, **{f'test_{n}': v for n, v in metrics.items()}} for a in accuracies],
    }
    (folder / 'result.json').write_text(json.dumps(result))
    return folder


def test_each_run_has_a_line_and_a_place_in_the_picture(tmp_path, capsys):
    runs = [make_run(tmp_path / 'multiply', [0.8, 0.9], auc=0.7), make_run(tmp_path / 'add', [0.75])]
    rows = main([*map(str, runs), '--out', str(tmp_path / 'out'), '--title', 'IMDB'])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ['run', 'seeds', 'accuracy', 's/epoch', 'MiB', 'parameters']
    assert lines[1].split() == ['multiply', '2', '85.00', '+-', '1.23', '12.3', '457', '1,234,567']
    assert lines[2].split() == ['add', '1', '75.00', '12.3', '457', '1,234,567']
    assert json.loads((tmp_path / 'out' / 'compare_seeds.json').read_text()) == rows
    assert Image.open(tmp_path / 'out' / 'compare_seeds.png').size[0] > 500


def test_the_points_are_the_means_and_the_dots_the_seeds(tmp_path):
    rows = [{'name': name, **read_seeds(make_run(tmp_path / name, [0.8, 0.9]))} for name in 'ab']
    (axes,) = draw_seeds(rows, ['accuracy']).axes
    means, dots = (next(line for line in axes.lines if line.get_marker() == marker) for marker in 'o.')
    assert means.get_xydata() == pytest.approx(np.array([[0, 85], [1, 85]]))
    assert dots.get_ydata() == pytest.approx(np.array([80, 90, 80, 90]))
    assert axes.get_ylim()[0] < 80 < 90 < axes.get_ylim()[1]


def test_losses_are_in_nats(tmp_path, capsys):
    main([str(make_run(tmp_path / 'run', [0.8, 0.9], log_loss=0.4567)), '--out', str(tmp_path)])
    assert capsys.readouterr().out.splitlines()[1].split()[5:8] == ['0.4567', '+-', '0.0123']
    row = {'name': 'run', **read_seeds(tmp_path / 'run')}
    accuracy, loss = draw_seeds([row], ['accuracy', 'log_loss']).axes
    assert (accuracy.get_ylabel(), loss.get_ylabel()) == ('test accuracy (%)', 'test log_loss (nats)')
    assert next(line for line in loss.lines if line.get_marker() == 'o').get_ydata() == pytest.approx([0.4567])
    assert loss.get_ylim()[1] < 0.6


def test_metrics_that_not_all_runs_have_are_left_out_or_refused(tmp_path):
    rows = [read_seeds(make_run(tmp_path / 'a', [0.8], auc=0.7)), read_seeds(make_run(tmp_path / 'b', [0.8]))]
    assert choose_metrics(rows, None) == ['accuracy']
    assert choose_metrics(rows[:1], ['auc']) == ['auc']
    with pytest.raises(ValueError, match='among accuracy, which all runs have, got auc'):
        choose_metrics(rows, ['auc'])


def test_runs_of_two_tasks_are_named_with_their_metrics():
    rows = [{'name': 'texts', 'metrics': {'accuracy': {}, 'macro_f': {}}}, {'name': 'news', 'metrics': {'auc': {}}}]
    with pytest.raises(ValueError, match='share a metric, got texts with accuracy, macro_f; news with auc'):
        choose_metrics(rows, None)


def test_folders_without_a_result_of_this_kind_are_named(tmp_path):
    with pytest.raises(ValueError, match=r'complete run, got .*none without result\.json'):
        main([str(tmp_path / 'none')])
    (tmp_path / 'result.json').write_text('{"measure": "bits/dim"}')
    with pytest.raises(ValueError, match=r'run of train\.fastformer, got .* without seeds'):
        main([str(tmp_path)])
    run = make_run(tmp_path / 'run', [0.5])
    with pytest.raises(ValueError, match='different names, got run, run'):
        main([str(run), str(run)])
    with pytest.raises(ValueError, match='a name for each of 1 runs, got 2'):
        main([str(run), '--names', 'a', 'b', '--out', str(tmp_path)])
