"""The command of the benchmark: its options, the load of the machine, loaders, and the printed table."""

import json
from pathlib import Path

import pytest
from helpers import make_folder

from tools import machine
from tools.benchmark import ops
from tools.benchmark.__main__ import SECTIONS, main, parse_args
from tools.benchmark.printer import format_rows


@pytest.fixture
def quick(monkeypatch, unmetered):
    """A group of one small shape, and no meters."""
    group = 'onehot', (1, 4, 8), ops.onehot_candidates((1, 4, 8), 4)
    monkeypatch.setattr(ops, 'make_groups', lambda *args: [group])
    monkeypatch.setattr(machine, 'SAMPLE_SECONDS', 0.0)


ONEHOT = ['ops', '--groups', 'onehot', '--rounds', '1']


def test_loaders_are_compared_with_the_first_and_with_those_that_they_replace(tmp_path, capsys):
    folders = [str(make_folder(tmp_path / str(side), {'train': ['a', 'b']}, 4, (side, side))) for side in (16, 1200)]
    for folder in folders:
        make_folder(Path(folder), {'val': ['a', 'b']})
    options = ['--img-size', '16', '--batch-size', '4', '--workers', '0', '--allow-load']
    main(['loader', *folders, *options, '--rounds', '1', '--json', str(tmp_path / 'figures.json')])
    rows = json.loads((tmp_path / 'figures.json').read_text())['rows']
    names = [name for folder in folders for name in (folder, f"{folder}, timm's loader")]
    assert [row['name'] for row in rows] == names
    small, peer, large, _ = rows
    assert small['ratio'] == 1.0
    assert large['per_second'] == pytest.approx(large['ratio'] * small['per_second'])
    # Thousands of times the pixels to decode, however long others keep the cores.
    assert large['cpu_milliseconds'] > 5 * small['cpu_milliseconds']
    assert small['cpu_ratio'] == pytest.approx(small['cpu_milliseconds'] / peer['cpu_milliseconds'])
    assert 'cpu_ratio' not in peer
    shown = capsys.readouterr().out
    assert f'{small["per_second"]:.4g}' in shown


def test_a_loaded_machine_is_not_measured_unless_that_is_wanted(monkeypatch):
    monkeypatch.setattr(machine, 'SAMPLE_SECONDS', 0.0)
    monkeypatch.setattr('tools.machine.LoadMeter.load', lambda meter: 0.54)
    for section in (['loader', 'folder'], ['table', '7'], ['ops'], ['models'], ['text'], ['decode'], ['goals']):
        with pytest.raises(OSError, match=r'at most 10% of the available cores, got 54%; .* --allow-load'):
            main(section)


@pytest.mark.usefixtures('quick')
def test_a_load_that_comes_meanwhile_is_no_report(monkeypatch, capsys, tmp_path):
    # As the machine is watched before, and as the measurement ends.
    found = [0.0, 0.0, 0.3]
    monkeypatch.setattr('tools.machine.LoadMeter.load', lambda meter: found.pop(0))
    with pytest.raises(OSError, match='got 30%'):
        main([*ONEHOT, '--json', str(tmp_path / 'onehot.json')])
    assert 'one-hot' not in capsys.readouterr().out
    assert not (tmp_path / 'onehot.json').exists()
    found[:] = [0.3]
    result = main([*ONEHOT, '--allow-load', '--threads', '1', '--json', str(tmp_path / 'onehot.json')])
    assert result['load'] == 0.3
    assert len(result['rows']) == 6
    written = json.loads((tmp_path / 'onehot.json').read_text())
    assert written['settings']['rounds'] == 1
    assert set(written) == {'machine', 'backends', 'load', 'settings', 'rows'}
    shown = capsys.readouterr().out
    assert shown.startswith(f'{result["machine"]}\n{result["backends"]}\n')
    assert 'other processes used 30.0% of the cores' in shown


@pytest.mark.parametrize('section', SECTIONS)
def test_the_help_of_a_section_tells_its_own_defaults(section, capsys):
    with pytest.raises(SystemExit):
        parse_args([section, '--help'])
    shown = ' '.join(capsys.readouterr().out.partition('\noptions:')[2].split())
    required = {'table': ['7'], 'loader': ['images']}.get(section, [])
    for name, value in vars(parse_args([section, *required])).items():
        default = SECTIONS[section].get(name)
        if default:
            assert f'(default: {str(default).strip("()")})' in shown
            # Words in parentheses say what the section chooses.
            assert (value is None) == str(default).startswith('(')


def test_goals_have_their_old_name_too_wherever_it_stands():
    expected = parse_args(['goals', '--rows', '4', '5'])
    assert (expected.section, expected.rows, expected.rounds) == ('goals', [4, 5], 15)
    for words in (['--goals', '--rows', '4', '5'], ['--rows', '4', '5', '--goals']):
        assert parse_args(words) == expected


def test_a_table_has_the_columns_of_its_rows_and_why_a_row_has_no_figures():
    rows = [
        {'name': 'SDPA', 'form': 'eager', 'ratio': 1.0, 'peak_bytes': 3 * 2**20, 'ratio_quartiles': (1.0, 1.0)},
        {'name': 'AFT', 'form': 'compiled', 'ratio': None, 'other': 3},
        {'name': 'broken', 'error': 'RuntimeError: no kernel'},
    ]
    head, first, second, failed = format_rows(rows).splitlines()
    assert head.split() == ['ratio', 'quartiles', 'peak', 'MiB']
    assert first.split() == ['SDPA', '-', '1.00', '1.00', '-', '1.00', '3.0']
    assert second.split() == ['AFT', 'compiled', '-', '-', '-']
    assert failed.endswith('RuntimeError: no kernel')
