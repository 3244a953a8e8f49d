import logging
import pickle
import re
import shutil
import tarfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import NO_AUGMENTATION, make_folder
from PIL import Image, features
from torchvision.datasets import CIFAR10

from aft_vision.data import (
    Augmentation,
    CorruptImageError,
    LargeImageError,
    Preprocessing,
    Source,
    create_eval_loader,
    create_loaders,
)
from aft_vision.data.checked import ImageData, TorchvisionDataset
from aft_vision.data.datasets import open_eval_split, open_train_split, with_evaluation_images
from aft_vision.data.images import TransformError
from aft_vision.data.layout import MissingSplitError
from train.command_line import run_command

PLAIN = Preprocessing((16, 16), crop_pct=1.0, mean=(0, 0, 0), std=(1, 1, 1))


def make_tar(path: Path, folder: Path, prefix: str = '') -> Path:
    with tarfile.open(path, 'w') as file:
        file.add(folder, arcname=prefix or '.')
    return path


def evaluate(source: Source) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Mean pixel and class of every evaluation image."""
    loader, names = create_eval_loader(source, PLAIN, 4, num_workers=0)
    images, targets = (torch.cat(parts) for parts in zip(*loader, strict=True))
    return images.mean(dim=(1, 2, 3)) * 255 / 20, targets, names


CLASSES = {'train': ['a', 'b', 'c'], 'val': ['a', 'b', 'c']}


@pytest.mark.parametrize('layout', ['folder', 'one tar', 'one tar below a folder', 'a tar per split'])
def test_a_folder_and_its_tar_files_are_the_same_data_set(tmp_path, layout):
    folder = make_folder(tmp_path / 'images', CLASSES, images=3)
    if layout == 'folder':
        source = Source(dir=str(folder))
    elif layout == 'a tar per split':
        (tmp_path / 'tars').mkdir()
        for split in CLASSES:
            make_tar(tmp_path / 'tars' / f'{split}.tar', folder / split)
        source = Source(dir=str(tmp_path / 'tars'))
    else:
        source = Source(dir=str(make_tar(tmp_path / 'all.tar', folder, 'data/set' if 'below' in layout else '')))
    values, targets, names = evaluate(source)
    assert names == ['a', 'b', 'c']
    assert targets.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    torch.testing.assert_close(values, targets.float(), rtol=0, atol=0.05)
    assert len(open_train_split(source).dataset) == 9


def test_names_whose_numbers_are_equal_have_one_order(tmp_path):
    image = Image.new('RGB', (8, 8))
    paths = [f'{name}/{file}.png' for name in ('1', '01') for file in ('1', '001', 'A1', 'a1')]
    orders = []
    for number, order in enumerate((paths, paths[::-1])):
        folder = tmp_path / str(number)
        for path in order:
            (folder / 'train' / path).parent.mkdir(parents=True, exist_ok=True)
            image.save(folder / 'train' / path)
        opened = [open_train_split(Source(dir=str(x))) for x in (folder, make_tar(tmp_path / f'{number}.tar', folder))]
        assert [split.class_names for split in opened] == [['01', '1']] * 2
        orders.append([Path(path).relative_to(folder) for path, _ in opened[0].dataset.reader.samples])
    assert orders[0] == orders[1]


def test_a_chosen_split_is_used(tmp_path):
    make_folder(tmp_path, {'train': ['a'], 'val': ['a'], 'extra': ['a', 'b']})
    assert open_eval_split(Source(dir=str(tmp_path), eval_split='extra')).class_names == ['a', 'b']
    assert open_train_split(Source(dir=str(tmp_path), train_split='extra')).class_names == ['a', 'b']


def open_both(root: Path, **options: Any) -> tuple[list[str], int, list[str], int]:
    """The classes and the number of images of the training and of the evaluation split."""
    source = Source(dir=str(root), **options)
    train, evaluation = open_train_split(source), open_eval_split(source)
    return train.class_names, len(train.dataset), evaluation.class_names, len(evaluation.dataset)


AS_TAR = pytest.mark.parametrize('as_tar', [False, True])
OPEN = {'train': open_train_split, 'eval': open_eval_split}


@AS_TAR
@pytest.mark.parametrize('names', [('Train', 'Val'), ('TRAIN', 'TEST'), ('Training', 'Testing'), ('training', 'valid')])
@pytest.mark.parametrize('share', [None, 0.5])
def test_splits_of_other_usual_names_are_read_and_are_no_classes(tmp_path, names, share, as_tar):
    root = make_folder(tmp_path / 'images', {name: ['a', 'b'] for name in names}, images=4)
    root = make_tar(tmp_path / 'all.tar', root, 'some/place') if as_tar else root
    counts = (8, 8) if share is None else (4, 4)
    assert open_both(root, val_share=share) == (['a', 'b'], counts[0], ['a', 'b'], counts[1])


def test_the_split_with_the_exact_name_is_preferred(tmp_path, caplog):
    make_folder(tmp_path, {'Train': ['a'], 'train': ['b'], 'training': ['c']})
    assert open_train_split(Source(dir=str(tmp_path))).class_names == ['b']
    assert 'train is read, and not Train next to it' in caplog.text
    assert open_train_split(Source(dir=str(tmp_path), train_split='Train')).class_names == ['a']


@AS_TAR
@pytest.mark.parametrize('names', [('seg_train', 'seg_test'), ('training_set', 'test_set'), ('my-train', 'my-val')])
@pytest.mark.parametrize('share', [None, 0.5])
def test_folders_that_look_like_splits_are_named_as_keys_that_read_them(tmp_path, names, share, as_tar):
    root = make_folder(tmp_path / 'images', {name: ['a', 'b'] for name in names}, images=4)
    root = make_tar(tmp_path / 'all.tar', root) if as_tar else root
    with pytest.raises(MissingSplitError) as raised:
        open_both(root, val_share=share)
    assert raised.value.remedies == {'train_split': names[0], 'eval_split': names[1]}
    assert open_both(root, **raised.value.remedies) == (['a', 'b'], 8, ['a', 'b'], 8)


@AS_TAR
@pytest.mark.parametrize(
    'folders',
    [
        {'train': ['a', 'b']},
        {'train': ['a', 'b'], 'more': ['c']},
        {'train': ['a', 'b'], '.': ['more']},
        {'my_train': ['a', 'b'], 'more': ['c']},
        {'.': ['a', 'b']},
        {'.': ['bus', 'car', 'train']},
    ],
)
def test_the_remedies_of_a_missing_split_read_the_data_set(tmp_path, folders, as_tar):
    root = make_folder(tmp_path / 'images', folders, images=10)
    root = make_tar(tmp_path / 'all.tar', root) if as_tar else root
    with pytest.raises(MissingSplitError) as raised:
        open_both(root)
    first = next(iter(folders.values()))
    assert open_both(root, **raised.value.remedies) == (first, 9 * len(first), first, len(first))


def test_no_remedy_is_named_where_none_is_known(tmp_path):
    make_folder(tmp_path, {'val': ['a'], 'more': ['a']})
    with pytest.raises(MissingSplitError) as raised:
        open_both(tmp_path)
    assert raised.value.remedies == {}


@AS_TAR
@pytest.mark.parametrize('names', [['bus', 'car', 'train'], ['ok', 'test', 'val'], ['a', 'b', 'Train', 'TEST']])
def test_a_class_may_have_the_name_of_a_split(tmp_path, names, as_tar):
    undivided = make_folder(tmp_path / 'images', {'.': names}, images=4)
    divided = make_folder(tmp_path / 'divided', {'train': names, 'val': names}, images=3)
    if as_tar:
        undivided = make_tar(tmp_path / 'undivided.tar', undivided, 'place')
        divided = make_tar(tmp_path / 'divided.tar', divided, 'place')
    found, count, *_ = open_both(undivided, val_share=0.25)
    assert (sorted(found), count) == (sorted(names), 3 * len(names))
    found, count, *evaluation = open_both(divided)
    assert (sorted(found), count) == (sorted(names), 3 * len(names))
    assert evaluation == [found, count]


def test_flat_splits_are_no_classes(tmp_path):
    layout(tmp_path, 'train/0.png', 'val/0.png', 'notes/x.txt')
    with pytest.raises(ValueError, match=r'one folder per class in .*train, got 1 images without one'):
        open_train_split(Source(dir=str(tmp_path), val_share=0.5))


@AS_TAR
@pytest.mark.parametrize('split', ['train', ''])
def test_the_class_of_a_nested_image_is_the_outermost_folder(tmp_path, split, as_tar, caplog):
    kinds = ['cat/persian/0.png', 'cat/siamese/0.png', 'dog/pug/small/0.png', 'dog/0.png', 'dog/boxes.txt']
    layout(tmp_path / 'images', *(str(Path(split, kind)) for kind in kinds), 'val/cat/images/0.png', 'val/dog/0.png')
    root = tmp_path / 'images'
    if not split:
        shutil.rmtree(root / 'val')
    root = make_tar(tmp_path / 'all.tar', root, 'place') if as_tar else root
    source = Source(dir=str(root), val_share=None if split else 0.5)
    loaders = create_loaders(source, (16, 16), 1, augment=NO_AUGMENTATION, num_workers=0)
    assert loaders.class_names == ['cat', 'dog']
    assert sum(len(targets) for loader in (loaders.train, loaders.validation) for _, targets in loader) >= 4
    assert caplog.text.count('the class of an image is its outermost folder') == 1


@AS_TAR
def test_names_with_accents_in_either_form_are_one_class(tmp_path, as_tar):
    composed, apart = 'caf\u00e9', 'cafe\u0301'
    kinds = (f'train/{apart}/0.png', f'train/{apart}/1.png', f'train/{composed}/2.png', f'val/{composed}/0.png')
    layout(tmp_path / 'images', *kinds, 'train/bar/0.png', 'val/bar/0.png')
    root = make_tar(tmp_path / 'all.tar', tmp_path / 'images') if as_tar else tmp_path / 'images'
    loaders = create_loaders(root, (16, 16), 4, augment=NO_AUGMENTATION, num_workers=0)
    assert loaders.class_names == ['bar', composed]
    assert sorted(next(iter(loaders.train))[1].tolist()) == [0, 1, 1, 1]
    assert next(iter(loaders.validation))[1].tolist() == [0, 1]


def test_words_with_accents_in_either_form_are_one_class(tmp_path):
    labels = {'train': ['caf\u00e9', 'cafe\u0301', 'bar'], 'validation': ['cafe\u0301', 'bar']}
    source = write_parquet(tmp_path, lambda datasets: datasets.Value('string'), **labels)
    loaders = create_loaders(source, (4, 4), 3, augment=NO_AUGMENTATION, num_workers=0)
    assert loaders.class_names == ['bar', 'caf\u00e9']
    assert sorted(next(iter(loaders.train))[1].tolist()) == [0, 1, 1]


@AS_TAR
def test_a_folder_in_which_the_data_set_lies_is_opened(tmp_path, as_tar):
    layout(
        tmp_path / 'images', 'flowers/rose/0.png', 'flowers/rose/1.png', 'flowers/tulip/0.png', 'flowers/tulip/1.png'
    )
    layout(tmp_path / 'divided', 'train/train/a/0.png', 'train/train/b/0.png', 'val/a/0.png', 'val/b/0.png')
    undivided, divided = tmp_path / 'images', tmp_path / 'divided'
    if as_tar:
        undivided, divided = (make_tar(tmp_path / f'{x.name}.tar', x) for x in (undivided, divided))
    assert open_both(undivided, val_share=0.5) == (['rose', 'tulip'], 2, ['rose', 'tulip'], 2)
    assert open_both(divided) == (['a', 'b'], 2, ['a', 'b'], 2)


@AS_TAR
def test_the_only_folder_of_a_split_is_a_class_unless_it_has_the_name_of_the_split(tmp_path, as_tar):
    layout(tmp_path / 'images', 'train/cat/a/0.png', 'train/cat/b/0.png', 'val/cat/0.png', 'val/cat/1.png')
    root = make_tar(tmp_path / 'images.tar', tmp_path / 'images') if as_tar else tmp_path / 'images'
    assert open_both(root) == (['cat'], 2, ['cat'], 2)


def test_a_split_in_two_forms_is_named(tmp_path, caplog):
    folder = make_folder(tmp_path, {'val': ['a']})
    make_tar(tmp_path / 'val.tar', folder / 'val')
    assert open_eval_split(Source(dir=str(folder))).class_names == ['a']
    assert 'val is read, and not val.tar next to it' in caplog.text


def cifar10(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CIFAR-10 in its official format, ten images a file, without the official checksums."""
    folder = root / 'cifar-10-batches-py'
    folder.mkdir(parents=True)
    names = [f'data_batch_{i}' for i in range(1, 6)] + ['test_batch']
    for name in names:
        labels = list(range(10))
        data = np.repeat(20 * np.arange(10, dtype=np.uint8)[:, None], 3072, axis=1)
        (folder / name).write_bytes(pickle.dumps({'data': data, 'labels': labels}))
    (folder / 'batches.meta').write_bytes(pickle.dumps({'label_names': [f'kind {i}' for i in range(10)]}))
    monkeypatch.setattr(CIFAR10, '_check_integrity', lambda self: True)
    monkeypatch.setattr('torchvision.datasets.cifar.check_integrity', lambda *args: True)
    return root


def test_cifar10_is_read_through_torchvision(tmp_path, monkeypatch):
    source = Source(name='torch/cifar10', dir=str(cifar10(tmp_path, monkeypatch)))
    loaders = create_loaders(source, (32, 32), 25, num_workers=0)
    assert len(loaders.train) == 2
    assert loaders.class_names[3] == 'kind 3'
    values, targets, _ = evaluate(source)
    assert targets.tolist() == list(range(10))
    torch.testing.assert_close(values, targets.float(), rtol=0, atol=0.05)


def test_a_misspelt_split_of_torchvision_is_not_taken_for_the_test_images(tmp_path, monkeypatch):
    source = Source(name='torch/cifar10', dir=str(cifar10(tmp_path, monkeypatch)), train_split='trian')
    with pytest.raises(ValueError, match=r"must be one of train, .*, got 'trian'"):
        open_train_split(source)


def test_grey_images_of_torchvision_become_rgb(tmp_path):
    folder = tmp_path / 'MNIST' / 'raw'
    folder.mkdir(parents=True)
    for kind in ('train', 't10k'):
        pixels = torch.full((10, 28, 28), 100, dtype=torch.uint8)
        for name, x, shape in (('images-idx3', pixels, (10, 28, 28)), ('labels-idx1', torch.arange(10), (10,))):
            head = bytes([0, 0, 8, len(shape)]) + b''.join(size.to_bytes(4, 'big') for size in shape)
            (folder / f'{kind}-{name}-ubyte').write_bytes(head + x.to(torch.uint8).numpy().tobytes())
    loaders = create_loaders(Source(name='torch/mnist', dir=str(tmp_path)), (28, 28), 10, num_workers=0)
    assert next(iter(loaders.train))[0].shape == (10, 3, 28, 28)
    assert next(iter(loaders.validation))[0].shape == (10, 3, 28, 28)


def test_other_names_of_image_and_class_are_passed_on(tmp_path, monkeypatch):
    datasets = pytest.importorskip('datasets')
    monkeypatch.setenv('HF_DATASETS_OFFLINE', '1')
    rows = {'img': [Image.new('RGB', (4, 4), (20 * i,) * 3) for i in range(2)], 'fine': ['x', 'y']}
    features = datasets.Features({'img': datasets.Image(), 'fine': datasets.ClassLabel(names=['x', 'y'])})
    (tmp_path / 'data').mkdir()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / 'data' / 'validation.parquet'))
    options = dict(name=f'hfds/{tmp_path / "data"}', dir=str(tmp_path / 'cache'))
    values, targets, names = evaluate(Source(**options, input_key='img', target_key='fine'))
    assert names == ['x', 'y']
    assert targets.tolist() == [0, 1]
    torch.testing.assert_close(values, targets.float(), rtol=0, atol=0.05)
    with pytest.raises(ValueError, match=r'expected the column label of hfds/.*, got img, fine'):
        evaluate(Source(**options))


def write_parquet(folder: Path, kind: Any, **labels: list[Any]) -> Source:
    """A data set of Hugging Face with black images of these labels for each split."""
    datasets = pytest.importorskip('datasets')
    features = datasets.Features({'image': datasets.Image(), 'label': kind(datasets)})
    (folder / 'data').mkdir()
    for split, values in labels.items():
        rows = {'image': [Image.new('RGB', (4, 4))] * len(values), 'label': values}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(str(folder / 'data' / f'{split}.parquet'))
    return Source(name=f'hfds/{folder / "data"}', dir=str(folder / 'cache'))


def test_labels_of_hugging_face_that_are_words_are_classes(tmp_path):
    labels = {'train': ['dog', 'cat10', 'cat9', 'dog'], 'validation': ['cat9', 'dog', 'cat10']}
    source = write_parquet(tmp_path, lambda datasets: datasets.Value('string'), **labels)
    loaders = create_loaders(source, (4, 4), 4, augment=NO_AUGMENTATION, num_workers=0)
    assert loaders.class_names == ['cat9', 'cat10', 'dog']
    assert [targets.tolist() for _, targets in loaders.validation] == [[0, 2, 1]]
    assert sorted(next(iter(loaders.train))[1].tolist()) == [0, 1, 2, 2]
    with pytest.raises(ValueError, match=r'expected 3 classes, as in .*, got 4'):
        open_train_split(replace(source, num_classes=4))


@pytest.mark.parametrize(
    ('labels', 'kind', 'message'),
    [
        ([1, 2, 3], 'int64', r'from 0 to 2 in the split .validation. .*, got 3 for image 2'),
        ([0, 1, -1], 'int64', 'got -1 for image 2'),
        ([0, 1, None], 'int64', 'got None for image 2'),
        ([0.5, 1.0], 'float32', 'got 0.5 for image 0'),
        ([[0, 1], [1]], 'lists', r'got \[0, 1\] for image 0'),
    ],
)
def test_labels_of_hugging_face_that_are_no_classes_are_an_error_at_opening(tmp_path, labels, kind, message):
    source = write_parquet(
        tmp_path, lambda x: x.List(x.Value('int64')) if kind == 'lists' else x.Value(kind), validation=labels
    )
    with pytest.raises(ValueError, match=message):
        open_eval_split(replace(source, num_classes=3))


def damage(path: Path, kind: str) -> None:
    """Replace an image by a damaged one."""
    pixels = np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    content = path.read_bytes()
    path.write_bytes({'empty': b'', 'text': b'not an image', 'cut': content[: len(content) // 2]}[kind])


DAMAGE = pytest.mark.parametrize('kind', ['empty', 'text', 'cut'])


@DAMAGE
def test_a_corrupt_image_is_named_with_its_path(tmp_path, kind):
    make_folder(tmp_path, {'train': ['a', 'b'], 'val': ['a', 'b']})
    for split in ('train', 'val'):
        damage(tmp_path / split / 'b' / '1.png', kind)
    loaders = create_loaders(tmp_path, (16, 16), 4, augment=Augmentation(repeats=1), num_workers=0)
    for loader, split in ((loaders.train, 'train'), (loaders.validation, 'val')):
        with pytest.raises(CorruptImageError, match=rf'got .*{split}/b/1\.png: .*; data\.on_corrupt_image=skip'):
            list(loader)


@DAMAGE
def test_a_corrupt_image_in_a_tar_is_named(tmp_path, kind):
    folder = make_folder(tmp_path / 'images', {'val': ['a']})
    damage(folder / 'val' / 'a' / '1.png', kind)
    tar = make_tar(tmp_path / 'all.tar', folder, 'set')
    with pytest.raises(CorruptImageError, match=r'got set/val/a/1\.png in .*all\.tar: [^<]*$'):
        evaluate(Source(dir=str(tar)))


@DAMAGE
def test_evaluation_leaves_a_skipped_image_out(tmp_path, kind, caplog):
    make_folder(tmp_path, {'val': ['a', 'b']}, images=4)
    for number in range(1, 4):
        damage(tmp_path / 'val' / 'a' / f'{number}.png', kind)
    for _ in range(2):
        targets = evaluate(Source(dir=str(tmp_path), on_corrupt_image='skip'))[1]
        assert targets.tolist() == [0, 1, 1, 1, 1]
        assert 'val/a/1.png' in caplog.text
        assert caplog.messages[-1] == 'skipped: 3 of 8 images of the evaluation'
        caplog.clear()


@pytest.mark.parametrize('num_workers', [0, 2])
def test_a_skipped_image_is_named_once_in_a_run(tmp_path, capfd, num_workers):
    make_folder(tmp_path, {'train': ['a', 'b'], 'val': ['a', 'b']}, images=3)
    for split in ('train', 'val'):
        damage(tmp_path / split / 'a' / '1.png', 'cut')
    source = Source(dir=str(tmp_path), on_corrupt_image='skip')
    loaders = create_loaders(source, (16, 16), 2, augment=Augmentation(repeats=1), num_workers=num_workers)
    # Logging without a handler writes to stderr, from the loading processes too.
    with mock.patch.object(logging.getLogger(), 'handlers', []):
        for epoch in range(3):
            loaders.set_epoch(epoch)
            assert [len(list(loader)) for loader in (loaders.train, loaders.validation)] == [3, 3]
    shown = capfd.readouterr().err
    assert [shown.count(f'{split}/a/1.png') for split in ('train', 'val')] == [1, 1]


@pytest.mark.parametrize('num_workers', [0, 2])
def test_what_is_lost_of_images_is_said_once_in_a_run(tmp_path, capfd, num_workers):
    for split in ('train', 'val'):
        for name in 'ab':
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(2):
                Image.new('RGBA', (8, 8), (9, 9, 9, 0)).save(tmp_path / split / name / f'{number}.png')
    source = Source(dir=str(tmp_path))
    loader, _ = create_eval_loader(source, (16, 16), 1, num_workers=num_workers)
    with mock.patch.object(logging.getLogger(), 'handlers', []):
        for _ in range(2):
            assert len(list(loader)) == 4
    assert capfd.readouterr().err.count('has transparent pixels; all are read as opaque') == 1


@AS_TAR
def test_keys_of_reading_reach_every_image(tmp_path, as_tar):
    (tmp_path / 'images' / 'val' / 'a').mkdir(parents=True)
    Image.fromarray(np.full((20, 20), 20 * 16, np.uint16)).save(tmp_path / 'images' / 'val' / 'a' / '0.png')
    root = tmp_path / 'images'
    source = Source(dir=str(make_tar(tmp_path / 'all.tar', root) if as_tar else root), bits=12)
    torch.testing.assert_close(evaluate(source)[0], torch.ones(1), rtol=0, atol=0.05)
    with pytest.raises(LargeImageError, match=r'at most 399 pixels, got .*a/0\.png.* of 20 x 20'):
        evaluate(replace(source, max_image_pixels=399))
    source = replace(source, name='torch/image_folder', eval_split='val', dir=str(root))
    torch.testing.assert_close(evaluate(source)[0], torch.ones(1), rtol=0, atol=0.05)


def test_training_takes_the_next_image_for_a_skipped_one(tmp_path, caplog):
    make_folder(tmp_path, {'train': ['a', 'b'], 'val': ['a', 'b']}, images=3)
    damage(tmp_path / 'train' / 'a' / '2.png', 'cut')
    source = Source(dir=str(tmp_path), on_corrupt_image='skip')
    loader = create_loaders(source, (16, 16), 6, augment=Augmentation(repeats=1), num_workers=0).train
    assert sorted(next(iter(loader))[1].tolist()) == [0, 0, 1, 1, 1, 1]
    assert 'train/a/2.png' in caplog.text


def test_a_data_set_of_corrupt_images_ends_the_run(tmp_path):
    make_folder(tmp_path, {'train': ['a'], 'val': ['a']})
    for number in range(2):
        damage(tmp_path / 'train' / 'a' / f'{number}.png', 'empty')
    split = open_train_split(Source(dir=str(tmp_path), on_corrupt_image='skip'))
    with pytest.raises(CorruptImageError, match=r'50 in a row that cannot, the first one .*a/1\.png'):
        _ = split.dataset[1]


def divide_by_zero(image: Any) -> Any:
    return 1 / 0


def test_an_error_of_a_transform_is_not_skipped_and_names_the_image(tmp_path):
    make_folder(tmp_path, {'train': ['a'], 'val': ['a']})
    damage(tmp_path / 'train' / 'a' / '0.png', 'cut')
    split = open_train_split(Source(dir=str(tmp_path), on_corrupt_image='skip'))
    split.dataset.transform = divide_by_zero
    with pytest.raises(TransformError, match=r'a/1\.png: ZeroDivisionError: division by zero'):
        _ = split.dataset[0]


@pytest.mark.parametrize('num_workers', [0, 1])
def test_an_error_of_a_loading_process_is_one_line_with_the_file(tmp_path, monkeypatch, num_workers, capsys):
    make_folder(tmp_path, {'train': ['a'], 'val': ['a']}, images=1)
    for name in ('train_transform', 'eval_transform'):
        monkeypatch.setattr(ImageData, name, staticmethod(lambda *args: divide_by_zero))
    loaders = create_loaders(tmp_path, (16, 16), 1, augment=NO_AUGMENTATION, num_workers=num_workers)
    for loader, place in ((loaders.train, 'train/a/0.png'), (loaders.validation, 'val/a/0.png')):
        with pytest.raises(SystemExit):
            run_command(lambda argv, loader=loader: list(loader), [])
        assert capsys.readouterr().err == f'error: {tmp_path}/{place}: ZeroDivisionError: division by zero\n'


def layout(root: Path, *names: str) -> None:
    """Write small images, empty folders, which end with a slash, and other files."""
    for name in names:
        path = root / name
        (path if name.endswith('/') else path.parent).mkdir(parents=True, exist_ok=True)
        if name.endswith('.png'):
            Image.new('RGB', (4, 4)).save(path)
        elif not name.endswith('/'):
            path.write_text('nothing')


@pytest.mark.parametrize(
    ('paths', 'message'),
    [
        ([], 'images, which is not one'),
        (['./'], 'images, which is not one'),
        (
            ['train/a/0.png', 'extra/a/0.png'],
            r'folder, .tar or .beton file val or validation or valid or test or testing .* only extra, tr',
        ),
        (
            ['train/a/0.png', 'train/b/0.png', 'val/a/0.png', 'val/c/0.png'],
            r"only in training: \['b'\]; only in validation: \['c'\]",
        ),
        (['train/a/0.png', 'train/b/', 'val/a/0.png', 'val/b/'], 'got none in b'),
        (['train/a/0.png', 'train/b/x.heic', 'val/a/0.png'], r'got none in b; ignored: 1 file \(1 \.heic\)'),
        (['train/a/0.png', 'val/'], 'expected one folder per class in .*, got 0 images'),
        (['train/a/0.png', 'val/0.png'], r'one folder per class in .*val, got 1 images without one'),
    ],
)
def test_a_folder_that_is_no_data_set_is_named(tmp_path, paths, message):
    layout(tmp_path / 'images', *paths)
    with pytest.raises(ValueError, match=message):
        create_loaders(tmp_path / 'images', (16, 16), 1)


@pytest.mark.parametrize(
    ('split', 'place', 'paths', 'message'),
    [
        ('train', 'all', 'extra/a/0.png train2/a/0.png', 'train or training of class folders in .*only extra, train2'),
        ('train', 'all', 'train/notes.txt', r'expected images in class folders in .*all\.tar, got none'),
        ('train', 'all', 'train/a/._x.png', r'images in class folders in .*all\.tar, got none'),
        ('train', 'all', 'train/a/0.png train/b/', r'every class folder of .*all\.tar, got none in b'),
        ('eval', 'all', 'train/a/0.png extra/a/0.png', 'val or .* or testing of class folders in .*only extra, train'),
        ('eval', 'set/val', '0.png 1.png', r'class folders of .*val\.tar, got 2 without one'),
    ],
)
def test_a_tar_that_is_no_data_set_is_named(tmp_path, split, place, paths, message):
    layout(tmp_path / 'images', *paths.split())
    (tmp_path / 'set').mkdir()
    tar = make_tar(tmp_path / f'{place}.tar', tmp_path / 'images')
    with pytest.raises(ValueError, match=message):
        OPEN[split](Source(dir=str(tar.parent if '/' in place else tar)))


@pytest.mark.parametrize('kind', [tarfile.SYMTYPE, tarfile.LNKTYPE])
@pytest.mark.parametrize('name', ['train/c', 'train/b/x', 'train/b/x.png'])
def test_a_link_in_a_tar_is_named(tmp_path, kind, name):
    tar = make_tar(tmp_path / 'all.tar', make_folder(tmp_path / 'images', CLASSES))
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, './train/a'
    with tarfile.open(tar, 'a') as file:
        file.addfile(member)
    with pytest.raises(ValueError, match=rf'files in .*all\.tar, got the link {name}; tar '):
        open_train_split(Source(dir=str(tar)))


@pytest.mark.parametrize(('images', 'mode'), [(1, 'w:gz'), (1, 'w:bz2'), (1, 'w:xz'), (100, 'w:gz')])
def test_a_compressed_tar_is_named(tmp_path, mode, images):
    with tarfile.open(tmp_path / 'all.tar', mode) as file:
        file.add(make_folder(tmp_path / 'images', CLASSES, images=images), arcname='.')
    with pytest.raises(ValueError, match=r'expected a whole tar file, got .*all\.tar: it is compressed'):
        open_train_split(Source(dir=str(tmp_path / 'all.tar')))


@AS_TAR
def test_an_image_outside_the_class_folders_is_named(tmp_path, as_tar):
    folder = make_folder(tmp_path / 'images', {'train': ['a', 'b']})
    layout(folder, 'train/astray.png')
    path = make_tar(tmp_path / 'all.tar', folder) if as_tar else folder
    with pytest.raises(ValueError, match=r'only in the class folders of .*, got .*train/astray\.png'):
        open_train_split(Source(dir=str(path)))


def cut_blocks(content: bytes, blocks: int) -> bytes:
    """A tar file without so many of the last blocks that hold something."""
    whole = len(content.rstrip(b'\0')) // 512 + 1
    return content[: 512 * (whole - blocks)]


@pytest.mark.parametrize(
    ('change', 'split', 'message'),
    [
        *((partial(cut_blocks, blocks=blocks), 'train', '') for blocks in (1, 2, 3, 10)),
        *((lambda content, other=other: other, 'train', '') for other in (b'', b'not a tar file at all' * 100)),
        # A damaged header in the middle is not the end.
        (lambda content: re.sub(rb'val/c/1\.png.{9}', b'\xff' * 20, content, flags=re.DOTALL), 'eval', ': .* at byte'),
    ],
)
def test_a_damaged_tar_is_named_and_not_taken_for_a_smaller_one(tmp_path, change, split, message):
    tar = tmp_path / 'all.tar'
    with tarfile.open(tar, 'w', format=tarfile.USTAR_FORMAT) as file:
        file.add(make_folder(tmp_path / 'images', CLASSES, images=3), arcname='.')
    tar.write_bytes(change(tar.read_bytes()))
    with pytest.raises(ValueError, match=rf'expected a whole tar file, got .*all\.tar{message}'):
        OPEN[split](Source(dir=str(tar)))


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('torch/cifar10', r"the split 'train' of the data set torch/cifar10 in .*, got: .* or download it"),
        ('torch/cifar11', r'torch/cifar11 in .*Unknown torchvision dataset cifar11'),
        ('nonsense/x', r'name of a data set must begin with one of torch/, hfds/, wds/'),
        ('', 'expected the folder, the tar file or the name of a data set, got none'),
    ],
)
def test_a_named_data_set_that_cannot_be_opened_is_named(tmp_path, name, message):
    with pytest.raises(ValueError, match=message):
        open_train_split(Source(name=name, dir=str(tmp_path)) if name else Source())


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'name': 'torch/mnist'}, 'expected the folder of torch/mnist, got none'),
        ({'dir': 'x', 'input_key': 'jpg'}, r"data\.input_key belongs to a data set of data\.name, got 'jpg'"),
        ({'dir': 'x', 'num_classes': 0}, 'expected num_classes to be at least 1'),
    ],
)
def test_an_impossible_source_is_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        Source(**options)


@pytest.mark.parametrize('share', [None, 0.5])
def test_another_number_of_classes_than_a_folder_has_is_rejected(tmp_path, share):
    make_numbered(tmp_path if share else tmp_path / 'train', {'cat': 2, 'dog': 2})
    assert len(open_train_split(Source(dir=str(tmp_path), val_share=share, num_classes=2)).class_names) == 2
    with pytest.raises(ValueError, match=r'expected 2 classes, as in .*, got 3'):
        open_train_split(Source(dir=str(tmp_path), val_share=share, num_classes=3))


def make_numbered(root: Path, counts: dict[str, int]) -> Path:
    """A folder of class folders without splits; every image has a grey value of its own."""
    values = iter(range(256))
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            Image.new('RGB', (16, 16), (next(values),) * 3).save(root / name / f'{number}.png')
    return root


def divide(source: Source, **options: Any) -> tuple[list[int], list[int], list[int]]:
    """The images of the training and of the validation loader, by their grey values, and the classes of the latter."""
    loaders = create_loaders(
        source,
        PLAIN.size,
        options.pop('batch_size', 1),
        evaluation=PLAIN,
        augment=NO_AUGMENTATION,
        num_workers=0,
        **options,
    )
    loaders.set_epoch(0)
    trained = [round(255 * float(image.mean())) for images, _ in loaders.train for image in images]
    held = [
        (round(255 * float(x.mean())), int(y))
        for images, targets in loaders.validation
        for x, y in zip(images, targets, strict=True)
    ]
    return sorted(trained), [value for value, _ in held], [target for _, target in held]


COUNTS = {'a': 40, 'b': 20, 'c': 5, 'd': 1}


@pytest.mark.parametrize('layout', ['folder', 'tar', 'tar below a folder', 'folder with splits', 'a tar per split'])
def test_a_share_of_the_training_images_is_held_apart_by_class(tmp_path, layout):
    root = tmp_path / 'images'
    folder = make_numbered(root / 'train' if 'split' in layout else root, COUNTS)
    if 'split' in layout:
        make_folder(root, {'val': list(COUNTS)}, images=3)
    if layout == 'a tar per split':
        make_tar(root / 'train.tar', folder)
        shutil.rmtree(folder)
    elif layout.startswith('tar'):
        root = make_tar(tmp_path / 'all.tar', folder, 'data/set' if 'below' in layout else '')
    trained, held, targets = divide(Source(dir=str(root), val_share=0.1))
    assert sorted(trained + held) == list(range(66))
    # A tenth of 40, 20 and 5; the only image of a class is trained on.
    assert [targets.count(i) for i in range(4)] in ([4, 2, 0, 0], [4, 2, 1, 0])
    expected = divide(Source(dir=str(make_numbered(tmp_path / 'again', COUNTS)), val_share=0.1))
    assert (trained, held, targets) == expected
    assert divide(Source(dir=str(root), val_share=0.1), seed=5)[1] == held
    assert divide(Source(dir=str(root), val_share=0.1, val_seed=1))[1] != held


def test_a_share_is_held_apart_only_if_there_is_no_evaluation_split(tmp_path):
    undivided, half = tmp_path / 'undivided', tmp_path / 'half'
    make_numbered(undivided, COUNTS)
    make_numbered(half / 'train', COUNTS)
    for root in (undivided, half, make_tar(tmp_path / 'undivided.tar', undivided)):
        source = with_evaluation_images(Source(dir=str(root), val_share_without_split=0.2))
        assert source.val_share == 0.2
        assert len(divide(source)[1]) == 13
    make_folder(half, {'val': list(COUNTS)}, images=3)
    source = Source(dir=str(half), val_share_without_split=0.2)
    assert with_evaluation_images(source) == source
    held = Source(dir=str(half), val_share=0.1, val_share_without_split=0.2)
    assert with_evaluation_images(held).val_share == 0.1
    with pytest.raises(ValueError, match='which is not one'):
        with_evaluation_images(Source(dir=str(tmp_path / 'absent'), val_share_without_split=0.2))


@pytest.mark.parametrize('split', ['val', 'validation', 'valid', 'test', 'Testing'])
def test_a_share_that_is_held_apart_is_said_and_a_split_is_used(tmp_path, caplog, split):
    make_folder(tmp_path, {'train': ['a', 'b']}, images=5)
    source = Source(dir=str(tmp_path), val_share_without_split=0.2)
    assert len(evaluate(source)[1]) == 2
    assert f'{tmp_path} has none of the splits val, validation, valid, test, testing: 0.2 of' in caplog.text
    caplog.clear()
    make_folder(tmp_path, {split: ['a', 'b']}, images=3)
    assert len(evaluate(source)[1]) == 6
    assert not caplog.messages


@pytest.mark.parametrize('skips', [False, True])
@pytest.mark.parametrize('layout', ['folder', 'folder with splits', 'tar', 'share'])
def test_the_training_images_are_read_as_in_evaluation(tmp_path, layout, skips):
    folder = make_numbered(tmp_path / 'train' if 'split' in layout else tmp_path / 'all', COUNTS)
    place = {'tar': tmp_path / 'all.tar', 'folder with splits': tmp_path}.get(layout, folder)
    if layout == 'tar':
        make_tar(place, folder)
    if layout == 'folder with splits':
        make_folder(tmp_path, {'val': list(COUNTS)}, images=3)
    if skips and layout != 'tar':
        (folder / 'a' / '0.png').write_bytes(b'damaged')
    source = Source(
        dir=str(place),
        val_share=0.2 if layout == 'share' else None,
        val_share_without_split=0.2,
        on_corrupt_image='skip' if skips else 'raise',
    )
    loader, names = create_eval_loader(source, PLAIN, 4, num_workers=0, training=True)
    found = [round(255 * float(image.mean())) for images, _ in loader for image in images]
    wanted = divide(source)[0] if layout != 'folder with splits' else list(range(66))
    # Each once: another image does not take the place of one that is left out.
    damaged = {0} if skips and layout != 'tar' else set()
    assert found == [each for each in sorted({*wanted}) if each not in damaged]
    assert names == ['a', 'b', 'c', 'd']


def test_a_share_of_torchvisions_training_images_is_held_apart(tmp_path, monkeypatch):
    root = cifar10(tmp_path, monkeypatch)
    source = Source(name='torch/cifar10', dir=str(root), val_share=0.2)
    assert len(open_train_split(source).dataset) == 40
    assert sorted(evaluate(source)[1].tolist()) == list(range(10))


def test_a_corrupt_image_of_a_share_is_skipped_for_another_of_it(tmp_path, caplog):
    make_numbered(tmp_path, {'a': 10})
    source = Source(dir=str(tmp_path), val_share=0.5, on_corrupt_image='skip')
    trained, held, _ = divide(source)
    for value in (trained[0], held[0]):
        damage(tmp_path / 'a' / f'{value}.png', 'cut')
    assert divide(source)[:2] == (sorted([*trained[1:], trained[1]]), held[1:])
    assert f'a/{held[0]}.png' in caplog.text


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'val_share': 0.0}, r'val_share to be in \(0, 1\)'),
        ({'val_share': float('nan')}, r'val_share to be in \(0, 1\)'),
        ({'val_share': 0.1, 'eval_split': 'val'}, "got both, 'val' and 0.1"),
        ({'val_share': 0.1, 'val_seed': -1}, r'expected val_seed to be in \[0, 4294967296\)'),
        ({'val_share': 0.01}, r'that holds out at least one image, got 0\.01 of 4 images in 2 classes'),
        ({}, r'got only a, b$'),
    ],
)
def test_a_share_that_cannot_be_held_apart_is_rejected(tmp_path, options, message):
    make_folder(tmp_path, {'.': ['a', 'b']})
    with pytest.raises(ValueError, match=message):
        create_loaders(Source(dir=str(tmp_path), **options), (16, 16), 1, num_workers=0)


def damaged_link(folder: Path) -> Path:
    """A data set in whose first class a link leads back to the whole, with files that are no images."""
    make_folder(folder, CLASSES)
    (folder / 'train' / 'a' / 'up').symlink_to(folder, target_is_directory=True)
    (folder / 'train' / 'notes.txt').write_text('notes')
    for name in ('x.heic', 'y.heic', 'README'):
        (folder / 'train' / 'b' / name).write_text('no image')
    return folder


def test_a_link_back_to_a_parent_is_not_followed_and_what_is_ignored_is_said_once(tmp_path, caplog):
    loaders = create_loaders(damaged_link(tmp_path), (16, 16), 2, augment=Augmentation(repeats=1), num_workers=0)
    assert loaders.description == 'training: 6 images, 3 classes; validation: 6 images, 3 classes'
    assert caplog.text.count('5 files (1 without a suffix, 2 .heic, 1 .txt, 1 link to a folder above)') == 1
    assert caplog.text.count('ignored in') == 1


def test_a_link_in_place_of_a_class_folder_is_no_class_where_it_leads_back(tmp_path):
    make_folder(tmp_path, {'train': ['a']})
    (tmp_path / 'train' / 'loop').symlink_to('..', target_is_directory=True)
    make_folder(tmp_path / 'elsewhere', {'.': ['b']}, images=3)
    (tmp_path / 'train' / 'b').symlink_to(tmp_path / 'elsewhere' / 'b', target_is_directory=True)
    split = open_train_split(Source(dir=str(tmp_path)))
    assert (split.class_names, len(split.dataset)) == (['a', 'b'], 5)


@pytest.mark.parametrize('form', ['folder', 'tar'])
def test_what_macos_puts_next_to_images_is_no_image(tmp_path, caplog, form):
    folder = make_folder(tmp_path / 'images', CLASSES)
    for path in list(folder.rglob('*.png')):
        place = folder / '__MACOSX' / path.parent.relative_to(folder)
        place.mkdir(parents=True, exist_ok=True)
        for twin in (path.parent, place) if form == 'tar' else (path.parent,):
            (twin / f'._{path.name}').write_bytes(b'\0\5\x16\7')
    data = make_tar(tmp_path / 'all.tar', folder) if form == 'tar' else folder
    loaders = create_loaders(data, (16, 16), 2, augment=Augmentation(repeats=1), num_workers=0)
    assert loaders.description == 'training: 6 images, 3 classes; validation: 6 images, 3 classes'
    assert [len(targets) for _, targets in loaders.validation] == [2, 2, 2]
    assert caplog.text.count('6 files (6 hidden)') == 1


@pytest.mark.parametrize('form', ['folder', 'tar'])
def test_the_folder_that_macos_puts_next_to_class_folders_is_no_class(tmp_path, form):
    folder = make_folder(tmp_path / 'images', CLASSES)
    for path in list((folder / 'val').rglob('*.png')):
        place = folder / 'val' / '__MACOSX' / path.parent.name
        place.mkdir(parents=True, exist_ok=True)
        (place / f'._{path.name}').write_bytes(b'\0\5\x16\7')
    data = make_tar(tmp_path / 'all.tar', folder) if form == 'tar' else folder
    _, names = create_eval_loader(data, (16, 16), 2, num_workers=0)
    assert names == CLASSES['val']


@pytest.mark.parametrize('form', ['folder', 'tar', 'unsplit folder', 'unsplit tar'])
def test_a_hidden_folder_is_no_class_and_its_images_are_counted(tmp_path, caplog, form):
    folder = make_folder(tmp_path / 'images', {'train': ['a', 'b', '.ipynb_checkpoints'], 'val': ['a', 'b']}, images=4)
    shutil.copytree(folder / 'train' / 'b', folder / 'train' / 'a' / '.thumbnails')
    data = folder / 'train' if 'unsplit' in form else folder
    data = make_tar(tmp_path / 'all.tar', data, data.name) if 'tar' in form else data
    source = Source(dir=str(data), val_share=0.25)
    loaders = create_loaders(source, (16, 16), 2, augment=Augmentation(repeats=1), num_workers=0)
    assert loaders.class_names == ['a', 'b']
    assert loaders.description == 'training: 6 images, 2 classes; validation: 2 images, 2 classes'
    assert caplog.text.count('8 files (8 hidden)') == 1


def test_a_hidden_folder_that_torchvision_takes_for_a_class_is_refused(tmp_path):
    folder = make_folder(tmp_path, {'train': ['a', '.ipynb_checkpoints']})
    source = Source(name='torch/image_folder', dir=str(folder), train_split='train')
    with pytest.raises(ValueError, match=r'do not begin with a dot, got \.ipynb_checkpoints: .* data\.dir='):
        open_train_split(source)


def test_an_image_of_torchvision_that_cannot_be_decoded_is_an_error_or_skipped(tmp_path, caplog):
    folder = make_folder(tmp_path, {'train': ['a', 'b']})
    damage(folder / 'train' / 'a' / '0.png', 'cut')
    source = Source(name='torch/image_folder', dir=str(folder), eval_split='train')
    with pytest.raises(CorruptImageError, match=r'a/0\.png: .*; data\.on_corrupt_image=skip'):
        evaluate(source)
    assert evaluate(replace(source, on_corrupt_image='skip'))[1].tolist() == [0, 1, 1]
    assert 'skipped: expected an image that can be decoded, got ' in caplog.text
    # As torchvision's iNaturalist, which only opens the file.
    with pytest.raises(CorruptImageError, match='got image 0: '):
        TorchvisionDataset([(Image.open(folder / 'train' / 'a' / '0.png'), 0)])[0]


@pytest.mark.parametrize(
    ('counts', 'said'),
    [
        ({'a': 10, 'b': 49}, None),
        ({'a': 10, 'b': 50}, 'from 10 to 50 training images, the fewest: a (10), b (50); data.class_weights=balanced'),
        ({'a': 9, 'b': 9}, 'a class has 9 training images\n'),
        ({'a': 9, 'b': 12}, 'from 9 to 12 training images, the fewest: a (9), b (12)\n'),
        (
            {'f': 60, 'e': 5, 'd': 5, 'c': 4, 'b': 3, 'a': 20},
            'from 3 to 60 training images, the fewest: b (3), c (4), d (5), e (5), a (20); data.class_weights=balanced',
        ),
    ],
)
def test_small_classes_are_one_line_at_the_start(tmp_path, caplog, counts, said):
    make_numbered(tmp_path / 'train', counts)
    make_numbered(tmp_path / 'val', dict.fromkeys(counts, 1))
    create_loaders(tmp_path, (16, 16), 1, num_workers=0)
    assert caplog.text.count('a class has ') == (said is not None)
    assert said is None or said in caplog.text


def test_balanced_classes_are_drawn_equally_often(tmp_path, caplog):
    make_numbered(tmp_path, {'a': 20, 'b': 5})
    source = Source(dir=str(tmp_path), val_share=0.2)
    loaders = create_loaders(source, (16, 16), 10, augment=NO_AUGMENTATION, num_workers=0, balanced=True)
    assert [int(targets.sum()) for _, targets in loaders.train] == [5, 5]
    # What it advises is done.
    assert 'class_weights' not in caplog.text


def test_one_class_is_a_warning(tmp_path, caplog):
    make_folder(tmp_path, {'train': ['only'], 'val': ['only']})
    loaders = create_loaders(tmp_path, (16, 16), 1, augment=Augmentation(repeats=1), num_workers=0)
    assert loaders.description.endswith('validation: 2 images, 1 class')
    assert 'has one class, only, so' in caplog.text


def save_turned(path: Path, orientation: int) -> None:
    """A picture with a white left half, stored so that this orientation turns it upright."""
    upright = Image.new('RGB', (32, 32))
    upright.paste((255,) * 3, (0, 0, 16, 32))
    # The inverse of what a viewer does to it.
    stored = {6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270, 3: Image.Transpose.ROTATE_180}
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = upright.transpose(stored[orientation]) if orientation != 1 else upright
    image.save(path, quality=95, exif=exif)


@AS_TAR
@pytest.mark.parametrize('suffix', ['jpg', 'png', 'webp', 'tiff'])
def test_turned_photographs_are_trained_and_evaluated_upright(tmp_path, suffix, as_tar):
    root = tmp_path / 'images'
    for split in ('train', 'val'):
        (root / split / 'a').mkdir(parents=True)
        for orientation in (1, 3, 6, 8):
            save_turned(root / split / 'a' / f'{orientation}.{suffix}', orientation)
    root = make_tar(tmp_path / 'all.tar', root) if as_tar else root
    loaders = create_loaders(
        root, (32, 32), 4, evaluation=PLAIN._replace(size=(32, 32)), augment=NO_AUGMENTATION, num_workers=0
    )
    for loader in (loaders.train, loaders.validation):
        ((images, _),) = loader
        assert images.shape == (4, 3, 32, 32)
        assert images[..., :14].min() > 0.95
        assert images[..., 18:].max() < 0.05


KINDS = 'webp bmp gif tif tiff TIFF png jpg jpeg jfif ppm pgm pbm jp2 tga'.split() + ['avif'] * features.check('avif')


@pytest.mark.parametrize('suffix', KINDS)
def test_every_kind_of_image_is_read(tmp_path, suffix):
    mode = {'pgm': 'L', 'pbm': '1'}.get(suffix, 'RGB')
    # A bit is black or white, and only the mean of a dithered picture is grey.
    sides = (200, 200) if mode == '1' else (20, 20)
    for name, value in (('a', 0), ('b', 20)):
        (tmp_path / 'images' / 'val' / name).mkdir(parents=True)
        image = Image.new('RGB', sides, (value,) * 3).convert(mode)
        image.save(tmp_path / 'images' / 'val' / name / f'0.{suffix}')
    values, targets, _ = evaluate(Source(dir=str(tmp_path / 'images')))
    torch.testing.assert_close(values, targets.float(), rtol=0, atol=0.05)
