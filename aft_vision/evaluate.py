"""Accuracy of a classifier on a loader."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from timm.task.evaluator import ClassificationEvaluator
from torch import nn
from tqdm import tqdm

from aft_vision.data.native import Inputs, move
from aft_vision.devices import synchronize

# Its place before models/checkpoint.py, which users import from.
from aft_vision.models.checkpoint import load_model as load_model
from aft_vision.modes import in_evaluation


def evaluate(
    model: nn.Module,
    loader: Any,
    device: torch.device | str = 'cpu',
    *,
    amp_dtype: torch.dtype | None = None,
    distributed: bool = False,
    progress: bool = False,
) -> dict[str, float]:
    """Measure loss, accuracy and speed of a classifier; every sample is counted exactly once.

    Args:
        model: Maps images (B, 3, H, W) to logits; evaluated in eval mode; its mode is restored afterwards.
        loader: Yields (images, class indices (B,)); for a model of native shapes, dicts of timm's NaFlex collator.
        amp_dtype: Autocast data type; None keeps the model's data type.
        distributed: Sum over the processes of the default group, each of which has its share of the samples; speed is
            this process's.
        progress: Show a progress bar on standard error.

    Returns:
        `top1` in percent, and `top5` of more than five classes, `loss` (mean cross-entropy), `samples`, and
        `images_per_second` of the forward pass, without loading and without the first batch if there are others.

    Raises:
        ValueError: the loader is empty.
    """
    return evaluate_all([model], loader, device, amp_dtype=amp_dtype, distributed=distributed, progress=progress)[0]


@torch.inference_mode()
def evaluate_all(
    models: Sequence[nn.Module],
    loader: Any,
    device: torch.device | str = 'cpu',
    *,
    amp_dtype: torch.dtype | None = None,
    distributed: bool = False,
    progress: bool = False,
    evaluator: Callable[[], Any] | None = None,
) -> list[dict[str, float]]:
    """Evaluate several models in one pass over the loader, otherwise as `evaluate`.

    Args:
        evaluator: Builds the evaluator of one model's outputs, with the interface of timm's evaluators; by default for
            classifiers.
    """
    device = torch.device(device)
    meters = [_Meter(model, device, evaluator() if evaluator else ClassificationEvaluator(device)) for model in models]
    batches = tqdm(loader, desc='evaluate', unit='batch', leave=False, disable=None if progress else True)
    with in_evaluation(*models):
        for images, targets in batches:
            # All images of the batch were corrupt and skipped.
            if not len(targets):
                continue
            images, targets = move(images, device, non_blocking=True), targets.to(device, non_blocking=True)
            for meter in meters:
                meter.update(images, targets, amp_dtype)
    return [meter.finish(distributed) for meter in meters]


class _Meter:
    """A meter of one model's accuracy and time."""

    def __init__(self, model: nn.Module, device: torch.device, evaluator: Any) -> None:
        self.model, self.device, self.evaluator = model, device, evaluator
        self.timings: list[tuple[int, float]] = []
        self.outputs = 0

    def update(self, images: Inputs, targets: torch.Tensor, amp_dtype: torch.dtype | None) -> None:
        synchronize(self.device)
        start = time.perf_counter()
        with torch.autocast(self.device.type, dtype=amp_dtype, enabled=amp_dtype is not None):
            logits = self.model(images)
        synchronize(self.device)
        self.timings.append((len(targets), time.perf_counter() - start))
        self.evaluator.update(logits, targets)
        if isinstance(self.evaluator, ClassificationEvaluator):
            self.outputs = logits.shape[-1]

    def finish(self, distributed: bool) -> dict[str, float]:
        metrics = {name: float(value) for name, value in self.evaluator.compute(distributed).items()}
        # Of five classes or fewer, all are among the first five.
        if 0 < self.outputs <= 5:
            metrics.pop('top5', None)
        samples = self.evaluator.counts[0].clone()
        if distributed:
            torch.distributed.all_reduce(samples)
        if not samples:
            raise ValueError('expected a loader with at least one sample, got an empty one')
        return {**metrics, 'images_per_second': _throughput(self.timings), 'samples': int(samples)}


def check_classes(model: Any, class_names: Sequence[str], data: str) -> None:
    """Raise a ValueError unless the data set has the classes of a model, or of its Weights, in the same order."""
    if len(class_names) != model.num_classes:
        raise ValueError(
            f'expected {model.num_classes} classes in {data}, as many as the model has, got {len(class_names)}'
        )
    trained = model.pretrained_cfg.get('label_names') or class_names
    if len(trained) != len(class_names):
        # Names of another classifier, which was replaced.
        return
    differing = [(old, new) for old, new in zip(trained, class_names, strict=True) if old != new]
    # Some data sets have numbers instead of class names.
    numbered = [str(index) for index in range(len(class_names))]
    if differing and numbered not in (list(trained), list(class_names)):
        raise ValueError(f'expected the classes of the model in {data}, got {differing[0][1]} for {differing[0][0]}')


def _throughput(timings: list[tuple[int, float]]) -> float:
    """Return images per second, without the first batch, which includes the warm-up; NaN without batches."""
    if not timings:
        return math.nan
    measured = timings[1:] or timings
    return sum(count for count, _ in measured) / max(sum(seconds for _, seconds in measured), 1e-9)
