"""FFCV files are written and read for real where FFCV is installed."""

import builtins
import dataclasses
import json
import os
import pickle
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import CLOTHING, NO_AUGMENTATION, link_photographs, make_beton, make_folder, require_ffcv
from PIL import Image

from aft_vision.data import (
    Augmentation,
    CorruptImageError,
    NativeShape,
    Preprocessing,
    Source,
    create_eval_loader,
    create_loaders,
)
from aft_vision.data.datasets import open_eval_split, open_train_split
from aft_vision.data.shards import WebDataset

require_ffcv()

from aft_vision.data.ffcv import loader
from aft_vision.data.ffcv.loader import BetonDataset, EvalTransform
from aft_vision.data.ffcv.writer import BetonOptions, MemoryAllocator, write_beton

pytestmark = pytest.mark.ffcv
# A crop and a flip, each image once.
CROP = Augmentation(auto_augment=None, color_jitter=0, repeats=1, random_erasing=0, mixup=0, cutmix=0)
PLAIN = Preprocessing((32, 32), mean=(0, 0, 0), std=(1, 1, 1))


def make_photographs(root: Path, size: tuple[int, int]) -> None:
    """Four of the photographs of each class, at one size (H, W)."""
    for split in ('train', 'validation'):
        for folder in (CLOTHING / split).iterdir():
            (root / split / folder.name).mkdir(parents=True)
            for path in sorted(folder.iterdir())[:4]:
                image = Image.open(path).convert('RGB').resize(size[::-1])
                image.save(root / split / folder.name / f'{path.stem}.png')


@pytest.fixture(scope='module')
def squares(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Square photographs as an FFCV file without loss, and as the folder it was made from."""
    root = tmp_path_factory.mktemp('squares')
    make_photographs(root / 'images', (32, 32))
    return make_beton(root / 'ffcv', root / 'images', BetonOptions(raw_share=1.0)), root / 'images'


@pytest.fixture(scope='module')
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 to train with and 50 to evaluate."""
    return link_photographs(tmp_path_factory.mktemp('photographs'), 15, 5)


@pytest.fixture(scope='module')
def clothing(photographs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_beton(tmp_path_factory.mktemp('clothing'), photographs)


@pytest.fixture(scope='module')
def pixels(photographs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The photographs without the loss of a second compression."""
    return make_beton(tmp_path_factory.mktemp('pixels'), photographs, BetonOptions(raw_share=1.0))


def batches(folder: Path, workers: int = 0, epoch: int = 0, first: int = 0, sizes=(32, 32), **options) -> list[tuple]:
    options = {'augment': CROP, 'num_workers': workers, 'evaluation': PLAIN, **options}
    loaders = create_loaders(folder, sizes, 50, **options)
    loaders.set_epoch(epoch, first)
    return list(loaders.train)


def assert_same_batches(found: list[tuple], expected: list[tuple]) -> None:
    assert len(found) == len(expected) > 0
    for batch, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(batch, wanted, rtol=0, atol=0)


def test_pixels_come_back_as_they_were_and_jpeg_nearly(photographs, clothing, pixels):
    split = open_train_split(Source(dir=str(photographs)))
    raw, jpeg = BetonDataset(pixels / 'train.beton'), BetonDataset(clothing / 'train.beton')
    assert len(raw) == len(jpeg) == 150
    for index in range(0, 150, 9):
        image, target = split.dataset[index]
        assert raw[index][1] == jpeg[index][1] == target
        np.testing.assert_array_equal(raw[index][0], np.asarray(image))
        assert np.abs(jpeg[index][0].astype(int) - np.asarray(image)).mean() < 4


def test_the_class_names_are_those_of_the_folders(photographs, clothing):
    loader, names = create_eval_loader(clothing, (32, 32), 20, num_workers=0)
    assert names == create_eval_loader(photographs, (32, 32), 20, num_workers=0)[1]
    assert len(torch.cat([targets for _, targets in loader])) == 50


def test_the_same_crops_and_flips_are_drawn_as_from_a_folder(photographs, pixels):
    # The resizing differs, INTER_AREA for bicubic; another crop or a missing flip changes far more.
    for batch, wanted in zip(batches(pixels), batches(photographs), strict=True):
        assert batch[1].tolist() == wanted[1].tolist()
        per_image = (batch[0] - wanted[0]).abs().mean(dim=(1, 2, 3))
        assert per_image.max() < 0.06
        other = (batch[0].flip(3) - wanted[0]).abs().mean(dim=(1, 2, 3))
        assert (other > per_image).float().mean() > 0.99


@pytest.mark.parametrize('policy', ['rand-m9-mstd0.5-inc1', '3a', None])
def test_augmentation_gives_the_bits_of_a_folder_where_nothing_is_resized(policy, squares):
    # Such a crop is the whole image.
    augment = dataclasses.replace(CROP, scale=(1.0, 1.0), auto_augment=policy, color_jitter=0.3)
    options = dict(augment=augment, evaluation=PLAIN._replace(mean=(0.3, 0.4, 0.5)))
    for workers in (0, 1):
        loaders = [create_loaders(place, (32, 32), 20, num_workers=workers, **options) for place in squares]
        assert_same_batches(*(list(each.train) for each in loaders))


@pytest.mark.parametrize('size', [(32, 32), (32, 64), (64, 32)])
def test_the_evaluation_crop_is_that_of_a_folder(photographs, pixels, size):
    places = (pixels, photographs)
    loaders = [create_eval_loader(place, PLAIN._replace(size=size), 50, num_workers=0)[0] for place in places]
    (images, targets), (wanted, expected) = (next(iter(loader)) for loader in loaders)
    assert targets.tolist() == expected.tolist()
    # The box is rounded to pixels of these small images, and resized by INTER_AREA for bicubic.
    assert (images - wanted).abs().mean() < 0.04
    assert (images.flip(3) - wanted).abs().mean() > 0.1


def test_an_evaluation_crop_without_a_change_of_size_is_exact():
    image = np.random.default_rng(0).integers(0, 256, (40, 64, 3), dtype=np.uint8)
    cropped = EvalTransform((20, 32), 0.5)(image)
    np.testing.assert_array_equal(cropped.permute(1, 2, 0).numpy(), image[10:30, 16:48])


@pytest.mark.parametrize('crop_pct', [0, -1, 1.5])
def test_a_crop_that_no_image_has_is_an_error(crop_pct):
    with pytest.raises(ValueError, match=r'crop_pct must be in \(0, 1\], got'):
        EvalTransform((20, 32), crop_pct)


def test_the_number_of_processes_does_not_change_the_images(clothing):
    assert_same_batches(batches(clothing, workers=2), batches(clothing))


def test_writing_gives_the_same_bytes_with_more_processes(photographs, tmp_path, clothing):
    again = make_beton(tmp_path, photographs, workers=2)
    for name in ('train.beton', 'val.beton', 'train.json'):
        assert (again / name).read_bytes() == (clothing / name).read_bytes()


def test_images_are_made_smaller_and_a_share_is_kept_as_pixels(photographs, tmp_path):
    make_beton(tmp_path, photographs, BetonOptions(max_resolution=48, raw_share=0.3))
    dataset = BetonDataset(tmp_path / 'train.beton')
    assert max(dataset.images['width'].max(), dataset.images['height'].max()) == 48
    assert 0.2 < np.mean(dataset.images['mode'] == 1) < 0.4
    assert json.loads((tmp_path / 'train.json').read_text())['max_resolution'] == 48


def test_ffcv_reads_what_is_written(clothing, monkeypatch):
    # FFCV's loader starts numba's threads, and later tests fork: on one core this process would never end.
    monkeypatch.setattr('ffcv.pipeline.compiler.set_num_threads', lambda n: None)
    from ffcv.fields.decoders import CenterCropRGBImageDecoder, IntDecoder
    from ffcv.loader import Loader

    threads = torch.get_num_threads()
    loader = Loader(
        str(clothing / 'val.beton'),
        batch_size=25,
        num_workers=1,
        pipelines={'image': [CenterCropRGBImageDecoder((24, 24), 1.0)], 'label': [IntDecoder()]},
    )
    images, labels = (np.concatenate([part.copy() for part in parts]) for parts in zip(*loader, strict=True))
    torch.set_num_threads(threads)
    dataset = BetonDataset(clothing / 'val.beton')
    assert labels[:, 0].tolist() == dataset.labels.tolist()
    dataset.transform = EvalTransform((24, 24), 1.0)
    for index in range(0, 50, 7):
        np.testing.assert_array_equal(images[index], dataset[index][0].permute(1, 2, 0).numpy())


def test_importing_ffcv_leaves_the_threads_of_torch_alone(monkeypatch):
    find, threads = builtins.__import__, torch.get_num_threads()

    def import_module(name, *others):
        # As FFCV does when it is first imported.
        if name.startswith('ffcv.'):
            torch.set_num_threads(1)
        return find(name, *others)

    monkeypatch.setattr(builtins, '__import__', import_module)
    torch.set_num_threads(3)
    try:
        runpy.run_path(loader.__file__)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


def test_a_process_on_one_core_ends_after_its_workers(clothing):
    program = f"""
import os
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
from torch.utils.data import DataLoader
from aft_vision.data.ffcv.loader import BetonDataset
print(len(list(DataLoader(BetonDataset({str(clothing / 'val.beton')!r}), num_workers=1))))
"""
    environment = os.environ | {'PYTHONPATH': str(Path(__file__).parents[2])}
    command = [sys.executable, '-c', program]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == '50\n'


def test_another_process_maps_the_file_itself(clothing):
    dataset = BetonDataset(clothing / 'train.beton')
    first = dataset[0][0]
    sent = pickle.dumps(dataset)
    assert len(sent) < (clothing / 'train.beton').stat().st_size / 4
    np.testing.assert_array_equal(pickle.loads(sent)[0][0], first)


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Three images, the second of which cannot be decoded."""
    make_folder(tmp_path / 'images', {'train': ['a'], 'val': ['a']}, images=3)
    folder = make_beton(tmp_path, tmp_path / 'images')
    dataset = BetonDataset(folder / 'train.beton')
    start, size = int(dataset.images['data_ptr'][1]), int(dataset.sizes[1])
    content = bytearray((folder / 'train.beton').read_bytes())
    content[start : start + size] = bytes(size)
    (folder / 'train.beton').write_bytes(content)
    return folder


@pytest.mark.parametrize('workers', [0, 1])
def test_an_image_that_cannot_be_decoded_is_named_and_nothing_hangs(damaged, workers):
    loaders = create_loaders(damaged, (16, 16), 3, augment=CROP, num_workers=workers)
    with pytest.raises(CorruptImageError, match=r'got image 1 of .*train\.beton'):
        list(loaders.train)


def test_an_image_that_cannot_be_decoded_can_be_skipped(damaged, caplog):
    source = Source(dir=str(damaged), on_corrupt_image='skip')
    loaders = create_loaders(source, (16, 16), 3, augment=CROP, num_workers=0)
    assert [len(images) for images, _ in loaders.train] == [3]
    assert 'skipped: expected an image that can be decoded, got image 1 of' in caplog.text


def test_a_cut_or_foreign_file_is_named(clothing, tmp_path):
    content = (clothing / 'train.beton').read_bytes()
    for cut in (0, 100, len(content) // 2, len(content) - 24):
        (tmp_path / 'train.beton').write_bytes(content[:cut])
        with pytest.raises(ValueError, match=r'expected a whole \.beton file.* got .*train\.beton'):
            BetonDataset(tmp_path / 'train.beton')
    (tmp_path / 'train.beton').write_bytes(b'something else' * 1000)
    with pytest.raises(ValueError, match=r'expected a whole \.beton file.* got .*train\.beton'):
        BetonDataset(tmp_path / 'train.beton')
    with pytest.raises(ValueError, match='which is not one'):
        BetonDataset(tmp_path / 'none.beton')


def test_a_file_of_other_fields_is_named(tmp_path):
    from ffcv.fields import FloatField, RGBImageField
    from ffcv.writer import DatasetWriter

    images = [(np.zeros((8, 8, 3), np.uint8), 0.5)] * 4
    writer = DatasetWriter(str(tmp_path / 'a.beton'), {'image': RGBImageField(), 'y': FloatField()}, num_workers=1)
    writer.from_indexed_dataset(images)
    with pytest.raises(ValueError, match=r"a field of images and one of integers in .* got \['image', 'y'\]"):
        BetonDataset(tmp_path / 'a.beton')


def test_a_file_that_ffcv_wrote_is_read_with_numbers_for_class_names(tmp_path):
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    images = [(np.full((8, 8, 3), 10 * index, np.uint8), index) for index in range(4)]
    for name in ('train', 'val'):
        writer = DatasetWriter(str(tmp_path / f'{name}.beton'), {'x': RGBImageField(), 'y': IntField()}, num_workers=2)
        writer.from_indexed_dataset(images, chunksize=1)
    assert create_loaders(tmp_path, (8, 8), 2, augment=CROP, num_workers=0).class_names == ['0', '1', '2', '3']
    more = Source(dir=str(tmp_path), num_classes=6)
    loaders = create_loaders(more, (8, 8), 4, augment=NO_AUGMENTATION, num_workers=0, evaluation=PLAIN)
    assert loaders.class_names[-1] == '5'
    images, targets = next(iter(loaders.train))
    torch.testing.assert_close(images.mean(dim=(1, 2, 3)), targets * 10 / 255)
    with pytest.raises(ValueError, match='expected classes from 0 to 1 in'):
        BetonDataset(tmp_path / 'train.beton', num_classes=2)


def test_another_number_of_classes_than_the_names_is_rejected(clothing):
    with pytest.raises(ValueError, match=r'expected 10 classes, as in .*train\.json, got 11'):
        BetonDataset(clothing / 'train.beton', num_classes=11)


def test_a_source_image_that_cannot_be_decoded_ends_the_writing_or_is_left_out(tmp_path):
    folder = make_folder(tmp_path / 'images', {'train': ['a', 'b'], 'val': ['a', 'b']})
    (folder / 'train' / 'a' / '1.png').write_bytes(b'damaged')
    with pytest.raises(CorruptImageError, match=r'1\.png'):
        make_beton(tmp_path, folder, workers=1)
    assert not list(tmp_path.glob('*beton*'))
    source = Source(dir=str(folder), on_corrupt_image='skip', eval_split='train')
    assert write_beton(open_eval_split(source), tmp_path / 'train.beton', num_workers=0, progress=False) == 3
    assert BetonDataset(tmp_path / 'train.beton').labels.tolist() == [0, 1, 1]


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / 'images', {'train': ['a'], 'val': ['a']})
    make_beton(tmp_path, folder)
    before = (tmp_path / 'train.beton').read_bytes()

    def fail(*args):
        raise OSError('No space left on device')

    monkeypatch.setattr(MemoryAllocator, 'flush_page', fail)
    with pytest.raises(OSError, match='No space left'):
        make_beton(tmp_path, folder)
    assert (tmp_path / 'train.beton').read_bytes() == before
    assert not list(tmp_path.glob('.*'))


def test_an_image_larger_than_a_page_is_named(tmp_path):
    folder = make_folder(tmp_path / 'images', {'train': ['a'], 'val': ['a']}, images=1, size=(2000, 1500))
    message = r'got .*train/a/0\.png: 9000000 bytes are more than a page of the file, 8388608; set max_resolution'
    with pytest.raises(ValueError, match=message):
        make_beton(tmp_path, folder, BetonOptions(raw_share=1.0))


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'max_resolution': 0}, r'max_resolution to be in \[1, 18918\], or null, got 0'),
        ({'jpeg_quality': 101}, r'jpeg_quality to be in \[1, 100\], got 101'),
        ({'raw_share': 1.5}, r'raw_share to be in \[0, 1\], got 1\.5'),
        ({'seed': -1}, r'seed to be in \[0, 4294967296\), got -1'),
    ],
)
def test_options_out_of_range_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        BetonOptions(**options)


def test_a_path_of_another_kind_and_a_stream_are_rejected(tmp_path):
    split = open_train_split(Source(dir=str(CLOTHING)))
    with pytest.raises(ValueError, match=r'ends in \.beton, got .*train\.ffcv'):
        write_beton(split, tmp_path / 'train.ffcv')

    stream = WebDataset('', [], 1, None, None, is_training=False, seed=0)
    with pytest.raises(ValueError, match='at random positions, got a stream'):
        write_beton(dataclasses.replace(split, dataset=stream), tmp_path / 'train.beton')


@pytest.mark.parametrize(
    'text', ['[1, 2]', '{"class_names": ["a"', '{"images": 200}', '{"class_names": ["a"], "images": 7}']
)
def test_a_description_of_something_else_is_named(text, clothing, tmp_path):
    shutil.copy(clothing / 'val.beton', tmp_path / 'val.beton')
    (tmp_path / 'val.json').write_text(text)
    with pytest.raises(ValueError, match=r'expected the description of .* got '):
        BetonDataset(tmp_path / 'val.beton')


def test_an_image_that_ffcv_cannot_store_is_named_or_left_out(tmp_path):
    folder = make_folder(tmp_path / 'images', {'train': ['a', 'b'], 'val': ['a', 'b']}, images=1)
    Image.new('RGB', (70_000, 1)).save(folder / 'train' / 'a' / 'thin.png')
    with pytest.raises(CorruptImageError, match=r'FFCV can store, got .*thin\.png: .*; set max_resolution; .*=skip'):
        make_beton(tmp_path, folder)
    assert not list(tmp_path.glob('*beton*'))
    source = Source(dir=str(folder), on_corrupt_image='skip', eval_split='train')
    assert write_beton(open_eval_split(source), tmp_path / 'train.beton', num_workers=0, progress=False) == 2


@pytest.mark.parametrize(('size', 'stored'), [((3000, 4), (1, 500)), ((4, 3000), (500, 1)), ((3000, 6), (1, 500))])
def test_a_side_that_would_shrink_to_nothing_is_stored_as_a_pixel(tmp_path, size, stored):
    folder = make_folder(tmp_path / 'images', {'train': ['a', 'b'], 'val': ['a', 'b']}, images=1, size=size)
    place = make_beton(tmp_path, folder, BetonOptions(max_resolution=500))
    image = BetonDataset(place / 'train.beton')[1][0]
    assert image.shape[:2] == stored
    assert abs(image.astype(int) - 20).max() <= 1


def test_native_shapes_are_rejected(squares):
    shape = NativeShape(16, (8, 8))
    with pytest.raises(ValueError, match=r'images of native shapes, got FFCV files'):
        create_loaders(squares[0], shape, 2, num_workers=0)
    with pytest.raises(ValueError, match=r'images of native shapes, got FFCV files'):
        create_eval_loader(squares[0], Preprocessing(shape), 2, num_workers=0)
