"""Loaders of sequences of sub-pixels, characters and associative recall; random in training, exact in evaluation."""

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from aft_vision.data.loaders import survive_signals
from aft_vision.data.pixels import PixelAugmentation
from aft_vision.data.recall import FILLER, RecallTask
from aft_vision.data.sampling import SAMPLE, Draw, EpochSampler, Shard, derive_seed

# The target of a token that does not count, as in torch's cross-entropy.
IGNORED = -100


class PixelDataset(Dataset):
    """Augmented images as tokens (3072,) uint8, indexed by Draw; randomness depends only on the seed and the Draw.

    Args:
        images: (N, 32, 32, 3) uint8.
    """

    def __init__(self, images: np.ndarray, augment: PixelAugmentation, seed: int) -> None:
        self.images, self.augment, self.seed = images, augment, seed

    def __getitem__(self, draw: Draw) -> np.ndarray:
        # Raster order, red, green and blue within a pixel.
        return self.augment(self.images[draw.image], _generator(self.seed, draw)).reshape(-1)

    def __len__(self) -> int:
        return len(self.images)


class WindowDataset(Dataset):
    """Windows of a text at random positions, indexed by Draw; the position depends only on the seed and the Draw.

    It has as many windows as fit into the text without overlap, so that an epoch is one pass over the text.

    Args:
        text: (n,) uint8.
        context: Characters in a window.

    Raises:
        ValueError: the text is shorter than a window.
    """

    def __init__(self, text: np.ndarray, context: int, seed: int) -> None:
        if len(text) < context:
            raise ValueError(f'expected at least {context} characters to train on, a whole window, got {len(text)}')
        self.text, self.context, self.seed = text, context, seed

    def __getitem__(self, draw: Draw) -> np.ndarray:
        start = _generator(self.seed, draw).integers(len(self.text) - self.context, endpoint=True)
        return self.text[start : start + self.context]

    def __len__(self) -> int:
        return len(self.text) // self.context


class EvalDataset(Dataset):
    """Windows of a text for evaluation, placed by `sliding_windows`, each with its first token that counts.

    Args:
        text: (n,) uint8.
        context: Tokens in a window.
        stride: As in `sliding_windows`.
    """

    def __init__(self, text: np.ndarray, context: int, stride: int | None = None) -> None:
        self.text, self.windows, self.context = text, sliding_windows(len(text), context, stride), context

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        start, first = self.windows[index]
        return self.text[start : start + self.context], first

    def __len__(self) -> int:
        return len(self.windows)


class RecallDataset(Dataset):
    """Examples of associative recall as tokens and targets (T,) int64; only answers have targets other than -100.

    The first example of an epoch generates all of them: each loading process does so for itself.

    Args:
        split: `train`, indexed by Draw, of which every epoch has examples of its own; `valid` or `test`, indexed by
            number.
        size: Examples, in training of an epoch.
    """

    def __init__(self, task: RecallTask, split: str, size: int, seed: int = 0) -> None:
        self.task, self.split, self.size, self.seed = task, split, size, seed
        self.epoch: int | None = None

    def __getitem__(self, index: int | Draw) -> tuple[np.ndarray, np.ndarray]:
        epoch, number = (index.epoch, index.image) if isinstance(index, Draw) else (0, index)
        if epoch != self.epoch:
            self.tokens, answers = self.task.examples(self.split, self.size, self.seed, epoch)
            self.targets, self.epoch = np.where(answers == FILLER, IGNORED, answers), epoch
        return self.tokens[number], self.targets[number]

    def __len__(self) -> int:
        return self.size


def sliding_windows(length: int, context: int, stride: int | None = None) -> list[tuple[int, int]]:
    """Place windows over a text so that every character counts once, after at least `context - stride` others.

    The characters of the first window have fewer before them, because the text starts there.

    Args:
        length: Length of the text.
        context: Characters in a window; a shorter text has one window of its own length.
        stride: Distance between windows, in [1, context]; None for `context`.

    Returns:
        For each window its start in the text and its first character that counts.

    Raises:
        ValueError: the stride is out of range.
    """
    stride = context if stride is None else stride
    if not 1 <= stride <= context:
        raise ValueError(f'expected a stride in [1, {context}], {context} being the context, got {stride}')
    windows, done = [(0, 0)], min(context, length)
    while done < length:
        # The last window ends with the text, so that all windows have the same length.
        end = min(done + stride, length)
        windows.append((end - context, done - (end - context)))
        done = end
    return windows


def _generator(seed: int, draw: Draw) -> np.random.Generator:
    return np.random.default_rng(derive_seed(SAMPLE, seed, draw.epoch, draw.image, draw.repeat))


def sequence_train_loader(
    dataset: PixelDataset | WindowDataset | RecallDataset,
    batch_size: int,
    *,
    seed: int = 0,
    shard: Shard | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader:
    """Build the loader of training sequences: tokens and targets (B, T) int64, which for recall alone differ.

    Args:
        batch_size: Sequences per update, over all processes and accumulation steps; B is this divided by their number.
        seed: Of the order.
        shard: Shard of this process; everything by default.
        num_workers, pin_memory: Of the DataLoader.

    Raises:
        ValueError: there are fewer sequences than that, or they cannot be divided evenly.
    """
    shard = shard or Shard()
    return DataLoader(
        dataset,
        batch_size=shard.micro_batch_size(batch_size),
        sampler=EpochSampler(len(dataset), batch_size, seed, shard=shard),
        collate_fn=default_collate if isinstance(dataset, RecallDataset) else _collate,
        num_workers=num_workers,
        pin_memory=pin_memory,
        persistent_workers=num_workers > 0,
        worker_init_fn=survive_signals,
    )


def sequence_eval_loader(
    dataset: EvalDataset | RecallDataset, batch_size: int, *, shard: Shard | None = None, num_workers: int = 0
) -> DataLoader:
    """Build the loader of this process's sequences, each once; targets that do not count are -100."""
    return DataLoader(
        (shard or Shard()).of_evaluation(dataset),
        batch_size=batch_size,
        collate_fn=default_collate if isinstance(dataset, RecallDataset) else _collate_counted,
        num_workers=num_workers,
        worker_init_fn=survive_signals,
    )


def _collate(samples: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.from_numpy(np.stack(samples)).long()
    return tokens, tokens


def _collate_counted(samples: list[tuple[np.ndarray, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, _ = _collate([sample for sample, _ in samples])
    first = torch.tensor([first for _, first in samples])
    counts = torch.arange(tokens.shape[1]) >= first[:, None]
    return tokens, tokens.where(counts, IGNORED)
