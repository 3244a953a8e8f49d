"""Small runs to interrupt: their arguments, what they leave behind, and processes that end themselves."""

import gc
import itertools
import multiprocessing
import os
import pkgutil
import signal
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import CLOTHING, digest, leave_curves_undrawn, losses
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

ROOT = Path(__file__).parents[1]
# Everything random at once: each image three times an epoch, erasing, mixup and cutmix, drop path, moving average.
RECIPE = ['--quiet', '--config', str(ROOT / 'configs' / 'smoke' / 'deit_recipe.yaml')]
SMALL = [f'data.dir={CLOTHING}', 'data.batch_size=200', 'run.amp=none', 'model.drop_path_rate=0.2', 'model.depth=1']
SMALL += ['ema.decay=0.9', 'ema.warmup=true', 'optim.lr=5e-3', 'schedule.step=update', 'schedule.warmup_epochs=0']

# Where a process may end itself: before a part of a batch, an evaluation, an export or a renaming, and half-way through
# writing a file.
PART, EVALUATION = 'train.state.derive_seed', 'train.engine.evaluate_all'
EXPORT, RENAMING, WRITING = 'train.imagenet.export_model', 'os.replace', 'torch.save'

# Its server imports once what takes seconds, so that a process starts at once.
forkserver = multiprocessing.get_context('forkserver')
forkserver.set_forkserver_preload(['train.imagenet', 'train.sequence', 'train.fastformer.__main__'])


@dataclass(frozen=True)
class Interruption:
    """When a process sends itself a signal: at that call of that function, counted from its start.

    Attributes:
        rank: Of the process, in `run` counted from behind as in a list: -1 is the last one; None for all.
        group: Whether those that load its data get it too, from another process, as a scheduler sends it.
    """

    function: str
    call: int
    rank: int | None = None
    signal: int = signal.SIGKILL
    group: bool = False


def run(
    arguments: list[str],
    processes: int = 1,
    interruption: Interruption | None = None,
    trainer: str = 'train.imagenet',
    log: Path | None = None,
) -> list[int | None]:
    """Train in new processes, and give their exit codes, which are negative where a signal ended one.

    Args:
        log: A file for all that they print.
    """
    with socket.create_server(('127.0.0.1', 0)) as server:
        group = {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(server.getsockname()[1]), 'WORLD_SIZE': str(processes)}
    started = []
    for rank in range(processes):
        environment = {**group, 'RANK': str(rank), 'LOCAL_RANK': str(rank)} if processes > 1 else {}
        mine = interruption if interruption and interruption.rank in (None, rank - processes) else None
        started.append(forkserver.Process(target=train, args=(arguments, environment, mine, trainer, log)))
        started[-1].start()
    for process in started:
        process.join(timeout=180)
    hanging = [process for process in started if process.is_alive()]
    for process in hanging:
        process.kill()
        process.join()
    assert not hanging, f'{len(hanging)} of {processes} processes did not end'
    return [process.exitcode for process in started]


def run_restarted(arguments: list[str], interruption: Interruption, log: Path) -> int | None:
    """Train in two processes of torchrun's agent, which restarts both after one is killed; its exit code."""
    words = '--rdzv-backend c10d --rdzv-endpoint localhost:0 --nproc-per-node 2 --max-restarts 1 -m train.imagenet'
    agent = forkserver.Process(target=supervise, args=([*words.split(), *arguments], {}, interruption, log))
    agent.start()
    agent.join(timeout=180)
    assert not agent.is_alive()
    return agent.exitcode


def supervise(words: list[str], environment: dict[str, str], interruption: Interruption | None, log: Path) -> None:
    """Do what torchrun does with these words, but in processes that are forked: they need not import anything."""
    os.environ.update(environment)
    _print_to(log)
    config, _, _ = config_from_args(parse_args(words))
    config = replace(config, start_method='fork', monitor_interval=0.05)
    elastic_launch(config, _train_again)(words[words.index('-m') + 2 :], interruption, log)


def _train_again(arguments: list[str], interruption: Interruption | None, log: Path) -> None:
    is_first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'
    is_chosen = interruption is not None and is_first and int(os.environ['RANK']) == interruption.rank
    train(arguments, {}, interruption if is_chosen else None, 'train.imagenet', log)


def train(
    arguments: list[str], environment: dict[str, str], interruption: Interruption | None, trainer: str, log: Path | None
) -> None:
    """Train in this process, which has more of an environment, ends itself, and prints to a file."""
    os.environ.update(environment)
    if log is not None:
        _print_to(log)
    gc.freeze()
    leave_curves_undrawn(pytest.MonkeyPatch())
    # Loading processes of a server of their own would outlive this process.
    multiprocessing.set_start_method('fork', force=True)
    if interruption is not None:
        if interruption.group:
            os.setpgrp()
        mock.patch(interruption.function, _interrupted(interruption)).start()
    pkgutil.resolve_name(f'{trainer}:main')(arguments)


def _print_to(log: Path) -> None:
    with log.open('a') as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _interrupted(interruption: Interruption) -> Callable[..., Any]:
    original, calls = pkgutil.resolve_name(interruption.function), itertools.count(1)

    def function(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == interruption.call:
            if interruption.function == WRITING:
                content, file = args
                original(content, file)
                file.truncate(file.tell() // 2)
            if interruption.group:
                # A process of its own: of their parent, loading processes take it as their end.
                loading = [str(child.pid) for child in multiprocessing.active_children()]
                subprocess.run(['kill', f'-{int(interruption.signal)}', *loading], check=True)
                os.killpg(os.getpid(), interruption.signal)
            else:
                os.kill(os.getpid(), interruption.signal)
        return original(*args, **kwargs)

    return function


def assert_same_results(run_dir: Path, expected: Path) -> None:
    """Assert equal bits of weights, average and optimizer, an equal log and best weights, and no other files."""
    assert digest(run_dir / 'last.pth') == digest(expected / 'last.pth')
    assert losses(run_dir) == losses(expected)
    best, wanted = (torch.load(folder / 'best.pth', weights_only=True) for folder in (run_dir, expected))
    (key,) = (key for key in wanted if key.startswith('best_'))
    assert best[key] == wanted[key]
    torch.testing.assert_close(best['state_dict'], wanted['state_dict'], rtol=0, atol=0)
    assert {path.name for path in run_dir.iterdir()} == {path.name for path in expected.iterdir()}
