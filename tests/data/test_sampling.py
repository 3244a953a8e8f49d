import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from aft_vision.data import derive_seed, seed_generators
from aft_vision.data.sampling import Draw, EpochSampler, SeededDataset


class Randoms:
    """The index, and a number from each generator that timm's transforms use."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


def draw_epoch(epoch: int, seed: int = 0, repeats: int = 1, num_workers: int = 0) -> torch.Tensor:
    sampler = EpochSampler(12, seed, repeats)
    sampler.set_epoch(epoch)
    loader = DataLoader(SeededDataset(Randoms(), seed), batch_size=5, sampler=sampler, num_workers=num_workers)
    return torch.cat(list(loader))


def test_an_epoch_draws_every_image_once():
    assert sorted(draw.image for draw in EpochSampler(12, seed=0)) == list(range(12))


def test_repeats_draw_fewer_images_several_times_in_a_row():
    draws = list(EpochSampler(12, seed=0, repeats=3))
    assert Counter(draw.image for draw in draws) == dict.fromkeys({draw.image for draw in draws}, 3)
    assert [draw.repeat for draw in draws] == [0, 1, 2] * 4
    assert [draw.image for draw in draws[::3]] == [draw.image for draw in draws[2::3]]


def test_repeats_that_do_not_divide_the_images_keep_the_length_of_the_epoch():
    assert len(list(EpochSampler(10, seed=0, repeats=4))) == len(EpochSampler(10, seed=0, repeats=4)) == 10


@pytest.mark.parametrize('num_workers', [0, 1, 2])
def test_an_epoch_is_the_same_with_any_number_of_workers(num_workers: int):
    assert torch.equal(draw_epoch(2, num_workers=num_workers), draw_epoch(2))


def test_epochs_and_seeds_differ_in_order_and_in_what_is_random():
    first, second, other = draw_epoch(0), draw_epoch(1), draw_epoch(0, seed=1)
    for samples in (second, other):
        assert not torch.equal(samples[:, 0], first[:, 0])
        by_image = [x[x[:, 0].argsort()] for x in (samples, first)]
        assert not (by_image[0][:, 1:] == by_image[1][:, 1:]).any()


def test_repeats_of_an_image_differ():
    samples = draw_epoch(0, repeats=3).view(4, 3, 4)
    assert (samples[:, 0, 0] == samples[:, 1, 0]).all()
    assert not (samples[:, 0, 1:] == samples[:, 1, 1:]).any()


def test_reading_a_sample_leaves_the_generators_alone():
    seed_generators(5)
    expected = random.random(), np.random.rand(), torch.rand(())
    seed_generators(5)
    _ = SeededDataset(Randoms(), seed=0)[Draw(0, 3, 0)]
    assert (random.random(), np.random.rand(), torch.rand(())) == expected


def test_derived_seeds_depend_on_every_part_of_the_key():
    keys = [(1, 0), (1, 1), (2, 0), (1, 0, 1), (1, 1, 0), (1, 0, 1, 1)]
    seeds = [derive_seed(*key) for key in keys]
    assert len(set(seeds)) >= 5
    assert seeds == [derive_seed(*key) for key in keys]
    assert all(0 <= seed < 2**32 for seed in seeds)
