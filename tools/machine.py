"""The machine, the commit and the precision of a measurement, and a check that the machine is idle."""

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import timm
import torch

from aft_vision.ops import operator
from aft_vision.ops.common.choice import cpu_info, processor_name

# float32, or float32 with autocast.
PRECISIONS = {'float32': None, 'bfloat16': torch.bfloat16, 'float16': torch.float16}
# Largest share of the available cores that other processes may use; above it times are not reported.
MAX_LOAD = 0.1
SAMPLE_SECONDS = 1.0


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


def check_load() -> None:
    """Watch the machine for a second, and raise an OSError if other processes use it."""
    meter = LoadMeter()
    if meter.load() is not None:
        time.sleep(SAMPLE_SECONDS)
        refuse_load(meter.load())
    elif hasattr(os, 'getloadavg'):
        refuse_load(os.getloadavg()[0] / (os.cpu_count() or 1))


def refuse_load(load: float | None) -> None:
    """Raise an OSError if other processes use more than MAX_LOAD; None, for unknown, passes."""
    if load is not None and load > MAX_LOAD:
        raise OSError(
            f'expected other processes to use at most {MAX_LOAD:.0%} of the available cores, got {load:.0%}; wait, or '
            'give --allow-load'
        )


def count_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(_cores()) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def cpu_seconds() -> float:
    """Return the seconds of all cores that this process and those below it have used, such as those that load data."""
    parents, used, own = {}, {}, os.getpid()
    for path in Path('/proc').glob('[0-9]*/stat'):
        # A process may have ended. Its name, in parentheses, may contain any characters.
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(')')[2].split()
            process = int(path.parent.name)
            # Its own time, which is counted finer for this process, and that of its children that have ended, each in
            # user and in system mode.
            parents[process], used[process] = int(fields[1]), sum(map(int, fields[13 if process == own else 11 : 15]))
    below = {own}
    while more := {process for process, parent in parents.items() if parent in below} - below:
        below |= more
    ticks = os.sysconf('SC_CLK_TCK') if used else 1
    return time.process_time() + sum(used.get(process, 0) for process in below) / ticks


def has_bfloat16() -> bool:
    """Return whether the processor multiplies bfloat16; otherwise it is widened, and its times mean little."""
    return bool({'avx512_bf16', 'amx_bf16', 'bf16'} & _cpu_flags())


def has_tiles() -> bool:
    """Return whether the processor multiplies bfloat16 in matrix tiles."""
    return 'amx_bf16' in _cpu_flags()


def describe_processor(device: torch.device | str = 'cpu') -> str:
    """Name the processor and the widest vector instructions that our kernels may use on it, or the accelerator."""
    place = torch.device(device)
    if place.type == 'cuda':
        return torch.cuda.get_device_name(place)
    flags = _cpu_flags()
    known = {'avx512_bf16': 'AVX-512 with bfloat16', 'avx512f': 'AVX-512', 'avx2': 'AVX2', 'asimd': 'NEON'}
    vectors = next((words for flag, words in known.items() if flag in flags), 'no vector instructions known')
    return f'{processor_name()}, {vectors}'


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that can be allocated on a device, without swapping; None if unknown."""
    if device.type != 'cuda':
        path = Path('/proc/meminfo')
        lines = path.read_text().splitlines() if path.exists() else []
        found = [line.split()[1] for line in lines if line.startswith('MemAvailable:')]
        return 1024 * int(found[0]) if found else None
    # Memory that torch caches is free too.
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def autocast(device: torch.device, dtype: str) -> contextlib.AbstractContextManager[object]:
    """Return the context of a precision, a key of PRECISIONS."""
    low = PRECISIONS[dtype]
    return contextlib.nullcontext() if low is None else torch.autocast(device.type, dtype=low)


def describe_machine(device: torch.device | str, precision: str = 'float32') -> str:
    """Describe the processor or accelerator, the threads, the precision and the versions in one line."""
    place = torch.device(device)
    name = torch.cuda.get_device_name(place) if place.type == 'cuda' else processor_name()
    threads = f'{os.cpu_count()} cores, {torch.get_num_threads()} threads'
    versions = f'torch {torch.__version__}, timm {timm.__version__}, Python {platform.python_version()}'
    return f'{name}; {threads}; {precision}; {versions}'


def describe_backends(device: torch.device | str) -> str:
    """Describe the backends of a device in one line: torch's libraries, and the forms of our operators."""
    if torch.device(device).type == 'cuda':
        libraries = f'CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, TF32 ' + (
            'on' if torch.backends.cuda.matmul.allow_tf32 else 'off'
        )
    else:
        from aft_vision.ops.common.cpp import library

        onednn = 'on' if torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled else 'off'
        kernel = 'cannot be built' if library() is None else 'built'
        libraries = f'{torch.backends.cpu.get_cpu_capability()}, oneDNN {onednn}, compiled kernel {kernel}'
    try:
        triton = f'Triton {importlib.metadata.version("triton")}'
    except importlib.metadata.PackageNotFoundError:
        triton = 'no Triton'
    return f'{libraries}; {triton}; backends of aft_vision: {", ".join(operator.BACKENDS)}'


def read_commit() -> str:
    """Return the commit that is checked out in the current folder, or 'unknown' without git or its folder."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        command = ['git', 'rev-parse', '--short', 'HEAD']
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    return 'unknown'


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


def _cpu_flags() -> set[str]:
    # ATEN_CPU_CAPABILITY may limit torch, and with it our kernels.
    unused = {'AVX2': ('avx512', 'amx'), 'DEFAULT': ('avx', 'amx')}.get(torch.backends.cpu.get_cpu_capability(), ())
    return {flag for flag in cpu_info('flags', 'Features').split() if not flag.startswith(unused)}
