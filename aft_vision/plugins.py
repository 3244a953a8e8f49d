"""Modules of others, which register models and mixers when they are imported.

Commands import them at their start: the modules of `--import`, and the ones that installed packages declare as entry
points of the group `aft_vision.plugins`.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path

GROUP = 'aft_vision.plugins'


def import_plugins(names: Iterable[str] = ()) -> None:
    """Import the modules of the entry points, and then modules by name or Python files, each once.

    The folder of a file, or for a module the current one, is added at the end of `sys.path`.

    Raises:
        ValueError: there is no such module or file, or another module has the name of the file.
        ImportError: a module or an entry point imports what is not installed.
    """
    import_entry_points()
    for name in names:
        if name.endswith('.py') or '/' in name:
            _import_file(Path(name).expanduser())
        else:
            _import_module(name, Path.cwd())


@functools.cache
def import_entry_points() -> None:
    """Import the modules that installed packages declare, once.

    Raises:
        ImportError: one cannot be imported; the message names its package.
    """
    for each in entry_points(group=GROUP):
        try:
            each.load()
        except (ImportError, AttributeError) as error:
            package = each.dist.name if each.dist is not None else each.value
            raise ImportError(f'expected {each.value} of the package {package}, as {GROUP} says: {error}') from error


def _import_file(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f'expected a module or a Python file to import, got {path}, which does not exist')
    if path.suffix != '.py' or not path.stem.isidentifier():
        raise ValueError(f'expected a Python file with the name of a module, such as own_mixer.py, got {path}')
    _import_module(path.stem, path.resolve().parent, path.resolve())


def _import_module(name: str, folder: Path, file: Path | None = None) -> None:
    # At the end: a folder of a user may have a file train.py.
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    importlib.invalidate_caches()
    try:
        # A dotted name imports its parents.
        spec = importlib.util.find_spec(name)
        if file is not None and spec is not None and (spec.origin is None or Path(spec.origin).resolve() != file):
            raise ValueError(f'expected a file with a name of its own, got {file}: {name} is {spec.origin}; rename it')
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f'{name}.'.startswith(f'{error.name}.'):
            raise ValueError(f'expected a module or a Python file to import, got {name}, which is neither') from error
        raise ImportError(f'{file or name}: {error}') from error
