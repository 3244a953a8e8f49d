"""Time of the kernels of a call on a GPU, without what starting them costs the host."""

from collections.abc import Callable, Sequence

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from aft_vision.timing import synchronize
from tools.benchmark.memory import silence_profiler

# Calls whose mean is the time of a round: a kernel of a few microseconds alone says little.
CALLS = 10


def time_kernels(calls: Sequence[Callable[[], object]], device: torch.device, rounds: int) -> list[list[float]] | None:
    """Sum the times of the kernels of each call, one call after the other in every round.

    Args:
        calls: On one stream, warm.
        rounds: Each with CALLS of every call.

    Returns:
        For each call its seconds in every round; None on a CPU, or where the profiler sees no kernels.
    """
    if device.type != 'cuda':
        return None
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, seconds in zip(calls, found, strict=True):
            seconds.append(_kernel_seconds(call, device))
    return found if all(map(all, found)) else None


def _kernel_seconds(call: Callable[[], object], device: torch.device) -> float:
    silence_profiler()
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(CALLS):
            call()
        synchronize(device)
    kernels = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    return sum(event.time_range.elapsed_us() for event in kernels if not event.is_user_annotation) / 1e6 / CALLS
