"""Adjustment of values of the files that depend on values of the command line."""

from collections.abc import Collection
from typing import Any

from omegaconf import OmegaConf

from aft_vision_cli.commandline import print_once
from train.config_layers import as_yaml
from train.schema import peak_rate

# The length of a run by the length of its warm-up, if the warm-up would be longer.
RUN_BY_WARMUP = 5


def adjust_to_command_line(config: Any, files: Any, given: Collection[str]) -> dict[str, Any]:
    """Return the values that the command line forces to change, by section and key, with a note for each.

    Contradictions within the files or within the command line are left to the checks.

    Args:
        config: The merged layers, in their types.
        files: Those without the command line.
        given: The keys of the command line, as `section.key`.
    """
    adjusted: dict[str, dict[str, Any]] = {'schedule': {}, 'data': {}}

    def change(section: str, key: str, value: Any, why: str, *because: str) -> None:
        if f'{section}.{key}' not in given and any(each in given for each in because):
            adjusted[section][key] = value
            print_once(f'note: {section}.{key} = {as_yaml(value)} in place of {as_yaml(config[section][key])}, {why}')

    schedule, data = config.schedule, config.data
    if 'warmup_epochs' in schedule and schedule.warmup_epochs >= schedule.epochs > 0:
        why = f'to be below schedule.epochs = {schedule.epochs}'
        change('schedule', 'warmup_epochs', schedule.epochs // RUN_BY_WARMUP, why, 'schedule.epochs')
    if (
        'max_updates' in schedule
        and schedule.max_updates is not None
        and schedule.warmup_updates > schedule.max_updates
    ):
        why = f'to be within schedule.max_updates = {schedule.max_updates}'
        change('schedule', 'warmup_updates', _shorter(schedule.max_updates), why, 'schedule.max_updates')
    # Only for an image classifier the rate depends on the batch.
    because = ('optim.lr', 'data.batch_size') if 'warmup_epochs' in schedule else ('optim.lr',)
    peak = peak_rate(*(OmegaConf.select(config, name) for name in because))
    for key in ('warmup_lr', 'min_lr'):
        if key in schedule and schedule[key] > peak > 0:
            share = schedule[key] / peak_rate(*(OmegaConf.select(files, name) for name in because))
            value = min(float(f'{share * peak:.3g}'), peak)
            change('schedule', key, value, f'as the peak rate is {peak:.3g}', *because)
    if 'train_sizes' in data and data.train_sizes is not None:
        why = f'because data.img_size = {tuple(data.img_size)} is given after it'
        change('data', 'train_sizes', None, why, 'data.img_size')
        if 'train_sizes' in adjusted['data']:
            adjusted['data']['train_size_schedule'] = 'constant'
    return adjusted


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
