"""Learning-rate schedules of an experiment, by timm."""

import dataclasses
from typing import Any

import torch
from timm.scheduler import CosineLRScheduler, WSDLRScheduler, create_scheduler_v2
from timm.scheduler.scheduler import Scheduler

from aft_vision.commandline import print_once
from train.adjust import check_warmup
from train.schema import ScheduleConfig
from train.sequence_schema import SequenceSchedule


def with_min_updates(schedule: ScheduleConfig, updates_per_epoch: int) -> ScheduleConfig:
    """Return the schedule with as many epochs as its `min_updates` needs, with a note if these are more."""
    epochs = -(-schedule.min_updates // max(updates_per_epoch, 1))
    if epochs <= schedule.epochs:
        return schedule
    print_once(
        f'note: schedule.epochs = {epochs} in place of {schedule.epochs}, because schedule.min_updates = '
        f'{schedule.min_updates} and an epoch has {updates_per_epoch}'
    )
    return dataclasses.replace(schedule, epochs=epochs)


def create_schedule(optimizer: torch.optim.Optimizer, schedule: Any, updates_per_epoch: int) -> Scheduler:
    """Build the schedule of a ScheduleConfig or SequenceSchedule, and set the rate of the first update."""
    if isinstance(schedule, ScheduleConfig):
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
    return _create_by_update(optimizer, schedule, updates_per_epoch)


def _create_by_update(
    optimizer: torch.optim.Optimizer, schedule: SequenceSchedule, updates_per_epoch: int
) -> Scheduler:
    updates, warmup = schedule.total_updates(updates_per_epoch), schedule.warmup_updates
    check_warmup(warmup, updates)
    options: dict[str, Any] = dict(
        lr_min=schedule.min_lr, warmup_t=warmup, warmup_lr_init=schedule.warmup_lr, t_in_epochs=False
    )
    if schedule.kind == 'cosine':
        return CosineLRScheduler(optimizer, t_initial=updates, **options)
    # sqrt(warmup / update) after the warm-up, as in the first Transformer; independent of the end of the run. timm's
    # schedule ends with a decay, which here would begin after the run.
    stable = max(updates - warmup, 0) + 1
    return WSDLRScheduler(optimizer, t_initial=stable + 1, decay_t=1, stable_fn='rsqrt', **options)
