"""The objective of a run: its metrics, for the loop, the log and the checkpoints."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from timm.task import TrainingTask

from aft_vision.data import Inputs, NativeShape
from aft_vision.evaluate import ClassEvaluator

# Inputs, and targets.
Batch = tuple[Inputs, torch.Tensor]


class Objective(ABC):
    """The units and metrics of a run, and the comparison of two results.

    Attributes:
        unit: Unit of the speed, in the plural.
        metrics: Metrics of an evaluation, in the order of the log; the evaluator of the task computes them.
        best: The metric that selects the best weights.
        lower_is_better: Whether lower values of it are better.
        records_steps: Whether the log also has steps.csv, with single updates.
        goal: Value of `best` at which a run ends; None for no such end.
    """

    unit = 'images'
    metrics: tuple[str, ...]
    best: str
    lower_is_better = False
    records_steps = False
    goal: float | None = None

    @property
    def worst(self) -> float:
        """Return a value that is worse than any result."""
        return math.inf if self.lower_is_better else -math.inf

    def is_better(self, value: float, other: float, loss: float = math.inf, other_loss: float = math.inf) -> bool:
        """Return whether a value of `best` is better than another one, or equal with a lower loss; NaN never is."""
        if value == other:
            return loss < other_loss
        return value < other if self.lower_is_better else value > other

    def is_met(self, value: float) -> bool:
        """Return whether a value of `best` reaches the goal."""
        return self.goal is not None and not self.is_better(self.goal, value)

    def train_metrics(self, loss: float, updates: int, seconds: float, updates_per_second: float) -> dict[str, float]:
        """Return further columns of the log for an epoch of training.

        Args:
            loss: Mean of the epoch.
            updates, seconds: Totals of the run so far.
            updates_per_second: Mean of the epoch.
        """
        return {}

    def create_evaluator(self, task: TrainingTask) -> Any:
        """Build the evaluator of one model's outputs, with the interface of timm's evaluators."""
        return task.create_evaluator()

    @abstractmethod
    def describe(self, row: Mapping[str, float]) -> str:
        """Return the part of an epoch's line about its evaluation; '' if there was none."""

    @abstractmethod
    def blank(self, count: int) -> Batch:
        """Build a blank batch of this many samples with the shapes of training."""


def _accuracy(row: Mapping[str, float], prefix: str) -> str:
    # Columns of another number of classes are empty.
    values = [(name, row.get(f'{prefix}{name}', math.nan)) for name in ('top1', 'top5')]
    return ''.join(f'  {name[:3]}-{name[3:]} {value:.1f} %' for name, value in values if not math.isnan(value))


class Classification(Objective):
    """Images and their classes.

    Args:
        size: (H, W) of a training image in pixels, or the shape of each image itself.
        num_classes: Of five or fewer, top-5 is left out.
    """

    best = 'top1'

    def __init__(self, size: tuple[int, int] | NativeShape, num_classes: int) -> None:
        self.size, self.num_classes = size, num_classes
        self.metrics = ('loss', 'top1', 'top5') if num_classes > 5 else ('loss', 'top1')

    def create_evaluator(self, task: TrainingTask) -> ClassEvaluator:
        return ClassEvaluator(task.device, self.num_classes)

    def describe(self, row: Mapping[str, float]) -> str:
        line = ''
        if not math.isnan(row['eval_top1']):
            line += _accuracy(row, 'eval_')
        if not math.isnan(row.get('eval_ema_top1', math.nan)):
            line += f'  averaged weights:{_accuracy(row, "eval_ema_")[1:]}'
        return line

    def blank(self, count: int) -> Batch:
        targets = torch.zeros(count, dtype=torch.int64)
        if isinstance(self.size, NativeShape):
            return self.size.blank(count), targets
        return torch.zeros(count, 3, *self.size), targets
