"""Builders for the parts of a run: loaders, model and training state."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import PretrainedCfg
from timm.utils import random_seed
from torch import nn

from aft_vision.data import Loaders, Preprocessing, create_eval_loader, create_loaders
from aft_vision.data.datasets import MissingSplitError
from aft_vision.evaluate import check_classes
from aft_vision.models.checkpoint import initialize_model, load_model
from aft_vision.models.transfer_source import build_model
from aft_vision.sizes import check_image_size, has_fixed_input_size
from train.checkpoint import BEST, describe_samples
from train.distill import load_teacher
from train.distributed import World
from train.mismatch import naming_model_keys, stated_by_file, stated_by_name
from train.model_section import WEIGHT_KEYS, build_on_meta, native_shape
from train.schema import Config
from train.state import TrainState, create_state


def build_state(config: Config, loaders: Loaders, world: World) -> tuple[TrainState, dict[str, Any]]:
    """Build the model and its training state, and the description that rebuilds the model from a checkpoint."""
    class_names = loaders.class_names
    name, kwargs = model_arguments(config, num_classes=len(class_names))
    # Before seeding, so that the initial weights do not depend on the teacher.
    teacher = None
    if config.distill.teacher is not None:
        teacher = load_teacher(config.distill, class_names, training_sizes(config))
    random_seed(config.run.seed)
    start = config.run.init_from
    model: Any = _build_with_weights(
        config, name, {**kwargs, 'pretrained': bool(kwargs.get('pretrained')) and start is None}
    )
    check_image_sizes(model, config)
    if start is not None:
        with naming_model_keys(config.model, model.state_dict, lambda: stated_by_file(start)):
            initialize_model(model, start, config.run.reset_head)
    elif config.run.reset_head:
        model.reset_classifier(len(class_names))
    updates_per_epoch = len(loaders.train) // config.optim.accumulate
    state = create_state(model, config, updates_per_epoch, len(class_names), world, teacher)
    rebuild = {key: value for key, value in kwargs.items() if key not in WEIGHT_KEYS}
    cfg: Any = model.pretrained_cfg
    described: dict[str, Any] = {'model_name': name, 'model_kwargs': rebuild, 'class_names': class_names}
    described |= {'license': cfg.get('license'), 'data': describe_samples(loaders.train)}
    return state, {**described, 'data_config': described_preprocessing(config)}


def describe_start(config: Config) -> str:
    """Describe the weights that a run starts from; '' for random ones."""
    start = config.run.init_from or (_published(config) if config.model.get('pretrained') else '')
    return f'from {start}{", with a new classifier" if config.run.reset_head else ""}' if start else ''


def evaluated_checkpoint(config: Config, run_dir: Path, start_first: bool = False) -> str | Path | None:
    """Return the checkpoint for `--eval`: `best.pth` of the run, otherwise `run.init_from`; None for timm's weights.

    Args:
        start_first: Prefer `run.init_from`.

    Raises:
        ValueError: no weights are given.
    """
    best = run_dir / BEST
    if best.exists() and not (start_first and config.run.init_from):
        return best
    if not (config.run.init_from or config.model.get('pretrained')):
        raise ValueError(f'expected weights to evaluate: {best}, run.init_from or model.pretrained=true, got none')
    return config.run.init_from


def describe_evaluated(config: Config, checkpoint: str | Path | None) -> str:
    """Name the weights that `--eval` evaluates."""
    return f'evaluates {checkpoint or _published(config)}'


def build_evaluation(config: Config, checkpoint: str | Path | None, world: World) -> tuple[nn.Module, Any]:
    """Build the model for `--eval`, with its weights, and the validation loader of this process.

    Args:
        checkpoint: The weights; None for those of the name of the model.

    Raises:
        ValueError: the weights cannot be read, or are for other classes or another model.
    """
    with _advising_share():
        loader, class_names = create_eval_loader(
            config.data,
            preprocessing_of(config, checkpoint),
            config.data.eval_batch_size or config.check_parts(world.size),
            share=world.share(config.optim.accumulate),
            num_workers=config.data.num_workers,
            device=world.device,
        )
    name, kwargs = model_arguments(config, num_classes=len(class_names))
    if checkpoint is None:
        _check_pretrained_classes(config, class_names)
    else:
        check_classes(load_model(checkpoint), class_names, config.data.name or config.data.dir)
    model = _build_with_weights(config, name, {**kwargs, 'pretrained': checkpoint is None})
    check_image_sizes(model, config)
    if checkpoint is not None:
        with naming_model_keys(config.model, model.state_dict, lambda: stated_by_file(checkpoint)):
            initialize_model(model, checkpoint, transfer=False)
    return model.to(world.device), loader


def _published(config: Config) -> str:
    """Name the weights of model.pretrained=true."""
    overlay = config.model.get('pretrained_cfg_overlay') or {}
    return overlay.get('file') or f'the weights of {config.model["name"]}'


def _build_with_weights(config: Config, name: str, kwargs: dict[str, Any]) -> nn.Module:
    """Build the model, with the weights of its name if model.pretrained is true."""
    with naming_model_keys(
        config.model, lambda: build_on_meta(config.model).state_dict(), lambda: stated_by_name(config.model)
    ):
        return build_model(name, **kwargs)


def _check_pretrained_classes(config: Config, class_names: Sequence[str]) -> None:
    # timm silently replaces the classifier of a model with another number of classes.
    overlay = config.model.get('pretrained_cfg_overlay') or {}
    classes = overlay.get('num_classes', getattr(timm.get_pretrained_cfg(config.model['name']), 'num_classes', None))
    if classes not in (None, -1, len(class_names)):
        raise ValueError(f'expected a data set of {classes} classes, as the weights have, got {len(class_names)}')


def training_sizes(config: Config) -> list[tuple[int, int]]:
    """Return all sizes (H, W) of training images, in pixels."""
    sides = config.data.train_sizes
    return [config.data.img_size] if sides is None else [(side, side) for side in sides]


def check_image_sizes(model: nn.Module, config: Config) -> None:
    """Raise a ValueError unless a model supports all image sizes of the run."""
    training, evaluated = training_sizes(config), config.data.eval_img_size or config.data.img_size
    key = 'data.img_size' if config.data.train_sizes is None else 'data.train_sizes'
    for name, size in [*((key, each) for each in training), ('data.eval_img_size', evaluated)]:
        try:
            check_image_size(model, size)
        except ValueError as error:
            raise ValueError(f'{name}: {error}') from error
    sizes = [*training, evaluated]
    if len(set(sizes)) > 1 and has_fixed_input_size(model):
        raise ValueError(
            f'expected one image size, because {config.model["name"]} has a fixed one, got {sorted(set(sizes))}; '
            'set model.dynamic_img_size=true'
        )


def model_arguments(config: Config, num_classes: int) -> tuple[str, dict[str, Any]]:
    """Return the name of the model and all keyword arguments that rebuild it."""
    kwargs = {'num_classes': num_classes, **config.model}
    name = kwargs.pop('name')
    # Only a fixed-size model gets the size, as in timm's scripts.
    if getattr(timm.get_pretrained_cfg(name), 'fixed_input_size', False):
        kwargs.setdefault('img_size', list(config.data.img_size))
    return name, kwargs


def build_loaders(config: Config, world: World) -> Loaders:
    """Build the loaders of this process, with the normalisation of the weights."""
    with _advising_share():
        return create_loaders(
            config.data,
            native_shape(config) or config.size_schedule or config.data.img_size,
            config.data.batch_size,
            evaluation=preprocessing_of(config),
            eval_batch_size=config.data.eval_batch_size,
            augment=config.augment,
            share=world.share(config.optim.accumulate),
            seed=config.run.seed,
            num_workers=config.data.num_workers,
            device=world.device,
        )


@contextmanager
def _advising_share() -> Iterator[None]:
    try:
        yield
    except MissingSplitError as error:
        raise ValueError(f'{error}; data.val_share=0.1 holds out a tenth of the training images') from error


def described_preprocessing(config: Config) -> dict[str, Any]:
    """Return the preprocessing of the validation images as an entry `data_config` of a checkpoint."""
    size = config.data.eval_img_size or config.data.img_size
    known = preprocessing_of(config)
    described = {'input_size': (3, *size), 'crop_pct': known.crop_pct, 'interpolation': 'bicubic'}
    return {**described, 'mean': tuple(known.mean), 'std': tuple(known.std)}


def preprocessing_of(config: Config, checkpoint: str | Path | None = None) -> Preprocessing:
    """Return the preprocessing of the validation images, with the normalisation of the weights.

    Args:
        checkpoint: The weights; None for those of `run.init_from`, otherwise of the name of the model.
    """
    start = checkpoint or config.run.init_from
    if start is None:
        cfg: Any = (timm.get_pretrained_cfg(config.model['name']) or PretrainedCfg()).to_dict()
    else:
        # Building the model takes random numbers, which a run must not depend on.
        with torch.random.fork_rng(devices=[]):
            cfg = load_model(start).pretrained_cfg
    known = {**cfg, **(config.model.get('pretrained_cfg_overlay') or {})}
    size = native_shape(config) or config.data.eval_img_size or config.data.img_size
    return Preprocessing(size, config.data.crop_pct, known['mean'], known['std'])
