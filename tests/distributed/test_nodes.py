"""Two nodes train with the commands of the guide, and go on to the same bits after one of them has died."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path

import pytest
from helpers import link_photographs
from nodes import Nodes
from small_runs import PART, RECIPE, SMALL, Interruption, assert_same_results, run, supervise, train

from train.checkpoint import read_latest

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / 'docs' / 'guide' / 'imagenet.md').read_text()
# Two epochs of three updates, of two parts a process; before the third update a process of node1 stops.
SAVING = ['data.batch_size=24', 'run.cpu_threads=1', 'run.tensorboard=false']
BEFORE_THIRD = Interruption(PART, 5, rank=1, signal=signal.SIGSTOP)
# In seconds, also where many other processes run.
PATIENCE = 180


@pytest.fixture(scope='module')
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes without an interruption; its config.yaml repeats it."""
    photographs = link_photographs(tmp_path_factory.mktemp('photographs'), 18, 6, classes=4)
    run_dir = tmp_path_factory.mktemp('whole')
    arguments = [*RECIPE, *SMALL, *SAVING, 'run.save_minutes=1e-9', f'data.dir={photographs}', f'run.dir={run_dir}']
    assert run(arguments, 2) == [0, 0]
    return run_dir


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        try:
            found = stack.enter_context(Nodes(tmp_path))
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f'needs network namespaces, made with unshare and ip: {error}')
        yield found


def torchrun(config: Path, *more: str) -> tuple[list[str], dict[str, str]]:
    """The words after torchrun of the guide's command for several nodes, here two of one process, and its variables."""
    (line,) = re.findall(r'^.*torchrun --nnodes.*$', GUIDE.replace('\\\n', ''), re.MULTILINE)
    for name, value in {
        'nnodes 4': 'nnodes 2',
        'node 8': 'node 1',
        'FIRST_NODE': 'node0',
        'CONFIG': str(config),
    }.items():
        assert line.count(name) == 1
        line = line.replace(name, value)
    words = shlex.split(line)
    variables = list(takewhile(lambda word: word != 'torchrun', words))
    return [*words[len(variables) + 1 :], *more], dict(each.split('=') for each in variables)


def submit(folder: Path, code: int = 0) -> tuple[int, list[list[str]]]:
    """Run the guide's script for SLURM with a srun that ends with a code: the code of the script, and what it calls."""
    (script,) = re.findall(r'^#!/bin/bash\n.*?(?=^```)', GUIDE, re.MULTILINE | re.DOTALL)
    calls = folder / 'calls'
    programs = {
        'srun': f'echo srun $MASTER_ADDR $MASTER_PORT $* >> {calls}; exit {code}',
        'scontrol': f'echo scontrol $* >> {calls}; if [ $1 = show ]; then echo node0; echo node1; fi',
    }
    for name, body in programs.items():
        (folder / name).write_text(f'#!/bin/sh\n{body}\n')
        (folder / name).chmod(0o755)
    environment = {'PATH': f'{folder}:{os.environ["PATH"]}', 'SLURM_JOB_ID': '7', 'SLURM_JOB_NODELIST': 'node[0-1]'}
    done = subprocess.run(['bash', '-c', script], env=environment, check=False)
    return done.returncode, [line.split() for line in calls.read_text().splitlines()]


def start_tasks(
    nodes: Nodes, config: Path, mine: list[list[str]], interruption: Interruption | None, log: Path
) -> list:
    """Start a task of the guide's script for SLURM on each node, as srun does, with more arguments for each."""
    _, (_, (_, address, port, *words), *_) = submit(log.parent)
    assert words[:2] == ['aft-vision', 'train']
    started = []
    for node, more in enumerate(mine):
        variables = {'SLURM_PROCID': str(node), 'SLURM_LOCALID': '0', 'SLURM_NTASKS': '2'}
        variables |= {'MASTER_ADDR': address, 'MASTER_PORT': port}
        arguments = [str(config) if word == 'CONFIG' else word for word in words[2:]]
        arguments += ['--quiet', 'run.save_minutes=1e-9', *more]
        end = interruption if interruption and interruption.rank == node else None
        started.append(nodes.start(node, train, arguments, variables, end, 'train.imagenet', log))
    return started


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def has_two_updates(run_dir: Path) -> bool:
    found = read_latest(run_dir)
    return found is not None and found[1]['updates'] >= 2


def codes(processes: list) -> list[int | None]:
    for process in processes:
        process.join(PATIENCE)
    return [process.exitcode for process in processes]


@pytest.mark.slow
def test_torchrun_waits_for_a_node_that_lost_its_power(nodes, whole, tmp_path):
    run_dir, log = tmp_path / 'run', tmp_path / 'log'
    more = ['--quiet', 'run.save_minutes=1e-9', 'run.timeout_minutes=0.5', f'run.dir={run_dir}']
    command = torchrun(whole / 'config.yaml', *more)
    first, second = (nodes.start(node, supervise, *command, BEFORE_THIRD, log) for node in range(2))
    wait_for(lambda: has_two_updates(run_dir))
    nodes.connect(1, False)
    nodes.kill(second)
    wait_for(lambda: 'one has ended or has not answered for run.timeout_minutes=0.5' in log.read_text())
    nodes.connect(1)
    assert codes([first, nodes.start(1, supervise, *command, None, log)]) == [0, 0]
    assert log.read_text().count('resumed from') == 1
    assert_same_results(run_dir, whole)


@pytest.mark.slow
def test_tasks_of_slurm_end_with_one_that_was_killed_and_go_on_when_started_again(nodes, whole, tmp_path):
    run_dir, log = tmp_path / 'run', tmp_path / 'log'
    arguments = [[f'run.dir={run_dir}']] * 2
    first, second = start_tasks(nodes, whole / 'config.yaml', arguments, BEFORE_THIRD, log)
    wait_for(lambda: has_two_updates(run_dir))
    nodes.kill(second)
    assert codes([first]) == [1]
    assert 'ConnectionError: expected all 2 processes, but one has ended' in log.read_text()
    assert codes(start_tasks(nodes, whole / 'config.yaml', arguments, None, log)) == [0, 0]
    assert_same_results(run_dir, whole)


@pytest.mark.slow
def test_nodes_that_resume_from_different_checkpoints_are_told_so(nodes, whole, tmp_path):
    log, earlier = tmp_path / 'log', tmp_path / 'earlier'
    shutil.copytree(whole, earlier)
    (earlier / 'last.pth').unlink()
    arguments = [[f'run.dir={tmp_path / "run"}', f'run.resume={folder}'] for folder in (whole, earlier)]
    assert codes(start_tasks(nodes, whole / 'config.yaml', arguments, None, log)) == [1, 1]
    # The checkpoint before the last one is of an earlier update.
    for process, (epoch, update, folder) in enumerate([(2, 6, whole), (1, 5, earlier)]):
        place = f'epoch {epoch}, update {update}; run.resume={folder}'
        expected = f'process {process} has {place} must be the same on all nodes'
        assert expected in log.read_text()


@pytest.mark.parametrize('code', [0, 2, 128 + signal.SIGUSR1])
def test_the_script_for_slurm_starts_again_at_the_time_limit_alone(code, tmp_path):
    ended, ((*shown, _), (_, address, port, *_), *requeued) = submit(tmp_path, code)
    assert (ended, shown) == (code, ['scontrol', 'show', 'hostnames'])
    assert (address, port) == ('node0', '29500')
    assert requeued == ([['scontrol', 'requeue', '7']] if code > 128 else [])
