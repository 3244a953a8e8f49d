"""A run that is killed, wherever it may be, and started again ends with the same bits as one that is not."""

import signal
from pathlib import Path

import pytest
import torch
from helpers import link_photographs
from small_runs import (
    EVALUATION,
    EXPORT,
    PART,
    RECIPE,
    RENAMING,
    SMALL,
    WRITING,
    Interruption,
    assert_same_results,
    run,
)

from train.checkpoint import read_latest

pytestmark = pytest.mark.slow

# Two epochs of three updates of two parts a process, with a checkpoint after each update, evaluation and epoch.
SAVING = 'data.batch_size=24 run.cpu_threads=1 run.save_minutes=1e-9 run.resume=auto run.tensorboard=false'.split()
# Where a run is ended, and where again each time that it has gone on, and the updates that are saved then. The first
# epoch writes updates 1, 2 and 3, the best weights and the epoch. The first checkpoint takes one renaming, and so do
# the best weights; every other one takes two.
ONE_PROCESS = [
    # Half-way through writing update 2, and between its two renamings, when no last.pth is there.
    (Interruption(WRITING, 2), 1),
    (Interruption(RENAMING, 2), 1),
    (Interruption(RENAMING, 1), 1),
    # Within an epoch, after its last update, and writing the best weights and the epoch.
    (Interruption(PART, 4), 2),
    (Interruption(EVALUATION, 1), 3),
    (Interruption(WRITING, 1), 3),
    (Interruption(WRITING, 2), 3),
    # Before an epoch has an update, and after its first one.
    (Interruption(PART, 2), 3),
    (Interruption(PART, 4), 4),
    # Exporting.
    (Interruption(EXPORT, 1), 6),
    (Interruption(RENAMING, 2), 6),
]
# Only three processes add numbers in an order that can change.
THREE_PROCESSES = [
    # The last process is told to stop: all do, after the same update. Then the first one, which writes, is killed.
    (Interruption(PART, 3, rank=-1, signal=signal.SIGUSR1), 2),
    (Interruption(WRITING, 2), 3),
]


@pytest.fixture(scope='module')
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """72 to train with and 24 to evaluate."""
    return link_photographs(tmp_path_factory.mktemp('photographs'), 18, 6, classes=4)


@pytest.mark.parametrize(
    ('processes', 'more', 'ends'),
    [(1, [], ONE_PROCESS), (3, ['model.depth=3'], THREE_PROCESSES)],
    ids=['one_process', 'three_processes'],
)
def test_a_run_that_is_ended_again_and_again_ends_as_if_it_had_not_been(processes, more, ends, photographs, tmp_path):
    whole, ended = tmp_path / 'whole', tmp_path / 'ended'
    arguments = [*RECIPE, *SMALL, *SAVING, f'data.dir={photographs}', *more]
    assert run([*arguments, f'run.dir={whole}'], processes) == [0] * processes
    # Its config.yaml repeats it.
    again = ['--quiet', '--config', str(whole / 'config.yaml'), f'run.dir={ended}', 'run.resume=auto']
    for number, (end, updates) in enumerate(ends):
        codes = run([*again, f'data.num_workers={number % 3}'], processes, end)
        if end.signal == signal.SIGUSR1:
            assert codes == [128 + signal.SIGUSR1] * processes
        else:
            assert -signal.SIGKILL in codes
        assert read_latest(ended)[1]['updates'] == updates
        for path in ended.glob('*.pth'):
            assert 'epoch' in torch.load(path, weights_only=True)
    assert run(again, processes) == [0] * processes
    assert_same_results(ended, whole)


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGUSR1], ids=str)
def test_a_signal_to_the_process_group_and_to_all_processes_is_survived(photographs, tmp_path, number):
    arguments = [*RECIPE, *SMALL, f'data.dir={photographs}', 'data.batch_size=24', 'run.cpu_threads=1']
    whole, ended = tmp_path / 'whole', tmp_path / 'ended'
    assert run([*arguments, f'run.dir={whole}']) == [0]
    arguments += ['run.resume=auto', 'data.num_workers=2', f'run.dir={ended}']
    # In the second update, which is finished.
    end = Interruption(PART, 3, signal=number, group=True)
    assert run(arguments, interruption=end) == [128 + number]
    assert read_latest(ended)[1]['updates'] == 2
    assert run(arguments) == [0]
    assert_same_results(ended, whole)
