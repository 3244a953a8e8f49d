"""Opening of the splits of a data set: folders, tar files, and named data sets of timm's readers and torchvision."""

import contextlib
import fcntl
import io
import logging
import os
import re
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal

import numpy as np
from timm.data import ImageDataset, create_dataset
from timm.data.readers.reader_image_folder import ReaderImageFolder
from torchvision.datasets import DatasetFolder

from aft_vision.data.bytes import PACKED
from aft_vision.data.checked import CheckedDataset, CheckedImageDataset, CheckedSubset, TorchvisionDataset, shared_flags
from aft_vision.data.class_names import list_names, match_classes, normal_name
from aft_vision.data.images import (
    HIDDEN,
    LOSSES,
    MACOS_FOLDER,
    MAX_PIXELS,
    Decoding,
    describe_ignored,
    file_kind,
    find_images,
    image_suffixes,
    is_hidden,
)
from aft_vision.data.layout import (
    EVAL_SPLITS,
    MAX_LISTED,
    TRAIN_SPLITS,
    MissingSplitError,
    check_no_splits,
    class_folder,
    find_present,
    find_split,
    find_split_folders,
    find_top,
    missing_split,
    unwrap,
)
from aft_vision.data.ranges import check_ranges, within
from aft_vision.data.sampling import DIVISION, derive_seed
from aft_vision.data.shards import StrictTarInfo, WebDataset, open_shards

NAMED = ('torch/', 'hfds/', 'wds/')
# The evaluation split that is all of a data set without splits.
WHOLE = '.'
TORCH_SPLITS = ('train', 'training', 'val', 'valid', 'validation', 'eval', 'evaluation', 'test')


_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """The location and the splits of a data set.

    Attributes:
        dir: Without a `name`, a folder or tar file with a folder per split and a folder per class in it, or a folder
            with a tar file per split (`train.tar`) or an FFCV file per split (`train.beton`, see tools.write_ffcv).
            With a name, its root or cache folder; '' for the library's own.
        name: A data set of timm's readers: `torch/cifar10`, `hfds/NAME`, `wds/`; '' for `dir`.
        train_split: Name of the training split; of a folder or tar file also `training`, and in any case. After a name
            of `wds/`, `|NUMBER` is the number of its images.
        eval_split: Name of the evaluation split; None takes the first of `val`, `validation`, `valid`, `test`,
            `testing` that exists, or `validation` of a named data set; `.` all images of a folder or tar file of class
            folders without splits.
        val_share: Fraction of the training images, in (0, 1), to hold out for evaluation instead of the validation
            split; the rest is for training. It is drawn class by class. A folder or tar file of class folders without
            splits is divided in the same way. None holds out nothing.
        val_share_without_split: `val_share` of a data set that has no evaluation split; None for an error.
        val_seed: Seed of that draw, in [0, 2**32); separate from the seed of the run, so that runs have the same
            images.
        download: Download a named data set if it is missing.
        num_classes: Number of classes, for data sets without this information; None otherwise.
        input_key, target_key: Names of the image and of the class in data sets with such names: columns of `hfds/`,
            `image` and `label` by default; for `wds/` the ending of the images, by default any of images, and a field
            of `.json`, by default the whole of `.cls`.
        max_image_pixels: Largest number of pixels of an image; the default takes 0.75 GiB of memory. A larger JPEG is
            decoded at a half, a fourth or an eighth of its sides, which takes less time; any other image is an error.
        bits: Bits of the pixels that images of 16 bits use, such as 12 of many microscopes and scanners.
        on_corrupt_image: `raise` ends the run at an image that cannot be decoded, and at a shard of `wds/` that cannot
            be read; `skip` warns of each once. Training then takes the next one, and evaluation leaves it out.
    """

    dir: str = ''
    name: str = ''
    train_split: str = 'train'
    eval_split: str | None = None
    val_share: float | None = within('(0, 1)', None)
    val_share_without_split: float | None = within('(0, 1)', None)
    val_seed: int = within('[0, 4294967296)', 0)
    download: bool = False
    num_classes: int | None = within('[1, inf)', None)
    input_key: str | None = None
    target_key: str | None = None
    max_image_pixels: int = within('[1, inf)', MAX_PIXELS, 'px')
    bits: int = within('[8, 16]', 16)
    on_corrupt_image: Literal['raise', 'skip'] = 'raise'

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.name.lower().startswith('torch/') and not self.dir:
            raise ValueError(f'expected the folder of {self.name}, got none')
        for key in ('input_key', 'target_key', 'download'):
            if getattr(self, key) and not self.name:
                raise ValueError(
                    f'data.{key} belongs to a data set of data.name, got {getattr(self, key)!r} without one'
                )
        if self.val_share is not None and self.eval_split is not None:
            raise ValueError(
                f'expected an evaluation split or a held-out share, got both, {self.eval_split!r} and {self.val_share}'
            )


@dataclass(frozen=True)
class Split:
    """One split of a data set, and the class names in the order of their indices.

    Attributes:
        ignored: Files that are not images, as `describe_ignored` formats them.
        nested: An image that lies deeper than in its class folder; '' if there is none.
    """

    dataset: Any
    class_names: list[str]
    ignored: str = ''
    nested: str = ''

    @property
    def is_stream(self) -> bool:
        """Return whether the data set can only be read in its own order."""
        return isinstance(self.dataset, WebDataset)

    def describe(self) -> str:
        """Describe the number of images and classes."""
        if self.is_stream:
            return f'a stream of {self.dataset.images} images, {len(self.class_names)} classes'
        targets = self.dataset.targets
        number = len(self.class_names) if targets is None else len(np.unique(targets))
        return f'{len(self.dataset)} images, {number} {"class" if number == 1 else "classes"}'


def with_evaluation_images(source: Source) -> Source:
    """Return the source with `val_share_without_split` as its `val_share` if it has no evaluation split."""
    if source.val_share_without_split is None or source.val_share is not None:
        return source
    try:
        open_eval_split(source)
    except MissingSplitError:
        return replace(source, val_share=source.val_share_without_split)
    return source


def open_train_split(source: Source, batch_size: int | None = None, seed: int = 0) -> Split:
    """Open the training split.

    Args:
        batch_size: Ignored; kept for earlier callers.
        seed: Of the order of a stream.

    Raises:
        ValueError: the data set is missing or empty, or a class has no images; the message has the path.
    """
    split = _open(source, (source.train_split,), seed, is_training=True)
    if source.val_share is not None:
        split = _hold_out(split, source, source.val_share, held_out=False)
    if source.on_corrupt_image == 'skip':
        split.dataset.skip_corrupt('next')
    return split


def open_eval_split(source: Source, batch_size: int | None = None, training: bool = False) -> Split:
    """Open the evaluation split, with the arguments and errors of `open_train_split`.

    Args:
        training: Open the training images as an evaluation reads them: each once, in the order of their files.
    """
    if source.val_share is None and not training:
        wanted = EVAL_SPLITS if source.eval_split is None else (source.eval_split,)
    else:
        wanted = (source.train_split,)
    split = _open(source, wanted, seed=0, is_training=False)
    if source.val_share is not None:
        split = _hold_out(split, source, source.val_share, held_out=not training)
    if source.on_corrupt_image == 'skip':
        split.dataset.skip_corrupt('none')
    return split


def _hold_out(split: Split, source: Source, share: float, held_out: bool) -> Split:
    """Return the images of a training split that `val_share` holds out, or the others."""
    if split.is_stream:
        raise ValueError(
            f'expected no share to hold out of {source.name}, which can only be read in its own order, got {share}'
        )
    targets = split.dataset.targets
    classes = np.zeros(len(split.dataset), int) if targets is None else np.unique(targets, return_inverse=True)[1]
    counts = np.bincount(classes)
    # Round cumulative sums, not counts, so that many small classes contribute too. One image per class is for training.
    wanted = np.diff(np.round(share * np.cumsum(counts)), prepend=0).clip(max=counts - 1)
    if not wanted.any():
        raise ValueError(
            f'expected a share that holds out at least one image, got {share} of {len(classes)} images in '
            f'{len(counts)} classes'
        )
    draws = np.random.default_rng(derive_seed(DIVISION, source.val_seed)).random(len(classes))
    order = np.lexsort((draws, classes))
    ranks = np.empty(len(classes), int)
    ranks[order] = np.arange(len(classes)) - np.repeat(np.cumsum(counts) - counts, counts)
    is_held_out = ranks < wanted[classes]
    chosen = np.flatnonzero(is_held_out if held_out else ~is_held_out)
    return replace(split, dataset=CheckedSubset(split.dataset, chosen))


def check_same_classes(train: Sequence[str], evaluation: Sequence[str]) -> None:
    """Raise a ValueError with the differences unless both splits have the same classes in the same order."""
    if match_classes(train, evaluation) == list(range(len(train))):
        return
    only_train = sorted(set(train) - set(evaluation))
    only_evaluation = sorted(set(evaluation) - set(train))
    raise ValueError(
        f'expected the same classes in both splits, got {len(train)} for training and {len(evaluation)} for '
        f'validation; only in training: {only_train[:5]}; only in validation: {only_evaluation[:5]}'
    )


def _open(source: Source, wanted: Sequence[str], seed: int, is_training: bool) -> Split:
    split = _open_any(source, wanted, seed, is_training)
    dataset = split.dataset
    dataset.decoding, dataset.reported = Decoding(source.max_image_pixels, source.bits), shared_flags(len(LOSSES))
    return split


def _open_any(source: Source, wanted: Sequence[str], seed: int, is_training: bool) -> Split:
    if not source.name and not source.dir:
        raise ValueError('expected the folder, the tar file or the name of a data set, got none')
    if source.name:
        return _open_named(source, wanted, seed, is_training)
    root = Path(source.dir)
    names = TRAIN_SPLITS if tuple(wanted) == TRAIN_SPLITS[:1] else wanted
    # Without splits, the class folders are divided, or all of them evaluated.
    is_whole = source.val_share is not None or tuple(wanted) == (WHOLE,)
    whole = (*TRAIN_SPLITS, source.train_split, *EVAL_SPLITS) if is_whole else None
    if root.is_file() and root.suffix == '.tar':
        path, split = root, _open_tar(root, names, whole)
    elif whole is not None and root.is_dir() and not any(find_present(root, name, SUFFIXES) for name in whole):
        path, split = root, _open_folder(root, undivided=True)
    elif tuple(wanted) == (WHOLE,):
        raise ValueError(f'expected a folder or tar file of class folders without splits, got {root}')
    else:
        path = find_split(root, names, SUFFIXES)
        split = OPENERS[path.suffix if path.is_file() else ''](path, source.num_classes)
    _check_count(source.num_classes, split.class_names, path)
    return split


def _open_folder(folder: Path, undivided: bool = False) -> Split:
    """Open a folder of class folders, after checking that each holds an image.

    Args:
        undivided: The folder has no splits.
    """
    paths, class_folders, ignored = find_images(folder)
    if not class_folders:
        raise ValueError(f'expected one folder per class in {folder}, got {len(paths)} images without one')
    folders = {each: PurePosixPath(each).relative_to(folder) for each in set(map(os.path.dirname, paths))}
    split = None if undivided else folder.name
    if (inner := unwrap(PurePosixPath(), folders.values(), class_folders, split)).parts:
        return _open_folder(folder / inner, undivided)
    if undivided:
        check_no_splits(folder, folders.values())
    labels = {each: next(iter(inside.parts), '') for each, inside in folders.items()}
    return _make_split(folder, _FolderReader, paths, labels, class_folders, ignored)


def _open_tar(path: Path, wanted: Sequence[str] | None = None, whole: Sequence[str] | None = None) -> Split:
    """Open a tar file of class folders; with `wanted`, those in the first of these split folders that exists.

    Args:
        whole: Names of splits; if none exists, all class folders are opened. None raises an error instead.
    """
    members = _read_members(path)
    suffix_of, suffixes = {name: file_kind(name) for name in members}, image_suffixes()
    # A link may be a class folder, so its suffix does not count.
    for name, member in members.items():
        if suffix_of[name] != HIDDEN and not (member.isdir() or member.isfile()):
            raise ValueError(f'expected files in {path}, got the link {name}; tar --dereference --hard-dereference')
    images = [name for name, member in members.items() if not member.isdir() and suffix_of[name] in suffixes]
    if not images:
        raise ValueError(f'expected images in class folders in {path}, got none')
    image_folders = [PurePosixPath(folder) for folder in set(map(os.path.dirname, images))]
    shown = [PurePosixPath(name) for name, member in members.items() if member.isdir() and _is_shown(name)]
    undivided = wanted is None or (whole is not None and not find_split_folders(image_folders, whole))
    tops = {find_top(image_folders)} if undivided else find_split_folders(image_folders, wanted or ())
    if not tops:
        names = {folder.parent.name for folder in image_folders} - {''}
        raise missing_split(f'folder {" or ".join(wanted or ())} of class folders', path, wanted or (), [*names])
    tops = {
        unwrap(
            top,
            image_folders,
            [each.name for each in shown if each.parent == top != each],
            None if undivided else top.name,
        )
        for top in tops
    }
    if whole is not None and undivided:
        check_no_splits(path, [folder.relative_to(*tops) for folder in image_folders])
    # For each folder the name of its class folder, '' in none of them, None outside the split.
    labels = {folder: class_folder(PurePosixPath(folder), tops) for folder in set(map(os.path.dirname, members))}
    inside = [name for name in members if labels[os.path.dirname(name)] is not None]
    chosen = [name for name in inside if not members[name].isdir() and suffix_of[name] in suffixes]
    used = {label for label in map(labels.__getitem__, map(os.path.dirname, chosen)) if label}
    if not used:
        raise ValueError(f'expected images in class folders of {path}, got {len(chosen)} without one')
    folders = used.union(each.name for each in shown if each.parent in tops and each.name)
    others = [suffix_of[name] for name in inside if not members[name].isdir() and suffix_of[name] not in suffixes]
    split = _make_split(path, partial(_TarReader, members), chosen, labels, [*folders], Counter(others))
    split.dataset.archive = path
    return split


def _is_shown(folder: str) -> bool:
    return not is_hidden(folder) and PurePosixPath(folder).name != MACOS_FOLDER


def _make_split(
    root: Path,
    make_reader: Callable[..., '_FolderReader'],
    paths: Sequence[str],
    labels: Mapping[str, str | None],
    class_folders: Sequence[str],
    ignored: Counter[str],
) -> Split:
    """Check and open the images of class folders.

    Args:
        labels: The class folder of each folder of images; '' for images in none, which are an error. Folders whose
            names are equal as `normal_name` are one class.
        ignored: As in FoundImages.
    """
    others = f'; ignored: {describe_ignored(ignored)}' if ignored else ''
    if not paths:
        raise ValueError(f'expected images in the class folders of {root}, got none{others}')
    labels = {folder: normal_name(label or '') for folder, label in labels.items()}
    class_folders = sorted(set(map(normal_name, class_folders)))
    labelled = [(path, labels[os.path.dirname(path)]) for path in paths]
    outside = [path for path, label in labelled if not label]
    if outside:
        raise ValueError(f'expected images only in the class folders of {root}, got {min(outside)}')
    without_images = sorted(set(class_folders) - {label for _, label in labelled})
    if without_images:
        listed = list_names(without_images, MAX_LISTED)
        raise ValueError(f'expected images in every class folder of {root}, got none in {listed}{others}')
    names = sorted(class_folders, key=_natural_order)
    reader = make_reader(root, names, labelled)
    dataset = CheckedImageDataset(str(root), reader=reader)
    dataset.targets = np.array([target for _, target in reader.samples])
    nested = min((path for path, label in labelled if normal_name(Path(path).parent.name) != label), default='')
    return Split(dataset, names, describe_ignored(ignored), nested)


def _open_beton(path: Path, num_classes: int | None) -> Split:
    from aft_vision.data.ffcv.loader import BetonDataset

    dataset = BetonDataset(path, num_classes)
    return Split(dataset, list(map(normal_name, dataset.class_names)))


# The opener of a split by its suffix, '' for a folder. It also takes the number of classes if it is stated.
OPENERS: dict[str, Callable[[Path, int | None], Split]] = {
    '': lambda folder, _: _open_folder(folder),
    '.tar': lambda path, _: _open_tar(path),
    '.beton': _open_beton,
}
SUFFIXES = tuple(OPENERS)


def _natural_order(name: str) -> tuple[list[int | str], str]:
    """Return a key to sort by: timm's natural order, with 2 before 10, then the name, because timm's order has ties."""
    parts: list[int | str] = [int(part) if part.isdecimal() else part for part in re.split(r'(\d+)', name.lower())]
    return parts, name


class _FolderReader(ReaderImageFolder):
    """A timm reader for known images, as (path, class), of all supported suffixes."""

    def __init__(self, root: Path, names: Sequence[str], labelled: Iterable[tuple[str, str]]) -> None:
        self.root, self.class_to_idx = str(root), {name: index for index, name in enumerate(names)}
        samples = ((path, self.class_to_idx[label]) for path, label in labelled)
        self.samples = sorted(samples, key=lambda sample: _natural_order(sample[0]))


class _TarReader(_FolderReader):
    """A timm reader for known images of a tar file; any number of processes can share it."""

    def __init__(self, members: Mapping[str, tarfile.TarInfo], *args: Any) -> None:
        super().__init__(*args)
        self.members = members

    def __getitem__(self, index: int) -> tuple[IO[bytes], int]:
        name, target = self.samples[index]
        with open(self.root, 'rb') as file:
            file.seek(self.members[name].offset_data)
            return io.BytesIO(file.read(self.members[name].size)), target


def _read_members(path: Path) -> dict[str, tarfile.TarInfo]:
    """Return the members of an uncompressed tar file by name, after checking that it is whole."""
    try:
        with path.open('rb') as file:
            if PACKED.match(file.read(10)):
                raise tarfile.ReadError('it is compressed; decompress it')
            # The end marker of a tar file; without it, a file truncated between two members looks complete.
            file.seek(max(file.seek(0, os.SEEK_END) - 1024, 0))
            if any(file.read()):
                raise tarfile.ReadError('its end is missing')
        with tarfile.open(path, 'r:', tarinfo=StrictTarInfo) as tar:
            return {member.name: member for member in tar}
    except (tarfile.TarError, OSError, EOFError) as error:
        raise ValueError(f'expected a whole tar file, got {path}: {error}') from error


def _open_named(source: Source, wanted: Sequence[str], seed: int, is_training: bool) -> Split:
    """Open a data set of timm's readers; map-style image data sets also name damaged images."""
    if not source.name.lower().startswith(NAMED):
        raise ValueError(f'the name of a data set must begin with one of {", ".join(NAMED)}, got {source.name!r}')
    name = wanted[0] if len(wanted) == 1 else 'validation'
    # timm treats any other name as the test split.
    if source.name.lower().startswith('torch/') and name not in TORCH_SPLITS:
        raise ValueError(f'a split of {source.name} must be one of {", ".join(TORCH_SPLITS)}, got {name!r}')
    try:
        with _downloading_alone() if source.download else contextlib.nullcontext():
            dataset = _create(source, name, seed, is_training)
    except ImportError as error:
        raise ValueError(f'the data set {source.name} needs a package that is not installed: {error}') from error
    if isinstance(dataset, WebDataset):
        return _open_stream(dataset, source, name)
    if type(dataset) is ImageDataset:
        dataset = _open_hugging_face(dataset.reader, source)
    names = _known_class_names(dataset, source)
    if isinstance(dataset, DatasetFolder) and (hidden := [name for name in names if is_hidden(name)]):
        raise ValueError(
            f'expected class folders in {dataset.root} whose names do not begin with a dot, got '
            f'{list_names(hidden, MAX_LISTED)}: remove '
            f'them, or set data.dir={source.dir} without data.name, which leaves them out'
        )
    split = Split(dataset if isinstance(dataset, CheckedDataset) else TorchvisionDataset(dataset), names)
    _check_targets(split, source, name)
    return split


def _open_hugging_face(reader: Any, source: Source) -> CheckedImageDataset:
    """Return the data set of timm's reader, with the targets; classes that are words come from the column."""
    dataset = CheckedImageDataset(source.dir, reader=reader)
    key, columns = reader.label_key, reader.dataset.column_names
    try:
        values = list(reader.dataset[key]) if key in columns else list(reader.iter_targets())
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f'expected the column {key} of {source.name}, got {list_names(columns, MAX_LISTED)}; '
            f'data.target_key names that of the class'
        ) from error
    if values and all(isinstance(value, str) for value in values):
        words = set(values)
        names = sorted(set(map(normal_name, words)), key=_natural_order)
        reader.class_to_idx, reader.remap_class = {word: names.index(normal_name(word)) for word in words}, True
        values = [reader.class_to_idx[value] for value in values]
    # Rows of lists of different lengths are no array.
    dataset.targets = np.array(values) if all(isinstance(each, int) for each in values) else _as_objects(values)
    return dataset


def _as_objects(values: Sequence[Any]) -> np.ndarray:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def _check_targets(split: Split, source: Source, name: str) -> None:
    """Raise a ValueError unless every target is the index of a class."""
    targets, count = split.dataset.targets, len(split.class_names)
    labels = [] if targets is None else targets.tolist()
    wrong = [i for i, label in enumerate(labels) if not (isinstance(label, int) and 0 <= label < count)]
    if not wrong:
        return
    raise ValueError(
        f'expected labels from 0 to {count - 1} in the split {name!r} of {source.name}, got {labels[wrong[0]]!r} for '
        f'image {wrong[0]}'
    )


def _open_stream(stream: WebDataset, source: Source, split: str) -> Split:
    if not stream.images:
        key = 'train_split' if stream.is_training else 'eval_split'
        raise ValueError(
            f'expected the number of images of the split {split!r} of {source.name}, which does not say it, got none; '
            f"data.{key}='{split}|1000' or --split of a tool says that it has 1000"
        )
    names = _known_class_names(stream, source)
    # Its labels are only known when they are read.
    stream.target_transform = partial(_check_label, len(names), source.name)
    return Split(stream, names)


def _create(source: Source, split: str, seed: int, is_training: bool) -> Any:
    options: dict[str, Any] = dict(split=split, is_training=is_training, seed=seed)
    keys: dict[str, Any] = dict(input_key=source.input_key, target_key=source.target_key)
    if source.name.lower().startswith('wds/'):
        return open_shards(source.dir, **keys, **options)
    try:
        return create_dataset(
            source.name,
            root=source.dir or None,
            download=source.download,
            **{key: value for key, value in keys.items() if value is not None},
            **options,
        )
    except (AssertionError, RuntimeError, OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f'expected the split {split!r} of the data set {source.name} in {source.dir or "its cache"}, got: {error}; '
            'check its name, its folder, the split and the keys, or download it'
        ) from error


def _check_label(num_classes: int, name: str, label: int) -> int:
    if not 0 <= label < num_classes:
        raise ValueError(
            f'expected labels from 0 to {num_classes - 1} in {name}, as data.num_classes or --num-classes says, '
            f'got {label}'
        )
    return label


@contextlib.contextmanager
def _downloading_alone() -> Iterator[None]:
    # Downloads write and unpack to fixed names, so of the processes of a machine one goes before the others.
    with (Path(tempfile.gettempdir()) / f'aft_vision_download_{os.getuid()}.lock').open('w') as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _check_count(num_classes: int | None, classes: Sequence[Any], source: str | Path) -> None:
    if num_classes not in (None, len(classes)):
        raise ValueError(f'expected {len(classes)} classes, as in {source}, got {num_classes}')


def _known_class_names(dataset: Any, source: Source) -> list[str]:
    class_to_idx = getattr(getattr(dataset, 'reader', None), 'class_to_idx', None) or {}
    # torchvision's data sets have a list of names; its ImageNet has several names per class.
    by_index = {index: name for name, index in class_to_idx.items()}
    classes = getattr(dataset, 'classes', None) or [by_index[index] for index in sorted(by_index)]
    if not classes:
        if source.num_classes is None:
            raise ValueError(
                f'expected the number of classes or another key of the class, because {source.name} does not say how '
                'many classes it has'
            )
        return [str(index) for index in range(source.num_classes)]
    _check_count(source.num_classes, classes, source.name)
    return [normal_name(', '.join(name) if isinstance(name, tuple) else str(name)) for name in classes]
