"""Distillation: the teacher of a run, and the task of timm that learns from it."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import timm
import torch
from timm.models import load_state_dict
from timm.task import (
    ClassificationTask,
    DistillationTeacher,
    FeatureDistillationTask,
    LogitDistillationTask,
    TokenDistillationTask,
    TrainingTask,
)
from timm.task.distillation import FeatureDistillationTrainableModule
from timm.utils import unwrap_model
from torch import nn

from aft_vision.data.teacher_outputs import TeacherOutputs
from aft_vision.errors import first_line
from aft_vision.evaluate import find_classes
from aft_vision.models.block_alignment import block_errors, block_tokens, pair_models
from aft_vision.models.checkpoint import load_model
from aft_vision.models.transfer_source import build_model, did_you_mean
from aft_vision.sizes import check_image_size, has_fixed_input_size

# A logit whose softmax, next to zeros, is 1 in every precision; it fits into float16.
ONE_HOT_LOGIT = 1e4
# Files of weights in an installed package.
WEIGHT_FILES = ('.safetensors', '.pth', '.pt', '.bin')


def one_hot(logits: torch.Tensor) -> torch.Tensor:
    """Return logits of the class with the largest logit alone.

    The Kullback-Leibler divergence from it is the cross-entropy with the teacher's class, so timm's logit distillation
    becomes DeiT's hard distillation, for a student without a distillation token.
    """
    return ONE_HOT_LOGIT * nn.functional.one_hot(logits.argmax(dim=-1), logits.shape[-1])


class Teacher(DistillationTeacher):
    """timm's teacher, with its logits and features by one pass.

    Args:
        hard: Return one-hot logits.
    """

    def __init__(self, model: nn.Module, hard: bool, device: torch.device | None = None) -> None:
        super().__init__(model, device=device)
        self.hard = hard

    def forward(self, input: torch.Tensor, return_features: bool = False) -> torch.Tensor:
        output = super().forward(input, return_features)
        return one_hot(output) if self.hard and not return_features else output

    def both(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits and the pooled features of normalised images."""
        model: Any = self.model
        features = model.forward_features(input)
        return model.forward_head(features), model.forward_head(features, pre_logits=True)


class StoredTeacher(DistillationTeacher):
    """The stored outputs of a teacher for a batch of crops, in place of the teacher.

    Args:
        outputs: It has features if the task learns them.
        classes: Class of each image of the outputs.
        hard: Return one-hot logits.

    Attributes:
        crops: (B,) numbers of the crops of the batch, which `see` sets.
    """

    def __init__(self, outputs: TeacherOutputs, classes: np.ndarray, hard: bool) -> None:
        # timm's own initialisation needs a model.
        nn.Module.__init__(self)
        self.outputs, self.classes, self.hard = outputs, torch.from_numpy(classes), hard
        self.crops = torch.zeros(0, dtype=torch.int64)
        # timm's tasks ask the model of a teacher for the length of its features.
        self.model: Any = SimpleNamespace(num_features=outputs.facts.features)

    def see(self, crops: torch.Tensor) -> torch.Tensor:
        """Set the crops of the batch, and return the classes (B,) of their images."""
        self.crops = crops
        return self.classes.to(crops.device)[crops // self.outputs.facts.crops]

    def normalize_input(self, input: torch.Tensor, student_mean: Any = None, student_std: Any = None) -> torch.Tensor:
        """Return the input, which this teacher does not look at."""
        return input

    def compile(self, *args: Any, **kwargs: Any) -> 'StoredTeacher':  # type: ignore[override]
        """Return this teacher, which computes nothing."""
        return self

    def forward(self, input: torch.Tensor, return_features: bool = False) -> torch.Tensor:
        """Return the logits (B, classes) or the features (B, D) of the crops of the batch.

        The probability that is not stored is spread evenly over the other classes, as in FKD.
        """
        if return_features:
            return self._read('features', input).float()
        classes, logs = self._read('classes', input).long(), self._read('log_probabilities', input).float()
        others = len(self.outputs.facts.class_names) - classes.shape[1]
        rest = (1 - logs.exp().sum(dim=1, keepdim=True)).clamp(min=1e-6) / max(others, 1)
        logits = rest.log().expand(-1, others + classes.shape[1]).scatter(1, classes, logs)
        return one_hot(logits) if self.hard else logits

    def both(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits and the features."""
        return self(input), self(input, return_features=True)

    def _read(self, name: str, input: torch.Tensor) -> torch.Tensor:
        images, crops = divmod(self.crops.cpu().numpy(), self.outputs.facts.crops)
        values = self.outputs.arrays[name][images, crops]
        # torch has few operations of unsigned integers.
        return torch.from_numpy(values.astype(np.int64) if values.dtype.kind == 'u' else values).to(input.device)


class SoftFeatureTask(FeatureDistillationTask):
    """Training on labels, the probabilities of a teacher and its pooled features, together.

    The loss of the teacher is the Kullback-Leibler divergence of the student's probabilities from the teacher's, as in
    timm's LogitDistillationTask, and `feature_loss_weight` times the mean squared error of the student's projected
    features to the teacher's, whitened by a layer norm without parameters (Wei et al. 2022, Feature Distillation).
    """

    def __init__(self, temperature: float, feature_loss_weight: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.temperature, self.feature_loss_weight = temperature, feature_loss_weight

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the losses, as timm's tasks do."""
        logits, features = self.trainable_module(input)
        task_loss = self.criterion(logits, target)
        teacher: Any = self.teacher
        mean: Any = self.student_mean
        std: Any = self.student_std
        with torch.no_grad():
            wanted_logits, wanted = teacher.both(teacher.normalize_input(input, mean, std))
            wanted = nn.functional.layer_norm(wanted.float(), wanted.shape[-1:])
        logs, target_logs = ((each.float() / self.temperature).log_softmax(dim=-1) for each in (logits, wanted_logits))
        divergence = nn.functional.kl_div(logs, target_logs, reduction='batchmean', log_target=True)
        divergence = divergence * self.temperature**2
        kd_loss = divergence + self.feature_loss_weight * nn.functional.mse_loss(features.float(), wanted)
        total = self.task_loss_weight * task_loss + self.distill_loss_weight * kd_loss
        return {'loss': total, 'output': logits, 'task_loss': task_loss, 'kd_loss': kd_loss}


class AlignedBlocks(FeatureDistillationTrainableModule):
    """The student, called with the tokens of a teacher's blocks."""

    def forward(  # type: ignore[override]
        self, tokens: list[torch.Tensor], pairs: list[range], grid: tuple[int, int]
    ) -> torch.Tensor:
        """Return the mean error of the blocks, as `block_errors` defines it."""
        return block_errors(self.student, tokens, pairs, grid).mean()


class BlockAlignmentTask(FeatureDistillationTask):
    """Training of each block on the input and the output of the teacher's, without labels; the rest is frozen.

    Args:
        student_model: An AFTVisionTransformer.
        kwargs: Arguments of timm's FeatureDistillationTask.

    Raises:
        ValueError: student or teacher is not a vision transformer, or the teacher has fewer blocks.
    """

    def __init__(self, student_model: nn.Module, **kwargs: Any) -> None:
        super().__init__(student_model, **kwargs)
        student: Any = student_model
        self.pairs = pair_models(student, unwrap_model(self.teacher.model))
        student.requires_grad_(False).blocks.requires_grad_(True)
        self.trainable_module = AlignedBlocks(student_model)

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the error as `loss`; the targets are not used."""
        student: Any = self.get_eval_model()
        mean: Any = self.student_mean
        std: Any = self.student_std
        images = self.teacher.normalize_input(input, mean, std)
        tokens = block_tokens(self.teacher.model, images)
        grid = unwrap_model(student).patch_embed.dynamic_feat_size(input.shape[-2:])
        return {'loss': self.trainable_module(tokens, self.pairs, grid)}


def create_task(
    model: nn.Module,
    loss: dict[str, Any],
    device: torch.device,
    teacher: nn.Module | None = None,
    kind: str = 'hard',
    temperature: float = 1.0,
    feature_loss_weight: float = 1.0,
    **weights: float | None,
) -> TrainingTask:
    """Build timm's task that trains a model on labels and, if there is a teacher, on its outputs.

    Args:
        loss: Arguments of `timm.loss.create_classification_loss` for the labels.
        device: Device of both models.
        teacher: It is frozen and put in evaluation mode; or a StoredTeacher.
        kind, temperature, feature_loss_weight: As in the section `distill` of an experiment.
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
        teacher_model=teacher if isinstance(teacher, StoredTeacher) else Teacher(teacher, kind == 'hard', device),
        criterion_kwargs=loss,
        device=device,
        verbose=False,
        **weights,
    )
    if kind == 'soft_feature':
        return SoftFeatureTask(temperature, feature_loss_weight, **options)
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
    weights: str | None = None,
) -> nn.Module:
    """Build the teacher with its weights, on the CPU, for the images of the student.

    Args:
        name, arguments, weights: `distill.teacher`, `distill.teacher_args` and `distill.teacher_weights`.
        class_names: Classes of the data set, all of which the teacher has: its classifier keeps only these, in their
            order. None if only its features are learned.
        by_place: Compare only the number of classes.
        sizes: (H, W) in pixels of all images; a fixed-size teacher is resized if possible.

    Raises:
        ValueError: the teacher does not exist, its weights are missing or cannot be downloaded, it lacks a class of the
            data set, or it does not support these image sizes.
    """
    teacher: Any = _build(name, arguments, weights).eval()
    if class_names is not None:
        try:
            rows = find_classes(teacher, class_names, 'the data set', by_place)
        except ValueError as error:
            raise ValueError(f'distill.teacher {name}: {error}') from error
        if rows is not None:
            keep_classes(teacher, rows)
            teacher.num_classes = len(rows)
    try:
        if sizes and has_fixed_input_size(teacher) and hasattr(teacher, 'set_input_size'):
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


def keep_classes(model: Any, rows: Sequence[int]) -> None:
    """Keep the rows of a classifier, or of both of a distilled model, in the order of these rows."""
    names = model.pretrained_cfg['classifier']
    for name in [names] if isinstance(names, str) else names:
        for parameter in model.get_submodule(name).parameters():
            parameter.data = parameter.data[list(rows)]


def _build(teacher: str, arguments: dict[str, Any], weights: str | None) -> nn.Module:
    path = Path(teacher)
    if path.is_file() or (path.exists() and not timm.is_model(teacher)):
        for key, value in (('teacher_args', arguments), ('teacher_weights', weights)):
            if value:
                raise ValueError(f'expected distill.{key} to be empty for the checkpoint {teacher}, got {value}')
        return load_model(path)
    if not timm.is_model(teacher):
        raise ValueError(
            f'expected distill.teacher to be a checkpoint, an exported folder or a model of timm, got {teacher!r}, '
            f'which does not exist{did_you_mean(teacher, timm.list_models())}'
        )
    try:
        if weights is None:
            # Without num_classes, which would make timm replace the teacher's classifier.
            return build_model(teacher, **{'pretrained': True, **arguments})
        model = build_model(teacher, **{**arguments, 'pretrained': False})
        load_weights(model, find_weights(weights))
        return model
    except (ValueError, ConnectionError) as error:
        raise ValueError(f'distill.teacher: {error}') from error


def find_weights(weights: str) -> Path:
    """Return a file of weights, or the only one in an installed package.

    Raises:
        ValueError: there is none, or the package has several.
    """
    path = Path(weights)
    if path.is_file():
        return path
    spec = find_spec(weights) if weights.isidentifier() else None
    if spec is None:
        raise ValueError(f'expected distill.teacher_weights to be a file or an installed package, got {weights!r}')
    folders = spec.submodule_search_locations or []
    files = [each for folder in folders for each in sorted(Path(folder).rglob('*')) if each.suffix in WEIGHT_FILES]
    if len(files) != 1:
        listed = ', '.join(map(str, files)) or 'none'
        raise ValueError(f'expected one file of weights in the package {weights}, got {listed}; name the file')
    return files[0]


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a file of weights, by the order of its tensors if another implementation named them.

    Raises:
        ValueError: the file cannot be read, or its tensors have other shapes, in their order too.
    """
    try:
        state_dict, own = load_state_dict(str(path)), model.state_dict()
        shapes = [[each.shape for each in tensors.values()] for tensors in (state_dict, own)]
        if state_dict.keys() != own.keys() and shapes[0] == shapes[1]:
            state_dict = dict(zip(own, state_dict.values(), strict=True))
        model.load_state_dict(state_dict)
    # Files are damaged in many ways.
    except Exception as error:
        raise ValueError(
            f'expected weights of {type(model).__name__} in {path}, by name or in the same order, got: '
            f'{first_line(error) or type(error).__name__}'
        ) from error
