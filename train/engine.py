"""The training loop: epochs of updates, evaluation, the log and the checkpoints."""

import dataclasses
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.task import ClassificationTask
from timm.utils import unwrap_model
from torch import nn
from tqdm import tqdm

from aft_vision.data import STEP, BatchAugmentation, Loaders, derive_seed, seed_generators
from aft_vision.evaluate import evaluate, peak_memory_mb
from train.checkpoint import save_checkpoint
from train.log import RunLog
from train.schema import Config, OptimConfig

LR_BATCH_SIZE = 512
# Reading the loss waits for the device, so it is read for the progress bar and the log only this often.
UPDATES_PER_REPORT = 10
AMP_DTYPES = {'none': None, 'bfloat16': torch.bfloat16, 'float16': torch.float16}
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass
class TrainState:
    """Everything that changes while training, and what it needs to change.

    Attributes:
        task: timm's: the model, compiled or not, its loss, and the moving average of its weights.
        epoch: Finished epochs.
        updates: Optimizer steps so far.
        best_top1: Best validation accuracy so far, of the weights or of their average, in percent; -1 before the
            first evaluation.
        history: One row per epoch, with the columns of summary.csv.
    """

    config: Config
    task: ClassificationTask
    augment: BatchAugmentation
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: torch.amp.GradScaler
    device: torch.device
    updates_per_epoch: int
    epoch: int = 0
    updates: int = 0
    best_top1: float = -1.0
    history: list[dict[str, float]] = field(default_factory=list)

    @property
    def model(self) -> nn.Module:
        """The model as it was built."""
        return unwrap_model(self.task.get_trainable_module())

    @property
    def averaged_model(self) -> nn.Module | None:
        """The model with the moving average of the weights, if there is one."""
        return unwrap_model(self.task.get_trainable_module(ema=True)) if self.task.has_ema() else None

    @property
    def amp_dtype(self) -> torch.dtype | None:
        """Autocast data type."""
        return AMP_DTYPES[self.config.run.amp]


def create_state(
    model: nn.Module, config: Config, updates_per_epoch: int, num_classes: int, device: torch.device
) -> TrainState:
    """Put the model on the device and make its optimizer, schedule, loss and moving average.

    Raises:
        ValueError: the optimizer does not take an argument of `optim.args`.
    """
    model = model.to(device)
    augment = BatchAugmentation(config.augment, num_classes, config.optim.label_smoothing, device)
    # Mixed targets are smoothed as they are mixed.
    loss = {'smoothing': config.optim.label_smoothing, 'soft_targets': config.augment.mixes}
    task = ClassificationTask(model, criterion_kwargs=loss, device=device, verbose=False)
    optimizer = _create_optimizer(model, config.optim, config.data.batch_size)
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched='cosine',
        num_epochs=config.schedule.epochs,
        warmup_epochs=config.schedule.warmup_epochs,
        warmup_lr=config.schedule.warmup_lr,
        min_lr=config.schedule.min_lr,
        step_on_epochs=config.schedule.step != 'update',
        updates_per_epoch=updates_per_epoch,
    )
    if config.ema.decay is not None:
        task.setup_ema(decay=config.ema.decay, use_warmup=config.ema.warmup)
    if config.run.compile:
        task.compile()
    scaler = torch.amp.GradScaler(device.type, enabled=config.run.amp == 'float16')
    return TrainState(config, task, augment, optimizer, scheduler, scaler, device, updates_per_epoch)


def train_step(state: TrainState, parts: Iterable[Batch]) -> torch.Tensor:
    """Make one update and return the mean loss of its parts, a detached scalar on the device.

    All that is random in it follows from `run.seed` and the number of the update.

    Args:
        parts: `optim.accumulate` batches of the same size: images (B, 3, H, W) and class indices (B,).
    """
    config, optimizer = state.config, state.optimizer
    total = torch.zeros((), device=state.device)
    optimizer.zero_grad(set_to_none=True)
    for part, (images, targets) in enumerate(parts):
        seed_generators(derive_seed(STEP, config.run.seed, state.updates, part))
        images, targets = state.augment(images.to(state.device), targets.to(state.device))
        with torch.autocast(state.device.type, dtype=state.amp_dtype, enabled=state.amp_dtype is not None):
            loss = state.task(images, targets)['loss'] / config.optim.accumulate
        state.scaler.scale(loss).backward()
        total += loss.detach()
    if config.optim.clip_grad is not None:
        state.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(state.model.parameters(), config.optim.clip_grad)
    state.scaler.step(optimizer)
    state.scaler.update()
    state.updates += 1
    state.task.update_ema(step=state.updates if config.ema.warmup else None)
    state.scheduler.step_update(num_updates=state.updates)
    return total


def train_one_epoch(
    state: TrainState, loader: Any, log: RunLog | None = None, progress: bool = True
) -> dict[str, float]:
    """Pass over the loader once.

    Returns:
        `loss` (mean), `lr` (of the last update), `images_per_second` (loading included), `seconds`, and `memory_mb`,
        the peak so far: of the device, or of the whole process on a CPU.

    Raises:
        RuntimeError: the loss is no longer finite.
    """
    state.model.train()
    batches = iter(loader)
    total = torch.zeros((), device=state.device)
    lr, start, first = 0.0, time.perf_counter(), state.updates
    description = f'epoch {state.epoch + 1}/{state.config.schedule.epochs}'
    bar = tqdm(range(state.updates_per_epoch), desc=description, unit='update', leave=False, disable=not progress)
    for _ in bar:
        lr = state.optimizer.param_groups[0]['lr']
        loss = train_step(state, islice(batches, state.config.optim.accumulate))
        total += loss
        if state.updates % UPDATES_PER_REPORT == 0 or state.updates == first + state.updates_per_epoch:
            value = _finite(loss, state)
            seconds = (time.perf_counter() - start) / (state.updates - first)
            bar.set_postfix(_figures(state, value, lr, seconds))
            if log is not None:
                log.log_step(state.updates, value, lr)
    seconds = time.perf_counter() - start
    updates = state.updates - first
    return {
        'loss': total.item() / updates,
        'lr': lr,
        'images_per_second': updates * state.config.data.batch_size / seconds,
        'seconds': seconds,
        'memory_mb': peak_memory_mb(state.device),
    }


def fit(
    state: TrainState, loaders: Loaders, run_dir: Path, description: dict[str, Any], progress: bool = True
) -> TrainState:
    """Train to the last epoch; write the log, `last.pth` after each epoch and `best.pth` after the best.

    Args:
        description: What rebuilds the model from a checkpoint: `model_name`, `model_kwargs`, `class_names`.
    """
    schedule, run = state.config.schedule, state.config.run
    with RunLog(run_dir, state.epoch, run.tensorboard) as log:
        for epoch in range(state.epoch, schedule.epochs):
            loaders.set_epoch(epoch)
            trained = train_one_epoch(state, loaders.train, log, progress)
            state.epoch = epoch + 1
            state.scheduler.step(state.epoch - (schedule.step == 'deit'))
            due = state.epoch % run.eval_every == 0 or state.epoch == schedule.epochs
            evaluated = _evaluate(state, loaders.validation if due else None)
            row = {f'train_{name}': value for name, value in trained.items()}
            state.history.append({'epoch': epoch, **row, **{f'eval_{k}': v for k, v in evaluated.items()}})
            log.log_epoch(epoch, trained, evaluated)
            tqdm.write(_epoch_line(state))
            _save(state, description, run_dir, evaluated)
    return state


def _create_optimizer(model: nn.Module, optim: OptimConfig, batch_size: int) -> torch.optim.Optimizer:
    try:
        return create_optimizer_v2(
            model,
            opt=optim.name,
            lr=optim.lr * batch_size / LR_BATCH_SIZE,
            weight_decay=optim.weight_decay,
            layer_decay=optim.layer_decay,
            **optim.args,
        )
    except TypeError as error:
        raise ValueError(f'expected optim.args of the optimizer {optim.name}, got {optim.args}: {error}') from error


def _evaluate(state: TrainState, loader: Any | None) -> dict[str, float]:
    """Evaluate the weights and their average; without a loader everything is NaN."""
    found: dict[str, float] = {}
    for prefix, model in (('', state.model), ('ema_', state.averaged_model)):
        if model is None:
            continue
        metrics = {} if loader is None else evaluate(model, loader, state.device, amp_dtype=state.amp_dtype)
        found |= {f'{prefix}{name}': metrics.get(name, math.nan) for name in ('loss', 'top1', 'top5')}
    return found


def _save(state: TrainState, description: dict[str, Any], run_dir: Path, evaluated: dict[str, float]) -> None:
    """Write `last.pth`, and `best.pth` if the weights or their average are better than any before."""
    weights = {'top1': state.model.state_dict()}
    if state.averaged_model is not None:
        weights['ema_top1'] = state.averaged_model.state_dict()
    best = max(weights, key=lambda name: evaluated[name])
    # NaN is above nothing, so an epoch without an evaluation is never the best.
    is_best = evaluated[best] > state.best_top1
    state.best_top1 = evaluated[best] if is_best else state.best_top1
    content = {
        **description,
        'config': dataclasses.asdict(state.config),
        'epoch': state.epoch,
        'updates': state.updates,
        'best_top1': state.best_top1,
        'history': state.history,
    }
    if is_best:
        save_checkpoint({**content, 'state_dict': weights[best], 'averaged': best == 'ema_top1'}, run_dir / 'best.pth')
    content |= {'state_dict': weights['top1'], 'ema_state_dict': weights.get('ema_top1')}
    content |= {'optimizer': state.optimizer.state_dict(), 'scaler': state.scaler.state_dict()}
    save_checkpoint(content, run_dir / 'last.pth')


def _figures(state: TrainState, loss: float, lr: float, seconds_per_update: float) -> dict[str, str]:
    """The figures of the progress bar; the time left is that of all epochs, evaluation apart."""
    left = state.config.schedule.epochs * state.updates_per_epoch - state.updates
    return {
        'loss': f'{loss:.3f}',
        'lr': f'{lr:.2e}',
        'images/s': f'{state.config.data.batch_size / seconds_per_update:.0f}',
        'left': tqdm.format_interval(left * seconds_per_update),
    }


def _epoch_line(state: TrainState) -> str:
    row = state.history[-1]
    line = f'epoch {state.epoch}/{state.config.schedule.epochs}  loss {row["train_loss"]:.3f}'
    line += f'  lr {row["train_lr"]:.2e}  {row["train_images_per_second"]:.0f} images/s'
    if not math.isnan(row['eval_top1']):
        line += f'  top-1 {row["eval_top1"]:.1f} %  top-5 {row["eval_top5"]:.1f} %'
    if not math.isnan(row.get('eval_ema_top1', math.nan)):
        line += f'  averaged weights: top-1 {row["eval_ema_top1"]:.1f} %  top-5 {row["eval_ema_top5"]:.1f} %'
    return line


def _finite(loss: torch.Tensor, state: TrainState) -> float:
    value = loss.item()
    if not math.isfinite(value):
        raise RuntimeError(
            f'expected a finite training loss, got {value} in epoch {state.epoch + 1}, update {state.updates}; '
            'try a lower optim.lr or optim.clip_grad=1.0'
        )
    return value
