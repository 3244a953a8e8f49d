"""Class folders of ImageNet, from its archives as published or from a flat folder of validation images."""

import csv
import os
import re
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from torchvision.datasets.imagenet import ARCHIVE_META, META_FILE, load_meta_file, parse_devkit_archive
from tqdm import tqdm

from aft_vision.data.images import find_images, is_hidden
from aft_vision.data.layout import ANNOTATIONS
from aft_vision.data.shards import StrictTarInfo

# The class of every validation image: by its name without suffix, or in the order of the names.
Labels = Mapping[str, str] | Sequence[str]


def read_devkit(archives: Path, out: Path) -> tuple[list[str], list[str]]:
    """Read the archive of the development kit by torchvision, which keeps what it has read in `out`.

    Returns:
        The classes, and the class of every validation image in the order of their names.

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
    classes, of_images = load_meta_file(out)
    return sorted(classes), of_images


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


def unpack_training(archive: Path, folder: Path, classes: Iterable[str]) -> int:
    """Unpack the archive of one tar file per class into a folder per class; files that are there are kept.

    Returns:
        The number of images.

    Raises:
        ValueError: the archive is damaged or lacks a class or its images, or a folder then has other images too.
    """
    count = 0
    with _opened(archive) as file:
        members = {PurePosixPath(member.name).stem: member for member in file if member.isfile()}
        _check_equal(f'classes of {archive}', members, classes)
        for name, member in tqdm(members.items(), desc=folder.name, unit='class', disable=None):
            with _opened(archive / member.name, file.extractfile(member)) as inner:
                images = {PurePosixPath(image.name).name: image for image in inner if image.isfile()}
                if not images:
                    raise ValueError(f'expected images in {archive / member.name}, got none; fetch the archive again')
                for each, image in images.items():
                    _write(inner, image, folder / name / each)
            _check_equal(f'images of {folder / name}', _names(folder / name), images)
            count += len(images)
    return count


def unpack_validation(archive: Path, folder: Path, labels: Labels) -> int:
    """Unpack the archive of all validation images into class folders, otherwise as `unpack_training`."""
    with _opened(archive) as file:
        members = {PurePosixPath(member.name).name: member for member in file if member.isfile()}
        class_of = _match(members, labels, archive)
        for name in tqdm(sorted(members), desc=folder.name, unit='image', disable=None):
            _write(file, members[name], folder / class_of[name] / name)
    return _count(folder, class_of)


def sort_validation(folder: Path, labels: Labels) -> int:
    """Move the validation images below a folder into class folders; those that have been moved are kept.

    Returns:
        The number of images.

    Raises:
        ValueError: images are missing, or have no class.
    """
    paths = {os.path.basename(path): Path(path) for path in find_images(folder).paths}
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
    return _count(folder, class_of)


@contextmanager
def _opened(archive: Path, content: IO[bytes] | None = None) -> Iterator[tarfile.TarFile]:
    """Open a tar file; `content` is the content of one inside another."""
    try:
        with tarfile.open(archive, 'r:', content, tarinfo=StrictTarInfo) as file:
            yield file
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f'expected a whole tar file, got {archive}: {error}') from error


def _match(names: Iterable[str], labels: Labels, folder: Path) -> dict[str, str]:
    """Return the class of each image by its name."""
    names = sorted(names)
    if len(names) != len(labels):
        raise ValueError(f'expected {len(labels)} validation images in {folder}, as have a class, got {len(names)}')
    if isinstance(labels, Sequence):
        return dict(zip(names, labels, strict=True))
    _check_equal(f'validation images in {folder}', [PurePosixPath(name).stem for name in names], labels)
    return {name: labels[PurePosixPath(name).stem] for name in names}


def _write(file: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    """Write a member whole or not at all, unless it is there already."""
    if path.is_file() and path.stat().st_size == member.size:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # Hidden, so that what a killed process leaves is no image.
    temporary = path.with_name(f'.{path.name}')
    with file.extractfile(member) as source, temporary.open('wb') as target:  # type: ignore[union-attr]
        shutil.copyfileobj(source, target)
    temporary.replace(path)


def _count(folder: Path, class_of: Mapping[str, str]) -> int:
    """Return the number of images, after checking that every class folder has its own."""
    wanted: dict[str, list[str]] = {}
    for name, label in class_of.items():
        wanted.setdefault(label, []).append(name)
    for label, names in wanted.items():
        _check_equal(f'images of {folder / label}', _names(folder / label), names)
    return len(class_of)


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if not is_hidden(path.name)]


def _check_equal(what: str, names: Iterable[str], wanted: Iterable[str]) -> None:
    missing, others = sorted(set(wanted) - set(names)), sorted(set(names) - set(wanted))
    if missing or others:
        raise ValueError(
            f'expected {len(set(wanted))} {what}, got {len(set(names))}; missing: {missing[:5]}, others: {others[:5]}'
        )
