"""Signals that stop a run after an update, and the command that resumes it."""

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from aft_vision.data.loaders import STOP_SIGNALS
from train.command_line import process_number, program_name


@contextlib.contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Collect the numbers of stop signals; a second Ctrl-C raises a KeyboardInterrupt."""
    received: list[int] = []

    def receive(number: int, frame: object) -> None:
        if number == signal.SIGINT and number in received:
            raise KeyboardInterrupt
        received.append(number)
        if number == signal.SIGINT and process_number() == 0:
            tqdm.write('stopping after this update or evaluation; Ctrl-C again stops at once', file=sys.stderr)

    handlers = {number: signal.signal(number, receive) for number in STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def stop_run(number: int, updates: int, config: Path) -> NoReturn:
    """Print the command that resumes a saved run, and end the process.

    Args:
        number: Number of the signal, the same in all processes.
        updates: Number of updates so far.
        config: The resolved experiment, in the folder of the run.

    Raises:
        SystemExit: always; the code is 128 plus the number of the signal.
    """
    if process_number() == 0:
        tqdm.write(f'stopped after update {updates}, which is saved; resume with: {resume_command(config)}')
    raise SystemExit(128 + number)


def resume_command(config: Path) -> str:
    """Return the command line that resumes a run with the same number of processes."""
    name = program_name()
    words = ['python', sys.argv[0]] if name is None else name.split()
    if 'TORCHELASTIC_RUN_ID' in os.environ:
        several = ['--nnodes', os.environ['GROUP_WORLD_SIZE']] if os.environ['GROUP_WORLD_SIZE'] != '1' else []
        program = words[1:] if words[0] == 'python' else ['--no-python', *words]
        words = ['torchrun', *several, '--nproc-per-node', os.environ['LOCAL_WORLD_SIZE'], *program]
    return shlex.join([*words, '--config', str(config), 'run.resume=auto'])
