"""The layout of folders of images: which of them are splits, and which are classes."""

import logging
import os
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from aft_vision.data.class_names import list_names
from aft_vision.data.images import MACOS_FOLDER, image_suffixes, is_hidden

# Names of splits, in any case; the first that exists is taken.
TRAIN_SPLITS = ('train', 'training')
EVAL_SPLITS = ('val', 'validation', 'valid', 'test', 'testing')
# Words in the names of other folders that are probably splits, such as seg_train and test_set.
SIMILAR = {
    'train_split': re.compile(r'(?<![a-z])train(ing)?(?![a-z])'),
    'eval_split': re.compile(r'(?<![a-z])(val(id(ation)?)?|eval(uation)?|test(ing)?)(?![a-z])'),
}
ANNOTATIONS = 'val_annotations.txt'
# Names that a message lists.
MAX_LISTED = 10

_logger = logging.getLogger(__name__)


class MissingSplitError(ValueError):
    """An error of a data set that has no training or evaluation split of the usual names.

    Attributes:
        remedies: Fields of a Source that read the data set; {} if none does.
    """

    def __init__(self, message: str, remedies: dict[str, Any]) -> None:
        super().__init__(message)
        self.remedies = remedies

    @property
    def keys(self) -> str:
        """Return the remedies as keys of an experiment, as the end of a sentence; '' if there are none."""
        settings = ' '.join(f'data.{key}={value}' for key, value in self.remedies.items())
        share = 'val_share' in self.remedies
        return (
            f'; {settings} {"holds out a tenth of the training images" if share else "reads them"}' if settings else ''
        )


def find_split(root: str | Path, wanted: Sequence[str], suffixes: Sequence[str]) -> Path:
    """Return the folder or file of the first of `wanted` that is in the data set directory `root`.

    Args:
        suffixes: Suffixes of the files of a split, '' for a folder, the preferred one first.

    Raises:
        ValueError: `root` is missing, not a directory or empty, or has none of the splits.
    """
    root = Path(root)
    entries = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    if not entries:
        raise ValueError(
            f'expected a data set directory with the folders train and val, or a tar file, got {root}, which is not one'
        )
    for name in wanted:
        present = find_present(root, name, suffixes)
        if present:
            if len(present) > 1:
                others = ' and '.join(path.name for path in present[1:])
                _logger.warning('%s is read, and not %s next to it', present[0], others)
            return present[0]
    names = [name for name in entries if _folders(root / name) or Path(name).suffix in suffixes[1:]]
    raise missing_split(f'folder, .tar or .beton file {" or ".join(wanted)}', root, wanted, names, entries)


def find_present(root: Path, name: str, suffixes: Sequence[str]) -> list[Path]:
    """Return the folder and the files of a split; those first that have its name in the same case."""
    present = []
    for path in root.iterdir():
        stem, suffix = (path.name, '') if path.is_dir() else (path.stem, path.suffix)
        if stem.lower() == name.lower() and suffix in suffixes and not _is_class(path):
            present.append((stem != name, suffixes.index(suffix), path))
    return [path for *_, path in sorted(present)]


def _is_class(folder: Path) -> bool:
    """Return whether a folder with the name of a split has images and no folders, as one with another name next to it.

    A flat split, whose images have no classes, has no such folder next to it.
    """
    others = [name for name in _folders(folder.parent) if name.lower() not in (*TRAIN_SPLITS, *EVAL_SPLITS)]
    return _is_flat(folder) and any(_is_flat(folder.with_name(name)) for name in others)


def _is_flat(folder: Path) -> bool:
    """Return whether a folder has images and no folders."""
    if not folder.is_dir() or _folders(folder):
        return False
    suffixes = image_suffixes()
    return any(path.suffix.lower() in suffixes and not is_hidden(path.name) for path in folder.iterdir())


def _folders(folder: Path) -> list[str]:
    """Return the names of the folders in a folder that are not hidden."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return [e.name for e in entries if e.is_dir() and not is_hidden(e.name) and e.name != MACOS_FOLDER]


def missing_split(
    expected: str, root: Path, wanted: Sequence[str], names: Sequence[str], entries: Sequence[str] | None = None
) -> ValueError:
    """Return the error of a missing split; a MissingSplitError unless one of another name was asked for.

    Args:
        expected: The split that is missing.
        names: Names of folders with folders, and of files, which may be splits.
        entries: Names of all in `root`; `names` by default.
    """
    listed = list_names(sorted(names) if entries is None else entries, MAX_LISTED) or 'none'
    message = f'expected a {expected} in {root}, got only {listed}'
    if tuple(wanted) not in (EVAL_SPLITS, TRAIN_SPLITS):
        return ValueError(message)
    return MissingSplitError(message, _remedies(sorted(names)))


def _remedies(names: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a Source that read a data set whose folders with folders have these names."""
    remedies: dict[str, Any] = {}
    usual = {'train_split': TRAIN_SPLITS, 'eval_split': EVAL_SPLITS}
    present = {key: any(name.lower() in usual[key] for name in names) for key in usual}
    for key, pattern in SIMILAR.items():
        similar = [name for name in names if pattern.search(name.lower())]
        if not present[key] and similar:
            remedies[key] = min(similar, key=lambda name: ('val' not in name.lower(), name))
    if present['eval_split'] or 'eval_split' in remedies:
        return remedies if present['train_split'] or 'train_split' in remedies else {}
    return {**remedies, 'val_share': 0.1}


def find_split_folders(image_folders: Collection[PurePosixPath], wanted: Sequence[str]) -> set[PurePosixPath]:
    """Return the folders of the first of `wanted` that has class folders, at any depth.

    Args:
        image_folders: The folders with images.
    """
    top = find_top(image_folders)
    inner = {above for path in image_folders for above in path.parents}
    splits = {*TRAIN_SPLITS, *EVAL_SPLITS, *wanted}
    # A class in another split may be called as the wanted one.
    outer = {path for path in inner if not any(p.name.lower() in splits for p in path.parents if top in p.parents)}
    for name in wanted:
        folders = [path for path in outer if path.name.lower() == name.lower()]
        exact = {path for path in folders if path.name == name}
        if folders:
            return {path for path in exact or folders if not set(path.parents) & {*folders}}
    return set()


def find_top(image_folders: Collection[PurePosixPath]) -> PurePosixPath:
    """Return the folder of the outermost class folders of a data set without splits.

    Args:
        image_folders: The folders with images.
    """
    top = PurePosixPath(os.path.commonpath([str(PurePosixPath('/', path)) for path in image_folders])).relative_to('/')
    return top.parent if set(image_folders) == {top} else top


def unwrap(
    top: PurePosixPath, image_folders: Iterable[PurePosixPath], folders: Iterable[str], split: str | None
) -> PurePosixPath:
    """Return the folder of class folders at or below `top`: an only folder that has only folders wraps them.

    Args:
        image_folders: The folders with images.
        folders: Names of the folders in `top`.
        split: The name of `top` if it is a split, whose wrapper has the same name: another only folder is a class.
    """
    below = [path for path in image_folders if top in (path, *path.parents)]
    inner = find_top(below) if below else top
    names = {*folders, *(path.relative_to(top).parts[0] for path in below if path != top)}
    removed = inner.relative_to(top).parts if top in inner.parents else ()
    is_wrapper = split is None or all(name.lower() == split.lower() for name in removed)
    return inner if len(names) == 1 and removed and is_wrapper else top


def class_folder(path: PurePosixPath, tops: Collection[PurePosixPath]) -> str | None:
    """Return the name of the class folder of a folder: the first below one of `tops`; '' for that, None outside."""
    for top in (path, *path.parents):
        if top in tops:
            return next(iter(path.relative_to(top).parts), '')
    return None


def check_no_splits(root: Path, image_folders: Iterable[PurePosixPath]) -> None:
    """Raise a MissingSplitError if the outermost folders look like splits and not like classes.

    Args:
        image_folders: The folders with images, relative to `root`.
    """
    inner: dict[str, set[str]] = {}
    for path in image_folders:
        name, *rest = path.parts or ('',)
        inner.setdefault(name, set()).update(rest[:1])
    for name in inner:
        twins = [other for other in inner if other != name and inner[other] and inner[other] == inner[name]]
        if twins and SIMILAR['train_split'].search(name.lower()):
            raise MissingSplitError(
                f'expected class folders in {root}, got {name} and {twins[0]}, which look like splits: both have the '
                f'folders {list_names(sorted(inner[name]), MAX_LISTED)}',
                _remedies([name, *twins]),
            )
