from typing import Any

import numpy as np
import pytest
import torch

from aft_vision.data import (
    IGNORED,
    EvalDataset,
    PixelAugmentation,
    PixelDataset,
    Shard,
    WindowDataset,
    sequence_eval_loader,
    sequence_train_loader,
    sliding_windows,
)

TEXT = (np.arange(1000) % 251).astype(np.uint8)
IMAGES = np.random.default_rng(0).integers(256, size=(12, 32, 32, 3), dtype=np.uint8)


def epoch(loader, number: int = 0, first_update: int = 0) -> list[torch.Tensor]:
    loader.sampler.set_epoch(number, first_update)
    return [tokens for tokens, targets in loader if torch.equal(tokens, targets)]


def test_windows_are_contiguous_and_everywhere_and_an_epoch_is_one_pass():
    loader = sequence_train_loader(WindowDataset(TEXT, 16, 0), 4)
    windows = torch.cat(epoch(loader))
    assert windows.shape == (60, 16)
    assert windows.dtype == torch.int64
    assert len(loader.dataset) == 1000 // 16
    starts = set()
    for number in range(40):
        starts |= {int(window[0]) for window in torch.cat(epoch(loader, number))}
        for window in torch.cat(epoch(loader, number)):
            assert torch.equal((window[0] + torch.arange(16)) % 251, window)
    assert len(starts) > 245


def test_windows_reach_both_ends_of_the_text():
    loader = sequence_train_loader(WindowDataset(TEXT[:20], 16, 0), 1)
    starts = {int(tokens[0, 0]) for number in range(60) for tokens in epoch(loader, number)}
    assert starts == {0, 1, 2, 3, 4}


@pytest.mark.parametrize('kind', ['char', 'pixel'])
def test_a_sample_depends_on_the_seed_and_its_place_in_the_run_alone(kind):
    def make(seed: int = 0, **options: Any) -> list[torch.Tensor]:
        if kind == 'char':
            loader = sequence_train_loader(WindowDataset(TEXT, 16, seed), 4, seed=seed, **options)
        else:
            loader = sequence_train_loader(PixelDataset(IMAGES, PixelAugmentation(), seed), 4, seed=seed, **options)
        return epoch(loader, 3)

    whole = make()
    assert all(torch.equal(a, b) for a, b in zip(whole, make(num_workers=1), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(whole, make(seed=1), strict=True))
    parts = make(shard=Shard(accumulate=2))
    shards = [make(shard=Shard(rank, 2)) for rank in (0, 1)]
    for update, batch in enumerate(whole):
        assert torch.equal(torch.cat(parts[2 * update : 2 * update + 2]), torch.cat([batch[0::2], batch[1::2]]))
        for rank in (0, 1):
            assert torch.equal(shards[rank][update], batch[rank::2])


def test_an_epoch_goes_on_at_any_update_and_the_next_is_another():
    loader = sequence_train_loader(WindowDataset(TEXT, 16, 0), 4)
    whole = epoch(loader, 2)
    assert all(torch.equal(a, b) for a, b in zip(whole[7:], epoch(loader, 2, first_update=7), strict=True))
    assert not torch.equal(whole[0], epoch(loader, 3)[0])


def test_training_images_are_augmented_and_those_of_the_evaluation_are_not():
    plain = IMAGES.reshape(len(IMAGES), -1)
    loader = sequence_train_loader(PixelDataset(IMAGES, PixelAugmentation(), 0), 4)
    assert not any((torch.cat(epoch(loader)).numpy() == row).all(1).any() for row in plain[:2])
    still = sequence_train_loader(PixelDataset(IMAGES, PixelAugmentation(hflip=0, shift=0), 0), 4)
    assert {row.tobytes() for row in torch.cat(epoch(still)).byte().numpy()} == {row.tobytes() for row in plain}
    tokens, targets = next(iter(sequence_eval_loader(EvalDataset(plain.reshape(-1), 3072), 12)))
    assert torch.equal(tokens, targets)
    np.testing.assert_array_equal(tokens.numpy(), plain)


@pytest.mark.parametrize('length', [5, 16, 17, 31, 32, 100, 101])
@pytest.mark.parametrize('stride', [1, 3, 8, 16, None])
def test_every_character_counts_once_behind_as_many_as_promised(length, stride):
    counted = np.zeros(length, int)
    for start, first in sliding_windows(length, 16, stride):
        window = range(start, min(start + 16, length))
        assert len(window) == min(16, length)
        counted[list(window)[first:]] += 1
        if start:
            assert first >= 16 - (stride or 16)
    assert (counted == 1).all()


def test_windows_go_on_by_the_stride():
    assert sliding_windows(40, 16, 8) == [(0, 0), (8, 8), (16, 8), (24, 8)]
    assert sliding_windows(40, 16) == [(0, 0), (16, 0), (24, 8)]


@pytest.mark.parametrize('stride', [0, 17])
def test_a_stride_out_of_range_is_rejected(stride):
    with pytest.raises(ValueError, match=rf'stride in \[1, 16\], .*, got {stride}'):
        sliding_windows(40, 16, stride)


def test_processes_share_the_windows_and_count_each_character_once():
    text, found = TEXT[:101], []
    for rank in range(3):
        for tokens, targets in sequence_eval_loader(EvalDataset(text, 16, 5), 2, shard=Shard(rank, 3)):
            assert torch.equal(targets[targets != IGNORED], tokens[targets != IGNORED])
            found += targets[targets != IGNORED].tolist()
    assert sorted(found) == sorted(text.tolist())


def test_processes_share_the_images_of_an_evaluation():
    images = EvalDataset(IMAGES[:7].reshape(-1), 3072)
    loaders = [sequence_eval_loader(images, 2, shard=Shard(rank, 3)) for rank in range(3)]
    found = torch.cat([tokens for loader in loaders for tokens, _ in loader])
    assert sorted(found.tolist()) == sorted(IMAGES[:7].reshape(7, -1).tolist())


def test_a_text_shorter_than_a_window_and_a_batch_larger_than_the_data_are_rejected():
    with pytest.raises(ValueError, match=r'at least 16 characters to train on, .*, got 15'):
        WindowDataset(TEXT[:15], 16, 0)
    with pytest.raises(ValueError, match=r'batch_size must be in \[1, 12\], .*, got 13'):
        sequence_train_loader(PixelDataset(IMAGES, PixelAugmentation(), 0), 13)
