"""The command aft-vision, which runs the others."""

import ast
import os
import sys

import pytest
from test_commands import COMMANDS, ROOT

from tools import console


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    monkeypatch.setattr(sys, 'path', [*sys.path])
    monkeypatch.setattr(sys, 'argv', [*sys.argv])
    monkeypatch.setenv('PYTHONPATH', os.environ.get('PYTHONPATH', ''))


def stop(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        console.main(arguments)
    return stopped.value.code


def test_every_module_that_is_a_command_has_a_name_and_a_line_of_help(capsys):
    found = console.find_commands()
    assert sorted(found.values()) == COMMANDS
    assert [*found][:5] == ['train', 'predict', 'eval', 'report', 'export']
    assert stop('--help') == 0
    shown = capsys.readouterr().out
    assert shown.startswith(console.__doc__)
    for name, module in found.items():
        path = ROOT.joinpath(*module.split('.'))
        tree = ast.parse((path / '__main__.py' if path.is_dir() else path.with_suffix('.py')).read_text())
        assert any(isinstance(node, ast.FunctionDef) and node.name == 'main' for node in tree.body)
        (line,) = (line for line in shown.splitlines() if line.partition(' ')[0] == name)
        assert ast.get_docstring(tree).startswith(line.removeprefix(name).strip())


def test_without_a_command_it_says_which_there_are(capsys):
    assert stop() == 2
    assert 'aft-vision COMMAND' in capsys.readouterr().out


def test_an_unknown_command_is_one_line_with_the_nearest(capsys):
    assert stop('predct') == 2
    said = 'error: expected a command, got predct; did you mean predict?; aft-vision --help lists them\n'
    assert capsys.readouterr().err == said


def test_the_help_of_a_command_has_what_is_typed(capsys):
    assert stop('train', '--help') == 0
    shown = capsys.readouterr().out
    assert shown.startswith('usage: aft-vision train [')
    assert '\naft-vision train --config FILE' in shown
    assert '--no-python aft-vision train --config FILE' in shown
    assert '-m train.imagenet' not in shown


def test_a_command_runs_with_its_errors_as_its_own(capsys):
    assert stop('train', '--config', 'finetun') == 2
    assert capsys.readouterr().err.endswith('got finetun, which does not exist; did you mean finetune?\n')


def test_a_package_of_an_extra_that_is_missing_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(console, 'requires', lambda name: ['torch>=2', "omegaconf>=2.4; extra == 'train'"])
    monkeypatch.setattr(console.runpy, 'run_module', lambda *a, **k: __import__('torch_that_is_missing'))
    with pytest.raises(ModuleNotFoundError):
        console.main(['train'])
    monkeypatch.setattr(console, 'requires', lambda name: ["torch-that-is-missing>=2.4; extra == 'train'"])
    assert stop('train') == 2
    assert "pip install 'aft-vision[train]'" in capsys.readouterr().err
