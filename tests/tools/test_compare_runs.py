import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from aft_vision.visualize import draw_bits
from tools.compare_runs import common_metrics, draw_seeds, main, summarize_seeds


def make_run(folder: Path, test_bits: float, nats: float, measure: str = 'bits/dim') -> Path:
    """A run of two epochs of 20 updates of half a second, whose loss is the same all the time."""
    folder.mkdir()
    result = {
        'measure': measure,
        'test_bits': test_bits,
        'train_bits_of_last_epoch': 2.5,
        'updates': 40,
        'seconds': 20.0,
        'updates_per_second': 2.0,
        'memory_mb': 512.0,
        'parameters': 1234567,
    }
    (folder / 'result.json').write_text(json.dumps(result))
    tables = {
        'steps.csv': [dict(update=u, seconds=u / 2, loss=nats, lr=1e-3) for u in range(10, 50, 10)],
        'summary.csv': [
            dict(epoch=e, train_updates=20 * (e + 1), train_total_seconds=10 * (e + 1), eval_bits=test_bits + 1 - e)
            for e in (0, 1)
        ],
    }
    for name, rows in tables.items():
        with (folder / name).open('w', newline='') as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    return folder


def test_the_best_run_comes_first_and_all_are_drawn(tmp_path, capsys):
    runs = [make_run(tmp_path / 'simple', 3.0, 2.2), make_run(tmp_path / 'local', 2.75, 2.0)]
    diverged = make_run(tmp_path / 'diverged', float('nan'), 2.0)
    assert [row['name'] for row in main([str(diverged), *map(str, runs), '--out', str(tmp_path / 'all')])] == [
        'local',
        'simple',
        'diverged',
    ]
    capsys.readouterr()
    rows = main([*map(str, runs), '--out', str(tmp_path / 'out')])
    assert [row['name'] for row in rows] == ['local', 'simple']
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == 'run parameters train bits test bits updates updates/s seconds MiB'.split()
    assert lines[1].split() == ['local', '1,234,567', '2.5000', '2.7500', '40', '2.000', '20', '512']
    assert json.loads((tmp_path / 'out' / 'compare_runs.json').read_text()) == rows
    assert Image.open(tmp_path / 'out' / 'compare_runs.png').size[0] > 1000


def test_names_are_drawn_as_they_are(tmp_path):
    runs = {
        name: make_run(tmp_path / str(number), 3.0, 2.2)
        for number, name in enumerate(('$x_{2$', '_a', 'b$', 'caf\udce9'))
    }
    figure = draw_bits(runs)
    # Of an open formula matplotlib says that it cannot be read.
    figure.draw_without_rendering()
    (legend,) = filter(None, (panel.get_legend() for panel in figure.axes))
    assert len(legend.get_texts()) == 2 * len(runs)


def test_the_curves_have_their_bits_by_update_and_by_seconds(tmp_path):
    run = make_run(tmp_path / 'run', 3.0, 2.0794415416798357)
    panels = draw_bits({'run': run}, 'bits/dim').axes
    for axes, training, evaluated in zip(
        panels, ([10, 20, 30, 40], [5, 10, 15, 20]), ([20, 40], [10, 20]), strict=True
    ):
        lines = {line.get_label(): line.get_xydata() for line in axes.lines}
        assert lines['run, training (moving average)'] == pytest.approx(np.array([[x, 3.0] for x in training]))
        assert lines['run, evaluated'].tolist() == [[x, y] for x, y in zip(evaluated, (4.0, 3.0), strict=True)]


@pytest.mark.parametrize(('more', 'unit'), [({}, '% right answers'), ({'bits_unit': 'bits/answer'}, 'bits/answer')])
def test_the_curves_have_the_unit_of_bits_or_the_measure_of_earlier_results(more, unit, tmp_path, monkeypatch):
    run = make_run(tmp_path / 'run', 3.0, 2.0, '% right answers')
    result = json.loads((run / 'result.json').read_text())
    (run / 'result.json').write_text(json.dumps({**result, **more}))
    units = []
    monkeypatch.setattr('tools.compare_runs.draw_bits', lambda runs, unit: units.append(unit) or draw_bits(runs, unit))
    main([str(run), '--out', str(tmp_path)])
    assert units == [unit]


def test_what_is_no_run_is_rejected(tmp_path):
    run, other = make_run(tmp_path / 'run', 3.0, 2.0), make_run(tmp_path / 'other', 3.0, 2.0)
    with pytest.raises(ValueError, match=r'a name for each of 2 runs, got 1'):
        main([str(run), str(other), '--names', 'a'])
    with pytest.raises(ValueError, match=r'different names, got a, a'):
        main([str(run), str(other), '--names', 'a', 'a'])
    (other / 'steps.csv').unlink()
    with pytest.raises(ValueError, match=r'got .*other without steps\.csv'):
        main([str(run), str(other), '--out', str(tmp_path)])
    (run / 'result.json').write_text('{}')
    with pytest.raises(ValueError, match=r'run of train\.fastformer or train\.pixel, .*, got .*json, which is of none'):
        main([str(run)])
    (run / 'result.json').write_text('{')
    with pytest.raises(ValueError, match=r'expected a JSON file, got .*result\.json'):
        main([str(run)])
    (run / 'result.json').unlink()
    with pytest.raises(ValueError, match=r'complete run, got .*run without result\.json'):
        main([str(run)])


def test_bits_that_were_measured_in_another_way_are_not_compared(tmp_path):
    runs = [make_run(tmp_path / 'a', 3.0, 2.0), make_run(tmp_path / 'b', 2.0, 2.0, 'bits/character')]
    with pytest.raises(ValueError, match='in the same way, got b: bits/character, a: bits/dim'):
        main([*map(str, runs), '--out', str(tmp_path)])


def make_texts(folder: Path, accuracies: list[float], **metrics: float) -> Path:
    """A run of texts with this accuracy of each seed, and other metrics that are the same for all."""
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


def test_each_run_of_texts_has_a_line_and_a_place_in_the_picture(tmp_path, capsys):
    runs = [make_texts(tmp_path / 'multiply', [0.8, 0.9], auc=0.7), make_texts(tmp_path / 'add', [0.75])]
    rows = main([*map(str, runs), '--out', str(tmp_path / 'out'), '--title', 'IMDB'])
    lines = capsys.readouterr().out.splitlines()
    # Only the metric that both have.
    assert lines[0].split() == ['run', 'seeds', 'accuracy', 's/epoch', 'MiB', 'parameters']
    assert lines[1].split() == ['multiply', '2', '85.00', '+-', '1.23', '12.3', '457', '1,234,567']
    assert lines[2].split() == ['add', '1', '75.00', '12.3', '457', '1,234,567']
    assert json.loads((tmp_path / 'out' / 'compare_runs.json').read_text()) == rows
    assert Image.open(tmp_path / 'out' / 'compare_runs.png').size[0] > 500
    other = make_run(tmp_path / 'pixels', 3.0, 2.0)
    with pytest.raises(ValueError, match='expected runs of one kind'):
        main([str(runs[0]), str(other)])


def test_the_points_are_the_means_and_the_dots_the_seeds(tmp_path, capsys):
    run = make_texts(tmp_path / 'run', [0.8, 0.9], log_loss=0.4567)
    result = json.loads((run / 'result.json').read_text())
    rows = [{'name': name, **summarize_seeds(result)} for name in 'ab']
    accuracy, loss = draw_seeds(rows).axes
    means, dots = (next(line for line in accuracy.lines if line.get_marker() == marker) for marker in 'o.')
    assert means.get_xydata() == pytest.approx(np.array([[0, 85], [1, 85]]))
    assert dots.get_ydata() == pytest.approx(np.array([80, 90, 80, 90]))
    assert accuracy.get_ylim()[0] < 80 < 90 < accuracy.get_ylim()[1]
    # A loss is in nats.
    assert (accuracy.get_ylabel(), loss.get_ylabel()) == ('test accuracy (%)', 'test log_loss (nats)')
    assert next(line for line in loss.lines if line.get_marker() == 'o').get_ydata() == pytest.approx([0.4567] * 2)
    main([str(run), '--out', str(tmp_path)])
    assert capsys.readouterr().out.splitlines()[1].split()[5:8] == ['0.4567', '+-', '0.0123']


def test_runs_of_two_tasks_are_named_with_their_metrics():
    rows = [{'name': 'texts', 'metrics': {'accuracy': {}, 'macro_f': {}}}, {'name': 'news', 'metrics': {'auc': {}}}]
    with pytest.raises(ValueError, match='share a metric, got texts with accuracy, macro_f; news with auc'):
        common_metrics(rows)
