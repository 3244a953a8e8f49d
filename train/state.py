"""The state of training, saved and restored."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from timm.task import TrainingTask
from timm.utils import random_seed, unwrap_model
from torch import nn

from aft_vision.data import STEP, derive_seed, move
from aft_vision.models.checkpoint import load_matching_state_dict
from aft_vision.ops.common.choice import has_bfloat16
from train.distributed import World
from train.objective import Batch, Objective
from train.regularize import KernelRegularization

AMP_DTYPES = {'none': None, 'bfloat16': torch.bfloat16, 'float16': torch.float16}


def autocast_dtype(amp: str, device: torch.device) -> torch.dtype | None:
    """Return the data type of `run.amp` on a device, None for none."""
    if amp == 'auto':
        return torch.bfloat16 if has_bfloat16(device) else None
    return AMP_DTYPES[amp]


@dataclass(frozen=True)
class Loop:
    """The settings of the training loop; those without a description are keys of an experiment.

    Attributes:
        batch_size: Samples per update, over all processes and accumulation steps.
        accumulate, clip_grad: Of the section `optim`.
        epochs, max_updates: Of `schedule`.
        epoch_delay: Epochs by which the schedule is behind, as DeiT's is by one.
        ema_warmup: Whether the decay of the moving average rises in the first updates.
        seed, amp, eval_every, max_seconds, skip_nonfinite, tensorboard: Of `run`.
    """

    batch_size: int
    accumulate: int
    clip_grad: float | None
    epochs: int
    max_updates: int | None
    epoch_delay: int
    ema_warmup: bool
    seed: int
    amp: str
    eval_every: int
    max_seconds: float | None
    skip_nonfinite: int
    tensorboard: bool


@dataclass
class Progress:
    """The progress of a run, saved together with weights and optimizer.

    Attributes:
        updates_per_epoch: Optimizer steps per epoch.
        best: Best evaluation so far, by `objective.best`, of the weights or their average.
        best_eval_loss: Validation loss of these weights, which decides between equal results.
        epoch: Finished epochs.
        updates: Optimizer steps so far.
        epoch_done: Updates of the unfinished epoch, without skipped ones.
        epoch_loss: Sum of their losses.
        epoch_seconds: Their time.
        epoch_lr: Learning rate of the last one.
        skipped: Updates that were skipped because their loss was not finite.
        history: One row per epoch, counted from 0, with the columns of summary.csv, which counts from 1.
    """

    updates_per_epoch: int
    best: float
    best_eval_loss: float = math.inf
    epoch: int = 0
    updates: int = 0
    epoch_done: int = 0
    epoch_loss: float = 0.0
    epoch_seconds: float = 0.0
    epoch_lr: float = 0.0
    skipped: int = 0
    history: list[dict[str, float]] = field(default_factory=list)

    @property
    def updates_of_epoch(self) -> int:
        """Return the optimizer steps of the unfinished epoch."""
        return self.updates - self.epoch * self.updates_per_epoch

    @property
    def seconds(self) -> float:
        """Return the time of all updates."""
        whole = (row['train_seconds'] for row in self.history if row['epoch'] < self.epoch)
        return sum(whole) + self.epoch_seconds

    def restart_epoch(self) -> None:
        """Return to the start of the unfinished epoch."""
        self.updates = self.epoch * self.updates_per_epoch
        self.epoch_done, self.epoch_loss, self.epoch_seconds = 0, 0.0, 0.0


@dataclass
class TrainState:
    """The model, its training objects and the progress of a run.

    Attributes:
        record: The experiment, as a checkpoint keeps it.
        task: timm's task: the model, possibly compiled or distributed, its loss, its teacher if any, and the moving
            average of its weights.
        objective: The metrics and units of the run.
        augment: Augments a batch on the device.
        regularization: Regularisation of the kernels of AFT-conv.
    """

    record: dict[str, Any]
    loop: Loop
    world: World
    task: TrainingTask
    objective: Objective
    augment: Callable[..., Batch]
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: torch.amp.GradScaler
    regularization: KernelRegularization
    progress: Progress

    @property
    def model(self) -> nn.Module:
        """Return the model without wrappers."""
        return unwrap_model(self.task.get_eval_model())

    @property
    def averaged_model(self) -> nn.Module | None:
        """Return the model with the moving average of the weights, if there is one."""
        return unwrap_model(self.task.get_eval_model(ema=True)) if self.task.has_ema() else None

    @property
    def amp_dtype(self) -> torch.dtype | None:
        """Return the autocast data type."""
        return autocast_dtype(self.loop.amp, self.world.device)

    def autocast(self) -> torch.autocast:
        """Return the context of a forward pass."""
        return torch.autocast(self.world.device.type, dtype=self.amp_dtype, enabled=self.amp_dtype is not None)

    def prepare_micro_batch(self, index: int, batch: Batch) -> Batch:
        """Seed all randomness of a micro-batch of the next update, and return it augmented on the device."""
        before = self.world.rank * self.loop.accumulate
        random_seed(derive_seed(STEP, self.loop.seed, self.progress.updates, before + index))
        inputs, targets = batch
        return self.augment(move(inputs, self.world.device), targets.to(self.world.device))

    @property
    def total_updates(self) -> int:
        """Return the number of optimizer steps of the run, unless its time limit ends it earlier."""
        updates = self.loop.epochs * self.progress.updates_per_epoch
        return min(updates, self.loop.max_updates or updates)

    def budget_exhausted(self) -> bool:
        """Return whether the goal is met or the updates or time of the run are used up; the same in every process."""
        limit = self.loop.max_seconds
        spent = self.progress.updates >= self.total_updates or self.objective.is_met(self.progress.best)
        return spent or (limit is not None and self.world.any(self.progress.seconds >= limit))

    @property
    def best_key(self) -> str:
        """Return the name of the best result in a checkpoint: `best_top1` for a classifier."""
        return f'best_{self.objective.best}'

    def state_dict(self) -> dict[str, Any]:
        """Return all that another process needs to continue this run, as tensors and plain containers."""
        averaged, progress = self.averaged_model, dict(vars(self.progress))
        best = progress.pop('best')
        return {
            'state_dict': self.model.state_dict(),
            'ema_state_dict': None if averaged is None else averaged.state_dict(),
            'task_state': self.task.get_task_state(),
            'ema_task_state': self.task.get_task_state(ema=True),
            'optimizer': self.optimizer.state_dict(),
            'scaler': self.scaler.state_dict(),
            'config': self.record,
            'world_size': self.world.size,
            **progress,
            self.best_key: best,
        }

    def load_state_dict(self, content: dict[str, Any], source: str) -> None:
        """Continue from a `state_dict`; randomness is a function of the number of the update.

        Args:
            source: Name of the checkpoint in errors.

        Raises:
            ValueError: the weights belong to another model or kind of distillation, or the other run had another
                number of updates per epoch or other parameter groups.
        """
        same = {'updates_per_epoch': self.progress.updates_per_epoch, 'batch_size': self.loop.batch_size}
        saved_values = {**content, 'batch_size': content['config']['data']['batch_size']}
        for name, expected in same.items():
            if saved_values[name] != expected:
                raise ValueError(
                    f'expected a checkpoint of a run with {name} = {expected}, as this one has, got {source} with '
                    f'{saved_values[name]}; the data set and data.batch_size must be the same'
                )
        self._check_optimizer(content, source)
        load_matching_state_dict(self.model, content['state_dict'], source)
        averaged = self.averaged_model
        if averaged is not None:
            # A run without an average so far starts it from its weights.
            averaged.load_state_dict(content['ema_state_dict'] or content['state_dict'])
        self._load_task_state(content, source)
        # Keep the moments of the checkpoint, and the rates, decays and other settings of this experiment: before they
        # are loaded, because a fused optimizer has its counts of updates on the device.
        saved, own = content['optimizer'], self.optimizer.state_dict()['param_groups']
        pairs: Any = zip_longest(saved['param_groups'], own[: len(saved['param_groups'])], fillvalue={})
        groups = [{**group, **settings, 'params': group['params']} for group, settings in pairs]
        try:
            self.optimizer.load_state_dict({**saved, 'param_groups': groups})
        except ValueError as error:
            raise ValueError(
                f'expected a checkpoint with the parameter groups of this run, got {source}: {error}; '
                'optim.layer_decay, and whether optim.weight_decay is 0, must be as they were'
            ) from error
        # Only runs with float16 have a scale.
        if content['scaler']:
            self.scaler.load_state_dict(content['scaler'])
        for name in vars(self.progress).keys() - {'best', 'best_eval_loss'}:
            setattr(self.progress, name, content[name])
        self.progress.best = content.get(self.best_key, self.objective.worst)
        # Of equal results, a run of an earlier version goes on with its first one.
        self.progress.best_eval_loss = content.get('best_eval_loss', -math.inf)
        self.set_rate()

    def _check_optimizer(self, content: dict[str, Any], source: str) -> None:
        """Raise a ValueError for the state of another optimizer."""
        expected, saved = (config['optim']['name'] for config in (self.record, content['config']))
        if saved != expected:
            raise ValueError(
                f'expected a checkpoint of a run with optim.name = {expected}, as this one has, got {source} with '
                f'{saved}; run.init_from starts a new run from its weights'
            )

    def _load_task_state(self, content: dict[str, Any], source: str) -> None:
        """Restore what is trained besides the model: the projection of its features onto a teacher's."""
        saved = content.get('task_state') or {}
        expected, shapes = _shapes(self.task.get_task_state()), _shapes(saved)
        if shapes != expected:
            raise ValueError(
                f'expected a checkpoint of a run that trains {expected or "nothing"} next to the model, as '
                f'distill.kind and distill.teacher of this one say, got {source} with {shapes or "nothing"}'
            )
        self.task.load_task_state(saved)
        if self.task.has_ema():
            self.task.load_task_state(content.get('ema_task_state') or saved, ema=True)

    def set_rate(self) -> None:
        """Set the learning rate of the next update."""
        progress, delay = self.progress, self.loop.epoch_delay
        if progress.epoch > delay:
            self.scheduler.step(progress.epoch - delay)
        if progress.updates:
            self.scheduler.step_update(progress.updates)


def _shapes(task_state: dict[str, dict[str, torch.Tensor]]) -> dict[str, tuple[int, ...]]:
    return {f'{module}.{name}': tuple(x.shape) for module, values in task_state.items() for name, x in values.items()}
