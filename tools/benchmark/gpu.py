"""Measurements of a GPU: the time of kernels alone, and what the device could do at best."""

from collections.abc import Callable, Sequence

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from aft_vision.timing import synchronize, time_interleaved
from tools.benchmark.memory import silence_profiler
from tools.benchmark.ops import Operation

BATCH, HALF, CUDA = 256, torch.bfloat16, torch.device('cuda')
# Calls whose mean is the time of a round: a kernel of a few microseconds alone says little.
CALLS = 10
# A matrix product and a copy that are large enough to show what a device does at best.
MATRIX_SIDE, COPY_BYTES = 8192, 2**30
# The operations with the goal of their speed against attention.
OPERATIONS = (
    ('full, d=384, T=197', 1.3, Operation('aft_full', (BATCH, 197, 384), 6, (197, 197))),
    ('conv, d=384, h=16', 1.5, Operation('aft_conv', (BATCH, 196, 384), 6, (16, 11, 11), (14, 14), 16)),
    ('conv, d=384, h=384', 1.2, Operation('aft_conv', (BATCH, 196, 384), 6, (384, 11, 11), (14, 14))),
    ('local causal, d=256, T=3072, s=256', 4.0, Operation('aft_local_causal', (BATCH, 3072, 256), 2, (3072, 256))),
)


def device_rates(
    dtype: torch.dtype, device: torch.device, rounds: int, side: int = MATRIX_SIDE, size: int = COPY_BYTES
) -> tuple[float, float]:
    """Return floating-point operations a second of a matrix product, and bytes read and written a second of a copy."""
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product, copy = time_interleaved([lambda: a @ b, lambda: target.copy_(source)], device, rounds, warmup=3)
    return 2 * side**3 / product.seconds, 2 * size / copy.seconds


def count_flops(operation: Operation) -> int:
    """Count floating-point operations of the products that give numerators and denominators.

    AFT-full and AFT-conv multiply by a (T, T) matrix, AFT-conv with few heads denominators of a channel a head;
    AFT-local multiplies blocks of 64 targets with the sources of their windows.
    """
    batch, tokens, dim = operation.shape
    sums = dim + (operation.key_heads or dim)
    if operation.name == 'aft_local_causal':
        assert operation.bias is not None
        return 2 * batch * tokens * min(tokens, operation.bias[1] + 64) * sums
    return 2 * batch * tokens**2 * sums


def count_bytes(operation: Operation, dtype: torch.dtype) -> int:
    """Count bytes of q, k, v and the result, each read or written once."""
    batch, tokens, dim = operation.shape
    return batch * tokens * (3 * dim + (operation.key_heads or dim)) * dtype.itemsize


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
