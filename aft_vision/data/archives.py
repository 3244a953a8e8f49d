"""Class folders of ImageNet, from its archives as published or from a flat folder of validation images."""

import csv
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from torchvision.datasets.imagenet import ARCHIVE_META, META_FILE, load_meta_file, parse_devkit_archive
from torchvision.datasets.utils import check_integrity, extract_archive

from aft_vision.data.images import find_images
from aft_vision.data.layout import ANNOTATIONS

# The class of every validation image: by its name without suffix, or in the order of the names.
Labels = Mapping[str, str] | Sequence[str]


def read_devkit(archives: Path, out: Path) -> list[str]:
    """Read the archive of the development kit by torchvision, which keeps what it has read in `out`.

    Returns:
        The class of every validation image in the order of their names.

    Raises:
        ValueError: the archive is missing or is not the published one.
        ImportError: scipy, which torchvision reads it with, is not installed.
    """
    archive = archives / ARCHIVE_META['devkit'][0]
    out.mkdir(parents=True, exist_ok=True)
    if not (out / META_FILE).is_file():
        try:
            parse_devkit_archive(out, str(archive.resolve()))
        except RuntimeError as error:
            raise ValueError(f'expected {archive} as published, with its md5: {error}') from error
        except ImportError as error:
            raise ImportError(f'the development kit of ImageNet needs scipy: pip install scipy ({error})') from error
    return load_meta_file(out)[1]


def read_solution(path: Path) -> dict[str, str]:
    """Read Kaggle's LOC_val_solution.csv or Tiny-ImageNet's val_annotations.txt.

    Returns:
        The class of every validation image by its name without suffix.

    Raises:
        ValueError: it is another file.
    """
    with path.open(newline='') as file:
        if path.name == ANNOTATIONS:
            matches = [re.match(r'([^\t]+)\t(n\d{8})\t', line) for line in file]
            if not matches or None in matches:
                raise ValueError(f'expected lines of an image, its class and its box in {path}, got others')
            return {PurePosixPath(each[1]).stem: each[2] for each in matches if each}
        rows = csv.DictReader(file)
        if not {'ImageId', 'PredictionString'} <= set(rows.fieldnames or ()):
            raise ValueError(f'expected the columns ImageId and PredictionString in {path}, got {rows.fieldnames}')
        return {row['ImageId']: row['PredictionString'].partition(' ')[0] for row in rows}


def unpack_training(archive: Path, folder: Path) -> int:
    """Unpack the archive of one tar file per class into a folder per class.

    Returns:
        The number of images.

    Raises:
        ValueError: the archive is not the published one, by its checksum.
    """
    _unpack('train', archive, folder)
    for inner in sorted(folder.glob('*.tar')):
        extract_archive(inner, inner.with_suffix(''), remove_finished=True)
    return len(find_images(folder).paths)


def unpack_validation(archive: Path, folder: Path, labels: Sequence[str]) -> int:
    """Unpack the archive of all validation images into class folders, otherwise as `unpack_training`."""
    _unpack('val', archive, folder)
    return sort_validation(folder, labels)


def _unpack(split: str, archive: Path, folder: Path) -> None:
    if not check_integrity(archive, ARCHIVE_META[split][1]):
        raise ValueError(f'expected {archive} as published, with the md5 {ARCHIVE_META[split][1]}, got another file')
    extract_archive(archive, folder)


def sort_validation(folder: Path, labels: Labels) -> int:
    """Move the validation images below a folder into class folders; those that have been moved are kept.

    Returns:
        The number of images.

    Raises:
        ValueError: images are missing, or have no class.
    """
    # Of an image that an interrupted run has moved and unpacked again, the one outside a class folder counts.
    images = sorted(find_images(folder).paths, key=len, reverse=True)
    paths = {os.path.basename(path): Path(path) for path in images}
    class_of = _match(paths, labels, folder)
    for name, path in paths.items():
        (folder / class_of[name]).mkdir(exist_ok=True)
        path.rename(folder / class_of[name] / name)
    # An empty folder would be a class without images; one with hidden files alone, of a file manager, is hidden.
    for emptied in {path.parent for path in paths.values()} - {folder}:
        left = [path.name for path in emptied.iterdir()]
        if not left:
            emptied.rmdir()
        elif all(name.startswith('.') or name == 'Thumbs.db' for name in left):
            emptied.rename(emptied.with_name(f'.{emptied.name}'))
    return len(paths)


def _match(names: Iterable[str], labels: Labels, folder: Path) -> dict[str, str]:
    """Return the class of each image by its name."""
    names = sorted(names)
    if len(names) != len(labels):
        raise ValueError(f'expected {len(labels)} validation images in {folder}, as have a class, got {len(names)}')
    if isinstance(labels, Sequence):
        return dict(zip(names, labels, strict=True))
    _check_equal(f'validation images in {folder}', [PurePosixPath(name).stem for name in names], labels)
    return {name: labels[PurePosixPath(name).stem] for name in names}


def _check_equal(what: str, names: Iterable[str], wanted: Iterable[str]) -> None:
    missing, others = sorted(set(wanted) - set(names)), sorted(set(names) - set(wanted))
    if missing or others:
        raise ValueError(
            f'expected {len(set(wanted))} {what}, got {len(set(names))}; missing: {missing[:5]}, others: {others[:5]}'
        )
