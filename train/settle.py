"""What follows from other values of an experiment, and was given before them, as they now want it."""

from collections.abc import Sequence
from typing import Any

from commandline import say
from train.layers import Layer, level_of
from train.schema import LR_BATCH_SIZE

# Of the epochs, and of the peak rate: DeiT's warm-up is shorter, but not on a run of a few epochs.
WARMUP_SHARE = 5
RATE_SHARES = {'warmup_lr': 1e-3, 'min_lr': 1e-2}


def settle(config: Any, layers: Sequence[Layer]) -> dict[str, Any]:
    """Return what must change for a later layer's sake, by section and key, and say so.

    A value that comes from the same layer as what it does not go with, or from a later one, is left for the checks.

    Args:
        config: The merged layers, in their types.
    """
    settled: dict[str, dict[str, Any]] = {'schedule': {}, 'data': {}}

    def change(section: str, key: str, value: Any, why: str, *because: str) -> None:
        level = level_of(layers, f'{section}.{key}')
        if any(level_of(layers, each) > level for each in because):
            settled[section][key] = value
            say(f'note: {section}.{key} = {value!r} in place of {config[section][key]}, {why}')

    schedule, data = config.schedule, config.data
    if 'warmup_epochs' in schedule and schedule.warmup_epochs >= schedule.epochs > 0:
        why = f'to be below schedule.epochs = {schedule.epochs}'
        change('schedule', 'warmup_epochs', schedule.epochs // WARMUP_SHARE, why, 'schedule.epochs')
    # Of an image classifier the rate is per LR_BATCH_SIZE images.
    by_batch = 'warmup_epochs' in schedule
    peak = config.optim.lr * (data.batch_size / LR_BATCH_SIZE if by_batch else 1)
    for key, share in RATE_SHARES.items():
        if key in schedule and schedule[key] > peak > 0:
            value = float(f'{share * peak:.3g}')
            because = ('optim.lr', 'data.batch_size') if by_batch else ('optim.lr',)
            change('schedule', key, value, f'to be below the peak rate {peak:.3g}', *because)
    if 'train_sizes' in data and data.train_sizes is not None:
        why = f'because data.img_size = {tuple(data.img_size)} is given after it'
        change('data', 'train_sizes', None, why, 'data.img_size')
        if 'train_sizes' in settled['data']:
            settled['data']['train_size_schedule'] = 'constant'
    return settled
