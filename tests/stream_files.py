"""WebDataset shards and files of Hugging Face, written member by member."""

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from aft_vision.data import Source

FORMATS = {'jpg': 'JPEG', 'jpeg': 'JPEG', 'png': 'PNG', 'webp': 'WEBP'}
SPLITS = ('train', 'validation')


def encode(image: Image.Image | int, ending: str = 'png', **options: Any) -> bytes:
    """The file of an image, or of a grey one of this value."""
    if isinstance(image, int):
        image = Image.new('RGB', (20, 20), (image,) * 3)
    file = io.BytesIO()
    image.save(file, FORMATS[ending.lower()], **options)
    return file.getvalue()


def write_tar(path: Path, members: Mapping[str, bytes]) -> None:
    with tarfile.open(path, 'w') as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def numbered(first: int, count: int, ending: str = 'png', name: str = '{:04}') -> dict[str, bytes]:
    """Members of grey images; image i has the value 5 * i and the class i % 2."""
    return {
        f'{name.format(i)}.{kind}': content
        for i in range(first, first + count)
        for kind, content in ((ending, encode(5 * i, ending)), ('cls', str(i % 2).encode()))
    }


def write_shards(
    root: Path, shards: Sequence[Mapping[str, bytes]], num_classes: int = 2, name: str = '{}', **info: Any
) -> Source:
    """Both splits of the same shards; `info` replaces entries of the info file, which counts the classes."""
    root.mkdir(exist_ok=True)
    splits = {}
    for split in SPLITS:
        names = [f'{split}-{name.format(i)}.tar' for i in range(len(shards))]
        for file, members in zip(names, shards, strict=True):
            write_tar(root / file, members)
        lengths = [sum(member.endswith(('.cls', '.json')) for member in members) for members in shards]
        splits[split] = {'filenames': names, 'shard_lengths': lengths, 'num_samples': sum(lengths), **info}
    (root / '_info.json').write_text(json.dumps({'splits': splits}))
    return Source(name='wds/', dir=str(root), num_classes=num_classes)


def write_rows(folder: Path, files: Sequence[Sequence[tuple[bytes, int]]], classes: Sequence[str] = ('a', 'b')) -> Path:
    """Both splits of the same files of images and classes in the format of Hugging Face."""
    import datasets

    features = datasets.Features({'image': datasets.Image(), 'label': datasets.ClassLabel(names=list(classes))})
    folder.mkdir()
    for split in SPLITS:
        for index, rows in enumerate(files):
            content = [{'image': {'bytes': image, 'path': None}, 'label': label} for image, label in rows]
            table = datasets.Dataset.from_list(content, features=features)
            table.to_parquet(str(folder / f'{split}-{index:05}-of-{len(files):05}.parquet'))
    return folder
