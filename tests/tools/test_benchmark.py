import json

import pytest
import timm
import torch
from helpers import make_folder

from tools import machine
from tools.benchmark import onehot, paper, pixels
from tools.benchmark.__main__ import main
from tools.benchmark.onehot import Shape


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp('folders')
    return [
        str(make_folder(root / name, {'train': ['a', 'b'], 'val': ['a', 'b']}, 8, size))
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
    monkeypatch.setattr('tools.machine.LoadMeter.load', lambda meter: 0.54)
    for section in (['--loader', 'folder'], ['--table', '7'], ['--table', '2'], ['--onehot'], ['--scaling']):
        with pytest.raises(OSError, match=r'at most 10% of the available cores, got 54%; .* --allow-load'):
            main(section)


def test_a_load_that_comes_meanwhile_is_no_report(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(onehot, 'SHAPES', (Shape(1, 8, 4),))
    monkeypatch.setattr(machine, 'SAMPLE_SECONDS', 0.0)
    # As the machine is watched before, and as the measurement ends.
    found = [0.0, 0.0, 0.3]
    monkeypatch.setattr('tools.machine.LoadMeter.load', lambda meter: found.pop(0))
    with pytest.raises(OSError, match='got 30%'):
        main(['--onehot', '--rounds', '1', '--json', str(tmp_path / 'onehot.json')])
    assert 'one-hot' not in capsys.readouterr().out
    assert not (tmp_path / 'onehot.json').exists()
    found[:] = [0.3]
    assert main(['--onehot', '--rounds', '1', '--allow-load'])['load'] == 0.3


def test_no_round_is_rejected(folders):
    with pytest.raises(ValueError, match='at least 1 round, got 0'):
        main(['--loader', *folders, '--rounds', '0', '--allow-load'])


def test_memory_is_measured_on_a_loaded_machine_too(monkeypatch, tmp_path, capsys):
    kwargs = dict(features_only=True, out_indices=[0])
    monkeypatch.setattr(pixels, 'create_dense', lambda name, device: timm.create_model(name, **kwargs))
    monkeypatch.setattr('tools.machine.LoadMeter.load', lambda meter: 0.54)
    files = ['--png', str(tmp_path / 'memory.png'), '--json', str(tmp_path / 'memory.json')]
    result = main(['--memory', '--models', 'aft_conv_tiny', '--sizes', '64x32', '64', '--training', *files])
    assert (tmp_path / 'memory.png').stat().st_size > 10_000
    written = json.loads((tmp_path / 'memory.json').read_text())
    assert written['rows'] == result['rows']
    assert written['fits'] == result['fits']
    shown = capsys.readouterr().out
    for text in ('threads; float32; torch', 'peak of the forward pass', 'kept for the backward', '64x32', 'exponent'):
        assert text in shown


def test_a_table_shows_the_papers_figures_beside_ours(monkeypatch, tmp_path, capsys):
    rows = tuple(row for row in paper.TABLES[7].rows if row.model in (None, 'deit_tiny_patch16_224', 'aft_conv_tiny'))
    tiny = tuple(row for row in rows if row.baseline == 'DeiT tiny')
    monkeypatch.setitem(paper.TABLES, 7, paper.PaperTable(tiny, 32, 'V100'))
    options = ['--batch-size', '1', '--rounds', '2', '--dtype', 'bfloat16', '--allow-load']
    main(['--table', '7', *options, '--json', str(tmp_path / 'table.json')])
    written = json.loads((tmp_path / 'table.json').read_text())
    conv = next(row for row in written['rows'] if row['model'] == 'aft_conv_tiny')
    shown = capsys.readouterr().out
    line = next(line for line in shown.splitlines() if line.startswith('AFT-conv tiny'))
    assert f'{conv["measured"]["images_per_second"]:.1f}' in line
    for text in ('74.8', '2365', '0.94', '5,962,792'):
        assert text in line
    assert 'autocast to bfloat16' in shown
    assert 'AFT Table 7: inference at 32 px, batch of 1' in shown
    assert next(line for line in shown.splitlines() if line.startswith('Lambda tiny')).endswith('-')


def test_the_one_offset_operation_is_timed(monkeypatch, capsys):
    monkeypatch.setattr(onehot, 'SHAPES', (Shape(1, 8, 4),))
    threads = torch.get_num_threads()
    result = main(['--onehot', '--rounds', '1', '--threads', '1', '--dtype', 'bfloat16', '--allow-load'])
    assert torch.get_num_threads() == threads
    assert len(result['rows']) == 6
    shown = capsys.readouterr().out
    assert '1 threads; q, k and v in bfloat16; torch' in shown
    assert shown.count('one-hot') == 2


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (['--table', '7', '--png', 'x.png'], '--png is no option of --table'),
        (['--onehot', '--batch-size', '3'], '--batch-size is no option of --onehot'),
        (['--loader', 'folder', '--sizes', '32'], '--sizes is no option of --loader'),
        (['--table', '9'], 'invalid choice'),
        (['--table', '2', '--img-size', '32'], '--img-size is no option of --table {2,4}'),
        (['--table', '7', '--depth', '2'], '--depth is no option of --table'),
        (['--scaling', '128', '--compile'], '--compile is no option of --scaling'),
        (['--table', '7', '--onehot'], 'not allowed with'),
        ([], 'one of the arguments'),
    ],
)
def test_an_option_of_another_section_is_rejected(options, message, capsys):
    with pytest.raises(SystemExit):
        main(options)
    assert message in capsys.readouterr().err


def test_a_model_that_timm_does_not_have_is_rejected_with_close_names():
    with pytest.raises(ValueError, match=r"such as aft_conv_tiny, .*got 'aft_conv_tinny'"):
        main(['--memory', '--models', 'aft_conv_tinny', '--sizes', '32', '64'])
