"""Checkpoints that are never half-written."""

import contextlib
import fcntl
import hashlib
import logging
import math
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch.utils.data import IterableDataset

from aft_vision.data.class_names import list_names, match_classes
from aft_vision.data.shards import WebDataset
from aft_vision.files import BEST, LAST, older, replacing
from aft_vision.models.checkpoint import read_checkpoint
from train.config import continues
from train.state import TrainState

LOCK = '.lock'
MAX_KEPT = 100
# Files of a run besides its checkpoints and summary.csv, also by tools.eval_resolution and tools.report.
RESULTS = ('curves.png', 'result.json', 'steps.csv', 'eval_resolution.json', 'eval_resolution.png', 'report.html')
# Keys of `run` that affect updates, and keys of other sections that do not.
RUN_KEYS = ('seed', 'amp')
LOADING_KEYS = ('data.num_workers', 'data.eval_batch_size', 'data.download')

_logger = logging.getLogger(__name__)


class Saver:
    """Writer of the checkpoints of a run, in the first process only.

    Args:
        folder: Folder of the run.
        description: Entries that rebuild the model: `model_name`, `model_kwargs`, `class_names`.
        keep: Number of latest checkpoints to keep: `last.pth`, `last-1.pth`, ...
        minutes: Time between checkpoints within an epoch; None saves only after each epoch.
        experiment: The file to resume the run with; None for the config.yaml of the folder.
    """

    def __init__(
        self,
        folder: Path,
        description: dict[str, Any],
        keep: int,
        minutes: float | None,
        experiment: Path | None = None,
    ) -> None:
        self.folder, self.description, self.keep = folder, description, keep
        self.experiment = experiment or folder / 'config.yaml'
        self.interval = math.inf if minutes is None else 60 * minutes
        self.saved_at = time.monotonic()
        # Updates of the run in the checkpoint that is the newest.
        self.saved_updates: int | None = None

    def is_due(self) -> bool:
        """Return whether the latest checkpoint is older than `minutes`."""
        return time.monotonic() - self.saved_at >= self.interval

    def save_last(self, state: TrainState) -> None:
        """Write the whole state; keep the `keep` latest checkpoints, of which no two are of the same update."""
        self.saved_at = time.monotonic()
        if not state.world.is_primary:
            return
        updates, content = state.progress.updates, {**self.description, **state.state_dict()}
        save_checkpoint(content, self.folder / LAST, keep=1 if updates == self.saved_updates else self.keep)
        self.saved_updates = updates

    def withdraw_last(self, state: TrainState) -> None:
        """Put the checkpoint before the latest one in its place, if one is kept: a run would stop there again."""
        before = older(self.folder / LAST, 1)
        if state.world.is_primary and before.exists():
            os.replace(before, self.folder / LAST)

    def save_best(
        self,
        state: TrainState,
        weights: dict[str, torch.Tensor],
        averaged: bool,
        by_class: torch.Tensor | None = None,
    ) -> None:
        """Write the best weights so far, without the training state.

        Args:
            by_class: Validation images and right predictions by class, as a ClassEvaluator counts them.
        """
        if not state.world.is_primary:
            return
        reached = state.progress
        progress = {'epoch': reached.epoch, 'updates': reached.updates, state.best_key: reached.best}
        content = {**self.description, **progress, 'state_dict': weights, 'averaged': averaged}
        if by_class is not None:
            content['by_class'] = by_class.cpu()
        save_checkpoint(content, self.folder / BEST)


def save_checkpoint(content: dict[str, Any], path: Path, keep: int = 1) -> None:
    """Write `content` to `path`; an error leaves the existing file unchanged.

    Args:
        content: Only tensors and plain containers, so that `torch.load(weights_only=True)` reads it.
        keep: Number of files of this name to keep: `last.pth`, and before it `last-1.pth`, `last-2.pth`, ...

    Raises:
        OSError: the disk is full or the file cannot be written.
    """
    try:
        with replacing(path, keep) as written, written.open('wb') as file:
            torch.save(content, file)
    except (OSError, RuntimeError) as error:
        # torch wraps the reason in a RuntimeError.
        reason = error.__context__ if isinstance(error.__context__, OSError) else error
        raise OSError(f'could not write {path}; the files from before are whole: {reason}') from reason


def _latest(folder: Path) -> list[Path]:
    """Return all latest checkpoints of a run, newest first."""
    return [older(folder / LAST, age) for age in range(MAX_KEPT)]


def read_latest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Read the newest undamaged checkpoint of a run; warn about damaged ones.

    Returns:
        Its path and content, or None if there is no checkpoint.

    Raises:
        ValueError: all checkpoints are damaged.
    """
    # After an interruption between two renames, `last.pth` may be missing and `last-1.pth` is the newest.
    present = [path for path in _latest(folder) if path.exists()]
    for path in present:
        try:
            return path, read_checkpoint(path)
        except ValueError as error:
            _logger.warning('not resumed from: %s', error)
    if present:
        raise ValueError(f'expected a whole checkpoint in {folder}, got damaged ones: {", ".join(map(str, present))}')
    return None


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Keep other processes from training in a folder until this one ends.

    Unfinished files of a killed run are removed.

    Raises:
        FileExistsError: another process trains there, or has just ended.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with (folder / LOCK).open('a+') as file:
            _lock(file, folder)
            try:
                for path in folder.glob('.*.tmp'):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                yield
            finally:
                (folder / LOCK).unlink(missing_ok=True)
    finally:
        if is_new:
            # Remove the folder if it is empty: the run did not start.
            with contextlib.suppress(OSError):
                folder.rmdir()


def _lock(file: IO[str], folder: Path) -> None:
    try:
        # Unlike flock's, these locks are not inherited by loading processes, which outlive a killed run.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        owner = file.read().strip() or 'another process'
        raise FileExistsError(
            f'expected a folder in which no other run is going on, got {folder}, where {owner} trains; set run.dir, '
            'or wait for its end'
        ) from error
    except OSError as error:
        _logger.warning('%s is not locked against other runs: %s', folder, error)
    # A run that ended between `open` and here has removed the file, and another may lock a new one.
    is_named = False
    with contextlib.suppress(FileNotFoundError):
        is_named = os.path.samestat(os.fstat(file.fileno()), (folder / LOCK).stat())
    if not is_named:
        raise FileExistsError(
            f'expected a folder in which no other run is going on, got {folder}, where one has just ended; try again'
        )
    file.truncate(0)
    file.write(f'process {os.getpid()} of {socket.gethostname()}\n')
    file.flush()


def holds_run(folder: Path) -> bool:
    """Return whether a folder has a checkpoint of a run."""
    return any(path.exists() for path in (folder / BEST, *_latest(folder)))


def remove_run(folder: Path) -> None:
    """Remove the files of an earlier run, so that none is mistaken for a new one."""
    diagnoses = folder.glob('nonfinite-*.json')
    for path in (folder / BEST, *(folder / name for name in RESULTS), *_latest(folder), *diagnoses):
        path.unlink(missing_ok=True)
    for name in ('tensorboard', 'export'):
        shutil.rmtree(folder / name, ignore_errors=True)


def describe_samples(loader: Any) -> dict[str, Any]:
    """Return the number of training samples, and a digest of the names of their files, as an entry `data`.

    The names are those of the files with their class folders, or of the shards: a data set may move.
    """
    dataset = getattr(loader, 'dataset', None)
    if isinstance(dataset, WebDataset):
        return _describe(dataset.images, [file.url.rsplit('/', 1)[-1] for file in dataset.files])
    if not isinstance(dataset, Sized) or isinstance(dataset, IterableDataset):
        return {}
    # Below what transforms or chooses images.
    files: Any = dataset
    while not hasattr(files, 'reader') and hasattr(files, 'dataset'):
        files = files.dataset
    # Other readers know no name without reading the image.
    named = hasattr(getattr(files, 'reader', None), 'samples')
    names = files.filenames(absolute=True) if named else []
    return _describe(len(dataset), ['/'.join(name.rsplit('/', 2)[-2:]) for name in names])


def _describe(samples: int, names: Sequence[str]) -> dict[str, Any]:
    if not names:
        return {'samples': samples}
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode('utf-8', 'surrogateescape') + b'\n')
    return {'samples': samples, 'names': digest.hexdigest()}


def resume(state: TrainState, folder: Path, where: str, class_names: Sequence[str], data: Mapping[str, Any]) -> None:
    """Restore a state as `restore` does, and print the checkpoint and how this run differs from that which wrote it."""
    restored = restore(state, folder, where, class_names, data)
    if restored is None:
        return
    path, changes = restored
    reached = 'complete' if state.budget_exhausted() else f'epoch {state.progress.epoch + 1}'
    if state.world.is_primary:
        print(f'resumed from {path}: {reached}, update {state.progress.updates}')
        for change in changes:
            print(f'  now with {change}')


def restore(
    state: TrainState, folder: Path, where: str, class_names: Sequence[str], data: Mapping[str, Any]
) -> tuple[Path, list[str]] | None:
    """Restore a state from a checkpoint.

    Args:
        class_names: Classes of the data set, which must equal the checkpoint's.
        data: From `describe_samples`. Within an epoch, it must equal the checkpoint's.
        folder: Folder of the run.
        where: `auto` for the newest undamaged checkpoint in the folder, if there is one; or the path of a checkpoint,
            or of a run for its newest checkpoint.

    Returns:
        The path of the checkpoint, and how this run differs from the one that wrote it; None if there is none.

    Raises:
        ValueError: the checkpoint is missing, damaged, without the optimizer, or of another model or other data.
    """
    source = folder if where == 'auto' else Path(where)
    latest = read_latest(source) if where == 'auto' or source.is_dir() else (source, read_checkpoint(source))
    if latest is None:
        if where == 'auto':
            return None
        raise ValueError(f'expected a run with a checkpoint in {source}, got none')
    path, content = latest
    if 'optimizer' not in content:
        raise ValueError(f'expected a checkpoint with the state of the optimizer, as {LAST} has, got {path}')
    changes: list[str] = []
    try:
        _check_classes(content['class_names'], class_names, state.record['data'].get('match_classes') == 'place', path)
        changes += [*_data_changes(content, data, path), *_changes(content, state.record, state.world.size)]
        state.load_state_dict(content, source=str(path))
    except KeyError as error:
        raise ValueError(
            f'expected a checkpoint with the whole state of a run, as {LAST} has, got {path} without {error}; '
            'run.init_from starts a new run from its weights'
        ) from error
    except ValueError as error:
        of_model = [change for change in changes if change.startswith('model.')]
        raise ValueError('; '.join([str(error), *of_model])) from error
    # In another folder, the best weights are only those from now on.
    if not (continues(folder, where) and (folder / BEST).exists()):
        state.progress.best = state.objective.worst
    return path, changes


def _check_classes(saved: Sequence[str], class_names: Sequence[str], by_place: bool, path: Path) -> None:
    same = by_place or match_classes(saved, class_names) == list(range(len(saved)))
    if not same or len(saved) != len(class_names):
        raise ValueError(
            f'expected a checkpoint of the {len(class_names)} classes {list_names(class_names)}, got {path} with the '
            f'{len(saved)} classes {list_names(saved)}; run.init_from starts a new run from its weights'
        )


def _data_changes(content: dict[str, Any], now: Mapping[str, Any], path: Path) -> list[str]:
    """Return how the training samples differ from a checkpoint's.

    Raises:
        ValueError: they differ and the checkpoint is within an epoch, whose order is drawn from their number.
    """
    was = content.get('data') or {}
    if was.get('samples') != now.get('samples'):
        change = f'{now.get("samples")} training samples, was {was.get("samples")}'
    elif was.get('names') != now.get('names'):
        change = f'{now["samples"]} training samples in files of other names'
    else:
        return []
    # Of an epoch that is trained and not evaluated there is no rest.
    within = (content['updates'] - content['epoch'] * content['updates_per_epoch']) % content['updates_per_epoch']
    # A checkpoint of an earlier version says nothing about its data.
    if within and was:
        raise ValueError(
            f'expected the data set of {path}, which is within an epoch, after {within} of '
            f'{content["updates_per_epoch"]} updates, got {change}: the rest of the epoch would have another order; '
            'bring back these files, or resume from a checkpoint at the end of an epoch by run.resume=FILE and another '
            'run.dir'
        )
    return [change if was else 'a data set that cannot be compared, as the checkpoint says nothing about its own']


def _changes(content: dict[str, Any], record: dict[str, Any], world_size: int) -> list[str]:
    """Return the differences between a run and the one that it resumes."""
    before = {**content['config'], 'world_size': content['world_size']}
    changes = []
    for section, value in {**record, 'world_size': world_size}.items():
        # A checkpoint of an earlier version lacks newer sections.
        old = before.get(section, value)
        if not isinstance(value, dict):
            pairs = {section: (old, value)}
        else:
            keys = RUN_KEYS if section == 'run' else dict.fromkeys([*value, *(old or {})])
            pairs = {f'{section}.{key}': ((old or {}).get(key), value.get(key)) for key in keys}
        changed = {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and name not in LOADING_KEYS}
        changes += [f'{name} = {new!r}, was {was!r}' for name, (was, new) in changed.items()]
    return changes
