import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from aft_vision.data import derive_seed
from aft_vision.data.sampling import Draw, EpochSampler, SeededDataset, Shard, SizeSchedule, seed_generators


class Randoms:
    """The image, and a number from each generator that timm's transforms use."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: tuple[int, int]) -> torch.Tensor:
        return torch.tensor([index[0], random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


def draw_epoch(epoch: int, seed: int = 0) -> torch.Tensor:
    sampler = EpochSampler(12, 4, seed)
    sampler.set_epoch(epoch)
    loader = DataLoader(SeededDataset(Randoms(), seed), batch_size=5, sampler=sampler)
    return torch.cat(list(loader))


def test_an_epoch_draws_every_image_once():
    assert sorted(draw.image for draw in EpochSampler(12, 4, seed=0)) == list(range(12))


@pytest.mark.parametrize('counts', [(20, 8, 2), (5, 5, 5), (40, 1), (3, 0, 9)])
def test_balanced_epochs_draw_each_class_equally_often_and_no_image_before_all_others_of_it(counts):
    classes = np.repeat(np.arange(len(counts)), counts)[np.random.default_rng(0).permutation(sum(counts))]
    sampler = EpochSampler(len(classes), 1, seed=0, classes=classes)
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        orders.append([draw.image for draw in sampler])
        of_class = Counter(classes[orders[-1]].tolist())
        assert max(of_class.values()) - min(of_class.values()) <= 1
        assert of_class.keys() == {place for place, count in enumerate(counts) if count}
        of_image = Counter(orders[-1])
        for place, count in of_class.items():
            drawn = [of_image[index] for index in np.flatnonzero(classes == place).tolist()]
            assert max(drawn) - min(drawn) <= 1
            assert sum(drawn) == count
    assert orders[0] != orders[1]
    sampler.set_epoch(0)
    assert orders[0] == [draw.image for draw in sampler]


def test_the_parts_of_balanced_processes_make_the_batch_of_one():
    classes = np.repeat([0, 1], [40, 10])
    whole = EpochSampler(50, 12, seed=3, classes=classes)
    shards = [EpochSampler(50, 12, 3, 1, Shard(rank, 2), classes=classes) for rank in range(2)]
    for update in range(4):
        draws = [draw for shard in shards for draw in shard.draws(update)]
        assert sorted(draws) == sorted(whole.draws(update))
        assert sum(classes[draw.image] for draw in draws) == 6


def test_repeats_draw_fewer_images_several_times_in_a_row():
    draws = list(EpochSampler(12, 4, seed=0, repeats=3))
    assert Counter(draw.image for draw in draws) == dict.fromkeys({draw.image for draw in draws}, 3)
    assert [draw.repeat for draw in draws] == [0, 1, 2] * 4
    assert [draw.image for draw in draws[::3]] == [draw.image for draw in draws[2::3]]


def test_an_epoch_has_whole_batches_alone():
    sampler = EpochSampler(11, 4, seed=0)
    assert (sampler.updates, len(sampler), len(list(sampler))) == (2, 8, 8)


@pytest.mark.parametrize('repeats', [1, 3])
@pytest.mark.parametrize(('processes', 'accumulate'), [(1, 1), (2, 1), (2, 2), (1, 4), (4, 3)])
def test_the_parts_of_all_processes_make_the_batch_of_one(processes: int, accumulate: int, repeats: int):
    whole = EpochSampler(50, 12, seed=3, repeats=repeats)
    shards = [EpochSampler(50, 12, 3, repeats, Shard(rank, processes, accumulate)) for rank in range(processes)]
    for update in range(4):
        draws = [draw for shard in shards for draw in shard.draws(update)]
        assert sorted(draws) == sorted(whole.draws(update))
    assert {len(shard) for shard in shards} == {48 // processes}


def test_repeats_of_an_image_come_into_different_parts():
    first, second, third = (EpochSampler(12, 12, 0, 3, Shard(part, 3)).draws(0) for part in range(3))
    assert [draw.image for draw in first] == [draw.image for draw in second] == [draw.image for draw in third]
    assert {draw.repeat for draw in second} == {1}


def test_a_pass_may_begin_within_the_epoch():
    sampler = EpochSampler(50, 12, seed=3)
    whole = list(sampler)
    sampler.set_epoch(0, first_update=3)
    assert list(sampler) == whole[36:]
    assert len(sampler) == 12
    sampler.set_epoch(1)
    assert len(list(sampler)) == 48


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(batch_size=13), r'in \[1, 12\], .* got 13'),
        (dict(batch_size=0), r'in \[1, 12\], .* got 0'),
        (dict(batch_size=4, shard=Shard(0, 3)), 'a multiple of 3, which is .*, got 4'),
    ],
)
def test_a_batch_that_cannot_be_drawn_is_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        EpochSampler(12, seed=0, **options)


@pytest.mark.parametrize('numbers', [(2, 2, 1), (-1, 2, 1), (0, 1, 0)])
def test_a_share_that_no_process_has_is_rejected(numbers):
    with pytest.raises(ValueError, match='accumulate of at least 1, got Shard'):
        Shard(*numbers)


def test_epochs_and_seeds_differ_in_order_and_in_what_is_random():
    first, second, other = draw_epoch(0), draw_epoch(1), draw_epoch(0, seed=1)
    for samples in (second, other):
        assert not torch.equal(samples[:, 0], first[:, 0])
        by_image = [x[x[:, 0].argsort()] for x in (samples, first)]
        assert not (by_image[0][:, 1:] == by_image[1][:, 1:]).any()


def test_all_images_of_an_update_have_one_size_whoever_draws_them():
    sizes = SizeSchedule(((16, 16), (24, 24), (32, 32)))
    whole = EpochSampler(60, 6, seed=3, sizes=sizes)
    per_update = [{draw.size for draw in whole.draws(update)} for update in range(10)]
    assert {len(found) for found in per_update} == {1}
    assert set.union(*per_update) == {0, 1, 2}
    for part in range(3):
        shard = EpochSampler(60, 6, 3, shard=Shard(part, 3), sizes=sizes)
        assert [{draw.size for draw in shard.draws(update)} for update in range(10)] == per_update
    whole.set_epoch(0, first_update=7)
    assert [draw.size for draw in whole][::6] == [found.pop() for found in per_update[7:]]


def test_a_progressive_schedule_goes_from_the_first_size_to_the_last():
    sizes = SizeSchedule(((16, 16), (24, 24), (32, 32)), kind='progressive', epochs=5)
    means = [np.mean(sizes.choices(seed=0, epoch=epoch, updates=400)) for epoch in range(5)]
    assert means == sorted(means)
    assert means[0] < 0.5
    assert means[-1] > 1.5


def test_the_sizes_depend_on_seed_and_epoch_alone():
    sizes = SizeSchedule(((16, 16), (32, 32)))
    found = {(seed, epoch): tuple(sizes.choices(seed, epoch, 50)) for seed in range(3) for epoch in range(3)}
    assert len(set(found.values())) == 9
    assert found == {key: tuple(sizes.choices(*key, 50)) for key in found}


def test_reading_a_sample_leaves_the_generators_alone():
    seed_generators(5)
    expected = random.random(), np.random.rand(), torch.rand(())
    seed_generators(5)
    _ = SeededDataset(Randoms(), seed=0)[Draw(0, 3, 0)]
    assert (random.random(), np.random.rand(), torch.rand(())) == expected


def test_derived_seeds_depend_on_every_part_of_the_key():
    keys = [(1, 0), (1, 1), (2, 0), (1, 0, 1), (1, 1, 0), (1, 0, 1, 1)]
    seeds = [derive_seed(*key) for key in keys]
    assert len(set(seeds)) == 6
    assert seeds == [derive_seed(*key) for key in keys]
    assert all(0 <= seed < 2**32 for seed in seeds)
