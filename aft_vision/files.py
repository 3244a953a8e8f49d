"""Files of a run, and atomic writing of files."""

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

BEST, LAST = 'best.pth', 'last.pth'

_logger = logging.getLogger(__name__)


def find_checkpoint(path: str | Path) -> Path:
    """Return the best checkpoint of a run's folder; return any other path unchanged."""
    path = Path(path)
    best = path / BEST
    # An exported folder has a config.json.
    return best if best.is_file() and not (path / 'config.json').is_file() else path


def check_folder(path: Path) -> None:
    """Raise a ValueError unless a folder without best.pth has an exported image model."""
    if not (path / 'config.json').is_file():
        raise ValueError(
            f'expected a run with best.pth or an exported model with config.json in {path}, got neither'
            f'{name_latest(path)}'
        )
    try:
        config = dict(json.loads((path / 'config.json').read_bytes()))
    except (ValueError, TypeError) as error:
        raise ValueError(f'expected an exported model in {path}, got a damaged config.json: {error}') from error
    if 'architecture' not in config:
        described = f' of type {config["model_type"]}' if 'model_type' in config else ''
        raise ValueError(
            f'expected an image model in {path}, got a config.json{described} without an architecture of timm'
        )


def name_latest(folder: str | Path) -> str:
    """Return the end of an error about a folder without best.pth: its newest checkpoint, or ''."""
    last = Path(folder) / LAST
    return f'; its newest checkpoint is {last}' if last.is_file() else ''


def older(path: Path, age: int) -> Path:
    """Return the name of the file that is `age` saves older: `last-1.pth` for `last.pth`."""
    return path if age == 0 else path.with_name(f'{path.stem}-{age}{path.suffix}')


@contextlib.contextmanager
def replacing(path: str | Path, keep: int = 1) -> Iterator[Path]:
    """Yield a path to write; the complete file then replaces `path`, and after an error nothing changes.

    The content is synced before the rename; permissions stay. A killed process leaves a folder `.NAME.*.tmp` there.

    Args:
        keep: Number of files of this name to keep: `last.pth`, and before it `last-1.pth`, `last-2.pth`, ...
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The file has its final name from the start, in a temporary folder: a .pt2 file contains its first name.
    with tempfile.TemporaryDirectory(prefix=f'.{path.name}.', suffix='.tmp', dir=path.parent) as folder:
        written = Path(folder) / path.name
        yield written
        with written.open('rb') as file:
            os.fsync(file.fileno())
        if path.exists():
            written.chmod(path.stat().st_mode)
        for age in range(keep - 1, 0, -1):
            if older(path, age - 1).exists():
                os.replace(older(path, age - 1), older(path, age))
        os.replace(written, path)
    sync_directory(path.parent)


@contextlib.contextmanager
def replacing_output(path: str | Path) -> Iterator[Path]:
    """Yield a path to write, as `replacing` of the file to which a link leads; or a pipe or a terminal itself."""
    if Path(path).exists() and not Path(path).is_file():
        yield Path(path)
        return
    with replacing(os.path.realpath(path)) as file:
        yield file


def write_json(path: str | Path, content: Any) -> None:
    """Write a JSON file, complete or not at all, or that to which a link leads; to a pipe or a terminal as it comes."""
    text = json.dumps(content, indent=2) + '\n'
    with replacing_output(path) as file:
        file.write_text(text)


@contextlib.contextmanager
def keeping_rows(path: str | Path, finish: Callable[[Path], None] | None = None) -> Iterator[Callable[[Any], None]]:
    """Yield a function that writes one more row of a result as a line of JSON.

    The lines are in `PATH.part`, which replaces `path` at the end; after an error it stays if it has any. A pipe or a
    terminal is written to itself. Bytes of names that are not UTF-8 are escaped as JSON allows.

    Args:
        finish: Writes the result in another format to the path that it is given, in place of the lines.
    """
    is_file, rows = Path(path).is_file() or not Path(path).exists(), 0
    target = Path(os.path.realpath(path)) if is_file else Path(path)
    part = target.with_name(f'{target.name}.part') if is_file else target
    has_lines = is_file or finish is None
    file: TextIO | None = None

    def open_part() -> TextIO:
        return stack.enter_context(part.open('w', encoding='utf-8', errors='backslashreplace'))

    def write(row: Any) -> None:
        # The file of an earlier run stays until there is a row.
        nonlocal file, rows
        if has_lines:
            file = file or open_part()
            print(json.dumps(row, ensure_ascii=False), file=file, flush=True)
            rows += 1

    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with contextlib.ExitStack() as stack:
            yield write
            if finish is None:
                file = file or open_part()
    except BaseException:
        if is_file and rows:
            _logger.warning('the rows that were done are in %s: %d', part, rows)
        raise
    if finish is None and is_file:
        with replacing(target) as whole:
            os.replace(part, whole)
    elif finish is not None:
        with replacing_output(target) as whole:
            finish(whole)
        if is_file and rows:
            part.unlink()


def sync_directory(directory: Path) -> None:
    """Sync a directory so that a rename survives a power failure, if the system supports it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
