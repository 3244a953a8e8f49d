"""Images that keep their own shapes, as the dicts of timm's NaFlex loader."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from helpers import CLOTHING, assert_close, make_folder
from PIL import Image
from torch import Tensor

import aft_vision  # noqa: F401
from aft_vision.data import (
    Augmentation,
    Loaders,
    NativeShape,
    PatchAugmentation,
    Preprocessing,
    Shard,
    SizeSchedule,
    Source,
    create_eval_loader,
    create_loaders,
    move,
)
from aft_vision.evaluate import evaluate

SHAPE = NativeShape(24, (8, 8))
MIXED = Augmentation(repeats=1, mix_prob=1.0, mixup=0.8, cutmix=1.0)
PLAIN = Augmentation(scale=(1, 1), hflip=0, color_jitter=0, auto_augment=None, random_erasing=0, repeats=1, mix_prob=0)


def load(shard: Shard | None = None, augment: Augmentation = MIXED, batch: int = 12, workers: int = 0) -> Loaders:
    return create_loaders(CLOTHING, SHAPE, batch, augment=augment, shard=shard, seed=3, num_workers=workers)


def parts_of(loaders: Loaders, count: int) -> list[dict[str, Tensor]]:
    found = []
    for _, (batch, targets) in zip(range(count), loaders.train, strict=False):
        found.append({**{key: x for key, x in batch.items() if key != 'seq_len'}, 'targets': targets})
    return found


def assert_same(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    assert len(found) == len(expected)
    for batch, other in zip(found, expected, strict=True):
        assert all(torch.equal(batch[key], other[key]) for key in other)


def write_images(folder: Path, *sizes: tuple[int, int]) -> Path:
    """An evaluation split of one class of these (width, height)."""
    (folder / 'val' / 'a').mkdir(parents=True)
    for index, size in enumerate(sizes):
        Image.linear_gradient('L').resize(size).save(folder / 'val' / 'a' / f'{index}.png')
    return folder


def grids(batch: dict[str, Any]) -> list[Tensor]:
    """(rows, columns) of each image."""
    return [coord[valid].amax(0) + 1 for coord, valid in zip(batch['patch_coord'], batch['patch_valid'], strict=True)]


def test_each_image_keeps_its_shape_and_is_as_large_as_its_tokens_allow(tmp_path):
    write_images(tmp_path, (40, 60), (64, 8), (500, 500), (9, 300), (8, 8))
    loader, _ = create_eval_loader(tmp_path, Preprocessing(SHAPE), 8, num_workers=0)
    ((batch, targets),) = loader
    assert [grid.tolist() for grid in grids(batch)] == [[6, 4], [2, 12], [4, 4], [24, 1], [4, 4]]
    assert [int(valid.sum()) for valid in batch['patch_valid']] == [24, 24, 16, 24, 16]
    assert batch['patches'].shape == (5, 24, 8 * 8 * 3)
    assert targets.tolist() == [0] * 5
    assert SHAPE.square == (32, 32)


def test_pixels_are_resized_and_normalised(tmp_path):
    write_images(tmp_path, (40, 60))
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    loader, _ = create_eval_loader(tmp_path, Preprocessing(SHAPE, mean=mean, std=std), 1, num_workers=0)
    ((batch, _),) = loader
    image = Image.open(tmp_path / 'val' / 'a' / '0.png').convert('RGB').resize((32, 48), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(image)) / 255
    expected = (pixels - torch.tensor(mean)) / torch.tensor(std)
    expected = expected.view(6, 8, 4, 8, 3).transpose(1, 2).reshape(24, -1)
    torch.testing.assert_close(batch['patches'][0], expected)


def test_training_images_keep_their_shape_up_to_the_ratio_of_the_crop(tmp_path):
    for split in ('train', 'val'):
        for name, size in (('portrait', (40, 60)), ('wide', (120, 30))):
            (tmp_path / split / name).mkdir(parents=True)
            for index in range(4):
                Image.linear_gradient('L').resize(size).save(tmp_path / split / name / f'{index}.png')
    loaders = create_loaders(tmp_path, SHAPE, 8, augment=Augmentation(repeats=1, mix_prob=0), num_workers=0)
    ((batch, targets),) = loaders.train
    rows, columns = torch.stack(grids(batch)).unbind(1)
    assert ((rows * columns <= 24) & (rows * columns >= 12)).all()
    # The ratio of a crop is up to 4 / 3 times that of the image, and a patch may be added to either side.
    assert (rows / columns)[targets == 0].min() > 3 / 5
    assert (columns / rows)[targets == 1].min() >= 2


@pytest.mark.parametrize('name', ['aft_conv_tiny', 'aft_full_tiny'])
def test_an_image_of_a_loaded_batch_equals_the_image_alone(tmp_path, name):
    write_images(tmp_path, (40, 60), (64, 8), (50, 50))
    own = dict(num_heads=4, kernel_size=5) if name == 'aft_conv_tiny' else dict(dynamic_img_size=True, bias_dim=8)
    torch.manual_seed(0)
    model = timm.create_model(name, patch_size=8, img_size=32, embed_dim=16, depth=2, num_classes=5, **own).eval()
    together, alone = (
        [batch for batch, _ in create_eval_loader(tmp_path, Preprocessing(SHAPE), size, num_workers=0)[0]]
        for size in (3, 1)
    )
    with torch.inference_mode():
        assert_close(model(together[0]), torch.cat([model(batch) for batch in alone]), 1e-6)


@pytest.mark.parametrize('augment', [MIXED, PLAIN])
def test_ranks_have_disjoint_shares_that_are_the_parts_of_one_process(augment):
    whole = parts_of(load(Shard(accumulate=2), augment), 4)
    ranks = [parts_of(load(Shard(rank, 2), augment), 2) for rank in range(2)]
    assert_same([part for update in zip(*ranks, strict=True) for part in update], whole)
    draws = [set(load(Shard(rank, 2), augment).train.sampler.draws(0)) for rank in range(2)]
    assert not draws[0] & draws[1]
    assert len(draws[0] | draws[1]) == 12


def test_a_pass_may_begin_within_the_epoch_with_any_number_of_workers():
    loaders = load()
    loaders.set_epoch(1)
    whole = parts_of(loaders, 4)
    again = load(workers=1)
    again.set_epoch(1, first_update=2)
    assert_same(parts_of(again, 2), whole[2:])
    loaders.set_epoch(2)
    assert not torch.equal(parts_of(loaders, 1)[0]['patches'], whole[0]['patches'])


def test_mixed_images_have_the_targets_of_their_pixels():
    (part,) = parts_of(load(augment=Augmentation(repeats=1, mixup=0, cutmix=1.0)), 1)
    plain = parts_of(load(augment=Augmentation(repeats=1, mix_prob=0)), 1)[0]
    assert torch.equal(part['patch_valid'], plain['patch_valid'])
    torch.testing.assert_close(part['targets'].sum(1), torch.ones(12))
    kept = part['targets'].gather(1, plain['targets'][:, None]).squeeze(1)
    mixed = kept < 1
    assert mixed.any()
    changed = (part['patches'] != plain['patches']).view(12, -1, 3).any(-1).sum(1) / (64 * part['patch_valid'].sum(1))
    # Few of the pasted pixels are equal by chance.
    assert (changed <= 1 - kept + 1e-6)[mixed].all()
    assert changed[mixed].sum() > 0.9 * (1 - kept)[mixed].sum()


def test_schedules_of_native_shapes_share_a_length():
    shapes = SizeSchedule((NativeShape(12, (8, 8)), NativeShape(24, (8, 8))))
    loaders = create_loaders(CLOTHING, shapes, 12, augment=PLAIN, num_workers=0)
    counts = []
    for size in range(2):
        loaders.set_epoch(0, size=size)
        batch, _ = next(iter(loaders.train))
        assert batch['patches'].shape[1] == 24
        counts.append(int(batch['patch_valid'].sum(1).max()))
    assert counts[0] <= 12 < counts[1] <= 24


def test_erasing_fills_whole_patches_of_images_alone():
    batch, _ = NativeShape(6, (2, 2)).collate([(torch.zeros(3, 4, 4), 0), (torch.zeros(3, 4, 6), 1)])
    augment = PatchAugmentation(Augmentation(random_erasing=1.0, mix_prob=0), 5, 0.1)
    torch.manual_seed(0)
    erased, targets = augment(batch, torch.tensor([0, 1]))
    changed = erased['patches'] != 0
    assert torch.equal(changed.any(-1), changed.all(-1))
    assert changed.any(-1).sum(1).tolist() != [0, 0]
    assert not changed[~batch['patch_valid']].any()
    assert targets.tolist() == [0, 1]


def test_targets_of_mixed_batches_are_smoothed():
    augment = PatchAugmentation(Augmentation(random_erasing=0), 4, 0.2)
    batch = SHAPE.blank(2)
    _, mixed = augment(batch, torch.tensor([[0.25, 0.75, 0, 0], [0, 0, 0, 1.0]]))
    torch.testing.assert_close(mixed, torch.tensor([[0.25, 0.65, 0.05, 0.05], [0.05, 0.05, 0.05, 0.85]]))
    _, alone = augment(batch, torch.tensor([3, 0]))
    torch.testing.assert_close(alone, torch.tensor([[0.05, 0.05, 0.05, 0.85], [0.85, 0.05, 0.05, 0.05]]))


def test_a_batch_of_skipped_images_counts_for_nothing(tmp_path):
    folder = write_images(tmp_path, (40, 60), (64, 8), (50, 50))
    for index in (0, 1):
        (folder / 'val' / 'a' / f'{index}.png').write_bytes(b'')
    source = Source(dir=str(folder), on_corrupt_image='skip')
    loader, _ = create_eval_loader(source, Preprocessing(SHAPE), 2, num_workers=0)
    model = timm.create_model(
        'aft_conv_tiny', patch_size=8, embed_dim=16, depth=1, num_heads=4, kernel_size=3, num_classes=1
    )
    assert evaluate(model, loader)['samples'] == 1


def test_moving_keeps_what_is_no_tensor_and_copies_on_request():
    batch = SHAPE.blank(2)
    moved = move(batch, 'cpu', copy=True)
    moved['patches'] += 1
    assert not batch['patches'].any()
    assert moved['seq_len'] == batch['seq_len'] == 24
    assert move(torch.ones(2), 'meta').is_meta


def test_a_stream_cannot_be_mixed(tmp_path, monkeypatch):
    folder = make_folder(tmp_path, {'train': ['a', 'b'], 'val': ['a', 'b']})
    monkeypatch.setattr('aft_vision.data.datasets.Split.is_stream', property(lambda split: True))
    with pytest.raises(ValueError, match=r'augment\.mix_prob to be 0 .* got 1\.0'):
        create_loaders(folder, SHAPE, 2, augment=Augmentation(repeats=1), num_workers=0)
