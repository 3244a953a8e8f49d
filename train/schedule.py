"""Learning rates of a model of sequences, by a schedule of timm."""

from typing import Any

import torch
from timm.scheduler import CosineLRScheduler, WSDLRScheduler
from timm.scheduler.scheduler import Scheduler

from train.adjust import note_long_warmup


def create_schedule(
    optimizer: torch.optim.Optimizer,
    updates: int,
    kind: str,
    warmup_updates: int,
    warmup_lr: float = 0.0,
    min_lr: float = 0.0,
) -> Scheduler:
    """Build the schedule of a run, and set the rate of the first update.

    Args:
        updates: Updates of the run.
        kind, warmup_updates, warmup_lr, min_lr: As in SequenceSchedule.
    """
    note_long_warmup(warmup_updates, updates)
    options: dict[str, Any] = dict(lr_min=min_lr, warmup_t=warmup_updates, warmup_lr_init=warmup_lr, t_in_epochs=False)
    if kind == 'cosine':
        return CosineLRScheduler(optimizer, t_initial=updates, **options)
    # sqrt(warmup / update) after the warm-up, as in the first Transformer; independent of the end of the run. timm's
    # schedule ends with a decay, which here would begin after the run.
    stable = max(updates - warmup_updates, 0) + 1
    return WSDLRScheduler(optimizer, t_initial=stable + 1, decay_t=1, stable_fn='rsqrt', **options)
