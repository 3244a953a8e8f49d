"""Distillation: the teacher of a run, and the task of timm that learns from it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from timm.task import (
    ClassificationTask,
    DistillationTeacher,
    FeatureDistillationTask,
    LogitDistillationTask,
    TokenDistillationTask,
    TrainingTask,
)
from torch import nn

from aft_vision.evaluate import check_classes
from aft_vision.models.checkpoint import load_model
from aft_vision.models.transfer_source import build_model, did_you_mean
from aft_vision.sizes import check_image_size, has_fixed_input_size
from train.align import BlockAlignmentTask

# A logit whose softmax, next to zeros, is 1 in every precision; it fits into float16.
ONE_HOT_LOGIT = 1e4


class HardTeacher(DistillationTeacher):
    """A teacher with one-hot predictions.

    The Kullback-Leibler divergence from it is the cross-entropy with the teacher's class, so timm's logit distillation
    becomes DeiT's hard distillation, for a student without a distillation token.
    """

    def forward(self, input: torch.Tensor, return_features: bool = False) -> torch.Tensor:
        logits = super().forward(input, return_features)
        return ONE_HOT_LOGIT * nn.functional.one_hot(logits.argmax(dim=-1), logits.shape[-1])


def create_task(
    model: nn.Module,
    loss: dict[str, Any],
    device: torch.device,
    teacher: nn.Module | None = None,
    kind: str = 'hard',
    temperature: float = 1.0,
    **weights: float | None,
) -> TrainingTask:
    """Build timm's task that trains a model on labels and, if there is a teacher, on its outputs.

    Args:
        loss: Arguments of `timm.loss.create_classification_loss` for the labels.
        device: Device of both models.
        teacher: It is frozen and put in evaluation mode.
        kind, temperature: As in the section `distill` of an experiment.
        weights: `task_loss_weight` and `distill_loss_weight`, likewise.

    Raises:
        ValueError: the kind needs a distillation head that the model lacks.
    """
    model = model.to(device)
    if teacher is None:
        return ClassificationTask(model, criterion_kwargs=loss, device=device, verbose=False)
    teacher = teacher.to(device).requires_grad_(False)
    options: dict[str, Any] = dict(
        student_model=model,
        teacher_model=(HardTeacher if kind == 'hard' else DistillationTeacher)(teacher, device=device),
        criterion_kwargs=loss,
        device=device,
        verbose=False,
        **weights,
    )
    if kind in ('feature', 'blocks'):
        return (FeatureDistillationTask if kind == 'feature' else BlockAlignmentTask)(**options)
    if kind.startswith('token'):
        return TokenDistillationTask(**options, distill_type=kind.removeprefix('token_'), temperature=temperature)
    return LogitDistillationTask(**options, temperature=temperature)


def load_teacher(
    name: str,
    arguments: dict[str, Any],
    class_names: Sequence[str] | None,
    sizes: Sequence[tuple[int, int]],
    by_place: bool = False,
) -> nn.Module:
    """Build the teacher with its weights, on the CPU, for the images of the student.

    Args:
        name, arguments: `distill.teacher` and `distill.teacher_args`.
        class_names: Classes of the data set, which must be the teacher's; None if only its features are learned.
        by_place: Compare only the number of classes.
        sizes: (H, W) in pixels of all images; a fixed-size teacher is resized if possible.

    Raises:
        ValueError: the teacher does not exist, its weights are missing or cannot be downloaded, its classes differ from
            the data set's, or it does not support these image sizes.
    """
    teacher: Any = _build(name, arguments).eval()
    if class_names is not None:
        try:
            check_classes(teacher, class_names, 'the data set', by_place)
        except ValueError as error:
            raise ValueError(f'distill.teacher {name}: {error}') from error
    try:
        if has_fixed_input_size(teacher) and hasattr(teacher, 'set_input_size'):
            teacher.set_input_size(img_size=sizes[0])
        for size in sizes:
            check_image_size(teacher, size)
            with torch.no_grad():
                teacher(torch.zeros(1, 3, *size))
    # Models raise errors of any kind for an unsupported image.
    except Exception as error:
        raise ValueError(
            f'expected distill.teacher to take RGB images of {list(sizes)} pixels, got {name}: {error}'
        ) from error
    return teacher


def _build(teacher: str, arguments: dict[str, Any]) -> nn.Module:
    path = Path(teacher)
    if path.is_file() or (path.exists() and not timm.is_model(teacher)):
        if arguments:
            raise ValueError(f'expected distill.teacher_args to be empty for the checkpoint {teacher}, got {arguments}')
        return load_model(path)
    if not timm.is_model(teacher):
        raise ValueError(
            f'expected distill.teacher to be a checkpoint, an exported folder or a model of timm, got {teacher!r}, '
            f'which does not exist{did_you_mean(teacher, timm.list_models())}'
        )
    try:
        # Without num_classes, which would make timm replace the teacher's classifier.
        return build_model(teacher, **{'pretrained': True, **arguments})
    except (ValueError, ConnectionError) as error:
        raise ValueError(f'distill.teacher: {error}') from error
