"""Calls in a child process, in which a crash ends nothing else."""

import faulthandler
import json
import os
import signal
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import NoReturn

import torch

from aft_vision.errors import first_line

# A child that hangs is ended after these seconds.
SECONDS = 20


def run_trials(trials: Mapping[str, Callable[[], object]]) -> dict[str, str]:
    """Run calls one after the other in a child process, in another one after each that ends it.

    The child is forked, as the workers of a DataLoader are. The calls share a thread, with one thread of torch and none
    of the caller's modes: its autocast, default device and type, and what sees its operators.

    Returns:
        Why calls failed, by their names: the first line of an exception, or the signal that ended the process.

    Raises:
        OSError: no process can be started, or waited for.
    """
    failures, ahead = {}, dict(trials)
    while ahead:
        done, status = _run_in_child(ahead)
        for name, reason in done:
            del ahead[name]
            if reason:
                failures[name] = reason
        if ahead:
            # The one that was running.
            name = next(iter(ahead))
            del ahead[name]
            failures[name] = _describe_end(status)
    return failures


def _run_in_child(trials: Mapping[str, Callable[[], object]]) -> tuple[list[tuple[str, str]], int]:
    # The calls that returned, with what went wrong, and how the process ended.
    reader, writer = os.pipe()
    try:
        with warnings.catch_warnings():
            # Python 3.12 and later warn if there are threads; none of theirs is needed here.
            warnings.simplefilter('ignore', DeprecationWarning)
            child = os.fork()
        if child == 0:
            _call_all(trials, writer)
        _, status = os.waitpid(child, 0)
        # A last line, because nothing ends a pipe that others who were forked at this moment hold open.
        os.write(writer, b'\n')
        lines = os.read(reader, 1 << 16).decode().splitlines()
    finally:
        os.close(reader)
        os.close(writer)
    return [tuple(json.loads(line)) for line in lines if line], status


def _call_all(trials: Mapping[str, Callable[[], object]], writer: int) -> NoReturn:
    try:
        faulthandler.disable()
        nothing = os.open(os.devnull, os.O_WRONLY)
        for output in (1, 2):
            os.dup2(nothing, output)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        torch.set_default_dtype(torch.float32)
        # Modes are of a thread.
        thread = threading.Thread(target=_call_each, args=(trials, writer))
        thread.start()
        thread.join()
    finally:
        # Without what the parent would do at its end.
        os._exit(0)


def _call_each(trials: Mapping[str, Callable[[], object]], writer: int) -> None:
    torch.set_num_threads(1)
    for name, call in trials.items():
        reason = ''
        try:
            call()
        except Exception as error:
            reason = first_line(error)[:200] or type(error).__name__
        os.write(writer, json.dumps([name, reason]).encode() + b'\n')


def _describe_end(status: int) -> str:
    if not os.WIFSIGNALED(status):
        return f'the process ended with status {os.waitstatus_to_exitcode(status)}'
    number = os.WTERMSIG(status)
    if number == signal.SIGALRM:
        return f'no end after {SECONDS} s'
    return f'the process ended by {signal.Signals(number).name}'
