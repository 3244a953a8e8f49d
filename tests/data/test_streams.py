import io
from itertools import chain

import pytest
from formats import write_formats
from helpers import CLOTHING
from PIL import ExifTags, Image

from aft_vision.data import Preprocessing, Shard, Source, create_eval_loader

pytest.importorskip('datasets')
pytest.importorskip('webdataset')

PLAIN = Preprocessing((16, 16), crop_pct=1.0, mean=(0, 0, 0), std=(1, 1, 1))


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv('HF_DATASETS_OFFLINE', '1')


def images_of(source: Source, shard: Shard | None = None, **options) -> list[tuple[int, bytes]]:
    """Classes and pixels of the evaluation images."""
    loader, _ = create_eval_loader(source, PLAIN, 3, shard=shard, **{'num_workers': 0, **options})
    return [(int(y), x.numpy().tobytes()) for images, targets in loader for x, y in zip(images, targets, strict=True)]


def turned(photograph: bytes) -> bytes:
    """The photograph with an orientation that says that it lies on its side."""
    exif, file = Image.Exif(), io.BytesIO()
    exif[ExifTags.Base.Orientation] = 6
    Image.open(io.BytesIO(photograph)).save(file, 'JPEG', quality=95, exif=exif)
    return file.getvalue()


@pytest.fixture(scope='module')
def formats(tmp_path_factory) -> dict[str, Source]:
    """Nine photographs of three classes in every format; the first of a class is turned by its EXIF orientation."""
    classes = sorted((CLOTHING / 'validation').iterdir())[:3]
    files = {folder.name: [path.read_bytes() for path in sorted(folder.iterdir())[:3]] for folder in classes}
    for photographs in files.values():
        photographs[0] = turned(photographs[0])
    return write_formats(tmp_path_factory.mktemp('formats'), files)


@pytest.mark.parametrize('workers', [0, 5])
def test_the_same_photographs_are_evaluated_from_every_format(formats, workers):
    expected = sorted(images_of(formats['folder']))
    assert len(expected) == 9
    for name, source in formats.items():
        assert sorted(images_of(source, num_workers=workers)) == expected, name


def test_the_same_photographs_are_evaluated_by_several_processes(formats):
    expected = sorted(images_of(formats['folder']))
    for name, source in formats.items():
        for processes in (2, 4):
            parts = [images_of(source, Shard(rank, processes)) for rank in range(processes)]
            assert sorted(chain(*parts)) == expected, name
