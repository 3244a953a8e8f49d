"""A run that is killed, wherever it may be, and started again ends with the same bits as one that is not."""

import random
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

from train.checkpoint import find_latest

pytestmark = pytest.mark.slow

# Two epochs of three updates of two parts a process, with a checkpoint after each update, evaluation and epoch.
SAVING = [
    'data.batch_size=24',
    'run.cpu_threads=1',
    'run.save_minutes=1e-9',
    'run.resume=auto',
    'run.tensorboard=false',
]
# The number of processes, and what the run has besides.
RUNS = {'one_process': (1, []), 'two_processes': (2, []), 'three_processes': (3, ['model.depth=3'])}
# Where a run is killed, and where again when it has gone on; each time, the updates that are saved then. It writes
# updates 1, 2 and 3, the best weights and the epoch; the first and the best weights take one renaming, the others two.
KILLS = {
    'within_an_epoch': [(Interruption(PART, 6, rank=-1), 2), (Interruption(EVALUATION, 1), 3)],
    'after_the_last_update_of_an_epoch': [(Interruption(EVALUATION, 1, rank=-1), 3), (Interruption(PART, 2), 3)],
    'after_the_first_update_of_an_epoch': [(Interruption(PART, 10, rank=-1), 4), (Interruption(PART, 4), 5)],
    'while_it_writes_an_update': [(Interruption(WRITING, 2), 1), (Interruption(WRITING, 1), 1)],
    'while_it_writes_the_best_weights': [(Interruption(WRITING, 4), 3), (Interruption(WRITING, 2), 3)],
    'between_two_renamings': [(Interruption(RENAMING, 3), 1), (Interruption(RENAMING, 1), 1)],
    'while_it_exports': [(Interruption(EXPORT, 1), 6), (Interruption(RENAMING, 2), 6)],
}


@pytest.fixture(scope='module')
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """72 to train with and 24 to evaluate."""
    return link_photographs(tmp_path_factory.mktemp('photographs'), 18, 6, classes=4)


@pytest.fixture(scope='module')
def whole(request: pytest.FixtureRequest, photographs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing interrupted; its config.yaml repeats it."""
    processes, more = request.param
    run_dir = tmp_path_factory.mktemp('whole')
    arguments = [*RECIPE, *SMALL, *SAVING, f'data.dir={photographs}', *more, f'run.dir={run_dir}']
    assert run(arguments, processes) == [0] * processes
    return run_dir


def repeat(whole: Path, run_dir: Path, *more: str, interruption: Interruption | None = None) -> list[int | None]:
    """Begin the same run in another folder, or go on with it there."""
    processes = torch.load(whole / 'last.pth', weights_only=True)['world_size']
    arguments = ['--quiet', '--config', str(whole / 'config.yaml'), f'run.dir={run_dir}', *more]
    codes = run(arguments, processes, interruption)
    for path in run_dir.glob('*.pth'):
        assert 'epoch' in torch.load(path, weights_only=True)
    if interruption is None:
        assert codes == [0] * processes
    return codes


@pytest.mark.parametrize(
    ('whole', 'place'),
    [
        *(pytest.param(RUNS['one_process'], place, id=f'one_process-{place}') for place in KILLS),
        *(
            pytest.param(RUNS[processes], place, id=f'{processes}-{place}')
            for processes, place in (
                ('two_processes', 'while_it_writes_an_update'),
                # Only three add numbers in an order that can change.
                ('three_processes', 'within_an_epoch'),
            )
        ),
    ],
    indirect=['whole'],
)
def test_a_run_killed_twice_ends_as_if_it_had_not_been(whole, place, tmp_path):
    for kill, updates in KILLS[place]:
        assert -signal.SIGKILL in repeat(whole, tmp_path, interruption=kill)
        assert find_latest(tmp_path)[1]['updates'] == updates
    repeat(whole, tmp_path, 'data.num_workers=2')
    assert_same_results(tmp_path, whole)


@pytest.mark.parametrize('whole', [RUNS['one_process']], indirect=True, ids=['one_process'])
def test_a_run_killed_again_and_again_ends_as_if_it_had_not_been(whole, tmp_path):
    generator = random.Random(1)
    chosen = generator.choices([(PART, 6), (WRITING, 3), (RENAMING, 5)], k=6)
    kills = [Interruption(function, generator.randint(1, latest)) for function, latest in chosen]
    assert {PART, WRITING, RENAMING} == {kill.function for kill in kills}
    longer = 'schedule.epochs=4'
    repeat(whole, tmp_path / 'whole', longer)
    for number, kill in enumerate(kills):
        more = [longer, f'data.num_workers={number % 3}']
        assert -signal.SIGKILL in repeat(whole, tmp_path / 'killed', *more, interruption=kill)
    repeat(whole, tmp_path / 'killed', longer)
    assert_same_results(tmp_path / 'killed', tmp_path / 'whole')


@pytest.mark.parametrize('whole', [RUNS['two_processes']], indirect=True, ids=['two_processes'])
def test_a_signal_to_one_process_stops_all_after_the_same_update(whole, tmp_path):
    stop = Interruption(PART, 3, rank=-1, signal=signal.SIGTERM)
    assert set(repeat(whole, tmp_path, 'data.num_workers=1', interruption=stop)) == {128 + signal.SIGTERM}
    assert find_latest(tmp_path)[1]['updates'] == 2
    repeat(whole, tmp_path)
    assert_same_results(tmp_path, whole)
