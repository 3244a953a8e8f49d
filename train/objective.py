"""The task of a run, as far as the loop, the log and the checkpoints have to know."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

Batch = tuple[torch.Tensor, torch.Tensor]


class Objective(ABC):
    """The figures of a run: what is counted, measured and shown, and which of two results is the better.

    Attributes:
        unit: What the speed counts, in the plural.
        metrics: Of an evaluation, in the order of the log; the evaluator of the task gives them.
        best: The metric that decides which weights are kept.
        lower_is_better: Whether its low values are the good ones.
        records_steps: Whether the log has steps.csv, with single updates, beside summary.csv.
    """

    unit = 'images'
    metrics: tuple[str, ...]
    best: str
    lower_is_better = False
    records_steps = False

    @property
    def worst(self) -> float:
        """Return what any result is better than."""
        return math.inf if self.lower_is_better else -math.inf

    def is_better(self, value: float, other: float) -> bool:
        """Return whether a value of `best` is better than another one; NaN is better than nothing."""
        return value < other if self.lower_is_better else value > other

    def figures(self, loss: float, updates: int, seconds: float, updates_per_second: float) -> dict[str, float]:
        """Further columns of the log, for the training of an epoch.

        Args:
            loss: The mean of the epoch.
            updates, seconds: Of the run so far.
            updates_per_second: Of the epoch.
        """
        return {}

    @abstractmethod
    def describe(self, row: Mapping[str, float]) -> str:
        """Return what the line of an epoch says of its evaluation; nothing where there was none."""

    @abstractmethod
    def blank(self, count: int) -> Batch:
        """A batch of so many samples that look like those of training."""


class Classification(Objective):
    """Images and their classes.

    Args:
        size: (H, W) of a training image, in pixels.
    """

    metrics = ('loss', 'top1', 'top5')
    best = 'top1'

    def __init__(self, size: tuple[int, int]) -> None:
        self.size = size

    def describe(self, row: Mapping[str, float]) -> str:
        line = ''
        if not math.isnan(row['eval_top1']):
            line += f'  top-1 {row["eval_top1"]:.1f} %  top-5 {row["eval_top5"]:.1f} %'
        if not math.isnan(row.get('eval_ema_top1', math.nan)):
            line += f'  averaged weights: top-1 {row["eval_ema_top1"]:.1f} %  top-5 {row["eval_ema_top5"]:.1f} %'
        return line

    def blank(self, count: int) -> Batch:
        return torch.zeros(count, 3, *self.size), torch.zeros(count, dtype=torch.int64)
