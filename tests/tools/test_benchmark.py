import json

import pytest
from helpers import make_folder

from tools.benchmark.__main__ import main
from tools.benchmark.machine import check_load


@pytest.fixture
def folders(tmp_path):
    return [
        str(make_folder(tmp_path / name, {'train': ['a', 'b'], 'val': ['a', 'b']}, 8, size))
        for name, size in (('small', (16, 16)), ('large', (1500, 1500)))
    ]


def test_loaders_are_compared_with_the_first(folders, tmp_path, capsys):
    options = ['--img-size', '16', '--batch-size', '8', '--workers', '0', '--rounds', '3', '--allow-load']
    main(['--loader', *folders, *options, '--json', str(tmp_path / 'figures.json')])
    small, large = json.loads((tmp_path / 'figures.json').read_text())['rows']
    shown = capsys.readouterr().out
    assert 'torch' in shown
    assert 'threads' in shown
    for stage in ('read', 'ready'):
        assert (small[f'{stage}_ratio'], small[f'{stage}_ratio_range']) == (1.0, [1.0, 1.0])
        # Thousands of times the pixels to decode.
        assert large[f'{stage}_ratio'] < 0.5
        low, high = large[f'{stage}_ratio_range']
        assert low <= large[f'{stage}_ratio'] <= high
        assert f'{large[stage]:.0f}' in shown


def test_the_whole_recipe_can_be_timed(folders, capsys):
    options = ['--img-size', '16', '--batch-size', '8', '--workers', '0', '--rounds', '1', '--allow-load']
    main(['--loader', folders[0], *options, '--augment', 'deit'])
    assert 'ratio' in capsys.readouterr().out


def test_a_loaded_machine_is_not_measured_unless_that_is_wanted(monkeypatch):
    monkeypatch.setattr('os.getloadavg', lambda: (64.0, 0.0, 0.0))
    monkeypatch.setattr('os.cpu_count', lambda: 16)
    with pytest.raises(RuntimeError, match=r'at most 0\.5 running processes per core .* got 4\.00; .* --allow-load'):
        main(['--loader', 'folder'])
    monkeypatch.setattr('os.getloadavg', lambda: (4.0, 0.0, 0.0))
    check_load()


def test_no_round_is_rejected(folders):
    with pytest.raises(ValueError, match='at least 1 round, got 0'):
        main(['--loader', *folders, '--rounds', '0', '--allow-load'])
