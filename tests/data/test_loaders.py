import importlib
from itertools import islice
from pathlib import Path

import pytest
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_dataset, create_loader

from aft_vision.data import (
    Augmentation,
    Loaders,
    Preprocessing,
    Shard,
    SizeSchedule,
    create_eval_loader,
    create_loaders,
    derive_seed,
)
from aft_vision.data.sampling import SAMPLE, seed_generators

CLOTHING = Path(__file__).parents[1] / 'assets' / 'clothing'


def test_embedded_splits_are_small_and_share_no_image():
    assert sum(path.stat().st_size for path in CLOTHING.rglob('*') if path.is_file()) <= 3_000_000
    train, validation = ({p.read_bytes() for p in (CLOTHING / s).rglob('*.jpg')} for s in ('train', 'validation'))
    assert len(train) == 600
    assert len(validation) == 200
    assert not train & validation


def test_loaders_give_normalised_batches_of_the_wanted_size():
    loaders = create_loaders(CLOTHING, (32, 48), 8, num_workers=0)
    images, targets = next(iter(loaders.train))
    assert images.shape == (8, 3, 32, 48)
    assert images.dtype == torch.float32
    assert targets.shape == (8,)
    assert loaders.class_names[0] == 'dress'
    assert len(loaders.train) == 600 // 8


def first_batch(seed: int = 0, epoch: int = 0, num_workers: int = 0) -> torch.Tensor:
    loaders = create_loaders(CLOTHING, (16, 16), 4, seed=seed, num_workers=num_workers)
    loaders.set_epoch(epoch)
    return next(iter(loaders.train))[0]


def test_training_images_follow_the_seed_and_the_epoch_whatever_the_workers():
    batch = first_batch()
    assert torch.equal(batch, first_batch(num_workers=2))
    assert not torch.equal(batch, first_batch(seed=1))
    assert not torch.equal(batch, first_batch(epoch=1))


def test_repeated_augmentation_shows_an_image_several_times_and_otherwise_each_time():
    loaders = create_loaders(CLOTHING, (16, 16), 6, augment=Augmentation(repeats=3), num_workers=0)
    images, targets = next(iter(loaders.train))
    assert targets[:3].unique().numel() == targets[3:].unique().numel() == 1
    assert not torch.equal(images[0], images[1])
    assert len(loaders.train) == 100


def test_processes_share_the_updates_and_the_validation_images():
    options = dict(augment=Augmentation(repeats=1), num_workers=0)
    whole = create_loaders(CLOTHING, (16, 16), 12, **options)
    shards = [create_loaders(CLOTHING, (16, 16), 12, shard=Shard(rank, 3, 2), **options) for rank in range(3)]
    assert {len(shard.train) for shard in shards} == {2 * len(whole.train)}
    images = next(iter(whole.train))[0]
    parts = [images for shard in shards for _, (images, _) in zip(range(2), shard.train, strict=False)]
    assert [len(part) for part in parts] == [2] * 6
    assert torch.equal(torch.stack(parts, 1).flatten(0, 1), images)
    validation = [torch.cat([targets for _, targets in shard.validation]) for shard in shards]
    assert [len(targets) for targets in validation] == [67, 67, 66]
    assert torch.equal(torch.cat(validation).sort().values, torch.arange(10).repeat_interleave(20))


def test_a_stream_cannot_begin_within_an_epoch():
    with pytest.raises(ValueError, match='begins at the start of its epoch, not at update 3'):
        Loaders([], [], []).set_epoch(0, first_update=3)


def test_evaluation_batches_are_those_of_timms_own_loader():
    loader, names = create_eval_loader(CLOTHING, Preprocessing((48, 32), 0.8), 64, num_workers=0)
    dataset = create_dataset('', root=str(CLOTHING), split='validation')
    options = dict(is_training=False, interpolation='bicubic', crop_pct=0.8, num_workers=0, device=torch.device('cpu'))
    peer = create_loader(dataset, (3, 48, 32), 64, **options)
    assert list(dataset.reader.class_to_idx) == names
    for (images, targets), (expected, wanted) in zip(loader, peer, strict=True):
        assert torch.equal(images, expected)
        assert torch.equal(targets, wanted)


def test_training_images_are_changed_as_by_timms_own_loader():
    augment = Augmentation(repeats=1)
    loaders = create_loaders(CLOTHING, (32, 32), 8, augment=augment, num_workers=0)
    dataset = create_dataset('', root=str(CLOTHING), split='train')
    options = dict(is_training=True, interpolation='bicubic', scale=(0.08, 1.0), color_jitter=0.3, num_workers=0)
    create_loader(dataset, (3, 32, 32), 8, auto_augment='rand-m9-mstd0.5-inc1', device=torch.device('cpu'), **options)
    images = [image for batch, _ in islice(loaders.train, 2) for image in batch]
    statistics = [torch.tensor(x).view(3, 1, 1) for x in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)]
    for draw, image in zip(loaders.train.sampler, images, strict=False):
        seed_generators(derive_seed(SAMPLE, 0, *draw[:3]))
        expected = torch.as_tensor(dataset[draw.image][0]) / 255
        torch.testing.assert_close(image, (expected - statistics[0]) / statistics[1], rtol=1e-4, atol=1e-4)


def test_updates_have_the_sizes_of_the_schedule_and_validation_its_own():
    sizes = SizeSchedule(((16, 16), (24, 32)))
    loaders = create_loaders(
        CLOTHING, sizes, 40, evaluation=Preprocessing((40, 40)), shard=Shard(accumulate=2), num_workers=0
    )
    shapes = [tuple(images.shape[2:]) for images, _ in loaders.train]
    assert len(shapes) == 2 * 15
    assert set(shapes) == {(16, 16), (24, 32)}
    assert shapes[::2] == shapes[1::2]
    assert next(iter(loaders.validation))[0].shape[2:] == (40, 40)


def test_loaders_have_their_earlier_name_too():
    earlier = importlib.import_module('aft_vision.data.imagenet')
    assert earlier.create_loaders is create_loaders
    assert earlier.create_eval_loader is create_eval_loader
