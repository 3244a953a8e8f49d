"""timm's own results with Pillow are expected, bit by bit."""

import pickle
import random

import numpy as np
import pytest
import torch
from helpers import NO_AUGMENTATION, as_batch, photographs
from timm.data import auto_augment
from torch.utils.data import default_collate

from aft_vision.data import Augmentation, tensor_augment
from aft_vision.data.augment import automatic_steps
from aft_vision.data.sampling import seed_generators
from aft_vision.data.tensor_augment import ROW, TensorAugment

MEAN = (0.485, 0.456, 0.406)
# Neither square nor even.
SIZE = (40, 53)
POLICIES = [
    'rand-m9-mstd0.5-inc1',
    'rand-m10-n4-mstd101-p1',
    'rand-m30-mmax30-n3-p1-inc1',
    'rand-m9-mstd0.5-inc1-t3a',
    'rand-m9-mstd0.5-inc1-t3aw',
    'rand-m9-tweights',
    'v0',
    'v0r',
    'original-mstd0.5',
    'originalr',
    '3a',
    None,
]


def make(policy: str | None, **options: float) -> TensorAugment:
    return TensorAugment(Augmentation(auto_augment=policy, **options), SIZE, MEAN)


def draws(augment: TensorAugment, count: int) -> torch.Tensor:
    """(count, L, ROW), the draw of image i from seed i."""
    steps = []
    for seed in range(count):
        seed_generators(seed)
        steps.append(augment.draw())
    return default_collate(steps)


def batch(count: int) -> torch.Tensor:
    return as_batch(photographs(count, SIZE[::-1]))


def with_pillow(policy: str | None, count: int) -> torch.Tensor:
    """Photographs changed by timm itself, image i from seed i."""
    changes = automatic_steps(SIZE, Augmentation(auto_augment=policy), MEAN)
    images = photographs(count, SIZE[::-1])
    for seed in range(count):
        seed_generators(seed)
        for change in changes:
            images[seed] = change(images[seed])
    return as_batch(images)


def next_numbers() -> tuple[float, float, float, float]:
    return random.random(), random.gauss(0, 1), np.random.rand(), torch.rand(1).item()


@pytest.mark.parametrize('policy', POLICIES)
def test_a_policy_gives_the_images_of_timm(policy: str | None):
    augment = make(policy)
    changed = augment(batch(60), draws(augment, 60))
    assert torch.equal(changed, with_pillow(policy, 60))
    assert (changed != batch(60)).flatten(1).any(1).float().mean() > 0.5


@pytest.mark.parametrize('name', auto_augment.NAME_TO_OP)
@pytest.mark.parametrize('policy', ['rand-m0-n1-p1-inc1', 'rand-m5-n1-p1-mstd2-inc1', 'rand-m10-n1-p1-inc1'])
def test_each_operation_gives_the_images_of_timm(monkeypatch: pytest.MonkeyPatch, name: str, policy: str):
    monkeypatch.setattr(auto_augment, '_RAND_INCREASING_TRANSFORMS', [name])
    augment = make(policy)
    assert torch.equal(augment(batch(10), draws(augment, 10)), with_pillow(policy, 10))


@pytest.mark.parametrize('policy', POLICIES)
def test_as_many_random_numbers_are_drawn_as_by_timm(policy: str | None):
    draws(make(policy), 5)
    after = next_numbers()
    with_pillow(policy, 5)
    assert next_numbers() == after


@pytest.mark.parametrize(
    ('policy', 'length'), [('rand-m9', 2), ('rand-m9-n5', 5), ('v0', 2), ('3a', 4), ('rand-m9-t3a', 5), (None, 3)]
)
def test_draws_of_a_policy_have_one_shape(policy: str | None, length: int):
    assert draws(make(policy), 30).shape == (30, length, ROW)


def test_what_is_drawn_follows_the_seed():
    first, again = (draws(make('rand-m9-mstd0.5-inc1'), 4) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first[0], first[1])


def test_loading_processes_can_have_a_copy():
    augment = make('3a')
    assert torch.equal(draws(pickle.loads(pickle.dumps(augment)), 9), draws(augment, 9))


def test_images_without_a_step_stay_as_they_are():
    augment = make('rand-m9-mstd0.5-inc1')
    steps, images = draws(augment, 40), batch(40)
    unchanged = (steps[:, :, 0] == 0).all(1)
    assert unchanged.any()
    assert torch.equal(augment(images, steps)[unchanged], images[unchanged])


def test_the_given_batch_is_not_written_to():
    augment, images = make('rand-m9-p1'), batch(8)
    augment(images, draws(augment, 8))
    assert torch.equal(images, batch(8))


def test_no_augmentation_has_no_steps():
    augment = TensorAugment(NO_AUGMENTATION, SIZE, MEAN)
    assert torch.equal(augment(batch(3), draws(augment, 3)), batch(3))


@pytest.mark.parametrize('policy', ['rand-m9-mstd0.5-inc1', '3a'])
def test_a_batch_is_its_images_one_at_a_time(policy: str):
    augment = make(policy)
    steps, images = draws(augment, 40), batch(40)
    alone = [augment(images[i : i + 1], steps[i : i + 1]) for i in range(40)]
    assert torch.equal(augment(images, steps), torch.cat(alone))


def test_groups_of_any_size_give_the_same_images(monkeypatch: pytest.MonkeyPatch):
    augment = make('3a')
    steps, images = draws(augment, 40), batch(40)
    expected = augment(images, steps)
    monkeypatch.setattr(tensor_augment, 'CHUNK', 3)
    assert torch.equal(augment(images, steps), expected)


def test_batches_with_the_channels_last_in_memory_give_the_same_images():
    augment, images = make('rand-m9-p1-n4'), batch(40)
    steps = draws(augment, 40)
    assert torch.equal(augment(images.to(memory_format=torch.channels_last), steps), augment(images, steps))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('policy', ['rand-m9-n4-mstd0.5-p1', 'original', '3a'])
def test_images_on_a_gpu_are_the_same(policy: str):
    augment, images = make(policy), batch(100)
    steps = draws(augment, 100)
    assert torch.equal(augment(images.cuda(), steps).cpu(), augment(images, steps))


@pytest.mark.parametrize(
    'images',
    [torch.rand(2, 3, *SIZE), torch.zeros(2, 1, *SIZE, dtype=torch.uint8), torch.zeros(3, *SIZE, dtype=torch.uint8)],
    ids=['float', 'grey', 'single'],
)
def test_other_images_are_rejected(images: torch.Tensor):
    augment = make('v0')
    with pytest.raises(ValueError, match=r'uint8 of shape \(B, 3, 40, 53\), got'):
        augment(images, draws(augment, len(images)))


def test_images_of_another_size_are_rejected():
    augment = make('v0')
    with pytest.raises(ValueError, match=r'\(B, 3, 40, 53\), got torch.uint8 of shape \(2, 3, 53, 40\)'):
        augment(batch(2).mT, draws(augment, 2))


def test_steps_of_another_policy_are_rejected():
    with pytest.raises(ValueError, match=r'steps must have shape \(2, 2, 10\) .* got \(2, 4, 10\)'):
        make('v0')(batch(2), draws(make('3a'), 2))


def test_augmix_is_rejected():
    with pytest.raises(ValueError, match=r"augment.auto_augment must be RandAugment, .* got 'augmix-m5-w4-d2'"):
        make('augmix-m5-w4-d2')
