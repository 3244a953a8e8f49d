"""The training loop: epochs of updates, evaluation, the log and the checkpoints."""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from timm.loss import create_classification_loss
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import trim_summary, update_summary
from torch import nn
from tqdm import tqdm

from aft_vision.data import Loaders
from aft_vision.evaluate import evaluate
from train.checkpoint import save_checkpoint
from train.config import Config

LR_BATCH_SIZE = 512
# Reading the loss waits for the device, so it is read for the progress bar only this often.
STEPS_PER_REPORT = 10


@dataclass
class TrainState:
    """Everything that changes while training, and what it needs to change.

    Attributes:
        epoch: Finished epochs.
        updates: Optimizer steps so far.
        best_top1: Best validation accuracy so far, in percent; -1 before the first evaluation.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    criterion: nn.Module
    device: torch.device
    amp_dtype: torch.dtype | None = None
    clip_grad: float | None = None
    epoch: int = 0
    updates: int = 0
    best_top1: float = -1.0
    history: list[dict[str, float]] = field(default_factory=list)


def create_state(model: nn.Module, config: Config, updates_per_epoch: int, device: torch.device) -> TrainState:
    """Put the model on the device and make its optimizer, schedule and loss."""
    model = model.to(device)
    optimizer = create_optimizer_v2(
        model,
        opt='adamw',
        lr=config.optim.lr * config.data.batch_size / LR_BATCH_SIZE,
        weight_decay=config.optim.weight_decay,
        betas=config.optim.betas,
        eps=config.optim.eps,
    )
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched='cosine',
        num_epochs=config.schedule.epochs,
        warmup_epochs=config.schedule.warmup_epochs,
        warmup_lr=config.schedule.warmup_lr,
        min_lr=config.schedule.min_lr,
        step_on_epochs=config.schedule.step == 'epoch',
        updates_per_epoch=updates_per_epoch,
    )
    return TrainState(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        criterion=create_classification_loss(smoothing=config.optim.label_smoothing).to(device),
        device=device,
        amp_dtype=torch.bfloat16 if config.run.amp == 'bfloat16' else None,
        clip_grad=config.optim.clip_grad,
    )


def train_step(state: TrainState, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Make one update and return the loss, a detached scalar on the device.

    Args:
        images: (B, 3, H, W).
        targets: (B,) class indices.
    """
    with torch.autocast(state.device.type, dtype=state.amp_dtype, enabled=state.amp_dtype is not None):
        loss = state.criterion(state.model(images), targets)
    state.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    if state.clip_grad is not None:
        nn.utils.clip_grad_norm_(state.model.parameters(), state.clip_grad)
    state.optimizer.step()
    state.updates += 1
    state.scheduler.step_update(num_updates=state.updates)
    return loss.detach()


def train_one_epoch(state: TrainState, loader: Any, progress: bool = True) -> dict[str, float]:
    """Pass over the loader once.

    Returns:
        `loss` (mean), `images_per_second` (loading included) and `lr` (of the last update).

    Raises:
        RuntimeError: the loss is no longer finite.
    """
    state.model.train()
    total, seen = torch.zeros((), device=state.device), 0
    start = time.perf_counter()
    bar = tqdm(loader, desc=f'epoch {state.epoch + 1}', unit='batch', leave=False, disable=not progress)
    for step, (images, targets) in enumerate(bar, start=1):
        lr = state.optimizer.param_groups[0]['lr']
        loss = train_step(state, images.to(state.device), targets.to(state.device))
        total += loss * len(images)
        seen += len(images)
        if step % STEPS_PER_REPORT == 0 or step == len(loader):
            _require_finite(loss.item(), state)
            rate = seen / (time.perf_counter() - start)
            bar.set_postfix(loss=f'{loss.item():.3f}', lr=f'{lr:.2e}', images_per_s=f'{rate:.0f}')
    return {'loss': total.item() / seen, 'images_per_second': seen / (time.perf_counter() - start), 'lr': lr}


def fit(
    state: TrainState,
    loaders: Loaders,
    config: Config,
    run_dir: Path,
    description: dict[str, Any],
    progress: bool = True,
) -> TrainState:
    """Train to the last epoch; write `summary.csv`, `last.pth` after each epoch and `best.pth` after the best.

    Args:
        description: What rebuilds the model from a checkpoint: `model_name`, `model_kwargs`, `class_names`.
    """
    summary = run_dir / 'summary.csv'
    trim_summary(str(summary), state.epoch)
    for epoch in range(state.epoch, config.schedule.epochs):
        trained = train_one_epoch(state, loaders.train, progress)
        state.epoch = epoch + 1
        state.scheduler.step(state.epoch)
        measured = {'loss': float('nan'), 'top1': float('nan'), 'top5': float('nan')}
        is_best = False
        if state.epoch % config.run.eval_every == 0 or state.epoch == config.schedule.epochs:
            metrics = evaluate(state.model, loaders.validation, state.device, amp_dtype=state.amp_dtype)
            measured = {name: metrics[name] for name in measured}
            is_best = measured['top1'] > state.best_top1
            state.best_top1 = max(state.best_top1, measured['top1'])
        lr = trained.pop('lr')
        update_summary(epoch, trained, measured, str(summary), lr=lr)
        state.history.append({'epoch': epoch, 'lr': lr, **trained, **{f'eval_{k}': v for k, v in measured.items()}})
        tqdm.write(_epoch_line(state, config.schedule.epochs))
        _save(state, description, run_dir, is_best)
    return state


def _save(state: TrainState, description: dict[str, Any], run_dir: Path, is_best: bool) -> None:
    content = {
        **description,
        'state_dict': state.model.state_dict(),
        'epoch': state.epoch,
        'updates': state.updates,
        'best_top1': state.best_top1,
    }
    if is_best:
        save_checkpoint(content, run_dir / 'best.pth')
    save_checkpoint({**content, 'optimizer': state.optimizer.state_dict()}, run_dir / 'last.pth')


def _epoch_line(state: TrainState, epochs: int) -> str:
    row = state.history[-1]
    line = f'epoch {state.epoch}/{epochs}  loss {row["loss"]:.3f}  lr {row["lr"]:.2e}'
    line += f'  {row["images_per_second"]:.0f} images/s'
    if not math.isnan(row['eval_top1']):
        line += f'  top-1 {row["eval_top1"]:.1f} %  top-5 {row["eval_top5"]:.1f} %'
    return line


def _require_finite(loss: float, state: TrainState) -> None:
    if not math.isfinite(loss):
        raise RuntimeError(
            f'expected a finite training loss, got {loss} in epoch {state.epoch + 1}, update {state.updates}; '
            'try a lower optim.lr or optim.clip_grad=1.0'
        )
