"""Devices by name, waiting for their work, and their peak memory."""

import contextlib
import resource
import sys
from pathlib import Path

import torch

from aft_vision.cores import limit_threads
from aft_vision.errors import first_line


def resolve_device(name: str) -> torch.device:
    """Return a device by name; `auto` means CUDA if available.

    Raises:
        ValueError: this machine has no such device.
    """
    if name == 'auto':
        name = 'cuda' if torch.cuda.is_available() else 'cpu'
    try:
        device = torch.device(name)
        if device.type == 'meta':
            raise RuntimeError('it holds no values')
        if device.type == 'cuda':
            # Do not allocate on it: each of several processes uses another device.
            if (device.index or 0) >= torch.cuda.device_count():
                raise RuntimeError(f'there are {torch.cuda.device_count()} CUDA devices')
        else:
            torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        raise ValueError(f'expected auto or a device of this machine, got {name!r}: {first_line(error)}') from error
    return device


def use_device(name: str) -> torch.device:
    """Return a device as `resolve_device`, and limit the threads of a CPU to the cores that are free."""
    device = resolve_device(name)
    if device.type == 'cpu':
        limit_threads()
    return device


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has finished its work."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and device.type == accelerator.type:
        torch.accelerator.synchronize(device)


def reset_peak_memory(device: torch.device | str) -> None:
    """Start a new measurement of `peak_memory_mb`, if supported: on CUDA, and on the CPU under Linux."""
    if torch.device(device).type == 'cuda':
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path('/proc/self/clear_refs').write_text('5')


def peak_memory_mb(device: torch.device | str) -> float:
    """Return the peak allocation on the device, or the peak resident memory of this process on a CPU, in MiB."""
    if torch.device(device).type == 'cuda':
        return torch.cuda.max_memory_allocated(device) / 2**20
    with contextlib.suppress(OSError):
        for line in Path('/proc/self/status').read_text().splitlines():
            if line.startswith('VmHWM:'):
                return int(line.split()[1]) / 2**10
    # macOS counts bytes, the others kilobytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == 'darwin' else 2**10)
