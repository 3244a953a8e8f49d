"""Adjustment of values of the files that depend on values of the command line."""

from collections.abc import Collection
from typing import Any

from omegaconf import OmegaConf

from train.command_line import print_once
from train.config_layers import as_yaml
from train.schema import peak_rate

# The length of a run by the length of its warm-up, if the warm-up would be longer.
RUN_BY_WARMUP = 5


def adjust_to_command_line(config: Any, files: Any, given: Collection[str]) -> list[str]:
    """Return `section.key=value` for each value that the command line forces to change, with a note for each.

    Contradictions within the files or within the command line are left to the checks.

    Args:
        config: The merged layers, in their types.
        files: Those without the command line.
        given: The keys of the command line, as `section.key`.
    """
    changes: list[str] = []

    def change(key: str, value: Any, why: str, *because: str) -> None:
        if key not in given and any(each in given for each in because):
            changes.append(f'{key}={as_yaml(value)}')
            print_once(f'note: {key} = {as_yaml(value)} in place of {as_yaml(OmegaConf.select(config, key))}, {why}')

    schedule, data = config.schedule, config.data
    epochs, updates = schedule.epochs, schedule.get('max_updates')
    if schedule.get('warmup_epochs', -1) >= epochs > 0:
        why = f'to be below schedule.epochs = {epochs}'
        change('schedule.warmup_epochs', epochs // RUN_BY_WARMUP, why, 'schedule.epochs')
    if updates is not None and schedule.warmup_updates > updates:
        why = f'to be within schedule.max_updates = {updates}'
        change('schedule.warmup_updates', _shorter(updates), why, 'schedule.max_updates')
    # Only for an image classifier the rate depends on the batch.
    because = ('optim.lr', 'data.batch_size') if 'warmup_epochs' in schedule else ('optim.lr',)
    peak, peak_of_files = (peak_rate(*(OmegaConf.select(each, key) for key in because)) for each in (config, files))
    for key in ('warmup_lr', 'min_lr'):
        if schedule.get(key, 0.0) > peak > 0:
            value = min(float(f'{schedule[key] / peak_of_files * peak:.3g}'), peak)
            change(f'schedule.{key}', value, f'as the peak rate is {peak:.3g}', *because)
    if data.get('train_sizes') is not None:
        why = f'because data.img_size = {tuple(data.img_size)} is given after it'
        change('data.train_sizes', None, why, 'data.img_size')
        changes += ['data.train_size_schedule=constant'] * ('data.train_sizes=null' in changes)
    return changes


def note_long_warmup(warmup_updates: int, updates: int) -> None:
    """Print a note if a run ends within its warm-up, before the peak rate."""
    if warmup_updates > updates:
        share = f'{100 * updates / warmup_updates:.2g} % of the peak rate'
        print_once(
            f'note: the run has {updates} updates and ends at {share}, as schedule.warmup_updates = {warmup_updates}; '
            f'set schedule.warmup_updates={_shorter(updates)}'
        )


def _shorter(updates: int) -> int:
    """Return a warm-up for a run of this many updates."""
    return max(updates // RUN_BY_WARMUP, 1)
