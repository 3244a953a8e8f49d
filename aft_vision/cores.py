"""The cores that this process may use, and torch's threads for those that other processes leave free."""

import contextlib
import math
import os
import sys
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

# The limit that a container sets to the time of its processes, and the period in which it counts (cgroups 2).
QUOTA = Path('/sys/fs/cgroup/cpu.max')
SAMPLE_SECONDS = 0.25


class _Sample(NamedTuple):
    """Seconds of wall time, of busy time on the available cores, and of this process and its children."""

    clock: float
    busy: float
    own: float


class LoadMeter:
    """A meter of the share of the available cores that other processes use, from its creation on."""

    def __init__(self) -> None:
        self._start = _sample()

    def load(self) -> float | None:
        """Return the share, 0 to 1, since the meter was created; None if unknown (not Linux)."""
        now = _sample()
        if now is None or self._start is None:
            return None
        clock, busy, own = (after - before for before, after in zip(self._start, now, strict=True))
        return min(1.0, max(0.0, busy - own) / (clock * len(_cores()))) if clock > 0 else 0.0


def limit_threads(by_load: bool = True) -> None:
    """Give torch no more threads than cores are free, and say so; threads that OMP_NUM_THREADS chose stay.

    At the end of every operation all threads wait for one that shares its core with another process.

    Args:
        by_load: Also count the cores that other processes use now as not free. False only says that they do, because
            the last bits of a training depend on the number of threads.
    """
    if 'OMP_NUM_THREADS' in os.environ or torch.get_num_threads() == 1:
        return
    before = min(torch.get_num_threads(), count_cores())
    torch.set_num_threads(before)
    used = _used_by_others()
    if not used:
        return
    cores = len(_cores())
    free = max(1, min(before, round(cores - used)))
    if free == before:
        return
    advice = f'run.cpu_threads={free} may be faster'
    if by_load:
        torch.set_num_threads(free)
        advice = f'{free} of {before} threads are used, OMP_NUM_THREADS={before} takes all'
    # The first of several processes says it.
    if os.environ.get('RANK', '0') == '0':
        print(f'note: other processes use {used:.1f} of {cores} cores; {advice}', file=sys.stderr, flush=True)


@cache
def _used_by_others() -> float:
    """Return the number of cores that other processes use at the first call."""
    meter = LoadMeter()
    if meter.load() is None:
        return 0.0
    time.sleep(SAMPLE_SECONDS)
    return (meter.load() or 0.0) * len(_cores())


def count_cores() -> int:
    """Return the number of cores whose time this process may use, of its affinity and the limit of its container."""
    cores = len(_cores()) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    # Without a limit the first number is 'max'.
    with contextlib.suppress(OSError, ValueError):
        quota, period = map(int, QUOTA.read_text().split())
        cores = min(cores, math.ceil(quota / period))
    return cores


def cpu_seconds() -> float:
    """Return the seconds of all cores that this process and those below it have used, such as those that load data."""
    parents, used, own = {}, {}, os.getpid()
    for path in Path('/proc').glob('[0-9]*/stat'):
        # A process may have ended. Its name, in parentheses, may contain any characters.
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(')')[2].split()
            process = int(path.parent.name)
            # Its own time, which is counted finer for this process, and the time of its ended children, each in user
            # and in system mode.
            parents[process], used[process] = int(fields[1]), sum(map(int, fields[13 if process == own else 11 : 15]))
    below = {own}
    while more := {process for process, parent in parents.items() if parent in below} - below:
        below |= more
    ticks = os.sysconf('SC_CLK_TCK') if used else 1
    return time.process_time() + sum(used.get(process, 0) for process in below) / ticks


def _sample() -> _Sample | None:
    path = Path('/proc/stat')
    if not path.exists() or not hasattr(os, 'sched_getaffinity'):
        return None
    ticks, names, busy = os.sysconf('SC_CLK_TCK'), {f'cpu{core}' for core in _cores()}, 0
    for name, *fields in (line.split() for line in path.read_text().splitlines()):
        if name in names:
            # user, nice, system, idle, iowait, irq, softirq, steal; guests are part of user.
            numbers = [int(field) for field in fields[:8]]
            busy += sum(numbers) - sum(numbers[3:5])
    return _Sample(time.monotonic(), busy / ticks, cpu_seconds())


def _cores() -> set[int]:
    return os.sched_getaffinity(0)
