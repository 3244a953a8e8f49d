"""What something was measured on and in, and whether the machine was idle."""

import contextlib
import os
import platform
from pathlib import Path

import timm
import torch

# float32 alone, or autocast on it.
PRECISIONS = {'float32': None, 'bfloat16': torch.bfloat16, 'float16': torch.float16}
# Running processes per core, in the last minute, above which times say nothing.
MOST_LOAD = 0.5


def check_load() -> None:
    """Raise a RuntimeError where other processes have used the machine in the last minute."""
    if not hasattr(os, 'getloadavg'):
        return
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    if load > MOST_LOAD:
        raise RuntimeError(
            f'expected a machine with at most {MOST_LOAD} running processes per core in the last minute, got '
            f'{load:.2f}; wait, or give --allow-load'
        )


def autocast(device: torch.device, dtype: str) -> contextlib.AbstractContextManager[object]:
    """Enter the precision of that name: a key of PRECISIONS."""
    low = PRECISIONS[dtype]
    return contextlib.nullcontext() if low is None else torch.autocast(device.type, dtype=low)


def describe_machine(device: torch.device | str, dtype: str = 'float32') -> str:
    """Name the processor or the accelerator, the threads, the precision and the versions, in one line."""
    place = torch.device(device)
    name = torch.cuda.get_device_name(place) if place.type == 'cuda' else _processor()
    threads = f'{os.cpu_count()} cores, {torch.get_num_threads()} threads'
    precision = dtype if PRECISIONS[dtype] is None else f'autocast to {dtype}'
    versions = f'torch {torch.__version__}, timm {timm.__version__}, Python {platform.python_version()}'
    return f'{name}; {threads}; {precision}; {versions}'


def _processor() -> str:
    path = Path('/proc/cpuinfo')
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(':')[2].strip() for line in lines if line.startswith('model name')]
    return names[0] if names else platform.processor() or platform.machine()
