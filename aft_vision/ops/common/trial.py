"""Calls in a child process, in which a crash ends nothing else."""

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple, NoReturn

import torch

from aft_vision.errors import first_line

# A call that takes longer has failed, and so have all of a child that takes longer than the limit.
SECONDS = 10
LIMIT = 40

_is_child = False


class Failure(NamedTuple):
    """Why a call failed, and whether it would fail again: not for lack of memory or time, or killed from outside."""

    reason: str
    lasts: bool


def in_child() -> bool:
    """Return whether this process is one of `run_trials`."""
    return _is_child


def run_trials(trials: Mapping[str, Callable[[], object]]) -> dict[str, Failure]:
    """Run calls one after the other in a child process, in another one after each that ends it.

    The child is forked, as the workers of a DataLoader are. The calls share a thread, with one thread of torch and none
    of the caller's modes: its autocast, default device and type, and what sees its operators.

    Returns:
        Why calls failed, by their names: the first line of an exception, or the signal that ended the process.

    Raises:
        OSError: no process can be started or waited for, they take too long, or the system is macOS, whose libraries
            do not run in a forked process.
    """
    if sys.platform == 'darwin':
        raise OSError('expected a system whose libraries run in a forked process, got macOS')
    failures, ahead, end = {}, dict(trials), time.monotonic() + LIMIT
    while ahead:
        done, status = _run_in_child(ahead, end)
        for name, reason, lasts in done:
            del ahead[name]
            if reason:
                failures[name] = Failure(reason, lasts)
        if ahead:
            # The one that was running.
            name = next(iter(ahead))
            del ahead[name]
            failures[name] = _describe_end(status)
    return failures


def _run_in_child(trials: Mapping[str, Callable[[], object]], end: float) -> tuple[list[tuple[str, str, bool]], int]:
    # The calls that returned, with what went wrong, and how the process ended.
    reader, writer = os.pipe()
    try:
        with warnings.catch_warnings():
            # Python 3.12 and later warn if there are threads; none of theirs is needed here.
            warnings.simplefilter('ignore', DeprecationWarning)
            child = os.fork()
        if child == 0:
            _call_all(trials, writer)
        status = _wait(child, end)
        # A last line, because nothing ends a pipe that others who were forked at this moment hold open.
        os.write(writer, b'\n')
        lines = os.read(reader, 1 << 16).decode().splitlines()
    finally:
        os.close(reader)
        os.close(writer)
    return [tuple(json.loads(line)) for line in lines if line], status


def _wait(child: int, end: float) -> int:
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise OSError(f'expected trials to end in {LIMIT} s')
        time.sleep(1e-3)


def _call_all(trials: Mapping[str, Callable[[], object]], writer: int) -> NoReturn:
    global _is_child
    try:
        _is_child = True
        _leave_no_trace()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
        torch.set_default_dtype(torch.float32)
        # Modes are of a thread.
        thread = threading.Thread(target=_call_each, args=(trials, writer))
        thread.start()
        thread.join()
    finally:
        # Without what the parent would do at its end.
        os._exit(0)


def _leave_no_trace() -> None:
    # A crash is expected: no words, no traceback, no copy of the parent's memory.
    faulthandler.disable()
    nothing = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(nothing, output)
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _call_each(trials: Mapping[str, Callable[[], object]], writer: int) -> None:
    torch.set_num_threads(1)
    for name, call in trials.items():
        reason, lasts = '', True
        signal.alarm(SECONDS)
        try:
            call()
        except Exception as error:
            reason, lasts = first_line(error)[:200] or type(error).__name__, not isinstance(error, MemoryError)
        os.write(writer, json.dumps([name, reason, lasts]).encode() + b'\n')


def _describe_end(status: int) -> Failure:
    if not os.WIFSIGNALED(status):
        return Failure(f'the process ended with status {os.waitstatus_to_exitcode(status)}', True)
    number = os.WTERMSIG(status)
    if number == signal.SIGALRM:
        return Failure(f'no end after {SECONDS} s', False)
    return Failure(f'the process ended by {signal.Signals(number).name}', number != signal.SIGKILL)
