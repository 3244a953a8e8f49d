"""Randomness of training as a function of seed, epoch, image and update, independent of processes and history."""

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from timm.data import ScheduledBatchSampler
from torch.utils.data import Dataset, Sampler, SequentialSampler, Subset, get_worker_info

from aft_vision.data.native import NativeShape

# Purposes of derived seeds, which separate the streams of one run.
ORDER, SAMPLE, STEP, SIZE, DIVISION, MIX, RECALL, CROP = 1, 2, 3, 4, 5, 6, 7, 8


def derive_seed(stream: int, *key: int) -> int:
    """Hash a stream and its key (integers in [0, 2**32)) to a seed in the same range."""
    # The length is hashed too, because numpy pads a short key with zeros.
    return int(np.random.SeedSequence((len(key), stream, *key)).generate_state(1)[0])


def seed_generators(seed: int) -> None:
    """Seed `random`, numpy and torch's CPU generator, which timm's transforms draw from, with a seed in [0, 2**32)."""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


class Draw(NamedTuple):
    """One sample of an epoch: indices of the image, of its occurrence among `repeats`, and of the image size."""

    epoch: int
    image: int
    repeat: int
    size: int = 0


@dataclass(frozen=True)
class SizeSchedule:
    """Image sizes that change from update to update, by timm's schedule.

    Attributes:
        sizes: (H, W) in pixels or native shapes, from the first to the last of a progressive schedule.
        kind: `constant` draws each size equally often; `progressive` goes from the first to the last.
        epochs: Epochs of the progressive schedule.
    """

    sizes: tuple[tuple[int, int] | NativeShape, ...]
    kind: Literal['constant', 'progressive'] = 'constant'
    epochs: int = 1

    def choices(self, seed: int, epoch: int, updates: int) -> list[int]:
        """Return the index of the size of each update of an epoch."""
        if len(self.sizes) == 1:
            return [0] * updates
        schedule = ScheduledBatchSampler(
            SequentialSampler(range(updates)),
            batch_sizes=[1] * len(self.sizes),
            seed=derive_seed(SIZE, seed),
            num_batches=updates,
            choice_schedule=self.kind,
            schedule_epochs=self.epochs,
        )
        schedule.set_epoch(epoch)
        return [choice for choice, _ in schedule.schedule]


@dataclass(frozen=True)
class Shard:
    """The shard of a process in the batch of every update and in the evaluation.

    A batch is dealt to the micro-batches in turn, so that the repeats of an image are in different ones. Together the
    micro-batches of all processes and accumulation steps are the batch, for any number of them.

    Attributes:
        rank, world_size: This process and the number of them.
        accumulate: Accumulation steps of an update, each with a micro-batch per process.
    """

    rank: int = 0
    world_size: int = 1
    accumulate: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size or self.accumulate < 1:
            raise ValueError(f'expected rank in [0, world_size) and accumulate of at least 1, got {self}')

    @property
    def micro_batches(self) -> int:
        """Return the number of micro-batches in a batch, over all processes."""
        return self.world_size * self.accumulate

    def micro_batch_size(self, batch_size: int) -> int:
        """Return the number of samples per micro-batch; raise a ValueError if they would differ in size."""
        if batch_size % self.micro_batches:
            raise ValueError(
                f'batch_size must be a multiple of {self.micro_batches}, which is accumulate * world_size, got '
                f'{batch_size}'
            )
        return batch_size // self.micro_batches

    def of_evaluation(self, dataset: Any) -> Any:
        """Return the samples of a data set that this process evaluates, unpadded: shards may differ by one sample."""
        return dataset if self.world_size == 1 else Subset(dataset, range(self.rank, len(dataset), self.world_size))


class EpochSampler(Sampler[Draw]):
    """A sampler for this process, in an order that depends only on the seed and the epoch.

    Args:
        size: Images of the data set. An epoch has size // batch_size batches.
        batch_size: Images per update, over all processes and accumulation steps.
        seed: At least 0.
        repeats: Consecutive occurrences of each drawn image; an epoch draws one image in `repeats`.
        shard: Shard of this process in each batch.
        sizes: Schedule of the image sizes; None for a single size.
        classes: (size,) class of each image, each of which an epoch draws equally often; None draws every image once.

    Raises:
        ValueError: the batch is larger than the data set, or the micro-batches would differ in size.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        seed: int,
        repeats: int = 1,
        shard: Shard | None = None,
        sizes: SizeSchedule | None = None,
        classes: np.ndarray | None = None,
    ) -> None:
        self.shard, self.classes = shard or Shard(), classes
        self.sizes = sizes
        if not 0 < batch_size <= size:
            raise ValueError(f'batch_size must be in [1, {size}], the number of training images, got {batch_size}')
        self.micro_batch_size = self.shard.micro_batch_size(batch_size)
        self.size, self.batch_size, self.seed, self.repeats = size, batch_size, seed, repeats
        self.epoch = self.first_update = 0
        self.size_choice: int | None = None

    @property
    def updates(self) -> int:
        """Return the number of updates of a whole epoch."""
        return self.size // self.batch_size

    def set_epoch(self, epoch: int, first_update: int = 0, size: int | None = None) -> None:
        """Set the epoch of the next pass, its first update (from 0), and its image size.

        Args:
            size: Index of the size of all updates, -1 for the last; None for the schedule.
        """
        self.epoch, self.first_update, self.size_choice = epoch, first_update, size

    def draws(self, update: int) -> list[Draw]:
        """Return the samples of this process in one update of the epoch, by micro-batch."""
        return self._draws(self._order(), self._choices(), update)

    def __iter__(self) -> Iterator[Draw]:
        order, choices = self._order(), self._choices()
        for update in range(self.first_update, self.updates):
            yield from self._draws(order, choices, update)

    def __len__(self) -> int:
        return (self.updates - self.first_update) * self.micro_batch_size * self.shard.accumulate

    def _order(self) -> np.ndarray:
        rng = np.random.default_rng((ORDER, self.seed, self.epoch))
        return rng.permutation(self.size) if self.classes is None else balanced_order(self.classes, rng)

    def _choices(self) -> list[int]:
        if self.sizes is None:
            return [0] * self.updates
        if self.size_choice is not None:
            return [range(len(self.sizes.sizes))[self.size_choice]] * self.updates
        return self.sizes.choices(self.seed, self.epoch, self.updates)

    def _draws(self, order: np.ndarray, choices: list[int], update: int) -> list[Draw]:
        start, shard = update * self.batch_size, self.shard
        return [
            Draw(self.epoch, int(order[position // self.repeats]), position % self.repeats, choices[update])
            for offset in range(shard.rank * shard.accumulate, (shard.rank + 1) * shard.accumulate)
            for position in range(start + offset, start + self.batch_size, shard.micro_batches)
        ]


def balanced_order(classes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return as many indices as there are images, with each class equally often, up to one.

    An image is drawn again only after all others of its class.
    """
    _, counts = np.unique(classes, return_counts=True)
    groups = np.split(np.argsort(classes, kind='stable'), np.cumsum(counts)[:-1])
    rounds = -(-len(classes) // len(groups))
    # A column for each class, and in each row every class once in random order.
    columns = [np.concatenate([rng.permutation(g) for _ in range(-(-rounds // len(g)))])[:rounds] for g in groups]
    return rng.permuted(np.stack(columns, axis=1), axis=1).ravel()[: len(classes)]


class SeededDataset(Dataset):
    """A data set indexed by Draw, whose random changes depend only on the seed and the Draw.

    Args:
        dataset: timm's ScheduledTransformDataset: indexed by image and size, with transforms that draw from `random`,
            numpy and torch.
        mix: Mixes a batch of images and targets, both lists, by these generators; None mixes nothing.
    """

    def __init__(self, dataset: Any, seed: int, mix: Callable[[list[Any], Any], Any] | None = None) -> None:
        self.dataset = dataset
        self.seed = seed
        self.mix = mix

    def __getitem__(self, draw: Draw) -> Any:
        return self.__getitems__([draw])[0]

    def __getitems__(self, draws: list[Draw]) -> list[Any]:
        # A DataLoader asks for a batch at a time.
        with restored_generators():
            samples = [self._get(draw) for draw in draws]
            return samples if self.mix is None else self._mixed(self.mix, samples, draws[0])

    def _get(self, draw: Draw) -> Any:
        seed_generators(derive_seed(SAMPLE, self.seed, draw.epoch, draw.image, draw.repeat))
        return self.dataset[draw.image, draw.size]

    def _mixed(self, mix: Callable[..., Any], samples: list[Any], first: Draw) -> list[Any]:
        # The first sample of a batch is in no other batch of its epoch.
        seed_generators(derive_seed(MIX, self.seed, first.epoch, first.image, first.repeat))
        images, targets = zip(*samples, strict=True)
        return list(zip(*mix(list(images), list(targets)), strict=True))

    def __len__(self) -> int:
        return len(self.dataset)


@contextlib.contextmanager
def restored_generators() -> Iterator[None]:
    """Restore the global generators, except in a loading process, where nothing else uses them."""
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
