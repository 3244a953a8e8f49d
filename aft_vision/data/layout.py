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
PREPARATION = 'aft-vision prepare-imagenet makes the class folders of ImageNet from its archives or a flat val'
ANNOTATIONS = 'val_annotations.txt'
AS_CLASSES = 'if all are classes, move them into a new folder train'
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
    if not root.is_dir():
        raise ValueError(
            f'expected a data set directory with the folders train and val, or a tar file, got {root}, which is not one'
        )
    entries = sorted(path.name for path in root.iterdir())
    if not entries:
        raise ValueError(f'expected a data set directory with the folders train and val, got {root}, which is empty')
    for name in wanted:
        present = find_present(root, name, suffixes)
        if present:
            if len(present) > 1:
                others = ' and '.join(path.name for path in present[1:])
                _logger.warning('%s is read, and not %s next to it', present[0], others)
            return present[0]
    parents = [root / name / each for name in entries for each in _folders(root / name)]
    files = [root / name / 'a class' for name in entries if Path(name).suffix in suffixes[1:]]
    image_folders = [PurePosixPath(path).relative_to(root) for path in (*parents, *files)]
    classes = [name for name in entries if _has_images(root / name)]
    raise missing_split(
        f'folder, .tar or .beton file {" or ".join(wanted)}', root, wanted, image_folders, entries, classes
    )


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
    return _is_flat(folder) and any(map(_is_flat, _others(folder)))


def _others(split: Path) -> list[Path]:
    """Return the folders next to a split that do not have the name of one."""
    return [split.with_name(name) for name in sorted(_without_splits(_folders(split.parent)))]


def _without_splits(names: Iterable[str]) -> set[str]:
    return {name for name in names if name.lower() not in {*TRAIN_SPLITS, *EVAL_SPLITS}}


def check_no_classes(split: Path) -> None:
    """Raise a ValueError if folders next to the only split may be classes: it may be one itself, with such a name."""
    others = [folder.name for folder in _others(split) if _has_images(folder)]
    _refuse_classes(split, others, f'data.dir={split}, or --data {split} of a tool, reads its folders as the classes')


def check_no_classes_in_tar(
    path: Path, splits: Iterable[PurePosixPath], image_folders: Collection[PurePosixPath]
) -> None:
    """Raise a ValueError as `check_no_classes`, for folders of a tar file.

    Args:
        image_folders: The folders with images.
    """
    for split in splits:
        next_to = [inside for inside in image_folders if split.parent in inside.parents]
        others = _without_splits(inside.relative_to(split.parent).parts[0] for inside in next_to)
        _refuse_classes(f'{split} in {path}', sorted(others), 'a tar file of it alone has its folders as the classes')


def _refuse_classes(split: Path | str, others: Sequence[str], remedy: str) -> None:
    if others:
        raise ValueError(
            f'expected one folder per class, or a split of class folders, got {split} with folders, and next to it '
            f'{list_names(others, MAX_LISTED)}; {AS_CLASSES}, else {remedy}'
        )


def _has_images(folder: Path) -> bool:
    return bool(_folders(folder)) or _is_flat(folder)


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
    expected: str,
    root: Path,
    wanted: Sequence[str],
    image_folders: Collection[PurePosixPath],
    entries: Sequence[str] | None = None,
    classes: Iterable[str] | None = None,
) -> ValueError:
    """Return the error of a missing split; a MissingSplitError unless one of another name was asked for.

    Args:
        expected: The split that is missing.
        image_folders: Folders that may be classes.
        entries: Names of the files in `root`; by default of the folders with classes.
        classes: Names of the folders in `root` with images or folders; the outermost of `image_folders` by default.
    """
    names = sorted({path.parent.name for path in image_folders if path.parent.name})
    flat = [name for name in wanted if any(each.lower() == name for each in entries or ())]
    note = f'; {flat[0]} there has images and no folders, so it is a class' if flat else ''
    listed = list_names(names if entries is None else entries, MAX_LISTED) or 'none'
    message = f'expected a {expected} in {root}, got only {listed}{note}'
    if tuple(wanted) not in (EVAL_SPLITS, TRAIN_SPLITS):
        return ValueError(message)
    remedies = _remedies(names)
    tops = {path.parts[0] for path in image_folders if path.parts} if classes is None else {*classes}
    splits = tops & {*names} - _without_splits(names)
    # A class may have the name of a split, and folders.
    if splits and _without_splits(tops) and remedies.keys() <= {'val_share'}:
        message += f'; {AS_CLASSES}'
        if remedies:
            remedies = {'dir': root / min(splits), **remedies} if root.is_dir() else {}
    return MissingSplitError(message, remedies)


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


def check_sorted(folder: Path, class_folders: Sequence[str]) -> None:
    """Raise a ValueError for the validation images of Tiny-ImageNet as published, which are not in class folders."""
    if (folder / ANNOTATIONS).is_file() and len(class_folders) == 1:
        raise ValueError(
            f'expected one folder per class in {folder}, got the images of Tiny-ImageNet without one; '
            f'aft-vision prepare-imagenet --solution {folder / ANNOTATIONS} --out {folder.parent} makes them'
        )


def advise_flat(paths: Sequence[str]) -> str:
    """Return what makes class folders of images without one."""
    of_imagenet = any(os.path.basename(path).startswith('ILSVRC2012_val') for path in paths)
    return PREPARATION if of_imagenet else 'move each image into a folder with the name of its class'
