"""Run a command of aft-vision.

aft-vision COMMAND [ARGUMENT ...]
torchrun --nproc-per-node 8 --no-python aft-vision train --config NAME_OR_FILE [section.key=value ...]

`aft-vision COMMAND --help` describes a command. In a checkout, `python -m MODULE` is the same.
"""

import ast
import difflib
import os
import re
import runpy
import shutil
import sys
import textwrap
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

# A wheel has this folder as the package aft_vision_cli, with the commands and configs in it: their names, such as
# `train`, may be those of other packages. It is no part of aft_vision, whose import takes seconds.
HERE = Path(__file__).resolve().parent
ROOT = HERE if (HERE / 'train').is_dir() else HERE.parents[1]
DISTRIBUTION = 'aft-vision'
# The commands that --help lists first, and those that are not named after their modules.
FIRST = ('train', 'predict', 'eval', 'report', 'export')
NAMES = {
    'tools.eval_resolution': 'eval',
    'train.imagenet': 'train',
    **{f'train.{name}': f'train-{name}' for name in ('char', 'pixel', 'recall')},
    'train.fastformer': 'train-text',
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command as `python -m` would, or print what there is.

    Raises:
        SystemExit: there is no such command, a package that it needs is not installed, or the command exits.
    """
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ['']
    if name in ('', '-h', '--help'):
        print(list_commands())
        raise SystemExit(0 if name else 2)
    if name == '--version':
        print(f'aft-vision {version(DISTRIBUTION)}')
        return
    commands = find_commands()
    if name not in commands:
        near = difflib.get_close_matches(name, commands, n=1)
        meant = f'; did you mean {near[0]}?' if near else ''
        sys.exit(fail(f'expected a command, got {name}{meant}; aft-vision --help lists them'))
    sys.path.insert(0, str(ROOT))
    # For the commands that a command starts.
    os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
    sys.argv = [f'aft-vision {name}', *rest]
    try:
        runpy.run_module(commands[name], {'PROGRAM': sys.argv[0]}, run_name='__main__', alter_sys=True)
    except ModuleNotFoundError as error:
        extra = find_extra(error.name or '')
        if extra is None:
            raise
        sys.exit(fail(f"{name} needs {error.name}, which is not installed: pip install 'aft-vision[{extra}]'"))


def fail(message: str) -> int:
    """Print an error as a line, and return the exit status."""
    print(f'error: {message}', file=sys.stderr)
    return 2


def find_commands() -> dict[str, str]:
    """Return the module of each command by its name, those of FIRST first."""
    found = {}
    for path in (*ROOT.glob('t*/*.py'), *ROOT.glob('t*/*/__main__.py')):
        module = '.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__main__')
        if module.startswith(('train.', 'tools.')) and 'run_command(main)' in path.read_text(encoding='utf-8'):
            found[NAMES.get(module, module.partition('.')[2].replace('_', '-'))] = module
    return {name: found[name] for name in (*FIRST, *sorted(found.keys() - {*FIRST}))}


def list_commands() -> str:
    """Return the usage and a line for each command, from the docstring of its module."""
    width = min(shutil.get_terminal_size().columns, 120)
    lines = [__doc__ or '']
    for name, module in find_commands().items():
        path = ROOT.joinpath(*module.split('.'))
        source = path / '__main__.py' if path.is_dir() else path.with_suffix('.py')
        about = (ast.get_docstring(ast.parse(source.read_text(encoding='utf-8'))) or '').partition('\n')[0]
        lines.append(textwrap.fill(f'{name:18}{about}', width, subsequent_indent=' ' * 18))
    return '\n'.join(lines)


def find_extra(module: str) -> str | None:
    """Return the first extra of the distribution that installs a package, by the name that it is imported by."""
    try:
        needed = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return None
    # A distribution may have a hyphen where its package has an underscore.
    name = re.escape(module.partition('.')[0]).replace('_', '[-_]')
    pattern = re.compile(rf"{name}\b.*extra == ['\"]([\w-]+)", re.IGNORECASE)
    return next((found[1] for each in needed if (found := pattern.match(each))), None)
