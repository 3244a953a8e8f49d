import hashlib
import io
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.datasets import CIFAR10

from aft_vision import models
from aft_vision.data import Draw, PixelAugmentation, PixelDataset, read_cifar10

RNG = np.random.default_rng(0)
IMAGES = {
    'train': RNG.integers(256, size=(10, 32, 32, 3), dtype=np.uint8),
    'test': RNG.integers(256, size=(2, 32, 32, 3), dtype=np.uint8),
}


def planes(images: np.ndarray) -> np.ndarray:
    """(N, 3072): red, green and blue plane, as the official files have them."""
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


def batches(split: str) -> list[np.ndarray]:
    return np.split(planes(IMAGES[split]), 5 if split == 'train' else 1)


@pytest.fixture
def python_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of torchvision, whose sums are those of the files written here."""
    folder = tmp_path / 'cifar-10-batches-py'
    folder.mkdir()

    def write(name: str, content: object) -> list[str]:
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, hashlib.md5((folder / name).read_bytes()).hexdigest()]

    train = [
        write(f'data_batch_{i}', {'data': data, 'labels': [0] * 2}) for i, data in enumerate(batches('train'), start=1)
    ]
    test = [write('test_batch', {'data': batches('test')[0], 'labels': [1] * 2})]
    _, md5 = write('batches.meta', {'label_names': ['a', 'b']})
    monkeypatch.setattr(CIFAR10, 'train_list', train)
    monkeypatch.setattr(CIFAR10, 'test_list', test)
    monkeypatch.setattr(CIFAR10, 'meta', {**CIFAR10.meta, 'md5': md5})
    return folder


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    np.savez(tmp_path / 'cifar.npz', **{f'x_{split}': images for split, images in IMAGES.items()})
    return tmp_path / 'cifar.npz'


@pytest.mark.parametrize('split', ['train', 'test'])
@pytest.mark.parametrize('version', ['python_version', 'npz'])
def test_every_version_gives_the_images_in_their_order(version, split, request):
    path = request.getfixturevalue(version)
    places = [path] if path.is_file() else [path, path.parent]
    for place in places:
        found = read_cifar10(place, split)
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, IMAGES[split])


@pytest.mark.skipif('AFT_DATA' not in os.environ, reason='needs AFT_DATA with cifar10_lossless.npz')
def test_the_exact_pixels_at_hand_are_read():
    path = Path(os.environ['AFT_DATA']) / 'cifar10_lossless.npz'
    assert read_cifar10(path, 'test').shape == (1017, 32, 32, 3)


def test_the_raster_goes_row_by_row_and_has_red_green_and_blue_of_a_pixel_side_by_side():
    images = IMAGES['test']
    dataset = PixelDataset(images, PixelAugmentation(hflip=0.0, shift=0), seed=0)
    tokens = np.stack([dataset[Draw(0, number, 0)] for number in range(2)])
    assert tokens.shape == (2, 3072)
    assert [tokens[1, (5 * 32 + 7) * 3 + c] for c in range(3)] == list(images[1, 5, 7])
    # The order in which the models draw.
    channels_first = torch.from_numpy(images).permute(0, 3, 1, 2)
    np.testing.assert_array_equal(models.images_to_tokens(channels_first).numpy(), tokens)


def test_the_augmentation_flips_then_shifts_all_sub_pixels_and_clips():
    augment, image = PixelAugmentation(), IMAGES['train'][0]
    found, flips = set(), 0
    for seed in range(200):
        changed = augment(image, np.random.default_rng(seed)).astype(int)
        matches = []
        for flipped in (False, True):
            source = image[:, ::-1] if flipped else image
            for shift in range(-10, 11):
                if np.array_equal(changed, np.clip(source.astype(int) + shift, 0, 255)):
                    matches.append((flipped, shift))
        ((flipped, shift),) = matches
        flips += flipped
        found.add(shift)
    assert found == set(range(-10, 11))
    assert 70 < flips < 130


def test_without_augmentation_the_image_stays():
    image = IMAGES['train'][0]
    np.testing.assert_array_equal(PixelAugmentation(hflip=0, shift=0)(image, np.random.default_rng(0)), image)


@pytest.mark.parametrize(('key', 'value'), [('hflip', 1.5), ('shift', -1), ('shift', 256)])
def test_an_augmentation_out_of_range_is_rejected(key, value):
    with pytest.raises(ValueError, match=rf'expected augment\.{key} to be in .*, got {value}'):
        PixelAugmentation(**{key: value})


def test_a_damaged_pickle_is_an_error(python_version):
    path = python_version / 'data_batch_3'
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r'expected the whole CIFAR10 in .*cifar-10-batches-py'):
        read_cifar10(python_version, 'train')


@pytest.mark.parametrize('kind', ['cut', 'empty', 'other', 'flipped bits', 'single array'])
def test_a_damaged_archive_is_named(npz, kind):
    content, array = npz.read_bytes(), io.BytesIO()
    np.save(array, IMAGES['train'])
    damaged = {'cut': content[: len(content) // 2], 'empty': b'', 'other': b'other', 'single array': array.getvalue()}
    npz.write_bytes(damaged.get(kind, content[:500] + b'\xff' * 50 + content[550:]))
    with pytest.raises(ValueError, match=r'expected a whole \.npz with the array x_train, got .*cifar\.npz: '):
        read_cifar10(npz, 'train')


@pytest.mark.parametrize(
    ('arrays', 'message'),
    [
        ({'x_test': np.zeros((2, 32, 31, 3), np.uint8)}, r'shape \(32, 32, 3\) in .*, got \(32, 31, 3\)'),
        ({'x_test': np.zeros((2, 32, 32, 3))}, r'images of uint8 in .*, got float64'),
        ({'x_test': np.zeros((0, 32, 32, 3), np.uint8)}, r'at least 1 image in .*, got 0'),
        ({'x_train': np.zeros((2, 32, 32, 3), np.uint8)}, r'the array x_test, got .*x_test is not a file in'),
    ],
)
def test_other_arrays_are_rejected_with_both_numbers(arrays, message, tmp_path):
    np.savez(tmp_path / 'other.npz', **arrays)
    with pytest.raises(ValueError, match=message):
        read_cifar10(tmp_path / 'other.npz', 'test')


def test_what_is_not_there_is_said(python_version, tmp_path):
    (python_version / 'data_batch_5').unlink()
    with pytest.raises(ValueError, match=r'expected the whole CIFAR10'):
        read_cifar10(python_version, 'train')
    (tmp_path / 'empty').mkdir()
    with pytest.raises(ValueError, match=r'CIFAR10 in .*empty: cifar-10-batches-py or an .npz, got none of them'):
        read_cifar10(tmp_path / 'empty', 'train')
    with pytest.raises(ValueError, match='got nothing of this name'):
        read_cifar10(tmp_path / 'nothing', 'train')
    with pytest.raises(ValueError, match="train or test, got 'val'"):
        read_cifar10(tmp_path, 'val')
