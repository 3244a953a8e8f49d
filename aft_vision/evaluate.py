"""Accuracy of a classifier on a loader."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from timm.data import ImageNetInfo, infer_imagenet_subset
from timm.task.evaluator import ClassificationEvaluator
from torch import nn
from tqdm import tqdm

from aft_vision.data.class_names import list_names, match_classes
from aft_vision.data.native import Inputs, move
from aft_vision.devices import synchronize
from aft_vision.modes import in_evaluation

BY_PLACE = 'data.match_classes=place, or --match-classes place of a tool, compares them by their order'


def evaluate(
    model: nn.Module,
    loader: Any,
    device: torch.device | str = 'cpu',
    *,
    amp_dtype: torch.dtype | None = None,
    distributed: bool = False,
    progress: bool = False,
    classes: Sequence[int] | None = None,
) -> dict[str, float]:
    """Measure loss, accuracy and speed of a classifier; every sample is counted exactly once.

    Args:
        model: Maps images (B, 3, H, W) to logits; evaluated in eval mode; its mode is restored afterwards.
        loader: Yields (images, class indices (B,)); for a model of native shapes, dicts of timm's NaFlex collator.
        amp_dtype: Autocast data type; None keeps the model's data type.
        distributed: Sum over the processes of the default group, each of which has its share of the samples; speed is
            this process's.
        progress: Show a progress bar on standard error.
        classes: As in `evaluate_all`.

    Returns:
        `top1` in percent, and `top5` of more than five classes, `loss` (mean cross-entropy), `samples`, and
        `images_per_second` of the forward pass, without loading and without the first batch if there are others.

    Raises:
        ValueError: the loader is empty.
    """
    options: dict[str, Any] = dict(distributed=distributed, progress=progress, classes=classes)
    return evaluate_all([model], loader, device, amp_dtype=amp_dtype, **options)[0]


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
    classes: Sequence[int] | None = None,
) -> list[dict[str, float]]:
    """Evaluate several models in one pass over the loader, otherwise as `evaluate`.

    Args:
        evaluator: Builds the evaluator of one model's outputs, with the interface of timm's evaluators; by default for
            classifiers.
        classes: From `find_classes`: the outputs that are compared, in the order of the targets; None for all.
    """
    device = torch.device(device)
    meters = [
        _Meter(model, device, evaluator() if evaluator else ClassificationEvaluator(device), classes)
        for model in models
    ]
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

    def __init__(
        self, model: nn.Module, device: torch.device, evaluator: Any, classes: Sequence[int] | None = None
    ) -> None:
        self.model, self.device, self.evaluator, self.classes = model, device, evaluator, classes
        self.timings: list[tuple[int, float]] = []
        self.outputs = 0

    def update(self, images: Inputs, targets: torch.Tensor, amp_dtype: torch.dtype | None) -> None:
        synchronize(self.device)
        start = time.perf_counter()
        with torch.autocast(self.device.type, dtype=amp_dtype, enabled=amp_dtype is not None):
            logits = self.model(images)
        synchronize(self.device)
        self.timings.append((len(targets), time.perf_counter() - start))
        logits = logits if self.classes is None else logits[:, list(self.classes)]
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


class ClassEvaluator(ClassificationEvaluator):
    """timm's evaluator with counts by class.

    Attributes:
        by_class: (classes, 3): samples, and correct ones among the first and the first five predictions; after
            `compute`, of all processes.
    """

    def __init__(self, device: torch.device, num_classes: int) -> None:
        super().__init__(device)
        self.by_class = torch.zeros(num_classes, 3, dtype=torch.int64, device=device)

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        super().update(output, target)
        correct = output.topk(min(5, output.shape[-1]), dim=-1).indices.eq(target[:, None])
        counts = torch.stack([torch.ones_like(target), correct[:, 0], correct.any(dim=-1)], dim=-1)
        self.by_class.index_add_(0, target, counts.to(self.by_class))

    def compute(self, distributed: bool = False) -> Any:
        if distributed:
            torch.distributed.all_reduce(self.by_class)
        return super().compute(distributed)


def check_classes(model: Any, class_names: Sequence[str], data: str, by_place: bool = False) -> None:
    """Raise a ValueError unless the data set has the classes of a model, or of its Weights, in the same order.

    Args:
        by_place: Compare only their number.
    """
    if find_classes(model, class_names, data, by_place, some=False) is not None:
        raise ValueError(
            f'expected the classes of the model in {data}, got them in another order, {list_names(class_names)}, where '
            f'the model has {list_names(known_classes(model) or [])}; {BY_PLACE}'
        )


def find_classes(
    model: Any, class_names: Sequence[str], data: str, by_place: bool = False, some: bool = True
) -> list[int] | None:
    """Return the indices of a data set's classes among a model's, or its Weights'; None for the same order.

    Args:
        data: Name of the data set in errors.
        by_place: Compare only the number of classes.
        some: Accept a part of the classes of a model whose names are known.

    Raises:
        ValueError: the data set has a class that the model lacks, or another number of classes.
    """
    trained = None if by_place else known_classes(model)
    # Some data sets have numbers instead of class names.
    if trained is not None and not (is_numbered(trained) or is_numbered(class_names)):
        indices = match_classes(trained, class_names)
        lacking = [name for name, index in zip(class_names, indices, strict=True) if index is None]
        known = [index for index in indices if index is not None]
        if lacking and (some or len(trained) == len(class_names)):
            others = [name for index, name in enumerate(trained) if index not in known]
            raise ValueError(
                f'expected the classes of the model in {data}, got {list_names(lacking)}, where the model has '
                f'{list_names(others) or "none else"}; {BY_PLACE}'
            )
        if some or len(trained) == len(class_names):
            return None if indices == list(range(len(trained))) else known
    if len(class_names) != model.num_classes:
        raise ValueError(
            f'expected {model.num_classes} classes in {data}, as many as the model has, got {len(class_names)}'
        )
    return None


def known_classes(model: Any) -> list[str] | None:
    """Return the names of the classes of a model with weights, or of its Weights; None if they are not known.

    Weights of as many classes as a set of ImageNet, and without names, have its synsets, as timm assumes.
    """
    names, cfg = model.pretrained_cfg.get('label_names'), model.pretrained_cfg
    if not names and cfg.get('num_classes') == model.num_classes:
        subset = infer_imagenet_subset({'num_classes': model.num_classes})
        names = ImageNetInfo(subset).label_names() if subset else None
    # Names of another number belong to a classifier that was replaced.
    return list(names) if names and len(names) == model.num_classes else None


def is_numbered(names: Sequence[str]) -> bool:
    """Return whether classes have numbers instead of names."""
    return all(name.isdecimal() and int(name) == index for index, name in enumerate(names))


def _throughput(timings: list[tuple[int, float]]) -> float:
    """Return images per second, without the first batch, which includes the warm-up; NaN without batches."""
    if not timings:
        return math.nan
    measured = timings[1:] or timings
    return sum(count for count, _ in measured) / max(sum(seconds for _, seconds in measured), 1e-9)
