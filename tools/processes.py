"""Commands that a tool runs, and their end when the tool is ended."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from typing import Any

# Seconds that a command has to end, once it is asked to.
GRACE_SECONDS = 10


@contextlib.contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Raise a KeyboardInterrupt at SIGTERM, as at Ctrl-C; only in the main thread, which gets the signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Commands:
    """Commands of one or more threads, which can be ended together."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[Any]] = set()
        self._ending = threading.Event()

    def run_within(self, seconds: float, command: Sequence[str], **options: Any) -> int | None:
        """Run a command and return its exit status; None if it had to be stopped, with all that it started."""
        # A group of its own, which can be ended as a whole.
        process = subprocess.Popen(command, process_group=0, **options)
        self._running.add(process)
        try:
            if self._ending.is_set():
                raise KeyboardInterrupt
            return process.wait(seconds)
        except BaseException as error:
            end_group(process)
            if isinstance(error, subprocess.TimeoutExpired):
                return None
            raise
        finally:
            self._running.discard(process)

    def end(self) -> None:
        """End the commands that other threads run or begin now, with all that they started."""
        self._ending.set()
        for process in [*self._running]:
            end_group(process)


def end_group(process: subprocess.Popen[Any]) -> None:
    """End a process and its group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(GRACE_SECONDS)
