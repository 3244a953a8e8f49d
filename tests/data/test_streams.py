import io
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from formats import write_formats
from helpers import CLOTHING, NO_AUGMENTATION
from PIL import ExifTags, Image
from stream_files import encode, write_rows

from aft_vision.data import CorruptImageError, Preprocessing, Shard, Source, create_eval_loader, create_loaders

pytest.importorskip('datasets')
pytest.importorskip('webdataset')

PLAIN = Preprocessing((16, 16), crop_pct=1.0, mean=(0, 0, 0), std=(1, 1, 1))


def stream_rows(folder: Path, files: list[list[tuple[bytes, int]]]) -> Source:
    count = sum(map(len, files))
    splits = dict(train_split=f'train|{count}', eval_split=f'validation|{count}')
    return Source(name=f'hfids/{write_rows(folder, files)}', dir=str(folder.parent / 'cache'), **splits)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv('HF_DATASETS_OFFLINE', '1')


def images_of(source: Source, shard: Shard | None = None, **options) -> list[tuple[int, bytes]]:
    """Classes and pixels of the evaluation images."""
    loader, _ = create_eval_loader(source, PLAIN, 3, shard=shard, **{'num_workers': 0, **options})
    return [(int(y), x.numpy().tobytes()) for images, targets in loader for x, y in zip(images, targets, strict=True)]


def grey_rows(first: int, count: int) -> list[tuple[bytes, int]]:
    return [(encode(5 * i), i % 2) for i in range(first, first + count)]


@pytest.mark.parametrize('workers', [0, 3])
def test_a_streamed_data_set_of_hugging_face_is_read_whole(tmp_path, caplog, workers):
    source = stream_rows(tmp_path / 'rows', [grey_rows(0, 3), grey_rows(3, 4)])
    expected = sorted(images_of(replace(source, name=source.name.replace('hfids', 'hfds'), eval_split='validation')))
    assert sorted(images_of(source, num_workers=workers)) == expected
    assert ('2 instead of data.num_workers=3 processes' in caplog.text) == (workers == 3)
    loaders = create_loaders(source, (16, 16), 2, evaluation=PLAIN, augment=NO_AUGMENTATION, num_workers=workers)
    assert loaders.class_names == ['a', 'b']
    loaders.set_epoch(1)
    batches = [images for images, _ in loaders.train]
    assert len(batches) == len(loaders.train) == 3
    assert len({float(x.mean()) for x in torch.cat(batches)}) == 6


def test_a_damaged_image_of_a_streamed_row_is_an_error_or_skipped_and_counted(tmp_path, caplog):
    source = stream_rows(tmp_path / 'rows', [[*grey_rows(0, 3), (b'no image', 0)]])
    with pytest.raises(CorruptImageError, match=r'the image of row 4 in the split validation of .*rows'):
        images_of(source)
    assert len(images_of(replace(source, on_corrupt_image='skip'))) == 3
    assert 'skipped: 1 of 4 images of the split validation of' in caplog.text


@pytest.mark.parametrize('on_corrupt_image', ['raise', 'skip'])
def test_a_damaged_file_of_streamed_rows_is_an_error(tmp_path, on_corrupt_image):
    source = stream_rows(tmp_path / 'rows', [grey_rows(0, 3), grey_rows(3, 3)])
    path = next((tmp_path / 'rows').glob('validation-00001*'))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(
        ValueError, match=r'expected files of the split validation of .* that can be read, got after row 3'
    ):
        images_of(replace(source, on_corrupt_image=on_corrupt_image))


def test_streamed_rows_without_their_number_or_of_other_columns_are_named(tmp_path):
    source = stream_rows(tmp_path / 'rows', [grey_rows(0, 3)])
    with pytest.raises(
        ValueError, match=r"the number of images of the split 'validation' of hfids/.*'validation\|1000'"
    ):
        images_of(replace(source, eval_split='validation'))
    with pytest.raises(ValueError, match=r'expected 4 images in the split validation .*, got 3'):
        images_of(replace(source, eval_split='validation|4'))
    with pytest.raises(ValueError, match=r'expected one process for the split validation of .*, got 2; hfds/ instead'):
        images_of(source, Shard(0, 2))
    with pytest.raises(ValueError, match=r'the columns image and kind in .*, got image, label; data\.input_key and'):
        images_of(replace(source, target_key='kind', num_classes=2))


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


@pytest.mark.parametrize('workers', [0, 2, 5])
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
