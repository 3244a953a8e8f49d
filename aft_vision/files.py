"""Files of a run, and how a file is written whole or not at all."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

BEST, LAST = 'best.pth', 'last.pth'


def find_checkpoint(path: str | Path) -> Path:
    """Return the best checkpoint of the folder of a run; any other path as it is."""
    path = Path(path)
    best = path / BEST
    # An exported folder has a config.json.
    return best if best.is_file() and not (path / 'config.json').is_file() else path


def check_folder(path: Path) -> None:
    """Raise a ValueError unless a folder, which has no best.pth, holds an exported model."""
    if not (path / 'config.json').is_file():
        raise ValueError(
            f'expected a run with best.pth or an exported model with config.json in {path}, got neither'
            f'{name_latest(path)}'
        )


def name_latest(folder: str | Path) -> str:
    """Return the end of an error about a folder without best.pth: where the newest checkpoint of its run is, or ''."""
    last = Path(folder) / LAST
    return f'; its newest checkpoint is {last}' if last.is_file() else ''


def older(path: Path, age: int) -> Path:
    """Return the name of the file that is `age` saves older: `last-1.pth` for `last.pth`."""
    return path if age == 0 else path.with_name(f'{path.stem}-{age}{path.suffix}')


@contextlib.contextmanager
def replacing(path: str | Path, keep: int = 1) -> Iterator[Path]:
    """Give a path to write, and let the file take the place of `path` when it is whole; after an error nothing changes.

    Its content reaches the disk before its name. A process that is killed leaves a folder `.NAME.*.tmp` next to it.

    Args:
        keep: The files of this name that remain: `last.pth`, and before it `last-1.pth`, `last-2.pth`, ...
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The file has its name from the start, in a folder of its own: a .pt2 file holds its first name.
    with tempfile.TemporaryDirectory(prefix=f'.{path.name}.', suffix='.tmp', dir=path.parent) as folder:
        written = Path(folder) / path.name
        yield written
        with written.open('rb') as file:
            os.fsync(file.fileno())
        for age in range(keep - 1, 0, -1):
            if older(path, age - 1).exists():
                os.replace(older(path, age - 1), older(path, age))
        os.replace(written, path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make a rename survive a power cut, where the system allows it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
