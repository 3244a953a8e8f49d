import math

import pytest
import torch

from train.schedule import create_schedule
from train.sequence_schema import SequenceSchedule


def rates(updates: int, updates_per_epoch: int = 50, **keys: object) -> list[float]:
    """The rate of each update, by a schedule with a peak of 3e-3."""
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=3e-3)
    section = SequenceSchedule(**keys)
    options = (section.kind, section.warmup_updates, section.warmup_lr, section.min_lr)
    schedule = create_schedule(optimizer, section.total_updates(updates_per_epoch), *options)
    found = []
    for update in range(updates):
        found.append(optimizer.param_groups[0]['lr'])
        schedule.step_update(update + 1)
        schedule.step((update + 1) // updates_per_epoch)
    return found


@pytest.mark.parametrize('epochs', [1, 4])
def test_the_inverse_square_root_follows_a_linear_warm_up_whatever_the_length_of_the_run(epochs):
    found = rates(50 * epochs, epochs=epochs, warmup_updates=20)
    expected = [3e-3 * (update / 20 if update < 20 else math.sqrt(20 / update)) for update in range(50 * epochs)]
    assert found == pytest.approx(expected)


def test_a_warm_up_longer_than_the_run_is_not_cut_but_said(capsys):
    assert rates(50, epochs=1, warmup_updates=200)[-1] == pytest.approx(3e-3 * 49 / 200)
    said = capsys.readouterr().err
    assert said.startswith('note: the run has 50 updates and ends at 25 % of the peak rate')
    assert said.endswith('set schedule.warmup_updates=10\n')


def test_a_warm_up_as_long_as_the_run_is_not_said(capsys):
    rates(50, epochs=1, warmup_updates=50)
    assert capsys.readouterr().err == ''


def test_the_warm_up_begins_at_its_rate():
    found = rates(50, epochs=1, warmup_updates=10, warmup_lr=1e-3)
    assert found[:11] == pytest.approx([1e-3 + 2e-3 * update / 10 for update in range(11)])


@pytest.mark.parametrize(('max_updates', 'last'), [(None, 100), (60, 60), (400, 100)])
def test_the_cosine_ends_with_the_run(max_updates, last):
    found = rates(last, epochs=2, kind='cosine', warmup_updates=10, min_lr=1e-4, max_updates=max_updates)
    cosine = [1e-4 + 2.9e-3 * (1 + math.cos(math.pi * update / last)) / 2 for update in range(10, last)]
    assert found == pytest.approx([*(3e-4 * update for update in range(10)), *cosine])


@pytest.mark.parametrize(
    ('keys', 'message'),
    [
        (dict(warmup_updates=0), r'warmup_updates to be at least 1 with the kind inverse_sqrt, got 0'),
        (dict(min_lr=1e-4), r'schedule\.min_lr to be 0\.0 for inverse_sqrt, got 0\.0001'),
    ],
)
def test_a_schedule_that_cannot_be_is_rejected(keys, message):
    with pytest.raises(ValueError, match=message):
        SequenceSchedule(**keys)
