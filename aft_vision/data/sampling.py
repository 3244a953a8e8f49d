"""Randomness of training data as a function of (seed, epoch, image), independent of loaders, processes and history."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler, get_worker_info

# What a derived seed is for; keeps the streams of one run apart.
ORDER, SAMPLE, STEP = 1, 2, 3


def derive_seed(stream: int, *key: int) -> int:
    """Hash a stream and its key (integers of at least 0) to a seed in [0, 2**32)."""
    return int(np.random.SeedSequence((stream, *key)).generate_state(1)[0])


def seed_generators(seed: int, devices: bool = True) -> None:
    """Seed `random`, numpy and torch, on every device or on the CPU alone, with a seed in [0, 2**32)."""
    random.seed(seed)
    np.random.seed(seed)
    if devices:
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


class Draw(NamedTuple):
    """One sample of an epoch: which image, and which of its `repeats` occurrences."""

    epoch: int
    image: int
    repeat: int


class EpochSampler(Sampler[Draw]):
    """Draws `size` samples an epoch in an order that depends on the seed and the epoch alone.

    Args:
        size: Images of the data set, and samples of an epoch.
        repeats: Occurrences in a row of each image that is drawn; an epoch draws one image in `repeats`.
    """

    def __init__(self, size: int, seed: int, repeats: int = 1) -> None:
        self.size = size
        self.seed = seed
        self.repeats = repeats
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Draw]:
        order = np.random.default_rng((ORDER, self.seed, self.epoch)).permutation(self.size)
        for position in range(self.size):
            yield Draw(self.epoch, int(order[position // self.repeats]), position % self.repeats)

    def __len__(self) -> int:
        return self.size


class SeededDataset(Dataset):
    """A data set indexed by Draw, whose random changes depend on the seed and the Draw alone.

    Args:
        dataset: Map-style data set whose transform draws from `random`, numpy and torch.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __getitem__(self, draw: Draw) -> Any:
        with _restored_generators():
            seed_generators(derive_seed(SAMPLE, self.seed, *draw), devices=False)
            return self.dataset[draw.image]

    def __len__(self) -> int:
        return len(self.dataset)


@contextlib.contextmanager
def _restored_generators() -> Iterator[None]:
    """Put the global generators back; in a loading process nothing else uses them, so there it is left out."""
    if get_worker_info() is not None:
        yield
        return
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
