"""The resolution of an experiment: the arguments of its loaders, model, optimizer and schedule, and what they build.

Nothing that is built here knows the experiment: a TrainState has the settings of its loop, and the record of the
checkpoints.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import timm
import torch
from timm.models import PretrainedCfg
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.task import TrainingTask
from timm.utils import random_seed, unwrap_model
from torch import nn

from aft_vision.data import (
    BatchAugmentation,
    Loaders,
    NativeShape,
    PatchAugmentation,
    Preprocessing,
    SizeSchedule,
    create_eval_loader,
    create_loaders,
)
from aft_vision.data.class_names import list_names, match_classes
from aft_vision.data.layout import MissingSplitError
from aft_vision.data.teacher_outputs import TeacherOutputs
from aft_vision.evaluate import find_classes, is_numbered, known_classes
from aft_vision.models.checkpoint import Weights, initialize_model, read_weights
from aft_vision.models.transfer_source import build_model
from aft_vision.resolution import naflex_shape
from aft_vision.sizes import check_image_size, has_fixed_input_size
from train.checkpoint import describe_samples
from train.command_line import print_once
from train.distill import StoredTeacher, create_task, keep_classes, load_teacher
from train.distributed import World
from train.model_section import WEIGHT_KEYS, build_on_meta
from train.objective import Batch, Classification, Objective
from train.regularize import KernelRegularization
from train.schedule import create_schedule
from train.schema import Config, Experiment, ScheduleConfig, require
from train.state import Loop, Progress, TrainState

# Optimizers that torch computes in one call on a CPU.
FUSED_OPTIMIZERS = ('adam', 'adamw')


class Images(NamedTuple):
    """The images of an experiment, with the shapes that its model has and the normalisation of its weights.

    Attributes:
        training: (H, W) of the training images in pixels, the shape of each image itself, or a schedule of sizes.
        evaluation: Preprocessing of the validation images.
        described: This preprocessing as the entry `data_config` of a checkpoint.
        weights: Those that the model starts from, or that `--eval` evaluates, which are read once; None for its own.
    """

    training: tuple[int, int] | NativeShape | SizeSchedule
    evaluation: Preprocessing
    described: dict[str, Any]
    weights: Weights | None


def resolve_images(config: Config, checkpoint: str | Path | None = None) -> Images:
    """Return the images of an experiment.

    Args:
        checkpoint: The weights; None for `run.init_from`, otherwise the weights of the name of the model.

    Raises:
        ValueError: `data.max_tokens` is set and the model takes only images of one shape, or the weights cannot be
            read.
    """
    data, start = config.data, checkpoint or config.run.init_from
    native = _native_shape(config)
    weights = None if start is None else read_weights(start)
    if weights is None:
        cfg: Any = (timm.get_pretrained_cfg(config.model['name']) or PretrainedCfg()).to_dict()
    else:
        cfg = weights.pretrained_cfg
    known = {**cfg, **_overlay(config)}
    size = data.eval_img_size or data.img_size
    evaluation = Preprocessing(native or size, data.crop_pct, known['mean'], known['std'])
    described = {'input_size': (3, *size), 'crop_pct': data.crop_pct, 'interpolation': 'bicubic'}
    described |= {'mean': tuple(known['mean']), 'std': tuple(known['std'])}
    return Images(native or config.size_schedule or data.img_size, evaluation, described, weights)


def _native_shape(config: Config) -> NativeShape | None:
    tokens = config.data.image_tokens
    try:
        return None if tokens is None else naflex_shape(build_on_meta(config.model), tokens)
    except ValueError as error:
        raise ValueError(f'data.max_tokens: {error}') from error


def build_loaders(config: Config, images: Images, world: World) -> Loaders:
    """Build the loaders of this process."""
    config.check_batch_size(world.size)
    with _advising_keys():
        return create_loaders(
            config.data.source,
            images.training,
            config.data.batch_size,
            evaluation=images.evaluation,
            eval_batch_size=config.data.eval_batch_size,
            augment=config.augment,
            shard=world.shard(config.optim.accumulate),
            seed=config.run.seed,
            num_workers=config.data.num_workers,
            device=world.device,
            balanced=config.data.class_weights == 'balanced',
            outputs=_stored_outputs(config),
        )


def _stored_outputs(config: Config) -> TeacherOutputs | None:
    distill = config.distill
    if distill.stored is None:
        return None
    outputs = TeacherOutputs(distill.stored)
    # A checkpoint may be named in several ways.
    if timm.is_model(distill.teacher or '') and distill.teacher != outputs.facts.teacher:
        raise ValueError(
            f'expected distill.stored to have the outputs of distill.teacher {distill.teacher}, got those of '
            f'{outputs.facts.teacher}'
        )
    if distill.kind in ('feature', 'soft_feature') and not outputs.facts.features:
        raise ValueError(
            f'expected features in distill.stored for distill.kind={distill.kind}, got none in {distill.stored}; '
            'store them with train.store_teacher --features'
        )
    return outputs


def build_state(config: Config, images: Images, loaders: Loaders, world: World) -> tuple[TrainState, dict[str, Any]]:
    """Build the model and its training state, and the description that rebuilds the model from a checkpoint."""
    class_names, run = loaders.class_names, config.run
    # Before seeding, so that the initial weights do not depend on the teacher.
    teacher: nn.Module | None = None
    if loaders.outputs is not None:
        teacher = StoredTeacher(loaders.outputs, loaders.classes_of_outputs, config.distill.kind.endswith('hard'))
    elif config.distill.teacher is not None:
        names = None if config.distill.kind in ('feature', 'blocks') else class_names
        teacher = load_configured_teacher(config, names, config.data.training_sizes)
    random_seed(run.seed)
    model = _start_model(config, images.weights, class_names)
    updates_per_epoch = len(loaders.train) // config.optim.accumulate
    config = with_min_updates(config, updates_per_epoch)
    state = create_state(model, config, updates_per_epoch, len(class_names), world, teacher, images.training)
    name, kwargs = model_arguments(config, len(class_names))
    return state, {
        'model_name': name,
        'model_kwargs': {key: value for key, value in kwargs.items() if key not in WEIGHT_KEYS},
        'class_names': class_names,
        'license': model.pretrained_cfg.get('license'),
        'data': describe_samples(loaders.train),
        'data_config': images.described,
    }


def load_configured_teacher(
    config: Config, class_names: Sequence[str] | None, sizes: Sequence[tuple[int, int]]
) -> nn.Module:
    """Build the teacher of the section `distill`, with the arguments and errors of `load_teacher`."""
    distill, by_place = config.distill, config.data.classes_by_place
    name, arguments = str(distill.teacher), distill.teacher_args
    return load_teacher(name, arguments, class_names, sizes, by_place, distill.teacher_weights)


def _start_model(config: Config, weights: Weights | None, class_names: Sequence[str]) -> Any:
    """Build the model with its initial weights; its classifier is put in the order of the classes, or is new."""
    is_new, rows, said = config.run.reset_head, None, ''
    if not is_new and (weights is not None or config.model.get('pretrained')):
        is_new, rows, said = _match_classifier(weights or _published(config, len(class_names)), class_names, config)
    model = _build_with_weights(config, len(class_names), weights, reset_head=is_new)
    if said:
        print_once(said)
    # With another number of classes timm has built a new one.
    kept = model.pretrained_cfg.get('num_classes') == len(class_names)
    if is_new and weights is None and (kept or config.run.reset_head):
        model.reset_classifier(len(class_names))
    if rows is not None:
        keep_classes(model, rows)
    return model


def _match_classifier(start: Any, class_names: Sequence[str], config: Config) -> tuple[bool, list[int] | None, str]:
    """Return whether other classes need a new classifier, the rows of the old one in their order, and a line about it.

    Args:
        start: The Weights, or a model that has its own.
    """
    trained = None if config.data.classes_by_place else known_classes(start)
    if trained is None or is_numbered(trained) or is_numbered(class_names):
        return False, None, ''
    indices, whole = match_classes(trained, class_names), list(range(len(trained)))
    known = [index for index in indices if index is not None]
    if indices == whole:
        return False, None, ''
    if sorted(known) == whole and len(known) == len(class_names):
        return False, known, 'the classifier of the weights is put in the order of the classes, by their names'
    here = [name for name, index in zip(class_names, indices, strict=True) if index is None]
    there = [name for index, name in enumerate(trained) if index not in known]
    said = (
        f'a new classifier, as the data set has other classes ({list_names(here) or "fewer"}) than the weights '
        f'({list_names(there) or "fewer"}); data.match_classes=place compares them by their order'
    )
    return True, None, said


def with_min_updates(config: Config, updates_per_epoch: int) -> Config:
    """Return the experiment with as many epochs as `schedule.min_updates` needs, with a note if these are more."""
    schedule = config.schedule
    epochs = -(-schedule.min_updates // max(updates_per_epoch, 1))
    if epochs <= schedule.epochs:
        return config
    print_once(
        f'note: schedule.epochs = {epochs} in place of {schedule.epochs}, because schedule.min_updates = '
        f'{schedule.min_updates} and an epoch has {updates_per_epoch}'
    )
    return dataclasses.replace(config, schedule=dataclasses.replace(schedule, epochs=epochs))


def build_evaluation(
    config: Config, checkpoint: str | Path | None, world: World
) -> tuple[nn.Module, Any, list[int] | None]:
    """Build the model for `--eval`, with its weights, the validation loader of this process, and `find_classes`.

    Args:
        checkpoint: The weights; None for the weights of the name of the model.

    Raises:
        ValueError: the weights cannot be read, or are for other classes or another model.
    """
    images_per_pass = config.check_batch_size(world.size)
    images = resolve_images(config, checkpoint)
    with _advising_keys():
        loader, class_names = create_eval_loader(
            config.data.source,
            images.evaluation,
            config.data.eval_batch_size or images_per_pass,
            shard=world.shard(config.optim.accumulate),
            num_workers=config.data.num_workers,
            device=world.device,
        )
    start: Any = images.weights or _published(config, len(class_names))
    data, by_place = config.data.name or config.data.dir, config.data.classes_by_place
    classes = find_classes(start, class_names, data, by_place)
    if classes is not None and len(classes) < start.num_classes and world.is_primary:
        print(f'{data} has {len(classes)} of the {start.num_classes} classes of the model; only these are compared')
    model = _build_with_weights(config, start.num_classes, images.weights, transfer=False)
    return model.to(world.device), loader, classes


def model_arguments(config: Config, num_classes: int) -> tuple[str, dict[str, Any]]:
    """Return the name of the model and all keyword arguments that rebuild it."""
    kwargs = {'num_classes': num_classes, **config.model}
    name = kwargs.pop('name')
    # Only a fixed-size model gets the size, as in timm's scripts.
    if getattr(timm.get_pretrained_cfg(name), 'fixed_input_size', False):
        kwargs.setdefault('img_size', list(config.data.img_size))
    return name, kwargs


def _build_with_weights(config: Config, num_classes: int, weights: Weights | None, **options: Any) -> Any:
    """Build the model, with these weights, or if model.pretrained is true with the weights of its name.

    Args:
        options: Further arguments of `initialize_model`.
    """
    name, kwargs = model_arguments(config, num_classes)
    model = build_model(name, **{**kwargs, 'pretrained': weights is None and bool(kwargs.get('pretrained'))})
    check_image_sizes(model, config)
    if weights is not None:
        initialize_model(model, weights, **options)
    return model


def check_image_sizes(model: nn.Module, config: Config) -> None:
    """Raise a ValueError unless a model supports all image sizes of the run."""
    training, evaluated = config.data.training_sizes, config.data.eval_img_size or config.data.img_size
    key = 'data.img_size' if config.data.train_sizes is None else 'data.train_sizes'
    for name, size in [*((key, each) for each in training), ('data.eval_img_size', evaluated)]:
        try:
            check_image_size(model, size)
        except ValueError as error:
            raise ValueError(f'{name}: {error}') from error
    sizes = {*training, evaluated}
    if len(sizes) > 1 and has_fixed_input_size(model):
        raise ValueError(
            f'expected one image size, because {config.model["name"]} has a fixed one, got {sorted(sizes)}; '
            'set model.dynamic_img_size=true'
        )


def _overlay(config: Config) -> dict[str, Any]:
    return config.model.get('pretrained_cfg_overlay') or {}


def _published(config: Config, num_classes: int) -> SimpleNamespace:
    """Return what is known of the weights of `model.pretrained` before they are loaded, as attributes of a model.

    Args:
        num_classes: Classes of the data set, for weights whose number is not known.
    """
    cfg: Any = {**(timm.get_pretrained_cfg(config.model['name']) or PretrainedCfg()).to_dict(), **_overlay(config)}
    stated = cfg.get('num_classes')
    return SimpleNamespace(num_classes=num_classes if stated in (None, -1) else stated, pretrained_cfg=cfg)


@contextmanager
def _advising_keys() -> Iterator[None]:
    try:
        yield
    except MissingSplitError as error:
        raise ValueError(f'{error}{error.keys}') from error


def published_weights(config: Config) -> str:
    """Name the weights of model.pretrained=true."""
    return _overlay(config).get('file') or f'the weights of {config.model["name"]}'


def describe_start(config: Config) -> str:
    """Describe the weights that a run starts from; '' for random ones."""
    start = config.run.init_from or (published_weights(config) if config.model.get('pretrained') else '')
    return f'from {start}{", with a new classifier" if config.run.reset_head else ""}' if start else ''


def create_state(
    model: nn.Module,
    config: Config,
    updates_per_epoch: int,
    num_classes: int,
    world: World,
    teacher: nn.Module | None = None,
    size: tuple[int, int] | NativeShape | SizeSchedule | None = None,
) -> TrainState:
    """Move a classifier to the device and build its optimizer, schedule, loss and moving average.

    Args:
        teacher: The model that `distill.teacher` names.
        size: `training` of the Images; None for `data.img_size`.

    Raises:
        ValueError: `optim.args` do not fit the optimizer, `distill.kind` or `regularize` do not fit the model, or
            `optim.bce_target_thresh` makes all classes targets.
    """
    size = size or config.data.img_size
    augmentation = PatchAugmentation if isinstance(size, NativeShape) else BatchAugmentation
    threshold, smoothing = config.optim.bce_target_thresh, config.optim.label_smoothing
    augment = augmentation(config.augment, num_classes, smoothing, world.device)
    if threshold is not None:
        least = smoothing / num_classes
        wanted = f'above optim.label_smoothing / {num_classes} classes ({least:g}), the target of all other classes'
        require('optim.bce_target_thresh', threshold, threshold > least or smoothing == 0, wanted)
    # Mixing already smooths the targets.
    loss = {
        'loss_type': config.optim.loss,
        'bce_target_thresh': threshold,
        'smoothing': smoothing,
        'soft_targets': config.augment.mixes,
    }
    objective = Classification(size.sizes[0] if isinstance(size, SizeSchedule) else size, num_classes)
    updates = config.schedule.epochs * updates_per_epoch
    regularize, distill = config.regularize, config.distill
    regularization = KernelRegularization(model, updates, regularize.kernel_entropy, regularize.tau_end)
    options: dict[str, Any] = {
        name: getattr(distill, name)
        for name in ('kind', 'temperature', 'feature_loss_weight', 'task_loss_weight', 'distill_loss_weight')
    }
    task = create_task(model, loss, world.device, teacher, **options)
    taught = augment if not isinstance(teacher, StoredTeacher) else partial(_see, teacher, augment)
    return assemble_state(task, config, objective, taught, updates_per_epoch, world, regularization)


def _see(teacher: StoredTeacher, augment: Callable[..., Batch], images: Any, crops: torch.Tensor) -> Batch:
    """Show a stored teacher the crops of a batch; return it augmented, with the classes of its images."""
    return augment(images, teacher.see(crops))


def assemble_state(
    task: TrainingTask,
    config: Experiment,
    objective: Objective,
    augment: Callable[..., Batch],
    updates_per_epoch: int,
    world: World,
    regularization: KernelRegularization | None = None,
) -> TrainState:
    """Build the optimizer, schedule and moving average of a task whose model is on the device.

    Args:
        regularization: Regularisation of the kernels of AFT-conv; none by default.

    Raises:
        ValueError: `optim.args` do not fit the optimizer, or the model does not support gradient checkpointing.
    """
    device, run, model = world.device, config.run, unwrap_model(task.get_eval_model())
    if run.channels_last:
        # Convolutions answer in the layout of their weights.
        model.to(memory_format=torch.channels_last)
    if run.grad_checkpointing:
        _set_grad_checkpointing(model)
    optimizer = _create_optimizer(task, config)
    if config.ema.decay is not None:
        task.setup_ema(decay=config.ema.decay, use_warmup=config.ema.warmup)
    if run.compile:
        # A graph for each size: inductor cannot compile the gradient of every model at an open one.
        task.compile(dynamic=False if config.size_schedule else None)
    if world.is_distributed:
        task.prepare_distributed(device_ids=None if device.type == 'cpu' else [device])
    return TrainState(
        record=dataclasses.asdict(config),
        loop=_loop(config),
        world=world,
        task=task,
        objective=objective,
        augment=augment,
        optimizer=optimizer,
        scheduler=_create_scheduler(optimizer, config.schedule, updates_per_epoch),
        scaler=torch.amp.GradScaler(device.type, enabled=run.amp == 'float16'),
        regularization=regularization or KernelRegularization(model),
        progress=Progress(updates_per_epoch, objective.worst),
    )


def _loop(config: Experiment) -> Loop:
    optim, schedule, run = config.optim, config.schedule, config.run
    return Loop(
        batch_size=config.data.batch_size,
        accumulate=optim.accumulate,
        clip_grad=optim.clip_grad,
        epochs=schedule.epochs,
        max_updates=schedule.max_updates,
        epoch_delay=int(schedule.step == 'deit'),
        ema_warmup=config.ema.warmup,
        seed=run.seed,
        amp=run.amp,
        eval_every=run.eval_every,
        max_seconds=run.max_seconds,
        skip_nonfinite=run.skip_nonfinite,
        tensorboard=run.tensorboard,
    )


def _create_scheduler(optimizer: torch.optim.Optimizer, schedule: Any, updates_per_epoch: int) -> Scheduler:
    if not isinstance(schedule, ScheduleConfig):
        options = (schedule.kind, schedule.warmup_updates, schedule.warmup_lr, schedule.min_lr)
        return create_schedule(optimizer, schedule.total_updates(updates_per_epoch), *options)
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched='cosine',
        num_epochs=schedule.epochs,
        warmup_epochs=schedule.warmup_epochs,
        warmup_lr=schedule.warmup_lr,
        min_lr=schedule.min_lr,
        step_on_epochs=schedule.step != 'update',
        updates_per_epoch=updates_per_epoch,
    )
    return scheduler


def _set_grad_checkpointing(model: Any) -> None:
    try:
        model.set_grad_checkpointing()
    # A model without checkpointing, or a timm model that rejects it.
    except (AttributeError, AssertionError) as error:
        raise ValueError(
            f'expected run.grad_checkpointing to be false for a {type(model).__name__}, got true: {error}'
        ) from error


def _create_optimizer(task: TrainingTask, config: Experiment) -> torch.optim.Optimizer:
    trained: Any = task.get_trainable_module()
    optim, options = config.optim, dict(config.optim.args)
    # One call for all weights of a group; those of small models have more calls than work.
    if task.device.type == 'cpu' and optim.name in FUSED_OPTIMIZERS and 'foreach' not in options:
        options.setdefault('fused', True)
    try:
        return create_optimizer_v2(
            trained,
            opt=optim.name,
            lr=config.peak_lr,
            weight_decay=optim.weight_decay,
            layer_decay=optim.layer_decay,
            **options,
        )
    except (TypeError, ValueError, AssertionError, LookupError, RuntimeError) as error:
        decay = f' and optim.layer_decay = {optim.layer_decay}' if optim.layer_decay is not None else ''
        raise ValueError(
            f'expected optim.args of the optimizer {optim.name}, got {optim.args}{decay}: '
            f'{str(error) or type(error).__name__}'
        ) from error
